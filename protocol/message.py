"""Messages as producers send and consumers receive them."""

from typing import Any

from msgspec import Struct, field

from trimq.protocol import record, sysflag
from trimq.protocol.message_id import encode_offset_id
from trimq.protocol.message_keys import key_words
from trimq.protocol.property_names import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQ_KEY
from trimq.protocol.property_text import decode_properties


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
        """The id by which a broker finds the record: the broker's address and the commit-log offset."""
        return encode_offset_id(record.pack_host(*self.store_host), self.commit_log_offset)

    @property
    def unique_id(self) -> str | None:
        """The producer's own id for the message (UNIQ_KEY)."""
        return self.properties.get(PROPERTY_UNIQ_KEY)

    @property
    def tags(self) -> str | None:
        """The message's tag."""
        return self.properties.get(PROPERTY_TAGS)

    @property
    def keys(self) -> list[str]:
        """The message's keys."""
        return key_words(self.properties.get(PROPERTY_KEYS, ""))

    @property
    def is_compressed(self) -> bool:
        """True if ``body`` is compressed."""
        return bool(self.sys_flag & sysflag.COMPRESSED)


def decode_message(view: Any, at: int = 0) -> StoredMessage:
    """Decode the record at ``at`` of a buffer. Checks its lengths and magic, not its CRC. Raises record.RecordError."""
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
    """Decode consecutive records, the body of pull and query replies. Raises record.RecordError."""
    view = memoryview(data)
    messages = []
    at = 0
    while at < len(view):
        message = decode_message(view, at)
        messages.append(message)
        at += message.size
    return messages
