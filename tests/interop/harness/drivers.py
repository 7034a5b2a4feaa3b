"""The official clients as the tests use them: driver processes that speak JSON lines, and handles on open clients."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.interop.harness import partners, probe
from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.security import tools_file
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until

Record = dict[str, Any]

START_TIMEOUT = 120
CALL_TIMEOUT = 90
RECEIVE_TIMEOUT = 30.0

_numbers = itertools.count(1)


def unique(prefix: str) -> str:
    """A name that no other test of this run uses."""
    return f"{prefix}_{next(_numbers)}"


def _camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda found: found.group(1).upper(), name)


def message(body: str, **parts: object) -> Record:
    """One message for a driver: tags, keys, properties, size (pads the body), order, flag, wait.

    ``delay`` is a delay level; ``delay_ms``, ``delay_sec`` and ``deliver_ms`` need client 5.5.0.
    """
    return {"body": body, **{_camel(name): value for name, value in parts.items()}}


def messages(count: int, prefix: str = "m", **parts: object) -> list[Record]:
    return [message(f"{prefix}{number}", **parts) for number in range(count)]


def bodies(records: Sequence[Record]) -> list[str]:
    return [record["body"] for record in records]


class PartnerError(Exception):
    """The client raised an exception; ``codes`` and ``causes`` are the response codes and texts of its causes."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error.get('type')}: {error.get('message')}")
        self.type = str(error.get("type"))
        self.codes: list[int] = error.get("codes") or []
        self.causes: list[str] = error.get("causes") or [str(error.get("message"))]


class LineDriver:
    """A partner process: requests and answers are JSON lines matched by number; many requests can be pending."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        hello: Future[Any] = Future()
        self._pending[0] = hello
        child = process.start(piped=True)
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the driver's pipes are missing")
        self._requests = child.stdin
        self._answers = child.stdout
        self._reader = threading.Thread(target=self._read, name=f"{process.name} answers", daemon=True)
        self._reader.start()
        self.versions: Record = hello.result(START_TIMEOUT)

    def _read(self) -> None:
        for line in self._answers:
            answer = json.loads(line)
            with self._lock:
                waiting = self._pending.pop(answer["id"])
            if "error" in answer:
                waiting.set_exception(PartnerError(answer["error"]))
            else:
                waiting.set_result(answer.get("result"))
        with self._lock:
            lost, self._pending = list(self._pending.values()), {}
        for waiting in lost:
            waiting.set_exception(RuntimeError(f"{self.process.name} ended:\n{self.process.tail()}"))

    def begin(self, operation: str, **arguments: object) -> Future[Any]:
        """Start an operation and return its answer as a future."""
        number = next(self._ids)
        answer: Future[Any] = Future()
        request = {"id": number, "op": operation}
        request |= {_camel(name): value for name, value in arguments.items() if value is not None}
        with self._lock:
            self._pending[number] = answer
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        return answer

    def call(self, operation: str, **arguments: object) -> Any:
        return self.begin(operation, **arguments).result(CALL_TIMEOUT)

    def finish(self) -> None:
        """Close the driver's standard input, which ends the process in an orderly manner."""
        self._requests.close()
        self.process.wait_for_exit()
        self._reader.join(START_TIMEOUT)
        self._answers.close()


@dataclass(frozen=True)
class Producer:
    """A producer inside a driver."""

    driver: LineDriver
    name: str

    def send(self, topic: str, specs: Sequence[Record], mode: str = "sync", **options: object) -> list[Record]:
        sent: list[Record] = self.driver.call(
            "producer.send", name=self.name, topic=topic, messages=specs, mode=mode, **options
        )
        failed = [one["failed"] for one in sent or () if "failed" in one]
        if failed:
            raise PartnerError(failed[0])
        return sent

    def send_to(self, queue: tuple[str, int], topic: str, specs: Sequence[Record], mode: str = "sync") -> list[Record]:
        """Send to one queue, given as broker name and queue id."""
        return self.send(topic, specs, mode, broker=queue[0], queue=queue[1])

    def ask(self, operation: str, **arguments: object) -> Any:
        return self.driver.call(f"producer.{operation}", name=self.name, **arguments)

    def transaction(self, topic: str, specs: Sequence[Record], *, go_on: bool = False) -> list[Record]:
        """Send messages in one transaction each; with ``go_on`` a message that fails is a record with ``failed``."""
        sent: list[Record] = self.ask("transaction", topic=topic, messages=specs, go_on=go_on)
        return sent

    def checks(self) -> list[Record]:
        """The half messages about which brokers have asked this producer, oldest first."""
        asked: list[Record] = self.ask("checks")
        return asked

    def recall(self, topic: str, handle: str) -> str:
        """Recall a message that is to be delivered later; the unique key of the message."""
        return str(self.ask("recall", topic=topic, handle=handle))

    def query_key(self, topic: str, key: str) -> list[Record]:
        """The messages that the broker finds by a key; the client's "no message" error becomes an empty list."""
        try:
            found: list[Record] = self.ask("queryKey", topic=topic, key=key)["messages"]
        except PartnerError as error:
            if "no message" in str(error) or 208 in error.codes or 17 in error.codes:
                return []
            raise
        return found


@dataclass(frozen=True)
class Consumer:
    """A push consumer inside a driver, which stores the received messages."""

    driver: LineDriver
    name: str

    def received(self, count: int, *, wait: float = RECEIVE_TIMEOUT, distinct: str | None = None) -> list[Record]:
        """All messages received so far; AssertionError if there are fewer than ``count`` after ``wait`` seconds."""
        got: list[Record] = self.driver.call(
            "consumer.received", name=self.name, count=count, wait=int(wait * 1000), distinct=distinct
        )
        seen = len(got) if distinct is None else len({record[distinct] for record in got})
        if seen < count:
            raise AssertionError(f"{seen} of {count} messages after {wait:g} s: {bodies(got)}")
        return got

    def failures(self) -> list[Record]:
        """The replies that the consumer could not send."""
        failed: list[Record] = self.driver.call("consumer.failures", name=self.name)
        return failed

    def so_far(self) -> list[Record]:
        return self.received(0, wait=0)

    def queues(self) -> set[tuple[str, str, int]]:
        """The queues that the consumer holds now, without those of its retry topic."""
        held = self.driver.call("consumer.queues", name=self.name)
        return {(one["topic"], one["broker"], one["queue"]) for one in held if not one["topic"].startswith("%RETRY%")}

    def wait_for_position(self, topic: str, position: int) -> None:
        """Wait until the offsets that the consumer would commit sum up to ``position``.

        A message counts as received before it counts as processed.
        """
        wait_until(
            lambda: self.driver.call("consumer.position", name=self.name, topic=topic) == position,
            f"offsets of {position} in all at consumer {self.name}",
        )

    def wait_for_queues(self, count: int) -> set[tuple[str, str, int]]:
        wait_until(lambda: len(self.queues()) == count, f"{count} queues at consumer {self.name}")
        return self.queues()


@dataclass(frozen=True)
class LiteConsumer:
    """A lite pull consumer inside a driver."""

    driver: LineDriver
    name: str

    def ask(self, operation: str, **arguments: object) -> Any:
        return self.driver.call(f"lite.{operation}", name=self.name, **arguments)

    def poll(self, count: int, wait: float = RECEIVE_TIMEOUT) -> list[Record]:
        """Poll at least ``count`` messages; AssertionError if there are fewer after ``wait`` seconds."""
        got: list[Record] = self.ask("poll", count=count, wait=int(wait * 1000))
        if len(got) < count:
            raise AssertionError(f"{len(got)} of {count} messages after {wait:g} s: {bodies(got)}")
        return got


class JavaClient(LineDriver):
    """The Java client in a JVM of its own; its context managers close the clients that a test opened."""

    version: str
    encoding: str

    @contextmanager
    def producer(self, cluster: Cluster, group: str | None = None, **options: object) -> Iterator[Producer]:
        name = unique("producer")
        self.call("producer.open", name=name, group=group or unique("PG"), namesrv=cluster.namesrv, **options)
        try:
            yield Producer(self, name)
        finally:
            # The client takes up to three seconds to close, and no test depends on the end of it. But clients that
            # trace share one inner client, and one that opens while another closes would lose its traces.
            closing = self.begin("producer.close", name=name)
            if options.get("trace"):
                closing.result(CALL_TIMEOUT)

    @contextmanager
    def consumer(
        self, cluster: Cluster, group: str, subscribe: Mapping[str, str] | None = None, **options: object
    ) -> Iterator[Consumer]:
        name = unique("consumer")
        self.call(
            "consumer.open", name=name, group=group, namesrv=cluster.namesrv, subscribe=dict(subscribe or {}), **options
        )
        try:
            yield Consumer(self, name)
        finally:
            self.call("consumer.close", name=name)

    @contextmanager
    def lite_consumer(
        self, cluster: Cluster, group: str, subscribe: Mapping[str, str] | None = None, **options: object
    ) -> Iterator[LiteConsumer]:
        name = unique("lite")
        self.call(
            "lite.open", name=name, group=group, namesrv=cluster.namesrv, subscribe=dict(subscribe or {}), **options
        )
        try:
            yield LiteConsumer(self, name)
        finally:
            self.call("lite.close", name=name)

    def admin(self, cluster: Cluster, method: str, *arguments: object) -> Any:
        """Call a method of the administration client for which mqadmin has no command."""
        return self.call(
            "admin.call", name=unique("admin"), namesrv=cluster.namesrv, method=method, arguments=list(arguments)
        )


#: A driver shares two cores with a broker: little memory, no long background compilation, and clients that rebalance
#: every second instead of every 20.
JAVA_OPTIONS = (
    "-Xms64m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Drocketmq.client.rebalance.waitInterval=1000",
    "-Drocketmq.client.rebalance.minInterval=200",
    "-Drocketmq.client.rebalance.lockInterval=1000",
    "-Drocketmq.client.logLevel=WARN",
    # Clients of 5.5.0 that trace report recalls too.
    "-Dcom.rocketmq.recall.default.trace.enable=true",
)


def _java(version: str, directory: Path, main: str, *options: str) -> list[str]:
    return [
        partners.tool("java"),
        *JAVA_OPTIONS,
        *options,
        f"-Duser.home={directory}",
        "-cp",
        partners.java_driver(version),
        main,
    ]


@contextmanager
def java_client(version: str, encoding: str, directory: Path, *options: str) -> Iterator[JavaClient]:
    """Start a JVM with one version of the client, which encodes its headers as JSON or ROCKETMQ."""
    directory.mkdir(parents=True, exist_ok=True)
    argv = _java(version, directory, "partners.Driver", f"-Drocketmq.serialize.type={encoding}", *options)
    process = Process(f"java-{version}-{encoding}", argv, directory)
    with ended_afterwards(process):
        client = JavaClient(process)
        client.version, client.encoding = version, encoding
        yield client
        client.finish()


@contextmanager
def node_client(directory: Path) -> Iterator[LineDriver]:
    """The Node client."""
    home = partners.node_driver()
    process = Process("node", [partners.tool("node"), str(home / "driver.js")], directory, {"HOME": str(directory)})
    with ended_afterwards(process):
        client = LineDriver(process)
        yield client
        client.finish()


@contextmanager
def go_client(directory: Path) -> Iterator[LineDriver]:
    """The Go client."""
    process = Process("go", [str(partners.go_driver())], directory, {"HOME": str(directory)})
    with ended_afterwards(process):
        client = LineDriver(process)
        yield client
        client.finish()


class Admin:
    """mqadmin, many commands in one JVM."""

    def __init__(self, process: Process, cluster: Cluster) -> None:
        self.process = process
        self.cluster = cluster
        child = process.start(piped=True)
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("mqadmin's pipes are missing")
        self._requests = child.stdin
        self._answers = child.stdout
        self.commands: set[str] = set()

    def run(self, command: str, *words: str) -> str:
        """Run one command with -n for the cluster's name servers; return its output, followed by its error output."""
        self.commands.add(command)
        line = json.dumps([command, *words, "-n", self.cluster.namesrv]).encode() + b"\n"
        self._requests.write(line)
        self._requests.flush()
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"mqadmin ended at: {command} {' '.join(words)}\n{self.process.tail()}")
        printed = json.loads(answer)
        return str(printed["output"]) + str(printed["errors"])

    def finish(self) -> None:
        self._requests.close()
        self.process.wait_for_exit()
        self._answers.close()


@contextmanager
def mqadmin(
    cluster: Cluster,
    directory: Path,
    version: str = "5.5.0",
    *,
    options: Sequence[str] = (),
    user: probe.Credentials | None = None,
) -> Iterator[Admin]:
    """mqadmin for one cluster, with options of its JVM (for TLS), as a user whose credentials are in tools.yml."""
    directory.mkdir(parents=True, exist_ok=True)
    argv = _java(version, directory, "partners.AdminShell", f"-Drocketmq.home.dir={directory}", *options)
    if user is not None:
        tools_file(directory, user)
    process = Process("mqadmin", argv, directory)
    with ended_afterwards(process):
        shell = Admin(process, cluster)
        yield shell
        shell.finish()
