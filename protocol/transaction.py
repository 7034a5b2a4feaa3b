"""The records of transactions: halves, op records and commit records, and the properties that link them.

A half is a message in RMQ_SYS_TRANS_HALF_TOPIC with its real topic and queue in REAL_TOPIC and REAL_QID. It is ended by
an op record, whose body is a list of queue offsets of halves (``12,13,``). A committed one is stored once more in its
real topic; PREPAREDTRANSACTIONOFFSET of that record is the log offset of the half. Source: RocketMQ's
TransactionalMessageUtil, TransactionalMessageBridge. The page docs/formats/transaction.md has examples.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from trimq.protocol import record
from trimq.protocol.property_names import (
    PROPERTY_PGROUP,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TRAN_MSG,
    PROPERTY_TRAN_PREPARED_QUEUE_OFFSET,
    PROPERTY_TRAN_RESUMED_OFFSET,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
)
from trimq.protocol.property_text import decode_properties, join_properties, property_of
from trimq.protocol.real_place import real_place
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC

GROUP: Final = "CID_RMQ_SYS_TRANS"
"""The group whose offsets say up to where the half queue and the op queue are done."""
QUEUE: Final = 0
"""The queue of halves, and that of their op records."""
MAX_HALF_PROPERTIES: Final = record.MAX_PROPERTIES - 128
"""A half that is stored again gets further properties: these must fit too."""
OP_TAG: Final = "d"
"""The tag of op records."""
OP_PROPERTIES: Final = join_properties({PROPERTY_WAIT: "true", PROPERTY_TAGS: OP_TAG}).encode()
"""The properties of op records, as RocketMQ writes them."""

_HALF_TOPIC: Final = TRANS_HALF_TOPIC.encode()
_OF_BROKERS: Final = (
    PROPERTY_TRAN_PREPARED_QUEUE_OFFSET,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRAN_RESUMED_OFFSET,
)
_RESUMED: Final = PROPERTY_TRAN_RESUMED_OFFSET.encode()
_OP_BODY: Final = re.compile(rb"(?:\d{1,19},)*\d{0,19}")
_NUMBER: Final = re.compile("[0-9]{1,18}")


class NotAHalfError(ValueError):
    """A record that is not a half; the text says why."""


def op_body(offsets: Iterable[int]) -> bytes:
    """The body of an op record that ends the halves at these queue offsets."""
    return "".join([f"{offset}," for offset in offsets]).encode()


def op_offsets(body: bytes) -> list[int]:
    """The queue offsets in an op record. Raises ValueError if the body is not such a list."""
    if not _OP_BODY.fullmatch(body):
        raise ValueError(f"the body of an op record is no list of offsets: {body[:64]!r}")
    return [int(word) for word in body.split(b",") if word]


class Half(Struct):
    """A half as it is stored. ``data`` is its record, valid as long as the buffer that it was read from.

    ``origin`` is the queue offset under which the half was first stored: its own, or for one that was stored again the
    first one's. ``times``: how often it was checked. ``topic`` and ``queue_id``: where the message goes if it is
    committed. ``problem``: why it cannot be committed, as its real place is none (real_place.py); else empty.
    """

    data: Any
    head: record.RecordHead
    properties: dict[str, str]
    origin: int
    times: int
    topic: str
    queue_id: int
    problem: str = ""

    @property
    def offset(self) -> int:
        """Its offset in the half queue."""
        return self.head.queue_offset

    @property
    def physical_offset(self) -> int:
        """Its offset in the log."""
        return self.head.physical_offset

    @property
    def body(self) -> Any:
        """The body, a view of the record."""
        return self.data[self.head.body_at : self.head.body_end]

    @property
    def group(self) -> str:
        """The producer group that knows the state of the transaction."""
        return self.properties.get(PROPERTY_PGROUP, "")

    @property
    def is_first(self) -> bool:
        """False if it was stored again."""
        return self.origin == self.head.queue_offset

    @property
    def since(self) -> int:
        """When it was prepared, in ms: by this machine's clock if the record is the first one, else by the client's."""
        head = self.head
        return head.store_timestamp if self.is_first and not self.times else head.born_timestamp


def decode_half(data: Any, topic: bytes = _HALF_TOPIC, *, any_place: bool = False) -> Half:
    """The half in the bytes of a record of ``topic``. Raises NotAHalfError, RecordError.

    ``any_place``: also return a half that cannot be committed; then its ``problem`` says why.
    """
    head = record.decode_head(data)
    if bytes(data[head.topic_at : head.topic_end]) != topic or head.queue_id != QUEUE:
        raise NotAHalfError("the record is not in the queue of half messages")
    text = str(data[head.properties_at : head.properties_end], "utf-8", "replace")
    properties = decode_properties(text)
    place = real_place(properties.get(PROPERTY_REAL_TOPIC), properties.get(PROPERTY_REAL_QID))
    if isinstance(place, str) and not any_place:
        raise NotAHalfError(f"the half message cannot be committed: {place}")
    real_topic, queue_id, problem = ("", 0, place) if isinstance(place, str) else (*place, "")
    origin = number_of(properties.get(PROPERTY_TRAN_PREPARED_QUEUE_OFFSET), head.queue_offset)
    return Half(
        data,
        head,
        properties,
        # One that refers to itself or to a later one was not written by a broker.
        min(head.queue_offset, origin),
        number_of(properties.get(PROPERTY_TRANSACTION_CHECK_TIMES), 0),
        real_topic,
        queue_id,
        problem,
    )


def number_of(text: str | None, otherwise: int) -> int:
    """A number of at least 0 in a property; ``otherwise`` if it is missing or something else."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else otherwise


def make_half(properties: dict[str, str], topic: str, queue_id: int, group: str) -> None:
    """Turn the properties of a sent message into those of a half.

    What only brokers write is removed: a client must not refer to another half. ``group`` is that of the request.
    """
    for name in _OF_BROKERS:
        properties.pop(name, None)
    properties[PROPERTY_TRAN_MSG] = "true"
    properties.setdefault(PROPERTY_PGROUP, group)
    properties[PROPERTY_TRANSACTION_ID] = properties[PROPERTY_UNIQ_KEY]
    properties[PROPERTY_REAL_TOPIC] = topic
    properties[PROPERTY_REAL_QID] = str(queue_id)


def committed_properties(half: Half) -> dict[str, str]:
    """The properties of the commit record of a half: all but the real topic and queue, as RocketMQ 5 writes them."""
    properties = dict(half.properties)
    properties.pop(PROPERTY_REAL_TOPIC, None)
    properties.pop(PROPERTY_REAL_QID, None)
    return properties


def again_properties(half: Half, times: int) -> dict[str, str]:
    """The properties of a half that is stored again after ``times`` checks.

    TRAN_PREPARED_QUEUE_OFFSET links it with the first one. RocketMQ writes it only for halves that it stores again
    before their first check.
    """
    linked = {PROPERTY_TRAN_PREPARED_QUEUE_OFFSET: str(half.origin), PROPERTY_TRANSACTION_CHECK_TIMES: str(times)}
    return half.properties | linked


def resumed_properties(half: Half) -> dict[str, str]:
    """The properties of a new half made of one in TRANS_CHECK_MAX_TIME_TOPIC: no check of it counts any more.

    TRAN_RESUMED_OFFSET says of which one, so that no second half is made of it. RocketMQ does not write it.
    """
    linked = {PROPERTY_TRANSACTION_CHECK_TIMES: "0", PROPERTY_TRAN_RESUMED_OFFSET: str(half.physical_offset)}
    properties = half.properties | linked
    properties.pop(PROPERTY_TRAN_PREPARED_QUEUE_OFFSET, None)
    return properties


def resumed_from(properties: bytes) -> int:
    """The log offset of the record in TRANS_CHECK_MAX_TIME_TOPIC that a half was made of; -1 for other halves.

    ``properties`` is the text of the half's properties.
    """
    if _RESUMED not in properties:
        return -1
    text = property_of(properties.decode("utf-8", "replace"), PROPERTY_TRAN_RESUMED_OFFSET)
    return number_of(text, -1)
