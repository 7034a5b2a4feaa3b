"""Heartbeats: what a broker says to each controller at intervals; a reply is a lease, or that the broker is unknown.

Source: RocketMQ's ReplicasManager, whose heartbeats have no reply.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import structlog
import trio

from trimq.broker.config import BrokerConfig, ControllerModeConfig
from trimq.broker.replicas.controller_client import ControllerClient
from trimq.broker.store.message_store import Leadership
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.controller import LEASE, LeaseResponseHeader
from trimq.protocol.headers.namesrv import BrokerHeartbeatRequestHeader
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.errors import RemotingTransportError
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger(__name__)

LEASE_MARGIN: Final = 0.5
"""Seconds by which the lease is taken for shorter than it is."""
_LEAST_TIMEOUT: Final = 0.5


class LogState(NamedTuple):
    """What a heartbeat says of the log: its last epoch, its end, and how far it is confirmed."""

    epoch: int = 0
    max_offset: int = 0
    confirm_offset: int = 0


class Conversation(Protocol):
    """The part of ReplicasManager that is used."""

    broker_id: int

    @property
    def leadership(self) -> Leadership | None:
        """That of the present life of the store; None before the first one."""
        ...

    @property
    def epoch(self) -> int:
        """That of the master that is known; 0 before."""
        ...

    @property
    def is_master(self) -> bool:
        """See ReplicasManager."""
        ...

    def ask_master_again(self) -> None:
        """Ask for the master and the set soon."""
        ...


class Heartbeats:
    """Sends heartbeats to each controller, and keeps what they say. Belongs to the event loop."""

    def __init__(
        self,
        manager: Conversation,
        configuration: Configuration,
        client: ControllerClient,
        clock: Clock,
        address: str,
    ) -> None:
        """``address`` is the broker's own, for clients and for the other replicas."""
        self._manager = manager
        self._configuration = configuration
        self._client = client
        self._clock = clock
        self._address = address
        self.log_state: Callable[[], LogState] = LogState
        """What the present life of the store says of its log."""
        self.healthy: Callable[[], bool] = lambda: True
        """Whether the store can still be written. If not, no heartbeat is sent, and another broker is elected."""
        self.leases: bool | None = None
        """Whether the controllers give leases; None before the first reply."""
        self._lease_until = 0.0
        self._known: set[str] = set()
        """The controllers that know this broker, by their last reply."""
        self._strange: dict[str, str] = {}
        """Those that do not, with the reason if one was given."""
        self._now = trio.Event()

    # the lease

    @property
    def lease_seconds(self) -> float | None:
        """What is left of the lease; None without leases."""
        return self._lease_until - self._clock.boot_seconds() if self.leases else None

    def end_lease(self) -> None:
        """Another broker is the master: the lease was for an epoch that has ended."""
        self._lease_until = 0.0

    def pass_lease(self) -> None:
        """Let the present life of the store have the lease."""
        # Before the first reply it is not known whether there are leases: then there is none.
        leadership = self._manager.leadership
        if leadership is not None and self.leases is not False:
            leadership.renew(self._lease_until)

    # who knows this broker

    def note_known(self, address: str) -> None:
        """The controller at ``address`` knows this broker."""
        self._strange.pop(address, None)
        if address in self._client.addresses:
            self._known.add(address)
        if self._known.issuperset(self._client.addresses):
            self._strange.clear()  # also one with another name for the same controller

    def note_strange(self, address: str, reason: str = "") -> None:
        """The controller at ``address`` does not know this broker: it was removed, or this is another cluster's."""
        self._known.discard(address)
        self._strange[address] = reason or self._strange.get(address, "")

    def is_strange(self, address: str) -> bool:
        """Whether what the controller at ``address`` decides is not for this broker, as it does not know it."""
        if address in self._strange:
            return True
        return bool(self._strange) and not self._known

    @property
    def problem(self) -> str:
        """Which controllers do not know this broker; empty if there are none."""
        if not self._strange:
            return ""
        number = self._manager.broker_id
        if self._known:
            strange, known = (", ".join(sorted(which)) for which in (self._strange, self._known))
            return f"{strange} does not know broker id {number}, {known} does: are they controllers of one cluster?"
        reason = next(filter(None, self._strange.values()), "to let it join again, restart it")
        return f"they do not know broker id {number}: {reason}"

    # the heartbeats

    def send_now(self) -> None:
        """Wait for the next interval no longer."""
        self._now.set()
        self._now = trio.Event()

    async def run(self) -> None:
        """Send heartbeats to each controller until cancelled."""
        async with trio.open_nursery() as nursery:
            for address in self._client.addresses:
                nursery.start_soon(self._keep_sending, address)

    async def _keep_sending(self, address: str) -> None:
        reason = ""
        while True:
            period = self._configuration.section(ControllerModeConfig).broker_heartbeat_interval / 1000
            began = self._clock.monotonic()
            now = self._now
            try:
                if self.healthy():
                    await self.send(address, max(period, _LEAST_TIMEOUT))
                reason = ""
            except (RemotingTransportError, RemotingError) as error:
                self._known.discard(address)
                text = error.lasting if isinstance(error, RemotingTransportError) else str(error)
                if text != reason:
                    _log.warning("heartbeat_failed", controller=address, reason=text)
                reason = text
            with trio.move_on_after(max(0.0, period - (self._clock.monotonic() - began))):
                await now.wait()

    async def send(self, address: str, timeout: float) -> None:
        """Send one heartbeat and take its reply. Raises RemotingTransportError, RemotingError."""
        config = self._configuration.section(BrokerConfig)
        mode = self._configuration.section(ControllerModeConfig)
        log = self.log_state()
        header = BrokerHeartbeatRequestHeader(
            cluster_name=config.broker_cluster_name,
            broker_addr=self._address,
            broker_name=config.broker_name,
            broker_id=self._manager.broker_id,
            epoch=log.epoch,
            max_offset=log.max_offset,
            confirm_offset=log.confirm_offset,
            heartbeat_timeout_mills=mode.controller_heart_beat_timeout_mills,
            election_priority=mode.broker_election_priority,
        )
        command = RemotingCommand.request(RequestCode.BROKER_HEARTBEAT, header)
        command.ext = {**command.ext_fields(), LEASE: "1"}
        # Counted from here: the controller renews the lease later than this.
        sent = self._clock.boot_seconds()
        reply = await self._client.heartbeat(address, command, timeout)
        if reply.code == ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED:
            self.note_strange(address)
            self._manager.ask_master_again()
            return
        if reply.code != ResponseCode.SUCCESS:
            raise RemotingError(reply.code, reply.remark or "")
        self.note_known(address)
        if "leaseMillis" not in reply.ext_fields():  # Apache's controller, or a name server at a wrong address
            if self.leases is None:
                self.leases = False
                _log.warning("no_leases", controller=address, effect="a master that is cut off may serve old offsets")
                if self._manager.leadership is not None:
                    self._manager.leadership.lease_until = None
            return
        self._take_lease(reply.header(LeaseResponseHeader), sent)

    def _take_lease(self, answer: LeaseResponseHeader, sent: float) -> None:
        if not self.leases:
            # Before this one there is none, whatever another program has answered at a wrong address.
            self.leases = True
            self.pass_lease()
        # At most a little more than what was asked for: etcd has a least time of its own.
        mode = self._configuration.section(ControllerModeConfig)
        most = 2 * mode.controller_heart_beat_timeout_mills + 5000
        until = sent + min(answer.lease_millis, most) / 1000 - LEASE_MARGIN
        # A lease says that this broker is alive; it counts for the epoch in which it leads.
        epoch = self._manager.epoch
        if self._manager.is_master and answer.master_epoch == epoch:
            self._lease_until = max(self._lease_until, until)
            self.pass_lease()
        if answer.master_broker_id is None or not epoch or answer.master_epoch > epoch:
            self._manager.ask_master_again()
