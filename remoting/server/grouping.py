"""Grouping: requests of one round are held in the receive buffer and served together.

Most of the cost of a request is the same whatever the request holds. So when many arrive in one round, and a
GroupedServer is registered for their code, they stay in the receive buffer side by side. They are served together at
the end of the round, or before any other request is served.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from trimq.protocol.command import Encoding
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import decode
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.failures import Failures
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import GroupedServer, Served, Span
from trimq.remoting.server.limits import ReactorLimits, ReactorStats

GROUP_BYTES: Final = 128 * 1024
"""Held frames of this total size are served before more is received."""
LONGEST_REST: Final = 64 * 1024
"""The longest rest of a connection's last turn that is copied behind held frames: space to receive has to remain."""
MOST: Final = 256
"""The most requests served in one call: other clients wait while it runs."""
FEW: Final = 4
"""A connection that sends this many requests at a time is pipelining: its requests are always held."""
LEAST: Final = 8
"""Rounds of fewer requests are faster to serve one by one."""
_SMALL_ROUNDS: Final = 16
"""After this many rounds in a row with fewer than LEAST requests, ``many`` is reset."""
_PAUSE: Final = 16
"""Rounds in which nothing is held after ``_MISSES`` misses."""
_MISSES: Final = 16
"""Times in a row that frames were held and the server served none of them."""
_WORD: Final = 4
_length_at = struct.Struct(">I").unpack_from
_ENCODINGS: Final = tuple(Encoding)


class OneByOne(Protocol):
    """Serves a connection's bytes [begin, end) of the receive buffer: Intake.serve_received."""

    def __call__(self, conn: Connection, begin: int, end: int, *, continues: bool) -> None:
        """``continues``: the start of the first frame was received in an earlier turn."""
        ...


class Grouping:
    """The held frames of a server. ``end`` is where they end in the receive buffer; 0 if there are none.

    ``many``: a recent round had LEAST requests or more, so requests of clients that send one at a time are held too.
    """

    def __init__(
        self,
        view: memoryview,
        limits: ReactorLimits,
        stats: ReactorStats,
        failures: Failures,
        *,
        one_by_one: OneByOne,
        send_now: Callable[[Connection], bool],
    ) -> None:
        """``view`` is the receive buffer. ``send_now`` sends the queued bytes of a connection that is over its mark."""
        self._view = view
        self._high_water = limits.high_water
        self._max_inflight = limits.max_inflight
        self._max_inflight_here = limits.max_inflight_per_connection
        self._stats = stats
        self._failures = failures
        self._serve_received = one_by_one
        self._send_now = send_now
        self.begin = 0
        self.end = 0
        self._server: GroupedServer | None = None
        self._table: HandlerTable | None = None
        self._changes = 0  # the table's counter when the server was looked up in it
        self._spans: list[Span] = []
        self.many = False
        self._frames_before = 0
        self._small_rounds = 0
        self._misses = 0
        self._not_before = 0

    def round_ended(self) -> None:
        """Update ``many`` from the number of requests in the round."""
        stats = self._stats
        frames, self._frames_before = stats.frames - self._frames_before, stats.frames
        if frames >= LEAST:
            self.many = True
            self._small_rounds = 0
        elif frames and self.many:
            self._small_rounds += 1
            self.many = self._small_rounds < _SMALL_ROUNDS

    def take(self, conn: Connection, server: GroupedServer, begin: int, end: int, *, continues: bool) -> None:
        """Hold or serve the bytes just received from ``conn``. The first frame, if complete, is one for ``server``."""
        wait = self._stats.rounds < self._not_before
        changes = conn.table.changes  # read before ``serve`` below, which may change the routes
        if self.end and (wait or server is not self._server):
            self.serve()
            if conn.closed:
                return
        if wait:
            self._serve_received(conn, begin, end, continues=continues)
            return
        if not self.end:
            self.begin = begin
            self._server = server
            self._table, self._changes = conn.table, changes
        most = self._max_inflight_here - conn.inflight
        self._spans.append(Span(conn, begin - self.begin, end - self.begin, most, continues))
        self.end = end
        conn.in_group = True

    def serve(self) -> None:
        """Serve all held frames. ``end`` is 0 afterwards."""
        # State is reset first: a handler may close a connection, and a close calls this again.
        spans, self._spans = self._spans, []
        begin, end, self.end = self.begin, self.end, 0
        server, table = self._server, self._table
        assert server is not None
        assert table is not None
        for span in spans:
            span.connection.in_group = False
        most = min(MOST, self._max_inflight - self._stats.inflight)  # all of them may be deferred, and so in flight
        if table.changes != self._changes:  # a request served since may have shut this path: serve one by one
            most = 0
        try:
            served = server.serve(self._view[begin:end], spans, most) if most > 0 else None
        except Exception as error:  # noqa: BLE001 - as for any other handler
            served = self._failed(spans, begin, error)
        if served is None:
            served = Served([(0, span.begin) for span in spans], [b""] * len(spans))
        elif not served.fits(spans):
            self._close(spans, server)
            return
        self._answer(spans, served, begin)
        # The frames that the server did not take are served one by one, after the replies to those before them.
        for span, (count, stop) in zip(spans, served.parts, strict=True):
            if stop < span.end and not span.connection.closed:
                continues = span.continues and not count
                self._serve_received(span.connection, begin + stop, begin + span.end, continues=continues)

    def _answer(self, spans: Sequence[Span], served: Served, begin: int) -> None:
        total = sum([count for count, _ in served.parts])
        # Holding costs time even if no frame is served together, so it pauses after a series of such rounds.
        if not total:
            self._misses += 1
            if self._misses == _MISSES:
                self._misses = 0
                self._not_before = self._stats.rounds + _PAUSE
            return
        self._misses = 0
        self._stats.frames += total
        view, first = self._view, begin + _WORD
        # The replies come later, by ``complete``: until then the requests are in flight.
        if served.deferred:
            for span, (count, _) in zip(spans, served.parts, strict=True):
                if count:
                    span.connection.encoding = _ENCODINGS[view[first + span.begin]]
                    span.connection.begin(count)
            return
        high_water = self._high_water
        for span, (count, _), reply in zip(spans, served.parts, served.replies, strict=True):
            conn = span.connection
            if count:
                conn.encoding = _ENCODINGS[view[first + span.begin]]
            if reply:
                conn.reply(reply)
                out = conn.out
                # A long reply is sent now: the rest of the round must not wait for it in memory.
                if out.queued - out.sent >= high_water and not conn.closed:
                    self._send_now(conn)

    def _close(self, spans: Sequence[Span], server: GroupedServer) -> None:
        """Close all connections of a group whose result has no entry for some span: no reply could be right."""
        error = ValueError("the server of grouped requests returned no valid result for a span")
        self._failures.of_hook(server.serve, error)
        for span in spans:
            span.connection.close(f"server error: {error}")

    def _failed(self, spans: Sequence[Span], begin: int, error: Exception) -> Served:
        """Answer all complete frames with the error: which of them the server has already served is unknown."""
        parts: list[tuple[int, int]] = []
        replies: list[bytes] = []
        for span in spans:
            own: list[bytes] = []
            at = span.begin
            while len(own) < span.most and span.end - at >= _WORD:
                stop = at + _WORD + _length_at(self._view, begin + at)[0]
                if stop > span.end:
                    break
                try:
                    command = decode(self._view[begin + at + _WORD : begin + stop])
                except FrameError:
                    break  # serving the rest one by one closes the connection
                own.append(b"" if command.is_oneway else self._failures.frame(span.connection, command, error))
                at = stop
            parts.append((len(own), at))
            replies.append(b"".join(own))
        return Served(parts, replies)
