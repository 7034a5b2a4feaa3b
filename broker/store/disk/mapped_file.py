"""One file of the commit log: full size from the start, mapped, made ready for writing in steps.

Positions are bytes from the file's beginning::

    0 .. flushed .. wrote .. append_limit .. reserved .. size
         durable    records  room for a record that leaves 8 bytes

A page is only stored into below ``reserved``: there it has its block, and a full disk can no longer kill the process.
Source: RocketMQ's DefaultMappedFile; unlike there never truncated, and never written by write(2) but in
transient_store_pool.py.
"""

from collections.abc import Callable
from typing import Final

from trimq.broker.store.disk.disk import Disk, MappedPart, Mapping

BLANK_ROOM: Final = 8
"""Bytes that stay free behind every record, for the filler that ends a file."""


class MappedFile:
    """A mapped file of the log. Not thread-safe: positions belong to the event loop.

    Readers of long-lived views call ``hold`` and ``release``. ``destroy`` unlinks at once and unmaps when nobody holds
    it.
    """

    __slots__ = (
        "_disk",
        "_holders",
        "_mapping",
        "append_limit",
        "buffer",
        "destroyed",
        "fd",
        "flushed",
        "found",
        "in_memory_from",
        "path",
        "reserved",
        "size",
        "start",
        "view",
        "wrote",
    )

    def __init__(self, disk: Disk, path: str, start: int, size: int, fd: int) -> None:
        self._disk = disk
        self._mapping: Mapping | None = disk.map(fd, size)
        self._holders = 0
        self.found = True
        """It was there before this process, which has not synced all of it yet."""
        self.path = path
        self.start = start
        self.size = size
        self.fd = fd
        self.view = self._mapping.view
        self.buffer = self._mapping.buffer
        self.wrote = 0
        self.flushed = 0
        self.reserved = 0
        self.append_limit = -1
        self.in_memory_from = size
        self.destroyed = False

    @classmethod
    def create(
        cls,
        disk: Disk,
        path: str,
        start: int,
        size: int,
        reserve: int,
        make: "Callable[[Disk, str, int, int, int], MappedFile] | None" = None,
        *,
        durable: bool = False,
        large: bool = False,
    ) -> "MappedFile":
        """A new file with its first ``reserve`` bytes ready; its name and length are durable when this returns.

        ``make`` makes another kind of file, ``durable`` and ``large`` are as for ``reserve_range``. Blocks: call it
        through ``disk.run``. OSError (ENOSPC above all) leaves nothing behind.
        """
        fd = disk.create(path, size)
        try:
            file = (make or cls)(disk, path, start, size, fd)
            try:
                file.in_memory_from = 0
                file.found = False
                reserve = min(reserve, size)
                disk.data_sync(fd)  # of its length: what lies ready is still empty, nobody needs it on the device
                file.reserve_range(0, reserve, durable=durable, large=large)
                disk.sync_directory(path.rpartition("/")[0])
            except BaseException:
                file.unmap()
                raise
        except BaseException:
            disk.close(fd)
            disk.delete(path)
            raise
        file.mark_reserved(reserve)
        return file

    @classmethod
    def open(cls, disk: Disk, path: str, start: int, size: int) -> "MappedFile":
        """An existing file; all positions stand at its end until recovery lowers them."""
        fd = disk.open(path)
        try:
            file = cls(disk, path, start, size, fd)
        except BaseException:
            disk.close(fd)
            raise
        file.wrote = file.flushed = file.reserved = size
        return file

    @property
    def end(self) -> int:
        """Log offset behind the file's last byte."""
        return self.start + self.size

    @property
    def committed(self) -> int:
        """Records below are in the file: all of them, where they are written into its map."""
        return self.wrote

    @property
    def is_full(self) -> bool:
        """True once a BLANK has closed it (or it was loaded as one that has a successor)."""
        return self.wrote == self.size

    @property
    def is_held(self) -> bool:
        """True while a reader has views of it."""
        return self._holders > 0

    def set_position(self, position: int) -> None:
        """Recovery's word: records end at ``position`` and are durable. Space behind it counts as not reserved."""
        self.wrote = self.flushed = self.reserved = position
        self.in_memory_from = position
        self.append_limit = -1

    def mark_reserved(self, position: int) -> None:
        """Space up to ``position`` is ready (after ``reserve_range`` has returned)."""
        self.reserved = position
        self.append_limit = position - BLANK_ROOM

    def reserve_range(self, begin: int, end: int, *, durable: bool = False, large: bool = False) -> None:
        """Make [begin, end) ready and zero; blocks: call it through ``disk.run``, then ``mark_reserved``.

        ``durable`` and ``large``: see ``Disk.reserve``.
        """
        self._disk.reserve(self.fd, begin, self.view[begin:end], durable=durable, large=large)

    def sync(self) -> None:
        """Data sync of what is in the file and not ``flushed`` yet; blocks. The caller moves ``flushed``.

        The first one of a file that was found is for all of it: a process that was killed may have left something in
        memory only.
        """
        if self.found or self._mapping is None:
            self._disk.data_sync(self.fd)
            self.found = False
        else:
            self._disk.data_sync(self.fd, MappedPart(self._mapping, self.flushed, self.committed))

    def let_go(self, begin: int, end: int) -> None:
        """Give the memory of [begin, end) back, which is on the device; blocks: call it through ``disk.run``."""
        if self._mapping is not None:
            self._disk.let_go(self.fd, MappedPart(self._mapping, begin, end))

    def read(self, position: int, length: int) -> memoryview | bytes | None:
        """Bytes that lie below ``wrote``, or None if they would have to come from the device: then ``read_cold``.

        What was written lately is a view of the map (hold the file while you keep it), anything else a copy.
        """
        if position >= self.in_memory_from:
            return self.view[position : position + length]
        return self._disk.pread_cached(self.fd, length, position)

    def read_cold(self, position: int, length: int) -> bytes:
        """The same by a read that may wait: call it through ``disk.run`` with the file held."""
        return self._disk.pread(self.fd, length, position)

    def read_ahead(self, begin: int, end: int) -> int:
        """Bring [begin, end) into memory, up to where it says: call it through ``disk.run`` with the file held."""
        return self._disk.read_ahead(self.fd, begin, end)

    def in_memory(self, begin: int, end: int) -> int:
        """Up to where [begin, end), which it has written, is in memory from ``begin`` on (see Disk)."""
        return self._disk.in_memory(self.fd, MappedPart(self._mapping, begin, end)) if self._mapping else begin

    def hold(self) -> None:
        """Count a reader."""
        self._holders += 1

    def release(self) -> None:
        """Count a reader off; the last one of a destroyed file unmaps it."""
        self._holders -= 1
        if self.destroyed and not self._holders:
            self.unmap()
            self._disk.close(self.fd)

    def destroy(self) -> None:
        """Remove the name now, memory and descriptor when nobody holds the file. Blocks on large files.

        OSError leaves the file as it was.
        """
        if self.destroyed:
            return
        self._disk.delete(self.path)
        self._retire()

    def close(self) -> None:
        """Unmap and close; the file stays. With readers left, the last of them does it."""
        if not self.destroyed:
            self._retire()

    def _retire(self) -> None:
        self.destroyed = True
        if not self._holders:
            self.unmap()
            self._disk.close(self.fd)

    def unmap(self) -> None:
        """Give the memory back; nobody reads it."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()

    def is_released_by(self, release: Callable[[], None]) -> bool:
        """Whether an answer's ``release`` will give this file back: who has not called it yet has views of it."""
        return self in release.files if isinstance(release, Hold) else getattr(release, "__self__", None) is self


class Hold:
    """The files that the views of an answer belong to; calling it gives them back."""

    __slots__ = ("files",)

    def __init__(self, files: list[MappedFile]) -> None:
        self.files = files

    def __call__(self) -> None:
        """Once."""
        for file in self.files:
            file.release()
