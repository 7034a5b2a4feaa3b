"""Puts the messages of a slot into their real topics, or into the timer's topic again (RocketMQ's doPut, convert).

Records are read in log order. Puts do not wait for each other: under SYNC_FLUSH the whole slot shares a few syncs.
"""

import math
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.stored_again import QueuesOf, place_of, stored_again
from trimq.broker.services.timer_ahead import TimerAhead
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import DueTimers, MessageStore
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol import record
from trimq.protocol.property_names import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_UNIQ_KEY,
)
from trimq.protocol.property_text import decode_properties
from trimq.protocol.real_place import RealPlace
from trimq.protocol.timer_layout import MAGIC_DELETE, MAGIC_ROLL
from trimq.protocol.timer_message import delete_key, restored_text, rolled_text
from trimq.protocol.topic_rules import MAX_RETRY_TOPIC_LENGTH, TIMER_TOPIC
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget

_log = structlog.get_logger("broker.timer")

_TOPIC: Final = TIMER_TOPIC.encode()
_SLICE_SECONDS: Final = 0.001
_STOP_SECONDS: Final = 2.0
_MARKS_OF_SLICE: Final = 10_000
_IN_FLIGHT: Final = 1024
_FIRST_RETRY_MS: Final = 100
_LAST_RETRY_MS: Final = 10_000
READ_ATTEMPTS: Final = 8
"""After so many failed attempts to read a message it counts as lost; the pauses between them are 12.7 s."""
_HOPELESS: Final = (PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED)
_ALL_ALIKE: Final = (PutMessageStatus.SERVICE_NOT_AVAILABLE, PutMessageStatus.CREATE_MAPPED_FILE_FAILED)
"""Results that the next message would get too."""

MarkKey = tuple[str, str]
"""Of a delete mark: the topic that it was sent to, and its TIMER_DEL_UNIQKEY.

It cancels no message of another topic: who may send to one topic only could make messages of others disappear.
"""


class TimedMessage(NamedTuple):
    """A timed message, read from its record: the properties, and the view of its parts."""

    view: memoryview
    head: record.RecordHead
    properties: dict[str, str]


class NotReadableError(OSError):
    """A record is in the log, and may not be read before slaves have it."""


class _Attempt:
    """One attempt to put messages: what is on its way, and what has to be tried again."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.failed = array("q")
        """The numbers of messages that the store has not taken."""
        self.broken = array("q")
        """The numbers of messages that could not be read."""
        self.reason = ""
        self.refuses_all = False
        self._landed = trio.Event()

    def land(self) -> None:
        """A result has come."""
        self.in_flight -= 1
        self._landed.set()

    async def landing(self, most: int) -> None:
        """Wait until at most so many puts have no result yet."""
        while self.in_flight > most:
            self._landed = trio.Event()
            await self._landed.wait()


class TimerPuts:
    """Delivers messages by their places in the commit log."""

    def __init__(
        self,
        configuration: Configuration,
        store: MessageStore,
        clock: Clock,
        stats: BrokerStats,
        ahead: TimerAhead | None,
        store_host: bytes,
        queues_of: QueuesOf | None = None,
    ) -> None:
        """``queues_of``: see ``stored_again.place_of``."""
        self._configuration = configuration
        self._store = store
        self._ahead = ahead
        self._clock = clock
        self._stats = stats
        self._store_host = store_host
        self._queues_of = queues_of
        self._log_budget = LogBudget(clock)
        self.is_stopping = False
        """No further attempts are made."""
        self._stop_by = math.inf
        self._pausing: trio.CancelScope | None = None
        self.delivered = 0
        """Messages delivered since the start."""
        self.cancelled = 0
        """Messages that a delete mark cancelled."""
        self.dropped = 0
        """Messages that the store can never take."""
        self.deleted = 0
        """Messages whose records were gone from the commit log, or could not be read, when they were due."""

    @property
    def _config(self) -> MessageStoreConfig:
        return self._configuration.section(MessageStoreConfig)

    def stop(self) -> None:
        """Make no further attempts after a failure, and end a slot that takes long in its middle."""
        self.is_stopping = True
        self._stop_by = time.perf_counter() + _STOP_SECONDS
        if self._pausing is not None:
            self._pausing.cancel()

    async def _pause(self, milliseconds: int) -> bool:
        """Wait before the next attempt; False if there is none because of ``stop``."""
        if not self.is_stopping:
            with trio.CancelScope() as self._pausing:
                await self._clock.sleep(milliseconds / 1000)
            self._pausing = None
        return not self.is_stopping

    # delete marks

    async def marks(self, due: DueTimers) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """The properties of the delete marks in a slot: of those that are due, and of those that are rolling.

        One that cannot be read is left out: what it cancels is delivered.
        """
        found: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
        for begin in range(0, len(due) if due.deletes else 0, _MARKS_OF_SLICE):
            for at, magic in enumerate(due.magics[begin : begin + _MARKS_OF_SLICE], begin):
                if magic & MAGIC_DELETE:
                    message = await self._read_patiently(due.offsets[at], due.sizes[at])
                    if message is not None and PROPERTY_TIMER_DEL_UNIQKEY in message.properties:
                        found[bool(magic & MAGIC_ROLL)].append(message.properties)
            await trio.lowlevel.checkpoint()
        return found

    async def _read_patiently(self, offset: int, size: int) -> TimedMessage | None:
        """As ``_read``; None also if it cannot be read in several attempts, or if ``stop`` ended them."""
        pause = _FIRST_RETRY_MS
        for _ in range(READ_ATTEMPTS):
            try:
                while True:
                    try:
                        return await self._read(offset, size)
                    except NotReadableError:
                        if not await self._pause(_FIRST_RETRY_MS):
                            return None
            except Exception as error:  # noqa: BLE001 - the slot of the mark must not wait forever
                if self._log_budget.allows():
                    _log.warning("timer_mark_not_read", commit_log_offset=offset, error=str(error), wait_ms=pause)
            if not await self._pause(pause):
                break
            pause = min(2 * pause, _LAST_RETRY_MS)
        return None

    # delivery

    async def deliver(
        self, due: DueTimers, deleted: frozenset[MarkKey] = frozenset(), numbers: Sequence[int] | None = None
    ) -> Sequence[int]:
        """Put all messages of a slot that are not ``deleted``, or those with these ``numbers``.

        Returns the numbers of those that are left because of ``stop``; none if all are delivered.

        A failed put is tried again with growing pauses; those that succeeded are not. A message that cannot be read
        in READ_ATTEMPTS attempts is lost: others wait behind it.
        """
        remaining: Sequence[int] = range(len(due)) if numbers is None else numbers
        pause = _FIRST_RETRY_MS
        reads = 0
        while True:
            attempt = _Attempt()
            left = await self._deliver_each(attempt, due, remaining, deleted)
            reads = reads + 1 if attempt.broken else 0
            if reads < READ_ATTEMPTS:
                remaining = array("q", sorted([*attempt.failed, *attempt.broken, *left]))
            else:
                for at in attempt.broken:
                    self._lost(due.offsets[at], attempt.reason)
                remaining = array("q", sorted([*attempt.failed, *left]))
            if len(remaining) == 0:
                return ()
            _log.warning("timed_delivery_put_off", messages=len(remaining), reason=attempt.reason, wait_ms=pause)
            if not await self._pause(pause):
                return remaining
            pause = min(2 * pause, _LAST_RETRY_MS)

    async def leave_out(self, due: DueTimers, numbers: Sequence[int]) -> None:
        """The messages of a slot but those with these numbers were delivered before a start.

        The rolled copies that ``ahead`` has found then are those of these messages, and not of equal ones.
        ``numbers`` rise. A stop ends this in its middle.
        """
        ahead = self._ahead
        if ahead is None or not ahead.has_rolls:
            return
        left = 0
        until = time.perf_counter() + _SLICE_SECONDS
        for at, magic in enumerate(due.magics):
            if left < len(numbers) and numbers[left] == at:
                left += 1
            elif magic & MAGIC_ROLL:
                message = await self._read_patiently(due.offsets[at], due.sizes[at])
                if message is not None and (rolled := ahead.roll_of(*message)) is not None:
                    ahead.was_rolled(rolled)
            if self.is_stopping:
                return
            if time.perf_counter() >= until:
                await trio.lowlevel.checkpoint()
                until = time.perf_counter() + _SLICE_SECONDS

    async def _deliver_each(
        self, attempt: _Attempt, due: DueTimers, numbers: Iterable[int], deleted: frozenset[MarkKey]
    ) -> Iterator[int]:
        """One attempt. Returns the numbers of those that were not tried."""
        left = iter(numbers)
        until = time.perf_counter() + _SLICE_SECONDS
        try:
            for at in left:
                magic = due.magics[at]
                if not magic & MAGIC_DELETE or magic & MAGIC_ROLL:
                    try:
                        await self._deliver_one(attempt, due, at, deleted)
                    except NotReadableError as error:
                        attempt.failed.append(at)
                        attempt.reason = str(error)
                    except Exception as error:  # noqa: BLE001 - the others of the slot must neither wait nor come again
                        attempt.broken.append(at)
                        attempt.reason = f"{type(error).__name__}: {error}"
                if attempt.in_flight >= _IN_FLIGHT:
                    await attempt.landing(_IN_FLIGHT // 2)
                if attempt.refuses_all:
                    break
                now = time.perf_counter()
                if now >= until:
                    if now >= self._stop_by:
                        break
                    await trio.lowlevel.checkpoint()
                    until = time.perf_counter() + _SLICE_SECONDS
            await attempt.landing(0)
        finally:
            if attempt.in_flight:  # cancelled. The results are only counted; a sync may never end.
                with trio.move_on_after(_STOP_SECONDS, shield=True):
                    await attempt.landing(0)
        return left

    def _lost(self, offset: int, reason: str) -> None:
        self.deleted += 1
        if self._log_budget.allows():
            begins = self._store.min_phy_offset
            _log.error("timed_message_lost", commit_log_offset=offset, reason=reason, log_begins_at=begins)

    def _drop(self, topic: str, offset: int, reason: str) -> None:
        self.dropped += 1
        if self._log_budget.allows():
            _log.error(
                "timed_message_dropped", topic=topic[:MAX_RETRY_TOPIC_LENGTH], commit_log_offset=offset, reason=reason
            )

    async def _deliver_one(self, attempt: _Attempt, due: DueTimers, at: int, deleted: frozenset[MarkKey]) -> None:
        offset = due.offsets[at]
        message = await self._read(offset, due.sizes[at])
        if message is None:
            self._lost(offset, "its record is gone")
            return
        properties = message.properties
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        ahead, rolls = self._ahead, bool(due.magics[at] & MAGIC_ROLL)
        if (deleted and self._is_deleted(properties, topic, deleted)) or (ahead and ahead.cancels(properties)):
            self.cancelled += 1
            return
        if rolls and ahead and (rolled := ahead.roll_of(message.view, message.head, properties)) is not None:
            ahead.was_rolled(rolled)
            return
        inner = self._message(message, due.write_times[at], rolls=rolls)
        if isinstance(inner, str):
            self._drop(topic, offset, inner)
            return
        attempt.in_flight += 1
        done = partial(self._done, attempt, at, topic, offset, inner.topic)
        try:
            result = self._store.put_message(inner, done)
        except Exception:
            attempt.in_flight -= 1
            raise
        if result is not None:
            done(result)

    def _is_deleted(self, properties: dict[str, str], topic: str, deleted: frozenset[MarkKey]) -> bool:
        unique = properties.get(PROPERTY_UNIQ_KEY)
        with_topic = self._config.append_topic_for_timer_delete_key
        return unique is not None and (topic, delete_key(topic, unique, with_topic=with_topic)) in deleted

    def _done(
        self, attempt: _Attempt, at: int, topic: str, offset: int, stored_topic: str, result: PutMessageResult
    ) -> None:
        attempt.land()
        status = result.status
        if result.ok:
            self.delivered += 1
            if stored_topic == TIMER_TOPIC and self._ahead is not None:
                self._ahead.rolled(result.queue_offset)
            self._stats.topic_put(stored_topic, 1, result.size)
        elif status in _HOPELESS or (
            status is PutMessageStatus.UNKNOWN_ERROR and self._config.timer_skip_unknown_error
        ):
            self._drop(topic, offset, result.remark)
        else:
            attempt.failed.append(at)
            attempt.reason = f"{status.name}: {result.remark}"
            attempt.refuses_all = status in _ALL_ALIKE

    # records

    async def _read(self, offset: int, size: int) -> TimedMessage | None:
        """The timed message at a log offset, valid until the next await; None if another record, or none, is there.

        Raises NotReadableError, OSError.
        """
        data = self._store.look_own_message(offset)
        if data is None:
            data = self._store.look_message(offset)
        if data is None:
            data = await self._store.look_message_cold(offset)
        if len(data) != size:
            if self._store.readable_offset <= offset < self._store.appended_offset:
                raise NotReadableError("it waits for slaves, since the broker was restarted")
            return None
        view = memoryview(data)
        head = record.decode_head(view)
        if view[head.topic_at : head.topic_end] != _TOPIC:
            return None
        text = str(view[head.properties_at : head.properties_end], "utf-8", "replace")
        return TimedMessage(view, head, decode_properties(text))

    async def topic_at(self, offset: int, size: int) -> str | None:
        """REAL_TOPIC of the message at a log offset; None if it cannot be read now."""
        try:
            message = await self._read(offset, size)
        except Exception:  # noqa: BLE001 - its delivery will show why, and count it
            return None
        return None if message is None else message.properties.get(PROPERTY_REAL_TOPIC)

    def place(self, properties: dict[str, str]) -> RealPlace | str:
        """Where a message goes, or why it cannot be delivered."""
        return place_of(properties, self._queues_of)

    def _message(self, message: TimedMessage, write_time: int, *, rolls: bool) -> MessageInner | str:
        """What is put for a timed message, or why it cannot be delivered."""
        view, head, properties = message
        now = self._clock.wall_ms()
        if rolls:
            place: RealPlace | str = RealPlace(TIMER_TOPIC, 0)
            text = rolled_text(properties, write_time, now)
        else:
            if PROPERTY_TIMER_DEL_UNIQKEY in properties:
                return "it is a delete mark"
            place = self.place(properties)
            text = restored_text(properties, write_time, now)
        if isinstance(place, str):
            return place
        return stored_again(
            view,
            head,
            properties,
            place,
            text,
            store_host=self._store_host,
            indexes_tags=self._store.indexes_tags,
            prepared_transaction_offset=head.prepared_transaction_offset,
        )


def delete_keys(marks: Iterable[dict[str, str]]) -> frozenset[MarkKey]:
    """The keys of the messages that the delete marks of a slot cancel."""
    return frozenset(
        (properties.get(PROPERTY_REAL_TOPIC, ""), properties[PROPERTY_TIMER_DEL_UNIQKEY]) for properties in marks
    )
