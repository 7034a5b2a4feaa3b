"""What a connection needs of trio: a request's waiting task is put to sleep and woken by the lowest calls there are."""

import socket

import trio
from trio.lowlevel import Abort, Task, current_task, in_trio_task, reschedule, wait_readable, wait_task_rescheduled

from remoting.client_call import Loop, Readable, WaitingCall

is_running = in_trio_task


class _TrioCall(WaitingCall):
    __slots__ = ("_done", "_task")

    def __init__(self) -> None:
        super().__init__()
        self._done = False
        self._task: Task | None = None

    def finish(self) -> None:
        self._done = True
        task = self._task
        if task is not None:
            self._task = None
            reschedule(task)

    async def wait(self) -> None:
        if not self._done:
            self._task = current_task()
            await wait_task_rescheduled(self._cancelled)

    def _cancelled(self, _raise_cancel: object) -> Abort:
        self._task = None
        return Abort.SUCCEEDED


class _TrioReadable(Readable):
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def wait(self) -> None:
        await wait_readable(self._socket)

    def close(self) -> None:
        """Nothing is registered while nobody waits."""


LOOP = Loop(_TrioCall, trio.current_time, _TrioReadable)
