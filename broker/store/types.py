"""What goes into the store and what comes out of it."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol

from msgspec import Struct

from trimq.broker.store.topic_queue import TopicQueue
from trimq.protocol.index_batch import KeyColumns
from trimq.protocol.record_batch import BatchMessages


class PutMessageStatus(IntEnum):
    """Outcome of a put. The first four mean that the record is in the log."""

    PUT_OK = 0
    FLUSH_DISK_TIMEOUT = 1
    FLUSH_SLAVE_TIMEOUT = 2
    SLAVE_NOT_AVAILABLE = 3
    SERVICE_NOT_AVAILABLE = 4
    CREATE_MAPPED_FILE_FAILED = 5
    MESSAGE_ILLEGAL = 6
    PROPERTIES_SIZE_EXCEEDED = 7
    OS_PAGE_CACHE_BUSY = 8
    UNKNOWN_ERROR = 9
    IN_SYNC_REPLICAS_NOT_ENOUGH = 10
    PUT_TO_REMOTE_BROKER_FAIL = 11
    LMQ_CONSUME_QUEUE_NUM_EXCEEDED = 12
    WHEEL_TIMER_FLOW_CONTROL = 13
    WHEEL_TIMER_MSG_ILLEGAL = 14
    WHEEL_TIMER_NOT_ENABLE = 15


class GetMessageStatus(IntEnum):
    """Outcome of a get, in RocketMQ's order."""

    FOUND = 0
    NO_MATCHED_MESSAGE = 1
    MESSAGE_WAS_REMOVING = 2
    OFFSET_FOUND_NULL = 3
    OFFSET_OVERFLOW_BADLY = 4
    OFFSET_OVERFLOW_ONE = 5
    OFFSET_TOO_SMALL = 6
    NO_MATCHED_LOGIC_QUEUE = 7
    NO_MESSAGE_IN_QUEUE = 8
    OFFSET_RESET = 9


class MessageInner(Struct, gc=False):
    """A message on its way into the log.

    ``born_host`` and ``store_host`` are packed addresses (8 or 20 bytes); their IPv6 bits of ``sys_flag`` are set by
    the store. ``properties`` is the encoded text, ``tags_code`` the hash of the tag, ``keys`` the words the index shall
    find it by (UNIQ_KEY first). ``wait`` is the WAIT property: False means that the reply does not wait for the disk.
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


class MessageBatch(Struct, gc=False):
    """A traditional batch: messages of one topic and queue that get consecutive offsets and lie in one file.

    ``messages``, ``tags_codes`` and ``keys`` are of the same length: what belongs to each message, as in MessageInner.
    They are kept by column because what is done to them is done to all at once.
    """

    topic: str
    queue_id: int
    messages: BatchMessages
    tags_codes: Sequence[int]
    keys: list[tuple[str, ...]] | KeyColumns
    born_timestamp: int
    born_host: bytes
    store_host: bytes
    sys_flag: int = 0
    reconsume_times: int = 0
    wait: bool = True


class AlikeRows(Protocol):
    """Records that are laid out alike, see trimq.protocol.alike_rows.PlacedRows."""

    @property
    def counts(self) -> Sequence[int]:
        """How many messages each queue has."""
        ...

    def __len__(self) -> int: ...

    def records(self, starts: Sequence[int], physical_offset: int, store_timestamp: int) -> memoryview:
        """Their bytes: ``starts`` has the next offset of each queue, ``physical_offset`` is the first one's.

        Asked for once, before ``units``; they are copied before other rows are asked.
        """
        ...

    def units(self, tags_code: int) -> bytes:
        """The queues' units, those of each queue side by side, in the order of ``counts``."""
        ...


class MessageRows(Struct, gc=False):
    """Ordinary messages of one topic that differ in nothing but what is known of each here; they lie in one file.

    ``queues``: those that ``rows`` counts messages of, in its order. Bodies and properties have one length. ``starts``
    are for the store to fill in: the offset of each queue's first message.
    """

    topic: str
    queues: Sequence[TopicQueue]
    rows: AlikeRows
    body_length: int
    properties_length: int
    tags_code: int
    keys: KeyColumns
    starts: Sequence[int] = ()


class PutMessageResult(Struct, gc=False):
    """What became of a put. Offsets are -1 unless the record is in the log.

    For a batch ``physical_offset`` and ``queue_offset`` are the first message's, ``offsets`` every message's physical
    offset. ``remark`` says why a put was refused and what to do.
    """

    status: PutMessageStatus
    physical_offset: int = -1
    queue_offset: int = -1
    size: int = 0
    store_timestamp: int = 0
    offsets: Sequence[int] | None = None
    remark: str = ""

    @property
    def ok(self) -> bool:
        """True where the record is in the log, whatever became of the waiting for disk and slave."""
        return self.status <= PutMessageStatus.SLAVE_NOT_AVAILABLE


PutCallback = Callable[[PutMessageResult], None]


def _nothing() -> None:
    """Release of a result that holds nothing."""


class GetMessageResult(Struct):
    """Outcome of a get: ``buffers`` are record bytes, adjacent records merged into one view.

    The views belong to mapped files: call ``release`` once, when they have been sent or are not needed any more.
    """

    status: GetMessageStatus
    next_begin_offset: int = 0
    min_offset: int = 0
    max_offset: int = 0
    buffers: list[Any] = []
    count: int = 0
    size: int = 0
    suggest_slave: bool = False
    release: Callable[[], None] = _nothing


class QueryMessageResult(Struct):
    """Records found by key, oldest first. ``release`` as in GetMessageResult."""

    buffers: list[Any] = []
    count: int = 0
    size: int = 0
    last_update_timestamp: int = 0
    last_update_physical_offset: int = 0
    release: Callable[[], None] = _nothing


class MessageFilter(Protocol):
    """Which messages of a queue a consumer wants."""

    needs_properties: bool

    def match_tags(self, tags_code: int) -> bool:
        """By the tag slot of the queue unit, without reading the record."""
        ...

    def match_record(self, properties: dict[str, str]) -> bool:
        """By the record's properties; asked only where ``needs_properties``."""
        ...


class Dispatcher(Protocol):
    """What the log hands its records to, in log order, once they may be read (queue units, index, waiting pulls).

    Implemented by the reput side. It keeps the one dispatch position: a record that does not begin there (live dispatch
    is off) is left to ReputMessageService, which reads it from the log.
    """

    def dispatch(  # noqa: PLR0913, PLR0917 - the hot path: a struct for each record would cost more than the call
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
        """One record. Never raises; never waits. ``tags_code`` of a delayed message is already its due time."""
        ...

    def dispatch_batch(self, batch: MessageBatch, result: PutMessageResult) -> None:
        """All records of a batch that was put, as ``dispatch`` for each of them: they lie side by side."""
        ...

    def dispatch_rows(self, rows: MessageRows, result: PutMessageResult) -> None:
        """The same of ordinary messages that were put together."""
        ...

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        """The log goes on at ``next_offset``: a BLANK fills [blank_offset, next_offset)."""
        ...
