"""Timed messages: they wait in rmq_sys_wheel_timer until they are due (the services of RocketMQ's TimerMessageStore).

One task moves messages between the timer's queue, the wheel and their real topics: it takes new messages of the queue
into the wheel, and delivers the slots whose time has come. A slot ends one precision after its time, so no message
comes before its TIMER_OUT_MS, nor before the time that was asked for. After a start the overdue slots are delivered
before anything enters the wheel; a message that does not fit into the wheel stays in the queue until it does.
Another task writes checkpoints (store/timer/timer_store.py).

Unlike RocketMQ, a message whose put fails is put again until the store takes it, without those of its slot that are
stored; only a message that no store can take is dropped, counted and logged.
"""

import time
from collections.abc import Iterable
from typing import Any, Final

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.services.queued_messages import QueuePosition
from trimq.broker.services.state_file import StateFileError
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.timer_ahead import TimerAhead, read_timer_queue
from trimq.broker.services.timer_metrics import TimerMetrics
from trimq.broker.services.timer_put import TimerPuts
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.message_store import DueTimers, MessageStore, NewTimer, TimerStore
from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.protocol import record
from trimq.protocol.hashing import tags_code
from trimq.protocol.property_names import PROPERTY_REAL_TOPIC
from trimq.protocol.property_text import decode_properties
from trimq.protocol.timer_layout import MAGIC_DEFAULT, MAGIC_DELETE, TimerCheckpoint
from trimq.protocol.timer_message import NEVER_ENQUEUED, TimerTextError, due_time, is_delete_mark
from trimq.protocol.topic_rules import TIMER_TOPIC
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("broker.timer")

_READS: Final = 8
_LONGEST_SLEEP_SECONDS: Final = 1.0  # while a message waits: the wall clock may be set at any time
_PAUSE_SECONDS: Final = 0.1
_LOOK_AHEAD_SLOTS: Final = 32
_ENQUEUE_SECONDS: Final = 0.02
"""How long new messages may enter the wheel while slots are due."""


class TimerMessageService:
    """Delivers timed messages. ``store_host`` is the packed address in delivered records."""

    def __init__(
        self,
        configuration: Configuration,
        store: MessageStore,
        disk: Disk,
        clock: Clock,
        stats: BrokerStats,
        store_host: bytes = b"",
    ) -> None:
        self._configuration = configuration
        self._store = store
        self._clock = clock
        self._timers = store.timers
        self._stopping = False
        self._sleeping: trio.CancelScope | None = None
        self._arrived = False
        self._work = trio.Event()
        self._ended: trio.Event | None = None
        path = self._config.config_path / "timermetrics"
        self.metrics = TimerMetrics(disk, str(path), clock, lambda: self._config.timer_flush_interval_ms / 1000)
        self._ahead = TimerAhead(configuration, store, store.timers) if store.timers is not None else None
        self.puts = TimerPuts(configuration, store, clock, stats, self.metrics, self._ahead, store_host)
        self.enqueued = 0
        """Messages that entered the wheel since the start."""
        self._enqueue_rate, self._dequeue_rate = _Rate(clock), _Rate(clock)

    @property
    def _config(self) -> MessageStoreConfig:
        return self._configuration.section(MessageStoreConfig)

    # what others ask

    @property
    def enabled(self) -> bool:
        """Whether timed messages are accepted (timerWheelEnable)."""
        return self._timers is not None

    @property
    def precision(self) -> int:
        """The precision in ms that is in use."""
        return self._timers.precision if self._timers is not None else 1000

    def count_at(self, out_ms: int) -> int:
        """The number of messages that wait for the slot of a TIMER_OUT_MS."""
        slot = self._timers.wheel.find(out_ms) if self._timers is not None else None
        return 0 if slot is None else slot.messages

    @property
    def is_broken(self) -> bool:
        """Whether there are no checkpoints any more, because a sync of the timer's log has failed."""
        return self._timers is not None and self._timers.is_broken

    @property
    def pending(self) -> int:
        """Messages in the wheel."""
        return 0 if self._timers is None else self._timers.wheel.count

    @property
    def behind_messages(self) -> int:
        """Messages of the timer's queue that are not in the wheel yet."""
        if self._timers is None:
            return 0
        return max(0, self._store.max_offset(TIMER_TOPIC, 0) - self._timers.next_offset)

    @property
    def behind_ms(self) -> int:
        """How long the oldest overdue slot has been due."""
        timers = self._timers
        if timers is None or timers.is_empty:
            return 0
        now = self._clock.wall_ms()
        first = timers.wheel.next_time(timers.read_time, now - timers.precision)
        return max(0, now - first - timers.precision)

    def positions(self) -> list[QueuePosition]:
        """What is still to be read of the timer's queue (see QueuedMessages)."""
        return [] if self._timers is None else [(TIMER_TOPIC, 0, self._timers.next_offset)]

    def checkpoint(self) -> TimerCheckpoint | None:
        """The last checkpoint; None without timers."""
        return None if self._timers is None else self._timers.checkpoint

    def runtime_info(self) -> dict[str, str]:
        """The timer's part of a broker's runtime information: seconds, numbers of messages, messages a second."""
        return {
            "timerReadBehind": str(self.behind_ms // 1000),
            "timerOffsetBehind": str(self.behind_messages),
            "timerCongestNum": str(self.pending),
            "timerEnqueueTps": f"{self._enqueue_rate.per_second(self.enqueued):.1f}",
            "timerDequeueTps": f"{self._dequeue_rate.per_second(self.puts.delivered):.1f}",
        }

    # task

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Move messages, until ``stop``. The store has to be open and recovered."""
        timers = self._timers
        if timers is None:
            task_status.started()
            return
        self._ended = trio.Event()
        try:
            try:
                await self.metrics.load()
            except StateFileError as error:  # counts only: they are made again from the log
                _log.warning("timer_metrics_unreadable", error=str(error))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.metrics.run)
                nursery.start_soon(self._save, timers)
                task_status.started()
                await self._compare_counts(timers)
                if self._ahead is not None:
                    await self._move(timers, self._ahead)
                nursery.cancel_scope.cancel()
        finally:
            self._ended.set()

    async def _move(self, timers: TimerStore, ahead: TimerAhead) -> None:
        # Overdue slots first: a message that enters the wheel now may get the place of an overdue slot.
        due_first = True
        while not self._stopping:
            try:
                if due_first:
                    await ahead.look()
                more = due_first or await self._enqueue(timers, ahead)
                due_first = True  # after an error too: a mark that is due now may cancel what the queue has next
                await self._deliver_due(timers, ahead)
                due_first = False
            except OSError as error:
                _log.error("timer_files_not_written", error=str(error))
                await self._pause()
                continue
            except Exception:  # noqa: BLE001 - the timer goes on; the same message is tried again
                _log.exception("timer_failed", next_offset=timers.next_offset, read_time=timers.read_time)
                await self._pause()
                continue
            if not more:
                await self._sleep(timers)

    async def stop(self) -> None:
        """Deliver the slot that was begun, then end the task and write the last checkpoint."""
        self._stopping = True
        self.puts.stop()
        self._wake()
        if self._ended is not None:
            await self._ended.wait()
        if self._timers is not None:
            await self._timers.save(self._store.flush, self._clock.wall_ms(), last=True)
            await self.metrics.persist()

    def message_arriving(
        self, _topic: str, _queue_id: int, _next_offset: int, _tags_code: int, _store_timestamp: int
    ) -> None:
        """Wake the task. The store calls it when a message of the timer's topic can be read."""
        self._arrived = True
        self._wake()

    def _wake(self) -> None:
        if self._sleeping is not None:
            self._sleeping.cancel()

    async def _pause(self) -> None:
        with trio.CancelScope() as self._sleeping:
            await self._clock.sleep(_PAUSE_SECONDS)
        self._sleeping = None

    async def _sleep(self, timers: TimerStore) -> None:
        """Sleep until the next slot ends, or until a message arrives."""
        if self._stopping or self._arrived:  # it came while this task was busy
            self._arrived = False
            return
        with trio.CancelScope() as self._sleeping:
            if self.behind_messages:  # they cannot enter the wheel now
                await self._clock.sleep(_PAUSE_SECONDS)
            elif timers.is_empty:
                await trio.sleep_forever()
            else:
                now, precision = self._clock.wall_ms(), timers.precision
                until = now - now % precision + _LOOK_AHEAD_SLOTS * precision
                ends = timers.wheel.next_time(timers.read_time, until) + precision
                await self._clock.sleep(min(max((ends - now) / 1000, 0.001), _LONGEST_SLEEP_SECONDS))
        self._sleeping = None

    async def _save(self, timers: TimerStore) -> None:
        """Write a checkpoint at every interval in which something happened."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            await self._clock.sleep(self._config.timer_flush_interval_ms / 1000)
            if not await timers.save(self._store.flush, self._clock.wall_ms()) and not timers.is_broken:
                self._work.set()

    async def _compare_counts(self, timers: TimerStore) -> None:
        """Make the counts of topics again if they do not fit the wheel: they are written a little later than it."""
        if self.metrics.total != timers.wheel.count:
            self.metrics.replace(await timers.counts())

    # into the wheel

    async def _enqueue(self, timers: TimerStore, ahead: TimerAhead) -> bool:
        """Take new messages of the queue into the wheel. True if there are more that can enter it now."""
        until = time.perf_counter() + _ENQUEUE_SECONDS
        while not self._stopping and not self._config.timer_stop_enqueue:
            if not await self._enqueue_some(timers, ahead):
                return False
            if time.perf_counter() >= until:
                return True
            await trio.lowlevel.checkpoint()
        return False

    async def _enqueue_some(self, timers: TimerStore, ahead: TimerAhead) -> bool:
        offset = timers.next_offset
        batch = _Batch(timers, ahead, self._now(timers))
        for number in range(
            _READS
        ):  # several, because a read returns few messages, and a write costs the same for many
            result = await read_timer_queue(self._store, batch.next_offset, cold=not number)
            if result is None:
                break
            try:
                if result.status is GetMessageStatus.FOUND:
                    batch.take(result.buffers)
                elif number:
                    break
                else:
                    skipped = self._skip_deleted(timers, result)
                    ahead.passed()
                    return skipped
            finally:
                result.release()
            if batch.is_full:
                break
        if batch.next_offset == offset:
            return False
        if len(batch.due):
            await ahead.look()
        ahead.keep(batch.late_marks)
        if not await self.puts.deliver(batch.due, frozenset()):
            return False  # the task ends: what was put comes again after the next start
        await timers.add(batch.new, batch.next_offset)
        for name, count in batch.rolled.items():
            ahead.was_rolled(name, count)
        ahead.passed()
        self.metrics.add(batch.topics)
        self.enqueued += len(batch.new)
        self._work.set()
        return not batch.is_full

    def _skip_deleted(self, timers: TimerStore, result: GetMessageResult) -> bool:
        """A read that found nothing: the queue is at its end, or its next messages were deleted."""
        if result.status is GetMessageStatus.OFFSET_OVERFLOW_BADLY or result.next_begin_offset <= timers.next_offset:
            return False
        lost = result.next_begin_offset - timers.next_offset
        _log.error("timed_messages_deleted", first=timers.next_offset, count=lost)
        self.puts.deleted += lost
        timers.next_offset = result.next_begin_offset
        timers.changed = True
        return True

    def _now(self, timers: TimerStore) -> int:
        now = self._clock.wall_ms()
        return now - now % timers.precision

    # out of the wheel

    async def _deliver_due(self, timers: TimerStore, ahead: TimerAhead) -> None:
        """Deliver the slots that have ended, in the order of their times."""
        while not self._stopping and not self._config.timer_stop_dequeue:
            now = self._now(timers)
            if timers.read_time > now:  # the wall clock was set back: messages for times before may come now
                timers.move_read_time(now)
            first = timers.wheel.next_time(timers.read_time, now)
            if first > timers.read_time:
                timers.move_read_time(first)
            slot = timers.wheel.find(first) if first < now else None
            if slot is None:
                return
            await ahead.look()
            due = await timers.due(slot)
            marks, rolling = await self.puts.marks(due), await self.puts.marks(due, rolling=True)
            if not await self.puts.deliver(due, self.puts.delete_keys(marks)):
                return
            ahead.keep(marks)
            ahead.keep(rolling)
            timers.delivered(first)
            ahead.passed()
            self._work.set()
            await trio.lowlevel.checkpoint()


class _Rate:
    """The rate of a counter between two requests that are at least a second apart."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.monotonic()
        self._count = 0
        self._rate = 0.0

    def per_second(self, count: int) -> float:
        now = self._clock.monotonic()
        if now - self._since >= 1:
            self._rate = (count - self._count) / (now - self._since)
            self._since, self._count = now, count
        return self._rate


class _Batch:
    """The messages of one read of the queue: those for the wheel, and those that are due already."""

    def __init__(self, timers: TimerStore, ahead: TimerAhead, now: int) -> None:
        self._timers = timers
        self._ahead = ahead
        self._now = now
        self.new: list[NewTimer] = []
        self.due = DueTimers()
        self.topics: dict[str, int] = {}
        self.late_marks: list[dict[str, str]] = []
        """Marks whose slots are delivered."""
        self.rolled: dict[bytes, int] = {}
        """The numbers of messages whose rolled copies are ahead (see TimerAhead.roll_of)."""
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
        try:
            due = due_time(properties)
        except TimerTextError as error:
            # Not from this broker or RocketMQ: a client wrote to the timer's topic.
            _log.warning("timer_message_without_time", offset=head.queue_offset, error=str(error))
            self.next_offset = head.queue_offset + 1
            return
        timers, topic = self._timers, properties.get(PROPERTY_REAL_TOPIC, "")
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
        slot = due - due % timers.precision
        if slot < self._now and deletes and slot < timers.read_time:
            self.late_marks.append(properties)
        elif slot < self._now and not deletes:
            self.due.append(*where, magic, NEVER_ENQUEUED)
        else:
            # A mark may come between the end of its slot and its delivery.
            timer = timers.timer(due, min(slot, self._now), *where, tags_code(topic), magic)
            if timer.time >= timers.free_until():
                self.is_full = True
                return
            self.new.append(timer)
            self.topics[topic] = self.topics.get(topic, 0) + (-1 if deletes else 1)
        self.next_offset = head.queue_offset + 1
