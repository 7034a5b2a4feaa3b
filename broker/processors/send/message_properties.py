"""What a message's properties mean to a send: whether it waits for the disk, and where a delayed one is parked."""

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
    """The queue unit's tag slot: the hash of TAGS, 0 without."""
    tags = properties.get(PROPERTY_TAGS)
    return tags_code(tags) if tags else 0


def waits_for_store(properties: dict[str, str]) -> bool:
    """False where the producer does not want to wait for the disk (WAIT=false)."""
    wait = properties.get(PROPERTY_WAIT)
    return wait is None or wait.lower() == "true"


def delay_level(properties: dict[str, str]) -> int:
    """The DELAY property. Raises RemotingError(MESSAGE_ILLEGAL) where it is not a number."""
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
    """Turn a message with a delay level to the schedule topic: its place there; the real one goes into its properties.

    ``level`` is at most the highest one there is. The DELAY property is set to it.
    """
    properties[PROPERTY_DELAY] = str(level)
    properties[PROPERTY_REAL_TOPIC] = topic
    properties[PROPERTY_REAL_QID] = str(queue_id)
    return SCHEDULE_TOPIC, level - 1
