"""JSON bodies of requests and replies.

Structs ignore unknown fields and have RocketMQ's defaults for missing ones. Lists and maps that TriMQ's own code
iterates are never null. ``encode_json`` writes compact JSON, which the route parser of the Go client requires.
"""

from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from trimq.protocol import lenient_json
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError

T = TypeVar("T")

PERM_PRIORITY = 8
PERM_READ = 4
PERM_WRITE = 2
PERM_INHERIT = 1


class Body(Struct, rename="camel", kw_only=True):
    """Base of the JSON bodies."""


class FrozenBody(Struct, rename="camel", kw_only=True, frozen=True):
    """Base of the bodies that are stored in tables: a reference to one stays valid, since it cannot change."""


class DataVersion(Body):
    """The version of a table. Two versions differ if any of the three numbers differs.

    ``state_version`` is the epoch of the master that has made the change; 0 without controllers.
    """

    counter: int = 0
    state_version: int = 0
    timestamp: int = 0

    def next(self, wall_ms: int) -> "DataVersion":
        """The version after a change made at ``wall_ms``."""
        return DataVersion(
            counter=self.counter + 1,
            state_version=self.state_version,
            timestamp=wall_ms,
        )

    def led(self, epoch: int, wall_ms: int) -> "DataVersion":
        """The version with which the master of an epoch begins."""
        return DataVersion(counter=self.counter + 1, state_version=epoch, timestamp=wall_ms)


class TopicConfig(FrozenBody, frozen=True):
    """One topic on one broker. ``perm``: PERM_* bits."""

    topic_name: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = PERM_READ | PERM_WRITE
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] = {}


class SubscriptionGroupConfig(FrozenBody, frozen=True):
    """One consumer group on one broker."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    group_retry_policy: dict[str, Any] = field(default_factory=lambda: {"type": "CUSTOMIZED"})
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: int = 0
    consume_timeout_minute: int = 15
    attributes: dict[str, str] = {}


class SubscriptionData(Body):
    """A group's subscription to a topic. ``code_set``: hashes of the tags in ``tags_set``; both empty: all messages."""

    topic: str
    sub_string: str = "*"
    tags_set: list[str] = []
    code_set: list[int] = []
    sub_version: int = 0
    expression_type: str | None = "TAG"
    class_filter_mode: bool = False


class TopicConfigList(Body):
    """Body of UPDATE_AND_CREATE_TOPIC_LIST (18)."""

    topic_config_list: list[TopicConfig] = field(default_factory=list)


class SubscriptionGroupList(Body):
    """Body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225)."""

    group_config_list: list[SubscriptionGroupConfig] = field(default_factory=list)


class CheckClientRequestBody(Body):
    """Body of CHECK_CLIENT_CONFIG (46)."""

    client_id: str = ""
    group: str = ""
    namespace: str | None = None
    subscription_data: SubscriptionData | None = None


class ConsumerData(Body):
    """A consumer group in a heartbeat."""

    group_name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionData] = []
    unit_mode: bool = False


class ProducerData(Body):
    """A producer group in a heartbeat."""

    group_name: str


class HeartbeatData(Body):
    """Body of HEART_BEAT (34)."""

    client_id: str = field(name="clientID")
    producer_data_set: list[ProducerData] = []
    consumer_data_set: list[ConsumerData] = []
    heartbeat_fingerprint: int = 0
    without_sub: bool = field(name="withoutSub", default=False)


class MessageQueue(Struct, rename="camel", frozen=True, order=True, kw_only=True):
    """A queue of a topic on a broker."""

    topic: str
    broker_name: str
    queue_id: int


class LockBatchBody(Body):
    """Body of LOCK_BATCH_MQ (41) and UNLOCK_BATCH_MQ (42)."""

    consumer_group: str
    client_id: str
    only_this_broker: bool = False
    mq_set: list[MessageQueue] = []


class SetMessageRequestModeRequestBody(Body):
    """Body of SET_MESSAGE_REQUEST_MODE (401), and an entry of messageRequestMode.json.

    ``mode`` is PULL or POP; ``pop_share_queue_num``: how many of the following clients share a POP client's queues.
    """

    topic: str
    consumer_group: str
    mode: str = "PULL"
    pop_share_queue_num: int = 0


class QueryAssignmentRequestBody(Body):
    """Body of QUERY_ASSIGNMENT (400). ``strategy_name`` is AVG or AVG_BY_CIRCLE."""

    topic: str
    consumer_group: str
    message_model: str
    client_id: str = ""
    strategy_name: str = ""


class MessageQueueAssignment(Body):
    """A queue assigned to a client, and how it gets the messages: PULL or POP."""

    message_queue: MessageQueue
    mode: str = "PULL"


class QueryAssignmentResponseBody(Body):
    """Body of the reply to QUERY_ASSIGNMENT (400). Without assignments the client keeps those that it has."""

    message_queue_assignments: list[MessageQueueAssignment] | msgspec.UnsetType = msgspec.UNSET


class BrokerData(Body):
    """The members of one broker name: broker id to address."""

    cluster: str = ""
    broker_name: str = ""
    broker_addrs: dict[str, str] = {}
    enable_acting_master: bool = False


class QueueData(Body):
    """A topic's queues on the brokers of one name."""

    broker_name: str
    read_queue_nums: int = 0
    write_queue_nums: int = 0
    perm: int = PERM_READ | PERM_WRITE
    topic_sys_flag: int = 0


class TopicQueueMappingInfo(Body):
    """A static topic's queues on one broker name; ``curr_id_map``: logical queue id to the broker's queue id."""

    topic: str = ""
    total_queues: int = 0
    bname: str = ""
    epoch: int = 0
    dirty: bool = False
    scope: str | None = None
    curr_id_map: dict[str, int] = {}


class TopicRouteData(Body):
    """Body of the reply to GET_ROUTEINFO_BY_TOPIC (105)."""

    broker_datas: list[BrokerData] = []
    filter_server_table: dict[str, list[str]] = {}
    queue_datas: list[QueueData] = []
    order_topic_conf: str | msgspec.UnsetType | None = msgspec.UNSET
    topic_queue_mapping_by_broker: dict[str, TopicQueueMappingInfo] | msgspec.UnsetType = msgspec.UNSET


class ClusterInfo(Body):
    """Body of the reply to GET_BROKER_CLUSTER_INFO (106)."""

    broker_addr_table: dict[str, BrokerData] = {}
    cluster_addr_table: dict[str, list[str]] = {}


class TopicConfigSerializeWrapper(Body):
    """A broker's topics with their version; in REGISTER_BROKER and in topics.json."""

    data_version: DataVersion = field(default_factory=DataVersion)
    topic_config_table: dict[str, TopicConfig] = {}
    mapping_data_version: DataVersion | None = None


WITH_DELETED_TOPICS: Final = "withDeletedTopics"
"""Ext field of GET_ALL_TOPIC_CONFIG (21) by which a slave of TriMQ asks for DELETED_TOPICS too."""
DELETED_TOPICS: Final = "deletedTopics"
"""Member of its reply: topic -> log offset below which its records belong to a topic that was deleted."""


class TopicConfigAndMappingSerializeWrapper(TopicConfigSerializeWrapper):
    """The body of REGISTER_BROKER has this in addition to topics.json: the queues of static topics."""

    topic_queue_mapping_info_map: dict[str, TopicQueueMappingInfo] = {}


class RegisterBrokerBody(Body):
    """Body of REGISTER_BROKER (103) in its plain form; register_broker_body has the compressed one."""

    topic_config_serialize_wrapper: TopicConfigAndMappingSerializeWrapper = field(
        default_factory=TopicConfigAndMappingSerializeWrapper
    )
    filter_server_list: list[str] = []


class TopicList(Body):
    """Body of the replies that list topics; ``broker_addr`` only in the list of system topics."""

    broker_addr: str | msgspec.UnsetType | None = msgspec.UNSET
    topic_list: list[str] = []


class BrokerMemberGroup(Body):
    """The brokers of one name: broker id to address."""

    broker_addrs: dict[str, str] = {}
    broker_name: str = ""
    cluster: str = ""


class GetBrokerMemberGroupResponseBody(Body):
    """Body of the reply to GET_BROKER_MEMBER_GROUP (901)."""

    broker_member_group: BrokerMemberGroup


class KVTable(Body):
    """Body of the reply to GET_KVLIST_BY_NAMESPACE (219), and to REGISTER_BROKER if there are ordered topics."""

    table: dict[str, str] = {}


class HAConnectionRuntimeInfo(Body):
    """A slave, as its master sees it: see HARuntimeInfo. ``diff``: bytes that it has not acknowledged."""

    addr: str = ""
    slave_ack_offset: int = 0
    diff: int = 0
    in_sync: bool = False
    transferred_byte_in_second: int = 0
    transfer_from_where: int = 0


class HAClientRuntimeInfo(Body):
    """A slave, as it sees itself: see HARuntimeInfo. Times are ms since the epoch. Without an address: a master's."""

    master_addr: str | UnsetType = UNSET
    transferred_byte_in_second: int = 0
    max_offset: int = 0
    last_read_timestamp: int = 0
    last_write_timestamp: int = 0
    master_flush_offset: int = 0


class HARuntimeInfo(Body):
    """Body of the reply to GET_BROKER_HA_STATUS (907)."""

    master: bool = False
    master_commit_log_max_offset: int = 0
    in_sync_slave_nums: int = 0
    ha_connection_info: list[HAConnectionRuntimeInfo] = []
    ha_client_runtime_info: HAClientRuntimeInfo = field(default_factory=HAClientRuntimeInfo)


class SyncStateSet(Body):
    """The ids of the brokers that have every acknowledged message. The epoch counts changes of the set."""

    sync_state_set: list[int] = []
    sync_state_set_epoch: int = 0


class ElectMasterResponseBody(Body):
    """Body of the reply to CONTROLLER_ELECT_MASTER (1002): the addresses of all brokers of the name, and the set."""

    broker_member_group: BrokerMemberGroup | None = None
    sync_state_set: list[int] = []


class ReplicaIdentity(Body):
    """One broker in a BrokerReplicasInfo."""

    broker_name: str = ""
    broker_id: int = 0
    broker_address: str = ""
    alive: bool = False


class ReplicasInfo(Body):
    """The brokers of one name; ``master_address`` is missing if there is no master."""

    master_broker_id: int | None = None
    master_address: str | None = None
    master_epoch: int = 0
    sync_state_set_epoch: int = 0
    in_sync_replicas: list[ReplicaIdentity] = []
    not_in_sync_replicas: list[ReplicaIdentity] = []


class BrokerReplicasInfo(Body):
    """Body of the reply to CONTROLLER_GET_SYNC_STATE_DATA (1006), by broker name."""

    replicas_info_table: dict[str, ReplicasInfo] = {}


class EpochEntry(Body):
    """Where an epoch begins and ends in the log; the last one ends at 2^63 - 1."""

    epoch: int
    start_offset: int
    end_offset: int = 2**63 - 1


class EpochEntryCache(Body):
    """Body of the reply to GET_BROKER_EPOCH_CACHE (1007). ``broker_id`` is the id of the role: 0 on a master."""

    cluster_name: str = ""
    broker_name: str = ""
    broker_id: int = 0
    epoch_list: list[EpochEntry] = []
    max_offset: int = 0


def encode_json(value: Any) -> bytes:
    """Compact JSON; struct fields under their wire names."""
    return msgspec.json.encode(value)


def decode_json(data: bytes | memoryview, kind: type[T], *, lenient: bool = True) -> T:
    """A body as ``kind``, decoded strictly, else tolerantly (bare keys, nulls for defaults, numbers as text).

    Without ``lenient`` the text has to be standard JSON: other text costs 2 us a byte.

    Raises RemotingError(SYSTEM_ERROR) if the body is not JSON or does not match ``kind``.
    """
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        loads = lenient_json.loads if lenient else msgspec.json.decode
        return msgspec.convert(_without_nulls(loads(bytes(data))), kind, strict=False)
    except (ValueError, msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the body does not fit {kind.__name__}: {error}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
