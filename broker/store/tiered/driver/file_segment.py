"""A segment: a file of the tier that only grows. Providers implement reading and writing.

Source: RocketMQ's FileSegment. It has no buffer here: what is to be written is kept by the writer until it is durable.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from trimq.broker.store.tiered.driver.provider_stats import FileStats
from trimq.protocol.tiered_layout import UNSET_TIME, SegmentType

Piece = bytes | bytearray | memoryview


class FileSegment(ABC):
    """One segment. ``path`` is the one of its queue, "broker/topic/queue id"; positions count from its begin.

    ``commit_position`` is the number of durable bytes. ``min_timestamp`` and ``max_timestamp`` are store times in ms of
    its messages.
    """

    def __init__(self, type: SegmentType, path: str, base_offset: int) -> None:
        self.type = type
        self.path = path
        self.base_offset = base_offset
        self.commit_position = 0
        self.min_timestamp = UNSET_TIME
        self.max_timestamp = UNSET_TIME
        self.create_timestamp = 0
        self.stats: FileStats | None = None
        """Where its calls are counted."""

    @property
    def commit_offset(self) -> int:
        """The stream position behind its last durable byte."""
        return self.base_offset + self.commit_position

    def include_time(self, begin_ms: int, end_ms: int) -> None:
        """Extend its timestamps by those of messages."""
        if self.max_timestamp == UNSET_TIME:
            self.min_timestamp, self.max_timestamp = begin_ms, end_ms
        else:
            self.min_timestamp, self.max_timestamp = min(self.min_timestamp, begin_ms), max(self.max_timestamp, end_ms)

    async def read(self, position: int, length: int) -> bytes:
        """Up to ``length`` bytes, fewer only at ``commit_position``. Raises OSError, also if bytes are missing."""
        length = min(length, self.commit_position - position)
        if position < 0 or length <= 0:
            return b""
        stats = self.stats
        if stats is None:
            return await self._read_all(position, length)
        with stats.reads.measured(length):
            return await self._read_all(position, length)

    async def _read_all(self, position: int, length: int) -> bytes:
        data = await self._read(position, length)
        if len(data) != length:
            raise OSError(f"{self} has lost bytes: {length} were expected at {position}, {len(data)} are there")
        return data

    async def upload(self, pieces: Sequence[Piece], size: int, position: int) -> None:
        """Write ``pieces`` of ``size`` bytes together, see ``write``, and count it. Raises OSError."""
        stats = self.stats
        if stats is None:
            await self.write(pieces, position)
            return
        with stats.writes.measured(size):
            await self.write(pieces, position)

    @abstractmethod
    async def _read(self, position: int, length: int) -> bytes: ...

    @abstractmethod
    async def size(self) -> int | None:
        """The number of bytes that are there, confirmed or not; None if it does not exist. Raises OSError."""

    @abstractmethod
    async def write(self, pieces: Sequence[Piece], position: int) -> None:
        """Write at ``position``. When it returns the bytes are durable, and the name too. Raises OSError.

        ``commit_position`` is the caller's: it moves once all that belongs to the bytes is durable.
        """

    @abstractmethod
    async def cut(self, size: int) -> None:
        """Remove the bytes behind ``size``, durably. Raises OSError."""

    @abstractmethod
    async def delete(self) -> None:
        """Remove the segment, durably; no error if it does not exist. Raises OSError."""

    def __str__(self) -> str:
        return f"the segment {self.type.name} {self.base_offset} of {self.path}"
