"""When the log's bytes are on the device: the flushed offset, the syncs that move it, and where each of them runs.

A sync that began after a record's bytes were in the mapping makes the record durable when it returns. Files are synced
oldest first, so that the flushed offset covers a contiguous prefix. A sync that failed is never tried again: the kernel
may have dropped the pages, and a second sync would report success. The store is read-only from then on.
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
    """Where the data sync of a group runs."""

    THREAD = "thread"
    INLINE = "inline"
    AUTO = "auto"
    """Inline while syncs are short: a thread and back costs as much as a quick device takes. After a long one in a
    thread of the log's own that the loop waits for, but not longer than for a short one."""


class SyncPace:
    """Decides whether the next sync may stop the loop: only while the last ones were well under the 5 ms rule."""

    short: Final = 0.0015
    """Average seconds up to which a sync runs inline."""
    long: Final = 0.004
    """One sync that takes so long sends the following ones to a thread for a while."""
    penalty: Final = 0.25
    """Seconds for the first one; each one that comes within ``memory`` seconds doubles it, up to ``longest``."""
    longest: Final = 4.0
    memory: Final = 2.0
    largest: Final = 1 << 20
    """Bytes that are synced inline at most: how long more of them take is not what the last ones tell."""

    def __init__(self, place: SyncPlace) -> None:
        self._place = place
        self._average = 0.0
        self._not_before = 0.0
        self._penalty = self.penalty

    def inline(self, size: int) -> bool:
        """True where the next sync, of ``size`` bytes, may run on the loop."""
        if self._place is not SyncPlace.AUTO:
            return self._place is SyncPlace.INLINE
        return self.worth_waiting(size) and time.perf_counter() >= self._not_before

    def worth_waiting(self, size: int) -> bool:
        """True where the loop may wait ``short`` seconds for the next sync, of ``size`` bytes, in a thread."""
        return self._place is SyncPlace.AUTO and size <= self.largest and self._average < self.short

    def took(self, seconds: float) -> None:
        """Note how long a sync took in the kernel."""
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
    """A sync in the log's own thread that the loop did not wait for to the end."""

    file: MappedFile
    end: int
    took: "Future[float]"


async def _done(future: "Future[float]") -> None:
    """Wait until it is, whatever comes of it."""
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()
    future.add_done_callback(lambda _future: token.run_sync_soon(done.set))
    await done.wait()


class LogSync:
    """The flushed offset, and the one way to move it."""

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
        """Why there will be no further sync; empty as long as all have succeeded."""
        self.durations = Durations()
        """How long syncs took in the kernel."""

    def restart(self) -> None:
        """Recovery has set the positions."""
        self.flushed_offset = self._log.files.flushed_offset

    def close(self) -> None:
        """End the thread. There is nothing to sync any more."""
        self._thread.shutdown()

    def flush_inline(self) -> bool | None:
        """As ``flush``, in this turn of the loop; None where that may take long or cannot be: ``advance`` does it."""
        dirty = self._dirty()
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
        file.hold()
        future = self._thread.submit(_timed_sync, file)
        self._under_way = _UnderWay(file, end, future)
        with suppress(OSError):  # not there yet (TimeoutError), or the sync's own, which _settle looks at
            future.result(self._pace.short)
        return self._settle() if future.done() else None

    async def advance(self) -> bool:
        """Wait for the sync that ``flush_inline`` has left under way; where there is none, as ``flush``."""
        return await self._flush(all_of_it=self._under_way is None)

    async def flush(self) -> bool:
        """Make all records durable that are in the mapping now; False where a sync has failed, now or before."""
        return await self._flush(all_of_it=True)

    def _dirty(self) -> list[tuple[MappedFile, int]]:
        """Files that have to be synced, oldest first, and up to where records are in them."""
        return [(file, file.committed) for file in self._log.files.files if file.flushed < file.committed]

    async def _flush(self, *, all_of_it: bool) -> bool:
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()
        try:
            if self._under_way is not None:
                await _done(self._under_way.took)
                self._settle()
            return not self.failed and (not all_of_it or await self._sync_dirty())
        finally:
            self._lock.release()

    def _settle(self) -> bool:
        """What was under way is done; False where it has failed."""
        assert self._under_way is not None
        file, end, future = self._under_way
        self._under_way = None
        file.release()
        return self._ended(file, end, future.result)

    def _ended(self, file: MappedFile, end: int, took: Callable[[], float]) -> bool:
        """Note what came of a sync: ``took`` tells its seconds, or raises what it raised; False where it has failed."""
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
        file.flushed = end
        self.flushed_offset = file.start + end

    async def _sync_dirty(self) -> bool:
        for file, end in self._dirty():
            if file.destroyed:  # it expired while an older one was synced
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
            f"the data sync of {file.path} failed ({error.strerror or error}): what was not yet on the device may be "
            "lost. The store is read-only; check the device and restart"
        )
        self._flags.set(Flag.NOT_WRITEABLE, self.failed, forever=True)
        _log.error("commit_log_sync_failed", file=file.path, error=str(error), flushed_offset=self.flushed_offset)
