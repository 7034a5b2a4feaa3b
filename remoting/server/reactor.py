"""Reactor: one trio task serves all connections of a server, with its own epoll selector.

A task per connection would cost a wake-up for each request. Instead this task waits in trio for its epoll descriptor,
which becomes readable when any connection is ready, and then serves all ready connections in a tight loop: a *round*.
Connections that become ready within ``limits.gather`` seconds join the round. The replies of a round are sent at its
end, with one system call per connection. After every ``limits.turn`` seconds of work the task yields to trio, so that
timers fire in time under any load.
"""

import select
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from time import perf_counter
from typing import Any, Final

import structlog
import trio

from trimq.remoting.runtime.clock import Clock, CoarseTime, SystemClock
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.accept import Acceptor, listen
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.failures import Failures
from trimq.remoting.server.first_bytes import FirstBytes
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import DEFERRED, HELD, Handler, Outcome, Reply
from trimq.remoting.server.handshakes import Handshakes, ServerTls
from trimq.remoting.server.intake import Intake
from trimq.remoting.server.limits import ReactorLimits, ReactorStats
from trimq.remoting.server.origins import Origins
from trimq.remoting.server.outcomes import Outcomes
from trimq.remoting.server.proxied import Proxied
from trimq.remoting.server.selector import EpollSelector, Selector
from trimq.remoting.server.sender import READ, WRITE, Sender
from trimq.remoting.server.unfinished import UnfinishedFrames

__all__ = [
    "DEFERRED",
    "HELD",
    "Connection",
    "Handler",
    "HandlerTable",
    "Origins",
    "Outcome",
    "Reactor",
    "ReactorLimits",
    "ReactorStats",
    "Reply",
    "ServerTls",
    "listen",
]

_log = structlog.get_logger("remoting")

_GONE: Final = select.EPOLLHUP | select.EPOLLERR

_SCAN: Final = 1.0
"""Seconds between two scans of all connections."""
_SCAN_SLICE: Final = 1000
"""Connections scanned before other tasks may run."""

_MANY: Final = 2
"""With at least this many events in a round, it is worth polling for more of them."""


class Reactor:
    """Serves connections until ``shutdown``. All of it is used in the trio loop that ``run`` runs in only.

    The functions in ``at_round_end`` are called at the end of every round, before replies are sent: work deferred until
    the handlers of a round are done. They must be quick when there is nothing to do; their exceptions are logged. Those
    in ``on_idle`` are called when a single client has been answered and its next request has not arrived yet.
    ``stats`` has the counters, and is given if others use it too. ``tls`` serves TLS on the same ports; without it they
    are plain. ``origins`` limits what an address may do, and knows the proxies. The reactor is the ConnectionOwner of
    its connections.
    """

    def __init__(
        self,
        limits: ReactorLimits | None = None,
        clock: Clock | None = None,
        selector: Selector | None = None,
        tls: ServerTls | None = None,
        origins: Origins | None = None,
        stats: ReactorStats | None = None,
    ) -> None:
        self.limits = limits or ReactorLimits()
        self.stats = origins.stats if origins is not None else stats or ReactorStats()
        self._origins = origins
        self.at_round_end: list[Callable[[], None]] = []
        self.on_idle: list[Callable[[], None]] = []
        self.connections: dict[int, Connection] = {}
        self.slices = trio.Lock()
        self._clock = clock or SystemClock()
        self._time = CoarseTime(self._clock)
        self._log_budget = LogBudget(self._clock)
        self._selector = selector or EpollSelector()
        stats = self.stats
        self._sender = Sender(self.limits, stats, self._time, self._selector, self.wake)
        self._failures = Failures(stats, self._log_budget)
        self._acceptor = Acceptor(
            self.limits,
            stats,
            self._selector,
            self._log_budget,
            self.adopt,
            None if origins is None else lambda address: origins.is_proxy(address) or origins.admits(address),
        )
        self._unfinished = UnfinishedFrames(self.limits, stats, self._sender.watch)
        self._handshakes = (
            Handshakes(tls, stats, self._time, watch=self._sender.watch, continue_later=self._sender.continue_later)
            if tls is not None and tls.is_on
            else None
        )
        if tls is not None:
            stats.certificate_ends = lambda: {
                str(side): found.expires_at for side, found in tls.contexts.certificates.items()
            }
        self._steps: Collection[Connection] = self._handshakes.queue if self._handshakes is not None else ()
        self.outcomes = Outcomes(
            self.limits,
            stats,
            self._failures,
            start_task=self._start_task,
        )
        self.intake = Intake(
            self.limits,
            stats,
            time=self._time,
            unfinished=self._unfinished,
            outcomes=self.outcomes,
            failures=self._failures,
            send_now=self._sender.send_now,
            continue_later=self._sender.continue_later,
        )
        self.mark = self._sender.mark
        self.pause_if_over = self._sender.pause_if_over
        self.conclude = self.outcomes.conclude
        self.resumed = self.outcomes.start
        self.client_closed = self.outcomes.client_closed
        self.serve_group = self.intake.grouping.serve
        self.hook_failed = self._failures.of_hook
        self.not_encoded = self._failures.not_encoded
        self._wake_wanted = False
        self._waker = trio.lowlevel.ParkingLot()
        self._opaque = 0
        self._nursery: trio.Nursery | None = None
        self._drained = trio.Event()
        self._ended = trio.Event()

    # called by the owner

    def add_listener(self, sock: socket.socket, table: HandlerTable) -> None:
        """Accept from ``sock`` (made by ``listen``) and serve its clients with ``table``. The reactor closes it."""
        self._acceptor.add(sock, table)

    def adopt(self, sock: socket.socket, table: HandlerTable, peer: tuple[str, int] = ("127.0.0.1", 0)) -> Connection:
        """Serve a connected socket. The reactor closes it."""
        sock.setblocking(False)
        conn = Connection(sock, peer, table, self)
        origins = self._origins
        if origins is not None and origins.is_proxy(peer[0]):
            conn.sock = Proxied(conn, sock, self.stats, self._came_from)
        else:
            if origins is not None:
                origins.join(conn)
            self._begin(conn, sock)
        conn.active_at = self._time.now
        conn.mask = READ if self._sender.reads else 0
        self._selector.register(sock.fileno(), conn.mask)
        self.connections[sock.fileno()] = conn
        self.stats.connections += 1
        return conn

    def _begin(self, conn: Connection, sock: socket.socket) -> None:
        """Have ``conn`` read from ``sock``, or from what decides by its first byte."""
        conn.sock = sock if self._handshakes is None else FirstBytes(conn, sock, self._handshakes)

    def _came_from(self, conn: Connection, sock: socket.socket) -> bool:
        """The address of a client behind a proxy is known. False: it has too many connections, and this one is closed.

        The limit of an address does not count for the proxy, of which every client has the same.
        """
        assert self._origins is not None
        if not self._origins.admits(conn.peer[0]):
            conn.close("its address has too many connections (maxConnectionsPerAddress)", quiet=True)
            return False
        self._origins.join(conn)
        self._begin(conn, sock)
        return True

    @property
    def in_round(self) -> bool:
        """Whether a round is running, so that ``at_round_end`` will be called soon anyway."""
        return self._sender.in_round

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``shutdown`` or cancellation. All connections are closed when it returns. Can run only once."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._serve)
                nursery.start_soon(self._serve_outside)
                nursery.start_soon(self._scan)
                task_status.started()
        finally:
            self._nursery = None
            self._acceptor.close()
            self.outcomes.drop()  # before the closes: no close may start a task without a nursery
            for conn in list(self.connections.values()):
                conn.close("the server has stopped", quiet=True)
            self._selector.close()
            self._ended.set()

    async def shutdown(self, seconds: float) -> None:
        """Shut down gracefully, and end ``run``.

        Stops accepting and reading, waits up to ``seconds`` seconds until the requests in flight have ended and their
        replies are sent, then closes every connection. Held long polls are not waited for: settle them first.
        """
        self._acceptor.close()
        self._sender.reads = False
        for conn in self.connections.values():
            self._sender.watch(conn)
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
                        tasks=self.outcomes.tasks,
                    )
        finally:
            if self._nursery is not None:
                self._nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await self._ended.wait()

    def wake(self) -> None:
        """Run a round as soon as the calling task yields: it calls the hooks and sends what was queued."""
        if not self._wake_wanted:
            self._wake_wanted = True
            self._waker.unpark()

    # called by its connections and its parts

    def _start_task(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run the awaitable of a request in the reactor's nursery."""
        assert self._nursery is not None, "requests are served while run() runs"
        self._nursery.start_soon(function, *args)

    def request_ended(self) -> None:
        """Note that a request has ended: a shutdown may wait for it."""
        if not self._sender.reads:
            self.wake()

    def next_opaque(self) -> int:
        """The opaque number for a request sent by the server: 1 to 2**31 - 1, then from 1 again."""
        self._opaque = self._opaque % 0x7FFFFFFF + 1
        return self._opaque

    def forget(self, conn: Connection, reason: str, *, broken: bool, quiet: bool) -> None:
        """Remove a connection that is being closed. Its socket is still open."""
        fd = conn.sock.fileno()
        del self.connections[fd]
        self._unfinished.forget(conn)
        if self._handshakes is not None:
            self._handshakes.forget(conn)
        if self._origins is not None:
            self._origins.leave(conn)
        self._selector.unregister(fd)
        stats = self.stats
        stats.connections -= 1
        stats.closed += 1
        stats.broken += broken
        stats.paused -= conn.paused
        self.request_ended()
        if quiet:
            _log.debug("connection_closed", peer=conn.peer_text, reason=reason)
        elif self._log_budget.allows():
            log = _log.warning if broken else _log.info
            log("connection_broken" if broken else "connection_closed", peer=conn.peer_text, reason=reason)

    def _call(self, hooks: list[Callable[[], None]]) -> None:
        for hook in hooks:
            try:
                hook()
            except Exception as error:  # noqa: BLE001 - a fault in deferred work must not end every connection
                self._failures.of_hook(hook, error)

    # rounds

    async def _serve(self) -> None:
        poll = self._selector.poll
        stats = self.stats
        limits = self.limits
        spin_end = 0.0
        has_leisure = False
        while True:
            events = poll(0)
            if events or self._sender.ready or self._steps:
                sent = stats.bytes_out
                await self._round(events)
                now = perf_counter()
                # A client that was just answered often sends its next request before trio's wait has even started.
                # Being woken from that wait costs more than polling a few times.
                answered = stats.bytes_out != sent
                has_leisure = answered and len(events) == 1
                spin_end = now + (limits.spin if has_leisure else limits.spin_many) if answered else 0.0
                if now >= self.intake.turn_end:
                    await self._give_way()
            elif has_leisure:
                has_leisure = False
                self._call(self.on_idle)
            elif perf_counter() >= spin_end:
                await self._selector.wait()
                self.intake.turn_end = perf_counter() + self.limits.turn

    async def _serve_outside(self) -> None:
        """Run the rounds requested by ``wake``: other tasks have queued something, or need the hooks to run."""
        while True:
            if self._wake_wanted:
                # A checkpoint also here: with constant wakes this loop would never yield.
                await trio.lowlevel.checkpoint()
            else:
                await self._waker.park()
            self._wake_wanted = False
            self.intake.turn_end = perf_counter() + self.limits.turn
            await self._round(())
            if self._sender.ready:  # no event reports frames that are already in memory
                self._wake_wanted = True

    async def _round(self, events: Sequence[tuple[int, int]]) -> None:
        intake = self.intake
        self.stats.rounds += 1
        self._sender.in_round = True
        connections = self.connections
        gather_end = perf_counter() + self.limits.gather
        while True:
            for fd, mask in events:
                # Looked up for each event: serving an earlier one may have closed this connection.
                conn = connections.get(fd)
                if mask == READ and conn is not None and not (conn.ready or conn.paused or conn.aside):
                    intake.serve(conn)
                else:
                    self._serve_event(fd, mask)
                if perf_counter() >= intake.turn_end:
                    await self._give_way()
                    self._sender.in_round = True
            # With many clients, more requests have arrived by now. Served in the same round, they let one flush, and
            # one wake-up of the client, carry several replies.
            if len(events) < _MANY or self._sender.ready or perf_counter() >= gather_end:
                break
            events = self._selector.poll(0)
        if self._sender.ready:
            for conn in self._sender.take_ready():
                # A turn of another connection may have closed or paused it since.
                has_more = conn.ready or (conn.tls is not None and conn.tls.has_bytes and not conn.closed)
                if has_more and not conn.paused and not conn.aside and self._sender.reads:
                    intake.serve(conn)
                    if perf_counter() >= intake.turn_end:
                        await self._give_way()
                        self._sender.in_round = True
        self._end_round()
        if self._steps:  # after the replies of the round are sent
            assert self._handshakes is not None
            self._handshakes.step()

    async def _give_way(self) -> None:
        """End the round and let every other runnable task run once."""
        self._end_round()
        await trio.lowlevel.checkpoint()
        self.intake.turn_end = perf_counter() + self.limits.turn

    def _end_round(self) -> None:
        # The order matters: held frames first, since their handlers queue work for the hooks; the hooks next, since
        # they queue replies; then one flush for all. ``in_round`` avoids a wake for what these queue.
        self._sender.in_round = True
        grouping = self.intake.grouping
        if grouping.end:
            grouping.serve()
        if self.at_round_end:
            self._call(self.at_round_end)
        self._sender.send_marked()
        self._sender.in_round = False
        grouping.round_ended()  # after the send: no reply has to wait for it
        if not self._sender.reads and self._is_drained():
            self._drained.set()

    def _serve_event(self, fd: int, mask: int) -> None:
        conn = self.connections.get(fd)
        if conn is None:
            self._acceptor.accept(fd)
            return
        if mask & WRITE:
            self._sender.flush(conn)
        if mask & READ:
            if not conn.ready and not conn.paused and not conn.aside and not conn.closed:
                self.intake.serve(conn)
        elif mask & _GONE and not conn.closed:
            self._check_lost(conn)

    def _check_lost(self, conn: Connection) -> None:
        """Close a connection that failed while not being read, unless the event was for an earlier owner of its fd."""
        try:
            conn.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            pass
        conn.close("the connection was lost")

    async def _scan(self) -> None:
        """Scan all connections once a second: close idle ones and those whose frames make no progress."""
        while True:
            await self._clock.sleep(_SCAN)
            now = self._time.look()
            self._acceptor.resume()
            await self._scan_connections(now)
            self._unfinished.scan_ended()
            if self._handshakes is not None:
                await self._end_late(self._handshakes, now)

    async def _scan_connections(self, now: float) -> None:
        """In slices. A function of its own, since a variable of ``_scan`` would keep the last connection in memory."""
        idle = self.limits.idle
        for count, conn in enumerate(list(self.connections.values()), 1):
            if conn.closed:
                continue
            if now - conn.active_at >= idle:
                self.stats.idle_closed += 1
                conn.close(f"neither sent nor received for {idle:g} s")
            else:
                self._unfinished.scan(conn, now)
            if count % _SCAN_SLICE == 0:
                await trio.lowlevel.checkpoint()

    async def _end_late(self, handshakes: Handshakes, now: float) -> None:
        """Close connections whose handshake takes too long."""
        while late := handshakes.overdue(now):
            for conn in late:
                handshakes.time_out(conn)
            await trio.lowlevel.checkpoint()

    def _is_drained(self) -> bool:
        return not (
            self.stats.inflight or self.outcomes.tasks or any(conn.out.chunks for conn in self.connections.values())
        )
