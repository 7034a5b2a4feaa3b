"""How a message becomes a send request, and its reply a receipt."""

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
"""The codes that mean stored."""
BATCH_OVERHEAD: Final = 22
_SINGLE: Final = RequestCode.SEND_MESSAGE_V2
_WAIT: Final = "WAIT\x01true\x02"
_NO_WAIT: Final = "WAIT\x01false\x02"


class Limits(NamedTuple):
    """What a producer sends: sizes in bytes; None does not compress."""

    max_message_size: int
    compression: Compression | None
    compress_over: int
    compression_level: int


class Prepared(NamedTuple):
    """A message ready to travel; the same for every attempt, so that a repetition has the same id."""

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
        """Whether its request differs from others only in its body, its properties and its time."""
        return not (self.sys_flag or self.flag or self.reconsume_times or self.max_reconsume_times is not None)


def prepare(message: Message, properties: dict[str, str] | None, ids: UniqueIdGenerator, limits: Limits) -> Prepared:
    """A single message, with ``properties`` in place of its own.

    Sets its id. Raises UsageError for what breaks a limit that the broker has too.
    """
    body = message.body
    size = len(body)
    if not size:
        raise UsageError("the body is empty: brokers do not take that", code=ResponseCode.MESSAGE_ILLEGAL)
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
    """Gives the message its id: its properties as text."""
    if properties is None:
        if message.is_plain:
            message.message_id = message_id = ids.next(now)
            text = f"{_WAIT if message.wait_stored else _NO_WAIT}UNIQ_KEY\x01{message_id}\x02"
            if not message.tags and not message.keys:
                return text
            text, count = _with_tags_and_keys(message, text)
            if text.count(NAME_END) == count == text.count(VALUE_END) and len(text) * 3 <= MAX_PROPERTIES:
                return text
        properties = message.wire_properties()
    message.message_id = properties[PROPERTY_UNIQ_KEY] = properties.get(PROPERTY_UNIQ_KEY) or ids.next(now)
    return property_text(message, properties)


def _with_tags_and_keys(message: Message, text: str) -> tuple[str, int]:
    """The text with them, and how many properties it should have: what would make more of them has to be refused."""
    count = 2
    if message.tags:
        text = f"{text}TAGS\x01{message.tags}\x02"
        count += 1
    if message.keys:
        text = f"{text}KEYS\x01{joined(message.keys)}\x02"
        count += 1
    return text, count


def property_text(message: Message, properties: dict[str, str]) -> str:
    """Properties as text. Raises UsageError where they are too long or cannot travel."""
    text = message.wire_text(properties)
    if len(text) * 3 > MAX_PROPERTIES and len(text.encode()) > MAX_PROPERTIES:
        raise UsageError(
            f"the properties have {len(text.encode())} bytes, the limit is {MAX_PROPERTIES}",
            code=ResponseCode.MESSAGE_ILLEGAL,
        )
    return text


class BatchEntry(NamedTuple):
    """A message of a batch, ready to travel."""

    message_id: str
    flag: int
    body: bytes
    properties: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes in the batch's body."""
        return BATCH_OVERHEAD + len(self.body) + len(self.properties)


def entry_text(
    message: Message, properties: dict[str, str] | None, ids: UniqueIdGenerator, max_message_size: int
) -> bytes:
    """The properties of a message for a batch, with ``properties`` in place of its own.

    Sets its id. Raises UsageError for what cannot be in a batch.
    """
    size = len(message.body)
    if not size:
        raise UsageError("the body is empty: brokers do not take that", code=ResponseCode.MESSAGE_ILLEGAL)
    text = _identified(message, properties, ids).encode()
    size += BATCH_OVERHEAD + len(text)
    if size > max_message_size:
        raise UsageError(
            f"one message takes {size} bytes of a batch, the limit is {max_message_size}",
            code=ResponseCode.MESSAGE_ILLEGAL,
        )
    return text


def prepare_entry(message: Message, ids: UniqueIdGenerator, max_message_size: int) -> BatchEntry:
    """One message of a batch. Sets its id. Raises UsageError for what cannot be in a batch."""
    if message.is_delayed:
        raise UsageError("a delayed message cannot be in a batch")
    text = entry_text(message, None, ids, max_message_size)
    return BatchEntry(message.message_id or "", message.flag, message.body, text)


def prepare_batch(topic: str, entries: list[BatchEntry], *, wait_stored: bool = True) -> Prepared:
    """A batch. It has no id of its own: brokers put a batch's properties behind its messages', and the last id wins."""
    message_ids = tuple([entry.message_id for entry in entries])
    return whole_batch(topic, message_ids, [entry[1:] for entry in entries], wait_stored=wait_stored)


def whole_batch(
    topic: str, message_ids: tuple[str, ...], parts: Iterable[tuple[int, bytes, bytes]], *, wait_stored: bool
) -> Prepared:
    """A batch of (flag, body, properties) of each message."""
    properties = _WAIT if wait_stored else _NO_WAIT
    return Prepared(
        RequestCode.SEND_BATCH_MESSAGE, topic, encode_batch(parts), properties, 0, 0, wall_ms(), message_ids
    )


def send_command(group: str, prepared: Prepared, queue: MessageQueue) -> RemotingCommand:
    """The request, with the one-letter names of SendMessageRequestHeaderV2."""
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
    """A receipt for each message of the request. Raises the error for a code that does not mean stored."""
    status = STATUS.get(reply.code)
    if status is None:
        raise error_for(reply.code, reply.remark, address)
    try:
        answer = reply.header(SendMessageResponseHeader)
    except RemotingError as error:
        raise PerhapsStoredError(f"the broker's answer cannot be read: {error.remark}", address=address) from None
    if answer.queue_id != queue.queue_id:
        queue = MessageQueue(topic=queue.topic, broker_name=queue.broker_name, queue_id=answer.queue_id)
    message_ids, offset = prepared.message_ids, answer.queue_offset
    place = answer.msg_id
    if len(message_ids) == 1:
        last = (answer.transaction_id, answer.recall_handle)
        return [_receipt(SendReceipt, (message_ids[0], queue, offset, status, place, *last))]
    places = place.split(",")
    if len(places) != len(message_ids):  # an inner batch is stored as one record
        places = [place] * len(message_ids)
    offsets = range(offset, offset + len(places))
    return [
        _receipt(SendReceipt, (message_id, queue, offset, status, place, None, None))
        for message_id, offset, place in zip(message_ids, offsets, places, strict=True)
    ]


_prepared: Final[Callable[[type[Prepared], tuple[object, ...]], Prepared]] = tuple.__new__
_receipt: Final[Callable[[type[SendReceipt], tuple[object, ...]], SendReceipt]] = tuple.__new__
"""What the classes themselves do, at a third of the cost."""
