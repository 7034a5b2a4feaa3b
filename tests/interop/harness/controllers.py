"""Controllers, Apache's or TriMQ's, and groups whose roles they assign: of Apache's brokers, TriMQ's, or both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.interop.harness import probe
from tests.interop.harness.etcd import running_etcd
from tests.interop.harness.failover import Controller
from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.servers import Broker, NameServer, Peer, apache_command, write_properties
from tests.interop.harness.waiting import wait_until
from tests.ports import free_port

METADATA = 1005
SYNC_STATE = 1006
ELECT_MASTER = 1002

#: Small, because several run beside each other and beside brokers.
CONTROLLER_MEMORY = ("-Xms96m", "-Xmx96m", "-XX:MaxDirectMemorySize=96m")
BROKER_MEMORY = ("-Xms256m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m")

#: Intervals and files of a broker in a group. Apache's scan for silent masters is each 5 s, its timeout 10 s; these
#: are shorter on purpose, except where a test sets them back.
GROUPED = {
    "enableControllerMode": "true",
    "brokerHeartbeatInterval": "500",
    "controllerHeartBeatTimeoutMills": "3000",
    "syncBrokerMetadataPeriod": "1000",
    "checkSyncStateSetPeriod": "1000",
    "haSendHeartbeatInterval": "1000",
    "mappedFileSizeCommitLog": str(1024 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 1000),
    "maxHashSlotNum": "64",
    "maxIndexNum": "400",
    "slaveReadEnable": "true",
    "brokerIP2": "127.0.0.1",
}
ONLY = {
    # a slave learns where to connect for the log when it registers at a name server
    "apache": {"timerWheelEnable": "false", "registerNameServerPeriod": "10000"},
    "trimq": {"embeddedNamesrvEnable": "false", "bindAddress": "127.0.0.1", "commitLogReserveStep": "8192"},
}
SCANS = {"scanNotActiveBrokerInterval": "500", "scanInactiveMasterInterval": "500"}


@dataclass
class ApacheController:
    """One process of Apache's controller. ``peers`` are the ports of all controllers, ``number`` is its place there."""

    directory: Path
    peers: Sequence[int]
    number: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        configuration = self.directory / "controller.conf"
        write_properties(
            configuration,
            {
                "controllerType": "DLedger",
                "controllerDLegerGroup": "group1",
                "controllerDLegerPeers": ";".join(f"n{at}-127.0.0.1:{port}" for at, port in enumerate(self.peers)),
                "controllerDLegerSelfId": f"n{self.number}",
                "controllerStorePath": str(self.directory / "store"),
                "configStorePath": str(self.directory / "controller.properties"),
                "mappedFileSize": str(4 * 1024 * 1024),
                "controllerThreadPoolNums": "4",
                **SCANS,
                **self.properties,
            },
        )
        command = apache_command(
            "org.apache.rocketmq.controller.ControllerStartup", CONTROLLER_MEMORY, self.directory, "5.5.0"
        )
        self.process = Process(
            f"controller-{self.port}",
            [*command, "-c", str(configuration)],
            self.directory,
            {"HOME": str(self.directory), "ROCKETMQ_HOME": str(self.directory)},
        )

    @property
    def port(self) -> int:
        return self.peers[self.number]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class Deciding(Protocol):
    """A controller of either kind."""

    process: Process

    @property
    def address(self) -> str: ...


def metadata(controller: Deciding) -> dict[str, str]:
    """The fields of 1005: group, controllerLeaderId, controllerLeaderAddress, isLeader, peers; empty if silent."""
    if not controller.process.running:
        raise RuntimeError(f"{controller.process.name} has ended:\n{controller.process.tail()}")
    try:
        reply = probe.call(controller.address, METADATA)
    except OSError:
        return {}
    return reply.ext if reply.code == 0 else {}


@dataclass
class Controllers:
    """Controllers that decide together, seen through one that leads. With TriMQ's that is any of them."""

    every: Sequence[Deciding]

    @property
    def addresses(self) -> str:
        """As ``controllerAddr`` of brokers."""
        return ";".join(one.address for one in self.every)

    def leader(self) -> Deciding | None:
        """The running controller that leads; None if there is none now."""
        for one in self.every:
            if one.process.running and metadata(one).get("isLeader") == "true":
                return one
        return None

    def wait_for_leader(self) -> Deciding:
        return wait_until(self.leader, "a leader of the controllers", 60)

    def replicas(self, name: str) -> dict[str, Any]:
        """What the leader knows of the brokers of a name: masterBrokerId, masterAddress, masterEpoch, inSyncReplicas...

        Empty if there is no leader, or the name is unknown.
        """
        leader = self.leader()
        if leader is None:
            return {}
        reply = probe.call(leader.address, SYNC_STATE, body=json.dumps([name]).encode())
        if reply.code != 0:
            return {}
        found: dict[str, Any] = (reply.json().get("replicasInfoTable") or {}).get(name) or {}
        return found

    def master(self, name: str) -> str:
        """The address of the elected broker; empty if there is none, or if it is silent."""
        found = self.replicas(name)
        return str(found["masterAddress"]) if found.get("masterAddress") in _alive(found) else ""

    def alive(self, name: str) -> set[str]:
        """The addresses of the brokers whose heartbeats arrive."""
        return _alive(self.replicas(name))

    def in_sync(self, name: str) -> set[str]:
        """The addresses of the SyncStateSet's members."""
        return {one["brokerAddress"] for one in self.replicas(name).get("inSyncReplicas", [])}

    def elect(self, broker: Broker, broker_id: int) -> probe.Reply:
        """Ask for this broker as the master, as mqadmin's electMaster does."""
        return probe.call(
            self.wait_for_leader().address,
            ELECT_MASTER,
            {
                "clusterName": "DefaultCluster",
                "brokerName": broker.name,
                "brokerId": str(broker_id),
                "designateElect": "true",
                "invokeTime": "0",
            },
        )


def _alive(replicas: Mapping[str, Any]) -> set[str]:
    every = [*replicas.get("inSyncReplicas", []), *replicas.get("notInSyncReplicas", [])]
    return {one["brokerAddress"] for one in every if one["alive"]}


@contextmanager
def apache_controllers(
    directory: Path, count: int = 1, properties: Mapping[str, str] | None = None
) -> Iterator[Controllers]:
    """Run Apache's controllers. One of them leads when the block begins."""
    ports = [free_port() for _ in range(count)]
    every = [
        ApacheController(directory / f"controller-{number}", ports, number, properties or {}) for number in range(count)
    ]
    with ExitStack() as stack:
        for one in every:
            stack.enter_context(ended_afterwards(one.process, gracefully=False))
            one.process.start()
        controllers = Controllers(every)
        controllers.wait_for_leader()
        yield controllers


@contextmanager
def trimq_controllers(directory: Path, count: int = 1) -> Iterator[Controllers]:
    """Run TriMQ's controllers: one on SQLite, several on an etcd of three members."""
    with ExitStack() as stack:
        etcd = stack.enter_context(running_etcd(directory / "etcd", 3)) if count > 1 else None
        every = [Controller(directory / f"controller-{number}", etcd) for number in range(count)]
        for one in every:
            stack.enter_context(ended_afterwards(one.process))
            one.start()
        yield Controllers(every)


def grouped_broker(
    peer: Peer,
    home: Path,
    names: Sequence[NameServer],
    controllers: str,
    properties: Mapping[str, str] | None = None,
    name: str = "group-a",
) -> Broker:
    """A broker of a group, with ``controllers`` as its ``controllerAddr``; its store is in ``home``."""
    return Broker(
        peer,
        home,
        list(names),
        store=home / "store",
        name=name,
        properties={**GROUPED, **ONLY[peer], "controllerAddr": controllers, **(properties or {})},
        memory=BROKER_MEMORY,
    )


@dataclass
class Group:
    """Brokers of one name, their controllers and their name server."""

    names: NameServer
    controllers: Controllers
    brokers: list[Broker]

    @property
    def name(self) -> str:
        return self.brokers[0].name

    def master(self) -> Broker | None:
        """The broker that the controllers have elected and that the name server lists as the master."""
        elected = self.controllers.master(self.name)
        listed = probe.cluster(self.names.address).get(self.name, {}).get("brokerAddrs", {}).get("0")
        return next((one for one in self.brokers if one.address == elected == listed), None)

    def wait_for_master(self, timeout: float = 60.0) -> Broker:
        return wait_until(self.master, f"a master of {self.name}", timeout)

    def alive(self) -> set[str]:
        """The addresses of the brokers whose heartbeats arrive at the controllers."""
        return self.controllers.alive(self.name)

    def wait_for_set(self, *members: Broker, timeout: float = 60.0) -> None:
        """Until the SyncStateSet has exactly these members."""
        wanted = {one.address for one in members}
        wait_until(lambda: self.controllers.in_sync(self.name) == wanted, f"the set of {self.name}", timeout)


@contextmanager
def running_group(
    directory: Path,
    peers: Sequence[Peer],
    *,
    decided_by: Peer = "apache",
    controllers: int = 1,
    properties: Mapping[str, str] | None = None,
    controller_properties: Mapping[str, str] | None = None,
) -> Iterator[Group]:
    """Run a name server of TriMQ, controllers (Apache's, or TriMQ's) and a group of brokers.

    One after the other, so that the first broker is the first master. When the block begins, all are in the
    SyncStateSet.
    """
    with ExitStack() as stack:
        names = NameServer("trimq", directory / "namesrv")
        stack.enter_context(ended_afterwards(names.process))
        names.start()
        home = directory / "controllers"
        if decided_by == "trimq":
            deciding = stack.enter_context(trimq_controllers(home, controllers))
        else:
            deciding = stack.enter_context(apache_controllers(home, controllers, controller_properties))
        group = Group(names, deciding, [])
        for number, peer in enumerate(peers):
            broker = grouped_broker(peer, directory / f"broker-{number}", [names], deciding.addresses, properties)
            stack.enter_context(ended_afterwards(broker.process, gracefully=peer == "trimq"))
            broker.start()
            group.brokers.append(broker)
            if number == 0:
                group.wait_for_master()
        group.wait_for_set(*group.brokers)
        yield group
