"""Sender: sends what connections have queued, and sets which events the selector watches for each connection."""

import select
from collections.abc import Callable
from typing import Final

from trimq.remoting.runtime.clock import CoarseTime
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.limits import ReactorLimits, ReactorStats
from trimq.remoting.server.selector import Selector

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT


class Sender:
    """Sends the bytes queued in a round at its end, with one system call per connection.

    ``in_round`` is set by the reactor while a round runs: ``send_marked`` is called at its end. Outside of rounds
    ``wake`` requests that. ``reads`` is False once a stopping server reads no more requests. ``ready`` holds
    connections with complete frames left to serve, or with bytes inside their TLS, which get a turn of their own.
    """

    def __init__(
        self,
        limits: ReactorLimits,
        stats: ReactorStats,
        time: CoarseTime,
        selector: Selector,
        wake: Callable[[], None],
    ) -> None:
        self.in_round = False
        self.reads = True
        self.ready: list[Connection] = []
        self._limits = limits
        self._stats = stats
        self._time = time
        self._selector = selector
        self._wake = wake
        self._marked: list[Connection] = []

    def mark(self, conn: Connection) -> None:
        """Have ``conn`` flushed at the end of the round, or soon if no round is running."""
        conn.dirty = True
        self._marked.append(conn)
        if not self.in_round:
            self._wake()

    def continue_later(self, conn: Connection) -> None:
        """Give ``conn`` another turn for what no event reports: frames or bytes in memory.

        A paused one gets it when it has drained (``watch``).
        """
        if not conn.paused:
            self.ready.append(conn)

    def take_ready(self) -> list[Connection]:
        """Take and clear ``ready``."""
        ready, self.ready = self.ready, []
        return ready

    def send_marked(self) -> None:
        """Send what was queued, and what is queued while that is sent."""
        stats, now = self._stats, self._time.now
        # A loop, since a flush may resume a connection or close one, and these callbacks may queue for others.
        while self._marked:
            marked, self._marked = self._marked, []
            for conn in marked:
                conn.dirty = False
                if conn.closed:
                    continue
                out = conn.out
                chunks = out.chunks
                if len(chunks) == 1 and conn.mask == READ and not out.to_release:
                    # the usual case of ``flush``, inlined: it saves two calls per connection and round
                    data = chunks[0]
                    try:
                        count = conn.sock.send(data)
                    except OSError:  # ``flush`` below tries again and handles it
                        count = 0
                    if count:
                        out.sent += count
                        stats.bytes_out += count
                        conn.active_at = now
                        if count == len(data):
                            chunks.clear()
                            continue
                        chunks[0] = memoryview(data)[count:]
                self.flush(conn)

    def send_now(self, conn: Connection) -> bool:
        """Send the queued bytes. True if ``conn`` is then closed, or still over its mark: serve it no more for now."""
        self.flush(conn)
        return conn.closed or conn.paused

    def flush(self, conn: Connection) -> None:
        """Send as much as its socket takes. A connection whose socket fails is closed."""
        out = conn.out
        before = out.sent
        try:
            done = out.flush(conn.sock)
            if conn.tls is not None and done:
                done = conn.tls.flushed()
        except OSError as error:
            conn.close(f"the connection was lost: {error}")
            return
        count = out.sent - before
        if count:
            self._stats.bytes_out += count
            conn.active_at = self._time.now
        if not done or conn.mask != READ:
            self.watch(conn)

    def pause_if_over(self, conn: Connection) -> bool:
        """Pause a connection that has reached its high-water mark; returns whether it has. Neither sends nor closes."""
        if conn.out.queued - conn.out.sent < self._limits.high_water:
            return False
        self.watch(conn)
        return True

    def watch(self, conn: Connection) -> None:
        """Update ``paused`` and the watched events: writable while bytes wait, readable unless reading is suspended."""
        waiting = conn.out.queued - conn.out.sent
        if conn.paused and waiting <= self._limits.low_water:
            conn.paused = False
            self._stats.paused -= 1
            if conn.ready:
                self.ready.append(conn)
            conn.resume()
            self._wake()  # the selector reports no event for frames that are already in memory
        elif not conn.paused and waiting >= self._limits.high_water:
            conn.paused = True
            self._stats.paused += 1
        mask = (WRITE if waiting else 0) | (0 if conn.paused or conn.aside or not self.reads else READ)
        tls = conn.tls
        if tls is not None:
            if tls.unsent:
                mask |= WRITE
            if tls.has_bytes and mask & READ and not conn.mask & READ:
                self.ready.append(conn)
                self._wake()  # as above
        if mask != conn.mask:
            conn.mask = mask
            self._selector.modify(conn.sock.fileno(), mask)
