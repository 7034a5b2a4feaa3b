"""Asks producers for the state of halves that were not ended (RocketMQ's TransactionalMessageCheckService).

In each round, every pending half that is past its immunity is stored again with one more TRANSACTION_CHECK_TIMES, and a
check for the new one is sent to one producer of its group; the next check goes to the next producer. After
transactionCheckMax checks it is moved to TRANS_CHECK_MAX_TIME_TOPIC; a half that cannot be committed, because its real
topic or queue is none, at once: RocketMQ moves it there too, after its last check.

Unlike in RocketMQ, age alone ends no half, only checks that were sent count, and no half is moved to
TRANS_CHECK_MAX_TIME_TOPIC before it has been checked once since the start. While no producer of a group is connected,
its halves wait where they are.
"""

import time
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, Final

import structlog
import trio

from trimq.broker.config import BrokerConfig
from trimq.broker.services.producers import ProducerManager
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.services.transaction.half_queue import State
from trimq.broker.services.transaction.messages import check_body
from trimq.broker.services.transaction.service import TransactionalMessageService, TransactionStore
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.body import PERM_READ, PERM_WRITE
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.transaction import CheckTransactionStateRequestHeader
from trimq.protocol.message_id import encode_offset_id
from trimq.protocol.property_names import PROPERTY_CHECK_IMMUNITY_TIME, PROPERTY_UNIQ_KEY
from trimq.protocol.record import RecordError
from trimq.protocol.topic_rules import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC
from trimq.protocol.transaction import QUEUE, Half, NotAHalfError, decode_half, number_of
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.connection import Connection

_log = structlog.get_logger("broker.transaction")

_SLICE: Final = 0.001
_SPARSE_AT: Final = 1 << 20
_SPARSE: Final = 4
"""If the table of halves has _SPARSE_AT entries and only one in _SPARSE is pending, the first ones are stored again."""
_READ_ATTEMPTS: Final = 8
"""After so many failed attempts, one in each round, a half counts as unreadable."""
_MOST_ERRORS: Final = 64
"""So many failed reads end a round's look at the halves that could be read before, at the others, or at the table."""
_OPEN: Final = (State.PENDING, State.COMMITTING)
_HOPELESS: Final = (PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED)


class _Oldest:
    """The earliest of some times; 0 if there is none."""

    def __init__(self) -> None:
        self.since = 0

    def add(self, since: int) -> None:
        """One more time; 0 for none."""
        self.since = min(self.since or since, since or self.since)


class TransactionalMessageCheckService:
    """The rounds of checks."""

    def __init__(
        self,
        configuration: Configuration,
        store: TransactionStore,
        transactions: TransactionalMessageService,
        producers: ProducerManager,
        topics: TopicConfigManager,
        clock: Clock,
        broker_name: str,
    ) -> None:
        self._configuration = configuration
        self._store = store
        self._transactions = transactions
        self._producers = producers
        self._topics = topics
        self._clock = clock
        self._broker_name = broker_name
        self._log_budget = LogBudget(clock)
        self._unsent: dict[int, int] = {}
        """Halves stored again for which no check was sent -> by how much their number of checks is too high.

        More than 0 only where the store did not take the record with the right number.
        """
        self._failed: dict[int, int] = {}
        """Halves that the device did not give in the last round that tried -> failed attempts."""
        self._errors = 0
        self._round = trio.Lock()

    @property
    def unreadable(self) -> int:
        """Halves that cannot be read: they are neither ended nor lost, and are tried again."""
        found_here = sum(attempts >= _READ_ATTEMPTS for attempts in self._failed.values())
        return found_here + len(self._transactions.halves.unreadable)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """A round at every transactionCheckInterval, forever."""
        task_status.started()
        while True:
            await self._clock.sleep(self._configuration.section(BrokerConfig).transaction_check_interval / 1000)
            try:
                await self.check()
            except OSError as error:  # the device; the next round tries again
                _log.error("transaction_check_failed", reason=str(error))
            self._log_budget.sum_up()

    async def check(self) -> None:
        """One round: every half that is pending now is looked at once.

        One that the device does not give is tried again in the next rounds, after all others. Raises OSError if it
        gives many of them no more.
        """
        async with self._round:
            halves = self._transactions.halves
            halves.advance()
            end = halves.end
            self._forget()
            failed = list(self._failed)
            oldest = _Oldest()
            complete = await self._look_at(takewhile(lambda offset: offset < end, halves.all_pending()), oldest)
            errors = self._errors
            await self._look_at(failed, oldest, failed=True)
            self._transactions.oldest_ms = oldest.since
            if not complete:
                raise OSError(f"{errors} half messages could not be read")
            await self._make_dense()

    async def _look_at(self, offsets: Iterable[int], oldest: _Oldest, *, failed: bool = False) -> bool:
        """Look at halves; at those of ``_failed`` only if ``failed``. False if it ended after too many failed reads."""
        self._errors = 0
        began = time.perf_counter()
        for offset in offsets:
            if self._errors >= _MOST_ERRORS:
                return False
            if failed or offset not in self._failed:
                oldest.add(await self._check_one(offset))
            if time.perf_counter() - began > _SLICE:
                await trio.lowlevel.checkpoint()
                began = time.perf_counter()
        return True

    def _forget(self) -> None:
        """What is known of halves ends with the halves, that of unreadable ones also with their log files."""
        halves, begins = self._transactions.halves, self._store.min_offset(TRANS_HALF_TOPIC, QUEUE)
        self._failed = {offset: attempts for offset, attempts in self._failed.items() if self._is_pending(offset)}
        self._unsent = {offset: over for offset, over in self._unsent.items() if halves.state(offset) in _OPEN}
        for offset in [offset for offset in halves.unreadable if offset < begins]:
            self._lose(offset)

    async def _check_one(self, offset: int) -> int:
        """Look at one half. Returns when it was prepared; 0 if it is not pending or cannot be read. Raises OSError.

        Any other error is a fault in this half: the others have to be checked all the same.
        """
        since = 0
        try:
            half = await self._find(offset)
            if half is not None:
                since = half.since
                await self._check(half)
        except OSError:  # the device: it concerns all halves
            raise
        except Exception:  # noqa: BLE001 - see above; it is logged
            self._transactions.counters.failed += 1
            if self._log_budget.allows():
                _log.exception("half_message_not_checked", offset=offset)
        return since

    # reading

    def _look(self, offset: int) -> Half | None:
        """The pending half at an offset, if it is in memory."""
        units = self._store.look_units(TRANS_HALF_TOPIC, QUEUE, offset, 1)
        data = self._store.look_message(units[0][0]) if units else None
        return _decoded(data, offset) if data else None

    def _is_pending(self, offset: int) -> bool:
        return self._transactions.halves.state(offset) is State.PENDING

    async def _find(self, offset: int) -> Half | None:
        """The pending half at an offset; None if it was ended meanwhile, is lost, or not given by the device.

        The last two are noted. The half is pending until the caller's next await.
        """
        # Since the round began it may have been ended, or stored again: then another record stands for it.
        if not self._is_pending(offset):
            self._failed.pop(offset, None)
            return None
        try:
            half = self._look(offset) or await self._read(offset)
        except OSError as error:
            if not self._is_pending(offset):  # it was ended while the device was waited for
                self._failed.pop(offset, None)
                return None
            # Behind the others: a round may try only the first ones of these again.
            attempts = self._failed.pop(offset, 0) + 1
            self._failed[offset] = attempts
            self._errors += 1
            if attempts == _READ_ATTEMPTS:
                _log.error("half_message_unreadable", offset=offset, reason=str(error))
            elif attempts < _READ_ATTEMPTS and self._log_budget.allows():
                _log.warning("half_message_not_read", offset=offset, reason=str(error))
            return None
        self._failed.pop(offset, None)
        return half

    async def _read(self, offset: int) -> Half | None:
        """The same from the device; None if it has been ended meanwhile, or if it is lost, which is noted."""
        units = await self._store.queue_units(TRANS_HALF_TOPIC, QUEUE, offset, 1)
        data = await self._store.look_message_cold(units[0][0]) if units else b""
        if not self._is_pending(offset):
            return None
        half = _decoded(data, offset) if len(data) else None
        if half is None and offset < self._store.max_offset(TRANS_HALF_TOPIC, QUEUE):
            self._lose(offset)
        return half

    def _lose(self, offset: int) -> None:
        if self._transactions.lose(offset) and self._log_budget.allows():
            deleted = offset < self._store.min_offset(TRANS_HALF_TOPIC, QUEUE)
            _log.error("half_message_lost", offset=offset, why="its log file was deleted" if deleted else "damaged")

    # one half

    def _is_due(self, half: Half) -> bool:
        immune = self._configuration.section(BrokerConfig).transaction_time_out
        seconds = half.properties.get(PROPERTY_CHECK_IMMUNITY_TIME)
        if seconds is not None:
            immune = number_of(seconds, -1) * 1000 if number_of(seconds, -1) >= 0 else immune
        # A half from the future was stored before the clock was set back: it cannot be known how long it has waited.
        return not 0 <= self._clock.wall_ms() - half.since <= immune

    async def _check(self, half: Half) -> None:
        transactions = self._transactions
        if half.problem:
            await self._expire(half, half.problem)
            return
        if not self._is_due(half):
            return
        times = half.times - self._unsent.get(half.offset, 0)
        checked_here = half.offset >= transactions.check_again and not half.is_first and half.offset not in self._unsent
        if times >= self._configuration.section(BrokerConfig).transaction_check_max and checked_here:
            await self._expire(half, f"it was checked {times} times")
            return
        if self._member(half, times) is None:
            transactions.counters.unanswered += 1
            return
        body = bytes(half.body)  # the half's record is a view, which may not outlive the put
        message, result = await transactions.store_again(half, times + 1)
        if result.ok:
            self._unsent.pop(half.offset, None)
        elif result.status in _HOPELESS:  # a limit was lowered since it was stored: then the first record has to do
            head = half.head
            result = PutMessageResult(
                PutMessageStatus.PUT_OK, head.physical_offset, head.queue_offset, 0, head.store_timestamp
            )
        else:
            return
        if not self._is_pending(result.queue_offset):
            return  # it has been ended while it was stored again
        if not self._ask(half, body, message, result, times) and result.queue_offset != half.offset:
            await self._uncount(result.queue_offset, times)

    async def _uncount(self, offset: int, times: int) -> None:
        """No check was sent for a half that was stored again for one: store it with the number of those before.

        A number in memory would be forgotten by a restart. Raises OSError.
        """
        self._unsent[offset] = 1
        half = await self._find(offset)
        if half is not None:
            _, result = await self._transactions.store_again(half, times)
            if result.ok:
                self._unsent[result.queue_offset] = 0

    async def _expire(self, half: Half, reason: str) -> None:
        """Move a half to TRANS_CHECK_MAX_TIME_TOPIC."""
        offset = half.offset
        self._topics.create_on_send_back(TRANS_CHECK_MAX_TIME_TOPIC, 1, PERM_READ | PERM_WRITE)
        result = await self._transactions.expire(half)
        if self._log_budget.allows():
            _log.warning("half_message_expired", offset=offset, reason=reason, stored=result.ok)

    def _ask(self, half: Half, body: bytes, message: MessageInner, place: PutMessageResult, times: int) -> bool:
        """Send a check to a producer. False if none could be reached."""
        unique = half.properties.get(PROPERTY_UNIQ_KEY)
        header = CheckTransactionStateRequestHeader(
            topic=TRANS_HALF_TOPIC,
            tran_state_table_offset=place.queue_offset,
            commit_log_offset=place.physical_offset,
            msg_id=unique,
            transaction_id=unique,
            offset_msg_id=encode_offset_id(message.store_host, place.physical_offset),
            bname=self._broker_name,
        )
        record = check_body(half, body, message, place)
        request = RemotingCommand.request(RequestCode.CHECK_TRANSACTION_STATE, header, record, oneway=True)
        connection = self._member(half, times)
        if connection is None or not connection.send_oneway(request):
            return False
        self._transactions.counters.checks += 1
        return True

    def _member(self, half: Half, times: int) -> Connection | None:
        """The producer that gets the next check of a half: each check goes to the member after that of the last one."""
        members = self._producers.senders(half.group, half.topic)
        count = len(members)
        for step in range(count):
            connection = members[(half.origin + times + step) % count].connection
            if not connection.closed and not connection.is_over():
                return connection
        return None

    # room

    async def _make_dense(self) -> None:
        """Store the first pending halves again if they keep a large table alive in which most others are ended."""
        halves = self._transactions.halves
        end = halves.end
        offset = halves.next_pending(halves.first, end)
        self._errors = 0
        # The length of the table from the first pending half on: those before it need no entry once they are done.
        while offset >= 0 and max(_SPARSE_AT, halves.pending * _SPARSE) <= halves.end - offset:
            if self._errors >= _MOST_ERRORS:
                return
            half = await self._find(offset) if offset not in self._failed else None  # this round has tried those
            if half is not None:
                if not self._is_due(half):
                    return
                over = self._unsent.get(offset, 0)
                _, result = await self._transactions.store_again(half, half.times - over)
                if not result.ok:
                    return
                self._unsent[result.queue_offset] = 0
            await trio.lowlevel.checkpoint()
            offset = halves.next_pending(offset + 1, end)


def _decoded(data: Any, offset: int) -> Half | None:
    """The half in a record; None if the record is another one, because queue or log are damaged."""
    try:
        half = decode_half(data, any_place=True)
    except (NotAHalfError, RecordError):
        return None
    return half if half.offset == offset else None
