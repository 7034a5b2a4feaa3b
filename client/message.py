"""Messages as programs see them: the message to send, the receipt of a send, and the received message.

A received message is a view into the pull reply that brought it. Each field is decoded on first access, so a consumer
that reads only bodies pays only for bodies.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from msgspec import Struct

from trimq.client.compression import decompress
from trimq.client.errors import UsageError
from trimq.protocol import record
from trimq.protocol.body import MessageQueue
from trimq.protocol.message_id import encode_offset_id
from trimq.protocol.message_keys import key_words
from trimq.protocol.property_names import (
    FAST_NAMES,
    PROPERTY_CLUSTER,
    PROPERTY_DELAY,
    PROPERTY_INSTANCE_ID,
    PROPERTY_KEYS,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
    SLOW_NAMES,
)
from trimq.protocol.property_text import decode_properties, encode_properties
from trimq.protocol.topic_rules import RETRY_PREFIX, topic_problem

__all__ = ["Message", "MessageQueue", "ReceivedMessage", "SendOutcome", "SendReceipt", "SendStatus"]


_problem: Final = lru_cache(maxsize=1024)(topic_problem)

_NO_DELAY: Final = (None, None, None)
_NONE: Final[Mapping[str, str]] = {}

RESERVED: Final = (FAST_NAMES | SLOW_NAMES) - {PROPERTY_INSTANCE_ID}
"""Property names with a meaning in RocketMQ. They are set by arguments of Message, never through ``properties``."""


class SendOutcome(Enum):
    """What the client knows about a message's last send. It is also set if the send was cancelled.

    >>> Message("Orders", b"x").outcome
    <SendOutcome.NOT_STORED: 'certainly not stored'>
    """

    NOT_STORED = "certainly not stored"
    PERHAPS_STORED = "perhaps stored"
    STORED = "stored"


class SendStatus(Enum):
    """How durable a stored message is. Every status means that the master has stored the message.

    ``SEND_OK`` meets the broker's configured guarantees. ``FLUSH_DISK_TIMEOUT``: the master did not confirm the flush
    to disk in time. ``FLUSH_SLAVE_TIMEOUT`` and ``SLAVE_NOT_AVAILABLE``: no slave has confirmed the message.

    >>> SendStatus.SEND_OK.value
    0
    """

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


class SendReceipt(NamedTuple):
    """A broker's answer to a send: the message is stored.

    ``message_id`` is the id that the producer gave it (UNIQ_KEY). ``offset_message_id`` is the id by which the broker
    finds it: the broker's address and the commit log offset. ``queue_offset`` is its offset in ``queue``; a delayed or
    prepared message has the offset in the internal queue where it waits.

    >>> queue = MessageQueue(topic="Orders", broker_name="broker-a", queue_id=0)
    >>> SendReceipt("0A", queue, 7, SendStatus.SEND_OK, "0B").queue_offset
    7
    """

    message_id: str
    queue: MessageQueue
    queue_offset: int
    status: SendStatus
    offset_message_id: str
    transaction_id: str | None = None
    recall_handle: str | None = None


class Message:
    """A message to send.

    ``tags`` is one tag, by which consumers filter. ``keys`` are indexed for queries. ``properties`` are the program's
    own headers. All messages with the same ``sharding_key`` go to the same queue, in the order of their sends. At most
    one of ``delay_level`` (1 to 18), ``delay`` (seconds) and ``deliver_at`` (an aware datetime, or seconds since the
    epoch) sets when consumers may see the message. ``flag`` is a number that the broker stores and returns.
    ``wait_stored=False`` lets a broker with synchronous flush answer before the flush.

    ``message_id`` is None until the first send. ``outcome`` says whether the message is stored, also after a cancelled
    send.

    Raises UsageError for an invalid topic name, for more than one delay, and for a delay level below 1.

    >>> message = Message("Orders", b"1 book", tags="paid", keys=["o-1", "c-7"], properties={"shop": "north"})
    >>> message.keys, message.properties
    (('o-1', 'c-7'), {'shop': 'north'})
    """

    __slots__ = (
        "_properties",
        "body",
        "delay",
        "delay_level",
        "deliver_at",
        "flag",
        "keys",
        "message_id",
        "outcome",
        "sharding_key",
        "system_properties",
        "tags",
        "topic",
        "wait_stored",
    )

    def __init__(  # noqa: PLR0913 - a message has that many parts, all but two by keyword
        self,
        topic: str,
        body: bytes,
        *,
        tags: str | None = None,
        keys: Iterable[str] | str = (),
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        delay_level: int | None = None,
        delay: float | None = None,
        deliver_at: datetime | float | None = None,
        flag: int = 0,
        wait_stored: bool = True,
    ) -> None:
        problem = _problem(topic)
        if problem is not None:
            raise UsageError(problem)
        delays = (delay_level, delay, deliver_at)
        if delays != _NO_DELAY and sum(value is not None for value in delays) > 1:
            raise UsageError("at most one of delay_level, delay and deliver_at may be given")
        if delay_level is not None and delay_level < 1:
            raise UsageError(f"delay level {delay_level}: levels are 1 to 18")
        self.topic: str = topic
        self.body: bytes = body
        self.tags: str | None = tags
        self.keys: tuple[str, ...] = () if keys == () else (keys,) if isinstance(keys, str) else tuple(keys)
        self._properties: dict[str, str] | None = dict(properties) if properties else None
        self.sharding_key: str | None = sharding_key
        self.delay_level: int | None = delay_level
        self.delay: float | None = delay
        self.deliver_at: datetime | float | None = deliver_at
        self.flag: int = flag
        self.wait_stored: bool = wait_stored
        self.message_id: str | None = None
        self.outcome: SendOutcome = SendOutcome.NOT_STORED
        self.system_properties: Mapping[str, str] = _NONE

    def __repr__(self) -> str:
        return f"Message({self.topic!r}, <{len(self.body)} bytes>, tags={self.tags!r}, id={self.message_id})"

    @property
    def properties(self) -> dict[str, str]:
        """The program's own properties; the dictionary may be changed until the message is sent.

        >>> message = Message("T", b"x")
        >>> message.properties["shop"] = "north"
        >>> message.properties
        {'shop': 'north'}
        """
        properties = self._properties
        if properties is None:
            properties = self._properties = {}
        return properties

    @properties.setter
    def properties(self, properties: dict[str, str]) -> None:
        self._properties = properties

    @property
    def is_delayed(self) -> bool:
        """Whether consumers may see the message only after a delay.

        >>> Message("T", b"x", delay=2.5).is_delayed
        True
        """
        return self.delay_level is not None or self.delay is not None or self.deliver_at is not None

    @property
    def is_plain(self) -> bool:
        """Whether the message has no properties on the wire beyond id, WAIT, tags and keys."""
        return (
            not self._properties
            and self.sharding_key is None
            and self.delay_level is None
            and self.delay is None
            and self.deliver_at is None
            and not self.system_properties
        )

    def wire_properties(self) -> dict[str, str]:
        """All properties as they are sent, RocketMQ's own included, except UNIQ_KEY, which the sender adds.

        Raises UsageError for a property name that is reserved for RocketMQ, for an empty key or one that contains a
        blank, and for a ``deliver_at`` without a time zone.

        >>> Message("T", b"x", tags="a", properties={"p": "q"}).wire_properties()
        {'p': 'q', 'WAIT': 'true', 'TAGS': 'a'}
        """
        properties = self._properties.copy() if self._properties else {}
        if properties and not RESERVED.isdisjoint(properties):
            name = next(name for name in properties if name in RESERVED)
            raise UsageError(f"the property {name} is reserved: it is set by an argument of Message or of send")
        properties[PROPERTY_WAIT] = "true" if self.wait_stored else "false"
        if self.tags:
            properties[PROPERTY_TAGS] = self.tags
        if self.keys:
            properties[PROPERTY_KEYS] = joined(self.keys)
        if self.sharding_key is not None:
            properties[PROPERTY_SHARDING_KEY] = self.sharding_key
        if self.is_delayed:
            properties.update(self._delay_property())
        if self.system_properties:
            properties.update(self.system_properties)
        return properties

    def wire_text(self, properties: dict[str, str]) -> str:
        """Properties encoded as one text. Raises UsageError for a name or value with RocketMQ's separators in it."""
        try:
            return encode_properties(properties)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _delay_property(self) -> dict[str, str]:
        if self.delay_level is not None:
            return {PROPERTY_DELAY: str(self.delay_level)}
        if self.delay is not None:
            return {PROPERTY_TIMER_DELAY_MS: str(int(self.delay * 1000))}
        when = self.deliver_at
        if isinstance(when, datetime):
            if when.tzinfo is None:
                raise UsageError("deliver_at has no time zone: use an aware datetime such as datetime.now(UTC)")
            when = when.timestamp()
        return {PROPERTY_TIMER_DELIVER_MS: str(int((when or 0) * 1000))}


def joined(keys: tuple[str, ...]) -> str:
    """Keys as one property. Raises UsageError for a key that is empty or contains a blank, which separates keys."""
    for key in keys:
        if not key or " " in key:
            raise UsageError(f"the key {key!r} is empty or contains a blank: blanks separate keys")
    return " ".join(keys)


class ReceivedMessage(Struct, eq=False, gc=False):
    """A message as a broker delivered it. Times are in seconds since the epoch, sizes in bytes.

    ``size`` is that of the whole stored record, ``queue_offset`` its offset in the queue that it was read from.

    >>> data = record.encode_record(
    ...     topic=b"Orders", body=b"1 book", queue_id=3, queue_offset=7,
    ...     properties=encode_properties({"TAGS": "paid", "KEYS": "o-1", "shop": "north"}).encode(),
    ...     physical_offset=0, born_timestamp=1000, born_host=record.pack_host("127.0.0.1", 4),
    ...     store_timestamp=2000, store_host=record.pack_host("127.0.0.1", 10911))
    >>> message = ReceivedMessage(memoryview(data), 0, len(data), 7, "broker-a")
    >>> message.topic, message.body, message.tags, message.keys, message.properties
    ('Orders', b'1 book', 'paid', ('o-1',), {'shop': 'north'})
    >>> message.queue.queue_id, message.queue_offset, message.born_time, message.reconsume_times
    (3, 7, 1.0, 0)
    """

    _data: memoryview
    _at: int
    size: int
    queue_offset: int
    broker_name: str
    _receiver: Any = None
    _head: record.RecordHead | None = None
    _properties: dict[str, str] | None = None
    _body: bytes | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topic!r}, queue={self.queue_id}, offset={self.queue_offset})"

    @property
    def head(self) -> record.RecordHead:
        """The record's fixed fields.

        Raises trimq.protocol.record.RecordError if the record's lengths are inconsistent.
        """
        head = self._head
        if head is None:
            head = self._head = record.decode_head(self._data, self._at)
        return head

    @property
    def all_properties(self) -> dict[str, str]:
        """All properties, RocketMQ's own included."""
        properties = self._properties
        if properties is None:
            head = self.head
            text = bytes(self._data[head.properties_at : head.properties_end]).decode("utf-8", "replace")
            properties = self._properties = decode_properties(text)
        return properties

    @property
    def body(self) -> bytes:
        """The body as the producer gave it, decompressed if necessary.

        Raises UsageError if the library for the compression is not installed, and ValueError if the compressed bytes
        are damaged.
        """
        body = self._body
        if body is None:
            head = self.head
            body = self._body = decompress(bytes(self._data[head.body_at : head.body_end]), head.sys_flag)
        return body

    @property
    def stored_topic(self) -> str:
        """The topic that it was read from: the group's retry topic for a message that is being retried."""
        head = self.head
        return bytes(self._data[head.topic_at : head.topic_end]).decode("utf-8", "replace")

    @property
    def topic(self) -> str:
        """The topic that it was sent to, also if it was read from a retry topic."""
        topic = self.stored_topic
        return self.all_properties.get(PROPERTY_RETRY_TOPIC, topic) if topic.startswith(RETRY_PREFIX) else topic

    @property
    def tags(self) -> str | None:
        """The tag; None if it has none."""
        return self.all_properties.get(PROPERTY_TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys by which queries find it."""
        return tuple(key_words(self.all_properties.get(PROPERTY_KEYS, "")))

    @property
    def properties(self) -> dict[str, str]:
        """The program's own properties, without RocketMQ's."""
        return {name: value for name, value in self.all_properties.items() if name not in RESERVED}

    @property
    def wants_reply(self) -> bool:
        """Whether it is a request: a client waits for a reply (``Producer.reply``)."""
        properties = self.all_properties
        return PROPERTY_REPLY_TO_CLIENT in properties and PROPERTY_CLUSTER in properties

    @property
    def sharding_key(self) -> str | None:
        """The key by which the producer chose the queue; None if there was none."""
        return self.all_properties.get(PROPERTY_SHARDING_KEY)

    @property
    def message_id(self) -> str:
        """The id that the producer gave it; ``offset_message_id`` if it gave none."""
        return self.all_properties.get(PROPERTY_UNIQ_KEY) or self.offset_message_id

    @property
    def offset_message_id(self) -> str:
        """The id by which the broker finds it: the broker's address and the commit log offset."""
        return encode_offset_id(self.head.store_host, self.head.physical_offset)

    @property
    def queue_id(self) -> int:
        """The id of the queue that it was read from."""
        return self.head.queue_id

    @property
    def queue(self) -> MessageQueue:
        """The queue that it was read from."""
        return MessageQueue(topic=self.stored_topic, broker_name=self.broker_name, queue_id=self.queue_id)

    @property
    def born_time(self) -> float:
        """When the producer sent it, by the producer's clock, in seconds since the epoch."""
        return self.head.born_timestamp / 1000

    @property
    def store_time(self) -> float:
        """When the broker stored it, by the broker's clock, in seconds since the epoch."""
        return self.head.store_timestamp / 1000

    @property
    def born_host(self) -> tuple[str, int]:
        """The producer's IP address and port, as the broker saw them."""
        return record.unpack_host(self.head.born_host)

    @property
    def store_host(self) -> tuple[str, int]:
        """The IP address and port of the broker that stored it."""
        return record.unpack_host(self.head.store_host)

    @property
    def flag(self) -> int:
        """The ``flag`` that the producer gave it."""
        return self.head.flag

    @property
    def commit_log_offset(self) -> int:
        """The offset of its record in the broker's commit log."""
        return self.head.physical_offset

    @property
    def prepared_transaction_offset(self) -> int:
        """For a message of a committed transaction: the commit log offset of the prepared message."""
        return self.head.prepared_transaction_offset

    @property
    def reconsume_times(self) -> int:
        """How many times it was delivered before without being acknowledged."""
        return self.head.reconsume_times

    @property
    def transaction_id(self) -> str | None:
        """The id of the transaction that it belongs to; None if it belongs to none."""
        return self.all_properties.get(PROPERTY_TRANSACTION_ID)
