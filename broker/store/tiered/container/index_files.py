"""Where full files of the key index go: what IndexStoreService asks of it."""

from collections.abc import Sequence
from typing import Protocol

from trimq.broker.store.tiered.driver.file_segment import FileSegment, Piece


class IndexFiles(Protocol):
    """The uploaded index files, each a segment: FlatAppendFile of the type INDEX, IndexObjects."""

    segments: list[FileSegment]
    """In the order of their base offsets."""

    async def recover(self) -> None:
        """Find what is there. Raises OSError."""
        ...

    async def roll(self, base_offset: int | None = None) -> None:
        """Begin a new segment, unless the last one is empty. Raises OSError."""
        ...

    async def append(self, pieces: Sequence[Piece], size: int, begin_ms: int, end_ms: int) -> int:
        """Write an index file of so many bytes to the last segment. Raises OSError.

        ``begin_ms``: its stamp; ``end_ms``: the largest store time of its messages.
        """
        ...

    async def destroy_expired(self, before_ms: int) -> list[int]:
        """Delete the files whose messages were all stored before a time; returns their base offsets. Raises OSError."""
        ...
