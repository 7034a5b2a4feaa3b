"""ReadyQueue: the process queues with messages to hand out, in turn, and the tasks that wait for one.

If no process queue is ready, the bytes that have arrived at the sockets are read before a task waits. Under load that
saves two turns of the event loop for each pull, which cost more than the pull itself.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import anyio

from trimq.client.message import ReceivedMessage
from trimq.client.message_block import MessageBlock
from trimq.client.process_queue import ProcessQueue

_TURNS: Final = 16
"""Messages that are taken one by one from a process queue before the next one has its turn."""


class ReadyQueue:
    """Ready process queues. Any number of tasks may take from them and wait; each message goes to one task.

    ``read_arrived`` reads the bytes that have arrived, which may add process queues, and returns False if there are
    none.
    """

    __slots__ = ("_queued", "_read_arrived", "_ready", "_turns", "_wake")

    def __init__(self, read_arrived: Callable[[], bool]) -> None:
        self._read_arrived = read_arrived
        self._ready: deque[ProcessQueue] = deque()
        self._queued: set[ProcessQueue] = set()
        self._turns = _TURNS
        self._wake = anyio.Event()

    def add(self, process_queue: ProcessQueue) -> None:
        """Appends a process queue that has messages, if it is not in the queue already, and wakes the waiting tasks."""
        if process_queue not in self._queued:
            self._queued.add(process_queue)
            self._ready.append(process_queue)
        self._wake.set()

    def discard(self, process_queue: ProcessQueue) -> None:
        """Removes a process queue that is closed."""
        if process_queue in self._queued:
            self._queued.discard(process_queue)
            self._ready.remove(process_queue)

    def take_one(self) -> ReceivedMessage | None:
        """The next message; None if there is none. Takes several of a process queue before the next has its turn."""
        ready = self._ready
        while ready or (self._read_arrived() and ready):
            process_queue = ready[0]
            front = process_queue.buffer.front
            message = front.popleft() if front and process_queue.is_free else process_queue.take_one()
            if message is None:  # empty, busy or paused: its on_ready adds it again
                self._queued.discard(ready.popleft())
                continue
            self._turns = turns = self._turns - 1
            if turns <= 0:
                self._turns = _TURNS
                ready.rotate(-1)
            return message
        return None

    def take(self, count: int) -> tuple[ProcessQueue, MessageBlock[ReceivedMessage]] | None:
        """Up to ``count`` messages of one queue, with its process queue; None if no process queue has one."""
        ready = self._ready
        while ready or (self._read_arrived() and ready):
            process_queue = ready.popleft()
            block = process_queue.take(count)
            if process_queue.is_ready:
                ready.append(process_queue)
            else:
                self._queued.discard(process_queue)
            if block is not None:
                return process_queue, block
        return None

    def wake(self) -> None:
        """Wakes all waiting tasks, so that they check again."""
        self._wake.set()

    async def wait(self) -> None:
        """Waits until there may be messages to take.

        To be called right after a ``take`` that returned None, without an await between: a process queue that is added
        before this call would not wake the task.
        """
        if self._wake.is_set():
            self._wake = anyio.Event()
        await self._wake.wait()
