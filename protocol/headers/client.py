"""Headers of client management: 34, 35, 38, 40, and of requests from a broker to its clients: 220, 221, 307, 309."""

from msgspec import field

from trimq.protocol.headers.base import I32, I64, Header


class HeartbeatResponseHeader(Header):
    """Reply to HEART_BEAT (34). ``trimq_msgpack``: whether this broker accepts msgpack headers."""

    is_support_heart_beat_v2: bool = field(name="IS_SUPPORT_HEART_BEAT_V2", default=True)
    is_sub_change: bool = field(name="IS_SUB_CHANGE", default=False)
    trimq_msgpack: bool | None = field(name="TRIMQ_MSGPACK", default=None)


class UnregisterClientRequestHeader(Header):
    """UNREGISTER_CLIENT (35). The wire spells it ``clientID``."""

    client_id: str = field(name="clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class GetConsumerListByGroupRequestHeader(Header):
    """GET_CONSUMER_LIST_BY_GROUP (38)."""

    consumer_group: str


class NotifyConsumerIdsChangedRequestHeader(Header):
    """NOTIFY_CONSUMER_IDS_CHANGED (40), broker to client."""

    consumer_group: str


class ResetOffsetRequestHeader(Header):
    """INVOKE_BROKER_TO_RESET_OFFSET (222) and RESET_CONSUMER_CLIENT_OFFSET (220). -1: all queues, or the end."""

    topic: str
    group: str
    timestamp: I64
    is_force: bool | None = None
    queue_id: I32 | None = None
    offset: I64 | None = None


class GetConsumerStatusRequestHeader(Header):
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223) and GET_CONSUMER_STATUS_FROM_CLIENT (221)."""

    topic: str
    group: str
    client_addr: str | None = None


class GetConsumerRunningInfoRequestHeader(Header):
    """GET_CONSUMER_RUNNING_INFO (307), forwarded to the client that it names."""

    consumer_group: str
    client_id: str
    jstack_enable: bool | None = None


class ConsumeMessageDirectlyRequestHeader(Header):
    """CONSUME_MESSAGE_DIRECTLY (309), forwarded to a client with the message as its body."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
    topic_sys_flag: I32 | None = None
    group_sys_flag: I32 | None = None
