"""How the properties of a timed message change on its way through the timer (RocketMQ's HookUtils, TimerMessageStore).

A send puts it into rmq_sys_wheel_timer with TIMER_OUT_MS, REAL_TOPIC and REAL_QID. The timer puts it into its real
topic with TIMER_ENQUEUE_MS (when it entered the wheel) and TIMER_DEQUEUE_MS (when it left it). A message that rolls
gets TIMER_ROLL_TIMES too, and goes into rmq_sys_wheel_timer again. All others stay, REAL_TOPIC and REAL_QID too:
RocketMQ 5.5.0 makes the text of the record before it removes them.
"""

from typing import Final

from trimq.protocol.property_names import (
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_DEQUEUE_MS,
    PROPERTY_TIMER_ENQUEUE_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
)
from trimq.protocol.property_text import join_properties
from trimq.protocol.record import MAX_PROPERTIES

TIMER_NAMES: Final = (PROPERTY_TIMER_DELAY_SEC, PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELIVER_MS)
"""The properties by which a send asks for a time, the one that takes precedence first."""
NEVER_ENQUEUED: Final = (1 << 63) - 1
"""TIMER_ENQUEUE_MS of a message that was due when the timer found it, so that it never was in the wheel."""
RECALL_TAG: Final = "_RECALL_TAG_"
_OF_ROLLS: Final = (PROPERTY_TIMER_ROLL_TIMES, PROPERTY_TIMER_ENQUEUE_MS, PROPERTY_TIMER_DEQUEUE_MS)
_MAX_LONG: Final = (1 << 63) - 1


class TimerTextError(ValueError):
    """A property of a timed message does not hold a number."""


def _number(name: str, text: str) -> int:
    try:
        value = int(text) if text.lstrip("+-").isdecimal() and text.isascii() else None
    except ValueError:  # more digits than Python converts
        value = None
    if value is None or not -_MAX_LONG - 1 <= value <= _MAX_LONG:
        raise TimerTextError(f"the property {name} is not a whole number: {text[:32]!r}")
    return value


def deliver_time(properties: dict[str, str], now_ms: int) -> int | None:
    """The time at which a message that is sent now is to be delivered (ms since 1970); None if it is not timed.

    Raises TimerTextError.
    """
    if PROPERTY_TIMER_OUT_MS in properties:
        return None
    for name, factor in zip(TIMER_NAMES, (1000, 1, 0), strict=True):
        text = properties.get(name)
        if text is not None:
            value = _number(name, text)
            return now_ms + value * factor if factor else value
    return None


def due_time(properties: dict[str, str]) -> int:
    """TIMER_OUT_MS of a message in the timer's topic. Raises TimerTextError."""
    return _number(PROPERTY_TIMER_OUT_MS, properties.get(PROPERTY_TIMER_OUT_MS, ""))


def delete_key(topic: str, unique_key: str, *, with_topic: bool) -> str:
    """TIMER_DEL_UNIQKEY of the delete mark of a message (``with_topic``: appendTopicForTimerDeleteKey)."""
    return f"{topic}+{unique_key}" if with_topic else unique_key


def is_delete_mark(properties: dict[str, str]) -> bool:
    """Whether the message cancels another one."""
    return PROPERTY_TIMER_DEL_UNIQKEY in properties


def restored_text(properties: dict[str, str], enqueued_ms: int, dequeued_ms: int) -> bytes:
    """The properties of a message that goes to its real topic; as they were if the times do not fit into the record."""
    times = {PROPERTY_TIMER_ENQUEUE_MS: str(enqueued_ms), PROPERTY_TIMER_DEQUEUE_MS: str(dequeued_ms)}
    return _fitting(properties, times)


def rolled_text(properties: dict[str, str], enqueued_ms: int, dequeued_ms: int) -> bytes:
    """The properties of a message that goes into the timer's topic again; as they were if the others do not fit."""
    added = {
        PROPERTY_TIMER_ROLL_TIMES: str(roll_times(properties) + 1),
        PROPERTY_TIMER_ENQUEUE_MS: str(enqueued_ms),
        PROPERTY_TIMER_DEQUEUE_MS: str(dequeued_ms),
    }
    return _fitting(properties, added)


def roll_times(properties: dict[str, str]) -> int:
    """TIMER_ROLL_TIMES: how often a message has rolled; 0 if that is no number."""
    try:
        return _number(PROPERTY_TIMER_ROLL_TIMES, properties.get(PROPERTY_TIMER_ROLL_TIMES, "0"))
    except TimerTextError:
        return 0


def unrolled_text(properties: dict[str, str]) -> bytes:
    """The properties that a message and its rolled copies have in common."""
    return join_properties({name: value for name, value in properties.items() if name not in _OF_ROLLS}).encode()


def _fitting(properties: dict[str, str], added: dict[str, str]) -> bytes:
    text = join_properties(properties | added).encode()
    return text if len(text) <= MAX_PROPERTIES else join_properties(properties).encode()
