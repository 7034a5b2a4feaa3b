"""A stream of bytes that grows at its end and is deleted from its begin, made of segments.

Source: RocketMQ's FlatAppendFile. Positions are those of the stream; they go on over segments. A piece that is appended
stands in one segment as a whole.
"""

from bisect import bisect_right
from collections.abc import Sequence

from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.file_segment import FileSegment, Piece
from trimq.broker.store.tiered.driver.metadata import DELETED, DefaultMetadataStore, SegmentMetadata
from trimq.protocol.tiered_layout import UNSET_TIME, SegmentType


class FlatAppendFile:
    """The stream of one type of a queue. ``recover`` comes first; appends come one after the other."""

    def __init__(
        self, factory: FileSegmentFactory, metadata: DefaultMetadataStore, type: SegmentType, path: str
    ) -> None:
        self.type = type
        self.path = path
        self.segments: list[FileSegment] = []
        """In the order of their base offsets."""
        self.confirmed = 0
        """After ``recover``: bytes of the last segment that were durable before the last stop, as the metadata says.

        What follows may be torn: a power cut leaves any part of a write that was under way.
        """
        self._factory = factory
        self._metadata = metadata
        self._max_size = factory.max_size(type)
        self._is_unclear = False
        """Whether the durable metadata may have a change of the list of segments that has failed."""

    # -- what is there

    @property
    def min_offset(self) -> int:
        """Where the stream begins; 0 without segments."""
        return self.segments[0].base_offset if self.segments else 0

    @property
    def commit_offset(self) -> int:
        """Where the next piece will stand: all before it is durable. 0 without segments."""
        return self.segments[-1].commit_offset if self.segments else 0

    @property
    def min_timestamp(self) -> int:
        """Store time in ms of the first message; UNSET_TIME if there is none."""
        return next((s.min_timestamp for s in self.segments if s.min_timestamp != UNSET_TIME), UNSET_TIME)

    @property
    def max_timestamp(self) -> int:
        """The largest store time in ms of a message; UNSET_TIME if there is none."""
        times = [s.max_timestamp for s in self.segments[-2:] if s.max_timestamp != UNSET_TIME]
        return max(times, default=UNSET_TIME)

    @property
    def room(self) -> int | None:
        """The bytes that the last segment still takes; None if there is no limit, 0 if a new one is needed."""
        if not self.segments:
            return 0
        return None if self._max_size is None else max(0, self._max_size - self.segments[-1].commit_position)

    @property
    def size(self) -> int:
        """The durable bytes of all segments."""
        return sum([segment.commit_position for segment in self.segments])

    # -- start

    async def recover(self) -> None:
        """Load the segments that the metadata knows; the length of the last one is that of its file.

        A deletion that was interrupted is completed. Raises OSError.
        """
        known = self._metadata.segments(self.path, self.type)
        marked = [entry.base_offset for entry in known if entry.status == DELETED]
        if marked:
            # A process that was killed may have left a mark that a power cut still takes, but not the file with it.
            for base_offset in marked:
                self._metadata.mark_deleted(self.path, self.type, base_offset)
            await self._metadata.persist()
        for entry in known:
            segment = self._of(entry)
            if entry.status == DELETED:
                await segment.delete()
                self._metadata.delete_segment(self.path, self.type, entry.base_offset)
            else:
                self.segments.append(segment)
        if self.segments and self.type is not SegmentType.INDEX:
            await self._recover_size(self.segments[-1])

    def _of(self, entry: SegmentMetadata) -> FileSegment:
        segment = self._factory.create(self.type, self.path, entry.base_offset)
        segment.commit_position = entry.size
        segment.min_timestamp, segment.max_timestamp = entry.begin_timestamp, entry.end_timestamp
        return segment

    async def _recover_size(self, last: FileSegment) -> None:
        size = await last.size() or 0
        self.confirmed = min(size, last.commit_position)
        if size != last.commit_position:
            last.commit_position = size
            self._metadata.update_segment(last)

    async def cut(self, offset: int) -> None:
        """Remove what stands behind ``offset`` in the last segment, durably. Raises OSError."""
        last = self.segments[-1]
        if offset < last.commit_offset:
            await last.cut(offset - last.base_offset)
            last.commit_position = offset - last.base_offset
            self._metadata.update_segment(last)

    # -- growth

    async def init_offset(self, base_offset: int) -> None:
        """Begin the stream. Raises OSError."""
        if not self.segments:
            await self._add(base_offset)

    async def roll(self, base_offset: int | None = None) -> None:
        """Begin a new segment, at the end or, leaving a gap, at ``base_offset``. Its metadata is durable.

        An empty last segment is used, or given up for one behind the gap. Raises OSError.
        """
        base = self.commit_offset if base_offset is None else base_offset
        if self.segments and not self.segments[-1].commit_position:
            if self.segments[-1].base_offset == base:
                return
            await self._remove(self.segments[-1])
        await self._add(base)

    async def _add(self, base_offset: int) -> None:
        segment = self._factory.create(self.type, self.path, base_offset)
        if await segment.size():
            # Left of a stream that was deleted: RocketMQ's broker keeps files that it could not delete.
            await segment.cut(0)
        # Not the entry of one whose deletion has failed: its mark would delete this one at the next start.
        self._metadata.delete_segment(self.path, self.type, base_offset)
        self._metadata.update_segment(segment)
        self._is_unclear = True
        try:
            await self._metadata.persist()
        except BaseException:
            self._metadata.delete_segment(self.path, self.type, base_offset)
            raise
        self._is_unclear = False
        self.segments.append(segment)

    async def append(self, pieces: Sequence[Piece], size: int, begin_ms: int, end_ms: int) -> int:
        """Append ``pieces`` of ``size`` bytes together, with messages stored between two times in ms.

        Rolls first if they do not fit. Returns their position in the stream; they are durable then. Raises OSError:
        then nothing counts as appended.
        """
        room = self.room
        if room is not None and size > room and (not self.segments or self.segments[-1].commit_position):
            await self.roll()
        segment = self.segments[-1]
        times = segment.min_timestamp, segment.max_timestamp
        segment.include_time(begin_ms, end_ms)
        try:
            if times[0] == UNSET_TIME or self._is_unclear:
                # RocketMQ's broker deletes a segment without times as expired: they are durable before its first byte.
                self._metadata.update_segment(segment)
                await self._metadata.persist()
                self._is_unclear = False
            await segment.upload(pieces, size, segment.commit_position)
        except BaseException:
            segment.min_timestamp, segment.max_timestamp = times
            if times[0] != UNSET_TIME:
                self._metadata.update_segment(segment)  # with a time of messages that it has not got it expires late
            raise
        position = segment.commit_offset
        segment.commit_position += size
        self._metadata.update_segment(segment)
        return position

    def take_back(self, offset: int) -> None:
        """Let the next append write at ``offset`` of the last segment again: what followed it failed."""
        last = self.segments[-1]
        last.commit_position = offset - last.base_offset
        self._metadata.update_segment(last)

    # -- reads

    def segment_at(self, offset: int) -> FileSegment | None:
        """The segment that holds a position; None below the begin, behind the end, and in a gap."""
        index = bisect_right(self.segments, offset, key=lambda segment: segment.base_offset) - 1
        if index < 0 or offset >= self.segments[index].commit_offset:
            return None
        return self.segments[index]

    def behind_gap(self, offset: int) -> int:
        """``offset``, or where the next segment begins if no segment holds it: ``commit_offset`` if there is none."""
        if self.segment_at(offset) is not None:
            return offset
        return min((s.base_offset for s in self.segments if s.base_offset > offset), default=self.commit_offset)

    def narrowed(self, low: int, high: int, later: int) -> tuple[int, int]:
        """The part of [low, high) in which a search for the first time from ``later`` (ms) on has to look."""
        for number, segment in enumerate(self.segments):
            if segment.min_timestamp == UNSET_TIME:
                continue
            if segment.min_timestamp >= later:
                return low, max(low, min(high, segment.base_offset))
            # The end time of the last segment may be an old one: it is saved with the next change of the metadata.
            if number + 1 < len(self.segments) and segment.max_timestamp < later:
                low = max(low, min(high, segment.commit_offset))
        return low, high

    async def read(self, offset: int, length: int) -> bytes:
        """The bytes at a position, over edges of segments; fewer at the end and before a gap.

        Raises LookupError if there is no byte at ``offset``, OSError.
        """
        found: list[bytes] = []
        end = offset + length
        while offset < end:
            segment = self.segment_at(offset)
            if segment is None:
                break
            data = await segment.read(offset - segment.base_offset, end - offset)
            found.append(data)
            offset += len(data)
            if not data:  # taken back meanwhile
                break
        if not found:
            raise LookupError(f"{self.path} has no {self.type.name} at {offset}")
        return found[0] if len(found) == 1 else b"".join(found)

    # -- deletion

    async def destroy_expired(self, before_ms: int) -> list[int]:
        """Delete whole segments from the begin whose messages were all stored before a time.

        The last one too, if it has messages: an empty one then takes its place, so that positions go on. Returns the
        base offsets. Raises OSError.
        """
        deleted: list[int] = []
        while self.segments:
            first = self.segments[0]
            if first.max_timestamp == UNSET_TIME or first.max_timestamp >= before_ms:
                break
            if len(self.segments) == 1:
                if not first.commit_position:  # times of what was taken back, or of an append that did not come
                    break
                await self.roll()
            await self._remove(first)
            deleted.append(first.base_offset)
        return deleted

    async def destroy_below(self, offset: int) -> list[int]:
        """Delete the segments that end at or below a position, but not the last. Raises OSError."""
        deleted: list[int] = []
        while len(self.segments) > 1 and self.segments[0].commit_offset <= offset:
            deleted.append(self.segments[0].base_offset)
            await self._remove(self.segments[0])
        return deleted

    async def destroy(self) -> None:
        """Delete all segments. Raises OSError."""
        while self.segments:
            await self._remove(self.segments[-1])

    async def _remove(self, segment: FileSegment) -> None:
        # Marked durably first: after a power cut the next start completes the deletion, and no file is left over.
        self._metadata.mark_deleted(self.path, self.type, segment.base_offset)
        self._is_unclear = True
        try:
            await self._metadata.persist()
        except BaseException:
            self._metadata.mark_deleted(self.path, self.type, segment.base_offset, undo=True)  # it stays in use
            raise
        self._is_unclear = False
        if segment in self.segments:
            self.segments.remove(segment)
        await segment.delete()
        self._metadata.delete_segment(self.path, self.type, segment.base_offset)
