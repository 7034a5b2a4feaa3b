"""The state of each queue that the commit log keeps between two appends."""

from typing import TYPE_CHECKING, Final

from trimq.protocol import record
from trimq.protocol.topic_rules import MAX_RETRY_TOPIC_LENGTH, MAX_TOPIC_LENGTH, RETRY_PREFIX

if TYPE_CHECKING:
    from trimq.broker.store.queue.consume_queue import ConsumeQueue

V4_HOSTS: Final = 16
"""Bytes of two hosts with IPv4 addresses."""


class TopicQueue:
    """The state of a queue that an append needs: its next offset, and its topic as it is encoded in a record.

    ``deleted``: the topic was deleted, so that a caller who has cached this object must look the queue up again.
    ``units``: the consume queue, once it has been looked up, as long as it is not deleted.
    """

    __slots__ = (
        "deleted",
        "magic",
        "next_offset",
        "overhead",
        "queue_id",
        "topic",
        "topic_part",
        "units",
    )

    def __init__(self, topic: str, queue_id: int, raw: bytes, next_offset: int) -> None:
        wide = len(raw) > MAX_TOPIC_LENGTH
        self.topic = topic
        self.queue_id = queue_id
        self.magic = record.MAGIC_V2 if wide else record.MAGIC_V1
        self.topic_part = len(raw).to_bytes(2 if wide else 1, "big") + raw
        self.overhead = record.OVERHEAD_V1 - 1 - V4_HOSTS + len(self.topic_part)
        self.next_offset = next_offset
        self.deleted = False
        self.units: ConsumeQueue | None = None


class TopicIllegalError(ValueError):
    """A topic that no record can carry; the text gives the reason."""


def checked_topic(topic: str) -> bytes:
    """The encoded topic. Raises TopicIllegalError if it does not fit a record or breaks a rule for names."""
    try:
        raw = topic.encode()
    except UnicodeEncodeError:
        raise TopicIllegalError("the topic is not valid text") from None
    limit = MAX_RETRY_TOPIC_LENGTH if topic.startswith(RETRY_PREFIX) else MAX_TOPIC_LENGTH
    if not raw:
        raise TopicIllegalError("the topic is empty")
    if len(raw) > limit:
        raise TopicIllegalError(f"the topic has {len(raw)} bytes, the limit is {limit}")
    return raw
