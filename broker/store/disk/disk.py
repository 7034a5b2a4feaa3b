"""The disk: one small interface for all file work of the store.

RealDisk (real_disk.py) implements it with thin calls of the operating system. Tests use a simulated disk, which knows
which bytes are durable and fails on request. Code of the store uses ``os`` and ``mmap`` only through this interface.

Every method except ``run`` is an ordinary call that may block in the kernel. Those that can block for long (reserve,
data_sync, sync_directory, delete, pread of cold data, space) are called through ``await disk.run(method, ...)``: in a
thread in production, inline in a simulation. Such a call only makes kernel calls and does no Python work of its own.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol, TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_UNRELIABLE: Final = ("btrfs", "zfs", "nfs", "fuse", "cifs", "smb", "9p")


class FileInfo(NamedTuple):
    """A directory entry: kind, length in bytes, time of the last change in ms since the epoch, permission bits.

    ``owner``: the number of the user (uid), 0 is root.
    """

    is_directory: bool
    size: int
    modified_ms: int
    permissions: int = 0o600
    owner: int = 0


class DiskSpace(NamedTuple):
    """Bytes of a file system without those reserved for root: all that an ordinary user gets, and the free ones.

    The used share, (total - free) / total, is the one that df and RocketMQ show (UtilAll, space used percent).
    """

    total: int
    free: int


class FileSystem(NamedTuple):
    """The file system of a path: mount point, type as in /proc/self/mountinfo ("ext4"), device or source."""

    mount_point: str
    kind: str
    source: str

    @property
    def keeps_reservations(self) -> bool:
        """False if posix_fallocate does not guarantee that a later store into the range finds its block."""
        return not self.kind.startswith(_UNRELIABLE)


class Mapping(Protocol):
    """The bytes of a file as writable memory: a store into it changes the file immediately.

    ``view`` covers the whole file, and readers get slices of it. ``buffer`` is the object behind it, an mmap.
    An assignment to a slice of it costs a third of the same assignment through the view. The length never changes.
    """

    view: memoryview
    buffer: Any

    def close(self) -> None:
        """Unmap. If views still exist, the last of them to be released unmaps it."""
        ...


class MappedPart(NamedTuple):
    """The bytes [begin, end) of a mapped file."""

    mapping: Mapping
    begin: int
    end: int


class Disk(Protocol):
    """All that the store needs of a file system. Errors are OSError with their errno; paths are absolute strings."""

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        """Call ``fn`` where it may block: a thread in production, inline in a simulation. Not cancellable midway."""
        ...

    def with_own_threads(self) -> "Disk":
        """The same file systems, whose ``run`` has threads of its own: calls that hang there delay none here."""
        ...

    def create(self, path: str, size: int, *, private: bool = False) -> int:
        """A new file of ``size`` bytes without blocks, open for reading and writing. FileExistsError if it exists.

        ``private``: only the owner may read and write it.
        """
        ...

    def open(self, path: str, *, writable: bool = True) -> int:
        """A descriptor of an existing file. FileNotFoundError if it does not exist."""
        ...

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        ...

    def size(self, fd: int) -> int:
        """Length of an open file in bytes."""
        ...

    def map(self, fd: int, size: int) -> Mapping:
        """The first ``size`` bytes of a file as shared, writable memory."""
        ...

    def reserve(self, fd: int, offset: int, view: memoryview, *, durable: bool = False, large: bool = False) -> None:
        """Prepare ``view`` (the mapped bytes from ``offset`` on) for safe and fast stores: allocate blocks, then pages.

        The range reads as zeros afterwards. ``durable``: the zeros are on the device too, so that later data syncs find
        written blocks. ``large``: use pages of 2 MiB if kernel and file system have them. A sync then write-protects
        one page instead of 512, which is most of its cost on a busy machine, but writes the whole page even if only a
        part was stored into. OSError ENOSPC if the file system is full; the mapping is then unchanged. A write error is
        also reported to the next data sync of ``fd``: this call never consumes it.
        """
        ...

    def evict(self, fd: int, begin: int, end: int, mapping: Mapping | None = None) -> None:
        """Free the memory of the bytes of [begin, end) that are on the device; the next read comes from there.

        ``mapping`` is the map of ``fd``, if there is one.
        """
        ...

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Allocate blocks for bytes that only ``pwrite`` will write. ENOSPC as for ``reserve``."""
        ...

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``; the file grows if needed."""
        ...

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end of the file. May wait for the device."""
        ...

    def pread_cached(self, fd: int, length: int, offset: int) -> bytes | None:
        """As ``pread`` if all bytes are in memory, else None: never waits for the device."""
        ...

    def read_ahead(self, fd: int, begin: int, end: int) -> int:
        """Bring [begin, end) of a file into memory, where it stays as long as the system has memory for it.

        Waits for the device. Returns the position that was reached: less than ``end`` if the file is shorter.
        """
        ...

    def in_memory(self, fd: int, part: MappedPart) -> int:
        """The position up to which a part of the map of ``fd`` is in memory from its start on. Never waits.

        ``part.begin`` if its first page is not in memory, ``part.end`` if all of it is.
        """
        ...

    def next_data(self, fd: int, offset: int) -> int:
        """First position from ``offset`` on that may hold anything but zeros; the file's size if there is none."""
        ...

    def truncate(self, fd: int, size: int) -> None:
        """Set the length of a file; an added part reads as zeros."""
        ...

    def data_sync(self, fd: int, part: MappedPart | None = None) -> None:
        """Return when the bytes of the file (mapped stores too) and its length are on the device (fdatasync).

        With ``part``, of the map of ``fd``, only its bytes and the metadata to find them (msync): space that was
        allocated ahead is not written for nothing, and its pages stay fast to store into.
        """
        ...

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory are on the device."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomically rename a file, replacing an existing ``target``."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file's name. Open descriptors and mappings stay valid."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents; no error if it exists."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def list(self, path: str) -> list[str]:
        """Sorted names in a directory; empty if the directory does not exist."""
        ...

    def lengths(self, path: str) -> dict[str, int]:
        """The files in a directory, without sub-directories, with their lengths; empty if it does not exist."""
        ...

    def stat(self, path: str) -> FileInfo | None:
        """The entry at ``path``; None if it does not exist."""
        ...

    def space(self, path: str) -> DiskSpace:
        """Size and free bytes of the file system that holds ``path``."""
        ...

    def file_system(self, path: str) -> FileSystem:
        """Mount point, type and source of the file system that holds ``path``."""
        ...

    def identity(self, path: str) -> tuple[int, int] | None:
        """Device and inode of the file at ``path``, without opening it; None if it does not exist."""
        ...

    def lock(self, fd: int) -> bool:
        """Lock byte 0 exclusively (POSIX). False if another process has the lock. Any close of the file releases it."""
        ...
