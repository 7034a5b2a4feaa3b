"""QueuedMessages: the messages of queues that a service has not read yet, as far as the cleaner has to know them."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from trimq.protocol.queue_unit import FILLER_SIZE

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

    Log offsets rise with the offsets in a queue, so a place in the log is found by bisection.
    """

    def __init__(self, name: str, store: UnitStore, positions: Callable[[], Iterable[QueuePosition]]) -> None:
        self.name = name
        self._store = store
        self._positions = positions

    async def lowest(self) -> int | None:
        """The lowest log offset of a pending message that is still in the log; None if there is none."""
        found = None
        for topic, queue_id, offset in self._positions():
            first = await self._first_from(topic, queue_id, offset, self._store.min_phy_offset)
            at = await self._log_offset(topic, queue_id, first)
            if at is not None and (found is None or at < found):
                found = at
        return found

    async def count(self, start: int, end: int) -> int:
        """The number of pending messages whose records are in the log between ``start`` and ``end``."""
        total = 0
        for topic, queue_id, offset in self._positions():
            first = await self._first_from(topic, queue_id, offset, start)
            total += await self._first_from(topic, queue_id, first, end) - first
        return total

    async def _first_from(self, topic: str, queue_id: int, offset: int, log_offset: int) -> int:
        """The offset of the first message not below ``offset`` whose record is not below ``log_offset``."""
        low = max(offset, self._store.min_offset(topic, queue_id))
        high = max(low, self._store.max_offset(topic, queue_id))
        while low < high:
            middle = (low + high) // 2
            at = await self._log_offset(topic, queue_id, middle)
            # A unit that cannot be read has no message: deleted with its file meanwhile, or a filler at the front.
            if at is None or at < log_offset:
                low = middle + 1
            else:
                high = middle
        return low

    async def _log_offset(self, topic: str, queue_id: int, offset: int) -> int | None:
        units = await self._store.queue_units(topic, queue_id, offset, 1)
        return units[0][0] if units and units[0][1] != FILLER_SIZE else None
