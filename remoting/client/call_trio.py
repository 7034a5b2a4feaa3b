"""The primitives of call.py for trio: waiting tasks sleep and are woken by trio's lowest-level calls."""

import socket
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import TypeVar

import trio
from outcome import Outcome
from trio.lowlevel import Abort, Task, current_task, in_trio_task, reschedule, wait_readable, wait_task_rescheduled

from trimq.remoting.client.call import Crowd, Loop, Readable, WaitingCall

T = TypeVar("T")

is_running = in_trio_task


class _Nothing(Outcome[None]):
    """The value a task is woken with. outcome's own objects serve once only, which costs a third of a wake-up."""

    __slots__ = ()

    def unwrap(self) -> None:
        return None

    def send(self, gen: Generator[T, None, object]) -> T:
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[T, None]) -> T:
        return await agen.asend(None)


_NOTHING = _Nothing()


def _cancelled(_raise_cancel: object) -> Abort:
    return Abort.SUCCEEDED


class _TrioCall(WaitingCall):
    __slots__ = ("_done", "_task")

    def __init__(self) -> None:
        super().__init__()
        self._done = False
        self._task: Task | None = None

    def finish(self) -> None:
        self._done = True
        task, self._task = self._task, None
        # trio clears ``custom_sleep_data`` of a task that it wakes, so one that was cancelled is not rescheduled again.
        if task is not None and task.custom_sleep_data is self:
            reschedule(task, _NOTHING)

    def wait(self) -> Awaitable[object]:
        if self._done:
            return trio.lowlevel.checkpoint()  # noqa: ASYNC105 - the caller awaits it: saves a coroutine per wait
        task = self._task = current_task()
        task.custom_sleep_data = self
        return wait_task_rescheduled(_cancelled)  # noqa: ASYNC105 - as above


class _TrioCrowd(Crowd):
    """Marks its tasks by ``custom_sleep_data``, which trio clears when it wakes a task for another reason."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def wait(self) -> Awaitable[object]:
        task = current_task()
        task.custom_sleep_data = self
        self._tasks.append(task)
        return wait_task_rescheduled(_cancelled)  # noqa: ASYNC105 - as above

    def wake(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if task.custom_sleep_data is self:
                reschedule(task, _NOTHING)


class _TrioReadable(Readable):
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def wait(self) -> None:
        await wait_readable(self._socket)

    def close(self) -> None:
        """Nothing is registered while no task waits."""


LOOP = Loop(_TrioCall, _TrioCrowd, trio.current_time, _TrioReadable)
