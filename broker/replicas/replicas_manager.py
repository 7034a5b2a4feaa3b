"""ReplicasManager: a broker's conversation with the controllers. It knows the broker's id, its role, and the lease.

It outlives the roles: see replicated_broker. Source: RocketMQ's ReplicasManager. There a master that cannot reach its
controllers goes on, and nothing ends its right to acknowledge.
"""

import random
from typing import Final, NamedTuple

import structlog
import trio

from trimq.broker.config import BrokerConfig, ControllerModeConfig
from trimq.broker.replicas.broker_identity import Applied, BrokerIdentityFile
from trimq.broker.replicas.controller_client import ControllerClient, ControllersError
from trimq.broker.replicas.heartbeats import Heartbeats
from trimq.broker.replicas.set_changes import SetChanges
from trimq.broker.start_error import StartError
from trimq.broker.store.message_store import Leadership
from trimq.protocol.body import SyncStateSet, decode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.controller import (
    KNOWN,
    ApplyBrokerIdRequestHeader,
    ElectMasterRequestHeader,
    ElectMasterResponseHeader,
    GetNextBrokerIdRequestHeader,
    GetNextBrokerIdResponseHeader,
    GetReplicaInfoRequestHeader,
    GetReplicaInfoResponseHeader,
    NotifyBrokerRoleChangedRequestHeader,
    RegisterBrokerToControllerRequestHeader,
    RegisterBrokerToControllerResponseHeader,
)
from trimq.remoting.client.remoting_client import split_address
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger(__name__)

STARTED: Final = "trimqStarted"
"""Field of CONTROLLER_REGISTER_BROKER: this process has just started, so the end of its log may be lost."""
_AGAIN: Final = 1.0
_SOON: Final = 0.2
_APPLY_TRIES: Final = 5
_LARGEST_EPOCH: Final = 2**31 - 1


class Master(NamedTuple):
    """The master that the controllers have elected. ``members`` is the SyncStateSet, ``set_epoch`` its last change."""

    broker_id: int
    address: str
    epoch: int
    members: frozenset[int]
    set_epoch: int


class ReplicasManager:
    """One broker of a set of replicas. Belongs to the event loop.

    ``broker_id`` is valid after ``register``. ``master`` is the one of the highest epoch that is known; None before.
    ``master_alive``: whether the controllers let it lead. ``problem`` says what is wrong, empty while all is well.
    """

    def __init__(
        self,
        configuration: Configuration,
        client: ControllerClient,
        identity: BrokerIdentityFile,
        clock: Clock,
        address: str,
    ) -> None:
        """``address`` is the broker's own, for clients and for the other replicas."""
        self._configuration = configuration
        self._client = client
        self._identity = identity
        self._clock = clock
        self._address = address
        self.broker_id = 0
        self.master: Master | None = None
        self.master_alive = False
        self.problem = ""
        self._leadership: Leadership | None = None
        self._changed = trio.Event()
        self._asked_again = trio.Event()
        self.heartbeats = Heartbeats(self, configuration, client, clock, address)
        self.set_changes = SetChanges(self, configuration, clock)

    # what is known

    @property
    def _config(self) -> ControllerModeConfig:
        return self._configuration.section(ControllerModeConfig)

    @property
    def is_master(self) -> bool:
        """Whether this broker is the master of the highest epoch that is known."""
        return self.master is not None and self.master.broker_id == self.broker_id

    @property
    def epoch(self) -> int:
        """The highest epoch that is known; 0 before."""
        return self.master.epoch if self.master is not None else 0

    @property
    def lead_holds(self) -> bool:
        """Whether no other broker can be the master now: see Leadership."""
        return self._leadership is not None and self._leadership.holds()

    @property
    def leadership(self) -> Leadership | None:
        """What was assigned for the present life of the store; None before the first one."""
        return self._leadership

    def is_present(self, leadership: Leadership) -> bool:
        """Whether it is of the epoch of the present master."""
        return self.master is not None and leadership.epoch == self.master.epoch

    @property
    def gives_leases(self) -> bool:
        """Whether the controllers give leases, as far as it is known."""
        return bool(self.heartbeats.leases)

    async def changed(self) -> None:
        """Return when there is another master, another epoch, or a new life of the store."""
        await self._changed.wait()

    def lead(self) -> Leadership:
        """What the controllers have assigned to this broker, for one life of its store."""
        master = self.master
        epoch, members, set_epoch = (master.epoch, master.members, master.set_epoch) if master else (0, (), 0)
        leadership = Leadership(
            self.broker_id, epoch, members, set_epoch, self._clock.boot_seconds, learner=self._config.async_learner
        )
        self._leadership = leadership
        self.heartbeats.pass_lease()
        self._tell()  # the task that waits for what the last store wanted
        return leadership

    # the start

    async def register(self) -> None:
        """Get an id, if this store has none, and register. Tries until it succeeds. Raises StartError."""
        while True:
            try:
                if not self.broker_id:
                    self.broker_id = self._identity.broker_id() or await self._get_id()
                if await self._register(started=True):
                    break
            except (ControllersError, RemotingError) as error:
                self.note_failure(str(error))
            except OSError as error:
                raise StartError(f"the broker's id cannot be stored: {error}") from error
            await self._clock.sleep(_AGAIN * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
        self._well()
        _log.info("replica_registered", broker_id=self.broker_id, master=self.master and self.master.address)

    async def _get_id(self) -> int:
        """Apply for the next free id. Raises ControllersError, RemotingError, OSError, StartError."""
        config = self._configuration.section(BrokerConfig)
        names = {"cluster_name": config.broker_cluster_name, "broker_name": config.broker_name}
        for _ in range(_APPLY_TRIES):
            applied = self._identity.applied()
            if applied is None:
                reply = await self._ask(
                    RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, GetNextBrokerIdRequestHeader(**names)
                )
                _check(reply)
                number = reply.header(GetNextBrokerIdResponseHeader).next_broker_id
                applied = Applied(number, f"{self._address};{self._clock.wall_ms()}")
                self._identity.apply(applied)
            reply = await self._apply(applied)
            if reply.code == ResponseCode.SUCCESS:
                self._identity.assign(applied.broker_id)
                return applied.broker_id
            if reply.code != ResponseCode.CONTROLLER_BROKER_ID_INVALID:
                _check(reply)
            self._identity.forget_applied()  # another broker was quicker
        raise ControllersError("other brokers have taken each free broker id first", unsent=True)

    async def _apply(self, applied: Applied, *, again: bool = False) -> RemotingCommand:
        config = self._configuration.section(BrokerConfig)
        header = ApplyBrokerIdRequestHeader(
            cluster_name=config.broker_cluster_name,
            broker_name=config.broker_name,
            applied_broker_id=applied.broker_id,
            register_check_code=applied.check_code,
        )
        command = RemotingCommand.request(RequestCode.CONTROLLER_APPLY_BROKER_ID, header)
        if again:
            command.ext = {**command.ext_fields(), KNOWN: "1"}
        return await self._client.ask(command)

    async def _register(self, *, started: bool = False) -> bool:
        """Register the address; learn the master, if one is alive. Raises ControllersError, RemotingError."""
        config = self._configuration.section(BrokerConfig)
        header = RegisterBrokerToControllerRequestHeader(
            cluster_name=config.broker_cluster_name,
            broker_name=config.broker_name,
            broker_id=self.broker_id,
            broker_address=self._address,
            invoke_time=self._clock.wall_ms(),
        )
        command = RemotingCommand.request(RequestCode.CONTROLLER_REGISTER_BROKER, header)
        if started:
            command.ext = {**command.ext_fields(), STARTED: "true"}
        reply = await self._client.ask(command)
        if reply.code == ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED:
            # The controllers have lost what they knew, or were asked to forget this broker. The same id again.
            applied = Applied(self.broker_id, f"{self._address};{self._clock.wall_ms()}")
            again = await self._apply(applied, again=True)
            if again.code != ResponseCode.SUCCESS:
                self.heartbeats.note_strange(self._client.leader, again.remark or f"answer {again.code}")
                self.note_failure(self.heartbeats.problem)
            return False
        _check(reply)
        self.heartbeats.note_known(self._client.leader)
        answer = reply.header(RegisterBrokerToControllerResponseHeader)
        found = _set(reply)
        self._note(answer.master_broker_id, answer.master_address, answer.master_epoch, found)
        return True

    # the loops

    async def run(self) -> None:
        """Send heartbeats, and follow what the controllers decide, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.heartbeats.run)
            nursery.start_soon(self._sync_metadata)
            nursery.start_soon(self._sync_leader)
            nursery.start_soon(self.set_changes.run)

    async def _sync_metadata(self) -> None:
        """Ask for the master and the set, at intervals and when a heartbeat's reply shows that there is news."""
        while True:
            try:
                await self._ask_master()
                self._well()
            except (ControllersError, RemotingError) as error:
                self.note_failure(str(error))
            pause = self._config.sync_broker_metadata_period / 1000
            if not self.master_alive:
                pause = min(pause, _AGAIN)
            with trio.move_on_after(pause):
                await self._asked_again.wait()
            self._asked_again = trio.Event()
            await self._clock.sleep(_SOON / 4)  # several heartbeats may say the same

    async def _ask_master(self) -> None:
        name = self._configuration.section(BrokerConfig).broker_name
        reply = await self._ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, GetReplicaInfoRequestHeader(broker_name=name))
        if reply.code == ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST:
            await self._register()
            return
        _check(reply)
        if self.heartbeats.is_strange(self._client.leader):
            return  # of a group that has begun anew the master has nothing in common with this log
        answer = reply.header(GetReplicaInfoResponseHeader)
        self._note(answer.master_broker_id, answer.master_address, answer.master_epoch, _set(reply))
        if not self.master_alive:
            await self._elect()

    async def _elect(self) -> None:
        """Ask for an election: any broker that may be the master. Raises ControllersError, RemotingError."""
        config = self._configuration.section(BrokerConfig)
        header = ElectMasterRequestHeader(
            cluster_name=config.broker_cluster_name,
            broker_name=config.broker_name,
            broker_id=self.broker_id,
            invoke_time=self._clock.wall_ms(),
        )
        reply = await self._ask(RequestCode.CONTROLLER_ELECT_MASTER, header)
        if reply.code == ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED:
            await self._register()
            return
        if reply.code != ResponseCode.CONTROLLER_MASTER_STILL_EXIST:
            _check(reply)
        answer = reply.header(ElectMasterResponseHeader)
        found = _set(reply, answer.sync_state_set_epoch)
        self._note(answer.master_broker_id, answer.master_address, answer.master_epoch, found)

    async def hand_over(self) -> None:
        """Before a stop of the master: let another member of the set be elected, so that none has to wait for that."""
        if not self.is_master or self.master is None:
            return
        config = self._configuration.section(BrokerConfig)
        for other in sorted(self.master.members - {self.broker_id}):
            header = ElectMasterRequestHeader(
                cluster_name=config.broker_cluster_name,
                broker_name=config.broker_name,
                broker_id=other,
                designate_elect=True,
                invoke_time=self._clock.wall_ms(),
            )
            try:
                reply = await self._ask(RequestCode.CONTROLLER_ELECT_MASTER, header)
            except ControllersError as error:
                _log.warning("not_handed_over", reason=str(error))
                return
            if reply.code == ResponseCode.SUCCESS:
                _log.info("handed_over", master_id=other)
                return
        _log.warning("not_handed_over", reason="no other member of the SyncStateSet can be elected")

    async def _sync_leader(self) -> None:
        while True:
            await self._clock.sleep(self._config.sync_controller_metadata_period / 1000)
            await self._client.find_leader()

    def notified(self, header: NotifyBrokerRoleChangedRequestHeader) -> None:
        """A controller says that there is a new master (1008). Any peer may have sent it: the controllers are asked."""
        known = self.master
        if known is None or header.master_epoch is None or header.master_epoch > known.epoch:
            self._asked_again.set()

    def ask_master_again(self) -> None:
        """Ask for the master and the set soon."""
        self._asked_again.set()

    def note_set(self, epoch: int, found: SyncStateSet) -> None:
        """The controllers have changed the set of this master."""
        self._note(self.broker_id, self._address, epoch, found)

    def _note(self, broker_id: int | None, address: str | None, epoch: int | None, found: SyncStateSet) -> None:
        """Take what a controller has said. An older epoch, and an older set of the same epoch, are left out."""
        known = self.master
        alive = broker_id is not None and broker_id >= 0 and bool(address)
        if alive and not self._is_possible(broker_id, address, epoch, found):
            self.note_failure(f"they name a master that cannot be one: id {broker_id}, {address}, epoch {epoch}")
            return
        self.master_alive = alive
        if not alive:
            return
        assert broker_id is not None
        new = Master(broker_id, address or "", epoch or 0, frozenset(found.sync_state_set), found.sync_state_set_epoch)
        if known is None or new.epoch > known.epoch:
            self.master = new
            if new.broker_id != self.broker_id:
                self.heartbeats.end_lease()
            _log.info("master_changed", master_id=new.broker_id, master=new.address, epoch=new.epoch)
            self._tell()
            # A new master has no lease before the reply to a heartbeat shows that it is known as such.
            self.heartbeats.send_now()
        elif new.epoch == known.epoch and new.set_epoch > known.set_epoch:
            self.master = new
            if self._leadership is not None and self._leadership.epoch == new.epoch and self.is_master:
                self._leadership.set_members(new.members, new.set_epoch)
        elif new.epoch == known.epoch and new.address != known.address:
            self.master = known._replace(address=new.address)  # it has moved
            self._tell()

    def _is_possible(self, broker_id: int | None, address: str | None, epoch: int | None, found: SyncStateSet) -> bool:
        """Whether an answer makes sense: a master is a member of its set, and can be connected to."""
        try:
            split_address(address or "")
        except ValueError:
            return False
        if broker_id == self.broker_id and (epoch or 0) >= self.epoch and broker_id not in found.sync_state_set:
            return False
        return 1 <= (epoch or 0) < _LARGEST_EPOCH

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # helpers

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        """The reply of the leading controller. Raises ControllersError."""
        return await self._client.ask(command)

    async def _ask(self, code: RequestCode, header: object) -> RemotingCommand:
        return await self._client.ask(RemotingCommand.request(code, header))  # type: ignore[arg-type]

    def note_failure(self, reason: str) -> None:
        """The controllers do not answer as they should."""
        if reason != self.problem:  # once for each reason: it is tried again and again
            _log.warning("controllers_do_not_answer", reason=reason)
        self.problem = reason

    def _well(self) -> None:
        if self.heartbeats.problem:
            self.note_failure(self.heartbeats.problem)
        else:
            self.problem = ""


def _check(reply: RemotingCommand) -> None:
    if reply.code != ResponseCode.SUCCESS:
        raise RemotingError(reply.code, reply.remark or "")


def _set(reply: RemotingCommand, epoch: int | None = None) -> SyncStateSet:
    """The set in a reply's body; ``epoch`` if it is in the header."""
    found = decode_json(reply.body, SyncStateSet) if len(reply.body) else SyncStateSet()
    if epoch is not None:
        found.sync_state_set_epoch = epoch
    return found
