"""NamesrvController: the composition root of the name server, a service that runs in a nursery of its caller."""

import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from trimq.namesrv.config import NamesrvConfig, named_ports
from trimq.namesrv.kv_config import NAMESPACE_ORDER_TOPIC_CONFIG, KVConfigManager
from trimq.namesrv.processor import ClientRequestProcessor, DefaultRequestProcessor
from trimq.namesrv.route_info import RouteInfoManager
from trimq.namesrv.start_error import StartError
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.auth.followed_config import auth_settings_of
from trimq.remoting.auth.followed_users import FollowedUsers, follow_users
from trimq.remoting.auth.users import AccessError
from trimq.remoting.config.client_limits import ClientLimitsConfig, limits_of
from trimq.remoting.config.configuration import Configuration, NettyServerConfig
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.http.access_health import access_notes
from trimq.remoting.http.health import Health
from trimq.remoting.http.tls_health import certificate_notes
from trimq.remoting.http.web_config import WebConfig
from trimq.remoting.network import Network, SystemNetwork
from trimq.remoting.runtime.clock import Clock, SystemClock
from trimq.remoting.server.gate import Gate
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.server.reactor import Connection, HandlerTable, Origins, Reactor, ReactorLimits, ServerTls
from trimq.remoting.tls.config import TlsConfig, settings_of
from trimq.remoting.tls.contexts import TlsContexts
from trimq.remoting.tls.key_files import KeyFileError

if TYPE_CHECKING:
    from trimq.controller.server import ControllerManager

__all__ = ["NamesrvController", "StartError"]

_log = structlog.get_logger("namesrv")


class NamesrvController:
    """The name server's parts (RocketMQ's NamesrvController).

    ``routes`` and ``kv_config`` are its state. ``address`` is its address once ``run`` has started, ``named_endpoints``
    are those of the named listeners, and ``web_endpoints`` those of ``health`` and metrics. ``embedded`` is the
    controller in this process, if there is one. ``stopped`` is set at the end of ``run``. Features that check requests
    are registered with ``gate``.
    """

    def __init__(
        self, configuration: Configuration, clock: Clock | None = None, network: Network | None = None
    ) -> None:
        self._configuration = configuration
        self._clock = clock or SystemClock()
        self._network: Network = network or SystemNetwork()
        self._stop = trio.Event()
        self.stopped = trio.Event()
        self._tls: TlsContexts
        self.gate = Gate()
        self.users: FollowedUsers | None = None
        """While authentication is on."""
        self._sock: socket.socket | None = None
        self._named_sockets: dict[str, socket.socket] = {}
        self._web_sockets: list[socket.socket] = []
        self.health = Health()
        self.web_endpoints: list[tuple[str, int]] = []
        self.named_endpoints: dict[str, tuple[str, int]] = {}
        self.address: tuple[str, int] | None = None
        self.embedded: ControllerManager | None = None
        self.kv_config = KVConfigManager(Path(self._config().kv_config_path))
        self.routes = RouteInfoManager(self._config, self._clock, self._order_topic_conf)

    def _config(self) -> NamesrvConfig:
        return self._configuration.section(NamesrvConfig)

    def _order_topic_conf(self, topic: str) -> str | None:
        return self.kv_config.get(NAMESPACE_ORDER_TOPIC_CONFIG, topic)

    def bind(self) -> socket.socket:
        """Load the KV file and bind the addresses, before anything runs. ``run`` calls this if the caller has not.

        Raises StartError if the file cannot be parsed or an address cannot be bound.
        """
        try:
            return self._bind()
        except BaseException as error:
            for bound in [self._sock, *self._named_sockets.values(), *self._web_sockets]:
                if bound is not None:
                    bound.close()
            if isinstance(error, (ConfigError, AccessError)):
                raise StartError(str(error)) from error
            if isinstance(error, OSError):
                raise StartError(str(error.strerror)) from error
            raise

    def _bind(self) -> socket.socket:
        config = self._configuration.section(NettyServerConfig)
        self.kv_config.load()
        self._read_certificate()
        self._read_users()
        self._sock = self._listen(config.bind_address, self._config().listen_port, config)
        for name, port in named_ports(self._config().named_listen_ports).items():
            self._named_sockets[name] = sock = self._listen(config.bind_address, int(port), config)
            self.named_endpoints[name] = sock.getsockname()[:2]
        self._bind_web()
        self._bind_embedded(config.bind_address)
        return self._sock

    def _read_certificate(self) -> None:
        config = self._configuration.section(TlsConfig)
        try:
            contexts = self._tls = TlsContexts(config, _log)
        except KeyFileError as error:
            raise StartError(f"tls.server.{error.part}: {error}") from error
        days = config.tls_certificate_warning_days
        self.health.notes.append(lambda: certificate_notes(contexts, self._clock, days))

    def _read_users(self) -> None:
        users = self.users = follow_users(self._configuration, self._clock)
        self.health.notes.append(lambda: access_notes(self._configuration.section(AuthConfig), users))

    def _listen(self, address: str, port: int, config: NettyServerConfig) -> socket.socket:
        sock = self._network.bind(address, port, config)
        self._network.open_port(sock, config)
        return sock

    def _bind_embedded(self, bind_address: str) -> None:
        if self._config().enable_controller_in_namesrv:
            from trimq.namesrv.embedded_controller import bind_controller  # noqa: PLC0415 - only if it is configured

            file = self._config().controller_config_file
            found = self._configuration
            limits = {key: (value, found.source(key)) for key, value in limits_of(found).items()}
            shared = settings_of(found) | auth_settings_of(found) | limits
            self.embedded = bind_controller(file, bind_address, shared, self._clock, self._network)

    async def _run_embedded(self, nursery: trio.Nursery) -> None:
        if (embedded := self.embedded) is None:
            return
        await nursery.start(embedded.run)
        self.health.checks.append(lambda: embedded.health.readiness().reasons)

    async def _stop_embedded(self) -> None:
        if self.embedded is not None:
            self.embedded.shutdown()
            await self.embedded.stopped.wait()

    def _bind_web(self) -> None:
        config = self._configuration.section(WebConfig)
        if config.addresses:
            if missing := config.missing():
                raise StartError(missing)
            from trimq.remoting.http import web  # noqa: PLC0415 - only if it is configured

            self._web_sockets = web.bind(config)
            self.web_endpoints = [sock.getsockname()[:2] for sock in self._web_sockets]

    async def _serve_web(self, reactor: Reactor, stack: AsyncExitStack, nursery: trio.Nursery) -> None:
        if not self._web_sockets:
            return
        from trimq.remoting.http import web  # noqa: PLC0415 - as above

        app = web.WebApp(self.health)
        if self._configuration.section(WebConfig).serves_metrics:
            from trimq.namesrv.metrics import NamesrvMetrics  # noqa: PLC0415 - only if metrics are on

            metrics = NamesrvMetrics(self.routes, reactor.stats, self.health, self.users)
            app.metrics = metrics.page
            await nursery.start(metrics.probe.run)
        await stack.enter_async_context(web.served(app, self._web_sockets))

    async def run(self, task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``shutdown``; reports the bound address as started. Runs once. Raises StartError as ``bind``."""
        config = self._configuration.section(NettyServerConfig)
        sock = self._sock or self.bind()
        address = self.address = sock.getsockname()[:2]
        tls = ServerTls.of(self._tls, self._configuration.section(TlsConfig))
        origins = Origins.of(self._configuration.section(ClientLimitsConfig), self._clock, ReactorStats())
        reactor = Reactor(ReactorLimits.of(config), self._clock, self._network.selector(), tls, origins)
        # In the order of what they cost.
        if origins is not None and origins.feature is not None:
            self.gate.register(origins.feature)
        if self.users is not None:
            self.gate.register(self.users.users.access.feature)
        reactor.add_listener(sock, self._handlers())
        for name, named in self._named_sockets.items():
            reactor.add_listener(named, self._handlers(name))
        self._configuration.listeners.append(self._config_changed)
        try:
            async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
                await self._serve_web(reactor, stack, nursery)
                await nursery.start(reactor.run)
                await self._run_embedded(nursery)
                nursery.start_soon(self._scan_not_active_brokers)
                nursery.start_soon(self._tls.run, self._clock)
                if self.users is not None:
                    nursery.start_soon(self.users.run)
                self.health.started()
                _log.info("namesrv_started", address=f"{address[0]}:{address[1]}")
                task_status.started(address)
                await self._stop.wait()
                # Not ready before the reactor stops: a load balancer must not send requests to a closing port.
                self.health.stopping()
                await self._stop_embedded()
                await reactor.shutdown(config.shutdown_wait_time_seconds)
                nursery.cancel_scope.cancel()
        finally:
            self._configuration.listeners.remove(self._config_changed)
            self.stopped.set()
            _log.info("namesrv_stopped")

    def _config_changed(self, _keys: frozenset[str]) -> None:
        self.routes.forget_routes()

    def shutdown(self) -> None:
        """Stop: answer the requests in flight, within shutdownWaitTimeSeconds, then close all connections."""
        self._stop.set()

    def _handlers(self, listener: str = "") -> HandlerTable:
        table = HandlerTable(self.gate)
        ClientRequestProcessor(self.routes, self._config, self._clock, listener).register(table)
        DefaultRequestProcessor(self.routes, self.kv_config, self._configuration, listener).register(table)
        return table

    async def _scan_not_active_brokers(self) -> None:
        while True:
            await self._clock.sleep(self._config().scan_not_active_broker_interval / 1000)
            for info in self.routes.scan_not_active_brokers():
                if isinstance(info.connection, Connection):
                    info.connection.close(f"broker {info.broker_name} was silent for too long")
