"""Which way requests take, counted beside the hot path.

Full handlers and grouped servers are wrapped in the route table: a call more for each full request and for each group.
Fast handlers are not touched; what was served and did not come by there has gone through them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Literal, Self, TypeAlias, cast
from unittest.mock import patch

from trimq.broker.processors.send import send as full_sends
from trimq.broker.processors.send.send_batch import BatchParts, parts_of
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable, Route
from trimq.remoting.server.handlers import GroupedServer, Handler, Outcome, Served, Span

Way: TypeAlias = Literal["fast", "grouped", "reader", "full"]
"""``reader``: a batch of the full handler that a BatchReader has taken apart. ``full``: by the full handler alone."""

_BATCH: Final = RequestCode.SEND_BATCH_MESSAGE


class OtherWayError(RuntimeError):
    """A row's requests have taken another way than the one that it measures."""


class Ways:
    """Counts for the time of its block what the routes of ``codes`` serve."""

    def __init__(self, table: HandlerTable, codes: Iterable[int]) -> None:
        """``table``: that of the connections that are served."""
        self._table = table
        self._codes = list(codes)
        self._stack = ExitStack()
        self._placed: dict[int, Route] = {}
        self._grouped = 0
        self._full: Counter[int] = Counter()
        self._by_reference = 0

    def __enter__(self) -> Self:
        """Counts from now on."""
        for code in self._codes:
            route = self._table.routes[code]
            grouped = None if route.grouped is None else cast("GroupedServer", _Group(route.grouped, self._served))
            placed = replace(route, full=self._counting(code, route.full), grouped=grouped)
            self._table.route(code, placed)
            self._placed[code] = placed
            self._stack.callback(self._table.route, code, route)
        self._stack.enter_context(patch.object(full_sends, "parts_of", self._reference()))
        return self

    def __exit__(self, *_: object) -> None:
        """The routes are what they were."""
        self._stack.close()

    def taken(self, requests: int) -> Counter[Way]:
        """How many of ``requests``, which are all that were served since this was called last, took which way."""
        for code, placed in self._placed.items():
            if self._table.routes[code] is not placed:
                raise OtherWayError(f"the route of the code {code} has been replaced: its ways are not counted")
        full, batches = self._full.total(), self._full[_BATCH]
        by_readers = batches - self._by_reference
        found: Counter[Way] = Counter()
        found["grouped"] = self._grouped
        found["reader"] = by_readers
        found["full"] = full - by_readers
        found["fast"] = requests - full - self._grouped
        self._grouped = self._by_reference = 0
        self._full.clear()
        return +found

    def _counting(self, code: int, handler: Handler) -> Handler:
        counts = self._full

        def serve(connection: Connection, command: RemotingCommand) -> Outcome:
            counts[code] += 1
            return handler(connection, command)

        return serve

    def _reference(self) -> Callable[..., BatchParts]:
        def counting(*args: Any, **named: Any) -> BatchParts:
            self._by_reference += 1
            return parts_of(*args, **named)

        return counting

    def _served(self, count: int) -> None:
        self._grouped += count


class _Group:
    """A GroupedServer; ``served`` is told how many requests it has served. All else is the server's own."""

    def __init__(self, server: GroupedServer, served: Callable[[int], None]) -> None:
        self._server = server
        self._served = served

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def serve(self, frames: memoryview, spans: Sequence[Span]) -> Served | None:
        """See GroupedServer."""
        served = self._server.serve(frames, spans)
        if served is not None:
            parts = served.parts
            self._served(sum([span.frames for span in spans] if parts is None else [count for count, _ in parts]))
        return served
