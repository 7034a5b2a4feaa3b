"""BigFrame: a frame that is too long for the buffer that all connections share, on its way."""

import socket
from typing import Final

from trimq.remoting.server.limits import RECEIVE_BUFFER

SPARE_SIZE: Final = 1024 * 1024
"""Buffers of this size are kept for long frames, ``SPARES`` of them: no handler looks at a frame after its turn."""
SPARES: Final = 4


class BigFrame:
    """A long frame on its way, in a buffer that grows with what really arrives: an announced length costs nothing.

    With a ``spare`` it is in that from the beginning: a new buffer is cleared, and copied when it grows.
    """

    __slots__ = ("buffer", "filled", "size")

    def __init__(self, size: int, first: memoryview, spare: bytearray | None = None) -> None:
        self.size = size
        self.filled = len(first)
        self.buffer = spare or bytearray(self.wanted(size, self.filled, None))
        self.buffer[: self.filled] = first

    @staticmethod
    def wanted(size: int, filled: int, spare: bytearray | None) -> int:
        """Bytes of the first buffer of a frame."""
        return len(spare) if spare else min(size, max(RECEIVE_BUFFER, 2 * filled))

    def growth(self) -> int:
        """By how much a full buffer has to grow."""
        return min(self.size - self.filled, self.filled)

    def grow(self, more: int) -> None:
        """Make room for ``more`` bytes."""
        self.buffer += bytes(more)

    def receive(self, sock: socket.socket) -> int:
        """Read on, into a buffer with room; how many bytes came. Raises as recv does."""
        count = sock.recv_into(memoryview(self.buffer)[self.filled : self.size])
        self.filled += count
        return count
