"""``pip install trimq`` installs the SDK with few dependencies, ``trimq[broker]`` what makes the broker run fast."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path

import pytest

from trimq.broker.testing_threads import broker_in_thread

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
HEAVY = {"click", "crcmod", "isal", "msgpack", "numpy", "rich", "structlog", "trio"}


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def needed(requirements: list[str]) -> dict[str, Distribution]:
    """The distributions that pip would install, by name."""
    found: dict[str, Distribution] = {}
    for requirement in requirements:
        if "extra ==" not in requirement and "sys_platform" not in requirement and name_of(requirement) not in found:
            try:
                found[name_of(requirement)] = distribution(name_of(requirement))
            except ModuleNotFoundError:  # its marker is false for this Python
                continue
            found |= needed(found[name_of(requirement)].requires or [])
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory with the packages of ``pip install trimq`` and no others."""
    site = tmp_path_factory.mktemp("site")
    wanted = set(needed(PROJECT["dependencies"]))
    assert wanted >= {"anyio", "msgspec", "outcome"}
    assert not wanted & HEAVY
    for module, owners in packages_distributions().items():
        if {owner.lower().replace("_", "-") for owner in owners} & wanted:
            owner = distribution(owners[0])
            name = module if (Path(str(owner.locate_file(module)))).is_dir() else f"{module}.py"
            if (source := Path(str(owner.locate_file(name)))).exists():
                (site / name).symlink_to(source)
    return site


def run(code: str, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=site,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_sdk_alone_sends_and_receives(installed: Path) -> None:
    code = """
import asyncio, sys
from trimq import Consumer, Message, Producer
async def main():
    async with Producer("shop", namesrv=sys.argv[1]) as producer:
        print((await producer.send(Message("Orders", b"1"))).status.name)
    async with Consumer("bill", "Orders", namesrv=sys.argv[1], start="first") as consumer:
        async for message in consumer:
            print(message.body)
            await message.ack()
            break
asyncio.run(main())
"""
    with broker_in_thread() as broker:
        done = run(code.replace("sys.argv[1]", repr(broker.namesrv)), installed)
    assert (done.stdout, done.stderr) == ("SEND_OK\nb'1'\n", "")


def test_every_module_of_the_sdk_can_be_imported_with_it(installed: Path) -> None:
    code = """
import importlib, pkgutil
from trimq import client
needs_more = {"trimq.client.otel", "trimq.client.mqadmin"}
modules = [m.name for m in pkgutil.iter_modules(client.__path__, "trimq.client.") if m.name not in needs_more]
for name in modules:
    importlib.import_module(name)
print(len(modules) > 20)
"""
    done = run(code, installed)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize(
    ("module", "what", "extra"),
    [
        ("trimq.broker.cli", "the broker needs", "broker"),
        ("trimq.broker.tools.cli", "the broker needs", "broker"),
        ("trimq.controller.cli", "a controller needs", "controller"),
        ("trimq.namesrv.cli", "the name server needs", "broker"),
        ("trimq.client.mqadmin", "mqadmin needs", "broker"),
    ],
)
def test_a_program_says_what_to_install(installed: Path, module: str, what: str, extra: str) -> None:
    done = run(f"import {module}", installed)
    assert done.stderr.splitlines()[-1] == f"ImportError: {what} more than the SDK: pip install 'trimq[{extra}]'"


def test_headers_in_msgpack_say_what_to_install(installed: Path) -> None:
    code = """
from trimq.client import Client, ClientOptions, UsageError
try:
    Client("127.0.0.1:1", ClientOptions(header="msgpack"))
except UsageError as error:
    print(error)
from trimq.protocol.frame import FrameError, decode_frame, encode_frame
"""
    assert "needs the package msgpack: pip install msgpack" in run(code, installed).stdout


def test_the_extra_broker_has_what_makes_it_fast() -> None:
    assert {name_of(requirement) for requirement in EXTRAS["broker"]} == HEAVY
    locked = (ROOT / "requirements" / "run.txt").read_text(encoding="utf-8")
    assert {name for name in HEAVY if not re.search(rf"^{name}==", locked, re.MULTILINE)} == set()


def test_only_the_extra_for_buckets_has_its_library() -> None:
    assert [extra for extra, needs in EXTRAS.items() if "obstore" in map(name_of, needs)] == ["s3"]
    assert "trimq[broker]" in EXTRAS["s3"]
    locked = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    assert re.search(r"^obstore==", locked, re.MULTILINE)


def test_only_the_extra_for_secrets_has_its_library() -> None:
    assert [extra for extra, needs in EXTRAS.items() if "cryptography" in map(name_of, needs)] == ["security"]
    assert "trimq[broker]" in EXTRAS["security"]
    locked = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    assert re.search(r"^cryptography==", locked, re.MULTILINE)


def test_secrets_load_their_library_only_with_a_key_file() -> None:
    code = """
import sys
from trimq.remoting.auth import auth_store, authenticator, authorizer, secrets
secrets.Secrets(allow_clear=True).record("me", "x")
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "trimq.remoting.auth.secrets" in done.stdout.split()
    assert not {name.partition(".")[0] for name in done.stdout.split()} & {"cryptography", "cffi"}


def test_producer_consumer_and_message_load_no_server_and_no_tool() -> None:
    """Slow imports stay out: trio where asyncio runs, numpy, command lines."""
    code = "from trimq import Consumer, Message, Producer; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & (HEAVY - {"isal"} | {"asyncio", "pyarrow", "opentelemetry"})
