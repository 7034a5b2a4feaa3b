"""What a controller does when its store fails in the moment of an election, and what a lease promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.controller.groups import NAME, TTL, Group, refused
from tests.interop.harness.etcd import running_etcd
from trimq.controller.config import load_controller
from trimq.controller.etcd_kv import EtcdKv
from trimq.controller.group_state import GroupState
from trimq.controller.kv import Compare, Delete, KvError, Put
from trimq.controller.local_kv import LocalKv
from trimq.controller.server import ControllerManager
from trimq.protocol.codes import ResponseCode
from trimq.remoting.runtime.clock import ManualClock


class FailingKv(LocalKv):
    """``fail`` is called before and after each transaction."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.fail: Callable[[bool], None] = lambda _done: None

    async def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        self.fail(False)
        made = await super().txn(compares, changes)
        self.fail(True)
        return made

    def lose_answer(self, made: bool, *, sent: bool = True) -> None:
        """Fail the next transaction, ``made`` or not. ``sent``: whether the caller has to take it for possible."""

        def lose(done: bool) -> None:
            if done is made:
                self.fail = lambda _done: None
                raise KvError("the answer got lost", sent=sent)

        self.fail = lose


async def controlled(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Group, FailingKv, ControllerManager, list[GroupState]]:
    """A group led by 1, its store, a controller that does not run yet, and what that one would say to the brokers."""
    group = Group()
    kv = group.kv = FailingKv(group.clock)
    group.managers = [group.through(kv)]
    await group.led_by(1, 2)
    keys = {"bindAddress": "127.0.0.1", "listenPort": "0", "scanInactiveMasterInterval": "1000000"}
    configuration = load_controller(flags={key: (value, "test") for key, value in keys.items()})
    controller = ControllerManager(configuration, group.clock, kv=kv)
    news: list[GroupState] = []
    monkeypatch.setattr(controller, "_notify_soon", news.append)
    return group, kv, controller, news


@pytest.mark.parametrize("made", [True, False])
async def test_brokers_hear_of_an_election_whose_answer_got_lost(made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group, kv, controller, news = await controlled(monkeypatch)
    async with trio.open_nursery() as nursery:
        await nursery.start(controller.run)
        await pass_time(group.clock, 2)
        await group.beat(2)
        kv.lose_answer(made)
        await pass_time(group.clock, 2.5)
        assert [(state.master, state.epoch) for state in news] == [(2, 2)]
        assert await group.facts() == (2, 2, [2], 3)
        controller.shutdown()
        await pass_time(group.clock, 1)


@pytest.mark.parametrize(("sent", "made"), [(True, True), (True, False), (False, False)])
async def test_a_master_that_is_gone_while_the_store_does_not_answer(
    sent: bool, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease decides; if the election was made, the brokers hear of it."""
    group, kv, controller, news = await controlled(monkeypatch)
    async with trio.open_nursery() as nursery:
        await nursery.start(controller.run)
        await trio.testing.wait_all_tasks_blocked(0.005)
        kv.lose_answer(made, sent=sent)
        with pytest.raises(KvError):
            await controller._replace(await group.manager.state(NAME), 1, {2})
        await pass_time(group.clock, 0.5)
        assert [(state.master, state.epoch) for state in news] == ([(2, 2)] if made else [])
        assert (await group.facts())[:2] == ((2, 2) if made else (1, 1))
        controller.shutdown()
        await pass_time(group.clock, 1)


async def test_a_master_that_is_gone_with_none_that_may_follow() -> None:
    group = Group()
    await group.led_by(1, 2)
    keys = {"bindAddress": "127.0.0.1", "listenPort": "0"}
    configuration = load_controller(flags={key: (value, "test") for key, value in keys.items()})
    controller = ControllerManager(configuration, group.clock, kv=group.kv)
    controller.replicas = group.manager
    state = await group.manager.state(NAME)
    with capture_logs() as logs:
        await controller._replace(state, 1, {3})
    assert [line["event"] for line in logs] == ["no_master_elected"]
    await group.manager._next_epoch(NAME, 1)
    await controller._replace(state, 1, {2})
    assert (await group.facts())[:2] == (1, 2), "it was started again since that state"
    state = await group.manager.state(NAME)
    await group.manager.elect(NAME, 2, designate=True)
    with capture_logs() as logs:
        await controller._replace(state, 1, {2})  # another controller was quicker
    assert logs == []
    assert (await group.facts())[:2] == (2, 3)


async def test_a_living_master_is_not_removed() -> None:
    group = Group()
    await group.led_by(1, 2)
    assert (await group.beat(1)).ttl_ms == TTL
    call = group.manager.clean(NAME, [1], living=True)
    assert await refused(call) == ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    assert not (await group.manager.elect(NAME)).changed
    await group.manager.elect(NAME, 2, designate=True)
    await group.manager.clean(NAME, [1], living=True)
    assert await group.facts() == (2, 2, [2], 3)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_watch_leaves_a_member_that_does_not_answer(tmp_path: Path) -> None:
    with running_etcd(tmp_path, members=3) as etcd:
        kv = EtcdKv([member.client for member in etcd.members])
        since = await kv.range("/t/")
        with etcd.members[0].process.frozen():
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kv.watch, "/t/", since.revision, lambda _key: None)
                await trio.testing.wait_all_tasks_blocked(0.2)
                await answered(kv)
            # The watch has returned too, long before it is silent for too long.
            assert trio.current_time() - began < 20
        await kv.close()


async def answered(kv: EtcdKv) -> None:
    with trio.fail_after(20):
        while True:
            try:
                await kv.range("/t/")
            except KvError:
                continue
            return


async def pass_time(clock: ManualClock, seconds: float) -> None:
    """In steps, so that the tasks that sleep on this clock run in between."""
    for _ in range(math.ceil(seconds / 0.1)):
        clock.advance(0.1)
        await trio.testing.wait_all_tasks_blocked(0.005)
