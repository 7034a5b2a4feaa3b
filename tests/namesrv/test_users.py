"""Who may do what at a name server: each of its codes, signed by whom, and changes of the broker's file."""

import json
from pathlib import Path

import pytest

from tests.broker.auth.signed import signed
from tests.namesrv.builders import registration_body, registration_header, topic
from tests.namesrv.server import Wire, running
from tests.ports import free_port
from tests.remoting.auth.user_files import following, grant, key_file, writer
from trimq.namesrv.cli import banner
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController
from trimq.namesrv.start_error import StartError
from trimq.protocol.auth.model import User, UserChange, UserStatus, UserType
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.register_broker_body import encode_register_broker_body
from trimq.remoting.auth.replay_guard import AGAIN
from trimq.remoting.client.credentials import Credentials, Signer
from trimq.remoting.http.access_metrics import access_families

ROOT = User("root", "root canary-27", UserType.SUPER)
READER = User("reader", "reader canary-27")
SECRETS = {ROOT.username: ROOT.password, READER.username: READER.password}

CODES: dict[RequestCode, dict[str, str]] = {
    RequestCode.PUT_KV_CONFIG: {"namespace": "n", "key": "k", "value": "v"},
    RequestCode.GET_KV_CONFIG: {"namespace": "n", "key": "k"},
    RequestCode.DELETE_KV_CONFIG: {"namespace": "n", "key": "k"},
    RequestCode.UNREGISTER_BROKER: {
        "brokerName": "broker-a",
        "brokerAddr": "127.0.0.1:10911",
        "clusterName": "DefaultCluster",
        "brokerId": "0",
    },
    RequestCode.GET_BROKER_CLUSTER_INFO: {},
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: {"brokerName": "broker-a"},
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: {},
    RequestCode.DELETE_TOPIC_IN_NAMESRV: {"topic": "T"},
    RequestCode.UPDATE_NAMESRV_CONFIG: {},
    RequestCode.GET_NAMESRV_CONFIG: {},
    RequestCode.ADD_WRITE_PERM_OF_BROKER: {"brokerName": "broker-a"},
    RequestCode.GET_BROKER_MEMBER_GROUP: {"clusterName": "DefaultCluster", "brokerName": "broker-a"},
}
"""100 and following, without 103 and 105, which have their own tests."""


async def ask(
    wire: Wire, code: int, ext: dict[str, str] | None = None, body: bytes = b"", by: str | None = None
) -> RemotingCommand:
    fields = ext or {}
    return await wire.ask(code, fields if by is None else signed(fields, body, by, SECRETS[by]), body)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
async def test_codes_need_a_signature_and_a_policy(tmp_path: Path, code: RequestCode) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT, READER)
    config = following(tmp_path / "config", keys) | {"allowAdminOverPlain": "true"}
    async with running(tmp_path, **config) as server, server.connect() as wire:
        ext, body = CODES[code], b"orderMessageEnable=true" if code == RequestCode.UPDATE_NAMESRV_CONFIG else b""
        assert (await ask(wire, code, ext, body)).code == ResponseCode.NO_PERMISSION
        assert (await ask(wire, code, ext, body, "reader")).code == ResponseCode.NO_PERMISSION
        wrong = signed(ext, body, "root", "no")
        assert (await wire.ask(code, wrong, body)).code == ResponseCode.NO_PERMISSION
        assert server.controller.users is not None
        assert server.controller.users.users.access.refused == {
            "authentication": 2,
            "replay": 0,
            "plain": 0,
            "authorization": 1,
        }
        assert (await ask(wire, code, ext, body, "root")).code != ResponseCode.NO_PERMISSION


async def test_a_broker_registers_with_its_signature_only(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    store = await writer(tmp_path / "config", keys, ROOT, READER)
    await grant(store, "reader", "Cluster:other", "Update")
    async with running(tmp_path, **following(tmp_path / "config", keys)) as server, server.connect() as wire:
        header = registration_header("broker-a", 0, "127.0.0.1:10911")
        ext = RemotingCommand.request(RequestCode.REGISTER_BROKER, header).ext_fields()
        body = encode_register_broker_body(registration_body(topic("A"), topic("TBW102", read=8, write=8, perm=7)))
        for by in (None, "reader"):  # whose policy is about another cluster
            assert (await ask(wire, 103, ext, body, by)).code == ResponseCode.NO_PERMISSION
        assert server.controller.routes.live_brokers() == []
        # Between servers, so also on a plain connection.
        assert (await ask(wire, 103, ext, body, "root")).code == 0
        assert len(server.controller.routes.live_brokers()) == 1
        # Administration on a plain connection can be recorded, and sent again.
        reply = await ask(wire, RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"}, by="root")
        assert reply.code == ResponseCode.NO_PERMISSION
        assert reply.remark is not None
        assert "TLS" in reply.remark


async def test_routes_are_for_those_who_may_use_the_topic_and_changes_count(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    store = await writer(tmp_path / "config", keys, ROOT, READER)
    config = following(tmp_path / "config", keys) | {"namedListenPorts": f"inside={free_port()}"}
    async with running(tmp_path, **config) as server, server.connect() as wire:
        route = {"topic": "T"}
        assert (await ask(wire, 105, route, by="reader")).code == ResponseCode.NO_PERMISSION
        await grant(store, "reader", "Topic:T", "Sub")
        assert server.controller.users is not None
        await server.controller.users.refresh()
        assert (await ask(wire, 105, route, by="reader")).code == ResponseCode.TOPIC_NOT_EXIST
        assert (await ask(wire, 105, {"topic": "U"}, by="reader")).code == ResponseCode.NO_PERMISSION
        server.address = server.controller.named_endpoints["inside"]
        async with server.connect() as inside:
            assert (await ask(inside, 105, route)).code == ResponseCode.NO_PERMISSION
            assert (await ask(inside, 105, route, by="reader")).code == ResponseCode.TOPIC_NOT_EXIST
        await store.delete_user("reader")
        await server.controller.users.refresh()
        assert (await ask(wire, 105, route, by="reader")).code == ResponseCode.NO_PERMISSION


async def test_a_recorded_request_is_not_served_again(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT)
    config = following(tmp_path / "config", keys) | {"authReplayWindowSeconds": "60"}
    async with running(tmp_path, **config) as server, server.connect() as wire:
        assert server.controller.users is not None
        access = server.controller.users.users.access
        server.clock.advance(1)  # what was made before a start is refused
        stamped = Signer(Credentials(ROOT.username, ROOT.password), server.clock)
        code = RequestCode.GET_BROKER_CLUSTER_INFO
        fields = stamped.signed(RemotingCommand.request(code)).ext_fields()
        assert (await wire.ask(code, fields)).code == 0
        again = await wire.ask(code, fields)
        assert (again.code, again.remark) == (ResponseCode.NO_PERMISSION, AGAIN)
        fields = stamped.signed(RemotingCommand.request(code)).ext_fields()
        server.clock.advance(61)
        assert (await wire.ask(code, fields)).code == ResponseCode.NO_PERMISSION
        assert (access.refused["replay"], access.replay_guard.senders) == (2, 1)


async def test_limits_come_before_signatures(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT)
    config = following(tmp_path / "config", keys) | {"maxRequestsPerSecondPerAddress": "2"}
    async with running(tmp_path, **config) as server, server.connect() as wire:
        codes = [(await ask(wire, RequestCode.GET_BROKER_CLUSTER_INFO)).code for _ in range(3)]
        assert codes == [ResponseCode.NO_PERMISSION] * 2 + [ResponseCode.SYSTEM_BUSY]
        assert server.controller.users is not None
        assert server.controller.users.users.access.refused["authentication"] == 2


async def test_codes_without_a_handler_are_refused_too(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT, READER)
    async with running(tmp_path, **following(tmp_path / "config", keys)) as server, server.connect() as wire:
        assert (await ask(wire, 9999)).code == ResponseCode.NO_PERMISSION
        assert (await ask(wire, 9999, by="reader")).code == ResponseCode.NO_PERMISSION
        assert (await ask(wire, 9999, by="root")).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


async def test_who_may_do_what_is_seen(tmp_path: Path) -> None:
    configuration = load_namesrv()
    assert "  access         open: " in "\n".join(banner(configuration, "h", 1, 0.0))
    async with running(tmp_path) as server, server.connect() as wire:
        (note,) = [note for note in server.controller.health.readiness().notes if note.code == "access"]
        assert note.text.startswith("open: ")
        assert (await ask(wire, RequestCode.GET_BROKER_CLUSTER_INFO)).code == 0
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT)
    async with running(tmp_path, **following(tmp_path / "config", keys)) as server:
        assert server.controller.users is not None
        (tmp_path / "config" / "auth.json").write_bytes(b"{")
        await server.controller.users.refresh()
        notes = {note.code: note.text for note in server.controller.health.readiness().notes}
        assert notes["access"].startswith("every request has to be signed")
        assert "damaged" in notes["access_users_not_read"]
        families = {family.name: family.samples[0].value for family in access_families(server.controller.users.users)}
        assert (families["trimq_access_open"], families["trimq_access_users"]) == (0, 1)


async def test_no_request_changes_these_keys_or_shows_their_secrets(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT)
    inner = json.dumps({"accessKey": "i", "secretKey": "inner canary-27"})
    config = following(tmp_path / "config", keys) | {
        "allowAdminOverPlain": "true",
        "innerClientAuthenticationCredentials": inner,
    }
    async with running(tmp_path, **config) as server, server.connect() as wire:
        for key in ("authenticationEnabled", "authConfigPath", "authClusterName"):
            reply = await ask(wire, RequestCode.UPDATE_NAMESRV_CONFIG, {}, f"{key}=false".encode(), "root")
            assert reply.code == ResponseCode.NO_PERMISSION
        shown = await ask(wire, RequestCode.GET_NAMESRV_CONFIG, by="root")
        assert b"canary" not in bytes(shown.body)
        assert b"authenticationEnabled=true" in bytes(shown.body)


def test_without_users_there_is_no_start(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    config = following(tmp_path / "config", keys) | {"bindAddress": "127.0.0.1", "listenPort": "0"}
    configuration = load_namesrv(flags={key: (value, "test") for key, value in config.items()})
    with pytest.raises(StartError, match=r"there are no users: .*cannot be read: No such file"):
        NamesrvController(configuration).bind()


async def test_a_user_that_is_disabled_at_the_broker(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    store = await writer(tmp_path / "config", keys, ROOT, READER)
    async with running(tmp_path, **following(tmp_path / "config", keys)) as server, server.connect() as wire:
        await grant(store, "reader", "Cluster:DefaultCluster", "Get")
        assert server.controller.users is not None
        await server.controller.users.refresh()
        assert (await ask(wire, RequestCode.GET_BROKER_CLUSTER_INFO, by="reader")).code == 0
        await store.update_user("reader", UserChange(user_status=UserStatus.DISABLE))
        await server.controller.users.refresh()
        reply = await ask(wire, RequestCode.GET_BROKER_CLUSTER_INFO, by="reader")
        assert reply.code == ResponseCode.NO_PERMISSION
