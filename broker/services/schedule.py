"""Delay levels: messages wait in SCHEDULE_TOPIC_XXXX until they are due (RocketMQ's ScheduleMessageService).

Queue ``level - 1`` holds the messages of a level. Its units hold the due time in the field that holds the tag's hash in
other queues. The messages of a level are delivered in order, so only the first of each level matters: one task sleeps
until the earliest of them is due. A due message is stored again in its real topic with its original properties; it gets
a new offset and store time. delayOffset.json stores the progress of each level: after a kill, the deliveries of the
last seconds are made again.

No message may be due later than one delay from now. A later due time was computed with a clock that was ahead, or was
rebuilt from a record that was stored with such a clock. Such messages are due one delay after they were found, by the
monotonic clock. RocketMQ delivers them immediately, before their time.
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import structlog
import trio
from msgspec import Struct, field

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.services.queued_messages import QueuePosition
from trimq.broker.services.schedule_store import ScheduleStore, Unit
from trimq.broker.services.state_file import StateFile, StateFileError, encode_pieces, load_data_version, unknown_fields
from trimq.broker.services.stored_again import place_of, put_again, stored_again
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import (
    GetMessageResult,
    GetMessageStatus,
    PutMessageStatus,
)
from trimq.protocol import record, topic_rules
from trimq.protocol.body import DataVersion
from trimq.protocol.property_names import PROPERTY_REAL_TOPIC
from trimq.protocol.property_text import decode_properties
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("broker.schedule")

_KNOWN: Final = frozenset({"dataVersion", "offsetTable"})
_MAX_BYTES: Final = 256 * 1024
_MAX_COUNT: Final = 32
_LONGEST_SLEEP_SECONDS: Final = 1.0  # while a message waits: the wall clock may be set at any time
_CLOCK_SET_MS: Final = 100
"""A larger change of the difference between wall clock and monotonic clock means that the wall clock was set."""
_FIRST_RETRY_MS: Final = 100
_LAST_RETRY_MS: Final = 10_000
_STOP_SECONDS: Final = 2.0
_NEVER: Final = 1 << 62
_HOPELESS: Final = (PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED)


class _Level(Struct):
    """The state of a level: the next offset to deliver, and the time of the next check (ms since the epoch).

    ``found_end`` is the queue's end at the time when a due time was found to be too late. All messages below it are due
    at ``found_due`` of the monotonic clock (ms) at the latest. ``unflushed``: the deliveries that may not be durable
    yet, as (offset of the message, log offset behind its copy).
    """

    delay: int
    offset: int = 0
    next_check: int = _NEVER
    retry: int = 0
    found_end: int = 0
    found_due: int = 0
    unflushed: deque[tuple[int, int]] = field(default_factory=deque)

    def delivered(self, offset: int, copy_end: int, flushed: int) -> None:
        """A message was delivered, by a copy that ends at a log offset."""
        self.durable_offset(flushed)
        if copy_end > flushed:
            self.unflushed.append((offset, copy_end))

    def durable_offset(self, flushed: int) -> int:
        """The first message whose delivery is not durable, if the log is durable up to ``flushed``."""
        while self.unflushed and self.unflushed[0][1] <= flushed:
            self.unflushed.popleft()
        return min(self.unflushed[0][0], self.offset) if self.unflushed else self.offset


class ScheduleMessageService:
    """Delivers delayed messages.

    ``store_host`` is the packed address in delivered records; if it is empty, they keep that of the original record.
    """

    def __init__(
        self, configuration: Configuration, store: ScheduleStore, disk: Disk, clock: Clock, store_host: bytes = b""
    ) -> None:
        self._configuration = configuration
        self._store = store
        self._clock = clock
        self._store_host = store_host
        self._sleeping: trio.CancelScope | None = None
        self._deliveries = 0
        self._is_stopping = False
        self._ended: trio.Event | None = None
        self._wall_ahead = 0.0
        self._rest: dict[str, Any] = {}
        self._foreign: dict[int, int] = {}
        config = configuration.section(MessageStoreConfig)
        self._levels = {level: _Level(delay) for level, delay in enumerate(config.delay_levels_ms) if level}
        self.data_version = DataVersion()
        path = config.config_path / "delayOffset.json"
        self._file = StateFile(disk, str(path), self._pieces, lambda: config.flush_delay_offset_interval / 1000)

    @property
    def max_level(self) -> int:
        """The highest delay level. Higher ones in messages are treated as this one."""
        return max(self._levels)

    @property
    def delivered(self) -> int:
        """Messages delivered since the start."""
        return self._deliveries

    def positions(self) -> Iterator[QueuePosition]:
        """The queue of each level and its first message whose delivery is not durable.

        A power cut may take the copies behind it: then these messages are delivered again.
        """
        for level, state in self._levels.items():
            yield topic_rules.SCHEDULE_TOPIC, level - 1, state.durable_offset(self._store.flushed_offset)

    def offsets(self) -> dict[int, int]:
        """The next offset to deliver of each level."""
        return self._foreign | {level: state.offset for level, state in self._levels.items()}

    # state file and task

    async def load(self) -> None:
        """Read delayOffset.json. Raises StateFileError."""
        state = await self._file.load()
        if state is not None:
            self._take(state, self._file.path)

    def follow(self, state: dict[str, Any]) -> None:
        """Take the offsets of a slave's master. Raises StateFileError."""
        before = self.offsets()
        self._take(state, "the master's delay offsets")
        if self.offsets() != before:
            self._file.changed()

    def _take(self, state: dict[str, Any], where: str) -> None:
        self.data_version = load_data_version(state.get("dataVersion"), where)
        self._rest = unknown_fields(state, _KNOWN)
        try:
            offsets = {int(level): int(offset) for level, offset in (state.get("offsetTable") or {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise StateFileError(f"{where}: offsetTable: {error}") from None
        for level, offset in offsets.items():
            if level in self._levels:
                self._levels[level].offset = offset
            else:
                self._foreign[level] = offset  # a level that is not configured now: preserve its offset

    async def persist(self) -> None:
        """Deliver no more, and write delayOffset.json if it is not current (shutdown).

        A delivery that is under way ends before, if it takes less than ``_STOP_SECONDS``.
        """
        self._is_stopping = True
        self._wake()
        if self._ended is not None:
            # The file is written once more only here: what is delivered after it would be delivered again.
            with trio.move_on_after(_STOP_SECONDS):
                await self._ended.wait()
        # The file has durable deliveries only, and what it does not have is delivered again after the start.
        await self._store.flush()
        await self._file.persist()

    def encode(self) -> bytes:
        """The content of delayOffset.json; also the body of GET_ALL_DELAY_OFFSET (45)."""
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        # A copy that is not durable may be lost in a power cut; the next start has to find its message pending then.
        flushed = self._store.flushed_offset
        offsets = self._foreign | {level: state.durable_offset(flushed) for level, state in self._levels.items()}
        if any(state.unflushed for state in self._levels.values()):
            self._file.changed()  # they are in the next write
        return encode_pieces({"dataVersion": self.data_version, "offsetTable": offsets} | self._rest)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver due messages, forever. The store has to be open and recovered."""
        for level, state in self._levels.items():
            self._correct(level, state)
            state.next_check = 0
        self._ended = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._file.run, self._clock.sleep)
            task_status.started()
            try:
                await self._deliver()
            finally:
                self._ended.set()

    async def _deliver(self) -> None:
        while not self._is_stopping:
            was_set = self._clock_was_set()
            now = self._clock.wall_ms()
            for level, state in self._levels.items():
                if state.next_check <= now or (was_set and state.next_check != _NEVER):
                    await self._deliver_level(level, state)
            await self._sleep()

    def _clock_was_set(self) -> bool:
        """Whether the wall clock was set since the last call. Checks that were planned by it may be too late then."""
        ahead = self._clock.wall_ms() - self._clock.monotonic() * 1000
        was_set = abs(ahead - self._wall_ahead) >= _CLOCK_SET_MS
        if was_set:
            self._wall_ahead = ahead
        return was_set

    def _correct(self, level: int, state: _Level) -> None:
        low = self._store.min_offset(topic_rules.SCHEDULE_TOPIC, level - 1)
        high = self._store.next_offset(topic_rules.SCHEDULE_TOPIC, level - 1)
        offset = min(max(state.offset, low), max(high, low))
        if offset != state.offset:
            _log.warning("delay_offset_corrected", level=level, before=state.offset, now=offset)
            state.offset = offset
            self._file.changed()

    async def _sleep(self) -> None:
        """Sleep until the earliest check, or until ``message_arriving`` plans an earlier one."""
        if self._is_stopping:
            return
        with trio.CancelScope() as self._sleeping:
            earliest = min(state.next_check for state in self._levels.values())
            if earliest == _NEVER:
                await trio.sleep_forever()
            seconds = (earliest - self._clock.wall_ms()) / 1000
            await self._clock.sleep(min(max(seconds, 0), _LONGEST_SLEEP_SECONDS))
        self._sleeping = None

    def message_arriving(
        self, topic: str, queue_id: int, _next_offset: int, tags_code: int, _store_timestamp: int
    ) -> None:
        """Plan the check for a delayed message. The store calls it when the message can be read."""
        if topic != topic_rules.SCHEDULE_TOPIC:
            return
        state = self._levels.get(queue_id + 1)
        # A level that has a check planned has an earlier message: this one is delivered after it.
        if state is not None and state.next_check == _NEVER:
            too_late = tags_code > self._clock.wall_ms() + state.delay
            state.next_check = 0 if too_late else tags_code
            self._wake()

    def _wake(self) -> None:
        if self._sleeping is not None:
            self._sleeping.cancel()

    # delivering

    async def _deliver_level(self, level: int, state: _Level) -> None:
        """Deliver all due messages of a level, and plan its next check.

        After a failure the level waits and tries the same message again; no message is skipped.
        """
        try:
            while await self._deliver_some(level, state):
                pass
        except _NotStoredError as error:
            state.retry = min(max(state.retry * 2, _FIRST_RETRY_MS), _LAST_RETRY_MS)
            state.next_check = self._clock.wall_ms() + state.retry
            _log.warning("delivery_put_off", level=level, offset=state.offset, reason=str(error), wait_ms=state.retry)
        except Exception:  # noqa: BLE001 - the other levels continue; this one is tried again
            state.next_check = self._clock.wall_ms() + _LAST_RETRY_MS
            _log.exception("delivery_failed", level=level, offset=state.offset)
        else:
            state.retry = 0

    async def _deliver_some(self, level: int, state: _Level) -> bool:
        """Read the queue of a level once and deliver what is due; True if there may be more due messages."""
        queue = (topic_rules.SCHEDULE_TOPIC, level - 1, state.offset)
        # The units come first: they have the due times, and records that are not due need not be read.
        await trio.lowlevel.checkpoint()
        if self._is_stopping:
            return False
        units = self._store.look_units(*queue, _MAX_COUNT)
        if units is None:
            units = await self._store.queue_units(*queue, _MAX_COUNT)
        due = self._count_due(level, state, units)
        if units and not due:
            return False
        where = (*queue, max(due, 1), _MAX_BYTES, None)
        result = self._store.get_message(*where)
        if result is None:
            result = await self._store.get_message_cold(*where)
        with contextlib.ExitStack() as stack:
            stack.callback(result.release)
            if result.status is GetMessageStatus.FOUND and due:
                before = state.offset
                for buffer in result.buffers:
                    # The end is passed because the result may hold records whose units were not among those read.
                    await self._deliver_records(level, state, buffer, before + due)
                if state.offset > before or self._is_stopping:
                    return True
        if result.status is GetMessageStatus.FOUND and not due:
            # The message arrived between the two reads: its due time is not known yet.
            state.next_check = self._clock.wall_ms() + _FIRST_RETRY_MS
            return False
        return self._check_later(level, state, result)

    def _count_due(self, level: int, state: _Level, units: list[Unit]) -> int:
        """The number of due messages at the head of a level. If there is none, the next check is planned.

        A message that is not due delays those behind it, even if their due times are earlier: the order is preserved.
        """
        now = self._clock.wall_ms()
        for count, (_, _, due) in enumerate(units):
            if due <= now:
                continue
            offset = state.offset + count
            # A due time further away than the delay is wrong (see the module). Found once per group of such messages:
            # those up to the queue's end share the deadline, and later ones are not due before them in any case.
            if offset >= state.found_end and due > now + state.delay and not count:
                state.found_end = self._store.max_offset(topic_rules.SCHEDULE_TOPIC, level - 1)
                state.found_due = math.ceil(self._clock.monotonic() * 1000) + state.delay
                _log.warning("due_time_too_late", level=level, offset=offset, by_ms=due - now - state.delay)
            next_check = due
            if offset < state.found_end:
                left = state.found_due - int(self._clock.monotonic() * 1000)
                if left <= 0:
                    continue
                next_check = min(due, now + left)
            if not count:
                state.next_check = next_check
            return count
        return len(units)

    def _check_later(self, level: int, state: _Level, result: GetMessageResult) -> bool:
        """Plan the next check after a read that delivered nothing: the queue is empty, or its messages were deleted."""
        if result.status is GetMessageStatus.OFFSET_OVERFLOW_BADLY:
            self._correct(level, state)
        elif result.next_begin_offset > state.offset:
            _log.warning("delayed_messages_deleted", level=level, first=state.offset, next=result.next_begin_offset)
            state.offset = result.next_begin_offset
            self._file.changed()
            return True
        # Set to never before the queue's end is read: a message that arrives after this line plans its own check.
        state.next_check = _NEVER
        if self._store.max_offset(topic_rules.SCHEDULE_TOPIC, level - 1) > state.offset:
            # A message arrived between the read and this check, or is not readable yet.
            state.next_check = self._clock.wall_ms() + _FIRST_RETRY_MS
        return False

    async def _deliver_records(self, level: int, state: _Level, buffer: Any, end: int) -> None:
        """Deliver the records in ``buffer`` whose offset is below ``end``."""
        view = memoryview(buffer)
        at = 0
        while at < len(view):
            head = record.decode_head(view, at)
            at += head.size
            if not state.offset <= head.queue_offset < end:
                continue
            if self._is_stopping:
                return
            message = self._restore(view, head)
            if message is not None:
                copy_end = await self._put(message, level, head.queue_offset)
                state.delivered(head.queue_offset, copy_end, self._store.flushed_offset)
            # Only after the store has the message: a failure or a kill in between delivers it again, never loses it.
            state.offset = head.queue_offset + 1
            self._deliveries += 1
            step = self._configuration.section(BrokerConfig).delay_offset_update_version_step
            if not self._deliveries % step:
                self.data_version = self.data_version.next(self._clock.wall_ms())
            self._file.changed()

    def _restore(self, view: memoryview, head: record.RecordHead) -> MessageInner | None:
        """The message for its real topic; None, with an event in the log, if it has none that can be delivered to."""
        text = bytes(view[head.properties_at : head.properties_end])
        properties = decode_properties(text.decode("utf-8", "replace"))
        place = place_of(properties)
        if isinstance(place, str):
            topic = properties.get(PROPERTY_REAL_TOPIC, "")[: topic_rules.MAX_RETRY_TOPIC_LENGTH]
            _log.error("delayed_message_dropped", topic=topic, commit_log_offset=head.physical_offset, reason=place)
            return None
        tags = self._store.indexes_tags
        return stored_again(view, head, properties, place, text, store_host=self._store_host, indexes_tags=tags)

    async def _put(self, message: MessageInner, level: int, offset: int) -> int:
        """Returns the log offset behind the copy; 0 if the message was dropped."""
        result = await put_again(self._store, message)
        if result.ok:
            return result.physical_offset + result.size
        if result.status in _HOPELESS:
            _log.error("delayed_message_dropped", topic=message.topic, level=level, offset=offset, reason=result.remark)
            return 0
        raise _NotStoredError(f"{result.status.name}: {result.remark}")


class _NotStoredError(Exception):
    """The store refused a message for now; the delivery is tried again."""
