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
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Final, Self, cast

import trio

from tests.simulation.nodes import NODE, Node
from tests.simulation.times import VirtualClock
from trimq.remoting.client.call import Readable
from trimq.remoting.config.configuration import NettyServerConfig

_WINDOW: Final = 64 * 1024
"""Bytes that may be under way in one direction of a connection."""


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
        """Hosts without power: nobody answers there."""
        self.cuts: set[tuple[str, str]] = set()
        """Directions (from host, to host) in which nothing arrives."""
        self.arrivals: dict[str, trio.Event] = {}
        """Set when the next bytes arrive at a host, and removed then."""
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


class SimSocket:
    """One end of a connection, with the methods of a non-blocking socket that clients, reactors and streams use."""

    def __init__(self, network: SimNetwork, node: Node, peer_host: str) -> None:
        self.network = network
        self.node = node
        self.peer_host = peer_host
        self.other: SimSocket | None = None
        self.error = 0
        self.gone = False
        self.closed = False
        self.selector: SimSelector | None = None
        self._fd = network.next_fd()
        self._arrived = bytearray()
        self._eof = False
        self._out: deque[bytes] = deque()
        self._under_way = 0
        self._last_arrival = 0.0
        self._readers = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()
        network.sockets.append(self)
        network.by_fd[self._fd] = self

    # what programs call

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def setsockopt(self, *_: object) -> None:
        pass

    def send(self, data: Any, _flags: int = 0) -> int:
        self._check_error()
        room = _WINDOW - self._under_way
        if room <= 0:
            raise BlockingIOError
        piece = bytes(memoryview(data)[:room])
        self._out.append(piece)
        self._under_way += len(piece)
        self.transmit()
        return len(piece)

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        return self.send(b"".join(bytes(buffer) for buffer in buffers))

    def recv_into(self, buffer: Any, _count: int = 0) -> int:
        if not self._arrived:
            self._check_error()
            if self._eof:
                return 0
            raise BlockingIOError
        count = min(len(buffer), len(self._arrived))
        buffer[:count] = self._arrived[:count]
        del self._arrived[:count]
        return count

    def recv(self, count: int, flags: int = 0) -> bytes:
        if not self._arrived:
            self._check_error()
            if self._eof:
                return b""
            raise BlockingIOError
        data = bytes(self._arrived[:count])
        if not flags & socket.MSG_PEEK:
            del self._arrived[:count]
        return data

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self.gone or self.error:
            self._forget()
            return
        self._out.append(b"")  # the end of the stream, behind all that was sent
        self.transmit()

    # what the network calls

    @property
    def is_readable(self) -> bool:
        return bool(self._arrived or self._eof or self.error)

    @property
    def is_writable(self) -> bool:
        return self._under_way < _WINDOW or bool(self.error)

    def transmit(self) -> None:
        """Send what waits, unless the direction is cut."""
        network = self.network
        if self.gone or (self.node.host, self.peer_host) in network.cuts:
            return
        while self._out:
            piece = self._out.popleft()
            self._last_arrival = max(self._last_arrival, trio.current_time() + network.draw_delay())
            network.at(self._last_arrival, partial(self._arrive, piece))

    def _arrive(self, piece: bytes) -> None:
        other = self.other
        if self.error or other is None:
            return
        was_full = not self.is_writable
        self._under_way -= len(piece)
        self.network.trace(f"{self.node.name} -> {self.peer_host} {self._fd} {len(piece)} {zlib.crc32(piece)}")
        if other.gone:
            # The machine is there and knows nothing of this connection; or it is not there, and nobody answers.
            if self.peer_host not in self.network.dark:
                self.fail(errno.ECONNRESET)
            return
        if (arrival := self.network.arrivals.pop(self.peer_host, None)) is not None:
            arrival.set()
        if not piece:
            other._eof = True
            if self.closed:
                self._forget()
        elif not other.closed:
            other._arrived += piece
        else:
            self.fail(errno.ECONNRESET)
        other.changed()
        if was_full:
            self.changed()

    def fail(self, number: int) -> None:
        """The connection is broken: every use of this end fails with this errno."""
        if not self.error:
            self.error = number
            self._out.clear()
            self.changed()
        if self.closed:
            self._forget()

    def _forget(self) -> None:
        if self in self.network.sockets:
            self.network.sockets.remove(self)

    def changed(self) -> None:
        """Wake those who wait for this end."""
        if self.is_readable or self.closed:
            self._readers.unpark_all()
        if self.is_writable or self.closed:
            self._writers.unpark_all()
        if self.selector is not None:
            self.selector.changed()

    async def wait_readable(self) -> None:
        """Return when there is something to read, or the end."""
        if self.is_readable:
            await trio.lowlevel.checkpoint()
        else:
            await self._readers.park()

    async def wait_writable(self) -> None:
        """Return when there is room for more, or the end."""
        if self.is_writable:
            await trio.lowlevel.checkpoint()
        else:
            await self._writers.park()

    def _check_error(self) -> None:
        if self.error:
            raise OSError(self.error, errno.errorcode[self.error])


class SimListener:
    """A bound socket; it listens once it is opened."""

    def __init__(self, network: SimNetwork, node: Node, port: int) -> None:
        self.network = network
        self.node = node
        self.address = (node.host, port or network.next_port())
        self.selector: SimSelector | None = None
        self.waiting: deque[tuple[SimSocket, tuple[str, int]]] = deque()
        self._fd = network.next_fd()
        self._changed = trio.Event()
        network.by_fd[self._fd] = self

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.popleft()

    def close(self) -> None:
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_readable(self) -> bool:
        return bool(self.waiting)

    is_writable = False

    def changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        if self.selector is not None:
            self.selector.changed()

    async def accepted(self) -> tuple[SimSocket, tuple[str, int]]:
        while not self.waiting:
            await self._changed.wait()
        await trio.lowlevel.checkpoint()
        return self.waiting.popleft()


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
            mask = watched
            ready = (select.EPOLLIN if sock.is_readable else 0) | (select.EPOLLOUT if sock.is_writable else 0)
            if isinstance(sock, SimSocket) and sock.error:
                ready |= select.EPOLLERR
                mask |= select.EPOLLERR  # as epoll: reported also if it is not asked for
            if ready & mask:
                events.append((fd, ready & mask))
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
        listener = network.listeners.get((host, port))
        await trio.sleep(network.draw_delay())
        if listener is None or listener.node.is_dead:
            if host in network.dark:
                await trio.sleep_forever()
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nothing listens at {host}:{port}")
        mine = SimSocket(network, self._node, host)
        theirs = SimSocket(network, listener.node, here)
        mine.other, theirs.other = theirs, mine
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
