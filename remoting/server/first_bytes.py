"""FirstBytes: the first byte of a connection decides between TLS and plain frames.

It stands in for the connection's socket until bytes have arrived, so every later read costs what it does without TLS.
A plain frame cannot begin as TLS does: as the high byte of a length, 0x16 is above any limit.
"""

import socket
from typing import Final

from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handshakes import Handshakes
from trimq.remoting.server.unsecured import Unsecured
from trimq.remoting.tls.tls_socket import MOST_HANDSHAKE

_HANDSHAKE: Final = 0x16
"""The first byte of a TLS record with a handshake message."""


class FirstBytes(Unsecured):
    """The socket of a connection that has sent nothing yet. With ``handshakes.requires_tls`` plain ones are closed."""

    __slots__ = ("_connection", "_handshakes")

    def __init__(self, conn: Connection, raw: socket.socket, handshakes: Handshakes) -> None:
        super().__init__(raw)
        self._connection = conn
        self._handshakes = handshakes

    def recv_into(self, buffer: memoryview) -> int:
        """Receive the first bytes. BlockingIOError also if they begin a handshake, or the connection was closed."""
        conn = self._connection
        count = self.raw.recv_into(buffer[:MOST_HANDSHAKE])
        if count and buffer[0] == _HANDSHAKE:
            self._handshakes.begin(conn, self, buffer[:count])
        elif count and self._handshakes.requires_tls:
            self._handshakes.refuse_plain(conn)
        else:
            # A plain socket has all methods; its own are typed for more kinds of arguments.
            conn.sock = self.raw
            return count
        raise BlockingIOError

    def close(self) -> None:
        """Close the plain socket. No reference to the connection is left: it is freed without the collector."""
        super().close()
        del self._connection
