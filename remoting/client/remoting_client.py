"""RemotingClient: requests to servers by address. Runs on anyio: in trio and in asyncio programs."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Final, Self

import anyio
from anyio.abc import TaskGroup

from trimq.protocol.command import ONEWAY_FLAG, Encoding, RemotingCommand
from trimq.protocol.frame import encode
from trimq.remoting.client.back_off import BackOff
from trimq.remoting.client.call import Call, CallbackCall
from trimq.remoting.client.client_connection import ClientConnection, RequestProcessor
from trimq.remoting.client.client_log import ClientLog, StandardLog
from trimq.remoting.client.client_socket import ClientNetwork, SocketNetwork
from trimq.remoting.client.credentials import Credentials, Signer
from trimq.remoting.client.handshake import secured
from trimq.remoting.errors import RemotingConnectError, RemotingSendError, RemotingTimeoutError, RemotingTransportError
from trimq.remoting.runtime.clock import Clock, SystemClock
from trimq.remoting.tls.client_contexts import ClientTls
from trimq.remoting.tls.tls_socket import TlsSocket

__all__ = ["CallbackCall", "ClientConnection", "ClientNetwork", "RemotingClient", "RequestProcessor"]

_SCAN: Final = 1.0
_DRAIN: Final = 1.0
_LASTED: Final = 10.0
"""Seconds after which a connection counts as a success, even if the server never sent anything."""


class _Peer:
    """The state of an address: its connection, or its failures to connect."""

    __slots__ = ("back_off", "connection", "error", "failures", "lock")

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.connection: ClientConnection | None = None
        self.back_off = BackOff()
        self.failures = 0
        self.error: OSError = TimeoutError()


class RemotingClient:
    """Talks to any number of servers, over one connection each that all callers share (RocketMQ's RemotingClient).

    An async context manager, which owns the connections; they are made on demand. When a connection breaks, the
    requests that wait on it fail, and the next request connects again. An address that cannot be reached is tried again
    after a growing, random delay; requests wait for that as far as their own timeout allows.

    ``encoding`` is the header encoding of new connections. With ``credentials`` every request is signed, those to name
    servers too; that does not change the command that is passed in. A connection is closed after ``idle`` seconds
    without traffic. With ``tls``, which clients may share, all connections are TLS connections, never plain ones.
    Faults are logged to ``log``, by default the standard library's logger "trimq.client.remoting".
    ``on_connect`` is called with each new connection, ``on_close`` with each that has ended.
    """

    def __init__(
        self,
        *,
        encoding: Encoding = Encoding.JSON,
        credentials: Credentials | None = None,
        connect_timeout: float = 3.0,
        idle: float = 120.0,
        clock: Clock | None = None,
        network: ClientNetwork | None = None,
        log: ClientLog | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._encoding = encoding
        self.signer: Signer | None = None if credentials is None else Signer(credentials, clock)
        self.encode: Callable[[RemotingCommand], bytes] = encode if self.signer is None else self.signer.encode
        self._connect_timeout = connect_timeout
        self._idle = idle
        self._clock = clock or SystemClock()
        self._network = network or SocketNetwork()
        self._log = log or StandardLog("trimq.client.remoting")
        self._tls = tls
        self._own: dict[str, ClientTls] = {}
        self._processors: dict[int, RequestProcessor] = {}
        self._peers: dict[str, _Peer] = {}
        self._opaque = 0
        self._tasks: TaskGroup | None = None
        self._lifetime: AbstractAsyncContextManager[None]
        self.on_connect: list[Callable[[ClientConnection], None]] = []
        self.on_close: list[Callable[[ClientConnection], None]] = []

    async def __aenter__(self) -> Self:
        self._lifetime = self._live()
        await self._lifetime.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return await self._lifetime.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if group.exceptions == (error,):  # not wrapped in a group: it is the caller's own exception
                return False
            raise

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._scan)
            try:
                yield
                with anyio.move_on_after(_DRAIN):  # accepted one-ways are still sent
                    for connection in self._connections():
                        await connection.drained()
            finally:
                self._tasks = None
                tasks.cancel_scope.cancel()

    async def invoke(self, address: str, command: RemotingCommand, timeout: float = 3.0) -> RemotingCommand:
        """Send a request to ``address`` ("host:port") and return the reply, of any code.

        ``command`` gets its number and is encoded before anything is awaited on the connection; the caller may then use
        it again. Raises RemotingConnectError, RemotingSendError if the connection ended, RemotingTimeoutError after
        ``timeout`` seconds in all, and FrameError if the request is too long for a frame.
        """
        connection = self._open(address)
        if connection is not None and connection.has_space:
            deadline = connection.now() + timeout
        else:
            deadline = anyio.current_time() + timeout
            connection = await self.with_space(address, command.code, timeout)
        call = connection.new_call()
        self.begin(connection, command, deadline, call)
        try:
            await call.wait()
        finally:
            connection.end(call)
        if call.reply is not None:
            return call.reply
        raise no_reply(connection, call, command.code, timeout)

    async def connection(self, address: str, timeout: float = 3.0) -> ClientConnection:
        """The connection to ``address``, for ``begin``. Raises RemotingConnectError."""
        return await self._connection(address, anyio.current_time() + timeout)

    def begin(self, connection: ClientConnection, command: RemotingCommand, deadline: float, call: Call) -> None:
        """Send a request and return; ``call`` is finished by its reply, or at ``deadline`` (the connection's ``now``).

        The caller has to end the call with the connection's ``end``. Raises FrameError if it is too long for a frame.
        """
        self._opaque = command.opaque = self._opaque % 0x7FFFFFFF + 1
        connection.begin(command, deadline, call)

    def begin_frame(
        self, connection: ClientConnection, frame: Callable[[int, Encoding], bytes], deadline: float, call: Call
    ) -> None:
        """As ``begin``, for callers that encode frames: ``frame`` gets the request's opaque number and the encoding.

        They sign their frames themselves, with ``signer``, or by making them with ``encode``.
        """
        self._opaque = opaque = self._opaque % 0x7FFFFFFF + 1
        connection.begin_frame(opaque, frame(opaque, connection.encoding), deadline, call)

    async def with_space(self, address: str, code: int, timeout: float = 3.0) -> ClientConnection:
        """The connection to ``address``, once a request of ``code`` can be queued on it.

        Raises RemotingConnectError, RemotingSendError and RemotingTimeoutError; in all cases nothing was sent.
        """
        deadline = anyio.current_time() + timeout
        connection = await self._connection(address, deadline)
        if not connection.has_space:
            with anyio.CancelScope(deadline=deadline) as scope:
                await connection.wait_for_space()
            if scope.cancelled_caught:
                raise RemotingTimeoutError(address, code, timeout, written=False)
        return connection

    async def invoke_oneway(self, address: str, command: RemotingCommand, timeout: float = 3.0) -> None:
        """Queue a one-way request on the connection to ``address``; it may still get lost.

        Raises RemotingConnectError, RemotingSendError, RemotingTimeoutError (no space to queue it), FrameError.
        """
        deadline = anyio.current_time() + timeout
        connection = await self._connection(address, deadline)
        command.flag |= ONEWAY_FLAG
        with anyio.CancelScope(deadline=deadline):
            await connection.wait_for_space()
            self._opaque = command.opaque = self._opaque % 0x7FFFFFFF + 1
            connection.send(command)
            return
        raise RemotingTimeoutError(address, command.code, timeout, written=False)

    def is_own(self, address: str) -> None:
        """The server at ``address`` is in this process: with TLS, its certificate is not verified."""
        if self._tls is not None:
            self._own[address] = self._tls.unverified()

    def read_arrived(self) -> bool:
        """Process data that has already arrived on any connection. False if there was none. See ClientConnection."""
        arrived = False
        for peer in self._peers.values():
            if peer.connection is not None and peer.connection.read_arrived():
                arrived = True
        return arrived

    def register_processor(self, code: int, processor: RequestProcessor) -> None:
        """Serve servers' requests of ``code`` with ``processor``; its exceptions become error replies."""
        self._processors[int(code)] = processor

    def use_encoding(self, address: str, encoding: Encoding) -> None:
        """Use ``encoding`` on the current connection to ``address``. No effect if there is none."""
        connection = self._open(address)
        if connection is not None:
            connection.encoding = encoding

    def is_connected(self, address: str) -> bool:
        """Whether there is a connection to ``address`` now."""
        return self._open(address) is not None

    def disconnect(self, address: str, reason: str = "no longer wanted") -> None:
        """Close the connection to ``address``; the next request makes a new one."""
        connection = self._open(address)
        if connection is not None:
            connection.close(reason)

    def ready(self, address: str) -> ClientConnection | None:
        """The connection to ``address`` if a request can be queued on it without waiting, else None."""
        connection = self._open(address)
        return connection if connection is not None and connection.has_space else None

    def _open(self, address: str) -> ClientConnection | None:
        peer = self._peers.get(address)
        connection = peer.connection if peer else None
        return connection if connection and not connection.closed else None

    def _connections(self) -> list[ClientConnection]:
        return [peer.connection for peer in self._peers.values() if peer.connection is not None]

    async def _connection(self, address: str, deadline: float) -> ClientConnection:
        connection = self._open(address)
        if connection is not None:
            return connection
        tasks = self._tasks
        if tasks is None:
            raise RuntimeError("the client is not open: use it in `async with`")
        host, port = split_address(address)
        peer = self._peers.setdefault(address, _Peer())
        failures = peer.failures
        step = ""
        with anyio.CancelScope(deadline=deadline) as scope:
            async with peer.lock:
                connection = self._open(address)
                if connection is not None:
                    return connection
                if peer.failures != failures:  # another task has tried and failed while this one waited
                    raise RemotingConnectError(address, peer.error)
                await self._wait_turn(address, peer, deadline)
                step = "no answer in time"
                scope.deadline = min(deadline, anyio.current_time() + self._connect_timeout)
                try:
                    plain = await self._network.connect(host, port)
                    sock: socket.socket | TlsSocket = plain
                    if self._tls is not None:
                        step = "no answer to the TLS handshake in time"
                        sock = await self._secured(self._tls, address, plain, host)
                except OSError as error:
                    self._failed(peer, error)
                    raise RemotingConnectError(address, error) from error
                if self._tasks is not tasks:
                    sock.close()
                    raise RuntimeError("the client was closed while it connected")
                return self._adopt(address, peer, sock, tasks)
        if not step:
            raise RemotingConnectError(address, TimeoutError("another caller is still connecting"))
        self._failed(peer, TimeoutError(step))
        raise RemotingConnectError(address, peer.error)

    async def _secured(self, tls: ClientTls, address: str, sock: socket.socket, host: str) -> TlsSocket:
        tls = self._own.get(address, tls)
        try:
            return await secured(sock, host, tls, self._network)
        finally:  # the former files may be why it fails
            problem = tls.new_problem()
            if problem:
                self._log.warning("tls_reload_failed", reason=problem, address=address)

    async def _wait_turn(self, address: str, peer: _Peer, deadline: float) -> None:
        delay = peer.back_off.delay(self._clock.monotonic())
        if delay and anyio.current_time() + delay >= deadline:
            raise RemotingConnectError(address, peer.error, f"; tried again in {delay:.1f} s")
        if delay:
            await self._clock.sleep(delay)

    def _failed(self, peer: _Peer, error: OSError) -> None:
        peer.failures += 1
        peer.error = error
        peer.back_off.failed(self._clock.monotonic())

    def _adopt(self, address: str, peer: _Peer, sock: socket.socket | TlsSocket, tasks: TaskGroup) -> ClientConnection:
        connection = ClientConnection(
            address,
            sock,
            self._processors,
            partial(self._ended, peer),
            encoding=self._encoding,
            encode_request=self.encode,
            clock=self._clock,
            log=self._log,
            network=self._network,
        )
        peer.connection = connection
        tasks.start_soon(connection.run)
        self._notify(self.on_connect, connection)
        return connection

    def _ended(self, peer: _Peer, connection: ClientConnection) -> None:
        if peer.connection is connection:
            peer.connection = None
        if connection.received or self._clock.monotonic() - connection.began_at > _LASTED:
            peer.back_off.succeeded()
        elif self._tasks is not None:  # accepted and closed without a reply: the same as refused
            self._failed(peer, ConnectionError(connection.close_reason))
        self._notify(self.on_close, connection)

    async def _scan(self) -> None:
        while True:
            await self._clock.sleep(_SCAN)
            now = self._clock.monotonic()
            for connection in self._connections():
                if now - connection.active_at >= self._idle:
                    connection.close(f"neither sent nor received for {self._idle:g} s")

    def _notify(self, callbacks: list[Callable[[ClientConnection], None]], connection: ClientConnection) -> None:
        for callback in callbacks:
            try:
                callback(connection)
            except Exception as error:  # noqa: BLE001 - a fault of a listener must not end the connection
                self._log.failed("connection_callback_failed", error, address=connection.address)


def no_reply(connection: ClientConnection, call: Call, code: int, timeout: float) -> RemotingTransportError:
    """The error for a call that ended without a reply."""
    if connection.refused:
        return RemotingConnectError(connection.address, ConnectionError(connection.close_reason))
    if connection.closed:
        return RemotingSendError(connection.address, connection.close_reason, written=call.written)
    return RemotingTimeoutError(connection.address, code, timeout, written=call.written)


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6 address]:port". Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
