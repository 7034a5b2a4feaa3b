"""PendingPuts: puts whose reply and dispatch wait until a position of the log covers them, in the order of the log."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog
import trio
from msgspec import Struct

from trimq.broker.store.log.puts import Dispatcher, Put
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus

_TURN: Final = 256

_log = structlog.get_logger(__name__)


class _Pending(Struct, gc=False):
    end: int
    deadline: float
    put: Put | None
    result: PutMessageResult
    on_done: PutCallback | None


class PendingPuts:
    """The puts of one store that wait, for the device or for slaves.

    A message with WAIT=false is answered immediately but dispatched in its turn. A message that waits longer than
    ``timeout`` seconds gets what ``late`` returns for its end, and is still dispatched in its turn.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        timeout: float,
        took: Callable[[float, int], None],
        late: Callable[[int], tuple[PutMessageStatus, str]],
    ) -> None:
        """``took`` is called with the seconds that replies have waited, and their number of messages."""
        self._dispatch = dispatcher.dispatch
        self._rolled = dispatcher.rolled
        self._timeout = timeout
        self._took = took
        self._late = late
        self._in_round: Callable[[], bool] = lambda: False  # whether the round's end will be heard soon
        self._pending: deque[_Pending] = deque()
        self._late_ones = 0
        """The number of entries at the front that were answered as late, or need no answer."""
        self._round_deadline = 0.0
        """The deadline of all puts of the current round; 0 before its first put."""
        self.wake: Callable[[], None] = lambda: None
        """Called when something has come outside of a round."""

    def __len__(self) -> int:
        return len(self._pending)

    def join_rounds(self, in_round: Callable[[], bool]) -> None:
        """``in_round``: whether ``round_ended`` will be called soon."""
        self._in_round = in_round

    def submit(self, put: Put, result: PutMessageResult, on_done: PutCallback | None) -> PutMessageResult | None:
        """See Durability: ``on_done`` is called when the records are covered. With WAIT=false the result is ready."""
        put.release_buffers()
        # One clock read for all puts of a round; ``complete`` relies on the shared deadline.
        deadline = self._round_deadline
        if not deadline:
            deadline = trio.current_time() + self._timeout
            if self._in_round():
                self._round_deadline = deadline
            else:
                self.wake()
        waits = put.wait
        end = result.physical_offset + result.size
        self._pending.append(_Pending(end, deadline, put, result, on_done if waits else None))
        return None if waits else result

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        """See Durability."""
        result = PutMessageResult(PutMessageStatus.PUT_OK, blank_offset, size=next_offset - blank_offset)
        self._pending.append(_Pending(next_offset, float("inf"), None, result, None))
        self.wake()

    def round_ended(self) -> None:
        """The puts that come from here on belong to another round."""
        self._round_deadline = 0.0

    def complete(self, covered: int) -> bool:
        """Dispatch and answer puts that end below ``covered``, one turn's worth at most. True if there are more."""
        pending, dispatch = self._pending, self._dispatch
        begin = trio.current_time() + self._timeout
        deadline, messages = 0.0, 0  # puts of one round share a deadline and are reported together
        for _ in range(_TURN):
            if not pending or pending[0].end > covered:
                break
            entry = pending.popleft()
            if self._late_ones:
                self._late_ones -= 1
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
        return bool(pending) and pending[0].end <= covered

    def fail(self, remark: str) -> None:
        """Refuse all waiting puts: none is acknowledged or becomes readable."""
        pending, self._pending, self._late_ones = self._pending, deque(), 0
        for entry in pending:
            if entry.on_done is not None:
                _answer(entry.on_done, PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark=remark))

    def leave(self) -> None:
        """Answer the waiting puts as late, at the end of the service: what covers them will not come any more."""
        for entry in self._pending:
            self._answer_late(entry)
        self._pending.clear()
        self._late_ones = 0

    async def watch_deadlines(self) -> None:
        """Answer the puts that are late. A put that arrives later has at least ``timeout`` from now."""
        while True:
            now = trio.current_time()
            following = now + self._timeout
            # Deadlines rise along the queue, so the first put that still waits sets the next time to look.
            late = []
            for entry in itertools.islice(self._pending, self._late_ones, None):
                if entry.deadline > now and entry.put is not None:
                    following = min(following, entry.deadline)
                    break
                late.append(entry)
            self._late_ones += len(late)
            for entry in late:
                self._answer_late(entry)
            await trio.sleep_until(following)

    def _answer_late(self, entry: _Pending) -> None:
        """The entry stays: the record is in the log, and is dispatched once it is covered."""
        if entry.on_done is not None:
            on_done, entry.on_done = entry.on_done, None
            status, remark = self._late(entry.end)
            _answer(on_done, PutMessageResult(status, *_place(entry.result), remark))


def _answer(on_done: PutCallback, result: PutMessageResult) -> None:
    try:
        on_done(result)
    except Exception:  # noqa: BLE001 - a fault in one callback must not end the service for all others
        _log.exception("put_callback_failed")


def _place(result: PutMessageResult) -> tuple[int, int, int, int, Sequence[int] | None]:
    return (result.physical_offset, result.queue_offset, result.size, result.store_timestamp, result.offsets)
