"""The uploaded files of the key index in a bucket: an object each, named by the root of the manifest.

A name has what a search has to know of the file before it is read, and up to which log offset all keys are in it and in
those before: what comes behind is put into the index again by a broker that has no local files (index_completion.py).
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.driver.file_segment import FileSegment, Piece
from trimq.protocol.bucket_names import INDEXES
from trimq.protocol.tiered_index_batch import COMPACT_TYPE
from trimq.protocol.tiered_index_layout import COMPACT_ITEM_SIZE, GROUP, HEADER_SIZE
from trimq.protocol.tiered_layout import UNSET_TIME, SegmentType

PART_SIZE: Final = 8 * 1024 * 1024
"""Larger files are written in parts of this size."""
_NAME: Final = re.compile(re.escape(INDEXES) + r"(\d{20})-(\d{20})-(\d{20})-(\d{12})-(\d{8})")


class IndexName(NamedTuple):
    """An index file: its stamp, the largest store time (both ms), the log offset behind its keys, its bytes, epoch."""

    stamp: int
    end_ms: int
    upto: int
    size: int
    epoch: int

    def __str__(self) -> str:
        return f"{INDEXES}{self.stamp:020d}-{self.end_ms:020d}-{self.upto:020d}-{self.size:012d}-{self.epoch:08d}"


def parse_index_name(name: str) -> IndexName | None:
    """The parts of a name; None if it is not that of an index file."""
    found = _NAME.fullmatch(name)
    return None if found is None else IndexName(*map(int, found.groups()))


class ObjectSegment(FileSegment):
    """An index file in the bucket. It is written as a whole."""

    def __init__(self, bucket: Bucket, base_offset: int) -> None:
        super().__init__(SegmentType.INDEX, INDEXES, base_offset)
        self._bucket = bucket
        self.name = ""

    async def _read(self, position: int, length: int) -> bytes:
        return bytes(await self._bucket.read_range(self.name, position, length))

    async def size(self) -> int | None:
        """See FileSegment."""
        return self.commit_position if self.name else None

    async def write(self, pieces: Sequence[Piece], position: int) -> None:
        """See FileSegment. ``name`` is set; ``position`` is 0."""
        views = [memoryview(piece) for piece in pieces]
        if position or sum(view.nbytes for view in views) <= PART_SIZE:
            try:
                await self._bucket.create(self.name, views)
            except FileExistsError:  # the reply to an earlier attempt was lost: its stamp and its epoch are ours
                return
            return
        writer = self._bucket.writer(self.name, PART_SIZE)
        for view in views:
            for at in range(0, view.nbytes, PART_SIZE):
                await writer.write(view[at : at + PART_SIZE])
        await writer.finish()

    async def cut(self, size: int) -> None:
        """See FileSegment: an object is never cut."""
        raise NotImplementedError

    async def delete(self) -> None:
        """See FileSegment."""
        await self._bucket.delete([self.name])


class IndexObjects:
    """See IndexFiles. Belongs to the event loop."""

    def __init__(
        self,
        bucket: Bucket,
        named: Callable[[], Sequence[str]],
        epoch: Callable[[], int],
        begin_of: Callable[[int], int],
    ) -> None:
        """``named``: the index files of the root. ``epoch``: of this owner.

        ``begin_of``: where the upload object with a log offset begins.
        """
        self.segments: list[FileSegment] = []
        self._bucket = bucket
        self._named = named
        self._epoch = epoch
        self._begin_of = begin_of
        self._next_base = 0
        self._is_recovered = False
        self.upto = 0
        """All keys below this log offset are in uploaded files."""

    @property
    def names(self) -> list[str] | None:
        """The files, as the root shall name them; None before ``recover``. Not one that is being uploaded."""
        return self._names(0) if self._is_recovered else None

    @property
    def own(self) -> list[str]:
        """The files, also the one that is being uploaded."""
        return self._names(-1)

    def _names(self, above: int) -> list[str]:
        return [
            segment.name
            for segment in self.segments
            if isinstance(segment, ObjectSegment) and segment.name and segment.commit_position > above
        ]

    async def recover(self) -> None:
        """See IndexFiles."""
        self.segments.clear()
        self._next_base = self.upto = 0
        for name in sorted(self._named()):
            found = parse_index_name(name)
            if found is not None:
                self._add(name, found)
        self._is_recovered = True

    def _add(self, name: str, parts: IndexName) -> None:
        segment = ObjectSegment(self._bucket, self._next_base)
        segment.name, segment.commit_position = name, parts.size
        segment.min_timestamp, segment.max_timestamp = parts.stamp, parts.end_ms
        self.segments.append(segment)
        self._next_base += parts.size
        self.upto = max(self.upto, parts.upto)

    async def roll(self, base_offset: int | None = None) -> None:  # noqa: ARG002 - see IndexFiles
        """See IndexFiles."""
        if not self.segments or self.segments[-1].commit_position:
            self.segments.append(ObjectSegment(self._bucket, self._next_base))

    async def append(self, pieces: Sequence[Piece], size: int, begin_ms: int, end_ms: int) -> int:
        """See IndexFiles."""
        segment = self.segments[-1]
        assert isinstance(segment, ObjectSegment)
        upto = max(self.upto, self._begin_of(_last_physical(pieces)))
        segment.name = str(IndexName(begin_ms, end_ms, upto, size, self._epoch()))
        try:
            await segment.upload(pieces, size, 0)
        except BaseException:
            segment.name = ""
            raise
        segment.min_timestamp, segment.max_timestamp = begin_ms, end_ms
        segment.commit_position = size
        self._next_base += size
        self.upto = upto
        return segment.base_offset

    async def destroy_expired(self, before_ms: int) -> list[int]:
        """See IndexFiles. The objects are garbage once the root does not name them any more."""
        gone = [s for s in self.segments if s.max_timestamp != UNSET_TIME and s.max_timestamp < before_ms]
        self.segments = [segment for segment in self.segments if segment not in gone]
        return [segment.base_offset for segment in gone]


def _last_physical(pieces: Sequence[Piece]) -> int:
    """The greatest log offset of an item in a compacted file."""
    data = memoryview(b"".join(pieces)) if len(pieces) > 1 else memoryview(pieces[0])
    first = GROUP.unpack_from(data, HEADER_SIZE)[0]
    count = (data.nbytes - first) // COMPACT_ITEM_SIZE
    items = np.frombuffer(data, COMPACT_TYPE, count=count, offset=first)
    return int(items["offset"].max()) if count else 0
