"""A local index file of the tier: the one that takes keys (UNSEALED), or a full one that is to be uploaded (SEALED).

Mapped for writing, as the local store's IndexFile: stores go only to pages that have their blocks. Items that this
process has put are read from the map, older ones with calls that do not wait, or in a thread if they would have to.
Layout: tiered_index_layout. Source: RocketMQ's IndexStoreFile.
"""

import time
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from trimq.broker.store.disk.disk import Disk, MappedPart, Mapping
from trimq.broker.store.index.index_file import Cold
from trimq.protocol.tiered_index_batch import KeyItems, Scan, compact, may_be_in, put, scan, slot_table
from trimq.protocol.tiered_index_layout import (
    BEGIN_MAGIC,
    END_MAGIC,
    HEADER_SIZE,
    ITEM,
    ITEM_SIZE,
    Header,
    IndexItem,
    compacted_size,
    file_size,
    item_at,
    slot_at,
    slot_of,
)

MAX_QUERY_COUNT: Final = 512
"""Items of a chain that the event loop walks through."""
MAX_CHAIN: Final = 1 << 16
"""Items of one slot that a query looks at, in a thread if there are many."""
ENTRY_STEP: Final = 1 << 20
_COPY_STEP: Final = 1 << 20


class IndexStatus(Enum):
    """The state of an index file. UPLOAD is the one of IndexSegment."""

    UNSEALED = "UNSEALED"
    SEALED = "SEALED"
    UPLOAD = "UPLOAD"


class TieredIndexShape(NamedTuple):
    """Slots and items of an index file; it takes one item less, since number 0 is never used."""

    slots: int
    items: int

    @property
    def file_size(self) -> int:
        """Bytes of a local file."""
        return file_size(self.slots, self.items)


class Compacted(NamedTuple):
    """The compacted form of a file: its bytes are mapped from ``path``."""

    path: str
    fd: int
    mapping: Mapping

    def close(self, disk: Disk) -> None:
        """Unmap and delete it. Blocks."""
        self.mapping.close()
        disk.close(self.fd)
        disk.delete(self.path)


class IndexStoreFile:
    """``count`` items are there; those up to ``ready`` have blocks, those up to ``durable`` are on the device.

    ``stamp`` is the time of its creation, its name and the begin of its seconds. ``first_ms`` to ``last_ms`` are the
    times that its messages can have. Not thread-safe: all but ``select`` with ``wait`` and what is said to block
    belongs to the event loop.
    """

    def __init__(self, disk: Disk, path: str, shape: TieredIndexShape, fd: int) -> None:
        self._disk = disk
        self._mapping: Mapping | None = disk.map(fd, shape.file_size)
        self._view = self._mapping.view
        self._holders = 0
        self._closed = False
        self._rewrite = False
        self.fd = fd
        self.path = path
        self.shape = shape
        self.stamp = int(path.rpartition("/")[2])
        self.status = IndexStatus.UNSEALED
        self.end_ms = 0
        self.first_ms = 1 << 62
        self.last_ms = -1
        self.count = self.used_slots = self.ready = self.durable = 0
        self.in_memory_from = 1

    @classmethod
    def create(cls, disk: Disk, path: str, shape: TieredIndexShape) -> "IndexStoreFile":
        """A new file with its slots and the first items ready. Blocks. An OSError leaves no file behind."""
        fd = disk.create(path, shape.file_size)
        try:
            file = cls(disk, path, shape, fd)
            try:
                end = min(item_at(shape.slots, 0) + ENTRY_STEP, shape.file_size)
                disk.reserve(fd, 0, file._view[:end])
                file.ready = file._items_below(end)
                file._write_header()
                disk.data_sync(fd)
                disk.sync_directory(path.rpartition("/")[0])
            except BaseException:
                file._unmap()
                raise
        except BaseException:
            disk.close(fd)
            disk.delete(path)
            raise
        return file

    @classmethod
    def open(cls, disk: Disk, path: str, shape: TieredIndexShape, *, durable: int, exact: bool) -> "IndexStoreFile":
        """An existing file of the right size, ours or one of RocketMQ's broker; its items are found and linked again.

        ``durable`` and ``exact`` are as for tiered_index_batch.scan. Blocks, a few seconds for a full file.
        """
        fd = disk.open(path)
        try:
            file = cls(disk, path, shape, fd)
            try:
                file._recover(durable, exact=exact)
            except BaseException:
                file._unmap()
                raise
        except BaseException:
            disk.close(fd)
            raise
        return file

    def _recover(self, durable: int, *, exact: bool) -> None:
        found: Scan | None = None
        limit, slots = self.shape.items - 1, self.shape.slots
        for found in scan(self._read_cold, self._write, slots, limit, durable=durable, exact=exact):  # noqa: B007
            time.sleep(0)  # in a thread: let the event loop run
        if found is None:
            raise AssertionError
        self.count = self.ready = found.items
        self.in_memory_from = found.items + 1
        self.used_slots = found.used_slots
        # The whole table, changed or not: afterwards each of its pages has its block.
        table = slot_table(found.table)
        for at in range(0, len(table), _COPY_STEP):
            self._write(HEADER_SIZE + at, table[at : at + _COPY_STEP])
        if found.items:
            self.first_ms = self.stamp + found.first_second * 1000 - 999
            self.last_ms = self.stamp + found.last_second * 1000 + 999
            try:
                self.end_ms = Header.decode(self._read_cold(0, HEADER_SIZE)).end_ms
            except ValueError:
                self.end_ms = 0
            # RocketMQ's broker sets it to the begin time when it opens a file.
            exact_end = self.stamp + found.last_second * 1000
            if not exact_end - 999 <= self.end_ms <= exact_end + 999:
                self.end_ms = exact_end
        self._write(0, self._header().encode(self._magic()))
        self.durable = 0  # a killed process may have left them in memory only

    # -- writing

    @property
    def free(self) -> int:
        """The number of items that still fit."""
        return self.shape.items - 1 - self.count

    @property
    def space(self) -> int:
        """The number of items that can be put now."""
        return max(0, min(self.ready, self.shape.items - 1) - self.count)

    def put(self, items: KeyItems) -> None:
        """Put items, not more than ``space``; there is at least one."""
        self.used_slots += put(self._view, self.shape.slots, self.count, items, self.stamp)
        self.count += len(items)
        first_ms, last_ms = int(items.times.min()), int(items.times.max())
        self.first_ms, self.last_ms = min(self.first_ms, first_ms), max(self.last_ms, last_ms)
        self.end_ms = max(self.end_ms, last_ms)
        # The header last: after a kill it does not count items that were not written.
        self._write_header()

    def _header(self) -> Header:
        return Header(self.stamp, self.end_ms, self.used_slots, self.count)

    def _magic(self) -> int:
        return END_MAGIC if self.count + 1 == self.shape.items else BEGIN_MAGIC

    def _write_header(self) -> None:
        self._view[:HEADER_SIZE] = self._header().encode(self._magic())

    def _items_below(self, position: int) -> int:
        """The last item that ends at or below a position."""
        return min((position - item_at(self.shape.slots, 0)) // ITEM_SIZE, self.shape.items) - 1

    def next_ready(self) -> int:
        """The position up to which ``make_ready`` should go; not above the size."""
        begin = item_at(self.shape.slots, max(self.ready, self.count) + 1)
        return min((begin // ENTRY_STEP + 2) * ENTRY_STEP, self.shape.file_size)

    def make_ready(self, position: int) -> None:
        """Allocate blocks for the items up to ``position``. Blocks; ``mark_ready`` must follow."""
        begin = item_at(self.shape.slots, max(self.ready, self.count) + 1)
        if begin < position:
            self._disk.reserve(self.fd, begin, self._view[begin:position])

    def mark_ready(self, position: int) -> None:
        """Let ``put`` use the items up to ``position``, after ``make_ready`` has returned."""
        self.ready = self._items_below(position)

    @property
    def is_unsynced(self) -> bool:
        """Whether there are items that may not be durable."""
        return self.durable < self.count

    def sync(self, count: int) -> None:
        """Make the items up to number ``count`` durable. Blocks. The caller sets ``durable`` afterwards.

        Slots and header are left to the system: they follow from the items.
        """
        part_begin, part_end = item_at(self.shape.slots, self.durable + 1), item_at(self.shape.slots, count + 1)
        if self._rewrite:
            # A failed sync leaves pages that count as written. Only another write makes them dirty again.
            for at in range(part_begin, part_end, _COPY_STEP):
                self._write(at, bytes(self._view[at : min(at + _COPY_STEP, part_end)]))
        self._rewrite = True
        if self._mapping is None:
            raise AssertionError
        self._disk.data_sync(self.fd, MappedPart(self._mapping, part_begin, part_end))
        self._rewrite = False

    # -- reading

    def may_hold(self, first_ms: int, last_ms: int) -> bool:
        """Whether it can hold messages from one time to another."""
        return bool(self.count) and self.first_ms <= last_ms and self.last_ms >= first_ms

    def select(self, key_hash: int, first_ms: int, last_ms: int, limit: int, *, wait: bool) -> list[IndexItem]:
        """Up to ``limit`` items of a hash, newest first. Raises Cold, unless ``wait``, if it needs the device."""
        read: Callable[[int, int], bytes] = self._read_cold if wait else self._read_cached
        slots, view, stamp = self.shape.slots, self._view, self.stamp
        at = slot_at(slot_of(key_hash, slots))
        number = int.from_bytes(view[at : at + 4], "big", signed=True)
        bound = self.count + 1
        found: list[IndexItem] = []
        steps = 0
        # Numbers must fall along the chain: a damaged link must not make this loop endless.
        while 0 < number < bound and len(found) < limit and steps < MAX_CHAIN:
            steps += 1
            if not steps % MAX_QUERY_COUNT:
                if not wait:
                    raise Cold
                time.sleep(0)
            at = item_at(slots, number)
            data = view[at : at + ITEM_SIZE] if number >= self.in_memory_from else read(at, ITEM_SIZE)
            stored_hash, topic_id, queue_id, offset, size, seconds, previous = ITEM.unpack(data)
            if stored_hash == key_hash and size > 0 and may_be_in(stamp, seconds, first_ms, last_ms):
                found.append(IndexItem(stored_hash, topic_id, queue_id, offset, size, stamp + seconds * 1000))
            bound, number = number, previous
        return found

    def select_cold(self, key_hash: int, first_ms: int, last_ms: int, limit: int) -> list[IndexItem]:
        """As ``select``, waiting for the device: for a thread, with the file held."""
        return self.select(key_hash, first_ms, last_ms, limit, wait=True)

    def _read_cached(self, at: int, size: int) -> bytes:
        data = self._disk.pread_cached(self.fd, size, at)
        if data is None:
            raise Cold
        return data

    def _read_cold(self, at: int, size: int) -> bytes:
        return self._disk.pread(self.fd, size, at)

    def _write(self, at: int, data: bytes) -> None:
        self._disk.pwrite(self.fd, data, at)

    # -- the end

    @property
    def compacted_size(self) -> int:
        """Bytes of its compacted form."""
        return compacted_size(self.shape.slots, self.count)

    def compact_to(self, path: str) -> Compacted:
        """Write the compacted form to a new file, which is not synced. Blocks: for a thread. Raises OSError.

        The file must be sealed, or take no keys meanwhile.
        """
        size = self.compacted_size
        if self._disk.stat(path) is not None:
            self._disk.delete(path)
        fd = self._disk.create(path, size)
        result = None
        try:
            result = Compacted(path, fd, self._disk.map(fd, size))
            view = result.mapping.view
            for at in range(0, size, _COPY_STEP):
                self._disk.reserve(fd, at, view[at : min(at + _COPY_STEP, size)])
            header = self._header().encode(END_MAGIC)
            for _ in compact(self._read_cold, self.shape.slots, self.count, header, view):
                time.sleep(0)  # let the event loop run
        except BaseException:
            if result is not None:
                result.mapping.close()
            self._disk.close(fd)
            self._disk.delete(path)
            raise
        return result

    def hold(self) -> None:
        """Keep it open for a thread."""
        self._holders += 1

    def release(self) -> None:
        """End a ``hold``."""
        self._holders -= 1
        if self._closed and not self._holders:
            self._shut()

    def close(self) -> None:
        """Unmap and close it, when no thread reads it; the file stays on disk."""
        if not self._closed:
            self._closed = True
            if not self._holders:
                self._shut()

    def _shut(self) -> None:
        self._unmap()
        self._disk.close(self.fd)

    def _unmap(self) -> None:
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()
