"""Puts the messages of a slot into their real topics, or into the timer's topic again (RocketMQ's doPut, convert).

Records are read in log order. Puts do not wait for each other: under SYNC_FLUSH the whole slot shares a few syncs.
"""

import math
import time
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.stored_again import real_place, stored_again
from trimq.broker.services.timer_ahead import TimerAhead
from trimq.broker.services.timer_metrics import TimerMetrics
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
from trimq.protocol.timer_layout import MAGIC_DELETE, MAGIC_ROLL
from trimq.protocol.timer_message import NEVER_ENQUEUED, delete_key, restored_text, rolled_text
from trimq.protocol.topic_rules import TIMER_TOPIC
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("broker.timer")

_TOPIC: Final = TIMER_TOPIC.encode()
_SLICE_SECONDS: Final = 0.001
_STOP_SECONDS: Final = 2.0
_IN_FLIGHT: Final = 1024
_FIRST_RETRY_MS: Final = 100
_LAST_RETRY_MS: Final = 10_000
_HOPELESS: Final = (PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED)
_ALL_ALIKE: Final = (PutMessageStatus.SERVICE_NOT_AVAILABLE, PutMessageStatus.CREATE_MAPPED_FILE_FAILED)
"""Results that the next message would get too."""


class TimedMessage(NamedTuple):
    """A timed message, read from its record: the properties, and the view of its parts."""

    view: memoryview
    head: record.RecordHead
    properties: dict[str, str]


class TimerPuts:
    """Delivers messages by their places in the commit log."""

    def __init__(
        self,
        configuration: Configuration,
        store: MessageStore,
        clock: Clock,
        stats: BrokerStats,
        metrics: TimerMetrics,
        ahead: TimerAhead | None,
        store_host: bytes,
    ) -> None:
        self._configuration = configuration
        self._store = store
        self._ahead = ahead
        self._clock = clock
        self._stats = stats
        self._metrics = metrics
        self._store_host = store_host
        self._in_flight = 0
        self._landed = trio.Event()
        self._failed = array("q")
        self._changes: dict[str, int] = {}
        """Changes of the counts of topics that ``metrics`` does not have yet."""
        self._reason = ""
        self._refuses_all = False
        self._stopping = False
        self._stop_by = math.inf
        self._pausing: trio.CancelScope | None = None
        self.delivered = 0
        """Messages delivered since the start."""
        self.cancelled = 0
        """Messages that a delete mark cancelled."""
        self.dropped = 0
        """Messages that the store can never take."""
        self.deleted = 0
        """Messages whose records were gone from the commit log when they were due."""

    @property
    def _config(self) -> MessageStoreConfig:
        return self._configuration.section(MessageStoreConfig)

    def stop(self) -> None:
        """Make no further attempts after a failure, and end a slot that takes long in its middle: it comes again."""
        self._stopping = True
        self._stop_by = time.perf_counter() + _STOP_SECONDS
        if self._pausing is not None:
            self._pausing.cancel()

    # delete marks

    async def marks(self, due: DueTimers, *, rolling: bool = False) -> list[dict[str, str]]:
        """The properties of the delete marks in a slot: of those that are due, or of those that are ``rolling``."""
        found = []
        for at, magic in enumerate(due.magics):
            if magic & MAGIC_DELETE and bool(magic & MAGIC_ROLL) == rolling:
                message = await self._read(due.offsets[at], due.sizes[at])
                if message is not None and PROPERTY_TIMER_DEL_UNIQKEY in message.properties:
                    found.append(message.properties)
        return found

    def delete_keys(self, marks: Iterable[dict[str, str]]) -> frozenset[str]:
        """The keys of the messages that the delete marks of a slot cancel."""
        keys = set()
        for properties in marks:
            keys.add(properties[PROPERTY_TIMER_DEL_UNIQKEY])
            # The mark counted -1; what it cancels counts -1 too.
            self._metrics.add({properties.get(PROPERTY_REAL_TOPIC, ""): 1})
        return frozenset(keys)

    # delivery

    async def deliver(self, due: DueTimers, deleted: frozenset[str]) -> bool:
        """Put all messages of a slot that are not ``deleted``. False if ``stop`` ended that.

        A failed put or read is tried again with growing pauses; those that succeeded are not.
        """
        remaining: Sequence[int] = range(len(due))
        pause = _FIRST_RETRY_MS
        while True:
            remaining = await self._deliver_each(due, remaining, deleted)
            if len(remaining) == 0:
                return True
            _log.warning("timed_delivery_put_off", messages=len(remaining), reason=self._reason, wait_ms=pause)
            if not self._stopping:
                with trio.CancelScope() as self._pausing:
                    await self._clock.sleep(pause / 1000)
                self._pausing = None
            if self._stopping:
                return False
            pause = min(2 * pause, _LAST_RETRY_MS)

    async def _deliver_each(self, due: DueTimers, numbers: Iterable[int], deleted: frozenset[str]) -> Sequence[int]:
        """Returns the numbers of those that have to be tried again, in order."""
        self._failed = array("q")
        self._refuses_all = False
        left = iter(numbers)
        until = time.perf_counter() + _SLICE_SECONDS
        with trio.CancelScope(shield=True):  # records may be in the log already: their results have to be known
            for at in left:
                magic = due.magics[at]
                if not magic & MAGIC_DELETE or magic & MAGIC_ROLL:
                    try:
                        await self._deliver_one(due, at, deleted)
                    except OSError as error:  # the record could not be read
                        self._failed.append(at)
                        self._reason = str(error)
                if self._in_flight >= _IN_FLIGHT:
                    await self._landing(_IN_FLIGHT // 2)
                if self._refuses_all:
                    break
                now = time.perf_counter()
                if now >= until:
                    if now >= self._stop_by:
                        break
                    await trio.lowlevel.checkpoint()
                    until = time.perf_counter() + _SLICE_SECONDS
            await self._landing(0)
        self._metrics.add(self._changes)
        self._changes = {}
        return array("q", sorted([*self._failed, *left]))

    async def _landing(self, most: int) -> None:
        """Wait until at most so many puts have no result yet."""
        while self._in_flight > most:
            self._landed = trio.Event()
            await self._landed.wait()

    async def _deliver_one(self, due: DueTimers, at: int, deleted: frozenset[str]) -> None:
        offset = due.offsets[at]
        message = await self._read(offset, due.sizes[at])
        if message is None:
            self.deleted += 1
            _log.error("timed_message_lost", commit_log_offset=offset, log_begins_at=self._store.min_phy_offset)
            return
        properties = message.properties
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        change = 0 if due.write_times[at] == NEVER_ENQUEUED else 1 if due.magics[at] & MAGIC_DELETE else -1
        ahead, rolls = self._ahead, bool(due.magics[at] & MAGIC_ROLL)
        if (deleted and self._is_deleted(properties, topic, deleted)) or (ahead and ahead.cancels(properties)):
            self.cancelled += 1
            self._changes[topic] = self._changes.get(topic, 0) + change
            return
        if rolls and ahead and (rolled := ahead.roll_of(message.view, message.head, properties)) is not None:
            ahead.was_rolled(rolled)
            self._changes[topic] = self._changes.get(topic, 0) + change
            return
        inner = self._message(message, due.write_times[at], rolls=rolls)
        if inner is None:
            self.dropped += 1
            _log.error(
                "timed_message_dropped",
                topic=topic,
                commit_log_offset=offset,
                reason="no real topic that clients may send to",
            )
            return
        self._in_flight += 1
        done = partial(self._done, at, change, topic, offset, inner.topic)
        result = self._store.put_message(inner, done)
        if result is not None:
            done(result)

    def _is_deleted(self, properties: dict[str, str], topic: str, deleted: frozenset[str]) -> bool:
        unique = properties.get(PROPERTY_UNIQ_KEY)
        with_topic = self._config.append_topic_for_timer_delete_key
        return unique is not None and delete_key(topic, unique, with_topic=with_topic) in deleted

    def _done(self, at: int, change: int, topic: str, offset: int, stored_topic: str, result: PutMessageResult) -> None:
        self._in_flight -= 1
        self._landed.set()
        status = result.status
        if result.ok:
            self.delivered += 1
            if stored_topic == TIMER_TOPIC and self._ahead is not None:
                self._ahead.rolled(result.queue_offset)
            self._stats.topic_put(stored_topic, 1, result.size)
        elif status in _HOPELESS or (
            status is PutMessageStatus.UNKNOWN_ERROR and self._config.timer_skip_unknown_error
        ):
            self.dropped += 1
            _log.error("timed_message_dropped", topic=topic, commit_log_offset=offset, reason=result.remark)
        else:
            self._failed.append(at)
            self._reason = f"{status.name}: {result.remark}"
            self._refuses_all = status in _ALL_ALIKE
            return
        if change:
            self._changes[topic] = self._changes.get(topic, 0) + change

    # records

    async def _read(self, offset: int, size: int) -> TimedMessage | None:
        """The timed message at a log offset, valid until the next await; None if another record, or none, is there."""
        data = self._store.look_own_message(offset)
        if data is None:
            data = self._store.look_message(offset)
        if data is None:
            data = await self._store.look_message_cold(offset)
        if len(data) != size:
            return None
        view = memoryview(data)
        head = record.decode_head(view)
        if view[head.topic_at : head.topic_end] != _TOPIC:
            return None
        text = str(view[head.properties_at : head.properties_end], "utf-8", "replace")
        return TimedMessage(view, head, decode_properties(text))

    def _message(self, message: TimedMessage, write_time: int, *, rolls: bool) -> MessageInner | None:
        """What is put for a timed message; None if it has no real topic."""
        view, head, properties = message
        now = self._clock.wall_ms()
        if rolls:
            place: tuple[str, int] | None = (TIMER_TOPIC, 0)
            text = rolled_text(properties, write_time, now)
        else:
            place = real_place(properties)
            text = restored_text(properties, write_time, now)
        if place is None or (PROPERTY_TIMER_DEL_UNIQKEY in properties and not rolls):
            return None
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
