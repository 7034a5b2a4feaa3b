"""Segments in memory, for tests. Source: RocketMQ's MemoryFileSegment."""

from collections.abc import Sequence

import trio

from trimq.broker.store.tiered.driver.file_segment import FileSegment, Piece
from trimq.protocol.tiered_layout import SegmentType


class MemoryFileSegment(FileSegment):
    """A segment whose bytes are lost when the broker ends."""

    def __init__(self, type: SegmentType, path: str, base_offset: int) -> None:
        super().__init__(type, path, base_offset)
        self.content = bytearray()
        self.exists = False

    async def _read(self, position: int, length: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes(self.content[position : position + length])

    async def size(self) -> int | None:
        """See FileSegment."""
        await trio.lowlevel.checkpoint()
        return len(self.content) if self.exists else None

    async def write(self, pieces: Sequence[Piece], position: int) -> None:
        """See FileSegment."""
        await trio.lowlevel.checkpoint()
        self.exists = True
        del self.content[position:]
        self.content.extend(bytes(position - len(self.content)))
        for piece in pieces:
            self.content += piece

    async def cut(self, size: int) -> None:
        """See FileSegment."""
        await trio.lowlevel.checkpoint()
        del self.content[size:]

    async def delete(self) -> None:
        """See FileSegment."""
        await trio.lowlevel.checkpoint()
        self.content.clear()
        self.exists = False
