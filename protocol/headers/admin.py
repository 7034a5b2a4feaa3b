"""Headers of administration: topics, groups, broker statistics."""

from trimq.protocol.headers.base import I32, I64, Header


class CreateTopicRequestHeader(Header):
    """UPDATE_AND_CREATE_TOPIC (17). ``attributes``: ``+key=value,-key``."""

    topic: str
    default_topic: str
    read_queue_nums: I32
    write_queue_nums: I32
    perm: I32
    topic_filter_type: str
    topic_sys_flag: I32 | None = None
    order: bool = False
    attributes: str | None = None
    force: bool | None = None


class TopicRequestHeader(Header):
    """Only a topic's name: 215, 202, 300, 351."""

    topic: str
    lo: bool | None = None


class GroupRequestHeader(Header):
    """A group's name under ``group``: 343, 352."""

    group: str


class ConsumerGroupRequestHeader(Header):
    """A group's name under ``consumerGroup``: 203."""

    consumer_group: str


class ProducerGroupRequestHeader(Header):
    """A group's name under ``producerGroup``: 204."""

    producer_group: str


class DeleteSubscriptionGroupRequestHeader(Header):
    """DELETE_SUBSCRIPTIONGROUP (207)."""

    group_name: str
    clean_offset: bool | None = None


class GetConsumeStatsRequestHeader(Header):
    """GET_CONSUME_STATS (208); ``topic_list`` is separated by semicolons."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class GetBrokerConsumeStatsRequestHeader(Header):
    """GET_BROKER_CONSUME_STATS (317)."""

    is_order: bool


class QueryConsumeTimeSpanRequestHeader(Header):
    """QUERY_CONSUME_TIME_SPAN (303)."""

    topic: str
    group: str


class ViewBrokerStatsDataRequestHeader(Header):
    """VIEW_BROKER_STATS_DATA (315)."""

    stats_name: str
    stats_key: str


class QueryConsumeQueueRequestHeader(Header):
    """QUERY_CONSUME_QUEUE (321)."""

    topic: str
    queue_id: I32
    index: I64
    count: I32
    consumer_group: str | None = None


class QuerySubscriptionByConsumerRequestHeader(Header):
    """QUERY_SUBSCRIPTION_BY_CONSUMER (345)."""

    group: str
    topic: str


class CloneGroupOffsetRequestHeader(Header):
    """CLONE_GROUP_OFFSET (314)."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool | None = None


class QueryCorrectionOffsetRequestHeader(Header):
    """QUERY_CORRECTION_OFFSET (308)."""

    topic: str
    compare_group: str = ""
    filter_groups: str | None = None


class UpdateGroupForbiddenRequestHeader(Header):
    """UPDATE_AND_GET_GROUP_FORBIDDEN (353)."""

    group: str
    topic: str
    readable: bool | None = None


class VersionResponseHeader(Header):
    """Reply to GET_BROKER_CONFIG (26): DataVersion as JSON text."""

    version: str


class ExchangeHAInfoResponseHeader(Header):
    """EXCHANGE_BROKER_HA_INFO (906), reply of a master."""

    master_ha_address: str | None = None
    master_flush_offset: I64 | None = None
    master_address: str | None = None
