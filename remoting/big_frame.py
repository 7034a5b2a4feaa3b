"""BigFrame: a frame that is too long for the buffer that all connections share, on its way."""

import socket
from typing import Final

from remoting.limits import RECEIVE_BUFFER

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
        self.buffer = spare or bytearray(min(size, max(RECEIVE_BUFFER, 2 * self.filled)))
        self.buffer[: self.filled] = first

    def receive(self, sock: socket.socket) -> int:
        """Read on; how many bytes came. Raises as recv does."""
        if self.filled == len(self.buffer):
            self.buffer += bytes(min(self.size - self.filled, self.filled))
        count = sock.recv_into(memoryview(self.buffer)[self.filled : self.size])
        self.filled += count
        return count
