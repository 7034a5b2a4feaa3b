"""The sockets for clients: the main port, and the VIP port (fastListenPort), which serves no pulls."""

import socket
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from trimq.broker import addresses
from trimq.broker.config import BrokerConfig
from trimq.broker.start_error import StartError
from trimq.remoting.config.configuration import NettyServerConfig
from trimq.remoting.network import Network


class ClientPorts:
    """The bound sockets, main port first, and ``admin`` (adminListenAddress), None without one.

    None listens before ``open``; leaving the block closes them.

    ``address`` is the advertised ``host:port``, ``endpoint`` where this machine connects, ``listening`` describes where
    the sockets listen.
    """

    def __init__(self, broker: BrokerConfig, config: NettyServerConfig, network: Network) -> None:
        """Bind. Raises StartError if a port is taken."""
        self._config = config
        self._network = network
        self._stack = ExitStack()
        self.sockets: list[socket.socket] = []
        try:
            for port in (broker.listen_port, broker.fast_port):
                # Port 0 means any free port for the main port, and off for the VIP port.
                if port or not self.sockets:
                    self.sockets.append(self._stack.enter_context(network.bind(config.bind_address, port, config)))
        except OSError as error:
            self._stack.close()
            raise _port_taken(error) from error
        self.admin = self._bind_admin(broker.admin_listen_address)
        self.endpoint = addresses.reachable(self.sockets[0])
        host = addresses.advertised_address(broker.broker_ip1, config.bind_address)
        self.address = addresses.join(host, self.endpoint[1])
        self.listening = [
            f"{config.bind_address}:{found.getsockname()[1]}" + (" (without pulls)" if n else "")
            for n, found in enumerate(self.sockets)
        ]
        if self.admin is not None:
            self.listening.append(f"{self.admin_address} (for administrators)")

    @property
    def admin_address(self) -> str:
        """HOST:PORT of the admin port; empty without one."""
        return "" if self.admin is None else addresses.join(*self.admin.getsockname()[:2])

    def _bind_admin(self, address: str) -> socket.socket | None:
        if not address:
            return None
        host, _, port = address.rpartition(":")
        try:
            found = self._network.bind(host.strip("[]"), int(port), self._config)
        except OSError as error:
            self._stack.close()
            raise _admin_address_taken(error) from error
        return self._stack.enter_context(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def open(self) -> None:
        """Listen: clients can connect from here on. Raises StartError."""
        try:
            for sock in self.sockets:
                self._network.open_port(sock, self._config)
        except OSError as error:
            raise _port_taken(error) from error
        try:
            if self.admin is not None:
                self._network.open_port(self.admin, self._config)
        except OSError as error:  # bound all the same: SO_REUSEADDR lets two sockets have an address until one listens
            raise _admin_address_taken(error) from error


def _port_taken(error: OSError) -> StartError:
    return StartError(f"{error.strerror or error}: stop the process that listens there, or set listenPort")


def _admin_address_taken(error: OSError) -> StartError:
    return StartError(f"{error.strerror or error}: set another adminListenAddress")
