"""What a broker believes of the controllers' answers, and how it ends before it has a role."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.broker.replicas.group import QUICK, running_group
from tests.broker.wire_client import WireClient
from tests.store.replication.pairs import until
from trimq.broker.replicas.controller_client import ControllerClient, ControllersError
from trimq.broker.replicas.replicas_manager import ReplicasManager
from trimq.broker.replicated_broker import ReplicatedBroker
from trimq.broker.store.message_store import Leadership
from trimq.broker.testing import configuration
from trimq.protocol.body import SyncStateSet, decode_json, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.remoting.client.remoting_client import RemotingClient
from trimq.remoting.errors import RemotingTransportError
from trimq.remoting.runtime.clock import ManualClock


class Controllers:
    """Answers with ``replies`` in turn, and keeps what it was asked for."""

    def __init__(self, *replies: RemotingCommand) -> None:
        self.addresses: list[str] = []
        self.leader = "leader:1"
        self.replies = list(replies)
        self.asked: list[RemotingCommand] = []

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        self.asked.append(command)
        await trio.lowlevel.checkpoint()
        return self.replies.pop(0)

    async def heartbeat(self, _address: str, _command: RemotingCommand, _timeout: float) -> RemotingCommand:
        await trio.lowlevel.checkpoint()
        return self.replies.pop(0)


def manager(tmp_path: Path, controllers: Controllers) -> ReplicasManager:
    """The manager of broker id 1, which leads epoch 3 with the set {1, 2}."""
    settings = configuration(tmp_path, {**QUICK, "controllerAddr": "127.0.0.1:1", "namesrvAddr": "127.0.0.1:1"})
    identity: Any = None
    client: Any = controllers
    found = ReplicasManager(settings, client, identity, ManualClock(), "127.0.0.1:10911")
    found.broker_id = 1
    found._note(1, "127.0.0.1:10911", 3, SyncStateSet(sync_state_set=[1, 2], sync_state_set_epoch=5))
    assert found.is_master
    return found


@pytest.mark.parametrize(
    ("broker_id", "address", "epoch", "members"),
    [
        (1, "127.0.0.1:10911", 4, []),  # a master that is no member of its set
        (1, "127.0.0.1:10911", 3, [2]),
        (2, "nowhere", 4, [2]),
        (2, "127.0.0.1:2", 2**31 - 1, [2]),
        (2, "127.0.0.1:2", 0, [2]),
    ],
)
def test_what_cannot_be_is_not_believed(
    broker_id: int, address: str, epoch: int, members: list[int], tmp_path: Path
) -> None:
    found = manager(tmp_path, Controllers())
    before = found.master
    found._note(broker_id, address, epoch, SyncStateSet(sync_state_set=members, sync_state_set_epoch=9))
    assert found.master == before
    assert "they name a master that cannot be one" in found.problem


async def test_a_set_that_is_not_wanted_any_more_is_not_asked_for(tmp_path: Path) -> None:
    controllers = Controllers()
    found = manager(tmp_path, controllers)
    leadership = found.lead()
    leadership.want(frozenset({1, 2, 3}))
    wished = leadership.wish
    assert wished is not None
    leadership.want(leadership.members)  # the slave has gone
    assert await found.set_changes.alter(leadership, wished)
    assert controllers.asked == []
    assert leadership.proposed is None


@pytest.mark.parametrize("proposed", [False, True])
async def test_the_wish_of_a_store_that_is_being_closed_is_no_hot_loop(
    proposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """This broker was elected again, for an epoch that its store is not of yet."""
    controllers = Controllers()
    found = manager(tmp_path, controllers)
    leadership = found.lead()
    leadership.want(frozenset({1}))
    if proposed:
        leadership.propose(frozenset({1}))
    found._note(1, "127.0.0.1:10911", 4, SyncStateSet(sync_state_set=[1, 2], sync_state_set_epoch=6))
    looks = 0

    def is_present(_leadership: Leadership) -> bool:
        nonlocal looks
        looks += 1
        assert looks < 10
        return False

    monkeypatch.setattr(found, "is_present", is_present)
    nursery.start_soon(found.set_changes.run)
    clock = found._clock
    assert isinstance(clock, ManualClock)
    for _ in range(3):
        await trio.testing.wait_all_tasks_blocked()
        assert clock.sleeping == 1
        clock.advance(0.2)
    assert looks == 3
    assert controllers.asked == []


async def test_a_broker_that_may_not_join_keeps_none_in_the_set_that_is_lost(tmp_path: Path) -> None:
    alone = encode_json(SyncStateSet(sync_state_set=[1], sync_state_set_epoch=6))
    controllers = Controllers(RemotingCommand(ResponseCode.CONTROLLER_BROKER_NOT_ALIVE), RemotingCommand(0, body=alone))
    found = manager(tmp_path, controllers)
    leadership = found.lead()
    leadership.want(frozenset({1, 3}))
    assert await found.set_changes.alter(leadership, frozenset({1, 3}))
    assert leadership.members == {1}
    assert leadership.proposed is None


async def test_a_refusal_is_logged_once_and_one_of_a_broker_that_has_just_started_is_no_warning(tmp_path: Path) -> None:
    codes = [ResponseCode.CONTROLLER_BROKER_NOT_ALIVE] * 2 + [ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH]
    found = manager(tmp_path, Controllers(*(RemotingCommand(code) for code in codes)))
    leadership = found.lead()
    leadership.want(frozenset({1, 2, 3}))
    with capture_logs() as logs:
        for _ in codes:
            assert not await found.set_changes.alter(leadership, frozenset({1, 2, 3}))
    assert [(log["code"], log["log_level"]) for log in logs] == [(2006, "info"), (2001, "warning")]


async def test_a_set_that_was_not_sent_is_not_waited_for(tmp_path: Path) -> None:
    class Unreachable(Controllers):
        async def ask(self, _command: RemotingCommand) -> RemotingCommand:
            raise ControllersError("no connection", unsent=True)

    found = manager(tmp_path, Unreachable())
    leadership = found.lead()
    leadership.want(frozenset({1, 2, 3}))
    assert not await found.set_changes.alter(leadership, frozenset({1, 2, 3}))
    assert leadership.awaited == {1, 2}
    assert found.problem == "no connection"


async def test_an_answer_without_a_set_leaves_the_outcome_open(tmp_path: Path) -> None:
    found = manager(tmp_path, Controllers(RemotingCommand(0, body=b"{")))
    leadership: Leadership = found.lead()
    leadership.want(frozenset({1}))
    assert not await found.set_changes.alter(leadership, frozenset({1}))
    assert leadership.awaited == {1, 2}
    assert found.problem


async def test_a_notification_is_only_a_reason_to_ask(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        ext = {"masterAddress": slave.broker.address, "masterEpoch": 9, "syncStateSetEpoch": 9, "masterBrokerId": 2}
        async with WireClient.connect(slave.controller.endpoint) as client:
            reply = await client.ask(RequestCode.NOTIFY_BROKER_ROLE_CHANGED, ext, b'{"syncStateSet":[2]}')
            assert reply.code == 0
        await trio.sleep(0.3)  # the question takes a millisecond
        assert master.leads
        assert not slave.leads
        assert slave.broker.manager.master is not None
        assert slave.broker.manager.master.epoch == 1


async def test_a_stop_before_any_controller_answers(tmp_path: Path) -> None:
    settings = configuration(tmp_path, {**QUICK, "controllerAddr": "127.0.0.1:1", "namesrvAddr": "127.0.0.1:1"})
    broker = ReplicatedBroker(settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(nursery.start, broker.run)
        await until(lambda: hasattr(broker, "manager") and bool(broker.manager.problem))
        with trio.fail_after(5):
            broker.shutdown()
            await broker.stopped.wait()


async def test_the_store_of_a_former_role_is_garbage(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        former = weakref.ref(slave.controller.context.store)
        assert slave.settled == 1
        await master.stop()
        await group.master(but=master)
        assert slave.settled == 2
        gc.collect()
        assert former() is None


def test_a_client_of_controllers_begins_without_a_leader() -> None:
    client = ControllerClient(RemotingClient(), ["127.0.0.1:1"])
    assert (client.addresses, client.leader) == (["127.0.0.1:1"], "")


def said(code: int, body: bytes = b"", **ext: object) -> RemotingCommand:
    return RemotingCommand(code, ext={key: str(value) for key, value in ext.items()}, body=body)


async def test_controllers_without_leases_let_a_master_lead(tmp_path: Path) -> None:
    controllers = Controllers(said(0), said(0), said(ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED))
    found = manager(tmp_path, controllers)
    leadership = found.lead()
    assert not leadership.holds()
    await found.heartbeats.send("a:1", 1.0)
    assert leadership.holds()
    assert found.heartbeats.lease_seconds is None
    await found.heartbeats.send("a:1", 1.0)
    asked = found._asked_again
    await found.heartbeats.send("a:1", 1.0)
    assert asked.is_set()


@pytest.mark.parametrize("epoch", [3, 2])
async def test_an_answer_with_a_lease_ends_what_one_without_has_said(epoch: int, tmp_path: Path) -> None:
    """A name server at a wrong address answers as Apache's controllers do."""
    lease = said(0, leaseMillis=3000, masterEpoch=epoch, masterBrokerId=1, masterAddress="127.0.0.1:10911")
    found = manager(tmp_path, Controllers(said(0), lease, said(0)))
    leadership = found.lead()
    await found.heartbeats.send("names:1", 1.0)
    assert leadership.holds()
    await found.heartbeats.send("a:1", 1.0)
    assert leadership.holds() is (epoch == 3), "a lease counts for the epoch in which this broker leads"
    await found.heartbeats.send("names:1", 1.0)
    found._clock.advance(9)  # type: ignore[attr-defined]
    assert not leadership.holds()
    assert not found.lead().holds()


async def test_a_lease_is_not_longer_than_what_was_asked_for(tmp_path: Path) -> None:
    reply = said(0, leaseMillis=10**9, masterEpoch=3, masterBrokerId=1, masterAddress="127.0.0.1:10911")
    found = manager(tmp_path, Controllers(reply))
    found.lead()
    await found.heartbeats.send("a:1", 1.0)
    assert found.heartbeats.lease_seconds is not None
    assert 0 < found.heartbeats.lease_seconds < 10
    assert found.lead_holds


async def test_a_broker_that_is_not_known_applies_for_the_same_id(tmp_path: Path) -> None:
    unknown = said(ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED)
    controllers = Controllers(unknown, said(0), unknown, said(ResponseCode.CONTROLLER_BROKER_ID_INVALID))
    found = manager(tmp_path, controllers)
    assert not await found._register()
    assert controllers.asked[1].code == RequestCode.CONTROLLER_APPLY_BROKER_ID
    assert controllers.asked[1].ext_fields()["appliedBrokerId"] == "1"
    assert controllers.asked[1].ext_fields()["trimqKnown"] == "1"
    assert not found.problem
    assert not await found._register()
    assert "they do not know broker id 1" in found.problem


async def test_a_group_that_is_not_known_is_registered_again(tmp_path: Path) -> None:
    controllers = Controllers(
        said(ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST),
        said(0, clusterName="C", brokerName="b"),
        said(ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED),
        said(0, clusterName="C", brokerName="b"),
    )
    found = manager(tmp_path, controllers)
    await found._ask_master()
    await found._elect()
    asked = [command.code for command in controllers.asked]
    assert asked == [
        RequestCode.CONTROLLER_GET_REPLICA_INFO,
        RequestCode.CONTROLLER_REGISTER_BROKER,
        RequestCode.CONTROLLER_ELECT_MASTER,
        RequestCode.CONTROLLER_REGISTER_BROKER,
    ]


async def test_a_broker_that_was_removed_follows_no_master_that_came_since(tmp_path: Path) -> None:
    controllers = Controllers(
        said(ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED),
        said(
            0,
            encode_json(SyncStateSet(sync_state_set=[3], sync_state_set_epoch=9)),
            masterBrokerId="3",
            masterAddress="127.0.0.1:3",
            masterEpoch="9",
        ),
    )
    found = manager(tmp_path, controllers)
    before = found.master
    await found.heartbeats.send("127.0.0.1:1", 1.0)
    await found._ask_master()
    assert found.master == before


async def test_handing_over_asks_one_member_after_the_other(tmp_path: Path) -> None:
    controllers = Controllers(said(ResponseCode.CONTROLLER_ELECT_MASTER_FAILED))
    found = manager(tmp_path, controllers)
    await found.hand_over()
    assert [command.ext_fields()["brokerId"] for command in controllers.asked] == ["2"]

    class Silent(Controllers):
        async def ask(self, _command: RemotingCommand) -> RemotingCommand:
            raise ControllersError("none answers", unsent=True)

    await manager(tmp_path, Silent()).hand_over()


async def test_a_set_whose_outcome_is_not_known_is_waited_for(tmp_path: Path) -> None:
    class Lost(Controllers):
        async def ask(self, _command: RemotingCommand) -> RemotingCommand:
            raise ControllersError("no answer", unsent=False)

    found = manager(tmp_path, Lost())
    leadership = found.lead()
    leadership.want(frozenset({1, 2, 3}))
    assert not await found.set_changes.alter(leadership, frozenset({1, 2, 3}))
    assert leadership.awaited == {1, 2, 3}
    # What is wanted meanwhile comes later: first it has to be known what became of that.
    leadership.want(frozenset({1}))
    assert not await found.set_changes.alter(leadership, frozenset({1}))
    assert leadership.proposed == frozenset({1, 2, 3})


async def test_a_member_that_dies_before_its_outcome_is_known_is_not_waited_for_for_ever(
    tmp_path: Path, autojump_clock: object
) -> None:
    """The request that was lost is made to fail by a fence, which needs no wish of the store."""
    fenced = encode_json(SyncStateSet(sync_state_set=[1, 2], sync_state_set_epoch=6))

    class Lossy(Controllers):
        async def ask(self, command: RemotingCommand) -> RemotingCommand:
            if not self.asked:
                leadership.want(frozenset({1, 2}))  # the third one dies meanwhile
                self.asked.append(command)
                raise ControllersError("no answer", unsent=False)
            assert leadership.awaited == {1, 2, 3}
            return await super().ask(command)

    lease = said(0, leaseMillis=3000, masterEpoch=3, masterBrokerId=1, masterAddress="127.0.0.1:10911")
    controllers = Lossy(lease, RemotingCommand(0, body=fenced))
    found = manager(tmp_path, controllers)
    leadership = found.lead()
    await found.heartbeats.send("a:1", 1.0)
    leadership.want(frozenset({1, 2, 3}))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.set_changes.run)
        while not controllers.asked:
            await trio.lowlevel.checkpoint()
        assert leadership.awaited == {1, 2, 3}
        found._clock.advance(1)  # type: ignore[attr-defined]
        await trio.testing.wait_all_tasks_blocked()
        assert leadership.awaited == {1, 2}
        assert leadership.set_epoch == 6
        nursery.cancel_scope.cancel()
    _, fence = controllers.asked
    assert fence.ext_fields()["trimqFence"] == "1"
    body = decode_json(fence.body, SyncStateSet)
    assert (body.sync_state_set, body.sync_state_set_epoch) == ([1, 2], 5)


async def test_a_fence_that_is_refused_leaves_the_outcome_open(tmp_path: Path) -> None:
    """The set is another one by now: it is asked for."""
    found = manager(tmp_path, Controllers(said(ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH)))
    found.heartbeats.leases = True
    leadership = found.lead()
    leadership.propose(frozenset({1, 2, 3}))
    assert not await found.set_changes.alter(leadership, await leadership.wanted())
    assert leadership.awaited == {1, 2, 3}
    assert found._asked_again.is_set()
    found._note(1, "127.0.0.1:10911", 3, SyncStateSet(sync_state_set=[1, 2, 3], sync_state_set_epoch=6))
    assert leadership.members == {1, 2, 3}
    assert leadership.proposed is None


async def test_apaches_controllers_are_asked_again_for_the_same_set(tmp_path: Path) -> None:
    controllers = Controllers(said(ResponseCode.CONTROLLER_BROKER_NOT_ALIVE))
    found = manager(tmp_path, controllers)
    found.heartbeats.leases = False
    leadership = found.lead()
    leadership.propose(frozenset({1, 2, 3}))
    assert not await found.set_changes.alter(leadership, await leadership.wanted())
    (asked,) = controllers.asked
    assert "trimqFence" not in asked.ext_fields()
    assert decode_json(asked.body, SyncStateSet).sync_state_set == [1, 2, 3]
    assert leadership.awaited == {1, 2, 3}, "an answer to the older one may still be under way"


async def test_what_waits_for_a_wish_hears_of_a_proposal() -> None:
    leadership = Leadership(1, 1, {1}, 1, lambda: 0.0)
    heard: list[frozenset[int]] = []
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            heard.append(await leadership.wanted())

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        leadership.propose(frozenset({1, 2}))
    assert heard == [{1, 2}]


class Remoting:
    """Ends each request as ``steps`` say: a reply, or an error."""

    def __init__(self, *steps: RemotingCommand | RemotingTransportError) -> None:
        self.steps = list(steps)

    async def invoke(self, _address: str, _command: RemotingCommand, _timeout: float) -> RemotingCommand:
        await trio.lowlevel.checkpoint()
        step = self.steps.pop(0)
        if isinstance(step, RemotingTransportError):
            raise step
        return step


def leader(address: str) -> RemotingCommand:
    return said(0, group="g", controllerLeaderId="n0", controllerLeaderAddress=address, isLeader="true", peers="")


def refused(*, written: bool) -> RemotingTransportError:
    return RemotingTransportError("a:1", "gone", written=written)


@pytest.mark.parametrize(
    ("steps", "unsent"),
    [
        ([refused(written=False), said(1), leader("nowhere")], True),
        ([leader("a:1"), refused(written=True)], False),
        ([leader("a:1"), refused(written=False), leader("b:1"), said(ResponseCode.CONTROLLER_NOT_LEADER)], True),
        ([leader("a:1"), said(ResponseCode.CONTROLLER_NOT_LEADER), refused(written=False), said(1), said(1)], True),
    ],
)
async def test_whether_a_request_may_have_arrived(
    steps: list[RemotingCommand | RemotingTransportError], unsent: bool
) -> None:
    remoting: Any = Remoting(*steps)
    client = ControllerClient(remoting, ["a:1", "b:1", "c:1"])
    with pytest.raises(ControllersError) as caught:
        await client.ask(RemotingCommand(RequestCode.CONTROLLER_GET_REPLICA_INFO))
    assert caught.value.unsent is unsent


async def test_another_leader_is_found(tmp_path: Path) -> None:
    remoting: Any = Remoting(leader("a:1"), said(ResponseCode.CONTROLLER_NOT_LEADER), leader("b:1"), said(0))
    client = ControllerClient(remoting, ["a:1"])
    assert (await client.ask(RemotingCommand(RequestCode.CONTROLLER_GET_REPLICA_INFO))).code == 0
    assert client.leader == "b:1"


UNKNOWN = ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED


async def test_a_controller_of_another_cluster_is_named_and_the_others_are_followed(tmp_path: Path) -> None:
    new = encode_json(SyncStateSet(sync_state_set=[2], sync_state_set_epoch=9))
    news = said(0, new, masterBrokerId="2", masterAddress="127.0.0.1:2", masterEpoch="9")
    known = said(0, leaseMillis=3000, masterEpoch=3, masterBrokerId=1, masterAddress="127.0.0.1:10911")
    controllers = Controllers(known, said(UNKNOWN), news, news)
    controllers.addresses = ["right:1", "wrong:1"]
    found = manager(tmp_path, controllers)
    before = found.master
    await found.heartbeats.send("right:1", 1.0)
    await found.heartbeats.send("wrong:1", 1.0)
    found._well()
    both = "wrong:1 does not know broker id 1, right:1 does: are they controllers of one cluster?"
    assert found.problem == both
    controllers.leader = "wrong:1"
    await found._ask_master()
    assert found.master == before
    controllers.leader = "right:1"
    await found._ask_master()
    assert found.epoch == 9
    found._well()
    assert found.problem == both


async def test_a_broker_that_all_controllers_know_again_has_no_problem(tmp_path: Path) -> None:
    """It was removed, and the controllers' store was replaced by an older copy of it."""
    controllers = Controllers(
        said(UNKNOWN), said(UNKNOWN), said(ResponseCode.CONTROLLER_BROKER_ID_INVALID), said(0), said(0)
    )
    controllers.addresses = ["a:1", "b:1"]
    controllers.leader = "another name of a:1"
    found = manager(tmp_path, controllers)
    await found.heartbeats.send("a:1", 1.0)
    found._well()
    assert found.problem == "they do not know broker id 1: to let it join again, restart it"
    assert not await found._register()
    assert found.problem == "they do not know broker id 1: answer 2014"
    await found.heartbeats.send("a:1", 1.0)
    assert found.heartbeats.is_strange(controllers.leader)
    assert found.heartbeats.problem
    await found.heartbeats.send("b:1", 1.0)
    assert not found.heartbeats.problem
    assert not found.heartbeats.is_strange(controllers.leader)
