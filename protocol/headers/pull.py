"""Headers of pulling: 11 and 361."""

from msgspec import Struct, field

from trimq.protocol.headers.base import I32, I64, Header


class PullMessageRequestHeader(Struct, rename="camel", gc=False):
    """PULL_MESSAGE (11), LITE_PULL_MESSAGE (361). ``sys_flag``: see trimq.protocol.sysflag, PULL_*."""

    consumer_group: str
    topic: str
    queue_id: I32
    queue_offset: I64
    max_msg_nums: I32
    sys_flag: I32
    commit_offset: I64
    suspend_timeout_millis: I64
    sub_version: I64
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: I32 | None = None
    request_source: I32 | None = None
    proxy_froward_client_id: str | None = field(name="proxyFrowardClientId", default=None)


class PullMessageResponseHeader(Header):
    """Reply to a pull. The four mandatory fields are sent with each of the codes 0, 19, 20 and 21."""

    suggest_which_broker_id: I64
    next_begin_offset: I64
    min_offset: I64
    max_offset: I64
    offset_delta: I64 | None = None
    topic_sys_flag: I32 | None = None
    group_sys_flag: I32 | None = None
    forbidden_type: I32 | None = None
