"""TimerEnqueue: takes new messages of the timer's queue into the wheel, and delivers those that are due already.

With timerStopDequeue those enter the wheel too. One whose slot is delivered is late: it gets the next slot that is not,
and the checkpoint notes that (``TimerStore.late_since``). The read time does not go back for it: RocketMQ reads all
slots from there on, also those that are delivered.

For each batch the units are written first, then what is due is delivered, then wheel and queue offset move in memory.
So a disk that takes no units leaves the whole batch in the queue, and none of it is delivered again and again.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.services.timer_ahead import TimerAhead, read_timer_queue
from trimq.broker.services.timer_metrics import TimerMetrics
from trimq.broker.services.timer_put import READ_ATTEMPTS, TimerPuts
from trimq.broker.store.message_store import DueTimers, MessageStore, NewTimer, TimerStore
from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.protocol import record
from trimq.protocol.hashing import tags_code
from trimq.protocol.property_names import PROPERTY_REAL_TOPIC
from trimq.protocol.property_text import decode_properties
from trimq.protocol.timer_layout import MAGIC_DEFAULT, MAGIC_DELETE
from trimq.protocol.timer_message import NEVER_ENQUEUED, TimerTextError, due_time, is_delete_mark
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget

_log = structlog.get_logger("broker.timer")

_READS: Final = 8
"""Reads of a batch: a read returns few messages, and a write costs the same for many."""
_TURN_SECONDS: Final = 0.02
"""How long new messages may enter the wheel while slots are due."""


class TimerEnqueue:
    """The way from the queue into the wheel. Only the timer's task calls this."""

    def __init__(
        self,
        configuration: Configuration,
        store: MessageStore,
        timers: TimerStore,
        ahead: TimerAhead,
        puts: TimerPuts,
        metrics: TimerMetrics,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called when something has entered the wheel or was delivered."""
        self._configuration = configuration
        self._store = store
        self._timers = timers
        self._ahead = ahead
        self._puts = puts
        self._metrics = metrics
        self._clock = clock
        self._on_change = on_change
        self._log_budget = LogBudget(clock)
        self._failed_at = -1
        self._failed_reads = 0
        self.enqueued = 0
        """Messages that entered the wheel since the start."""

    async def run_once(self) -> bool:
        """Take new messages for a while. True if there are more that can enter now. Raises OSError."""
        until = time.perf_counter() + _TURN_SECONDS
        while not self._puts.is_stopping and not self._configuration.section(MessageStoreConfig).timer_stop_enqueue:
            if not await self._take_batch():
                return False
            if time.perf_counter() >= until:
                return True
            await trio.lowlevel.checkpoint()
        return False

    async def _take_batch(self) -> bool:
        timers, ahead = self._timers, self._ahead
        config = self._configuration.section(MessageStoreConfig)
        wall = self._clock.wall_ms()
        now = wall - wall % timers.precision
        # Before a slot gets messages: a checkpoint with a later read time would count it as delivered.
        timers.keep_read_time_before(now)
        batch = _Batch(timers, ahead, self._problem, now, self._log_budget, delivers=not config.timer_stop_dequeue)
        for number in range(_READS):
            try:
                result = await read_timer_queue(self._store, batch.next_offset, cold=not number)
            except OSError as error:
                return self._skip_unreadable(error)
            if result is None:
                break
            try:
                if result.status is GetMessageStatus.FOUND:
                    batch.take(result.buffers)
                elif number:
                    break
                else:
                    return self._skip_deleted(result)
            finally:
                result.release()
            if batch.is_full:
                break
        if batch.next_offset == timers.next_offset:
            return False
        placed = await timers.write(batch.new)
        if len(batch.due):
            await ahead.look()
        ahead.keep(batch.late_marks)
        if left := await self._puts.deliver(batch.due):
            # The task ends. In the wheel, what is left comes after the next start, without what was put.
            if not batch.put_off(left):
                return False
            placed = await timers.write(batch.new)
        self._puts.dropped += batch.dropped
        timers.enter(placed, batch.next_offset)
        for name, count in batch.rolled.items():
            ahead.was_rolled(name, count)
        ahead.passed()
        self._metrics.add(batch.topics)
        self.enqueued += len(batch.new)
        self._on_change()
        return not batch.is_full

    def _problem(self, topic: str, properties: dict[str, str]) -> str:
        """Why a message cannot be delivered to its real topic, or "": it would only grow the table of counts."""
        if topic in self._metrics.counts:
            return ""
        place = self._puts.place(properties)
        return place if isinstance(place, str) else ""

    def _skip_deleted(self, result: GetMessageResult) -> bool:
        """A read that found nothing: the queue is at its end, or its next messages were deleted."""
        first = self._timers.next_offset
        if result.status is GetMessageStatus.OFFSET_OVERFLOW_BADLY or result.next_begin_offset <= first:
            return False
        lost = result.next_begin_offset - first
        if self._log_budget.allows():
            _log.error("timed_messages_deleted", first=first, count=lost)
        self._skip(lost)
        return True

    def _skip_unreadable(self, error: OSError) -> bool:
        """The next message cannot be read. It is skipped after some attempts: others wait behind it."""
        if self._failed_at != self._timers.next_offset:
            self._failed_at, self._failed_reads = self._timers.next_offset, 0
        self._failed_reads += 1
        if self._failed_reads < READ_ATTEMPTS:
            raise error
        if self._log_budget.allows():
            _log.error("timed_message_unreadable", queue_offset=self._timers.next_offset, reason=str(error))
        self._skip(1)
        return True

    def _skip(self, lost: int) -> None:
        timers = self._timers
        self._puts.deleted += lost
        timers.enter(None, timers.next_offset + lost)
        self._ahead.passed()
        self._on_change()


class _Place(NamedTuple):
    """The place in the wheel that a message has, or would have: its topic counts there. ``due`` is its own time."""

    timer: NewTimer
    topic: str
    due: int


class _Batch:
    """The messages of one read of the queue: those for the wheel, and those that are due already."""

    def __init__(
        self,
        timers: TimerStore,
        ahead: TimerAhead,
        problem: Callable[[str, dict[str, str]], str],
        now: int,
        log_budget: LogBudget,
        *,
        delivers: bool,
    ) -> None:
        """``delivers``: messages that are due already are delivered, and do not enter the wheel."""
        self._timers = timers
        self._ahead = ahead
        self._problem = problem
        self._now = now
        self._log_budget = log_budget
        self._delivers = delivers
        self.new: list[NewTimer] = []
        self.due = DueTimers()
        self._due_places: list[_Place] = []
        self._late_places: list[_Place] = []
        """The places that those in ``due`` and ``late_marks`` would have."""
        self.topics: dict[str, int] = {}
        self.late_marks: list[dict[str, str]] = []
        """Marks whose messages are delivered."""
        self.rolled: dict[bytes, int] = {}
        """The numbers of messages whose rolled copies are ahead (see TimerAhead.roll_of)."""
        self.dropped = 0
        """Messages that can never be delivered."""
        self.next_offset = timers.next_offset
        self.is_full = False
        """The wheel still has an overdue slot where the next message has to go."""

    def take(self, buffers: Iterable[Any]) -> None:
        """Take the records of a read, as far as the wheel has place for them."""
        for buffer in buffers:
            view = memoryview(buffer)
            at = 0
            while at < len(view) and not self.is_full:
                head = record.decode_head(view, at)
                at += head.size
                if head.queue_offset >= self.next_offset:
                    self._take_one(view, head)

    def _take_one(self, view: memoryview, head: record.RecordHead) -> None:
        properties = decode_properties(str(view[head.properties_at : head.properties_end], "utf-8", "replace"))
        timers, topic = self._timers, properties.get(PROPERTY_REAL_TOPIC, "")
        try:
            due = due_time(properties)
        except TimerTextError as error:
            # Not from this broker: a client wrote to the timer's topic of RocketMQ.
            if self._log_budget.allows():
                _log.error("timer_message_without_time", queue_offset=head.queue_offset, reason=str(error))
            self.next_offset = head.queue_offset + 1
            return
        problem = self._problem(topic, properties)
        if problem:
            if self._log_budget.allows():
                _log.error("timed_message_dropped", queue_offset=head.queue_offset, reason=problem)
            self.dropped += 1
            self.next_offset = head.queue_offset + 1
            return
        deletes = is_delete_mark(properties)
        if head.queue_offset < timers.found_until and due < timers.found_read_time:
            self.next_offset = head.queue_offset + 1
            return
        rolled = self._ahead.roll_of(view, head, properties)
        if rolled is not None and self._ahead.rolls_left(rolled) > self.rolled.get(rolled, 0):
            self.rolled[rolled] = self.rolled.get(rolled, 0) + 1
            self.next_offset = head.queue_offset + 1
            return
        magic = MAGIC_DEFAULT | (MAGIC_DELETE if deletes else 0)
        where = head.physical_offset, head.size
        is_due = due < self._now
        is_late = due < timers.read_time
        # A slot that is delivered gets no messages any more. A late mark has to be where its message is.
        is_with_late = is_late and deletes and timers.may_wait_late(due)
        time = max(due, timers.read_time, timers.late_until if is_with_late else 0)
        timer = timers.timer(time, min(time - time % timers.precision, self._now), *where, tags_code(topic), magic)
        place = _Place(timer, topic, due)
        if is_late and deletes and self._delivers and not is_with_late:
            self.late_marks.append(properties)
            self._late_places.append(place)
        elif is_due and not deletes and self._delivers:
            self.due.append(*where, magic, NEVER_ENQUEUED, 0)
            self._due_places.append(place)
        # Also a mark that comes between the end of its slot and its delivery, or whose message waits late: in its slot.
        elif self._has_place(timer):
            self._enter(place)
        else:
            self.is_full = True
            return
        self.next_offset = head.queue_offset + 1

    def _has_place(self, timer: NewTimer) -> bool:
        return timer.time < self._timers.free_until() and not self._timers.wheel.is_taken(timer.time)

    def _enter(self, place: _Place) -> None:
        timer, topic, due = place
        if due < self._timers.read_time:
            self._timers.wait_late(due, timer.time)
        self.new.append(timer)
        self.topics[topic] = self.topics.get(topic, 0) + (-1 if timer.magic & MAGIC_DELETE else 1)

    def put_off(self, numbers: Iterable[int]) -> bool:
        """Let those of ``due`` with these numbers wait in the wheel, with the marks that may cancel them.

        False if the wheel has no place for one of them: all stay in the queue then.
        """
        waiting = [self._due_places[number] for number in numbers] + self._late_places
        if not all(self._has_place(place.timer) for place in waiting):
            return False
        for place in waiting:
            self._enter(place)
        self.new.sort(key=lambda timer: timer.offset)  # the order of the timer log
        return True
