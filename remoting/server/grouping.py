"""Grouping: requests of one round, kept where they were received until all are there.

To serve a request by itself costs more than what it has of its own. So where many come in one round, and somebody
serves requests of their code together (a GroupedServer), they stay in the receive buffer side by side, and are served
together at the end of the round, or before anything else is.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from trimq.protocol.command import Encoding
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import decode, encode
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.failures import Failures
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import GroupedServer, Served, Span
from trimq.remoting.server.limits import ReactorLimits, ReactorStats

GROUP_BYTES: Final = 128 * 1024
"""Held frames that reach this size are served before more is received."""
LONGEST_REST: Final = 64 * 1024
"""What a connection has left of its last turn is put behind held frames up to this size: there has to be more room."""
MOST: Final = 256
"""Requests that are served together: others shall not have to wait for long."""
FEW: Final = 4
"""A connection that sends so many at a time has more under way: its requests are held in any case."""
LEAST: Final = 8
"""Rounds of fewer requests are quicker one by one."""
_SMALL_ROUNDS: Final = 16
"""So many rounds in a row with less end ``many``."""
_PAUSE: Final = 16
"""Rounds without holding after ``_MISSES`` times in a row that frames were held and none was served together."""
_MISSES: Final = 16
_WORD: Final = 4
_length_at = struct.Struct(">I").unpack_from
_ENCODINGS: Final = tuple(Encoding)


class OneByOne(Protocol):
    """Serves what a connection has in [begin, end) of the receive buffer: Intake.serve_received."""

    def __call__(self, conn: Connection, begin: int, end: int, *, continues: bool) -> None:
        """``continues``: the first frame had begun in an earlier turn."""
        ...


class Grouping:
    """``end`` is where the held frames end in the receive buffer, 0 without any.

    ``many``: one of the last rounds had so many requests that those of clients with one at a time are held too.
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
        """``view``: the receive buffer. ``send_now`` sends what waits, for a connection that is over its mark."""
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
        self._changes = 0  # of the table, when the server was found there
        self._spans: list[Span] = []
        self.many = False
        self._frames_before = 0
        self._small_rounds = 0
        self._misses = 0
        self._not_before = 0

    def round_ended(self) -> None:
        """Note how many requests the round had."""
        stats = self._stats
        frames, self._frames_before = stats.frames - self._frames_before, stats.frames
        if frames >= LEAST:
            self.many = True
            self._small_rounds = 0
        elif frames and self.many:
            self._small_rounds += 1
            self.many = self._small_rounds < _SMALL_ROUNDS

    def take(self, conn: Connection, server: GroupedServer, begin: int, end: int, *, continues: bool) -> None:
        """Hold or serve what ``conn`` has just sent. The first frame, if it is whole, is one for ``server``."""
        wait = self._stats.rounds < self._not_before
        changes = conn.table.changes
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
        """Serve all that is held. ``end`` is 0 afterwards."""
        spans, self._spans = self._spans, []
        begin, end, self.end = self.begin, self.end, 0
        server, table = self._server, self._table
        assert server is not None
        assert table is not None
        for span in spans:
            span.connection.in_group = False
        most = min(MOST, self._max_inflight - self._stats.inflight)  # at its end all of them may be in flight
        if table.changes != self._changes:  # something that was served meanwhile may have shut this way
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
        for span, (count, stop) in zip(spans, served.parts, strict=True):
            if stop < span.end and not span.connection.closed:
                continues = span.continues and not count
                self._serve_received(span.connection, begin + stop, begin + span.end, continues=continues)

    def _answer(self, spans: Sequence[Span], served: Served, begin: int) -> None:
        total = sum([count for count, _ in served.parts])
        if not total:
            self._misses += 1
            if self._misses == _MISSES:
                self._misses = 0
                self._not_before = self._stats.rounds + _PAUSE
            return
        self._misses = 0
        self._stats.frames += total
        view, first = self._view, begin + _WORD
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
                if out.queued - out.sent >= high_water and not conn.closed:
                    self._send_now(conn)

    def _close(self, spans: Sequence[Span], server: GroupedServer) -> None:
        """The server does not say what became of each request: no reply could be right."""
        error = ValueError("the server of grouped requests has left out a span")
        self._failures.of_hook(server.serve, error)
        for span in spans:
            span.connection.close(f"a fault of the server: {error}")

    def _failed(self, spans: Sequence[Span], begin: int, error: Exception) -> Served:
        """All whole frames are answered with the error: what the server has done to them is not known."""
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
                    break  # whoever serves what is left finds out too
                own.append(b"" if command.is_oneway else encode(self._failures.reply(span.connection, command, error)))
                at = stop
            parts.append((len(own), at))
            replies.append(b"".join(own))
        return Served(parts, replies)
