"""Consecutive files of equal size, each named by the offset it starts at (RocketMQ's MappedFileQueue)."""

import itertools
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.page_cache import PageCache
from trimq.protocol.file_names import offset_name, parse_offset_name


class StoreLoadError(Exception):
    """The directory does not match the configuration; the text names the file, its state and the expected one."""


class FileName(NamedTuple):
    """A file of a MappedFileQueue: its start offset and its path."""

    start: int
    path: str


def list_row(disk: Disk, directory: str, size: int) -> list[FileName]:
    """The files of a directory in order, by RocketMQ's rules of loading; none if the directory does not exist.

    Sub-directories and names that are not offsets are skipped. A zero-length last file is deleted. Raises
    StoreLoadError if a file has another length, or a file is missing between two others.
    """
    names: list[tuple[int, str, int]] = []
    for name in disk.list(directory):
        start = parse_offset_name(name)
        path = os.path.join(directory, name)
        info = disk.stat(path) if start is not None else None
        if start is not None and info is not None and not info.is_directory:
            names.append((start, path, info.size))
    names.sort()
    if names and names[-1][2] == 0:
        disk.delete(names.pop()[1])
        disk.sync_directory(directory)
    for start, path, length in names:
        if length != size:
            raise StoreLoadError(
                f"{path} has {length} bytes, the configured file size is {size}: start with the size the store was "
                "made with, or move the file away if it does not belong to the store"
            )
        if start % size:
            raise StoreLoadError(f"{path} does not start at a multiple of the configured file size of {size}")
    for (before, _, _), (start, path, _) in itertools.pairwise(names):
        if start != before + size:
            raise StoreLoadError(f"the file {offset_name(before + size)} before {path} is missing")
    return [FileName(start, path) for start, path, _ in names]


class MappedFileQueue:
    """The mapped files of a directory, oldest first."""

    def __init__(self, disk: Disk, directory: str, size: int) -> None:
        self.disk = disk
        self.directory = directory
        self.size = size
        self.files: list[MappedFile] = []
        self.begin = 0
        """Where the first file starts, as long as there is none."""
        self.page_cache = PageCache()
        self.own_from = sys.maxsize
        """Everything from this offset on was put by this process, not found in files at the start."""

    def load(self) -> None:
        """Map the existing files. Raises StoreLoadError or OSError, and leaves no file open then."""
        try:
            for start, path in list_row(self.disk, self.directory, self.size):
                self.files.append(MappedFile.open(self.disk, path, start, self.size))
        except BaseException:
            self.close()
            raise

    def path_of(self, start: int) -> str:
        """Path of the file that starts at ``start``."""
        return os.path.join(self.directory, offset_name(start))

    @property
    def last(self) -> MappedFile | None:
        """The file that is written to."""
        return self.files[-1] if self.files else None

    @property
    def min_offset(self) -> int:
        """Start offset of the oldest file; ``begin`` without files."""
        return self.files[0].start if self.files else self.begin

    @property
    def last_start(self) -> int:
        """Start offset of the newest file; 0 without files."""
        return self.files[-1].start if self.files else 0

    @property
    def max_offset(self) -> int:
        """Offset of the next record; ``begin`` without files."""
        return self.files[-1].start + self.files[-1].wrote if self.files else self.begin

    @property
    def flushed_offset(self) -> int:
        """Everything below is durable: the contiguous prefix only."""
        for file in self.files:
            if file.flushed < file.size:
                return file.start + file.flushed
        return self.files[-1].end if self.files else self.begin

    def find(self, offset: int) -> MappedFile | None:
        """The file that holds the byte at ``offset``; None if there is none."""
        files = self.files
        if not files:
            return None
        index = (offset - files[0].start) // self.size
        return files[index] if 0 <= index < len(files) else None

    def append(self, file: MappedFile) -> None:
        """Add the file that follows the last one."""
        if self.files and file.start != self.files[-1].end:
            raise ValueError(f"{file.path} does not follow {self.files[-1].path}")
        self.files.append(file)

    def remove_first(self) -> MappedFile:
        """Remove the oldest file from the queue; the caller destroys it (in a thread: unlinking can block)."""
        return self.files.pop(0)

    def truncate_after(self, offset: int) -> list[MappedFile]:
        """Set the end of the queue to ``offset`` and remove the files behind it; the caller destroys them.

        Used by recovery. Returns the newest file first. A file that starts exactly at ``offset`` is removed too, unless
        it is the only one.
        """
        removed = []
        while self.files and self.files[-1].start >= offset and len(self.files) > 1:
            removed.append(self.files.pop())
        if self.files:
            file = self.files[-1]
            file.set_position(max(0, min(offset - file.start, file.size)))
        return removed

    def holders(self) -> Iterator[MappedFile]:
        """The files that readers hold."""
        return (file for file in self.files if file.is_held)

    def close(self) -> None:
        """Unmap and close all files."""
        while self.files:
            self.files.pop().close()
