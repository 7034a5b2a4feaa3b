"""Hands each record, in the order of the log, to its queue, to the index and to whoever waits for messages.

There is one dispatch position. Appends dispatch their own record as long as it begins there; anything else is left to
ReputMessageService, which goes on from the position in the log until it has caught up.
Source: RocketMQ's CommitLogDispatcherBuildConsumeQueue, CommitLogDispatcherBuildIndex, NotifyMessageArrivingListener.
"""

from collections.abc import Callable, Container, Sequence
from itertools import repeat
from operator import sub
from typing import Final

from trimq.broker.store.consume_queue import ConsumeQueue
from trimq.broker.store.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.index_service import WAKE_AT, IndexService
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import MessageBatch, MessageRows, PutMessageResult
from trimq.protocol import sysflag
from trimq.protocol.hashing import tags_code
from trimq.protocol.property_names import PropertyName
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.topic_rules import SCHEDULE_TOPIC

MessageArriving = Callable[[str, int, int, int, int], None]
"""Hears (topic, queue id, offset after the message, tags code, store timestamp) of each message that can be read."""

_PACK: Final = UNIT.pack
_UNKNOWN_LEVEL_MS: Final = 1000
_TYPES: Final = sysflag.TRANSACTION_MASK
_ROLLBACK: Final = sysflag.TRANSACTION_ROLLBACK
_PREPARED: Final = sysflag.TRANSACTION_PREPARED


def _nobody(_topic: str, _queue_id: int, _next_offset: int, _tags_code: int, _store_timestamp: int) -> None:
    pass


class StoreDispatcher:
    """Implements types.Dispatcher. ``position`` is the log offset behind the last record that was dispatched."""

    def __init__(
        self,
        queues: ConsumeQueueStore,
        index: IndexService | None,
        stats: StoreStats,
        *,
        delay_ms: Sequence[int] = (0,),
    ) -> None:
        """``delay_ms`` is the delay of each level, [0] being none. Without ``index`` no keys are kept."""
        self._queues = queues
        self._by_topic = queues.queues
        self._dropped = queues.dropped
        self.index = index
        self._stats = stats
        self.delay_ms = delay_ms
        self.position = 0
        self.last_record = -1
        """Log offset of the last record that was dispatched; -1 before the first."""
        self.last_store_timestamp = 0
        self.message_arriving: list[MessageArriving] = []
        """Hear of every message."""
        self.awaited: Container[tuple[str, int]] = ()
        """Queues (topic, queue id) that ``on_awaited`` hears of."""
        self.on_awaited: MessageArriving = _nobody
        self.arriving_in: dict[str, MessageArriving] = {}
        """Who hears of the messages of a topic."""
        self.on_behind: Callable[[], None] = lambda: None
        """Called when a record begins behind the position: ReputMessageService has to go there."""

    def dispatch(  # noqa: PLR0913, PLR0917 - the record's own fields, without an object for each of them
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        physical_offset: int,
        size: int,
        tags_code: int,
        store_timestamp: int,
        keys: tuple[str, ...],
        sys_flag: int,
    ) -> None:
        """One record; see types.Dispatcher."""
        if physical_offset != self.position:
            if physical_offset > self.position:
                self.on_behind()
            return
        self.position = end = physical_offset + size
        self.last_record = physical_offset
        self.last_store_timestamp = store_timestamp
        kind = sys_flag & _TYPES
        if keys and kind != _ROLLBACK:
            index = self.index
            if index is not None:
                pending = index.pending
                pending.append((topic, keys, physical_offset, store_timestamp))
                if len(pending) == WAKE_AT:
                    index.wake()
        if kind == _PREPARED or kind == _ROLLBACK:  # noqa: PLR1714, SIM109 - a third of the time of a tuple
            return
        dropped = self._dropped
        if physical_offset < dropped.end and dropped.has(topic, physical_offset, store_timestamp):
            return
        try:
            queue = self._by_topic[topic][queue_id]
        except KeyError:
            queue = self._queues.find_or_create(topic, queue_id)
        if queue_offset == queue.next_offset and physical_offset >= queue.max_phy and queue.dirty:
            # ConsumeQueue.put's usual case, without the call
            queue.tail += _PACK(physical_offset, size, tags_code)
            queue.next_offset = queue_offset + 1
            queue.max_phy = end
        else:
            queue.put(physical_offset, size, tags_code, queue_offset)
        if (topic, queue_id) in self.awaited or self.message_arriving or topic in self.arriving_in:
            self.tell(topic, queue_id, queue_offset + 1, tags_code, store_timestamp)

    def tell(self, topic: str, queue_id: int, next_offset: int, tags_code: int, store_timestamp: int) -> None:
        """Let those who wait for it hear of a message."""
        for listener in self.message_arriving:
            listener(topic, queue_id, next_offset, tags_code, store_timestamp)
        if topic in self.arriving_in:
            self.arriving_in[topic](topic, queue_id, next_offset, tags_code, store_timestamp)
        if (topic, queue_id) in self.awaited:
            self.on_awaited(topic, queue_id, next_offset, tags_code, store_timestamp)

    def units_of(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The consume queue that messages of a queue are dispatched to."""
        return self._queues.find_or_create(topic, queue_id)

    def dispatch_batch(self, batch: MessageBatch, result: PutMessageResult) -> None:
        """All records of a batch; see types.Dispatcher."""
        position = result.physical_offset
        if position != self.position:
            if position + result.size > self.position:
                self.on_behind()
            return
        topic, queue_id, store_timestamp = batch.topic, batch.queue_id, result.store_timestamp
        offsets = result.offsets or [position]
        self.position = end = position + result.size
        self.last_record = offsets[-1]
        self.last_store_timestamp = store_timestamp
        index = self.index
        if index is not None:
            if isinstance(batch.keys, list):
                index.put_all(zip(repeat(topic), batch.keys, offsets, repeat(store_timestamp), strict=False))
            else:
                index.put_run(batch.keys.run(topic, offsets, store_timestamp))
        if isinstance(offsets, range):
            sizes = [offsets.step] * len(offsets)
        else:
            sizes = list(map(sub, [*offsets[1:], end], offsets))
        tags = batch.tags_codes
        if position < self._dropped.end and self._dropped.has(topic, position, store_timestamp):
            return
        self._queues.find_or_create(topic, queue_id).put_all(offsets, sizes, tags, result.queue_offset)
        if (topic, queue_id) in self.awaited or self.message_arriving or topic in self.arriving_in:
            for following, tags_code in enumerate(tags, result.queue_offset + 1):
                self.tell(topic, queue_id, following, tags_code, store_timestamp)

    def dispatch_rows(self, rows: MessageRows, result: PutMessageResult) -> None:
        """Records of several queues that were put together; see types.Dispatcher."""
        position, offsets = result.physical_offset, result.offsets
        if position != self.position:
            if position + result.size > self.position:
                self.on_behind()
            return
        assert offsets is not None
        topic, tags_code, store_timestamp = rows.topic, rows.tags_code, result.store_timestamp
        self.position = position + result.size
        self.last_record = offsets[-1]
        self.last_store_timestamp = store_timestamp
        if self.index is not None:
            self.index.put_run(rows.keys.run(topic, offsets, store_timestamp))
        if position < self._dropped.end and self._dropped.has(topic, position, store_timestamp):
            return
        units = rows.rows.units(tags_code)
        end = 0
        for queue, count, start in zip(rows.queues, rows.rows.counts, rows.starts, strict=True):
            begin, end = end, end + count * UNIT_SIZE
            places = queue.units
            if places is None or places.deleted:
                places = queue.units = self.units_of(topic, queue.queue_id)
            places.put_units(units[begin:end], start)
        told = bool(self.message_arriving) or topic in self.arriving_in
        for queue, count, start in zip(rows.queues, rows.rows.counts, rows.starts, strict=True):
            if told or queue.key in self.awaited:
                for following in range(start + 1, start + count + 1):
                    self.tell(topic, queue.queue_id, following, tags_code, store_timestamp)

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        """The log goes on in its next file; see types.Dispatcher."""
        if self.position == blank_offset:
            self.position = next_offset

    def start_at(self, position: int, last_record: int, store_timestamp: int) -> None:
        """Recovery's word: everything before ``position`` has been dispatched."""
        self.position = position
        self.last_record = last_record
        self.last_store_timestamp = store_timestamp

    def tags_code_of(self, topic: str, properties: dict[str, str], store_timestamp: int) -> int:
        """The tag slot of a record's queue unit: the tag's hash, or for a delayed message the time it is due."""
        if topic == SCHEDULE_TOPIC:
            delay = properties.get(PropertyName.DELAY, "")
            if delay.isascii() and delay.isdigit():
                level = min(int(delay), len(self.delay_ms) - 1)
                if level > 0:
                    return store_timestamp + self.delay_ms[level]
                if int(delay) > 0:
                    return store_timestamp + _UNKNOWN_LEVEL_MS
        return tags_code(properties.get(PropertyName.TAGS, ""))
