"""Which records are dispatched to queues and to the index, and the content of their queue units.

Several parts derive queues and index from the log: the dispatch of puts, ReputMessageService, recovery, the offline
check of a store, and the Spark job that works in columns. This module alone defines what they derive.
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
"""The bits of a record's sysFlag for its kind (transaction type)."""


def _table(*kinds: int) -> tuple[bool, ...]:
    """For each kind, whether it is in ``kinds``. A tuple: indexing one is the fastest test per record."""
    return tuple(kind in kinds for kind in range(KIND + 1))


IN_QUEUE: Final = _table(TRANSACTION_NOT, TRANSACTION_COMMIT)
"""``IN_QUEUE[sys_flag & KIND]``: whether a record is in its queue: it gets a queue offset and a unit."""
IN_INDEX: Final = _table(TRANSACTION_NOT, TRANSACTION_PREPARED, TRANSACTION_COMMIT)
"""``IN_INDEX[sys_flag & KIND]``: whether the keys of a record are in the index."""

_UNKNOWN_LEVEL_MS: Final = 1000


def unit_tags_code(topic: str, properties: str, since: int, delays_ms: Sequence[int]) -> int:
    """The tags code of a record's unit: the hash of its tag, or for a delayed message the time when it is due.

    ``properties`` is the text of the record's properties. ``since``, ``delays_ms``: see ``due_time``.
    """
    if topic == SCHEDULE_TOPIC:
        due = due_time(property_of(properties, PROPERTY_DELAY), since, delays_ms)
        if due is not None:
            return due
    return tags_code(property_of(properties, PROPERTY_TAGS))


def due_time(delay: str, since: int, delays_ms: Sequence[int]) -> int | None:
    """When a message with the property DELAY ``delay`` is due, in ms; None if that is no delay level.

    ``since`` is the start of its delay: the record's store time if nothing else is known. ``delays_ms`` has the delay
    of each level; [0] is unused. A level above the last one counts as the last one.
    """
    if not (delay.isascii() and delay.isdigit()) or int(delay) == 0:
        return None
    level = min(int(delay), len(delays_ms) - 1)
    return since + (delays_ms[level] if level > 0 else _UNKNOWN_LEVEL_MS)
