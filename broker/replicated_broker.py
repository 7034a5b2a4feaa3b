"""ReplicatedBroker: a broker in controller mode. It runs a BrokerController for each role that it is given.

A change of the role closes the store, and opens it again: so the start of a master is the same whether the process is
new or was a slave until now, and nothing of the other role can be left over. What outlives a role is here: the
conversation with the controllers, the lease, the HTTP side, and what was read from files of keys and users.

Source: RocketMQ's ReplicasManager, which changes the parts of a running broker.
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import structlog
import trio

from trimq.broker.config import BrokerConfig, BrokerRole, ControllerModeConfig, MessageStoreConfig, ReplicationConfig
from trimq.broker.controller import BrokerController, open_web
from trimq.broker.ports import ClientPorts
from trimq.broker.replicas.broker_identity import BrokerIdentityFile
from trimq.broker.replicas.controller_client import ControllerClient
from trimq.broker.replicas.replica import Replica
from trimq.broker.replicas.replicas_manager import ReplicasManager
from trimq.broker.security_files import SecurityFiles
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.message_store import SyncPlace
from trimq.remoting.auth.users import credentials_of
from trimq.remoting.client.remoting_client import RemotingClient
from trimq.remoting.config.command_line import stop_on_signal
from trimq.remoting.config.configuration import Configuration, NettyServerConfig
from trimq.remoting.http.health import Health, Reason
from trimq.remoting.network import Network, SystemNetwork
from trimq.remoting.runtime.clock import Clock, SystemClock
from trimq.remoting.runtime.log_setup import StructuredLog

if TYPE_CHECKING:
    from trimq.remoting.http.web import WebApp

_log = structlog.get_logger("broker")

_SOURCE: Final = "the controllers"
_DECISION_SECONDS: Final = 3.0
"""How long a start waits for a master, before it counts as done without one."""
_FIRST_CUT_PAUSE: Final = 0.1
_LONGEST_CUT_PAUSE: Final = 5.0
_SETTLED: Final = 60.0
"""Seconds after which a slave's log needs to be cut for another reason than before."""
NO_MASTER: Final = "no_master"


class ReplicatedBroker:
    """One broker whose role is assigned. It is used as a BrokerController is; ``controller`` is that of its role.

    ``manager`` is valid while it runs. ``changes`` counts the roles that it has had.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        network: Network | None = None,
        sync_place: SyncPlace = SyncPlace.AUTO,
        accept_missing_log: bool = False,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """See BrokerController. ``settle`` is called for each role."""
        self.configuration = configuration
        self.clock: Clock = clock or SystemClock()
        self.disk: Disk = disk or RealDisk()
        self.network: Network = network or SystemNetwork()
        self.health = Health()
        self.web_endpoints: list[tuple[str, int]] = []
        self.stopped = trio.Event()
        self.manager: ReplicasManager
        self.controller: BrokerController
        self.changes = 0
        self.address = ""
        self._sync_place = sync_place
        self._accept_missing_log = accept_missing_log
        self._settle = settle
        self._files = SecurityFiles(configuration, self.disk, self.clock)
        self._web: WebApp | None = None
        self._decided = trio.Event()
        """Set when it has the role that the controllers want, with a master known."""
        self._reported = trio.Event()
        """Set when the owner knows that the start is done."""
        self._stop = trio.Event()

    # for the owner

    async def serve(self, ready: Callable[[], None]) -> None:
        """See BrokerController."""
        async with trio.open_nursery() as nursery:
            await nursery.start(stop_on_signal, self.shutdown)
            await nursery.start(self.run)
            if not self._stop.is_set():
                ready()
            await self.stopped.wait()
            nursery.cancel_scope.cancel()

    def shutdown(self) -> None:
        """See BrokerController."""
        self._stop.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Register with the controllers, and serve in the role that they assign, until ``shutdown``. Runs once.

        Raises StartError inside an exception group.
        """
        try:
            async with AsyncExitStack() as stack:
                self._web, self.web_endpoints = await open_web(self.configuration, self.health, stack)
                self._choose_ports(stack)
                await self._files.open()
                client = await stack.enter_async_context(
                    RemotingClient(
                        clock=self.clock,
                        network=self.network,
                        log=StructuredLog(),
                        credentials=credentials_of(await self._files.inner_user()),
                        tls=self._files.client_tls,
                    )
                )
                self.manager = self._make_manager(client)
                self.health.checks.append(self._reasons)
                if not await self._unless_stopped(self.manager.register):
                    task_status.started()
                    return
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._files.run)
                    await self._serve(nursery, task_status)
                    nursery.cancel_scope.cancel()
        finally:
            self.stopped.set()

    # the roles

    async def _serve(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        manager = self.manager
        truncate_at: int | None = None
        cuts = 0
        while True:
            replica = Replica(manager, self._files, truncate_at=truncate_at, web=self._web)
            self._apply(replica)
            kept = list(self.configuration.listeners)
            controller = self.controller = BrokerController(
                self.configuration,
                clock=self.clock,
                disk=self.disk,
                network=self.network,
                sync_place=self._sync_place,
                accept_missing_log=self._accept_missing_log and not self.changes,
                replica=replica,
                settle=self._settle,
            )
            controller.health.checks.append(self._reasons)
            began = trio.current_time()
            await nursery.start(controller.run)
            self.changes += 1
            if self.changes == 1:
                # Only now: what heartbeats say of the log decides who is elected.
                nursery.start_soon(manager.run)
                nursery.start_soon(self._started, task_status)
            await self._until_outdated(replica, controller)
            stops = self._stop.is_set() or controller.stopped.is_set()
            if stops:
                self.health.stopping()
            controller.shutdown(changes_role=not stops)
            await controller.stopped.wait()
            stops = stops or self._stop.is_set()
            self.configuration.listeners[:] = kept
            if self._web is not None:
                self._web.health, self._web.metrics = self.health, None
            if stops:
                self._decided.set()  # a start that is stopped is done
                await manager.hand_over()
                await self._reported.wait()
                return
            # What an old master does not have is no reason to cut the log of a broker that was elected meanwhile.
            cut = replica.must_truncate.is_set() and not manager.is_master
            truncate_at = replica.truncate_to if cut else None
            _log.info("role_changes", was_master=replica.is_master, master=manager.is_master, truncate_at=truncate_at)
            # One cut is enough; if it is not, the next ones must not close and open the store in a loop.
            cuts = cuts + 1 if cut and trio.current_time() - began < _SETTLED else int(cut)
            if cuts > 1:
                with trio.move_on_after(min(_LONGEST_CUT_PAUSE, _FIRST_CUT_PAUSE * 2**cuts)):
                    await self._stopped_or_elected()
                if manager.is_master:
                    truncate_at = None

    async def _stopped_or_elected(self) -> None:
        async with trio.open_nursery() as nursery:

            async def stop() -> None:
                await self._stop.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop)
            while not self.manager.is_master:
                await self.manager.changed()
            nursery.cancel_scope.cancel()

    async def _until_outdated(self, replica: Replica, controller: BrokerController) -> None:
        """Return when the role is another one, or when the broker stops."""
        async with trio.open_nursery() as nursery:

            async def ends(wait: Callable[[], Awaitable[None]]) -> None:
                await wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(ends, self._stop.wait)
            nursery.start_soon(ends, controller.stopped.wait)
            nursery.start_soon(ends, replica.outdated)
            nursery.start_soon(self._note_decision, replica)

    async def _started(self, task_status: trio.TaskStatus[None]) -> None:
        """The start is done when the role is known, which takes two starts for a broker that is elected by it."""
        with trio.move_on_after(_DECISION_SECONDS):
            await self._decided.wait()
        self.health.started()
        task_status.started()
        self._reported.set()

    async def _note_decision(self, replica: Replica) -> None:
        while self.manager.master is None or not replica.is_current:
            await self.manager.changed()
        self._decided.set()

    async def _unless_stopped(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do ``work``. Returns whether it was finished before ``shutdown``."""
        done = False
        async with trio.open_nursery() as nursery:

            async def stop() -> None:
                await self._stop.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop)
            await work()
            done = True
            nursery.cancel_scope.cancel()
        return done

    # parts

    def _make_manager(self, client: RemotingClient) -> ReplicasManager:
        config, broker = self.configuration.section(ControllerModeConfig), self.configuration.section(BrokerConfig)
        root = self.configuration.section(MessageStoreConfig).root
        path = config.store_path_broker_identity or str(root / "brokerIdentity")
        identity = BrokerIdentityFile(self.disk, path, broker.broker_cluster_name, broker.broker_name)
        controllers = ControllerClient(client, config.controllers)
        return ReplicasManager(self.configuration, controllers, identity, self.clock, self.address)

    def _choose_ports(self, stack: AsyncExitStack) -> None:
        """Choose the ports once: the other replicas know this broker by its address. Raises StartError.

        A port that the system has chosen stays bound, so that it is given to no other process while a change of the
        role has it closed.
        """
        broker = self.configuration.section(BrokerConfig)
        free = not broker.listen_port
        ports = ClientPorts(broker, self.configuration.section(NettyServerConfig), self.network)
        self.address = ports.address
        port = int(ports.address.rpartition(":")[2])
        if free:
            stack.enter_context(ports)
            # As without controllers: listenPort - 2, the default, may be the port of any other process.
            self.configuration.apply("fastListenPort", str(broker.fast_port), _SOURCE)
        else:
            with ports:
                pass
        self.configuration.apply("listenPort", str(port), _SOURCE)
        if self.configuration.section(ReplicationConfig).ha_listen_port is None:
            self.configuration.apply("haListenPort", "0" if free else str(port + 1), _SOURCE)

    def _apply(self, replica: Replica) -> None:
        """Configure the role."""
        role = BrokerRole.SYNC_MASTER if replica.is_master else BrokerRole.SLAVE
        self.configuration.apply("brokerRole", role.value, _SOURCE)
        self.configuration.apply("brokerId", str(0 if replica.is_master else self.manager.broker_id), _SOURCE)

    def _reasons(self) -> list[Reason]:
        manager = self.manager
        if manager.problem:
            return [Reason(NO_MASTER, f"the controllers do not answer as they should: {manager.problem}")]
        if not manager.master_alive:
            return [Reason(NO_MASTER, "there is no master: no member of the SyncStateSet is alive")]
        return []
