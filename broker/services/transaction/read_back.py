"""Finds at the start which halves are pending.

From the group's offset on, all halves are pending that no op record names. If there are none, nothing else is read. The
records of the others are read: of several records of the same half, the last one stands for it. Then the log is read
from the settled offset on (service.py) for commit records, and for records in TRANS_CHECK_MAX_TIME_TOPIC, whose op
record is missing: their halves are ended too, and get an op record now. So no half is committed twice, whatever was cut
off at the end of the log.

A half that the device does not give is left as it is, after some attempts: it may be pending or ended. Until the next
start it is neither checked nor ended, and the progress in op queue and log is not noted, so that the next start has all
that this one had.

If the op queue does not have what it had (its topic was deleted, the group's offset is wrong, a record is damaged), the
op records are searched in the log instead, from the first half on, and all ends are written to the op queue again.
transaction.json says so until they are durable and all halves can be read: every start before that searches the log.
"""

from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import structlog
import trio

from trimq.broker.services.offsets import NOT_FOUND, ConsumerOffsetManager
from trimq.broker.services.transaction.half_queue import State
from trimq.broker.services.transaction.service import TransactionalMessageService
from trimq.broker.store.message_store import MessageStore
from trimq.protocol import record
from trimq.protocol.property_names import PROPERTY_TRAN_PREPARED_QUEUE_OFFSET, PROPERTY_UNIQ_KEY
from trimq.protocol.property_text import property_of
from trimq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_MASK
from trimq.protocol.topic_rules import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from trimq.protocol.transaction import GROUP, QUEUE, Half, NotAHalfError, decode_half, number_of, op_offsets
from trimq.remoting.runtime.log_budget import LogBudget

_log = structlog.get_logger("broker.transaction")

_T = TypeVar("_T")

_UNITS: Final = 256
_PAUSES: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""Seconds between the attempts to read the first records that the device does not give: others get one attempt."""


_pause = trio.sleep


class _DamagedError(Exception):
    """The op queue does not have what it had; the text says why."""


async def read_back(
    transactions: TransactionalMessageService, store: MessageStore, offsets: ConsumerOffsetManager
) -> None:
    """Fill ``transactions.halves``. Before clients are served. Raises OSError and StateFileError."""
    reader = _ReadBack(transactions, store)
    low, high = store.min_offset(TRANS_HALF_TOPIC, QUEUE), store.max_offset(TRANS_HALF_TOPIC, QUEUE)
    first = offsets.own_offset(GROUP, TRANS_HALF_TOPIC, QUEUE)
    first = low if first == NOT_FOUND else min(max(first, low), high)
    transactions.halves.restart(first, high)
    transactions.check_again = high
    damaged = ""
    try:
        await reader.read_ops(offsets.own_offset(GROUP, TRANS_OP_HALF_TOPIC, QUEUE))
    except _DamagedError as error:
        damaged = str(error)
        await transactions.forget_ops()
        await reader.search_ops()
    if transactions.halves.pending:
        await reader.read_pending()
        await reader.search_commits()
        transactions.oldest_ms = reader.oldest()
    if damaged:
        transactions.rebuild_ops()
    if damaged or reader.found:
        _log.warning(
            "transactions_read_back",
            pending=transactions.halves.pending,
            without_op_record=reader.found,
            read_from=reader.read_from,
            op_queue=damaged or "complete",
        )


class _ReadBack:
    """The steps of one start. ``found``: halves with a commit record and no op record."""

    def __init__(self, transactions: TransactionalMessageService, store: MessageStore) -> None:
        self._transactions = transactions
        self._halves = transactions.halves
        self._store = store
        self._ended_before: set[int] = set()  # offsets in op records below the first half: they may be origins
        # A table of the halves in the order of their records, in columns: a million of them may be pending.
        self._offsets = array("q")
        self._places = array("q")  # log offsets
        self._origins = array("q")
        self._uniques = array("q")  # hashes of the unique keys
        self._since = array("q")  # when they were prepared
        # The first records of those that were stored again, in the order of the log once all are known.
        self._first_places = array("q")
        self._first_origins = array("q")
        self._pauses = iter(_PAUSES)
        self._begin = 0  # of _units
        self._units: list[tuple[int, int, int]] = []  # of the half queue, which is read in steps
        self._singly_below = 0  # offset in the half queue: the device does not give all units before it
        self._log_budget = LogBudget(transactions.clock)
        self.found = 0
        self.read_from = -1

    def _end(self, offset: int) -> None:
        if offset < self._halves.first:
            self._ended_before.add(offset)
        else:
            self._halves.ended(offset)

    async def _record(self, physical_offset: int) -> Any:
        data = self._store.look_message(physical_offset)
        return await self._store.look_message_cold(physical_offset) if data is None else data

    async def _patiently(self, topic: str, offset: int, read: Callable[[], Awaitable[_T]]) -> _T:
        """The result of ``read``, in several attempts if the device reports an error. Raises OSError."""
        for pause in self._pauses:
            try:
                return await read()
            except OSError as error:
                _log.warning(
                    "half_message_not_read" if topic == TRANS_HALF_TOPIC else "op_record_not_read",
                    offset=offset,
                    reason=str(error),
                    wait_seconds=pause,
                )
                await _pause(pause)
        return await read()

    # op records

    async def read_ops(self, first: int) -> None:
        """Read the op queue from the group's offset on. Raises _DamagedError, and OSError for a bad page of the log."""
        store, transactions = self._store, self._transactions
        low, high = store.min_offset(TRANS_OP_HALF_TOPIC, QUEUE), store.max_offset(TRANS_OP_HALF_TOPIC, QUEUE)
        if transactions.settled.known_op_end < 0:
            raise _DamagedError("an earlier start has not written it again completely")
        known = max(first, transactions.settled.known_op_end)
        if known > high:
            raise _DamagedError(f"the op queue ends at {high}, it had {known} records")
        first = offset = max(first, low)
        if not len(self._halves):
            transactions.ops.start_at(high, high, [])
            return
        records: list[tuple[int, int]] = []
        while offset < high:
            units = await self._op_units(offset)
            if not units:
                raise _DamagedError(f"the op queue has no record {offset}")
            for physical_offset, _, _ in units:
                named = self._named(await self._op_record(offset, physical_offset), offset)
                records.append((offset, max(named, default=-1)))
                for half in named:
                    self._end(half)
                offset += 1
            await trio.lowlevel.checkpoint()
        transactions.ops.start_at(first, high, records)

    async def _op_units(self, offset: int) -> list[tuple[int, int, int]]:
        read = partial(self._store.queue_units, TRANS_OP_HALF_TOPIC, QUEUE, offset, _UNITS)
        try:
            return await self._patiently(TRANS_OP_HALF_TOPIC, offset, read)
        except OSError as error:
            raise _DamagedError(f"the op queue cannot be read at {offset}: {error}") from None

    async def _op_record(self, offset: int, physical_offset: int) -> Any:
        try:
            return await self._patiently(TRANS_OP_HALF_TOPIC, offset, partial(self._record, physical_offset))
        except OSError as error:
            # The log has no second copy of it, and a search of the log would read the same page through the map.
            raise OSError(error.errno, f"the op record at {physical_offset} of the log: {error}") from None

    def _named(self, data: Any, offset: int) -> list[int]:
        """The halves that an op record names. Raises _DamagedError if it is not the op record with this offset."""
        try:
            head = record.decode_head(data)
            topic = bytes(data[head.topic_at : head.topic_end]).decode("utf-8", "replace")
            if (topic, head.queue_id, head.queue_offset) != (TRANS_OP_HALF_TOPIC, QUEUE, offset):
                raise _DamagedError(f"the op queue has no record {offset}")
            return op_offsets(bytes(data[head.body_at : head.body_end]))
        except ValueError as error:
            raise _DamagedError(f"op record {offset}: {error}") from None

    async def search_ops(self) -> None:
        """Find the op records in the log."""

        def visit(topic: str, _sys_flag: int, data: Any) -> None:
            if topic == TRANS_OP_HALF_TOPIC:
                head = record.decode_head(data)
                try:
                    named = op_offsets(bytes(data[head.body_at : head.body_end]))
                except ValueError as error:
                    _log.error("op_record_damaged", offset=head.physical_offset, why=str(error))
                    return
                for half in named:
                    self._end(half)

        if len(self._halves):
            await self._store.read_log(await self._first_half(), visit)

    async def _first_half(self) -> int:
        """Log offset of the first half in the table; that of the whole log if it cannot be read."""
        try:
            units = await self._store.queue_units(TRANS_HALF_TOPIC, QUEUE, self._halves.first, 1)
        except OSError as error:
            _log.warning("half_message_not_read", offset=self._halves.first, reason=str(error))
            units = []
        return units[0][0] if units else self._store.min_phy_offset

    # pending halves

    async def read_pending(self) -> None:
        """Read the pending halves, and leave the last record of each."""
        halves = self._halves
        for offset in halves.all_pending():
            try:
                half, first_place = await self._patiently(TRANS_HALF_TOPIC, offset, partial(self._half, offset))
            except OSError as error:
                halves.hide(offset)
                if self._log_budget.allows():
                    _log.error("half_message_unreadable", offset=offset, reason=str(error))
                continue
            if half is None:
                continue  # the first round of checks finds it again, and reports it
            origin = half.origin
            if self._is_ended(origin):
                halves.ended(offset)
                continue
            self._offsets.append(offset)
            self._places.append(half.physical_offset)
            self._origins.append(origin)
            self._uniques.append(hash(half.properties.get(PROPERTY_UNIQ_KEY, "")))
            self._since.append(half.since)
            if origin != offset:
                before = halves.latest(origin, origin)
                if halves.state(before) is State.PENDING:
                    halves.replaced(before)
                halves.stands_for(origin, offset)
                # A late commit names the first record, even if that is below the first half of the table.
                if first_place >= 0:
                    self._first_places.append(first_place)
                    self._first_origins.append(origin)
        self._log_budget.sum_up()
        order = sorted(range(len(self._first_places)), key=self._first_places.__getitem__)
        self._first_places = array("q", map(self._first_places.__getitem__, order))
        self._first_origins = array("q", map(self._first_origins.__getitem__, order))

    async def _half(self, offset: int) -> tuple[Half | None, int]:
        """The half at an offset, None if it is damaged, and the log offset of its first record if that is another."""
        store = self._store
        physical_offset = await self._place(offset)
        data = await self._record(physical_offset) if physical_offset >= 0 else b""
        try:
            half = decode_half(data, any_place=True) if len(data) else None
        except (NotAHalfError, record.RecordError):
            return None, -1
        if half is None or half.offset != offset:
            return None, -1
        half.data = None  # it may be a view, and only its head and properties are needed
        first = [] if half.is_first else await store.queue_units(TRANS_HALF_TOPIC, QUEUE, half.origin, 1)
        return half, first[0][0] if first else -1

    async def _place(self, offset: int) -> int:
        """The log offset of the half at an offset; -1 if the half queue has none."""
        if not self._begin <= offset < self._begin + len(self._units):
            self._begin, self._units = offset, []
            if offset >= self._singly_below:
                try:
                    self._units = await self._store.queue_units(TRANS_HALF_TOPIC, QUEUE, offset, _UNITS)
                except OSError:
                    self._singly_below = offset + _UNITS
            # One page that the device does not give hides only the halves on it, not all of the step.
            if offset < self._singly_below:
                self._units = await self._store.queue_units(TRANS_HALF_TOPIC, QUEUE, offset, 1)
        return self._units[offset - self._begin][0] if self._units else -1

    def _is_ended(self, origin: int) -> bool:
        if origin < self._halves.first:
            return origin in self._ended_before
        return self._halves.state(origin) is State.ENDED

    def oldest(self) -> int:
        """When the oldest pending half was prepared; 0 if none is pending."""
        state = self._halves.state
        rows = zip(self._offsets, self._since, strict=True)
        return min((since for offset, since in rows if state(offset) is State.PENDING), default=0)

    async def search_commits(self) -> None:
        """Find the halves among the pending ones that are ended by a record in the log."""
        if not len(self._places):
            return

        def visit(topic: str, sys_flag: int, data: Any) -> None:
            if sys_flag & TRANSACTION_MASK == TRANSACTION_COMMIT:
                self._commit(data, State.COMMITTED)
            elif topic == TRANS_CHECK_MAX_TIME_TOPIC:
                self._commit(data, State.EXPIRED)

        settled = self._transactions.settled.offset
        known = 0 <= settled <= self._store.appended_offset
        lowest = min([*self._places[:1], *self._first_places[:1]])
        self.read_from = max(lowest, settled if known else 0)
        await self._store.read_log(self.read_from, visit)

    def _commit(self, data: Any, state: State) -> None:
        head = record.decode_head(data)
        text = str(data[head.properties_at : head.properties_end], "utf-8", "replace")
        origin = self._origin(head.prepared_transaction_offset)
        if origin < 0:
            # It may name a record of the half between the first one and the last one.
            origin = number_of(property_of(text, PROPERTY_TRAN_PREPARED_QUEUE_OFFSET), -1)
        offset = self._halves.latest(origin, origin)
        row = _find(self._offsets, offset)
        if row < 0 or hash(property_of(text, PROPERTY_UNIQ_KEY)) != self._uniques[row]:
            return
        if self._halves.state(offset) is State.PENDING:
            self.found += 1
            self._transactions.found_end(offset, origin, state)

    def _origin(self, physical_offset: int) -> int:
        """The origin of the half whose first or last record is at this log offset; -1 if there is none."""
        row = _find(self._places, physical_offset)
        if row >= 0:
            return self._origins[row]
        row = _find(self._first_places, physical_offset)
        return self._first_origins[row] if row >= 0 else -1


def _find(column: Sequence[int], value: int) -> int:
    """The row with this value in a column whose values rise; -1 if there is none."""
    row = bisect_left(column, value)
    return row if row < len(column) and column[row] == value else -1
