"""HeldHalves: the log files that the cleaner must not delete, because they hold halves that are not ended."""

from trimq.broker.services.queued_messages import QueuedMessages, QueuePosition, UnitStore
from trimq.broker.services.transaction.half_queue import HalfQueue
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC
from trimq.protocol.transaction import QUEUE


class HeldHalves(QueuedMessages):
    """Implements log_holds.PendingMessages for the pending halves."""

    def __init__(self, store: UnitStore, halves: HalfQueue) -> None:
        self._halves = halves
        super().__init__("half messages", store, self._first)

    def _first(self) -> list[QueuePosition]:
        """The first pending half; none if all are ended."""
        offset = self._halves.next_pending(self._halves.first, self._halves.end)
        return [(TRANS_HALF_TOPIC, QUEUE, offset)] if offset >= 0 else []

    async def behind(self, log_offset: int) -> int:
        """The first half, pending or not, whose record is not below a log offset; the end of the queue if none is."""
        offset, _ = await self._first_from(TRANS_HALF_TOPIC, QUEUE, 0, log_offset)
        return offset

    async def count(self, start: int, end: int) -> int:
        """The number of pending halves between two log offsets; those between them that are ended do not count."""
        first, _ = await self._first_from(TRANS_HALF_TOPIC, QUEUE, self._halves.first, start)
        last, _ = await self._first_from(TRANS_HALF_TOPIC, QUEUE, first, end)
        return self._halves.count_pending(first, last)
