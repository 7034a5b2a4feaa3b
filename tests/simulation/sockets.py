"""The ends of connections in memory, and bound sockets: what programs use of them, and what the network calls."""

import errno
import select
import socket
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import trio

from tests.simulation.nodes import Node

if TYPE_CHECKING:
    from tests.simulation.network import SimNetwork, SimSelector

WINDOW: Final = 64 * 1024
"""Bytes that may be under way in one direction of a connection."""
BODY_PADDING: Final = b"......"
"""What bodies are filled with. Damage elsewhere in a record no checksum of the store would show."""


class SimSocket:
    """One end of a connection, with the methods of a non-blocking socket that clients, reactors and streams use."""

    def __init__(self, network: "SimNetwork", node: Node, peer_host: str) -> None:
        self.network = network
        self.node = node
        self.peer_host = peer_host
        self.other: SimSocket | None = None
        self.address = (node.host, 0)
        """Its own address; the port is that of the listener that has accepted it."""
        self.error = 0
        self.gone = False
        self.closed = False
        self.selector: SimSelector | None = None
        self.listener: Callable[[], None] | None = None
        """Called with each change; it stands for a program that has no task for a connection."""
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

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def setsockopt(self, *_: object) -> None:
        pass

    def send(self, data: Any, _flags: int = 0) -> int:
        self._check_error()
        room = WINDOW - self._under_way
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
        return self._under_way < WINDOW or bool(self.error)

    @property
    def ready(self) -> int:
        """What epoll would report."""
        if self.error:
            return select.EPOLLIN | select.EPOLLOUT | select.EPOLLERR
        readable = select.EPOLLIN if self._arrived or self._eof else 0
        return readable | select.EPOLLOUT if self._under_way < WINDOW else readable

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
            # The machine is there and knows nothing of this connection; or it is not there, and does not answer.
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
            other._arrived += self._damage(piece) if self.network.damaged else piece
        else:
            self.fail(errno.ECONNRESET)
        other.changed()
        if was_full:
            self.changed()

    def _damage(self, piece: bytes) -> bytes:
        """``piece`` with another byte in a body, by chance and between machines whose bytes are damaged."""
        at = piece.find(BODY_PADDING)
        hosts = tuple(self.network.damaged)
        if at < 0 or not (self.node.host.startswith(hosts) and self.peer_host.startswith(hosts)):
            return piece
        if self.network.rng.random() < 0.5:
            return piece
        return piece[:at] + b"!" + piece[at + 1 :]

    def fail(self, number: int) -> None:
        """The connection is broken: every use of this end fails with this errno."""
        if not self.error:
            self.error = number
            self._out.clear()
            self.changed()
        if self.closed:
            self._forget()

    def drop(self) -> None:
        """This end is gone, and its peer finds that out."""
        self.gone = True
        self._forget()
        if self.other is not None:
            network = self.network
            network.at(trio.current_time() + network.draw_delay(), partial(self.other.fail, errno.ECONNRESET))

    def _forget(self) -> None:
        if self in self.network.sockets:
            self.network.sockets.remove(self)

    def changed(self) -> None:
        """Wake those who wait for this end."""
        if self._readers and (self.is_readable or self.closed):
            self._readers.unpark_all()
        if self._writers and (self.is_writable or self.closed):
            self._writers.unpark_all()
        if self.selector is not None:
            self.selector.changed()
        if self.listener is not None:
            self.listener()

    def wake(self) -> None:
        """Wake those who wait to read, though there may be nothing."""
        self._readers.unpark_all()

    async def woken(self) -> None:
        """Return after the next change, or ``wake``."""
        await self._readers.park()

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

    def __init__(self, network: "SimNetwork", node: Node, port: int) -> None:
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
        # As the kernel does: connections that were not accepted are reset.
        while self.waiting:
            self.waiting.popleft()[0].drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ready(self) -> int:
        """What epoll would report."""
        return select.EPOLLIN if self.waiting else 0

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
