"""Sockets in memory with a selector: a reactor serves them as it serves those of the system."""

import itertools
from typing import Any

import trio

from tests.remoting.tls_ends import Pipe, SlowSocket
from trimq.remoting.server.sender import READ, WRITE

_numbers = itertools.count(1 << 20)


class MemorySocket(SlowSocket):
    """The server's end of a connection. ``other`` is that of the client. ``is_reset``: the client has reset it."""

    def __init__(self) -> None:
        inward, outward = Pipe(), Pipe()
        super().__init__(inward, outward)
        self.other = SlowSocket(outward, inward)
        self.is_reset = False
        self._number = next(_numbers)

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def fileno(self) -> int:
        return -1 if self.closed else self._number

    def recv_into(self, view: memoryview) -> int:
        if self.is_reset:
            raise ConnectionResetError
        return super().recv_into(view)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Also with MSG_PEEK, the only flag there is."""
        view = memoryview(bytearray(size))
        before = bytes(self.inward.data[:size]) if flags else b""
        count = self.recv_into(view)
        if flags:
            self.inward.data[:0] = before
        return bytes(view[:count])


class MemorySelector:
    """A Selector of such sockets."""

    def __init__(self) -> None:
        self.sockets: dict[int, MemorySocket] = {}
        self._masks: dict[int, int] = {}
        self._waiting = trio.lowlevel.ParkingLot()

    def register(self, fd: int, eventmask: int, /) -> None:
        self._masks[fd] = eventmask

    def modify(self, fd: int, eventmask: int, /) -> None:
        assert fd in self._masks
        self._masks[fd] = eventmask

    def unregister(self, fd: int, /) -> None:
        del self._masks[fd]
        del self.sockets[fd]

    def poll(self, _timeout: float, /) -> list[tuple[int, int]]:
        found = []
        for fd, mask in self._masks.items():
            sock = self.sockets[fd]
            inward = sock.inward
            ready = mask & (READ if inward.data or inward.ended or sock.is_reset else 0) | mask & WRITE
            if ready:
                found.append((fd, ready))
        return found

    def close(self) -> None:
        self._masks.clear()

    def wake(self) -> None:
        """Something has arrived."""
        self._waiting.unpark_all()

    async def wait(self) -> None:
        if not self.poll(0):
            await self._waiting.park()
        else:
            await trio.lowlevel.checkpoint()


def sockets_of(value: Any) -> Any:
    """For arguments that are typed as sockets of the system."""
    return value
