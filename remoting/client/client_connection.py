"""ClientConnection: one connection to a server, shared by all callers in this program that use its address."""

import math
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import anyio
from anyio.abc import TaskGroup

from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import REPLY_FLAG, Encoding, RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import encode
from trimq.protocol.frame_buffer import FrameBuffer
from trimq.protocol.not_supported import not_supported
from trimq.remoting.client.call import Call, WaitingCall, running_loop
from trimq.remoting.client.client_log import ClientLog
from trimq.remoting.client.client_socket import ClientNetwork
from trimq.remoting.errors import RemotingSendError
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.tls.tls_socket import TlsSocket
from trimq.remoting.tls.tls_texts import is_certificate_refused

RequestProcessor: TypeAlias = Callable[
    ["ClientConnection", RemotingCommand], RemotingCommand | Awaitable[RemotingCommand | None] | None
]
"""Serves a request of the server: a plain or a coroutine function that returns the reply, or None for no reply."""

_SEND: Final = 256 * 1024
"""The most bytes passed to the socket at a time; frames queued after them can still be taken back."""

_READS: Final = 3
"""Further reads without a turn of the loop between them: more often has arrived while replies were processed."""

_FULL: Final = 8 * 1024 * 1024
"""Bytes waiting to be sent from which on callers wait for space."""

_FEW: Final = 8
"""With up to this many requests in flight, each is sent immediately; with more they are gathered into one send."""

_TICK: Final = 0.05
"""The least seconds between two checks of deadlines. A cancel scope per request would cost more than the request."""


class ClientConnection:
    """A connection to ``address`` ("host:port"). ``encoding`` is the encoding of headers sent from now on.

    ``encode_request`` makes the frames of requests: it signs them if there are credentials. Replies are not signed.
    ``data`` is free for callers that store state per connection. ``close_reason`` is why it was closed. ``refused`` is
    whether the server did not accept this side's certificate: with TLS 1.3 it looks at that after the client's end of
    the handshake, and decrypts no request before.
    """

    def __init__(  # noqa: PLR0913 - what a RemotingClient gives to its connections, by keyword
        self,
        address: str,
        sock: socket.socket | TlsSocket,
        processors: dict[int, RequestProcessor],
        on_close: Callable[["ClientConnection"], None],
        *,
        encoding: Encoding,
        encode_request: Callable[[RemotingCommand], bytes] = encode,
        clock: Clock,
        log: ClientLog,
        network: ClientNetwork,
    ) -> None:
        self.address = address
        self.encoding = encoding
        self.data: dict[str, Any] = {}
        self.closed: bool = False
        self.close_reason: str = ""
        self.refused: bool = False
        self.received: int = 0
        self.began_at: float = clock.monotonic()
        self.active_at: float = self.began_at
        self._on_close = on_close
        self._encode_request = encode_request
        self._clock = clock
        self._log = log
        self._socket = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._raw = sock.raw if isinstance(sock, TlsSocket) else sock  # what the loop waits for
        self._begun: bytes | None = None  # first in the queue, and encrypted: it cannot be taken back
        self._wait_writable = network.wait_writable
        self._processors = processors
        self._calls: dict[int, Call] = {}
        self._queue: list[bytes] = []
        self._queued = 0
        loop = running_loop()
        self.new_call: Callable[[], WaitingCall] = loop.call
        self.now: Callable[[], float] = loop.now
        self._wanted = anyio.Event()
        self._space = anyio.Event()
        self._sending = False
        self._scope = anyio.CancelScope()
        self._event = type(self._space)  # this backend's class; anyio.Event() looks up the backend at each call
        self._next_check: float = math.inf
        self._earlier = anyio.Event()
        self._arrived = FrameBuffer()
        self._readable = network.readable(self._raw)
        self._tasks: TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<ClientConnection {self.address}{' closed' if self.closed else ''}>"

    @property
    def waiting(self) -> int:
        """Requests without a reply yet."""
        return len(self._calls)

    async def run(self) -> None:
        """Read, write and serve the server's requests until the connection ends. It is closed when this returns."""
        try:
            with self._scope:
                async with anyio.create_task_group() as self._tasks:
                    self._tasks.start_soon(self._write)
                    self._tasks.start_soon(self._expire)
                    await self._read()
                    self._tasks.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - a fault of one connection must not end the others
            self._log.failed("connection_failed", error, address=self.address)
            self.close(f"internal error: {error!r}")
        finally:
            self.close("the client was closed")
            self._readable.close()
            self._socket.close()

    def close(self, reason: str) -> None:
        """Close the connection: calls without a reply fail with ``reason``. No effect if it is closed already."""
        if self.closed:
            return
        self.closed = True
        self.close_reason = reason
        for call in list(self._calls.values()):
            call.finish()
        self._space.set()
        self._scope.cancel()
        self._on_close(self)

    def send(self, command: RemotingCommand) -> None:
        """Queue ``command``, which is numbered already, in the connection's encoding. Raises FrameError if too long."""
        command.encoding = self.encoding
        self._put(self._encode_request(command))

    def begin(self, command: RemotingCommand, deadline: float, call: Call) -> None:
        """Queue a request for ``call``, which ends at ``deadline`` (by ``now``). Raises FrameError if too long."""
        command.encoding = self.encoding
        self.begin_frame(command.opaque, self._encode_request(command), deadline, call)

    def begin_frame(self, opaque: int, frame: bytes, deadline: float, call: Call) -> None:
        """As ``begin``, for an encoded request: its opaque number and its frame."""
        call.opaque = opaque
        call.frame = frame
        call.deadline = deadline
        self._calls[opaque] = call
        if deadline < self._next_check:
            self._next_check = deadline
            self._earlier.set()
        self._put(frame)

    def end(self, call: Call) -> None:
        """Forget a call. A request not yet passed to the socket never will be. Sets ``written`` of the call."""
        if call.reply is None:
            self._calls.pop(call.opaque, None)
            if call.frame is self._begun:
                call.written = True
                return
            try:
                self._queue.remove(call.frame)
            except ValueError:
                call.written = True  # not queued any more, or its first part was sent
            else:
                self._queued -= len(call.frame)
                self._notify_space()

    @property
    def has_space(self) -> bool:
        """Whether a request can be queued without waiting."""
        return self._queued < _FULL and not self.closed

    async def wait_for_space(self) -> None:
        """Return when one more request can be queued. Raises RemotingSendError if the connection has ended."""
        while self._queued >= _FULL and not self.closed:
            await self._space.wait()
        if self.closed:
            raise RemotingSendError(self.address, self.close_reason, written=False)

    async def drained(self) -> None:
        """Return when everything queued has been passed to the socket, or the connection has ended."""
        while (self._queue or self._sending) and not self.closed:
            await self._space.wait()

    def _put(self, frame: bytes) -> None:
        # Only while nothing is queued or being sent: a frame must not overtake another, or get into the middle of it.
        if not self._queue and not self._sending and len(self._calls) <= _FEW:
            try:
                sent = self._socket.send(frame)
            except OSError:  # the socket is full or broken: the writer finds out
                sent = 0
                if self._tls is not None and self._tls.encrypted:
                    self._begun = frame
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
                    self._notify_space()
        except OSError as error:
            self.close(f"the connection was lost: {_text(error)}")

    def _notify_space(self) -> None:
        self._space.set()
        self._space = self._event()

    async def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await self._wait_writable(self._raw)

    async def _expire(self) -> None:
        """End calls whose deadline has passed. Most calls end long before theirs, so few checks are needed."""
        while True:
            self._earlier = self._event()
            with anyio.CancelScope(deadline=self._next_check):
                await self._earlier.wait()
                continue  # a call with an earlier deadline has come: wait for that one
            for call in [call for call in self._calls.values() if call.deadline <= self.now()]:
                call.finish()
            await anyio.sleep(_TICK)
            self._next_check = min((call.deadline for call in self._calls.values()), default=math.inf)

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
        self._begun = None
        return data

    async def _read(self) -> None:
        if self._tls is not None:
            self.read_arrived()  # it may have arrived with the end of the handshake, which no event reports
        while not self.closed:
            await self._readable.wait()
            reads = 1 + _READS
            while reads and self.read_arrived():
                reads -= 1

    def read_arrived(self) -> bool:
        """Read and process the data that has already arrived. False if there was none.

        For a caller that is about to wait for a reply: it saves a turn of the loop. An error closes the connection.
        """
        tasks = self._tasks
        if self.closed or tasks is None:
            return False
        try:
            count = self._socket.recv_into(self._arrived.space())
            if not count:
                mute = self._tls is None and not self.received
                hint = "; it has answered nothing: it may serve TLS only" if mute else ""
                self.close(f"the server closed the connection{hint}")
                return False
            self.active_at = self._clock.monotonic()
            # In the order of arrival, replies and requests alike: the reading task would process them in no other.
            for command in self._arrived.received(count):
                self.received += 1
                if command.flag & REPLY_FLAG:
                    self._reply_arrived(command)
                else:
                    self._serve(command, tasks)
        except BlockingIOError:
            return False
        except OSError as error:
            self.refused = not self.received and is_certificate_refused(error)
            self.close(f"the connection was lost: {_text(error)}")
            return False
        except FrameError as error:
            self._log.warning("broken_frame", address=self.address, error=str(error))
            self.close(f"the server sent a broken frame: {error}")
            return False
        except Exception as error:  # noqa: BLE001 - the caller may be waiting on another connection
            self._log.failed("connection_failed", error, address=self.address)
            self.close(f"internal error: {error!r}")
            return False
        if self._tls is not None and self._tls.has_bytes:  # what did not fit: no event reports it
            self.read_arrived()
        return True

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
        self._log.failed("request_failed", error, address=self.address, code=command.code)
        return command.reply(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
