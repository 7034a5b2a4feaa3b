"""Two live broker processes that claim the same broker name and id: the first keeps the route, and both are notified.

In RocketMQ the last one silently wins, so that two such brokers take the route from each other every 30 s. Here the
second one is refused as long as the first one is live: its connection is open, and it has registered within its
heartbeat timeout. A host that died without closing its connection is detected by probes (see ``Connection.probe``).
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
    """A broker at ``address`` that was refused. After ``until`` (monotonic seconds) it is assumed to have stopped."""

    address: str
    until: float


class BrokerIdConflictError(RemotingError):
    """A registration is refused because ``holder`` is live with this broker name and id."""

    def __init__(self, holder: "BrokerLiveInfo", address: str) -> None:
        super().__init__(
            ResponseCode.SYSTEM_ERROR,
            f"broker_id_conflict: brokerName {holder.broker_name} with brokerId {holder.broker_id} belongs to the"
            f" live broker at {holder.broker_addr}; the one at {address} was not registered: give it another brokerName"
            " (or brokerId), or stop one of them",
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
    """Raises BrokerIdConflictError if ``holder``, which has the id, is live at another address.

    A higher state version, which a controller assigns, overrides a live holder; see ``is_elected`` too. ``timeout_ms``:
    the time for which the holder is notified of a challenger that does not register again.
    """
    # Each of these conditions alone admits the registration: the id is free, the holder itself registers (same address
    # or connection), a controller has decided, or the holder has not registered in time.
    if (
        holder is None
        or holder.broker_addr == header.broker_addr
        or holder.connection is connection
        or holder.data_version.state_version < version.state_version
        or (now - holder.last_update) * 1000 > holder.heartbeat_timeout_ms
    ):
        return
    address = header.broker_addr
    if challenger_of(holder, now) != address:  # once, not at each of its attempts
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
    """Whether a live member of the group registers with another broker id over its open connection.

    A DLedger broker does this when its group has elected it. It sends no state version, and would not try again for
    30 s if it were refused. The previous master may have died without closing its connection.
    """
    return (
        previous is not None
        and previous.connection is connection
        and previous.broker_name == header.broker_name
        and previous.broker_id != header.broker_id
    )


def challenger_of(info: "BrokerLiveInfo", now: float) -> str | None:
    """The address of a broker that has recently claimed the name and id of this one."""
    challenger = info.challenger
    return challenger.address if challenger is not None and now <= challenger.until else None
