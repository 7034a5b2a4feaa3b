"""RealDisk: the store's disk on the operating system. disk.py describes each method."""

import contextlib
import copy
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar, TypeVarTuple

import trio

from trimq.broker.store.disk.disk import DiskSpace, FileInfo, FileSystem, MappedPart, Mapping

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_TOUCH_STEP: Final = 1 << 21
_ZEROS: Final = memoryview(bytes(1 << 18))

_MS_SYNC: Final = 4
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14 and later: fault the pages of a map in as stores would, without storing anything."""
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_CACHED_READ: Final = 32 * 1024
_READ_AHEAD: Final = 1 << 20


class _RealMapping:
    """A shared mapping of a whole file."""

    def __init__(self, fd: int, size: int) -> None:
        if sys.version_info >= (3, 13):  # one descriptor fewer for each mapped file
            self._map = mmap.mmap(fd, size, trackfd=False)
        else:
            self._map = mmap.mmap(fd, size)
        self.buffer = self._map
        self.view = memoryview(self._map)

    def close(self) -> None:
        self.view.release()
        with contextlib.suppress(BufferError):  # readers have views, which keep the map; the last one unmaps it
            self._map.close()


class RealDisk:
    """The operating system's file system."""

    def __init__(self, max_threads: int = 8) -> None:
        self._max_threads = max_threads
        self._limiter: trio.CapacityLimiter | None = None
        self._scratch: list[bytearray] = []
        self._zero = -1
        self._populates = True
        self._sees_pages: bool | None = None
        """Whether mincore gives true answers; None before the first check."""

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        if self._limiter is None:
            self._limiter = trio.CapacityLimiter(self._max_threads)
        return await trio.to_thread.run_sync(fn, *args, limiter=self._limiter)

    def with_own_threads(self) -> "RealDisk":
        other = copy.copy(self)
        other.__dict__.update(_limiter=None, _scratch=[])
        return other

    def create(self, path: str, size: int, *, private: bool = False) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o644)
        if size:
            os.ftruncate(fd, size)
        return fd

    def open(self, path: str, *, writable: bool = True) -> int:
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def map(self, fd: int, size: int) -> Mapping:
        return _RealMapping(fd, size)

    def reserve(self, fd: int, offset: int, view: memoryview, *, durable: bool = False, large: bool = False) -> None:
        length = len(view)
        if not length:
            return
        # Before the allocation, which may turn a hole into data.
        blank = self.next_data(fd, offset) >= offset + length
        os.posix_fallocate(fd, offset, length)
        if durable:
            self._write_zeros(fd, offset, offset + length, large=large)
            return
        if not blank or not self._populates:
            # Writing zeros brings in many pages at a time; a fault would allocate and clear each page separately.
            self._clear(fd, offset, offset + length)
        self._advise(view, mmap.MADV_HUGEPAGE if large else mmap.MADV_NOHUGEPAGE)
        if large:
            # A fault would bring in several large pages behind its own, and occupy the processor until all are cleared.
            self._advise(view, mmap.MADV_RANDOM)
        for at in range(0, length, _TOUCH_STEP):
            part = view[at : at + _TOUCH_STEP]
            try:
                self._touch(part)
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
                # A fault hides its reason. A write reports it, for example that there is no space.
                self._clear(fd, offset + at, offset + at + len(part))
                self._touch(part)

    @staticmethod
    def _clear(fd: int, offset: int, end: int) -> None:
        while offset < end:
            offset += os.pwrite(fd, _ZEROS[: end - offset], offset)

    def _touch(self, view: memoryview) -> None:
        """Fault in pages that hold zeros, so that no store waits for them; without the interpreter's lock."""
        if self._populates:
            number = self._advise(view, _MADV_POPULATE_WRITE)
            if not number:
                return
            if number != errno.EINVAL:
                raise OSError(number, os.strerror(number))
            self._populates = False
        if self._zero < 0:
            self._zero = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        at = 0
        while at < len(view):
            at += os.readv(self._zero, [view[at:]])

    @staticmethod
    def _advise(view: memoryview, advice: int) -> int:
        """Call madvise for the pages of ``view``, without the interpreter's lock. Returns its errno, or 0."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        ahead = address % mmap.PAGESIZE
        return ctypes.get_errno() if _libc.madvise(address - ahead, ahead + len(view), advice) else 0

    def evict(self, fd: int, begin: int, end: int, mapping: Mapping | None = None) -> None:
        if mapping is not None:
            with mapping.view[begin:end] as view:
                self._advise(view, mmap.MADV_DONTNEED)  # first: the kernel does not evict pages that are mapped
        os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        if length:
            os.posix_fallocate(fd, offset, length)

    @staticmethod
    def _write_zeros(fd: int, offset: int, end: int, *, large: bool) -> None:
        """Write zeros to the device in small steps: a data sync that comes in between waits for few of them only.

        Uses an open file of its own: the kernel reports a write-back error once to each open file, and the error meant
        for the next data sync of ``fd`` must not be consumed here.

        A file system may store the bytes of one call as one large page, all of which would be written to the device
        again for each synced record. Bytes read without readahead are in small pages.
        """
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fadvise(own, 0, 0, os.POSIX_FADV_RANDOM)
            scratch = None if large else bytearray(min(len(_ZEROS), end - offset))
            while offset < end:
                if scratch is not None:
                    os.preadv(own, [scratch], offset)
                offset += os.pwritev(own, [_ZEROS[: end - offset]], offset, os.RWF_DSYNC)
        finally:
            os.close(own)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        done = os.pwrite(fd, data, offset)
        if done < len(data):
            rest = memoryview(data)
            while done < len(rest):
                done += os.pwrite(fd, rest[done:], offset + done)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        data = os.pread(fd, length, offset)
        while len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def pread_cached(self, fd: int, length: int, offset: int) -> bytes | None:
        data = bytearray(length)
        try:
            got = os.preadv(fd, [data], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS):
                return None
            raise
        return bytes(data) if got == length else None

    def read_ahead(self, fd: int, begin: int, end: int) -> int:
        """See Disk. Reads into a buffer that is not used: this waits, and it reports errors.

        posix_fadvise(WILLNEED) with madvise(MADV_POPULATE_READ) is two to three times as slow: it uses small pages.
        """
        try:
            buffer = self._scratch.pop()
        except IndexError:  # one buffer for each thread that reads ahead at the same time
            buffer = bytearray(_READ_AHEAD)
        try:
            with memoryview(buffer) as view:
                while begin < end:
                    got = os.preadv(fd, [view[: end - begin]], begin)
                    if not got:
                        break
                    begin += got
        finally:
            self._scratch.append(buffer)
        return begin

    def in_memory(self, fd: int, part: MappedPart) -> int:
        """See Disk. Asking the kernel's tables costs less than a read of the bytes, which are not needed here."""
        if self._sees_pages is None:
            self._sees_pages = _mincore_is_true()
        begin = part.begin - part.begin % mmap.PAGESIZE
        pages = _pages_of(part.mapping.buffer, begin, part.end) if self._sees_pages else None
        if pages is not None:
            missing = pages.find(0)
            return part.end if missing < 0 else max(part.begin, begin + missing * mmap.PAGESIZE)
        at = part.begin
        while at < part.end:
            count = min(_CACHED_READ, part.end - at)
            if self.pread_cached(fd, count, at) is None:
                break
            at += count
        return at

    def next_data(self, fd: int, offset: int) -> int:
        """See Disk."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return os.fstat(fd).st_size
            if error.errno == errno.EINVAL:  # a file system without SEEK_DATA: anything may be data
                return offset
            raise

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def data_sync(self, fd: int, part: MappedPart | None = None) -> None:
        if part is None:
            os.fdatasync(fd)
            return
        # mmap.flush would hold the interpreter's lock until the device has answered; a ctypes call releases it
        begin = part.begin - part.begin % mmap.PAGESIZE
        address = ctypes.addressof(ctypes.c_char.from_buffer(part.mapping.buffer))
        if _libc.msync(address + begin, part.end - begin, _MS_SYNC):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def delete(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        parent = os.path.dirname(path)
        if parent and not os.path.isdir(parent):
            self.make_directory(parent)
        try:
            # Whatever the umask: who may write to a directory may replace the files in it.
            os.mkdir(path, 0o755)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def lengths(self, path: str) -> dict[str, int]:
        try:
            with os.scandir(path) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if not entry.is_dir()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def stat(self, path: str) -> FileInfo | None:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        mode, modified_ms = found.st_mode, found.st_mtime_ns // 1_000_000
        return FileInfo(stat.S_ISDIR(mode), found.st_size, modified_ms, mode & 0o777, found.st_uid)

    def space(self, path: str) -> DiskSpace:
        found = os.statvfs(path)
        used = found.f_blocks - found.f_bfree
        return DiskSpace((used + found.f_bavail) * found.f_frsize, found.f_bavail * found.f_frsize)

    def file_system(self, path: str) -> FileSystem:
        return _find_mount(os.path.realpath(path))

    def identity(self, path: str) -> tuple[int, int] | None:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def lock(self, fd: int) -> bool:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True


def _pages_of(buffer: Any, begin: int, end: int) -> bytes | None:
    """A byte for each page of [begin, end) of a map, with ``begin`` at a page boundary: 0 if it is not in memory.

    None if the kernel does not know.
    """
    found = ctypes.create_string_buffer(-(-(end - begin) // mmap.PAGESIZE))
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return None if _libc.mincore(address + begin, end - begin, found) else found.raw


def _mincore_is_true() -> bool:
    """False if mincore reports an untouched page as present, as the kernel of a sandbox does."""
    try:
        fd = os.memfd_create("pages")
    except OSError:
        return False
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as probe:
            untouched = _pages_of(probe, 0, mmap.PAGESIZE)
            probe[0] = 1
            return untouched == b"\0" and _pages_of(probe, 0, mmap.PAGESIZE) == b"\1"
    finally:
        os.close(fd)


def _find_mount(path: str) -> FileSystem:
    """The mount with the longest mount point above ``path``; among equal ones the last, which covers the others."""
    best = FileSystem("/", "unknown", "unknown")
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields, _, rest = line.partition(" - ")
                point = fields.split()[4].encode("latin-1", "replace").decode("unicode_escape")
                kind, source = rest.split()[:2]
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best.mount_point):
                    best = FileSystem(point, kind, source)
    except OSError:  # no /proc: not a reason to refuse the start
        pass
    return best
