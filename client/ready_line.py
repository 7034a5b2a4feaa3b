"""Readers that have messages to hand out, each in its turn, and the tasks that wait for one.

Where nobody has one, what has arrived already is read before a task waits for it: under load that saves two turns of
the loop for each pull, which cost more than the pull.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import anyio

from trimq.client.message import ReceivedMessage
from trimq.client.message_run import MessageRun
from trimq.client.queue_reader import QueueReader

_TURNS: Final = 16
"""Messages that are taken from one reader, one by one, before it is the next one's turn."""


class ReadyLine:
    """Any number of tasks may take and wait; what is ready is found by one of them.

    ``read_arrived`` reads what has arrived, and may add readers; False where nothing has.
    """

    __slots__ = ("_inside", "_line", "_read_arrived", "_turns", "_wake")

    def __init__(self, read_arrived: Callable[[], bool]) -> None:
        self._read_arrived = read_arrived
        self._line: deque[QueueReader] = deque()
        self._inside: set[QueueReader] = set()
        self._turns = _TURNS
        self._wake = anyio.Event()

    def add(self, reader: QueueReader) -> None:
        """It has something to take: to the end of the line, if it is not in it."""
        if reader not in self._inside:
            self._inside.add(reader)
            self._line.append(reader)
        self._wake.set()

    def discard(self, reader: QueueReader) -> None:
        """It is read no more."""
        if reader in self._inside:
            self._inside.discard(reader)
            self._line.remove(reader)

    def take_one(self) -> ReceivedMessage | None:
        """The next message; None where nobody has one. A reader has a few turns before the next one has."""
        line = self._line
        while line or (self._read_arrived() and line):
            reader = line[0]
            front = reader.buffer.front
            message = front.popleft() if front and reader.is_free else reader.take_one()
            if message is None:
                self._inside.discard(line.popleft())
                continue
            self._turns = turns = self._turns - 1
            if turns <= 0:
                self._turns = _TURNS
                line.rotate(-1)
            return message
        return None

    def take(self, count: int) -> tuple[QueueReader, MessageRun[ReceivedMessage]] | None:
        """Up to ``count`` messages of one queue; None where nobody has one."""
        line = self._line
        while line or (self._read_arrived() and line):
            reader = line.popleft()
            run = reader.take(count)
            if reader.is_ready:
                line.append(reader)
            else:
                self._inside.discard(reader)
            if run is not None:
                return reader, run
        return None

    def wake(self) -> None:
        """Lets everybody who waits look again."""
        self._wake.set()

    async def wait(self) -> None:
        """Returns when there may be something to take. To be called at once where there was nothing."""
        if self._wake.is_set():
            self._wake = anyio.Event()
        await self._wake.wait()
