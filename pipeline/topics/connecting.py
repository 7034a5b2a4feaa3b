"""Connections that a task waits on by itself, one at a time: no event loop is there in a Spark worker."""

import socket


def connect(address: str, timeout: float) -> socket.socket:
    """A connection to ``host:port``, whose small requests go out at once; ``timeout``: seconds for it and each wait.

    Raises OSError.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
