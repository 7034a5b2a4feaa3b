"""Flushes the log to the device: group commit for SYNC_FLUSH, flushing at intervals for ASYNC_FLUSH.

log_sync.py explains what one sync is and where it runs.
Source: RocketMQ's CommitLog.GroupCommitService, FlushRealTimeService and FlushDiskWatcher.
"""

from collections.abc import Callable
from typing import Final

import trio

from trimq.broker.store.durability.log_sync import LogSync
from trimq.broker.store.durability.pending_puts import PendingPuts
from trimq.broker.store.interval_service import IntervalService
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.puts import Dispatcher
from trimq.broker.store.types import PutMessageStatus

PAGE: Final = 4096


class GroupCommitService:
    """SYNC_FLUSH: one sync for all waiting puts; then each is dispatched and answered, in the order of the log.

    A message with WAIT=false is answered immediately but dispatched in its turn. A message that waits longer than
    ``timeout`` seconds is answered FLUSH_DISK_TIMEOUT, and still dispatched in its turn.
    """

    waits = True
    dispatch_only = None

    def __init__(
        self, log: CommitLog, sync: LogSync, dispatcher: Dispatcher, timeout: float, took: Callable[[float, int], None]
    ) -> None:
        """``took`` is called with the seconds that replies have waited, and their number of messages."""
        self._log = log
        self._sync = sync
        self._timeout = timeout
        self._pending = PendingPuts(dispatcher, timeout, took, self._late)
        self._pending.wake = self._wake_task
        self.submit = self._pending.submit
        """See Durability."""
        self.rolled = self._pending.rolled
        """See Durability."""
        self._wake = trio.Event()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def readable_offset(self) -> int:
        """Records below this offset are durable."""
        return self._sync.flushed_offset

    @property
    def end_offset(self) -> int:
        """See Durability."""
        return self._log.max_offset

    def join_rounds(self, rounds: list[Callable[[], None]], in_round: Callable[[], bool]) -> None:
        """Sync once at the end of each round."""
        self._pending.join_rounds(in_round)
        rounds.append(self.commit)

    def commit(self) -> None:
        """End of a round of requests: sync and answer now if the device is quick, else leave it to the task."""
        pending = self._pending
        pending.round_ended()
        if not pending:
            return
        done = self._sync.flush_inline()
        if done is False:
            pending.fail(self._sync.failed)
        # None: the sync was not possible or is not finished. True of ``complete``: more than one turn's worth is
        # durable. The task does the rest in both cases.
        elif done is None or pending.complete(self._sync.flushed_offset):
            self._wake.set()

    def commit_soon(self) -> None:
        """See Durability: there are no write buffers."""

    async def commit_buffers(self) -> bool:
        """See Durability: there are no write buffers."""
        return True

    async def run(self) -> None:
        """Sync and answer until ``stop``; puts that are pending then are still synced."""
        pending, sync = self._pending, self._sync
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pending.watch_deadlines)
            while pending or not self._stopping:
                await self._wake.wait()
                # A new event before the work: a put during the sync sets it, so no wake-up is lost.
                self._wake = trio.Event()
                while pending:
                    if not await sync.advance():
                        pending.fail(sync.failed)
                        break
                    while pending.complete(sync.flushed_offset):
                        await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    async def stop(self) -> bool:
        """End the task once all puts are answered."""
        self._stopping = True
        self._wake.set()
        return True

    def _wake_task(self) -> None:
        self._wake.set()

    def _late(self, _end: int) -> tuple[PutMessageStatus, str]:
        return PutMessageStatus.FLUSH_DISK_TIMEOUT, f"not on disk after {self._timeout:g} s"


class FlushRealTimeService(IntervalService):
    """ASYNC_FLUSH: checks each ``interval``, and syncs if ``least_pages`` are dirty, a file is full, or time is up."""

    def __init__(
        self, log: CommitLog, sync: LogSync, *, interval: float, least_pages: int, thorough: float, timed: bool
    ) -> None:
        """Times are in seconds. Without ``timed``, each put also wakes the service."""
        super().__init__(interval, thorough)
        self._log = log
        self._sync = sync
        self._least = least_pages
        self.timed = timed

    def stop(self) -> None:
        """End the task. The last flush is the store's."""
        self._end()

    async def _work(self) -> None:
        await self._sync.flush()

    def _enough(self) -> bool:
        end = self._log.max_offset
        flushed = self._sync.flushed_offset
        if end // self._log.files.size > flushed // self._log.files.size:
            return True
        return end > flushed and end // PAGE - flushed // PAGE >= self._least
