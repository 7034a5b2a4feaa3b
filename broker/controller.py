"""BrokerController: the composition root. Builds the broker, starts its services, serves, and stops in order.

Start: lock and recover the store, bind the sockets, read the state files, listen, start the services, serve, register
with the name servers. Stop, within shutdownWaitTimeSeconds: unregister, answer the held pulls, finish the requests in
flight, write the state files, close the store.
"""

import gc
import socket
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import structlog
import trio

from trimq.broker import addresses
from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.context import BrokerContext
from trimq.broker.health import log_hold_notes, name_server_reasons, native_notes, store_reasons, timer_notes
from trimq.broker.identity import BrokerIdentity
from trimq.broker.processor_table import register_processors
from trimq.broker.services.client_calls import ClientCalls
from trimq.broker.services.config_file import ConfigFile
from trimq.broker.services.consumer_filters import ConsumerFilterManager
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.long_polling import PullRequestHoldService
from trimq.broker.services.message_request_mode import MessageRequestModeManager
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.pending_timers import TIMED_MESSAGES, PendingTimers
from trimq.broker.services.producers import ProducerManager
from trimq.broker.services.queued_messages import QueuedMessages
from trimq.broker.services.rebalance_lock import RebalanceLockManager
from trimq.broker.services.registration import BrokerOuterAPI
from trimq.broker.services.schedule import ScheduleMessageService
from trimq.broker.services.state_file import StateFileError
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.timer import TimerMessageService
from trimq.broker.services.topic_routes import TopicRouteInfoManager
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.services.transaction.check import TransactionalMessageCheckService
from trimq.broker.services.transaction.held_halves import HeldHalves
from trimq.broker.services.transaction.read_back import read_back
from trimq.broker.services.transaction.service import TransactionalMessageService
from trimq.broker.services.unread import UnreadPositions
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.message_store import MappedFile, MessageStore, StoreInUseError, StoreLoadError
from trimq.protocol.body import TopicConfig
from trimq.protocol.codes import RequestCode
from trimq.protocol.message_id import UniqueIdGenerator
from trimq.protocol.native import NATIVE
from trimq.protocol.topic_rules import SCHEDULE_TOPIC, TIMER_TOPIC, TRANS_HALF_TOPIC
from trimq.remoting.client.remoting_client import RemotingClient
from trimq.remoting.config.command_line import stop_on_signal
from trimq.remoting.config.configuration import ConfigError, Configuration, NettyServerConfig
from trimq.remoting.http.health import Health
from trimq.remoting.http.web_config import WebConfig
from trimq.remoting.runtime.clock import Clock, SystemClock
from trimq.remoting.runtime.log_setup import StructuredLog
from trimq.remoting.server.accept import bind, open_port
from trimq.remoting.server.gate import Gate
from trimq.remoting.server.reactor import HandlerTable, Reactor, ReactorLimits

if TYPE_CHECKING:
    from trimq.namesrv.controller import NamesrvController
    from trimq.remoting.http.web import WebApp

_log = structlog.get_logger("broker")

_T = TypeVar("_T")

_NOT_ON_FAST_PORT: Final = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
_HOUSEKEEPING_SECONDS: Final = 30.0
_QUEUES_AT_ONCE: Final = 64
"""A topic with more queues than this does not get them when it is created, but each one with its first message."""
_GC_THRESHOLDS: Final = (50_000, 25, 50)
"""The hot path makes no reference cycles: collections are for the rest of the program, and each one stops the loop."""


class _Loads(Protocol):
    async def load(self) -> None: ...


class StartError(Exception):
    """The broker cannot start. The text gives the reason and a remedy; the command prints it."""


class BrokerController:
    """One broker (RocketMQ's BrokerController).

    Valid after the start: ``address`` is the advertised address, ``endpoint`` one that this machine can connect to,
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
        accept_missing_log: bool = False,
    ) -> None:
        """``accept_missing_log``: see MessageStore."""
        self.configuration = configuration
        self._accept_missing_log = accept_missing_log
        self.clock: Clock = clock or SystemClock()
        self.disk: Disk = disk or RealDisk()
        self.address = ""
        self.endpoint: tuple[str, int] = ("", 0)
        self.listening: list[str] = []
        self.name_servers: list[str] = []
        self.health = Health()
        self.health.notes.append(lambda: native_notes(NATIVE))
        self.gate = Gate()
        self.web_endpoints: list[tuple[str, int]] = []
        self.stopped = trio.Event()
        self.namesrv: NamesrvController | None = None
        self.context: BrokerContext
        self.reactor: Reactor
        self._stop = trio.Event()

    # for the owner

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

    def shutdown(self) -> None:
        """Request an orderly stop and return immediately. ``stopped`` is set when it has ended."""
        self._stop.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start, serve until ``shutdown``, stop. Runs once. Raises StartError."""
        try:
            # The stack closes in reverse order, after the nursery: the store is closed once no task uses it, and
            # health answers until the store is closed.
            async with AsyncExitStack() as stack:
                web = await self._open_web(stack)
                store = await self._open_store(stack)
                sockets = self._bind(stack)
                context = self.context = await self._build(store, sockets, stack)
                self._serve_with(context, sockets)
                stack.enter_context(NATIVE.heard_by(self._native_failed))
                async with trio.open_nursery() as nursery:
                    await self._start(context, nursery)
                    if web is not None and self._section(WebConfig).serves_metrics:
                        await self._serve_metrics(web, context, nursery)
                    _settle_memory()
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
        config = self._section(WebConfig)
        if not config.addresses:
            return None
        if missing := config.missing():
            raise StartError(missing)
        from trimq.remoting.http import web  # noqa: PLC0415 - only if it is configured

        try:
            sockets = web.bind(config)
        except OSError as error:
            raise StartError(f"{error.strerror or error}: set healthPort or metricsPromExporterPort") from error
        self.web_endpoints = [sock.getsockname()[:2] for sock in sockets]
        app = web.WebApp(self.health)
        await stack.enter_async_context(web.served(app, sockets))
        return app

    def _native_failed(self) -> None:
        """A call of the native extension has failed. It is off now: make all routes again, so that Python serves."""
        _log.error("native_extension_off", reason=NATIVE.reason)
        self.gate.reconfigure()

    async def _serve_metrics(self, app: "WebApp", context: BrokerContext, nursery: trio.Nursery) -> None:
        from trimq.broker.metrics.clients import ClientMetrics  # noqa: PLC0415 - only if metrics are on
        from trimq.broker.metrics.features import FeatureMetrics  # noqa: PLC0415 - as above
        from trimq.broker.metrics.page import BrokerMetrics  # noqa: PLC0415 - as above
        from trimq.broker.metrics.series import SeriesMetrics  # noqa: PLC0415 - as above
        from trimq.broker.metrics.services import ServiceMetrics  # noqa: PLC0415 - as above
        from trimq.broker.metrics.transactions import TransactionMetrics  # noqa: PLC0415 - as above

        metrics = BrokerMetrics(
            configuration=context.configuration,
            store=context.store,
            services=ServiceMetrics(
                topics=context.topics,
                groups=context.groups,
                offsets=context.offsets,
                long_polling=context.long_polling,
                registration=context.registration,
                stats=context.stats,
            ),
            features=FeatureMetrics(
                filters=context.filters,
                client_calls=context.client_calls,
                transactions=TransactionMetrics(
                    transactions=context.transactions, checks=context.transaction_checks, clock=context.clock
                ),
                timer=context.timer,
            ),
            series=SeriesMetrics(offsets=context.offsets, stats=context.stats, store=context.store),
            clients=ClientMetrics(producers=context.producers, consumers=context.consumers),
            reactor=self.reactor.stats,
            health=self.health,
        )
        app.metrics = metrics.page
        await nursery.start(metrics.probe.run)

    async def _open_store(self, stack: AsyncExitStack) -> MessageStore:
        store = MessageStore(
            self._section(MessageStoreConfig),
            disk=self.disk,
            clock=self.clock,
            accept_missing_log=self._accept_missing_log,
        )
        self.health.checks.append(lambda: store_reasons(store))
        self.health.notes.append(lambda: log_hold_notes(store))
        try:
            await stack.enter_async_context(store.opened())
        except (StoreInUseError, StoreLoadError) as error:
            raise StartError(str(error)) from error
        except OSError as error:
            raise StartError(f"the store {store.root} cannot be opened: {error}") from error
        return store

    def _bind(self, stack: AsyncExitStack) -> list[socket.socket]:
        """Bind the sockets for clients: the main port, and the VIP port, which serves no pulls. Neither listens yet."""
        broker, network = self._section(BrokerConfig), self._section(NettyServerConfig)
        sockets: list[socket.socket] = []
        try:
            for port in (broker.listen_port, broker.fast_port):
                # Port 0 means any free port for the main port, and off for the VIP port.
                if port or not sockets:
                    sockets.append(stack.enter_context(bind(network.bind_address, port, network)))
        except OSError as error:
            raise _port_taken(error) from error
        port = sockets[0].getsockname()[1]
        host = addresses.advertised_address(broker.broker_ip1, network.bind_address)
        self.address = addresses.join(host, port)
        self.endpoint = (addresses.LOOPBACK if network.bind_address in addresses.WILDCARDS else host, port)
        self.listening = [
            f"{network.bind_address}:{found.getsockname()[1]}" + (" (without pulls)" if n else "")
            for n, found in enumerate(sockets)
        ]
        return sockets

    def _open_ports(self, sockets: list[socket.socket]) -> None:
        """Listen: clients can connect from here on."""
        try:
            for sock in sockets:
                open_port(sock, self._section(NettyServerConfig))
        except OSError as error:
            raise _port_taken(error) from error

    async def _build(self, store: MessageStore, sockets: list[socket.socket], stack: AsyncExitStack) -> BrokerContext:
        broker = self._section(BrokerConfig)
        host, _, port = self.address.rpartition(":")
        packed = addresses.pack(host, int(port))
        if packed is None:
            raise StartError(f"brokerIP1={host} is neither an IP address nor a name of one")
        configuration, clock, disk = self.configuration, self.clock, self.disk
        topics = TopicConfigManager(configuration, disk, clock)
        groups = SubscriptionGroupManager(configuration, disk, clock)
        offsets = ConsumerOffsetManager(configuration, disk, clock)
        schedule = ScheduleMessageService(configuration, store, disk, clock, packed)
        stats = BrokerStats(clock, broker.broker_cluster_name)
        timer = TimerMessageService(configuration, store, disk, clock, stats, packed, topics.queues_of)
        modes = MessageRequestModeManager(configuration, disk, clock)
        filters = ConsumerFilterManager(configuration, disk, clock)
        transactions = TransactionalMessageService(
            configuration=configuration, store=store, offsets=offsets, disk=disk, clock=clock, store_host=packed
        )
        # Before they are read: that may take longer than the time until the first cleaning of the log.
        store.hold_log(HeldHalves(store, transactions.halves))
        await self._load(store, topics, (topics, groups, offsets, schedule, modes, filters, transactions))
        await read_back(transactions, store, offsets)
        # Listen only after the state files were read: an unreadable file ends the start before a client can connect.
        self._open_ports(sockets)
        registration = await self._registration(topics, stack)
        limits = ReactorLimits.of(self._section(NettyServerConfig))
        if store.syncs_each_put:
            # Each round costs one sync, so fewer and larger rounds are better: do not poll for the next requests.
            limits = replace(limits, spin_many=0.0)
        self.reactor = Reactor(limits, clock)
        consumers = ConsumerManager(configuration, clock)
        consumers.listeners.append(filters.group_changed)
        producers = ProducerManager(configuration, clock)
        return BrokerContext(
            identity=BrokerIdentity(broker_name=broker.broker_name, address=self.address),
            configuration=configuration,
            config_file=ConfigFile(configuration, disk),
            clock=clock,
            disk=disk,
            store=store,
            topics=topics,
            groups=groups,
            offsets=offsets,
            consumers=consumers,
            filters=filters,
            producers=producers,
            client_calls=ClientCalls(clock),
            locks=RebalanceLockManager(clock),
            long_polling=PullRequestHoldService(configuration, clock),
            schedule=schedule,
            timer=timer,
            transactions=transactions,
            transaction_checks=TransactionalMessageCheckService(
                configuration, store, transactions, producers, topics, clock, broker.broker_name
            ),
            registration=registration,
            routes=TopicRouteInfoManager(configuration, registration, clock),
            modes=modes,
            stats=stats,
            unread=UnreadPositions(consumers, offsets, store.look_units, clock),
            unique_ids=UniqueIdGenerator(packed[:-4]),
            store_host=packed,
            started_wall_ms=clock.wall_ms(),
        )

    async def _registration(self, topics: TopicConfigManager, stack: AsyncExitStack) -> BrokerOuterAPI:
        """The registration with the configured name servers, and with the embedded one if it is enabled."""
        broker = self._section(BrokerConfig)
        servers = list(broker.namesrv_addresses)
        self.name_servers = list(servers)
        if broker.runs_embedded_namesrv:
            self.namesrv, address = self._embedded_namesrv()
            servers.append(address)
            self.name_servers.append(f"{address} (in this process)")
        client = await stack.enter_async_context(RemotingClient(clock=self.clock, log=StructuredLog()))
        host, _, port = self.address.rpartition(":")
        ha_port = self._section(MessageStoreConfig).ha_listen_port or int(port) + 1
        registration = BrokerOuterAPI(
            self.configuration,
            client,
            topics,
            self.clock,
            addresses=servers,
            address=self.address,
            ha_address=addresses.join(broker.broker_ip2 or host, ha_port),
        )
        self.health.checks.append(lambda: name_server_reasons(registration))
        client.on_close.append(lambda connection: registration.connection_lost(connection.address))
        return registration

    def _embedded_namesrv(self) -> "tuple[NamesrvController, str]":
        from trimq.namesrv import controller as namesrv  # noqa: PLC0415 - only if it is enabled
        from trimq.namesrv.config import load_namesrv  # noqa: PLC0415 - as above

        broker, network = self._section(BrokerConfig), self._section(NettyServerConfig)
        directory = self._section(MessageStoreConfig).config_path
        settings = {
            "listenPort": str(broker.embedded_namesrv_port),
            "namedListenPorts": broker.embedded_namesrv_named_listen_ports,
            "bindAddress": network.bind_address,
            "kvConfigPath": str(directory / "kvConfig.json"),
            "configStorePath": str(directory / "namesrv.properties"),
        }
        try:
            found = namesrv.NamesrvController(
                load_namesrv(flags={key: (value, "embedded") for key, value in settings.items()}), self.clock
            )
            port = found.bind().getsockname()[1]
        except (namesrv.StartError, ConfigError) as error:
            raise StartError(
                f"the name server in this process: {error}. If one runs at that address already, pass it with -n"
            ) from error
        return found, addresses.join(self.endpoint[0], port)

    async def _load(self, store: MessageStore, topics: TopicConfigManager, services: Iterable[_Loads]) -> None:
        """Read the state files, then restore the topics of queues that topics.json does not have."""
        try:
            for service in services:
                await service.load()
        except StateFileError as error:
            raise StartError(f"a state file cannot be read: {error}") from error
        topics.adopt({name: max(ids) + 1 for name, ids in store.topics().items() if ids})

    def _serve_with(self, context: BrokerContext, sockets: list[socket.socket]) -> None:
        """Connect store, services, processors and reactor. Nothing is served before the reactor runs."""
        table = HandlerTable(self.gate)
        pulls = register_processors(table, context, self.reactor.stats)
        holds = context.long_polling
        holds.again = pulls.again
        holds.in_round = lambda: self.reactor.in_round
        holds.filters.look = context.store.look_properties
        # The order at a round's end matters: under SYNC_FLUSH the store's sync makes messages readable and wakes the
        # pulls that wait for them, then the woken pulls are served in the same round.
        context.store.commit_rounds(self.reactor.at_round_end, lambda: self.reactor.in_round)
        self.reactor.at_round_end.append(holds.serve_woken)
        # A new feature has to see held pulls too: a change wakes them, and each is compared with the gate's terms.
        self.gate.listeners.append(holds.wake_all)
        self.reactor.on_idle.append(pulls.prepare)
        context.store.on_overdue.append(self._close_readers)
        context.store.keep_unread(context.unread.oldest)
        context.store.hold_log(QueuedMessages("delayed messages", context.store, context.schedule.positions))
        if context.store.timers is not None:
            context.store.hold_log(PendingTimers(context.store.timers))
            context.store.hold_log(QueuedMessages(TIMED_MESSAGES, context.store, context.timer.positions))
        context.store.hear_awaited(holds.awaited, holds.notify_arriving)
        context.store.add_topic_listener(SCHEDULE_TOPIC, context.schedule.message_arriving)
        context.store.add_topic_listener(TRANS_HALF_TOPIC, context.transactions.half_arriving)
        context.store.add_topic_listener(TIMER_TOPIC, context.timer.message_arriving)
        self.configuration.listeners.append(lambda _: context.store.set_config(self._section(MessageStoreConfig)))
        # Only for topics that are created from here on: those of the state files were loaded before.
        context.topics.delete_listeners.append(context.timer.metrics.remove)
        self.health.notes.append(lambda: timer_notes(context.timer))
        context.topics.listeners.append(lambda configs: _create_queues(context.store, configs))
        self.reactor.add_listener(sockets[0], table)
        for sock in sockets[1:]:
            self.reactor.add_listener(sock, table.without(*_NOT_ON_FAST_PORT))

    async def _start(self, context: BrokerContext, nursery: trio.Nursery) -> None:
        if self.namesrv is not None:
            await nursery.start(self.namesrv.run)
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
            context.schedule,
            context.timer,
            context.modes,
            context.transactions,
            context.transaction_checks,
            context.unread,
        ):
            await nursery.start(service.run)
        nursery.start_soon(self._housekeep, context)
        # System and adopted topics are on disk before a client can use them.
        await context.topics.persisted()
        # The broker registers last: a client that finds it in a route is served.
        await nursery.start(self.reactor.run)
        await nursery.start(context.registration.run)
        nursery.start_soon(addresses.warn_if_unreachable, self.address, self.endpoint)

    async def _housekeep(self, context: BrokerContext) -> None:
        while True:
            await self.clock.sleep(_HOUSEKEEPING_SECONDS)
            context.locks.remove_expired()

    def _close_readers(self, file: MappedFile) -> None:
        """Close connections whose unsent replies still hold a deleted file, after destroyMapedFileIntervalForcibly."""
        for connection in list(self.reactor.connections.values()):
            if any(file.is_released_by(release) for release in connection.out.releases()):
                seconds = self._section(MessageStoreConfig).destroy_maped_file_interval_forcibly / 1000
                connection.close(f"it still reads a commit log file that was deleted more than {seconds:g} s ago")

    # stop, in this order

    async def _shut_down(self, context: BrokerContext) -> None:
        """Within shutdownWaitTimeSeconds: unregister, end all requests, write the state files."""
        seconds = self._section(NettyServerConfig).shutdown_wait_time_seconds
        with trio.move_on_after(seconds, shield=True) as deadline:
            # First out of the routes, so that no further client connects while the reactor drains.
            await context.registration.unregister_all()
            # Held pulls do not count as in flight, so the reactor would not wait for them: answer them first.
            context.long_polling.wake_all()
            context.long_polling.serve_woken()
            await self.reactor.shutdown(max(1.0, seconds - 5))  # the rest is for the state files
            await context.transactions.stop()
            # After the last request, so that the files hold every offset and topic that was acknowledged.
            await context.timer.stop()
            for service in (
                context.topics,
                context.groups,
                context.offsets,
                context.schedule,
                context.modes,
                context.filters,
            ):
                await service.persist()
            if self.namesrv is not None:
                self.namesrv.shutdown()
                await self.namesrv.stopped.wait()
        if deadline.cancelled_caught:
            _log.warning("shutdown_incomplete", seconds=seconds)

    def _section(self, kind: type[_T]) -> _T:
        return self.configuration.section(kind)


def _port_taken(error: OSError) -> StartError:
    return StartError(f"{error.strerror or error}: stop the process that listens there, or set listenPort")


def _create_queues(store: MessageStore, configs: Iterable[TopicConfig]) -> None:
    for config in configs:
        if config.write_queue_nums <= _QUEUES_AT_ONCE:
            store.create_queues(config.topic_name, config.write_queue_nums)


def _settle_memory() -> None:
    """Freeze the objects of the start: they live as long as the process, so the collector need not visit them again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
