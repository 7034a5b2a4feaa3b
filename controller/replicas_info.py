"""ReplicasInfoManager: the decisions. Each is a transaction on what it was made from, so any controller may make it.

Source: RocketMQ's ReplicasInfoManager, whose decisions are entries of a log that its leader alone writes.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, NamedTuple, TypeVar

import structlog
import trio

from trimq.controller.config import ControllerConfig
from trimq.controller.elect import BrokerLiveInfo, best
from trimq.controller.group_state import (
    AliveRecord,
    GroupRecord,
    GroupState,
    IdRecord,
    SetRecord,
    UnreadableError,
    group_prefix,
    place_of,
)
from trimq.controller.kv import Compare, Delete, Entry, Kv, Put, Snapshot
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.namesrv import BrokerHeartbeatRequestHeader

_log = structlog.get_logger("controller")

_TRIES: Final = 8
_MOST_IDS: Final = 64
"""Brokers of one name: a set is sent with each reply, and a record of each is read with each heartbeat."""
_DEFAULT_TIMEOUT_MS: Final = 10_000

_T = TypeVar("_T")


class Elected(NamedTuple):
    """The outcome of an election. ``changed``: this call has elected a new master; else the present one is alive."""

    state: GroupState
    changed: bool


class LeaseAnswer(NamedTuple):
    """After a heartbeat: the milliseconds of the lease, and the group as it was after the renewal."""

    ttl_ms: int
    state: GroupState


class ReplicasInfoManager:
    """All groups. ``live`` has what heartbeats have said to this controller."""

    def __init__(self, kv: Kv, config: Callable[[], ControllerConfig]) -> None:
        self._kv = kv
        self._config = config
        self.live: dict[tuple[str, int], BrokerLiveInfo] = {}
        self.silent: set[tuple[str, int]] = set()
        """Brokers that have started, or whose connection has closed, after their last heartbeat: it does not count."""
        self.hears_until = -math.inf
        """Until when, in trio's time, elections wait for heartbeats of all that may be elected. The owner sets it."""
        self._heard: dict[str, trio.lowlevel.ParkingLot] = {}
        """Elections that wait for a heartbeat of their group."""
        self.elections = 0
        """Elections that this controller has made since its start."""
        self._revived = trio.Event()
        """Set and replaced when a broker is alive that was not."""

    @property
    def root(self) -> str:
        """Where the keys of all groups begin."""
        return self._config().etcd_prefix

    async def state(self, name: str) -> GroupState:
        """What is known of a name now. Raises KvError, UnreadableError."""
        return GroupState(self.root, name, await self._kv.range(group_prefix(self.root, name)))

    async def _decided(self, name: str, decide: Callable[[GroupState], Awaitable[_T | None]]) -> _T:
        """Try until a decision is made on what is true then. Raises RemotingError, KvError."""
        for _ in range(_TRIES):
            found = await decide(await self.state(name))
            if found is not None:
                return found
        raise RemotingError(ResponseCode.SYSTEM_BUSY, f"other controllers decide about {name} at the same time")

    async def _txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        return await self._kv.txn(compares, changes)

    # ids

    async def next_broker_id(self, name: str) -> int:
        """The id for another broker of a name."""
        return (await self.state(name)).next_id

    async def apply_broker_id(
        self, cluster: str, name: str, broker_id: int, check_code: str, *, has_had: bool = False
    ) -> None:
        """Assign an id. Raises CONTROLLER_BROKER_ID_INVALID if another request has got it.

        ``has_had``: this broker has had the id before; it was removed, or the store has lost it. It gets it again,
        unless all brokers of the name were removed: what is left of them has nothing to do with those that came since.
        """
        if broker_id < 1:
            raise RemotingError(ResponseCode.CONTROLLER_BROKER_ID_INVALID, f"brokerId {broker_id}: 1 or more")

        async def decide(state: GroupState) -> bool | None:
            known = state.ids.get(broker_id)
            if known is not None:
                if known.check_code == check_code:
                    return True
                text = f"broker id {broker_id} of {name} was given to another broker, at {known.address}"
                raise RemotingError(ResponseCode.CONTROLLER_BROKER_ID_INVALID, text)
            if has_had and broker_id < state.least_id:
                text = (
                    f"all brokers of {name} were removed: without its file brokerIdentity this one begins as a new one"
                )
                raise RemotingError(ResponseCode.CONTROLLER_BROKER_ID_INVALID, text)
            if broker_id < state.next_id and not has_had:
                # Also of a broker that was removed: sets and logs of others may still speak of it.
                text = f"broker id {broker_id} of {name} was given before: the next one is {state.next_id}"
                raise RemotingError(ResponseCode.CONTROLLER_BROKER_ID_INVALID, text)
            if len(state.ids) >= _MOST_IDS:
                text = f"{name} has {_MOST_IDS} brokers: remove those that are gone (mqadmin cleanBrokerMetadata)"
                raise RemotingError(ResponseCode.CONTROLLER_INVALID_REQUEST, text)
            if state.group is not None and state.group.cluster != cluster:
                text = f"{name} belongs to the cluster {state.group.cluster}, not to {cluster}"
                raise RemotingError(ResponseCode.CONTROLLER_INVALID_REQUEST, text)
            address = check_code.partition(";")[0]
            changes = [
                state.put("group", GroupRecord(cluster, max(state.next_id, broker_id + 1), state.least_id)),
                state.put(f"ids/{broker_id}", IdRecord(address, check_code)),
            ]
            return await self._txn(state.unchanged("group", "next", f"ids/{broker_id}"), changes) or None

        await self._decided(name, decide)

    async def register(self, name: str, broker_id: int, address: str, *, started: bool) -> Elected:
        """Store a broker's address. Raises CONTROLLER_BROKER_NEED_TO_BE_REGISTERED.

        ``started``: the broker has just started. If it was the master, another living member of the set is elected: a
        machine that has lost power may have lost the end of the log, which the others have.
        """

        async def decide(state: GroupState) -> GroupState | None:
            known = _known(state, broker_id)
            if started:
                self.silent.add((name, broker_id))
            if known.address == address:
                return state
            _log.info("broker_address_changed", broker_name=name, broker_id=broker_id, address=address)
            record = IdRecord(address, known.check_code)
            await self._txn(state.unchanged(f"ids/{broker_id}"), [state.put(f"ids/{broker_id}", record)])
            return None  # read again

        state = await self._decided(name, decide)
        if not started or state.master != broker_id:
            return Elected(state, changed=False)
        if any(other in state.alive for other in state.members if other != broker_id):
            try:
                return await self.elect(name, without=broker_id)
            except RemotingError as error:
                _log.warning("restarted_master_stays", broker_name=name, broker_id=broker_id, reason=error.remark)
        return await self._next_epoch(name, broker_id)

    async def _next_epoch(self, name: str, broker_id: int) -> Elected:
        """Let a master that was started again lead another epoch, with the same set.

        What it had written at the end of its log may be lost. What it writes there now must not pass for the same.
        """

        async def decide(state: GroupState) -> Elected | None:
            if state.master != broker_id or state.set is None:
                return Elected(state, changed=False)
            changes = [
                state.put("epoch", state.epoch + 1),
                state.put("set", SetRecord(state.set_epoch + 1, state.members)),
            ]
            if not await self._txn(state.unchanged("master", "epoch", "set"), changes):
                return None
            _log.info("master_started_again", broker_name=name, master_id=broker_id, epoch=state.epoch + 1)
            return Elected(state.after(changes), changed=True)

        return await self._decided(name, decide)

    # liveness

    async def heartbeat(self, header: BrokerHeartbeatRequestHeader) -> LeaseAnswer:
        """Keep a broker alive. Raises RemotingError, KvError."""
        name, broker_id = header.broker_name, header.broker_id
        if broker_id is None:
            raise RemotingError(ResponseCode.CONTROLLER_INVALID_REQUEST, "a heartbeat has no brokerId")
        timeout = max(header.heartbeat_timeout_mills or _DEFAULT_TIMEOUT_MS, 1000)
        state = await self.state(name)
        _known(state, broker_id)
        self.live[name, broker_id] = BrokerLiveInfo(
            header.epoch or 0,
            header.max_offset or 0,
            header.confirm_offset or 0,
            header.election_priority if header.election_priority is not None else 2**31 - 1,
        )
        self.silent.discard((name, broker_id))
        if name in self._heard:
            self._heard.pop(name).unpark_all()
        if broker_id in state.alive and state.timeout_ms(broker_id) == timeout:
            ttl = await self._kv.keep(state.lease(broker_id))
            # Read after the renewal: the answer tells the broker who is the master while the lease runs.
            after = await self.state(name)
            if ttl and after.lease(broker_id) == state.lease(broker_id):
                return LeaseAnswer(ttl, after)
        return await self._revive(name, broker_id, timeout)

    async def _revive(self, name: str, broker_id: int, timeout: int) -> LeaseAnswer:
        """Give a lease to a broker that has none, or one with another time."""
        lease = await self._kv.grant(timeout)

        async def decide(state: GroupState) -> bool | None:
            _known(state, broker_id)
            if broker_id in state.alive and state.timeout_ms(broker_id) == timeout:
                return True  # another controller was quicker
            alive = f"alive/{broker_id}"
            change = state.put(alive, AliveRecord(timeout), lease.number)
            return await self._txn(state.unchanged(alive, f"ids/{broker_id}"), [change]) or None

        await self._decided(name, decide)
        _log.info("broker_alive", broker_name=name, broker_id=broker_id, timeout_ms=timeout)
        self._revived.set()
        self._revived = trio.Event()
        after = await self.state(name)
        # With another controller's lease, how long that lasts is not known here: the next heartbeat renews it.
        return LeaseAnswer(lease.ttl_ms if after.lease(broker_id) == lease.number else 0, after)

    async def first_heartbeat(self, name: str, broker_id: int, seconds: float) -> None:
        """Wait until a broker is alive, ``seconds`` at most. Raises KvError."""
        with trio.move_on_after(seconds):
            while True:
                revived = self._revived
                if broker_id in (await self.state(name)).alive:
                    return
                await revived.wait()

    # elections

    async def elect(
        self,
        name: str,
        broker_id: int = -1,
        *,
        designate: bool = False,
        without: int | None = None,
        among: Collection[int] | None = None,
        epoch: int | None = None,
    ) -> Elected:
        """Elect a master, unless the present one is alive. Raises RemotingError if none can be elected, KvError.

        ``broker_id`` is the broker that asks; -1: a controller. ``designate``: that broker, even if the present master
        is alive. ``without``: any other broker than this one, even if it is the present master and alive. ``among``:
        one of these. ``epoch``: only while this one lasts.

        Of several the one with the longest log is taken, as heartbeats to this controller say. All have what was
        acknowledged, unless a machine has lost its power under ASYNC_FLUSH. So a controller that has just started first
        hears them all, ``hears_until`` at most; one that has said nothing since its connection closed is taken last.
        """
        if not designate and among is None and trio.current_time() < self.hears_until:
            await self._hear_candidates(name, broker_id, without)

        async def decide(state: GroupState) -> Elected | None:
            if state.group is None:
                raise RemotingError(ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED, f"{name} is not known")
            old = state.living_master
            if epoch not in {None, state.epoch}:
                return Elected(state, changed=False)
            if old is not None and old != without and (not designate or old == broker_id):
                return Elected(state, changed=False)
            candidates = self._candidates(state, broker_id, designate=designate, without=without)
            if among is not None:
                candidates &= set(among)
            new = best((found, self._rank(name, found)) for found in candidates)
            if new is None:
                by_broker = broker_id >= 0
                code = ResponseCode.CONTROLLER_ELECT_MASTER_FAILED if by_broker else _NOT_AVAILABLE
                raise RemotingError(code, _why_none(state, broker_id if designate else -1))
            unclean = state.set is not None and new not in state.members
            compares = state.unchanged("group", "master", "epoch", "set", f"ids/{new}", f"alive/{new}")
            if state.master is not None and state.master != new and old is None:
                compares += state.unchanged(f"alive/{state.master}")  # it is still not there
            if unclean and not designate:
                compares += state.unchanged(*(f"alive/{member}" for member in state.members))  # nor is any of them
            changes = [
                state.put("master", new),
                state.put("epoch", state.epoch + 1),
                state.put("set", SetRecord(state.set_epoch + 1, [new])),
            ]
            if not await self._txn(compares, changes):
                return None
            self.elections += 1
            if unclean:
                _log.warning(
                    "unclean_election",
                    broker_name=name,
                    elected=new,
                    sync_state_set=state.members,
                    log_end=self._live(name, new).max_offset,
                    known_ends={member: self._live(name, member).max_offset for member in state.members},
                    effect="messages that only members of the SyncStateSet have are lost",
                )
            _log.info("master_elected", broker_name=name, master_id=new, epoch=state.epoch + 1, before=state.master)
            # Not what is known by now: that may be a later master already, or the store may not answer any more.
            return Elected(state.after(changes), changed=True)

        return await self._decided(name, decide)

    async def _hear_candidates(self, name: str, broker_id: int, without: int | None) -> None:
        with trio.move_on_at(self.hears_until):
            while True:
                state = await self.state(name)
                candidates = self._candidates(state, broker_id, designate=False, without=without)
                unheard = [found for found in candidates if (name, found) not in self.live.keys() - self.silent]
                if state.living_master not in {None, without} or len(candidates) == 1 or not unheard:
                    return
                await self._heard.setdefault(name, trio.lowlevel.ParkingLot()).park()

    def _candidates(self, state: GroupState, broker_id: int, *, designate: bool, without: int | None) -> set[int]:
        if state.set is None:  # the first master: there is nothing that another broker could have
            candidates = {broker_id} if broker_id in state.ids else set(state.alive)
        else:
            candidates = state.alive & set(state.members) & set(state.ids)
            if self._config().enable_elect_unclean_master and without is None:
                wide = state.alive & set(state.ids)
                if not candidates or (designate and broker_id not in candidates):
                    candidates = wide
        candidates.discard(-1 if without is None else without)
        return candidates & {broker_id} if designate else candidates

    def _rank(self, name: str, broker_id: int) -> BrokerLiveInfo:
        return BrokerLiveInfo() if (name, broker_id) in self.silent else self._live(name, broker_id)

    def _live(self, name: str, broker_id: int) -> BrokerLiveInfo:
        return self.live.get((name, broker_id), BrokerLiveInfo())

    async def without_master(self) -> list[str]:
        """The names whose master is not alive, and which have a member of the set that is. Raises KvError."""
        snapshot = await self._kv.range(self.root)
        groups: dict[str, dict[str, Entry]] = {}
        for key, entry in snapshot.entries.items():
            groups.setdefault(place_of(self.root, key)[0], {})[key] = entry
        found = []
        for name, entries in sorted(groups.items()):
            try:
                state = GroupState(self.root, name, Snapshot(snapshot.revision, entries))
            except UnreadableError as error:
                _log.error("controller_record_unreadable", broker_name=name, reason=str(error))
                continue
            if state.set is not None and state.living_master is None and state.alive:
                found.append(name)
        return found

    # the set

    async def alter_sync_state_set(
        self, name: str, master: int, epoch: int, members: Sequence[int], set_epoch: int, *, fence: bool = False
    ) -> SetRecord:
        """Change the set for its master. Raises RemotingError with the first reason against it, KvError.

        ``fence``: the members may be the same. Their new epoch lets every request fail that was made before, so the
        master knows what became of one that was not answered.
        """

        async def decide(state: GroupState) -> SetRecord | None:
            new = sorted(set(members))
            _check_change(state, master, epoch, new, set_epoch, fence=fence)
            found = SetRecord(state.set_epoch + 1, new)
            alive = [f"alive/{member}" for member in new if member not in state.members]
            compares = state.unchanged("set", "master", "epoch", *alive)
            return found if await self._txn(compares, [state.put("set", found)]) else None

        found = await self._decided(name, decide)
        _log.info("sync_state_set_changed", broker_name=name, members=found.ids, set_epoch=found.epoch)
        return found

    # removal

    async def clean(self, name: str, broker_ids: Sequence[int] | None, *, living: bool) -> None:
        """Forget brokers of a name, or all of them. Raises CONTROLLER_INVALID_CLEAN_BROKER_METADATA, KvError.

        One that is alive (``living``) gets no lease any more, and joins the set again when it is restarted. With all of
        them the group ends, also while its master is alive: it acknowledges until its lease ends. Their ids are not
        given again.

        RocketMQ's controller with ``living`` removes all brokers of the name, whatever ids are asked for.
        """
        gone_alive: list[int] = []

        async def decide(state: GroupState) -> bool | None:
            if state.group is None:
                raise RemotingError(_NOT_CLEANED, f"broker {name} is not known")
            gone = set(state.ids) if broker_ids is None else set(broker_ids)
            gone_alive[:] = sorted(gone & state.alive)
            if not living and gone_alive:
                raise RemotingError(_NOT_CLEANED, f"broker {name} with id {gone_alive[0]} is still alive")
            if state.living_master in gone and not gone >= set(state.ids):
                # Its lease goes on for a while, and with its key gone another master would be elected meanwhile.
                text = f"broker {name} with id {state.master} is the master: elect another one first"
                raise RemotingError(_NOT_CLEANED, text)
            changes: list[Put | Delete] = []
            for broker_id in sorted(gone):
                changes += [Delete(state.key(f"ids/{broker_id}")), Delete(state.key(f"alive/{broker_id}"))]
            left = [member for member in state.members if member not in gone]
            if gone >= set(state.ids):
                # The epoch and the next id stay: brokers that come back know theirs.
                changes += [Delete(state.key(key)) for key in ("group", "master", "set")]
                changes.append(state.put("next", state.next_id))
            elif left != state.members:
                if not left:
                    raise RemotingError(_NOT_CLEANED, f"no other broker of {name} has all of its messages")
                changes.append(state.put("set", SetRecord(state.set_epoch + 1, left)))
                if state.master in gone:
                    changes.append(Delete(state.key("master")))
            keys = [f"{part}/{found}" for found in sorted(gone) for part in ("ids", "alive")]
            return await self._txn(state.unchanged("group", "master", "set", *keys), changes) or None

        await self._decided(name, decide)
        ids = list(broker_ids) if broker_ids is not None else "all"
        _log.info("broker_cleaned", broker_name=name, broker_ids=ids, living=gone_alive)


_NOT_AVAILABLE: Final = ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE
_NOT_CLEANED: Final = ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA


def _known(state: GroupState, broker_id: int) -> IdRecord:
    """The record of a broker. Raises CONTROLLER_BROKER_NEED_TO_BE_REGISTERED."""
    found = state.ids.get(broker_id)
    if found is None:
        text = f"broker {state.name} with id {broker_id} is not known: it has to apply for an id"
        raise RemotingError(ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED, text)
    return found


def _why_none(state: GroupState, designated: int) -> str:
    alive = sorted(state.alive & set(state.members))
    if designated >= 0:
        why = "is not in the SyncStateSet" if designated not in state.members else "is not alive"
        return f"broker id {designated} {why}: living members of the set are {alive}"
    return f"no member of the SyncStateSet {state.members} is alive: start one of them, or set enableElectUncleanMaster"


def _check_change(
    state: GroupState, master: int, epoch: int, members: Sequence[int], set_epoch: int, *, fence: bool
) -> None:
    """Raise the first reason against a change of the set, in RocketMQ's order."""
    name, old = state.name, state.set
    if old is None:
        raise RemotingError(ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED, f"{name} has no SyncStateSet")
    if sorted(old.ids) == list(members) and not fence:
        raise RemotingError(ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED, "the SyncStateSet is this one already")
    if state.master != master:
        raise RemotingError(ResponseCode.CONTROLLER_INVALID_MASTER, f"the master is {state.master}, not {master}")
    if state.epoch != epoch:
        raise RemotingError(ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH, f"the epoch is {state.epoch}, not {epoch}")
    if old.epoch != set_epoch:
        text = f"the set's epoch is {old.epoch}, not {set_epoch}"
        raise RemotingError(ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH, text)
    for member in members:
        if member not in state.ids:
            raise RemotingError(ResponseCode.CONTROLLER_INVALID_REPLICAS, f"broker id {member} is not known")
        # One that is in the set already may stay: the master may hear from it though no controller does.
        if member not in state.alive and member not in old.ids:
            raise RemotingError(ResponseCode.CONTROLLER_BROKER_NOT_ALIVE, f"broker id {member} is not alive")
    if master not in members:
        text = "the new SyncStateSet does not have the master"
        raise RemotingError(ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED, text)
