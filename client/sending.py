"""How a message becomes a send request, and its reply a receipt."""

from typing import Final, NamedTuple

from client.compression import Compression, compress
from client.core import wall_ms
from client.errors import PerhapsStoredError, UsageError, error_for
from client.message import Message, SendReceipt, SendStatus
from protocol.batch import encode_batch
from protocol.body import MessageQueue
from protocol.codes import RequestCode, ResponseCode
from protocol.command import RemotingCommand
from protocol.errors import RemotingError
from protocol.headers.send import SendMessageResponseHeader
from protocol.message_id import UniqueIdGenerator
from protocol.record import MAX_PROPERTIES
from protocol.topic_rules import AUTO_CREATE_TOPIC

DEFAULT_QUEUES: Final = "4"
STATUS: Final = {int(status.value): status for status in SendStatus}
"""The codes that mean stored."""
BATCH_OVERHEAD: Final = 22


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


def prepare(message: Message, properties: dict[str, str], ids: UniqueIdGenerator, limits: Limits) -> Prepared:
    """A single message. Raises UsageError for what breaks a limit that the broker has too."""
    body = message.body
    if not body:
        raise UsageError("the body is empty: brokers do not take that", code=ResponseCode.MESSAGE_ILLEGAL)
    if len(body) > limits.max_message_size:
        raise UsageError(
            f"the body has {len(body)} bytes, the limit is {limits.max_message_size}", code=ResponseCode.MESSAGE_ILLEGAL
        )
    sys_flag = 0
    if limits.compression is not None and len(body) >= limits.compress_over:
        body, sys_flag = compress(body, limits.compression, limits.compression_level)
    now = wall_ms()
    message_id = properties.get("UNIQ_KEY")
    if message_id is None:
        message_id = properties["UNIQ_KEY"] = ids.next(now)
    message.message_id = message_id
    text = property_text(message, properties)
    return Prepared(RequestCode.SEND_MESSAGE_V2, message.topic, body, text, sys_flag, message.flag, now, (message_id,))


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


def prepare_entry(
    message: Message, properties: dict[str, str], ids: UniqueIdGenerator, max_message_size: int
) -> BatchEntry:
    """One message of a batch. Raises UsageError for what cannot be in a batch."""
    if message.is_delayed:
        raise UsageError("a delayed message cannot be in a batch")
    if not message.body:
        raise UsageError("the body is empty: brokers do not take that", code=ResponseCode.MESSAGE_ILLEGAL)
    message.message_id = properties["UNIQ_KEY"] = properties.get("UNIQ_KEY") or ids.next()
    text = property_text(message, properties).encode()
    entry = BatchEntry(message.message_id, message.flag, message.body, text)
    if entry.size > max_message_size:
        raise UsageError(
            f"one message takes {entry.size} bytes of a batch, the limit is {max_message_size}",
            code=ResponseCode.MESSAGE_ILLEGAL,
        )
    return entry


def prepare_batch(topic: str, entries: list[BatchEntry], *, wait_stored: bool = True) -> Prepared:
    """A batch. It has no id of its own: brokers put a batch's properties behind its messages', and the last id wins."""
    body = encode_batch((entry.flag, entry.body, entry.properties) for entry in entries)
    properties = f"WAIT\x01{'true' if wait_stored else 'false'}\x02"
    ids = tuple(entry.message_id for entry in entries)
    return Prepared(RequestCode.SEND_BATCH_MESSAGE, topic, body, properties, 0, 0, wall_ms(), ids)


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
    if len(prepared.message_ids) == 1:
        return [
            SendReceipt(
                prepared.message_ids[0],
                queue,
                answer.queue_offset,
                status,
                answer.msg_id,
                answer.transaction_id,
                answer.recall_handle,
            )
        ]
    places = answer.msg_id.split(",")
    if len(places) != len(prepared.message_ids):  # an inner batch is stored as one record
        places = [answer.msg_id] * len(prepared.message_ids)
    return [
        SendReceipt(message_id, queue, answer.queue_offset + number, status, place)
        for number, (message_id, place) in enumerate(zip(prepared.message_ids, places, strict=True))
    ]
