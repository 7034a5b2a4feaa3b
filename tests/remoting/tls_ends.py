"""Both ends of a TLS connection in one thread, over sockets that a test can fill or slow down."""

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from tests.tls_certificates import Certificates
from trimq.remoting.tls.tls_socket import TlsSocket


class Pipe:
    """One direction of a connection in memory."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = False


class SlowSocket:
    """A non-blocking socket in memory. ``takes`` and ``gives`` say how many bytes the next call may move at most."""

    def __init__(self, inward: Pipe, outward: Pipe) -> None:
        self.inward = inward
        self.outward = outward
        self.takes: Callable[[], int] = lambda: 1 << 30
        self.gives: Callable[[], int] = lambda: 1 << 30
        self.closed = False

    def send(self, data: Any) -> int:
        if self.outward.ended:
            raise BrokenPipeError
        count = min(self.takes(), len(data))
        if not count and len(data):
            raise BlockingIOError
        self.outward.data += bytes(data[:count])
        return count

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        return self.send(b"".join(map(bytes, buffers)))

    def recv_into(self, view: memoryview) -> int:
        if not self.inward.data and self.inward.ended:
            return 0
        count = min(self.gives(), len(view), len(self.inward.data))
        if not count:
            raise BlockingIOError
        view[:count] = self.inward.data[:count]
        del self.inward.data[:count]
        return count

    def fileno(self) -> int:
        return -1 if self.closed else 99

    def close(self) -> None:
        self.closed = True
        self.outward.ended = True


def slow_pair() -> tuple[SlowSocket, SlowSocket]:
    there, back = Pipe(), Pipe()
    return SlowSocket(there, back), SlowSocket(back, there)


def contexts(
    certificates: Certificates, version: ssl.TLSVersion | None = None
) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's and a client's context, limited to ``version``."""
    server, client = certificates.server_context(), certificates.client_context()
    server.options |= ssl.OP_NO_RENEGOTIATION
    if version is not None:
        server.maximum_version = server.minimum_version = version
    return server, client


def over(
    server: Any, client: Any, server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> tuple[TlsSocket, TlsSocket]:
    """The two ends of a connection over two plain sockets, before the handshake."""
    return (
        TlsSocket(server, server_context, server_side=True),
        TlsSocket(client, client_context, server_side=False, server_hostname="localhost"),
    )


def shake_hands(*ends: TlsSocket) -> None:
    """Take handshake steps at both ends until they are done."""
    for _ in range(10_000):
        done = [end.do_handshake() for end in ends]
        if all(done) and not any(end.unsent for end in ends):
            return
        for end in ends:
            end.fill()
    raise AssertionError("the handshake does not end")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    return left, right
