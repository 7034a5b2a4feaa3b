"""Broker processes for the benchmarks: start, wait for the first accepted connection, read the memory use, stop."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from bench import mixed

START_DEADLINE_SECONDS = 90
STOP_DEADLINE_SECONDS = 30
HERE = Path(__file__).resolve().parent
_DESCRIBE = """
import json, sys, sysconfig
flags = " ".join(str(sysconfig.get_config_var(name)) for name in ("CONFIG_ARGS", "PY_CORE_CFLAGS", "PY_CORE_LDFLAGS"))
print(json.dumps({
    "version": sys.version.split()[0],
    "profile-guided": "--enable-optimizations" in flags or "-fprofile-use" in flags,
    "link-time optimised": "-flto" in flags or "--with-lto" in flags,
    "global lock": not sysconfig.get_config_var("Py_GIL_DISABLED") or sys._is_gil_enabled(),
    "just-in-time compiler": hasattr(sys, "_jit") and sys._jit.is_enabled(),
}))
"""


def port_open(port: int) -> bool:
    """Whether a process accepts connections at this port on loopback."""
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port below the ephemeral range whose neighbours (the fast port and the HA port) are free too."""
    while True:
        port = random.randrange(20_000, 30_000)
        if not any(port_open(neighbour) for neighbour in (port - 2, port, port + 1)):
            return port


def anonymous_memory_mib(pid: int) -> float:
    """RssAnon of a process and its children. Mapped store files belong to the page cache and are not included."""
    total, todo = 0, [pid]
    while todo:
        current = Path("/proc") / str(todo.pop())
        with contextlib.suppress(OSError):
            for line in (current / "status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    total += int(line.split()[1])
            for task in (current / "task").iterdir():
                todo += [int(child) for child in (task / "children").read_text().split()]
    return total / 1024


class BrokerProcess:
    """A broker in a session of its own, with a properties file that both brokers accept.

    ``boot_seconds``: from the start of the process to its first accepted connection.
    """

    def __init__(self, name: str, command: Sequence[str], root: Path, **properties: object) -> None:
        """``command`` contains ``{conf}`` for the path of the configuration file."""
        self.name = name
        self.port = free_port()
        self.log_path = root / f"{name}.log"
        self._conf = root / f"{name}.conf"
        settings = {
            "brokerClusterName": "DefaultCluster",
            "brokerName": "broker-a",
            "brokerId": 0,
            "brokerIP1": "127.0.0.1",
            "listenPort": self.port,
            "haListenPort": self.port + 1,
            "fastListenPort": self.port - 2,
            "storePathRootDir": root / name,
            "autoCreateTopicEnable": "true",
            "namesrvAddr": f"127.0.0.1:{self.port - 1000}",
        } | properties
        self._conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="utf-8")
        self._command = [part.replace("{conf}", str(self._conf)) for part in command]
        self._environment = {**os.environ, "ROCKETMQ_HOME": str(root / f"{name}-home")}
        self.boot_seconds = 0.0

    def __enter__(self) -> Self:
        """Start the process and wait until it accepts connections."""
        started = time.perf_counter()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True, env=self._environment
            )
        while not port_open(self.port):
            if self.process.poll() is not None or time.perf_counter() - started > START_DEADLINE_SECONDS:
                self.stop()
                raise RuntimeError(f"{self.name} did not start:\n{self.log_path.read_text()[-2000:]}")
            time.sleep(0.005)
        self.boot_seconds = time.perf_counter() - started
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the process."""
        self.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process and its children (SIGSTOP) for the time of the block."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    def memory_mib(self) -> float:
        """The anonymous memory that the process and its children use now."""
        return anonymous_memory_mib(self.process.pid)

    def kill(self) -> None:
        """Send SIGKILL, for a broker whose store is not needed any more: Apache's takes 20 s for SIGTERM."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after 30 s."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(STOP_DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def our_command(python: str | None = None) -> list[str]:
    """The command that starts this checkout's broker, with this interpreter or with another one."""
    if python is not None:
        return [python, "-m", "trimq.broker", "-c", "{conf}"]
    return [str(Path(sys.executable).parent / "mqbroker"), "-c", "{conf}"]


def describe(python: str) -> dict[str, Any]:
    """The version of an interpreter and how it was built, as far as the interpreter reports it."""
    run = subprocess.run([python, "-c", _DESCRIBE], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@contextlib.contextmanager
def load_tool(root: Path) -> Iterator[Path]:
    """Compile the load generator (bench/rmqload) into ``root``, and write the mixed messages there. Needs Go."""
    tool = root / "rmqload"
    subprocess.run(["go", "build", "-o", tool, "."], cwd=HERE / "rmqload", check=True)
    mixed.write(root / mixed.FILE)
    yield tool
