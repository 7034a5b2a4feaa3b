"""Unsecured: stands in for a connection's socket while it is not decided how bytes pass, so that none do."""

import socket
from collections.abc import Iterable
from typing import Any

from trimq.protocol.frame import Buffer


class Unsecured:
    """A socket that nothing may be sent through yet. ``raw`` is the plain one. Subclasses receive."""

    __slots__ = ("raw",)

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw

    def recv_into(self, _: memoryview) -> int:
        """See ByteSocket."""
        raise NotImplementedError

    def send(self, _: Buffer) -> int:
        """Always BlockingIOError: the peer gets nothing before it has asked for something."""
        raise BlockingIOError

    def sendmsg(self, _: Iterable[Buffer]) -> int:
        """As ``send``."""
        raise BlockingIOError

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Of the plain socket: whether it is lost."""
        return self.raw.recv(size, flags)

    def fileno(self) -> int:
        """Of the plain socket."""
        return self.raw.fileno()

    def getpeername(self) -> Any:
        """Of the plain socket."""
        return self.raw.getpeername()

    def getsockname(self) -> Any:
        """Of the plain socket."""
        return self.raw.getsockname()

    def getsockopt(self, level: int, name: int) -> int:
        """Of the plain socket."""
        return self.raw.getsockopt(level, name)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """Of the plain socket."""
        self.raw.setsockopt(level, name, value)

    def close(self) -> None:
        """Close the plain socket."""
        self.raw.close()
