"""Telling the name servers about this broker and its topics (the registering half of RocketMQ's BrokerOuterAPI).

Each name server has a task of its own, so that a dead one does not hold up the others: it registers at the start, at
every change of a topic, every registerNameServerPeriod, and at once when its connection had broken, with growing pauses
while it cannot be reached. Changes that come while a registration is under way go with the next one.
"""

import random
from collections.abc import Sequence
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
LAST_RETRY_SECONDS: Final = 10.0
UNREGISTER_SECONDS: Final = 3.0
ALL_TOPICS: Final = 1000
"""Up to so many topics a change sends all of them, which is right whatever the name server does about missing ones.

Beyond it, only those that changed.
"""

_READ_WRITE: Final = PERM_READ | PERM_WRITE


class NameServerClient(Protocol):
    """What this service needs of a RemotingClient."""

    async def invoke(self, address: str, command: RemotingCommand, timeout: float) -> RemotingCommand:
        """Ask and wait for the reply. Raises RemotingTransportError."""
        ...


class _NameServer:
    """What one name server still has to hear."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.everything = True
        self.topics: set[str] = set()
        self.told = 0  # number of the last change it has heard of
        self.failing = False
        self.reached = False
        self.conflict = ""  # address of another broker with our name and id
        self.keeps_first = False  # whether it has told of that itself, which only TriMQ's do
        self.sleeping: trio.CancelScope | None = None

    def wake(self) -> None:
        """Register now, or right after the registration that is under way."""
        if self.sleeping is not None:
            self.sleeping.cancel()


class BrokerOuterAPI:
    """Registration of one broker with all of its name servers.

    ``address`` is what clients are told to connect to (``host:port``), ``ha_address`` what slaves are told. Both may be
    set until ``run`` starts.
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
        self._changes = 1  # the start is one: everything is to be told
        self._told = trio.Event()
        self._scope: trio.CancelScope | None = None
        self.address = address
        self.ha_address = ha_address
        topics.listeners.append(self.topics_changed)
        topics.delete_listeners.append(lambda _: self.register_soon())
        configuration.listeners.append(self._reconfigured)

    # what happens

    def topics_changed(self, topics: Sequence[TopicConfig]) -> None:
        """Topics were made or changed: tell all name servers."""
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
        """The connection to a name server broke.

        It takes the broker out of the routes then, so register again as soon as it is back.
        """
        server = self._servers.get(address)
        if server is not None:
            server.everything = True
            server.reached = False
            server.wake()

    def reached(self) -> dict[str, bool]:
        """Each name server, and whether the last registration with it went well."""
        return {address: server.reached for address, server in self._servers.items()}

    def conflicts(self) -> dict[str, str]:
        """Name servers at which another broker has our name and id, and its address there."""
        return {
            address: server.conflict
            for address, server in self._servers.items()
            if server.conflict and not (server.reached and server.keeps_first)
        }

    async def registered(self, timeout: float = 3.0) -> bool:
        """Wait until the name servers that can be reached know all changes made until now.

        False when that took too long.

        An administrator's tool reads a topic back from a name server as soon as it has the broker's reply.
        """
        target = self._changes
        with trio.move_on_after(timeout):
            while any(server.told < target and not server.failing for server in self._servers.values()):
                await self._told.wait()
            return True
        for server in self._servers.values():
            if server.told < target:
                server.failing = True  # nobody waits for it again until it has answered
        return False

    def _reconfigured(self, keys: frozenset[str]) -> None:
        if "brokerPermission" in keys:
            self.register_soon()

    # the tasks

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep all name servers informed, until ``unregister_all``."""
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
                    server.conflict = ""  # what it would say now nobody knows
                self._pulse()
                # changes do not cut this pause short: they would only hammer a name server that is not there
                await self._clock.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
                continue
            if server.failing or not pause:
                _log.info("registered", namesrv=server.address, topics=len(self._topics.table))
            server.failing, server.reached, pause = False, True, FIRST_RETRY_SECONDS / 2
            self._pulse()
            if not (server.everything or server.topics):
                period = self._configuration.section(BrokerConfig).register_name_server_period / 1000
                with trio.CancelScope() as server.sleeping:
                    await self._clock.sleep(period)
                if not server.topics:
                    server.everything = True
                server.sleeping = None

    def _pulse(self) -> None:
        self._told.set()
        self._told = trio.Event()

    # one registration

    async def _register(self, server: _NameServer) -> None:
        config = self._configuration.section(BrokerConfig)
        change, everything = self._changes, server.everything or len(self._topics.table) <= ALL_TOPICS
        names, server.topics, server.everything = server.topics, set(), False
        timeout = config.register_broker_timeout_mills / 1000
        if server.reached and not names:
            await self._look_for_conflict(server, config, timeout)
        if not config.force_register and not names and not await self._differs(server, config, timeout):
            server.told = change
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
        self._hear(server, answer.conflict)
        if reply.code != ResponseCode.SUCCESS:
            raise RemotingError(reply.code, reply.remark or "")
        server.told = max(server.told, change)
        if len(reply.body):
            self._topics.update_order(decode_json(reply.body, KVTable).table)

    async def _look_for_conflict(self, server: _NameServer, config: BrokerConfig, timeout: float) -> None:
        """Apache's name servers let the last one win: if it is no longer us who we registered, there are two."""
        header = GetBrokerMemberGroupRequestHeader(
            cluster_name=config.broker_cluster_name, broker_name=config.broker_name
        )
        command = RemotingCommand.request(RequestCode.GET_BROKER_MEMBER_GROUP, header)
        reply = await self._client.invoke(server.address, command, timeout)
        if reply.code != ResponseCode.SUCCESS or not len(reply.body):
            return  # one of RocketMQ 4, which does not know the question
        try:
            group = decode_json(reply.body, GetBrokerMemberGroupResponseBody).broker_member_group
        except RemotingError:
            return
        listed = group.broker_addrs.get(str(config.broker_id), self.address)
        if not server.keeps_first:
            self._note_conflict(server, listed if listed != self.address else "")

    def _hear(self, server: _NameServer, conflict: str | None) -> None:
        """What the reply of a name server says of another broker; only TriMQ's say anything."""
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
        self._hear(server, answer.conflict)
        return answer.changed

    # leaving

    async def unregister_all(self) -> None:
        """Take the broker out of all routes and register no more (shutdown), within 3 s.

        Name servers that cannot be reached notice by themselves.
        """
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
    """The field that TriMQ's name servers understand and others pass over."""
    found = parse_listeners(config.advertised_listeners)
    return msgspec.json.encode(found).decode() if found else None
