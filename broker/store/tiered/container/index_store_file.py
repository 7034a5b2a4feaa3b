"""Index files of the tier: a local one that takes keys, and an uploaded one. Source: RocketMQ's IndexStoreFile."""

import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from trimq.broker.store.disk.disk import Disk, Mapping
from trimq.broker.store.disk.durable_files import write_beside
from trimq.broker.store.tiered.container.index_compaction import chain, compact
from trimq.broker.store.tiered.driver.file_segment import FileSegment
from trimq.protocol.tiered_index_layout import (
    BEGIN_MAGIC,
    COMPACT_SIZE,
    END_MAGIC,
    ENTRY,
    ENTRY_SIZE,
    HEADER,
    HEADER_SIZE,
    SLOT,
    SLOT_SIZE,
    IndexItem,
    compact_slots,
    entries_at,
    items_of,
    local_size,
    time_difference,
)

_STEP: Final = 4 * 1024 * 1024
"""Bytes of entries that are reserved at a time."""
_MOST_FOLLOWED: Final = 512
_MOST_READ: Final = 1024
_INT: Final = struct.Struct(">i")
_BLOCK: Final = 4096
_MOST_BLOCKS: Final = 256
"""Blocks of slots in memory, 32 KiB each."""

Keyed = tuple[int, int, int, int, int, int]
"""A key to put: hash, topic id, queue id, stream position, size, store time in ms."""


class LocalIndexFile:
    """A file on the local disk, mapped. Its name is the time of its creation in ms (``begin_ms``)."""

    def __init__(self, disk: Disk, path: str, slots: int, entries: int, fd: int) -> None:
        self.path = path
        self.begin_ms = int(path.rpartition("/")[2])
        self.end_ms = 0
        self.slots = slots
        self.entries = entries
        self.count = 0
        self.is_sealed = False
        self._used = 0
        self._disk = disk
        self._fd = fd
        self._mapping: Mapping | None = disk.map(fd, local_size(slots, entries))
        self._view = self._mapping.view
        self._reserved = 0

    @classmethod
    def create(cls, disk: Disk, path: str, slots: int, entries: int) -> "LocalIndexFile":
        """A new file. Blocks. Raises OSError, which leaves no file."""
        fd = disk.create(path, local_size(slots, entries))
        file = cls(disk, path, slots, entries, fd)
        try:
            file._reserve(min(entries_at(slots) + _STEP, local_size(slots, entries)))
            file._write_header()
            disk.sync_directory(path.rpartition("/")[0])
        except BaseException:
            file.close()
            disk.delete(path)
            raise
        return file

    @classmethod
    def open(cls, disk: Disk, path: str, slots: int, entries: int) -> "LocalIndexFile":
        """A file that an earlier process has left. Blocks. Raises OSError, ValueError if it has another size."""
        fd = disk.open(path)
        size = disk.size(fd)
        if size != local_size(slots, entries):
            disk.close(fd)
            raise ValueError(f"{path} has {size} bytes, {local_size(slots, entries)} are expected")
        file = cls(disk, path, slots, entries, fd)
        try:
            file._keep_content()
        except BaseException:
            file.close()
            raise
        return file

    def _keep_content(self) -> None:
        # Its blocks are allocated, not reserved, which would make zeros of what is there.
        count = min(HEADER.unpack(self._disk.pread(self._fd, HEADER_SIZE, 0))[4], self.entries - 1)
        end = local_size(self.slots, count + 1)
        self._disk.allocate(self._fd, 0, end)
        self._reserved = end
        self.count, self._used, self.end_ms = chain(self._view[:end], self.slots, self.begin_ms, count + 1)
        self._write_header()

    @property
    def _ready(self) -> int:
        """One more than the number of the last entry whose place is reserved."""
        return (self._reserved - entries_at(self.slots)) // ENTRY_SIZE

    def _reserve(self, end: int) -> None:
        self._disk.reserve(self._fd, self._reserved, self._view[self._reserved : end])
        self._reserved = end

    def makes_room(self, count: int) -> bool:
        """Whether ``prepare`` has to be called before ``count`` keys are put."""
        return self.count + count >= self._ready

    def prepare(self, count: int) -> None:
        """Reserve space for ``count`` more keys. Blocks. Raises OSError."""
        end = entries_at(self.slots) + ENTRY_SIZE * (self.count + count + 1) + _STEP
        self._reserve(min(end, local_size(self.slots, self.entries)))

    def is_full(self, count: int) -> bool:
        """Whether ``count`` keys have no place: then the file takes no more."""
        return self.is_sealed or self.count + count >= self.entries

    def put(self, keys: Sequence[Keyed]) -> None:
        """Put keys, for which there is room."""
        view, slots, begin_ms, number = self._view, self.slots, self.begin_ms, self.count
        base = entries_at(slots)
        for key, topic_id, queue_id, offset, size, store_ms in keys:
            number += 1
            at = HEADER_SIZE + SLOT_SIZE * (key % slots)
            (previous,) = _INT.unpack_from(view, at)
            seconds = time_difference(store_ms, begin_ms)
            ENTRY.pack_into(
                view, base + ENTRY_SIZE * number, key, topic_id, queue_id, offset, size, seconds, max(0, previous)
            )
            _INT.pack_into(view, at, number)
            self._used += previous <= 0
            self.end_ms = max(self.end_ms, store_ms)
        self.count = number
        self._write_header()

    def _write_header(self) -> None:
        magic = END_MAGIC if self.count + 1 == self.entries else BEGIN_MAGIC
        HEADER.pack_into(self._view, 0, magic, self.begin_ms, self.end_ms, self._used, self.count)

    def query(self, key: int) -> list[IndexItem]:
        """The entries with a hash, newest first."""
        found: list[IndexItem] = []
        number = _INT.unpack_from(self._view, HEADER_SIZE + SLOT_SIZE * (key % self.slots))[0]
        for _ in range(_MOST_FOLLOWED):
            if not 0 < number <= self.count:
                break
            at = entries_at(self.slots) + ENTRY_SIZE * number
            its, topic, queue, offset, size, seconds, previous = ENTRY.unpack_from(self._view, at)
            if its == key:
                found.append(IndexItem(its, topic, queue, offset, size, self.begin_ms + 1000 * seconds))
            if previous >= number:
                break
            number = previous
        return found

    def sync(self) -> None:
        """Make its content durable. Blocks. Raises OSError."""
        self._disk.data_sync(self._fd)

    def compact(self, path: str) -> None:
        """Write the compacted file to ``path``. Blocks, for seconds if there are many entries. Raises OSError."""
        pieces = compact(self._view, self.slots, self.begin_ms, self.end_ms, self.count)
        self._disk.rename(write_beside(self._disk, path, *pieces), path)

    def close(self) -> None:
        """Unmap and close."""
        if self._mapping is not None:
            self._view.release()
            self._mapping.close()
            self._mapping = None
            self._disk.close(self._fd)


class SlotCache:
    """Blocks of slots of uploaded files; the least recently used go first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    async def slot(self, segment: FileSegment, slots: int, slot: int) -> tuple[int, int]:
        """Position and length of a slot's entries. Raises OSError."""
        begin = slot - slot % _BLOCK
        key = segment.base_offset, begin
        block = self._blocks.get(key)
        if block is None:
            length = min(_BLOCK, slots - begin) * SLOT_SIZE
            block = await segment.read(HEADER_SIZE + SLOT_SIZE * begin, length)
            self._blocks[key] = block
            if len(self._blocks) > _MOST_BLOCKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(key)
        found: tuple[int, int] = SLOT.unpack_from(block, SLOT_SIZE * (slot - begin))
        return found


class UploadedIndexFile:
    """A compacted file in the tier. A key costs two reads, one if its block of slots is in memory."""

    def __init__(self, segment: FileSegment, cache: SlotCache) -> None:
        self.segment = segment
        self.begin_ms = segment.min_timestamp
        self.end_ms = segment.max_timestamp
        self._cache = cache
        self._slots = 0

    async def query(self, key: int) -> list[IndexItem]:
        """The entries with a hash, newest first. Raises OSError, ValueError if the file is damaged."""
        segment = self.segment
        if not self._slots:
            magic, _, _, _, count = HEADER.unpack(await segment.read(0, HEADER_SIZE))
            if magic != END_MAGIC:
                raise ValueError(f"{segment} does not begin as an index file")
            self._slots = compact_slots(segment.commit_position, count)
        position, length = await self._cache.slot(segment, self._slots, key % self._slots)
        if length <= 0:
            return []
        data = await segment.read(position, min(length, COMPACT_SIZE * _MOST_READ))
        return [
            item
            for item in items_of(data[: len(data) // COMPACT_SIZE * COMPACT_SIZE], self.begin_ms)
            if item.hash == key
        ]
