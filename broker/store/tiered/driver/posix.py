"""Segments as files below tieredStoreFilePath. Source: RocketMQ's PosixFileSegment.

A file is open only during a call, so that the number of open files does not grow with the number of segments. Each call
runs in a thread and makes only calls of the kernel.
"""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import delete_durably, make_durable_directory
from trimq.broker.store.tiered.driver.file_segment import FileSegment, Piece
from trimq.protocol.tiered_layout import SegmentType, segment_file


class PosixFileSegment(FileSegment):
    """A segment in a file. ``suffix`` is for files beside a segment, which are written in the same way."""

    def __init__(
        self, disk: Disk, root: str, cluster: str, type: SegmentType, path: str, base_offset: int, suffix: str = ""
    ) -> None:
        super().__init__(type, path, base_offset)
        self._disk = disk
        self.file = segment_file(root, cluster, path, type, base_offset) + suffix
        self._is_durable = False  # its name is

    async def _read(self, position: int, length: int) -> bytes:
        return await self._disk.run(_read, self._disk, self.file, position, length)

    async def size(self) -> int | None:
        """See FileSegment."""
        info = await self._disk.run(self._disk.stat, self.file)
        return None if info is None else info.size

    async def write(self, pieces: Sequence[Piece], position: int) -> None:
        """See FileSegment."""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        # What is uploaded is history: in memory it would take the place of what is read now, and of new messages.
        evict = self.type is not SegmentType.CONSUME_QUEUE
        await self._disk.run(_write, self._disk, self.file, data, position, not self._is_durable, evict)
        self._is_durable = True

    async def cut(self, size: int) -> None:
        """See FileSegment."""
        await self._disk.run(_cut, self._disk, self.file, size)

    async def delete(self) -> None:
        """See FileSegment."""
        self._is_durable = False
        await self._disk.run(_delete, self._disk, self.file)


def _read(disk: Disk, file: str, position: int, length: int) -> bytes:
    fd = disk.open(file, writable=False)
    try:
        return disk.pread(fd, length, position)
    finally:
        disk.close(fd)


def _write(disk: Disk, file: str, data: Piece, position: int, name: bool, evict: bool) -> None:
    directory = os.path.dirname(file)
    if name:
        make_durable_directory(disk, directory)
    try:
        fd = disk.open(file)
    except FileNotFoundError:
        fd = disk.create(file, 0)
    try:
        if disk.size(fd) > position:
            # What a failed write has left must not stand behind the new bytes, where a start would count it.
            disk.truncate(fd, position)
        disk.pwrite(fd, data, position)
        disk.data_sync(fd)
        if evict:
            # Whole pages: the next write begins within the last one, which would have to be read again.
            begin, end = (at - at % mmap.PAGESIZE for at in (position, position + len(data)))
            if begin < end:
                with suppress(OSError):  # the bytes are durable all the same
                    disk.evict(fd, begin, end)
    finally:
        disk.close(fd)
    if name:
        disk.sync_directory(directory)


def _cut(disk: Disk, file: str, size: int) -> None:
    fd = disk.open(file)
    try:
        disk.truncate(fd, size)
        disk.data_sync(fd)
    finally:
        disk.close(fd)


def _delete(disk: Disk, file: str) -> None:
    if disk.stat(os.path.dirname(file)) is not None:
        delete_durably(disk, file)
