"""Commits the write buffers of the transient store pool to their files. Source: RocketMQ's CommitRealTimeService."""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog
import trio

from trimq.broker.store.durability.flush import PAGE, FlushRealTimeService
from trimq.broker.store.interval_service import IntervalService
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.puts import Dispatcher, Put
from trimq.broker.store.log.transient_store_pool import PooledMappedFile, TransientStorePool, lock_limit_text
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus

_log = structlog.get_logger(__name__)

_PIECE: Final = 4 << 20
"""Bytes of one write, and of the memory that is given back after it."""
_TURN: Final = 256


class _Pending(NamedTuple):
    """A put that ends at ``end`` in the log; without ``put``, the BLANK that starts at ``result.physical_offset``."""

    end: int
    put: Put | None
    result: PutMessageResult


class CommitRealTimeService(IntervalService):
    """Commits if ``least_pages`` wait, a file is full, or ``thorough`` seconds are over; checks each ``interval``.

    ``committed_offset``: everything below may be read. A failed write makes the store read-only. It is retried, because
    the records are still in memory, and each one that reaches its file can be read.
    """

    waits = False
    dispatch_only = None

    def __init__(
        self,
        log: CommitLog,
        flags: RunningFlags,
        pool: TransientStorePool,
        dispatcher: Dispatcher,
        real_time: FlushRealTimeService,
        *,
        interval: float,
        least_pages: int,
        thorough: float,
    ) -> None:
        super().__init__(interval, thorough)
        self._log = log
        self._flags = flags
        self._pool = pool
        self._least = least_pages * PAGE
        self._dispatch = dispatcher.dispatch
        self._rolled = dispatcher.rolled
        self._real_time = real_time
        self._pending: deque[_Pending] = deque()
        self.committed_offset = log.max_offset
        self._lock = trio.Lock()
        self._refused_to_lock = False

    @property
    def readable_offset(self) -> int:
        """Records below this offset are in their file."""
        return self.committed_offset

    @property
    def end_offset(self) -> int:
        """See Durability. Records that are only in a buffer are not reported."""
        return self.committed_offset

    def join_rounds(self, _rounds: list[Callable[[], None]], _in_round: Callable[[], bool]) -> None:
        """No put waits for a round."""

    def submit(self, put: Put, result: PutMessageResult, _on_done: PutCallback | None) -> PutMessageResult | None:
        """Queue the records: they are in a write buffer (or in a file without one) and dispatched after the commit."""
        if not self._real_time.timed:
            self._real_time.wake()
        put.release_buffers()
        self._pending.append(_Pending(result.physical_offset + result.size, put, result))
        file = self._log.files.last
        if self._log.max_offset - self.committed_offset >= self._least or not isinstance(file, PooledMappedFile):
            self.wake()
        return result

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        """See Durability."""
        self._pending.append(_Pending(next_offset, None, PutMessageResult(PutMessageStatus.PUT_OK, blank_offset)))

    def commit_soon(self) -> None:
        """See Durability."""
        self.wake()

    async def run(self) -> None:
        """Commit, and flush at intervals, until ``stop``."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._real_time.run)
            await super().run()

    async def stop(self) -> bool:
        """Commit everything and end the tasks. Returns False if the device refused."""
        self._real_time.stop()
        self._end()
        return await self.commit_buffers()

    def _enough(self) -> bool:
        waiting = self._log.max_offset - self.committed_offset
        file = self._log.files.find(self.committed_offset)
        return waiting > 0 and (waiting >= self._least or not isinstance(file, PooledMappedFile) or file.is_full)

    async def _work(self) -> None:
        await self.commit_buffers()

    async def commit_buffers(self) -> bool:
        """Write the present content of the buffers into the files. Returns False if that failed."""
        async with self._lock:
            # A copy: the log may add a file, and expiry may remove one, during the writes.
            for file in self._log.files.files[:]:
                if isinstance(file, PooledMappedFile) and not await self._commit_file(file):
                    return False
                # Oldest file first and only then dispatched: consumers see a prefix of the log without holes.
                self.committed_offset = max(self.committed_offset, file.start + file.committed)
                await self._dispatch_committed()
            return True

    async def _dispatch_committed(self) -> None:
        pending = self._pending
        done = 0
        while pending and pending[0].end <= self.committed_offset:
            end, put, result = pending.popleft()
            if put is None:
                self._rolled(result.physical_offset, end)
            else:
                self._dispatch(put, result)
            done += 1
            if done % _TURN == 0:
                await trio.lowlevel.checkpoint()

    async def _commit_file(self, file: PooledMappedFile) -> bool:
        wrote = file.wrote
        if file.committed < wrote and not await self._write(file, wrote):
            return False
        # Not while a thread prepares pages of the buffer: it would touch unmapped memory.
        if file.committed == file.size and not file.is_reserving:
            buffer = file.take_buffer()
            if buffer is not None:
                self._pool.give_back(buffer)
        return True

    async def _write(self, file: PooledMappedFile, wrote: int) -> bool:
        # A BLANK sets ``wrote`` to the file's end. The bytes behind the reserved part were never written: skip them.
        end = min(wrote, file.reserved)
        disk = self._log.files.disk
        file.hold()
        try:
            while file.committed < end:
                piece = min(end, file.committed + _PIECE)
                await disk.run(file.write_range, file.committed, piece)
                file.committed = piece
        except OSError as error:
            self._fail(file, error)
            return False
        finally:
            file.release()
        file.committed = wrote
        self._report_refused_lock(file)
        return True

    def _fail(self, file: PooledMappedFile, error: OSError) -> None:
        reason = (
            f"writing {file.path} failed ({error.strerror or error}): messages acknowledged since then are in memory "
            "only. The store is read-only; check the device and restart"
        )
        if not self._flags.is_broken:
            _log.error("commit_log_commit_failed", file=file.path, error=str(error), committed=self.committed_offset)
        self._flags.set(Flag.NOT_WRITEABLE, reason, forever=True)

    def _report_refused_lock(self, file: PooledMappedFile) -> None:
        if file.lock_refused and not self._refused_to_lock:
            self._refused_to_lock = True
            _log.warning("write_buffers_not_locked", reason=lock_limit_text(file.lock_refused))
