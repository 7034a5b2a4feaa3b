"""Flushes the log to the device: group commit for SYNC_FLUSH, flushing at intervals for ASYNC_FLUSH.

log_sync.py explains what one sync is and where it runs.
Source: RocketMQ's CommitLog.GroupCommitService, FlushRealTimeService and FlushDiskWatcher.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog
import trio
from msgspec import Struct

from trimq.broker.store.durability.log_sync import LogSync
from trimq.broker.store.interval_service import IntervalService
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.puts import Dispatcher, Put
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus

PAGE: Final = 4096
_TURN: Final = 256

_log = structlog.get_logger(__name__)


class _Pending(Struct, gc=False):
    end: int
    deadline: float
    put: Put | None
    result: PutMessageResult
    on_done: PutCallback | None


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
        self._dispatch = dispatcher.dispatch
        self._rolled = dispatcher.rolled
        self._timeout = timeout
        self._took = took
        self._in_round: Callable[[], bool] = lambda: False  # whether ``commit`` will be called soon
        self._pending: deque[_Pending] = deque()
        self._round_deadline = 0.0
        """The deadline of all puts of the current round; 0 before its first put."""
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
        self._in_round = in_round
        rounds.append(self.commit)

    def submit(self, put: Put, result: PutMessageResult, on_done: PutCallback | None) -> PutMessageResult | None:
        """See Durability: ``on_done`` is called when the records are durable. With WAIT=false the result is ready."""
        put.release_buffers()
        # One clock read for all puts of a round; ``_complete`` relies on the shared deadline.
        deadline = self._round_deadline
        if not deadline:
            deadline = trio.current_time() + self._timeout
            if self._in_round():
                self._round_deadline = deadline
            else:
                self._wake.set()
        waits = put.wait
        end = result.physical_offset + result.size
        self._pending.append(_Pending(end, deadline, put, result, on_done if waits else None))
        return None if waits else result

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        """See Durability."""
        result = PutMessageResult(PutMessageStatus.PUT_OK, blank_offset, size=next_offset - blank_offset)
        self._pending.append(_Pending(next_offset, float("inf"), None, result, None))
        self._wake.set()

    def commit(self) -> None:
        """End of a round of requests: sync and answer now if the device is quick, else leave it to the task."""
        self._round_deadline = 0.0
        if not self._pending:
            return
        done = self._sync.flush_inline()
        if done is False:
            self._fail()
        # None: the sync was not possible or is not finished. True of ``_complete``: more than one turn's worth is
        # durable. The task does the rest in both cases.
        elif done is None or self._complete():
            self._wake.set()

    def commit_soon(self) -> None:
        """See Durability: there are no write buffers."""

    async def commit_buffers(self) -> bool:
        """See Durability: there are no write buffers."""
        return True

    async def run(self) -> None:
        """Sync and answer until ``stop``; puts that are pending then are still synced."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_deadlines)
            while self._pending or not self._stopping:
                await self._wake.wait()
                # A new event before the work: a put during the sync sets it, so no wake-up is lost.
                self._wake = trio.Event()
                while self._pending:
                    if not await self._sync.advance():
                        self._fail()
                        break
                    while self._complete():
                        await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    async def stop(self) -> bool:
        """End the task once all puts are answered."""
        self._stopping = True
        self._wake.set()
        return True

    def _complete(self) -> bool:
        """Dispatch and answer durable puts, one turn's worth at most. Returns True if there are more."""
        pending, flushed, dispatch = self._pending, self._sync.flushed_offset, self._dispatch
        begin = trio.current_time() + self._timeout
        deadline, messages = 0.0, 0  # puts of one round share a deadline and are reported together
        for _ in range(_TURN):
            if not pending or pending[0].end > flushed:
                break
            entry = pending.popleft()
            put = entry.put
            if put is None:
                self._rolled(entry.result.physical_offset, entry.end)
                continue
            # Dispatched before the reply: the sender may pull the message as soon as it has the reply.
            dispatch(put, entry.result)
            if entry.on_done is None:
                continue
            if entry.deadline != deadline:
                if messages:
                    self._took(begin - deadline, messages)
                deadline, messages = entry.deadline, 0
            messages += put.count
            _answer(entry.on_done, entry.result)
        if messages:
            self._took(begin - deadline, messages)
        return bool(pending) and pending[0].end <= flushed

    def _fail(self) -> None:
        """Refuse all waiting puts: none is acknowledged or becomes readable."""
        pending, self._pending = self._pending, deque()
        for entry in pending:
            if entry.on_done is not None:
                _answer(
                    entry.on_done, PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark=self._sync.failed)
                )

    async def _watch_deadlines(self) -> None:
        """Answer the puts that are late. A put that arrives later has at least ``timeout`` from now."""
        while True:
            now = trio.current_time()
            following = now + self._timeout
            # Deadlines rise along the queue, so the first put that still waits sets the next time to look.
            for entry in self._pending:
                if entry.deadline > now:
                    following = min(following, entry.deadline)
                    if entry.on_done is not None:
                        break
                elif entry.on_done is not None:
                    # The entry stays: the record is in the log, and is dispatched once it is durable.
                    on_done, entry.on_done = entry.on_done, None
                    late = PutMessageStatus.FLUSH_DISK_TIMEOUT
                    remark = f"not on disk after {self._timeout:g} s"
                    _answer(on_done, PutMessageResult(late, *_place(entry.result), remark))
            await trio.sleep_until(following)


def _answer(on_done: PutCallback, result: PutMessageResult) -> None:
    try:
        on_done(result)
    except Exception:  # noqa: BLE001 - a fault in one callback must not end the service for all others
        _log.exception("put_callback_failed")


def _place(result: PutMessageResult) -> tuple[int, int, int, int, Sequence[int] | None]:
    return (result.physical_offset, result.queue_offset, result.size, result.store_timestamp, result.offsets)


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
