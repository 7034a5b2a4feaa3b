"""The topic and queue that a parked message is for: its properties REAL_TOPIC and REAL_QID, checked.

A half, and a message that waits for its time, go to their real topic later. Their records may have been written by a
client (through the timer's topic), or by Apache's broker, which checks neither. So each is checked where it is read: it
must not get to a topic of the broker itself, nor name files outside the store.
"""

import re
from typing import Final, NamedTuple

from trimq.protocol.property_names import PROPERTY_REAL_QID, PROPERTY_REAL_TOPIC
from trimq.protocol.property_text import decode_properties
from trimq.protocol.topic_rules import NO_SEND_TOPICS, SCHEDULE_TOPIC, TIMER_TOPIC, TRANS_HALF_TOPIC, topic_problem

WAITING_TOPICS: Final = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC, TRANS_HALF_TOPIC})
"""The topics of messages that wait, and go to another topic later."""

MAX_QUEUE_ID: Final = 2**31 - 1
"""The highest number in the field QUEUEID of a record."""

_NUMBER: Final = re.compile(r"[0-9]{1,10}\Z")
_REFUSED: Final = NO_SEND_TOPICS | {TIMER_TOPIC}


class RealPlace(NamedTuple):
    """A topic that clients may send to, and a queue id."""

    topic: str
    queue_id: int


def real_place(topic: str | None, queue_id: str | None, queues: int = MAX_QUEUE_ID + 1) -> RealPlace | str:
    """The place that the texts of REAL_TOPIC and REAL_QID name, or why it is none: a text for the log.

    ``queues``: how many queues the topic has, if that is known. A missing REAL_QID means queue 0.
    """
    if not topic:
        return "it has no REAL_TOPIC"
    if topic in _REFUSED:
        return f"REAL_TOPIC is {topic}, a topic of the broker itself"
    problem = topic_problem(topic)
    if problem is not None:
        return f"REAL_TOPIC: {problem}"
    if queue_id is None:
        return RealPlace(topic, 0)
    if not _NUMBER.match(queue_id):
        return f"REAL_QID is no number of a queue: {queue_id[:32]!r}"
    number = int(queue_id)
    if number >= queues:
        return f"REAL_QID is {number}, but the queues end at {queues - 1}"
    return RealPlace(topic, number)


def waiting_for(topic: str, properties: str) -> RealPlace | None:
    """Where a record of one of ``WAITING_TOPICS`` goes in the end; None for others, and if it names no place.

    ``properties`` is the text of the record's properties.
    """
    if topic not in WAITING_TOPICS:
        return None
    found = decode_properties(properties)
    place = real_place(found.get(PROPERTY_REAL_TOPIC), found.get(PROPERTY_REAL_QID))
    return None if isinstance(place, str) else place
