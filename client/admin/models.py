"""Results of administration for which ``trimq.protocol.body`` has no struct. Timestamps are in ms since the epoch."""

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
    """A queue's first offset, the offset of its next message, and the store time of its last message.

    Only a TriMQ broker whose tier has messages of the queue sends the last three: the first offset in its local store,
    the first one in the tier, and the one behind the last message in the tier.
    """

    min_offset: int = 0
    max_offset: int = 0
    last_update_timestamp: int = 0
    local_min_offset: int | None = None
    tier_min_offset: int | None = None
    tier_max_offset: int | None = None


class OffsetWrapper(Body):
    """A group's progress in a queue. ``broker_offset`` is the queue's end, ``consumer_offset`` the committed offset.

    ``pull_offset`` is the offset up to which messages were pulled, ``last_timestamp`` the store time of the last
    consumed message.
    """

    broker_offset: int = 0
    consumer_offset: int = 0
    pull_offset: int = 0
    last_timestamp: int = 0

    @property
    def lag(self) -> int:
        """The number of stored messages that the group has not consumed."""
        return self.broker_offset - self.consumer_offset


class ConsumeStats(Struct):
    """A group's progress in its queues, and the messages that it consumes per second."""

    consume_tps: float
    offsets: dict[MessageQueue, OffsetWrapper]

    @property
    def lag(self) -> int:
        """The number of stored messages that the group has not consumed, in all queues."""
        return sum(wrapper.lag for wrapper in self.offsets.values())


class Connection(Body):
    """A client's connection to a broker."""

    client_id: str = ""
    client_addr: str = ""
    language: str | None = None
    version: int = 0


class ConsumerConnection(Body):
    """The members of a consumer group, and their subscriptions by topic."""

    connection_set: list[Connection] = field(default_factory=list)
    subscription_table: dict[str, SubscriptionData] = field(default_factory=dict)
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None


class ProducerConnection(Body):
    """The members of a producer group."""

    connection_set: list[Connection] = field(default_factory=list)


class ProducerInfo(Body):
    """A producer that is connected to a broker."""

    client_id: str = ""
    remote_ip: str = field(name="remoteIP", default="")
    language: str | None = None
    version: int = 0
    last_update_timestamp: int = 0


class ConsumerRunningInfo(Struct):
    """The state of a consumer as it reports it: settings, subscriptions, state by queue, and rates by topic."""

    properties: dict[str, str]
    subscriptions: list[SubscriptionData]
    queues: dict[MessageQueue, dict[str, Any]]
    status: dict[str, dict[str, Any]]
    stacks: str | None = None


class BrokerStatsItem(Body):
    """A counter over a period: its sum, its rate per second, and its average per operation."""

    sum: int = 0
    tps: float = 0.0
    avgpt: float = 0.0


class BrokerStatsData(Body):
    """A counter over the last minute, hour and day."""

    stats_minute: BrokerStatsItem = field(default_factory=BrokerStatsItem)
    stats_hour: BrokerStatsItem = field(default_factory=BrokerStatsItem)
    stats_day: BrokerStatsItem = field(default_factory=BrokerStatsItem)


class QueueUnit(Body):
    """A unit of a consume queue: the commit log offset and size of its record, and the code of its tag.

    ``eval`` is the result of the group's filter, where one was given.
    """

    physic_offset: int = 0
    physic_size: int = 0
    tags_code: int = 0
    extend_data_json: str | None = None
    bit_map: str | None = None
    eval: bool = False
    msg: str | None = None


class QueueUnits(Body):
    """Units of a consume queue, and the bounds of the queue."""

    min_queue_index: int = 0
    max_queue_index: int = 0
    filter_data: str | None = None
    queue_data: list[QueueUnit] = field(default_factory=list)


class TimeSpan(Body):
    """Store times of a queue's first and last message, and of the last message that a group has consumed.

    ``delay_time`` is how far the group is behind, in milliseconds.
    """

    message_queue: MessageQueue
    min_time_stamp: int = 0
    max_time_stamp: int = 0
    consume_time_stamp: int = 0
    delay_time: int = 0


def queue_table(value: Any) -> dict[MessageQueue, Any]:
    """A table by queue, from one whose keys are JSON objects, as fastjson writes them."""
    found = {}
    for key, item in (value or {}).items():
        fields = lenient_json.loads(key)
        queue = MessageQueue(topic=fields["topic"], broker_name=fields["brokerName"], queue_id=int(fields["queueId"]))
        found[queue] = item
    return found


def as_kind(value: Any, kind: type[Any]) -> Any:
    """A JSON object as a struct; null counts as a missing field, so that the field's default applies."""
    return msgspec.convert({key: item for key, item in value.items() if item is not None}, kind, strict=False)
