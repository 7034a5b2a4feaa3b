"""docs/security.md: its commands, configurations and programs work together; its tables are complete."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
import trio

from tests.broker.auth.signed import ROOT as ACCOUNT
from tests.broker.auth.signed import SECRETS, closed_broker, secret_of, signed
from tests.client.tls_servers import tls_servers
from tests.docs.commands import ALL, PAGES, ROOT
from tests.docs.examples import examples
from tests.namesrv.server import running as name_server
from tests.remoting.auth.user_files import following, key_file
from trimq.client import Admin, Message
from trimq.protocol.auth.permissions import ADMINISTRATION
from trimq.protocol.auth.stamp import STAMP
from trimq.remoting.auth.replay_guard import MOST_SENDERS, REMEMBERED, WINDOW_SECONDS
from trimq.remoting.config import properties
from trimq.remoting.tls.config import TLS_KEYS, TlsMode

PAGE = PAGES["security"].read_text()
TOOLS = str(Path(sys.executable).parent)


def keys_of(example: str, folder: Path) -> dict[str, str]:
    """The keys of a configuration of the page, with the paths of files in ``folder``."""
    found = {entry.key: entry.value for entry in properties.parse(example)}
    return {key: str(folder / value) if key.endswith("Path") else value for key, value in found.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificates that the page's commands make."""
    made = tmp_path_factory.mktemp("certificates")
    subprocess.run(["sh", "-e", "-c", ALL["security certificates"]], cwd=made, check=True, capture_output=True)
    return made


@pytest.mark.timeout(120, func_only=True)
def test_the_page_from_certificates_to_clients(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    server, mutual, program = sorted(
        (example for example in examples("docs/security.md") if example.startswith(("tls.", "from trimq"))),
        key=lambda example: (example.startswith("from"), "need.client.auth" in example),
    )
    monkeypatch.chdir(folder)
    module: dict[str, Any] = {}

    async def run_program() -> None:
        exec(compile(program.replace("mq1.example.org:9876", servers.namesrv), "security.md", "exec"), module)
        async with Admin(servers.namesrv, options=module["ClientOptions"](tls=module["tls"])) as admin:
            await admin.create_topic("Orders", queues=1)
        async with module["producer"] as producer:
            assert (await producer.send(Message("Orders", b"1 book"))).queue_offset == 0

    keys = keys_of(server, folder) | keys_of(mutual, folder)
    assert keys["tls.server.mode"] == TlsMode.ENFORCING
    with tls_servers(tmp_path, keys) as servers:
        anyio.run(run_program)
        command = ALL["security mqadmin"].replace("mq1.example.org:9876", servers.namesrv)
        path = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=folder,
            env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "broker-a" in done.stdout


async def test_users_of_a_broker_get_to_a_name_server(tmp_path: Path) -> None:
    keys, users = key_file(tmp_path), tmp_path / "users"
    users.mkdir(mode=0o755)
    command = ALL["security copyauth"].replace("/etc/trimq/users", str(users))
    environment = {
        "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TRIMQ_ACCESS_KEY": ACCOUNT,
        "TRIMQ_SECRET_KEY": SECRETS[ACCOUNT],
    }

    async def copy(address: str) -> None:
        text = command.replace("mq1.example.org:10911", address)
        done = await trio.run_process(["sh", "-c", text], env=os.environ | environment, capture_stdout=True)
        assert b"success, version" in done.stdout
        assert SECRETS[ACCOUNT].encode() not in done.stdout

    async with closed_broker(tmp_path, authKeyFile=str(keys), allowSecretsInClear=False) as (broker, root):
        address = broker.address
        await copy(address)
        async with name_server(tmp_path, **following(users, keys)) as server, server.connect() as wire:
            assert server.controller.users is not None
            route = signed({"topic": "T"}, b"", "app", secret_of("app"))
            assert (await wire.ask(105, route)).code == 16
            await root.make("app", "Topic:T Pub")
            await copy(address)
            await server.controller.users.refresh()
            assert (await wire.ask(105, route)).code == 17
            assert (await wire.ask(105, signed({"topic": "U"}, b"", "app", secret_of("app")))).code == 16


def test_every_key_is_on_the_page() -> None:
    named = set(re.findall(r"`([A-Za-z.]+)`", PAGE))
    assert {key for key in TLS_KEYS if key not in named} == set()


def test_every_key_on_the_page_exists() -> None:
    named = set(re.findall(r"`((?:tls\.|tls[A-Z])[A-Za-z.]+?)(?:=[a-z]+)?`", PAGE))
    assert len(named) > 20
    assert named - TLS_KEYS - {"tls.properties"} == set()


def test_the_codes_that_need_tls_are_on_the_page() -> None:
    table = PAGE.partition("| codes that need TLS |")[2].partition("\n\n")[0]
    found: list[int] = []
    for line in table.splitlines()[2:]:
        codes = line.split("|")[2]
        first, through, last = codes.partition(" to ")
        found += range(int(first), int(last) + 1) if through else map(int, codes.split(","))
    assert sorted(found) == sorted(ADMINISTRATION)


def test_the_limits_of_the_memory_of_requests_are_those_of_the_code() -> None:
    assert f"at most {MOST_SENDERS:,} senders" in PAGE
    assert f"which of the {REMEMBERED} before it" in PAGE
    assert f"`authReplayWindowSeconds` ({WINDOW_SECONDS})" in PAGE
    assert f"`{STAMP}`" in PAGE
