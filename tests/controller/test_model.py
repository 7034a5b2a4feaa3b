"""Random histories of three brokers and three controllers: what has to hold for each decision."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.controller.groups import NAME, Group, heartbeat_header
from trimq.controller.group_state import GroupState
from trimq.controller.replicas_info import ReplicasInfoManager
from trimq.protocol.errors import RemotingError

T = TypeVar("T")

BROKERS = st.integers(1, 3)
CONTROLLERS = st.integers(0, 2)
DIFFERENCE = st.sampled_from([0, 0, 0, -1])


class Controllers(RuleBasedStateMachine):
    """``promised`` has what the answers to heartbeats promise to brokers: no other master until then."""

    def __init__(self) -> None:
        super().__init__()
        self.group = Group(controllers=3)
        self.masters: dict[int, int] = {}
        self.sets: dict[int, list[int]] = {}
        self.promised: dict[int, float] = {}
        self.given: dict[int, str] = {}

    def run(self, function: Callable[..., Awaitable[T]], *arguments: object) -> T:
        return trio.run(function, *arguments)

    def manager(self, at: int) -> ReplicasInfoManager:
        return self.group.managers[at]

    def state(self) -> GroupState:
        return self.run(self.manager(0).state, NAME)

    def checked(
        self, call: Callable[[], Awaitable[T]], *, may_replace: bool = False, restarted: int | None = None
    ) -> T | None:
        """Make a decision, and compare the group before and after. None if the decision was refused."""
        before = self.state()
        try:
            found: T | None = self.run(call)
        except RemotingError:
            found = None
        after = self.state()
        assert after.epoch >= before.epoch, "an epoch fell"
        assert after.epoch <= before.epoch + 1, "one call has elected twice"
        if after.epoch == before.epoch:
            assert after.master == before.master, "another master in the same epoch"
        else:
            assert after.epoch not in self.masters, "two masters in one epoch"
            assert after.master is not None
            self.masters[after.epoch] = after.master
            if restarted == after.master == before.master:  # it leads another epoch, and the set waits for the same
                assert after.members == before.members
            else:
                assert after.members == [after.master]
                assert after.master in before.alive
            assert before.set is None or after.master in before.members, "it may lack acknowledged messages"
            old = before.master
            if old is not None and old != after.master and not may_replace:
                assert self.promised.get(old, 0) <= self.group.clock.boot_seconds(), "the old master has a lease"
        if after.members != before.members or after.epoch != before.epoch:
            assert after.set_epoch == before.set_epoch + 1
        assert set(after.members) <= set(after.ids)
        return found

    @initialize(brokers=st.permutations([1, 2, 3]))
    def group_begins(self, brokers: list[int]) -> None:
        for broker_id in (1, 2, 3):
            self.apply(0, broker_id, "first")
        for broker_id in brokers:
            self.heartbeat(0, broker_id, 3000, 0)
        self.elect(0, brokers[0], designate=False)
        self.alter(0, brokers[0], brokers, 0, 0)

    @rule(at=CONTROLLERS, broker_id=BROKERS, code=st.sampled_from(["first", "second"]))
    def apply(self, at: int, broker_id: int, code: str) -> None:
        async def call() -> bool:
            await self.manager(at).apply_broker_id("c", NAME, broker_id, f"a:{broker_id};{code}")
            return True

        if self.checked(call):
            assert self.given.setdefault(broker_id, code) == code, "an id was given twice"

    @rule(
        at=CONTROLLERS,
        broker_id=BROKERS,
        timeout=st.sampled_from([3000, 3000, 5000]),
        max_offset=st.integers(0, 1 << 40),
    )
    def heartbeat(self, at: int, broker_id: int, timeout: int, max_offset: int) -> None:
        header = heartbeat_header(broker_id, timeout=timeout, max_offset=max_offset)
        began = self.group.clock.boot_seconds()
        found = self.checked(lambda: self.manager(at).heartbeat(header))
        assert found is not None
        assert broker_id in found.state.alive
        if found.state.master == broker_id:
            self.promised[broker_id] = max(self.promised.get(broker_id, 0), began + found.ttl_ms / 1000)

    @rule(at=CONTROLLERS, brokers=st.sampled_from([(1, 2, 3), (1, 2, 3), (1, 2), (2, 3), (1, 3)]))
    def heartbeats(self, at: int, brokers: tuple[int, ...]) -> None:
        for broker_id in brokers:
            self.heartbeat(at, broker_id, 3000, 0)

    @rule(seconds=st.sampled_from([0.5, 1, 1.5, 2, 2.999, 3]))
    def time_passes(self, seconds: float) -> None:
        self.group.clock.advance(seconds)

    @rule(at=CONTROLLERS, dead=BROKERS, seconds=st.sampled_from([0.9, 1, 1.5]))
    def one_is_silent(self, at: int, dead: int, seconds: float) -> None:
        """The others go on; with the shortest time its lease has not ended yet."""
        self.heartbeats(at, (1, 2, 3))
        self.group.clock.advance(2)
        self.heartbeats(at, tuple({1, 2, 3} - {dead}))
        self.group.clock.advance(seconds)

    @rule(at=CONTROLLERS, broker_id=st.integers(-1, 3).filter(bool), designate=st.booleans())
    def elect(self, at: int, broker_id: int, *, designate: bool) -> None:
        designate = designate and broker_id > 0
        self.checked(lambda: self.manager(at).elect(NAME, broker_id, designate=designate), may_replace=designate)

    @rule()
    def elect_everywhere(self) -> None:
        """The controllers have all heard that a broker is not alive any more."""
        changed: list[int] = []

        async def one(at: int) -> None:
            try:
                found = await self.manager(at).elect(NAME)
            except RemotingError:
                return
            if found.changed:
                assert found.state.master is not None
                changed.append(found.state.master)

        async def all_of_them() -> None:
            async with trio.open_nursery() as nursery:
                for at in range(3):
                    nursery.start_soon(one, at)

        before = self.state()
        self.checked(all_of_them)
        assert len(changed) == self.state().epoch - before.epoch, "each election is reported by one controller"

    @rule(at=CONTROLLERS, broker_id=BROKERS)
    def restart(self, at: int, broker_id: int) -> None:
        """A broker that starts again has no promise from before."""
        self.promised.pop(broker_id, None)
        address = f"127.0.0.1:{2000 + broker_id}"
        found = self.checked(
            lambda: self.manager(at).register(NAME, broker_id, address, started=True), restarted=broker_id
        )
        assert found is not None
        others = set(found.state.members) & found.state.alive - {broker_id}
        assert not (found.state.master == broker_id and others), "a restarted master stays"

    @rule(
        at=CONTROLLERS,
        master=st.one_of(st.none(), BROKERS),
        members=st.lists(BROKERS, max_size=3),
        old_epoch=DIFFERENCE,
        old_set_epoch=DIFFERENCE,
    )
    def alter(self, at: int, master: int | None, members: list[int], old_epoch: int, old_set_epoch: int) -> None:
        before = self.state()
        if master is None:  # the present one
            assert before.master is not None
            master = before.master
            members = sorted({*members, master})
        epoch, set_epoch = before.epoch + old_epoch, before.set_epoch + old_set_epoch
        found = self.checked(lambda: self.manager(at).alter_sync_state_set(NAME, master, epoch, members, set_epoch))
        if found is None:
            assert self.state().members == before.members
        else:
            assert (old_epoch, old_set_epoch, master) == (0, 0, before.master), "a change by a stale master"
            assert set(found.ids) == set(members) >= {master}
            assert set(found.ids) <= before.alive | set(before.members)

    @invariant()
    def the_set_has_the_master(self) -> None:
        state = self.state()
        if state.set is not None:
            assert state.master in state.members


TestControllers = Controllers.TestCase
TestControllers.settings = settings(max_examples=40, stateful_step_count=40)
