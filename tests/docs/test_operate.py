"""docs/operate.md matches the code: the events that need attention, the reasons, the alerts, the backup."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.wire_client import WireClient
from tests.docs.commands import ALL, PAGES, ROOT, RUN_IN
from tests.ports import broker_port, free_port
from tests.store.replication.pairs import until
from trimq.broker import health
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.testing import SMALL, running_broker
from trimq.broker.tiered_config import PLUG_IN, POSIX_PROVIDER
from trimq.protocol.codes import ResponseCode
from trimq.remoting.http import health as phases

MANUAL = PAGES["operate"].read_text()
TOOLS = str(Path(sys.executable).parent)
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
PACKAGES = ("broker", "controller", "namesrv", "remoting")
PASSED_ON = {"client_log.py", "log_setup.py"}
"""Modules that pass on events named by their callers."""


def logged(source: str) -> set[str]:
    """The names of events that a module logs: every text in the first argument of a call like log.warning().

    ``failed`` is a method of ClientLog; methods of other classes with this name take no text.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LEVELS | {"failed"}
        ):
            (event,) = node.args[:1]
            texts = [part.value for part in ast.walk(event) if isinstance(part, ast.Constant)]
            assert texts or node.func.attr == "failed", (
                f"line {node.lineno}: an event whose name is not there to read: {ast.unparse(event)}"
            )
            found |= {text for text in texts if isinstance(text, str)}
    return found


def test_every_event_is_explained() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name not in PASSED_ON]
    events = {event for path in modules for event in logged(path.read_text())}
    assert {"connection_callback_failed", "broken_frame"} <= events  # remoting's client side is included
    assert len(events) > 75
    assert {event for event in events if f"`{event}`" not in MANUAL} == set()


def test_every_event_on_the_page_exists() -> None:
    tables = MANUAL.split("\n## Logs\n")[1].split("\n## Answers\n")[0]
    named = {
        event for row in re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE) for event in re.findall(r"`([a-z_]+)`", row)
    }
    assert len(named) > 75
    logs = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert {event for event in named if f'"{event}"' not in logs} == set()


def test_every_code_that_a_server_answers_is_explained() -> None:
    used = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"\bResponseCode\.([A-Z_]+)", path.read_text())
    }
    assert len(used) > 15
    table = MANUAL.split("\n## Answers\n")[1].split("\n## ")[0]
    wanted = {f"{name} ({ResponseCode[name].value})" for name in used - {"SUCCESS"}}
    assert {text for text in wanted if text not in table} == set()


def test_every_reason_and_every_alert_is_explained() -> None:
    codes = {phases.STARTING, phases.STOPPING, health.RECOVERING, health.DISK_FULL}
    codes |= {health.REPLICAS_MISSING, health.MASTER_SILENT, health.REPLICATION}
    codes |= {health.READ_ONLY, health.NO_NAME_SERVER, health.BROKER_ID_CONFLICT, health.RUNS, health.NATIVE_FAILED}
    assert {code for code in codes if f"`{code}`" not in MANUAL} == set()
    alerts = re.findall(r"alert: (\w+)", (ROOT / "docker" / "monitoring" / "alerts.yml").read_text())
    assert {alert for alert in alerts if alert not in MANUAL} == set()


def test_every_block_of_commands_is_run_by_a_test() -> None:
    assert set(ALL) == set(RUN_IN)
    for name, path in RUN_IN.items():
        assert f'"{name}"' in (ROOT / path).read_text(), (name, path)


ELSEWHERE = {
    "mqadmin halfMessages": "tests/client/test_mqadmin_transactions.py",
    "mqadmin resumeCheckHalfMessage": "tests/client/test_mqadmin_transactions.py",
    "mqadmin topicStatus": "tests/client/test_mqadmin.py",
    "mqadmin queryCq": "tests/client/test_mqadmin.py",
    "mqadmin brokerStatus": "tests/client/test_mqadmin.py",
    "mqadmin haStatus": "tests/client/test_mqadmin.py",
    "mqadmin getSyncStateSet": "tests/client/test_controllers.py",
    "mqadmin getBrokerEpoch": "tests/client/test_controllers.py",
    "mqadmin electMaster": "tests/client/test_controllers.py",
    "mqadmin cleanBrokerMetadata": "tests/client/test_controllers.py",
    "mqadmin getControllerMetaData": "tests/client/test_controllers.py",
    "mqadmin getControllerConfig": "tests/client/test_controllers.py",
    "mqadmin updateControllerConfig": "tests/client/test_controllers.py",
    "mqadmin updateTopic": "tests/client/test_mqadmin.py",
    "mqadmin updateSubGroup": "tests/client/test_mqadmin.py",
    "mqadmin queryMsgTraceById": "tests/client/test_trace_reading.py",
    "mqbroker --accept-missing-log": "tests/broker/test_cli.py",
}
"""Commands that are in a sentence only, and the tests that run them."""


def test_every_command_in_a_sentence_stands_in_a_block_too() -> None:
    text = re.sub(r"^```.*?^```$", "", MANUAL, flags=re.MULTILINE | re.DOTALL)
    inline = set(re.findall(r"`((?:mq[a-z]+|docker|systemctl|pip) [^`]+)`", text))
    assert len(inline) > 5
    run = "\n".join(ALL.values())
    for words in inline:
        tool, what = words.split()[:2]
        path = ELSEWHERE.get(f"{tool} {what}")
        if path is not None:
            assert what in (ROOT / path).read_text(), words
        else:
            assert re.search(rf"^.*\b{tool} (?:-c \S+ )?{what}\b", run, re.MULTILINE), words


ENDED = "trap 'kill $(jobs -p) 2>/dev/null || :; wait' EXIT\n"
"""Ends the background processes of a block with it, however it ends."""


def sh(name: str, environment: dict[str, str], replaced: dict[str, str] | None = None) -> str:
    """Run a block in a shell, with values of this machine in place of those on the page."""
    text = ENDED + ALL[name]
    for old, new in (replaced or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    run = subprocess.run(
        ["bash", "-euc", text],
        env=os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def write(path: Path, **values: object) -> None:
    path.write_text("".join(f"{key}={value}\n" for key, value in values.items()))


def test_the_commands_for_a_shell(tmp_path: Path) -> None:
    namesrv, broker = free_port(), broker_port()
    home = {"kvConfigPath": tmp_path / "kv.json", "configStorePath": tmp_path / "namesrv.properties"}
    write(tmp_path / "namesrv.conf", listenPort=namesrv, healthPort=free_port(), bindAddress="127.0.0.1", **home)
    settings = {**SMALL, "listenPort": broker, "storePathRootDir": tmp_path / "store", "healthPort": free_port()}
    write(tmp_path / "broker.conf", **settings, namesrvAddr=f"localhost:{namesrv}")
    replaced = {"/etc/trimq": str(tmp_path), "localhost:9876": f"localhost:{namesrv}"}
    replaced["localhost:10911"] = f"localhost:{broker}"
    out = sh("operate shell", {}, replaced)
    assert out.splitlines().count("ready") >= 2
    assert "# TRIMQ_" not in out  # no variable sets a value
    assert re.search(r"^DefaultCluster +broker-a +0 ", out, re.MULTILINE), out
    assert "fileReservedTime=48" in (tmp_path / "broker.conf").read_text().splitlines()
    assert not (tmp_path / "store" / "abort").exists()  # an orderly shutdown


async def test_a_backup_of_a_running_broker_has_all_that_was_acknowledged(tmp_path: Path) -> None:
    environment = os.environ | {"STORE": str(tmp_path / "store"), "BACKUP": str(tmp_path / "backup")}
    sent = 0

    async def send(client: WireClient) -> None:
        nonlocal sent
        while True:
            assert (await client.send("T", b"%d" % sent + bytes(5000))).code == 0
            sent += 1

    async with (
        running_broker(tmp_path / "store", mappedFileSizeCommitLog=1 << 20, flushConsumerOffsetInterval=100) as broker,
        WireClient.connect(broker.endpoint) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(send, client)
        while sent < 400:
            await trio.lowlevel.checkpoint()
        broker.context.offsets.commit("c", "G", "T", 0, 7)
        await broker.context.offsets.persisted()
        before = sent
        await trio.run_process(["sh", "-ec", ALL["operate backup"]], env=environment)
        nursery.cancel_scope.cancel()
    assert len(list((tmp_path / "backup" / "commitlog").iterdir())) > 2
    async with (
        running_broker(tmp_path / "backup", mappedFileSizeCommitLog=1 << 20) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        assert broker.context.store.max_offset("T", 0) >= before
        assert broker.context.offsets.query("G", "T", 0) == 7
        offset = 0
        while offset < before:
            found = await client.pull_messages("T", offset)
            assert [message.body[:-5000] for message in found] == [
                b"%d" % n for n in range(offset, offset + len(found))
            ]
            offset += len(found)


async def test_a_tier_is_listed_and_verified(tmp_path: Path) -> None:
    store, conf = tmp_path / "store", tmp_path / "conf"
    settings = TIERED | {"tieredStoreFilePath": str(tmp_path / "tier")}
    write(conf, **SMALL | settings | {"brokerIP1": "127.0.0.1"})
    async with running_broker(store, **settings) as broker, WireClient.connect(broker.endpoint) as client:
        for number in range(20):
            assert (await client.send("T", b"%d" % number)).code == 0
        assert isinstance(broker.context.store, TieredMessageStore)
        assert await broker.context.store.flush()
        await broker.context.store.uploads.upload_all()
    out = await trio.to_thread.run_sync(sh, "operate tier", {"STORE": str(store), "CONF": str(conf)})
    assert re.search(r"^T +0 +0 +20 ", out, re.MULTILINE), out
    assert out.count("/tier/") >= 3
    assert out.endswith("the tier is sound\n")


async def test_a_slave_is_added_and_promoted_by_hand(tmp_path: Path) -> None:
    """The lines for both roles are those of the page; a planned change needs no store to be emptied."""
    roles = [dict(re.findall(r"^(\w+)=(.*)$", block, re.MULTILINE)) for block in ROLES.findall(MANUAL)]
    assert [lines["brokerRole"] for lines in roles] == ["SYNC_MASTER", "SLAVE"]
    leader: dict[str, Any] = roles[0] | {"haListenPort": free_port()}
    names: dict[str, Any] = {"embeddedNamesrvEnable": True, "embeddedNamesrvPort": free_port()}
    address = f"127.0.0.1:{names['embeddedNamesrvPort']}"
    follower: dict[str, Any] = roles[1] | {"namesrvAddr": address}
    async with (
        running_broker(tmp_path / "one", **leader, **names) as master,
        running_broker(tmp_path / "two", **follower) as slave,
    ):
        await until(lambda: master.health.readiness().ready)
        async with WireClient.connect(master.endpoint) as client:
            for number in range(10):
                assert (await client.send("T", b"%d" % number)).code == 0
        await until(lambda: slave.context.store.dispatched_offset == master.context.store.appended_offset)
        replaced = {"localhost:9876": address, "localhost:10921": slave.address}
        out = await trio.to_thread.run_sync(sh, "operate switch", {}, replaced)
        assert "Nothing would be lost" in out
        blocks = re.findall(r"(?:^   \w+=.*\n)+", out, re.MULTILINE)
        lines: list[dict[str, Any]] = [dict(re.findall(r"(\w+)=(.*)", block)) for block in blocks]
    promoted, demoted = lines
    assert promoted.pop("haListenPort") == str(leader["haListenPort"])
    assert promoted == {"brokerRole": "SYNC_MASTER", "brokerId": "0"}
    demoted["namesrvAddr"] = address
    async with (
        running_broker(tmp_path / "two", **promoted, haListenPort=free_port(), **names) as master,
        running_broker(tmp_path / "one", **demoted, slaveReadEnable=True) as slave,
        WireClient.connect(master.endpoint) as client,
    ):
        await until(lambda: master.health.readiness().ready)
        assert (await client.send("T", b"10")).code == 0
        assert [(await client.pull_messages("T", at))[0].body for at in (9, 10)] == [b"9", b"10"]
        await until(lambda: slave.context.store.max_offset("T", 0) == 11)


ROLES = re.compile(r"^```properties replicated\n(.*?)^```$", re.MULTILINE | re.DOTALL)

TIERED: dict[str, Any] = {
    "messageStorePlugIn": PLUG_IN,
    "tieredBackendServiceProvider": POSIX_PROVIDER,
    "tieredStoreIndexFileMaxHashSlotNum": "1000",
    "tieredStoreIndexFileMaxIndexNum": "4000",
}


BACKUP_FILES = {"mappedFileSizeCommitLog": str(1 << 20)}


async def test_a_restored_store_is_sound_before_a_broker_opens_it(tmp_path: Path) -> None:
    environment = {name: str(tmp_path / name.lower()) for name in ("STORE", "BACKUP", "CONF")}
    write(tmp_path / "conf", **SMALL | BACKUP_FILES | {"brokerIP1": "127.0.0.1"})
    async with (
        running_broker(tmp_path / "store", mappedFileSizeCommitLog=1 << 20) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        for number in range(300):
            assert (await client.send("T", b"%d" % number + bytes(5000))).code == 0
        await trio.to_thread.run_sync(sh, "operate backup", environment)
    await trio.to_thread.run_sync(sh, "operate restore", environment)
    await trio.to_thread.run_sync(sh, "operate move", environment)
    async with running_broker(tmp_path / "backup", mappedFileSizeCommitLog=1 << 20) as broker:
        assert broker.context.store.max_offset("T", 0) == 300


@pytest.mark.parametrize("unit", ["trimq-broker.service", "trimq-namesrv.service"])
def test_systemd_understands_the_units(unit: str, tmp_path: Path) -> None:
    """The tests with Docker start the same commands, without systemd."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not here")
    text = (ROOT / "docs" / "systemd" / unit).read_text()
    (tmp_path / unit).write_text(re.sub(r"/opt/trimq/bin/\w+", "/bin/true", text))
    run = subprocess.run([analyze, "verify", str(tmp_path / unit)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")
