"""The properties that decide how a message is stored: TAGS, WAIT and DELAY."""

from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.hashing import tags_code
from trimq.protocol.property_names import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_WAIT,
)
from trimq.protocol.topic_rules import SCHEDULE_TOPIC


def tag_hash(properties: dict[str, str]) -> int:
    """The tags code of the queue unit: the hash of TAGS, 0 without tags."""
    tags = properties.get(PROPERTY_TAGS)
    return tags_code(tags) if tags else 0


def waits_for_store(properties: dict[str, str]) -> bool:
    """False if the producer does not want to wait for the disk (WAIT=false)."""
    wait = properties.get(PROPERTY_WAIT)
    return wait is None or wait.lower() == "true"


def delay_level(properties: dict[str, str]) -> int:
    """The DELAY property, 0 without one. Raises RemotingError(MESSAGE_ILLEGAL) if it is not a number."""
    text = properties.get(PROPERTY_DELAY)
    if not text:
        return 0
    try:
        return int(text)
    except ValueError:
        raise RemotingError(
            ResponseCode.MESSAGE_ILLEGAL, f"the property DELAY is not a whole number: {text[:32]!r}"
        ) from None


def park(properties: dict[str, str], topic: str, queue_id: int, level: int) -> tuple[str, int]:
    """Redirect a delayed message to the schedule topic. Returns the topic and queue that store it until it is due.

    The real topic and queue are saved in its properties. ``level`` is at most the highest configured one; the DELAY
    property is set to it.
    """
    properties[PROPERTY_DELAY] = str(level)
    properties[PROPERTY_REAL_TOPIC] = topic
    properties[PROPERTY_REAL_QID] = str(queue_id)
    return SCHEDULE_TOPIC, level - 1
