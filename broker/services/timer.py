"""Timed messages: they wait in rmq_sys_wheel_timer until they are due (the services of RocketMQ's TimerMessageStore).

One task moves messages between the timer's queue, the wheel and their real topics: it takes new messages of the queue
into the wheel, and delivers the slots whose time has come. A slot ends one precision after its time, so no message
comes before its TIMER_OUT_MS, nor before the time that was asked for, unless the precision has become finer since.
After a start the overdue slots are delivered before anything enters the wheel; a message that does not fit into the
wheel stays in the queue until it does.
Another task writes checkpoints (store/timer/timer_store.py).

Unlike RocketMQ, a message whose put fails is put again until the store takes it, without those of its slot that are
stored; only a message that no store can take is dropped, counted and logged.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.services.queued_messages import QueuePosition
from trimq.broker.services.state_file import StateFileError
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.stored_again import QueuesOf
from trimq.broker.services.timer_ahead import TimerAhead
from trimq.broker.services.timer_enqueue import TimerEnqueue
from trimq.broker.services.timer_metrics import Rate, TimerMetrics
from trimq.broker.services.timer_put import TimerPuts, delete_keys
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.message_store import MessageStore, TimerStore
from trimq.protocol.timer_handover import TimerHandover
from trimq.protocol.topic_rules import TIMER_TOPIC
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget

_log = structlog.get_logger("broker.timer")

_LONGEST_SLEEP_SECONDS: Final = 1.0  # while a message waits: the wall clock may be set at any time
_FIRST_PAUSE_SECONDS: Final = 0.1
_LAST_PAUSE_SECONDS: Final = 1.0
_LOOK_AHEAD_SLOTS: Final = 32


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
        queues_of: QueuesOf | None = None,
    ) -> None:
        """``queues_of``: see ``stored_again.place_of``."""
        self._configuration = configuration
        self._store = store
        self._clock = clock
        self._timers = store.timers
        self._stopping = False
        self._sleeping: trio.CancelScope | None = None
        self._pausing: trio.CancelScope | None = None
        self._arrived = False
        self._work = trio.Event()
        self._ended: trio.Event | None = None
        path = self._config.config_path / "timermetrics"
        self.metrics = TimerMetrics(disk, str(path), clock, lambda: self._config.timer_flush_interval_ms / 1000)
        self._log_budget = LogBudget(clock, 1)
        self._ahead = TimerAhead(configuration, store, store.timers) if store.timers is not None else None
        self.puts = TimerPuts(configuration, store, clock, stats, self._ahead, store_host, queues_of)
        self._entry: TimerEnqueue | None = None
        if store.timers is not None and self._ahead is not None:
            self._entry = TimerEnqueue(
                configuration, store, store.timers, self._ahead, self.puts, self.metrics, clock, self._changed
            )
        self._enqueue_rate, self._dequeue_rate = Rate(clock), Rate(clock)
        self._unserved_of_wheel = 0
        if not self.enabled:  # then the wheel stays as it is
            # By slots: a delete mark whose message is gone, or is marked already, hides none of another slot.
            self._unserved_of_wheel = sum(max(0, slot.messages) for slot in store.timer_data.wheel.all_slots())

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
        """What is still to be read of the timer's queue, also after a crash, or with timerWheelEnable=true."""
        return [(TIMER_TOPIC, 0, self._store.timer_data.unsaved_offset)]

    @property
    def unserved(self) -> int:
        """Messages that wait, and are not delivered because timerWheelEnable is false; 0 if it is true.

        All of the queue if the timer's files cannot be read.
        """
        if self.enabled:
            return 0
        begin = max(self._store.timer_data.next_offset, self._store.min_offset(TIMER_TOPIC, 0))
        return self._unserved_of_wheel + max(0, self._store.max_offset(TIMER_TOPIC, 0) - begin)

    @property
    def enqueued(self) -> int:
        """Messages that entered the wheel since the start."""
        return 0 if self._entry is None else self._entry.enqueued

    def unread(self) -> list[QueuePosition]:
        """What is still to be read of the timer's queue: all before it is in the wheel, or delivered."""
        return [(TIMER_TOPIC, 0, self._store.timer_data.next_offset)]

    def handover(self) -> TimerHandover | None:
        """The last checkpoint, and what a slave has to know besides; None without timers."""
        return None if self._timers is None else self._timers.handover()

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
        timers, entry = self._timers, self._entry
        if timers is None or entry is None:
            task_status.started()
            return
        self._ended = trio.Event()
        if timers.changed:  # recovery has repaired something
            self._changed()
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
                await self._move(timers, entry)
                nursery.cancel_scope.cancel()
        finally:
            self._ended.set()

    async def _move(self, timers: TimerStore, entry: TimerEnqueue) -> None:
        # Overdue slots first: a message that enters the wheel now may get the place of an overdue slot.
        due_first, pause = True, _FIRST_PAUSE_SECONDS
        while not self._stopping:
            only_due = due_first
            more = True if only_due else await self._attempt(entry.run_once)
            delivered = await self._attempt(partial(self._deliver_due, timers, look=only_due))
            # After an error too: a mark that is due now may cancel what the queue has next.
            due_first = more is None or delivered is None
            if due_first:
                await self._pause(pause)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
                continue
            if not only_due:
                pause = _FIRST_PAUSE_SECONDS
            if not more:
                await self._sleep(timers)

    async def _attempt(self, step: Callable[[], Awaitable[bool]]) -> bool | None:
        """The result of a step; None if it has failed: it is tried again after a pause, from where it was."""
        assert self._timers is not None
        try:
            return await step()
        except Exception as error:  # noqa: BLE001 - the timer goes on
            if self._log_budget.allows():
                where = {"next_offset": self._timers.next_offset, "read_time": self._timers.read_time}
                if isinstance(error, OSError):
                    _log.error("timer_files_not_written", error=str(error), **where)
                else:
                    _log.exception("timer_failed", **where)
            return None

    async def stop(self) -> None:
        """Deliver the slot that was begun, then end the task and write the last checkpoint."""
        self._stopping = True
        self.puts.stop()
        self._wake()
        if self._pausing is not None:
            self._pausing.cancel()
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

    async def _pause(self, seconds: float) -> None:
        """Wait after a failure; a message that arrives does not end that."""
        if not self._stopping:
            with trio.CancelScope() as self._pausing:
                await self._clock.sleep(seconds)
            self._pausing = None

    async def _sleep(self, timers: TimerStore) -> None:
        """Sleep until the next slot ends, or until a message arrives."""
        if self._stopping or self._arrived:  # it came while this task was busy
            self._arrived = False
            return
        with trio.CancelScope() as self._sleeping:
            if self._config.timer_stop_dequeue:  # a change of it is not heard of
                await self._clock.sleep(_LONGEST_SLEEP_SECONDS)
            elif self.behind_messages:  # they cannot enter the wheel now
                await self._clock.sleep(_FIRST_PAUSE_SECONDS)
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

    def _changed(self) -> None:
        self._work.set()

    async def _compare_counts(self, timers: TimerStore) -> None:
        """Make the counts of topics again if they may not fit the wheel: they are written a little later than it."""
        recovered = self._store.recovered
        if self.metrics.total == timers.wheel.count and recovered is not None and recovered.clean_exit:
            return
        try:
            counts = await timers.counts()
        except OSError as error:
            _log.error("timer_counts_not_made", error=str(error))
            return
        topics = []
        for topic_hash, count in counts.items():
            if not self.metrics.knows(topic_hash):
                topic = await self.puts.topic_at(count.offset, count.size)
                if topic is not None:
                    topics.append(topic)
        self.metrics.replace({topic_hash: count.messages for topic_hash, count in counts.items()}, topics)

    # out of the wheel

    async def _deliver_due(self, timers: TimerStore, *, look: bool) -> bool:
        """Deliver the slots that have ended, in the order of their times. False if ``stop`` ended that.

        ``look``: look at what is in the queue also if no slot is due.
        """
        ahead, puts = self._ahead, self.puts
        assert ahead is not None
        if look:
            await ahead.look()
        while not self._stopping and not self._config.timer_stop_dequeue:
            now = self._now(timers)
            timers.keep_read_time_before(now)
            first = timers.wheel.next_time(timers.read_time, now)
            if first > timers.read_time:
                timers.move_read_time(first)
            slot = timers.wheel.find(first) if first < now else None
            if slot is None:
                break
            await ahead.look()
            due = await timers.due(slot)
            marks, rolling = await puts.marks(due)
            rest = timers.rests.get(first)
            numbers = None if rest is None else rest.numbers(due.offsets)
            if numbers is not None:
                await puts.leave_out(due, numbers)
            # Without all marks nothing may be delivered: the reading of one may have ended because of ``stop``.
            if puts.is_stopping:
                return False
            if left := await puts.deliver(due, delete_keys(marks), numbers):
                timers.delivered_but(first, due, left)
                return False
            counts = await due.counts()
            ahead.keep(marks)
            ahead.keep(rolling)
            timers.delivered(first, has_marks=bool(marks))
            ahead.passed()
            self.metrics.add_hashes({topic_hash: -count for topic_hash, count in counts.items()})
            self._changed()
            await trio.lowlevel.checkpoint()
        return True

    def _now(self, timers: TimerStore) -> int:
        now = self._clock.wall_ms()
        return now - now % timers.precision
