"""Small files and directories that are replaced as a whole: after a power cut there is the old or the new state."""

import contextlib
import os

from trimq.broker.store.disk.disk import Disk


def write_durably(disk: Disk, path: str, data: bytes, *, private: bool = False) -> None:
    """Replace a file so that a power cut leaves the old or the new content: temporary file, sync, rename, sync.

    ``private``: only the owner may read it.
    """
    # The content is durable before the rename: else a power cut could leave the new name with an empty file.
    disk.rename(write_beside(disk, path, data, private=private), path)
    disk.sync_directory(os.path.dirname(path))


def write_beside(disk: Disk, path: str, *data: bytes, private: bool = False) -> str:
    """Write ``data`` (in pieces) to a synced temporary file next to the file that it will replace; returns its path."""
    temporary = path + ".tmp"
    if disk.stat(temporary) is not None:
        disk.delete(temporary)
    fd = disk.create(temporary, 0, private=private)
    try:
        at = 0
        for piece in data:
            disk.pwrite(fd, piece, at)
            at += len(piece)
        disk.data_sync(fd)
    finally:
        disk.close(fd)
    return temporary


def delete_durably(disk: Disk, path: str) -> None:
    """Delete a file, if it exists, so that a power cut does not bring it back."""
    if disk.stat(path) is not None:
        disk.delete(path)
    disk.sync_directory(os.path.dirname(path))  # perhaps another process has deleted it just now


def make_durable_directory(disk: Disk, path: str) -> None:
    """Create a directory and its missing parents, and sync each of them into its parent."""
    missing = []
    while disk.stat(path) is None:
        missing.append(path)
        path = os.path.dirname(path)
    for made in reversed(missing):
        disk.make_directory(made)
        try:
            disk.sync_directory(os.path.dirname(made))
        except OSError:
            # The next attempt must not find it and take its name for durable.
            with contextlib.suppress(OSError):
                disk.remove_directory(made)
            raise


def read_whole(disk: Disk, path: str) -> bytes | None:
    """All bytes of a file; None if it does not exist."""
    try:
        fd = disk.open(path, writable=False)
    except FileNotFoundError:
        return None
    try:
        return disk.pread(fd, disk.size(fd), 0)
    finally:
        disk.close(fd)
