"""What a message's properties mean to a send: whether it waits for the disk, and where a delayed one is parked."""

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
    """The queue unit's tag slot: the hash of TAGS, 0 without."""
    tags = properties.get(_TAGS)
    return tags_code(tags) if tags else 0


def waits_for_store(properties: dict[str, str]) -> bool:
    """False where the producer does not want to wait for the disk (WAIT=false)."""
    wait = properties.get(_WAIT)
    return wait is None or wait.lower() == "true"


def delay_level(properties: dict[str, str]) -> int:
    """The DELAY property. Raises RemotingError(MESSAGE_ILLEGAL) where it is not a number."""
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
    """Turn a message with a delay level to the schedule topic: its place there; the real one goes into its properties.

    ``level`` is at most the highest one there is. The DELAY property is set to it.
    """
    properties[_DELAY] = str(level)
    properties[_REAL_TOPIC] = topic
    properties[_REAL_QID] = str(queue_id)
    return SCHEDULE_TOPIC, level - 1
