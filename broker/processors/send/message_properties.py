"""The properties that decide how a message is stored: TAGS, WAIT and DELAY."""

from typing import Final

from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.hashing import tags_code
from trimq.protocol.property_names import PropertyName
from trimq.protocol.topic_rules import SCHEDULE_TOPIC

_TAGS: Final = PropertyName.TAGS.value
_WAIT: Final = PropertyName.WAIT.value
_DELAY: Final = PropertyName.DELAY.value
_REAL_TOPIC: Final = PropertyName.REAL_TOPIC.value
_REAL_QID: Final = PropertyName.REAL_QID.value


def tag_hash(properties: dict[str, str]) -> int:
    """The tags code of the queue unit: the hash of TAGS, 0 without tags."""
    tags = properties.get(_TAGS)
    return tags_code(tags) if tags else 0


def waits_for_store(properties: dict[str, str]) -> bool:
    """False if the producer does not want to wait for the disk (WAIT=false)."""
    wait = properties.get(_WAIT)
    return wait is None or wait.lower() == "true"


def delay_level(properties: dict[str, str]) -> int:
    """The DELAY property, 0 without one. Raises RemotingError(MESSAGE_ILLEGAL) if it is not a number."""
    text = properties.get(_DELAY)
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
    properties[_DELAY] = str(level)
    properties[_REAL_TOPIC] = topic
    properties[_REAL_QID] = str(queue_id)
    return SCHEDULE_TOPIC, level - 1
