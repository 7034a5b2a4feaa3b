"""Every request code that a server of ours serves: allowed with exactly what it needs, refused without each part."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.broker.auth.requests import CASES, CLUSTER, Case
from tests.broker.auth.signed import acl, closed_broker, signed
from trimq.broker.testing import running_broker
from trimq.controller.processor import ControllerRequestProcessor
from trimq.protocol.auth.body import decode_acl
from trimq.protocol.auth.model import UserChange, UserType
from trimq.protocol.auth.permissions import TABLE
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import encode
from trimq.remoting.auth.access import Access
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.authenticator import Authenticator
from trimq.remoting.auth.authorizer import Authorizer
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.auth.secrets import Secrets
from trimq.remoting.runtime.clock import SystemClock
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.gate import GatedTable
from trimq.remoting.server.handler_table import HandlerTable

CONNECTION: Any = SimpleNamespace(peer=("127.0.0.1", 1), peer_text="127.0.0.1:1", tls=None)
VERSION = 479


class MemoryFile:
    path = "memory"

    async def read(self) -> bytes | None:
        return None

    async def replace(self, data: bytes) -> None:
        pass


async def made(inner_user: str = "", **options: Any) -> tuple[Access, AuthStore]:
    store = AuthStore(MemoryFile(), Secrets(allow_clear=True))
    await store.create_user("root", UserChange("s", UserType.SUPER))
    await store.create_user("app", UserChange("s"))
    given: dict[str, Any] = {
        "authentication_enabled": True,
        "authorization_enabled": True,
        "allow_admin_over_plain": True,
    }
    clock = SystemClock()
    access = Access(
        config=AuthConfig(**given | options),
        cluster=CLUSTER,
        store=store,
        authenticator=Authenticator(store, clock),
        authorizer=Authorizer(store),
        log_budget=LogBudget(clock),
        inner_user=inner_user,
    )
    return access, store


def command_of(code: int, case: Case, name: str = "app") -> RemotingCommand:
    command = case.command(code)
    command.ext = signed(command.ext, bytes(command.body), name, "s", VERSION)
    return command


async def policies(store: AuthStore, *entries: str) -> None:
    if store.acl("app") is not None:
        await store.delete_acl("User:app")
    if entries:
        await store.write_acl(decode_acl(acl("app", *entries)))


def passes(access: Access, command: RemotingCommand) -> bool:
    try:
        access.check(CONNECTION, command)
    except RemotingError as error:
        return error.code != ResponseCode.NO_PERMISSION
    return True


def one_action(needs: tuple[str, ...]) -> list[list[str]]:
    """The needs with the first and with the last of the actions of which one is enough."""
    return [[f"{need.split()[0]} {need.split()[1].split('|')[at]}" for need in needs] for at in (0, -1)]


@pytest.mark.parametrize("code", sorted(CASES))
async def test_a_user_with_exactly_what_it_needs_passes_and_one_without_any_part_does_not(code: int) -> None:
    access, store = await made()
    case = CASES[code]
    command = command_of(code, case)
    for needs in one_action(case.needs):
        await policies(store, *needs)
        assert passes(access, command)
        for missing in needs:
            await policies(store, *(need for need in needs if need != missing))
            assert not passes(access, command), missing
            # other actions on the same resource are no help
            resource, action = missing.split()
            asked = next(need for need in case.needs if need.startswith(f"{resource} ")).split()[1].split("|")
            others = {"Pub", "Sub", "Create", "Update", "Delete", "Get", "List"} - set(asked)
            rest = [need for need in needs if need != missing]
            await policies(store, *rest, f"{resource} {'|'.join(sorted(others))}")
            assert not passes(access, command), (missing, action)
    await policies(store, "* All")
    assert passes(access, command)
    await policies(store, "* All", *(f"Deny {need}" for need in case.needs))
    assert not passes(access, command)
    assert passes(access, command_of(code, case, "root"))
    command.ext = case.ext
    assert not passes(access, command)


@pytest.mark.parametrize("code", [901, 322, 224, 216, 1012, 103])
async def test_the_cluster_that_a_request_names_does_not_count(code: int) -> None:
    access, store = await made()
    names = {"clusterName": "other", "cluster": "other"}
    command = command_of(code, Case(CASES[code].ext | names, b"", ()))
    await policies(store, "Cluster:other All")
    assert not passes(access, command)


async def test_a_changed_policy_counts_for_the_next_request() -> None:
    access, store = await made()
    command = command_of(30, CASES[30])
    assert not passes(access, command)
    await policies(store, "Topic:T Get")
    assert passes(access, command)
    await policies(store)
    assert not passes(access, command)
    await policies(store, "Topic:T Get")
    await store.delete_user("app")
    assert not passes(access, command)


async def test_what_a_record_is_about_is_checked_with_the_user_of_the_request() -> None:
    access, store = await made(authorization_whitelist="31", authentication_whitelist="32")
    command = command_of(33, CASES[33])
    await policies(store, "Topic:U Get")
    access.require_topic(CONNECTION, command, "U", TABLE_GET)
    with pytest.raises(RemotingError, match="no matched policies"):
        access.require_topic(CONNECTION, command, "T", TABLE_GET)
    with pytest.raises(RemotingError, match="parse authorization context error"):
        access.require_record(CONNECTION, command, b"no record at all", TABLE_GET)
    access.require_topic(CONNECTION, command_of(33, CASES[33], "root"), "T", TABLE_GET)
    for code in (31, 32):  # white lists
        access.require_topic(CONNECTION, command_of(code, CASES[code]), "T", TABLE_GET)
    await store.delete_user("app")
    with pytest.raises(RemotingError, match="username cannot be null"):
        access.require_topic(CONNECTION, command, "U", TABLE_GET)


async def test_a_group_is_checked_with_the_user_of_the_request() -> None:
    access, store = await made(authorization_whitelist="31")
    command = command_of(352, CASES[352])
    await policies(store, "Group:G Get")
    assert access.may_on_group(CONNECTION, command, "G", TABLE_GET)
    assert not access.may_on_group(CONNECTION, command, "H", TABLE_GET)
    assert access.refused["authorization"] == 0
    assert access.may_on_group(CONNECTION, command_of(352, CASES[352], "root"), "H", TABLE_GET)
    assert access.may_on_group(CONNECTION, command_of(31, CASES[31]), "H", TABLE_GET)
    await store.delete_user("app")
    assert not access.may_on_group(CONNECTION, command, "G", TABLE_GET)


TABLE_GET = next(iter(TABLE[30](CASES[30].command(30), CLUSTER))).actions


@pytest.mark.parametrize("code", [33, 36, 37])
async def test_the_user_is_known_after_the_receive_buffer_was_used_again(code: int) -> None:
    access, store = await made()
    await policies(store, "Topic:T All", "Group:G All")
    command = command_of(code, CASES[code])
    frame = bytearray(encode(command)[8:])
    received = msgspec.json.decode(memoryview(frame), type=RemotingCommand)
    assert passes(access, received)
    frame[:] = bytes(frame).replace(b'"AccessKey":"app"', b'"AccessKey":"xxx"')
    user = access.user(received)
    assert user is not None
    assert user.username == "app"
    with pytest.raises(RemotingError, match="User:app has no permission to access Topic:U"):
        access.require_topic(CONNECTION, received, "U", TABLE_GET)


async def test_without_authorization_records_are_not_looked_at() -> None:
    access, _ = await made(authorization_enabled=False)
    access.require_record(CONNECTION, command_of(33, CASES[33]), b"no record at all", TABLE_GET)


def served(tables: Sequence[GatedTable]) -> set[int]:
    return {code for table in tables if isinstance(table, HandlerTable) for code in table.routes}


async def test_every_code_that_a_server_serves_has_an_entry(tmp_path: Path) -> None:
    async with running_broker(tmp_path, embeddedNamesrvEnable=True, embeddedNamesrvPort=0) as broker:
        assert broker.namesrv is not None
        codes = served(broker.gate.tables)
        assert len(codes) > 80
        assert codes <= set(TABLE)
        codes = served([broker.namesrv._handlers()])
        assert len(codes) > 20
        assert codes <= set(TABLE)
    table, nothing = HandlerTable(), cast("Any", None)
    ControllerRequestProcessor(nothing, nothing, nothing, nothing, nothing).register(table)
    assert len(served([table])) > 10
    assert served([table]) <= set(TABLE)


async def test_a_request_with_a_wrong_ext_is_refused_and_not_a_fault(tmp_path: Path) -> None:
    access, _ = await made()
    for raw in (b"[1]", b"7", b'"x"', b'{"AccessKey":{"a":[1]}}', b'{"AccessKey":"\\ud800","Signature":"\\udfff"}'):
        assert not passes(access, RemotingCommand(310, ext_raw=msgspec.Raw(raw)))
    async with closed_broker(tmp_path) as (broker, root):
        assert (await root.client.ask(310)).code == 16
        assert broker.reactor.stats.failures == 0
