"""The files of a store directory, on a local disk or any fsspec path, and reads of byte ranges.

A local file is mapped, so a range costs nothing until its bytes are accessed. A remote file is read by ranges. Nothing
is locked or written; the store may belong to a running broker.
"""

import errno
import mmap
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

from trimq.protocol.file_names import is_index_name, parse_offset_name
from trimq.protocol.queue_unit import UNIT_SIZE

_LOCAL: Final = ("file", "local")
_READ_AHEAD: Final = 1 << 20
"""A remote read of at least so many bytes is taken as sequential, and the next range is fetched ahead."""


class StorePathError(ValueError):
    """The path is not that of a store; the text says which files were expected."""


class DataFile(NamedTuple):
    """A file of the log or of a queue. ``start`` is the offset of its first byte in the log or queue."""

    path: str
    start: int
    size: int

    @property
    def end(self) -> int:
        """The offset behind its last byte."""
        return self.start + self.size


class ByteSource(Protocol):
    """The bytes of one file. Views that ``read`` returned stay valid after ``close``."""

    size: int

    def read(self, begin: int, end: int) -> memoryview:
        """The bytes in [begin, end), fewer if the file ends before."""
        ...

    def next_data(self, at: int) -> int:
        """The next position at or after ``at`` that is not in a hole of the file; the file's size if there is none."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class LocalSource:
    """A mapped file."""

    def __init__(self, path: str) -> None:
        self._path = path
        fd = os.open(path, os.O_RDONLY)
        try:
            self.size = os.fstat(fd).st_size
            self._view = memoryview(mmap.mmap(fd, self.size, prot=mmap.PROT_READ)) if self.size else memoryview(b"")
        finally:
            os.close(fd)

    def read(self, begin: int, end: int) -> memoryview:
        """See ByteSource."""
        return self._view[begin:end]

    def next_data(self, at: int) -> int:
        """See ByteSource."""
        fd = os.open(self._path, os.O_RDONLY)
        try:
            return os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            return self.size if error.errno == errno.ENXIO else at
        finally:
            os.close(fd)

    def close(self) -> None:
        """See ByteSource. Views may still be in use; the last of them unmaps the file."""
        self._view = memoryview(b"")


class RemoteSource:
    """A file behind fsspec, read by ranges. After a large read, the next range of that size is fetched in a thread."""

    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs = fs
        self._path = path
        self.size = size
        self._held = b""
        self._held_at = 0
        self._ahead: tuple[int, Future[bytes]] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def read(self, begin: int, end: int) -> memoryview:
        """See ByteSource."""
        end = min(end, self.size)
        if begin >= end:
            return memoryview(b"")
        if self._held_at <= begin and end <= self._held_at + len(self._held):
            return memoryview(self._held)[begin - self._held_at : end - self._held_at]
        if end - begin < _READ_AHEAD:
            return memoryview(self._fetch(begin, end))
        # Consecutive windows overlap by the record that was cut off: those bytes are in memory from the last read.
        data = self._held[begin - self._held_at :] if self._held_at <= begin else b""
        data += self._rest(begin + len(data), end)
        self._held, self._held_at = data, begin
        held_end = begin + len(data)
        if held_end < self.size:
            self._pool = self._pool or ThreadPoolExecutor(1)
            following = min(held_end + end - begin, self.size)
            self._ahead = held_end, self._pool.submit(self._fetch, held_end, following)
        return memoryview(data)[: end - begin]

    def _rest(self, begin: int, end: int) -> bytes:
        """The bytes that the last read did not have: from the range fetched ahead, if it begins at ``begin``."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != begin:
            return self._fetch(begin, end)
        data = ahead[1].result()
        return data if begin + len(data) >= end else data + self._fetch(begin + len(data), end)

    def _fetch(self, begin: int, end: int) -> bytes:
        data: bytes = self._fs.cat_file(self._path, start=begin, end=end)
        return data

    def next_data(self, at: int) -> int:
        """See ByteSource. Remote file systems do not report holes."""
        return at

    def close(self) -> None:
        """See ByteSource."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


class StoreFiles:
    """One store. ``path`` is its root, with the directory ``commitlog``, or a directory of log files.

    ``storage_options`` are passed to the file system, as fsspec takes them.
    """

    def __init__(self, path: str, storage_options: Mapping[str, Any] | None = None) -> None:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - the slowest import here, and schemas do not need it

        self.path = path
        self._storage_options = dict(storage_options or {})
        self.fs, self.root = url_to_fs(path, **self._storage_options)
        self.root = self.root.rstrip("/") or "/"
        protocol = self.fs.protocol
        self.is_local = bool(set((protocol,) if isinstance(protocol, str) else protocol) & set(_LOCAL))

    def __reduce__(self) -> tuple[type["StoreFiles"], tuple[str, dict[str, Any]]]:
        """Pickled as its path and settings; an executor opens its own file system."""
        return StoreFiles, (self.path, self._storage_options)

    def join(self, *names: str) -> str:
        """A path below the root."""
        return posixpath.join(self.root, *names)

    def exists(self, *names: str) -> bool:
        """Whether this file or directory exists below the root."""
        return bool(self.fs.exists(self.join(*names)))

    def entries(self, path: str) -> list[tuple[str, int, bool]]:
        """(name, size, is a directory) for each entry of a directory; empty if it does not exist."""
        if self.is_local:
            try:
                with os.scandir(path) as entries:
                    return sorted((entry.name, entry.stat().st_size, entry.is_dir()) for entry in entries)
            except (FileNotFoundError, NotADirectoryError):
                return []
        try:
            found = self.fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(
            (posixpath.basename(item["name"].rstrip("/")), int(item["size"] or 0), item["type"] == "directory")
            for item in found
        )

    def _data_files(self, directory: str) -> list[DataFile]:
        files = []
        for name, size, is_directory in self.entries(directory):
            start = parse_offset_name(name)
            if start is not None and not is_directory:
                files.append(DataFile(posixpath.join(directory, name), start, size))
        return sorted(files, key=lambda file: file.start)

    def log_files(self) -> list[DataFile]:
        """The commit log in its order, without empty files. Raises StorePathError if there is no log."""
        directory = self.join("commitlog")
        files = self._data_files(directory)
        if not files:
            files = self._data_files(self.root)
            if not files and not self.exists("commitlog"):
                raise StorePathError(
                    f"{self.path} is no store: it has neither {directory} nor log files (named by 20 digits)"
                )
        return [file for file in files if file.size]

    def topics(self) -> list[str]:
        """The names of topics that have queues."""
        return [name for name, _, is_directory in self.entries(self.join("consumequeue")) if is_directory]

    def queue_ids(self, topic: str) -> Sequence[int]:
        """The ids of a topic's queues, ascending."""
        found = self.entries(self.join("consumequeue", topic))
        return sorted(int(name) for name, _, is_dir in found if is_dir and name.isascii() and name.isdigit())

    def queue_files(self, topic: str, queue_id: int) -> list[DataFile]:
        """The files of a queue."""
        return self._data_files(self.join("consumequeue", topic, str(queue_id)))

    def index_files(self) -> list[DataFile]:
        """The index files, oldest first; ``start`` is the name as a number."""
        directory = self.join("index")
        return [
            DataFile(posixpath.join(directory, name), int(name), size)
            for name, size, is_directory in sorted(self.entries(directory), key=lambda item: (len(item[0]), item[0]))
            if not is_directory and is_index_name(name)
        ]

    @property
    def stopped_in_order(self) -> bool:
        """False while a broker runs and after a kill (the file ``abort`` exists): queues may lag behind the log."""
        return not self.exists("abort")

    def source(self, file: DataFile) -> ByteSource:
        """Open a file. The caller closes the source."""
        if self.is_local:
            return LocalSource(file.path)
        return RemoteSource(self.fs, file.path, file.size)

    @contextmanager
    def opened(self, file: DataFile) -> Iterator[ByteSource]:
        """As ``source``, for a ``with`` block."""
        source = self.source(file)
        try:
            yield source
        finally:
            source.close()

    def units(self, files: Sequence[DataFile], begin: int, end: int) -> bytes:
        """The units of a queue in [begin, end), zeros if no file has them."""
        out = bytearray((end - begin) * UNIT_SIZE)
        first, last = begin * UNIT_SIZE, end * UNIT_SIZE
        for file in files:
            low, high = max(first, file.start), min(last, file.end)
            if low < high:
                with self.opened(file) as source:
                    data = source.read(low - file.start, high - file.start)
                    out[low - first : low - first + len(data)] = data
        return bytes(out)
