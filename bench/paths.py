"""Counts which path requests take, without a cost on the fast path.

Full handlers and grouped servers are wrapped in the route table, which costs a call for each full request and each
group. Fast handlers are not wrapped: requests that were served by none of the others took the fast path.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal, Self, TypeAlias

from trimq.protocol.command import RemotingCommand
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable, Route
from trimq.remoting.server.handlers import GroupedServer, Handler, Later, Outcome, Served, Span

RequestPath: TypeAlias = Literal["fast", "single", "grouped", "full"]


class OtherPathError(RuntimeError):
    """Requests of a row took another path than the one that the row measures."""


class PathCounter:
    """A context manager that counts the requests served by the routes of ``codes``."""

    def __init__(self, table: HandlerTable, codes: Iterable[int]) -> None:
        """``table`` is the handler table of the measured connections."""
        self._table = table
        self._codes = list(codes)
        self._stack = ExitStack()
        self._placed: dict[int, Route] = {}
        self._grouped = 0
        self._single = 0
        self._full = 0

    def __enter__(self) -> Self:
        """Replace the routes by counting ones."""
        groups: dict[GroupedServer, GroupedServer] = {}  # one for each: codes of one server are served together
        for code in self._codes:
            route = self._table.routes[code]
            grouped = route.grouped
            if grouped is not None:
                grouped = groups.setdefault(grouped, _Group(grouped, self._served, self._served_one))
            placed = replace(route, full=self._counting(route.full), grouped=grouped)
            self._table.route(code, placed)
            self._placed[code] = placed
            self._stack.callback(self._table.route, code, route)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the routes."""
        self._stack.close()

    def taken(self, requests: int) -> Counter[RequestPath]:
        """The number of requests by path. ``requests`` is the number of all that were served since the last call.

        Raises OtherPathError if a route was replaced, because its requests were not counted.
        """
        for code, placed in self._placed.items():
            if self._table.routes[code] is not placed:
                raise OtherPathError(f"the route of the code {code} was replaced: its requests are not counted")
        grouped, single, full = self._grouped, self._single, self._full
        self._grouped = self._single = self._full = 0
        found: Counter[RequestPath] = Counter()
        found["grouped"], found["single"], found["full"] = grouped, single, full
        found["fast"] = requests - full - grouped - single
        return +found

    def _counting(self, handler: Handler) -> Handler:
        def serve(connection: Connection, command: RemotingCommand) -> Outcome:
            self._full += 1
            return handler(connection, command)

        return serve

    def _served(self, count: int) -> None:
        self._grouped += count

    def _served_one(self) -> None:
        self._single += 1


class _Group:
    """A GroupedServer that calls ``served`` with the number of requests, and ``served_one`` for each single one."""

    def __init__(self, server: GroupedServer, served: Callable[[int], None], served_one: Callable[[], None]) -> None:
        self._server = server
        self._served = served
        self._served_one = served_one

    def serve(self, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        """See GroupedServer."""
        served = self._server.serve(frames, spans, most)
        if served is not None:
            self._served(sum(count for count, _ in served.parts))
        return served

    def serve_one(self, connection: Connection, frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        """See GroupedServer."""
        answer = self._server.serve_one(connection, frame)
        if answer is not None:
            self._served_one()
        return answer
