"""TransactionalMessageService: ends halves, each once (RocketMQ's TransactionalMessageServiceImpl, TransactionMetrics).

A commit stores the message in its real topic, a rollback stores nothing. Both are noted in an op record
(broker/services/transaction/ops.py). A kill may leave a commit record whose op record is missing: the next start reads
such commit records from the log (broker/services/transaction/read_back.py), from the settled offset on
(broker/services/transaction/settled.py).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import trio

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.services.offsets import NOT_FOUND, ConsumerOffsetManager
from trimq.broker.services.stored_again import put_again
from trimq.broker.services.transaction.half_queue import HalfQueue, State
from trimq.broker.services.transaction.messages import HalfMessages
from trimq.broker.services.transaction.ops import End, OpQueue
from trimq.broker.services.transaction.settled import SettledOffset
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus
from trimq.protocol.native import Pending
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from trimq.protocol.transaction import GROUP, QUEUE, Half
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_SETTLE_SECONDS: Final = 1.0
_DENSE: Final = 4
"""Units of the half queue are read together if at least one in so many is needed."""
_UNREADABLE_SECONDS: Final = 1.0
_MOVING: Final = "the half message is being stored again"
_NOT_PENDING: Final = "the half message is not pending"


class TransactionStore(Protocol):
    """The part of the message store that transactions use."""

    @property
    def put_message(self) -> Callable[[MessageInner, PutCallback], PutMessageResult | None]:
        """Store a message; None if the result comes by the callback."""
        ...

    @property
    def flushed_offset(self) -> int:
        """Everything below is on the device."""
        ...

    @property
    def max_phy_offset(self) -> int:
        """The end of the log."""
        ...

    @property
    def limits(self) -> tuple[int, int]:
        """The largest body and the largest record, in bytes."""
        ...

    @property
    def indexes_tags(self) -> bool:
        """Whether the index has tags."""
        ...

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset behind the last readable message of a queue."""
        ...

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The offset of the first message of a queue."""
        ...

    def look_units(self, topic: str, queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]] | None:
        """(log offset, size, tags code) of units; None if they are not in memory."""
        ...

    async def queue_units(self, topic: str, queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]]:
        """The same for units that have to be read from the disk."""
        ...

    def own_log(self) -> tuple[int, memoryview]:
        """Log offset and bytes of the part of the last log file that may be read, and that this process has put."""
        ...

    def look_message(self, offset: int) -> Any | None:
        """The record at a log offset: b"" for none, None if it is not in memory."""
        ...

    async def look_message_cold(self, offset: int) -> Any:
        """As ``look_message``, waiting for the device."""
        ...

    async def flush(self) -> bool:
        """Make the log durable. False if the device refused."""
        ...


class Counters:
    """Totals since the start."""

    __slots__ = ("checks", "commits", "expired", "failed", "lost", "moved", "refused", "rollbacks", "unanswered")

    def __init__(self) -> None:
        self.commits = 0
        self.rollbacks = 0
        self.checks = 0
        """Checks sent to producers."""
        self.unanswered = 0
        """Halves that were due for a check while no producer of their group was connected."""
        self.moved = 0
        """Halves stored again."""
        self.expired = 0
        """Halves moved to TRANS_CHECK_MAX_TIME_TOPIC."""
        self.failed = 0
        """Halves that a fault of the broker's own kept from being checked, in any round."""
        self.refused = 0
        """Ends of halves that are not pending: ended otherwise, or being committed, or it is not known how."""
        self.lost = 0
        """Halves that could not be read any more before they were ended."""


class TransactionalMessageService:
    """The halves of this broker. ``halves`` is complete after the start has read them (read_back.py).

    ``check_again``: halves that were stored in this process have been checked in it if they are copies; those below
    this offset have not. ``oldest_ms``: when the oldest half was prepared that was pending at the start, or in the last
    round of checks (ms since the epoch); 0 if none was.
    """

    def __init__(
        self,
        *,
        configuration: Configuration,
        store: TransactionStore,
        offsets: ConsumerOffsetManager,
        disk: Disk,
        clock: Clock,
        store_host: bytes,
    ) -> None:
        self._configuration = configuration
        self._store = store
        self._offsets = offsets
        self.clock = clock
        self.counters = Counters()
        self.messages = HalfMessages(store_host, tags=store.indexes_tags)
        self.halves = HalfQueue()
        self.ops = OpQueue(configuration, store, self.messages, self.halves, clock)
        self.ops.on_done = self._end_is_durable
        self.check_again = 0
        self.oldest_ms = 0
        self._copies: deque[tuple[int, int]] = deque()  # log end of a half stored again, and what it replaces
        self._moving: set[int] = set()  # origins of halves that are being stored again
        self._arrival: trio.Event | None = None  # set when the next half can be read; None if no one waits for that
        self.settled = SettledOffset(
            disk,
            str(configuration.section(MessageStoreConfig).config_path / "transaction.json"),
            lambda: self.ops.end,
            lambda: configuration.section(BrokerConfig).flush_consumer_offset_interval / 1000,
        )

    async def load(self) -> None:
        """Read config/transaction.json. Raises StateFileError."""
        await self.settled.load()

    # -- the half queue

    def half_arriving(self, _topic: str, queue_id: int, next_offset: int, _tags: int, _store_timestamp: int) -> None:
        """A half can be read. The store calls it before the reply to the half leaves."""
        if queue_id == QUEUE:
            self.halves.reach(next_offset)
            if self._arrival is not None:
                self._arrival.set()
                self._arrival = None

    async def until_readable(self, offset: int) -> None:
        """Wait, a second at most, until the half at ``offset`` of the half queue can be read."""
        with trio.move_on_after(_UNREADABLE_SECONDS):
            while offset >= self.halves.end:
                if self._arrival is None:
                    self._arrival = trio.Event()
                await self._arrival.wait()

    # -- ends

    def commit(self, half: Half, on_done: PutCallback) -> PutMessageResult | None:
        """Store the commit record of a pending half. The result, or None if ``on_done`` gets it later."""
        offset, origin = self.halves.latest(half.origin, half.offset), half.origin
        self.halves.set(offset, State.COMMITTING)
        self.settled.putting(origin, self._store.max_phy_offset)

        def stored(result: PutMessageResult) -> None:
            self._committed(offset, origin, result)
            on_done(result)

        result = self._store.put_message(self.messages.committed(half), stored)
        if result is not None:
            self._committed(offset, origin, result)
        return result

    def _committed(self, offset: int, origin: int, result: PutMessageResult) -> None:
        offset = self.halves.latest(origin, offset)  # it may have been stored again meanwhile
        if result.ok:
            self.counters.commits += 1
            self._end(offset, origin, State.COMMITTED)
        else:
            self.settled.not_put(origin)
            self.halves.set(offset, State.PENDING)

    def roll_back(self, half: Half) -> None:
        """End a pending half without a message."""
        self.counters.rollbacks += 1
        self._end(self.halves.latest(half.origin, half.offset), half.origin, State.ROLLED_BACK)

    def _end(self, offset: int, origin: int, state: State) -> None:
        self.halves.set(offset, state)
        self.ops.add(End(offset, origin))

    # -- ends of a round, which have been read together (broker/processors/send/send_native.py)

    def pending(self) -> Pending:
        """The halves that may be ended together: those whose records are in the last file of the log."""
        start, log = self._store.own_log()
        return start, log, *self.halves.table

    def are_placed(self, halves: Sequence[tuple[int, int]]) -> bool:
        """Whether halves, which are (offset, log offset), are where the half queue has them; False if not in memory.

        A client may have sent a body with the bytes of a half, which may name any half and any topic.
        """
        offsets = [offset for offset, _ in halves]
        begin, count = min(offsets), max(offsets) - min(offsets) + 1
        look, own = self._store.look_units, (TRANS_HALF_TOPIC, QUEUE)
        if count > _DENSE * len(halves):
            return all(_is_unit(look(*own, offset, 1), 0, physical) for offset, physical in halves)
        units = look(*own, begin, count)
        return all(_is_unit(units, offset - begin, physical) for offset, physical in halves)

    def committing(self, offsets: Sequence[int]) -> None:
        """The commit records of pending halves are put now. Their first records stand for them (``pending``)."""
        self.halves.set_all(offsets, State.PENDING, State.COMMITTING)
        self.settled.putting_all(offsets, self._store.max_phy_offset)

    def committed(self, offsets: Sequence[int]) -> None:
        """Their commit records are stored."""
        self.counters.commits += len(offsets)
        self._end_all(offsets, State.COMMITTING, State.COMMITTED)

    def not_committed(self, offsets: Sequence[int]) -> None:
        """Their commit records could not be stored."""
        for offset in offsets:
            self.settled.not_put(offset)
            self.halves.set(self.halves.latest(offset, offset), State.PENDING)

    def rolled_back(self, offsets: Sequence[int]) -> None:
        """End pending halves without messages."""
        self.counters.rollbacks += len(offsets)
        self._end_all(offsets, State.PENDING, State.ROLLED_BACK)

    def _end_all(self, origins: Sequence[int], before: State, state: State) -> None:
        latest = self.halves.latest  # they may have been stored again meanwhile
        ends = [End(latest(origin, origin), origin) for origin in origins]
        self.halves.set_all([end.offset for end in ends], before, state)
        self.ops.add_all(ends)

    # -- ends that a start has found

    def found_end(self, offset: int, origin: int, state: State) -> None:
        """Set by the start: a pending half has a commit record, or is in TRANS_CHECK_MAX_TIME_TOPIC, without an op."""
        self.halves.set(offset, state)
        self.settled.found(origin)
        self.ops.add(End(offset, origin))

    async def forget_ops(self) -> None:
        """Set by the start: the op queue is damaged. Before any op record is put. Raises StateFileError."""
        await self.settled.forget()
        end = self._store.max_offset(TRANS_OP_HALF_TOPIC, QUEUE)
        self.ops.rebuild(end)
        # The ends will be in op records from ``end`` on. A start after the rebuild must not begin behind them, even if
        # this offset is the last one of the group that reached the disk.
        if self._offsets.own_offset(GROUP, TRANS_OP_HALF_TOPIC, QUEUE) > end:
            self._offsets.commit_own(GROUP, TRANS_OP_HALF_TOPIC, QUEUE, end)
            await self._offsets.persisted()

    def rebuild_ops(self) -> None:
        """Set by the start: the op queue is damaged, and ``halves`` has the ends that the log has. Write all again."""
        for offset in self.halves.all_ended():
            self.settled.found(offset)
            self.ops.add(End(offset, offset))
        self.ops.rebuilt()

    # -- halves stored again, and expired ones

    def _refusal(self, half: Half) -> PutMessageResult | None:
        """Why a half cannot be stored again or expire now; None if it can."""
        # A round of checks and an administrator may want it at the same time: two copies would be two halves, and a
        # copy would be pending after the half has expired.
        if half.origin in self._moving:
            return PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark=_MOVING)
        # It was ended since it was read, or another record stands for it: it would be pending, or end, a second time.
        if self.halves.state(half.offset) is not State.PENDING:
            return PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark=_NOT_PENDING)
        return None

    async def store_again(self, half: Half, times: int) -> tuple[MessageInner, PutMessageResult]:
        """Store a pending half again, after ``times`` checks; it stays pending, at the offset in the result.

        Nothing changes if the result is not ok.
        """
        message = self.messages.again(half, times)
        offset, origin = half.offset, half.origin
        refusal = self._refusal(half)
        if refusal is not None:
            return message, refusal
        self._moving.add(origin)

        def stored(result: PutMessageResult) -> None:
            self._moving.discard(origin)
            if result.ok:
                self.counters.moved += 1
                self._moved(offset, origin, result)

        return message, await self._put(message, stored)

    def _moved(self, offset: int, origin: int, result: PutMessageResult) -> None:
        new = result.queue_offset
        state = self.halves.state(offset)
        self.halves.moves(origin, offset, new)
        self._copies.append((result.physical_offset + result.size, offset))
        if state is State.PENDING:
            return
        # Ended while it was stored again: the copy shares that end.
        self.halves.set(new, state if state is not None else State.ENDED)
        if state is not State.COMMITTING:
            self.ops.add(End(new, origin))

    async def expire(self, half: Half) -> PutMessageResult:
        """Move a pending half to TRANS_CHECK_MAX_TIME_TOPIC. Nothing changes if the result is not ok."""
        origin = half.origin
        refusal = self._refusal(half)
        if refusal is not None:
            return refusal
        self.halves.set(half.offset, State.COMMITTING)  # no end is accepted meanwhile
        self.settled.putting(origin, self._store.max_phy_offset)

        def stored(result: PutMessageResult) -> None:
            if result.ok:
                self.counters.expired += 1
                self._end(half.offset, origin, State.EXPIRED)
            else:
                self.settled.not_put(origin)
                self.halves.set(half.offset, State.PENDING)

        return await self._put(self.messages.expired(half), stored)

    async def resume(self, half: Half) -> PutMessageResult:
        """Make a new half of one in TRANS_CHECK_MAX_TIME_TOPIC."""
        return await self._put(self.messages.resumed(half), _ignore)

    async def _put(self, message: MessageInner, stored: PutCallback) -> PutMessageResult:
        return await put_again(self._store, message, stored)

    def lose(self, offset: int) -> bool:
        """A record cannot be read any more: its log file was deleted, or it is damaged. False if no half is lost."""
        lost = self.halves.lose(offset)
        self.counters.lost += lost
        return lost

    # -- what is durable

    def _end_is_durable(self, end: End) -> None:
        self.settled.done(end.origin)
        self.halves.forget(end.origin)

    def settle(self) -> None:
        """Note what has become durable, and commit the group's offsets in the half queue and the op queue."""
        for _ in self.settling():
            pass

    def settling(self) -> Iterator[None]:
        """The same in steps, between which ends may be added: at full load a second has tens of thousands of them."""
        # Before anything else: what is below was durable when the oldest commit without an op record was found.
        flushed = self._store.flushed_offset
        yield from self.ops.settle(flushed)
        copies = self._copies
        while copies and copies[0][0] <= flushed:
            self.halves.done(copies.popleft()[1])
        first = self.halves.advance()
        offsets = [(TRANS_HALF_TOPIC, first)]
        # A half that could not be read may be one that was first stored at any earlier offset, and that is ended now by
        # its other records: a start that can read it needs all ends since this one.
        if not self.halves.unreadable and (op_offset := self.ops.advance(first)) >= 0:
            self.settled.settle(flushed, self.halves.pending)
            offsets.append((TRANS_OP_HALF_TOPIC, op_offset))
        for topic, offset in offsets:
            if offset > 0 or (offset == 0 and self._offsets.own_offset(GROUP, topic, QUEUE) != NOT_FOUND):
                self._offsets.commit_own(GROUP, topic, QUEUE, offset)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write op records, and note what has become durable, forever."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.ops.run)
            nursery.start_soon(self.settled.file.run, self.clock.sleep)
            task_status.started()
            while True:
                await self.clock.sleep(_SETTLE_SECONDS)
                for _ in self.settling():
                    await trio.lowlevel.checkpoint()

    async def stop(self) -> None:
        """Write the last op records and make them durable, so that the next start has nothing to read back."""
        if await self.ops.drain() and await self._store.flush():
            self.settle()
            self.settled.write()
        await self.settled.file.persist()


def _is_unit(units: Sequence[tuple[int, int, int]] | None, at: int, physical: int) -> bool:
    return units is not None and at < len(units) and units[at][0] == physical


def _ignore(_result: PutMessageResult) -> None:
    """The caller gets the result too."""
