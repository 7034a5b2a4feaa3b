"""Who may do what at a controller, and what signs its own requests."""

import json
from pathlib import Path

import pytest
import trio

from tests.broker.auth.signed import signed
from tests.controller.server import NAME, ScriptedBroker, Server, configuration_keys, heartbeat, name, running
from tests.remoting.auth.user_files import following, grant, key_file, writer
from trimq.controller.cli import banner
from trimq.controller.config import load_controller
from trimq.controller.server import ControllerManager, StartError
from trimq.protocol.auth.model import User, UserType
from trimq.protocol.auth.signature import ACCESS_KEY, SIGNATURE, sign
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.remoting.client.credentials import Credentials, Signer

ROOT = User("root", "root canary-33", UserType.SUPER)
BROKER = User("broker", "broker canary-33")
READER = User("reader", "reader canary-33")
SECRETS = {user.username: user.password for user in (ROOT, BROKER, READER)}

CHANGES: dict[RequestCode, dict[str, str]] = {
    RequestCode.CONTROLLER_APPLY_BROKER_ID: name(appliedBrokerId="1", registerCheckCode="127.0.0.1:1001;5"),
    RequestCode.BROKER_HEARTBEAT: heartbeat(1, trimqLease="1"),
    RequestCode.CONTROLLER_REGISTER_BROKER: name(brokerId="1", brokerAddress="127.0.0.1:1001"),
    RequestCode.CONTROLLER_ELECT_MASTER: name(brokerId="1"),
    RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET: {"brokerName": NAME, "masterBrokerId": "1", "masterEpoch": "1"},
    RequestCode.UPDATE_CONTROLLER_CONFIG: {},
    RequestCode.CLEAN_BROKER_DATA: name(brokerControllerIdsToClean="1"),
}
READS: dict[RequestCode, dict[str, str]] = {
    RequestCode.CONTROLLER_GET_REPLICA_INFO: name(),
    RequestCode.CONTROLLER_GET_METADATA_INFO: {},
    RequestCode.CONTROLLER_GET_SYNC_STATE_DATA: {},
    RequestCode.CONTROLLER_GET_NEXT_BROKER_ID: name(),
    RequestCode.GET_CONTROLLER_CONFIG: {},
}


async def ask(server: Server, code: RequestCode, ext: dict[str, str], by: str | None = None) -> int:
    body = b'["a"]' if code == RequestCode.CONTROLLER_GET_SYNC_STATE_DATA else b""
    if code == RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET:
        body = b'{"syncStateSet":[1],"syncStateSetEpoch":1}'
    return (await server.ask(code, ext if by is None else signed(ext, body, by, SECRETS[by]), body))[0]


async def test_codes_need_a_signature_and_a_policy_of_the_cluster(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    store = await writer(tmp_path / "config", keys, ROOT, BROKER, READER)
    await grant(store, "broker", "Cluster:c", "Update", "Get")
    await grant(store, "reader", "Cluster:c", "Get")
    config = following(tmp_path / "config", keys) | {"authClusterName": "c", "allowAdminOverPlain": "true"}
    async with running(tmp_path, sqlite=False, **config) as server:
        for code, ext in (CHANGES | READS).items():
            assert await ask(server, code, ext) == ResponseCode.NO_PERMISSION, code
            allowed = ("broker", "root") if code in CHANGES else ("reader", "broker", "root")
            if code in CHANGES:
                assert await ask(server, code, ext, "reader") == ResponseCode.NO_PERMISSION, code
            for by in allowed:
                assert await ask(server, code, ext, by) != ResponseCode.NO_PERMISSION, (code, by)


async def test_nothing_of_a_refused_request_counts(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT, READER)
    async with running(tmp_path, sqlite=False, **following(tmp_path / "config", keys)) as server:
        await ask(server, RequestCode.CONTROLLER_APPLY_BROKER_ID, CHANGES[RequestCode.CONTROLLER_APPLY_BROKER_ID])
        await ask(server, RequestCode.BROKER_HEARTBEAT, CHANGES[RequestCode.BROKER_HEARTBEAT], "reader")
        assert not server.controller.replicas.live
        assert not (await server.kv.range("/")).entries
        # Administration needs TLS.
        designated = name(brokerId="1", designateElect="true")
        assert await ask(server, RequestCode.CONTROLLER_ELECT_MASTER, designated, "root") == 16
        assert server.controller.users is not None
        assert server.controller.users.users.access.refused == {
            "authentication": 1,
            "replay": 0,
            "plain": 1,
            "authorization": 1,
        }
        # A change of the file counts for the next request.
        store = await writer(tmp_path / "config", keys)
        await store.delete_user("reader")
        await server.controller.users.refresh()
        assert await ask(server, RequestCode.CONTROLLER_GET_REPLICA_INFO, name(), "reader") == 16
        assert server.controller.users.users.access.refused["authentication"] == 2


async def test_brokers_get_their_first_master_without_tls(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    store = await writer(tmp_path / "config", keys, ROOT, BROKER)
    await grant(store, "broker", "Cluster:DefaultCluster", "Update")
    async with running(tmp_path, sqlite=False, **following(tmp_path / "config", keys)) as server:
        for code in (
            RequestCode.CONTROLLER_APPLY_BROKER_ID,
            RequestCode.CONTROLLER_REGISTER_BROKER,
            RequestCode.BROKER_HEARTBEAT,
            RequestCode.CONTROLLER_ELECT_MASTER,
        ):
            assert await ask(server, code, CHANGES[code], "broker") == ResponseCode.SUCCESS, code
        assert (await server.controller.replicas.state(NAME)).master == 1
        # Who reads the request must not be able to move the role with it.
        for value in ("true", "TRUE"):
            moved = name(brokerId="1", designateElect=value)
            assert await ask(server, RequestCode.CONTROLLER_ELECT_MASTER, moved, "root") == ResponseCode.NO_PERMISSION


async def test_a_master_that_stops_hands_over_without_tls(tmp_path: Path) -> None:
    """With the brokers' own user and a stamp; so who reads the request cannot send it again."""
    keys = key_file(tmp_path)
    store = await writer(tmp_path / "config", keys, ROOT, BROKER)
    await grant(store, "broker", "Cluster:DefaultCluster", "Update")
    inner = json.dumps({"accessKey": BROKER.username, "secretKey": BROKER.password})
    config = following(tmp_path / "config", keys) | {"innerClientAuthenticationCredentials": inner}
    async with running(tmp_path, sqlite=False, **config) as server:
        for number in (1, 2):
            for code, ext in (
                (
                    RequestCode.CONTROLLER_APPLY_BROKER_ID,
                    name(appliedBrokerId=str(number), registerCheckCode=f"127.0.0.1:100{number};5"),
                ),
                (
                    RequestCode.CONTROLLER_REGISTER_BROKER,
                    name(brokerId=str(number), brokerAddress=f"127.0.0.1:100{number}"),
                ),
                (RequestCode.BROKER_HEARTBEAT, heartbeat(number)),
            ):
                assert await ask(server, code, ext, "broker") == ResponseCode.SUCCESS, code
        assert await ask(server, RequestCode.CONTROLLER_ELECT_MASTER, name(brokerId="1"), "broker") == 0
        epoch = (await server.controller.replicas.state(NAME)).epoch
        body = b'{"syncStateSet":[1,2],"syncStateSetEpoch":1}'
        ext = {"brokerName": NAME, "masterBrokerId": "1", "masterEpoch": str(epoch)}
        ext = signed(ext, body, "broker", SECRETS["broker"])
        assert (await server.ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, ext, body))[0] == 0
        request = RemotingCommand(RequestCode.CONTROLLER_ELECT_MASTER, ext=name(brokerId="2", designateElect="true"))
        server.clock.advance(1)  # what has the time of the start may be a request of before
        stamped = {
            user.username: Signer(Credentials(user.username, user.password), server.clock).signed(request).ext_fields()
            for user in (BROKER, ROOT)
        }
        elect = RequestCode.CONTROLLER_ELECT_MASTER
        assert await ask(server, elect, name(brokerId="2", designateElect="true"), "broker") == 16  # without a stamp
        assert (await server.ask(elect, stamped["root"]))[0] == ResponseCode.NO_PERMISSION
        assert (await server.controller.replicas.state(NAME)).master == 1
        assert (await server.ask(elect, stamped["broker"]))[0] == ResponseCode.SUCCESS
        assert (await server.controller.replicas.state(NAME)).master == 2
        assert (await server.ask(elect, stamped["broker"]))[0] == ResponseCode.NO_PERMISSION


async def test_limits_come_before_signatures(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT)
    config = following(tmp_path / "config", keys) | {"maxRequestsPerSecondPerAddress": "2"}
    async with running(tmp_path, sqlite=False, **config) as server:
        codes = [await ask(server, RequestCode.CONTROLLER_GET_METADATA_INFO, {}) for _ in range(3)]
        assert codes == [ResponseCode.NO_PERMISSION] * 2 + [ResponseCode.SYSTEM_BUSY]
        assert server.controller.users is not None
        assert server.controller.users.users.access.refused["authentication"] == 2


async def test_notifications_are_signed(tmp_path: Path) -> None:
    inner = json.dumps({"accessKey": "broker", "secretKey": SECRETS["broker"]})
    async with (
        running(tmp_path, innerClientAuthenticationCredentials=inner) as server,
        trio.open_nursery() as nursery,
    ):
        broker = ScriptedBroker()
        await nursery.start(broker.run)
        await server.led_by_1(broker.address)
        command = await broker.notified.receive()
        fields = command.ext_fields()
        assert fields[ACCESS_KEY] == "broker"
        signature = fields.pop(SIGNATURE)
        assert signature == sign(SECRETS["broker"], fields, bytes(command.body), command.version)
        nursery.cancel_scope.cancel()


def configured(tmp_path: Path, **keys: str) -> ControllerManager:
    flags = {key: (value, "test") for key, value in configuration_keys(tmp_path, **keys).items()}
    return ControllerManager(load_controller(flags=flags))


def test_without_users_there_is_no_start(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    with pytest.raises(StartError, match="there are no users"):
        configured(tmp_path, **following(tmp_path / "config", keys)).bind()


async def test_credentials_that_are_gone_refuse_the_start(tmp_path: Path) -> None:
    path = tmp_path / "inner"
    path.write_text('{"accessKey":"a","secretKey":"b"}')
    path.chmod(0o600)
    controller = configured(tmp_path, innerClientAuthenticationCredentialsFile=str(path))
    path.unlink()
    with pytest.raises(StartError, match="innerClientAuthenticationCredentialsFile: expected a file that can be read"):
        await controller.run()


async def test_who_may_do_what_is_seen(tmp_path: Path) -> None:
    assert "  access         open: " in "\n".join(banner(load_controller(), "h", 1, 0.0))
    async with running(tmp_path) as server:
        (note,) = [note for note in server.controller.health.readiness().notes if note.code == "access"]
        assert note.text.startswith("open: ")
