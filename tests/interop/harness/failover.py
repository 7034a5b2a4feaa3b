"""A broker group in controller mode: etcd, TriMQ's controllers, a name server, and three brokers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.interop.harness import probe
from tests.interop.harness.etcd import Etcd, running_etcd
from tests.interop.harness.networks import Host
from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.servers import Broker, NameServer, write_properties
from tests.interop.harness.waiting import wait_until
from tests.ports import free_port

SYNC_STATE = 1006
NAME = "group-a"
LOG_FILE = 4 * 1024 * 1024
REPLICA = {
    "enableControllerMode": "true",
    "bindAddress": "127.0.0.1",
    "mappedFileSizeCommitLog": str(LOG_FILE),
    "mappedFileSizeConsumeQueue": str(20 * 5000),
}


@dataclass
class Controller:
    """One process of mqcontroller, on an etcd, or on SQLite without one."""

    directory: Path
    etcd: Etcd | None
    port: int = field(default_factory=free_port)
    host: Host | None = None

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        configuration = self.directory / "controller.conf"
        store = (
            {"controllerStore": "etcd", "etcdEndpoints": self.etcd.endpoints}
            if self.etcd is not None
            else {"controllerStore": "sqlite", "controllerStorePath": str(self.directory / "controller.db")}
        )
        write_properties(configuration, {"listenPort": str(self.port), "bindAddress": "0.0.0.0", **store})
        self.process = Process(
            f"controller-{self.port}",
            [str(Path(sys.executable).parent / "mqcontroller"), "-c", str(configuration)],
            self.directory,
            {"HOME": str(self.directory)},
        )
        if self.host is not None:
            self.host.runs(self.process)

    @property
    def address(self) -> str:
        return f"{self.host.address if self.host is not None else '127.0.0.1'}:{self.port}"

    def start(self) -> None:
        """Start; it answers when this returns."""
        self.process.start()
        wait_until(lambda: probe.accepts(self.address), f"{self.process.name}", 60)


@dataclass
class PlacedBroker(Broker):
    """A broker on a host of its own."""

    host: Host | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host is not None:
            self.host.runs(self.process)

    @property
    def address(self) -> str:
        return f"{self.host.address if self.host is not None else '127.0.0.1'}:{self.port}"


@dataclass
class PlacedNameServer(NameServer):
    """A name server that hosts reach at ``at``."""

    at: str = "127.0.0.1"

    @property
    def address(self) -> str:
        return f"{self.at}:{self.port}"


@dataclass
class Group:
    """Three brokers of one name."""

    names: NameServer
    etcd: Etcd | None
    controllers: list[Controller]
    brokers: list[Broker]

    def replicas(self) -> dict[str, Any]:
        """What the controllers know of the group: masterBrokerId, masterAddress, masterEpoch, inSyncReplicas...

        Empty if none answers.
        """
        for controller in self.controllers:
            if not controller.process.running:
                continue
            try:
                reply = probe.call(controller.address, SYNC_STATE, body=json.dumps([NAME]).encode())
            except OSError:
                continue
            if reply.code == 0:
                return (reply.json().get("replicasInfoTable") or {}).get(NAME) or {}
        return {}

    def in_sync(self) -> set[str]:
        """The addresses of the members of the SyncStateSet."""
        return {one["brokerAddress"] for one in self.replicas().get("inSyncReplicas", [])}

    def master(self) -> Broker | None:
        """The broker that is elected and alive, and that the name server lists as the master."""
        found = self.replicas()
        every = [*found.get("inSyncReplicas", []), *found.get("notInSyncReplicas", [])]
        alive = {one["brokerAddress"] for one in every if one["alive"]}
        listed = probe.cluster(self.names.address).get(NAME, {}).get("brokerAddrs", {}).get("0")
        return next(
            (one for one in self.brokers if one.address == found.get("masterAddress") == listed and listed in alive),
            None,
        )

    def wait_for_master(self, but: Broker | None = None) -> Broker:
        """Until there is a master, another one than ``but``."""

        def other() -> Broker | None:
            found = self.master()
            return found if found is not but else None

        return wait_until(other, f"a master of {NAME}", 60)

    def wait_for_all(self) -> None:
        """Until all brokers are members of the SyncStateSet."""
        wanted = {one.address for one in self.brokers}
        wait_until(lambda: self.in_sync() == wanted, f"all members of {NAME}", 60)


@contextmanager
def running_group(
    directory: Path,
    *,
    brokers: int = 3,
    controllers: int = 3,
    etcd_members: int = 3,
    properties: Mapping[str, str] | None = None,
    each: Sequence[Mapping[str, str]] = (),
    hosts: list[Host] | None = None,
) -> Iterator[Group]:
    """Run all of it. All brokers are in sync when the block begins. Without ``etcd_members``: one controller, SQLite.

    ``each``: properties of each broker. ``hosts``: where the name server is, where a single controller is, then one
    for each broker.
    """
    with ExitStack() as stack:
        etcd = stack.enter_context(running_etcd(directory / "etcd", etcd_members)) if etcd_members else None
        place = hosts[1] if hosts is not None else None
        count = controllers if etcd is not None else 1
        deciding = [Controller(directory / f"controller-{at}", etcd, host=place) for at in range(count)]
        for controller in deciding:
            stack.enter_context(ended_afterwards(controller.process))
            controller.start()
        names = PlacedNameServer("trimq", directory / "namesrv", at=hosts[0].address if hosts else "127.0.0.1")
        stack.enter_context(ended_afterwards(names.process))
        names.start()
        addresses = ";".join(controller.address for controller in deciding)
        group = Group(names, etcd, deciding, [])
        for at in range(brokers):
            home = directory / f"broker-{at}"
            own = hosts[2 + at] if hosts is not None else None
            place_of = {"bindAddress": "0.0.0.0", "brokerIP1": own.address} if own is not None else {}
            broker = PlacedBroker(
                "trimq",
                home,
                [names],
                store=home / "store",
                name=NAME,
                properties={
                    **REPLICA,
                    "controllerAddr": addresses,
                    **place_of,
                    **(properties or {}),
                    **(each[at] if each else {}),
                },
                host=own,
            )
            stack.enter_context(ended_afterwards(broker.process))
            broker.start()
            group.brokers.append(broker)
        group.wait_for_all()
        yield group
