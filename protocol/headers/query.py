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
    """VIEW_MESSAGE_BY_ID (33): commit-log offset.

    ``trimq_sha256`` is TriMQ's own: a slave asks whether the record at the offset has this hash (hexadecimal). The
    reply then has ViewMessageResponseHeader, and no record, which may be one that no client may read yet.
    """

    offset: I64
    topic: str | None = None
    trimq_sha256: str | None = None


class ViewMessageResponseHeader(Header):
    """The reply to ``trimq_sha256``: "true", "false", or "expired" if the log begins behind the offset."""

    trimq_same: str
