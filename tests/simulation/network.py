"""A network in memory: connections between the nodes of a simulated cluster, and its faults.

A connection is two ends; bytes sent at one arrive at the other in order, after a delay that is drawn for each piece.
Connections are independent of each other, so that what was sent later on another one may come first. A direction
between two machines can be cut: what is sent waits, as TCP would send it again, until the cut ends. A connection can
be reset: what is under way is lost, and both ends find it out. A machine that lost its power sends nothing more; who
still has a connection to it finds out when he sends after it is back.
"""

import errno
import itertools
import select
import socket
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Final, cast

import trio

from tests.simulation.nodes import NODE, Node
from tests.simulation.sockets import SimListener, SimSocket
from tests.simulation.times import VirtualClock
from trimq.remoting.client.call import Readable
from trimq.remoting.config.configuration import NettyServerConfig

BROKER_HOSTS: Final = "10.0.1."
"""Prefix of the addresses of brokers."""


class SimNetwork:
    """All connections of a cluster. ``nodes`` get a view of it as trimq.remoting.network.Network by ``of``."""

    def __init__(self, rng: Random, clock: VirtualClock, trace: Callable[[str], None]) -> None:
        self.rng = rng
        self.at = clock.at
        self.trace = trace
        self.min_delay = 0.0002
        self.max_delay = 0.004
        self.listeners: dict[tuple[str, int], SimListener] = {}
        self.sockets: list[SimSocket] = []
        self.by_fd: dict[int, SimSocket | SimListener] = {}
        self.dark: set[str] = set()
        """Hosts without power: there is no answer from them."""
        self.cuts: set[tuple[str, str]] = set()
        """Directions (from host, to host) in which nothing arrives."""
        self.refused: set[tuple[str, str]] = set()
        """Directions in which connections are refused, though the other machine listens."""
        self.was_refused = False
        """Whether there has ever been one."""
        self.arrivals: dict[str, trio.Event] = {}
        """Set when the next bytes arrive at a host, and removed then."""
        self.damaged: set[str] = set()
        """Prefixes of hosts: what machines with this prefix send each other is damaged at times."""
        self.healed = trio.Event()
        """Set when a cut ends; another event takes its place then."""
        self._fds = itertools.count(1000)
        self._ports = itertools.count(40_000)

    def of(self, node: Node) -> "NodeNetwork":
        """The network as ``node`` sees it."""
        return NodeNetwork(self, node)

    def next_fd(self) -> int:
        return next(self._fds)

    def next_port(self) -> int:
        return next(self._ports)

    async def arrival(self, host: str) -> None:
        """Return when the next bytes arrive at ``host``."""
        await self.arrivals.setdefault(host, trio.Event()).wait()

    def draw_delay(self) -> float:
        """Seconds until a piece arrives: mostly short, at times long."""
        rng = self.rng
        if rng.random() < 0.02:
            return rng.uniform(self.max_delay, 20 * self.max_delay)
        return rng.uniform(self.min_delay, self.max_delay)

    # -- faults

    def cut(self, source: str, target: str) -> None:
        """From here on nothing that ``source`` sends arrives at ``target``."""
        self.cuts.add((source, target))

    def heal(self, source: str, target: str) -> None:
        """End a cut: what was sent in the meantime arrives."""
        self.cuts.discard((source, target))
        self.healed.set()
        self.healed = trio.Event()
        for sock in self.sockets:
            if (sock.node.host, sock.peer_host) == (source, target):
                sock.transmit()

    def reset(self, sock: "SimSocket") -> None:
        """Break a connection: what is under way is lost."""
        sock.fail(errno.ECONNRESET)
        if sock.other is not None:
            sock.other.fail(errno.ECONNRESET)

    def refuse(self, source: str, target: str) -> None:
        """Reset the connections from one machine to another, as a firewall may, in both directions; refuse new ones."""
        self.refused.add((source, target))
        self.was_refused = True
        for sock in list(self.sockets):
            if (sock.node.host, sock.peer_host) == (source, target):
                self.reset(sock)

    def node_ended(self, node: Node, *, silently: bool) -> None:
        """The process of ``node`` has ended: its kernel closes its connections, unless the power failed too."""
        if silently:
            self.dark.add(node.host)
        for listener in [found for found in self.listeners.values() if found.node is node]:
            del self.listeners[listener.address]
        for sock in [found for found in self.sockets if found.node is node]:
            other = sock.other
            sock.gone = True
            self.sockets.remove(sock)
            if other is not None and not silently:
                self.at(trio.current_time() + self.draw_delay(), partial(other.fail, errno.ECONNRESET))


class SimSelector:
    """Implements trimq.remoting.server.selector.Selector for the ends of one node."""

    def __init__(self, network: SimNetwork, node: Node) -> None:
        self._network = network
        self._node = node
        self._watched: dict[int, tuple[SimSocket | SimListener, int]] = {}
        self._changed = trio.lowlevel.ParkingLot()

    def register(self, fd: int, eventmask: int, /) -> None:
        sock = self._network.by_fd[fd]
        sock.selector = self
        self._watched[fd] = (sock, eventmask)
        self.changed()

    def modify(self, fd: int, eventmask: int, /) -> None:
        self._watched[fd] = (self._watched[fd][0], eventmask)
        self.changed()

    def unregister(self, fd: int, /) -> None:
        self._watched.pop(fd)[0].selector = None

    def poll(self, _timeout: float, /) -> list[tuple[int, int]]:
        events = []
        for fd, (sock, watched) in self._watched.items():
            ready = sock.ready & (watched | select.EPOLLERR)  # as epoll: errors also if they are not asked for
            if ready:
                events.append((fd, ready))
        return events

    def close(self) -> None:
        for sock, _ in self._watched.values():
            sock.selector = None
        self._watched.clear()

    def changed(self) -> None:
        self._changed.unpark_all()

    async def wait(self) -> None:
        # A reactor has just polled, and found nothing.
        await self._changed.park()


class _SimReadable(Readable):
    def __init__(self, sock: SimSocket) -> None:
        self._sock = sock

    async def wait(self) -> None:
        await self._sock.wait_readable()

    def close(self) -> None:
        pass


class SimStream(trio.abc.Stream):
    """A connection as trio's stream."""

    def __init__(self, sock: SimSocket) -> None:
        self.socket = sock

    async def send_all(self, data: Any) -> None:
        left = memoryview(data)
        await trio.lowlevel.checkpoint()
        while left:
            if self.socket.closed:
                raise trio.ClosedResourceError
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                await self.socket.wait_writable()
            except OSError as error:
                raise trio.BrokenResourceError from error

    async def wait_send_all_might_not_block(self) -> None:
        await self.socket.wait_writable()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await self.socket.wait_readable()
        if self.socket.closed:
            raise trio.ClosedResourceError
        try:
            return self.socket.recv(max_bytes or 65_536)
        except BlockingIOError:
            raise trio.ClosedResourceError from None
        except OSError as error:
            raise trio.BrokenResourceError from error

    async def aclose(self) -> None:
        self.socket.close()
        self.socket.changed()
        await trio.lowlevel.checkpoint()


class _StreamListener(trio.abc.Listener[trio.abc.Stream]):
    def __init__(self, listener: SimListener) -> None:
        self._listener = listener

    async def accept(self) -> trio.abc.Stream:
        return SimStream((await self._listener.accepted())[0])

    async def aclose(self) -> None:
        self._listener.close()
        await trio.lowlevel.checkpoint()


class NodeNetwork:
    """Implements trimq.remoting.network.Network for one node."""

    def __init__(self, network: SimNetwork, node: Node) -> None:
        self._network = network
        self._node = node

    def bind(self, _address: str, port: int, _config: NettyServerConfig | None = None) -> socket.socket:
        return cast("socket.socket", SimListener(self._network, self._node, port))

    def open_port(self, sock: socket.socket, _config: NettyServerConfig | None = None) -> None:
        listener = cast("SimListener", sock)
        if listener.address in self._network.listeners:
            raise OSError(errno.EADDRINUSE, f"{listener.address} is in use")
        self._network.listeners[listener.address] = listener

    def selector(self) -> SimSelector:
        return SimSelector(self._network, self._node)

    async def connect(self, host: str, port: int) -> socket.socket:
        return cast("socket.socket", await self._connected(host, port))

    async def _connected(self, host: str, port: int) -> SimSocket:
        network, here = self._network, self._node.host
        assert NODE.get() is self._node
        await trio.sleep(network.draw_delay())
        while (here, host) in network.cuts or (host, here) in network.cuts:
            await network.healed.wait()
        before = network.listeners.get((host, port))
        await trio.sleep(network.draw_delay())
        listener = network.listeners.get((host, port))
        refused = (here, host) in network.refused
        if refused or listener is None or listener is not before or listener.node.is_dead:
            if host in network.dark and not refused:
                await trio.sleep_forever()
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nothing listens at {host}:{port}")
        mine = SimSocket(network, self._node, host)
        theirs = SimSocket(network, listener.node, here)
        mine.other, theirs.other = theirs, mine
        theirs.address = listener.address
        listener.waiting.append((theirs, (here, network.next_port())))
        listener.changed()
        return mine

    def readable(self, sock: socket.socket) -> Readable:
        return _SimReadable(cast("SimSocket", sock))

    async def wait_writable(self, sock: socket.socket) -> None:
        await cast("SimSocket", sock).wait_writable()

    async def open_stream(self, host: str, port: int) -> trio.abc.Stream:
        return SimStream(await self._connected(host, port))

    def listener(self, sock: socket.socket) -> trio.abc.Listener[trio.abc.Stream]:
        return _StreamListener(cast("SimListener", sock))

    def peer_of(self, stream: trio.abc.Stream) -> str:
        return cast("SimStream", stream).socket.peer_host
