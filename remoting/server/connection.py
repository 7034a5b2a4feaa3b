"""Connection: one accepted client, as handlers and services see it."""

import socket
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import encode, encode_head
from trimq.remoting.errors import RemotingSendError, RemotingTimeoutError
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome, Reply
from trimq.remoting.server.out_buffer import Buffer, OutBuffer
from trimq.remoting.server.put_off import PutOff

if TYPE_CHECKING:
    from trimq.remoting.server.big_frame import BigFrame
    from trimq.remoting.server.reactor import Reactor

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


class Connection:
    """A client's connection. Everything here is called in the reactor's own loop, from handlers or from other tasks.

    ``peer`` and ``peer_text`` ("ip:port") say who it is, ``encoding`` is that of the client's last frame, ``data`` is
    for whoever has to remember something about it, and ``on_close`` is called once with it when it is gone.
    ``inflight`` and ``held`` count requests without a reply and long polls. ``slices`` is held by the one request of
    all connections that works on a long reply now.
    """

    __slots__ = (
        "__weakref__",
        "_pending",
        "_put_off",
        "_reactor",
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
        "held_back",
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

    def __init__(self, sock: socket.socket, peer: tuple[str, int], table: HandlerTable, reactor: "Reactor") -> None:
        self.peer = peer
        self.peer_text = f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"
        self.encoding: Encoding = Encoding.JSON
        self.closed = False
        self.data: dict[str, Any] = {}
        self.admission: object = None  # the gate's
        self.on_close: list[Callable[[Connection], None]] = []
        self.inflight = 0
        self.held = 0
        self.slices = reactor.slices
        # The rest is the reactor's.
        self.sock = sock
        self.table = table
        self.held_back = False  # has frames that wait for others of their round
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
        self._reactor = reactor
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
        return not self.closed and (self.paused or self._reactor.pause_if_over(self))

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
        self._reactor.intake.tasks.start(self, put_off)
        callbacks, put_off.callbacks = put_off.callbacks, {}
        for callback in callbacks.values():
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - a fault in work put off must not end every connection
                self._reactor.log_hook_failure(callback, error)

    def write(self, *buffers: Buffer) -> None:
        """Queue ``buffers``: bytes, or views of bytes that stay as they are.

        They are sent at the end of the reactor's round, or as soon as the calling task has yielded. Nothing happens on
        a closed connection.
        """
        if self.closed:
            return
        out = self.out
        for buffer in buffers:
            out.chunks.append(buffer)
            out.queued += len(buffer)
        if not self.dirty:
            self._reactor.mark(self)

    def write_owned(self, buffers: Iterable[Buffer], release: Callable[[], None]) -> None:
        """As ``write``, for views of memory that somebody has to keep.

        ``release`` is called when they have been sent, or at once when the connection is gone. It must not raise.
        """
        if self.closed:
            release()
            return
        self.write(*buffers)
        self.out.on_sent(release)

    def send(self, command: RemotingCommand) -> None:
        """Queue ``command`` in its own encoding.

        Raises FrameError where it is too long for a frame.
        """
        body = command.body
        if type(body) is bytes and len(body) >= _LARGE_BODY:
            self.write(encode_head(command, len(body)), body)
        else:
            self.write(encode(command))

    def send_oneway(self, command: RemotingCommand) -> bool:
        """Queue a request of ours that wants no reply, in the encoding of the client's last frame.

        False: it was not, because the connection is over its mark; ``when_drained`` tells when to try again.
        """
        if self.is_over():
            return False
        self._number(command)
        self.send(command)
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
            self.send(command)
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

    def complete(self, reply: Reply, count: int = 1) -> None:
        """The end of a DEFERRED request: ``reply`` is queued, unless it is None (one-way, or already written).

        bytes may be the replies to ``count`` of them.
        """
        if self.closed:
            return
        reactor = self._reactor
        self.inflight -= count
        reactor.stats.inflight -= count
        reactor.request_ended()
        if type(reply) is bytes:  # answer's usual case, without the calls
            self.out.chunks.append(reply)
            self.out.queued += len(reply)
            if not self.dirty:
                reactor.mark(self)
        elif reply is not None:
            reactor.intake.answer(self, reply)

    def settle(self, command: RemotingCommand, outcome: Outcome) -> None:
        """The end of a HELD request: ``outcome`` is what its handler would have returned; HELD again is possible.

        On a closed connection only an awaitable is closed.
        """
        if self.closed:
            _drop(outcome)
            return
        self.held -= 1
        self._reactor.stats.held -= 1
        self._reactor.intake.conclude(self, command, outcome)

    def close(self, reason: str, *, broken: bool = False, quiet: bool = False) -> None:
        """End the connection now: what is queued is offered to the socket once, the rest is dropped.

        ``reason`` goes to the log: a warning where the peer is to blame (``broken``), for debugging only if ``quiet``.
        """
        if self.held_back:
            self._reactor.intake.held.serve()
        if self.closed:
            return
        if self.out.chunks:
            with suppress(OSError):
                self.out.flush(self.sock)
        self.closed = True
        self._reactor.forget(self, reason, broken=broken, quiet=quiet)
        self.sock.close()
        self.ready = False
        self.inflight = self.held = 0
        self.out.discard()
        if self._put_off is not None:
            self._put_off.callbacks.clear()
            self._reactor.intake.tasks.client_gone(self)
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
        command.opaque = self._reactor.next_opaque()
        command.encoding = self.encoding


def _drop(outcome: Outcome) -> None:
    close = getattr(outcome, "close", None)
    if close is not None and isinstance(outcome, Awaitable):
        close()
