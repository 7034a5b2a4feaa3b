"""HeldFrames: requests of one round that may be laid out alike, kept where they were received until all are there.

To serve a request by itself costs more than what it has of its own. So where many come in one round, and their
server knows frames of their length (an GroupedServer), they stay in the receive buffer side by side, and are served
together at the end of the round, or before anything else is.
"""

from collections.abc import Callable, Sequence
from typing import Final

from trimq.protocol.command import Encoding
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import decode, encode
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.failures import Failures
from trimq.remoting.server.handlers import GroupedServer, Served, Span
from trimq.remoting.server.limits import RECEIVE_BUFFER, ReactorLimits, ReactorStats

HELD_BYTES: Final = 128 * 1024
"""Held frames that reach this size are served before more is received."""
MOST: Final = 256
"""Requests that are served together: others shall not have to wait for long."""
FEW: Final = 4
"""A connection that sends so many at a time has more under way: its requests are held in any case."""
LEAST: Final = 24
"""Fewer requests are quicker one by one."""
LONGEST: Final = HELD_BYTES // LEAST
"""Longer frames are not held: there would be too few."""
_SMALL_ROUNDS: Final = 16
"""So many rounds in a row with less end ``many``."""
_PAUSE: Final = 16
"""Rounds without holding after ``_MISSES`` times in a row that frames were held and not served together."""
_MISSES: Final = 16
_LEARN_PAUSE: Final = 8
_LONGEST_PAUSE: Final = 4096
"""Rounds between two frames to learn from: the first, and where none of them was of use."""


class HeldFrames:
    """``end`` is where the held frames end in the receive buffer, 0 without any.

    ``many``: one of the last rounds had so many requests that those of clients with one at a time are held too.
    ``learns_now``: those of unknown lengths shall pass through ``take``.
    """

    def __init__(
        self,
        view: memoryview,
        limits: ReactorLimits,
        stats: ReactorStats,
        failures: Failures,
        *,
        one_by_one: Callable[[Connection, int, int], bool],
        send_now: Callable[[Connection], bool],
    ) -> None:
        """``view``: the receive buffer.

        ``one_by_one`` serves what a connection has in [begin, end) of it; whether all of it went to fast handlers.
        ``send_now`` sends what waits, for a connection that is over its mark.
        """
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
        self._length = 0
        self._server: GroupedServer | None = None
        self._spans: list[Span] = []
        self.many = False
        self.learns_now = False
        self._frames_before = 0
        self._small_rounds = 0
        self._misses = 0
        self._not_before = 0
        self._learn_at = 0
        self._learn_pause = _LEARN_PAUSE

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
        self.learns_now = self.many and stats.rounds >= self._learn_at

    def take(self, conn: Connection, server: GroupedServer, length: int, begin: int, end: int) -> None:
        """Hold or serve what ``conn`` has just sent. The first frame, if it is whole, has this length."""
        if length not in server.lengths:
            all_fast = self._one_by_one(conn, begin, end)
            if all_fast and length <= min(LONGEST, end - begin) and not conn.closed:
                self._learn(server, begin, length)
        elif (end - begin) % length or end - begin > MOST * length or self._stats.rounds < self._not_before:
            self._one_by_one(conn, begin, end)
        else:
            self._hold(conn, server, length, begin, end)

    def _hold(self, conn: Connection, server: GroupedServer, length: int, begin: int, end: int) -> None:
        if self.end and (length != self._length or server is not self._server or end - self.begin > MOST * length):
            self.serve()
            if conn.closed:
                return
        if not self.end:
            self.begin = begin
            self._length = length
            self._server = server
        self._spans.append(Span(conn, begin - self.begin, end - self.begin, (end - begin) // length))
        self.end = end
        conn.held_back = True

    def _one_by_one(self, conn: Connection, begin: int, end: int) -> bool:
        if self.end:
            self.serve()
        return not conn.closed and self._serve_received(conn, begin, end)

    def serve(self) -> None:
        """Serve all that is held. ``end`` is 0 afterwards."""
        spans, self._spans = self._spans, []
        begin, end, self.end = self.begin, self.end, 0
        server = self._server
        assert server is not None
        for span in spans:
            span.connection.held_back = False
        count = sum([span.frames for span in spans])
        served: Served | None = None
        most = self._max_inflight_here
        # at its end all of them may be in flight
        if (
            count >= LEAST
            and self._stats.inflight + count <= self._max_inflight
            and all(span.connection.inflight + span.frames <= most for span in spans)
        ):
            try:
                served = server.serve(self._view[begin:end], spans)
            except Exception as error:  # noqa: BLE001 - as for any other handler
                served = Served([self._failed(span, begin, error) for span in spans])
        if served is None:
            self._misses += 1
            if self._misses == _MISSES:
                self._misses = 0
                self._not_before = self._stats.rounds + _PAUSE
            for span in spans:
                if not span.connection.closed:
                    self._serve_received(span.connection, begin + span.begin, begin + span.end)
            return
        self._misses = 0
        self._learn_pause = _LEARN_PAUSE
        if not served.fits(len(spans)):
            self._close(spans, server)
            return
        self._answer(spans, served)
        if served.parts is not None:
            for span, (_, stop) in zip(spans, served.parts, strict=True):
                if stop < span.end and not span.connection.closed:
                    self._serve_received(span.connection, begin + stop, begin + span.end)

    def _answer(self, spans: Sequence[Span], served: Served) -> None:
        frames = [span.frames for span in spans] if served.parts is None else [count for count, _ in served.parts]
        self._stats.frames += sum(frames)
        if served.deferred:
            for span, count in zip(spans, frames, strict=True):
                span.connection.encoding = Encoding.JSON
                span.connection.begin(count)
            return
        high_water = self._high_water
        for span, reply in zip(spans, served.replies, strict=True):
            conn = span.connection
            if reply:
                conn.encoding = Encoding.JSON
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

    def _learn(self, server: GroupedServer, begin: int, length: int) -> None:
        """A frame of a length that is not known has been served one by one, and more of them may come."""
        rounds = self._stats.rounds
        if rounds >= self._learn_at:
            try:
                server.learn(bytes(self._view[begin : begin + length]), min(MOST, RECEIVE_BUFFER // length))
            except Exception as error:  # noqa: BLE001 - it was served already
                self._failures.of_hook(server.learn, error)
            self._learn_at = rounds + self._learn_pause
            self._learn_pause = min(2 * self._learn_pause, _LONGEST_PAUSE)

    def _failed(self, span: Span, begin: int, error: Exception) -> bytes:
        """All of a span's requests are answered with the error: what the server has done to them is not known."""
        replies = []
        length = (span.end - span.begin) // span.frames
        for at in range(begin + span.begin, begin + span.end, length):
            try:
                command = decode(self._view[at + 4 : at + length])
                replies.append(encode(self._failures.reply(span.connection, command, error)))
            except FrameError:
                span.connection.close(f"broken frame: {error}", broken=True)
                break
        return b"".join(replies)
