"""Child processes: each in a session of its own, ended by its process id, with a log that a failed test shows."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.interop.harness.waiting import wait_until

TAIL_BYTES = 64 * 1024
TAIL_LINES = 60

#: Prefix of lines in which RocketMQ's logging library prints its configuration at each start; reports omit them.
_CHATTER = " |-"

#: The processes whose logs a failed test shows: all running ones, and those that its error has ended.
started: list[Process] = []


def _ends_with_the_tests() -> list[str]:
    """A command prefix that makes the kernel kill the process when the test run itself is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


class Process:
    """One child process that writes its output to a log file."""

    def __init__(
        self, name: str, argv: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.argv = [*_ends_with_the_tests(), *argv]
        self.directory = directory
        self.log = directory / f"{name}.log"
        # Brokers read TRIMQ_ variables. Those of the test run are not meant for the brokers under test, except the
        # one that selects the native extension.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("TRIMQ_", "ROCKETMQ_"))}
        native = {key: value for key, value in os.environ.items() if key == "TRIMQ_NATIVE"}
        self.environment = {**inherited, **native, **(environment or {})}
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, *, piped: bool = False) -> subprocess.Popen[bytes]:
        """Start the process; with ``piped`` the caller gets standard input and output, only errors go to the log."""
        if self.running:
            raise RuntimeError(f"{self.name} is running already, pid {self.pid}")
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self.argv,
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                start_new_session=True,
            )
        if self not in started:
            started.append(self)
        return self._child

    @property
    def child(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._child

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def kill(self) -> None:
        """Send SIGKILL; the process has ended when this returns."""
        self._signal(signal.SIGKILL)
        self.child.wait()

    def stop(self, timeout: float = 30.0) -> int:
        """Send SIGTERM, and SIGKILL if the process has not ended after ``timeout`` seconds; return the exit status."""
        self._signal(signal.SIGTERM)
        try:
            return self.child.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.child.wait()
        finally:
            for pipe in (self.child.stdin, self.child.stdout):
                if pipe is not None:
                    pipe.close()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Send SIGSTOP, and SIGCONT at the end. No thread runs any more when the block begins."""
        threads = Path(f"/proc/{self.pid}/task")

        def stopped() -> bool:
            return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads.glob("*/stat"))

        self._signal(signal.SIGSTOP)
        try:
            wait_until(stopped, f"stop of {self.name}")
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)

    def tail(self) -> str:
        """The end of the process's log."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if _CHATTER not in line][-TAIL_LINES:])

    def wait_for_exit(self, timeout: float = 30.0) -> int:
        wait_until(lambda: not self.running, f"end of {self.name}", timeout)
        return self.child.wait()


@contextmanager
def ended_afterwards(process: Process, *, gracefully: bool = True) -> Iterator[Process]:
    """Stop the process at the end, and remove it from the reports; after an error it stays in the one of this test."""
    try:
        yield process
    finally:
        if process.running:
            if gracefully:
                process.stop()
            else:
                process.kill()
    if process in started:
        started.remove(process)


def reported() -> list[Process]:
    """For the report of a failed test, its own processes first. Those that have ended are in no other report."""
    found = started[::-1]
    started[:] = [process for process in started if process.running]
    return found
