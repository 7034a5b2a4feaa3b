"""Memory that records are written to before they are written to their file (transientStorePoolEnable).

::

    append -> WriteBuffer -> CommitRealTimeService: write(2) -> file -> FlushRealTimeService: data sync -> device
              private, locked                        readable from here on

So an append never waits for the page cache. Records that are not committed are in no file: a crash of the process loses
them, and no consumer has read them. Memory is allocated step by step as the log grows and given back after the commit,
so that a pool of five buffers of 1 GiB takes megabytes unless the disk falls behind.
Source: RocketMQ's TransientStorePool, and DefaultMappedFile with a write buffer.
"""

import ctypes
import mmap
import os
import resource
from collections.abc import Callable
from typing import Final

import structlog

from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.mapped_file import MappedFile

_log = structlog.get_logger(__name__)

_STEP: Final = 1 << 20

Lock = Callable[[mmap.mmap, int, int], int]
"""Locks (memory, begin, end) in RAM; returns 0, or the errno of a refusal."""


def lock_memory(memory: mmap.mmap, begin: int, end: int) -> int:
    """Call mlock(2): the pages are allocated now and stay. Blocks. Bounded by RLIMIT_MEMLOCK."""
    libc = ctypes.CDLL(None, use_errno=True)
    anchor = ctypes.c_char.from_buffer(memory, begin)
    if libc.mlock(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(end - begin)):
        return ctypes.get_errno()
    return 0


def _unlock(memory: mmap.mmap, begin: int, end: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    anchor = ctypes.c_char.from_buffer(memory, begin)
    libc.munlock(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(end - begin))


class WriteBuffer:
    """Private memory as long as a file. ``make_ready`` allocates its pages, ``give_back`` frees them."""

    __slots__ = ("_given_back", "_lock", "locked", "memory")

    def __init__(self, size: int, lock: Lock = lock_memory) -> None:
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.locked = 0
        """The errno of the last refusal to lock; 0 if everything is locked."""
        self._lock = lock
        self._given_back = 0

    def make_ready(self, begin: int, end: int) -> None:
        """Allocate the pages of [begin, end), locked if the limit allows it. Blocks."""
        if begin == end:
            return
        self.locked = self._lock(self.memory, begin, end)
        if self.locked:
            self._touch(begin, end)

    def _touch(self, begin: int, end: int) -> None:
        """Allocate pages by a read into them, which releases the interpreter's lock, as in RealDisk.reserve."""
        zero = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with memoryview(self.memory) as view:
                while begin < end:
                    with view[begin : min(begin + _STEP, end)] as piece:
                        begin += os.readv(zero, [piece])
        finally:
            os.close(zero)

    def give_back(self, end: int) -> None:
        """Free the whole pages below ``end``: their records are in the file."""
        end -= end % mmap.PAGESIZE
        begin = self._given_back
        if end > begin:
            _unlock(self.memory, begin, end)
            self.memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            self._given_back = end

    def close(self) -> None:
        """Free all of the memory."""
        self.memory.close()


class TransientStorePool:
    """A bounded number of write buffers; each is created when it is borrowed. Belongs to the event loop."""

    def __init__(self, size: int, file_size: int, lock: Lock = lock_memory) -> None:
        self.size = size
        self.available = size
        self._file_size = file_size
        self._lock = lock
        self.on_returned: Callable[[], None] = lambda: None
        """Called when a buffer has become free."""

    def borrow(self) -> WriteBuffer | None:
        """A new buffer; None if all are in use. Raises OSError if the system has no memory."""
        if not self.available:
            return None
        buffer = WriteBuffer(self._file_size, self._lock)
        self.available -= 1
        return buffer

    def give_back(self, buffer: WriteBuffer) -> None:
        """Return a buffer that is no longer needed."""
        buffer.close()
        self.available += 1
        self.on_returned()


class PooledMappedFile(MappedFile):
    """A file whose records are written to a buffer first. Readers see only committed records."""

    __slots__ = ("_write_buffer", "committed", "is_reserving")

    committed: int
    """Records below this position are in the file."""
    is_reserving: bool
    """A thread is preparing a part of the buffer, so the buffer cannot be returned yet."""

    def __init__(self, write_buffer: WriteBuffer, disk: Disk, path: str, start: int, size: int, fd: int) -> None:
        super().__init__(disk, path, start, size, fd)
        self._write_buffer: WriteBuffer | None = write_buffer
        self.buffer = write_buffer.memory
        self.committed = 0
        self.is_reserving = False

    @property
    def lock_refused(self) -> int:
        """The errno with which the system refused to lock the last part of the buffer; 0 if it did not refuse."""
        return self._write_buffer.locked if self._write_buffer is not None else 0

    def reserve_range(self, begin: int, end: int, *, durable: bool = False, large: bool = False) -> None:  # noqa: ARG002 - a write(2) needs no zeros on the device, and the buffer is not a file
        """Allocate blocks for the file and pages for the buffer; see MappedFile."""
        self._disk.allocate(self.fd, begin, end - begin)
        if self._write_buffer is not None:
            self._write_buffer.make_ready(begin, end)

    def read(self, position: int, length: int) -> memoryview | bytes | None:
        """See MappedFile; records that are not committed are not readable."""
        length = min(length, self.committed - position)
        return super().read(position, length) if length > 0 else b""

    def read_cold(self, position: int, length: int) -> bytes:
        """See MappedFile; records that are not committed are not readable."""
        return super().read_cold(position, max(0, min(length, self.committed - position)))

    def write_range(self, begin: int, end: int) -> None:
        """Write [begin, end) of the buffer into the file. Blocks. The caller moves ``committed``."""
        buffer = self._write_buffer
        if buffer is None:
            raise RuntimeError(f"{self.path} is already committed")
        with memoryview(buffer.memory) as view, view[begin:end] as piece:
            self._disk.pwrite(self.fd, piece, begin)
        buffer.give_back(end)

    def take_buffer(self) -> WriteBuffer | None:
        """The buffer, for its return to the pool. Called once everything is committed."""
        buffer, self._write_buffer = self._write_buffer, None
        if self._mapping is not None:
            self.buffer = self._mapping.buffer
        return buffer

    def unmap(self) -> None:
        """See MappedFile."""
        super().unmap()
        buffer, self._write_buffer = self._write_buffer, None
        if buffer is not None:
            buffer.close()


def lock_limit_text(refused: int) -> str:
    """The warning for an operator whose buffers could not be locked."""
    return (
        f"the write buffers of the transient store pool are not locked in memory ({os.strerror(refused)}): raise the "
        "limit (ulimit -l, LimitMEMLOCK= of systemd, --ulimit memlock= of docker), or the system may swap them out"
    )


def make_pool(config: MessageStoreConfig) -> TransientStorePool | None:
    """The pool, if the configuration asks for one; logs what it means for acknowledged messages.

    Raises the soft limit of locked memory to the hard limit.
    """
    if not config.transient_store_pool_enable:
        return None
    if config.flush_disk_type is FlushDiskType.SYNC_FLUSH:
        _log.warning("transient_store_pool_not_used", reason="flushDiskType is SYNC_FLUSH, which does not use the pool")
        return None
    _log.warning(
        "transient_store_pool",
        buffers=config.transient_store_pool_size,
        reason="a crash of this process loses what was acknowledged and not yet committed: the messages of the last "
        f"{config.commit_thorough_ms} ms, more where the disk does not keep up",
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return TransientStorePool(config.transient_store_pool_size, config.mapped_file_size_commit_log)
