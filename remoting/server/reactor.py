"""Reactor: one trio task serves all connections of a server through a selector of its own.

A task for each connection would cost a wake-up each; this one waits in trio for its epoll descriptor, which becomes
readable when any connection is ready, and then serves all of them in a tight loop: a *round*. Those that become ready
meanwhile join it for a moment (``limits.gather``). Replies of a round go out at its end, one system call for each
connection. The loop is given back to trio after every ``limits.turn`` seconds
of work, so that timers keep their times, whatever the load.
"""

import select
import socket
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any, Final

import structlog
import trio

from trimq.protocol.command import RemotingCommand
from trimq.remoting.runtime.clock import Clock, SystemClock
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.accept import Acceptor, listen
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.connection_scan import scan_connections
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import DEFERRED, HELD, Handler, Outcome, Reply
from trimq.remoting.server.intake import Intake
from trimq.remoting.server.limits import ReactorLimits, ReactorStats
from trimq.remoting.server.unfinished import UnfinishedFrames

__all__ = [
    "DEFERRED",
    "HELD",
    "Connection",
    "Handler",
    "HandlerTable",
    "Outcome",
    "Reactor",
    "ReactorLimits",
    "ReactorStats",
    "Reply",
    "listen",
]

_log = structlog.get_logger("remoting")

_READ: Final = select.EPOLLIN
_WRITE: Final = select.EPOLLOUT
_GONE: Final = select.EPOLLHUP | select.EPOLLERR

_MANY: Final = 2
"""Events of a round from which on it is worth a look whether there are more."""


class Reactor:
    """Serves connections until ``shutdown``. All of it belongs to the trio loop that ``run`` runs in.

    ``at_round_end`` holds functions that are called at the end of every round, before replies are sent: work put off
    until the handlers of a round are done. They must be quick where there is nothing to do; what one raises is logged.
    Those in ``at_leisure`` are called when a single client has been answered and its next request is not there yet.
    ``stats`` counts. ``now`` is the clock's monotonic time, at most a second old.
    """

    def __init__(self, limits: ReactorLimits | None = None, clock: Clock | None = None) -> None:
        self.limits = limits or ReactorLimits()
        self.stats = ReactorStats()
        self.at_round_end: list[Callable[[], None]] = []
        self.at_leisure: list[Callable[[], None]] = []
        self.connections: dict[int, Connection] = {}
        self._clock = clock or SystemClock()
        self.now = self._clock.monotonic()
        self.slices = trio.Lock()
        self.unfinished = UnfinishedFrames(self)
        self.intake = Intake(self)
        self._log_budget = LogBudget(self._clock)
        self._epoll = select.epoll()
        self._acceptor = Acceptor(self, self._epoll, self._log_budget)
        self._dirty: list[Connection] = []
        self._ready: list[Connection] = []
        self._in_round = False
        self._wake_wanted = False
        self._waker = trio.lowlevel.ParkingLot()
        self._opaque = 0
        self._nursery: trio.Nursery | None = None
        self._draining = False
        self._drained = trio.Event()
        self._ended = trio.Event()

    # what owners call

    def add_listener(self, sock: socket.socket, table: HandlerTable) -> None:
        """Accept from ``sock`` (made by ``listen``) and serve what comes with ``table``. The reactor closes it."""
        self._acceptor.add(sock, table)

    def adopt(self, sock: socket.socket, table: HandlerTable, peer: tuple[str, int] = ("127.0.0.1", 0)) -> Connection:
        """Serve a socket that is connected already. The reactor closes it."""
        sock.setblocking(False)
        conn = Connection(sock, peer, table, self)
        conn.active_at = self.now
        conn.mask = 0 if self._draining else _READ
        self._epoll.register(sock.fileno(), conn.mask)
        self.connections[sock.fileno()] = conn
        self.stats.connections += 1
        return conn

    @property
    def in_round(self) -> bool:
        """Whether a round is going on, so that ``at_round_end`` will be called soon anyway."""
        return self._in_round

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``shutdown`` or cancellation; every connection is closed when it returns. Runs once."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._serve)
                nursery.start_soon(self._serve_outside)
                nursery.start_soon(scan_connections, self, self._clock)
                task_status.started()
        finally:
            self._nursery = None
            self._acceptor.close()
            self.intake.tasks.drop()
            for conn in list(self.connections.values()):
                conn.close("the server has stopped", quiet=True)
            self._epoll.close()
            self._ended.set()

    async def shutdown(self, seconds: float) -> None:
        """Stop in order, and end ``run``.

        Accept and read no more, finish what is in flight and send its replies, for ``seconds`` at most, then close
        every connection. Long polls still held are not waited for: settle them first.
        """
        self._acceptor.close()
        self._draining = True
        for conn in self.connections.values():
            self.watch(conn)
        self.wake()
        try:
            if self._nursery is not None:
                with trio.move_on_after(seconds) as scope:
                    await self._drained.wait()
                if scope.cancelled_caught:
                    _log.warning(
                        "shutdown_incomplete",
                        after_seconds=seconds,
                        inflight=self.stats.inflight,
                        tasks=self.intake.tasks.count,
                    )
        finally:
            if self._nursery is not None:
                self._nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await self._ended.wait()

    def wake(self) -> None:
        """End a round soon, as soon as the calling task yields: hooks run and what was written is sent."""
        if not self._wake_wanted:
            self._wake_wanted = True
            self._waker.unpark()

    # what connections and the intake call

    def mark(self, conn: Connection) -> None:
        """There is something to send: at the end of the round, or soon where none is going on."""
        conn.dirty = True
        self._dirty.append(conn)
        if not self._in_round:
            self.wake()

    def continue_later(self, conn: Connection) -> None:
        """It has whole frames left, which get a turn of their own."""
        if not conn.paused:
            self._ready.append(conn)

    def is_stuck(self, conn: Connection) -> bool:
        """Send now; True where the client is too slow (or gone), and nothing more may be served to it for now."""
        self._flush(conn)
        return conn.closed or conn.paused

    def pause_if_over(self, conn: Connection) -> bool:
        """Pause a connection that has its high-water mark to send; whether it had. Sends nothing, closes nothing."""
        if conn.out.queued - conn.out.sent < self.limits.high_water:
            return False
        self.watch(conn)
        return True

    def start_task(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run the rest of a request in the reactor's nursery."""
        assert self._nursery is not None, "requests are served while run() runs"
        self._nursery.start_soon(function, *args)

    def resume_listeners(self) -> None:
        """Listen again where nobody could be accepted a while ago."""
        self._acceptor.resume()

    def request_ended(self) -> None:
        """Something in flight is done; a shutdown may wait for it."""
        if self._draining:
            self.wake()

    def next_opaque(self) -> int:
        """The number of a request of ours, from 1 to 2**31 - 1, then again."""
        self._opaque = self._opaque % 0x7FFFFFFF + 1
        return self._opaque

    def forget(self, conn: Connection, reason: str, *, broken: bool, quiet: bool) -> None:
        """It is being closed: its socket is still open, its counts are as they were."""
        fd = conn.sock.fileno()
        del self.connections[fd]
        self.unfinished.forget(conn)
        self._epoll.unregister(fd)
        stats = self.stats
        stats.connections -= 1
        stats.closed += 1
        stats.broken += broken
        stats.inflight -= conn.inflight
        stats.held -= conn.held
        stats.paused -= conn.paused
        self.request_ended()
        if quiet:
            _log.debug("connection_closed", peer=conn.peer_text, reason=reason)
        elif self._log_budget.allows():
            log = _log.warning if broken else _log.info
            log("connection_broken" if broken else "connection_closed", peer=conn.peer_text, reason=reason)

    def log_failure(self, conn: Connection, command: RemotingCommand, error: Exception) -> None:
        """A handler has raised what it should not."""
        self.stats.failures += 1
        if self._log_budget.allows():
            _log.error("request_failed", peer=conn.peer_text, code=command.code, exc_info=error)

    def _call(self, hooks: list[Callable[[], None]]) -> None:
        for hook in hooks:
            try:
                hook()
            except Exception as error:  # noqa: BLE001 - a fault in work put off must not end every connection
                self.log_hook_failure(hook, error)

    def log_hook_failure(self, hook: Callable[..., object], error: Exception) -> None:
        """What is called beside the requests has raised."""
        self.stats.failures += 1
        if self._log_budget.allows():
            _log.error("round_end_failed", hook=repr(hook), exc_info=error)

    # rounds

    async def _serve(self) -> None:
        poll = self._epoll.poll
        stats = self.stats
        limits = self.limits
        spin_end = 0.0
        has_leisure = False
        while True:
            events = poll(0)
            if events or self._ready:
                sent = stats.bytes_out
                await self._round(events)
                now = perf_counter()
                # Who has just been answered asks again before trio's wait has even begun, and to be woken from that
                # costs more than to look a few times.
                answered = stats.bytes_out != sent
                has_leisure = answered and len(events) == 1
                spin_end = now + (limits.spin if has_leisure else limits.spin_many) if answered else 0.0
                if now >= self.intake.turn_end:
                    await self._give_way()
            elif has_leisure:
                has_leisure = False
                self._call(self.at_leisure)
            elif perf_counter() >= spin_end:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                self.intake.turn_end = perf_counter() + self.limits.turn

    async def _serve_outside(self) -> None:
        """Rounds that no socket asks for: other tasks have written, or want the hooks to run."""
        while True:
            if self._wake_wanted:
                await trio.lowlevel.checkpoint()
            else:
                await self._waker.park()
            self._wake_wanted = False
            self.intake.turn_end = perf_counter() + self.limits.turn
            await self._round(())
            if self._ready:
                self._wake_wanted = True

    async def _round(self, events: Sequence[tuple[int, int]]) -> None:
        intake = self.intake
        self.stats.rounds += 1
        self._in_round = True
        connections = self.connections
        gather_end = perf_counter() + self.limits.gather
        while True:
            for fd, mask in events:
                conn = connections.get(fd)
                if mask == _READ and conn is not None and not (conn.ready or conn.paused or conn.aside):
                    intake.serve(conn)
                else:
                    self._serve_event(fd, mask)
                if perf_counter() >= intake.turn_end:
                    await self._give_way()
                    self._in_round = True
            # with many clients more of them have asked meanwhile: each reply then wakes its client once for all it gets
            if len(events) < _MANY or self._ready or perf_counter() >= gather_end:
                break
            events = self._epoll.poll(0)
        if self._ready:
            ready, self._ready = self._ready, []
            for conn in ready:
                if conn.ready and not conn.paused and not self._draining:
                    intake.serve(conn)
                    if perf_counter() >= intake.turn_end:
                        await self._give_way()
                        self._in_round = True
        self._end_round()

    async def _give_way(self) -> None:
        """Let every other task that is due run once."""
        self._end_round()
        await trio.lowlevel.checkpoint()
        self.intake.turn_end = perf_counter() + self.limits.turn

    def _end_round(self) -> None:
        self._in_round = True
        held = self.intake.held
        if held.end:
            held.serve()
        held.round_ended()
        self._call(self.at_round_end)
        stats, now = self.stats, self.now
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for conn in dirty:
                conn.dirty = False
                if conn.closed:
                    continue
                out = conn.out
                chunks = out.chunks
                if len(chunks) == 1 and conn.mask == _READ and not out.to_release:
                    # _flush's usual case, without the calls
                    data = chunks[0]
                    try:
                        count = conn.sock.send(data)
                    except OSError:  # _flush looks what it is
                        count = 0
                    if count:
                        out.sent += count
                        stats.bytes_out += count
                        conn.active_at = now
                        if count == len(data):
                            chunks.clear()
                            continue
                        chunks[0] = memoryview(data)[count:]
                self._flush(conn)
        self._in_round = False
        if self._draining and self._is_drained():
            self._drained.set()

    def _serve_event(self, fd: int, mask: int) -> None:
        conn = self.connections.get(fd)
        if conn is None:
            self._acceptor.accept(fd)
            return
        if mask & _WRITE:
            self._flush(conn)
        if mask & _READ:
            if not conn.ready and not conn.paused and not conn.aside and not conn.closed:
                self.intake.serve(conn)
        elif mask & _GONE and not conn.closed:
            self._look_whether_gone(conn)

    def _look_whether_gone(self, conn: Connection) -> None:
        """One that is not read has failed, unless the event was for an earlier owner of its descriptor."""
        try:
            conn.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            pass
        conn.close("the connection was lost")

    def _flush(self, conn: Connection) -> None:
        out = conn.out
        before = out.sent
        try:
            done = out.flush(conn.sock)
        except OSError as error:
            conn.close(f"the connection was lost: {error}")
            return
        count = out.sent - before
        if count:
            self.stats.bytes_out += count
            conn.active_at = self.now
        if not done or conn.mask != _READ:
            self.watch(conn)

    def watch(self, conn: Connection) -> None:
        """Let the selector watch what matters: room to send, and more requests while the client takes its replies."""
        waiting = conn.out.queued - conn.out.sent
        if conn.paused and waiting <= self.limits.low_water:
            conn.paused = False
            self.stats.paused -= 1
            if conn.ready:
                self._ready.append(conn)
            conn.resume()
            self.wake()
        elif not conn.paused and waiting >= self.limits.high_water:
            conn.paused = True
            self.stats.paused += 1
        mask = (_WRITE if waiting else 0) | (0 if conn.paused or conn.aside or self._draining else _READ)
        if mask != conn.mask:
            conn.mask = mask
            self._epoll.modify(conn.sock.fileno(), mask)

    def _is_drained(self) -> bool:
        return not (
            self.stats.inflight or self.intake.tasks.count or any(conn.out.chunks for conn in self.connections.values())
        )
