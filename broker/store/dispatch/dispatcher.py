"""Hands each record, in the order of the log, to its queue, to the index and to whoever waits for messages.

There is one dispatch position. Appends dispatch their own record as long as it begins there; anything else is left to
ReputMessageService, which goes on from the position in the log until it has caught up. What goes where is said in
protocol/dispatch_rules.py.
Source: RocketMQ's CommitLogDispatcherBuildConsumeQueue, CommitLogDispatcherBuildIndex, NotifyMessageArrivingListener.
"""

from collections.abc import Callable, Collection, Sequence

from trimq.broker.store.index.index_service import IndexService
from trimq.broker.store.log.puts import Put
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.dispatch_rules import IN_INDEX, IN_QUEUE, KIND

MessageArriving = Callable[[str, int, int, int, int], None]
"""Hears (topic, queue id, offset after the message, tags code, store timestamp) of each message that can be read."""


def _nobody(_topic: str, _queue_id: int, _next_offset: int, _tags_code: int, _store_timestamp: int) -> None:
    pass


class StoreDispatcher:
    """Implements puts.Dispatcher. ``position`` is the log offset behind the last record that was dispatched."""

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
        self._deleted_topics = queues.deleted_topics
        self.index = index
        self._stats = stats
        self.delay_ms = delay_ms
        self.position = 0
        self.last_record = -1
        """Log offset of the last record that was dispatched; -1 before the first."""
        self.last_store_timestamp = 0
        self.message_arriving: list[MessageArriving] = []
        """Hear of every message."""
        self.awaited: Collection[tuple[str, int]] = ()
        """Queues (topic, queue id) that ``on_awaited`` hears of."""
        self.on_awaited: MessageArriving = _nobody
        self.arriving_in: dict[str, MessageArriving] = {}
        """Who hears of the messages of a topic."""
        self.on_behind: Callable[[], None] = lambda: None
        """Called when a record begins behind the position: ReputMessageService has to go there."""

    def dispatch(self, put: Put, result: PutMessageResult) -> None:
        """Records that lie side by side; see puts.Dispatcher."""
        position = result.physical_offset
        end = position + result.size
        if position != self.position:
            if end > self.position:
                self.on_behind()
            return
        self.position = end
        offsets = result.offsets
        self.last_record = position if offsets is None else offsets[-1]
        self.last_store_timestamp = result.store_timestamp
        kind = put.sys_flag & KIND
        index = self.index if IN_INDEX[kind] else None
        if not IN_QUEUE[kind]:
            put.dispatch_into(index, None, result)
            return
        queues: ConsumeQueueStore | None = self._queues
        deleted_topics = self._deleted_topics
        if position < deleted_topics.end:
            topics = put.topics
            deleted = [topic for topic in topics if deleted_topics.has(topic, position, result.store_timestamp)]
            if len(deleted) == len(topics):
                queues = None
            elif deleted:
                put.leave_out(deleted)
        put.dispatch_into(index, queues, result)
        if queues is not None and (self.message_arriving or self.awaited or put.is_in(self.arriving_in)):
            self._tell_of(put, result)

    def _tell_of(self, put: Put, result: PutMessageResult) -> None:
        every = bool(self.message_arriving)
        for topic, queue_id, following, tags_codes in put.arrivals(result):
            if every or topic in self.arriving_in or (topic, queue_id) in self.awaited:
                for next_offset, tags_code in enumerate(tags_codes, following):
                    self.tell(topic, queue_id, next_offset, tags_code, result.store_timestamp)

    def tell(self, topic: str, queue_id: int, next_offset: int, tags_code: int, store_timestamp: int) -> None:
        """Let those who wait for it hear of a message."""
        for listener in self.message_arriving:
            listener(topic, queue_id, next_offset, tags_code, store_timestamp)
        if topic in self.arriving_in:
            self.arriving_in[topic](topic, queue_id, next_offset, tags_code, store_timestamp)
        if (topic, queue_id) in self.awaited:
            self.on_awaited(topic, queue_id, next_offset, tags_code, store_timestamp)

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        """The log goes on in its next file; see puts.Dispatcher."""
        if self.position == blank_offset:
            self.position = next_offset

    def start_at(self, position: int, last_record: int, store_timestamp: int) -> None:
        """Recovery's word: everything before ``position`` has been dispatched."""
        self.position = position
        self.last_record = last_record
        self.last_store_timestamp = store_timestamp
