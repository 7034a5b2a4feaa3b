"""Registers this broker and its topics with the name servers (the registering half of RocketMQ's BrokerOuterAPI).

Each name server has its own task, so that one that does not answer delays no other. The task registers at the start, at
every change of a topic, every registerNameServerPeriod, and as soon as a broken connection can be opened again, with
growing pauses while the name server cannot be reached. Changes during a registration are sent by the next one.
"""

import random
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
import structlog
import trio

from trimq.broker.config import BrokerConfig, parse_listeners
from trimq.broker.services.topics import TopicConfigManager
from trimq.protocol.body import (
    PERM_READ,
    PERM_WRITE,
    GetBrokerMemberGroupResponseBody,
    KVTable,
    RegisterBrokerBody,
    TopicConfig,
    decode_json,
    encode_json,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.hashing import crc32
from trimq.protocol.headers.namesrv import (
    GetBrokerMemberGroupRequestHeader,
    QueryDataVersionRequestHeader,
    QueryDataVersionResponseHeader,
    RegisterBrokerRequestHeader,
    RegisterBrokerResponseHeader,
    UnRegisterBrokerRequestHeader,
)
from trimq.protocol.register_broker_body import encode_register_broker_body
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.errors import RemotingTransportError
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("broker.registration")

FIRST_RETRY_SECONDS: Final = 0.25
NO_MASTER_SECONDS: Final = 2.0
"""How soon a slave registers again whose master is not known: the reply says where it is. Each one has all topics."""
LAST_RETRY_SECONDS: Final = 10.0
UNREGISTER_SECONDS: Final = 3.0
ALL_TOPICS: Final = 1000
"""Up to this number of topics a change sends all of them: that is correct for every setting of the name server.

Beyond it a change sends only the topics that changed. A name server with deleteTopicWithBrokerRegistration would take
the others for deleted.
"""

_READ_WRITE: Final = PERM_READ | PERM_WRITE


class NameServerClient(Protocol):
    """The part of RemotingClient that this service uses."""

    async def invoke(self, address: str, command: RemotingCommand, timeout: float) -> RemotingCommand:
        """Send a request and wait for the reply. Raises RemotingTransportError."""
        ...


class _NameServer:
    """The state of the registration with one name server."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.everything = True  # whether the next registration sends all topics
        self.topics: set[str] = set()  # changed topics that it does not have yet
        self.registered = 0  # number of the last change that it has confirmed
        self.failing = False
        self.reached = False
        self.conflict = ""  # address of another broker with the same name and id
        self.keeps_first = False  # whether it reports conflicts itself, which only TriMQ's name servers do
        self.knows_master = False  # whether its last reply to a slave had a master
        self.sleeping: trio.CancelScope | None = None

    def wake(self) -> None:
        """Register now, or right after the registration that is under way."""
        if self.sleeping is not None:
            self.sleeping.cancel()


class BrokerOuterAPI:
    """Registration of one broker with all of its name servers.

    ``address`` (``host:port``) is the address advertised to clients, ``ha_address`` the one advertised to slaves. Both
    may be set until ``run`` starts.
    """

    def __init__(
        self,
        configuration: Configuration,
        client: NameServerClient,
        topics: TopicConfigManager,
        clock: Clock,
        *,
        addresses: Sequence[str],
        address: str = "",
        ha_address: str = "",
    ) -> None:
        self._configuration = configuration
        self._client = client
        self._topics = topics
        self._clock = clock
        self._servers = {address: _NameServer(address) for address in addresses}
        self._changes = 1  # the start counts as a change: everything has to be registered
        self._progress = trio.Event()
        self._scope: trio.CancelScope | None = None
        self.address = address
        self.ha_address = ha_address
        self.on_master: Callable[[str, str], None] = lambda _address, _ha_address: None
        """Called with the address of this slave's master, and the one at which that sends its log."""
        topics.listeners.append(self.topics_changed)
        topics.delete_listeners.append(lambda _: self.register_soon())
        configuration.listeners.append(self._reconfigured)

    # events

    def topics_changed(self, topics: Sequence[TopicConfig]) -> None:
        """Topics were created or changed: register them with all name servers."""
        self._changes += 1
        for server in self._servers.values():
            server.topics.update(topic.topic_name for topic in topics)
            server.wake()

    def register_soon(self) -> None:
        """Register everything with all name servers now."""
        self._changes += 1
        for server in self._servers.values():
            server.everything = True
            server.wake()

    def connection_lost(self, address: str) -> None:
        """The connection to a name server broke: register everything again as soon as it can be reached.

        The name server removes a broker from the routes when its connection breaks.
        """
        server = self._servers.get(address)
        if server is not None:
            server.everything = True
            server.reached = False
            server.wake()

    def reached(self) -> dict[str, bool]:
        """Each name server, and whether the last registration with it succeeded."""
        return {address: server.reached for address, server in self._servers.items()}

    def conflicts(self) -> dict[str, str]:
        """Name servers at which another broker is registered under this name and id, with its address.

        A TriMQ name server keeps the broker that registered first: while it accepts this one, it refuses the other.
        """
        return {
            address: server.conflict
            for address, server in self._servers.items()
            if server.conflict and not (server.reached and server.keeps_first)
        }

    async def registered(self, timeout: float = 3.0) -> bool:
        """Wait until every name server that can be reached has all changes made until now. False after ``timeout``.

        Replies that promise a change wait for it, because an administrator's tool reads the change back from a name
        server as soon as it has the reply.
        """
        target = self._changes
        with trio.move_on_after(timeout):
            while any(server.registered < target and not server.failing for server in self._servers.values()):
                await self._progress.wait()
            return True
        for server in self._servers.values():
            if server.registered < target:
                server.failing = True  # later callers do not wait for it until it has answered again
        return False

    async def ask(self, command: RemotingCommand, timeout: float) -> RemotingCommand:
        """Send a question to the name servers in turn, and return the first answer, of any code.

        Each one has ``timeout`` seconds. Raises RemotingTransportError if none answers, SYSTEM_ERROR if there is none.
        """
        failure: Exception = RemotingError(ResponseCode.SYSTEM_ERROR, "this broker has no name server")
        for server in sorted(self._servers.values(), key=lambda server: not server.reached):
            try:
                return await self._client.invoke(server.address, command, timeout)
            except RemotingTransportError as error:
                failure = error
        raise failure

    def _reconfigured(self, keys: frozenset[str]) -> None:
        if "brokerPermission" in keys:
            self.register_soon()

    # the tasks

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the broker registered with all name servers, until ``unregister_all``."""
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            for server in self._servers.values():
                nursery.start_soon(self._serve, server)
            task_status.started()
            await trio.sleep_forever()

    async def _serve(self, server: _NameServer) -> None:
        pause = 0.0
        while True:
            try:
                await self._register(server)
            except (RemotingTransportError, RemotingError, FrameError) as error:
                pause = min(max(pause * 2, FIRST_RETRY_SECONDS), LAST_RETRY_SECONDS)
                if not server.failing:
                    _log.warning("registration_failed", namesrv=server.address, reason=str(error))
                server.failing = server.everything = True
                server.reached = False
                if isinstance(error, RemotingTransportError):
                    server.conflict = ""  # it cannot be asked now
                self._wake_waiters()
                # Changes do not end this pause: each one would only be another attempt to reach a failed name server.
                await self._clock.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
                continue
            if server.failing or not pause:
                _log.info("registered", namesrv=server.address, topics=len(self._topics.table))
            server.failing, server.reached, pause = False, True, FIRST_RETRY_SECONDS / 2
            self._wake_waiters()
            # Sleep only if no change came during the registration. There is no await between this check and the
            # sleep's scope, so ``wake`` cannot come in between.
            if not (server.everything or server.topics):
                config = self._configuration.section(BrokerConfig)
                period = config.register_name_server_period / 1000
                if config.broker_id and not server.knows_master:
                    period = min(period, NO_MASTER_SECONDS)
                with trio.CancelScope() as server.sleeping:
                    await self._clock.sleep(period)
                if not server.topics:  # not woken by changed topics: the period is over, so register everything
                    server.everything = True
                server.sleeping = None

    def _wake_waiters(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    # one registration

    async def _register(self, server: _NameServer) -> None:
        config = self._configuration.section(BrokerConfig)
        # Take the pending changes before the first await: those that come later belong to the next registration. If
        # this one fails, the caller sets ``everything``, so no change is lost.
        change, everything = self._changes, server.everything or len(self._topics.table) <= ALL_TOPICS
        names, server.topics, server.everything = server.topics, set(), False
        timeout = config.register_broker_timeout_mills / 1000
        if server.reached and not names:
            await self._look_for_conflict(server, config, timeout)
        # The reply to a slave says where its master is.
        if (
            not config.force_register
            and not config.broker_id
            and not names
            and not await self._differs(server, config, timeout)
        ):
            server.registered = change
            return
        body = encode_register_broker_body(
            self._body(None if everything else names, config), compressed=config.compressed_register
        )
        header = RegisterBrokerRequestHeader(
            broker_name=config.broker_name,
            broker_addr=self.address,
            cluster_name=config.broker_cluster_name,
            ha_server_addr=self.ha_address,
            broker_id=config.broker_id,
            compressed=config.compressed_register,
            body_crc32=crc32(body),
            listeners=_listeners(config),
        )
        command = RemotingCommand.request(RequestCode.REGISTER_BROKER, header, body)
        reply = await self._client.invoke(server.address, command, timeout)
        answer = reply.header(RegisterBrokerResponseHeader)
        self._note_answer(server, answer.conflict)  # before the check: a refusal carries the conflict
        if reply.code != ResponseCode.SUCCESS:
            raise RemotingError(reply.code, reply.remark or "")
        server.registered = max(server.registered, change)
        if config.broker_id:
            server.knows_master = bool(answer.master_addr)
            self.on_master(answer.master_addr or "", answer.ha_server_addr or "")
        if len(reply.body):
            self._topics.update_order(decode_json(reply.body, KVTable).table)

    async def _look_for_conflict(self, server: _NameServer, config: BrokerConfig, timeout: float) -> None:
        """Detect a second broker with this name and id at Apache's name servers, which keep the last registration.

        If the address listed there is not the one that this broker registered, another broker has replaced it.
        """
        header = GetBrokerMemberGroupRequestHeader(
            cluster_name=config.broker_cluster_name, broker_name=config.broker_name
        )
        command = RemotingCommand.request(RequestCode.GET_BROKER_MEMBER_GROUP, header)
        reply = await self._client.invoke(server.address, command, timeout)
        if reply.code != ResponseCode.SUCCESS or not len(reply.body):
            return  # RocketMQ 4 does not know this request
        try:
            group = decode_json(reply.body, GetBrokerMemberGroupResponseBody).broker_member_group
        except RemotingError:
            return
        listed = group.broker_addrs.get(str(config.broker_id), self.address)
        if not server.keeps_first:
            self._note_conflict(server, listed if listed != self.address else "")

    def _note_answer(self, server: _NameServer, conflict: str | None) -> None:
        """Record the conflict in the reply of a name server. Only TriMQ's name servers send this field."""
        server.keeps_first = server.keeps_first or bool(conflict)
        if server.keeps_first:
            self._note_conflict(server, conflict or "")

    def _note_conflict(self, server: _NameServer, other: str) -> None:
        if other and other != server.conflict:
            config = self._configuration.section(BrokerConfig)
            _log.error(
                "broker_id_conflict",
                namesrv=server.address,
                broker_name=config.broker_name,
                broker_id=config.broker_id,
                address=self.address,
                other=other,
                remedy="give one of the two brokers another brokerName (or brokerId), or stop it",
            )
        server.conflict = other

    def _body(self, names: set[str] | None, config: BrokerConfig) -> RegisterBrokerBody:
        wrapper = self._topics.serialize_wrapper()
        table = self._topics.table
        if names is not None:
            table = {name: table[name] for name in names if name in table}
        if config.broker_permission & _READ_WRITE != _READ_WRITE:
            # As in RocketMQ, routes carry the broker's permission in each topic's.
            permission = config.broker_permission
            table = {
                name: msgspec.structs.replace(topic, perm=topic.perm & permission) for name, topic in table.items()
            }
        wrapper.topic_config_table = table
        return RegisterBrokerBody(topic_config_serialize_wrapper=wrapper)

    async def _differs(self, server: _NameServer, config: BrokerConfig, timeout: float) -> bool:
        header = QueryDataVersionRequestHeader(
            broker_name=config.broker_name,
            broker_addr=self.address,
            cluster_name=config.broker_cluster_name,
            broker_id=config.broker_id,
        )
        body = encode_json(self._topics.data_version)
        command = RemotingCommand.request(RequestCode.QUERY_DATA_VERSION, header, body)
        reply = await self._client.invoke(server.address, command, timeout)
        if reply.code != ResponseCode.SUCCESS:
            return True
        answer = reply.header(QueryDataVersionResponseHeader)
        self._note_answer(server, answer.conflict)
        return answer.changed

    # leaving

    async def unregister_all(self) -> None:
        """Remove the broker from all routes and stop registering (shutdown), within 3 s.

        Name servers that cannot be reached remove it when its connection ends or its registration expires.
        """
        # The tasks end first: a registration that is sent after the unregistration would put the broker back.
        if self._scope is not None:
            self._scope.cancel()
        with trio.move_on_after(UNREGISTER_SECONDS):
            async with trio.open_nursery() as nursery:
                for address in self._servers:
                    nursery.start_soon(self._unregister, address)

    async def _unregister(self, address: str) -> None:
        config = self._configuration.section(BrokerConfig)
        header = UnRegisterBrokerRequestHeader(
            broker_name=config.broker_name,
            broker_addr=self.address,
            cluster_name=config.broker_cluster_name,
            broker_id=config.broker_id,
        )
        try:
            await self._client.invoke(
                address, RemotingCommand.request(RequestCode.UNREGISTER_BROKER, header), UNREGISTER_SECONDS
            )
        except (RemotingTransportError, RemotingError) as error:
            _log.warning("unregistration_failed", namesrv=address, reason=str(error))
        else:
            _log.info("unregistered", namesrv=address)


def _listeners(config: BrokerConfig) -> str | None:
    """The value of a header field that TriMQ's name servers read and others ignore."""
    found = parse_listeners(config.advertised_listeners)
    return msgspec.json.encode(found).decode() if found else None
