"""Headers of QUERY_MESSAGE (12) and VIEW_MESSAGE_BY_ID (33)."""

from msgspec import field

from trimq.protocol.headers.base import I32, I64, Header


class QueryMessageRequestHeader(Header):
    """QUERY_MESSAGE (12): times in ms; ``unique_key_query`` limits the result to 32 messages."""

    topic: str
    key: str
    max_num: I32
    begin_timestamp: I64
    end_timestamp: I64
    unique_key_query: bool | None = field(name="_UNIQUE_KEY_QUERY", default=None)
    index_type: str | None = None
    last_key: str | None = None


class QueryMessageResponseHeader(Header):
    """The end of the index: store time and commit-log offset of its newest entry."""

    index_last_update_timestamp: I64
    index_last_update_phyoffset: I64


class ViewMessageRequestHeader(Header):
    """VIEW_MESSAGE_BY_ID (33): commit-log offset."""

    offset: I64
    topic: str | None = None
