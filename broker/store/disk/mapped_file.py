"""One file of the commit log: full size from the start, mapped, prepared for writing in steps.

Positions are bytes from the start of the file::

    0 .. flushed .. wrote .. append_limit .. reserved .. size
         durable    records  space for a record that leaves 8 bytes free

Stores go only below ``reserved``: the pages there have their blocks, so a full disk cannot kill the process.
Source: RocketMQ's DefaultMappedFile. Unlike there, a file is never truncated, and never written by write(2) except in
transient_store_pool.py.
"""

from collections.abc import Callable
from typing import Final

from trimq.broker.store.disk.disk import Disk, MappedPart, Mapping

BLANK_SPACE: Final = 8
"""Bytes that stay free behind every record, for the BLANK that closes a file."""


class MappedFile:
    """A mapped file of the log. Not thread-safe: its positions belong to the event loop.

    Readers of long-lived views call ``hold`` and ``release``. ``destroy`` unlinks immediately and unmaps when no reader
    holds the file.
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
        """The file existed before this process, which has not yet synced all of it."""
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
        """A new file with its first ``reserve`` bytes prepared; its name and length are durable when this returns.

        ``make`` creates another kind of file; ``durable`` and ``large`` are as for ``reserve_range``. Blocks: call it
        through ``disk.run``. An OSError (mostly ENOSPC) leaves no file behind.
        """
        fd = disk.create(path, size)
        try:
            file = (make or cls)(disk, path, start, size, fd)
            try:
                file.in_memory_from = 0
                file.found = False
                reserve = min(reserve, size)
                disk.data_sync(fd)  # before reserve_range: only the length matters, the allocated pages are empty
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
        """An existing file; all positions are at its end until recovery lowers them."""
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
        """Log offset behind the last byte of the file."""
        return self.start + self.size

    @property
    def committed(self) -> int:
        """Records below are in the file: all of them, since they are written through its map."""
        return self.wrote

    @property
    def is_full(self) -> bool:
        """True once a BLANK has closed the file (or it was loaded with a successor)."""
        return self.wrote == self.size

    @property
    def is_held(self) -> bool:
        """True while a reader has views of the file."""
        return self._holders > 0

    def set_position(self, position: int) -> None:
        """Set by recovery: records end at ``position`` and are durable. Space behind it counts as not reserved."""
        self.wrote = self.flushed = self.reserved = position
        self.in_memory_from = position
        self.append_limit = -1

    def mark_reserved(self, position: int) -> None:
        """Let appends use the space up to ``position``; call it after ``reserve_range`` has returned."""
        self.reserved = position
        self.append_limit = position - BLANK_SPACE

    def reserve_range(self, begin: int, end: int, *, durable: bool = False, large: bool = False) -> None:
        """Prepare [begin, end), filled with zeros. Blocks: call it through ``disk.run``, then ``mark_reserved``.

        ``durable`` and ``large``: see ``Disk.reserve``.
        """
        self._disk.reserve(self.fd, begin, self.view[begin:end], durable=durable, large=large)

    def sync(self) -> None:
        """Data sync of the bytes that are in the file and not yet ``flushed``. Blocks. The caller moves ``flushed``.

        The first sync of a file that existed before covers all of it: a killed process may have left bytes in memory
        only.
        """
        if self.found or self._mapping is None:
            self._disk.data_sync(self.fd)
            self.found = False
        else:
            self._disk.data_sync(self.fd, MappedPart(self._mapping, self.flushed, self.committed))

    def evict(self, begin: int, end: int) -> None:
        """Free the memory of [begin, end), which is on the device. Blocks: call it through ``disk.run``."""
        if self._mapping is not None:
            self._disk.evict(self.fd, begin, end, self._mapping)

    def read(self, position: int, length: int) -> memoryview | bytes | None:
        """Bytes below ``wrote``; None if they would have to come from the device: then use ``read_cold``.

        Recently written bytes are a view of the map (hold the file while it is used), others are a copy.
        """
        if position >= self.in_memory_from:
            return self.view[position : position + length]
        return self._disk.pread_cached(self.fd, length, position)

    def read_cold(self, position: int, length: int) -> bytes:
        """As ``read``, with a read that may wait: call it through ``disk.run`` with the file held."""
        return self._disk.pread(self.fd, length, position)

    def read_ahead(self, begin: int, end: int) -> int:
        """Bring [begin, end) into memory; returns the position reached. Call it through ``disk.run``, file held."""
        return self._disk.read_ahead(self.fd, begin, end)

    def in_memory(self, begin: int, end: int) -> int:
        """The position up to which [begin, end), which is written, is in memory from ``begin`` on (see Disk)."""
        return self._disk.in_memory(self.fd, MappedPart(self._mapping, begin, end)) if self._mapping else begin

    def hold(self) -> None:
        """Add a reader."""
        self._holders += 1

    def release(self) -> None:
        """Remove a reader; the last reader of a destroyed file unmaps it."""
        self._holders -= 1
        if self.destroyed and not self._holders:
            self.unmap()
            self._disk.close(self.fd)

    def destroy(self) -> None:
        """Unlink now; unmap and close when no reader holds the file. Blocks on large files.

        An OSError leaves the file unchanged.
        """
        if self.destroyed:
            return
        self._disk.delete(self.path)
        self._retire()

    def close(self) -> None:
        """Unmap and close; the file stays on disk. If there are readers, the last of them does it."""
        if not self.destroyed:
            self._retire()

    def _retire(self) -> None:
        self.destroyed = True
        if not self._holders:
            self.unmap()
            self._disk.close(self.fd)

    def unmap(self) -> None:
        """Unmap the file; there must be no reader."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()

    def is_released_by(self, release: Callable[[], None]) -> bool:
        """True if an answer's ``release`` will release this file: until it is called, views of the file exist."""
        return self in release.files if isinstance(release, Hold) else getattr(release, "__self__", None) is self


class Hold:
    """The files that the views of an answer belong to; calling it releases them."""

    __slots__ = ("files",)

    def __init__(self, files: list[MappedFile]) -> None:
        self.files = files

    def __call__(self) -> None:
        """Release the files. Call it once."""
        for file in self.files:
            file.release()
