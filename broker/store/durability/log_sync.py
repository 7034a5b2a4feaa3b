"""Flushes the log to the device: the flushed offset, the syncs that move it, and where each of them runs.

A sync that starts after a record's bytes are in the mapping makes the record durable when it returns. Files are synced
oldest first, so that the flushed offset covers a contiguous prefix. A failed sync is never retried: the kernel may have
dropped the pages, and a second sync would report success. The store is read-only from then on.
Source: RocketMQ's MappedFileQueue.flush, and flushedWhere.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from typing import Final, NamedTuple

import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.remoting.runtime.durations import Durations

_log = structlog.get_logger(__name__)


class SyncPlace(Enum):
    """Where the data sync of a group commit runs."""

    THREAD = "thread"
    INLINE = "inline"
    AUTO = "auto"
    """Inline while syncs are short: a thread and back costs as much as a quick device takes. After a long sync, in the
    log's own thread; the loop waits for it, but not longer than for a short one."""


class SyncPace:
    """Decides whether the next sync may block the loop: only while the last ones were well under the 5 ms rule."""

    short: Final = 0.0015
    """Average seconds up to which syncs run inline."""
    long: Final = 0.004
    """A single sync that takes this long moves the following ones to a thread for a while."""
    penalty: Final = 0.25
    """Seconds in a thread after a long sync; each further one within ``memory`` doubles them, up to ``longest``."""
    longest: Final = 4.0
    memory: Final = 2.0
    largest: Final = 1 << 20
    """The most bytes that are synced inline: past durations do not predict the time for more bytes."""

    def __init__(self, place: SyncPlace) -> None:
        self._place = place
        self._average = 0.0
        self._not_before = 0.0
        self._penalty = self.penalty

    def inline(self, size: int) -> bool:
        """True if the next sync, of ``size`` bytes, may run on the loop."""
        if self._place is not SyncPlace.AUTO:
            return self._place is SyncPlace.INLINE
        return self.worth_waiting(size) and time.perf_counter() >= self._not_before

    def worth_waiting(self, size: int) -> bool:
        """True if the loop may wait ``short`` seconds for the next sync, of ``size`` bytes, in a thread."""
        return self._place is SyncPlace.AUTO and size <= self.largest and self._average < self.short

    def took(self, seconds: float) -> None:
        """Record the time that a sync took in the kernel."""
        self._average += (seconds - self._average) / 8
        if seconds > self.long:
            now = time.perf_counter()
            if now - self._not_before > self.memory:
                self._penalty = self.penalty
            self._not_before = now + self._penalty
            self._penalty = min(2 * self._penalty, self.longest)


def _timed_sync(file: MappedFile) -> float:
    begin = time.perf_counter()
    file.sync()
    return time.perf_counter() - begin


class _UnderWay(NamedTuple):
    """A sync in the log's own thread for which the loop did not wait until its end."""

    file: MappedFile
    end: int
    took: "Future[float]"


async def _done(future: "Future[float]") -> None:
    """Wait until ``future`` is done, with a result or an error."""
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()
    future.add_done_callback(lambda _future: token.run_sync_soon(done.set))
    await done.wait()


class LogSync:
    """The flushed offset. All syncs that move it go through this class."""

    def __init__(self, log: CommitLog, flags: RunningFlags, place: SyncPlace = SyncPlace.THREAD) -> None:
        self._log = log
        self._disk: Disk = log.files.disk
        self._flags = flags
        self._pace = SyncPace(place)
        self._lock = trio.Lock()
        self._thread = ThreadPoolExecutor(1, "log-sync")
        self._under_way: _UnderWay | None = None
        self.flushed_offset = log.files.flushed_offset
        self.failed = ""
        """Why there will be no further sync; empty as long as all syncs have succeeded."""
        self.on_flushed: Callable[[], None] = lambda: None
        """Called when the flushed offset has moved."""
        self.durations = Durations()
        """The times that syncs took in the kernel."""

    def restart(self) -> None:
        """Take the flushed offset from the files, after recovery has set their positions."""
        self.flushed_offset = self._log.files.flushed_offset

    def close(self) -> None:
        """End the thread, after the last sync."""
        self._thread.shutdown()

    def flush_inline(self) -> bool | None:
        """As ``flush``, in this turn of the loop. None if that may take long or is not possible: use ``advance``."""
        dirty = self._dirty()
        # With more than one dirty file, or a sync under way, the order of the syncs needs the task.
        if self._lock.locked() or self._under_way is not None or len(dirty) > 1:
            return None
        if self.failed:
            return False
        if not dirty:
            return True
        file, end = dirty[0]
        if self._pace.inline(end - file.flushed):
            return self._ended(file, end, lambda: _timed_sync(file))
        if not self._pace.worth_waiting(end - file.flushed):
            return None
        # Held until ``_settle``: the thread may still sync the file after this turn has given up waiting.
        file.hold()
        future = self._thread.submit(_timed_sync, file)
        self._under_way = _UnderWay(file, end, future)
        with suppress(OSError):  # a TimeoutError (not done yet), or the sync's own error, which _settle handles
            future.result(self._pace.short)
        return self._settle() if future.done() else None

    async def advance(self) -> bool:
        """Wait for the sync that ``flush_inline`` has left under way. If there is none, do as ``flush``."""
        return await self._flush(all_of_it=self._under_way is None)

    async def flush(self) -> bool:
        """Make all records that are in the mapping now durable. Returns False if this or an earlier sync failed."""
        return await self._flush(all_of_it=True)

    def _dirty(self) -> list[tuple[MappedFile, int]]:
        """The files to sync, oldest first, each with the end of its records at this time."""
        return [(file, file.committed) for file in self._log.files.files if file.flushed < file.committed]

    async def _flush(self, *, all_of_it: bool) -> bool:
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()
        try:
            # First the sync under way: two syncs of one file at the same time could move ``flushed`` back.
            if self._under_way is not None:
                await _done(self._under_way.took)
                self._settle()
            return not self.failed and (not all_of_it or await self._sync_dirty())
        finally:
            self._lock.release()

    def _settle(self) -> bool:
        """Process the result of the finished sync that was under way. Returns False if it has failed."""
        assert self._under_way is not None
        file, end, future = self._under_way
        self._under_way = None
        file.release()
        return self._ended(file, end, future.result)

    def _ended(self, file: MappedFile, end: int, took: Callable[[], float]) -> bool:
        """Record a finished sync. ``took`` returns its seconds or raises its error. Returns False if it has failed."""
        try:
            seconds = took()
        except OSError as error:
            self._fail(file, error)
            return False
        self._synced(file, end, seconds)
        return True

    def _synced(self, file: MappedFile, end: int, took: float) -> None:
        self._pace.took(took)
        self.durations.add(took)
        # ``end`` was taken before the sync started; records that came during it are not covered.
        file.flushed = end
        self.flushed_offset = file.start + end
        self.on_flushed()

    async def _sync_dirty(self) -> bool:
        for file, end in self._dirty():
            if file.destroyed:  # it expired while an older file was synced
                continue
            if not await self._sync(file, end):
                return False
        return True

    async def _sync(self, file: MappedFile, end: int) -> bool:
        file.hold()
        try:
            if self._pace.inline(end - file.flushed):
                took = _timed_sync(file)
            else:
                took = await self._disk.run(_timed_sync, file)
        except OSError as error:
            self._fail(file, error)
            return False
        finally:
            file.release()
        self._synced(file, end, took)
        return True

    def _fail(self, file: MappedFile, error: OSError) -> None:
        self.failed = (
            f"the data sync of {file.path} failed ({error.strerror or error}): messages not yet on the device may be "
            "lost. The store is read-only; check the device and restart"
        )
        self._flags.set(Flag.NOT_WRITEABLE, self.failed, forever=True)
        _log.error("commit_log_sync_failed", file=file.path, error=str(error), flushed_offset=self.flushed_offset)
