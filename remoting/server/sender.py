"""Sender: sends what connections have queued, and has the selector watch what matters of each of them."""

import select
from collections.abc import Callable
from typing import Final

from trimq.remoting.runtime.clock import CoarseTime
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.limits import ReactorLimits, ReactorStats

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT


class Sender:
    """What is queued in a round goes out at its end, one system call for each connection.

    ``in_round``, set by the reactor: ``send_marked`` will be called soon anyway. Otherwise ``wake`` asks for that.
    ``reads``: False when a server that stops reads no more requests. ``ready`` are connections with whole frames left,
    which get a turn of their own.
    """

    def __init__(
        self,
        limits: ReactorLimits,
        stats: ReactorStats,
        time: CoarseTime,
        epoll: select.epoll,
        wake: Callable[[], None],
    ) -> None:
        self.in_round = False
        self.reads = True
        self.ready: list[Connection] = []
        self._limits = limits
        self._stats = stats
        self._time = time
        self._epoll = epoll
        self._wake = wake
        self._marked: list[Connection] = []

    def mark(self, conn: Connection) -> None:
        """There is something to send: at the end of the round, or soon where none is going on."""
        conn.dirty = True
        self._marked.append(conn)
        if not self.in_round:
            self._wake()

    def continue_later(self, conn: Connection) -> None:
        """It has whole frames left, which get a turn of their own."""
        if not conn.paused:
            self.ready.append(conn)

    def take_ready(self) -> list[Connection]:
        """Those that are ``ready``."""
        ready, self.ready = self.ready, []
        return ready

    def send_marked(self) -> None:
        """Send what was queued, and what is queued while that is sent."""
        stats, now = self._stats, self._time.now
        while self._marked:
            marked, self._marked = self._marked, []
            for conn in marked:
                conn.dirty = False
                if conn.closed:
                    continue
                out = conn.out
                chunks = out.chunks
                if len(chunks) == 1 and conn.mask == READ and not out.to_release:
                    # flush's usual case, without the calls
                    data = chunks[0]
                    try:
                        count = conn.sock.send(data)
                    except OSError:  # flush looks what it is
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
        """Send what waits; True where the client is too slow, or gone: nothing more may be served to it for now."""
        self.flush(conn)
        return conn.closed or conn.paused

    def flush(self, conn: Connection) -> None:
        """Send as much as its socket takes. It is closed where it has failed."""
        out = conn.out
        before = out.sent
        try:
            done = out.flush(conn.sock)
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
        """Pause a connection that has its high-water mark to send; whether it had. Sends nothing, closes nothing."""
        if conn.out.queued - conn.out.sent < self._limits.high_water:
            return False
        self.watch(conn)
        return True

    def watch(self, conn: Connection) -> None:
        """Let the selector watch what matters: room to send, and more requests while the client takes its replies."""
        waiting = conn.out.queued - conn.out.sent
        if conn.paused and waiting <= self._limits.low_water:
            conn.paused = False
            self._stats.paused -= 1
            if conn.ready:
                self.ready.append(conn)
            conn.resume()
            self._wake()
        elif not conn.paused and waiting >= self._limits.high_water:
            conn.paused = True
            self._stats.paused += 1
        mask = (WRITE if waiting else 0) | (0 if conn.paused or conn.aside or not self.reads else READ)
        if mask != conn.mask:
            conn.mask = mask
            self._epoll.modify(conn.sock.fileno(), mask)
