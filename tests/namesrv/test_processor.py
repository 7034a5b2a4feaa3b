"""All requests of the name server over a real socket."""

import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.namesrv.builders import CLUSTER, registration_body, registration_header, topic
from tests.namesrv.server import Server, Wire, running, until
from trimq.protocol.body import DataVersion, RegisterBrokerBody, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.headers.namesrv import RegisterBrokerRequestHeader
from trimq.protocol.register_broker_body import decode_register_broker_body, encode_register_broker_body

BROKER = {"clusterName": CLUSTER, "brokerName": "broker-a", "brokerAddr": "127.0.0.1:10911", "brokerId": "0"}
BODY = encode_register_broker_body(registration_body(topic("A"), topic("B")))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with running(tmp_path) as server:
        yield server


@pytest.fixture
async def wire(server: Server) -> AsyncIterator[Wire]:
    async with server.connect() as wire:
        yield wire


async def json_of(wire: Wire, code: int, header: dict[str, str] | None = None) -> Any:
    reply = await wire.ask(code, header)
    assert reply.code == 0, reply.remark
    return json.loads(bytes(reply.body))


class TestRegistration:
    async def test_register_and_route(self, wire: Wire) -> None:
        await wire.register()
        reply = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
        assert reply.code == 0
        assert reply.remark is None
        assert bytes(reply.body) == (
            b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:10911"},"brokerName":"broker-a","cluster":"DefaultCluster",'
            b'"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,'
            b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
        )

    async def test_old_clients_get_the_same_bytes(self, wire: Wire) -> None:
        await wire.register()
        new = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A", "acceptStandardJsonOnly": "true"})
        old = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"}, version=121)
        assert bytes(new.body) == bytes(old.body)

    async def test_binary_headers(self, wire: Wire) -> None:
        header = registration_header()
        assert (await wire.ask(RequestCode.REGISTER_BROKER, header, BODY, encoding=Encoding.ROCKETMQ)).code == 0
        reply = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"}, encoding=Encoding.ROCKETMQ)
        assert reply.code == 0
        assert reply.encoding is Encoding.ROCKETMQ

    async def test_checksum(self, wire: Wire) -> None:
        header = registration_header()
        header.body_crc32 = zlib.crc32(BODY) & 0x7FFFFFFF
        assert (await wire.ask(RequestCode.REGISTER_BROKER, header, BODY)).code == 0
        header.body_crc32 ^= 1
        reply = await wire.ask(RequestCode.REGISTER_BROKER, header, BODY)
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "bodyCrc32" in (reply.remark or "")

    async def test_compressed(self, wire: Wire) -> None:
        header = registration_header()
        header.compressed = True
        body = encode_register_broker_body(registration_body(topic("A"), topic("B")), compressed=True)
        assert (await wire.ask(RequestCode.REGISTER_BROKER, header, body)).code == 0
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "B"})).code == 0

    @pytest.mark.parametrize("compressed", [False, True])
    async def test_a_body_that_cannot_be_read(self, wire: Wire, compressed: bool) -> None:
        header = registration_header()
        header.compressed = compressed
        reply = await wire.ask(RequestCode.REGISTER_BROKER, header, b"garbage")
        assert reply.code == ResponseCode.SYSTEM_ERROR

    async def test_a_header_that_is_not_whole(self, wire: Wire) -> None:
        reply = await wire.ask(RequestCode.REGISTER_BROKER, {"brokerName": "x"}, BODY)
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "brokerAddr" in (reply.remark or "")

    async def test_one_topic_first_is_refused(self, wire: Wire) -> None:
        body = encode_register_broker_body(registration_body(topic("A")))
        reply = await wire.ask(RequestCode.REGISTER_BROKER, registration_header(), body)
        assert reply.code == ResponseCode.SYSTEM_ERROR

    async def test_a_slave_gets_the_address_of_its_master(self, wire: Wire) -> None:
        await wire.register()
        reply = await wire.ask(RequestCode.REGISTER_BROKER, registration_header(broker_id=1, addr="127.0.0.1:2"), BODY)
        assert reply.ext_fields() == {"haServerAddr": "127.0.0.1:10912", "masterAddr": "127.0.0.1:10911"}

    async def test_a_registration_that_repeats_itself_is_read_once(
        self, server: Server, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = []

        def counting(*args: Any, **options: Any) -> RegisterBrokerBody:
            read.append(args)
            return decode_register_broker_body(*args, **options)

        monkeypatch.setattr("trimq.namesrv.processor.decode_register_broker_body", counting)

        async def register(body: bytes = BODY, wire: Wire = wire) -> None:
            assert (await wire.ask(RequestCode.REGISTER_BROKER, registration_header(), body)).code == 0

        await register()
        await register()
        assert len(read) == 1
        await wire.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": "A"})
        await register()
        assert len(read) == 2
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})).code == 0
        other = encode_register_broker_body(registration_body(topic("A"), topic("C"), counter=2))
        await register(other)
        assert len(read) == 3
        await register(BODY)
        assert len(read) == 4
        async with server.connect() as new:
            await register(BODY, new)
            assert len(read) == 5

    async def test_a_registration_that_repeats_itself_is_a_sign_of_life(self, server: Server, wire: Wire) -> None:
        header = registration_header(timeout_ms=30_000)
        for _ in range(3):
            await wire.ask(RequestCode.REGISTER_BROKER, header, BODY)
            server.clock.advance(29)
            await trio.testing.wait_all_tasks_blocked()
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})).code == 0

    async def test_a_slave_that_repeats_itself_brings_its_topics_once_there_is_no_master(self, wire: Wire) -> None:
        slave = registration_header(broker_id=1, addr="127.0.0.1:2")
        body = encode_register_broker_body(registration_body(topic("A"), topic("OnlyThere")))
        await wire.register()
        await wire.ask(RequestCode.REGISTER_BROKER, slave, body)
        await wire.ask(RequestCode.UNREGISTER_BROKER, BROKER)
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "OnlyThere"})).code == 17
        await wire.ask(RequestCode.REGISTER_BROKER, slave, body)
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "OnlyThere"})).code == 0

    async def test_ordered_topics_come_with_the_answer(self, wire: Wire) -> None:
        first = await wire.ask(RequestCode.REGISTER_BROKER, registration_header(), BODY)
        assert bytes(first.body) == b""
        entry = {"namespace": "ORDER_TOPIC_CONFIG", "key": "A", "value": "broker-a:4"}
        await wire.ask(RequestCode.PUT_KV_CONFIG, entry)
        second = await wire.ask(RequestCode.REGISTER_BROKER, registration_header(), BODY)
        assert bytes(second.body) == b'{"table":{"A":"broker-a:4"}}'

    async def test_ordered_topics_may_be_kept_back(self, tmp_path: Path) -> None:
        async with running(tmp_path, returnOrderTopicConfigToBroker="false") as server, server.connect() as wire:
            entry = {"namespace": "ORDER_TOPIC_CONFIG", "key": "A", "value": "broker-a:4"}
            await wire.ask(RequestCode.PUT_KV_CONFIG, entry)
            reply = await wire.ask(RequestCode.REGISTER_BROKER, registration_header(), BODY)
            assert bytes(reply.body) == b""

    async def test_unregister(self, wire: Wire) -> None:
        await wire.register()
        assert (await wire.ask(RequestCode.UNREGISTER_BROKER, BROKER)).code == 0
        reply = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
        assert reply.code == ResponseCode.TOPIC_NOT_EXIST
        assert "it unregistered" in (reply.remark or "")

    async def test_query_data_version(self, wire: Wire) -> None:
        stranger = await wire.ask(RequestCode.QUERY_DATA_VERSION, BROKER, encode_json(DataVersion()))
        assert stranger.ext_fields() == {"changed": "true"}
        assert bytes(stranger.body) == b""
        await wire.register()
        mine = encode_json(DataVersion(counter=1, timestamp=1_700_000_000_000))
        same = await wire.ask(RequestCode.QUERY_DATA_VERSION, BROKER, mine)
        assert same.ext_fields() == {"changed": "false"}
        assert bytes(same.body) == mine
        for other in (encode_json(DataVersion(counter=2, timestamp=1_700_000_000_000)), b""):
            changed = await wire.ask(RequestCode.QUERY_DATA_VERSION, BROKER, other)
            assert changed.ext_fields() == {"changed": "true"}


class TestLiveness:
    async def test_a_closed_connection_removes_its_broker_at_once(self, server: Server, wire: Wire) -> None:
        async with server.connect() as broker:
            await broker.register()
        await until(lambda: not server.controller.routes.live_brokers(), "the broker is removed")
        reply = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
        assert reply.code == ResponseCode.TOPIC_NOT_EXIST
        assert "its connection closed" in (reply.remark or "")

    async def test_a_silent_broker_expires_and_its_connection_is_closed(self, server: Server, wire: Wire) -> None:
        header = registration_header(timeout_ms=30_000)
        async with server.connect() as broker:
            await broker.ask(RequestCode.REGISTER_BROKER, header, BODY)
            server.clock.advance(31)
            await until(lambda: not server.controller.routes.live_brokers(), "the broker has expired")
            with pytest.raises(AssertionError, match="closed the connection"):
                await broker.receive()
        reply = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
        assert "no heartbeat for 30 s" in (reply.remark or "")

    @pytest.mark.parametrize(
        ("code", "body"),
        [(RequestCode.BROKER_HEARTBEAT, b""), (RequestCode.QUERY_DATA_VERSION, b"{}")],
        ids=["heartbeat", "query"],
    )
    async def test_signs_of_life(self, server: Server, wire: Wire, code: int, body: bytes) -> None:
        await wire.ask(RequestCode.REGISTER_BROKER, registration_header(timeout_ms=30_000), BODY)
        server.clock.advance(29)
        assert (await wire.ask(code, BROKER, body)).code == 0
        server.clock.advance(29)
        await trio.testing.wait_all_tasks_blocked()
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})).code == 0


class TestRoutes:
    async def test_no_broker(self, wire: Wire) -> None:
        reply = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
        assert reply.code == ResponseCode.TOPIC_NOT_EXIST
        assert "no broker is registered" in (reply.remark or "")

    async def test_unknown_topic(self, wire: Wire) -> None:
        await wire.register()
        reply = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "Nope"})
        assert reply.code == ResponseCode.TOPIC_NOT_EXIST
        assert "the first message sent to it creates it" in (reply.remark or "")

    async def test_no_routes_before_the_brokers_had_time_to_register(self, tmp_path: Path) -> None:
        config = {"needWaitForService": "true", "waitSecondsForService": "45"}
        async with running(tmp_path, **config) as server, server.connect() as wire:
            await wire.register()
            reply = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
            assert reply.code == ResponseCode.SYSTEM_ERROR
            assert "45 s" in (reply.remark or "")
            server.clock.advance(45)
            assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})).code == 0

    async def test_two_name_servers_side_by_side_say_the_same(self, server: Server, tmp_path: Path) -> None:
        folder = tmp_path / "second"
        async with running(folder) as second, server.connect() as one, second.connect() as other:
            for name, addr in (("broker-a", "127.0.0.1:1"), ("broker-b", "127.0.0.1:2")):
                await one.register(name, addr)
            for name, addr in (("broker-b", "127.0.0.1:2"), ("broker-a", "127.0.0.1:1")):
                await other.register(name, addr)
            for code, header in (
                (RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"}),
                (RequestCode.GET_BROKER_CLUSTER_INFO, {}),
                (RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {}),
            ):
                assert bytes((await one.ask(code, header)).body) == bytes((await other.ask(code, header)).body)


class TestClusters:
    async def test_cluster_info(self, wire: Wire) -> None:
        await wire.register()
        reply = await wire.ask(RequestCode.GET_BROKER_CLUSTER_INFO)
        assert b" " not in bytes(reply.body)
        assert json.loads(bytes(reply.body)) == {
            "brokerAddrTable": {
                "broker-a": {
                    "brokerAddrs": {"0": "127.0.0.1:10911"},
                    "brokerName": "broker-a",
                    "cluster": CLUSTER,
                    "enableActingMaster": False,
                }
            },
            "clusterAddrTable": {CLUSTER: ["broker-a"]},
        }

    async def test_member_group(self, wire: Wire) -> None:
        await wire.register()
        header = {"clusterName": CLUSTER, "brokerName": "broker-a"}
        assert await json_of(wire, RequestCode.GET_BROKER_MEMBER_GROUP, header) == {
            "brokerMemberGroup": {
                "brokerAddrs": {"0": "127.0.0.1:10911"},
                "brokerName": "broker-a",
                "cluster": CLUSTER,
            }
        }
        unknown = await json_of(wire, RequestCode.GET_BROKER_MEMBER_GROUP, {**header, "brokerName": "unknown"})
        assert unknown["brokerMemberGroup"]["brokerAddrs"] == {}

    async def test_write_permission(self, wire: Wire) -> None:
        await wire.register()
        wiped = await wire.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"})
        assert wiped.ext_fields() == {"wipeTopicCount": "2"}
        route = await json_of(wire, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
        assert route["queueDatas"][0]["perm"] == 4
        added = await wire.ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"})
        assert added.ext_fields() == {"addTopicCount": "2"}
        route = await json_of(wire, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
        assert route["queueDatas"][0]["perm"] == 6
        unknown = await wire.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "unknown"})
        assert (unknown.code, unknown.ext_fields()) == (0, {"wipeTopicCount": "0"})


class TestTopics:
    async def test_lists(self, wire: Wire) -> None:
        await wire.register()
        assert await json_of(wire, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER) == {"topicList": ["A", "TBW102"]}
        by_cluster = RequestCode.GET_TOPICS_BY_CLUSTER
        assert await json_of(wire, by_cluster, {"cluster": CLUSTER}) == {"topicList": ["A", "TBW102"]}
        assert await json_of(wire, by_cluster, {"cluster": "nowhere"}) == {"topicList": []}
        assert await json_of(wire, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS) == {
            "brokerAddr": "127.0.0.1:10911",
            "topicList": [CLUSTER, "broker-a"],
        }

    async def test_system_topics_without_a_broker(self, wire: Wire) -> None:
        assert await json_of(wire, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS) == {"topicList": []}

    async def test_unit_lists(self, wire: Wire) -> None:
        body = registration_body(topic("U", sys_flag=1), topic("S", sys_flag=2), topic("US", sys_flag=3))
        await wire.ask(RequestCode.REGISTER_BROKER, registration_header(), encode_register_broker_body(body))
        assert await json_of(wire, RequestCode.GET_UNIT_TOPIC_LIST) == {"topicList": ["U", "US"]}
        assert await json_of(wire, RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST) == {"topicList": ["S", "US"]}
        assert await json_of(wire, RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST) == {"topicList": ["S"]}

    async def test_lists_can_be_switched_off(self, tmp_path: Path) -> None:
        config = {"enableAllTopicList": "false", "enableTopicList": "false"}
        async with running(tmp_path, **config) as server, server.connect() as wire:
            for code in (
                RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
                RequestCode.GET_TOPICS_BY_CLUSTER,
                RequestCode.GET_UNIT_TOPIC_LIST,
                RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
                RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
            ):
                reply = await wire.ask(code, {"cluster": CLUSTER})
                assert reply.code == ResponseCode.SYSTEM_ERROR
                assert "TopicList=false" in (reply.remark or "")

    async def test_registering_and_deleting_a_topic(self, wire: Wire) -> None:
        await wire.register()
        body = b'{"queueDatas":[{"brokerName":"broker-a","perm":6,"readQueueNums":1,"writeQueueNums":1}]}'
        assert (await wire.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "H"}, body)).code == 0
        route = {"topic": "H"}
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, route)).code == 0
        delete = RequestCode.DELETE_TOPIC_IN_NAMESRV
        assert (await wire.ask(delete, {**route, "clusterName": "nowhere"})).code == 0
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, route)).code == 0
        assert (await wire.ask(delete, {**route, "clusterName": CLUSTER})).code == 0
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, route)).code == ResponseCode.TOPIC_NOT_EXIST
        assert (await wire.ask(delete, {"topic": "A"})).code == 0
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})).code == 17

    async def test_a_topic_on_an_unknown_broker_is_passed_over(self, wire: Wire) -> None:
        body = b'{"queueDatas":[{"brokerName":"unknown","perm":6,"readQueueNums":1,"writeQueueNums":1}]}'
        assert (await wire.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "H"}, body)).code == 0
        assert (await wire.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "H"})).code == 0
        assert (await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "H"})).code == 17


KEY = {"namespace": "n", "key": "k"}


class TestKV:
    async def test_put_get_list_delete(self, wire: Wire, tmp_path: Path) -> None:
        missing = await wire.ask(RequestCode.GET_KV_CONFIG, KEY)
        assert missing.code == ResponseCode.QUERY_NOT_FOUND
        assert (await wire.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})).code == 22
        assert (await wire.ask(RequestCode.PUT_KV_CONFIG, {**KEY, "value": "v"})).code == 0
        assert json.loads((tmp_path / "kvConfig.json").read_bytes()) == {"configTable": {"n": {"k": "v"}}}
        assert (await wire.ask(RequestCode.GET_KV_CONFIG, KEY)).ext_fields() == {"value": "v"}
        listed = await wire.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
        assert bytes(listed.body) == b'{"table":{"k":"v"}}'
        assert (await wire.ask(RequestCode.DELETE_KV_CONFIG, KEY)).code == 0
        assert (await wire.ask(RequestCode.GET_KV_CONFIG, KEY)).code == ResponseCode.QUERY_NOT_FOUND
        assert json.loads((tmp_path / "kvConfig.json").read_bytes()) == {"configTable": {"n": {}}}
        empty = await wire.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
        assert bytes(empty.body) == b'{"table":{}}'
        assert (await wire.ask(RequestCode.DELETE_KV_CONFIG, KEY)).code == 0

    async def test_it_survives_a_restart(self, tmp_path: Path) -> None:
        async with running(tmp_path) as server, server.connect() as wire:
            await wire.ask(RequestCode.PUT_KV_CONFIG, {**KEY, "value": "wert ä"})
        async with running(tmp_path) as server, server.connect() as wire:
            assert (await wire.ask(RequestCode.GET_KV_CONFIG, KEY)).ext_fields() == {"value": "wert ä"}

    async def test_what_cannot_be_saved_is_not_there(self, tmp_path: Path) -> None:
        (tmp_path / "blocked").write_text("a file where a folder should be")
        path = tmp_path / "blocked" / "kvConfig.json"
        async with running(tmp_path) as server, server.connect() as wire:
            server.controller.kv_config._path = path
            reply = await wire.ask(RequestCode.PUT_KV_CONFIG, {**KEY, "value": "v"})
            assert reply.code == ResponseCode.SYSTEM_ERROR
            assert str(tmp_path / "blocked") in (reply.remark or "")
            assert (await wire.ask(RequestCode.GET_KV_CONFIG, KEY)).code == ResponseCode.QUERY_NOT_FOUND

    async def test_order_of_a_topic_shows_in_its_route_at_once(self, tmp_path: Path) -> None:
        async with running(tmp_path, orderMessageEnable="true") as server, server.connect() as wire:
            await wire.register()
            entry = {"namespace": "ORDER_TOPIC_CONFIG", "key": "A"}
            route = {"topic": "A"}
            assert "orderTopicConf" not in await json_of(wire, RequestCode.GET_ROUTEINFO_BY_TOPIC, route)
            await wire.ask(RequestCode.PUT_KV_CONFIG, {**entry, "value": "broker-a:4"})
            shown = await json_of(wire, RequestCode.GET_ROUTEINFO_BY_TOPIC, route)
            assert shown["orderTopicConf"] == "broker-a:4"
            await wire.ask(RequestCode.DELETE_KV_CONFIG, entry)
            assert "orderTopicConf" not in await json_of(wire, RequestCode.GET_ROUTEINFO_BY_TOPIC, route)


class TestConfig:
    async def test_get(self, wire: Wire) -> None:
        reply = await wire.ask(RequestCode.GET_NAMESRV_CONFIG)
        lines = bytes(reply.body).decode().splitlines()
        assert "orderMessageEnable=false" in lines
        assert lines == sorted(lines)

    async def test_a_change_applies_at_once_and_is_saved(self, wire: Wire, tmp_path: Path) -> None:
        await wire.register()
        entry = {"namespace": "ORDER_TOPIC_CONFIG", "key": "A", "value": "broker-a:4"}
        await wire.ask(RequestCode.PUT_KV_CONFIG, entry)
        assert "orderTopicConf" not in await json_of(wire, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
        assert (await wire.ask(RequestCode.UPDATE_NAMESRV_CONFIG, None, b"orderMessageEnable=true\n")).code == 0
        assert "orderTopicConf" in await json_of(wire, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
        assert (tmp_path / "namesrv.properties").read_text() == "orderMessageEnable=true\n"

    async def test_a_change_that_cannot_be_saved_does_not_apply(self, wire: Wire, tmp_path: Path) -> None:
        (tmp_path / "namesrv.properties").mkdir()
        reply = await wire.ask(RequestCode.UPDATE_NAMESRV_CONFIG, None, b"orderMessageEnable=true")
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "namesrv.properties" in (reply.remark or "")
        assert b"orderMessageEnable=false" in bytes((await wire.ask(RequestCode.GET_NAMESRV_CONFIG)).body)

    async def test_a_change_keeps_what_the_file_has(self, wire: Wire, tmp_path: Path) -> None:
        (tmp_path / "namesrv.properties").write_text("# mine\nlistenPort=9876\norderMessageEnable=false\n")
        await wire.ask(RequestCode.UPDATE_NAMESRV_CONFIG, None, b"orderMessageEnable=true")
        text = (tmp_path / "namesrv.properties").read_text()
        assert text == "# mine\nlistenPort=9876\norderMessageEnable=true\n"

    @pytest.mark.parametrize("key", ["kvConfigPath", "configStorePath", "configBlackList"])
    async def test_black_list(self, wire: Wire, key: str) -> None:
        body = f"orderMessageEnable=true\n{key}=x".encode()
        reply = await wire.ask(RequestCode.UPDATE_NAMESRV_CONFIG, None, body)
        assert reply.code == ResponseCode.NO_PERMISSION
        assert key in (reply.remark or "")
        text = bytes((await wire.ask(RequestCode.GET_NAMESRV_CONFIG)).body)
        assert b"orderMessageEnable=false" in text

    async def test_refusals(self, wire: Wire, tmp_path: Path) -> None:
        for body in (b"listenPort=1", b"orderMessageEnable=perhaps"):
            reply = await wire.ask(RequestCode.UPDATE_NAMESRV_CONFIG, None, body)
            assert reply.code == ResponseCode.INVALID_PARAMETER
            assert reply.remark
        assert not (tmp_path / "namesrv.properties").exists()

    async def test_unknown_keys_and_an_empty_body_change_nothing(self, wire: Wire, tmp_path: Path) -> None:
        for body in (b"", b"whatIsThis=1"):
            assert (await wire.ask(RequestCode.UPDATE_NAMESRV_CONFIG, None, body)).code == 0
        assert not (tmp_path / "namesrv.properties").exists()


async def test_other_codes_are_not_supported(wire: Wire) -> None:
    for code in (10, 34, 999, 40000):
        reply = await wire.ask(code)
        assert reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        assert reply.remark == f" request type {code} not supported"


async def test_one_ways_are_not_answered(wire: Wire) -> None:
    header = RegisterBrokerRequestHeader(
        broker_name="broker-a", broker_addr="127.0.0.1:1", cluster_name="c", ha_server_addr="", broker_id=0
    )
    await wire.stream.send_all(encode(RemotingCommand.request(103, header, BODY, oneway=True)))
    reply = await wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
    assert reply.code == 0
