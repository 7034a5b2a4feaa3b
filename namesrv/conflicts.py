"""Two living broker processes that claim one broker name and id: the first keeps the route, and both are told.

RocketMQ lets the last one win without a word, so that two such brokers take the route from each other every 30 s. Here
the second one is refused for as long as the first one lives: its connection is open and it has registered within its
heartbeat timeout. A host that is gone without closing its connection is found by probes (see ``Connection.probe``).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from trimq.protocol.body import DataVersion
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.namesrv import RegisterBrokerRequestHeader

if TYPE_CHECKING:
    from trimq.namesrv.live_brokers import BrokerLiveInfo

_log = structlog.get_logger("namesrv")


@dataclass(frozen=True, slots=True)
class Challenger:
    """A broker at ``address`` that was refused; after ``until`` (monotonic seconds) it is taken to have gone."""

    address: str
    until: float


class BrokerIdConflictError(RemotingError):
    """A registration is refused because ``holder`` lives under this broker name and id."""

    def __init__(self, holder: "BrokerLiveInfo", address: str) -> None:
        super().__init__(
            ResponseCode.SYSTEM_ERROR,
            f"broker_id_conflict: brokerName {holder.broker_name} with brokerId {holder.broker_id} belongs to the"
            f" broker at {holder.broker_addr}, which lives; the one at {address} was not registered: give it another"
            " brokerName (or brokerId), or stop one of them",
        )
        self.holder = holder


def refuse_second(
    holder: "BrokerLiveInfo | None",
    header: RegisterBrokerRequestHeader,
    version: DataVersion,
    connection: object,
    now: float,
    timeout_ms: int,
) -> None:
    """Raises BrokerIdConflictError where ``holder``, who has the id, lives at another address.

    A higher state version, which a controller gives, wins over a living holder; see ``is_elected`` too.
    ``timeout_ms``: for how long a holder is told of a challenger that does not come again.
    """
    if (
        holder is None
        or holder.broker_addr == header.broker_addr
        or holder.connection is connection
        or holder.data_version.state_version < version.state_version
        or (now - holder.last_update) * 1000 > holder.heartbeat_timeout_ms
    ):
        return
    address = header.broker_addr
    if challenger_of(holder, now) != address:  # once, not at each of its tries
        _log.warning(
            "broker_id_conflict",
            broker_name=header.broker_name,
            broker_id=header.broker_id,
            kept=holder.broker_addr,
            refused=address,
        )
    holder.challenger = Challenger(address, now + timeout_ms / 1000)
    raise BrokerIdConflictError(holder, address)


def is_elected(previous: "BrokerLiveInfo | None", header: RegisterBrokerRequestHeader, connection: object) -> bool:
    """Whether a live member of the group says over the connection it has that its broker id is another one now.

    So does a DLedger broker that its group has elected. It does not send a state version, and does not come again for
    30 s if it is refused; the master before it may be gone without having closed its connection.
    """
    return (
        previous is not None
        and previous.connection is connection
        and previous.broker_name == header.broker_name
        and previous.broker_id != header.broker_id
    )


def challenger_of(info: "BrokerLiveInfo", now: float) -> str | None:
    """The address of a broker that has claimed this one's name and id of late."""
    challenger = info.challenger
    return challenger.address if challenger is not None and now <= challenger.until else None
