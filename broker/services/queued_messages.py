"""QueuedMessages: the messages of queues that a service has not read yet, as far as the cleaner has to know them."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Protocol

from trimq.protocol.queue_unit import FILLER_SIZE

_UNITS: Final = 64

QueuePosition = tuple[str, int, int]
"""(topic, queue id, offset of the first message that is still to be read)."""


class UnitStore(Protocol):
    """The part of the message store that this class uses."""

    @property
    def queue_units(self) -> Callable[[str, int, int, int], Awaitable[list[tuple[int, int, int]]]]:
        """(topic, queue id, offset, count): (log offset, size, tags code) of units from the offset on."""
        ...

    @property
    def min_phy_offset(self) -> int:
        """Start of the log."""
        ...

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The smallest offset of a queue that still exists."""
        ...

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset that the next message of a queue will get."""
        ...


class QueuedMessages:
    """Implements log_holds.PendingMessages for all messages from the ``positions`` of a service on.

    ``unread``: the positions from which on they are counted, if others are held too: those that a crash makes unread
    again, and that are counted elsewhere meanwhile.

    Log offsets rise with the offsets in a queue, so a place in the log is found by bisection.
    """

    def __init__(
        self,
        name: str,
        store: UnitStore,
        positions: Callable[[], Iterable[QueuePosition]],
        unread: Callable[[], Iterable[QueuePosition]] | None = None,
    ) -> None:
        self.name = name
        self._store = store
        self._positions = positions
        self._unread = unread or positions

    async def lowest(self) -> int | None:
        """The lowest log offset of a pending message that is still in the log; None if there is none."""
        found = None
        for topic, queue_id, offset in self._positions():
            _, at = await self._first_from(topic, queue_id, offset, self._store.min_phy_offset)
            if at is not None and (found is None or at < found):
                found = at
        return found

    async def count(self, start: int, end: int) -> int:
        """The number of pending messages whose records are in the log between ``start`` and ``end``.

        A place in a queue whose message was lost before counts as well.
        """
        total = 0
        for topic, queue_id, offset in self._unread():
            first, _ = await self._first_from(topic, queue_id, offset, start)
            last, _ = await self._first_from(topic, queue_id, first, end)
            total += last - first
        return total

    async def _first_from(self, topic: str, queue_id: int, offset: int, log_offset: int) -> tuple[int, int | None]:
        """The first message not below ``offset`` whose record is not below ``log_offset``: its offset and log offset.

        The end of the queue and None if there is none.
        """
        low = max(offset, self._store.min_offset(topic, queue_id))
        high = max(low, self._store.max_offset(topic, queue_id))
        found: tuple[int, int | None] = high, None
        while low < high:
            middle = (low + high) // 2
            message = await self._message(topic, queue_id, middle, high)
            if message is None:
                high = middle
            elif message[1] < log_offset:
                low = message[0] + 1
            else:
                found, high = message, middle
        return found

    async def _message(self, topic: str, queue_id: int, offset: int, end: int) -> tuple[int, int] | None:
        """The first message of [offset, end): its offset and log offset. Fillers are no messages."""
        while offset < end:
            units = await self._store.queue_units(topic, queue_id, offset, min(_UNITS, end - offset))
            if not units:
                return None
            for log_offset, size, _ in units:
                if size != FILLER_SIZE:
                    return offset, log_offset
                offset += 1
        return None
