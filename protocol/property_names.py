"""Names of message properties. Made from properties.toml by ``python -m trimq.protocol.generate_properties``."""

from enum import StrEnum
from typing import Final


class PropertyName(StrEnum):
    """Names that mean something to the broker or to clients (RocketMQ's MessageConst)."""

    KEYS = "KEYS"
    TAGS = "TAGS"
    UNIQ_KEY = "UNIQ_KEY"
    WAIT = "WAIT"
    DELAY = "DELAY"
    TIMER_DELAY_SEC = "TIMER_DELAY_SEC"
    TIMER_DELAY_MS = "TIMER_DELAY_MS"
    TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
    TIMER_OUT_MS = "TIMER_OUT_MS"
    TIMER_ENQUEUE_MS = "TIMER_ENQUEUE_MS"
    TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS"
    TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
    TIMER_ROLL_LABEL = "TIMER_ROLL_LABEL"
    TIMER_DEL_UNIQKEY = "TIMER_DEL_UNIQKEY"
    TIMER_DELAY_LEVEL = "TIMER_DELAY_LEVEL"
    REAL_TOPIC = "REAL_TOPIC"
    REAL_QID = "REAL_QID"
    RETRY_TOPIC = "RETRY_TOPIC"
    ORIGIN_GROUP = "ORIGIN_GROUP"
    ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
    RECONSUME_TIME = "RECONSUME_TIME"
    MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
    DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"
    DLQ_ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_MESSAGE_ID"
    CONSUME_START_TIME = "CONSUME_START_TIME"
    MIN_OFFSET = "MIN_OFFSET"
    MAX_OFFSET = "MAX_OFFSET"
    TRAN_MSG = "TRAN_MSG"
    PGROUP = "PGROUP"
    TRANSACTION_ID = "__transactionId__"
    TRANS_OFFSET = "TRANS_OFFSET"
    TRAN_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
    TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
    CHECK_IMMUNITY_TIME = "CHECK_IMMUNITY_TIME_IN_SECONDS"
    MSG_REGION = "MSG_REGION"
    TRACE_ON = "TRACE_ON"
    CLUSTER = "CLUSTER"
    SHARDING_KEY = "__SHARDINGKEY"
    INSTANCE_ID = "INSTANCE_ID"
    BUYER_ID = "BUYER_ID"
    TRANSFER_FLAG = "TRANSFER_FLAG"
    CORRECTION_FLAG = "CORRECTION_FLAG"
    MQ2_FLAG = "MQ2_FLAG"
    EXTEND_UNIQ_INFO = "EXTEND_UNIQ_INFO"
    DUP_INFO = "DUP_INFO"
    CORRELATION_ID = "CORRELATION_ID"
    REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
    TTL = "TTL"
    MSG_TYPE = "MSG_TYPE"
    ARRIVE_TIME = "ARRIVE_TIME"
    PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
    POP_CK = "POP_CK"
    POP_CK_OFFSET = "POP_CK_OFFSET"
    FIRST_POP_TIME = "1ST_POP_TIME"
    INNER_NUM = "INNER_NUM"
    INNER_BASE = "INNER_BASE"
    INNER_MULTI_DISPATCH = "INNER_MULTI_DISPATCH"
    INNER_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET"
    LITE_TOPIC = "__LITE_TOPIC"
    PRIORITY = "_SYS_MSG_PRIORITY_"
    FORWARD_QUEUE_ID = "PROPERTY_FORWARD_QUEUE_ID"
    REDIRECT = "REDIRECT"
    TRACE_CONTEXT = "TRACE_CONTEXT"
    BORN_HOST = "__BORNHOST"
    BORN_TIMESTAMP = "BORN_TIMESTAMP"
    CRC32 = "__CRC32#"
    TRANSIENT_PREFIX = "__RMQ.TRANSIENT."
    TRANSIENT_TOPIC_CONFIG = "__RMQ.TRANSIENT.TOPIC_SYS_FLAG"
    TRANSIENT_GROUP_CONFIG = "__RMQ.TRANSIENT.GROUP_SYS_FLAG"
    START_DELIVER_TIME = "__STARTDELIVERTIME"
    TIMER_ENGINE_TYPE = "E_T"


FAST_NAMES: Final = frozenset(
    {
        "ARRIVE_TIME",
        "BORN_TIMESTAMP",
        "BUYER_ID",
        "CONSUME_START_TIME",
        "CORRECTION_FLAG",
        "CORRELATION_ID",
        "DLQ_ORIGIN_MESSAGE_ID",
        "DLQ_ORIGIN_TOPIC",
        "EXTEND_UNIQ_INFO",
        "INSTANCE_ID",
        "KEYS",
        "MAX_OFFSET",
        "MAX_RECONSUME_TIMES",
        "MIN_OFFSET",
        "MQ2_FLAG",
        "MSG_TYPE",
        "ORIGIN_GROUP",
        "ORIGIN_MESSAGE_ID",
        "PGROUP",
        "RECONSUME_TIME",
        "REPLY_TO_CLIENT",
        "RETRY_TOPIC",
        "TAGS",
        "TRACE_CONTEXT",
        "TRANSFER_FLAG",
        "TTL",
        "UNIQ_KEY",
        "WAIT",
        "__BORNHOST",
        "__SHARDINGKEY",
        "__STARTDELIVERTIME",
        "__transactionId__",
    }
)
"""A message that has none but these may go the fast path."""

SLOW_NAMES: Final = frozenset(
    {
        "1ST_POP_TIME",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
        "CLUSTER",
        "DELAY",
        "DUP_INFO",
        "E_T",
        "INNER_BASE",
        "INNER_MULTI_DISPATCH",
        "INNER_MULTI_QUEUE_OFFSET",
        "INNER_NUM",
        "MSG_REGION",
        "POP_CK",
        "POP_CK_OFFSET",
        "PROPERTY_FORWARD_QUEUE_ID",
        "PUSH_REPLY_TIME",
        "REAL_QID",
        "REAL_TOPIC",
        "REDIRECT",
        "TIMER_DELAY_LEVEL",
        "TIMER_DELAY_MS",
        "TIMER_DELAY_SEC",
        "TIMER_DELIVER_MS",
        "TIMER_DEL_UNIQKEY",
        "TIMER_DEQUEUE_MS",
        "TIMER_ENQUEUE_MS",
        "TIMER_OUT_MS",
        "TIMER_ROLL_LABEL",
        "TIMER_ROLL_TIMES",
        "TRACE_ON",
        "TRANSACTION_CHECK_TIMES",
        "TRANS_OFFSET",
        "TRAN_MSG",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "_SYS_MSG_PRIORITY_",
        "__CRC32#",
        "__LITE_TOPIC",
        "__RMQ.TRANSIENT.",
        "__RMQ.TRANSIENT.GROUP_SYS_FLAG",
        "__RMQ.TRANSIENT.TOPIC_SYS_FLAG",
    }
)
"""A message that has one of these goes the full path."""

NOT_IN_A_BATCH: Final = frozenset(
    {
        "DELAY",
        "INNER_NUM",
        "TIMER_DELAY_MS",
        "TIMER_DELAY_SEC",
        "TIMER_DELIVER_MS",
        "TRAN_MSG",
    }
)
"""A message of a batch may not have these."""

SLOW_PREFIXES: Final = ("__", "INNER_", "POP_")
"""A name that is not listed and begins so goes the full path. Other names that are not listed are users'."""
