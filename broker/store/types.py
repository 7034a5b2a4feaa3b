"""Results of puts, gets and queries. What is put into the store: log/puts.py."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from msgspec import Struct


class PutMessageStatus(IntEnum):
    """Result of a put. The first four mean that the record is in the log."""

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
    """Result of a get, in RocketMQ's order."""

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


class PutMessageResult(Struct, gc=False):
    """Result of a put. Offsets are -1 unless the record is in the log.

    For a batch ``physical_offset`` and ``queue_offset`` are those of the first message, and ``offsets`` holds every
    message's physical offset. ``remark`` says why a put was refused and what to do.
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
        """True if the record is in the log, even if the wait for disk or slave has failed."""
        return self.status <= PutMessageStatus.SLAVE_NOT_AVAILABLE


PutCallback = Callable[[PutMessageResult], None]


def _nothing() -> None:
    """The ``release`` of a result that holds no files."""


class GetMessageResult(Struct):
    """Result of a get: ``buffers`` are the bytes of records, with adjacent records merged into one view.

    The views belong to mapped files: call ``release`` once, when they have been sent or are no longer needed.
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

    terms: int
    """How many conditions ``match_record`` evaluates at most: with many, fewer records are evaluated at once."""

    def match_tags(self, tags_code: int) -> bool:
        """Match by the tag slot of the queue unit, without reading the record."""
        ...

    @property
    def match_record(self) -> Callable[[bytes], bool]:
        """Match by the record's properties, encoded as in the record; called only if ``needs_properties``."""
        ...


class TierTrouble(NamedTuple):
    """Why nothing is uploaded to the tier. ``code``: a word for programs; ``text``: what it is, and what to do."""

    code: str
    text: str
