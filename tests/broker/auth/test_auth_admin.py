"""3001 to 3010 on a running broker, as RocketMQ's mqadmin sends them."""

import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.broker.auth.requests import Case
from tests.broker.auth.signed import ROOT, User, acl, closed_broker, secret_of
from tests.broker.auth.test_codes import command_of, made
from tests.broker.wire_client import WireClient, send_ext
from tests.remoting.auth.user_files import key_file
from trimq.broker.processors.admin.auth_admin import AuthAdminProcessor
from trimq.broker.testing import configuration, running_broker
from trimq.protocol.auth.auth_file import AUTH_FILE, SEAL, seal_of
from trimq.protocol.auth.model import UserChange, UserType
from trimq.protocol.command import RemotingCommand
from trimq.remoting.auth.users import Users

CREATE, UPDATE, DELETE, GET, LIST = range(3001, 3006)
ACL_CREATE, ACL_UPDATE, ACL_DELETE, ACL_GET, ACL_LIST = range(3006, 3011)


def said(reply: RemotingCommand) -> tuple[int, str | None]:
    return reply.code, reply.remark


def body(reply: RemotingCommand) -> Any:
    assert reply.code == 0, reply.remark
    return json.loads(bytes(reply.body)) if len(reply.body) else None


async def put(root: User, code: int, name: str, **fields: str) -> tuple[int, str | None]:
    return said(await root.ask(code, {"username": name}, json.dumps(fields).encode()))


async def test_users(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (_, root):
        assert (await put(root, CREATE, "app", username="other", password="p1"))[0] == 0  # the header's name counts
        assert (await put(root, CREATE, "app", password="p1")) == (16, "The user is existed")
        assert (await put(root, CREATE, "b")) == (16, "password can not be blank")
        assert (await put(root, CREATE, " ", password="p")) == (29, "The username is blank")
        assert (await put(root, UPDATE, "none", password="p")) == (16, "The user is not exist")
        assert body(await root.ask(GET, {"username": "app"})) == {
            "userStatus": "enable",
            "userType": "Normal",
            "username": "app",
        }
        reply = await root.ask(GET, {"username": "none"})
        assert (reply.code, len(reply.body)) == (0, 0)
        assert (await put(root, CREATE, "apple", password="p", userType="Super", userStatus="disable"))[0] == 0
        assert [user["username"] for user in body(await root.ask(LIST))] == ["app", "apple", ROOT]
        assert [user["username"] for user in body(await root.ask(LIST, {"filter": "ppl"}))] == ["apple"]
        assert body(await root.ask(LIST, {"filter": "zzz"})) is None
        app = User(root.client, "app", "p1")
        await root.grant("app", "Topic:T Pub")
        assert (await app.ask(310, send_ext("T"), b"x")).code == 0
        assert (await put(root, UPDATE, "app", password="p2"))[0] == 0
        assert (await app.ask(310, send_ext("T"), b"x")).code == 16
        assert (await User(root.client, "app", "p2").ask(310, send_ext("T"), b"x")).code == 0
        assert said(await root.ask(DELETE, {"username": "app"}))[0] == 0
        assert said(await root.ask(DELETE, {"username": "app"}))[0] == 0
        assert said(await root.ask(ACL_GET, {"subject": "User:app"})) == (16, "The subject is not exist.")
        assert said(await root.ask(DELETE, {"username": ""})) == (29, "The username is blank")
        for ext, data in (({"username": "x"}, b""), ({"username": "x"}, b"{"), ({}, b"{}")):
            assert (await root.ask(CREATE, ext, data)).code != 0


async def test_policies(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (_, root):
        app = await root.make("app")
        subject = {"subject": "User:app"}
        assert body(await root.ask(ACL_GET, subject)) is None
        assert said(await root.ask(ACL_DELETE, subject)) == (16, "The acl is not exist.")
        for code in (ACL_CREATE, ACL_UPDATE):
            assert (await root.ask(code, subject, acl("app", "Topic:T Pub", "Group:G* Sub"))).code == 0
        assert (await root.ask(ACL_UPDATE, subject, acl("app", "Deny Topic:U All"))).code == 0
        entries = [
            {"actions": ["Pub"], "decision": "Allow", "resource": "Topic:T"},
            {"actions": ["Sub"], "decision": "Allow", "resource": "Group:G*"},
            {"actions": ["All"], "decision": "Deny", "resource": "Topic:U"},
        ]
        found = {"policies": [{"entries": entries, "policyType": "Custom"}], "subject": "User:app"}
        assert body(await root.ask(ACL_GET, subject)) == found
        assert body(await root.ask(ACL_LIST)) == [found]
        assert body(await root.ask(ACL_LIST, {"subjectFilter": "nn"})) is None
        assert body(await root.ask(ACL_LIST, {"subjectFilter": "pp", "resourceFilter": "Group"})) == [
            {"policies": [{"entries": entries[1:2], "policyType": "Custom"}], "subject": "User:app"}
        ]
        assert body(await root.ask(ACL_LIST, {"resourceFilter": "zzz"})) is None
        assert (await app.ask(310, send_ext("T"), b"x")).code == 0
        for ext in ({"resource": "Topic:T", "policyType": "Default"}, {"resource": "Topic:none"}):
            assert (await root.ask(ACL_DELETE, subject | ext)).code == 0
        assert (await app.ask(310, send_ext("T"), b"x")).code == 0
        assert (await root.ask(ACL_DELETE, subject | {"resource": "Topic:T"})).code == 0
        assert (await app.ask(310, send_ext("T"), b"x")).code == 16
        assert (await root.ask(ACL_DELETE, subject | {"resource": " "})).code == 0  # everything
        assert body(await root.ask(ACL_GET, subject)) is None
        assert said(await root.ask(ACL_DELETE, subject | {"policyType": "x"})) == (
            29,
            "The policyType is illegal; expected Custom or Default",
        )
        none = {"subject": "User:none"}
        assert said(await root.ask(ACL_CREATE, none, acl("none", "Topic:T Pub"))) == (
            16,
            "The subject of User:none is not exist.",
        )
        assert (await root.ask(ACL_CREATE, subject, b"")).code != 0
        assert (await root.ask(ACL_GET, {})).code == 29


async def test_only_a_super_manages_supers_and_policies_and_one_remains(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (_, root):
        app = await root.make("app", "Cluster:DefaultCluster All")
        assert (await put(app, CREATE, "b", password="p"))[0] == 0
        assert (await put(app, CREATE, "c", password="p", userType="Super")) == (
            1,
            "The super user can only be create by super user",
        )
        text = "The super user can only be update by super user"
        assert (await put(app, UPDATE, "b", userType="Super")) == (1, text)
        assert (await put(app, UPDATE, ROOT, password="p")) == (16, text)
        assert said(await app.ask(DELETE, {"username": ROOT})) == (16, text)
        grant = said(await app.ask(ACL_CREATE, {"subject": "User:app"}, acl("app", "* All")))
        assert grant == (16, "The policies can only be update by super user")
        for reply in (
            await put(root, UPDATE, ROOT, userType="Normal"),
            await put(root, UPDATE, ROOT, userStatus="disable"),
            said(await root.ask(DELETE, {"username": ROOT})),
        ):
            assert reply[0] == 16
            assert "the last super user" in (reply[1] or "")


async def test_without_authorization_a_user_is_deleted_with_its_policies(tmp_path: Path) -> None:
    """Issue 9561 of RocketMQ: there, deleting a user fails in part then."""
    async with closed_broker(tmp_path, authorizationEnabled=False) as (broker, root):
        await root.make("app", "Topic:T Pub")
        assert said(await root.ask(DELETE, {"username": "app"})) == (0, None)
        assert body(await root.ask(GET, {"username": "app"})) is None
        assert broker.context.users is not None
        assert broker.context.users.store.acl("app") is None
        await root.make("app")
        assert body(await root.ask(ACL_GET, {"subject": "User:app"})) is None


async def test_a_reply_to_a_change_means_that_it_is_on_disk(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root):
        await root.make("app", "Topic:T Pub")
        (path,) = (tmp_path / "store" / "config").glob("*auth*")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert '"app"' in path.read_text()
        assert (await root.ask(DELETE, {"username": "app"})).code == 0
        assert '"app"' not in path.read_text()
        assert broker.gate.features


async def test_replies_have_no_passwords(tmp_path: Path) -> None:
    # superOverTls: this connection is not over TLS.
    for how in ("never", "superOverTls"):
        async with closed_broker(tmp_path / how, authReturnPasswords=how) as (_, root):
            for reply in (await root.ask(GET, {"username": ROOT}), await root.ask(LIST)):
                assert reply.code == 0
                assert b"password" not in bytes(reply.body)


@pytest.mark.parametrize("code", range(3001, 3011))
async def test_without_authentication_they_are_refused(tmp_path: Path, code: int) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        reply = await client.ask(code, {"username": "x"}, b"{}")
        assert said(reply) == (16, "users and policies are served while authenticationEnabled=true only")


@pytest.mark.parametrize(
    ("how", "kind", "tls", "shown"),
    [
        ("superOverTls", UserType.SUPER, True, True),
        ("superOverTls", UserType.SUPER, False, False),
        ("superOverTls", UserType.NORMAL, True, False),
        ("never", UserType.SUPER, True, False),
    ],
)
async def test_a_super_on_tls_gets_passwords_if_that_is_configured(
    tmp_path: Path, how: str, kind: UserType, tls: bool, shown: bool
) -> None:
    access, store = await made()
    await store.update_user("app", UserChange(user_type=kind))
    processor = AuthAdminProcessor(
        configuration=configuration(tmp_path, {"authReturnPasswords": how}), users=Users(store, access)
    )
    connection: Any = SimpleNamespace(peer=("127.0.0.1", 1), tls=object() if tls else None)
    command = command_of(GET, Case({"username": "root"}, b"", ()))
    assert ("password" in body(processor.get_user(connection, command))) is shown


async def test_the_file_of_users_for_super_users(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    async with closed_broker(tmp_path, authKeyFile=str(keys), allowSecretsInClear=False) as (_, root):
        app = await root.make("app", "Cluster:DefaultCluster Get|Update", "Topic:T Pub")
        assert said(await app.ask(13010)) == (16, "the file of users is for super users")
        data = bytes((await root.ask(13010)).body)
        path = tmp_path / "store" / "config" / AUTH_FILE
        assert data == path.read_bytes()
        assert b"canary" not in data
        assert secret_of("app").encode() not in data
        unchanged = await root.ask(13010, {SEAL: seal_of(data)})
        assert (unchanged.code, bytes(unchanged.body)) == (0, b"")
        await root.grant("app", "Topic:U Pub")
        changed = bytes((await root.ask(13010, {SEAL: seal_of(data)})).body)
        assert changed == path.read_bytes() != data


async def test_passwords_in_clear_do_not_leave_the_broker(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (_, root):
        code, text = said(await root.ask(13010))
        assert code == 16
        assert text is not None
        assert text.startswith("users leave this broker encrypted only: set authKeyFile")
