"""Client: connections, routes, heartbeats, and the requests that brokers send to a client.

Each producer and consumer opens a client instance of its own, unless the program opens one for several of them to
share. Its id is ``ip@pid#random``, so two instances in one process are two clients to the broker.
"""

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Literal, Protocol

import anyio
from msgspec import Struct

from trimq.client.errors import (
    ClosedError,
    CredentialsError,
    NoPermissionError,
    NotStoredError,
    PerhapsStoredError,
    RocketMQError,
    UnreachableError,
    UsageError,
    copied,
    error_for,
)
from trimq.client.lifecycle import Lifecycle
from trimq.client.name_servers import NameServers, parse_addresses
from trimq.client.outages import Denied, Outages
from trimq.client.routes import RouteCache, TopicRoute
from trimq.protocol.body import (
    ClusterInfo,
    ConsumerData,
    HeartbeatData,
    ProducerData,
    TopicRouteData,
    decode_json,
    encode_json,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.headers.client import HeartbeatResponseHeader, UnregisterClientRequestHeader
from trimq.protocol.headers.namesrv import GetRouteInfoRequestHeader
from trimq.protocol.message_id import UniqueIdGenerator
from trimq.remoting.client import remoting_client
from trimq.remoting.client.call import Call
from trimq.remoting.client.client_log import StandardLog
from trimq.remoting.client.credentials import Credentials, Signer
from trimq.remoting.client.remoting_client import ClientConnection, RemotingClient
from trimq.remoting.errors import RemotingConnectError, RemotingTransportError
from trimq.remoting.tls.client_contexts import ClientTls, Tls
from trimq.remoting.tls.key_files import KeyFileError

_log = StandardLog("trimq.client.core")

_ENCODINGS: Final = {"json": Encoding.JSON, "rocketmq": Encoding.ROCKETMQ, "msgpack": Encoding.MSGPACK}

Push = Callable[[RemotingCommand], Awaitable[RemotingCommand | None]]
"""Handles a request that a broker sent. Returns the reply, or None if there is none or the request is not its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Settings of a client instance; times are in seconds.

    ``request_timeout`` bounds a request that has no timeout of its own. ``heartbeat_interval`` and ``route_interval``
    are the times between heartbeats and between refreshes of all routes. ``header`` is the encoding of request headers;
    ``msgpack`` is used with a broker only after the broker has announced that it supports it, and JSON until then.
    ``credentials`` sign every request, of whatever object uses these options; without them servers see no user.
    ``instance_name`` replaces ``pid#random`` in the client id, ``unit_name`` is appended to it. ``tls`` is how it
    connects with TLS, to name servers and brokers: True verifies them with the CA certificates of the system; False
    connects without.

    >>> ClientOptions(request_timeout=10.0).header
    'json'
    """

    request_timeout: float = 3.0
    heartbeat_interval: float = 30.0
    route_interval: float = 30.0
    header: Literal["json", "rocketmq", "msgpack"] = "json"
    instance_name: str | None = None
    unit_name: str | None = None
    credentials: Credentials | None = None
    tls: Tls | bool = False


class Member(Protocol):
    """The interface through which a client instance uses a producer or consumer."""

    def producer_data(self) -> ProducerData | None:
        """Its part of the heartbeat as a producer; None for a consumer."""

    def consumer_data(self) -> ConsumerData | None:
        """Its part of the heartbeat as a consumer; None for a producer."""

    def pushes(self) -> dict[int, Push]:
        """Handlers for requests of brokers, by request code."""


class Client(Lifecycle):
    """A client instance, which several producers and consumers of a program may share.

    ``namesrv`` is ``host:port`` of each name server, as a text separated by semicolons or as an iterable; None takes
    the environment variable NAMESRV_ADDR. Raises UsageError if no name server is given; with ``namesrv_needed=False``
    the error is raised only by a call that needs one.

    >>> async def shared(namesrv: str) -> None:
    ...     async with Client(namesrv) as client, Producer("a", client=client), Producer("b", client=client):
    ...         ...
    """

    def __init__(
        self,
        namesrv: str | Iterable[str] | None = None,
        options: ClientOptions | None = None,
        *,
        namesrv_needed: bool = True,
    ) -> None:
        super().__init__()
        self.options: ClientOptions = options or ClientOptions()
        if self.options.header not in _ENCODINGS:
            raise UsageError(f"header={self.options.header!r} is none of {', '.join(_ENCODINGS)}")
        if self.options.header == "msgpack" and find_spec("msgpack") is None:
            raise UsageError("header='msgpack' needs the package msgpack: pip install msgpack")
        address = _own_address()
        instance = self.options.instance_name or f"{os.getpid()}#{secrets.token_hex(5)}"
        unit = f"@{self.options.unit_name}" if self.options.unit_name else ""
        self.id: str = f"{address}@{instance}{unit}"
        self.unique_ids: UniqueIdGenerator = UniqueIdGenerator(socket.inet_aton(address))
        self.routes: RouteCache = RouteCache(self._fetch_route, self._any_broker)
        self.outages: Outages = Outages(_log)
        self.name_servers: NameServers = NameServers(
            parse_addresses(namesrv, needed=namesrv_needed), self.invoke, self.outages.note
        )
        self._encoding = _ENCODINGS[self.options.header]
        first = Encoding.JSON if self._encoding is Encoding.MSGPACK else self._encoding
        tls = self.options.tls
        self._tls = ClientTls(Tls() if tls is True else tls) if tls else None
        self._remoting = RemotingClient(encoding=first, tls=self._tls, credentials=self.options.credentials)
        self.signer: Signer | None = self._remoting.signer
        self.encode: Callable[[RemotingCommand], bytes] = self._remoting.encode
        """Makes the frame of a request, signed if there are credentials."""
        self._remoting.on_connect.append(self._connected)
        self._remoting.on_close.append(self._disconnected)
        self._members: list[Member] = []
        self._joins = 0
        self._losses: Counter[str] = Counter()  # addresses: how many of their connections have ended
        self._greeted: dict[str, int] = {}  # addresses, with the number of joins of which the broker knows
        self._lost: set[str] = set()
        self._unaccepted: dict[str, CredentialsError] = {}  # addresses that refused the user of the last heartbeat

    async def _prepare(self) -> None:
        if self._tls is not None:
            try:
                await self._tls.context()
            except KeyFileError as error:
                raise UsageError(f"a file for TLS cannot be used: {error}") from None
        for code in (
            RequestCode.CHECK_TRANSACTION_STATE,
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT,
            RequestCode.GET_CONSUMER_RUNNING_INFO,
            RequestCode.CONSUME_MESSAGE_DIRECTLY,
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
        ):
            self._remoting.register_processor(code, self._pushed)

    async def _open(self) -> None:
        self.spawn(self._every, self.options.heartbeat_interval, self.heartbeat)
        self.spawn(self._every, self.options.route_interval, self.routes.refresh_all)
        self.spawn(self.routes.look_again)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        async with self._remoting:
            yield

    async def _every(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await anyio.sleep(seconds)
            try:
                await action()
            except Exception as error:  # noqa: BLE001 - the next run may succeed
                _log.failed("a regular task failed", error, client=self.id)

    # -- requests --------------------------------------------------------------------------------------------------

    async def invoke(self, address: str, command: RemotingCommand, timeout: float | None = None) -> RemotingCommand:
        """Sends a request and returns the reply, whatever its code. ``timeout`` is in seconds.

        Raises UnreachableError if the request was not sent, PerhapsStoredError if no reply came, UsageError if the
        request is too long for a frame, and ClosedError if the client is closed before the reply comes.
        """
        self._check_open()
        try:
            reply = await self._remoting.invoke(address, command, timeout or self.options.request_timeout)
        except (RemotingTransportError, FrameError, RuntimeError) as error:
            raise self._sdk_error(error) from None
        if self.outages.open:
            self.outages.over(address)
        return reply

    async def connection(self, address: str) -> ClientConnection:
        """The connection to an address, for ``begin``. Raises UnreachableError if it cannot be opened."""
        self._check_open()
        try:
            return await self._remoting.connection(address, self.options.request_timeout)
        except (RemotingTransportError, RuntimeError) as error:
            raise self._sdk_error(error) from None

    async def with_space(self, address: str, code: int, timeout: float) -> ClientConnection:
        """Waits for a connection to ``address`` with a free slot for a request with ``code``.

        Raises UnreachableError if there is none within ``timeout`` seconds; nothing was sent then.
        """
        self._check_open()
        try:
            return await self._remoting.with_space(address, code, timeout)
        except (RemotingTransportError, RuntimeError) as error:
            raise self._sdk_error(error) from None

    def _sdk_error(self, error: Exception) -> Exception:
        """The SDK's error for an error of the transport layer."""
        if isinstance(error, RemotingTransportError):
            return transport_error(error)
        if isinstance(error, FrameError):
            return UsageError(str(error), code=ResponseCode.MESSAGE_ILLEGAL)
        # The transport raises RuntimeError when it is used while it closes.
        return error if self.is_open else ClosedError(f"this {type(self).__name__} was closed during the call")

    def read_arrived(self) -> bool:
        """Reads the bytes that have arrived at any connection, without waiting. Returns False if there were none."""
        return self._remoting.read_arrived()

    def ready(self, address: str) -> ClientConnection | None:
        """The connection to an address if a request can be sent on it without waiting; else None."""
        return self._remoting.ready(address)

    def begin(
        self, connection: ClientConnection, frame: Callable[[int, Encoding], bytes], timeout: float, call: Call
    ) -> None:
        """Sends a request without waiting. ``frame`` makes its bytes, given the opaque number and the encoding.

        ``call`` is finished by the reply, the timeout (seconds) or the end of the connection. The caller has to pass it
        to ``connection.end`` afterwards, or to abandon it. ``frame`` has to sign the request: it makes it with
        ``encode``, or with ``signer``. Raises FrameError if the frame is too long.
        """
        self._remoting.begin_frame(connection, frame, connection.now() + timeout, call)

    async def request(
        self,
        address: str,
        code: int,
        header: Struct | dict[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout: float | None = None,
        accept: tuple[int, ...] = (0,),
    ) -> RemotingCommand:
        """Sends a request and returns the reply, if its code is one of ``accept``.

        Raises the error for any other code (``error_for``), and the errors of ``invoke``.
        """
        reply = await self.invoke(address, RemotingCommand.request(code, header, body), timeout)
        if reply.code not in accept:
            raise error_for(reply.code, reply.remark, address, code)
        return reply

    async def oneway(self, address: str, code: int, header: Struct | dict[str, str] | None, body: bytes = b"") -> None:
        """Sends a request that gets no reply. Raises the errors of ``invoke``."""
        self._check_open()
        command = RemotingCommand.request(code, header, body, oneway=True)
        try:
            await self._remoting.invoke_oneway(address, command)
        except (RemotingTransportError, FrameError, RuntimeError) as error:
            raise self._sdk_error(error) from None

    async def ask_name_server(
        self,
        code: int,
        header: Struct | dict[str, str] | None = None,
        body: bytes = b"",
        *,
        accept: tuple[int, ...] = (0,),
    ) -> RemotingCommand:
        """Sends a request to the name servers in turn and returns the first reply, if its code is one of ``accept``.

        Raises the error for any other code, and UnreachableError if no name server answers.
        """
        reply = await self.name_servers.ask(RemotingCommand.request(code, header, body))
        if reply.code not in accept:
            raise error_for(reply.code, reply.remark, None)
        return reply

    async def fetch_route(self, topic: str) -> TopicRouteData:
        """A topic's current route at the name servers.

        Raises TopicNotFoundError, NoBrokerError, and UnreachableError if no name server answers.
        """
        data = await self._fetch_route(topic)
        if data is None:
            raise await self.routes.missing(topic)
        return data

    async def _fetch_route(self, topic: str) -> TopicRouteData | None:
        """The topic's route; None if the name servers do not know the topic.

        A query stores nothing, so every error is a NotStoredError, whatever the code; but NoPermissionError and
        CredentialsError of a name server that checks users.
        """
        header = GetRouteInfoRequestHeader(topic=topic, accept_standard_json_only=True)
        unknown = ResponseCode.TOPIC_NOT_EXIST
        command = RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        reply = await self.name_servers.ask(command, but=unknown)
        if reply.code == unknown or (reply.code == 0 and not reply.body):
            return None
        if reply.code != 0:
            error = error_for(reply.code, reply.remark, None, RequestCode.GET_ROUTEINFO_BY_TOPIC)
            kind = type(error) if isinstance(error, NoPermissionError) else NotStoredError
            raise kind(f"the route of {topic} cannot be fetched: {error.text}", code=error.code)
        try:
            return decode_json(reply.body, TopicRouteData)
        except RemotingError as error:
            raise NotStoredError(f"the route of {topic} cannot be decoded: {error.remark}") from None

    async def _any_broker(self) -> bool:
        """Whether any broker is registered at the name servers; True if the reply does not show it."""
        reply = await self.name_servers.ask(RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO))
        try:
            return reply.code != 0 or bool(decode_json(reply.body or b"{}", ClusterInfo).broker_addr_table)
        except RemotingError:
            return True

    async def master(self, route: TopicRoute, broker_name: str) -> str:
        """The address of a broker's master, by the given route or else by a fresh one.

        Raises UnreachableError if no master is registered.
        """
        address = route.master(broker_name)
        if address is None:
            address = (await self.routes.refresh(route.topic)).master(broker_name)
        if address is None:
            raise UnreachableError(f"no master of {broker_name} is registered at the name servers")
        return address

    # -- members and heartbeats ------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """Adds a producer or consumer to the heartbeats. Brokers know of it from the next heartbeat on."""
        self._members.append(member)
        self._joins += 1

    async def leave(self, member: Member) -> None:
        """Removes a member and unregisters it at the brokers, so that others take over its queues immediately."""
        if member not in self._members:
            return
        self._members.remove(member)
        as_producer, as_consumer = member.producer_data(), member.consumer_data()
        header = UnregisterClientRequestHeader(
            client_id=self.id,
            producer_group=as_producer.group_name if as_producer else None,
            consumer_group=as_consumer.group_name if as_consumer else None,
        )
        async with anyio.create_task_group() as group:
            for address in list(self._greeted):
                group.start_soon(self._unregister, address, header)

    async def _unregister(self, address: str, header: UnregisterClientRequestHeader) -> None:
        try:
            await self.request(address, RequestCode.UNREGISTER_CLIENT, header)
        except RocketMQError as error:
            _log.info("a member could not be unregistered at a broker", address=address, reason=str(error))

    async def heartbeat(self, only: str | None = None) -> None:
        """Sends a heartbeat to the brokers of all known routes, to masters only if there are no consumers.

        ``only``: to this address instead. A failure is logged, not raised.
        """
        producers = [data for member in self._members if (data := member.producer_data())]
        consumers = [entry for member in self._members if (entry := member.consumer_data())]
        if not producers and not consumers:
            return
        body = encode_json(HeartbeatData(client_id=self.id, producer_data_set=producers, consumer_data_set=consumers))
        if only is not None:
            await self._greet(only, body, self._joins)
            return
        async with anyio.create_task_group() as group:
            for address in self.routes.addresses(masters_only=not consumers):
                group.start_soon(self._greet, address, body, self._joins)

    async def _greet(self, address: str, body: bytes, joins: int) -> None:
        losses = self._losses[address]
        try:
            reply = await self.request(address, RequestCode.HEART_BEAT, {}, body)
        except RocketMQError as error:
            self._greeted.pop(address, None)
            if isinstance(error, CredentialsError):
                self._unaccepted[address] = error
            self.outages.note("a heartbeat", error)
            return
        self._unaccepted.pop(address, None)
        if self._losses[address] != losses:  # the reply came, but its connection has ended since
            self._lost.add(address)
            return
        self._greeted[address] = joins
        if self._encoding is Encoding.MSGPACK and reply.header(HeartbeatResponseHeader).trimq_msgpack:
            self._remoting.use_encoding(address, Encoding.MSGPACK)

    def _disconnected(self, connection: ClientConnection) -> None:
        self._losses[connection.address] += 1
        if connection.address in self._greeted:
            del self._greeted[connection.address]
            self._lost.add(connection.address)
        self.routes.doubt(connection.address)

    def _connected(self, connection: ClientConnection) -> None:
        """Sends a heartbeat to a broker after a reconnect, since the broker has removed the client with its connection.

        Without it, the client would not exist for the broker until the next regular heartbeat.
        """
        if connection.address in self._lost and self.is_open:
            self._lost.discard(connection.address)
            self.spawn(self.heartbeat, connection.address)

    def has_greeted(self, address: str) -> bool:
        """Whether the broker at this address knows all members by a heartbeat over a connection that is still open."""
        return self._greeted.get(address) == self._joins

    def check_accepted(self) -> None:
        """Raises CredentialsError if brokers refused this client's user at the last heartbeat, and none accepted it.

        >>> def fail_early(consumer: "Consumer") -> None:
        ...     consumer.client.check_accepted()
        """
        if self._unaccepted and not self._greeted:
            raise copied(next(iter(self._unaccepted.values())))

    @property
    def denied(self) -> list[Denied]:
        """The operations in the background that servers did not permit within the last minute, with their errors.

        Pulls, heartbeats and the like are tried again until they are permitted; meanwhile a warning is logged once a
        minute. Empty if everything is permitted.

        >>> def why(consumer: "Consumer") -> list[str]:
        ...     return [f"{denied.event}: {denied.error}" for denied in consumer.client.denied]
        """
        return self.outages.denied

    # -- requests of brokers ---------------------------------------------------------------------------------------

    async def _pushed(self, _connection: object, command: RemotingCommand) -> RemotingCommand | None:
        """Passes a broker's request to the members in turn; a member returns None for a request that is not its own."""
        for member in list(self._members):
            handler = member.pushes().get(command.code)
            if handler is not None:
                reply = await handler(command)
                if reply is not None:
                    return reply
        if command.is_oneway:
            return None
        if command.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            # The reply to a request that waits no more, as in RocketMQ: for the replier it is no failure to be late.
            return command.reply()
        return command.reply(ResponseCode.SYSTEM_ERROR, "no member of this client handles this request")


def transport_error(error: RemotingTransportError) -> RocketMQError:
    """The SDK's error for a request without a reply; it depends on whether the request may have been sent."""
    if isinstance(error, RemotingConnectError) or not error.written:
        return UnreachableError(str(error), address=error.address)
    return PerhapsStoredError(str(error), address=error.address)


def no_reply(connection: ClientConnection, call: Call, code: int, timeout: float) -> RocketMQError:
    """The SDK's error for a call that ended without a reply."""
    return transport_error(remoting_client.no_reply(connection, call, code, timeout))


def wall_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def _own_address() -> str:
    """The local address of the default route. Connecting a datagram socket selects it and sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address
