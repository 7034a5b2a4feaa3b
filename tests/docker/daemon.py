"""The commands docker and docker-compose for one daemon, and clients on this machine and in containers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from tests.docker.sdk_job import ACKNOWLEDGED, REFUSED
from tests.docs.commands import ALL
from tests.interop.harness import partners
from tests.interop.harness.drivers import JAVA_OPTIONS, JavaClient, bodies, message, unique
from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.servers import Cluster

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("sdk_job.py")
ADDRESS = "127.7.0.1"  # a loopback address like 127.0.0.1, on which no other program listens
PATIENCE = 400
"""Time limit in seconds for a start or for a client's work, which take a few seconds on an idle machine."""

MAKE_SECONDS = 900
"""Time limit in seconds for what builds an image or its wheels; a slow machine with two cores needs a third of that."""

Remarks = Callable[[str], None]
"""Prints a figure, or what has been done, at once."""


class Docker:
    """Runs commands with the daemon's address and the variables of docker-compose.yml; a failure shows the output."""

    def __init__(self, host: str, log: Path | None = None) -> None:
        """``host``: the daemon's address. ``log``: its log, shown if a command hangs."""
        self._log = log
        self.environment = os.environ | {
            "DOCKER_HOST": host,
            "TRIMQ_ADDRESS": ADDRESS,
            "TRIMQ_METRICS_ADDRESS": ADDRESS,
            "COMPOSE_PROJECT_NAME": "trimqtest",
            "COMPOSE_HTTP_TIMEOUT": "300",  # the daemon copies files before it answers
            "DOCKER_BUILDKIT": "0",  # the only builder that every version of Docker's command has
        }
        self.build = {"BASE": "trimq-base", "PYTHON": sys.executable, "OPTIONS": "--network=host"}
        """Variables of docker/build that select the base built by the tests."""

    def run(self, *command: str, timeout: float = 300, environment: dict[str, str] | None = None) -> str:
        """Run a command; its output. One that does not end in time ends with its children, and shows the containers."""
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment | (environment or {}),
            cwd=ROOT,
            start_new_session=True,
        ) as process:
            late = ""
            try:
                output, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                late = f"has not ended after {timeout} s\n{self._containers()}"
                os.killpg(process.pid, signal.SIGKILL)
                output, errors = process.communicate()
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        said = f"{' '.join(command)} {late}\n{output[-4000:]}\n{errors[-4000:]}"
        assert process.returncode == 0, said
        return output.strip()

    def _containers(self) -> str:
        """What the daemon says of all containers, and has logged last: for the failure of a command that hangs."""
        states = 'for id in $(docker ps -aq); do docker inspect --format "{{.Name}} {{json .State}}" $id; done'
        log = self._log.read_text(errors="replace")[-3000:] if self._log is not None else ""
        try:
            asked = subprocess.run(
                ["sh", "-c", states], capture_output=True, text=True, check=False, env=self.environment, timeout=20
            )
        except subprocess.TimeoutExpired:
            return f"the daemon does not answer\n{log}"
        return f"{asked.stdout}{asked.stderr}\n{log}"

    def compose(self, profile: str, *arguments: str) -> str:
        return self.run("docker-compose", "-f", "docker/docker-compose.yml", "--profile", profile, *arguments)

    def type_in(
        self,
        name: str,
        directory: Path,
        *,
        until: str = "\0",
        since: str = "",
        timeout: float = PATIENCE,
        replaced: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Run a block of commands from the documentation, or its part up to or from a line, on the tests' base.

        ``replaced``: names of the page, and those of the test.

        Debian's docker-compose is a separate command; the documentation uses docker's subcommand compose.
        """
        before, _, after = ALL[name].partition(until)
        text = before
        if since:
            before, found, after = ALL[name].partition(since)
            assert found, since
            exports = [line for line in before.splitlines() if line.startswith("export ")]
            text = "\n".join([*exports, since + after])
        for theirs, ours in replaced.items():
            assert theirs in text, theirs
            text = text.replace(theirs, ours)
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if plugin.returncode:
            script = (
                f'[ "$1" != compose ] || {{ shift; exec docker-compose "$@"; }}\nexec {shutil.which("docker")} "$@"\n'
            )
            (directory / "docker").write_text(f"#!/bin/sh\n{script}")
            (directory / "docker").chmod(0o755)
        path = {"PATH": f"{directory}:{self.environment['PATH']}:{Path(sys.executable).parent}"}
        return self.run("sh", "-euc", text, timeout=timeout, environment=self.build | path)

    def container(self, service: str) -> str:
        return self.run("docker", "ps", "-aq", "--filter", f"label=com.docker.compose.service={service}")

    def inspect(self, what: str) -> Any:
        (found,) = json.loads(self.run("docker", "inspect", what))
        return found

    def state(self, service: str) -> Any:
        return self.inspect(self.container(service))["State"]

    def started_in(self, service: str) -> str:
        """The duration of the server's start in seconds, from its log."""
        (seconds,) = re.findall(r"is up after ([\d.]+) s", self.run("docker", "logs", self.container(service)))[-1:]
        return str(seconds)

    def events(self, since: float) -> list[str]:
        """The events of services since a time, in order, as "SERVICE EVENT"."""
        form = '{{index .Actor.Attributes "com.docker.compose.service"}} {{.Action}}'
        return self.run(
            *("docker", "events", "--since", f"{since:.3f}", "--until", f"{time.time():.3f}"),
            *("--filter", "type=container", "--format", form),
        ).splitlines()

    def wait_healthy(self, *services: str) -> None:
        ends = time.monotonic() + PATIENCE
        while True:
            states = {name: self.state(name) for name in services}
            if all(state["Running"] and state["Health"]["Status"] == "healthy" for state in states.values()):
                return
            assert time.monotonic() < ends, json.dumps(states, indent=1)
            time.sleep(0.2)

    def job_in(self, network: str, *arguments: object) -> str:
        """Run the SDK in its own container."""
        return self.run(
            *("docker", "run", "--rm", "--network", network, "-v", f"{JOB}:/job.py:ro", "--no-healthcheck"),
            *("trimq", "python3", "/job.py", *map(str, arguments)),
        )

    @contextmanager
    def java_in(self, network: str, directory: Path) -> Iterator[JavaClient]:
        """Run the Java client in its own container, with the Java runtime of the pipeline's image."""
        classes, _, jars = partners.java_driver("5.5.0").partition(":")
        argv = [
            *("docker", "run", "--rm", "-i", "--network", network, "--entrypoint", "java"),
            *("-v", f"{classes}:/driver/classes:ro", "-v", f"{jars.removesuffix('/*')}:/driver/lib:ro"),
            *("trimq-pipeline", *JAVA_OPTIONS, "-cp", "/driver/classes:/driver/lib/*", "partners.Driver"),
        ]
        process = Process("java-in-container", argv, directory, {"DOCKER_HOST": self.environment["DOCKER_HOST"]})
        with ended_afterwards(process):
            client = JavaClient(process)
            yield client
            client.finish()


def job_command(*arguments: object) -> list[str]:
    return [sys.executable, str(JOB), *map(str, arguments)]


def job_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def job(*arguments: object) -> str:
    """Run the SDK on this machine."""
    run = subprocess.run(
        job_command(*arguments), capture_output=True, text=True, check=False, env=job_environment(), timeout=PATIENCE
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


class Flood:
    """Sends from this machine until ``end``, and collects the acknowledged messages."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.acknowledged: set[str] = set()
        self._newest = 0.0
        """Time of the last acknowledgement that was taken."""
        self.refused: list[str] = []
        """The codes of the others."""

    def send(self, count: int) -> None:
        """Wait for ``count`` more acknowledgements; those that only wait in the pipe since before do not count."""
        began, ends = time.time(), time.monotonic() + PATIENCE
        wanted: int | None = None
        while wanted is None or len(self.acknowledged) < wanted:
            last = Counter(self.refused[-100:])
            assert time.monotonic() < ends, f"no {count} sends are acknowledged; the codes of the last ones: {last}"
            self._take_one()
            if wanted is None and self._newest >= began:
                wanted = len(self.acknowledged) + count - 1

    def is_refused(self, code: str) -> None:
        """Wait for one more send that ends with ``code``: that of an error, or of a status."""
        wanted = self.refused.count(code) + 1
        ends = time.monotonic() + PATIENCE
        while self.refused.count(code) < wanted:
            assert time.monotonic() < ends, f"no send ends with {code}, but with {sorted(set(self.refused))}"
            self._take_one()

    def end(self) -> set[str]:
        """Stop sending and return the bodies of all acknowledged messages."""
        rest, _ = self._process.communicate(timeout=PATIENCE)
        for line in rest.splitlines():
            self._take(line)
        return self.acknowledged

    def _take_one(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the SDK has ended"
        self._take(line)

    def _take(self, line: str) -> None:
        if line.startswith(ACKNOWLEDGED):
            body, at = line.removeprefix(ACKNOWLEDGED).split()
            self.acknowledged.add(body)
            self._newest = float(at)
        elif line.startswith(REFUSED):
            self.refused.append(line.removeprefix(REFUSED).strip())


@contextmanager
def flood(namesrv: str, topic: str) -> Iterator[Flood]:
    process = subprocess.Popen(
        job_command("flood", namesrv, topic),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=job_environment(),
    )
    try:
        yield Flood(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def java_round_trip(java: JavaClient, namesrv: str, topic: str, count: int) -> None:
    """Check that the client receives each message that it sends once."""
    cluster = cast("Cluster", SimpleNamespace(namesrv=namesrv))
    wanted = {f"java{number}" for number in range(count)}
    with java.producer(cluster) as producer:
        producer.send(topic, [message(body) for body in sorted(wanted)])
    with java.consumer(cluster, unique("docker"), {topic: "*"}) as consumer:
        assert set(bodies(consumer.received(count))) == wanted
