"""Outcomes: what becomes of what handlers return. Replies are queued, later ones counted, awaitables run as tasks.

A task that is under way may bring a reply at any time. So one whose connection has its high-water mark to send is not
started, and of those that are started there are ``limits.max_tasks_per_connection`` at most: the others wait in the
order in which they came. When the client has gone, those of them that want a reply are dropped, so that a client that
comes again and again piles up nothing; a one-way request still happens.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from trimq.protocol.command import ONEWAY_FLAG, RemotingCommand
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.failures import Failures
from trimq.remoting.server.handlers import DEFERRED, HELD, Outcome
from trimq.remoting.server.limits import ReactorLimits, ReactorStats
from trimq.remoting.server.put_off import PutOff


class Outcomes:
    """``tasks`` is how many requests run as tasks, with those that wait for their turn."""

    def __init__(
        self,
        limits: ReactorLimits,
        stats: ReactorStats,
        failures: Failures,
        *,
        start_task: Callable[..., None],
        request_ended: Callable[[], None],
    ) -> None:
        """``start_task`` runs a coroutine function with its arguments; ``request_ended`` hears that something has."""
        self._stats = stats
        self._failures = failures
        self._start_task = start_task
        self._request_ended = request_ended
        self._at_once = limits.max_tasks_per_connection
        self._max_oneways = limits.max_inflight_per_connection
        self._waiting: set[Connection] = set()  # closed ones too: their tasks have to be ended when the server stops
        self.tasks = 0

    def conclude(self, conn: Connection, command: RemotingCommand, outcome: Outcome) -> None:
        """Do what an outcome asks for."""
        if outcome is None:
            return
        if outcome is DEFERRED:
            conn.begin()
        elif outcome is HELD:
            conn.hold()
        elif isinstance(outcome, (bytes, RemotingCommand)):
            if not command.flag & ONEWAY_FLAG:
                conn.reply(outcome)
        else:  # an awaitable; what is not one fails there, like any other mistake of a handler
            self._add(conn, command, outcome)

    def _add(self, conn: Connection, command: RemotingCommand, awaitable: Awaitable[Outcome]) -> None:
        """Run the rest of a handler. One-ways do not count as in flight: beyond the limit they are lost."""
        if command.flag & ONEWAY_FLAG:
            if conn.oneways >= self._max_oneways:
                self._stats.busy += 1
                _close(awaitable)
                return
            conn.oneways += 1
        else:
            conn.begin()
        conn.tasks += 1
        self.tasks += 1
        put_off = conn.put_off
        put_off.tasks.append((command, awaitable))
        self.start(conn, put_off)

    def start(self, conn: Connection, put_off: PutOff) -> None:
        """Start what waits, as far as the connection may have more."""
        waiting = put_off.tasks
        while waiting and conn.tasks - len(waiting) < self._at_once and (conn.closed or not conn.is_over()):
            command, awaitable = waiting.popleft()
            self._start_task(self._run, conn, command, awaitable)
        if waiting:
            self._waiting.add(conn)
        elif self._waiting:
            self._waiting.discard(conn)

    def client_gone(self, conn: Connection) -> None:
        """Its requests that have not begun are dropped with their bodies, but for one-ways."""
        waiting = conn.put_off.tasks
        kept = [entry for entry in waiting if entry[0].flag & ONEWAY_FLAG]
        for command, awaitable in waiting:
            if not command.flag & ONEWAY_FLAG:
                _close(awaitable)
                conn.tasks -= 1
                self.tasks -= 1
        waiting.clear()
        waiting.extend(kept)
        if not kept:
            self._waiting.discard(conn)
        self._request_ended()  # a shutdown may wait for them

    def drop(self) -> None:
        """The server has stopped: what has not begun never will."""
        for conn in self._waiting:
            waiting = conn.put_off.tasks
            while waiting:
                _close(waiting.popleft()[1])
                conn.tasks -= 1
                self.tasks -= 1
        self._waiting.clear()

    async def _run(self, conn: Connection, command: RemotingCommand, awaitable: Awaitable[Any]) -> None:
        outcome: Outcome
        try:
            outcome = await awaitable
        except Exception as error:  # noqa: BLE001 - as for a handler that is a plain function
            outcome = self._failures.reply(conn, command, error)
        finally:
            conn.tasks -= 1
            self.tasks -= 1
            if command.flag & ONEWAY_FLAG:
                conn.oneways -= 1
            else:
                conn.end()
            self._request_ended()
        self.conclude(conn, command, outcome)
        if conn.put_off.tasks:
            self.start(conn, conn.put_off)


def _close(awaitable: Awaitable[Outcome]) -> None:
    getattr(awaitable, "close", lambda: None)()
