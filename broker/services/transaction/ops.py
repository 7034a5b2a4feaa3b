"""Op records: the ends of halves, many to a record (RocketMQ's TransactionalOpBatchService, writeOp).

Ends are written in their order. An end is in memory until its op record is durable; then the half is done. A record
that could not be stored is tried again with the next ones, so no end is skipped.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple, Protocol

import structlog
import trio

from trimq.broker.config import BrokerConfig
from trimq.broker.services.transaction.half_queue import HalfQueue
from trimq.broker.services.transaction.messages import HalfMessages
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import PutCallback, PutMessageResult
from trimq.protocol.transaction import op_body
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget

_log = structlog.get_logger("broker.transaction")

_MOST_RECORDS: Final = 4096
"""Op records that are remembered one by one while they name halves that are not done: later ones count as one."""


class OpStore(Protocol):
    """The part of the message store that op records need."""

    @property
    def put_message(self) -> Callable[[MessageInner, PutCallback], PutMessageResult | None]:
        """Store a message; None if the result comes by the callback."""
        ...

    @property
    def limits(self) -> tuple[int, int]:
        """The largest body and the largest record, in bytes."""
        ...


class End(NamedTuple):
    """The end of a half: the offset that stood for it, and under which it was first stored."""

    offset: int
    origin: int


class _Written(NamedTuple):
    log_end: int
    op_end: int
    ends: list[End]


class _OpRecord(NamedTuple):
    """An op record in its queue, and the highest half in it, or in those before it that count as one with it."""

    offset: int
    highest: int


class OpQueue:
    """Ends that are not in an op record yet, those whose op record is not durable yet, and the op queue's progress.

    ``first`` is the first op record that names a half which is not done, or an earlier one.
    """

    def __init__(
        self, configuration: Configuration, store: OpStore, messages: HalfMessages, halves: HalfQueue, clock: Clock
    ) -> None:
        self._configuration = configuration
        self._store = store
        self._log_budget = LogBudget(clock)
        self._messages = messages
        self._halves = halves
        self._clock = clock
        self._waiting: deque[End] = deque()
        self._size = 0  # characters that the waiting ends take in a body
        self._putting = False
        self._idle = trio.Event()
        self._idle.set()
        self._written: deque[_Written] = deque()
        self._records: deque[_OpRecord] = deque()
        self._added = 0
        self._durable = 0  # of those that were added, in their order
        self._rebuilt_at: int | None = None  # the first op record of this process
        self._rebuilt = 0  # ends that were added before the rebuilt queue had all
        self.first = 0
        self.end = 0
        """Behind the last op record that is durable."""
        self.on_done: Callable[[End], None] = lambda _end: None
        """Called with each end that has become durable."""

    @property
    def waiting(self) -> int:
        """Ends that are in no op record yet."""
        return len(self._waiting)

    def start_at(self, first: int, end: int, records: list[tuple[int, int]]) -> None:
        """Set by the start: the op queue's part from ``first`` on, with the highest half in each of its records."""
        self.first, self.end = first, end
        self._records.clear()
        for each in records:
            self._remember(_OpRecord(*each))

    def rebuild(self, end: int) -> None:
        """Set by the start: the op queue is damaged, so the caller adds all ends again.

        Until they are durable ``first`` is not known: a start before that has to find them in the log once more.
        """
        self.first, self.end = -1, end

    def rebuilt(self) -> None:
        """Set by the start: all ends of the damaged queue have been added."""
        self._rebuilt = self._added

    def add(self, end: End) -> None:
        """A half has ended. Writes an op record if its size is reached: transactionOpMsgMaxSize or maxMessageSize."""
        self.add_all((end,))

    def add_all(self, ends: Collection[End]) -> None:
        """The same for several halves, in the order of their ends."""
        self._waiting.extend(ends)
        self._added += len(ends)
        self._size += sum(map(_length, ends))
        if self._size >= self._limit:
            self.write()

    @property
    def _limit(self) -> int:
        return min(self._configuration.section(BrokerConfig).transaction_op_msg_max_size, self._most)

    @property
    def _most(self) -> int:
        """The largest body that the store takes."""
        return self._store.limits[0]

    def write(self) -> None:
        """Put an op record of the waiting ends, unless one is being put: then the rest follows it."""
        if self._putting or not self._waiting:
            return
        ends: list[End] = []
        size, limit, most = 0, self._limit, self._most
        while self._waiting and size < limit:
            length = _length(self._waiting[0])
            if ends and size + length > most:
                break
            size += length
            ends.append(self._waiting.popleft())
        self._size -= size
        offsets = [offset for end in ends for offset in _offsets(end)]
        self._putting = True
        self._idle = trio.Event()

        def stored(result: PutMessageResult) -> None:
            self._stored(ends, max(offsets), result)

        result = self._store.put_message(self._messages.op(op_body(offsets), self._clock.wall_ms()), stored)
        if result is not None:
            stored(result)

    def _stored(self, ends: list[End], highest: int, result: PutMessageResult) -> None:
        self._putting = False
        self._idle.set()
        if result.ok:
            self._remember(_OpRecord(result.queue_offset, highest))
            self._written.append(_Written(result.physical_offset + result.size, result.queue_offset + 1, ends))
            if self._rebuilt_at is None:
                self._rebuilt_at = result.queue_offset
            if self._size >= self._limit:
                self.write()
            return
        # First again, in their order; ``run`` tries again after its interval.
        self._waiting.extendleft(reversed(ends))
        self._size += sum(map(_length, ends))
        if self._log_budget.allows():
            _log.warning("op_record_not_stored", status=result.status.name, reason=result.remark, waiting=self.waiting)

    def _remember(self, record: _OpRecord) -> None:
        # One half that is not done, or cannot be read, keeps all later records here: memory stays bounded, and a start
        # may read some more of them.
        if len(self._records) >= _MOST_RECORDS:
            record = _OpRecord(record.offset, max(record.highest, self._records.pop().highest))
        self._records.append(record)

    def settle(self, flushed: int) -> Iterator[None]:
        """The log is durable up to ``flushed``: the ends in durable op records are done. A step for each op record."""
        while self._written and self._written[0].log_end <= flushed:
            written = self._written.popleft()
            self.end = written.op_end
            self._durable += len(written.ends)
            for end in written.ends:
                for offset in _offsets(end):
                    self._halves.done(offset)
                self.on_done(end)
            yield  # last: meanwhile a stop may settle the rest

    def advance(self, first_half: int) -> int:
        """Move ``first`` behind the op records that name no half from ``first_half`` on, and return it; -1: unknown."""
        if self.first < 0:
            if self._durable < self._rebuilt:
                return -1
            self.first = self.end if self._rebuilt_at is None else self._rebuilt_at
        while self._records and self._records[0].highest < first_half:
            self.first = self._records.popleft().offset + 1
        return self.first

    async def drain(self) -> bool:
        """Write all waiting ends. False if the store refuses them."""
        while self._waiting or self._putting:
            await self._idle.wait()
            before = self.waiting
            self.write()
            await self._idle.wait()
            if self.waiting >= before > 0:
                return False
        return True

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write the waiting ends at every transactionOpBatchInterval, forever."""
        task_status.started()
        while True:
            await self._clock.sleep(self._configuration.section(BrokerConfig).transaction_op_batch_interval / 1000)
            self.write()
            self._log_budget.sum_up()


def _offsets(end: End) -> tuple[int, ...]:
    """The offsets in the op record: also the first one, by which a start recognizes all others of the same half."""
    return (end.offset,) if end.offset == end.origin else (end.origin, end.offset)


def _length(end: End) -> int:
    """The characters that an end takes in the body."""
    offset, origin = end
    return len(f"{offset},") if offset == origin else len(f"{origin},{offset},")
