"""The put-message lock: while one append waits for space, all later ones queue behind it, first come, first served.

The fast path only checks ``is_held``; no put waits for a lock that is free. RocketMQ's choices of a lock (spin,
reentrant, adaptive) have no counterpart here, because one event loop does all appends.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import trio
from msgspec import Struct

from trimq.broker.store.log.puts import WaitablePut
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus
from trimq.remoting.runtime.durations import Durations

CREATE_FILE_SECONDS: Final = 5.0
"""How long an append waits for a new file (RocketMQ's AllocateMappedFileService)."""
_TURN: Final = 256


class _Waiting(Struct):
    put: WaitablePut
    on_done: PutCallback
    since: float


class PutMessageLock:
    """Appends that wait, in order of arrival.

    ``append`` tries one put: it returns a result, or None if the space is still missing. ``finish`` completes a put
    with its result (dispatch and wait for the disk, or count the refusal) and returns the reply if it is ready.
    """

    def __init__(
        self,
        append: Callable[[WaitablePut], PutMessageResult | None],
        finish: Callable[[WaitablePut, PutMessageResult, PutCallback], PutMessageResult | None],
        refusal: Callable[[], PutMessageResult | None],
        *,
        busy_seconds: float,
        needs_file: Callable[[], bool],
    ) -> None:
        """``refusal`` answers all puts while the store refuses them; ``needs_file``: they wait for a whole file."""
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
        """How long appends have waited for space, whatever their result."""
        self.busy = 0
        """Appends refused because the wait was too long."""

    def wait(self, put: WaitablePut, on_done: PutCallback) -> PutMessageResult | None:
        """Queue the put. The body is copied: it may be in a buffer that the next receive overwrites."""
        now = trio.current_time()
        # Back-pressure: when the first put has already waited too long, a new one is refused instead of queued.
        if self._queue and now - self._queue[0].since > self._busy_seconds:
            return self._finish(put, self._busy(), on_done)
        put.copy_buffers()
        self._queue.append(_Waiting(put, on_done, now))
        self.is_held = True
        self._changed.set()
        return None

    def space_ready(self) -> None:
        """There may be space now, or the store has started to refuse puts."""
        if self._queue:
            self._changed.set()

    def __len__(self) -> int:
        return len(self._queue)

    def held_ms(self) -> int:
        """How long the first put in the queue has been waiting, in ms."""
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
            # A new event before the next pass: a change during the pass sets it, so no wake-up is lost.
            self._changed = trio.Event()

    def stop(self) -> None:
        """End the task as soon as the queue is empty."""
        self._closed = True
        self._changed.set()

    async def _serve(self) -> None:
        """Append in order until a put has to wait; the lock is released when the queue is empty."""
        queue = self._queue
        served = 0
        while queue:
            head = queue[0]
            result = self._refusal() or self._append(head.put)
            if result is None:
                return
            # Removed only now: as long as it waits for space, the put keeps its place in front of all later ones.
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
        # A file takes longer than a step of the current one, so the head gets RocketMQ's time for it.
        patience = CREATE_FILE_SECONDS if first and self._needs_file() else self._busy_seconds
        return waiting.since + patience

    def _next_deadline(self) -> float:
        queue = self._queue
        if not queue:
            return float("inf")
        deadline = self._limit(queue[0], first=True)
        return min(deadline, self._limit(queue[1], first=False)) if len(queue) > 1 else deadline

    def _expire(self) -> None:
        """Answer the puts that have waited too long, in order of arrival. One that needs a file may wait longer."""
        queue = self._queue
        now = trio.current_time()
        if not queue:
            return
        head = queue[0]
        first_due = now >= self._limit(head, first=True)
        needs_file = self._needs_file()
        late: list[_Waiting] = []
        # The head may have more time than those behind it. So take out the late ones first, then decide about it.
        queue.popleft()
        while queue and now >= queue[0].since + self._busy_seconds:
            late.append(queue.popleft())
        if not first_due:
            queue.appendleft(head)
        # Set before any callback runs: a callback may put again, and must find the lock in its new state.
        self.is_held = bool(queue)
        if first_due:
            self._done(head, self._no_file() if needs_file else self._busy())
        for waiting in late:
            self._done(waiting, self._busy())

    def _busy(self) -> PutMessageResult:
        self.busy += 1
        return PutMessageResult(
            PutMessageStatus.OS_PAGE_CACHE_BUSY,
            remark=f"waited more than {self._busy_seconds:g} s for space in the commit log; the disk does not keep up",
        )

    @staticmethod
    def _no_file() -> PutMessageResult:
        return PutMessageResult(
            PutMessageStatus.CREATE_MAPPED_FILE_FAILED,
            remark=f"the next commit log file was not ready after {CREATE_FILE_SECONDS:g} s",
        )
