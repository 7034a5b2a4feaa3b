"""Connection: one accepted client, as handlers and services use it."""

import socket
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any, Final, Protocol

import structlog
import trio

from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import encode, encode_head
from trimq.remoting.errors import RemotingSendError, RemotingTimeoutError
from trimq.remoting.server.big_frame import BigFrame
from trimq.remoting.server.callers import Caller
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome, Reply
from trimq.remoting.server.limits import ReactorLimits, ReactorStats
from trimq.remoting.server.out_buffer import Buffer, OutBuffer
from trimq.remoting.server.put_off import PutOff
from trimq.remoting.tls.tls_socket import ByteSocket, TlsSocket

_log = structlog.get_logger("remoting")

_LARGE_BODY: Final = 16 * 1024
"""A reply body of at least this size is queued as a buffer of its own; a shorter one is copied behind its header."""

PROBE_SECONDS: Final = 5
"""Seconds after which a probed peer that does not respond counts as lost."""


class _Pending:
    """A request sent by the server that waits for the client's reply."""

    __slots__ = ("event", "reply")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.reply: RemotingCommand | None = None


class ConnectionOwner(Protocol):
    """The part of its server (the Reactor) that a connection uses. It knows nothing else of it."""

    @property
    def limits(self) -> ReactorLimits:
        """The server's limits."""
        ...

    @property
    def stats(self) -> ReactorStats:
        """The server's counters. Connections themselves count requests in flight and held requests."""
        ...

    @property
    def slices(self) -> trio.Lock:
        """Lock held by the one request, over all connections, that is currently producing a long reply."""
        ...

    def mark(self, conn: "Connection", /) -> None:
        """Schedule a flush: ``conn`` has queued something to send."""
        ...

    def pause_if_over(self, conn: "Connection", /) -> bool:
        """If ``conn`` has reached its high-water mark, stop reading it. Returns whether it has."""
        ...

    def conclude(self, conn: "Connection", command: RemotingCommand, outcome: Outcome, /) -> None:
        """Act on the outcome of a request."""
        ...

    def request_ended(self) -> None:
        """Note that a request is no longer in flight."""
        ...

    def resumed(self, conn: "Connection", put_off: PutOff, /) -> None:
        """Start the tasks that waited for ``conn`` to drain."""
        ...

    def hook_failed(self, hook: Callable[..., object], error: Exception, /) -> None:
        """Count and log an exception of a callback that belongs to no request."""
        ...

    def not_encoded(self, conn: "Connection", command: RemotingCommand, error: Exception, /) -> RemotingCommand:
        """Count and log that ``command`` cannot be encoded. Returns the error reply for the case that it is a reply."""
        ...

    def next_opaque(self) -> int:
        """The opaque number for a request sent by the server."""
        ...

    def serve_group(self) -> None:
        """Serve the frames held for their round now, because one of their connections is about to be closed."""
        ...

    def forget(self, conn: "Connection", reason: str, *, broken: bool, quiet: bool) -> None:
        """Remove ``conn`` from the server. Called while its socket is still open."""
        ...

    def client_closed(self, conn: "Connection", /) -> None:
        """Drop the requests of a closed connection that have not started."""
        ...


class Connection:
    """A client's connection. All of it is used in the reactor's trio loop only, by handlers and by other tasks.

    ``peer`` and ``peer_text`` ("ip:port") are the client's address. ``encoding`` is the encoding of the client's last
    frame. ``data`` is free for services that store state per connection. Each function in ``on_close`` is called once
    with the connection after it was closed. ``inflight`` counts requests without a reply, without the one-ways that run
    as tasks (``oneways``), and ``held`` long polls. ``slices`` is the server's lock for producing long replies
    (ConnectionOwner.slices). ``tls`` is the encryption of the connection, None if it is plain.

    Replies are queued by ``reply`` and ``reply_with`` only, requests in flight counted by ``begin`` and ``end``,
    ``begin_task`` and ``end_task`` only.
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
        "origin",
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
        "tls",
    )

    def __init__(self, sock: ByteSocket, peer: tuple[str, int], table: HandlerTable, owner: ConnectionOwner) -> None:
        self.came_from(peer)
        self.origin: Caller | None = None  # set and read by Origins
        self.encoding: Encoding = Encoding.JSON
        self.closed = False
        self.data: dict[str, Any] = {}
        self.admission: object = None  # set and compared by the gate
        self.on_close: list[Callable[[Connection], None]] = []
        self.tls: TlsSocket | None = None
        self.inflight = 0
        self.held = 0
        self.slices = owner.slices
        # The attributes below are used by the reactor and its parts only.
        self.sock = sock  # until its first bytes and its handshake have arrived, a stand-in
        self.table = table
        self.in_group = False  # has frames held for the end of the round
        self.out = OutBuffer()
        self.rest = b""  # bytes received and not served yet
        self.ready = False  # ``rest`` starts with a complete frame
        self.big: BigFrame | None = None
        self.dirty = False  # is marked to be flushed at the end of the round
        self.paused = False  # not read until its out-buffer has drained
        self.aside = False  # not read until there is memory for its unfinished frame
        self.frame = 0  # number of the unfinished frame
        self.mask = 0  # what the selector watches
        self.active_at = 0.0
        self.tasks = 0  # requests that run as tasks or wait to be started as one, also after the close
        self.oneways = 0  # the one-way requests among them
        self._put_off: PutOff | None = None
        self._owner = owner
        self._stats = owner.stats
        self._pending: dict[int, _Pending] = {}

    def __repr__(self) -> str:
        return f"<Connection {self.peer_text}{' closed' if self.closed else ''}>"

    def came_from(self, peer: tuple[str, int]) -> None:
        """Set the client's address: that of the socket, or the one that a proxy has named."""
        self.peer = peer
        self.peer_text = f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"

    @property
    def waiting(self) -> int:
        """Bytes queued and not sent yet."""
        return self.out.queued - self.out.sent

    @property
    def put_off(self) -> PutOff:
        """The work that waits for this connection; created on first use."""
        if self._put_off is None:
            self._put_off = PutOff()
        return self._put_off

    def is_over(self) -> bool:
        """Whether it has its high-water mark or more to send. If so, nothing may be started that adds to it."""
        return not self.closed and (self.paused or self._owner.pause_if_over(self))

    async def drained(self) -> None:
        """Return when it is below its mark again, or closed."""
        while not self.closed and self.is_over():
            await self.put_off.lot.park()

    def when_drained(self, key: Hashable, callback: Callable[[], object]) -> None:
        """Call ``callback`` once when the connection is below its mark again; never if it is closed before.

        A second callback for the same ``key`` replaces the first. To be used only after ``is_over()`` returned True.
        """
        self.put_off.callbacks[key] = callback

    def resume(self) -> None:
        """Continue the work that waited for the connection to drain. Called by the reactor."""
        put_off = self._put_off
        if put_off is None:
            return
        put_off.lot.unpark_all()
        self._owner.resumed(self, put_off)
        # Replaced before the calls: a callback may find the connection over its mark again, and register again.
        callbacks, put_off.callbacks = put_off.callbacks, {}
        for callback in callbacks.values():
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - a fault in deferred work must not end every connection
                self._owner.hook_failed(callback, error)

    def reply(self, reply: Reply) -> None:
        """Queue a reply: complete frames, or a command, which is encoded in its own encoding. None queues nothing.

        It is sent at the end of the reactor's round, or outside of rounds once the calling task yields. A command that
        cannot be encoded is replaced by an error reply, or ends the connection if that cannot be encoded either: never
        the caller, which may serve other connections too. On a closed connection the reply is dropped.
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
            except Exception as error:  # noqa: BLE001 - whatever a reply holds: it must not end every connection
                self._send_instead(reply, error)

    def reply_with(self, buffers: Iterable[Buffer], release: Callable[[], None] | None = None) -> None:
        """Queue a frame in pieces: bytes, or views of memory that has to stay valid until ``release`` is called.

        ``release`` is called when the pieces have been sent, or immediately if the connection is closed. It must not
        raise.
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

    def _send_instead(self, reply: RemotingCommand, error: Exception) -> None:
        try:
            self._send(self._owner.not_encoded(self, reply, error))
        except Exception as failure:  # noqa: BLE001 - as in ``reply``
            self.close(f"server error: neither a reply nor its error could be encoded: {type(failure).__name__}")

    def _send(self, command: RemotingCommand) -> None:
        """Queue ``command`` in its own encoding. Raises FrameError if it cannot be encoded."""
        body = command.body
        if type(body) is bytes and len(body) >= _LARGE_BODY:
            self.reply_with((encode_head(command, len(body)), body))
        else:
            self.reply(encode(command))

    def send_oneway(self, command: RemotingCommand) -> bool:
        """Queue a one-way request to the client, in the encoding of the client's last frame.

        False: it was not queued, because the connection is over its mark (``is_over``; ``when_drained`` calls back for
        a retry), or because it cannot be encoded, which is counted and logged. It raises nothing: the callers are
        services, and what they send has names that clients have chosen.
        """
        if self.is_over():
            return False
        self._number(command)
        try:
            self._send(command)
        except Exception as error:  # noqa: BLE001 - as in ``reply``
            self._owner.not_encoded(self, command, error)
            return False
        return True

    async def request(self, command: RemotingCommand, timeout: float) -> RemotingCommand:
        """Send the client a request and wait for its reply, ``timeout`` seconds at most.

        Raises RemotingTimeoutError, RemotingSendError if the connection was closed or is over its mark, and FrameError
        if the request cannot be encoded.
        """
        if self.closed:
            raise RemotingSendError(self.peer_text, "the connection is closed", written=False)
        if self.is_over():
            raise RemotingSendError(self.peer_text, "the client does not read what it was sent", written=False)
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
        """Count ``count`` requests as in flight, until ``end`` or ``complete``."""
        if not self.closed:
            self.inflight += count
            self._stats.inflight += count

    def end(self, count: int = 1) -> None:
        """Count ``count`` requests as ended. Not on a closed connection: ``close`` has already subtracted them."""
        if not self.closed:
            self.inflight -= count
            self._stats.inflight -= count
            self._owner.request_ended()

    def begin_task(self, *, oneway: bool) -> None:
        """Count a request that runs as a task, or waits to be started as one, until ``end_task``.

        A close does not end it: the task goes on with its body.
        """
        self.tasks += 1
        self._stats.inflight += 1
        if oneway:
            self.oneways += 1
        else:
            self.inflight += 1

    def end_task(self, *, oneway: bool) -> None:
        """Count a request no longer whose task has ended, or was dropped before it began."""
        self.tasks -= 1
        self._stats.inflight -= 1
        if oneway:
            self.oneways -= 1
        else:
            self.inflight -= 1
        self._owner.request_ended()

    @property
    def deferred(self) -> int:
        """The requests in flight that are not tasks: their replies come by ``complete``. None once it is closed."""
        return self.inflight - (self.tasks - self.oneways)

    def complete(self, reply: Reply, count: int = 1) -> None:
        """End a DEFERRED request and queue ``reply``; None queues nothing (a one-way, or the reply is queued already).

        With ``count``, the bytes are the joined replies to that many requests.
        """
        self.end(count)
        self.reply(reply)

    def hold(self) -> None:
        """Count a request as held until ``settle``: a long poll, which is not in flight."""
        if not self.closed:
            self.held += 1
            self._stats.held += 1

    def settle(self, command: RemotingCommand, outcome: Outcome) -> None:
        """End a HELD request with an ``outcome`` as a handler returns it; HELD, to hold it again, is allowed.

        On a closed connection the outcome is dropped; an awaitable is closed.
        """
        if self.closed:
            _drop(outcome)
            return
        self.held -= 1
        self._stats.held -= 1
        self._owner.conclude(self, command, outcome)

    def close(self, reason: str, *, broken: bool = False, quiet: bool = False) -> None:
        """Close the connection now. Queued bytes are offered to the socket once; those it does not take are dropped.

        ``reason`` is logged: as a warning if the peer broke the protocol (``broken``), at debug level if ``quiet``.
        """
        # Its frames in the receive buffer belong to a group: they are served, and answered, before the socket closes.
        # Serving may close this connection, so ``closed`` is checked after it.
        if self.in_group:
            self._owner.serve_group()
        if self.closed:
            return
        if self.out.chunks:
            with suppress(OSError):
                self.out.flush(self.sock)
        self.closed = True
        stats = self._stats
        deferred = self.deferred  # tasks are counted until they end: otherwise a reconnect would be a new allowance
        stats.inflight -= deferred
        self.inflight -= deferred
        stats.held -= self.held
        self.held = 0
        # The owner unregisters the descriptor, so this comes before the close, which frees its number for reuse.
        self._owner.forget(self, reason, broken=broken, quiet=quiet)
        self.sock.close()
        self.ready = False
        self.out.discard()
        if self._put_off is not None:
            self._put_off.callbacks.clear()
            self._owner.client_closed(self)
            self.resume()
        for pending in self._pending.values():
            pending.event.set()
        callbacks, self.on_close = self.on_close, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - one listener's fault must not keep the others from being called
                _log.exception("on_close_failed", peer=self.peer_text)

    def probe(self) -> None:
        """Have the kernel probe the peer (TCP keep-alive): a lost connection fails within ``PROBE_SECONDS``.

        A live peer does not notice. Meant for connections lost without a FIN, as when a machine or a container is
        killed: these would otherwise stay open until they are found idle.
        """
        with suppress(OSError):  # not a TCP socket, or already disconnected
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBE_SECONDS - 1)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PROBE_SECONDS * 1000)

    def reply_arrived(self, command: RemotingCommand) -> None:
        """Take the client's reply to a request of the server; ignored if no task waits for it any more."""
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
