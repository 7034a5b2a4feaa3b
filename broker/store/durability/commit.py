"""From the write buffers into the files, with the transient store pool. Source: RocketMQ's CommitRealTimeService."""

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
"""Bytes of one write: so much memory is given back at a time."""
_TURN: Final = 256


class _Pending(NamedTuple):
    """Something that stands in the log up to ``end``; without ``put`` the BLANK from ``result.physical_offset`` on."""

    end: int
    put: Put | None
    result: PutMessageResult


class CommitRealTimeService(IntervalService):
    """Commits when ``least_pages`` wait, a file is full, or ``thorough`` seconds are over; looks every ``interval``.

    ``committed_offset``: everything below may be read. A write that fails makes the store read-only; it is tried again,
    because the records are still in memory, and what it saves can be read.
    """

    waits = False
    at_once = None

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
        """What is in its file."""
        return self.committed_offset

    @property
    def end_offset(self) -> int:
        """What is only in a buffer is not told of."""
        return self.committed_offset

    def join_rounds(self, _rounds: list[Callable[[], None]], _in_round: Callable[[], bool]) -> None:
        """Nothing waits for a round."""

    def submit(self, put: Put, result: PutMessageResult, _on_done: PutCallback | None) -> PutMessageResult | None:
        """Records are in a buffer, or in a file that has none: they are dispatched once they are in their file."""
        if not self._real_time.timed:
            self._real_time.wake()
        put.let_go()
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
        """Commit, and flush by time, until ``stop``."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._real_time.run)
            await super().run()

    async def stop(self) -> bool:
        """Commit all and end the tasks; False where the device refused."""
        self._real_time.stop()
        self._end()
        return await self.commit()

    def _enough(self) -> bool:
        waiting = self._log.max_offset - self.committed_offset
        file = self._log.files.find(self.committed_offset)
        return waiting > 0 and (waiting >= self._least or not isinstance(file, PooledMappedFile) or file.is_full)

    async def _work(self) -> None:
        await self.commit()

    async def commit(self) -> bool:
        """Write into the files what is in the buffers now; False where that failed."""
        async with self._lock:
            for file in self._log.files.files[:]:
                if isinstance(file, PooledMappedFile) and not await self._commit_file(file):
                    return False
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
        if file.committed == file.size and not file.is_reserving:
            buffer = file.take_buffer()
            if buffer is not None:
                self._pool.give_back(buffer)
        return True

    async def _write(self, file: PooledMappedFile, wrote: int) -> bool:
        # a BLANK tells of room up to the file's end, which nothing has been written into and need not be
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
        self._tell_of_locks(file)
        return True

    def _fail(self, file: PooledMappedFile, error: OSError) -> None:
        reason = (
            f"writing {file.path} failed ({error.strerror or error}): what was acknowledged since then is in memory "
            "only. The store is read-only; check the device and restart"
        )
        if not self._flags.is_broken:
            _log.error("commit_log_commit_failed", file=file.path, error=str(error), committed=self.committed_offset)
        self._flags.set(Flag.NOT_WRITEABLE, reason, forever=True)

    def _tell_of_locks(self, file: PooledMappedFile) -> None:
        if file.lock_refused and not self._refused_to_lock:
            self._refused_to_lock = True
            _log.warning("write_buffers_not_locked", reason=lock_limit_text(file.lock_refused))
