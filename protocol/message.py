"""Messages as producers and consumers see them, and their properties.

Properties travel and are stored as one text: ``name 0x01 value 0x02``, repeated; the last 0x02 may be missing, of equal
names the last wins (RocketMQ's MessageDecoder, MessageConst).
"""

from enum import StrEnum
from typing import Any, Final

from msgspec import Struct, field

from trimq.protocol import record, sysflag
from trimq.protocol.message_id import encode_offset_id

NAME_END: Final = "\x01"
VALUE_END: Final = "\x02"


class PropertyName(StrEnum):
    """Names of properties that mean something to the broker or to clients (RocketMQ's MessageConst)."""

    KEYS = "KEYS"
    TAGS = "TAGS"
    UNIQ_KEY = "UNIQ_KEY"
    WAIT = "WAIT"
    DELAY = "DELAY"
    TIMER_DELAY_SEC = "TIMER_DELAY_SEC"
    TIMER_DELAY_MS = "TIMER_DELAY_MS"
    TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
    REAL_TOPIC = "REAL_TOPIC"
    REAL_QID = "REAL_QID"
    RETRY_TOPIC = "RETRY_TOPIC"
    ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
    RECONSUME_TIME = "RECONSUME_TIME"
    MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
    DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"
    DLQ_ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_MESSAGE_ID"
    TRAN_MSG = "TRAN_MSG"
    PGROUP = "PGROUP"
    TRANSACTION_ID = "__transactionId__"
    MSG_REGION = "MSG_REGION"
    TRACE_ON = "TRACE_ON"
    CLUSTER = "CLUSTER"
    SHARDING_KEY = "__SHARDINGKEY"
    CORRELATION_ID = "CORRELATION_ID"
    REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
    TTL = "TTL"
    MSG_TYPE = "MSG_TYPE"
    ARRIVE_TIME = "ARRIVE_TIME"
    PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
    POP_CK = "POP_CK"
    INNER_NUM = "INNER_NUM"
    INNER_BASE = "INNER_BASE"
    INSTANCE_ID = "INSTANCE_ID"
    MIN_OFFSET = "MIN_OFFSET"
    MAX_OFFSET = "MAX_OFFSET"
    CRC32 = "__CRC32#"
    CHECK_IMMUNITY_TIME = "CHECK_IMMUNITY_TIME_IN_SECONDS"


def encode_properties(properties: dict[str, str]) -> str:
    """The text form. Raises ValueError where a name or value holds one of the two separators, or a name is empty."""
    text = "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])
    count = len(properties)
    if text.count(NAME_END) == count and text.count(VALUE_END) == count and "" not in properties:
        return text
    for name, value in properties.items():
        if not name:
            raise ValueError("a property has an empty name")
        if NAME_END in name or VALUE_END in name or NAME_END in value or VALUE_END in value:
            raise ValueError(f"the property {name[:64]!r} holds a separator (0x01 or 0x02) in its name or value")
    raise AssertionError("one of the properties holds a separator")


def decode_properties(text: str) -> dict[str, str]:
    """Names to values. Pieces without a name or a value are passed over, as RocketMQ's reader does."""
    properties = {}
    for piece in text.split(VALUE_END):
        name, separator, value = piece.partition(NAME_END)
        if separator and name and value:
            properties[name] = value
    return properties


class Message(Struct, kw_only=True):
    """A message before it is sent."""

    topic: str
    body: bytes
    flag: int = 0
    properties: dict[str, str] = field(default_factory=dict)


class StoredMessage(Struct, kw_only=True, gc=False):
    """One record of a commit log, decoded. Hosts are ``(ip text, port)``; times are ms."""

    topic: str
    body: bytes
    flag: int
    properties: dict[str, str]
    queue_id: int
    queue_offset: int
    commit_log_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: tuple[str, int]
    store_timestamp: int
    store_host: tuple[str, int]
    reconsume_times: int
    prepared_transaction_offset: int
    body_crc: int
    size: int

    @property
    def offset_message_id(self) -> str:
        """The id by which a broker finds the record: its address and commit-log offset."""
        return encode_offset_id(record.pack_host(*self.store_host), self.commit_log_offset)

    @property
    def unique_id(self) -> str | None:
        """The producer's own id for the message (UNIQ_KEY)."""
        return self.properties.get(PropertyName.UNIQ_KEY)

    @property
    def tags(self) -> str | None:
        """The message's tag."""
        return self.properties.get(PropertyName.TAGS)

    @property
    def keys(self) -> list[str]:
        """The message's keys."""
        return key_words(self.properties.get(PropertyName.KEYS, ""))

    @property
    def is_compressed(self) -> bool:
        """True where ``body`` is as the producer compressed it."""
        return bool(self.sys_flag & sysflag.COMPRESSED)


def key_words(keys: str) -> list[str]:
    """The keys in the property KEYS: what stands between spaces. Other white space is part of a key, as in RocketMQ."""
    words = keys.split(" ")
    return [word for word in words if word] if "" in words else words


TAG_KEY: Final = "T#"
"""What stands in front of a tag where the index has it as a key; an index type of its own in RocketMQ."""


def decode_message(view: Any, at: int = 0) -> StoredMessage:
    """The record at ``at`` of a buffer, checked by its lengths and magic. Raises record.RecordError."""
    head = record.decode_head(view, at)
    buffer = memoryview(view)
    properties = bytes(buffer[head.properties_at : head.properties_end]).decode("utf-8", "replace")
    return StoredMessage(
        topic=bytes(buffer[head.topic_at : head.topic_end]).decode("utf-8", "replace"),
        body=bytes(buffer[head.body_at : head.body_end]),
        flag=head.flag,
        properties=decode_properties(properties),
        queue_id=head.queue_id,
        queue_offset=head.queue_offset,
        commit_log_offset=head.physical_offset,
        sys_flag=head.sys_flag,
        born_timestamp=head.born_timestamp,
        born_host=record.unpack_host(head.born_host),
        store_timestamp=head.store_timestamp,
        store_host=record.unpack_host(head.store_host),
        reconsume_times=head.reconsume_times,
        prepared_transaction_offset=head.prepared_transaction_offset,
        body_crc=head.body_crc,
        size=head.size,
    )


def decode_messages(data: Any) -> list[StoredMessage]:
    """Records back to back, as pull and query replies carry them. Raises record.RecordError."""
    view = memoryview(data)
    messages = []
    at = 0
    while at < len(view):
        message = decode_message(view, at)
        messages.append(message)
        at += message.size
    return messages
