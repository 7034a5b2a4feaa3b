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
from trimq.broker.services.timer_metrics import TimerMetrics
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import DueTimers, MessageStore
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol import hashing, record
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_names import (
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
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
        store_host: bytes,
    ) -> None:
        self._configuration = configuration
        self._store = store
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

    async def delete_keys(self, due: DueTimers) -> frozenset[str]:
        """The keys of the messages that delete marks in a slot cancel."""
        keys = set()
        for at, magic in enumerate(due.magics):
            if magic & MAGIC_DELETE and not magic & MAGIC_ROLL:
                message = await self._read(due.offsets[at], due.sizes[at])
                key = message.properties.get(PROPERTY_TIMER_DEL_UNIQKEY) if message is not None else None
                if message is not None and key is not None:
                    keys.add(key)
                    # The mark counted -1; what it cancels counts -1 too.
                    self._metrics.add({message.properties.get(PROPERTY_REAL_TOPIC, ""): 1})
        return frozenset(keys)

    # delivery

    async def deliver(self, due: DueTimers, deleted: frozenset[str]) -> bool:
        """Put all messages of a slot that are not ``deleted``. False if ``stop`` ended that.

        A failed put is tried again with growing pauses; those that succeeded are not.
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
                    await self._deliver_one(due, at, deleted)
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
        if deleted and self._is_deleted(properties, topic, deleted):
            self.cancelled += 1
            self._changes[topic] = self._changes.get(topic, 0) - 1
            return
        inner = self._message(message, due.write_times[at], rolls=bool(due.magics[at] & MAGIC_ROLL))
        if inner is None:
            self.dropped += 1
            _log.error("timed_message_dropped", topic=topic, commit_log_offset=offset, reason="no real topic")
            return
        self._in_flight += 1
        change = 0 if due.write_times[at] == NEVER_ENQUEUED else 1 if due.magics[at] & MAGIC_DELETE else -1
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
            topic, queue_id = TIMER_TOPIC, 0
            text = rolled_text(properties, write_time, now)
        else:
            topic = properties.get(PROPERTY_REAL_TOPIC, "")
            if not topic or PROPERTY_TIMER_DEL_UNIQKEY in properties:
                return None
            queue_id = _queue_id(properties)
            text = restored_text(properties, write_time, now)
        tags = properties.get(PROPERTY_TAGS)
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
            prepared_transaction_offset=head.prepared_transaction_offset,
            tags_code=hashing.tags_code(tags) if tags else 0,
            keys=index_keys(properties, tags=self._store.indexes_tags),
            wait=False,
        )


def _queue_id(properties: dict[str, str]) -> int:
    text = properties.get(PROPERTY_REAL_QID, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
