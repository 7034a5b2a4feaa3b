"""docs/operate.md says what is true: every event that asks for attention, the reasons, the alerts, the backup."""

import os
import re
from pathlib import Path

import trio

from broker import health
from broker.testing import running_broker
from remoting import health as phases
from tests.broker.wire_client import WireClient

ROOT = Path(__file__).parents[2]
MANUAL = (ROOT / "docs" / "operate.md").read_text()
EVENT = re.compile(r"\b_?log\.(?:warning|error|exception)\(\s*(?:\"([a-z_]+)\"|\"([a-z_]+)\" if)")


def test_every_event_that_asks_for_attention_is_explained() -> None:
    events: set[str] = set()
    for room in ("broker", "namesrv", "remoting"):
        for path in (ROOT / room).rglob("*.py"):
            events |= {first or second for first, second in EVENT.findall(path.read_text())}
    assert len(events) > 40
    assert {event for event in events if f"`{event}`" not in MANUAL} == set()


def test_every_reason_and_every_alert_is_explained() -> None:
    codes = {phases.STARTING, phases.STOPPING, health.RECOVERING, health.DISK_FULL}
    codes |= {health.READ_ONLY, health.NO_NAME_SERVER}
    assert {code for code in codes if f"`{code}`" not in MANUAL} == set()
    alerts = re.findall(r"alert: (\w+)", (ROOT / "docker" / "monitoring" / "alerts.yml").read_text())
    assert {alert for alert in alerts if alert not in MANUAL} == set()


def command(name: str) -> str:
    found = re.search(rf"```sh {name}\n(.*?)```", MANUAL, re.DOTALL)
    assert found
    return found[1]


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
        broker.parts.offsets.commit("c", "G", "T", 0, 7)
        await broker.parts.offsets.persisted()
        before = sent
        await trio.run_process(["sh", "-ec", command("backup")], env=environment)
        nursery.cancel_scope.cancel()
    assert len(list((tmp_path / "backup" / "commitlog").iterdir())) > 2
    async with (
        running_broker(tmp_path / "backup", mappedFileSizeCommitLog=1 << 20) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        assert broker.parts.store.max_offset("T", 0) >= before
        assert broker.parts.offsets.query("G", "T", 0) == 7
        offset = 0
        while offset < before:
            found = await client.pull_messages("T", offset)
            assert [message.body[:-5000] for message in found] == [
                b"%d" % n for n in range(offset, offset + len(found))
            ]
            offset += len(found)
