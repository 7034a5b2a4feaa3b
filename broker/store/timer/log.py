"""The timer log: a unit for each timed message, in the order of the timer's queue (RocketMQ's TimerLog).

The units have the order of their messages in the commit log too. They are written with ordinary writes, in batches;
bytes that are not synced yet are never relied on after a restart, so a write that fails costs nothing.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory
from trimq.broker.store.disk.mapped_file_queue import list_row
from trimq.protocol.file_names import offset_name
from trimq.protocol.timer_layout import (
    BLANK_SIZE,
    UNIT_SIZE,
    TimerUnit,
    fits,
    last_unit_at,
    pack_blank,
    unpack_unit,
)

_OPEN_FILES: Final = 4
_WINDOW: Final = 4096
_SCAN: Final = UNIT_SIZE * 1024


class Piece(NamedTuple):
    """Bytes to be written at a position of the log, all in one file."""

    position: int
    data: bytes


class _OpenFile:
    """A file that is open, and the number of calls that use its descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.is_gone = False
        """Not in the table any more: the last user closes it."""


class TimerLog:
    """The files of the log. ``end`` is the position of the next unit.

    Threads write, sync, read and delete at the same time; a descriptor that a call uses stays open.
    """

    def __init__(self, disk: Disk, directory: str, file_size: int) -> None:
        self._disk = disk
        self.directory = directory
        self.file_size = file_size
        self.starts: list[int] = []
        """The starts of the files, which follow each other."""
        self.end = 0
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        """Of ``_open``. No call that may block is made under it."""
        self._unsynced: set[int] = set()
        self._named_to = -1
        """The last file whose name is durable."""
        self._window_at = 0
        self._window = b""

    def load(self) -> None:
        """Find the files. Blocks. Until ``truncate`` the log ends with the last one. Raises StoreLoadError, OSError."""
        self.starts = [file.start for file in list_row(self._disk, self.directory, self.file_size)]
        self._unsynced = set(self.starts[-2:])
        self.end = self.files_end

    @property
    def begin(self) -> int:
        """The start of the first file; the end if there is none."""
        return self.starts[0] if self.starts else self.end

    @property
    def files_end(self) -> int:
        """The end of the last file; 0 without files."""
        return self.starts[-1] + self.file_size if self.starts else 0

    # -- writing

    def place(self, count: int) -> list[int]:
        """The positions of the next ``count`` units."""
        positions = []
        at = self.end
        for _ in range(count):
            if not fits(at % self.file_size, self.file_size):
                at += self.file_size - at % self.file_size
            positions.append(at)
            at += UNIT_SIZE
        return positions

    def pieces(self, positions: Sequence[int], units: Sequence[bytes]) -> list[Piece]:
        """What has to be written for units at the positions that ``place`` has returned."""
        pieces: list[Piece] = []
        begin, parts, at = self.end, [], self.end
        for position, unit in zip(positions, units, strict=True):
            if position != at:  # in the next file
                parts.append(pack_blank(position - at))
                pieces.append(Piece(begin, b"".join(parts)))
                begin, parts = position, []
            parts.append(unit)
            at = position + UNIT_SIZE
        pieces.append(Piece(begin, b"".join(parts)))
        return pieces

    def has_to_sync(self, piece: Piece) -> bool:
        """Whether ``sync`` has to come before a piece: a power cut must not leave a gap between the files."""
        return bool(self.starts) and piece.position >= self.files_end and self.starts[-1] > self._named_to

    def write(self, piece: Piece) -> None:
        """Write a piece; ``end`` stays. Blocks. Raises OSError; the same positions can then be written again."""
        start = piece.position - piece.position % self.file_size
        with self._opened(start, create=True) as fd:
            self._disk.pwrite(fd, piece.data, piece.position - start)
            self._unsynced.add(start)

    def wrote(self, end: int) -> None:
        """The units up to ``end`` have been written."""
        self.end = end
        self._window = b""

    def sync(self) -> None:
        """Make durable what was written. Blocks. Raises OSError: then nothing may be relied on any more."""
        last = self.starts[-1] if self.starts else -1
        for start in sorted(self._unsynced):
            with self._opened(start) as fd:
                # Before the sync: a write during it is for the next one.
                self._unsynced.discard(start)
                try:
                    self._disk.data_sync(fd)
                except OSError:
                    self._unsynced.add(start)
                    raise
        if last > self._named_to:
            self._disk.sync_directory(self.directory)
            self._named_to = last

    def _hold(self, start: int) -> _OpenFile | None:
        """The file as it is open, which has to be released; None if it is not."""
        with self._lock:
            file = self._open.get(start)
            if file is not None:
                file.users += 1
                self._open.move_to_end(start)
            return file

    def _release(self, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            unused = file.is_gone and not file.users
        if unused:
            self._disk.close(file.fd)

    @contextmanager
    def _opened(self, start: int, *, create: bool = False) -> Iterator[int]:
        """The descriptor of a file. Opens it, which blocks."""
        file = self._hold(start)
        if file is None:
            file = self._keep(start, self._open_file(start, create=create))
        try:
            yield file.fd
        finally:
            self._release(file)

    def _open_file(self, start: int, *, create: bool) -> int:
        path = os.path.join(self.directory, offset_name(start))
        if not create or start in self.starts[-2:]:
            return self._disk.open(path)
        make_durable_directory(self._disk, self.directory)
        fd = self._disk.create(path, self.file_size)
        self.starts.append(start)
        return fd

    def _keep(self, start: int, fd: int) -> _OpenFile:
        """Hold a file that was opened now, and close others that are not used."""
        closing = []
        with self._lock:
            file = self._open.get(start)
            if file is None:
                file = self._open[start] = _OpenFile(fd)
            else:  # another thread has opened it meanwhile
                closing.append(fd)
            file.users += 1
            # Unsynced files stay open: a write error is reported to the descriptors that were open when it occurred.
            for other, its in list(self._open.items()):
                if len(self._open) > _OPEN_FILES and other not in self._unsynced and not its.users:
                    closing.append(self._open.pop(other).fd)
        for unused in closing:
            self._disk.close(unused)
        return file

    def truncate(self, end: int) -> None:
        """End the log at ``end``: later files are deleted, what follows in the last one is erased. Blocks."""
        while self.starts and self.starts[-1] >= end and (len(self.starts) > 1 or not end):
            self._delete(self.starts.pop())
            self._named_to = min(self._named_to, self.starts[-1] if self.starts else -1)
        if self.starts and end < self.files_end:
            self._erase(self.starts[-1], end - self.starts[-1])
        self.end = end
        self._window = b""

    def _erase(self, start: int, at: int) -> None:
        with self._opened(start) as fd:
            while (at := max(at, self._disk.next_data(fd, at))) < self.file_size:
                data = self._disk.pread(fd, min(_SCAN, self.file_size - at), at)
                if any(data):
                    self._disk.pwrite(fd, bytes(len(data)), at)
                elif not any(self._disk.pread(fd, UNIT_SIZE, min(at + len(data), self.file_size))):
                    break  # units are written one after the other: nothing follows
                at += len(data)
            self._disk.data_sync(fd)

    def delete_before(self, position: int) -> int:
        """Delete the files all of whose units are before ``position``, never the last. Blocks. Returns their number."""
        deleted = 0
        while len(self.starts) > 1 and self.starts[1] <= position:
            self._delete(self.starts.pop(0))
            deleted += 1
        return deleted

    def _delete(self, start: int) -> None:
        with self._lock:
            file = self._open.pop(start, None)
            if file is not None:
                file.is_gone = True
                file.users += 1
        if file is not None:
            self._release(file)
        self._unsynced.discard(start)
        self._disk.delete(os.path.join(self.directory, offset_name(start)))
        # Each deletion is durable before the next one: a power cut must not leave a gap between the files.
        self._disk.sync_directory(self.directory)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._disk.close(self._open.popitem()[1].fd)

    # -- reading

    async def unit(self, position: int) -> TimerUnit | None:
        """The unit at a position; None if there is none."""
        return unpack_unit(await self._read(position, UNIT_SIZE))

    async def went_on(self, position: int) -> bool:
        """Whether the log went on at a position: a unit was written there, or the file was ended behind it."""
        blank = position - position % self.file_size + last_unit_at(self.file_size) + UNIT_SIZE
        return any(await self._read(position, UNIT_SIZE)) or any(await self._read(blank, BLANK_SIZE))

    async def _read(self, position: int, length: int) -> bytes:
        """Bytes at a position, fewer at the end of its file; a chain's units are mostly close to each other."""
        at = position - self._window_at
        if 0 <= at <= len(self._window) - length:
            return self._window[at : at + length]
        start = position - position % self.file_size
        if start not in self.starts or position < 0:
            return b""
        begin = max(start, position + length - max(length, _WINDOW))
        end = min(position + length, start + self.file_size)
        data = self._read_cached(start, end - begin, begin - start)
        if data is None:
            data = await self._disk.run(self._read_cold, start, end - begin, begin - start)
        self._window_at, self._window = begin, data
        return data[position - begin :]

    def _read_cached(self, start: int, length: int, at: int) -> bytes | None:
        file = self._hold(start)
        if file is None:
            return None
        try:
            return self._disk.pread_cached(file.fd, length, at)
        finally:
            self._release(file)

    def _read_cold(self, start: int, length: int, at: int) -> bytes:
        """Blocks. Raises OSError."""
        with self._opened(start) as fd:
            return self._disk.pread(fd, length, at)

    async def units_from(self, position: int, end: int) -> tuple[list[tuple[int, TimerUnit]], int]:
        """One step of a scan: units (with their positions) from ``position`` on, and where the next step begins.

        The scan ends when that is not before ``end``. Damaged units are left out.
        """
        position = self.next_position(position)
        start = position - position % self.file_size
        if position >= end or start not in self.starts:
            return [], max(end, position)
        length = min(_SCAN, end - position, start + self.file_size - position)
        data = await self._disk.run(self._read_cold, start, length, position - start)
        units = [
            (position + at, unit) for at in range(0, length, UNIT_SIZE) if (unit := unpack_unit(data, at)) is not None
        ]
        return units, position + length

    def next_position(self, position: int) -> int:
        """``position``, or the start of the next file if no unit fits there."""
        at = position % self.file_size
        return position if fits(at, self.file_size) else position - at + self.file_size

    def before(self, position: int) -> int:
        """The position of the unit before ``position``; -1 if there is none."""
        at = position % self.file_size
        if at:
            at = min(at, last_unit_at(self.file_size) + UNIT_SIZE)
            return position - position % self.file_size + at - UNIT_SIZE
        found = position - self.file_size + last_unit_at(self.file_size)
        return found if self.starts and found >= self.starts[0] else -1
