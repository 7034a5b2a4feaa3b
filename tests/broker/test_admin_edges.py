"""Administration in error cases: state that cannot be saved or read, clients that do not answer."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.broker.test_admin import NEW_TOPIC, RESET, body, by_queue
from tests.broker.wire_client import WireClient, consumer
from trimq.broker import addresses
from trimq.broker.controller import BrokerController
from trimq.broker.processors.admin import client_admin
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode, ResponseCode


async def test_a_change_that_cannot_be_saved_is_not_made(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        (tmp_path / "config" / "broker.properties").mkdir()
        reply = await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"maxMessageSize=1024\n")
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "nothing was changed" in str(reply.remark)
        assert b"maxMessageSize=1024" not in bytes((await client.ask(RequestCode.GET_BROKER_CONFIG)).body)


async def test_a_disk_that_does_not_say_how_full_it_is(client: WireClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def space(_disk: RealDisk, path: str) -> None:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(RealDisk, "space", space)
    table = body(await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO))["table"]
    assert table["commitLogDiskRatio"] == "-1"
    assert table["commitLogDirCapacity"] == "unknown: Input/output error"
    assert table["brokerVersionDesc"]


async def test_units_for_a_group_that_is_not_there(client: WireClient) -> None:
    await client.send("Orders")
    ext = {"topic": "Orders", "queueId": 0, "index": 0, "count": 10, "consumerGroup": "G"}
    found = body(await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext))
    assert found["filterData"] == "G@Orders is not online!"
    assert len(found["queueData"]) == 1
    assert body(await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext | {"index": 1}))["queueData"] == []


async def test_one_queue_is_reset_to_a_time(client: WireClient) -> None:
    await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)
    for _ in range(3):
        await client.send("Orders")
    await client.pull("Orders", 1, sysFlag=5, commitOffset=1)
    reset = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    assert by_queue(body(await client.ask(reset, RESET | {"queueId": 0}))["offsetTable"]) == {0: 3}
    assert by_queue(body(await client.ask(reset, RESET | {"queueId": 0, "timestamp": 1}))["offsetTable"]) == {0: 0}


async def test_without_force_a_reset_by_the_clients_goes_back_only(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, useServerSideResetOffset=False) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)
        for _ in range(3):
            await client.send("Orders")
        await client.pull("Orders", 1, sysFlag=5, commitOffset=1)
        await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
        reset = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
        late = RESET | {"timestamp": 2**62, "isForce": "false"}
        assert by_queue(body(await client.ask(reset, late))["offsetTable"]) == {0: 1, 1: 0}
        assert by_queue(body(await client.ask(reset, late | {"isForce": "true"}))["offsetTable"]) == {0: 3, 1: 0}
        assert by_queue(body(await client.ask(reset, late | {"timestamp": 1}))["offsetTable"]) == {0: 0, 1: 0}


async def test_a_client_that_does_not_answer_or_is_too_old(client: WireClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_admin, "CLIENT_TIMEOUT", 0.05)
    ask = {"consumerGroup": "G", "clientId": "c1", "jstackEnable": "true"}
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    reply = await client.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, ask)
    assert reply.code == ResponseCode.CONSUME_MSG_TIMEOUT
    assert "c1 did not answer" in str(reply.remark)
    status = await client.ask(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"topic": "Orders", "group": "G"})
    assert body(status)["consumerTable"] == {}  # it lists only clients that answer
    old = json.dumps({"clientID": "c2", "consumerDataSet": [consumer("H", "Orders")], "producerDataSet": []}).encode()
    await client.ask(RequestCode.HEART_BEAT, body=old, version=61)
    reply = await client.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, ask | {"consumerGroup": "H", "clientId": "c2"})
    assert reply.code == ResponseCode.SYSTEM_ERROR
    assert "c2 is too old" in str(reply.remark)


async def test_a_group_that_is_behind_the_others_needs_no_correction(client: WireClient) -> None:
    for _ in range(3):
        await client.send("Orders")
    await client.pull("Orders", 2, sysFlag=5, commitOffset=2)
    commit = {"consumerGroup": "H", "topic": "Orders", "queueId": 0, "commitOffset": 1}
    await client.pull("Orders", 0, group="H")
    assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == ResponseCode.SUCCESS
    ext = {"filterGroups": "H", "compareGroup": "H", "topic": "Orders"}
    found = body(await client.ask(RequestCode.QUERY_CORRECTION_OFFSET, ext))
    assert found == {"correctionOffsets": {"0": 2**63 - 1}}


async def test_offsets_of_a_topic_that_was_not_requested_are_not_copied(
    broker: BrokerController, client: WireClient
) -> None:
    await client.send("Orders")
    await client.pull("Orders", 1, sysFlag=5, commitOffset=1)
    ext = {"srcGroup": "G", "destGroup": "H", "topic": "Nowhere", "offline": "true"}
    assert (await client.ask(RequestCode.CLONE_GROUP_OFFSET, ext)).code == ResponseCode.SUCCESS
    assert broker.context.offsets.query("H", "Orders", 0) == -1


# the address that a broker gives to clients


class NoRoute:
    """A socket on a machine without a network."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise OSError(101, "Network is unreachable")


@pytest.mark.parametrize(
    ("found", "address"),
    [
        (["127.0.1.1", "10.1.2.3"], "10.1.2.3"),
        (["127.0.1.1"], "127.0.0.1"),
        (["fe80::1%eth0", "no address"], "127.0.0.1"),
        (OSError(2, "no such name"), "127.0.0.1"),
    ],
)
def test_a_machine_without_a_network_is_called_by_its_name(
    found: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: Any, **__: Any) -> list[Any]:
        if isinstance(found, OSError):
            raise found
        return [(2, 1, 6, "", (one, 0)) for one in found]

    monkeypatch.setattr(socket, "socket", NoRoute)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert addresses.first_address() == address
