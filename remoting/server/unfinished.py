"""UnfinishedFrames: bounds the memory of incompletely received frames over all connections.

A frame that was started and is not complete occupies a buffer. Two rules bound these buffers:

- All buffers together (allocated bytes) stay below ``limits.max_unfinished``. If one more would exceed it, the slowest
  sender is closed first. A sender's speed is what it has sent of its frame in at least the last
  ``limits.unfinished_age`` seconds in which it was read. So no sender is slow before that age, nor is one that would
  send the longest possible frame within ``limits.idle`` seconds. If there is no sender to close, a connection whose
  long frame has to grow is not read until there is space, and it may be closed after a quarter of ``limits.idle``.
  Long frames may use three quarters of the memory, so that they cannot crowd out short ones. Of this part, the length
  of one frame is reserved for one of them, the *leader*. So many frames that were started at the same time cannot block
  each other: they complete one after another.
- An unfinished frame must receive ``limits.frame_progress`` bytes, or its end, in every ``limits.idle`` seconds. A byte
  from time to time does not keep a connection open.

All connections are checked by the reactor's scan once a second, in slices. Between two scans nothing is searched.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from trimq.remoting.server.big_frame import BigFrame
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.limits import ReactorLimits, ReactorStats

_PRESSED: Final = 2
"""From this part of the bound on (a half), scans record the slow senders."""
_PATIENCE: Final = 4
"""A connection that waits to be read may be closed after this part of ``limits.idle`` (a quarter)."""
_MOST_NOTED: Final = 10_000
"""The most slow senders recorded in one scan; the next scan is a second later."""


class _Progress:
    """The progress of one frame over several scans. ``rate`` is in bytes per second, -1 before the first full window.

    ``read_at`` is the time of the last scan at which the connection was being read.
    """

    __slots__ = ("frame", "got", "got_before", "period_at", "rate", "read_at", "scanned_at", "window_at")

    def __init__(self, frame: int, now: float, got: int) -> None:
        self.frame = frame
        self.period_at = self.window_at = self.scanned_at = self.read_at = now
        self.got = self.got_before = got
        self.rate = -1.0


class _Slow(NamedTuple):
    """A slow sender. Entries sort in the order of closing: those being read before paused ones, the slowest first.

    A ``spared`` sender is too young, fast enough, or has not waited long: it is closed for short frames only.
    """

    spared: bool
    paused: bool
    rate: float
    held: int
    number: int
    connection: Connection
    frame: int


class UnfinishedFrames:
    """The unfinished frames of a server. ``stats.unfinished`` is their memory, with complete frames not served yet."""

    def __init__(self, limits: ReactorLimits, stats: ReactorStats, watch: Callable[[Connection], None]) -> None:
        """``watch`` updates what the selector watches for a connection."""
        self._watch = watch
        self._limits = limits
        self._stats = stats
        self._most = limits.max_unfinished
        self._most_of_long = self._most * 3 // 4
        self._most_of_others = self._most_of_long - min(self._limits.max_frame, self._most_of_long // 2)
        self._leader: Connection | None = None
        self._leads = 0  # number of the leader's frame
        self._quick = self._limits.max_frame / self._limits.idle
        self._seen: dict[Connection, _Progress] = {}
        self._next_seen: dict[Connection, _Progress] = {}
        self._slow: list[_Slow] = []
        self._next_slow: list[_Slow] = []
        self._aside: deque[Connection] = deque()

    # called by the intake

    def keep(self, conn: Connection, data: bytes) -> None:
        """Store ``data``: bytes of ``conn`` after its last complete frame, or frames that wait for another turn."""
        conn.rest = data
        self._stats.unfinished += len(data)
        if self._stats.unfinished > self._most:
            self._free(conn, 0, self._most, spare=False)
            if self._stats.unfinished > self._most and not conn.closed:
                self._close(conn, "no memory left for unfinished frames")

    def take(self, conn: Connection) -> bytes:
        """Take back the bytes stored by ``keep``."""
        data = conn.rest
        conn.rest = b""
        self._stats.unfinished -= len(data)
        return data

    def begin(self, conn: Connection, size: int, first: memoryview, spare: bytearray | None) -> bool:
        """Allocate a buffer for a long frame that ``conn`` has started. False: there is no space now."""
        big = BigFrame.wanted(size, len(first), spare)
        if not self._has_space(conn, big):
            return False
        conn.big = BigFrame(size, first, spare)
        self._stats.unfinished += len(conn.big.buffer)
        return True

    def grow(self, conn: Connection, big: BigFrame) -> bool:
        """Extend a full buffer. False: there is no space now, and ``conn`` is not read until there is."""
        more = big.growth()
        if not self._has_space(conn, more):
            self.set_aside(conn)
            return False
        big.grow(more)
        self._stats.unfinished += more
        return True

    def ended(self, conn: Connection, big: BigFrame) -> None:
        """Note that a long frame is complete; it is served next."""
        conn.big = None
        self._stats.unfinished -= len(big.buffer)
        while self._aside:  # the space it frees goes to connections that wait
            other = self._aside.popleft()
            if not other.closed:
                self._read_again(other)
                if other.aside:
                    # Still no space: ``grow`` has queued it at the end, so it goes back to the front.
                    self._aside.rotate(1)
                    break

    def forget(self, conn: Connection) -> None:
        """Release the memory of a connection that is being closed."""
        self._stats.unfinished -= len(conn.rest)
        if conn.big is not None:
            self._stats.unfinished -= len(conn.big.buffer)
        conn.rest, conn.big = b"", None

    def set_aside(self, conn: Connection) -> None:
        """Stop reading ``conn`` until there is space, or until the next scan."""
        if not conn.closed and not conn.aside:
            conn.aside = True
            self._aside.append(conn)
            self._watch(conn)

    # scans

    def scan(self, conn: Connection, now: float) -> None:
        """Record the progress of ``conn``'s unfinished frame. A connection without enough progress is closed."""
        big = conn.big
        if big is None and not conn.rest:
            return
        got = big.filled if big is not None else len(conn.rest)
        seen = self._seen.get(conn)
        if seen is None or seen.frame != conn.frame:
            seen = _Progress(conn.frame, now, got)
        waits = conn.paused or conn.ready or conn.aside
        if waits:  # the server does not read it: such time does not count against the sender
            seen.period_at, seen.got = now, got
            seen.window_at += now - seen.scanned_at
        else:
            seen.read_at = now
        seen.scanned_at = now
        if now - seen.period_at >= self._limits.idle:
            if got - seen.got < self._limits.frame_progress:
                self._close(
                    conn,
                    f"its unfinished frame has grown by {got - seen.got} bytes in {now - seen.period_at:.0f} s, "
                    f"the minimum is {self._limits.frame_progress}",
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

    def scan_ended(self) -> None:
        """Take over the results of a scan of all connections, and read waiting ones again as far as there is space."""
        self._seen, self._next_seen = self._next_seen, {}
        self._slow, self._next_slow = sorted(self._next_slow, reverse=True), []
        # A new queue, since connections for which there is still no space are put into it again.
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

    # freeing memory

    def _has_space(self, conn: Connection, more: int) -> bool:
        """Whether a long frame may take ``more`` bytes. Beyond the part of the others, one frame becomes the leader."""
        if self._stats.unfinished + more <= self._most_of_others:
            return True
        leader = self._leader
        if leader is None or leader.closed or leader.big is None or leader.frame != self._leads:
            leader, self._leader, self._leads = conn, conn, conn.frame
        most = self._most_of_long if leader is conn else self._most_of_others
        return self._free(conn, more, most, spare=True)

    def _free(self, conn: Connection, more: int, most: int, *, spare: bool) -> bool:
        """Close slow senders until ``more`` bytes fit. False if they do not, or if ``conn`` itself was closed."""
        slow = self._slow
        while self._stats.unfinished + more > most and not conn.closed:
            if not slow or (slow[-1].spared and spare):
                return False
            entry = slow.pop()
            other = entry.connection
            # The entry is from the last scan: the frame may be complete by now.
            if not other.closed and other.frame == entry.frame and (other.big is not None or other.rest):
                self._close(other, "it was the slowest sender when memory for unfinished frames ran short")
        return not conn.closed

    def _close(self, conn: Connection, reason: str) -> None:
        self._stats.unfinished_closed += 1
        conn.close(reason)
