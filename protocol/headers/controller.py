"""Headers of the controllers' requests, and of those between a controller and brokers.

A broker id is the number that the controllers have assigned, 1 or more; -1 stands for none. An epoch counts masters, a
set's epoch the changes of the SyncStateSet.
"""

from typing import Final

from trimq.protocol.headers.base import I32, I64, Header

LEASE: Final = "trimqLease"
"""Field of BROKER_HEARTBEAT with which a TriMQ broker asks for a lease: the request is not one-way then."""
KNOWN: Final = "trimqKnown"
"""Field of CONTROLLER_APPLY_BROKER_ID: the broker has had this id before, as the file on its disk says."""
FENCE: Final = "trimqFence"
"""Field of CONTROLLER_ALTER_SYNC_STATE_SET: the set stays, and gets a new epoch, so what was asked before fails."""


class GetMetaDataResponseHeader(Header):
    """CONTROLLER_GET_METADATA_INFO (1005), reply. ``peers``: ``n0:host:port;n1:host:port``."""

    group: str
    controller_leader_id: str
    controller_leader_address: str
    is_leader: bool
    peers: str


class GetNextBrokerIdRequestHeader(Header):
    """CONTROLLER_GET_NEXT_BROKER_ID (1012)."""

    cluster_name: str
    broker_name: str


class GetNextBrokerIdResponseHeader(Header):
    """Reply to 1012."""

    cluster_name: str
    broker_name: str
    next_broker_id: I64


class ApplyBrokerIdRequestHeader(Header):
    """CONTROLLER_APPLY_BROKER_ID (1013). ``register_check_code``: ``address;milliseconds``, the same when repeated."""

    cluster_name: str
    broker_name: str
    applied_broker_id: I64
    register_check_code: str


class ApplyBrokerIdResponseHeader(Header):
    """Reply to 1013."""

    cluster_name: str
    broker_name: str


class RegisterBrokerToControllerRequestHeader(Header):
    """CONTROLLER_REGISTER_BROKER (1003)."""

    cluster_name: str
    broker_name: str
    broker_id: I64
    broker_address: str
    invoke_time: I64 | None = None


class RegisterBrokerToControllerResponseHeader(Header):
    """Reply to 1003; the master's fields are only there if one is alive. The body is a SyncStateSet."""

    cluster_name: str
    broker_name: str
    master_broker_id: I64 | None = None
    master_address: str | None = None
    master_epoch: I32 | None = None
    sync_state_set_epoch: I32 | None = None


class ElectMasterRequestHeader(Header):
    """CONTROLLER_ELECT_MASTER (1002). ``designate_elect``: this broker and no other one."""

    broker_name: str
    cluster_name: str = ""
    broker_id: I64 = -1
    designate_elect: bool = False
    invoke_time: I64 | None = None


class ElectMasterResponseHeader(Header):
    """Reply to 1002, also if the old master is alive. The body is an ElectMasterResponseBody."""

    master_broker_id: I64 | None = None
    master_address: str | None = None
    master_epoch: I32 | None = None
    sync_state_set_epoch: I32 | None = None


class AlterSyncStateSetRequestHeader(Header):
    """CONTROLLER_ALTER_SYNC_STATE_SET (1001). The body is a SyncStateSet: the new members, and the epoch of the old."""

    broker_name: str
    master_broker_id: I64
    master_epoch: I32
    invoke_time: I64 | None = None


class AlterSyncStateSetResponseHeader(Header):
    """Reply to 1001. The body is a SyncStateSet."""

    new_sync_state_set_epoch: I32


class GetReplicaInfoRequestHeader(Header):
    """CONTROLLER_GET_REPLICA_INFO (1004)."""

    broker_name: str


class GetReplicaInfoResponseHeader(Header):
    """Reply to 1004. Without a master its fields are missing. The body is a SyncStateSet."""

    master_broker_id: I64 | None = None
    master_address: str | None = None
    master_epoch: I32 | None = None


class CleanControllerBrokerDataRequestHeader(Header):
    """CLEAN_BROKER_DATA (1011). ``broker_controller_ids_to_clean``: ``1;2``; without it all brokers of a name."""

    broker_name: str
    cluster_name: str | None = None
    broker_controller_ids_to_clean: str | None = None
    is_clean_living_broker: bool = False
    invoke_time: I64 | None = None


class NotifyBrokerRoleChangedRequestHeader(Header):
    """NOTIFY_BROKER_ROLE_CHANGED (1008), from a controller to a broker. The body is a SyncStateSet."""

    master_address: str | None = None
    master_epoch: I32 | None = None
    sync_state_set_epoch: I32 | None = None
    master_broker_id: I64 | None = None


class LeaseResponseHeader(Header):
    """TriMQ's reply to a BROKER_HEARTBEAT with ``trimqLease``.

    ``lease_millis``: how long the controllers let no other broker become the master, from the moment at which the
    heartbeat was sent. ``master_epoch`` is 0 if there was no master yet; ``master_broker_id`` is missing if none is
    alive.
    """

    lease_millis: I64
    master_epoch: I32
    master_broker_id: I64 | None = None
    master_address: str | None = None
    sync_state_set_epoch: I32 | None = None
