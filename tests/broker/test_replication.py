"""Brokers with roles: what a slave takes over from its master, refuses, and knows when it becomes the master."""

import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.auth.signed import ROOT, ROOT_SECRET, User, is_refused, secret_of
from tests.broker.wire_client import WireClient
from tests.canary import permit
from tests.client.tls_servers import server_keys
from tests.ports import free_port
from tests.tls_certificates import Certificates, certificates
from trimq.broker.config import load_broker
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.secrets import make_key_file
from trimq.remoting.config.properties import ConfigError

__all__ = ["certificates"]

TOPIC = "Copied"


@asynccontextmanager
async def pair(
    root: Path, leader: Mapping[str, Any] | None = None, **more: object
) -> AsyncIterator[tuple[BrokerController, BrokerController]]:
    """A master with its name server, and a slave. ``leader`` and ``more`` are settings of the master and the slave."""
    mine: dict[str, Any] = {"embeddedNamesrvEnable": True, "embeddedNamesrvPort": 0, "haListenPort": free_port()}
    async with running_broker(root / "master", **mine, **(leader or {})) as master:
        assert master.namesrv is not None
        assert master.namesrv.address is not None
        host, port = master.namesrv.address
        settings: dict[str, Any] = {"brokerRole": "SLAVE", "brokerId": 1, "namesrvAddr": f"{host}:{port}"} | more
        async with running_broker(root / "slave", **settings) as slave:
            yield master, slave


async def in_sync(master: BrokerController, slave: BrokerController) -> None:
    """Wait until the slave has the log, and has asked for everything else since."""
    synchronize = slave.replication.synchronize
    assert synchronize is not None
    with trio.fail_after(30):
        while slave.context.store.dispatched_offset < master.context.store.appended_offset:  # noqa: ASYNC110
            await trio.sleep(0.01)
        synchronize.wake()
        wanted = synchronize.rounds + 2
        while synchronize.rounds < wanted:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def test_a_slave_has_messages_topics_groups_and_offsets(tmp_path: Path) -> None:
    async with pair(tmp_path, slaveReadEnable=True) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            for number in range(20):
                assert (await client.send(TOPIC, b"%d" % number, queue_id=number % 2)).code == 0
            assert await client.pull_messages(TOPIC, group="G")
            commit = {"consumerGroup": "G", "topic": TOPIC, "queueId": 0, "commitOffset": 7}
            reply = await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
            assert reply.code == 0, reply.remark
        await in_sync(master, slave)
        mine, theirs = master.context, slave.context
        assert theirs.topics.table[TOPIC] == mine.topics.table[TOPIC]
        assert theirs.topics.data_version == mine.topics.data_version
        assert "G" in theirs.groups.table
        assert theirs.offsets.query("G", TOPIC, 0) == 7
        async with WireClient.connect(slave.endpoint) as client:
            found = await client.pull_messages(TOPIC, queueId=1)
            assert [one.body for one in found] == [b"%d" % number for number in range(1, 20, 2)]


async def test_topics_that_the_master_deletes_go_and_those_of_the_system_stay(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            await client.send(TOPIC)
            await in_sync(master, slave)
            assert TOPIC in slave.context.topics.table
            assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": TOPIC})).code == 0
            master.context.topics.table.pop("SELF_TEST_TOPIC")
        await in_sync(master, slave)
        assert TOPIC not in slave.context.topics.table
        assert "SELF_TEST_TOPIC" in slave.context.topics.table


async def test_a_slave_serves_neither_sends_nor_pulls(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_master, slave), WireClient.connect(slave.endpoint) as client:
        reply = await client.send("TBW102", b"no")
        assert reply.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert "brokerRole=SLAVE" in (reply.remark or "")
        reply = await client.pull("TBW102", queueId=1, queueOffset=7)
        assert reply.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert "slaveReadEnable=false" in (reply.remark or "")
        # A client keeps the broker of the last reply: this one must send it back, and leave its offset as it is.
        assert (reply.ext_fields()["suggestWhichBrokerId"], reply.ext_fields()["nextBeginOffset"]) == ("0", "7")
        assert slave.health.readiness().ready


async def cut_off(master: BrokerController, slave: BrokerController) -> None:
    """The slave finds the port for slaves no more; everything else goes on."""
    view, service = slave.replication.master, master.context.store.replication.ha
    assert view is not None
    assert service is not None
    view._learned = "127.0.0.1:1"
    for connection in list(service.connections):
        connection.close("a test")
    while service.connections:
        await trio.lowlevel.checkpoint()


async def test_a_slave_that_is_behind_sends_consumers_back_to_the_master(tmp_path: Path) -> None:
    """Its offsets are not the master's: a consumer that took them would go back, and commit that."""
    quick: dict[str, Any] = {"haSendHeartbeatInterval": 100, "haHousekeepingInterval": 5000, "slaveReadEnable": True}
    async with pair(tmp_path, leader=quick, **quick) as (master, slave), WireClient.connect(master.endpoint) as client:
        for _ in range(3):
            await client.send(TOPIC)
        await in_sync(master, slave)
        await cut_off(master, slave)
        for queue in (0, 0, 0, 1):
            await client.send(TOPIC, queue_id=queue)
        async with WireClient.connect(slave.endpoint) as reader:
            for queue, offset in ((0, 5), (1, 1)):  # behind the end of its queue; a queue that it does not have
                began = trio.current_time()
                reply = await reader.pull(TOPIC, queueId=queue, queueOffset=offset)
                ext = reply.ext_fields()
                assert (reply.code, ext["suggestWhichBrokerId"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "0")
                assert ext["nextBeginOffset"] == str(offset)
                assert "is a slave" in (reply.remark or "")
                assert trio.current_time() - began >= 0.9, "clients without a master in their route ask again at once"
            assert len(await reader.pull_messages(TOPIC, queueId=0, queueOffset=0)) == 3
        async with WireClient.connect(master.endpoint) as reader:
            reply = await reader.pull(TOPIC, queueId=0, queueOffset=99)
            assert (reply.code, reply.ext_fields()["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "6")


async def test_refusals_without_a_name_server_do_not_fill_the_log(tmp_path: Path) -> None:
    async with running_broker(tmp_path, haListenPort=0, namesrvAddr="127.0.0.1:1") as master:
        with capture_logs() as logs:
            for _ in range(5):
                async with await trio.open_tcp_stream("127.0.0.1", master.replication.port) as stream:
                    with trio.fail_after(20), contextlib.suppress(trio.BrokenResourceError):
                        assert await stream.receive_some(1) == b""
        assert master.context.store.replication.ha is not None
        assert master.context.store.replication.ha.refused == 5
        assert [log["event"] for log in logs].count("slaves_not_known") == 1


async def test_how_many_slaves_an_address_may_have(tmp_path: Path) -> None:
    allowed = "127.0.0.1;127.0.0.1;127.0.0.0/8;10.0.0.0/8;10.1.0.0/16"
    async with running_broker(tmp_path, haListenPort=0, haAllowedAddresses=allowed) as broker:
        admitted = broker.replication._admission(broker.context.registration)
        found = {address: await admitted(address) for address in ("127.0.0.1", "127.0.0.2", "10.1.0.1", "192.0.2.1")}
        assert found == {"127.0.0.1": 2, "127.0.0.2": 1, "10.1.0.1": 1, "192.0.2.1": 0}


async def test_with_addresses_the_brokers_that_the_name_server_lists_may_not_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # guards against an attacker who has registered a broker of this name at the name server
    async def listed(_registration: object) -> list[str]:
        return ["192.0.2.1"]

    for allowed, expected in (("", 1), ("10.0.0.1", 0), ("10.0.0.0/8", 0)):
        async with running_broker(tmp_path, haListenPort=0, haAllowedAddresses=allowed) as broker:
            monkeypatch.setattr(broker.replication, "_listed", listed)
            admitted = broker.replication._admission(broker.context.registration)
            assert await admitted("192.0.2.1") == expected, allowed


async def test_addresses_that_may_connect_have_to_prove_themselves(tmp_path: Path) -> None:
    """haAllowedAddresses says who may connect, and haAllowedWithoutProof who need not prove anything."""
    keys: dict[str, Any] = {
        "haSecretFile": key_file(tmp_path / "ha.key"),
        "haListenPort": 0,
        "haAllowedAddresses": "10.0.0.0/8;192.0.2.1",
        "haAllowedWithoutProof": "192.0.2.1",
    }
    async with running_broker(tmp_path / "store", **keys) as broker:
        proofs = broker.replication._proofs
        assert proofs is not None
        assert [proofs.may_prove_nothing(address) for address in ("10.0.0.1", "192.0.2.1")] == [False, True]


async def test_odd_answers_do_not_end_a_slave(tmp_path: Path) -> None:
    """A name server or a master may be broken, or another program at its address."""
    async with pair(tmp_path) as (master, slave):
        view, synchronize = slave.replication.master, slave.replication.synchronize
        assert view is not None
        assert synchronize is not None
        good = view.ha_address
        with capture_logs() as logs:
            view.note(master.address, "no address")
            view.note(master.address, "no address")
        assert [log["event"] for log in logs] == ["master_address_invalid"]
        assert view.ha_address == good

        await in_sync(master, slave)

        def odd(_state: dict[str, Any]) -> None:
            raise TypeError("what is this?")

        with capture_logs() as logs:
            assert not await synchronize._take(RequestCode.GET_ALL_TOPIC_CONFIG, odd)
            assert not await synchronize._take(RequestCode.GET_ALL_TOPIC_CONFIG, odd)
        assert [log["event"] for log in logs] == ["synchronization_failed"]
        async with WireClient.connect(master.endpoint) as client:
            await client.send(TOPIC)
        await in_sync(master, slave)
        # A slave that was away for longer than its master keeps messages.
        assert await view.has_record(0, b"another record") is False
        view._bounds = AsyncMock(return_value=(5000, 9000))  # type: ignore[method-assign]
        expired = RemotingCommand(0).reply(header={"trimqSame": "expired"})
        view.ask = AsyncMock(return_value=expired)  # type: ignore[method-assign]
        with pytest.raises(OSError, match="this log ends at 1001, the master's begins at 5000: empty the store"):
            await view.has_record(1000, b"x")


async def test_a_slave_that_becomes_the_master(tmp_path: Path) -> None:
    """Its topics may lack what the log has, and consumers' offsets may be ahead of it."""
    async with pair(tmp_path) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            for number in range(4):
                await client.send(TOPIC, queue_id=number)
        await in_sync(master, slave)
        slave.context.offsets.commit("", "G", TOPIC, 2, 50)
    state = tmp_path / "slave" / "config" / "topics.json"
    topics = json.loads(state.read_text())
    assert topics["trimqFollowed"] is True
    topics["topicConfigTable"][TOPIC]["readQueueNums"] = 1
    state.write_text(json.dumps(topics))
    async with running_broker(tmp_path / "slave") as broker:
        assert broker.context.topics.table[TOPIC].read_queue_nums == 4
        assert broker.context.offsets.query("G", TOPIC, 2) == 1
        async with WireClient.connect(broker.endpoint) as client:
            assert len(await client.pull_messages(TOPIC, queueId=3)) == 1
            assert (await client.send(TOPIC, queue_id=3)).code == 0
    assert "trimqFollowed" not in json.loads(state.read_text())


async def test_slaves_of_other_addresses_are_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path, haListenPort=free_port(), haAllowedAddresses="10.0.0.0/8;192.0.2.1") as broker:
        async with await trio.open_tcp_stream("127.0.0.1", broker.replication.port) as stream:
            assert bytes(await stream.receive_some()) == b""
        assert broker.context.store.replication.ha is not None
        assert broker.context.store.replication.ha.refused == 1


async def test_no_port_is_open_unless_it_is_configured(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        assert broker.replication.port == 0
        assert broker.context.store.replication.ha is None


@pytest.mark.parametrize(
    ("lines", "key", "expected"),
    [
        ("brokerRole=SLAVE", "brokerId", "a number above 0"),
        ("brokerId=1", "brokerRole", "SLAVE, since brokerId=1"),
        ("brokerRole=SYNC_MASTER", "haListenPort", "a port for slaves"),
        ("inSyncReplicas=2\nminInSyncReplicas=3", "minInSyncReplicas", "at most inSyncReplicas"),
        ("haListenPort=1\ntransientStorePoolEnable=true", "transientStorePoolEnable", "false with slaves"),
        ("haSendHeartbeatInterval=20000", "haHousekeepingInterval", "more than haSendHeartbeatInterval"),
        ("haAllowedAddresses=10.0.0.0/8;x", "haAllowedAddresses", "IP addresses or networks"),
        ("haMasterAddress=10.0.0.1", "haMasterAddress", "HOST:PORT"),
    ],
)
def test_roles_that_do_not_fit_stop_the_start(lines: str, key: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(f"brokerName=a\n{lines}\n")
    with pytest.raises(ConfigError) as raised:
        load_broker(path)
    assert key in str(raised.value)
    assert expected in str(raised.value)


def test_a_sync_master_that_waits_for_no_slave_needs_no_port(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("brokerRole=SYNC_MASTER\ninSyncReplicas=1\n")
    assert load_broker(path).warnings == []


def key_file(path: Path) -> str:
    make_key_file(path)
    return str(path)


async def test_master_and_slave_prove_that_they_know_the_secret(tmp_path: Path) -> None:
    secret = {"haSecretFile": key_file(tmp_path / "ha.key")}
    async with pair(tmp_path, secret, **secret) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            assert (await client.send(TOPIC, b"x")).code == 0
        await in_sync(master, slave)
        assert slave.context.store.max_phy_offset == master.context.store.max_phy_offset > 0
        # A client that knows no secret gets nothing.
        async with await trio.open_tcp_stream("127.0.0.1", master.replication.port) as stream:
            await stream.send_all(bytes(8))
            assert await stream.receive_some(1) == b""


@pytest.mark.parametrize("without", ["master", "slave", "neither"])
async def test_a_secret_on_one_side_only(tmp_path: Path, without: str) -> None:
    mine = {"haSecretFile": key_file(tmp_path / "ha.key")}
    theirs = {"haSecretFile": key_file(tmp_path / "other.key")} if without == "neither" else {}
    leader, follower = (mine, theirs) if without != "master" else (theirs, mine)
    async with pair(tmp_path, leader, **follower) as (_, slave):
        client = slave.replication.client
        assert client is not None
        with trio.fail_after(30):
            while not client.state().error:  # noqa: ASYNC110 - there is no event for it
                await trio.sleep(0.01)
        assert slave.context.store.max_phy_offset == 0


async def test_a_secret_that_cannot_be_read_refuses_the_start(tmp_path: Path) -> None:
    path = tmp_path / "ha.key"
    key_file(path)
    path.chmod(0o644)
    with pytest.raises(ExceptionGroup) as caught:
        async with running_broker(tmp_path / "b", haSecretFile=str(path), haListenPort=0):
            pass
    text = str(caught.value.exceptions)
    assert "haSecretFile" in text
    assert "may be read by others (mode 0644)" in text


def test_exceptions_need_a_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        load_broker(flags={"haAllowedWithoutProof": ("10.0.0.1", "test")})
    assert caught.value.key == "haAllowedWithoutProof"


@pytest.mark.parametrize("networks", ["0.0.0.0/0", "10.0.0.1;::/0", "0.0.0.0/1;128.0.0.0/1", "::ffff:0:0/96"])
def test_exceptions_for_everybody_refuse_the_start(tmp_path: Path, networks: str) -> None:
    """They would make the secret worth nothing."""
    path = tmp_path / "broker.conf"
    path.write_text(f"haSecretFile=/etc/ha.key\nhaAllowedWithoutProof={networks}\n")
    with pytest.raises(ConfigError) as caught:
        load_broker(path)
    text = str(caught.value)
    assert f"{path}:2" in text
    assert "haAllowedWithoutProof" in text
    assert "expected addresses of RocketMQ's brokers" in text


INNER = {"accessKey": "brokers", "secretKey": "inner canary-42"}


def closed(directory: Path, keys: str, **more: Any) -> dict[str, Any]:
    """The settings of a broker that asks for signatures; each has its own first administrator."""
    directory.mkdir(exist_ok=True)
    return {
        "authenticationEnabled": True,
        "authorizationEnabled": True,
        "allowAdminOverPlain": True,
        "authKeyFile": keys,
        "initAuthenticationUser": json.dumps({"username": ROOT, "password": ROOT_SECRET}),
        "innerClientAuthenticationCredentials": json.dumps(INNER),
    } | more


def users_of(broker: BrokerController) -> AuthStore:
    assert broker.context.users is not None
    return broker.context.users.store


async def same_users(master: BrokerController, slave: BrokerController) -> None:
    """Wait until the slave has the users and policies of the master."""
    mine, theirs = users_of(master), users_of(slave)
    with trio.fail_after(30):
        while (  # noqa: ASYNC110 - there is no event for it
            dict(mine.users) != dict(theirs.users) or mine.list_acls() != theirs.list_acls()
        ):
            await trio.sleep(0.02)


async def test_users_and_policies_get_to_a_slave_that_becomes_the_master_with_them(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "auth.key")
    own = json.dumps({"username": "of-the-slave", "password": "p"})
    settings = closed(tmp_path, keys)
    follower = closed(tmp_path, keys, initAuthenticationUser=own, slaveReadEnable=True)
    async with pair(tmp_path, settings, **follower) as (master, slave):
        await in_sync(master, slave)
        async with WireClient.connect(master.endpoint) as client, WireClient.connect(slave.endpoint) as reading:
            root = User(client)
            app = await root.make("app", f"Topic:{TOPIC} Pub|Sub", "Group:G Sub")
            await same_users(master, slave)
            assert users_of(slave).user("of-the-slave") is None
            assert (await User(reading, "app").ask(34, {}, b'{"clientID":"c"}')).code == 0
            assert (await root.ask(3003, {"username": "app"})).code == 0
            await same_users(master, slave)
            assert is_refused(await User(reading, "app").ask(34, {}, b'{"clientID":"c"}'))
            # A change that is made at the slave is replaced by what the master has.
            assert (await User(reading, ROOT).ask(3003, {"username": "brokers"})).code == 0
            await same_users(master, slave)
            assert users_of(slave).user("brokers") is not None
            await root.make("last", "Cluster:DefaultCluster Get")
            await same_users(master, slave)
            assert app.name == "app"
        for path in (tmp_path / "slave" / "config").iterdir():
            assert b"canary-42" not in path.read_bytes()
            assert secret_of("last").encode() not in path.read_bytes()
    # The master is lost; the slave's store becomes the master's.
    other = json.dumps({"username": "another", "password": "p"})
    async with running_broker(tmp_path / "slave", **closed(tmp_path, keys, initAuthenticationUser=other)) as master:
        assert sorted(users_of(master).users) == ["brokers", "last", ROOT]
        assert users_of(master).acl("last") is not None
        async with WireClient.connect(master.endpoint) as client:
            assert (await User(client, "last").ask(RequestCode.GET_BROKER_RUNTIME_INFO)).code == 0


async def test_a_change_that_no_slave_has_seen_is_lost_with_the_master_and_can_be_made_again(tmp_path: Path) -> None:
    """What the slave has seen stays: also that a user was deleted."""
    keys = key_file(tmp_path / "auth.key")
    async with (
        pair(tmp_path, closed(tmp_path, keys), **closed(tmp_path, keys)) as (master, slave),
        WireClient.connect(master.endpoint) as client,
    ):
        root = User(client)
        await root.make("kept", f"Topic:{TOPIC} Pub")
        await root.make("gone")
        await same_users(master, slave)
        assert (await root.ask(3003, {"username": "gone"})).code == 0
        await same_users(master, slave)
        assert slave.replication.master is not None
        ask = slave.replication.master.ask

        async def lost(code: int, ext: dict[str, str] | None = None) -> RemotingCommand:
            if code == RequestCode.AUTH_GET_FILE:
                raise OSError("the master is lost")
            return await ask(code, ext)

        slave.replication.master.ask = lost  # type: ignore[method-assign]
        await root.make("late")
        assert (await root.ask(3003, {"username": "kept"})).code == 0
        await in_sync(master, slave)
        assert sorted(users_of(slave).users) == ["brokers", "kept", ROOT]
    async with (
        running_broker(tmp_path / "slave", **closed(tmp_path, keys)) as master,
        WireClient.connect(master.endpoint) as client,
    ):
        assert sorted(users_of(master).users) == ["brokers", "kept", ROOT]
        root = User(client)
        await root.make("late")
        assert (await root.ask(3003, {"username": "kept"})).code == 0
        assert sorted(users_of(master).users) == ["brokers", "late", ROOT]


async def test_users_get_to_a_slave_of_a_master_with_an_admin_port(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "auth.key")
    settings = closed(tmp_path, keys, adminListenAddress="127.0.0.1:0")
    follower = closed(tmp_path, keys, initAuthenticationUser=json.dumps({"username": "of-the-slave", "password": "p"}))
    async with pair(tmp_path, settings, **follower) as (master, slave):
        await same_users(master, slave)
        assert sorted(users_of(slave).users) == ["brokers", ROOT]


async def test_a_slave_without_the_masters_key_says_so_and_keeps_its_users(tmp_path: Path) -> None:
    mine, theirs = key_file(tmp_path / "a.key"), key_file(tmp_path / "b.key")
    with capture_logs() as logs:
        async with pair(tmp_path, closed(tmp_path, mine), **closed(tmp_path, theirs)) as (master, slave):
            async with WireClient.connect(master.endpoint) as client:
                await User(client).make("app")
            await in_sync(master, slave)
            assert sorted(users_of(slave).users) == ["brokers", ROOT]
    lines = [line for line in logs if line["event"] == "not_synchronized" and line["request"] == "AUTH_GET_FILE"]
    assert [line["reason"] for line in lines if "not in authKeyFile" in line["reason"]]
    assert len(lines) == len({line["reason"] for line in lines})
    assert "canary" not in str(lines)


async def test_users_in_clear_stay_where_they_are(tmp_path: Path) -> None:
    permit(tmp_path / "*" / "config" / "auth.json*")
    more: dict[str, Any] = {"authKeyFile": "", "allowSecretsInClear": True}
    with capture_logs() as logs:
        async with pair(tmp_path, closed(tmp_path, "", **more), **closed(tmp_path, "", **more)) as (master, slave):
            async with WireClient.connect(master.endpoint) as client:
                await User(client).make("app")
            await in_sync(master, slave)
            assert sorted(users_of(slave).users) == ["brokers", ROOT]
    assert [
        line["reason"] for line in logs if line["event"] == "not_synchronized" and "set authKeyFile" in line["reason"]
    ]


async def test_a_master_of_rocketmq_has_no_file_of_users(tmp_path: Path) -> None:
    """It answers that it does not support the request: nothing happens, and nothing is logged."""
    keys = key_file(tmp_path / "auth.key")
    with capture_logs() as logs:
        async with pair(tmp_path, closed(tmp_path, keys), **closed(tmp_path, keys)) as (master, slave):
            await same_users(master, slave)
            assert slave.replication.master is not None
            synchronize, ask = slave.replication.synchronize, slave.replication.master.ask

            async def as_rocketmq(code: int, ext: dict[str, str] | None = None) -> RemotingCommand:
                if code == RequestCode.AUTH_GET_FILE:
                    return RemotingCommand.request(code).reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
                return await ask(code, ext)

            slave.replication.master.ask = as_rocketmq  # type: ignore[method-assign]
            async with WireClient.connect(master.endpoint) as client:
                await User(client).make("app")
            before = len([line for line in logs if line["event"] == "not_synchronized"])
            assert synchronize is not None
            await in_sync(master, slave)
            assert users_of(slave).user("app") is None
            assert len([line for line in logs if line["event"] == "not_synchronized"]) == before


def tls_of(certificates: Certificates, **more: Any) -> dict[str, Any]:
    keys = server_keys(certificates, "permissive", mutual=True)
    keys |= {"tls.server.need.client.auth": "optional", "tls.enable": "true"}
    return {**keys, "haTls": True, "brokerIP1": "127.0.0.1", **more}


@pytest.mark.parametrize("secret", [False, True], ids=["certificates", "certificates and a secret"])
async def test_replication_over_tls(tmp_path: Path, certificates: Certificates, secret: bool) -> None:
    more = {"haSecretFile": key_file(tmp_path / "ha.key")} if secret else {}
    async with pair(tmp_path, tls_of(certificates, **more), **tls_of(certificates, **more)) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            for _ in range(3):
                assert (await client.send(TOPIC, b"x" * 100_000)).code == 0
        await in_sync(master, slave)
        assert slave.context.store.max_phy_offset == master.context.store.max_phy_offset > 300_000
        address = ("127.0.0.1", master.replication.port)
        async with await trio.open_tcp_stream(*address) as stream:
            await stream.send_all(bytes(8))
            assert await stream.receive_some(1) == b""
        # A certificate of no CA of ours, and none at all.
        for shown in (certificates.foreign_client, None):
            context = ssl.create_default_context(cafile=str(certificates.ca))
            if shown is not None:
                context.load_cert_chain(shown.cert, shown.key)
            tls = trio.SSLStream(await trio.open_tcp_stream(*address), context, server_hostname="127.0.0.1")
            got = b""
            with contextlib.suppress(trio.BrokenResourceError):
                await tls.send_all(bytes(8))
                got = bytes(await tls.receive_some(100))
            assert got == b""
            await trio.aclose_forcefully(tls)


@pytest.mark.parametrize("side", ["master", "slave"])
async def test_replication_with_tls_on_one_side_only(tmp_path: Path, certificates: Certificates, side: str) -> None:
    with_tls, without = tls_of(certificates), tls_of(certificates, haTls=False)
    leader, follower = (with_tls, without) if side == "master" else (without, with_tls)
    async with pair(tmp_path, leader, **follower) as (_, slave):
        client = slave.replication.client
        assert client is not None
        with trio.fail_after(30):
            while not client.state().error:  # noqa: ASYNC110 - there is no event for it
                await trio.sleep(0.01)
        assert slave.context.store.max_phy_offset == 0


def test_what_replication_over_tls_needs(certificates: Certificates) -> None:
    keys = {key: str(value).lower() if value is True else str(value) for key, value in tls_of(certificates).items()}
    load_broker(flags={key: (value, "test") for key, value in keys.items()})
    for without in (
        {"tls.enable": "false"},
        {"tls.server.authClient": "false", "tls.server.need.client.auth": "none"},
        {"tls.client.authServer": "false"},
        {"tls.client.certPath": "", "tls.client.keyPath": ""},
        {"tls.server.certPath": "", "tls.server.keyPath": ""},
    ):
        with pytest.raises(ConfigError) as caught:
            load_broker(flags={key: (value, "test") for key, value in (keys | without).items()})
        assert caught.value.key == "haTls"
        assert next(iter(without)).rpartition(".")[2] in str(caught.value)
