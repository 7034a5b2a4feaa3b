"""A disk in memory that tracks which bytes are durable: it loses, tears and fails writes where a test requests it.

A file's ``cache`` holds the bytes that the system shows (and that a mapping stores into); ``durable`` those on the
device. A data sync copies pages from one to the other. Names are treated likewise: a change of names is pending until
its directory is synced. ``power_cut`` returns the disk as a machine finds it after the power came back.
"""

import copy
import errno
import os
import posixpath
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random
from typing import Final, TypeVar, TypeVarTuple

import trio

from trimq.broker.store.disk.disk import DiskSpace, FileInfo, FileSystem, MappedPart, Mapping

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

PAGE: Final = 4096
SECTOR: Final = 512


_ZEROS: Final = bytes(PAGE)


def _is_zero(page: bytes) -> bool:
    return _ZEROS.startswith(page)


class PowerCut(BaseException):
    """The power failed in the middle of a call. Nothing that the program does from here on reaches the disk."""


class MappedStoreError(AssertionError):
    """A store into a page without a block: SIGBUS on a full disk."""


class Loss(Enum):
    """Which of the unsynced pages and names a power cut loses."""

    ALL = "all"
    NOTHING = "nothing"
    PAGES = "pages"
    SECTORS = "sectors"


@dataclass(eq=False)
class _Inode:
    number: int
    cache: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    blocks: set[int] = field(default_factory=set)
    dropped: dict[int, bytes] = field(default_factory=dict)
    modified_ms: int = 0
    errors: int = 0

    def page(self, number: int) -> bytes:
        return bytes(self.cache[number * PAGE : (number + 1) * PAGE])

    def dirty_pages(self) -> list[int]:
        cache, durable = self.cache, self.durable
        if cache == durable:
            return []
        return [at // PAGE for at in range(0, len(cache), PAGE) if cache[at : at + PAGE] != durable[at : at + PAGE]]

    def persist(self, number: int) -> None:
        page = self.page(number)
        end = number * PAGE + len(page)
        if len(self.durable) < end:
            self.durable.extend(bytes(end - len(self.durable)))
        self.durable[number * PAGE : end] = page


@dataclass(frozen=True)
class _NameChange:
    """A change of names whose directories have not been synced: names removed, names added."""

    gone: tuple[str, ...]
    come: tuple[tuple[str, "_Inode | None"], ...]

    def directories(self) -> set[str]:
        return {posixpath.dirname(path) for path in (*self.gone, *(path for path, _ in self.come))}

    def apply(self, names: "dict[str, _Inode | None]") -> None:
        for path in self.gone:
            names.pop(path, None)
        names.update(self.come)


class _SimMapping:
    def __init__(self, inode: _Inode, size: int) -> None:
        self.buffer = inode.cache
        self.view = memoryview(inode.cache)[:size]

    def close(self) -> None:
        self.view.release()  # slices still in use stay valid, as with a mapping


class SimDisk:
    """Implements trimq.broker.store.disk.disk.Disk. ``names`` maps paths to inodes; None is a directory.

    ``fail(name, number, nth)`` makes the nth call of a method from now on fail. ``cut_at`` cuts the power in the nth
    call of any method.
    """

    def __init__(self, *, capacity: int = 1 << 40, seed: int = 0, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.random = Random(seed)
        self.capacity = capacity
        self.calls = 0
        self.history: list[str] = []
        self.cut_at: int | None = None
        self.loss = Loss.ALL
        self.write_back = 0.0
        """Probability that a call also writes some dirty page to the device."""
        self.cold = False
        """Reads that must not wait find only the pages read ahead in memory."""
        self._read_ahead: set[tuple[int, int]] = set()
        self.after_cut: SimDisk | None = None
        self._now_ms = now_ms
        self._names: dict[str, _Inode | None] = {"/": None}
        self._durable_names: dict[str, _Inode | None] = {"/": None}
        self._pending: list[_NameChange] = []
        self._open: dict[int, _Inode] = {}
        self._errors_seen: dict[int, int] = {}
        self._next_fd = 100
        self._next_inode = 1
        self._locked: dict[int, int] = {}
        self._failures: list[tuple[str, int, int]] = []

    # -- controls for tests

    def fail(self, method: str, number: int, nth: int = 1) -> None:
        """Make the nth call of ``method`` ("*" for any) raise OSError(number)."""
        self._failures.append((method, number, nth))

    def pending_failures(self) -> int:
        """The number of requested failures that have not occurred yet."""
        return len(self._failures)

    def clear_failures(self) -> None:
        """Remove all requested failures."""
        self._failures.clear()

    def power_cut(self, loss: Loss | None = None) -> "SimDisk":
        """The disk as it is found after a power failure now. This disk is dead from here on."""
        if self.after_cut is None:
            self.after_cut = self._survivor(loss or self.loss)
        return self.after_cut

    def copy_after_cut(self, loss: Loss) -> "SimDisk":
        """The disk as it would be found after a power failure now. This disk stays usable."""
        return self._survivor(loss)

    def copy(self) -> "SimDisk":
        """Another disk with the same content, all of it durable."""
        return self._survivor(Loss.NOTHING)

    def after_kill(self) -> "SimDisk":
        """The disk as another process finds it after this one was killed: the unsynced pages are still not durable."""
        copies: dict[_Inode, _Inode] = {}

        def copied(inode: _Inode | None) -> _Inode | None:
            if inode is not None and inode not in copies:
                copies[inode] = replace(
                    inode,
                    cache=bytearray(inode.cache),
                    durable=bytearray(inode.durable),
                    blocks=set(inode.blocks),
                    dropped=dict(inode.dropped),
                )
            return copies[inode] if inode is not None else None

        # Not copy.deepcopy: it takes many times as long.
        disk = copy.copy(self)
        disk.random = copy.copy(self.random)
        disk.history = list(self.history)
        disk._read_ahead = set(self._read_ahead)
        disk._names = {path: copied(inode) for path, inode in self._names.items()}
        disk._durable_names = {path: copied(inode) for path, inode in self._durable_names.items()}
        disk._pending = [
            replace(change, come=tuple((path, copied(inode)) for path, inode in change.come))
            for change in self._pending
        ]
        disk._failures = list(self._failures)
        disk._open, disk._errors_seen, disk._locked = {}, {}, {}
        return disk

    def flip(self, path: str, position: int, bit: int = 0) -> None:
        """Flip one bit, on the device and in memory."""
        inode = self._inode(path)
        for data in (inode.cache, inode.durable):
            data[position] ^= 1 << bit

    def content(self, path: str) -> bytes:
        """The bytes of a file as the system shows them."""
        return bytes(self._inode(path).cache)

    def durable_content(self, path: str) -> bytes:
        """The bytes of a file on the device."""
        return bytes(self._inode(path).durable)

    def used(self) -> int:
        """Allocated bytes of files that have a name or are open."""
        alive = {inode.number: inode for inode in (*self._names.values(), *self._open.values()) if inode is not None}
        return PAGE * sum(len(inode.blocks) for inode in alive.values())

    def open_files(self) -> int:
        """The number of descriptors that are not closed."""
        return len(self._open)

    def check_mapped_stores(self) -> None:
        """Raise MappedStoreError where something was stored into a page that has no block."""
        for path, inode in self._names.items():
            if inode is not None:
                self._check_inode(inode, path)

    @staticmethod
    def _check_inode(inode: _Inode, path: str) -> None:
        for number in range((len(inode.cache) + PAGE - 1) // PAGE):
            if number not in inode.blocks and not _is_zero(inode.page(number)):
                raise MappedStoreError(f"{path}: page {number} was stored into before it was reserved")

    # -- power cuts and faults

    def _call(self, method: str, path: object = "") -> None:
        if self.after_cut is not None:
            raise PowerCut
        self.calls += 1
        self.history.append(f"{method} {path}")
        if self.write_back and self.random.random() < self.write_back:
            self._write_something_back()
        if self.calls == self.cut_at:
            self.power_cut()
            raise PowerCut
        for at, (name, number, nth) in enumerate(self._failures):
            if name in (method, "*"):
                if nth > 1:
                    self._failures[at] = (name, number, nth - 1)
                    continue
                del self._failures[at]
                raise OSError(number, os.strerror(number), str(path))

    def _write_something_back(self) -> None:
        inodes = [inode for inode in self._names.values() if inode is not None]
        if inodes:
            inode = self.random.choice(inodes)
            dirty = inode.dirty_pages()
            if dirty:
                self._grow_durable(inode)  # a length is written atomically: file systems store it in the inode
                inode.persist(self.random.choice(dirty))

    def _survivor(self, loss: Loss) -> "SimDisk":
        disk = SimDisk(capacity=self.capacity, seed=self.random.getrandbits(32), now_ms=self._now_ms)
        names = dict(self._durable_names)
        for change in self._pending:
            if loss is Loss.NOTHING or (loss is not Loss.ALL and self.random.random() < 0.5):
                change.apply(names)
        copies: dict[int, _Inode] = {}
        for path, inode in sorted(names.items()):
            if path != "/" and posixpath.dirname(path) not in disk._names:
                continue  # its directory was lost
            if inode is None:
                disk._names[path] = None
                continue
            copy = copies.get(inode.number)
            if copy is None:
                data = self._surviving_bytes(inode, loss)
                pages = set(range((len(data) + PAGE - 1) // PAGE))
                copy = _Inode(inode.number, bytearray(data), bytearray(data), inode.blocks & pages)
                copy.blocks |= {number for number in pages if not _is_zero(copy.page(number))}
                copy.modified_ms = inode.modified_ms
                copies[inode.number] = copy
            disk._names[path] = copy
        disk._durable_names = dict(disk._names)
        disk._next_inode = self._next_inode
        return disk

    def _surviving_bytes(self, inode: _Inode, loss: Loss) -> bytes:
        if loss is Loss.ALL:
            return bytes(inode.durable)
        if loss is Loss.NOTHING:
            return bytes(inode.cache)
        size = len(inode.cache) if self.random.random() < 0.5 else len(inode.durable)
        data = bytearray(inode.durable[:size].ljust(size, b"\0"))
        step = PAGE if loss is Loss.PAGES else SECTOR
        for page in inode.dirty_pages():
            for at in range(page * PAGE, min((page + 1) * PAGE, size), step):
                if self.random.random() < 0.5:
                    piece = inode.cache[at : min(at + step, size)]
                    data[at : at + len(piece)] = piece
        return bytes(data)

    # -- names

    def _inode(self, path: str) -> _Inode:
        inode = self._names.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return inode

    def _parent_must_exist(self, path: str) -> None:
        parent = posixpath.dirname(path)
        if parent not in self._names or self._names[parent] is not None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _change(self, gone: tuple[str, ...], come: tuple[tuple[str, _Inode | None], ...]) -> None:
        change = _NameChange(gone, come)
        change.apply(self._names)
        self._pending.append(change)

    def _open_inode(self, inode: _Inode) -> int:
        fd = self._next_fd
        self._next_fd += 1
        self._open[fd] = inode
        self._errors_seen[fd] = inode.errors
        return fd

    def create(self, path: str, size: int, *, private: bool = False) -> int:
        self._call("create", path)
        self._parent_must_exist(path)
        if path in self._names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        inode = _Inode(self._next_inode, bytearray(size), modified_ms=self._now_ms())
        self._next_inode += 1
        self._change((), ((path, inode),))
        return self._open_inode(inode)

    def open(self, path: str, *, writable: bool = True) -> int:
        self._call("open", path)
        return self._open_inode(self._inode(path))

    def close(self, fd: int) -> None:
        inode = self._open.pop(fd)
        self._locked.pop(inode.number, None)

    def rename(self, source: str, target: str) -> None:
        self._call("rename", f"{source} {target}")
        inode = self._inode(source)
        self._parent_must_exist(target)
        self._change((source,), ((target, inode),))

    def delete(self, path: str) -> None:
        self._call("delete", path)
        self._inode(path)
        self._change((path,), ())

    def make_directory(self, path: str) -> None:
        self._call("make_directory", path)
        missing = []
        while path not in self._names:
            missing.append(path)
            path = posixpath.dirname(path)
        for name in reversed(missing):
            self._change((), ((name, None),))

    def remove_directory(self, path: str) -> None:
        self._call("remove_directory", path)
        if self.list(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._change((path,), ())

    def sync_directory(self, path: str) -> None:
        self._call("sync_directory", path)
        kept = []
        for change in self._pending:
            if path in change.directories():
                change.apply(self._durable_names)
            else:
                kept.append(change)
        self._pending = kept

    def list(self, path: str) -> list[str]:
        prefix = path.rstrip("/") + "/"
        at = len(prefix)
        return sorted(
            name[at:] for name in self._names if name.startswith(prefix) and name.find("/", at) < 0 and len(name) > at
        )

    def lengths(self, path: str) -> dict[str, int]:
        found = {name: self._names[f"{path.rstrip('/')}/{name}"] for name in self.list(path)}
        return {name: len(inode.cache) for name, inode in found.items() if inode is not None}

    def stat(self, path: str) -> FileInfo | None:
        if path not in self._names:
            return None
        inode = self._names[path]
        return FileInfo(True, 0, 0) if inode is None else FileInfo(False, len(inode.cache), inode.modified_ms)

    # -- bytes

    def size(self, fd: int) -> int:
        return len(self._open[fd].cache)

    def map(self, fd: int, size: int) -> Mapping:
        self._call("map", fd)
        return _SimMapping(self._open[fd], size)

    def _allocate(self, inode: _Inode, begin: int, end: int) -> None:
        wanted = set(range(begin // PAGE, (end + PAGE - 1) // PAGE)) - inode.blocks
        if not wanted:
            return
        if self.used() + PAGE * len(wanted) > self.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inode.blocks |= wanted

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._call("allocate", f"{offset}+{length}")
        self._allocate(self._open[fd], offset, offset + length)

    def evict(self, fd: int, begin: int, end: int, mapping: Mapping | None = None) -> None:
        self._call("evict", f"{begin}+{end - begin}")
        self._read_ahead.difference_update(self._pages(fd, begin, end))

    def _pages(self, fd: int, begin: int, end: int) -> set[tuple[int, int]]:
        return {(self._open[fd].number, page) for page in range(begin // PAGE, (end + PAGE - 1) // PAGE)}

    def forget_read_ahead(self) -> None:
        """The system evicts the pages that were read ahead."""
        self._read_ahead.clear()

    def read_ahead(self, fd: int, begin: int, end: int) -> int:
        self._call("read_ahead", f"{begin}+{end - begin}")
        end = min(end, len(self._open[fd].cache))
        self._read_ahead.update(self._pages(fd, begin, end))
        return end

    def reserve(self, fd: int, offset: int, view: memoryview, *, durable: bool = False, large: bool = False) -> None:
        inode = self._open[fd]
        pages = range(offset // PAGE, (offset + len(view) + PAGE - 1) // PAGE)
        self._call("reserve", f"{offset}+{len(view)}")
        self._allocate(inode, offset, offset + len(view))
        view[:] = bytes(len(view))
        if durable:
            try:
                self._call("write_zeros", inode.number)
            except OSError:
                self._drop(inode, pages)
                raise
            self._grow_durable(inode)
            for number in pages:
                inode.persist(number)

    @staticmethod
    def _drop(inode: _Inode, pages: Iterable[int]) -> None:
        """The kernel marks pages that it could not write as clean, and reports the error once to each open file."""
        inode.dropped.update({number: inode.page(number) for number in pages})
        inode.errors += 1

    @staticmethod
    def _grow_durable(inode: _Inode) -> None:
        del inode.durable[len(inode.cache) :]
        inode.durable.extend(bytes(len(inode.cache) - len(inode.durable)))

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        inode = self._open[fd]
        self._call("pwrite", f"{offset}+{len(data)}")
        self._allocate(inode, offset, offset + len(data))
        end = offset + len(data)
        if len(inode.cache) < end:
            inode.cache.extend(bytes(end - len(inode.cache)))
        inode.cache[offset:end] = data
        for number in range(offset // PAGE, (end + PAGE - 1) // PAGE):
            inode.dropped.pop(number, None)  # dirty again
        inode.modified_ms = self._now_ms()

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self._call("pread", f"{offset}+{length}")
        return bytes(self._open[fd].cache[offset : offset + length])

    def pread_cached(self, fd: int, length: int, offset: int) -> bytes | None:
        self._call("pread_cached", f"{offset}+{length}")
        data = bytes(self._open[fd].cache[offset : offset + length])
        cold = self.cold and not self._read_ahead.issuperset(self._pages(fd, offset, offset + length))
        return None if cold or len(data) < length else data

    def in_memory(self, fd: int, part: MappedPart) -> int:
        self._call("in_memory", f"{part.begin}+{part.end - part.begin}")
        assert part.mapping.buffer is self._open[fd].cache
        if not self.cold:
            return part.end
        for number, page in sorted(self._pages(fd, part.begin, part.end)):
            if (number, page) not in self._read_ahead:
                return max(part.begin, page * PAGE)
        return part.end

    def next_data(self, fd: int, offset: int) -> int:
        inode = self._open[fd]
        for number in range(offset // PAGE, (len(inode.cache) + PAGE - 1) // PAGE):
            if number in inode.blocks:
                return max(offset, number * PAGE)
        return len(inode.cache)

    def truncate(self, fd: int, size: int) -> None:
        self._call("truncate", size)
        inode = self._open[fd]
        if size < len(inode.cache):
            del inode.cache[size:]
            inode.blocks = {number for number in inode.blocks if number * PAGE < size}
        else:
            inode.cache.extend(bytes(size - len(inode.cache)))

    def data_sync(self, fd: int, part: MappedPart | None = None) -> None:
        inode = self._open[fd]
        self._check_inode(inode, f"inode {inode.number}")
        dirty = inode.dirty_pages()
        if part is not None:
            assert part.mapping.buffer is inode.cache
            pages = range(part.begin // PAGE, (part.end + PAGE - 1) // PAGE)
            dirty = [number for number in dirty if number in pages]
        try:
            self._call("data_sync", inode.number)
        except OSError:
            self._drop(inode, dirty)
            self._errors_seen[fd] = inode.errors
            raise
        self._grow_durable(inode)
        for number in dirty:
            if inode.dropped.get(number) != inode.page(number):
                inode.dropped.pop(number, None)
                inode.persist(number)
        if self._errors_seen[fd] < inode.errors:
            self._errors_seen[fd] = inode.errors
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    # -- the rest

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        # As a thread: a task that is cancelled already does not begin, and one that began is not cancelled.
        await trio.lowlevel.checkpoint_if_cancelled()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return fn(*args)

    def with_own_threads(self) -> "SimDisk":
        return self

    def space(self, path: str) -> DiskSpace:
        self._call("space", path)
        return DiskSpace(self.capacity, self.capacity - self.used())

    def file_system(self, path: str) -> FileSystem:
        return FileSystem("/", "sim", "memory")

    def identity(self, path: str) -> tuple[int, int] | None:
        inode = self._names.get(path)
        return None if inode is None else (id(self), inode.number)

    def lock(self, fd: int) -> bool:
        self._call("lock", fd)
        return self._locked.setdefault(self._open[fd].number, fd) == fd
