"""BrokerController: the composition root. Builds the broker, starts its services, serves, and stops in order.

Start: lock and recover the store, bind the sockets, read the state files, listen, start the services, serve, register
with the name servers. Stop, within shutdownWaitTimeSeconds: unregister, answer the held pulls, finish the requests in
flight, write the state files, close the store.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

import structlog
import trio

from trimq.broker import addresses
from trimq.broker.auth.admin_port import AdminPort
from trimq.broker.auth.request_users import RequestUsers
from trimq.broker.auth.user_limits import UserLimits
from trimq.broker.config import AuthConfig, BrokerConfig, ReplicationConfig, UserLimitsConfig
from trimq.broker.context import BrokerContext
from trimq.broker.health import (
    log_hold_notes,
    name_server_reasons,
    native_notes,
    replication_notes,
    replication_reasons,
    store_reasons,
    tier_notes,
    timer_notes,
    transaction_notes,
)
from trimq.broker.identity import BrokerIdentity
from trimq.broker.open_store import make_store, opened
from trimq.broker.ports import ClientPorts
from trimq.broker.replication import Replication
from trimq.broker.security_files import SecurityFiles
from trimq.broker.services.client_calls import ClientCalls
from trimq.broker.services.config_file import ConfigFile
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.long_polling import PullRequestHoldService
from trimq.broker.services.producers import ProducerManager
from trimq.broker.services.rebalance_lock import RebalanceLockManager
from trimq.broker.services.registration import BrokerOuterAPI
from trimq.broker.services.slave_master import SlaveMaster
from trimq.broker.services.slave_timers import SlaveTimers
from trimq.broker.services.topic_followers import TopicFollowers
from trimq.broker.services.topic_routes import TopicRouteInfoManager
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.services.transaction.check import TransactionalMessageCheckService
from trimq.broker.services.unread import UnreadPositions
from trimq.broker.start_error import StartError
from trimq.broker.state_services import make_services
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.message_store import MessageStore, SyncPlace
from trimq.broker.wiring import connect
from trimq.protocol.auth.model import User
from trimq.protocol.codes import RequestCode
from trimq.protocol.message_id import UniqueIdGenerator
from trimq.protocol.native import NATIVE
from trimq.remoting.auth.permit import OPEN
from trimq.remoting.auth.users import Users, credentials_of
from trimq.remoting.client.remoting_client import RemotingClient
from trimq.remoting.config.client_limits import ClientLimitsConfig
from trimq.remoting.config.command_line import stop_on_signal
from trimq.remoting.config.configuration import Configuration, NettyServerConfig
from trimq.remoting.http.access_health import access_notes
from trimq.remoting.http.health import Health
from trimq.remoting.http.web_config import WebConfig
from trimq.remoting.network import Network, SystemNetwork
from trimq.remoting.runtime.clock import Clock, SystemClock
from trimq.remoting.runtime.log_setup import StructuredLog
from trimq.remoting.server.gate import Gate
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.server.reactor import Origins, Reactor, ReactorLimits, ServerTls
from trimq.remoting.tls.config import TlsConfig

if TYPE_CHECKING:
    from trimq.broker.replicas.replica import Replica
    from trimq.broker.replicas.replicas_manager import ReplicasManager
    from trimq.namesrv.controller import NamesrvController
    from trimq.remoting.http.web import WebApp

_log = structlog.get_logger("broker")

_T = TypeVar("_T")

_NOT_ON_FAST_PORT: Final = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
_HOUSEKEEPING_SECONDS: Final = 30.0
_SLAVES_SECONDS: Final = 3.0
"""How long a stop waits for slaves, within shutdownWaitTimeSeconds; ``_LAST_SECOND`` is for what follows."""
_LAST_SECOND: Final = 1.0
_ROLE_CHANGE_SECONDS: Final = 0.5
"""How long a change of the role waits for name servers: each one also sees the registration in the new role."""


class BrokerController:
    """One broker (RocketMQ's BrokerController).

    Valid after the start: ``address`` is the advertised address, ``endpoint`` where this machine connects,
    ``listening`` and ``name_servers`` describe where the broker listens and registers, ``web_endpoints`` serve
    ``health`` and metrics, ``context`` has the services. Features that check requests are registered with ``gate``.
    ``stopped`` is set when everything has ended.
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
        replica: "Replica | None" = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """``sync_place`` and ``accept_missing_log``: see MessageStore. ``replica``: the role, in controller mode.

        ``settle`` is called when all that lives as long as the broker exists: a process of its own settles its memory.
        """
        self.configuration = configuration
        self._accept_missing_log = accept_missing_log
        self._sync_place = sync_place
        self.clock: Clock = clock or SystemClock()
        self.disk: Disk = disk or RealDisk()
        self.network: Network = network or SystemNetwork()
        self.address = ""
        self.endpoint: tuple[str, int] = ("", 0)
        self.listening: list[str] = []
        self.name_servers: list[str] = []
        self.health = Health()
        self.health.notes.append(lambda: native_notes(NATIVE))
        self.health.notes.append(lambda: access_notes(self._section(AuthConfig)))
        self.gate = Gate()
        self.web_endpoints: list[tuple[str, int]] = []
        self.stopped = trio.Event()
        self.namesrv: NamesrvController | None = None
        self._files = replica.files if replica is not None else SecurityFiles(configuration, self.disk, self.clock)
        self.health.notes.append(self._files.notes)
        self.replication = Replication(configuration, self.network, self._files, replica)
        self.context: BrokerContext
        self.reactor: Reactor
        self._admin_port: AdminPort | None = None
        self._request_users: RequestUsers | None = None
        self._replica = replica
        self._settle = settle
        self._changes_role = False
        self._stop = trio.Event()

    # for the owner

    @property
    def controller(self) -> "BrokerController":
        """This one: an owner need not know whether the role is assigned (see ReplicatedBroker)."""
        return self

    @property
    def replicas(self) -> "ReplicasManager | None":
        """What the controllers have said, in controller mode."""
        return self._replica.manager if self._replica is not None else None

    async def serve(self, ready: Callable[[], None]) -> None:
        """Run until SIGTERM, SIGINT or ``shutdown``. ``ready`` is called once the broker serves.

        Raises StartError inside an exception group.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(stop_on_signal, self.shutdown)
            await nursery.start(self.run)
            ready()
            await self.stopped.wait()
            nursery.cancel_scope.cancel()

    def shutdown(self, *, changes_role: bool = False) -> None:
        """Request an orderly stop and return immediately. ``stopped`` is set when it has ended.

        ``changes_role``: the broker is started again at once with another role, so nothing waits for slaves.
        """
        self._changes_role = self._changes_role or changes_role
        self._stop.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start, serve until ``shutdown``, stop. Runs once. Raises StartError."""
        try:
            # The stack closes in reverse order, after the nursery: the store is closed once no task uses it, and
            # health answers until the store is closed.
            async with AsyncExitStack() as stack:
                web = await self._open_web(stack)
                store = await self._open_store(stack)
                ports = stack.enter_context(self._bind())
                stack.callback(self.replication.close)
                self.replication.bind()
                context = self.context = await self._build(store, ports, stack)
                table = connect(context, self.reactor, self.gate)
                self.replication.refuse_pulls(table, context.store)
                self.health.notes.append(lambda: timer_notes(context.timer))
                self.health.notes.append(lambda: transaction_notes(context.transactions, context.transaction_checks))
                self.reactor.add_listener(ports.sockets[0], table)
                for sock in ports.sockets[1:]:
                    self.reactor.add_listener(sock, table.without(*_NOT_ON_FAST_PORT))
                if ports.admin is not None and self._admin_port is not None:
                    self.reactor.add_listener(ports.admin, self._admin_port.table(table))
                stack.enter_context(NATIVE.heard_by(self._native_failed))
                async with trio.open_nursery() as nursery:
                    await self._start(context, nursery)
                    if web is not None and self._section(WebConfig).serves_metrics:
                        from trimq.broker.assemble_metrics import broker_metrics  # noqa: PLC0415 - only if they are on

                        metrics = broker_metrics(context, self.reactor.stats, self.health)
                        web.metrics = metrics.page
                        await nursery.start(metrics.probe.run)
                    if self._settle is not None:
                        self._settle()
                    # Ready only now: sockets, services and registration are running.
                    self.health.started()
                    task_status.started()
                    name = context.identity.broker_name
                    _log.info("broker_started", name=name, address=self.address, runs=NATIVE.status)
                    await self._stop.wait()
                    # Not ready before the first step of the stop, so that a load balancer sees it in time.
                    self.health.stopping()
                    await self._shut_down(context)
                    nursery.cancel_scope.cancel()
        finally:
            self.stopped.set()

    # start, in this order

    async def _open_web(self, stack: AsyncExitStack) -> "WebApp | None":
        """Serve health over HTTP before the store is opened, so that it can report the progress of a recovery."""
        if self._replica is not None:
            web_app = self._replica.web  # the process's, which outlives this role
            if web_app is not None:
                web_app.health, web_app.metrics = self.health, None
            return web_app
        app, self.web_endpoints = await open_web(self.configuration, self.health, stack)
        return app

    def _native_failed(self) -> None:
        """A call of the native extension has failed. It is off now: make all routes again, so that Python serves."""
        _log.error("native_extension_off", reason=NATIVE.reason)
        self.gate.reconfigure()

    async def _open_store(self, stack: AsyncExitStack) -> MessageStore:
        replica = self._replica
        parts = {} if replica is None else {"leadership": replica.leadership, "truncate_at": replica.truncate_at}
        store = make_store(
            self.configuration,
            disk=self.disk,
            clock=self.clock,
            sync_place=self._sync_place,
            accept_missing_log=self._accept_missing_log,
            **parts,
        )
        self.health.checks.append(lambda: store_reasons(store))
        self.health.checks.append(lambda: replication_reasons(store))
        self.health.notes.append(lambda: log_hold_notes(store))
        self.health.notes.append(lambda: tier_notes(store))
        self.health.notes.append(lambda: replication_notes(store))
        await stack.enter_async_context(opened(store))
        if replica is not None:
            replica.opened(store)
        return store

    def _register_checks(
        self, origins: Origins | None, stats: ReactorStats, users: Users | None, ports: ClientPorts
    ) -> None:
        """Register the features that see requests: those that may refuse one first, in the order of what they cost."""
        if origins is not None and origins.feature is not None:
            self.gate.register(origins.feature)
        if ports.admin_address:
            self._admin_port = AdminPort(ports.admin_address, stats)
            self.gate.register(self._admin_port.feature)
        if users is None:
            return
        self.gate.register(users.access.feature)
        auth = users.store
        auth.on_adopted = self.gate.changed
        config = self._section(UserLimitsConfig)
        if config.is_on:
            self.gate.register(UserLimits(config, self.clock, stats, users.access.user).feature)
        if RequestCode.HEART_BEAT not in self._section(AuthConfig).whitelisted:  # else no connection has a user
            self._request_users = RequestUsers(users.access, self.clock)
            self.gate.register(self._request_users.feature)

    def _bind(self) -> ClientPorts:
        ports = ClientPorts(self._section(BrokerConfig), self._section(NettyServerConfig), self.network)
        self.address, self.endpoint, self.listening = ports.address, ports.endpoint, ports.listening
        return ports

    async def _build(self, store: MessageStore, ports: ClientPorts, stack: AsyncExitStack) -> BrokerContext:
        broker = self._section(BrokerConfig)
        host, _, port = self.address.rpartition(":")
        packed = addresses.pack(host, int(port))
        if packed is None:
            raise StartError(f"brokerIP1={host} is neither an IP address nor a name of one")
        configuration, clock, disk = self.configuration, self.clock, self.disk
        services = make_services(configuration, store, disk, clock, packed)
        if self._section(ReplicationConfig).is_slave:
            self.replication.timers = SlaveTimers(store)
        await services.load(store, self.replication.timers)
        stats = ReactorStats()
        origins = Origins.of(self._section(ClientLimitsConfig), clock, stats)
        if self._replica is None:  # else the owner has: they outlive this role
            await self._files.open()
        inner = await self._files.inner_user()
        users = await self._files.users(inner)
        self._register_checks(origins, stats, users, ports)
        # Listen only after the state files were read: an unreadable file ends the start before a client can connect.
        ports.open()
        registration = await self._registration(services.topics, inner, stack)
        limits = ReactorLimits.of(self._section(NettyServerConfig))
        if store.syncs_each_put:
            # Each round costs one sync, so fewer and larger rounds are better: do not poll for the next requests.
            limits = replace(limits, spin_many=0.0)
        await self.replication.prove()
        tls = ServerTls.of(self._files.contexts, self._section(TlsConfig))
        self.reactor = Reactor(limits, clock, self.network.selector(), tls, origins, stats)
        consumers = ConsumerManager(configuration, clock)
        producers = ProducerManager(configuration, clock, OPEN if users is None else users.access)
        return BrokerContext(
            identity=BrokerIdentity(broker_name=broker.broker_name, address=self.address),
            configuration=configuration,
            config_file=ConfigFile(configuration, disk),
            clock=clock,
            disk=disk,
            store=store,
            topics=services.topics,
            topic_followers=TopicFollowers(
                services.topics,
                None if store.replication.is_slave else store.replication.leadership,
                store.replication.slave_timeout,
                lambda: store.replication.slave_ids,
            ),
            groups=services.groups,
            offsets=services.offsets,
            consumers=consumers,
            filters=services.filters,
            producers=producers,
            client_calls=ClientCalls(clock),
            locks=RebalanceLockManager(clock),
            long_polling=PullRequestHoldService(configuration, clock),
            schedule=services.schedule,
            timer=services.timer,
            transactions=services.transactions,
            transaction_checks=TransactionalMessageCheckService(
                configuration, store, services.transactions, producers, services.topics, clock, broker.broker_name
            ),
            registration=registration,
            routes=TopicRouteInfoManager(configuration, registration, clock),
            modes=services.modes,
            stats=services.stats,
            unread=UnreadPositions(consumers, services.offsets, store.look_units, clock),
            unique_ids=UniqueIdGenerator(packed[:-4]),
            store_host=packed,
            started_wall_ms=clock.wall_ms(),
            replicas=self.replicas,
            users=users,
            request_users=self._request_users,
        )

    async def _registration(
        self, topics: TopicConfigManager, inner: User | None, stack: AsyncExitStack
    ) -> BrokerOuterAPI:
        """The registration with the configured name servers, and with the embedded one if it is enabled.

        ``inner`` signs it.
        """
        broker = self._section(BrokerConfig)
        servers = list(broker.namesrv_addresses)
        self.name_servers = list(servers)
        if broker.runs_embedded_namesrv:
            from trimq.broker.embedded_namesrv import bind_namesrv  # noqa: PLC0415 - only if it is enabled

            self.namesrv, address = bind_namesrv(self.configuration, self.clock, self.network)
            servers.append(address)
            self.name_servers.append(f"{address} (in this process)")
        client = await stack.enter_async_context(
            RemotingClient(
                clock=self.clock,
                network=self.network,
                log=StructuredLog(),
                credentials=credentials_of(inner),
                tls=self._files.client_tls,
            )
        )
        if self.namesrv is not None:
            client.is_own(servers[-1])
        is_slave = self._section(ReplicationConfig).is_slave
        host, _, port = self.address.rpartition(":")
        ha_port = self.replication.port or int(port) + 1
        registration = BrokerOuterAPI(
            self.configuration,
            client,
            topics,
            self.clock,
            addresses=servers,
            address=self.address,
            ha_address=addresses.join(broker.broker_ip2 or host, ha_port),
        )
        if is_slave:
            self.replication.master = SlaveMaster(self.configuration, client)
            if self._replica is None:  # else the controllers say who is the master
                registration.on_master = self.replication.master.note
        self.health.checks.append(lambda: name_server_reasons(registration))
        client.on_close.append(lambda connection: registration.connection_lost(connection.address))
        return registration

    async def _start(self, context: BrokerContext, nursery: trio.Nursery) -> None:
        if self.namesrv is not None:
            await nursery.start(self.namesrv.run)
        # What puts messages by itself is the master's; a slave gets these messages with the log.
        is_slave = self._section(ReplicationConfig).is_slave
        for service in (
            context.topics,
            context.groups,
            context.offsets,
            context.consumers,
            context.filters,
            context.producers,
            context.client_calls,
            context.stats,
            context.long_polling,
            *(() if is_slave else (context.schedule, context.timer)),
            context.modes,
            *(() if is_slave else (context.transactions, context.transaction_checks)),
            context.unread,
        ):
            await nursery.start(service.run)
        nursery.start_soon(self._housekeep, context)
        if self._replica is None:
            nursery.start_soon(self._files.run)
        await self.replication.start(context, nursery)
        # System and adopted topics are on disk before a client can use them.
        await context.topics.persisted()
        context.topic_followers.start()
        # The broker registers last: a client that finds it in a route is served.
        await nursery.start(self.reactor.run)
        await nursery.start(context.registration.run)
        nursery.start_soon(addresses.warn_if_unreachable, self.address, self.endpoint, self.network)

    async def _housekeep(self, context: BrokerContext) -> None:
        while True:
            await self.clock.sleep(_HOUSEKEEPING_SECONDS)
            context.locks.remove_expired()

    # stop, in this order

    async def _shut_down(self, context: BrokerContext) -> None:
        """Within shutdownWaitTimeSeconds: unregister, end all requests, write the state files."""
        seconds = self._section(NettyServerConfig).shutdown_wait_time_seconds
        with trio.move_on_after(seconds, shield=True) as deadline:
            if self._changes_role:
                context.store.step_down()
            # First out of the routes, so that no further client connects while the reactor drains.
            with trio.move_on_after(_ROLE_CHANGE_SECONDS if self._changes_role else seconds):
                await context.registration.unregister_all()
            # Held pulls do not count as in flight, so the reactor would not wait for them: answer them first.
            context.long_polling.wake_all()
            context.long_polling.serve_woken()
            context.topic_followers.stop()
            await self.reactor.shutdown(max(1.0, seconds - 5))  # the rest is for the state files
            is_slave = self._section(ReplicationConfig).is_slave
            if not is_slave:  # they have not run, and would replace what the slave has taken over
                await context.transactions.stop()
            # After the last request, so that the files hold every offset and topic that was acknowledged.
            if not is_slave:
                await context.timer.stop()
            for service in (
                context.topics,
                context.groups,
                context.offsets,
                context.modes,
                context.filters,
                context.schedule,  # the last: it waits for a delivery and a flush, which a bad disk makes long
            ):
                await service.persist()
            # What the services have written last too: a slave that becomes the master must lack nothing.
            left = 0.0 if self._changes_role else deadline.deadline - trio.current_time() - _LAST_SECOND
            if lacking := await context.store.finish_replication(max(0.0, min(_SLAVES_SECONDS, left))):
                _log.warning("slaves_lack_messages", slaves=lacking, log_end=context.store.appended_offset)
            if self.namesrv is not None:
                self.namesrv.shutdown()
                await self.namesrv.stopped.wait()
        if deadline.cancelled_caught:
            _log.warning("shutdown_incomplete", seconds=seconds)

    def _section(self, kind: type[_T]) -> _T:
        return self.configuration.section(kind)


async def open_web(
    configuration: Configuration, health: Health, stack: AsyncExitStack
) -> "tuple[WebApp | None, list[tuple[str, int]]]":
    """Serve health over HTTP, if that is configured. Returns the application and its addresses. Raises StartError."""
    config = configuration.section(WebConfig)
    if not config.addresses:
        return None, []
    if missing := config.missing():
        raise StartError(missing)
    from trimq.remoting.http import web  # noqa: PLC0415 - only if it is configured

    try:
        sockets = web.bind(config)
    except OSError as error:
        raise StartError(f"{error.strerror or error}: set healthPort or metricsPromExporterPort") from error
    endpoints = [sock.getsockname()[:2] for sock in sockets]
    app = web.WebApp(health)
    await stack.enter_async_context(web.served(app, sockets))
    return app, endpoints
