"""BigFrame: a frame that is being received and is too long for the buffer shared by all connections."""

from typing import Final

from trimq.remoting.server.limits import RECEIVE_BUFFER
from trimq.remoting.tls.tls_socket import ByteSocket

SPARE_SIZE: Final = 1024 * 1024
"""Size of the buffers reused for long frames. Reuse is safe: no handler reads a frame after its turn has ended."""
SPARES: Final = 4
"""Buffers of SPARE_SIZE that are retained for reuse."""


class BigFrame:
    """A partly received long frame. Its buffer grows with the bytes received: an announced length allocates nothing.

    ``spare`` is a buffer to use from the start. It saves clearing a new buffer, and copying it whenever it grows.
    """

    __slots__ = ("buffer", "filled", "size")

    def __init__(self, size: int, first: memoryview, spare: bytearray | None = None) -> None:
        self.size = size
        self.filled = len(first)
        self.buffer = spare or bytearray(self.wanted(size, self.filled, None))
        self.buffer[: self.filled] = first

    @staticmethod
    def wanted(size: int, filled: int, spare: bytearray | None) -> int:
        """Size in bytes of the first buffer for a frame of ``size`` bytes, ``filled`` of which are received."""
        return len(spare) if spare else min(size, max(RECEIVE_BUFFER, 2 * filled))

    def growth(self) -> int:
        """Bytes by which a full buffer has to grow: it doubles, up to the length of the frame."""
        return min(self.size - self.filled, self.filled)

    def grow(self, more: int) -> None:
        """Extend the buffer by ``more`` bytes."""
        self.buffer += bytes(more)

    def receive(self, sock: ByteSocket) -> int:
        """Read into the free part of the buffer and return the number of bytes; 0 at end of file. Raises like recv."""
        count = sock.recv_into(memoryview(self.buffer)[self.filled : self.size])
        self.filled += count
        return count
