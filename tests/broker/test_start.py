"""Reasons to refuse a start; and that no client is served before the state files are read."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import pytest
import trio

from tests.broker.test_cli import write_config
from tests.ports import free_port
from trimq.broker.controller import BrokerController
from trimq.broker.ports import ClientPorts
from trimq.broker.start_error import StartError
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.testing import configuration
from trimq.remoting.http.web_config import MetricsExporterType, WebConfig

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class DiskThatWaits(RealDisk):
    """Holds the first read of topics.json until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = trio.Event()
        self.go_on = trio.Event()

    async def run(self, function: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        if not self.asked.is_set() and any(str(argument).endswith("topics.json") for argument in arguments):
            self.asked.set()
            await self.go_on.wait()
        return await super().run(function, *arguments)


def refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 1).close()
    except ConnectionRefusedError:
        return True
    return False


async def test_no_client_can_connect_before_the_state_files_are_read(tmp_path: Path) -> None:
    # guards the order of the start: a client that connected earlier would wait, or be dropped by a refused start
    port = free_port()
    disk = DiskThatWaits()
    keys = {"embeddedNamesrvEnable": True, "embeddedNamesrvPort": port}
    controller = BrokerController(configuration(tmp_path, keys), disk=disk)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(controller.run)
        with trio.fail_after(10):
            await disk.asked.wait()
        assert controller.endpoint[1]
        assert refused(controller.endpoint)
        assert refused(("127.0.0.1", port))
        disk.go_on.set()
        with trio.fail_after(10):
            while controller.health.phase is not None:
                await trio.lowlevel.checkpoint()
        assert not refused(controller.endpoint)
        assert not refused(("127.0.0.1", port))
        controller.shutdown()


async def test_a_broken_state_file_refuses_before_a_port_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # guards that a refused start has never listened
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "consumerOffset.json").write_text("{broken")
    controller = BrokerController(configuration(tmp_path, {}))
    listened = False
    original = ClientPorts.open

    def counted(ports: ClientPorts) -> None:
        nonlocal listened
        listened = True
        original(ports)

    monkeypatch.setattr(ClientPorts, "open", counted)
    problem = pytest.RaisesExc(StartError, match=r"consumerOffset\.json")
    with pytest.RaisesGroup(problem, flatten_subgroups=True):
        await controller.run()
    assert not listened
    assert refused(controller.endpoint)


# the extra metrics


@pytest.mark.parametrize("module", ["trimq.broker.cli", "trimq.namesrv.cli"])
def test_health_without_the_extra_is_a_start_error_that_names_it(tmp_path: Path, module: str) -> None:
    # guards that a user who sets healthPort on a plain installation learns what to install, without a traceback
    if module == "trimq.broker.cli":
        path = str(write_config(tmp_path, healthPort=0))
    else:
        file = tmp_path / "namesrv.conf"
        file.write_text(f"bindAddress=127.0.0.1\nlistenPort=0\nhealthPort=0\nkvConfigPath={tmp_path}/kv.json\n")
        path = str(file)
    program = f"import sys; sys.modules['hypercorn'] = None; from {module} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "-c", path], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "healthPort: hypercorn cannot be imported: install the extra metrics (pip install 'trimq[metrics]'" in (
        done.stderr
    )
    assert "Traceback" not in done.stderr


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WebConfig().missing() == ""
    both = WebConfig(health_port=0, metrics_exporter_type=MetricsExporterType.PROM)
    assert both.missing() == ""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert both.missing().startswith("healthPort and metricsExporterType=PROM: prometheus_client cannot be imported")
    assert WebConfig(health_port=0).missing() == ""
