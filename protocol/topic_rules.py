"""Names of topics and groups: legal and reserved ones (RocketMQ's TopicValidator, MixAll)."""

import re
from typing import Final

MAX_TOPIC_LENGTH: Final = 127
MAX_RETRY_TOPIC_LENGTH: Final = 255
MAX_GROUP_LENGTH: Final = 255
AUTO_CREATE_TOPIC: Final = "TBW102"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
TRANS_HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
TRANS_OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANS_CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT: Final = "OFFSET_MOVED_EVENT"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
SYSTEM_PREFIX: Final = "rmq_sys_"
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"

SYSTEM_TOPICS: Final = frozenset(
    {
        AUTO_CREATE_TOPIC,
        SCHEDULE_TOPIC,
        BENCHMARK_TOPIC,
        TRANS_HALF_TOPIC,
        TRANS_OP_HALF_TOPIC,
        TRANS_CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_EVENT,
        TRACE_TOPIC,
        "CHECKPOINT_TOPIC",
    }
)
NO_SEND_TOPICS: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        TRANS_HALF_TOPIC,
        TRANS_OP_HALF_TOPIC,
        TRANS_CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_EVENT,
        TIMER_TOPIC,  # RocketMQ takes them: the timer then delivers to any topic that such a message names
    }
)
SYSTEM_GROUPS: Final = (
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    "CID_RMQ_SYS_TRANS",
)

_LEGAL = re.compile(r"[%|a-zA-Z0-9_-]+\Z")


def topic_problem(topic: str) -> str | None:
    """Why ``topic`` is not a legal name for a topic that clients send to; None if it is."""
    if not topic.strip():
        return "the topic is blank"
    if not _LEGAL.match(topic):
        return f"the topic {topic[:200]!r} has characters other than % | a-z A-Z 0-9 _ -"
    limit = MAX_RETRY_TOPIC_LENGTH if topic.startswith(RETRY_PREFIX) else MAX_TOPIC_LENGTH
    if len(topic) > limit:
        return f"the topic is {len(topic)} characters long, the limit is {limit}"
    return None


def group_problem(group: str) -> str | None:
    """Why ``group`` is not a legal name for a group; None if it is."""
    if not group.strip():
        return "the group is blank"
    if len(group) > MAX_GROUP_LENGTH:
        return f"the group is {len(group)} characters long, the limit is {MAX_GROUP_LENGTH}"
    if not _LEGAL.match(group):
        return f"the group {group[:200]!r} has characters other than % | a-z A-Z 0-9 _ -"
    return None


def is_system_topic(topic: str) -> bool:
    """True for topics of the broker itself."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_PREFIX)


def retry_topic(group: str) -> str:
    """The topic in which a group's messages wait for a retry."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """The topic that a group's messages go to after their last retry."""
    return DLQ_PREFIX + group
