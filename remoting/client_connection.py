"""ClientConnection: one connection to a server, shared by everybody in this program who talks to that address."""

import math
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import anyio
import structlog
from anyio.abc import ByteStream, SocketAttribute, TaskGroup

from protocol.codes import ResponseCode
from protocol.command import Encoding, RemotingCommand
from protocol.errors import FrameError, RemotingError
from protocol.frame import FrameDecoder, encode
from remoting.client_call import Call, running_loop
from remoting.clock import Clock
from remoting.errors import RemotingSendError
from remoting.handlers import not_supported

_log = structlog.get_logger("remoting")

RequestProcessor: TypeAlias = Callable[
    ["ClientConnection", RemotingCommand], RemotingCommand | Awaitable[RemotingCommand | None] | None
]
"""Serves a request of the server: a plain function or a coroutine function; returns the reply, or None for none."""

_RECEIVE: Final = 64 * 1024
"""Bytes asked for at once. From 128 KiB on each buffer is a mapping of its own: 8 us to receive 34 KiB become 47."""
_SEND: Final = 256 * 1024
"""Bytes handed to the socket at once; what is behind them can still be taken back."""

_READS: Final = 3
"""More reads without a turn of the loop between: what comes while replies are served is there already."""

_FULL: Final = 8 * 1024 * 1024
"""Bytes waiting to be sent beyond which callers wait for room."""

_FEW: Final = 8
"""Up to so many requests under way, each goes to the socket at once; with more they gather for one system call."""

_TICKS: Final = 20
"""Deadlines are looked at so often a second: a cancel scope for each request would cost more than the request."""


class ClientConnection:
    """A connection to ``address`` ("host:port"). ``encoding`` is that of the headers sent from here on.

    ``data`` is for whoever has to remember something about it. ``close_reason`` says why it is closed.
    """

    def __init__(
        self,
        address: str,
        stream: ByteStream,
        processors: dict[int, RequestProcessor],
        on_close: Callable[["ClientConnection"], None],
        *,
        encoding: Encoding,
        clock: Clock,
    ) -> None:
        self.address = address
        self.encoding = encoding
        self.data: dict[str, Any] = {}
        self.closed = False
        self.close_reason = ""
        self.received = 0
        self.began_at = self.active_at = clock.monotonic()
        self._on_close = on_close
        self._clock = clock
        self._stream = stream
        self._processors = processors
        self._calls: dict[int, Call] = {}
        self._queue: list[bytes] = []
        self._queued = 0
        loop = running_loop()
        self.new_call = loop.call
        self.now = loop.now
        self._wanted = anyio.Event()
        self._room = anyio.Event()
        self._sending = False
        self._scope = anyio.CancelScope()
        self._event = type(self._room)  # of this backend; anyio.Event() asks which one runs each time
        self._deadlines: dict[int, list[int]] = {}
        self._next_tick: float = math.inf
        self._earlier = anyio.Event()
        raw = stream.extra(SocketAttribute.raw_socket, None)  # noqa: S610 - not Django's
        # Where the stream is nothing but a socket (on trio), the socket itself saves a turn of the loop for each use.
        self._socket: socket.socket | None = (
            raw if isinstance(raw, socket.socket) and loop.wait_readable is not None else None
        )
        self._wait_readable = loop.wait_readable or anyio.wait_readable
        self._reads_left = 0

    def __repr__(self) -> str:
        return f"<ClientConnection {self.address}{' closed' if self.closed else ''}>"

    @property
    def waiting(self) -> int:
        """Requests without a reply yet."""
        return len(self._calls)

    async def run(self) -> None:
        """Own the connection until it ends: read, write, serve the server's requests. Closed when this returns."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write)
                    tasks.start_soon(self._expire)
                    await self._read(tasks)
                    tasks.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - one connection's fault must not end the others
            _log.exception("connection_failed", address=self.address)
            self.close(f"internal error: {error!r}")
        finally:
            self.close("the client was closed")
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                await anyio.aclose_forcefully(self._stream)

    def close(self, reason: str) -> None:
        """End the connection: what waits for a reply fails with ``reason``. Nothing where it is closed already."""
        if self.closed:
            return
        self.closed = True
        self.close_reason = reason
        for call in list(self._calls.values()):
            call.finish()
        self._room.set()
        self._scope.cancel()
        self._on_close(self)

    def send(self, command: RemotingCommand) -> None:
        """Queue ``command``, numbered by its sender, in the connection's encoding. Raises FrameError (too long)."""
        command.encoding = self.encoding
        self._put(encode(command))

    def begin(self, command: RemotingCommand, deadline: float, call: Call) -> None:
        """Queue a request whose reply ``call`` wants until ``deadline`` (by ``now``). Raises FrameError (too long)."""
        command.encoding = self.encoding
        self.begin_frame(command.opaque, encode(command), deadline, call)

    def begin_frame(self, opaque: int, frame: bytes, deadline: float, call: Call) -> None:
        """As ``begin``, with the request's number and frame."""
        call.opaque = opaque
        call.frame = frame
        self._calls[opaque] = call
        tick = int(deadline * _TICKS) + 1
        try:
            self._deadlines[tick].append(opaque)
        except KeyError:
            self._deadlines[tick] = [opaque]
            if tick < self._next_tick:
                self._earlier.set()
        self._put(frame)

    def end(self, call: Call) -> None:
        """Forget a call; where it has not been handed to the socket, it never will be. Sets its ``written``."""
        if call.reply is None:
            self._calls.pop(call.opaque, None)
            try:
                self._queue.remove(call.frame)
            except ValueError:
                call.written = True
            else:
                self._queued -= len(call.frame)
                self._there_is_room()

    @property
    def has_room(self) -> bool:
        """Whether a request can be queued without waiting."""
        return self._queued < _FULL and not self.closed

    async def wait_for_room(self) -> None:
        """Return when there is room for one more request. Raises RemotingSendError where the connection has ended."""
        while self._queued >= _FULL and not self.closed:
            await self._room.wait()
        if self.closed:
            raise RemotingSendError(self.address, self.close_reason, written=False)

    async def drained(self) -> None:
        """Return when all that is queued has been handed to the socket, or the connection has ended."""
        while (self._queue or self._sending) and not self.closed:
            await self._room.wait()

    def _put(self, frame: bytes) -> None:
        if self._socket is not None and not self._queue and not self._sending and len(self._calls) <= _FEW:
            try:
                sent = self._socket.send(frame)
            except OSError:  # no room, or it is broken: the writer will see
                sent = 0
            if sent == len(frame):
                self.active_at = self._clock.monotonic()
                return
            frame = frame[sent:]
        if not self._queue:
            self._wanted.set()
        self._queue.append(frame)
        self._queued += len(frame)

    async def _write(self) -> None:
        try:
            while True:
                await self._wanted.wait()
                self._wanted = self._event()
                while self._queue:
                    self._sending = True
                    await self._send(self._take())
                    self._sending = False
                    self.active_at = self._clock.monotonic()
                    self._there_is_room()
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            self.close(f"the connection was lost: {_text(error)}")

    def _there_is_room(self) -> None:
        self._room.set()
        self._room = self._event()

    async def _send(self, data: bytes) -> None:
        if self._socket is not None:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        await self._stream.send(data)

    async def _expire(self) -> None:
        """Ends calls whose time is over."""
        while True:
            self._next_tick = min(self._deadlines, default=math.inf)
            self._earlier = self._event()
            with anyio.CancelScope(deadline=self._next_tick / _TICKS):
                await self._earlier.wait()
            now = self.now() * _TICKS
            for tick in [tick for tick in self._deadlines if tick <= now]:
                for opaque in self._deadlines.pop(tick):
                    call = self._calls.get(opaque)
                    if call is not None:
                        call.finish()

    def _take(self) -> bytes:
        count = size = 0
        for frame in self._queue:
            if count and size + len(frame) > _SEND:
                break
            count += 1
            size += len(frame)
        data = self._queue[0] if count == 1 else b"".join(self._queue[:count])
        del self._queue[:count]
        self._queued -= size
        return data

    async def _read(self, tasks: TaskGroup) -> None:
        decoder = FrameDecoder()
        try:
            while True:
                data = await self._receive()
                self.active_at = self._clock.monotonic()
                for command in decoder.feed(data):
                    self.received += 1
                    if command.is_reply:
                        self._reply_arrived(command)
                    else:
                        self._serve(command, tasks)
        except anyio.EndOfStream:
            self.close("the server has closed the connection")
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            self.close(f"the connection was lost: {_text(error)}")
        except FrameError as error:
            _log.warning("broken_frame", address=self.address, error=str(error))
            self.close(f"the server sent a broken frame: {error}")

    async def _receive(self) -> bytes:
        if self._socket is None:
            return await self._stream.receive(_RECEIVE)
        while True:
            if self._reads_left:
                self._reads_left -= 1
            else:
                await self._wait_readable(self._socket)
                self._reads_left = _READS
            try:
                data = self._socket.recv(_RECEIVE)
            except BlockingIOError:
                self._reads_left = 0
                continue
            if not data:
                raise anyio.EndOfStream
            return data

    def _reply_arrived(self, command: RemotingCommand) -> None:
        call = self._calls.pop(command.opaque, None)
        if call is not None:
            call.reply = command
            call.written = True
            call.finish()

    def _serve(self, command: RemotingCommand, tasks: TaskGroup) -> None:
        processor = self._processors.get(command.code)
        if processor is None:
            self._answer(command, not_supported(command))
            return
        try:
            outcome = processor(self, command)
        except Exception as error:  # noqa: BLE001 - a processor's fault ends one request
            outcome = self._failure(command, error)
        if outcome is None or isinstance(outcome, RemotingCommand):
            self._answer(command, outcome)
        else:
            tasks.start_soon(self._serve_later, command, outcome)

    async def _serve_later(self, command: RemotingCommand, outcome: Awaitable[RemotingCommand | None]) -> None:
        try:
            reply = await outcome
        except Exception as error:  # noqa: BLE001 - as above
            reply = self._failure(command, error)
        self._answer(command, reply)

    def _answer(self, command: RemotingCommand, reply: RemotingCommand | None) -> None:
        if reply is None or command.is_oneway or self.closed:
            return
        try:
            self._put(encode(reply))
        except FrameError as error:
            self._put(encode(command.reply(ResponseCode.SYSTEM_ERROR, f"the reply does not fit: {error}")))

    def _failure(self, command: RemotingCommand, error: Exception) -> RemotingCommand:
        if isinstance(error, RemotingError):
            return command.reply(error.code, error.remark)
        _log.error("request_failed", address=self.address, code=command.code, exc_info=error)
        return command.reply(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")


def _text(error: Exception) -> str:
    cause = error.__cause__ or error
    return str(cause) or type(cause).__name__
