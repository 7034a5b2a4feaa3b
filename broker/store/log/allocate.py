"""Space for the commit log, ahead of the writer: the next step of the current file, and the next file.

A page is only stored into once it has its block; posix_fallocate and the first touch of the pages run in a thread here
(RocketMQ's AllocateMappedFileService). With warmMapedFileEnable whole files are made ready, a step at a time.
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
    """What to do next: make [begin, end) of a file ready, or (no file) make the file that begins at ``begin``."""

    file: MappedFile | None
    begin: int
    end: int


class AllocateMappedFileService:
    """Keeps room ready for the log: half a step of the current file, and the next file before this one is full.

    Steps begin at 4 MiB, double up to ``step`` while the log grows by more than one in a quarter of a second, and halve
    when that takes longer than a second. An idle broker takes megabytes, and little lies ready that a sync of the log
    finds empty: it would write that for nothing, and a first store into each of its pages would be a fault again. Steps
    longer than the first are made of large pages: then the log grows by more in a second than a sync writes in excess.
    """

    def __init__(
        self,
        log: CommitLog,
        flags: RunningFlags,
        config: MessageStoreConfig,
        *,
        memory: LogMemory,
        pool: TransientStorePool | None,
        on_room: Callable[[], None],
        on_needs_commit: Callable[[], None],
    ) -> None:
        """``on_room`` is called whenever more room has become ready, or has been refused.

        ``on_needs_commit``: when nothing can be appended before the write buffers are committed. ``pool``: new files
        get a write buffer; where there is none left they are written through their map, once all before them has been
        committed, or with fastFailIfNoBufferInStorePool not made.
        """
        self._log = log
        self._files = log.files
        self._disk: Disk = log.files.disk
        self._flags = flags
        self._max_step = config.commit_log_reserve_step
        self._step = min(self._max_step, _FIRST_STEP)
        self._in_memory_bytes = memory.in_memory_bytes
        # SYNC_FLUSH: zeros go onto the device ahead
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
        self._on_room = on_room
        self._on_needs_commit = on_needs_commit

    # -- called by the log

    def poke(self, wanted: int = 0) -> None:
        """Look whether room is getting short; ``wanted`` bytes are needed now."""
        self._wanted = max(self._wanted, wanted)
        self._log.poke_at = _NEVER
        self._wake.set()

    def take_next(self) -> MappedFile | None:
        """The next file if it is ready; else make it.

        One without a write buffer is ready once all before it is in its files: what is in buffers goes with the
        process, what is stored through a map stays, and the log would have a hole.
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
        self._on_room()

    @property
    def lacks_buffer(self) -> bool:
        """True while the next file is not made because there is no write buffer for it."""
        if not self._fail_fast or self._pool is None or self._pool.available:
            return False
        return self.next_file is None and not self._making

    # -- the task

    async def run(self) -> None:
        """Make room until ``stop``."""
        system = await self._disk.run(self._disk.file_system, self._files.directory)
        if not system.keeps_reservations:
            self._margin = 2 * self._max_step
            _log.warning("reserved_space_not_guaranteed", file_system=system.kind, free_space_kept=self._margin)
        while not self._stopping:
            task = self._next_task()
            if task is None:
                self._set_poke()
                await self._wake.wait()
                self._wake = trio.Event()
                continue
            try:
                await self._do(task)
            except OSError as error:
                await self._refused(error)
            self._on_room()
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
        """Free bytes from which on it makes sense to go on: more than the next step, so that it does not flap."""
        return 3 * self._step + self._margin

    async def _space(self) -> DiskSpace | None:
        try:
            return await self._disk.run(self._disk.space, self._files.directory)
        except OSError:  # the file system that is asked may be the one that is broken
            return None

    async def stop(self) -> None:
        """End the task and remove a next file that nothing was written into."""
        self._stopping = True
        self._wake.set()
        file, self.next_file = self.next_file, None
        if file is not None:
            try:
                await self._disk.run(self._remove, file)
            except OSError as error:  # it is empty: the next start takes it for what it is
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
            return None if self.next_file else _Task(None, 0, self._step)
        ahead = file.reserved - file.wrote
        if self._wanted and ahead >= self._wanted:
            self._wanted = 0
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
        """The next file is made when this much is left of the current one."""
        return max(self._files.size // 5, min(2 * self._max_step, self._files.size))

    def _set_poke(self) -> None:
        """Tell the log at which position of its file the next task will be due."""
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
            if self._stopping:
                await self._disk.run(self._remove, made)
                return
            self.next_file = made
            self._wants_next = False
            begin, file = 0, made
        else:
            cost = await self._reserve(file, begin, task.end)
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
        self._space_is_back()

    async def _reserve(self, file: MappedFile, begin: int, end: int) -> float:
        file.hold()
        if isinstance(file, PooledMappedFile):
            file.is_reserving = True
        try:
            return await self._disk.run(self._ready, file, begin, end)
        finally:
            if isinstance(file, PooledMappedFile):
                file.is_reserving = False
            file.release()

    def _space_is_back(self) -> None:
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
            if self._pool is not None and buffer is not None:
                self._pool.give_back(buffer)
            raise
        finally:
            self._making = False

    # These two run in a thread. They tell what it took of a processor: waiting for the device does not count.

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
        """Where a reservation promises nothing, keep two steps free instead."""
        space = await self._space()
        if space is not None and space.free < self._margin + self._step:
            raise OSError(errno.ENOSPC, "less free than the margin that this file system needs")

    async def _refused(self, error: OSError) -> None:
        """Refuse puts with a reason, then wait until trying again makes sense."""
        directory = self._files.directory
        if error.errno in _NO_SPACE:
            self._flags.set(Flag.NO_SPACE, await self._no_space_text(error))
        else:
            reason = f"no room for the commit log in {directory}: {error.strerror or error}"
            self._flags.set(Flag.NOT_WRITEABLE, reason, forever=True)
        _log.error("no_room_for_commit_log", directory=directory, reason=self._flags.reason)
        self._on_room()
        while not self._stopping:
            with trio.move_on_after(_RETRY_SECONDS):
                await self._wake.wait()
            self._wake = trio.Event()
            if not self._flags.has(Flag.NO_SPACE):
                continue
            space = await self._space()
            if space is not None and space.free >= self._needed():
                if self._next_task() is None:  # the log has gone on in another file: nothing is tried that could tell
                    self._space_is_back()
                return
