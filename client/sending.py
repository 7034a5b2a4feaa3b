"""From a message to a send request, and from the reply to a receipt."""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from trimq.client.compression import Compression, compress
from trimq.client.core import wall_ms
from trimq.client.errors import PerhapsStoredError, UsageError, error_for
from trimq.client.message import Message, SendReceipt, SendStatus, joined
from trimq.protocol.batch import encode_batch
from trimq.protocol.body import MessageQueue
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.send import SendMessageResponseHeader
from trimq.protocol.message_id import UniqueIdGenerator
from trimq.protocol.property_names import PROPERTY_UNIQ_KEY
from trimq.protocol.property_text import NAME_END, VALUE_END
from trimq.protocol.record import MAX_PROPERTIES
from trimq.protocol.topic_rules import AUTO_CREATE_TOPIC

DEFAULT_QUEUES: Final = "4"
STATUS: Final = {int(status.value): status for status in SendStatus}
"""The response codes that mean stored."""
BATCH_OVERHEAD: Final = 22
"""Bytes of a batch entry besides the body and properties: size, magic, CRC, flag, and the two lengths."""
_SINGLE: Final = RequestCode.SEND_MESSAGE_V2
_WAIT: Final = "WAIT\x01true\x02"
_NO_WAIT: Final = "WAIT\x01false\x02"


class Limits(NamedTuple):
    """A producer's limits and compression. Sizes are in bytes; ``compression`` None sends bodies uncompressed."""

    max_message_size: int
    compression: Compression | None
    compress_over: int
    compression_level: int


class Prepared(NamedTuple):
    """A message or batch ready to be sent. All attempts send the same, so that a retried message keeps its id."""

    code: int
    topic: str
    body: bytes
    properties: str
    sys_flag: int
    flag: int
    born: int
    message_ids: tuple[str, ...]
    reconsume_times: int = 0
    max_reconsume_times: int | None = None

    @property
    def is_usual(self) -> bool:
        """Whether its request header differs from others only in properties and time, as a SendTemplate requires."""
        return not (self.sys_flag or self.flag or self.reconsume_times or self.max_reconsume_times is not None)


def prepare(message: Message, properties: dict[str, str] | None, ids: UniqueIdGenerator, limits: Limits) -> Prepared:
    """Prepares a single message and sets its id. ``properties`` replace those of the message, if given.

    Raises UsageError for a message that exceeds a limit of the broker: an empty or too large body, or too long
    properties.
    """
    body = message.body
    size = len(body)
    if not size:
        raise UsageError("the body is empty: brokers refuse empty messages", code=ResponseCode.MESSAGE_ILLEGAL)
    if size > limits.max_message_size:
        raise UsageError(
            f"the body has {size} bytes, the limit is {limits.max_message_size}", code=ResponseCode.MESSAGE_ILLEGAL
        )
    sys_flag = 0
    if limits.compression is not None and size >= limits.compress_over:
        body, sys_flag = compress(body, limits.compression, limits.compression_level)
    now = wall_ms()
    text = _identified(message, properties, ids, now)
    message_ids = (message.message_id,)
    return _prepared(Prepared, (_SINGLE, message.topic, body, text, sys_flag, message.flag, now, message_ids, 0, None))


def _identified(
    message: Message, properties: dict[str, str] | None, ids: UniqueIdGenerator, now: int | None = None
) -> str:
    """Sets the message's id and returns its properties as text."""
    if properties is None:
        if message.is_plain:
            # Fast path: no dictionary is built. The text is checked afterwards for what encode_properties refuses.
            message.message_id = message_id = ids.next(now)
            text = f"{_WAIT if message.wait_stored else _NO_WAIT}UNIQ_KEY\x01{message_id}\x02"
            if not message.tags and not message.keys:
                return text
            text, count = _with_tags_and_keys(message, text)
            # UTF-8 has at most four bytes for a character: that bounds the encoded length without encoding.
            if text.count(NAME_END) == count == text.count(VALUE_END) and len(text) * 4 <= MAX_PROPERTIES:
                return text
        properties = message.wire_properties()
    message.message_id = properties[PROPERTY_UNIQ_KEY] = properties.get(PROPERTY_UNIQ_KEY) or ids.next(now)
    return property_text(message, properties)


def _with_tags_and_keys(message: Message, text: str) -> tuple[str, int]:
    """The text with tags and keys added, and the number of properties in it.

    A tag or key with a separator in it would add properties; the caller finds that by counting separators.
    """
    count = 2
    if message.tags:
        text = f"{text}TAGS\x01{message.tags}\x02"
        count += 1
    if message.keys:
        text = f"{text}KEYS\x01{joined(message.keys)}\x02"
        count += 1
    return text, count


def property_text(message: Message, properties: dict[str, str]) -> str:
    """Properties as text. Raises UsageError if they are too long or contain RocketMQ's separators."""
    text = message.wire_text(properties)
    if len(text) * 4 > MAX_PROPERTIES and len(text.encode()) > MAX_PROPERTIES:
        raise UsageError(
            f"the properties have {len(text.encode())} bytes, the limit is {MAX_PROPERTIES}",
            code=ResponseCode.MESSAGE_ILLEGAL,
        )
    return text


class BatchEntry(NamedTuple):
    """A message of a batch, ready to be sent."""

    message_id: str
    flag: int
    body: bytes
    properties: bytes

    @property
    def size(self) -> int:
        """Its size in the batch's body, in bytes."""
        return BATCH_OVERHEAD + len(self.body) + len(self.properties)


def entry_text(
    message: Message, properties: dict[str, str] | None, ids: UniqueIdGenerator, max_message_size: int
) -> bytes:
    """The encoded properties of a message for a batch; sets its id. ``properties`` replace its own, if given.

    Raises UsageError for an empty body, and for a message that is too large for a batch.
    """
    size = len(message.body)
    if not size:
        raise UsageError("the body is empty: brokers refuse empty messages", code=ResponseCode.MESSAGE_ILLEGAL)
    text = _identified(message, properties, ids).encode()
    size += BATCH_OVERHEAD + len(text)
    if size > max_message_size:
        raise UsageError(
            f"the message has {size} bytes in a batch, the limit is {max_message_size}",
            code=ResponseCode.MESSAGE_ILLEGAL,
        )
    return text


def prepare_entry(
    message: Message, properties: dict[str, str] | None, ids: UniqueIdGenerator, max_message_size: int
) -> BatchEntry:
    """Prepares one message of a batch and sets its id. ``properties`` replace its own, if given.

    Raises UsageError for a delayed message, an empty body, and a message that is too large for a batch.
    """
    if message.is_delayed:
        raise UsageError("a delayed message cannot be in a batch")
    text = entry_text(message, properties, ids, max_message_size)
    return BatchEntry(message.message_id or "", message.flag, message.body, text)


def prepare_batch(topic: str, entries: list[BatchEntry], *, wait_stored: bool = True) -> Prepared:
    """Prepares a batch from its entries."""
    message_ids = tuple([entry.message_id for entry in entries])
    return whole_batch(topic, message_ids, [entry[1:] for entry in entries], wait_stored=wait_stored)


def whole_batch(
    topic: str, message_ids: tuple[str, ...], entries: Iterable[tuple[int, bytes, bytes]], *, wait_stored: bool
) -> Prepared:
    """Prepares a batch from the flag, body and properties of each message."""
    # Only WAIT, no id: brokers append the batch's properties to those of each message, and the last value wins, so an
    # id here would replace the ids of all messages.
    properties = _WAIT if wait_stored else _NO_WAIT
    return Prepared(
        RequestCode.SEND_BATCH_MESSAGE, topic, encode_batch(entries), properties, 0, 0, wall_ms(), message_ids
    )


def send_command(group: str, prepared: Prepared, queue: MessageQueue) -> RemotingCommand:
    """The send request, with the one-letter field names of SendMessageRequestHeaderV2."""
    header = {
        "a": group,
        "b": prepared.topic,
        "c": AUTO_CREATE_TOPIC,
        "d": DEFAULT_QUEUES,
        "e": str(queue.queue_id),
        "f": str(prepared.sys_flag),
        "g": str(prepared.born),
        "h": str(prepared.flag),
        "i": prepared.properties,
        "j": str(prepared.reconsume_times),
        "k": "false",
        "m": "true" if prepared.code == RequestCode.SEND_BATCH_MESSAGE else "false",
        "n": queue.broker_name,
    }
    if prepared.max_reconsume_times is not None:
        header["l"] = str(prepared.max_reconsume_times)
    return RemotingCommand.request(prepared.code, header, prepared.body)


def receipts(reply: RemotingCommand, prepared: Prepared, queue: MessageQueue, address: str) -> list[SendReceipt]:
    """A receipt for each message of the request.

    Raises the error for a code that does not mean stored (``error_for``), and PerhapsStoredError if the reply cannot be
    decoded: its code says that the broker has stored something, but not what.
    """
    status = STATUS.get(reply.code)
    if status is None:
        raise error_for(reply.code, reply.remark, address, prepared.code)
    try:
        answer = reply.header(SendMessageResponseHeader)
    except RemotingError as error:
        raise PerhapsStoredError(f"the broker's reply cannot be decoded: {error.remark}", address=address) from None
    if answer.queue_id != queue.queue_id:
        queue = MessageQueue(topic=queue.topic, broker_name=queue.broker_name, queue_id=answer.queue_id)
    message_ids, offset = prepared.message_ids, answer.queue_offset
    place = answer.msg_id
    if len(message_ids) == 1:
        last = (answer.transaction_id, answer.recall_handle)
        return [_receipt(SendReceipt, (message_ids[0], queue, offset, status, place, *last))]
    places = place.split(",")
    if len(places) != len(message_ids):  # an inner batch (batch consume queue) is one record with one offset id
        places = [place] * len(message_ids)
    offsets = range(offset, offset + len(places))
    return [
        _receipt(SendReceipt, (message_id, queue, offset, status, place, None, None))
        for message_id, offset, place in zip(message_ids, offsets, places, strict=True)
    ]


_prepared: Final[Callable[[type[Prepared], tuple[object, ...]], Prepared]] = tuple.__new__
_receipt: Final[Callable[[type[SendReceipt], tuple[object, ...]], SendReceipt]] = tuple.__new__
"""The constructors of the named tuples without their Python wrapper, at a third of its cost."""
