"""mqcontroller and mqbroker as programs: the banner, health and metrics of a broker whose role is assigned."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from tests.ports import broker_port, free_port
from tests.web_client import get
from trimq.broker import cli
from trimq.broker.config import load_broker
from trimq.broker.controller import BrokerController
from trimq.remoting.config.properties import ConfigError

PROGRAMS = Path(sys.executable).parent


@contextmanager
def program(name: str, directory: Path, **settings: object) -> Iterator[list[str]]:
    """Run a program until the block ends, and check that it stops in order. Yields the lines of its banner."""
    directory.mkdir()
    path = directory / "conf"
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    process = subprocess.Popen(
        [str(PROGRAMS / name), "-c", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while not lines[-1].startswith(("  decides in", "  runs", "  health")) and lines[-1]:
        lines.append(process.stdout.readline())
    try:
        yield lines
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=50)
    assert process.returncode == 0, errors


async def test_a_master_its_slave_and_their_pages(tmp_path: Path) -> None:
    at = free_port()
    settings = {"listenPort": at, "bindAddress": "127.0.0.1", "controllerStorePath": tmp_path / "controller.db"}
    with program("mqcontroller", tmp_path / "controller", **settings) as said:
        assert any("this is the only controller" in line for line in said)
        common: dict[str, object] = {
            "enableControllerMode": "true",
            "controllerAddr": f"127.0.0.1:{at}",
            "embeddedNamesrvEnable": "false",
            "bindAddress": "127.0.0.1",
            "brokerName": "g",
            "mappedFileSizeCommitLog": 1 << 20,
            "metricsExporterType": "PROM",
            "haAllowedAddresses": "127.0.0.1",
        }
        web = free_port()
        with program(
            "mqbroker", tmp_path / "one", **common, listenPort=broker_port(), storePathRootDir=tmp_path / "s1",
            healthPort=(health := free_port()), metricsPromExporterPort=web,
        ) as first:  # fmt: skip
            text = "".join(first)
            assert re.search(r"role           master of epoch 1, broker id 1: a message is acknowledged when", text)
            page = (await get(("127.0.0.1", web), "/metrics")).body
            assert '\ntrimq_replica_lease{broker="g"} 1' in page
            assert "\ntrimq_replica_sync_state_set_members 1" in page
            found = json.loads((await get(("127.0.0.1", health), "/readyz")).body)
            assert found["ready"]
            assert any("master of epoch 1, with a lease" in note["text"] for note in found["notes"])
            with program(
                "mqbroker", tmp_path / "two", **common, listenPort=broker_port(), storePathRootDir=tmp_path / "s2",
                metricsPromExporterPort=(web := free_port()),
            ) as second:  # fmt: skip
                assert "role           slave with broker id 2 of 127.0.0.1:" in "".join(second)
                page = (await get(("127.0.0.1", web), "/metrics")).body
                assert '\ntrimq_replica_id{broker="g"} 2' in page
                assert "trimq_replica_lease" not in page


def test_the_banner_without_a_master(tmp_path: Path) -> None:
    class Unknown:
        master = None

    path = tmp_path / "broker.conf"
    path.write_text("namesrvAddr=127.0.0.1:1\nenableControllerMode=true\ncontrollerAddr=127.0.0.1:1\n")
    controller = BrokerController(load_broker(path))

    class Replica:
        manager = Unknown()

    controller._replica = cast("Any", Replica())
    assert "  role           none yet: the controllers have not elected a master" in cli.banner(controller, 0.1)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("enableControllerMode=true\n", "the addresses of the controllers, since enableControllerMode=true"),
        ("controllerAddr=nowhere\n", "HOST:PORT, several separated by ;"),
        (
            "enableControllerMode=true\ncontrollerAddr=a:1\nbrokerHeartbeatInterval=2000\n",
            "at least twice brokerHeartbeatInterval",
        ),
        (
            "enableControllerMode=true\ncontrollerAddr=a:1\nallAckInSyncStateSet=false\n",
            "true, since enableControllerMode=true",
        ),
        (
            "enableControllerMode=true\ncontrollerAddr=a:1\nembeddedNamesrvEnable=true\n",
            "the name servers, since enableControllerMode=true: they have to outlive this broker",
        ),
        (
            "enableControllerMode=true\ncontrollerAddr=a:1\nnamesrvAddr=a:2\ntransientStorePoolEnable=true\n",
            "false, since enableControllerMode=true",
        ),
    ],
)
def test_options_that_do_not_fit_stop_the_start(lines: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(lines)
    with pytest.raises(ConfigError) as raised:
        load_broker(path)
    assert raised.value.expected == expected
