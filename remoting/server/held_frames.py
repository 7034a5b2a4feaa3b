"""HeldFrames: requests of one round that may be laid out alike, kept where they were received until all are there.

To serve a request by itself costs more than what it has of its own. So where many come in one round, and their
server knows frames of their length (an GroupedServer), they stay in the receive buffer side by side, and are served
together at the end of the round, or before anything else is.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import DEFERRED, GroupedServer
from trimq.remoting.server.limits import RECEIVE_BUFFER

if TYPE_CHECKING:
    from trimq.remoting.server.intake import Intake

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

    def __init__(self, intake: "Intake") -> None:
        self._intake = intake
        self._stats = intake.reactor.stats
        self.begin = 0
        self.end = 0
        self._length = 0
        self._server: GroupedServer | None = None
        self._owners: list[tuple[Connection, int]] = []
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
            self._one_by_one(conn, begin, end)
            if self._intake.all_fast and length <= min(LONGEST, end - begin) and not conn.closed:
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
        self._owners.append((conn, (end - begin) // length))
        self.end = end
        conn.held_back = True

    def _one_by_one(self, conn: Connection, begin: int, end: int) -> None:
        if self.end:
            self.serve()
        if not conn.closed:
            self._intake.serve_received(conn, begin, end)

    def serve(self) -> None:
        """Serve all that is held. ``end`` is 0 afterwards."""
        owners, self._owners = self._owners, []
        begin, end, self.end = self.begin, self.end, 0
        server, length = self._server, self._length
        assert server is not None
        for conn, _ in owners:
            conn.held_back = False
        intake = self._intake
        count = (end - begin) // length
        if count >= LEAST and intake.may_take(owners, count):
            try:
                replies = server.serve(intake.view[begin:end], length, owners)
            except Exception as error:  # noqa: BLE001 - as for any other handler
                replies = list(self._failures(owners, begin, length, error))
            if replies is not None:
                self._misses = 0
                self._learn_pause = _LEARN_PAUSE
                self._stats.frames += count
                intake.served_together(owners, None if replies is DEFERRED else replies)
                return
        self._misses += 1
        if self._misses == _MISSES:
            self._misses = 0
            self._not_before = self._stats.rounds + _PAUSE
        for conn, frames in owners:
            stop = begin + frames * length
            if not conn.closed:
                intake.serve_received(conn, begin, stop)
            begin = stop

    def _learn(self, server: GroupedServer, begin: int, length: int) -> None:
        """A frame of a length that is not known has been served one by one, and more of them may come."""
        rounds = self._stats.rounds
        if rounds >= self._learn_at:
            try:
                server.learn(bytes(self._intake.view[begin : begin + length]), min(MOST, RECEIVE_BUFFER // length))
            except Exception as error:  # noqa: BLE001 - it was served already
                self._intake.reactor.log_hook_failure(server.learn, error)
            self._learn_at = rounds + self._learn_pause
            self._learn_pause = min(2 * self._learn_pause, _LONGEST_PAUSE)

    def _failures(
        self, owners: Sequence[tuple[Connection, int]], begin: int, length: int, error: Exception
    ) -> Iterator[bytes]:
        intake = self._intake
        for conn, frames in owners:
            stop = begin + frames * length
            yield b"".join(
                [intake.fast_failure(conn, intake.view[at : at + length], error) for at in range(begin, stop, length)]
            )
            begin = stop
