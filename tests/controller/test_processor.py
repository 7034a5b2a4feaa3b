"""All requests of a controller over a real socket: field names, bodies, codes."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from tests.controller.server import NAME, Server, heartbeat, name, running
from trimq.controller.kv import KvError, Put
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode

TWO = ("127.0.0.1:1001", "127.0.0.1:1002")


@pytest.fixture(params=["memory", "sqlite"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    async with running(tmp_path, sqlite=request.param == "sqlite", notifyBrokerRoleChanged="false") as server:
        yield server


@pytest.fixture
async def memory(tmp_path: Path) -> AsyncIterator[Server]:
    async with running(tmp_path, notifyBrokerRoleChanged="false") as server:
        yield server


async def test_the_start_of_a_broker(server: Server) -> None:
    """The requests of Apache's broker in its order, with their fields."""
    code, fields, body = await server.ask(RequestCode.CONTROLLER_GET_METADATA_INFO)
    assert (code, body) == (0, b"")
    assert fields == {
        "group": "trimq",
        "controllerLeaderId": "n0",
        "controllerLeaderAddress": server.address,
        "isLeader": "true",
        "peers": f"n0:{server.address}",
    }
    code, fields, _ = await server.ask(RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, name())
    assert (code, fields) == (0, name(nextBrokerId="1"))
    apply = name(appliedBrokerId="1", registerCheckCode="127.0.0.1:1001;1700000000000")
    code, fields, _ = await server.ask(RequestCode.CONTROLLER_APPLY_BROKER_ID, apply)
    assert (code, fields) == (0, name())
    other = {**apply, "registerCheckCode": "127.0.0.1:1009;1"}
    code, _, _ = await server.ask(RequestCode.CONTROLLER_APPLY_BROKER_ID, other)
    assert code == ResponseCode.CONTROLLER_BROKER_ID_INVALID
    register = name(brokerId="1", brokerAddress="127.0.0.1:1001", invokeTime="5")
    code, fields, body = await server.ask(RequestCode.CONTROLLER_REGISTER_BROKER, register)
    assert (code, fields, json.loads(body)) == (0, name(), {"syncStateSet": [], "syncStateSetEpoch": 0})
    oneway = RemotingCommand.request(RequestCode.BROKER_HEARTBEAT, heartbeat(1), oneway=True)
    await server.wire.stream.send_all(encode(oneway))
    with trio.fail_after(5):
        while True:
            _, _, body = await server.ask(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, None, b'["broker-a"]')
            (found,) = json.loads(body)["replicasInfoTable"][NAME]["notInSyncReplicas"]
            if found["alive"]:
                break
    elect = name(brokerId="1", designateElect="false", invokeTime="5")
    code, fields, body = await server.ask(RequestCode.CONTROLLER_ELECT_MASTER, elect)
    led = {"masterBrokerId": "1", "masterAddress": "127.0.0.1:1001", "masterEpoch": "1", "syncStateSetEpoch": "1"}
    members = {"brokerAddrs": {"1": "127.0.0.1:1001"}, "brokerName": NAME, "cluster": "c", "enableActingMaster": False}
    assert (code, fields) == (0, led)
    found = json.loads(body)
    found["brokerMemberGroup"].setdefault("enableActingMaster", False)
    assert found == {"brokerMemberGroup": members, "syncStateSet": [1]}
    code, fields, body = await server.ask(RequestCode.CONTROLLER_REGISTER_BROKER, register)
    assert (code, fields, json.loads(body)) == (0, name(**led), {"syncStateSet": [1], "syncStateSetEpoch": 1})
    code, fields, body = await server.ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, {"brokerName": NAME})
    del led["syncStateSetEpoch"]
    assert (code, fields, json.loads(body)) == (0, led, {"syncStateSet": [1], "syncStateSetEpoch": 1})


async def test_a_one_way_heartbeat_gets_no_reply(memory: Server) -> None:
    await memory.join(1)
    for fields in (heartbeat(1), heartbeat(7), name()):
        command = RemotingCommand.request(RequestCode.BROKER_HEARTBEAT, fields, oneway=True)
        await memory.wire.stream.send_all(encode(command))
    # Each request that follows asserts that the reply is its own.
    assert (await memory.ask(RequestCode.CONTROLLER_GET_METADATA_INFO))[0] == 0


class TestHeartbeat:
    async def test_a_lease(self, server: Server) -> None:
        await server.join(1)
        found = await server.heartbeat(1)
        assert found == {"leaseMillis": "3000", "masterEpoch": "0"}, "there is no master yet"
        await server.ask(RequestCode.CONTROLLER_ELECT_MASTER, name(brokerId="1"))
        master = {"masterBrokerId": "1", "masterAddress": "127.0.0.1:1001", "masterEpoch": "1"}
        assert await server.heartbeat(1) == {"leaseMillis": "3000", "syncStateSetEpoch": "1", **master}

    async def test_without_a_lease(self, memory: Server) -> None:
        await memory.join(1)
        code, fields, body = await memory.ask(RequestCode.BROKER_HEARTBEAT, heartbeat(1))
        assert (code, fields, body) == (0, {}, b"")

    async def test_who_is_not_known(self, memory: Server) -> None:
        code, _, _ = await memory.ask(RequestCode.BROKER_HEARTBEAT, heartbeat(1, trimqLease="1"))
        assert code == ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
        fields = heartbeat(1, trimqLease="1")
        del fields["brokerId"]
        code, _, _ = await memory.ask(RequestCode.BROKER_HEARTBEAT, fields)
        assert code == ResponseCode.CONTROLLER_INVALID_REQUEST


class TestElectMaster:
    async def test_the_old_one_is_alive(self, server: Server) -> None:
        await server.led_by_1(*TWO)
        code, fields, body = await server.ask(RequestCode.CONTROLLER_ELECT_MASTER, name(brokerId="2"))
        assert code == ResponseCode.CONTROLLER_MASTER_STILL_EXIST
        assert fields == {
            "masterBrokerId": "1",
            "masterAddress": "127.0.0.1:1001",
            "masterEpoch": "1",
            "syncStateSetEpoch": "2",
        }
        assert json.loads(body)["syncStateSet"] == [1, 2]

    async def test_designated(self, server: Server) -> None:
        await server.led_by_1(*TWO)
        fields = name(brokerId="2", designateElect="true")
        code, fields, body = await server.ask(RequestCode.CONTROLLER_ELECT_MASTER, fields)
        assert (code, fields["masterBrokerId"], fields["masterEpoch"]) == (0, "2", "2")
        assert json.loads(body)["syncStateSet"] == [2]

    async def test_none_can_be_elected(self, memory: Server) -> None:
        await memory.led_by_1(TWO[0])
        await memory.join(2)
        memory.clock.advance(9)
        await memory.heartbeat(2)
        reply = await memory.wire.ask(RequestCode.CONTROLLER_ELECT_MASTER, name(brokerId="2"))
        assert reply.code == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
        assert "no member of the SyncStateSet [1] is alive" in (reply.remark or "")
        reply = await memory.wire.ask(RequestCode.CONTROLLER_ELECT_MASTER, name(brokerId="-1"))
        assert reply.code == ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE
        code, fields, _ = await memory.ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, {"brokerName": NAME})
        assert (code, fields) == (0, {"masterEpoch": "1"}), "a master that is not alive is none"

    async def test_a_master_that_has_restarted(self, memory: Server) -> None:
        await memory.led_by_1(*TWO)
        register = name(brokerId="1", brokerAddress=TWO[0], trimqStarted="true")
        code, fields, body = await memory.ask(RequestCode.CONTROLLER_REGISTER_BROKER, register)
        assert (code, fields["masterBrokerId"], fields["masterEpoch"]) == (0, "2", "2")
        assert json.loads(body) == {"syncStateSet": [2], "syncStateSetEpoch": 3}


class TestAlterSyncStateSet:
    FIELDS = {"brokerName": NAME, "masterBrokerId": "1", "masterEpoch": "1", "invokeTime": "5"}  # noqa: RUF012 - constant

    async def test_it_shrinks(self, server: Server) -> None:
        await server.led_by_1(*TWO)
        body = b'{"syncStateSet":[1],"syncStateSetEpoch":2}'
        code, fields, body = await server.ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, self.FIELDS, body)
        assert (code, fields) == (0, {"newSyncStateSetEpoch": "3"})
        assert json.loads(body) == {"syncStateSet": [1], "syncStateSetEpoch": 3}

    @pytest.mark.parametrize(
        ("changes", "body", "expected"),
        [
            ({"brokerName": "unknown"}, '{"syncStateSet":[1],"syncStateSetEpoch":2}', 2013),
            ({}, '{"syncStateSet":[2,1],"syncStateSetEpoch":2}', 2013),
            ({"masterBrokerId": "2"}, '{"syncStateSet":[1],"syncStateSetEpoch":2}', 2002),
            ({"masterEpoch": "2"}, '{"syncStateSet":[1],"syncStateSetEpoch":2}', 2000),
            ({}, '{"syncStateSet":[1],"syncStateSetEpoch":1}', 2001),
            ({}, '{"syncStateSet":[1,9],"syncStateSetEpoch":2}', 2003),
        ],
    )
    async def test_codes(self, memory: Server, changes: dict[str, str], body: str, expected: int) -> None:
        await memory.led_by_1(*TWO)
        fields = {**self.FIELDS, **changes}
        code, _, _ = await memory.ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, fields, body.encode())
        assert code == expected

    async def test_a_dead_one(self, memory: Server) -> None:
        await memory.led_by_1(TWO[0])
        await memory.join(2)
        memory.clock.advance(9)
        await memory.heartbeat(1)
        body = b'{"syncStateSet":[1,2],"syncStateSetEpoch":1}'
        code, _, _ = await memory.ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, self.FIELDS, body)
        assert code == ResponseCode.CONTROLLER_BROKER_NOT_ALIVE

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"syncStateSet":["a"]}', b"\xff"])
    async def test_a_body_that_is_none(self, memory: Server, body: bytes) -> None:
        await memory.led_by_1(*TWO)
        reply = await memory.wire.ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, self.FIELDS, body)
        assert reply.code not in {0, ResponseCode.CONTROLLER_NOT_LEADER}
        assert "not a controller's" not in (reply.remark or "")
        _, _, found = await memory.ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, {"brokerName": NAME})
        assert json.loads(found)["syncStateSetEpoch"] == 2


class TestAdmin:
    async def test_get_replica_info_of_an_unknown_group(self, memory: Server) -> None:
        code, _, _ = await memory.ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, {"brokerName": "unknown"})
        assert code == ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST

    async def test_get_sync_state_data(self, server: Server) -> None:
        await server.led_by_1(*TWO)
        await server.join(3)
        body = json.dumps([NAME, "unknown"]).encode()
        code, _, found = await server.ask(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, None, body)

        def identity(broker_id: int) -> dict[str, object]:
            address = f"127.0.0.1:{1000 + broker_id}"
            return {"alive": True, "brokerAddress": address, "brokerId": broker_id, "brokerName": NAME}

        assert code == 0
        assert json.loads(found) == {
            "replicasInfoTable": {
                NAME: {
                    "masterBrokerId": 1,
                    "masterAddress": "127.0.0.1:1001",
                    "masterEpoch": 1,
                    "syncStateSetEpoch": 2,
                    "inSyncReplicas": [identity(1), identity(2)],
                    "notInSyncReplicas": [identity(3)],
                }
            }
        }

    async def test_clean(self, server: Server) -> None:
        await server.led_by_1(*TWO)
        ids = {"brokerControllerIdsToClean": "2"}
        code, _, _ = await server.ask(RequestCode.CLEAN_BROKER_DATA, name(**ids))
        assert code == ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
        code, _, _ = await server.ask(RequestCode.CLEAN_BROKER_DATA, name(**ids, isCleanLivingBroker="true"))
        assert code == 0
        _, _, found = await server.ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, {"brokerName": NAME})
        assert json.loads(found)["syncStateSet"] == [1]
        code, _, _ = await server.ask(RequestCode.CLEAN_BROKER_DATA, name(brokerControllerIdsToClean="1;x"))
        assert code == 2009
        code, _, _ = await server.ask(RequestCode.CLEAN_BROKER_DATA, name(isCleanLivingBroker="true"))
        assert code == 0
        code, _, _ = await server.ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, {"brokerName": NAME})
        assert code == 2008

    async def test_peers(self, tmp_path: Path) -> None:
        peers = "n0:10.0.0.1:9878;n1:10.0.0.2:9878"
        async with running(tmp_path, controllerPeers=peers) as server:
            _, fields, _ = await server.ask(RequestCode.CONTROLLER_GET_METADATA_INFO)
        assert fields["peers"] == peers
        assert fields["controllerLeaderAddress"] == server.address

    async def test_the_configuration(self, memory: Server, tmp_path: Path) -> None:
        code, _, body = await memory.ask(RequestCode.GET_CONTROLLER_CONFIG)
        assert code == 0
        assert b"\nenableElectUncleanMaster=false\n" in body
        change = b"enableElectUncleanMaster=true\nlogLevel=INFO\n"
        assert (await memory.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, None, change))[0] == 0
        assert "enableElectUncleanMaster=true" in (tmp_path / "controller.properties").read_text()
        _, _, body = await memory.ask(RequestCode.GET_CONTROLLER_CONFIG)
        assert b"\nenableElectUncleanMaster=true\n" in body
        # It takes effect at once: a broker outside the set can be elected.
        await memory.led_by_1(TWO[0])
        await memory.join(2)
        fields = name(brokerId="2", designateElect="true")
        assert (await memory.ask(RequestCode.CONTROLLER_ELECT_MASTER, fields))[0] == 0

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ("etcdEndpoints=http://10.0.0.1:1", ResponseCode.NO_PERMISSION),
            ("configBlackList=", ResponseCode.NO_PERMISSION),
            ("controllerStorePath=/elsewhere", ResponseCode.NO_PERMISSION),
            ("enableElectUncleanMaster=perhaps", ResponseCode.INVALID_PARAMETER),
            ("listenPort=1", ResponseCode.INVALID_PARAMETER),
            ("a=\\uZZZZ", ResponseCode.INVALID_PARAMETER),
        ],
    )
    async def test_a_change_that_is_refused(
        self, memory: Server, tmp_path: Path, change: str, expected: ResponseCode
    ) -> None:
        body = f"notifyBrokerRoleChanged=true\n{change}\n".encode()
        code, _, _ = await memory.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, None, body)
        assert code == expected
        assert not (tmp_path / "controller.properties").exists()
        _, _, found = await memory.ask(RequestCode.GET_CONTROLLER_CONFIG)
        assert b"\nnotifyBrokerRoleChanged=false\n" in found, "all or nothing"

    async def test_a_file_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        async with running(tmp_path, configStorePath=str(tmp_path / "file" / "c.properties")) as server:
            reply = await server.wire.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, None, b"enableElectUncleanMaster=true")
            assert reply.code == ResponseCode.SYSTEM_ERROR
            assert "could not be written to" in (reply.remark or "")
            _, _, found = await server.ask(RequestCode.GET_CONTROLLER_CONFIG)
        assert b"\nenableElectUncleanMaster=false\n" in found


class TestStoreThatFails:
    REQUESTS = [  # noqa: RUF012 - constant
        (RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, name()),
        (RequestCode.CONTROLLER_APPLY_BROKER_ID, name(appliedBrokerId="2", registerCheckCode="a:1;1")),
        (RequestCode.CONTROLLER_REGISTER_BROKER, name(brokerId="1", brokerAddress="new:1")),
        (RequestCode.BROKER_HEARTBEAT, heartbeat(1, trimqLease="1")),
        (RequestCode.CONTROLLER_ELECT_MASTER, name(brokerId="1")),
        (RequestCode.CONTROLLER_GET_REPLICA_INFO, {"brokerName": NAME}),
        (RequestCode.CLEAN_BROKER_DATA, name(isCleanLivingBroker="true")),
    ]

    @pytest.mark.parametrize(("code", "fields"), REQUESTS)
    async def test_it_does_not_answer(self, memory: Server, code: RequestCode, fields: dict[str, str]) -> None:
        await memory.join(1)
        memory.kv.failure = KvError("etcd does not answer: all are gone", sent=False)
        reply = await memory.wire.ask(code, fields)
        assert reply.code == ResponseCode.CONTROLLER_NOT_LEADER
        assert reply.remark == "etcd does not answer: all are gone"
        assert (await memory.ask(RequestCode.CONTROLLER_GET_METADATA_INFO))[0] == 0

    @pytest.mark.parametrize(
        ("code", "fields"), [one for one in REQUESTS if one[0] in {1013, 1003, 1002, RequestCode.CLEAN_BROKER_DATA}]
    )
    async def test_the_outcome_is_not_known(self, memory: Server, code: RequestCode, fields: dict[str, str]) -> None:
        await memory.join(1)
        memory.kv.undecided = KvError("timed out", sent=True)
        reply = await memory.wire.ask(code, fields)
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert reply.remark == "the outcome is not known: timed out"

    async def test_a_record_that_is_none(self, memory: Server) -> None:
        await memory.join(1)
        root = memory.controller.replicas.root
        await memory.kv.txn([], [Put(f"{root}{NAME}/set", "no JSON")])
        reply = await memory.wire.ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, {"brokerName": NAME})
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert f"what the store has of {NAME} is not a controller's" in (reply.remark or "")
