"""HeldHalves: the log files that the cleaner must not delete, because they hold halves that are not ended durably."""

from typing import Final

from trimq.broker.services.queued_messages import QueuedMessages, QueuePosition, UnitStore
from trimq.broker.services.transaction.half_queue import HalfQueue
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC
from trimq.protocol.transaction import QUEUE

HALF_MESSAGES: Final = "half messages"


class HeldHalves(QueuedMessages):
    """Implements log_holds.PendingMessages for the halves that are not done.

    A half whose successor (the half stored again, its commit record, its record in TRANS_CHECK_MAX_TIME_TOPIC) is not
    durable yet is held like a pending one: a power cut may take the successor, and then the half is pending again.
    """

    def __init__(self, store: UnitStore, halves: HalfQueue) -> None:
        self._halves = halves
        super().__init__(HALF_MESSAGES, store, self._first)

    def _first(self) -> list[QueuePosition]:
        """The first half that is not done; none if all are."""
        halves = self._halves
        return [(TRANS_HALF_TOPIC, QUEUE, halves.first)] if halves.first < halves.end else []

    async def behind(self, log_offset: int) -> int:
        """The first half, pending or not, whose record is not below a log offset; the end of the queue if none is."""
        offset, _ = await self._first_from(TRANS_HALF_TOPIC, QUEUE, 0, log_offset)
        return offset

    async def count(self, start: int, end: int) -> int:
        """The number of pending halves between two log offsets; those between them that are ended do not count."""
        first, _ = await self._first_from(TRANS_HALF_TOPIC, QUEUE, self._halves.first, start)
        last, _ = await self._first_from(TRANS_HALF_TOPIC, QUEUE, first, end)
        return self._halves.count_pending(first, last)
