"""The disk: one small interface for all file work of the store.

RealDisk (real_disk.py) is thin. A simulated disk (tests) stands in for it: it keeps apart what is durable and what is
not, and fails where it is told to. Store code calls nothing of ``os`` or ``mmap`` but through here.

Every method but ``run`` is an ordinary call that may block in the kernel. Those that can block for long (reserve,
data_sync, sync_directory, delete, pread of cold data, space) are called through ``await disk.run(method, ...)``: a
thread in production, inline in a simulation. Such a call makes kernel calls only and does no Python work of its own.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol, TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_UNRELIABLE: Final = ("btrfs", "zfs", "nfs", "fuse", "cifs", "smb", "9p")


class FileInfo(NamedTuple):
    """A directory entry: kind, length in bytes, time of the last change in ms since the epoch."""

    is_directory: bool
    size: int
    modified_ms: int


class DiskSpace(NamedTuple):
    """Bytes of a file system without what it keeps for root: all that an ordinary user gets, and what is left of that.

    Their difference divided by the first is what df shows as used, and RocketMQ too (UtilAll, space used percent).
    """

    total: int
    free: int


class FileSystem(NamedTuple):
    """Where a path lies: mount point, type as in /proc/self/mountinfo ("ext4"), device or source."""

    mount_point: str
    kind: str
    source: str

    @property
    def keeps_reservations(self) -> bool:
        """False where posix_fallocate does not promise that a later store into the range finds its block."""
        return not self.kind.startswith(_UNRELIABLE)


class Mapping(Protocol):
    """A file's bytes as writable memory: a store into it changes the file at once.

    ``view`` covers the whole file and is what readers get slices of. ``buffer`` is the object behind it (an mmap): to
    assign to a slice of it costs a third of what it costs through the view. Its length never changes.
    """

    view: memoryview
    buffer: Any

    def close(self) -> None:
        """Give the memory back. Where somebody still has a view, the last of them to go does it."""
        ...


class MappedPart(NamedTuple):
    """The bytes [begin, end) of a mapped file."""

    mapping: Mapping
    begin: int
    end: int


class Disk(Protocol):
    """All that the store asks of a file system. Errors are OSError with their errno; paths are absolute text."""

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        """Call ``fn`` where it may block: a thread in production, inline in a simulation. Not cancellable half-way."""
        ...

    def create(self, path: str, size: int) -> int:
        """A new file of ``size`` bytes without blocks, open to read and write; FileExistsError if there is one."""
        ...

    def open(self, path: str, *, writable: bool = True) -> int:
        """A descriptor of an existing file; FileNotFoundError if there is none."""
        ...

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        ...

    def size(self, fd: int) -> int:
        """Length of an open file."""
        ...

    def map(self, fd: int, size: int) -> Mapping:
        """The first ``size`` bytes of a file as shared, writable memory."""
        ...

    def reserve(self, fd: int, offset: int, view: memoryview, *, durable: bool = False, large: bool = False) -> None:
        """Make ``view`` (the mapped bytes from ``offset`` on) safe and quick to store into: blocks, then pages.

        What was there is zero afterwards; ``durable``: on the device too, so that later data syncs find written blocks.
        ``large``: in pages of 2 MiB where kernel and file system have them. A sync then protects one page instead of
        512, which on a busy machine is most of what it costs, but writes all of a page that was stored into.
        OSError ENOSPC where the file system is full; the mapping is untouched then. An error is reported to the next
        data sync of ``fd`` too: this call never takes one away from it.
        """
        ...

    def let_go(self, fd: int, part: MappedPart) -> None:
        """Give the memory of bytes that are on the device back to the system; the next read comes from there."""
        ...

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Blocks for bytes that only ``pwrite`` will write; ENOSPC as for ``reserve``."""
        ...

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``; the file grows where needed."""
        ...

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """Up to ``length`` bytes, fewer only at the end of the file. May wait for the device."""
        ...

    def pread_cached(self, fd: int, length: int, offset: int) -> bytes | None:
        """The same if all of it is in memory, else None: never waits for the device."""
        ...

    def read_ahead(self, fd: int, begin: int, end: int) -> int:
        """Bring [begin, end) of a file into memory, where it stays for as long as the system has room for it.

        Waits for the device. Gives back up to where it has done so: less than ``end`` where the file is shorter.
        """
        ...

    def in_memory(self, fd: int, part: MappedPart) -> int:
        """Up to where a part of the map of ``fd`` is in memory from its beginning on; never waits for the device.

        ``part.begin`` where its first page is not, ``part.end`` where all of it is.
        """
        ...

    def next_data(self, fd: int, offset: int) -> int:
        """First position from ``offset`` on that may hold something else than zeros; the file's size for none."""
        ...

    def truncate(self, fd: int, size: int) -> None:
        """Set a file's length; a part that is added reads as zeros."""
        ...

    def data_sync(self, fd: int, part: MappedPart | None = None) -> None:
        """Return when the file's bytes (mapped stores too) and its length are on the device (fdatasync).

        With ``part``, of the map of ``fd``, only its bytes and what it takes to find them again (msync): what was made
        ready ahead is not written for nothing, and its pages stay quick to store into.
        """
        ...

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory are on the device."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomically give a file another name, in place of whatever has it."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file's name. Open descriptors and mappings stay valid."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory and its missing parents; no error if it is there."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def list(self, path: str) -> list[str]:
        """Sorted names in a directory; empty if the directory does not exist."""
        ...

    def lengths(self, path: str) -> dict[str, int]:
        """The files in a directory, without its directories, with their lengths; empty if there is no directory."""
        ...

    def stat(self, path: str) -> FileInfo | None:
        """What stands at ``path``; None if nothing does."""
        ...

    def space(self, path: str) -> DiskSpace:
        """Size and free bytes of the file system that holds ``path``."""
        ...

    def file_system(self, path: str) -> FileSystem:
        """Mount point, type and source of the file system that holds ``path``."""
        ...

    def identity(self, path: str) -> tuple[int, int] | None:
        """Device and inode of the file at ``path``, without opening it; None if there is none."""
        ...

    def lock(self, fd: int) -> bool:
        """Take the exclusive POSIX lock on byte 0; False if another process has it. Any close of the file ends it."""
        ...
