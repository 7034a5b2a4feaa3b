"""UnfinishedFrames: the memory that frames on their way take, over all connections, and who has to give it back.

A frame that has begun and does not end costs a buffer. Two rules bound that:

- All of these buffers together (allocated bytes) stay below ``limits.max_unfinished``. Where one more would exceed it,
  the slowest sender is closed first. Its speed is what it has sent of its frame in the last ``limits.unfinished_age``
  seconds or more in which it was read; so nobody is slow before that age, nor who would bring the longest frame in
  ``limits.idle`` seconds. Where there is nobody to close, a long frame that wants to grow is not read until there is
  room, and may be closed after a quarter of ``limits.idle``. Long frames get three quarters, so that they cannot crowd
  out short ones. Of these a frame's length is kept for one of them, the *leader*: many that have begun at once cannot
  wait for each other, they end one after another.
- An unfinished frame brings ``limits.frame_progress`` bytes or its end in every ``limits.idle`` seconds. A byte now
  and then does not keep a connection.

A look at all connections comes with the reactor's scan once a second, in slices; between two looks nothing is searched.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from trimq.remoting.server.big_frame import BigFrame
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.limits import ReactorLimits, ReactorStats

_PRESSED: Final = 2
"""From this part of the bound on (a half), looks note who is slow."""
_PATIENCE: Final = 4
"""One that waits to be read may be closed after this part of ``limits.idle`` (a quarter)."""
_MOST_NOTED: Final = 10_000
"""Connections noted at a look; the next one is a second later."""


class _Progress:
    """What a look has seen of one frame. ``rate`` is in bytes a second, -1 before the first full window.

    ``read_at`` is the last look at which it was read.
    """

    __slots__ = ("frame", "got", "got_before", "looked_at", "period_at", "rate", "read_at", "window_at")

    def __init__(self, frame: int, now: float, got: int) -> None:
        self.frame = frame
        self.period_at = self.window_at = self.looked_at = self.read_at = now
        self.got = self.got_before = got
        self.rate = -1.0


class _Slow(NamedTuple):
    """In the order in which they are closed: those that are read before paused ones, slow first.

    ``spared`` are too young, quick enough, or have not waited for long: they are closed for short frames only.
    """

    spared: bool
    paused: bool
    rate: float
    held: int
    number: int
    connection: Connection
    frame: int


class UnfinishedFrames:
    """Counts in ``stats.unfinished`` what they take, in bytes, with whole frames that wait for their turn."""

    def __init__(self, limits: ReactorLimits, stats: ReactorStats, watch: Callable[[Connection], None]) -> None:
        """``watch`` has the selector watch a connection as it is now: read or not."""
        self._watch = watch
        self._limits = limits
        self._stats = stats
        self._most = limits.max_unfinished
        self._most_of_long = self._most * 3 // 4
        self._most_of_others = self._most_of_long - min(self._limits.max_frame, self._most_of_long // 2)
        self._leader: Connection | None = None
        self._leads = 0  # the leader's frame
        self._quick = self._limits.max_frame / self._limits.idle
        self._seen: dict[Connection, _Progress] = {}
        self._next_seen: dict[Connection, _Progress] = {}
        self._slow: list[_Slow] = []
        self._next_slow: list[_Slow] = []
        self._aside: deque[Connection] = deque()

    # what the intake calls

    def keep(self, conn: Connection, data: bytes) -> None:
        """``data`` is what ``conn`` has sent beyond its last whole frame, or has to wait for its turn."""
        conn.rest = data
        self._stats.unfinished += len(data)
        if self._stats.unfinished > self._most:
            self._make_room(conn, 0, self._most, spare=False)
            if self._stats.unfinished > self._most and not conn.closed:
                self._close(conn, "no memory is left for unfinished frames")

    def take(self, conn: Connection) -> bytes:
        """What ``keep`` was given."""
        data = conn.rest
        conn.rest = b""
        self._stats.unfinished -= len(data)
        return data

    def begin(self, conn: Connection, size: int, first: memoryview, spare: bytearray | None) -> bool:
        """A long frame of ``conn`` has begun: it gets a buffer. False: there is no room now."""
        big = BigFrame.wanted(size, len(first), spare)
        if not self._has_room(conn, big):
            return False
        conn.big = BigFrame(size, first, spare)
        self._stats.unfinished += len(conn.big.buffer)
        return True

    def grow(self, conn: Connection, big: BigFrame) -> bool:
        """Give a full buffer more room. False: not now, and ``conn`` is not read until there is some."""
        more = big.growth()
        if not self._has_room(conn, more):
            self.set_aside(conn)
            return False
        big.grow(more)
        self._stats.unfinished += more
        return True

    def ended(self, conn: Connection, big: BigFrame) -> None:
        """A long frame is whole, and served next."""
        conn.big = None
        self._stats.unfinished -= len(big.buffer)
        while self._aside:  # its room is for those that wait
            other = self._aside.popleft()
            if not other.closed:
                self._read_again(other)
                if other.aside:
                    self._aside.rotate(1)
                    break

    def forget(self, conn: Connection) -> None:
        """It is being closed."""
        self._stats.unfinished -= len(conn.rest)
        if conn.big is not None:
            self._stats.unfinished -= len(conn.big.buffer)
        conn.rest, conn.big = b"", None

    def set_aside(self, conn: Connection) -> None:
        """Do not read it until the next look."""
        if not conn.closed and not conn.aside:
            conn.aside = True
            self._aside.append(conn)
            self._watch(conn)

    # looks

    def look(self, conn: Connection, now: float) -> None:
        """Note how ``conn`` gets on; it is closed where its frame does not."""
        big = conn.big
        if big is None and not conn.rest:
            return
        got = big.filled if big is not None else len(conn.rest)
        seen = self._seen.get(conn)
        if seen is None or seen.frame != conn.frame:
            seen = _Progress(conn.frame, now, got)
        waits = conn.paused or conn.ready or conn.aside
        if waits:  # not read: it is not its fault
            seen.period_at, seen.got = now, got
            seen.window_at += now - seen.looked_at
        else:
            seen.read_at = now
        seen.looked_at = now
        if now - seen.period_at >= self._limits.idle:
            if got - seen.got < self._limits.frame_progress:
                self._close(
                    conn,
                    f"its unfinished frame has brought {got - seen.got} bytes in {now - seen.period_at:.0f} s, "
                    f"and {self._limits.frame_progress} are the least",
                )
                return
            seen.period_at, seen.got = now, got
        window = now - seen.window_at
        if window >= self._limits.unfinished_age:
            seen.rate = (got - seen.got_before) / window
            seen.window_at, seen.got_before = now, got
        self._next_seen[conn] = seen
        if self._stats.unfinished * _PRESSED >= self._most and len(self._next_slow) < _MOST_NOTED:
            held = len(big.buffer) if big is not None else len(conn.rest)
            patience = self._limits.idle / _PATIENCE
            spared = now - seen.read_at < patience if waits else not 0 <= seen.rate < self._quick
            self._next_slow.append(_Slow(spared, waits, seen.rate, -held, len(self._next_slow), conn, conn.frame))

    def looked(self) -> None:
        """All connections have been looked at: those that had to wait are read again as far as there is room."""
        self._seen, self._next_seen = self._next_seen, {}
        self._slow, self._next_slow = sorted(self._next_slow, reverse=True), []
        aside, self._aside = self._aside, deque()
        for conn in aside:
            if not conn.closed:
                self._read_again(conn)

    def _read_again(self, conn: Connection) -> None:
        conn.aside = False
        if conn.big is not None:
            if conn.big.filled == len(conn.big.buffer) and not self.grow(conn, conn.big):
                return
        elif conn.rest and not conn.ready:
            rest = self.take(conn)
            size = int.from_bytes(rest[:4], "big") + 4
            if not self.begin(conn, size, memoryview(rest), None) and not conn.closed:
                self.keep(conn, rest)
                self.set_aside(conn)
        if not conn.closed:
            self._watch(conn)

    # making room

    def _has_room(self, conn: Connection, more: int) -> bool:
        """Whether a long frame may take ``more``. Where the others' part is full, one of them becomes the leader."""
        if self._stats.unfinished + more <= self._most_of_others:
            return True
        leader = self._leader
        if leader is None or leader.closed or leader.big is None or leader.frame != self._leads:
            leader, self._leader, self._leads = conn, conn, conn.frame
        most = self._most_of_long if leader is conn else self._most_of_others
        return self._make_room(conn, more, most, spare=True)

    def _make_room(self, conn: Connection, more: int, most: int, *, spare: bool) -> bool:
        """Close slow senders until there is room; False where there is none, or where ``conn`` was one of them."""
        slow = self._slow
        while self._stats.unfinished + more > most and not conn.closed:
            if not slow or (slow[-1].spared and spare):
                return False
            entry = slow.pop()
            other = entry.connection
            if not other.closed and other.frame == entry.frame and (other.big is not None or other.rest):
                self._close(other, "it was the slowest sender when memory for unfinished frames ran out")
        return not conn.closed

    def _close(self, conn: Connection, reason: str) -> None:
        self._stats.unfinished_closed += 1
        conn.close(reason)
