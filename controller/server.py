"""ControllerManager: the composition root of a controller, a service that runs in a nursery of its caller."""

import socket
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from trimq.controller.config import ControllerConfig, ControllerStore, endpoints
from trimq.controller.group_state import GroupState, UnreadableError, place_of
from trimq.controller.kv import Kv, KvError
from trimq.controller.lost_masters import LostMasters
from trimq.controller.processor import ControllerRequestProcessor
from trimq.controller.replicas_info import ReplicasInfoManager
from trimq.protocol.body import SyncStateSet, encode_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.headers.controller import NotifyBrokerRoleChangedRequestHeader
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.auth.followed_users import FollowedUsers, follow_users
from trimq.remoting.auth.users import AccessError, credentials_of, inner_user_of
from trimq.remoting.client.credentials import Credentials
from trimq.remoting.client.remoting_client import RemotingClient
from trimq.remoting.config.client_limits import ClientLimitsConfig
from trimq.remoting.config.configuration import Configuration, NettyServerConfig
from trimq.remoting.errors import RemotingTransportError
from trimq.remoting.http.access_health import access_notes
from trimq.remoting.http.health import Health, Reason
from trimq.remoting.http.tls_health import certificate_notes
from trimq.remoting.http.web_config import WebConfig
from trimq.remoting.network import Network, SystemNetwork
from trimq.remoting.runtime.clock import Clock, SystemClock
from trimq.remoting.runtime.log_setup import StructuredLog
from trimq.remoting.server.gate import Gate
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.server.reactor import HandlerTable, Origins, Reactor, ReactorLimits, ServerTls
from trimq.remoting.tls.config import TlsConfig
from trimq.remoting.tls.contexts import TlsContexts, client_of
from trimq.remoting.tls.key_files import KeyFileError

_log = structlog.get_logger("controller")

_NOTIFY_SECONDS: Final = 3.0
_ANSWER_SECONDS: Final = 0.4
_AGAIN: Final = 0.5
_TRIES: Final = 5
"""Elections after one death while the store does not answer, as when etcd elects too; the scan goes on."""
_MOST_WAITING: Final = 1000
_FIRST_HEARTBEATS_SECONDS: Final = 1.5
"""After a start: in this time each broker that is alive has sent a heartbeat, by default one a second."""
STORE_SILENT: Final = "controller_store_silent"


class StartError(Exception):
    """The controller cannot start; the text says why, for the user at the terminal."""


class ControllerManager:
    """A controller's parts (RocketMQ's ControllerManager).

    ``address`` is its address once ``bind`` was called, ``web_endpoints`` are those of ``health`` and metrics.
    ``stopped`` is set at the end of ``run``.
    """

    def __init__(
        self,
        configuration: Configuration,
        clock: Clock | None = None,
        network: Network | None = None,
        kv: Kv | None = None,
    ) -> None:
        """``kv``: where decisions are kept, in place of the configured store."""
        self._configuration = configuration
        self._clock = clock or SystemClock()
        self._network: Network = network or SystemNetwork()
        self._kv = kv
        self._stop = trio.Event()
        self.stopped = trio.Event()
        self.health = Health()
        self.health.checks.append(self._reasons)
        self.address: tuple[str, int] | None = None
        self.web_endpoints: list[tuple[str, int]] = []
        self.replicas: ReplicasInfoManager
        self.lost: LostMasters
        self._tls: TlsContexts
        self.users: FollowedUsers | None = None
        """While authentication is on."""
        self._sock: socket.socket | None = None
        self._web_sockets: list[socket.socket] = []
        self._failure = "the store was not read yet"
        """Why the store did not answer last; empty while it does."""
        self._unsure: dict[str, int] = {}
        """Names of which an election's outcome is not known, and their epoch before it."""
        self._failed = False
        """Whether that was logged."""
        self._headless_send, self._headless = trio.open_memory_channel[str](_MOST_WAITING)
        self._elected_send, self._elected = trio.open_memory_channel[GroupState](_MOST_WAITING)

    def _config(self) -> ControllerConfig:
        return self._configuration.section(ControllerConfig)

    def bind(self) -> socket.socket:
        """Bind the addresses, and open the database with controllerStore=sqlite, before anything runs.

        Raises StartError.
        """
        try:
            return self._bind()
        except BaseException:
            for sock in [self._sock, *self._web_sockets]:
                if sock is not None:
                    sock.close()
            raise

    def _bind(self) -> socket.socket:
        config = self._configuration.section(NettyServerConfig)
        self._read_certificate()
        self._read_users()
        try:
            self._sock = self._network.bind(config.bind_address, self._config().listen_port, config)
            web_config = self._configuration.section(WebConfig)
            if web_config.addresses:
                if missing := web_config.missing():
                    raise StartError(missing)
                from trimq.remoting.http import web  # noqa: PLC0415 - only if it is configured

                self._web_sockets = web.bind(web_config)
                self.web_endpoints = [sock.getsockname()[:2] for sock in self._web_sockets]
        except OSError as error:
            raise StartError(str(error.strerror)) from error
        self.address = self._sock.getsockname()[:2]
        if self._kv is None and self._config().controller_store is ControllerStore.SQLITE:
            from trimq.controller.sqlite_kv import open_now  # noqa: PLC0415 - only the store that is used

            try:
                self._kv = open_now(Path(self._config().controller_store_path), self._clock)
            except KvError as error:
                raise StartError(f"{error}: set controllerStorePath") from error
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
        try:
            users = self.users = follow_users(self._configuration, self._clock)
        except AccessError as error:
            raise StartError(str(error)) from error
        self.health.notes.append(lambda: access_notes(self._configuration.section(AuthConfig), users))

    def _gate(self, origins: Origins | None) -> Gate:
        """The checks of requests, in the order of what they cost."""
        gate = Gate()
        if origins is not None and origins.feature is not None:
            gate.register(origins.feature)
        if self.users is not None:
            gate.register(self.users.users.access.feature)
        return gate

    async def _credentials(self) -> Credentials | None:
        """What signs the requests to brokers."""
        config = self._configuration.section(AuthConfig)
        if not config.has_inner_user:
            return None
        try:
            return credentials_of(await trio.to_thread.run_sync(inner_user_of, config))
        except AccessError as error:
            raise StartError(str(error)) from error

    def _store(self) -> Kv:
        if self._kv is not None:
            return self._kv
        try:
            from trimq.controller.etcd_kv import EtcdKv  # noqa: PLC0415 - only the store that is used
        except ImportError as error:
            raise StartError(f"etcd needs httpx ({error}): pip install 'trimq[controller]'") from error
        return EtcdKv(endpoints(self._config().etcd_endpoints))

    async def run(self, task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``shutdown``; reports the bound address as started. Runs once. Raises StartError."""
        try:
            sock = self._sock or self.bind()
            config = self._configuration.section(NettyServerConfig)
            assert self.address is not None
            async with AsyncExitStack() as stack:
                for bound in (sock, *self._web_sockets):
                    stack.callback(bound.close)
                kv = self._store()
                stack.push_async_callback(kv.close)
                self.replicas = ReplicasInfoManager(kv, self._config)
                client = await stack.enter_async_context(
                    RemotingClient(
                        clock=self._clock,
                        network=self._network,
                        log=StructuredLog(),
                        credentials=await self._credentials(),
                        tls=client_of(self._configuration.section(TlsConfig)),
                    )
                )
                tls = ServerTls.of(self._tls, self._configuration.section(TlsConfig))
                origins = Origins.of(self._configuration.section(ClientLimitsConfig), self._clock, ReactorStats())
                reactor = Reactor(ReactorLimits.of(config), self._clock, self._network.selector(), tls, origins)
                table = HandlerTable(self._gate(origins))
                lost = self.lost = LostMasters(
                    self.replicas, self._network, self._clock, self._replace, partial(_answers, client)
                )
                ControllerRequestProcessor(
                    self.replicas, self._configuration, self._notify_soon, self._elect_soon, lost.heard
                ).register(table)
                reactor.add_listener(sock, table)
                async with trio.open_nursery() as nursery, AsyncExitStack() as served:
                    await self._serve_web(reactor, served, nursery)
                    self._network.open_port(sock, config)
                    self.replicas.hears_until = trio.current_time() + _FIRST_HEARTBEATS_SECONDS
                    nursery.start_soon(kv.run)
                    nursery.start_soon(self._watch, kv)
                    nursery.start_soon(self._elect_for_the_dead)
                    nursery.start_soon(self._scan)
                    nursery.start_soon(self._tls.run, self._clock)
                    if self.users is not None:
                        nursery.start_soon(self.users.run)
                    nursery.start_soon(lost.run)
                    nursery.start_soon(self._notify, client)
                    await nursery.start(reactor.run)
                    self.health.started()
                    _log.info("controller_started", address=f"{self.address[0]}:{self.address[1]}")
                    task_status.started(self.address)
                    await self._stop.wait()
                    self.health.stopping()
                    await reactor.shutdown(config.shutdown_wait_time_seconds)
                    nursery.cancel_scope.cancel()
        finally:
            self.stopped.set()
            _log.info("controller_stopped")

    def shutdown(self) -> None:
        """Stop: answer the requests in flight, within shutdownWaitTimeSeconds, then close all connections."""
        self._stop.set()

    async def _serve_web(self, reactor: Reactor, stack: AsyncExitStack, nursery: trio.Nursery) -> None:
        if not self._web_sockets:
            return
        from trimq.remoting.http import web  # noqa: PLC0415 - only if it is configured

        app = web.WebApp(self.health)
        if self._configuration.section(WebConfig).serves_metrics:
            from trimq.controller.metrics import ControllerMetrics  # noqa: PLC0415 - only if metrics are on

            metrics = ControllerMetrics(
                self.replicas, reactor.stats, self.health, lambda: not self._failure, self.users
            )
            app.metrics = metrics.page
            await nursery.start(metrics.probe.run)
        await stack.enter_async_context(web.served(app, self._web_sockets))

    def _reasons(self) -> list[Reason]:
        return [Reason(STORE_SILENT, self._failure)] if self._failure else []

    # elections

    def _note_failure(self, reason: str) -> None:
        if reason and not self._failed:
            _log.error("controller_store_failed", reason=reason)
        elif self._failed and not reason:
            _log.info("controller_store_answers")
        self._failure, self._failed = reason, bool(reason)

    async def _watch(self, kv: Kv) -> None:
        """Hear of each broker whose lease has ended."""
        root = self._config().etcd_prefix
        while True:
            try:
                snapshot = await kv.range(root)
                self._note_failure("")
                await self._elect_where_needed()  # what ended while nothing was watched
                await kv.watch(root, snapshot.revision, self._key_deleted)
            except KvError as error:
                self._note_failure(str(error))
            await self._clock.sleep(_AGAIN)

    def _key_deleted(self, key: str) -> None:
        name, rest = place_of(self._config().etcd_prefix, key)
        if rest.startswith("alive/"):
            _log.warning("broker_not_alive", broker_name=name, broker_id=rest.removeprefix("alive/"))
            self._elect_soon(name)

    def _elect_soon(self, name: str) -> None:
        """Let a master be elected, if a group has none that is alive."""
        try:
            self._headless_send.send_nowait(name)
        except trio.WouldBlock:
            pass  # the scan finds it

    async def _elect_for_the_dead(self) -> None:
        async for name in self._headless:
            for _ in range(_TRIES):
                try:
                    await self._elect(name)
                    break
                except KvError as error:
                    self._note_failure(str(error))
                    await self._clock.sleep(_AGAIN)

    async def _scan(self) -> None:
        while True:
            await self._clock.sleep(self._config().scan_inactive_master_interval / 1000)
            try:
                await self._elect_where_needed()
                self._note_failure("")
            except KvError as error:
                self._note_failure(str(error))

    async def _elect_where_needed(self) -> None:
        for name in await self.replicas.without_master():
            await self._elect(name)

    async def _elect(self, name: str) -> None:
        """Elect a master for a group whose master has died."""
        try:
            state = await self.replicas.state(name)
        except UnreadableError:
            return  # the scan logs it
        if state.living_master is not None and self._unsure.get(name, state.epoch) < state.epoch:
            self._notify_soon(state)  # perhaps another controller's election: news that comes twice does no harm
        if state.living_master is not None:
            self._unsure.pop(name, None)
        if state.set is None or state.living_master is not None or not state.alive:
            return
        try:
            found = await self.replicas.elect(name)
        except KvError as error:
            if error.sent:
                self._unsure[name] = state.epoch
            raise
        except RemotingError as error:
            _log.warning("no_master_elected", broker_name=name, reason=error.remark)
            return
        if found.changed:
            self._notify_soon(found.state)

    async def _replace(self, state: GroupState, lost: int, among: set[int]) -> None:
        """Elect another master in place of one whose process has ended. If that fails, its lease decides."""
        try:
            found = await self.replicas.elect(state.name, without=lost, among=among, epoch=state.epoch)
        except KvError as error:
            if error.sent:
                self._unsure[state.name] = state.epoch
                self._elect_soon(state.name)  # to notify the brokers, if it was made
            raise
        except RemotingError as error:
            _log.warning("no_master_elected", broker_name=state.name, reason=error.remark)
            return
        if found.changed:
            self._notify_soon(found.state)

    # notifications

    def _notify_soon(self, state: GroupState) -> None:
        """Let the brokers of a group know their new master."""
        if not self._config().notify_broker_role_changed:
            return
        try:
            self._elected_send.send_nowait(state)
        except trio.WouldBlock:
            pass  # brokers ask too

    async def _notify(self, client: RemotingClient) -> None:
        async with trio.open_nursery() as nursery:
            async for state in self._elected:
                for broker_id, record in state.ids.items():
                    nursery.start_soon(self._notify_broker, client, state, broker_id, record.address)

    async def _notify_broker(self, client: RemotingClient, state: GroupState, broker_id: int, address: str) -> None:
        """NOTIFY_BROKER_ROLE_CHANGED (1008)."""
        header = NotifyBrokerRoleChangedRequestHeader(
            master_address=state.address(state.master),
            master_epoch=state.epoch,
            sync_state_set_epoch=state.set_epoch,
            master_broker_id=state.master,
        )
        body = encode_json(SyncStateSet(sync_state_set=state.members, sync_state_set_epoch=state.set_epoch))
        try:
            command = RemotingCommand.request(RequestCode.NOTIFY_BROKER_ROLE_CHANGED, header, body)
            await client.invoke(address, command, _NOTIFY_SECONDS)
        except (RemotingTransportError, FrameError, ValueError) as error:  # ValueError: an address that is none
            # It asks for its role too. One that is not alive is expected not to answer.
            if broker_id in state.alive:
                reason = error.lasting if isinstance(error, RemotingTransportError) else str(error)
                _log.warning("broker_not_notified", broker_name=state.name, broker_id=broker_id, reason=reason)


async def _answers(client: RemotingClient, address: str) -> bool:
    """Whether a broker answers a request, whatever it says."""
    try:
        await client.invoke(address, RemotingCommand.request(RequestCode.GET_BROKER_EPOCH_CACHE), _ANSWER_SECONDS)
    except (RemotingTransportError, ValueError):  # ValueError: an address that is none
        return False
    return True
