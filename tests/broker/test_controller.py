"""The broker as a whole: name server in the process, addresses, restarts, clients sharing a group."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.wire_client import WireClient, consumer, pull_ext
from trimq.broker import addresses, state_services
from trimq.broker.controller import BrokerController
from trimq.broker.services.consumer_filters import ConsumerFilterManager
from trimq.broker.services.message_request_mode import MessageRequestModeManager
from trimq.broker.services.schedule import ScheduleMessageService
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.services.transaction.read_back import read_back
from trimq.broker.services.transaction.service import TransactionalMessageService
from trimq.broker.start_error import StartError
from trimq.broker.store.message_store import MessageStore
from trimq.broker.testing import configuration, running_broker
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.remoting.network import SystemNetwork


def namesrv(broker: BrokerController) -> tuple[str, int]:
    host, _, port = broker.name_servers[0].partition(" ")[0].rpartition(":")
    return host, int(port)


async def test_topics_are_known_to_the_name_server_at_once(tmp_path: Path) -> None:
    """Trap 15: an administrator reads back the topic it has just created."""
    async with (
        running_broker(tmp_path, embeddedNamesrvEnable=True, embeddedNamesrvPort=0) as broker,
        WireClient.connect(broker.endpoint) as client,
        WireClient.connect(namesrv(broker)) as names,
    ):
        create = {
            "topic": "Orders",
            "defaultTopic": "TBW102",
            "readQueueNums": 2,
            "writeQueueNums": 2,
            "perm": 6,
            "topicFilterType": "SINGLE_TAG",
        }
        assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, create)).code == 0
        reply = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "Orders"})
        route = json.loads(bytes(reply.body))
        assert route["brokerDatas"][0]["brokerAddrs"] == {"0": broker.address}
        assert route["queueDatas"][0]["writeQueueNums"] == 2
        await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
        reply = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "%RETRY%G"})
        assert reply.code == ResponseCode.SUCCESS  # trap 8
        reply = await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=4")
        assert reply.code == ResponseCode.SUCCESS
        reply = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "Orders"})
        assert json.loads(bytes(reply.body))["queueDatas"][0]["perm"] == 4


async def test_broker_leaves_the_routes_when_it_stops(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "a", embeddedNamesrvEnable=True, embeddedNamesrvPort=0) as first:
        address = namesrv(first)
        async with WireClient.connect(address) as names:
            where = f"{address[0]}:{address[1]}"
            async with running_broker(tmp_path / "b", brokerName="broker-b", namesrvAddr=where):
                await _wait_for_brokers(names, {"broker-a", "broker-b"})
            await _wait_for_brokers(names, {"broker-a"})


async def _wait_for_brokers(names: WireClient, wanted: set[str]) -> None:
    with trio.fail_after(50):
        while True:
            reply = await names.ask(RequestCode.GET_BROKER_CLUSTER_INFO)
            if set(json.loads(bytes(reply.body))["brokerAddrTable"]) == wanted:
                return
            await trio.lowlevel.checkpoint()


async def test_last_heartbeat_decides_for_the_group(broker: BrokerController, client: WireClient) -> None:
    """Trap 7: members of one group with different topics overwrite each other."""
    await client.send("One")
    await client.send("Two")
    async with WireClient.connect(broker.endpoint) as other:
        await client.heartbeat("c1", consumers=[consumer("G", "One")])
        assert (await client.pull("One", sysFlag=0)).code == ResponseCode.SUCCESS
        await other.heartbeat("c2", consumers=[consumer("G", "Two")])
        assert (await client.pull("One", sysFlag=0)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
        assert (await other.pull("Two", sysFlag=0)).code == ResponseCode.SUCCESS


async def test_the_store_knows_from_where_on_groups_have_yet_to_read(
    broker: BrokerController, client: WireClient
) -> None:
    await client.send("One")
    await client.send("One")
    await client.heartbeat("c1", consumers=[consumer("G", "One")])
    assert (await client.pull("One", maxMsgNums=1)).code == ResponseCode.SUCCESS
    store = broker.context.store
    with trio.fail_after(50):
        while not store.write_path.allocator.recycling.unread_from():
            await trio.lowlevel.checkpoint()
    ((second, _, _),) = await store.queue_units("One", 0, 1, 1)
    assert store.write_path.allocator.recycling.unread_from() == second


async def test_pending_messages_are_held_before_the_halves_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the halves may last longer than the time until the cleaner looks."""
    held: list[set[str]] = []

    async def noted(transactions: TransactionalMessageService, store: MessageStore, offsets: Any) -> None:
        held.append(set(store.log_holds.deleted))
        await read_back(transactions, store, offsets)

    monkeypatch.setattr(state_services, "read_back", noted)
    async with running_broker(tmp_path):
        pass
    assert held == [{"half messages", "delayed messages", "timed messages"}]


async def test_store_that_is_open_already(tmp_path: Path) -> None:
    async with running_broker(tmp_path):
        with trio.fail_after(50), pytest.RaisesGroup(StartError, flatten_subgroups=True):
            async with running_broker(tmp_path):
                pass


async def test_state_file_that_is_broken(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "topics.json").write_text("{broken")
    with pytest.RaisesGroup(pytest.RaisesExc(StartError, match="topics.json"), flatten_subgroups=True):
        async with running_broker(tmp_path):
            pass
    assert (tmp_path / "config" / "topics.json").read_text() == "{broken"


async def test_queue_files_of_another_size(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, mappedFileSizeConsumeQueue=4000) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        await client.send("Orders", queue_id=0)
    text = "0{20} has 4000 bytes, the configured file size of consume queues is 2000"
    with pytest.RaisesGroup(pytest.RaisesExc(StartError, match=text), flatten_subgroups=True):
        async with running_broker(tmp_path, mappedFileSizeConsumeQueue=2000):
            pass


async def test_queues_without_their_topic_get_it_back(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        await client.send("Orders", queue_id=2)
    for name in ("topics.json", "topics.json.bak"):
        (tmp_path / "config" / name).unlink(missing_ok=True)
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        assert len(await client.pull_messages("Orders", queueId=2)) == 1


async def test_a_stop_writes_the_delay_levels_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the device: a bad one must not keep the other state files from being written in time."""
    written: list[str] = []

    def note(kind: Any) -> None:
        persist = kind.persist

        async def noted(self: Any) -> None:
            written.append(kind.__name__)
            await persist(self)

        monkeypatch.setattr(kind, "persist", noted)

    for kind in (TopicConfigManager, MessageRequestModeManager, ConsumerFilterManager, ScheduleMessageService):
        note(kind)
    async with running_broker(tmp_path):
        pass
    assert written[-1] == "ScheduleMessageService"
    assert len(set(written)) == 4


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        for n in range(5):
            await client.send("Orders", b"%d" % n, {"KEYS": f"k{n}"})
        await client.send("Orders", b"later", {"DELAY": "1"})
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        bodies = [message.body for message in await client.pull_messages("Orders")]
        assert bodies[:5] == [b"0", b"1", b"2", b"3", b"4"]
        ext = {"topic": "Orders", "key": "k3", "maxNum": 4, "beginTimestamp": 0, "endTimestamp": 2**60}
        assert (await client.ask(RequestCode.QUERY_MESSAGE, ext)).code == ResponseCode.SUCCESS
        if len(bodies) == 5:
            assert [m.body for m in await client.pull_messages("Orders", 5, sysFlag=6)] == [b"later"]


async def test_nothing_is_logged_of_single_messages(tmp_path: Path) -> None:
    keys = {"topic": "Orders", "key": "k", "maxNum": 9, "beginTimestamp": 0, "endTimestamp": 2**60}
    offset = {"consumerGroup": "G", "topic": "Orders", "queueId": 0, "commitOffset": 1}

    async def everything(client: WireClient) -> None:
        await client.heartbeat("c1", consumers=[consumer("G", "Orders")], producers=["P"])
        for properties in ({"KEYS": "k", "UNIQ_KEY": "U1"}, {"KEYS": "k"}, {"WAIT": "false"}, {"DELAY": "18"}):
            assert (await client.send("Orders", b"body", properties)).code == 0
        assert (await client.send("Orders", encode_batch([(0, b"x", b"")]), batch="true", code=320)).code == 0
        assert await client.pull_messages("Orders")
        held = await client.post(RequestCode.PULL_MESSAGE, pull_ext("Orders", 1000, sysFlag=6))
        assert (await client.reply(held)).code == ResponseCode.PULL_OFFSET_MOVED
        assert (await client.ask(RequestCode.QUERY_MESSAGE, keys)).code == 0
        assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, offset)).code == 0
        assert (await client.send("Orders", b"")).code == ResponseCode.MESSAGE_ILLEGAL

    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        with capture_logs() as logs:
            await everything(client)
        assert {"topic_created", "group_created"} <= {log["event"] for log in logs}
        with capture_logs() as logs:
            await everything(client)
        assert logs == []


async def test_what_goes_wrong_with_a_name_server_is_in_the_brokers_own_log(tmp_path: Path) -> None:
    """Guards that the broker passes its log to the client code, which logs with the standard library in the SDK."""

    async def nonsense(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(b"\xff" * 8)

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), nonsense, 0)
        port = listener.socket.getsockname()[1]
        with capture_logs() as logs, trio.fail_after(50):
            async with running_broker(tmp_path, namesrvAddr=f"127.0.0.1:{port}"):
                while "broken_frame" not in [log["event"] for log in logs]:  # noqa: ASYNC110 - a log line sets no event
                    await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


def test_addresses() -> None:
    assert addresses.advertised_address("10.1.2.3", "0.0.0.0") == "10.1.2.3"
    assert addresses.advertised_address(None, "127.0.0.1") == "127.0.0.1"
    assert addresses.advertised_address(None, "0.0.0.0") == addresses.first_address()
    assert addresses.pack("127.0.0.1", 10911) == b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
    assert addresses.pack("::1", 1) == bytes(15) + b"\x01\x00\x00\x00\x01"
    assert addresses.pack("localhost", 1) is not None
    assert addresses.pack("no such host", 1) is None


@pytest.mark.parametrize(
    ("bound", "found"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")],
)
async def test_where_this_machine_connects_to_its_ports(bound: str, found: str) -> None:
    with SystemNetwork().bind(bound, 0) as sock:
        host, port = addresses.reachable(sock)
        assert host == found
        sock.listen()
        async with await trio.open_tcp_stream(host, port):
            pass


def test_unknown_keys_in_a_test_configuration(tmp_path: Path) -> None:
    assert configuration(tmp_path, {"noSuchKey": 1}).warnings
