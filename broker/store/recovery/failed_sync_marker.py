"""A note for the next start after a sync has failed while the machine stayed up.

The kernel marks pages that it could not write as clean. They are still in memory, so a restarted broker silently reads
them, and a later sync returns without having written them. The note says which parts of the store such pages may belong
to. The start writes those of the log again, and lets queues and index be rebuilt. The file itself needs no sync: if the
machine goes down, the pages that it refers to are lost too.
"""

import os
from contextlib import suppress
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import read_whole
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.running_flags import Flag

_FILE: Final = "failed_sync"
_CHUNK: Final = 1 << 20
_PAGE: Final = 4096

_log = structlog.get_logger(__name__)


class FailedSync(Struct):
    """``log_offset``: the log was durable up to here. ``flags``: the failed parts. ``reason``: text for humans."""

    log_offset: int
    flags: int
    reason: str


class FailedSyncMarker:
    """The file ``failed_sync`` in a store's directory."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._path = f"{root}/{_FILE}"

    def read(self) -> FailedSync | None:
        """The note; None if it does not exist or cannot be read."""
        data = read_whole(self._disk, self._path)
        if not data:
            return None
        try:
            return msgspec.json.decode(data, type=FailedSync)
        except msgspec.DecodeError:
            return None

    def add(self, flag: Flag, log_offset: int, reason: str) -> None:
        """Add a failed part to the note. Raises OSError."""
        before = self.read()
        if before is not None:
            flag |= Flag(before.flags)
            log_offset = min(log_offset, before.log_offset)
        data = msgspec.json.encode(FailedSync(log_offset, int(flag), reason))
        exists = self._disk.stat(self._path) is not None
        fd = self._disk.open(self._path) if exists else self._disk.create(self._path, 0)
        try:
            self._disk.truncate(fd, len(data))
            self._disk.pwrite(fd, data, 0)
        finally:
            self._disk.close(fd)

    def note(self, flag: Flag, log_offset: int, reason: str) -> None:
        """As ``add``, ignoring errors: without the note the store is as after a power cut."""
        with suppress(OSError):
            self.add(flag, log_offset, reason)

    async def repair(self, files: MappedFileQueue, queues: str, index: str | None) -> None:
        """Write the pages again that a failed sync of the last run left in memory only. Raises OSError.

        ``queues`` and ``index`` are directories whose files are rebuilt from the log.
        """
        marker = self.read()
        if marker is None:
            return
        disk = self._disk
        written = await disk.run(write_log_again, disk, files, marker.log_offset)
        if marker.flags & Flag.WRITE_LOGICS_QUEUE_ERROR:
            await disk.run(delete_files_below, disk, queues)
        if marker.flags & Flag.WRITE_INDEX_FILE_ERROR and index is not None:
            await disk.run(delete_files_below, disk, index)
        _log.warning("failed_sync_repaired", reason=marker.reason, log_from=marker.log_offset, bytes_written=written)

    def remove(self) -> None:
        """Delete the note: everything that it refers to has been written again."""
        if self._disk.stat(self._path) is not None:
            self._disk.delete(self._path)


def write_log_again(disk: Disk, files: MappedFileQueue, offset: int) -> int:
    """Write the log from ``offset`` on to the device again, from memory. Returns the bytes written. Blocks."""
    written = 0
    for file in files.files:
        if file.end <= offset:
            continue
        at = max(0, offset - file.start) // _PAGE * _PAGE
        while (at := disk.next_data(file.fd, at) // _PAGE * _PAGE if at < file.size else at) < file.size:
            data = disk.pread(file.fd, _CHUNK, at)
            disk.pwrite(file.fd, data, at)
            written += len(data)
            at += len(data)
        disk.data_sync(file.fd)
    return written


def delete_files_below(disk: Disk, directory: str) -> None:
    """Delete all files in a directory and its sub-directories; the directories stay. Blocks."""
    for name in disk.list(directory):
        path = os.path.join(directory, name)
        info = disk.stat(path)
        if info is not None and info.is_directory:
            delete_files_below(disk, path)
        else:
            disk.delete(path)
    if disk.stat(directory) is not None:
        disk.sync_directory(directory)
