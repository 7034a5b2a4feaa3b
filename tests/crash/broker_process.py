"""A broker process that can be killed and restarted on the same store and port."""

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
    """Resources of a process: private and resident memory in bytes, and the number of open descriptors."""

    private: int
    resident: int
    descriptors: int


class BrokerProcess:
    """A broker with its own configuration file.

    ``settings`` may be changed between two lives, that is between a kill or stop and the next start.
    """

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
        """For each start, the seconds until the first connection was accepted."""

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Start the broker and wait until it listens. Raises RuntimeError if it exits first."""
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
                    await trio.sleep(0.02)  # connecting is the only test for a listening port
                else:
                    await stream.aclose()
                    break
        self.start_seconds.append(time.monotonic() - began)

    async def kill(self) -> None:
        """Send SIGKILL; the process has ended when this returns."""
        await trio.to_thread.run_sync(self._process.kill)
        self.kills += 1

    async def stop(self) -> int:
        """Send SIGTERM, wait for the end, and return the exit code."""
        return await trio.to_thread.run_sync(self._process.stop)

    def tail(self) -> str:
        """The end of the broker's output."""
        return self._process.tail()

    def footprint(self) -> Footprint:
        """Memory and descriptors that the process uses now."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ":" in line
        )
        private, resident = (int(status[name].split()[0]) << 10 for name in ("RssAnon", "VmRSS"))
        return Footprint(private, resident, len(list(Path(f"/proc/{self.pid}/fd").iterdir())))
