"""Unsecured: stands in for a connection's socket while it is not decided how bytes pass, so that none do."""

from collections.abc import Iterable

from trimq.protocol.frame import Buffer
from trimq.remoting.tls.tls_socket import OverRaw


class Unsecured(OverRaw):
    """A socket that nothing may be sent through yet. ``raw`` is the plain one. Subclasses receive."""

    __slots__ = ()

    def recv_into(self, _: memoryview) -> int:
        """See ByteSocket."""
        raise NotImplementedError

    def send(self, _: Buffer) -> int:
        """Always BlockingIOError: the peer gets nothing before it has asked for something."""
        raise BlockingIOError

    def sendmsg(self, _: Iterable[Buffer]) -> int:
        """As ``send``."""
        raise BlockingIOError

    def close(self) -> None:
        """Close the plain socket."""
        self.raw.close()
