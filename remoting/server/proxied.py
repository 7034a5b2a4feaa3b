"""Proxied: reads the PROXY protocol preamble of a connection from a proxy, before anything else is decided.

It stands in for the connection's socket until the preamble is complete, or the first bytes are none; then the client's
address is known, and the connection goes on as any other: with its first byte, which may be that of TLS.
"""

import socket
from collections.abc import Callable
from typing import Final

from trimq.protocol.proxy_preamble import LONGEST, ProxyPreambleError, begins, parse
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.server.unsecured import Unsecured

_PEEKED: Final = 512
"""Bytes that are looked at first: nearly every preamble is shorter."""


class Proxied(Unsecured):
    """The socket of a connection from a proxy, until its preamble has been read."""

    __slots__ = ("_arrived", "_connection", "_decided", "_stats")

    def __init__(
        self,
        conn: Connection,
        raw: socket.socket,
        stats: ReactorStats,
        decided: Callable[[Connection, socket.socket], bool],
    ) -> None:
        """``decided`` is called once, when the client's address is known, to set the next ``conn.sock``.

        It returns False if the connection was closed, because that address may have no more.
        """
        super().__init__(raw)
        self._connection = conn
        self._stats = stats
        self._decided = decided
        self._arrived = b""

    def recv_into(self, buffer: memoryview) -> int:
        """Receive what follows the preamble. BlockingIOError also if that, or the connection, is not there (yet)."""
        conn = self._connection
        while True:
            # Only looked at: what is behind the preamble stays in the kernel, for those who read next.
            arrived = self._arrived
            peeked = self.raw.recv(min(_PEEKED, LONGEST + 1 - len(arrived)), socket.MSG_PEEK)
            if not peeked:
                return 0
            data = arrived + peeked
            if not arrived and not begins(data):
                self._stats.proxied_without_preamble += 1
                return self._go_on(buffer)
            try:
                preamble = parse(data)
            except ProxyPreambleError as error:
                conn.close(f"broken PROXY protocol preamble: {error}", broken=True)
                raise BlockingIOError from None
            used = len(peeked) if preamble is None else preamble.size - len(arrived)
            self._arrived = arrived + self.raw.recv(used)
            if preamble is not None:
                self._stats.proxied += 1
                if preamble.source is not None:
                    conn.came_from(preamble.source)
                return self._go_on(buffer)

    def _go_on(self, buffer: memoryview) -> int:
        if not self._decided(self._connection, self.raw):
            raise BlockingIOError
        return self._connection.sock.recv_into(buffer)
