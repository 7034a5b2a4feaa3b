"""Dispatches each record, in the order of the log, to its queue, to the index and to listeners for new messages.

There is one dispatch position. An append dispatches its own record as long as that starts at the position. Any other
record is left to ReputMessageService, which reads the log from the position on until it has caught up.
protocol/dispatch_rules.py decides which records go where.
Source: RocketMQ's CommitLogDispatcherBuildConsumeQueue, CommitLogDispatcherBuildIndex, NotifyMessageArrivingListener.
"""

from collections.abc import Callable, Collection, Sequence

from trimq.broker.store.index.index_service import IndexService
from trimq.broker.store.log.puts import Dispatchable
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.dispatch_rules import IN_INDEX, IN_QUEUE, KIND

MessageArriving = Callable[[str, int, int, int, int], None]
"""Called with (topic, queue id, offset after the message, tags code, store timestamp) of each readable message."""


def _ignore(_topic: str, _queue_id: int, _next_offset: int, _tags_code: int, _store_timestamp: int) -> None:
    pass


class StoreDispatcher:
    """Implements puts.Dispatcher. ``position`` is the log offset behind the last dispatched record."""

    def __init__(
        self,
        queues: ConsumeQueueStore,
        index: IndexService | None,
        stats: StoreStats,
        *,
        delay_ms: Sequence[int] = (0,),
    ) -> None:
        """``delay_ms`` is the delay of each level; [0] means no delay. Without ``index`` no keys are stored."""
        self._queues = queues
        self._deleted_topics = queues.deleted_topics
        self.index = index
        self._stats = stats
        self.delay_ms = delay_ms
        self.position = 0
        self.last_record = -1
        """Log offset of the last dispatched record; -1 before the first one."""
        self.last_store_timestamp = 0
        self.message_arriving: list[MessageArriving] = []
        """Notified of every message."""
        self.awaited: Collection[tuple[str, int]] = ()
        """The queues (topic, queue id) for which ``on_awaited`` is notified."""
        self.on_awaited: MessageArriving = _ignore
        self.arriving_in: dict[str, MessageArriving] = {}
        """The listener for the messages of a topic."""
        self.on_behind: Callable[[], None] = lambda: None
        """Called when a record starts behind the position: ReputMessageService has to read up to it."""

    @property
    def deleted_end(self) -> int:
        """From this log offset on, no record belongs to a topic that has been deleted."""
        return self._deleted_topics.end

    def dispatch(self, put: Dispatchable, result: PutMessageResult) -> None:
        """Dispatch adjacent records; see puts.Dispatcher."""
        position = result.physical_offset
        end = position + result.size
        # Not the next record in the log: dispatching it now would break the order of queues and index. Records before
        # the position were already dispatched by ReputMessageService.
        if position != self.position:
            if end > self.position:
                self.on_behind()
            return
        # The position moves before the work, so that a listener that puts a message itself finds it already moved.
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
        # ``end`` is almost always 0 or far back: one comparison for a record, and no look-up by topic.
        if position < deleted_topics.end:
            topics = put.topics
            deleted = [topic for topic in topics if deleted_topics.has(topic, position, result.store_timestamp)]
            if len(deleted) == len(topics):
                queues = None
            elif deleted:
                put.leave_out(deleted)
        put.dispatch_into(index, queues, result)
        if queues is not None and (self.message_arriving or self.awaited or put.is_in(self.arriving_in)):
            self._notify_arrivals(put, result)

    def _notify_arrivals(self, put: Dispatchable, result: PutMessageResult) -> None:
        every = bool(self.message_arriving)
        for topic, queue_id, following, tags_codes in put.arrivals(result):
            if every or topic in self.arriving_in or (topic, queue_id) in self.awaited:
                for next_offset, tags_code in enumerate(tags_codes, following):
                    self.notify(topic, queue_id, next_offset, tags_code, result.store_timestamp)

    def notify(self, topic: str, queue_id: int, next_offset: int, tags_code: int, store_timestamp: int) -> None:
        """Notify the listeners of a message."""
        for listener in self.message_arriving:
            listener(topic, queue_id, next_offset, tags_code, store_timestamp)
        if topic in self.arriving_in:
            self.arriving_in[topic](topic, queue_id, next_offset, tags_code, store_timestamp)
        if (topic, queue_id) in self.awaited:
            self.on_awaited(topic, queue_id, next_offset, tags_code, store_timestamp)

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        """The log continues in its next file; see puts.Dispatcher."""
        if self.position == blank_offset:
            self.position = next_offset

    def start_at(self, position: int, last_record: int, store_timestamp: int) -> None:
        """Set by recovery: everything before ``position`` has been dispatched."""
        self.position = position
        self.last_record = last_record
        self.last_store_timestamp = store_timestamp
