"""The put-message lock: while one append waits for room, all later ones queue behind it, first come first served.

The fast path only looks whether ``is_held``; nobody ever waits for a lock that is free. RocketMQ's choices of a lock
(spin, reentrant, adaptive) have no counterpart: one event loop appends.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import trio
from msgspec import Struct

from trimq.broker.store.log.puts import PatientPut
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus
from trimq.remoting.runtime.durations import Durations

CREATE_FILE_SECONDS: Final = 5.0
"""How long an append waits for a new file (RocketMQ's AllocateMappedFileService)."""
_TURN: Final = 256


class _Waiting(Struct):
    put: PatientPut
    on_done: PutCallback
    since: float


class PutMessageLock:
    """Appends that wait, in their order.

    ``append`` tries one put: a result, or None where it still has no room. ``finish`` takes a result to its end
    (dispatch, waiting for the disk), or counts a refusal, and gives the reply if that is ready.
    """

    def __init__(
        self,
        append: Callable[[PatientPut], PutMessageResult | None],
        finish: Callable[[PatientPut, PutMessageResult, PutCallback], PutMessageResult | None],
        refusal: Callable[[], PutMessageResult | None],
        *,
        busy_seconds: float,
        needs_file: Callable[[], bool],
    ) -> None:
        """``refusal`` answers all puts while the store refuses them; ``needs_file`` tells what is missing."""
        self._append = append
        self._finish = finish
        self._refusal = refusal
        self._busy_seconds = busy_seconds
        self._needs_file = needs_file
        self._queue: deque[_Waiting] = deque()
        self._changed = trio.Event()
        self._closed = False
        self.is_held = False
        self.waits = Durations()
        """How long appends that found no room have waited, whatever came of it."""
        self.busy = 0
        """Appends refused because the wait was too long."""

    def wait(self, put: PatientPut, on_done: PutCallback) -> PutMessageResult | None:
        """Queue up. The body is copied: it may lie in a buffer that the next read overwrites."""
        now = trio.current_time()
        if self._queue and now - self._queue[0].since > self._busy_seconds:
            return self._finish(put, self._busy(), on_done)
        put.keep()
        self._queue.append(_Waiting(put, on_done, now))
        self.is_held = True
        self._changed.set()
        return None

    def room(self) -> None:
        """There may be room now, or the store has begun to refuse."""
        if self._queue:
            self._changed.set()

    def __len__(self) -> int:
        return len(self._queue)

    def held_ms(self) -> int:
        """How long the first one in the queue has been waiting."""
        return int(1000 * (trio.current_time() - self._queue[0].since)) if self._queue else 0

    async def run(self) -> None:
        """Serve the queue until ``stop``."""
        while True:
            await self._serve()
            self._expire()
            if self._closed and not self._queue:
                break
            with trio.move_on_at(self._next_deadline()):
                await self._changed.wait()
            self._changed = trio.Event()

    def stop(self) -> None:
        """End the task once the queue is empty."""
        self._closed = True
        self._changed.set()

    async def _serve(self) -> None:
        """Append until somebody has to wait; the lock is free again where nobody does."""
        queue = self._queue
        served = 0
        while queue:
            head = queue[0]
            result = self._refusal() or self._append(head.put)
            if result is None:
                return
            queue.popleft()
            self._done(head, result)
            served += 1
            if served % _TURN == 0:
                await trio.lowlevel.checkpoint()
        self.is_held = False

    def _done(self, waiting: _Waiting, result: PutMessageResult) -> None:
        self.waits.add(trio.current_time() - waiting.since)
        reply = self._finish(waiting.put, result, waiting.on_done)
        if reply is not None:
            waiting.on_done(reply)

    def _limit(self, waiting: _Waiting, *, first: bool) -> float:
        patience = CREATE_FILE_SECONDS if first and self._needs_file() else self._busy_seconds
        return waiting.since + patience

    def _next_deadline(self) -> float:
        queue = self._queue
        if not queue:
            return float("inf")
        deadline = self._limit(queue[0], first=True)
        return min(deadline, self._limit(queue[1], first=False)) if len(queue) > 1 else deadline

    def _expire(self) -> None:
        """Answer those that have waited too long: in the order of arrival, but for one that waits for a file."""
        queue = self._queue
        now = trio.current_time()
        if not queue:
            return
        head = queue[0]
        first_due = now >= self._limit(head, first=True)
        needs_file = self._needs_file()
        late: list[_Waiting] = []
        queue.popleft()
        while queue and now >= queue[0].since + self._busy_seconds:
            late.append(queue.popleft())
        if not first_due:
            queue.appendleft(head)
        self.is_held = bool(queue)
        if first_due:
            self._done(head, self._no_file() if needs_file else self._busy())
        for waiting in late:
            self._done(waiting, self._busy())

    def _busy(self) -> PutMessageResult:
        self.busy += 1
        return PutMessageResult(
            PutMessageStatus.OS_PAGE_CACHE_BUSY,
            remark=f"waited more than {self._busy_seconds:g} s for room in the commit log; the disk does not keep up",
        )

    @staticmethod
    def _no_file() -> PutMessageResult:
        return PutMessageResult(
            PutMessageStatus.CREATE_MAPPED_FILE_FAILED,
            remark=f"the next commit log file was not ready after {CREATE_FILE_SECONDS:g} s",
        )
