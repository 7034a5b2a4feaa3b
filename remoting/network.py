"""Network: the listening sockets, connections and selectors of a server program.

A seam as the clock and the disk are: the composition roots pass it on, and a simulated cluster has one in memory.
"""

import socket
from typing import Protocol

import trio

from trimq.remoting.client.client_socket import ClientNetwork, SocketNetwork
from trimq.remoting.config.configuration import NettyServerConfig
from trimq.remoting.server.accept import bind, open_port
from trimq.remoting.server.selector import EpollSelector, Selector


class Network(ClientNetwork, Protocol):
    """What composition roots need of a network. ``connect`` and the waits are for RemotingClient."""

    def bind(self, address: str, port: int, config: NettyServerConfig | None = None) -> socket.socket:
        """A bound socket that does not listen yet; port 0: any free port. Raises OSError with the address."""
        ...

    def open_port(self, sock: socket.socket, config: NettyServerConfig | None = None) -> None:
        """Let clients connect to a socket made by ``bind``. Raises OSError with the address; it is closed then."""
        ...

    def selector(self) -> Selector:
        """A selector for the sockets of one reactor."""
        ...

    async def open_stream(self, host: str, port: int) -> trio.abc.Stream:
        """A connection to (host, port). Raises OSError."""
        ...

    def listener(self, sock: socket.socket) -> trio.abc.Listener[trio.abc.Stream]:
        """Accepts the connections of a socket made by ``bind`` that listens. Closing it closes the socket."""
        ...

    def peer_of(self, stream: trio.abc.Stream) -> str:
        """The IP address of the other end of a connection that a listener has accepted."""
        ...


class SystemNetwork(SocketNetwork):
    """The network of the operating system."""

    def bind(self, address: str, port: int, config: NettyServerConfig | None = None) -> socket.socket:
        """See Network."""
        return bind(address, port, config)

    def open_port(self, sock: socket.socket, config: NettyServerConfig | None = None) -> None:
        """See Network."""
        open_port(sock, config)

    def selector(self) -> Selector:
        """See Network."""
        return EpollSelector()

    async def open_stream(self, host: str, port: int) -> trio.abc.Stream:
        """See Network."""
        return await trio.open_tcp_stream(host, port)

    def listener(self, sock: socket.socket) -> trio.abc.Listener[trio.abc.Stream]:
        """See Network."""
        return trio.SocketListener(trio.socket.from_stdlib_socket(sock))

    def peer_of(self, stream: trio.abc.Stream) -> str:
        """See Network."""
        assert isinstance(stream, trio.SocketStream)
        address: str = stream.socket.getpeername()[0]
        return address.removeprefix("::ffff:")
