"""Headers of sending: 10, 310, 320 (and 324, 325), 326, 36, and 370."""

from msgspec import Struct, field

from trimq.protocol.headers.base import I32, I64, Header


class SendMessageRequestHeader(Header):
    """SEND_MESSAGE (10): the original form, with full field names."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: I32
    queue_id: I32
    sys_flag: I32
    born_timestamp: I64
    flag: I32
    properties: str | None = None
    reconsume_times: I32 | None = None
    unit_mode: bool | None = None
    batch: bool | None = None
    max_reconsume_times: I32 | None = None


class SendMessageRequestHeaderV2(Struct, gc=False):
    """SEND_MESSAGE_V2 (310), SEND_BATCH_MESSAGE (320): the same fields under one-letter names, in the order a to n."""

    producer_group: str = field(name="a")
    topic: str = field(name="b")
    default_topic: str = field(name="c")
    default_topic_queue_nums: I32 = field(name="d")
    queue_id: I32 = field(name="e")
    sys_flag: I32 = field(name="f")
    born_timestamp: I64 = field(name="g")
    flag: I32 = field(name="h")
    properties: str | None = field(name="i", default=None)
    reconsume_times: I32 | None = field(name="j", default=None)
    unit_mode: bool | None = field(name="k", default=None)
    max_reconsume_times: I32 | None = field(name="l", default=None)
    batch: bool | None = field(name="m", default=None)
    broker_name: str | None = field(name="n", default=None)


class SendMessageResponseHeader(Struct, kw_only=True):
    """Reply to a send; ``transaction_id`` is the message's UNIQ_KEY."""

    msg_id: str = field(name="msgId")
    queue_id: I32 = field(name="queueId")
    queue_offset: I64 = field(name="queueOffset")
    transaction_id: str | None = field(name="transactionId", default=None)
    batch_uniq_id: str | None = field(name="batchUniqId", default=None)
    recall_handle: str | None = field(name="recallHandle", default=None)
    msg_region: str = field(name="MSG_REGION", default="DefaultRegion")
    trace_on: str = field(name="TRACE_ON", default="true")


class ReplyMessageRequestHeader(Header):
    """PUSH_REPLY_MESSAGE_TO_CLIENT (326), from the broker to the client that waits for a reply.

    The fields of the reply's send, and ``born_host`` and ``store_host`` as "ip:port".
    """

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: I32
    queue_id: I32
    sys_flag: I32
    born_timestamp: I64
    flag: I32
    properties: str | None = None
    reconsume_times: I32 | None = None
    unit_mode: bool | None = False
    born_host: str = ""
    store_host: str = ""
    store_timestamp: I64 = 0


class ConsumerSendMsgBackRequestHeader(Header):
    """CONSUMER_SEND_MSG_BACK (36): ``offset`` is the message's commit-log offset."""

    offset: I64
    group: str
    delay_level: I32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool | None = None
    max_reconsume_times: I32 | None = None


class RecallMessageRequestHeader(Header):
    """RECALL_MESSAGE (370). ``recall_handle`` is that of the reply to the send."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


class RecallMessageResponseHeader(Header):
    """Reply to RECALL_MESSAGE: ``msg_id`` is the UNIQ_KEY of the message."""

    msg_id: str
