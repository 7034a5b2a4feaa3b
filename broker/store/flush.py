"""The log onto the device: group commit for SYNC_FLUSH, flushing by time for ASYNC_FLUSH.

A sync that began after a record's bytes were in the mapping makes the record durable when it returns. Files are synced
oldest first, so that the flushed offset covers a contiguous prefix. A sync that failed is never tried again: the kernel
may have dropped the pages, and a second sync would report success. The store is read-only from then on.
Source: RocketMQ's CommitLog.GroupCommitService, FlushRealTimeService and FlushDiskWatcher.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import Final

import structlog
import trio
from msgspec import Struct

from broker.store.commit_log import CommitLog
from broker.store.disk import Disk
from broker.store.mapped_file import MappedFile
from broker.store.paced import PacedService
from broker.store.running_flags import Flag, RunningFlags
from broker.store.types import (
    MessageBatch,
    MessageInner,
    MessageRows,
    PutCallback,
    PutMessageResult,
    PutMessageStatus,
)
from remoting.durations import Durations

PAGE: Final = 4096
_TURN: Final = 256

_log = structlog.get_logger(__name__)


class SyncPlace(Enum):
    """Where the data sync of a group runs."""

    THREAD = "thread"
    INLINE = "inline"
    AUTO = "auto"
    """Inline while syncs are short: the hop to a thread and back costs more than a quick device takes."""


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
        return size <= self.largest and self._average < self.short and time.perf_counter() >= self._not_before

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


class LogSync:
    """The flushed offset, and the one way to move it."""

    def __init__(self, log: CommitLog, flags: RunningFlags, place: SyncPlace = SyncPlace.THREAD) -> None:
        self._log = log
        self._disk: Disk = log.files.disk
        self._flags = flags
        self._pace = SyncPace(place)
        self._lock = trio.Lock()
        self.flushed_offset = log.files.flushed_offset
        self.failed = ""
        """Why there will be no further sync; empty as long as all have succeeded."""
        self.durations = Durations()
        """How long syncs took in the kernel."""
        self.on_flushed: Callable[[int, int], None] = lambda _offset, _store_timestamp: None
        """Hears of a new flushed offset and of a store timestamp that no durable record's is below (checkpoint)."""

    def restart(self) -> None:
        """Recovery has set the positions."""
        self.flushed_offset = self._log.files.flushed_offset

    def flush_inline(self) -> bool | None:
        """As ``flush``, in this turn of the loop; None where that may take long or cannot be: nothing has happened."""
        dirty = self._dirty()
        size = sum(end - file.flushed for file, end in dirty)
        if self._lock.locked() or len(dirty) > 1 or not self._pace.inline(size):
            return None
        if self.failed:
            return False
        timestamp = self._log.last_store_timestamp
        for file, end in dirty:
            try:
                took = _timed_sync(file)
            except OSError as error:
                self._fail(file, error)
                return False
            self._note(took)
            file.flushed = end
            self.flushed_offset = file.start + end
            self.on_flushed(self.flushed_offset, timestamp)
        return True

    async def flush(self) -> bool:
        """Make all records durable that are in the mapping now; False where a sync has failed, now or before."""
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()
        try:
            return not self.failed and await self._flush()
        finally:
            self._lock.release()

    def _dirty(self) -> list[tuple[MappedFile, int]]:
        """Files that have to be synced, oldest first, and up to where records are in them."""
        return [(file, file.committed) for file in self._log.files.files if file.flushed < file.committed]

    def _note(self, took: float) -> None:
        self._pace.took(took)
        self.durations.add(took)

    async def _flush(self) -> bool:
        timestamp = self._log.last_store_timestamp
        dirty = self._dirty()
        for file, end in dirty:
            if file.destroyed:  # it expired while an older one was synced
                continue
            if not await self._sync(file, end - file.flushed):
                return False
            file.flushed = end
            self.flushed_offset = file.start + end
        if dirty:
            self.on_flushed(self.flushed_offset, timestamp)
        return True

    async def _sync(self, file: MappedFile, size: int) -> bool:
        file.hold()
        try:
            if self._pace.inline(size):
                took = _timed_sync(file)
            else:
                took = await self._disk.run(_timed_sync, file)
        except OSError as error:
            self._fail(file, error)
            return False
        finally:
            file.release()
        self._note(took)
        return True

    def _fail(self, file: MappedFile, error: OSError) -> None:
        self.failed = (
            f"the data sync of {file.path} failed ({error.strerror or error}): what was not yet on the device may be "
            "lost. The store is read-only; check the device and restart"
        )
        self._flags.set(Flag.NOT_WRITEABLE, self.failed, forever=True)
        _log.error("commit_log_sync_failed", file=file.path, error=str(error), flushed_offset=self.flushed_offset)


Synced = MessageInner | MessageBatch | MessageRows
"""What may have to wait for the device."""


class _Pending(Struct, gc=False):
    end: int
    deadline: float
    put: Synced | None
    result: PutMessageResult
    on_done: PutCallback | None


class GroupCommitService:
    """SYNC_FLUSH: one sync for all that wait; then, in the order of the log, each is dispatched and its reply goes out.

    A message with WAIT=false is answered at once but dispatched in its turn. One that waits longer than ``timeout``
    seconds is answered FLUSH_DISK_TIMEOUT, and dispatched in its turn all the same.
    """

    def __init__(
        self,
        sync: LogSync,
        dispatch: Callable[[Synced, PutMessageResult], None],
        rolled: Callable[[int, int], None],
        timeout: float,
    ) -> None:
        self._sync = sync
        self._dispatch = dispatch
        self._rolled = rolled
        self._timeout = timeout
        self.took: Callable[[float, int], None] = lambda _seconds, _messages: None
        """Hears how long replies had to wait, and to how many messages."""
        self.in_round: Callable[[], bool] = lambda: False
        """Whether ``commit`` will be called soon: what is submitted now waits for it."""
        self._pending: deque[_Pending] = deque()
        self._round_deadline = 0.0
        """That of all that the current round has submitted; 0 while it has nothing."""
        self._wake = trio.Event()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, put: Synced, result: PutMessageResult, on_done: PutCallback | None) -> None:
        """A record (or several) is in the mapping; ``on_done`` is called when it is durable. None: nobody waits."""
        deadline = self._round_deadline
        if not deadline:
            deadline = trio.current_time() + self._timeout
            if self.in_round():
                self._round_deadline = deadline
            else:
                self._wake.set()
        self._pending.append(_Pending(result.physical_offset + result.size, deadline, put, result, on_done))

    def submit_roll(self, blank_offset: int, next_offset: int) -> None:
        """The log goes on in another file: told to the dispatcher between the records before and after."""
        result = PutMessageResult(PutMessageStatus.PUT_OK, blank_offset, size=next_offset - blank_offset)
        self._pending.append(_Pending(next_offset, float("inf"), None, result, None))
        self._wake.set()

    def commit(self) -> None:
        """At the end of a round of requests: sync and answer now where the device is quick, else let the task do it."""
        self._round_deadline = 0.0
        if not self._pending:
            return
        done = self._sync.flush_inline()
        if done is False:
            self._fail()
        elif done is None or self._complete():
            self._wake.set()

    async def run(self) -> None:
        """Sync and answer until ``stop``; what is pending then is still synced."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_deadlines)
            while self._pending or not self._stopping:
                await self._wake.wait()
                self._wake = trio.Event()
                while self._pending:
                    if not await self._sync.flush():
                        self._fail()
                        break
                    while self._complete():
                        await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """End the task once everything is answered."""
        self._stopping = True
        self._wake.set()

    def _complete(self) -> bool:
        """Dispatch and answer what is durable, a turn's worth of it; True where there is more."""
        pending, flushed = self._pending, self._sync.flushed_offset
        waited: list[tuple[float, int]] = []
        for _ in range(_TURN):
            if not pending or pending[0].end > flushed:
                break
            entry = pending.popleft()
            put = entry.put
            if put is None:
                self._rolled(entry.result.physical_offset, entry.end)
                continue
            self._dispatch(put, entry.result)
            if entry.on_done is not None:
                waited.append((entry.deadline, _messages_of(put)))
                _answer(entry.on_done, entry.result)
        begin = trio.current_time() + self._timeout
        for deadline, messages in groupby(waited, key=itemgetter(0)):  # of a round all have the same
            self.took(begin - deadline, sum(map(itemgetter(1), messages)))
        return bool(pending) and pending[0].end <= flushed

    def _fail(self) -> None:
        """Nothing that waited is acknowledged or becomes readable."""
        pending, self._pending = self._pending, deque()
        for entry in pending:
            if entry.on_done is not None:
                _answer(
                    entry.on_done, PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark=self._sync.failed)
                )

    async def _watch_deadlines(self) -> None:
        """Answer those that are late. Who is not there yet has at least ``timeout`` from now."""
        while True:
            now = trio.current_time()
            following = now + self._timeout
            for entry in self._pending:
                if entry.deadline > now:
                    following = min(following, entry.deadline)
                    if entry.on_done is not None:
                        break
                elif entry.on_done is not None:
                    on_done, entry.on_done = entry.on_done, None
                    late = PutMessageStatus.FLUSH_DISK_TIMEOUT
                    remark = f"not on disk after {self._timeout:g} s"
                    _answer(on_done, PutMessageResult(late, *_place(entry.result), remark))
            await trio.sleep_until(following)


def _messages_of(put: Synced) -> int:
    if isinstance(put, MessageInner):
        return 1
    return len(put.rows if isinstance(put, MessageRows) else put.keys)


def _answer(on_done: PutCallback, result: PutMessageResult) -> None:
    try:
        on_done(result)
    except Exception:  # noqa: BLE001 - a fault of one that waited must not end the service of all
        _log.exception("put_callback_failed")


def _place(result: PutMessageResult) -> tuple[int, int, int, int, Sequence[int] | None]:
    return (result.physical_offset, result.queue_offset, result.size, result.store_timestamp, result.offsets)


class FlushRealTimeService(PacedService):
    """ASYNC_FLUSH: a look every ``interval``; a sync where ``least_pages`` are dirty, a file is full, or time is up."""

    def __init__(
        self, log: CommitLog, sync: LogSync, *, interval: float, least_pages: int, thorough: float, timed: bool
    ) -> None:
        """Times in seconds; without ``timed`` a put wakes the service too."""
        super().__init__(interval, thorough)
        self._log = log
        self._sync = sync
        self._least = least_pages
        self._timed = timed

    def poke(self) -> None:
        """A record has come in."""
        if not self._timed:
            self.wake()

    def stop(self) -> None:
        """End the task; the last flush is the store's."""
        self._end()

    async def _work(self) -> None:
        await self._sync.flush()

    def _enough(self) -> bool:
        end = self._log.max_offset
        flushed = self._sync.flushed_offset
        if end // self._log.files.size > flushed // self._log.files.size:
            return True
        return end > flushed and end // PAGE - flushed // PAGE >= self._least
