"""A client's entry in the membership tables (RocketMQ's ClientChannelInfo)."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from trimq.remoting.server.connection import Connection


class ClientChannel(Struct):
    """One client process on one connection.

    ``last_update`` is monotonic seconds, ``last_update_timestamp`` the same moment in ms since the epoch. ``user``: who
    has signed the heartbeat; empty if it needed no signature.
    """

    connection: Connection
    client_id: str
    language: Any = None
    version: int = 0
    last_update: float = 0.0
    last_update_timestamp: int = 0
    user: str = ""


def watch(connection: Connection, closed: Callable[[Connection], None]) -> None:
    """Have ``closed`` called when a connection ends: once, even if the client joins and leaves groups many times."""
    if closed not in connection.on_close:
        connection.on_close.append(closed)
