"""Which records go to a queue and which to the index, and what their queue units say.

Queues and index are derived from the log by several: the dispatch of puts, ReputMessageService, recovery, what checks
a store that is offline, and the Spark job that does it in columns. What they derive is said here, and nowhere else.
Source: RocketMQ's CommitLogDispatcherBuildConsumeQueue, CommitLogDispatcherBuildIndex, and
CommitLog.checkMessageAndReturnSize.
"""

from collections.abc import Sequence
from typing import Final

from trimq.protocol.hashing import tags_code
from trimq.protocol.property_names import PROPERTY_DELAY, PROPERTY_TAGS
from trimq.protocol.property_text import property_of
from trimq.protocol.sysflag import (
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    TRANSACTION_NOT,
    TRANSACTION_PREPARED,
)
from trimq.protocol.topic_rules import SCHEDULE_TOPIC

KIND: Final = TRANSACTION_MASK
"""The bits of a record's sysFlag that tell its kind."""


def _table(*kinds: int) -> tuple[bool, ...]:
    """By kind, whether it is one of these. Of each record it is asked: to look into a tuple is the quickest way."""
    return tuple(kind in kinds for kind in range(KIND + 1))


IN_QUEUE: Final = _table(TRANSACTION_NOT, TRANSACTION_COMMIT)
"""``IN_QUEUE[sys_flag & KIND]``: whether a record has a place in its queue: it takes an offset, and has a unit."""
IN_INDEX: Final = _table(TRANSACTION_NOT, TRANSACTION_PREPARED, TRANSACTION_COMMIT)
"""``IN_INDEX[sys_flag & KIND]``: whether the keys of a record are in the index."""

_UNKNOWN_LEVEL_MS: Final = 1000


def unit_tags_code(topic: str, properties: str, since: int, delays_ms: Sequence[int]) -> int:
    """What stands in the tag slot of a record's unit: the tag's hash, or for a delayed message the time it is due.

    ``properties`` is the record's text of them. ``since``, ``delays_ms``: see ``due_time``.
    """
    if topic == SCHEDULE_TOPIC:
        due = due_time(property_of(properties, PROPERTY_DELAY), since, delays_ms)
        if due is not None:
            return due
    return tags_code(property_of(properties, PROPERTY_TAGS))


def due_time(delay: str, since: int, delays_ms: Sequence[int]) -> int | None:
    """When a message is due whose property DELAY is ``delay``, in ms; None where that is no delay level.

    ``since`` is when its delay began: the record's store time where nothing else is known. ``delays_ms`` is the delay
    of each level, [0] being none; a level beyond the last one is the last one.
    """
    if not (delay.isascii() and delay.isdigit()) or int(delay) == 0:
        return None
    level = min(int(delay), len(delays_ms) - 1)
    return since + (delays_ms[level] if level > 0 else _UNKNOWN_LEVEL_MS)
