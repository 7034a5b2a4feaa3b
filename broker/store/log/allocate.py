"""Allocates space for the commit log ahead of the writer: the next step of the current file, and the next file.

A store into a mapped page is only safe once the page has its disk block. posix_fallocate and the first touch of the
pages run in a thread (RocketMQ's AllocateMappedFileService). With warmMapedFileEnable whole files are prepared, one
step at a time.
"""

import errno
from collections.abc import Callable
from functools import partial
from time import thread_time
from typing import Final, NamedTuple

import structlog
import trio

from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.store.disk.disk import Disk, DiskSpace
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.memory import LogMemory
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.page_recycling import PageRecycling
from trimq.broker.store.log.transient_store_pool import PooledMappedFile, TransientStorePool
from trimq.broker.store.running_flags import Flag, RunningFlags

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_RETRY_SECONDS: Final = 1.0
_FIRST_STEP: Final = 4 << 20
_QUICK: Final = 0.25
_SLOW: Final = 1.0
"""Seconds between two steps."""
_NEVER: Final = 1 << 62

_log = structlog.get_logger(__name__)


class _Task(NamedTuple):
    """The next allocation: [begin, end) of ``file``, or, without one, a new file at the log offset ``begin``."""

    file: MappedFile | None
    begin: int
    end: int


class AllocateMappedFileService:
    """Keeps space ready for the log: half a step of the current file, and the next file before this one is full.

    Steps start at 4 MiB, double up to ``step`` while the log grows by more than one step in a quarter of a second, and
    halve when a step lasts longer than a second. So an idle broker takes megabytes, and a sync of the log finds few
    pages that are allocated but empty: it would write them for nothing, and the first store into each of them would
    fault again. Steps longer than the first one use large pages: at that rate the log grows by more in a second than a
    sync writes in excess.
    """

    def __init__(
        self,
        log: CommitLog,
        flags: RunningFlags,
        config: MessageStoreConfig,
        *,
        memory: LogMemory,
        pool: TransientStorePool | None,
        on_space: Callable[[], None],
        on_needs_commit: Callable[[], None],
    ) -> None:
        """``on_space`` is called when more space has become ready, or has been refused.

        ``on_needs_commit`` is called when nothing can be appended before the write buffers are committed. ``pool``: new
        files get a write buffer from it. When no buffer is left, a new file is written through its map, once all files
        before it are committed; with fastFailIfNoBufferInStorePool it is not created.
        """
        self._log = log
        self._files = log.files
        self._disk: Disk = log.files.disk
        self._flags = flags
        self._max_step = config.commit_log_reserve_step
        self._step = min(self._max_step, _FIRST_STEP)
        self._in_memory_bytes = memory.in_memory_bytes
        # SYNC_FLUSH: allocation writes zeros to the device, so that syncs find written blocks
        self._durable = config.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._warm = config.warm_maped_file_enable
        self._pool = pool
        self._fail_fast = config.fast_fail_if_no_buffer_in_store_pool
        self._making = False
        self.recycling = PageRecycling(log.files, memory.bulk_pace, memory.unread_bytes)
        if pool is not None:
            pool.on_returned = self._buffer_returned
        self._wake = trio.Event()
        self._last_step_at = float("-inf")
        self._last_step_end = 0
        self._stopping = False
        self._wants_next = False
        self._wanted = 0
        self._margin = 0
        self.next_file: MappedFile | None = None
        self._on_space = on_space
        self._on_needs_commit = on_needs_commit

    # -- called by the log

    def poke(self, wanted: int = 0) -> None:
        """Check whether space runs short; ``wanted`` bytes are needed now. Called by the log; never blocks."""
        self._wanted = max(self._wanted, wanted)
        # One call is enough: the log must not call again for every append until the task has set the next position.
        self._log.poke_at = _NEVER
        self._wake.set()

    def take_next(self) -> MappedFile | None:
        """The next file if it is ready; else request it and return None.

        A file without a write buffer is only ready once all files before it are committed. A crash of the process loses
        the buffers but not what was stored through a map: records behind lost ones would leave a hole in the log.
        """
        if self._waits_for_commit():
            self._on_needs_commit()
            return None
        file, self.next_file = self.next_file, None
        self._wants_next = file is None
        self.poke()
        return file

    def _waits_for_commit(self) -> bool:
        file, last = self.next_file, self._files.last
        if file is None or isinstance(file, PooledMappedFile) or not isinstance(last, PooledMappedFile):
            return False
        return last.committed < last.size

    def _buffer_returned(self) -> None:
        self._wake.set()
        self._on_space()

    async def begin_at(self, offset: int) -> None:
        """Let the first file of a log without files start at ``offset``. A file made for another begin is removed."""
        self._files.begin = offset
        file, self.next_file = self.next_file, None
        if file is not None:
            await self._disk.run(self._remove, file)
        self._wants_next = True
        self.poke()

    @property
    def lacks_buffer(self) -> bool:
        """True while the next file is not created because no write buffer is free."""
        if not self._fail_fast or self._pool is None or self._pool.available:
            return False
        return self.next_file is None and not self._making

    # -- the task

    async def run(self) -> None:
        """Allocate space until ``stop``."""
        system = await self._disk.run(self._disk.file_system, self._files.directory)
        if not system.keeps_reservations:
            self._margin = 2 * self._max_step
            _log.warning("reserved_space_not_guaranteed", file_system=system.kind, free_space_kept=self._margin)
        while not self._stopping:
            task = self._next_task()
            if task is None:
                # Before the wait: from here on an append that passes the position wakes this task.
                self._set_poke()
                await self._wake.wait()
                self._wake = trio.Event()
                continue
            try:
                await self._do(task)
            except OSError as error:
                await self._refused(error)
            self._on_space()
            await self.recycling.settle()

    async def _no_space_text(self, error: OSError) -> str:
        directory = self._files.directory
        system = await self._disk.run(self._disk.file_system, directory)
        space = await self._space()
        figures = (
            f"{space.free} of {space.total} bytes free" if space is not None else "an unknown number of bytes free"
        )
        return (
            f"the disk is full: {system.mount_point} ({system.kind}) has {figures}, {self._needed()} are needed "
            f"to go on ({error.strerror}); delete something or lower fileReservedTime"
        )

    def _needed(self) -> int:
        """Free bytes needed to go on after a full disk: more than one step, so that the state does not flap."""
        return 3 * self._step + self._margin

    async def _space(self) -> DiskSpace | None:
        try:
            return await self._disk.run(self._disk.space, self._files.directory)
        except OSError:  # the file system may be the broken one
            return None

    async def stop(self) -> None:
        """End the task and delete a next file that is still unused."""
        self._stopping = True
        self._wake.set()
        file, self.next_file = self.next_file, None
        if file is not None:
            try:
                await self._disk.run(self._remove, file)
            except OSError as error:  # it is empty: the next start handles it like any other file
                _log.warning("unused_file_not_removed", file=file.path, error=str(error))

    def _remove(self, file: MappedFile) -> None:
        try:
            file.destroy()
            self._disk.sync_directory(self._files.directory)
        finally:
            file.close()

    def _next_task(self) -> _Task | None:
        file = self._files.last
        if file is None:
            return None if self.next_file else _Task(None, self._files.begin, self._step)
        ahead = file.reserved - file.wrote
        if self._wanted and ahead >= self._wanted:
            self._wanted = 0
        # Half a step ahead keeps the writer from waiting while the thread allocates the next step.
        more = ahead <= self._step // 2 or ahead < self._wanted or self._warm
        if file.reserved < file.size and not file.is_full and more:
            end = max(file.reserved + self._step, file.wrote + self._wanted)
            return _Task(file, file.reserved, min(file.size, end))
        if self.next_file is None and (self._wants_next or file.size - file.wrote <= self._next_file_border()):
            return None if self.lacks_buffer else _Task(None, file.end, self._step)
        following = self.next_file
        if self._warm and following is not None and following.reserved < following.size:
            return _Task(following, following.reserved, min(following.size, following.reserved + self._step))
        return None

    def _next_file_border(self) -> int:
        """The next file is created when only this many bytes are left in the current one."""
        return max(self._files.size // 5, min(2 * self._max_step, self._files.size))

    def _set_poke(self) -> None:
        """Set the position of the log's file at which the next task becomes due."""
        file = self._files.last
        due = _NEVER
        if file is not None and file.reserved < file.size:
            due = file.reserved - self._step // 2
        if file is not None and self.next_file is None:
            due = min(due, file.size - self._next_file_border())
        self._log.poke_at = due

    async def _do(self, task: _Task) -> None:
        if self._margin:
            await self._check_margin()
        file, begin = task.file, task.begin
        if file is None:
            path = self._files.path_of(task.begin)
            made, cost = await self._create(path, task)
            if not self._files.files and task.begin != self._files.begin:
                await self._disk.run(self._remove, made)  # ``begin_at`` was called during the call
                return
            if self._stopping:
                # The service was stopped during the call: ``stop`` cannot have seen this file.
                await self._disk.run(self._remove, made)
                return
            self.next_file = made
            self._wants_next = False
            begin, file = 0, made
        else:
            cost = await self._reserve(file, begin, task.end)
            # Only after the blocks and pages exist: ``mark_reserved`` lets appends store into them.
            file.mark_reserved(task.end)
        now, log_end = trio.current_time(), self._log.max_offset
        pace = (log_end - self._last_step_end) / max(now - self._last_step_at, 1e-6)
        self.recycling.made(file, begin, min(task.end, file.size), cost=cost, pace=pace)
        if now - self._last_step_at < _QUICK:
            self._step = min(2 * self._step, self._max_step)
        elif now - self._last_step_at > _SLOW:
            self._step = max(self._step // 2, min(_FIRST_STEP, self._max_step))
        self._last_step_at, self._last_step_end = now, log_end
        self._log.cool_down(self._in_memory_bytes)
        self._clear_no_space()

    async def _reserve(self, file: MappedFile, begin: int, end: int) -> float:
        # Held, so that neither expiry nor the return of the write buffer unmaps what the thread touches.
        file.hold()
        if isinstance(file, PooledMappedFile):
            file.is_reserving = True
        try:
            return await self._disk.run(self._ready, file, begin, end)
        finally:
            if isinstance(file, PooledMappedFile):
                file.is_reserving = False
            file.release()

    def _clear_no_space(self) -> None:
        if self._flags.has(Flag.NO_SPACE):
            self._flags.clear(Flag.NO_SPACE)
            _log.info("space_is_back", directory=self._files.directory)

    async def _create(self, path: str, task: _Task) -> tuple[MappedFile, float]:
        buffer = self._pool.borrow() if self._pool is not None else None
        make = partial(PooledMappedFile, buffer) if buffer is not None else None
        if self._pool is not None and buffer is None:
            _log.warning("no_write_buffer", file=path, buffers=self._pool.size)
        self._making = True
        try:
            return await self._disk.run(self._new, path, task, make)
        except BaseException:
            # No file was created, so nothing else will return the buffer.
            if self._pool is not None and buffer is not None:
                self._pool.give_back(buffer)
            raise
        finally:
            self._making = False

    # These two run in a thread. They return the processor time they took: waiting for the device does not count.

    def _new(self, path: str, task: _Task, make: partial[PooledMappedFile] | None) -> tuple[MappedFile, float]:
        begin = thread_time()
        size, large = self._files.size, self._step > _FIRST_STEP
        file = MappedFile.create(self._disk, path, task.begin, size, task.end, make, durable=self._durable, large=large)
        return file, thread_time() - begin

    def _ready(self, file: MappedFile, begin: int, end: int) -> float:
        began = thread_time()
        file.reserve_range(begin, end, durable=self._durable, large=self._step > _FIRST_STEP)
        return thread_time() - began

    async def _check_margin(self) -> None:
        """Keep two steps free on a file system whose reservations guarantee nothing."""
        space = await self._space()
        if space is not None and space.free < self._margin + self._step:
            raise OSError(errno.ENOSPC, "the free space is below the margin that this file system needs")

    async def _refused(self, error: OSError) -> None:
        """Refuse puts with a reason, then wait until another attempt makes sense."""
        directory = self._files.directory
        if error.errno in _NO_SPACE:
            self._flags.set(Flag.NO_SPACE, await self._no_space_text(error))
        else:
            reason = f"no space for the commit log in {directory}: {error.strerror or error}"
            self._flags.set(Flag.NOT_WRITEABLE, reason, forever=True)
        _log.error("no_space_for_commit_log", directory=directory, reason=self._flags.reason)
        self._on_space()
        while not self._stopping:
            with trio.move_on_after(_RETRY_SECONDS):
                await self._wake.wait()
            self._wake = trio.Event()
            if not self._flags.has(Flag.NO_SPACE):
                continue
            space = await self._space()
            if space is not None and space.free >= self._needed():
                # The log may have rolled over to another file: then no allocation follows that would clear the flag.
                if self._next_task() is None:
                    self._clear_no_space()
                return
