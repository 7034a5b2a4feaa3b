"""What is put into the store: a message, or a batch of messages. Rows of the native extension are in message_rows.py.

Each kind of put says how many bytes its records take, writes them, and reports the new messages to the dispatch.
Everything else (limits, space, time, the order of writes, who waits for what) is done by the commit log and the write
path, in the same manner for all kinds.
Source: RocketMQ's MessageExtBrokerInner, MessageExtBatch, DefaultAppendMessageCallback.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from itertools import repeat
from operator import sub
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from msgspec import Struct

from trimq.broker.store.index.index_service import WAKE_AT
from trimq.broker.store.log.topic_queue import V4_HOSTS, TopicQueue
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol import record, sysflag
from trimq.protocol.dispatch_rules import IN_QUEUE, KIND
from trimq.protocol.hashing import crc32
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.record_batch import NO_MESSAGES, BatchHead, BatchMessages

if TYPE_CHECKING:
    from trimq.broker.store.index.index_service import IndexService
    from trimq.broker.store.log.commit_log import CommitLog
    from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore

Arrivals = Iterable[tuple[str, int, int, Sequence[int]]]
"""New messages: (topic, queue id, queue offset of the first one + 1, tags code of each)."""

_V6_FLAGS: Final = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6
_PACK_V4: Final = record.layout(0).pack
_FIXED_V4: Final = record.layout(0).size
_COPIED_ONCE: Final = 4096
"""Bodies up to this size are joined with the bytes behind them and stored by one copy; larger ones are not joined."""
_PACK_UNIT: Final = UNIT.pack
_HEAD: Final = record.SIZE_MAGIC.size


class RefusedError(Exception):
    """A put that breaks a limit; ``result`` says which one."""

    def __init__(self, status: PutMessageStatus, remark: str) -> None:
        super().__init__(remark)
        self.result = PutMessageResult(status, remark=remark)


class Dispatchable(Protocol):
    """Adjacent records that stand in the log, on their way to queues, index and waiting pulls."""

    @property
    def topics(self) -> Collection[str]:
        """The topics of the messages, each once."""
        ...

    @property
    def sys_flag(self) -> int:
        """The flags of the messages; the dispatch needs the kind of transaction in them."""
        ...

    def is_in(self, topics: Container[str]) -> bool:
        """Whether one of the topics of the messages is in ``topics``."""
        ...

    def leave_out(self, topics: Collection[str]) -> None:
        """Some of the topics (not all) have been deleted: ``dispatch_into`` adds no units to their queues."""
        ...

    def dispatch_into(
        self, index: "IndexService | None", queues: "ConsumeQueueStore | None", result: PutMessageResult, /
    ) -> None:
        """Give the keys to the index and add the units to the queues. None: skip the index, or the queues."""
        ...

    def arrivals(self, result: PutMessageResult, /) -> Arrivals:
        """The messages that can be read from now on."""
        ...


class Put(Dispatchable, Protocol):
    """Records that are appended together. The methods are called in the order below, then those of Dispatchable.

    Each is called at most once.
    """

    @property
    def count(self) -> int:
        """Number of messages."""
        ...

    @property
    def offsets(self) -> Sequence[int] | None:
        """Log offset of each record after the append; None for a single record."""
        ...

    @property
    def wait(self) -> bool:
        """The WAIT property. False: the reply does not wait for the disk."""
        ...

    def measure(self, log: "CommitLog") -> int:
        """Bytes that the records take. Raises RefusedError if they break one of the limits of ``log``.

        Called again when the put has waited for space.
        """
        ...

    def fill(self, buffer: memoryview, at: int, physical_offset: int, store_timestamp: int) -> tuple[bytes, int]:
        """Write the records from ``at`` on, except their first bytes, which are returned: the caller writes them last.

        Also returns the queue offset of the first record, and moves the next offsets of the queues behind the records.
        Raises struct.error if a number does not fit its field; then there are no side effects.
        """
        ...

    def release_buffers(self) -> None:
        """The dispatch comes later: drop what it does not need, which may be a view of the receive buffer."""
        ...


class WaitablePut(Put, Protocol):
    """A put that may wait for space."""

    def copy_buffers(self) -> None:
        """Copy the parts that are in buffers which the next receive overwrites."""
        ...


class MessageInner(Struct, gc=False):
    """A message on its way into the log.

    ``born_host`` and ``store_host`` are packed addresses (8 or 20 bytes); ``fill`` sets their IPv6 bits of
    ``sys_flag``. ``properties`` is the encoded text, ``tags_code`` the hash of the tag, ``keys`` the words by which the
    index finds the message (UNIQ_KEY first). ``wait``: see Put. ``queue``: that of ``topic`` and ``queue_id`` if the
    caller knows it, else set by ``measure``, like ``size``, the size of the record.
    """

    topic: str
    queue_id: int
    body: Any
    properties: bytes
    born_timestamp: int
    born_host: bytes
    store_host: bytes
    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    tags_code: int = 0
    keys: tuple[str, ...] = ()
    wait: bool = True
    queue: TopicQueue | None = None
    size: int = 0

    count: ClassVar[int] = 1
    offsets: ClassVar[None] = None

    @property
    def topics(self) -> tuple[str]:
        """See Put."""
        return (self.topic,)

    def measure(self, log: "CommitLog") -> int:
        """See Put."""
        queue = self.queue
        # A queue that the caller cached may belong to a topic that has been deleted since.
        if queue is None or queue.deleted:
            queue = self.queue = log.queue_to_put(self.topic, self.queue_id)
        body, properties = len(self.body), len(self.properties)
        size = self.size = queue.overhead + len(self.born_host) + len(self.store_host) + body + properties
        # Most messages are small: then no single limit has to be checked.
        if size > log.small:
            log.check(body, properties, size)
        return size

    def fill(self, buffer: memoryview, at: int, physical_offset: int, store_timestamp: int) -> tuple[bytes, int]:
        """See Put."""
        queue, body, sys_flag = self.queue, self.body, self.sys_flag
        assert queue is not None
        born_host, store_host, size = self.born_host, self.store_host, self.size
        body_length = len(body)
        if len(born_host) + len(store_host) == V4_HOSTS:
            sys_flag &= ~_V6_FLAGS
            pack, body_at = _PACK_V4, at + _FIXED_V4
        else:
            sys_flag = sys_flag & ~_V6_FLAGS | record.host_flags(born_host, store_host)
            layout = record.layout(sys_flag)
            pack, body_at = layout.pack, at + layout.size
        # Prepared and rolled back messages of transactions are in no queue of their topic: their offset is 0.
        takes_offset = IN_QUEUE[sys_flag & KIND]
        queue_offset = queue.next_offset if takes_offset else 0
        # ``pack`` is the only call that can fail, so it comes before the first store into the buffer.
        head = pack(
            size,
            queue.magic,
            crc32(body),
            self.queue_id,
            self.flag,
            queue_offset,
            physical_offset,
            sys_flag,
            self.born_timestamp,
            born_host,
            store_timestamp,
            store_host,
            self.reconsume_times,
            self.prepared_transaction_offset,
            body_length,
        )
        properties = self.properties
        tail = queue.topic_part + len(properties).to_bytes(2, "big") + properties
        # The ranges are as long as the data: a mapping refuses to assign a slice of another length.
        if body_length <= _COPIED_ONCE:
            buffer[body_at : at + size] = b"".join((body, tail))
        else:
            body_end = body_at + body_length
            buffer[body_at:body_end] = body
            buffer[body_end : at + size] = tail
        if takes_offset:
            queue.next_offset = queue_offset + 1
        return head, queue_offset

    def copy_buffers(self) -> None:
        """See WaitablePut."""
        self.body = bytes(self.body)

    def release_buffers(self) -> None:
        """See Put."""
        self.body = b""

    def is_in(self, topics: Container[str]) -> bool:
        """See Put."""
        return self.topic in topics

    def leave_out(self, topics: Collection[str]) -> None:
        """See Put. Never called: the message has one topic."""

    def dispatch_into(
        self, index: "IndexService | None", queues: "ConsumeQueueStore | None", result: PutMessageResult
    ) -> None:
        """See Put."""
        topic, physical_offset = self.topic, result.physical_offset
        if index is not None and self.keys:  # IndexService.put, inlined: this runs for every message
            pending = index.pending
            pending.append((topic, self.keys, physical_offset, result.store_timestamp))
            if len(pending) == WAKE_AT:
                index.wake()
        if queues is None:
            return
        try:
            queue = queues.queues[topic][self.queue_id]
        except KeyError:
            queue = queues.find_or_create(topic, self.queue_id)
        size, queue_offset = result.size, result.queue_offset
        if queue_offset == queue.next_offset and physical_offset >= queue.max_phy and queue.dirty:
            # the usual case of ConsumeQueue.put, inlined
            queue.tail += _PACK_UNIT(physical_offset, size, self.tags_code)
            queue.next_offset = queue_offset + 1
            queue.max_phy = physical_offset + size
        else:
            queue.put(physical_offset, size, self.tags_code, queue_offset)

    def arrivals(self, result: PutMessageResult) -> Arrivals:
        """See Put."""
        return ((self.topic, self.queue_id, result.queue_offset + 1, (self.tags_code,)),)


class MessageBatch(Struct, gc=False):
    """A traditional batch: messages of one topic and queue that get consecutive offsets and are in one file.

    ``messages``, ``tags_codes`` and ``keys`` have the same length and hold, per message, what MessageInner holds.
    They are stored by column because each step works on one column of all messages.
    """

    topic: str
    queue_id: int
    messages: BatchMessages
    tags_codes: Sequence[int]
    keys: list[tuple[str, ...]]
    born_timestamp: int
    born_host: bytes
    store_host: bytes
    sys_flag: int = 0
    reconsume_times: int = 0
    wait: bool = True
    queue: TopicQueue | None = None
    offsets: Sequence[int] = ()

    @property
    def topics(self) -> tuple[str]:
        """See Put."""
        return (self.topic,)

    @property
    def count(self) -> int:
        """Number of messages."""
        return len(self.tags_codes)

    def measure(self, log: "CommitLog") -> int:
        """See Put."""
        if self.sys_flag & KIND:
            raise RefusedError(PutMessageStatus.MESSAGE_ILLEGAL, "a batch cannot be part of a transaction")
        messages = self.messages
        if not len(messages):
            raise RefusedError(PutMessageStatus.MESSAGE_ILLEGAL, "the batch holds no message")
        queue = self.queue = log.queue_to_put(self.topic, self.queue_id)
        fixed = queue.overhead + len(self.born_host) + len(self.store_host)
        # The longest body and the longest properties together: if they break no limit, no message does.
        if sum(messages.longest) + fixed > log.small:
            for body, properties in messages.lengths():
                log.check(body, properties, fixed + body + properties)
        total = fixed * len(messages) + messages.size
        log.check_batch(total)
        return total

    def fill(self, buffer: memoryview, at: int, physical_offset: int, store_timestamp: int) -> tuple[bytes, int]:
        """See Put."""
        queue = self.queue
        assert queue is not None
        sys_flag = self.sys_flag & ~_V6_FLAGS | record.host_flags(self.born_host, self.store_host)
        # Everything that can fail comes before the first store into the buffer and before the queue's offset moves.
        shared = record.pack_shared(
            sys_flag, self.born_timestamp, self.born_host, store_timestamp, self.store_host, self.reconsume_times
        )
        head = BatchHead(queue.magic, self.queue_id, queue.next_offset, physical_offset, shared, queue.topic_part)
        first = queue.next_offset
        records, self.offsets = self.messages.records(head)
        queue.next_offset = first + len(self.offsets)
        buffer[at + _HEAD : at + len(records)] = memoryview(records)[_HEAD:]
        return bytes(records[:_HEAD]), first

    def copy_buffers(self) -> None:
        """See WaitablePut."""
        self.messages = self.messages.copied()

    def release_buffers(self) -> None:
        """See Put."""
        self.messages = NO_MESSAGES

    def is_in(self, topics: Container[str]) -> bool:
        """See Put."""
        return self.topic in topics

    def leave_out(self, topics: Collection[str]) -> None:
        """See Put. Never called: the messages have one topic."""

    def dispatch_into(
        self, index: "IndexService | None", queues: "ConsumeQueueStore | None", result: PutMessageResult
    ) -> None:
        """See Put."""
        offsets = self.offsets
        if index is not None:
            index.put_all(zip(repeat(self.topic), self.keys, offsets, repeat(result.store_timestamp), strict=False))
        if queues is None:
            return
        # The records are adjacent: the size of each is the distance to the next one.
        sizes = list(map(sub, [*offsets[1:], result.physical_offset + result.size], offsets))
        queue = queues.find_or_create(self.topic, self.queue_id)
        queue.put_all(offsets, sizes, self.tags_codes, result.queue_offset)

    def arrivals(self, result: PutMessageResult) -> Arrivals:
        """See Put."""
        return ((self.topic, self.queue_id, result.queue_offset + 1, self.tags_codes),)


class Dispatcher(Protocol):
    """Takes the records in log order once they may be read, and gives them to queues, index and waiting pulls.

    It owns the one dispatch position. Records that do not start at the position (the live dispatch is off) are left
    to ReputMessageService, which reads them from the log.
    """

    def dispatch(self, put: Dispatchable, result: PutMessageResult) -> None:
        """Dispatch adjacent records. Never raises, never waits. The tags code of a delayed message is its due time."""
        ...

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        """The log continues at ``next_offset``: a BLANK fills [blank_offset, next_offset)."""
        ...
