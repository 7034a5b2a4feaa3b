"""Connection: one accepted client, as handlers and services see it."""

import socket
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any, Final, Protocol

import structlog
import trio

from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import encode, encode_head
from trimq.remoting.errors import RemotingSendError, RemotingTimeoutError
from trimq.remoting.server.big_frame import BigFrame
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome, Reply
from trimq.remoting.server.limits import ReactorLimits, ReactorStats
from trimq.remoting.server.out_buffer import Buffer, OutBuffer
from trimq.remoting.server.put_off import PutOff

_log = structlog.get_logger("remoting")

_LARGE_BODY: Final = 16 * 1024
"""A reply's body of this size is sent from where it is, not copied behind its header."""

PROBE_SECONDS: Final = 5


class _Pending:
    """A request of ours that waits for the client's reply."""

    __slots__ = ("event", "reply")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.reply: RemotingCommand | None = None


class ConnectionOwner(Protocol):
    """What a connection needs of the server that it belongs to (the Reactor). It knows nothing else of it."""

    @property
    def limits(self) -> ReactorLimits:
        """Of the server."""
        ...

    @property
    def stats(self) -> ReactorStats:
        """Of the server; requests in flight and held are counted by the connections."""
        ...

    @property
    def slices(self) -> trio.Lock:
        """Held by the one request of all connections that works on a long reply now."""
        ...

    def mark(self, conn: "Connection", /) -> None:
        """There is something to send."""
        ...

    def pause_if_over(self, conn: "Connection", /) -> bool:
        """Do not read a connection that has its high-water mark to send; whether it had."""
        ...

    def conclude(self, conn: "Connection", command: RemotingCommand, outcome: Outcome, /) -> None:
        """Do what the outcome of a request asks for."""
        ...

    def request_ended(self) -> None:
        """A request is not in flight any more."""
        ...

    def resumed(self, conn: "Connection", put_off: PutOff, /) -> None:
        """It takes replies again: start what waits."""
        ...

    def hook_failed(self, hook: Callable[..., object], error: Exception, /) -> None:
        """What was called beside the requests has raised."""
        ...

    def next_opaque(self) -> int:
        """The number of a request of ours."""
        ...

    def serve_group(self) -> None:
        """Serve the frames that wait for others of their round: one of their connections is closed next."""
        ...

    def forget(self, conn: "Connection", reason: str, *, broken: bool, quiet: bool) -> None:
        """It is closed; its socket is still open."""
        ...

    def client_gone(self, conn: "Connection", /) -> None:
        """What waits for a closed connection need not begin."""
        ...


class Connection:
    """A client's connection. Everything here is called in the reactor's own loop, from handlers or from other tasks.

    ``peer`` and ``peer_text`` ("ip:port") say who it is, ``encoding`` is that of the client's last frame, ``data`` is
    for whoever has to remember something about it, and ``on_close`` is called once with it when it is gone.
    ``inflight`` and ``held`` count requests without a reply and long polls. ``slices`` is held by the one request of
    all connections that works on a long reply now.

    Replies leave by ``reply`` and ``reply_with`` alone, requests in flight are counted by ``begin`` and ``end`` alone.
    """

    __slots__ = (
        "__weakref__",
        "_owner",
        "_pending",
        "_put_off",
        "_stats",
        "active_at",
        "admission",
        "aside",
        "big",
        "closed",
        "data",
        "dirty",
        "encoding",
        "frame",
        "held",
        "in_group",
        "inflight",
        "mask",
        "on_close",
        "oneways",
        "out",
        "paused",
        "peer",
        "peer_text",
        "ready",
        "rest",
        "slices",
        "sock",
        "table",
        "tasks",
    )

    def __init__(self, sock: socket.socket, peer: tuple[str, int], table: HandlerTable, owner: ConnectionOwner) -> None:
        self.peer = peer
        self.peer_text = f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"
        self.encoding: Encoding = Encoding.JSON
        self.closed = False
        self.data: dict[str, Any] = {}
        self.admission: object = None  # the gate's
        self.on_close: list[Callable[[Connection], None]] = []
        self.inflight = 0
        self.held = 0
        self.slices = owner.slices
        # The rest is the reactor's.
        self.sock = sock
        self.table = table
        self.in_group = False  # has frames that wait for others of their round
        self.out = OutBuffer()
        self.rest = b""  # bytes received and not yet served
        self.ready = False  # rest begins with a whole frame
        self.big: BigFrame | None = None
        self.dirty = False  # will be flushed at the end of the round
        self.paused = False  # not read until its out-buffer has drained
        self.aside = False  # not read until there is memory for its unfinished frame
        self.frame = 0  # number of the unfinished frame
        self.mask = 0  # what the selector watches
        self.active_at = 0.0
        self.tasks = 0  # requests that run as tasks, with those that wait for it
        self.oneways = 0  # the one-ways among them
        self._put_off: PutOff | None = None
        self._owner = owner
        self._stats = owner.stats
        self._pending: dict[int, _Pending] = {}

    def __repr__(self) -> str:
        return f"<Connection {self.peer_text}{' closed' if self.closed else ''}>"

    @property
    def waiting(self) -> int:
        """Bytes that wait to be sent."""
        return self.out.queued - self.out.sent

    @property
    def put_off(self) -> PutOff:
        """What waits here; made when it is first needed."""
        if self._put_off is None:
            self._put_off = PutOff()
        return self._put_off

    def is_over(self) -> bool:
        """Whether it has its high-water mark or more to send. Then nothing is begun that would bring it more."""
        return not self.closed and (self.paused or self._owner.pause_if_over(self))

    async def drained(self) -> None:
        """Return when it is not over its mark any more, or closed."""
        while not self.closed and self.is_over():
            await self.put_off.lot.park()

    def when_drained(self, key: Hashable, callback: Callable[[], object]) -> None:
        """Call ``callback`` once when it is not over its mark any more, for each ``key`` the last one; never if closed.

        To be used where ``is_over()`` was true.
        """
        self.put_off.callbacks[key] = callback

    def resume(self) -> None:
        """It has drained: go on with what had to wait. Called by the reactor."""
        put_off = self._put_off
        if put_off is None:
            return
        put_off.lot.unpark_all()
        self._owner.resumed(self, put_off)
        callbacks, put_off.callbacks = put_off.callbacks, {}
        for callback in callbacks.values():
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - a fault in work put off must not end every connection
                self._owner.hook_failed(callback, error)

    def reply(self, reply: Reply) -> None:
        """Queue a reply: whole frames, or a command that goes in its own encoding. None: nothing.

        It is sent at the end of the reactor's round, or as soon as the calling task has yielded. One that is too long
        for a frame becomes an error reply. Nothing happens on a closed connection.
        """
        if type(reply) is bytes:
            if not self.closed:
                out = self.out
                out.chunks.append(reply)
                out.queued += len(reply)
                if not self.dirty:
                    self._owner.mark(self)
        elif isinstance(reply, RemotingCommand):
            try:
                self._send(reply)
            except FrameError as error:
                self._send(reply.reply(ResponseCode.SYSTEM_ERROR, f"the reply does not fit: {error}"))

    def reply_with(self, buffers: Iterable[Buffer], release: Callable[[], None] | None = None) -> None:
        """The same for a frame in pieces: bytes, or views of memory that somebody has to keep until ``release``.

        ``release`` is called when they have been sent, or at once when the connection is gone. It must not raise.
        """
        if self.closed:
            if release is not None:
                release()
            return
        out = self.out
        for buffer in buffers:
            out.chunks.append(buffer)
            out.queued += len(buffer)
        if not self.dirty:
            self._owner.mark(self)
        if release is not None:
            out.on_sent(release)

    def _send(self, command: RemotingCommand) -> None:
        """Queue ``command`` in its own encoding. Raises FrameError where it is too long for a frame."""
        body = command.body
        if type(body) is bytes and len(body) >= _LARGE_BODY:
            self.reply_with((encode_head(command, len(body)), body))
        else:
            self.reply(encode(command))

    def send_oneway(self, command: RemotingCommand) -> bool:
        """Queue a request of ours that wants no reply, in the encoding of the client's last frame.

        False: it was not, because the connection is over its mark; ``when_drained`` tells when to try again.
        """
        if self.is_over():
            return False
        self._number(command)
        self._send(command)
        return True

    async def request(self, command: RemotingCommand, timeout: float) -> RemotingCommand:
        """Ask the client and wait for its reply, ``timeout`` seconds at most.

        Raises RemotingTimeoutError, RemotingSendError (the connection ended, or is over its mark), FrameError (too
        long for a frame).
        """
        if self.closed:
            raise RemotingSendError(self.peer_text, "the connection is closed", written=False)
        if self.is_over():
            raise RemotingSendError(self.peer_text, "the client does not take what it has been sent", written=False)
        self._number(command)
        pending = self._pending[command.opaque] = _Pending()
        try:
            self._send(command)
            end = self.out.queued
            with trio.move_on_after(timeout):
                await pending.event.wait()
            if pending.reply is not None:
                return pending.reply
            written = self.out.sent >= end
            if self.closed:
                raise RemotingSendError(self.peer_text, "the connection was closed", written=written)
            raise RemotingTimeoutError(self.peer_text, command.code, timeout, written=written)
        finally:
            self._pending.pop(command.opaque, None)

    # requests in flight

    def begin(self, count: int = 1) -> None:
        """So many requests are in flight until ``end`` or ``complete``."""
        if not self.closed:
            self.inflight += count
            self._stats.inflight += count

    def end(self, count: int = 1) -> None:
        """They are not any more. Nothing happens on a closed connection, whose requests were given back."""
        if not self.closed:
            self.inflight -= count
            self._stats.inflight -= count
            self._owner.request_ended()

    def complete(self, reply: Reply, count: int = 1) -> None:
        """The end of a DEFERRED request: ``reply`` is queued, unless it is None (one-way, or already written).

        bytes may be the replies to ``count`` of them.
        """
        self.end(count)
        self.reply(reply)

    def hold(self) -> None:
        """A request is held until ``settle``: a long poll, which does not count as in flight."""
        if not self.closed:
            self.held += 1
            self._stats.held += 1

    def settle(self, command: RemotingCommand, outcome: Outcome) -> None:
        """The end of a HELD request: ``outcome`` is what its handler would have returned; HELD again is possible.

        On a closed connection only an awaitable is closed.
        """
        if self.closed:
            _drop(outcome)
            return
        self.held -= 1
        self._stats.held -= 1
        self._owner.conclude(self, command, outcome)

    def close(self, reason: str, *, broken: bool = False, quiet: bool = False) -> None:
        """End the connection now: what is queued is offered to the socket once, the rest is dropped.

        ``reason`` goes to the log: a warning where the peer is to blame (``broken``), for debugging only if ``quiet``.
        """
        if self.in_group:
            self._owner.serve_group()
        if self.closed:
            return
        if self.out.chunks:
            with suppress(OSError):
                self.out.flush(self.sock)
        self.closed = True
        stats = self._stats
        stats.inflight -= self.inflight
        stats.held -= self.held
        self.inflight = self.held = 0
        self._owner.forget(self, reason, broken=broken, quiet=quiet)
        self.sock.close()
        self.ready = False
        self.out.discard()
        if self._put_off is not None:
            self._put_off.callbacks.clear()
            self._owner.client_gone(self)
            self.resume()
        for pending in self._pending.values():
            pending.event.set()
        callbacks, self.on_close = self.on_close, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - one listener's fault must not hide the end from the others
                _log.exception("on_close_failed", peer=self.peer_text)

    def probe(self) -> None:
        """Have the kernel ask the peer whether it is there: one that is gone is closed within ``PROBE_SECONDS``.

        A peer that lives notices nothing. For connections that were cut without a word (a machine or a container that
        is gone), which would stay open until somebody finds them silent.
        """
        with suppress(OSError):  # not a TCP socket, or gone already
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBE_SECONDS - 1)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PROBE_SECONDS * 1000)

    def reply_arrived(self, command: RemotingCommand) -> None:
        """A reply of the client to a request of ours; ignored where nobody waits for it any more."""
        pending = self._pending.get(command.opaque)
        if pending is not None and pending.reply is None:
            command.copy_buffers()
            pending.reply = command
            pending.event.set()

    def _number(self, command: RemotingCommand) -> None:
        command.opaque = self._owner.next_opaque()
        command.encoding = self.encoding


def _drop(outcome: Outcome) -> None:
    close = getattr(outcome, "close", None)
    if close is not None and isinstance(outcome, Awaitable):
        close()
