"""BrokerLiveInfo and BrokerGroup: the registered broker processes, and those that share a broker name."""

from dataclasses import dataclass, field

import msgspec

from trimq.namesrv.conflicts import Challenger
from trimq.protocol.body import DataVersion
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.namesrv import RegisterBrokerRequestHeader


@dataclass(slots=True, eq=False)
class BrokerLiveInfo:
    """A registered broker process. ``last_update`` is the clock's monotonic time in seconds.

    ``header``, ``raw`` and ``deletions`` serve to recognise a registration that repeats the last one: its header and
    body, and the topic table's count of deletions at that time. ``listeners``: the broker's addresses for clients of
    our named listeners, by their names.
    """

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: int
    ha_server_addr: str
    data_version: DataVersion
    filter_servers: list[str]
    connection: object
    heartbeat_timeout_ms: int
    last_update: float
    header: RegisterBrokerRequestHeader
    listeners: dict[str, str] = field(default_factory=dict)
    challenger: Challenger | None = None
    raw: bytes = b""
    deletions: int = -1

    @property
    def key(self) -> tuple[str, str]:
        """The key of the table of live brokers."""
        return self.cluster_name, self.broker_addr


@dataclass(slots=True)
class BrokerGroup:
    """The members of one broker name by broker id; never empty while it is in the table."""

    enable_acting_master: bool = False
    members: dict[int, BrokerLiveInfo] = field(default_factory=dict)

    def addresses(self, listener: str = "") -> dict[str, str]:
        """The addresses (for clients of ``listener``) by broker id as text, as in a route; lowest id first."""
        members = self.members
        return {
            str(broker_id): members[broker_id].listeners.get(listener, members[broker_id].broker_addr)
            for broker_id in sorted(members)
        }


def decode_listeners(text: str | None) -> dict[str, str]:
    """Parse the field ``listeners`` of a registration: JSON of name to address. Raises RemotingError."""
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise RemotingError(ResponseCode.SYSTEM_ERROR, f"listeners is no JSON of name to address: {error}") from error
