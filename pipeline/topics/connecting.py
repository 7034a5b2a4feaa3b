"""Blocking connections for Spark workers, which have no event loop; a task waits for one socket at a time."""

import socket

from trimq.client import Tls
from trimq.client.blocking_tls import secured


def connect(address: str, timeout: float, tls: Tls | bool = False) -> socket.socket:
    """Connect to ``host:port``, with TCP_NODELAY. ``timeout`` in seconds applies to the connect and to each wait.

    With ``tls`` it is an ssl.SSLSocket, whose handshake is done. Raises OSError.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    connection = socket.create_connection((host, int(port)), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return secured(connection, host, tls) if tls else connection
