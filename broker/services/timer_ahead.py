"""TimerAhead: what the part of the timer's queue that is not in the wheel yet says about messages before it.

A delete mark there cancels a message that may be due before the mark enters the wheel: after an outage the overdue
slots are delivered first. A rolled copy there, found at the start, was stored after the last checkpoint: the roll of
its message is not repeated. RocketMQ knows neither before it reads them.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.message_store import MessageStore, TimerStore
from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.protocol import record
from trimq.protocol.property_names import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DEQUEUE_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    PROPERTY_UNIQ_KEY,
)
from trimq.protocol.property_text import decode_properties
from trimq.protocol.timer_message import TimerTextError, delete_key, due_time, roll_times, unrolled_text
from trimq.protocol.topic_rules import TIMER_TOPIC
from trimq.remoting.config.configuration import Configuration

_MAX_COUNT: Final = 256
_MAX_BYTES: Final = 256 * 1024
_NAMES: Final = (f"{PROPERTY_TIMER_DEL_UNIQKEY}\x01".encode(), f"{PROPERTY_TIMER_ROLL_TIMES}\x01".encode())
_DIGEST: Final = 16
MOST_MARKS: Final = 500_000
"""Marks ahead that are known at a time; some 100 MiB. Later ones are looked for when these have entered the wheel."""
MOST_ROLLS: Final = 250_000
"""Rolled copies that are recognised after a start; some 40 MiB."""


async def read_timer_queue(store: MessageStore, offset: int, *, cold: bool = True) -> GetMessageResult | None:
    """Messages of the timer's queue from ``offset`` on, which the caller releases.

    None if they would have to be read from the device and ``cold`` is false. Raises OSError if the first one cannot be
    read.
    """
    where = (TIMER_TOPIC, 0, offset)
    result = store.get_message(*where, _MAX_COUNT, _MAX_BYTES, None)
    if result is None and cold:
        try:
            result = await store.get_message_cold(*where, _MAX_COUNT, _MAX_BYTES, None)
        except OSError:  # one that follows may be the cause
            result = await store.get_message_cold(*where, 1, _MAX_BYTES, None)
    return result


class TimerAhead:
    """Marks and rolled copies that the timer's task has not reached. Only that task calls this."""

    def __init__(self, configuration: Configuration, store: MessageStore, timers: TimerStore) -> None:
        self._configuration = configuration
        self._store = store
        self._timers = timers
        self._looked_until = 0
        self._at_start = True
        self._marks: dict[bytes, int] = {}
        """The marks ahead, by what they cancel, with their queue offsets, which rise."""
        self._kept: set[bytes] = set()
        """What the marks cancel that were reached while a rolled copy was ahead, which may be what they cancel."""
        self._rolled_until = 0
        """Behind the last rolled copy of the queue."""
        self._rolls: dict[bytes, int] = {}
        """The rolled copies since the last checkpoint of the life before, by what was rolled.

        All of them if the queue is read again because wheel and log were lost.
        """
        self._rolls_until_ms = 0

    # the queue

    async def look(self) -> None:
        """Look for what is new in the queue. The first time also for rolled copies."""
        self._looked_until = max(self._looked_until, self._timers.next_offset)
        while self._looked_until < self._store.max_offset(TIMER_TOPIC, 0) and len(self._marks) < MOST_MARKS:
            try:
                result = await read_timer_queue(self._store, self._looked_until)
            except OSError:  # whether it is lost is decided when it is the next to enter the wheel
                self._looked_until += 1
                continue
            assert result is not None
            try:
                if result.status is GetMessageStatus.FOUND:
                    for buffer in result.buffers:
                        self._look_at(bytes(buffer))
                elif result.next_begin_offset <= self._looked_until:
                    break
                self._looked_until = result.next_begin_offset
            finally:
                result.release()
            await trio.lowlevel.checkpoint()
        self._at_start = False

    def _look_at(self, data: bytes) -> None:
        if not any(name in data for name in _NAMES):
            return
        at = 0
        view = memoryview(data)
        while at < len(data):
            head = record.decode_head(view, at)
            at += head.size
            text = data[head.properties_at : head.properties_end]
            if head.queue_offset < self._looked_until or not any(name in text for name in _NAMES):
                continue
            properties = decode_properties(str(text, "utf-8", "replace"))
            key = self._cancelled_by(properties)
            if key is not None:
                self._marks.pop(key, None)
                self._marks[key] = head.queue_offset
            if self._at_start and PROPERTY_TIMER_ROLL_TIMES in properties:
                self._found_roll(view, head, properties)

    def _found_roll(self, view: memoryview, head: record.RecordHead, properties: dict[str, str]) -> None:
        self._rolled_until = head.queue_offset + 1
        stored_ms = _number(properties.get(PROPERTY_TIMER_DEQUEUE_MS, ""))
        timers = self._timers
        # The slots before the checkpoint's read time are not delivered again, unless the queue is read again: then what
        # was rolled in them comes from there, with its copies.
        is_past = stored_ms < timers.checkpoint.read_time and not timers.is_read_again
        if is_past or len(self._rolls) >= MOST_ROLLS:
            return
        key = _roll(view, head, properties, roll_times(properties))
        self._rolls[key] = self._rolls.get(key, 0) + 1
        self._rolls_until_ms = max(self._rolls_until_ms, stored_ms)

    def passed(self) -> None:
        """Messages have left the queue: forget what was ahead of them."""
        offset = self._timers.next_offset
        marks = self._marks
        while marks and marks[key := next(iter(marks))] < offset:
            del marks[key]
        if offset >= self._rolled_until:
            self._kept.clear()
            self._timers.is_between = False
            if self._rolls and self._timers.read_time > self._rolls_until_ms:
                self._rolls.clear()

    # recalls

    def cancels(self, properties: dict[str, str]) -> bool:
        """Whether a mark ahead, or one that was kept, cancels a message."""
        if not self._marks and not self._kept:
            return False
        unique = properties.get(PROPERTY_UNIQ_KEY)
        if unique is None or PROPERTY_TIMER_DEL_UNIQKEY in properties:
            return False
        with_topic = self._configuration.section(MessageStoreConfig).append_topic_for_timer_delete_key
        name = delete_key(properties.get(PROPERTY_REAL_TOPIC, ""), unique, with_topic=with_topic)
        key = self._key(name, properties)
        return key in self._marks or key in self._kept

    def keep(self, marks: Iterable[dict[str, str]]) -> None:
        """These marks are reached. Keep what they cancel while that may be ahead as a rolled copy.

        No checkpoint is written meanwhile: after a crash the marks have to be reached once more.
        """
        if self._timers.next_offset < self._rolled_until:
            for properties in marks:
                key = self._cancelled_by(properties)
                if key is not None:
                    self._kept.add(key)
                    self._timers.is_between = True

    def _cancelled_by(self, properties: dict[str, str]) -> bytes | None:
        name = properties.get(PROPERTY_TIMER_DEL_UNIQKEY)
        return None if name is None else self._key(name, properties)

    def _key(self, name: str, properties: dict[str, str]) -> bytes | None:
        """What a mark and its message have in common: the topic, the name, and the slot in which they are due."""
        try:
            due = due_time(properties)
        except TimerTextError:
            return None
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        return blake2b(f"{due // self._timers.precision} {topic} {name}".encode(), digest_size=_DIGEST).digest()

    # rolls

    def rolled(self, queue_offset: int) -> None:
        """A rolled copy is stored at a queue offset."""
        self._rolled_until = max(self._rolled_until, queue_offset + 1)

    @property
    def has_rolls(self) -> bool:
        """Whether rolled copies that were found at the start still wait for their messages."""
        return bool(self._rolls)

    def roll_of(self, view: memoryview, head: record.RecordHead, properties: dict[str, str]) -> bytes | None:
        """The name under which a message that rolls has a copy, if one was found at the start: see ``was_rolled``."""
        if not self._rolls:
            return None
        key = _roll(view, head, properties, roll_times(properties) + 1)
        return key if key in self._rolls else None

    def rolls_left(self, key: bytes) -> int:
        """The number of messages with this name whose rolls need not be repeated."""
        return self._rolls.get(key, 0)

    def was_rolled(self, key: bytes, count: int = 1) -> None:
        """Messages with this name were left out, because they have their copies."""
        left = self._rolls.pop(key) - count
        if left > 0:
            self._rolls[key] = left


def _roll(view: memoryview, head: record.RecordHead, properties: dict[str, str], times: int) -> bytes:
    """A digest of a message and the number of its rolls; that of its rolled copy is the same."""
    digest = blake2b(f"{times} {head.born_timestamp} {head.body_crc} {head.flag}\n".encode(), digest_size=_DIGEST)
    digest.update(head.born_host)
    digest.update(view[head.body_at : head.body_end])
    digest.update(unrolled_text(properties))
    return digest.digest()


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
