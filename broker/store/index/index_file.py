"""One index file: from the keys of a message to its place in the log (layout: trimq.protocol.index_layout).

Mapped for writing. Entries that this process has written are read from the map. Older ones are read with a call that
does not wait, or in a thread if that would have to wait. Source: RocketMQ's IndexFile.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from trimq.broker.store.disk.disk import Disk, Mapping
from trimq.protocol.index_batch import Batch, Row, seconds_since
from trimq.protocol.index_layout import ENTRY, ENTRY_SIZE, HEADER, HEADER_SIZE, SLOT_SIZE, entry_at, file_size, slot_at

_ENTRY_AT: Final = ENTRY.unpack_from
_COPY_STEP: Final = 1 << 20
_CHUNK: Final = 4096
"""Entries that are read together when all are walked through."""
_STEPS: Final = 4096
"""Entries of a chain that are walked without a break: about a millisecond."""


class Cold(Exception):  # noqa: N818 - not an error: the answer needs the device
    """The requested entries are not in memory."""


class IndexShape(NamedTuple):
    """Slots and entries of each index file of a store."""

    slots: int
    entries: int

    @property
    def file_size(self) -> int:
        """Bytes of a file."""
        return file_size(self.slots, self.entries)


class IndexEntry(NamedTuple):
    """One entry as it is stored."""

    key_hash: int
    phy: int
    seconds: int
    previous: int


class IndexFile:
    """``count`` is the number of the next entry (1 in an empty file). Entries below ``ready`` have their blocks.

    ``in_memory_from`` is the first entry that this process has written through the map. ``slots_in_memory``: this
    process has read or created the slot table.
    """

    __slots__ = (
        "_disk",
        "_mapping",
        "begin_phy",
        "begin_timestamp",
        "closed",
        "count",
        "end_phy",
        "end_timestamp",
        "fd",
        "in_memory_from",
        "path",
        "ready",
        "shape",
        "slot_count",
        "slots_in_memory",
        "stamp",
        "unsynced",
        "view",
    )

    def __init__(self, disk: Disk, path: str, shape: IndexShape, fd: int) -> None:
        self._disk = disk
        self._mapping: Mapping | None = disk.map(fd, shape.file_size)
        self.view = self._mapping.view
        self.path = path
        self.stamp = int(path.rpartition("/")[2])
        self.shape = shape
        self.fd = fd
        self.closed = False
        self.unsynced = False
        self.ready = 0
        self.in_memory_from = shape.entries
        self.slots_in_memory = False
        self.set_header((0, 0, 0, 0, 0, 1))

    @classmethod
    def create(cls, disk: Disk, path: str, shape: IndexShape, step: int) -> "IndexFile":
        """A new file with its slots and ``step`` bytes of entries ready. Blocks. An OSError leaves no file behind."""
        fd = disk.create(path, shape.file_size)
        try:
            file = cls(disk, path, shape, fd)
            try:
                end = min(entry_at(shape.slots, 0) + step, shape.file_size)
                disk.reserve(fd, 0, file.view[:end])
                file.ready = file.entries_below(end)
                file.in_memory_from = 0
                file.slots_in_memory = True
                file.write_header()
                disk.data_sync(fd)
                disk.sync_directory(path.rpartition("/")[0])
            except BaseException:
                file.unmap()
                raise
        except BaseException:
            disk.close(fd)
            disk.delete(path)
            raise
        return file

    @classmethod
    def open(cls, disk: Disk, path: str, shape: IndexShape) -> "IndexFile":
        """An existing file of the right size; its header is not checked.

        A killed process may have left bytes in memory only: the next sync covers them too.
        """
        fd = disk.open(path)
        try:
            header = HEADER.unpack(disk.pread(fd, HEADER_SIZE, 0))
            file = cls(disk, path, shape, fd)
        except BaseException:
            disk.close(fd)
            raise
        file.set_header(header)
        file.unsynced = True
        return file

    def set_header(self, header: tuple[int, ...]) -> None:
        """Set the six fields of the header; an entry count of 0 (a file that was only created) means 1."""
        (
            self.begin_timestamp,
            self.end_timestamp,
            self.begin_phy,
            self.end_phy,
            self.slot_count,
            count,
        ) = header
        self.count = max(count, 1)

    def write_header(self) -> None:
        """Store the header into the map."""
        HEADER.pack_into(self.view, 0, *self._header())
        self.unsynced = True

    def _header(self) -> tuple[int, int, int, int, int, int]:
        times = self.begin_timestamp, self.end_timestamp
        return *times, self.begin_phy, self.end_phy, self.slot_count, self.count

    @property
    def is_full(self) -> bool:
        """True once no further entry fits: entry 0 is never used."""
        return self.count >= self.shape.entries

    @property
    def is_plausible(self) -> bool:
        """False for a header that no writer produces."""
        return 1 <= self.count <= self.shape.entries and 0 <= self.slot_count <= self.shape.slots

    def entries_below(self, position: int) -> int:
        """The number of entries that are wholly below a position of the file."""
        return min((position - entry_at(self.shape.slots, 0)) // ENTRY_SIZE, self.shape.entries)

    # -- writing

    def space(self) -> int:
        """The number of entries that can be put now."""
        return max(0, min(self.ready, self.shape.entries) - self.count)

    def put(self, batch: Batch, hashes: Row, phys: Row, timestamps: Row) -> None:
        """Put entries in the order of the log, not more than ``space``."""
        begin = self.begin_timestamp
        first = self.count == 1
        if first:
            # RocketMQ takes the first entry's difference against what the header was pre-filled with
            seconds = batch.seconds(timestamps, int(timestamps[0]))
            seconds[0] = seconds_since(begin, int(timestamps[0]))
        else:
            seconds = batch.seconds(timestamps, begin)
        self.slot_count += batch.put(self.view, self.shape.slots, self.count, hashes, phys, seconds)
        if first:
            self.begin_timestamp = int(timestamps[0])
            self.begin_phy = int(phys[0])
        self.end_timestamp = int(timestamps[-1])
        self.end_phy = int(phys[-1])
        self.count += len(hashes)
        # The header last: after a kill it does not count entries that were not written.
        self.write_header()

    def make_ready(self, position: int) -> None:
        """Allocate blocks and pages for the entries up to ``position``. Blocks; call ``mark_ready`` afterwards."""
        begin = entry_at(self.shape.slots, max(self.ready, self.count))
        self._disk.reserve(self.fd, begin, self.view[begin:position])

    def mark_ready(self, position: int) -> None:
        """Let ``put`` use the entries up to ``position``, after ``make_ready`` has returned."""
        self.ready = self.entries_below(position)
        self.in_memory_from = min(self.in_memory_from, self.count)

    def load_slots(self) -> None:
        """Read the slot table and write it back, so that each of its pages has its block and is in memory. Blocks."""
        end = slot_at(self.shape.slots)
        for at in range(0, end, _COPY_STEP):
            self._disk.pwrite(self.fd, self._disk.pread(self.fd, min(_COPY_STEP, end - at), at), at)
        self.slots_in_memory = True

    def sync(self) -> None:
        """Make the content of the file durable. Blocks."""
        self._disk.data_sync(self.fd)

    # -- reading

    def matches_time(self, begin: int, end: int) -> bool:
        """True if the file may hold messages of that time."""
        return self.count > 1 and self.begin_timestamp <= end and self.end_timestamp >= begin

    def select(self, key_hash: int, begin: int, end: int, limit: int, *, wait: bool) -> list[int]:
        """Log offsets of up to ``limit`` messages with that hash and time, newest first.

        Raises Cold, unless ``wait``, if it needs the device or more steps than the event loop has time for.
        """
        read = self._read_cold if wait else self._read_cached
        table_at = slot_at(key_hash % self.shape.slots)
        if self.slots_in_memory:
            number = int.from_bytes(self.view[table_at : table_at + SLOT_SIZE], "big", signed=True)
        else:
            number = int.from_bytes(read(table_at, SLOT_SIZE), "big", signed=True)
        found: list[int] = []
        bound = self.count
        # An entry's time is in whole seconds, rounded down: at the edges the record's own time decides.
        earliest = -((self.begin_timestamp + 999 - begin) // 1000)
        latest = (end - self.begin_timestamp) // 1000
        entries_at = entry_at(self.shape.slots, 0)
        in_memory_from, view = self.in_memory_from, self.view
        last = -1
        left = _STEPS
        # Numbers must fall along the chain (``bound``): a corrupt link must not make this loop endless.
        while 0 < number < bound and len(found) < limit:
            left -= 1
            if not left:  # all messages with the same tag or a frequent word form one chain
                if not wait:
                    raise Cold
                time.sleep(0)  # in a thread: let the event loop run
                left = _STEPS
            at = entries_at + number * ENTRY_SIZE
            if number >= in_memory_from:
                stored_hash, phy, seconds, previous = _ENTRY_AT(view, at)
            else:
                stored_hash, phy, seconds, previous = ENTRY.unpack(read(at, ENTRY_SIZE))
            if seconds < 0:
                break
            # Of the first entry RocketMQ stores no usable difference, see ``put``.
            if number == 1:
                seconds = 0
            if seconds < earliest:
                break
            if stored_hash == key_hash and seconds <= latest and phy != last:
                found.append(phy)
                last = phy
            bound, number = number, previous
        return found

    def _read_cached(self, at: int, size: int) -> bytes:
        data = self._disk.pread_cached(self.fd, size, at)
        if data is None:
            raise Cold
        return data

    def _read_cold(self, at: int, size: int) -> bytes:
        return self._disk.pread(self.fd, size, at)

    def entries(self, first: int = 1, *, read: Callable[[int, int], bytes] | None = None) -> Iterator[IndexEntry]:
        """All entries from number ``first`` on, in order. Blocks."""
        read = read or self._read_cold
        for number in range(first, self.count, _CHUNK):
            size = min(_CHUNK, self.count - number)
            data = read(entry_at(self.shape.slots, number), size * ENTRY_SIZE)
            yield from map(IndexEntry._make, ENTRY.iter_unpack(data))

    # -- recovery

    def set_end(self, count: int, end_timestamp: int) -> None:
        """Drop the entries from number ``count`` on; ``link`` must follow. Blocks."""
        self.count = max(1, count)
        self.ready = min(self.ready, self.count)
        if self.count == 1:
            self.begin_timestamp = self.end_timestamp = self.begin_phy = self.end_phy = 0
            return
        last = next(self.entries(self.count - 1))
        self.end_phy = last.phy
        self.end_timestamp = max(self.begin_timestamp, min(end_timestamp, self.end_timestamp))

    def link(self, batch: Batch) -> bool:
        """Rebuild slots and chains from the entries. Returns True if they were right already. Blocks."""
        table, used, changed = batch.link(self.view, self.shape.slots, self.count)
        stored = self.view[HEADER_SIZE : HEADER_SIZE + len(table)]
        if bytes(stored) != table:
            self.load_slots()
            stored[:] = table
            changed = True
        self.slot_count = used
        header = HEADER.pack(*self._header())
        if changed or header != self.view[:HEADER_SIZE]:
            # After a crash the file may have no blocks: a store into the map would be a SIGBUS on a full disk.
            self._disk.pwrite(self.fd, header, 0)
            self.unsynced = True
        return not changed

    # -- end

    def unmap(self) -> None:
        """Unmap the file."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()

    def close(self) -> None:
        """Unmap and close; the file stays on disk."""
        if not self.closed:
            self.closed = True
            self.unmap()
            self._disk.close(self.fd)

    def destroy(self) -> None:
        """Close and delete the file. Blocks."""
        self.close()
        self._disk.delete(self.path)


def search(files: list[IndexFile], key_hash: int, begin: int, end: int, limit: int, wait: bool) -> list[int]:
    """Walk the chains of a hash, newest file first, for up to ``limit`` places. Raises Cold unless ``wait``."""
    if len(files) == 1:
        (only,) = files
        if not only.matches_time(begin, end):
            return []
        return list(dict.fromkeys(only.select(key_hash, begin, end, limit, wait=wait)))
    found: dict[int, None] = {}
    for file in reversed(files):
        if file.matches_time(begin, end):
            for phy in file.select(key_hash, begin, end, limit, wait=wait):
                found[phy] = None
        if len(found) >= limit or (file.count > 1 and file.begin_timestamp < begin):
            break
    return list(found)[:limit]
