"""Ownership of a store, and whether its last owner closed it in order: the files ``lock`` and ``abort``.

RocketMQ takes the lock after recovery has already changed files; here it is taken before any file is touched.
"""

import os
from typing import Final, Self

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory, read_whole

LOCK_FILE: Final = "lock"
ABORT_FILE: Final = "abort"

_open_stores: set[tuple[int, int]] = set()
"""Lock files open in this process: a POSIX lock does not exclude its own process, and any close releases it."""


class StoreInUseError(Exception):
    """Another broker uses the store; the text names the directory, and the process if it is known."""


class StoreLock:
    """The exclusive POSIX lock on byte 0 of ``lock``, as Java's FileChannel.tryLock(0, 1) takes it."""

    def __init__(self, disk: Disk, fd: int, identity: tuple[int, int]) -> None:
        self._disk = disk
        self._fd = fd
        self._identity = identity

    @classmethod
    def acquire(cls, disk: Disk, root: str) -> Self:
        """Take the lock, creating the directory if needed. Raises StoreInUseError."""
        make_durable_directory(disk, root)
        path = f"{root}/{LOCK_FILE}"
        identity = disk.identity(path)
        # Before opening the file: closing it again would release the lock that this process already has.
        if identity is not None and identity in _open_stores:
            raise StoreInUseError(f"the store {root} is open in this process already")
        try:
            fd = disk.open(path)
        except FileNotFoundError:
            fd = disk.create(path, 0)
        try:
            identity = _lock(disk, fd, root)
        except BaseException:
            disk.close(fd)
            raise
        _open_stores.add(identity)
        return cls(disk, fd, identity)

    def release(self) -> None:
        """Release the lock."""
        _open_stores.discard(self._identity)
        self._disk.close(self._fd)


def _lock(disk: Disk, fd: int, root: str) -> tuple[int, int]:
    """Lock the open file; returns its identity."""
    identity = disk.identity(f"{root}/{LOCK_FILE}")
    if identity is None or not disk.lock(fd):
        owner = (read_whole(disk, f"{root}/{ABORT_FILE}") or b"").decode("ascii", "replace").strip()
        known = f" (process {owner})" if owner.isdigit() else ""
        raise StoreInUseError(f"the store {root} is in use by another broker{known}: stop that, or use another path")
    disk.pwrite(fd, b"lock", 0)
    disk.data_sync(fd)
    return identity


class AbortFile:
    """``abort`` exists while a broker writes the store. If it is found at start, the last exit was not orderly."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._root = root
        self._path = f"{root}/{ABORT_FILE}"

    def exists(self) -> bool:
        """True after an abnormal exit."""
        return self._disk.stat(self._path) is not None

    def create(self) -> None:
        """Write the process id, durably, before the first write to the store. An existing file is reused."""
        fd = self._disk.open(self._path) if self.exists() else self._disk.create(self._path, 0)
        try:
            text = str(os.getpid()).encode()
            self._disk.truncate(fd, len(text))
            self._disk.pwrite(fd, text, 0)
            self._disk.data_sync(fd)
        finally:
            self._disk.close(fd)
        self._disk.sync_directory(self._root)

    def remove(self) -> None:
        """Delete the file: the last step of an orderly stop, after everything else is complete and durable."""
        if self.exists():
            self._disk.delete(self._path)
            self._disk.sync_directory(self._root)
