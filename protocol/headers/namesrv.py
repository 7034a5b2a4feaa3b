"""Headers of the name server's requests."""

from trimq.protocol.headers.base import I32, I64, Header


class RegisterBrokerRequestHeader(Header):
    """REGISTER_BROKER (103). ``body_crc32`` 0: not checked. ``listeners`` is TriMQ's own: name to address, as JSON."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: I64
    heartbeat_timeout_millis: I64 | None = None
    enable_acting_master: bool | None = None
    compressed: bool | None = None
    body_crc32: I32 | None = None
    listeners: str | None = None


class RegisterBrokerResponseHeader(Header):
    """The addresses of a slave's master; empty for masters.

    ``conflict`` is TriMQ's own, and other clients ignore it: the address of another broker that claims the same name
    and id. In a refusal it is the broker that is registered with them.
    """

    ha_server_addr: str | None = None
    master_addr: str | None = None
    conflict: str | None = None


class UnRegisterBrokerRequestHeader(Header):
    """UNREGISTER_BROKER (104)."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: I64


class BrokerHeartbeatRequestHeader(Header):
    """BROKER_HEARTBEAT (904)."""

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: I64 | None = None
    epoch: I32 | None = None
    max_offset: I64 | None = None
    confirm_offset: I64 | None = None
    heartbeat_timeout_mills: I64 | None = None
    election_priority: I32 | None = None


class QueryDataVersionRequestHeader(Header):
    """QUERY_DATA_VERSION (322)."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: I64


class QueryDataVersionResponseHeader(Header):
    """Whether the broker's DataVersion differs from the one registered."""

    changed: bool
    conflict: str | None = None
    """As in RegisterBrokerResponseHeader."""


class GetRouteInfoRequestHeader(Header):
    """GET_ROUTEINFO_BY_TOPIC (105)."""

    topic: str
    accept_standard_json_only: bool | None = None


class GetBrokerMemberGroupRequestHeader(Header):
    """GET_BROKER_MEMBER_GROUP (901)."""

    cluster_name: str
    broker_name: str


class GetTopicsByClusterRequestHeader(Header):
    """GET_TOPICS_BY_CLUSTER (224)."""

    cluster: str


class WritePermRequestHeader(Header):
    """WIPE_ and ADD_WRITE_PERM_OF_BROKER (205, 327)."""

    broker_name: str


class WipeWritePermResponseHeader(Header):
    """Reply to 205."""

    wipe_topic_count: I32


class AddWritePermResponseHeader(Header):
    """Reply to 327."""

    add_topic_count: I32


class DeleteTopicFromNamesrvRequestHeader(Header):
    """DELETE_TOPIC_IN_NAMESRV (216)."""

    topic: str
    cluster_name: str | None = None


class RegisterTopicRequestHeader(Header):
    """REGISTER_TOPIC_IN_NAMESRV (217)."""

    topic: str


class PutKVConfigRequestHeader(Header):
    """PUT_KV_CONFIG (100)."""

    namespace: str
    key: str
    value: str


class KVConfigRequestHeader(Header):
    """GET_ and DELETE_KV_CONFIG (101, 102)."""

    namespace: str
    key: str


class GetKVConfigResponseHeader(Header):
    """Reply to 101."""

    value: str | None = None


class GetKVListByNamespaceRequestHeader(Header):
    """GET_KVLIST_BY_NAMESPACE (219)."""

    namespace: str
