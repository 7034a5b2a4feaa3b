"""Why a broker is not ready: provokes each reason, as /readyz and ``mqbroker health`` report it."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.test_cli import banner, start, stop, write_config
from tests.broker.wire_client import WireClient
from tests.ports import free_port
from tests.web_client import get
from trimq.broker.controller import BrokerController
from trimq.broker.store.disk.disk import DiskSpace, MappedPart
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.testing import configuration, running_broker
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController
from trimq.protocol.native import NATIVE

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


async def reasons(broker: BrokerController) -> dict[str, str]:
    answer = await get(broker.web_endpoints[0], "/readyz")
    found = json.loads(answer.body)
    assert answer.status == (200 if found["ready"] else 503)
    assert (await get(broker.web_endpoints[0], "/livez")).status == 200
    return {reason["code"]: reason["text"] for reason in found["reasons"]}


async def reasons_until(broker: BrokerController, condition: Callable[[dict[str, str]], object]) -> dict[str, str]:
    with trio.fail_after(20):
        while True:
            found = await reasons(broker)
            if condition(found):
                return found


class HeldDisk(RealDisk):
    """Holds the last step of a recovery until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = trio.Event()

    async def run(self, function: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        if getattr(function, "__name__", "") == "sync":
            await self.go_on.wait()
        return await super().run(function, *arguments)


async def test_a_recovery_says_how_far_it_is(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        for _ in range(10):
            await client.send("T", bytes(300_000))
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "abort").write_text("1")
    disk = HeldDisk()
    controller = BrokerController(configuration(tmp_path, {"healthPort": 0}), disk=disk)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(controller.run)
        while not controller.web_endpoints:
            await trio.lowlevel.checkpoint()
        found = await reasons_until(controller, lambda found: "3 of 16 MiB" in found.get("recovering", ""))
        assert found == {
            "starting": "the server is starting",
            "recovering": "the store is being recovered: 3 of 16 MiB of the commit log read (17 %)",
        }
        disk.go_on.set()
        assert await reasons_until(controller, lambda found: not found) == {}
        disk.go_on = trio.Event()  # now it holds the last step of the stop
        controller.shutdown()
        assert (await reasons_until(controller, bool))["stopping"] == "the server is shutting down"
        disk.go_on.set()


class SickDisk(RealDisk):
    """A disk whose data syncs fail and whose free space is set by a test."""

    broken = False
    free = 100

    def data_sync(self, fd: int, part: MappedPart | None = None) -> None:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().data_sync(fd, part)

    def space(self, path: str) -> DiskSpace:
        return DiskSpace(100, self.free)


async def test_read_only_after_a_failed_sync(tmp_path: Path) -> None:
    disk = SickDisk()
    async with (
        running_broker(tmp_path, disk=disk, healthPort=0, flushDiskType="SYNC_FLUSH") as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        assert (await client.send("T")).code == 0
        assert await reasons(broker) == {}
        disk.broken = True
        assert (await client.send("T")).code == 14
        found = await reasons(broker)
        assert list(found) == ["read_only"]
        assert "Input/output error" in found["read_only"]
        disk.broken = False  # it stays read-only: the data that the failed sync has lost is not known
        assert list(await reasons(broker)) == ["read_only"]


async def test_disk_over_its_limit(tmp_path: Path) -> None:
    disk = SickDisk()
    async with running_broker(tmp_path, disk=disk, healthPort=0, cleanResourceInterval=100) as broker:
        assert await reasons(broker) == {}
        disk.free = 5
        await broker.context.store.delete_expired_now()
        found = await reasons_until(broker, bool)
        assert list(found) == ["disk_full"]
        assert "is 95 % full, the limit (diskSpaceWarningLevelRatio) is 90 %" in found["disk_full"]
        disk.free = 50
        assert await reasons_until(broker, lambda found: not found) == {}


@pytest.fixture
def full_tmpfs(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode:
        assert not os.environ.get("CI"), mounted.stderr
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


async def test_a_full_file_system(full_tmpfs: Path) -> None:
    filler = full_tmpfs / "filler"
    filler.write_bytes(bytes(5 << 20))
    keys: dict[str, Any] = {"healthPort": 0, "cleanResourceInterval": 1000}
    async with (
        running_broker(full_tmpfs / "store", **keys) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        codes = [(await client.send("T", bytes(100_000))).code for _ in range(150)]
        assert set(codes) == {0, 14}
        found = await reasons(broker)
        assert list(found) == ["disk_full"]
        assert "space" in found["disk_full"]
        filler.unlink()
        assert await reasons_until(broker, lambda found: not found) == {}  # without intervention
        assert (await client.send("T", bytes(100_000))).code == 0


async def test_no_name_server(tmp_path: Path) -> None:
    port = free_port()
    keys: dict[str, Any] = {"namesrvAddr": f"127.0.0.1:{port};127.0.0.1:1", "healthPort": 0}
    async with running_broker(tmp_path / "store", **keys) as broker, trio.open_nursery() as nursery:
        assert await reasons(broker) == {
            "no_name_server": f"no name server could be reached: 127.0.0.1:{port}, 127.0.0.1:1"
        }
        settings = {"bindAddress": "127.0.0.1", "listenPort": str(port), "kvConfigPath": str(tmp_path / "kv.json")}
        namesrv = NamesrvController(load_namesrv(flags={key: (value, "test") for key, value in settings.items()}))
        await nursery.start(namesrv.run)
        assert await reasons_until(broker, lambda found: not found) == {}  # one of them is enough
        namesrv.shutdown()
        assert list(await reasons_until(broker, bool)) == ["no_name_server"]


RUNS = NATIVE.status if NATIVE.is_on else f"python ({NATIVE.reason})"
OPEN = "open: anybody who reaches the port is administrator (docs/security.md)"


async def test_a_native_extension_that_fails_is_noted_and_the_broker_stays_ready(
    tmp_path: Path, fail_native: Callable[[str], None]
) -> None:
    async with running_broker(tmp_path, healthPort=0) as broker, WireClient.connect(broker.endpoint) as client:

        async def notes() -> dict[str, str]:
            assert await reasons(broker) == {}
            answer = await get(broker.web_endpoints[0], "/readyz")
            return {note["code"]: note["text"] for note in json.loads(answer.body)["notes"]}

        assert await notes() == {"runs": RUNS, "access": OPEN}
        (connection,) = broker.reactor.connections.values()
        with capture_logs() as logs:
            fail_native("frames: index 7 of 3")
        assert logs == [{"event": "native_extension_off", "log_level": "error", "reason": NATIVE.reason}]
        assert not connection.table.grouped  # its routes have been rebuilt
        found = await notes()
        assert list(found) == ["runs", "native_failed", "access"]
        assert found["runs"] == "python (a fault: frames: index 7 of 3)"
        assert "Python serves until the next restart" in found["native_failed"]
        assert (await client.send("T")).code == 0
        environment = {"TRIMQ_HEALTH_PORT": str(broker.web_endpoints[0][1])}
        said = await trio.to_thread.run_sync(lambda: health("broker", "health", **environment))
        assert said[0] == 0
        assert said[1] == f"ready\nruns: {found['runs']}\nnative_failed: {found['native_failed']}\naccess: {OPEN}\n"


async def test_notes_are_reported_with_the_reasons(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"namesrvAddr": "127.0.0.1:1", "healthPort": 0}
    async with running_broker(tmp_path, **keys) as broker:
        await reasons_until(broker, bool)
        environment = {"TRIMQ_HEALTH_PORT": str(broker.web_endpoints[0][1])}
        code, text = await trio.to_thread.run_sync(lambda: health("broker", "health", **environment))
    assert code == 1
    first, second, third = text.splitlines()
    assert first.startswith("not ready: no_name_server: ")
    assert second == f"runs: {RUNS}"
    assert third == f"access: {OPEN}"


def health(program: str, *arguments: str, **environment: str) -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, "-m", f"trimq.{program}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env=os.environ | environment,
    )
    return run.returncode, run.stdout + run.stderr


def test_the_command_asks_the_broker_of_its_configuration(tmp_path: Path) -> None:
    port = free_port()
    config = str(write_config(tmp_path, healthPort=port))
    code, text = health("broker", "health", "-c", config)
    assert (code, text.partition(": [")[0]) == (1, f"not ready: no valid answer from 127.0.0.1:{port}")
    process = start("-c", config)
    try:
        assert f"http://127.0.0.1:{port}/readyz" in banner(process)
        while (found := health("broker", "health", "-c", config))[0]:
            assert "no_name_server" in found[1]  # it has just started
        assert found == (0, f"ready\nruns: {RUNS}\naccess: {OPEN}\n")
        assert health("broker", "-c", config, "health") == found
        assert health("broker", "health", TRIMQ_HEALTH_PORT=str(port)) == found
    finally:
        stop(process)
    code, text = health("broker", "health")
    assert (code, text) == (
        1,
        "health is not served: set healthPort (or metricsExporterType=PROM) in the configuration\n",
    )


@pytest.mark.parametrize("server", ["broker", "namesrv"])
def test_the_command_is_quick(server: str) -> None:
    """A container runs it every five seconds: modules that take long to import must not be imported."""
    imported = f"import sys, trimq.{server}.cli, trimq.remoting.http.health_command"
    code = f"{imported}; print({{'trio', 'structlog', 'rich'}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert run.stdout == "set()\n"


async def test_a_name_server_is_ready(tmp_path: Path) -> None:
    settings = {"listenPort": "0", "healthPort": "0", "kvConfigPath": str(tmp_path / "kv.json")}
    settings |= {"bindAddress": "127.0.0.1", "metricsExporterType": "PROM", "metricsPromExporterPort": "0"}
    namesrv = NamesrvController(load_namesrv(flags={key: (value, "test") for key, value in settings.items()}))
    async with trio.open_nursery() as nursery:
        await nursery.start(namesrv.run)
        (address,) = namesrv.web_endpoints
        answer = await get(address, "/readyz")
        found = json.loads(answer.body)
        assert (answer.status, found["ready"], found["reasons"]) == (200, True, [])
        assert [note["code"] for note in found["notes"]] == ["access"]
        page = (await get(address, "/metrics")).body
        assert "\ntrimq_namesrv_brokers 0.0\n" in page
        environment = {"TRIMQ_HEALTH_PORT": str(address[1])}
        code, text = await trio.to_thread.run_sync(lambda: health("namesrv", "health", **environment))
        assert (code, text.partition("\n")[0]) == (0, "ready")
        namesrv.shutdown()


async def test_a_second_broker_of_the_same_name_and_id(tmp_path: Path) -> None:
    # guards what the operators see: the second broker is not ready and reports why, until the first has stopped
    async with running_broker(tmp_path / "a", embeddedNamesrvEnable=True, embeddedNamesrvPort=0, healthPort=0) as first:
        where = first.name_servers[0].partition(" ")[0]
        # this broker runs the name server, which stays up
        async with running_broker(tmp_path / "b", brokerName="other", namesrvAddr=where, healthPort=0) as one:
            assert await reasons(one) == {}
            async with running_broker(tmp_path / "c", brokerName="other", namesrvAddr=where, healthPort=0) as two:
                found = await reasons_until(two, bool)
                assert list(found) == ["broker_id_conflict"]
                assert one.address in found["broker_id_conflict"]
                assert await reasons(one) == {}
                one.shutdown()
                assert await reasons_until(two, lambda found: not found) == {}
