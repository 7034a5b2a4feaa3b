"""Outcomes: acts on the results of handlers. Replies are queued, later replies counted, awaitables run as tasks.

A running task may produce a reply at any time. So a task is not started while its connection is over its high-water
mark, and at most ``limits.max_tasks_per_connection`` tasks of a connection run at a time; the others wait in the order
of their requests. When the client disconnects, waiting requests that want a reply are dropped. Running ones and one-way
requests go on. They count for ``limits.max_inflight`` until they end, so a client that reconnects again and again gets
no more than that. A one-way request beyond a limit is dropped before it begins; any other one was refused before its
handler was called.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from trimq.protocol.command import ONEWAY_FLAG, RemotingCommand
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.failures import Failures
from trimq.remoting.server.handlers import DEFERRED, HELD, Outcome
from trimq.remoting.server.limits import IN_FLIGHT, IN_FLIGHT_HERE, ReactorLimits, ReactorStats
from trimq.remoting.server.put_off import PutOff


class Outcomes:
    """The outcomes of one server's requests. ``tasks`` counts requests that run as tasks or wait to be started."""

    def __init__(
        self,
        limits: ReactorLimits,
        stats: ReactorStats,
        failures: Failures,
        *,
        start_task: Callable[..., None],
    ) -> None:
        """``start_task`` starts a coroutine function with arguments."""
        self._stats = stats
        self._failures = failures
        self._start_task = start_task
        self._max_tasks = limits.max_tasks_per_connection
        self._max_oneways = limits.max_inflight_per_connection
        self._max_inflight = limits.max_inflight
        self._waiting: set[Connection] = set()  # also closed ones: the server closes their one-ways when it stops
        self.tasks = 0

    def conclude(self, conn: Connection, command: RemotingCommand, outcome: Outcome) -> None:
        """Act on the outcome of a request. A fault in this ends the connection, and never the server."""
        if outcome is None:
            return
        try:
            if outcome is DEFERRED:
                conn.begin()
            elif outcome is HELD:
                conn.hold()
            elif isinstance(outcome, (bytes, RemotingCommand)):
                if not command.flag & ONEWAY_FLAG:
                    conn.reply(outcome)
            else:  # an awaitable; any other object fails in the task, like other mistakes of a handler
                self._add(conn, command, outcome)
        except Exception as error:  # noqa: BLE001 - the callers serve all connections, and the handler has ended
            self._failures.of_outcome(conn, command, error)

    def _add(self, conn: Connection, command: RemotingCommand, awaitable: Awaitable[Outcome]) -> None:
        """Run the awaitable of a handler. A one-way above a limit is dropped: nothing can answer it."""
        oneway = command.is_oneway
        # One-ways have the limit of a connection for themselves: they are not lost for the requests beside them.
        if oneway and (conn.oneways >= self._max_oneways or self._stats.inflight >= self._max_inflight):
            self._stats.count_busy(IN_FLIGHT_HERE if conn.oneways >= self._max_oneways else IN_FLIGHT)
            _close(awaitable)
            return
        conn.begin_task(oneway=oneway)
        self.tasks += 1
        put_off = conn.put_off
        put_off.tasks.append((command, awaitable))
        self.start(conn, put_off)

    def start(self, conn: Connection, put_off: PutOff) -> None:
        """Start waiting tasks, as far as the connection's limits allow."""
        waiting = put_off.tasks
        # On a closed connection only one-ways are left, which produce nothing to send: its mark does not matter.
        while waiting and conn.tasks - len(waiting) < self._max_tasks and (conn.closed or not conn.is_over()):
            command, awaitable = waiting.popleft()
            self._start_task(self._run, conn, command, awaitable)
        if waiting:
            self._waiting.add(conn)
        elif self._waiting:
            self._waiting.discard(conn)

    def client_closed(self, conn: Connection) -> None:
        """Drop the requests of a closed connection that have not started, with their bodies. One-ways remain."""
        waiting = conn.put_off.tasks
        oneways = [entry for entry in waiting if entry[0].flag & ONEWAY_FLAG]
        for command, awaitable in waiting:
            if not command.flag & ONEWAY_FLAG:
                self._drop(conn, command, awaitable)
        waiting.clear()
        waiting.extend(oneways)
        if not oneways:
            self._waiting.discard(conn)

    def drop(self) -> None:
        """Drop all waiting requests, after the server has stopped."""
        for conn in self._waiting:
            waiting = conn.put_off.tasks
            while waiting:
                self._drop(conn, *waiting.popleft())
        self._waiting.clear()

    def _drop(self, conn: Connection, command: RemotingCommand, awaitable: Awaitable[Outcome]) -> None:
        _close(awaitable)
        self._ended(conn, command)

    def _ended(self, conn: Connection, command: RemotingCommand) -> None:
        self.tasks -= 1
        conn.end_task(oneway=command.is_oneway)

    async def _run(self, conn: Connection, command: RemotingCommand, awaitable: Awaitable[Any]) -> None:
        outcome: Outcome
        try:
            outcome = await awaitable
        except Exception as error:  # noqa: BLE001 - as for a handler that is a plain function
            outcome = self._failures.reply(conn, command, error)
        finally:
            self._ended(conn, command)
        self.conclude(conn, command, outcome)
        if conn.put_off.tasks:
            self.start(conn, conn.put_off)


def _close(awaitable: Awaitable[Outcome]) -> None:
    getattr(awaitable, "close", lambda: None)()
