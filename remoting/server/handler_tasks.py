"""HandlerTasks: what coroutine handlers do runs as tasks of the reactor, a few at once for each connection.

A task that is under way may bring a reply at any time. So one whose connection has its high-water mark to send is not
started, and of those that are started there are ``limits.max_tasks_per_connection`` at most: the others wait in the
order in which they came. When the client has gone, those of them that want a reply are dropped, so that a client that
comes again and again piles up nothing; a one-way request still happens.
"""

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from trimq.protocol.command import ONEWAY_FLAG, RemotingCommand
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.put_off import PutOff

if TYPE_CHECKING:
    from trimq.remoting.server.intake import Intake


class HandlerTasks:
    """``count`` is how many there are, with those that wait."""

    def __init__(self, intake: "Intake") -> None:
        self._intake = intake
        self._reactor = intake.reactor
        self._stats = intake.reactor.stats
        self._at_once = intake.reactor.limits.max_tasks_per_connection
        self._max_oneways = intake.reactor.limits.max_inflight_per_connection
        self._waiting: set[Connection] = set()  # closed ones too: their tasks have to be ended when the server stops
        self.count = 0

    def add(self, conn: Connection, command: RemotingCommand, awaitable: Awaitable[Outcome]) -> None:
        """Run the rest of a handler. One-ways do not count as in flight: beyond the limit they are lost."""
        if command.flag & ONEWAY_FLAG:
            if conn.oneways >= self._max_oneways:
                self._stats.busy += 1
                _close(awaitable)
                return
            conn.oneways += 1
        elif not conn.closed:
            conn.inflight += 1
            self._stats.inflight += 1
        conn.tasks += 1
        self.count += 1
        put_off = conn.put_off
        put_off.tasks.append((command, awaitable))
        self.start(conn, put_off)

    def start(self, conn: Connection, put_off: PutOff) -> None:
        """Start what waits, as far as the connection may have more."""
        waiting = put_off.tasks
        while waiting and conn.tasks - len(waiting) < self._at_once and (conn.closed or not conn.is_over()):
            command, awaitable = waiting.popleft()
            self._reactor.start_task(self._run, conn, command, awaitable)
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
                self.count -= 1
        waiting.clear()
        waiting.extend(kept)
        if not kept:
            self._waiting.discard(conn)
        self._reactor.request_ended()  # a shutdown may wait for them

    def drop(self) -> None:
        """The server has stopped: what has not begun never will."""
        for conn in self._waiting:
            waiting = conn.put_off.tasks
            while waiting:
                _close(waiting.popleft()[1])
                conn.tasks -= 1
                self.count -= 1
        self._waiting.clear()

    async def _run(self, conn: Connection, command: RemotingCommand, awaitable: Awaitable[Outcome]) -> None:
        intake = self._intake
        outcome: Outcome
        try:
            outcome = await awaitable
        except Exception as error:  # noqa: BLE001 - as for a handler that is a plain function
            outcome = intake.failure(conn, command, error)
        finally:
            conn.tasks -= 1
            self.count -= 1
            if command.flag & ONEWAY_FLAG:
                conn.oneways -= 1
            elif not conn.closed:
                conn.inflight -= 1
                self._stats.inflight -= 1
            self._reactor.request_ended()
        intake.conclude(conn, command, outcome)
        if conn.put_off.tasks:
            self.start(conn, conn.put_off)


def _close(awaitable: Awaitable[Outcome]) -> None:
    getattr(awaitable, "close", lambda: None)()
