"""A broker that can be killed and started again on the same store and port."""

import sys
import time
from pathlib import Path
from typing import NamedTuple

import trio

from tests.interop.harness.processes import Process
from tests.ports import broker_port

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
SMALL = {
    "brokerName": "broker-a",
    "brokerIP1": "127.0.0.1",
    "bindAddress": "127.0.0.1",
    "embeddedNamesrvEnable": "false",
    "mappedFileSizeCommitLog": str(64 << 20),
    "mappedFileSizeConsumeQueue": str(20_000 * 20),
    "maxHashSlotNum": "50000",
    "maxIndexNum": "200000",
    "defaultTopicQueueNums": "8",
}


class Footprint(NamedTuple):
    """Of a process: private memory and all that is resident, in bytes, and open descriptors."""

    private: int
    resident: int
    descriptors: int


class BrokerProcess:
    """``settings`` may be changed between two lives."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.directory = directory
        self.port = broker_port()
        self.settings: dict[str, object] = {**SMALL, **settings}
        config = directory / "broker.conf"
        argv = [sys.executable, "-m", "trimq.broker", "-c", str(config)]
        self._process = Process("broker", argv, directory, {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"})
        self._config = config
        self.kills = 0
        self.start_seconds: list[float] = []
        """From each start to the first connection that was accepted."""

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        values = {"listenPort": self.port, "storePathRootDir": self.directory / "store", **self.settings}
        self._config.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        began = time.monotonic()
        self._process.start()
        with trio.fail_after(START_SECONDS):
            while True:
                if not self._process.running:
                    raise RuntimeError(f"the broker did not start:\n{self._process.tail()}")
                try:
                    stream = await trio.open_tcp_stream(*self.address)
                except OSError:
                    await trio.sleep(0.02)  # nothing else tells that a port is listened on
                else:
                    await stream.aclose()
                    break
        self.start_seconds.append(time.monotonic() - began)

    async def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        await trio.to_thread.run_sync(self._process.kill)
        self.kills += 1

    async def stop(self) -> int:
        """SIGTERM; its exit code."""
        return await trio.to_thread.run_sync(self._process.stop)

    def tail(self) -> str:
        """The end of what it said."""
        return self._process.tail()

    def footprint(self) -> Footprint:
        """What it takes now."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ":" in line
        )
        private, resident = (int(status[name].split()[0]) << 10 for name in ("RssAnon", "VmRSS"))
        return Footprint(private, resident, len(list(Path(f"/proc/{self.pid}/fd").iterdir())))
