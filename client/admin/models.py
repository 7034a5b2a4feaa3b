"""What administration answers, where trimq.protocol.body has no struct for it."""

from typing import Any

import msgspec
from msgspec import Struct, field

from trimq.protocol import lenient_json
from trimq.protocol.body import Body, MessageQueue, SubscriptionData

__all__ = [
    "BrokerStatsData",
    "BrokerStatsItem",
    "Connection",
    "ConsumeStats",
    "ConsumerConnection",
    "ConsumerRunningInfo",
    "GroupList",
    "OffsetWrapper",
    "ProducerConnection",
    "ProducerInfo",
    "QueueUnit",
    "QueueUnits",
    "TimeSpan",
    "TopicOffset",
    "queue_table",
]


class GroupList(Body):
    """Names of groups."""

    group_list: list[str] = field(default_factory=list)


class TopicOffset(Body):
    """A queue's bounds, and when its last message was stored (ms)."""

    min_offset: int = 0
    max_offset: int = 0
    last_update_timestamp: int = 0


class OffsetWrapper(Body):
    """How far a group is in a queue; ``last_timestamp`` (ms) is the store time of the last consumed message."""

    broker_offset: int = 0
    consumer_offset: int = 0
    pull_offset: int = 0
    last_timestamp: int = 0

    @property
    def lag(self) -> int:
        """Messages that are stored and not consumed."""
        return self.broker_offset - self.consumer_offset


class ConsumeStats(Struct):
    """How far a group is in its queues."""

    consume_tps: float
    offsets: dict[MessageQueue, OffsetWrapper]

    @property
    def lag(self) -> int:
        """Messages that are stored and not consumed, in all queues."""
        return sum(wrapper.lag for wrapper in self.offsets.values())


class Connection(Body):
    """A client's connection to a broker."""

    client_id: str = ""
    client_addr: str = ""
    language: str | None = None
    version: int = 0


class ConsumerConnection(Body):
    """The members of a consumer group."""

    connection_set: list[Connection] = field(default_factory=list)
    subscription_table: dict[str, SubscriptionData] = field(default_factory=dict)
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None


class ProducerConnection(Body):
    """The members of a producer group."""

    connection_set: list[Connection] = field(default_factory=list)


class ProducerInfo(Body):
    """One producer that a broker knows."""

    client_id: str = ""
    remote_ip: str = field(name="remoteIP", default="")
    language: str | None = None
    version: int = 0
    last_update_timestamp: int = 0


class ConsumerRunningInfo(Struct):
    """What a consumer tells of itself."""

    properties: dict[str, str]
    subscriptions: list[SubscriptionData]
    queues: dict[MessageQueue, dict[str, Any]]
    status: dict[str, dict[str, Any]]
    stacks: str | None = None


class BrokerStatsItem(Body):
    """A counter over a time: its sum, its rate per second and its average per operation."""

    sum: int = 0
    tps: float = 0.0
    avgpt: float = 0.0


class BrokerStatsData(Body):
    """A counter over the last minute, hour and day."""

    stats_minute: BrokerStatsItem = field(default_factory=BrokerStatsItem)
    stats_hour: BrokerStatsItem = field(default_factory=BrokerStatsItem)
    stats_day: BrokerStatsItem = field(default_factory=BrokerStatsItem)


class QueueUnit(Body):
    """An entry of a consume queue: where its record lies, its size, and its tag's code."""

    physic_offset: int = 0
    physic_size: int = 0
    tags_code: int = 0
    extend_data_json: str | None = None
    bit_map: str | None = None
    eval: bool = False
    msg: str | None = None


class QueueUnits(Body):
    """Entries of a consume queue, and its bounds."""

    min_queue_index: int = 0
    max_queue_index: int = 0
    filter_data: str | None = None
    queue_data: list[QueueUnit] = field(default_factory=list)


class TimeSpan(Body):
    """Store times (ms) of a queue: of its first and last message, and of the last that a group has consumed."""

    message_queue: MessageQueue
    min_time_stamp: int = 0
    max_time_stamp: int = 0
    consume_time_stamp: int = 0
    delay_time: int = 0


def queue_table(value: Any) -> dict[MessageQueue, Any]:
    """A table by queue, from fastjson's objects as keys."""
    found = {}
    for key, item in (value or {}).items():
        fields = lenient_json.loads(key)
        queue = MessageQueue(topic=fields["topic"], broker_name=fields["brokerName"], queue_id=int(fields["queueId"]))
        found[queue] = item
    return found


def as_kind(value: Any, kind: type[Any]) -> Any:
    """A JSON value as a struct."""
    return msgspec.convert({key: item for key, item in value.items() if item is not None}, kind, strict=False)
