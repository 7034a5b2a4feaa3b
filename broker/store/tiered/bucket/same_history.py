"""Whether the history in a bucket is that of the local log: with another one, offsets would stand for two messages.

The log may be longer than the bucket's history and still be another one: that of an older copy of the disk which has
grown since. So messages are compared, the newest ones that both have.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.queue.deleted_topics import DeletedTopic
from trimq.broker.store.tiered.access.batch import BatchBuilder
from trimq.broker.store.tiered.bucket.queue_starts import Origin
from trimq.protocol.bucket_manifest import Entry, Stretch, StretchRows
from trimq.protocol.queue_unit import FILLER_SIZE
from trimq.protocol.record import BLANK_SIZE, OVERHEAD_V1, SIZE_MAGIC, RecordError, decode_head

_ENTRIES: Final = 8
_MESSAGES: Final = 16
"""So many of the newest objects and messages are looked at."""
_ADVICE: Final = "restore the store from the bucket (mqstore tiered restore)"


class SameHistory:
    """See above."""

    def __init__(self, log: CommitLog, queues: ConsumeQueueStore, builder: BatchBuilder) -> None:
        self._log = log
        self._queues = queues
        self._builder = builder

    async def why_not(self, entries: Sequence[Entry], end: int, origin: Origin | None) -> str:
        """Why the bucket, whose objects reach to a log offset, has another history; "" if it has the same.

        ``origin``: of a restored store. Raises OSError.
        """
        if self._log.max_offset < end:
            return (
                f"the bucket has messages up to log offset {end}, and the log of this broker ends at "
                f"{self._log.max_offset}: {_ADVICE}"
            )
        if origin is not None and self._log.min_offset <= origin.log_start and _has_foreign(entries, origin):
            return (
                f"this store was restored from the bucket up to log offset {origin.end}, and then another broker has "
                f"uploaded more: {_ADVICE} again, when that one is stopped"
            )
        return await self._why_other(_newest(entries))

    async def _why_other(self, newest: Sequence[Stretch]) -> str:
        is_known = False
        for stretch in newest:
            is_same = await self._has_record(stretch) if stretch.last_physical >= self._log.min_offset else None
            if is_same is False:
                return _other(stretch)
            is_known = is_known or bool(is_same)
        if is_known:
            return ""
        # The log begins behind them all. A queue may still know where they were, if its topic was not created anew.
        other = None
        for stretch in newest:
            is_same = None if self._is_deleted(stretch) else await self._has_unit(stretch)
            if is_same:
                return ""
            other = stretch if is_same is False else other
        return "" if other is None else _other(other)

    async def _has_record(self, stretch: Stretch) -> bool | None:
        """Whether the log has the last message of a stretch at its place; None if that place cannot be read."""
        at = stretch.last_physical
        head = await self._log.read_cold(at, BLANK_SIZE)
        if not head:
            return None
        size = SIZE_MAGIC.unpack(head)[0] if len(head) == BLANK_SIZE else 0
        if not OVERHEAD_V1 <= size <= self._log.max_offset - at:
            return False
        data = await self._log.read_cold(at, size)
        try:
            record = decode_head(data)
        except RecordError:
            return False
        topic = bytes(data[record.topic_at : record.topic_end])
        if (topic, record.queue_id, record.physical_offset) != (stretch.topic.encode(), stretch.queue_id, at):
            return False
        # Another history with messages of the same sizes: those were stored at another time.
        if not stretch.begin_ms <= record.store_timestamp <= stretch.end_ms:
            return False
        # A message whose offset was given before is at another place of its queue.
        return record.queue_offset == stretch.end - 1 or await self._has_unit(stretch) is True

    async def _has_unit(self, stretch: Stretch) -> bool | None:
        """Whether the local queue has the last message of a stretch; None if it does not know its offset."""
        queue = self._queues.find(stretch.topic, stretch.queue_id)
        offset = stretch.end - 1
        if queue is None or not queue.first_offset <= offset < queue.next_offset:
            return None
        units = await self._builder.units(queue, offset, 1)
        if not units or units[0][1] == FILLER_SIZE:
            return None
        return units[0][0] == stretch.last_physical

    # -- topics that were deleted

    @property
    def deleted(self) -> Mapping[str, DeletedTopic]:
        """Topics that were deleted while the log has records of them: there may be new ones of their names."""
        return self._queues.deleted_topics.topics

    def _is_deleted(self, stretch: Stretch) -> bool:
        note = self.deleted.get(stretch.topic)
        return note is not None and stretch.last_physical < note.position and stretch.end_ms <= note.wall_ms


def _other(stretch: Stretch) -> str:
    return (
        f"the message {stretch.end - 1} of {stretch.topic}/{stretch.queue_id} is at log offset {stretch.last_physical} "
        f"in the bucket, and the log of this broker has not got it there: it is another history; {_ADVICE}"
    )


def _newest(entries: Sequence[Entry]) -> list[Stretch]:
    """The stretches of the last objects with the newest messages."""
    found: list[Stretch] = []
    left = _ENTRIES
    for entry in reversed(entries):
        stretches = StretchRows.of(entry.stretches)
        if len(stretches):
            found += [stretches[int(row)] for row in np.argsort(stretches.rows["last_physical"])[-_MESSAGES:]]
            left -= 1
            if not left:
                break
    found.sort(key=lambda stretch: stretch.last_physical, reverse=True)
    return found[:_MESSAGES]


def _has_foreign(entries: Sequence[Entry], origin: Origin) -> bool:
    """Whether there is a message between the end of what was restored and the start of the log: not of this store."""
    for entry in entries:
        if entry.object.end > origin.end and len(entry.stretches):
            rows = StretchRows.of(entry.stretches).rows
            first, last = rows["first_physical"], rows["last_physical"]
            # A join has messages of before and after in one stretch.
            places = np.where(first >= origin.end, first, last)
            if ((places >= origin.end) & (places < origin.log_start)).any():
                return True
    return False
