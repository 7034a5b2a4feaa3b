"""The offsets that messages of the tier have in the log: a side file beside each segment of units.

RocketMQ's broker neither writes nor reads these files, so a message that it has uploaded has no entry, or one that
belongs to another message; an entry carries size and body CRC of its message, which readers compare. The layout is in
``protocol/tiered_layout.py``.
"""

from trimq.broker.store.tiered.container.flat_append_file import FlatAppendFile
from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.file_segment import FileSegment
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.tiered_layout import PHYSICAL, PHYSICAL_SUFFIX, UNKNOWN_PHYSICAL, SegmentType

ENTRY_SIZE = PHYSICAL.size


class PhysicalOffsets:
    """The side files of a queue. Entry k of a file belongs to unit k of the segment beside it."""

    def __init__(self, factory: FileSegmentFactory, units: FlatAppendFile) -> None:
        self._factory = factory
        self._units = units
        self._files: dict[int, FileSegment] = {}

    def _file(self, base_offset: int) -> FileSegment:
        file = self._files.get(base_offset)
        if file is None:
            file = self._factory.create(SegmentType.CONSUME_QUEUE, self._units.path, base_offset, PHYSICAL_SUFFIX)
            self._files[base_offset] = file
        return file

    async def recover(self) -> None:
        """Find the length of each file. Raises OSError."""
        for segment in self._units.segments:
            file = self._file(segment.base_offset)
            size = await file.size() or 0
            # Not more than there are units: what follows belongs to an upload that did not come to its end.
            file.commit_position = min(size // ENTRY_SIZE, segment.commit_position // UNIT_SIZE) * ENTRY_SIZE

    async def append(self, entries: bytes, count: int) -> None:
        """Write the entries of the next ``count`` units, before these are written. Raises OSError."""
        units = self._units
        if not units.segments or (
            units.room is not None and count * UNIT_SIZE > units.room and units.segments[-1].commit_position
        ):
            await units.roll()
        segment = units.segments[-1]
        at = segment.commit_position // UNIT_SIZE * ENTRY_SIZE
        file = self._file(segment.base_offset)
        missing = at - file.commit_position
        if missing > 0:
            # RocketMQ's broker has uploaded these.
            entries = UNKNOWN_PHYSICAL * (missing // ENTRY_SIZE) + entries
        await file.upload((entries,), len(entries), min(at, file.commit_position))
        file.commit_position = at + count * ENTRY_SIZE

    async def read(self, offset: int, count: int) -> bytes:
        """The entries of ``count`` units from a queue offset on; UNKNOWN_PHYSICAL for missing ones. Raises OSError."""
        found = b""
        while len(found) < count * ENTRY_SIZE:
            at = offset * UNIT_SIZE + len(found) // ENTRY_SIZE * UNIT_SIZE
            segment = self._units.segment_at(at)
            if segment is None:
                break
            first = (at - segment.base_offset) // UNIT_SIZE
            wanted = min(count - len(found) // ENTRY_SIZE, (segment.commit_offset - at) // UNIT_SIZE)
            data = await self._file(segment.base_offset).read(first * ENTRY_SIZE, wanted * ENTRY_SIZE)
            found += data + UNKNOWN_PHYSICAL * (wanted - len(data) // ENTRY_SIZE)
        return found + UNKNOWN_PHYSICAL * (count - len(found) // ENTRY_SIZE)

    async def find(self, physical: int, lowest: int) -> int | None:
        """The queue offset, from ``lowest`` on, of the message that had an offset in the log; None if there is none.

        Log offsets grow with queue offsets. Raises OSError.
        """
        for segment in reversed(self._units.segments):
            file = self._file(segment.base_offset)
            first = segment.base_offset // UNIT_SIZE
            low, high = max(0, lowest - first), file.commit_position // ENTRY_SIZE
            end = high
            while low < high:
                middle = (low + high) // 2
                at, value = await self._known(file, middle, high)
                if value == physical:
                    return first + at
                if value is None or value > physical:
                    high = middle
                else:
                    low = at + 1
            if low < end and low > max(0, lowest - first):
                return None  # it would stand here
        return None

    async def _known(self, file: FileSegment, begin: int, end: int) -> tuple[int, int | None]:
        """The first entry from ``begin`` on that is known: its number and its offset; None if there is none."""
        at = begin
        while at < end:
            data = await file.read(at * ENTRY_SIZE, min(end - at, 256) * ENTRY_SIZE)
            for physical, _, _ in PHYSICAL.iter_unpack(data):
                if physical >= 0:
                    return at, physical
                at += 1
        return at, None

    async def delete(self, base_offset: int) -> None:
        """Delete the file beside a segment. Raises OSError."""
        await self._file(base_offset).delete()
        self._files.pop(base_offset, None)
