"""Process queues that have messages to hand out, each in its turn, and the tasks that wait for one.

Where nobody has one, what has arrived already is read before a task waits for it: under load that saves two turns of
the loop for each pull, which cost more than the pull.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import anyio

from trimq.client.message import ReceivedMessage
from trimq.client.message_block import MessageBlock
from trimq.client.process_queue import ProcessQueue

_TURNS: Final = 16
"""Messages that are taken from one process queue, one by one, before it is the next one's turn."""


class ReadyQueue:
    """Any number of tasks may take and wait; what is ready is found by one of them.

    ``read_arrived`` reads what has arrived, and may add process queues; False where nothing has.
    """

    __slots__ = ("_queued", "_read_arrived", "_ready", "_turns", "_wake")

    def __init__(self, read_arrived: Callable[[], bool]) -> None:
        self._read_arrived = read_arrived
        self._ready: deque[ProcessQueue] = deque()
        self._queued: set[ProcessQueue] = set()
        self._turns = _TURNS
        self._wake = anyio.Event()

    def add(self, process_queue: ProcessQueue) -> None:
        """It has something to take: to the end of the queue, if it is not in it."""
        if process_queue not in self._queued:
            self._queued.add(process_queue)
            self._ready.append(process_queue)
        self._wake.set()

    def discard(self, process_queue: ProcessQueue) -> None:
        """It is read no more."""
        if process_queue in self._queued:
            self._queued.discard(process_queue)
            self._ready.remove(process_queue)

    def take_one(self) -> ReceivedMessage | None:
        """The next message; None where nobody has one. A process queue has a few turns before the next one has."""
        ready = self._ready
        while ready or (self._read_arrived() and ready):
            process_queue = ready[0]
            front = process_queue.buffer.front
            message = front.popleft() if front and process_queue.is_free else process_queue.take_one()
            if message is None:
                self._queued.discard(ready.popleft())
                continue
            self._turns = turns = self._turns - 1
            if turns <= 0:
                self._turns = _TURNS
                ready.rotate(-1)
            return message
        return None

    def take(self, count: int) -> tuple[ProcessQueue, MessageBlock[ReceivedMessage]] | None:
        """Up to ``count`` messages of one queue; None where nobody has one."""
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
        """Lets everybody who waits look again."""
        self._wake.set()

    async def wait(self) -> None:
        """Returns when there may be something to take. To be called at once where there was nothing."""
        if self._wake.is_set():
            self._wake = anyio.Event()
        await self._wake.wait()
