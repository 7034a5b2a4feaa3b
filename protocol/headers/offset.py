"""Headers of consumer offsets and queue limits: 14, 15, 29, 30, 31, 32."""

from trimq.protocol.headers.base import I32, I64, Header


class QueryConsumerOffsetRequestHeader(Header):
    """QUERY_CONSUMER_OFFSET (14)."""

    consumer_group: str
    topic: str
    queue_id: I32
    set_zero_if_not_found: bool | None = None


class OffsetResponseHeader(Header):
    """Reply to 14, 29, 30 and 31: a single offset."""

    offset: I64


class UpdateConsumerOffsetRequestHeader(Header):
    """UPDATE_CONSUMER_OFFSET (15). -1 is stored, and read as not found."""

    consumer_group: str
    topic: str
    queue_id: I32
    commit_offset: I64


class SearchOffsetRequestHeader(Header):
    """SEARCH_OFFSET_BY_TIMESTAMP (29); ``boundary_type`` LOWER (default) or UPPER."""

    topic: str
    queue_id: I32
    timestamp: I64
    boundary_type: str | None = None


class GetMaxOffsetRequestHeader(Header):
    """GET_MAX_OFFSET (30)."""

    topic: str
    queue_id: I32
    committed: bool | None = None


class GetMinOffsetRequestHeader(Header):
    """GET_MIN_OFFSET (31)."""

    topic: str
    queue_id: I32


class GetEarliestMsgStoretimeRequestHeader(Header):
    """GET_EARLIEST_MSG_STORETIME (32)."""

    topic: str
    queue_id: I32


class GetEarliestMsgStoretimeResponseHeader(Header):
    """Store time in ms, -1 for an empty queue."""

    timestamp: I64
