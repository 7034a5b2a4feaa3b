"""A broker group in controller mode inside a test: name server, a controller on LocalKv, and brokers, in one loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from tests.broker.wire_client import WireClient
from tests.store.replication.pairs import until
from trimq.broker.controller import BrokerController
from trimq.broker.replicated_broker import ReplicatedBroker
from trimq.broker.testing import configuration
from trimq.controller.config import load_controller
from trimq.controller.group_state import GroupState
from trimq.controller.local_kv import LocalKv
from trimq.controller.server import ControllerManager
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController
from trimq.remoting.runtime.clock import SystemClock

TOPIC: Final = "T"
NAME: Final = "group-a"
QUICK: Final[dict[str, Any]] = {
    "enableControllerMode": True,
    "brokerName": NAME,
    "haListenPort": 0,
    "brokerHeartbeatInterval": 100,
    "controllerHeartBeatTimeoutMills": 1000,
    "syncBrokerMetadataPeriod": 500,
    "checkSyncStateSetPeriod": 50,
    "haMaxTimeSlaveNotCatchup": 1000,
    "haSendHeartbeatInterval": 100,
    "haHousekeepingInterval": 5000,
    "slaveTimeout": 700,
}


METRICS: Final[dict[str, Any]] = {"metricsExporterType": "PROM", "metricsPromExporterPort": 0}


class Replica:
    """One broker, which may be started again."""

    def __init__(self, group: "Group", directory: Path, changes: dict[str, Any]) -> None:
        self._group = group
        self._directory = directory
        self._changes = changes
        self._scope = trio.CancelScope()
        self.settled = 0
        """How often it has had all that lives as long as a role."""
        self.broker: ReplicatedBroker

    async def start(self) -> None:
        """Run it; its role is known when this returns, unless there is no master."""
        settings = configuration(self._directory, {**QUICK, **self._group.addresses, **self._changes})
        self.broker = ReplicatedBroker(settings, settle=self._count)
        self._scope = trio.CancelScope()

        async def run(task_status: trio.TaskStatus[None]) -> None:
            with self._scope:
                await self.broker.run(task_status=task_status)

        await self._group.nursery.start(run)
        self._changes = {**self._changes, "listenPort": self.broker.address.rpartition(":")[2]}

    def _count(self) -> None:
        self.settled += 1

    @property
    def controller(self) -> BrokerController:
        """That of its present role."""
        return self.broker.controller

    @property
    def leads(self) -> bool:
        """Whether it serves as a master."""
        controller = self.controller
        return self.broker.manager.is_master and not controller.health.phase and controller.replication.master is None

    async def stop(self) -> None:
        """Stop it in order."""
        self.broker.shutdown()
        await self.broker.stopped.wait()

    async def cut_short(self) -> None:
        """End it without an orderly stop of the broker: no name server and no controller hears of it."""
        self._scope.cancel()
        await self.broker.stopped.wait()


class Group:
    """``replicas`` are in the order of their ids."""

    def __init__(
        self, nursery: trio.Nursery, directory: Path, names: NamesrvController, controller: dict[str, str] | None = None
    ) -> None:
        """``controller``: further settings of the controller."""
        self.nursery = nursery
        self._settings = controller or {}
        self.names = names
        self.kv = LocalKv(SystemClock())
        self.replicas: list[Replica] = []
        self._directory = directory
        self._port = 0
        self.manager: ControllerManager

    @property
    def addresses(self) -> dict[str, str]:
        """The options that say where name server and controller are."""
        assert self.names.address is not None
        return {"namesrvAddr": f"127.0.0.1:{self.names.address[1]}", "controllerAddr": f"127.0.0.1:{self._port}"}

    async def start_controller(self) -> None:
        """Run a controller, at the same address each time."""
        values = {"listenPort": self._port, "bindAddress": "127.0.0.1", **METRICS, **self._settings}
        settings = load_controller(flags={key: (str(value), "test") for key, value in values.items()})
        self.manager = ControllerManager(settings, kv=self.kv)
        _, self._port = await self.nursery.start(self.manager.run)

    async def stop_controller(self) -> None:
        """Stop the controller. What it has decided stays."""
        self.manager.shutdown()
        await self.manager.stopped.wait()

    async def add(self, **changes: Any) -> Replica:
        """Start another broker."""
        replica = Replica(self, self._directory / f"broker-{len(self.replicas)}", changes)
        await replica.start()
        self.replicas.append(replica)
        return replica

    async def state(self) -> GroupState:
        """What the controllers have decided."""
        return await self.manager.replicas.state(NAME)

    async def master(self, but: Replica | None = None) -> Replica:
        """Wait for a master, another one than ``but``."""
        found: list[Replica] = []

        def one() -> bool:
            found[:] = [replica for replica in self.replicas if replica is not but and replica.leads]
            return bool(found)

        await until(one)
        return found[0]

    async def joined(self, *replicas: Replica) -> None:
        """Wait until the master knows these and no others as the members of the set."""
        wanted = {replica.broker.manager.broker_id for replica in replicas or self.replicas}

        def complete() -> bool:
            leading = [replica for replica in self.replicas if replica.leads]
            if len(leading) != 1:
                return False
            leadership = leading[0].controller.context.store.replication.leadership
            return leadership is not None and leadership.members == wanted

        await until(complete)


@asynccontextmanager
async def running_group(
    directory: Path,
    brokers: int = 2,
    *,
    controller: dict[str, str] | None = None,
    namesrv: dict[str, str] | None = None,
    **changes: Any,
) -> AsyncIterator[Group]:
    """Run a group. Its brokers are in sync when the block begins; the first one is the master.

    ``controller`` and ``namesrv``: further settings of these servers.
    """
    settings = {"listenPort": "0", "bindAddress": "127.0.0.1", **(namesrv or {})}
    names = NamesrvController(load_namesrv(flags={key: (value, "test") for key, value in settings.items()}))
    async with trio.open_nursery() as nursery:
        await nursery.start(names.run)
        group = Group(nursery, directory, names, controller)
        await group.start_controller()
        for _ in range(brokers):
            await group.add(**changes)
        await group.joined()
        yield group
        nursery.cancel_scope.cancel()


async def send(replica: Replica, body: bytes, queue_id: int = 0) -> int:
    """Send a message; returns the reply's code."""
    async with WireClient.connect(replica.controller.endpoint) as client:
        return int((await client.send(TOPIC, body, queue_id=queue_id)).code)
