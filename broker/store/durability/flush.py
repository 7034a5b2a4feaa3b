"""The log onto the device: group commit for SYNC_FLUSH, flushing by time for ASYNC_FLUSH.

What a sync is, and where it runs, is said in log_sync.py.
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
    """SYNC_FLUSH: one sync for all that wait; then, in the order of the log, each is dispatched and its reply goes out.

    A message with WAIT=false is answered at once but dispatched in its turn. One that waits longer than ``timeout``
    seconds is answered FLUSH_DISK_TIMEOUT, and dispatched in its turn all the same.
    """

    waits = True
    at_once = None

    def __init__(
        self, log: CommitLog, sync: LogSync, dispatcher: Dispatcher, timeout: float, took: Callable[[float, int], None]
    ) -> None:
        """``took`` hears how long replies had to wait, and to how many messages."""
        self._log = log
        self._sync = sync
        self._dispatch = dispatcher.dispatch
        self._rolled = dispatcher.rolled
        self._timeout = timeout
        self._took = took
        self._in_round: Callable[[], bool] = lambda: False  # whether ``commit`` will be called soon
        self._pending: deque[_Pending] = deque()
        self._round_deadline = 0.0
        """That of all that the current round has submitted; 0 while it has nothing."""
        self._wake = trio.Event()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def readable_offset(self) -> int:
        """What is durable."""
        return self._sync.flushed_offset

    @property
    def end_offset(self) -> int:
        """See Durability."""
        return self._log.max_offset

    def join_rounds(self, rounds: list[Callable[[], None]], in_round: Callable[[], bool]) -> None:
        """One sync at the end of each round."""
        self._in_round = in_round
        rounds.append(self.commit)

    def submit(self, put: Put, result: PutMessageResult, on_done: PutCallback | None) -> PutMessageResult | None:
        """See Durability: ``on_done`` is called when they are durable. The result of one with WAIT=false is ready."""
        put.let_go()
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
        """At the end of a round of requests: sync and answer now where the device is quick, else let the task do it."""
        self._round_deadline = 0.0
        if not self._pending:
            return
        done = self._sync.flush_inline()
        if done is False:
            self._fail()
        elif done is None or self._complete():
            self._wake.set()

    def commit_soon(self) -> None:
        """See Durability: there are no write buffers."""

    async def run(self) -> None:
        """Sync and answer until ``stop``; what is pending then is still synced."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_deadlines)
            while self._pending or not self._stopping:
                await self._wake.wait()
                self._wake = trio.Event()
                while self._pending:
                    if not await self._sync.advance():
                        self._fail()
                        break
                    while self._complete():
                        await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    async def stop(self) -> bool:
        """End the task once everything is answered."""
        self._stopping = True
        self._wake.set()
        return True

    def _complete(self) -> bool:
        """Dispatch and answer what is durable, a turn's worth of it; True where there is more."""
        pending, flushed, dispatch = self._pending, self._sync.flushed_offset, self._dispatch
        begin = trio.current_time() + self._timeout
        deadline, messages = 0.0, 0  # of a round all have the same
        for _ in range(_TURN):
            if not pending or pending[0].end > flushed:
                break
            entry = pending.popleft()
            put = entry.put
            if put is None:
                self._rolled(entry.result.physical_offset, entry.end)
                continue
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


def _answer(on_done: PutCallback, result: PutMessageResult) -> None:
    try:
        on_done(result)
    except Exception:  # noqa: BLE001 - a fault of one that waited must not end the service of all
        _log.exception("put_callback_failed")


def _place(result: PutMessageResult) -> tuple[int, int, int, int, Sequence[int] | None]:
    return (result.physical_offset, result.queue_offset, result.size, result.store_timestamp, result.offsets)


class FlushRealTimeService(IntervalService):
    """ASYNC_FLUSH: a look every ``interval``; a sync where ``least_pages`` are dirty, a file is full, or time is up."""

    def __init__(
        self, log: CommitLog, sync: LogSync, *, interval: float, least_pages: int, thorough: float, timed: bool
    ) -> None:
        """Times in seconds; without ``timed`` puts ``wake`` the service too."""
        super().__init__(interval, thorough)
        self._log = log
        self._sync = sync
        self._least = least_pages
        self.timed = timed

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
