"""Queues for clients that leave the rebalancing to the broker (400), and the modes of groups (401, 402)."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.broker.wire_client import WireClient, consumer
from tests.namesrv.server import Server, running
from trimq.broker.controller import BrokerController
from trimq.broker.processors.assignment import STRATEGIES
from trimq.broker.services import topic_routes
from trimq.broker.testing import running_broker
from trimq.client import allocation
from trimq.protocol.body import MessageQueue, TopicConfig
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand

ASK = {
    "topic": "Orders",
    "consumerGroup": "G",
    "clientId": "c2",
    "strategyName": "AVG",
    "messageModel": "CLUSTERING",
}
MODE = {"topic": "Orders", "consumerGroup": "G", "mode": "POP", "popShareQueueNum": 2}


@pytest.fixture
async def names(tmp_path: Path) -> AsyncIterator[Server]:
    async with running(tmp_path) as server:
        yield server


@pytest.fixture
async def broker(tmp_path: Path, names: Server) -> AsyncIterator[BrokerController]:
    address = "{}:{}".format(*names.address)
    async with running_broker(tmp_path / "store", namesrvAddr=address) as controller:
        controller.context.topics.put(TopicConfig(topic_name="Orders", read_queue_nums=5, write_queue_nums=5))
        await controller.context.registration.registered()
        yield controller


@pytest.fixture
async def member(broker: BrokerController) -> AsyncIterator[WireClient]:
    """One of the two members of the group G; the other one's id is c1."""
    async with (
        WireClient.connect(broker.endpoint) as one,
        WireClient.connect(broker.endpoint) as two,
    ):
        await one.heartbeat("c1", consumers=[consumer("G", "Orders")])
        await two.heartbeat("c2", consumers=[consumer("G", "Orders")])
        yield two


async def ask(client: WireClient, code: int = RequestCode.QUERY_ASSIGNMENT, **changes: Any) -> RemotingCommand:
    return await client.ask(code, body=json.dumps(ASK | changes).encode())


def queues(reply: RemotingCommand, topic: str = "Orders") -> list[int] | None:
    """The ids of the assigned queues; None if the client is to keep what it has."""
    assert reply.code == 0, reply.remark
    body = json.loads(bytes(reply.body))
    if not body:
        return None
    assert body.keys() == {"messageQueueAssignments"}
    found = []
    for item in body["messageQueueAssignments"]:
        place = item["messageQueue"]
        assert item == {"messageQueue": place, "mode": "PULL"}
        assert place == {"topic": topic, "brokerName": "broker-a", "queueId": place["queueId"]}
        found.append(place["queueId"])
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [3, 4]),
        ({"clientId": "c1"}, [0, 1, 2]),
        ({"strategyName": "AVG_BY_CIRCLE"}, [1, 3]),
        ({"clientId": "c1", "strategyName": "AVG_BY_CIRCLE"}, [0, 2, 4]),
        ({"messageModel": "BROADCASTING"}, [0, 1, 2, 3, 4]),
        ({"messageModel": "BROADCASTING", "consumerGroup": "unknown", "strategyName": "SAME"}, [0, 1, 2, 3, 4]),
        ({"messageModel": "BROADCASTING", "topic": "Unknown"}, None),
        ({"messageModel": "LITE_SELECTIVE"}, None),
        ({"clientId": "other"}, []),
        ({"clientId": " "}, None),
        ({"clientId": None}, None),
        ({"strategyName": "SAME"}, None),
        ({"strategyName": None}, None),
        ({"consumerGroup": "unknown"}, None),
        ({"topic": "Unknown"}, None),
    ],
    ids=str,
)
async def test_the_queues_of_a_client(member: WireClient, changes: dict[str, Any], expected: list[int] | None) -> None:
    for _ in range(2):  # the first time the name server is asked
        assert queues(await ask(member, **changes)) == expected


@pytest.mark.parametrize(
    "body",
    [b"", b"x", b"[]", b"{}", json.dumps(ASK | {"messageModel": "X"}).encode()]
    + [json.dumps(ASK | {name: None}).encode() for name in ("topic", "consumerGroup", "messageModel")],
)
async def test_broken_bodies(member: WireClient, body: bytes) -> None:
    reply = await member.ask(RequestCode.QUERY_ASSIGNMENT, body=body)
    assert reply.code == ResponseCode.SYSTEM_ERROR
    assert reply.remark


@pytest.mark.parametrize("topic", ["", " ", "a b", "x" * 128, "%RETRY%" + "x" * 300, "x" * 1_000_000])
@pytest.mark.parametrize("model", ["CLUSTERING", "BROADCASTING"])
async def test_a_name_that_no_topic_can_have(
    broker: BrokerController, member: WireClient, topic: str, model: str
) -> None:
    reply = await ask(member, topic=topic, messageModel=model)
    assert reply.code == ResponseCode.INVALID_PARAMETER
    assert len(reply.remark or "") < 500
    assert not broker.context.routes._entries


async def test_a_retry_topic_is_shared_too(member: WireClient) -> None:
    assert queues(await ask(member, topic="%RETRY%G", clientId="c1"), "%RETRY%G") == [0]
    assert queues(await ask(member, topic="%RETRY%G"), "%RETRY%G") == []


async def test_without_the_balancer_each_client_gets_all(broker: BrokerController, member: WireClient) -> None:
    assert (await member.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"serverLoadBalancerEnable=false")).code == 0
    assert queues(await ask(member)) == [0, 1, 2, 3, 4]
    assert queues(await ask(member, consumerGroup="unknown", strategyName="SAME")) == [0, 1, 2, 3, 4]
    assert queues(await ask(member, topic="Unknown")) is None


async def test_a_member_that_comes_or_goes_changes_the_shares(broker: BrokerController, member: WireClient) -> None:
    assert queues(await ask(member)) == [3, 4]
    async with WireClient.connect(broker.endpoint) as third:
        await third.heartbeat("c0", consumers=[consumer("G", "Orders")])
        assert queues(await ask(member)) == [4]
    with trio.fail_after(10):
        while queues(await ask(member)) != [3, 4]:
            await trio.lowlevel.checkpoint()


async def test_the_last_member_leaves_while_the_name_server_is_asked(
    broker: BrokerController, member: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = topic_routes.TopicRouteInfoManager._fetch

    async def leaving(self: topic_routes.TopicRouteInfoManager, topic: str) -> Any:
        del broker.context.consumers.table["G"]
        return await fetch(self, topic)

    monkeypatch.setattr(topic_routes.TopicRouteInfoManager, "_fetch", leaving)
    assert queues(await ask(member)) is None


async def test_many_queues(broker: BrokerController, member: WireClient) -> None:
    broker.context.topics.put(TopicConfig(topic_name="Large", read_queue_nums=3000, write_queue_nums=1))
    await broker.context.registration.registered()
    assert queues(await ask(member, topic="Large"), "Large") == list(range(1500, 3000))


@given(
    queue_count=st.integers(1, 40),
    ids=st.lists(st.text("abc012", min_size=1, max_size=4), min_size=1, max_size=12, unique=True),
)
def test_shares_are_those_that_clients_compute(queue_count: int, ids: list[str]) -> None:
    every = [MessageQueue(topic="T", broker_name="a", queue_id=number) for number in range(queue_count)]
    for name, share in (("AVG", allocation.average), ("AVG_BY_CIRCLE", allocation.circle)):
        taken: list[int] = []
        for client in ids:
            numbers = STRATEGIES[name](sum(other < client for other in ids), len(ids), queue_count)
            assert [every[number] for number in numbers] == share(client, every, sorted(ids))
            taken += numbers
        assert sorted(taken) == list(range(queue_count))


# the modes


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"mode": "PULL"}, 0),
        ({"popShareQueueNum": -1}, 0),
        ({"consumerGroup": "New"}, 0),
        ({"mode": None}, 0),
        ({"topic": "%RETRY%G"}, ResponseCode.NO_PERMISSION),
        ({"topic": "Unknown"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"consumerGroup": "a b"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        ({"mode": "PUSH"}, ResponseCode.INVALID_PARAMETER),
        ({"topic": None}, ResponseCode.SYSTEM_ERROR),
        ({"consumerGroup": None}, ResponseCode.SYSTEM_ERROR),
        ({"popShareQueueNum": "x"}, ResponseCode.SYSTEM_ERROR),
    ],
    ids=str,
)
async def test_the_mode_of_a_group_is_stored(
    broker: BrokerController, member: WireClient, tmp_path: Path, changes: dict[str, Any], code: int
) -> None:
    body = MODE | changes
    reply = await member.ask(RequestCode.SET_MESSAGE_REQUEST_MODE, body=json.dumps(body).encode())
    assert reply.code == code, reply.remark
    table = json.loads(bytes((await member.ask(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)).body))
    if code:
        assert reply.remark
        assert table == {"messageRequestModeMap": {}}
        return
    entry = body | {"mode": body["mode"] or "PULL"}
    assert table == {"messageRequestModeMap": {"Orders": {body["consumerGroup"]: entry}}}
    assert json.loads((tmp_path / "store/config/messageRequestMode.json").read_text()) == table


async def test_a_group_whose_mode_is_pop_pulls(member: WireClient) -> None:
    assert (await member.ask(RequestCode.SET_MESSAGE_REQUEST_MODE, body=json.dumps(MODE).encode())).code == 0
    assert queues(await ask(member)) == [3, 4]


async def test_modes_survive_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        await client.send("Orders")
        assert (await client.ask(RequestCode.SET_MESSAGE_REQUEST_MODE, body=json.dumps(MODE).encode())).code == 0
        before = (await client.ask(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)).body
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        assert (await client.ask(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)).body == before
        assert json.loads(bytes(before))["messageRequestModeMap"]["Orders"]["G"] == MODE


async def test_a_mode_beyond_the_limit(tmp_path: Path) -> None:
    async with running_broker(tmp_path, maxOffsetGroups=100) as broker, WireClient.connect(broker.endpoint) as client:
        await client.send("Orders")
        broker.context.modes._count = 100
        reply = await client.ask(RequestCode.SET_MESSAGE_REQUEST_MODE, body=json.dumps(MODE).encode())
        assert reply.code == ResponseCode.SYSTEM_BUSY
        assert "maxOffsetGroups" in (reply.remark or "")
