"""Starts: what is refused, and which users there are afterwards."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.broker.auth.signed import ON, ROOT, ROOT_SECRET, User, closed_broker
from tests.broker.wire_client import send_ext
from tests.canary import permit
from tests.remoting.auth.user_files import key_file
from trimq.broker.cli import banner
from trimq.broker.config import load_broker
from trimq.broker.security_files import SecurityFiles
from trimq.broker.start_error import StartError
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.testing import configuration, running_broker
from trimq.remoting.auth.config import AUTH_INERT, AuthConfig
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.runtime.clock import SystemClock


def files_of(settings: Configuration) -> SecurityFiles:
    return SecurityFiles(settings, RealDisk(), SystemClock())


async def opened(directory: Path, **changes: Any) -> list[tuple[str, str]]:
    """Names and passwords of the users after a start."""
    permit(directory / "config" / "auth.json*")  # allowSecretsInClear
    files = files_of(configuration(directory, {**ON, **changes}))
    users = await files.users(await files.inner_user())
    assert users is not None
    return [(user.username, user.password) for user in users.store.list_users()]


async def refusal(directory: Path, **changes: Any) -> str:
    with pytest.raises(StartError) as caught:
        await opened(directory, **changes)
    return str(caught.value)


async def test_the_first_administrator_is_made_at_the_first_start_only(tmp_path: Path) -> None:
    assert await opened(tmp_path) == [(ROOT, ROOT_SECRET)]
    another = json.dumps({"username": "another", "password": "p"})
    assert await opened(tmp_path, initAuthenticationUser=another) == [(ROOT, ROOT_SECRET)]
    assert await opened(tmp_path, initAuthenticationUser="") == [(ROOT, ROOT_SECRET)]


async def test_without_any_user_the_start_is_refused_with_how_to(tmp_path: Path) -> None:
    text = await refusal(tmp_path, initAuthenticationUser="")
    assert text == (
        "authenticationEnabled=true, and there is no user who could sign a request: set initAuthenticationUser"
        ' ({"username":"...","password":"..."}) or initAuthenticationUserFile for one start'
    )


async def test_passwords_in_clear_need_a_key(tmp_path: Path) -> None:
    text = await refusal(tmp_path, allowSecretsInClear=False)
    assert text.startswith("authenticationEnabled=true, and passwords could not be stored: set authKeyFile to ")
    assert "allowSecretsInClear=true" in text
    assert not (tmp_path / "config").exists()


async def test_a_key_file_that_cannot_be_used(tmp_path: Path) -> None:
    text = await refusal(tmp_path, authKeyFile=str(tmp_path / "none"))
    assert "authKeyFile" in text


async def test_a_damaged_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere" / "auth.json"
    await opened(tmp_path, authConfigPath=str(path.parent))
    (path,) = path.parent.iterdir()
    path.write_bytes(b"{")
    assert str(path) in await refusal(tmp_path, authConfigPath=str(path.parent))
    assert path.read_bytes() == b"{"


async def test_the_user_of_the_brokers_own_requests(tmp_path: Path) -> None:
    inner = json.dumps({"accessKey": "inner", "secretKey": "s1"})
    assert await opened(tmp_path, innerClientAuthenticationCredentials=inner) == [("inner", "s1"), (ROOT, ROOT_SECRET)]
    with capture_logs() as logs:
        await opened(tmp_path, innerClientAuthenticationCredentials=inner)
        assert logs == []
        other = json.dumps({"accessKey": "inner", "secretKey": "s2"})
        users = await opened(tmp_path, innerClientAuthenticationCredentials=other)
    assert users[0] == ("inner", "s1")
    assert [(line["event"], line["user"]) for line in logs] == [("auth_inner_user_differs", "inner")]
    found = await files_of(configuration(tmp_path, {"innerClientAuthenticationCredentials": inner})).inner_user()
    assert found is not None
    assert (found.username, found.password) == ("inner", "s1")
    assert await files_of(configuration(tmp_path)).inner_user() is None


async def test_a_broker_may_start_with_the_users_of_another_one(tmp_path: Path) -> None:
    """So that the users are there before a broker that was open asks for signatures."""
    keys = str(key_file(tmp_path))
    first = {"authKeyFile": keys, "allowSecretsInClear": False}
    assert await opened(tmp_path / "one", **first) == [(ROOT, ROOT_SECRET)]
    found, copy = (tmp_path / name / "config" / "auth.json" for name in ("one", "two"))
    copy.parent.mkdir(parents=True)
    shutil.copy(found, copy)
    another = json.dumps({"username": "another", "password": "p"})
    assert await opened(tmp_path / "two", **first, initAuthenticationUser=another) == [(ROOT, ROOT_SECRET)]


async def test_only_the_inner_user_is_an_administrator_too(tmp_path: Path) -> None:
    inner = json.dumps({"accessKey": "inner", "secretKey": "s1"})
    keys = {"innerClientAuthenticationCredentials": inner, "initAuthenticationUser": ""}
    assert await opened(tmp_path, **keys) == [("inner", "s1")]


async def test_files_with_users(tmp_path: Path) -> None:
    init, inner = tmp_path / "init", tmp_path / "inner"
    init.write_text('{"username":"admin","password":"p"}\n')
    inner.write_text('{"accessKey":"inner","secretKey":"s"}\n')
    for path in (init, inner):
        path.chmod(0o600)
    keys = {
        "initAuthenticationUser": "",
        "initAuthenticationUserFile": str(init),
        "innerClientAuthenticationCredentialsFile": str(inner),
    }
    assert await opened(tmp_path / "store", **keys) == [("admin", "p"), ("inner", "s")]
    settings = configuration(tmp_path / "store", {**ON, **keys})
    empty = configuration(tmp_path / "empty", {**ON, **keys})
    inner.unlink()  # after the configuration was read
    init.unlink()
    with pytest.raises(StartError, match="innerClientAuthenticationCredentialsFile: expected a file that can be read"):
        await files_of(settings).inner_user()
    found = await files_of(settings).users(None)  # the first user is not made again: his file is not needed
    assert found is not None
    assert list(found.store.users) == ["admin", "inner"]
    with pytest.raises(StartError, match="the users of the configuration cannot be made: a file that can be read"):
        await files_of(empty).users(None)


def problem(tmp_path: Path, *lines: str) -> tuple[str, str, str]:
    """Where, key, and expectation of a configuration that is refused."""
    path = tmp_path / "broker.conf"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        load_broker(path)
    assert "canary" not in str(caught.value)
    return caught.value.where.removeprefix(f"{path}:"), caught.value.key, caught.value.expected


LOCAL = "org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("authorizationEnabled=true", "false, or authenticationEnabled=true too: without signatures anybody"),
        ("aclEnable=true", "false: this key does nothing any more."),
        ("authenticationProvider=com.example.Mine", "one of org.apache.rocketmq.auth.authentication.provider.Default"),
        ("authorizationProvider=x", "one of org.apache.rocketmq.auth.authorization.provider.Default"),
        (f"authorizationMetadataProvider={LOCAL}", "one of org.apache.rocketmq.auth.authorization.provider.Local"),
        ("authenticationMetadataProvider=x", f"one of {LOCAL}"),
        ("authenticationStrategy=x", "one of org.apache.rocketmq.auth.authentication.strategy.Stateless"),
        ("authorizationStrategy=x", "one of org.apache.rocketmq.auth.authorization.strategy.Stateless"),
        ("authenticationWhitelist=30,x", "request codes, numbers separated by commas"),
        ("authorizationWhitelist=-1", "request codes, numbers separated by commas"),
        ("authReplayWindowSeconds=0", "1 to 3600 seconds"),
        ("authReplayWindowSeconds=3601", "1 to 3600 seconds"),
        ("authReturnPasswords=always", "one of never, superOverTls"),
        ("initAuthenticationUser=canary", 'JSON: {"username":"...","password":"..."}'),
        ('initAuthenticationUser={"username":"canary"}', 'JSON: {"username":"...","password":"..."}'),
        ('initAuthenticationUser={"username":"","password":"canary"}', 'JSON: {"username"'),
        ('initAuthenticationUser=["canary"]', 'JSON: {"username"'),
        ('innerClientAuthenticationCredentials={"username":"a","password":"canary"}', 'JSON: {"accessKey":"..."'),
    ],
)
def test_bad_values_refuse_the_start_with_file_and_line(tmp_path: Path, line: str, expected: str) -> None:
    where, key, found = problem(tmp_path, "# first", line)
    assert (where, key) == ("2", line.partition("=")[0])
    assert found.startswith(expected)
    if key == "aclEnable":
        assert "mqadmin migrateAuth" in found


def test_files_with_users_that_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "user"
    secret.write_text("canary")
    line = f"initAuthenticationUserFile={secret}"
    secret.chmod(0o640)
    assert problem(tmp_path, line)[2] == f"a file that only its owner can read (chmod 600 {secret})"
    secret.chmod(0o600)
    assert problem(tmp_path, line)[2].startswith('JSON: {"username"')
    secret.write_bytes(b"\xff")
    assert problem(tmp_path, line)[2] == "a file with UTF-8 text"
    secret.write_text('{"username":"a","password":"canary"}')
    twice = problem(tmp_path, line, secret.read_text().join(("initAuthenticationUser=", "")))
    assert twice == ("1", "initAuthenticationUserFile", "empty, since initAuthenticationUser is set too")
    secret.unlink()
    assert problem(tmp_path, line)[2] == "a file that can be read (No such file or directory)"


def test_rocketmqs_classes_are_accepted_and_what_has_no_effect_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(
        "authenticationEnabled=true\nauthorizationEnabled=true\naclEnable=false\nuserCacheMaxNum=10\n"
        "authenticationProvider=org.apache.rocketmq.auth.authentication.provider.DefaultAuthenticationProvider\n"
        f"authenticationMetadataProvider={LOCAL}\n"
        "authorizationProvider=org.apache.rocketmq.auth.authorization.provider.DefaultAuthorizationProvider\n"
        "authorizationMetadataProvider=org.apache.rocketmq.auth.authorization.provider.LocalAuthorizationMetadataProvider\n"
        "authenticationStrategy=org.apache.rocketmq.auth.authentication.strategy.StatefulAuthenticationStrategy\n"
        "authorizationStrategy=org.apache.rocketmq.auth.authorization.strategy.StatefulAuthorizationStrategy\n"
        'initAuthenticationUser={"username":"rocketmq","password":"12345678"}\n'
        'innerClientAuthenticationCredentials={"accessKey":"rocketmq","secretKey":"12345678"}\n'
    )
    found = load_broker(path)
    assert found.warnings == []
    effects = "has no effect: every signature is checked, and changes apply to the next request"
    assert found.notes == [
        f"{path}:4: userCacheMaxNum has no effect: {AUTH_INERT['userCacheMaxNum']}",
        f"{path}:9: authenticationStrategy {effects}",
        f"{path}:10: authorizationStrategy {effects}",
    ]


SIGNED = "every request has to be signed"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "open: anybody who reaches the port is administrator (docs/security.md)"),
        (
            {"authenticationEnabled": "true"},
            f"{SIGNED}, and each user may do everything (authorizationEnabled=false)",
        ),
        (
            {"authenticationEnabled": "true", "authorizationEnabled": "true", "authorizationWhitelist": "30,31"},
            f"{SIGNED}, and policies decide what its user may do; except authorizationWhitelist=30,31",
        ),
    ],
)
def test_the_summary_says_who_may_do_what(tmp_path: Path, keys: Mapping[str, object], text: str) -> None:
    assert configuration(tmp_path, keys).section(AuthConfig).summary == text


async def test_the_banner_says_open(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        assert "  access         open: anybody who reaches the port is administrator (docs/security.md)" in banner(
            broker, 1.0
        )


PLAIN_ACL = """
globalWhiteRemoteAddresses: [10.0.0.*]
accounts:
- accessKey: oldadmin
  secretKey: 12345678
  admin: true
- accessKey: oldapp
  secretKey: "87654321"
  topicPerms: ["T=PUB|SUB"]
- accessKey: root
  secretKey: ignored1
"""


async def test_accounts_of_rocketmq_4_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "home" / "conf"
    conf.mkdir(parents=True)
    (conf / "plain_acl.yml").write_text(PLAIN_ACL)
    monkeypatch.setenv("ROCKETMQ_HOME", str(tmp_path / "home"))
    with capture_logs() as logs:
        async with closed_broker(tmp_path, migrateAuthFromV1Enabled=True) as (broker, root):
            app = User(root.client, "oldapp", "87654321")
            assert (await app.ask(310, send_ext("T"), b"x")).code == 0
            assert (await app.ask(310, send_ext("U"), b"x")).code == 16
            assert (await User(root.client, "oldadmin", "12345678").ask(26)).code == 0
            assert (await root.ask(26)).code == 0  # it was known already
            assert broker.context.users is not None
    dropped = [line["text"] for line in logs if line["event"] == "auth_migration_dropped"]
    assert dropped == [
        f"{conf}/plain_acl.yml: globalWhiteRemoteAddresses is dropped: requests from 10.0.0.* have to be signed now"
    ]
    assert "87654321" not in str(logs)
    (conf / "plain_acl.yml").write_text("accounts: [")
    assert "not YAML" in await refusal(tmp_path / "store", migrateAuthFromV1Enabled=True)
    monkeypatch.delenv("ROCKETMQ_HOME")
    assert "ROCKETMQ_HOME" in await refusal(tmp_path / "store", migrateAuthFromV1Enabled=True)


async def test_without_authentication_nothing_is_read_or_made(tmp_path: Path) -> None:
    with capture_logs() as logs:
        settings = configuration(
            tmp_path, {"migrateAuthFromV1Enabled": True, "initAuthenticationUser": ON["initAuthenticationUser"]}
        )
        assert await files_of(settings).users(None) is None
    assert [line["event"] for line in logs] == ["auth_migration_off"]
    assert not (tmp_path / "config").exists()


async def test_a_start_that_is_refused_listens_nowhere(tmp_path: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with closed_broker(tmp_path, initAuthenticationUser=""):
            pytest.fail("it has started")
    assert caught.group_contains(StartError, match="there is no user who could sign")


CHANGES = [option for option in Configuration(load_broker().schema).options() if "auth" in option.key.lower()]


@pytest.mark.parametrize("key", [option.key for option in CHANGES])
async def test_no_request_changes_who_is_checked(tmp_path: Path, key: str) -> None:
    settings = configuration(tmp_path)
    (found,) = settings.check_change({key: "true"})
    assert found.protected
    assert settings.check_change({"allowAdminOverPlain": "true"})[0].protected
    assert settings.check_change({"aclEnable": "true"})[0].protected


async def test_signed_requests_to_others(tmp_path: Path) -> None:
    # To another broker, which asks for signatures, the broker sends what it would send to a name server.
    inner = json.dumps({"accessKey": ROOT, "secretKey": ROOT_SECRET})
    async with closed_broker(tmp_path) as (judge, _):
        users = judge.context.users
        assert users is not None
        address = f"127.0.0.1:{judge.endpoint[1]}"
        for own, refused in ((inner, False), ("", True)):
            users.access.refused.clear()
            with capture_logs() as logs:
                async with running_broker(
                    tmp_path / "b", namesrvAddr=address, innerClientAuthenticationCredentials=own
                ):
                    pass
            assert bool(users.access.refused["authentication"]) is refused
            assert [line["event"] for line in logs if line["event"] == "registration_failed"] != []


async def test_a_broker_that_its_own_name_server_would_refuse_does_not_start(tmp_path: Path) -> None:
    names: dict[str, Any] = {"embeddedNamesrvEnable": True, "embeddedNamesrvPort": 0}
    with pytest.raises(ExceptionGroup) as caught:
        async with closed_broker(tmp_path, **names):
            pass
    assert caught.value.subgroup(StartError) is not None
    assert "this broker could not register: set innerClientAuthenticationCredentialsFile" in repr(caught.value)
    for more in (
        {"innerClientAuthenticationCredentials": json.dumps({"accessKey": "brokers", "secretKey": "s"})},
        {"authenticationWhitelist": "103,104,322"},
    ):
        async with closed_broker(tmp_path, **names, **more) as (broker, _):
            await broker.context.registration.registered()
            assert broker.health.readiness().reasons == []
