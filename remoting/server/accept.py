"""Acceptor: listening sockets, and how clients are turned away when the process has no descriptor left."""

import errno
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from trimq.remoting.config.configuration import NettyServerConfig
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.limits import ReactorLimits, ReactorStats
from trimq.remoting.server.selector import Selector

_log = structlog.get_logger("remoting")

_BATCH: Final = 64
"""Connections accepted in one turn: the other sockets of the round wait while it runs."""

_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def listen(address: str, port: int, config: NettyServerConfig | None = None) -> socket.socket:
    """A listening socket (port 0: any free port). ``::`` accepts IPv4 clients too. Raises OSError with the address."""
    sock = bind(address, port, config)
    open_port(sock, config)
    return sock


def open_port(sock: socket.socket, config: NettyServerConfig | None = None) -> None:
    """Let clients connect to a socket made by ``bind``. On failure it is closed, and OSError names the address."""
    try:
        sock.listen((config or NettyServerConfig()).server_socket_backlog)
    except OSError as error:
        address, port = sock.getsockname()[:2]
        sock.close()
        raise OSError(error.errno, f"cannot listen on {address}:{port}: {error.strerror}") from error


def bind(address: str, port: int, config: NettyServerConfig | None = None) -> socket.socket:
    """A bound socket that does not listen yet: the kernel refuses connections to it. Raises as ``listen`` does."""
    config = config or NettyServerConfig()
    family, kind, protocol, _, where = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if config.server_socket_rcv_buf_size:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, config.server_socket_rcv_buf_size)
        if config.server_socket_snd_buf_size:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.server_socket_snd_buf_size)
        sock.bind(where)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {address}:{port}: {error.strerror}") from error
    return sock


class Acceptor:
    """Accepts connections for a reactor.

    One descriptor is held in reserve. When all others are in use, it is released to accept the next client and close
    that connection immediately. Otherwise the client would stay in the backlog, and epoll would report the listening
    socket as readable in every round.
    """

    def __init__(
        self,
        limits: ReactorLimits,
        stats: ReactorStats,
        selector: Selector,
        log_budget: LogBudget,
        adopt: Callable[[socket.socket, HandlerTable, tuple[str, int]], object],
        admits: Callable[[str], bool] | None = None,
    ) -> None:
        """``adopt`` takes a client's socket, the table of the port it connected to, and the client's address.

        ``admits``: whether one more connection from an IP address is accepted; it counts those that are not.
        """
        self._limits = limits
        self._stats = stats
        self._adopt = adopt
        self._admits = admits
        self._selector = selector
        self._log_budget = log_budget
        self._listeners: dict[int, tuple[socket.socket, HandlerTable]] = {}
        self._resting: list[int] = []
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def add(self, sock: socket.socket, table: HandlerTable) -> None:
        """Accept from ``sock`` from now on."""
        sock.setblocking(False)
        self._listeners[sock.fileno()] = (sock, table)
        self._selector.register(sock.fileno(), select.EPOLLIN)

    def accept(self, fd: int) -> None:
        """Accept the clients that wait at listener ``fd``. Does nothing if ``fd`` is not, or no longer, a listener."""
        listener = self._listeners.get(fd)
        if listener is None:
            return
        sock, table = listener
        for _ in range(_BATCH):
            try:
                client, peer = sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    continue  # this client has already disconnected
                self._turn_away(fd, sock, error)
                return
            self._admit(client, peer, table)

    def resume(self) -> None:
        """Watch again the listeners that were taken out of the selector because no client could be accepted."""
        resting, self._resting = self._resting, []
        for fd in resting:
            if fd in self._listeners:
                self._selector.modify(fd, select.EPOLLIN)
        self._take_reserve()

    def close(self) -> None:
        """Stop listening."""
        for fd, (sock, _) in self._listeners.items():
            self._selector.unregister(fd)
            sock.close()
        self._listeners.clear()
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

    def _admit(self, client: socket.socket, peer: tuple[str, int], table: HandlerTable) -> None:
        stats = self._stats
        if stats.connections >= self._limits.max_connections:
            stats.refused += 1
            client.close()
            if self._log_budget.allows():
                _log.warning("connection_refused", peer=peer[0], max_connections=stats.connections)
            return
        address = peer[0].removeprefix("::ffff:")
        if self._admits is not None and not self._admits(address):
            client.close()
            return
        stats.accepted += 1
        with suppress(OSError):  # not a TCP socket, or the client has already disconnected
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._adopt(client, table, (address, peer[1]))

    def _turn_away(self, fd: int, sock: socket.socket, error: OSError) -> None:
        """Accept and close waiting clients with the reserved descriptor. If that fails too, pause the listener."""
        try:
            for _ in range(_BATCH):
                # Only the first pass frees the reserve: the descriptor that ``accept`` takes is closed right after.
                if self._reserve >= 0:
                    os.close(self._reserve)
                    self._reserve = -1
                sock.accept()[0].close()
                self._stats.refused += 1
                if self._log_budget.allows():
                    _log.error("no_descriptor_left", error=str(error), connections=self._stats.connections)
        except BlockingIOError:
            pass
        except OSError as still:
            if self._log_budget.allows():
                _log.error("cannot_accept", error=str(still), connections=self._stats.connections)
            self._rest(fd)
        self._take_reserve()

    def _take_reserve(self) -> None:
        if self._reserve < 0:
            with suppress(OSError):
                self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _rest(self, fd: int) -> None:
        """Stop watching a listener until the next scan: epoll would report it again and again."""
        self._selector.modify(fd, 0)
        self._resting.append(fd)
