"""Name servers and brokers under test: TriMQ's, or Apache's to verify that a test holds for the original."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.canary import permit
from tests.interop.harness import partners, probe
from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.security import OPEN, Security, java_properties
from tests.interop.harness.waiting import wait_until
from tests.ports import broker_port, free_port

Peer = Literal["trimq", "apache"]

#: Features that TriMQ's broker refuses for now. Removing a name makes the tests expect the feature instead.
NOT_YET = frozenset({"pop"})

#: Features that are off by default in Apache's broker and on in these tests, for both peers.
SWITCHED_ON = {"recallMessageEnable": "true", "enablePropertyFilter": "true", "traceTopicEnable": "true"}

IDENTITY = {"brokerClusterName": "DefaultCluster", "brokerId": "0", "brokerIP1": "127.0.0.1"}

#: Small files, so that they roll over during the tests, and delay levels of seconds. Both peers use the same sizes, so
#: that they can take turns on one store directory.
SMALL = {
    "messageDelayLevel": "1s 1s 1s 2s 2s 3s 3s 4s 4s 5s 6s 7s 8s 9s 10s 20s 30s 1m",
    "mappedFileSizeCommitLog": str(16 * 1024 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 1000),
    "maxHashSlotNum": "50000",
    "maxIndexNum": "200000",
}

#: With its defaults Apache's broker refuses requests that waited for 200 ms, which a cold start on two cores can cause.
APACHE_PATIENCE = {"waitTimeMillsInSendQueue": "20000", "waitTimeMillsInPullQueue": "20000"}

#: Apache's broker waits for the first of these intervals (3 s) in a loop that takes a whole core, and for each of the
#: second ones (1 s) it compares its whole timer wheel with the file.
APACHE_REST = {"transactionMetricFlushInterval": "300", "timerFlushIntervalMs": "5000"}

APACHE_BROKER_MEMORY = ("-Xms512m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m")
APACHE_NAME_SERVER_MEMORY = ("-Xms128m", "-Xmx128m")
#: Most of these JVMs live for seconds: no second compiler, and no RSA key of Apache's own at each start, for which
#: without it four seconds are computed. A later option for TLS wins.
APACHE_SHORT_LIVED = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Dtls.server.mode=disabled",
)
APACHE_OPENINGS = (
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
)


def chosen_peer() -> Peer:
    """The peer whose servers the tests run: TRIMQ_INTEROP_SERVER=trimq (default) or apache."""
    chosen = os.environ.get("TRIMQ_INTEROP_SERVER", "trimq")
    if chosen == "trimq":
        return "trimq"
    if chosen == "apache":
        return "apache"
    raise ValueError(f"TRIMQ_INTEROP_SERVER={chosen}: trimq or apache is expected")


def supports(peer: Peer, feature: str) -> bool:
    """Whether a peer has a feature; if not, it has to refuse it clearly."""
    return peer == "apache" or feature not in NOT_YET


def write_properties(path: Path, properties: Mapping[str, str]) -> None:
    """Write a configuration file."""
    path.write_text("".join(f"{key}={value}\n" for key, value in properties.items()), encoding="utf-8")


def _command(
    peer: Peer, script: str, apache_class: str, memory: tuple[str, ...], directory: Path, version: str = "5.5.0"
) -> list[str]:
    if peer == "trimq":
        return [str(Path(sys.executable).parent / script)]
    return apache_command(apache_class, memory, directory, version)


def apache_command(apache_class: str, memory: tuple[str, ...], directory: Path, version: str = "5.5.0") -> list[str]:
    """The command line of one of Apache's servers; its log files are below ``directory``."""
    jars = partners.apache_servers(version)
    java = partners.tool("java")
    options = [*APACHE_SHORT_LIVED, *memory, f"-Duser.home={directory}", *APACHE_OPENINGS]
    return [java, *options, "-cp", f"{jars}/*", apache_class]


@dataclass
class NameServer:
    """One name server process."""

    peer: Peer
    directory: Path
    port: int = field(default_factory=free_port)
    properties: Mapping[str, str] = field(default_factory=dict)
    security: Security = OPEN

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        probe.ACCESS[self.address] = self.security.access
        self.configuration = self.directory / "namesrv.conf"
        write_properties(
            self.configuration,
            {
                "listenPort": str(self.port),
                "kvConfigPath": str(self.directory / "kvConfig.json"),
                "configStorePath": str(self.directory / "namesrv.properties"),
                **self.security.settings(self.peer),
                **self.properties,
            },
        )
        command = _command(
            self.peer,
            "mqnamesrv",
            "org.apache.rocketmq.namesrv.NamesrvStartup",
            (*APACHE_NAME_SERVER_MEMORY, *java_properties(self.security.tls)),
            self.directory,
        )
        self.process = Process(
            f"namesrv-{self.port}",
            [*command, "-c", str(self.configuration)],
            self.directory,
            {"HOME": str(self.directory), "ROCKETMQ_HOME": str(self.directory)},
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the name server; it answers when this returns."""
        self.process.start()
        _wait_for(self.process, self.address)


@dataclass
class Broker:
    """One broker process on a store directory, which another broker may have used before.

    ``version`` and ``memory``, options of the JVM, are for Apache's.
    """

    peer: Peer
    directory: Path
    name_servers: list[NameServer]
    store: Path
    name: str = "broker-a"
    port: int = field(default_factory=broker_port)
    properties: Mapping[str, str] = field(default_factory=dict)
    small: bool = True
    version: str = "5.5.0"
    memory: tuple[str, ...] = APACHE_BROKER_MEMORY
    security: Security = OPEN

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        probe.ACCESS[self.address] = self.security.access
        self.configuration = self.directory / "broker.conf"
        permit(f"{self.configuration}*")  # and the one before a change
        if self.security.in_clear:
            permit(self.store / "config" / "auth.json*")
        probe.SHOWS_PASSWORDS.discard(self.address)
        if self.peer == "apache":  # which has passwords in clear in its store and in its replies
            permit(self.store / "*")
            probe.SHOWS_PASSWORDS.add(self.address)
        write_properties(
            self.configuration,
            {
                **IDENTITY,
                **SWITCHED_ON,
                **(SMALL if self.small else {}),
                **(APACHE_PATIENCE | APACHE_REST if self.peer == "apache" else {}),
                "brokerName": self.name,
                "listenPort": str(self.port),
                "namesrvAddr": ";".join(server.address for server in self.name_servers),
                "storePathRootDir": str(self.store),
                **self.security.settings(self.peer),
                **self.security.broker_settings(self.peer, self.directory),
                **self.properties,
            },
        )
        command = _command(
            self.peer,
            "mqbroker",
            "org.apache.rocketmq.broker.BrokerStartup",
            (*self.memory, *java_properties(self.security.tls)),
            self.directory,
            self.version,
        )
        self.process = Process(
            f"{self.name}-{self.port}",
            [*command, "-c", str(self.configuration)],
            self.directory,
            {"HOME": str(self.directory), "ROCKETMQ_HOME": str(self.directory)},
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Started, and known to every name server that runs when this returns."""
        self.process.start()
        _wait_for(self.process, self.address)
        for server in self.name_servers:
            if server.process.running:
                wait_until(
                    lambda server=server: self._is_registered(server),  # type: ignore[misc]
                    f"registration of {self.name} at {server.address}",
                )

    def _is_registered(self, server: NameServer) -> bool:
        known = probe.cluster(server.address).get(self.name, {})
        return self.address in known.get("brokerAddrs", {}).values()

    def stop(self) -> int:
        """SIGTERM and the whole graceful way down; the exit status."""
        return self.process.stop(60)

    def kill(self) -> None:
        self.process.kill()


def _wait_for(process: Process, address: str) -> None:
    def listens() -> bool:
        if not process.running:
            raise RuntimeError(f"{process.name} ended with status {process.child.returncode}:\n{process.tail()}")
        return probe.accepts(address)

    wait_until(listens, f"{process.name} at {address}", 120)


@dataclass(frozen=True)
class Cluster:
    """Name servers and brokers that run together."""

    name_servers: list[NameServer]
    brokers: list[Broker]

    @property
    def namesrv(self) -> str:
        """The address list as clients take it."""
        return ";".join(server.address for server in self.name_servers)

    @property
    def broker(self) -> Broker:
        return self.brokers[0]

    def supports(self, feature: str) -> bool:
        return supports(self.broker.peer, feature)

    def create_topic(self, topic: str, queues: int = 4, perm: int = 6) -> str:
        for broker in self.brokers:
            probe.create_topic(broker.address, topic, queues, perm)
        return topic


def _run(stack: ExitStack, server: NameServer | Broker) -> None:
    """Start a server and end it when the stack closes. Apache's broker is killed, because its stop takes 20 s."""
    stack.enter_context(ended_afterwards(server.process, gracefully=server.peer == "trimq"))
    server.start()


@contextmanager
def running_cluster(
    directory: Path,
    *,
    peer: Peer | None = None,
    brokers: int = 1,
    name_servers: int = 1,
    properties: Mapping[str, str] | None = None,
    small: bool = True,
    security: Security = OPEN,
) -> Iterator[Cluster]:
    """Run name servers and masters (broker-a, broker-b, ...) of a peer or the chosen one, and end them afterwards.

    Without ``small`` files and delay levels are Apache's.
    """
    peer = peer or chosen_peer()
    with ExitStack() as stack:
        servers = [
            NameServer(peer, directory / f"namesrv-{number}", security=security) for number in range(name_servers)
        ]
        for server in servers:
            _run(stack, server)
        masters = [
            Broker(
                peer,
                home,
                servers,
                store=home / "store",
                name=home.name,
                properties=properties or {},
                small=small,
                security=security,
            )
            for home in (directory / f"broker-{letter}" for letter in "abcdefgh"[:brokers])
        ]
        for master in masters:
            _run(stack, master)
        yield Cluster(servers, masters)


@contextmanager
def broker_on_store(
    peer: Peer, directory: Path, store: Path, properties: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """Run a broker of either peer, with TriMQ's name server, on a store that another broker may have written.

    File sizes, names and delay levels are the same for both peers, so that they can take turns.
    """
    with ExitStack() as stack:
        server = NameServer("trimq", directory / "namesrv")
        broker = Broker(peer, directory / "broker", [server], store=store, properties=properties or {})
        _run(stack, server)
        _run(stack, broker)
        yield Cluster([server], [broker])
