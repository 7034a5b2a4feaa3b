"""Delay levels: messages wait in SCHEDULE_TOPIC_XXXX until they are due (RocketMQ's ScheduleMessageService).

Queue ``level - 1`` holds the messages of a level; its units carry the due time where others have the tag's hash. They
are delivered in order, so only the first message of each level matters: one task sleeps until the earliest of them.
What is due is stored again, in its real topic, with the properties it came with; it gets a new place and time.
delayOffset.json keeps how far each level has come: after a kill, the deliveries of the last seconds are made once more.

No message waits longer than its delay from now on: a later due time is one of a clock that was ahead, or was made anew
from a record whose store time is that of such a clock. Those messages are due one delay after they were found, by the
monotonic clock. RocketMQ delivers them at once, before their time.
"""

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol

import structlog
import trio
from msgspec import Struct

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.services.state_file import StateFile, StateFileError, encode_pieces, load_data_version, unknown_fields
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import (
    GetMessageResult,
    GetMessageStatus,
    MessageFilter,
    PutCallback,
    PutMessageResult,
    PutMessageStatus,
)
from trimq.protocol import hashing, record, topic_rules
from trimq.protocol.body import DataVersion
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_names import PROPERTY_REAL_QID, PROPERTY_REAL_TOPIC, PROPERTY_TAGS
from trimq.protocol.property_text import decode_properties
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("broker.schedule")

_KNOWN: Final = frozenset({"dataVersion", "offsetTable"})
_MAX_BYTES: Final = 256 * 1024
_MAX_COUNT: Final = 32
_LOOK_AGAIN_SECONDS: Final = 1.0  # while something waits: the wall clock may be set
_CLOCK_SET_MS: Final = 100
"""By how much the wall clock has to leave the monotonic one to count as set."""
_FIRST_RETRY_MS: Final = 100
_LAST_RETRY_MS: Final = 10_000
_NEVER: Final = 1 << 62
_HOPELESS: Final = (PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED)


Unit = tuple[int, int, int]
"""(log offset, size, due time in ms since the epoch) of a delayed message."""


class ScheduleStore(Protocol):
    """What this service needs of the message store."""

    @property
    def put_message(self) -> Callable[[MessageInner, PutCallback], PutMessageResult | None]:
        """Store a message; None when the outcome comes by the callback."""
        ...

    @property
    def look_units(self) -> Callable[[str, int, int, int], list[Unit] | None]:
        """(topic, queue id, offset, count): units from the offset on; None when they are not in memory."""
        ...

    @property
    def queue_units(self) -> Callable[[str, int, int, int], Awaitable[list[Unit]]]:
        """The same for units that have to be read from the disk."""
        ...

    @property
    def get_message(self) -> Callable[[str, int, int, int, int, MessageFilter | None], GetMessageResult | None]:
        """(topic, queue id, offset, max count, max bytes, filter): None when the records are not in memory."""
        ...

    @property
    def get_message_cold(
        self,
    ) -> Callable[[str, int, int, int, int, MessageFilter | None], Awaitable[GetMessageResult]]:
        """The same for records that have to be read from the disk."""
        ...

    @property
    def indexes_tags(self) -> bool:
        """Whether a message's keys shall have its tag among them."""
        ...

    def min_offset(self, topic: str, queue_id: int) -> int:
        """First offset of a queue that is still there."""
        ...

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Offset that the next message of a queue will get."""
        ...


class _Level(Struct):
    """A level: how far it has come, and when to look at it again (ms since the epoch).

    Messages below ``found_end`` were there when one was found whose due time is too late: all of them are due when the
    monotonic clock says ``found_due`` (ms), if not before.
    """

    delay: int
    offset: int = 0
    look_at: int = _NEVER
    retry: int = 0
    found_end: int = 0
    found_due: int = 0


class ScheduleMessageService:
    """Delivers delayed messages.

    ``store_host`` is the packed address that delivered records name; the original's without it.
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
        """The highest delay level; higher ones mean this one."""
        return max(self._levels)

    @property
    def delivered(self) -> int:
        """Messages delivered since the start."""
        return self._deliveries

    def offsets(self) -> dict[int, int]:
        """The next offset to deliver of each level."""
        return self._foreign | {level: state.offset for level, state in self._levels.items()}

    # life

    async def load(self) -> None:
        """Read delayOffset.json. Raises StateFileError."""
        state = await self._file.load()
        if state is None:
            return
        self.data_version = load_data_version(state.get("dataVersion"), self._file.path)
        self._rest = unknown_fields(state, _KNOWN)
        try:
            offsets = {int(level): int(offset) for level, offset in (state.get("offsetTable") or {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise StateFileError(f"{self._file.path}: offsetTable: {error}") from None
        for level, offset in offsets.items():
            if level in self._levels:
                self._levels[level].offset = offset
            else:
                self._foreign[level] = offset  # of a level that the configuration does not have now

    async def persist(self) -> None:
        """Write delayOffset.json if it is behind (shutdown)."""
        await self._file.persist()

    def encode(self) -> bytes:
        """The content of delayOffset.json; also the body of GET_ALL_DELAY_OFFSET (45)."""
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        state = {"dataVersion": self.data_version, "offsetTable": self.offsets()}
        return encode_pieces(state | self._rest)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver what is due, for ever. The store is open, and what is in it is dispatched."""
        for level, state in self._levels.items():
            self._correct(level, state)
            state.look_at = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._file.run, self._clock.sleep)
            task_status.started()
            while True:
                was_set = self._clock_was_set()
                now = self._clock.wall_ms()
                for level, state in self._levels.items():
                    if state.look_at <= now or (was_set and state.look_at != _NEVER):
                        await self._deliver_level(level, state)
                await self._sleep()

    def _clock_was_set(self) -> bool:
        """Whether the wall clock has been set since the last time: looks that were planned by it may be too late."""
        ahead = self._clock.wall_ms() - self._clock.monotonic() * 1000
        was_set = abs(ahead - self._wall_ahead) >= _CLOCK_SET_MS
        if was_set:
            self._wall_ahead = ahead
        return was_set

    def _correct(self, level: int, state: _Level) -> None:
        low = self._store.min_offset(topic_rules.SCHEDULE_TOPIC, level - 1)
        high = self._store.max_offset(topic_rules.SCHEDULE_TOPIC, level - 1)
        offset = min(max(state.offset, low), max(high, low))
        if offset != state.offset:
            _log.warning("delay_offset_corrected", level=level, before=state.offset, now=offset)
            state.offset = offset
            self._file.changed()

    async def _sleep(self) -> None:
        """Until the earliest look, or until ``message_arriving`` says that there is an earlier one."""
        with trio.CancelScope() as self._sleeping:
            earliest = min(state.look_at for state in self._levels.values())
            if earliest == _NEVER:
                await trio.sleep_forever()
            seconds = (earliest - self._clock.wall_ms()) / 1000
            await self._clock.sleep(min(max(seconds, 0), _LOOK_AGAIN_SECONDS))
        self._sleeping = None

    def message_arriving(
        self, topic: str, queue_id: int, _next_offset: int, tags_code: int, _store_timestamp: int
    ) -> None:
        """A message was parked. Belongs into the store's message_arriving."""
        if topic != topic_rules.SCHEDULE_TOPIC:
            return
        state = self._levels.get(queue_id + 1)
        if state is not None and state.look_at == _NEVER:
            too_late = tags_code > self._clock.wall_ms() + state.delay
            state.look_at = 0 if too_late else tags_code
            if self._sleeping is not None:
                self._sleeping.cancel()

    # delivering

    async def _deliver_level(self, level: int, state: _Level) -> None:
        """Deliver all that is due of a level, and set when to look again.

        Failures make it wait; nothing is left out because of one.
        """
        try:
            while await self._deliver_some(level, state):
                pass
        except _NotStoredError as error:
            state.retry = min(max(state.retry * 2, _FIRST_RETRY_MS), _LAST_RETRY_MS)
            state.look_at = self._clock.wall_ms() + state.retry
            _log.warning("delivery_put_off", level=level, offset=state.offset, reason=str(error), wait_ms=state.retry)
        except Exception:  # noqa: BLE001 - the other levels go on; this one is tried again
            state.look_at = self._clock.wall_ms() + _LAST_RETRY_MS
            _log.exception("delivery_failed", level=level, offset=state.offset)
        else:
            state.retry = 0

    async def _deliver_some(self, level: int, state: _Level) -> bool:
        """One get from the queue of a level; True if there may be more that is due."""
        queue = (topic_rules.SCHEDULE_TOPIC, level - 1, state.offset)
        await trio.lowlevel.checkpoint()
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
                    await self._deliver_records(level, state, buffer, before + due)
                if state.offset > before:
                    return True
        if result.status is GetMessageStatus.FOUND and not due:  # came in between: its unit has not been looked at
            state.look_at = self._clock.wall_ms() + _FIRST_RETRY_MS
            return False
        return self._look_later(level, state, result)

    def _count_due(self, level: int, state: _Level, units: list[Unit]) -> int:
        """How many of the first messages of a level are due; where none is, when to look again is set.

        A message that is not due holds up those behind it, whatever their units say: order is kept.
        """
        now = self._clock.wall_ms()
        for count, (_, _, due) in enumerate(units):
            if due <= now:
                continue
            offset = state.offset + count
            if offset >= state.found_end and due > now + state.delay and not count:
                state.found_end = self._store.max_offset(topic_rules.SCHEDULE_TOPIC, level - 1)
                state.found_due = math.ceil(self._clock.monotonic() * 1000) + state.delay
                _log.warning("due_time_too_late", level=level, offset=offset, by_ms=due - now - state.delay)
            look_at = due
            if offset < state.found_end:
                left = state.found_due - int(self._clock.monotonic() * 1000)
                if left <= 0:
                    continue
                look_at = min(due, now + left)
            if not count:
                state.look_at = look_at
            return count
        return len(units)

    def _look_later(self, level: int, state: _Level, result: GetMessageResult) -> bool:
        """Nothing was delivered: there is nothing, or it is gone."""
        if result.status is GetMessageStatus.OFFSET_OVERFLOW_BADLY:
            self._correct(level, state)
        elif result.next_begin_offset > state.offset:
            _log.warning("delayed_messages_gone", level=level, first=state.offset, next=result.next_begin_offset)
            state.offset = result.next_begin_offset
            self._file.changed()
            return True
        state.look_at = _NEVER
        if self._store.max_offset(topic_rules.SCHEDULE_TOPIC, level - 1) > state.offset:
            state.look_at = self._clock.wall_ms() + _FIRST_RETRY_MS  # came in between, or is not yet readable
        return False

    async def _deliver_records(self, level: int, state: _Level, buffer: Any, end: int) -> None:
        """Deliver those of the level's records that lie below the offset ``end``."""
        view = memoryview(buffer)
        at = 0
        while at < len(view):
            head = record.decode_head(view, at)
            at += head.size
            if not state.offset <= head.queue_offset < end:
                continue
            message = self._restore(view, head)
            if message is not None:
                await self._put(message, level, head.queue_offset)
            state.offset = head.queue_offset + 1
            self._deliveries += 1
            step = self._configuration.section(BrokerConfig).delay_offset_update_version_step
            if not self._deliveries % step:
                self.data_version = self.data_version.next(self._clock.wall_ms())
            self._file.changed()

    def _restore(self, view: memoryview, head: record.RecordHead) -> MessageInner | None:
        """The message as it goes to its real topic; None for one that cannot."""
        text = bytes(view[head.properties_at : head.properties_end])
        properties = decode_properties(text.decode("utf-8", "replace"))
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        if not topic or topic == topic_rules.TRANS_HALF_TOPIC:
            _log.error("delayed_message_dropped", topic=topic, commit_log_offset=head.physical_offset)
            return None
        try:
            queue_id = int(properties.get(PROPERTY_REAL_QID, "0"))
        except ValueError:
            queue_id = 0
        tags = properties.get(PROPERTY_TAGS)
        words = index_keys(properties, tags=self._store.indexes_tags)
        return MessageInner(
            topic=topic,
            queue_id=queue_id,
            body=view[head.body_at : head.body_end],
            properties=text,
            born_timestamp=head.born_timestamp,
            born_host=head.born_host,
            store_host=self._store_host or head.store_host,
            flag=head.flag,
            sys_flag=head.sys_flag,
            reconsume_times=head.reconsume_times,
            tags_code=hashing.tags_code(tags) if tags else 0,
            keys=words,
            wait=False,
        )

    async def _put(self, message: MessageInner, level: int, offset: int) -> None:
        done = trio.Event()
        outcome: list[PutMessageResult] = []

        def on_done(result: PutMessageResult) -> None:
            outcome.append(result)
            done.set()

        result = self._store.put_message(message, on_done)
        if result is None:
            with trio.CancelScope(shield=True):  # the record may be stored already: its offset has to follow
                await done.wait()
            result = outcome[0]
        if result.ok:
            return
        if result.status in _HOPELESS:
            _log.error("delayed_message_dropped", topic=message.topic, level=level, offset=offset, reason=result.remark)
            return
        raise _NotStoredError(f"{result.status.name}: {result.remark}")


class _NotStoredError(Exception):
    """The store did not take a message now."""
