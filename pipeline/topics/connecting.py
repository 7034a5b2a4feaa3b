"""Blocking connections for Spark workers, which have no event loop; a task waits for one socket at a time."""

import socket


def connect(address: str, timeout: float) -> socket.socket:
    """Connect to ``host:port``, with TCP_NODELAY. ``timeout`` in seconds applies to the connect and to each wait.

    Raises OSError.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
