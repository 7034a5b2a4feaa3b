"""Request and reply over topics (RocketMQ's RPC): a request names its client, and the broker pushes the reply to it."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from trimq.client.errors import UsageError
from trimq.client.message import Message, ReceivedMessage
from trimq.protocol import sysflag
from trimq.protocol.command import RemotingCommand
from trimq.protocol.property_names import (
    PROPERTY_CLUSTER,
    PROPERTY_CORRELATION_ID,
    PROPERTY_MSG_TYPE,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TTL,
)
from trimq.protocol.record import encode_record, host_flags, pack_host

_REPLY_TOPIC_SUFFIX: Final = "_REPLY_TOPIC"


class Answer:
    """The future reply to one request."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._message: ReceivedMessage | None = None

    def set(self, message: ReceivedMessage) -> None:
        """Sets the reply and wakes the waiting task."""
        self._message = message
        self._event.set()

    async def wait(self) -> ReceivedMessage:
        """Waits for the reply and returns it."""
        await self._event.wait()
        assert self._message is not None
        return self._message


class Requests:
    """A producer's requests that wait for replies, by correlation id."""

    def __init__(self) -> None:
        self._waiting: dict[str, Answer] = {}

    @contextmanager
    def opened(self, message: Message, client_id: str, ttl: float) -> Iterator[Answer]:
        """Makes ``message`` a request, and receives the reply to it until the block ends. ``ttl`` is in seconds."""
        correlation = str(uuid.uuid4())
        message.system_properties = {
            PROPERTY_CORRELATION_ID: correlation,
            PROPERTY_REPLY_TO_CLIENT: client_id,
            PROPERTY_TTL: str(int(ttl * 1000)),
        }
        answer = self._waiting[correlation] = Answer()
        try:
            yield answer
        finally:
            del self._waiting[correlation]
            message.system_properties = {}

    async def pushed(self, command: RemotingCommand) -> RemotingCommand | None:
        """Handles a reply pushed by a broker; returns None if the request is not one of this producer's."""
        message = _message_of(command)
        answer = self._waiting.get(message.all_properties.get(PROPERTY_CORRELATION_ID, ""))
        if answer is None:
            return None
        answer.set(message)
        return command.reply()


def reply_message(request: ReceivedMessage, body: bytes) -> Message:
    """The message that answers ``request``. Raises UsageError if the message is not a request."""
    properties = request.all_properties
    if PROPERTY_REPLY_TO_CLIENT not in properties or PROPERTY_CLUSTER not in properties:
        raise UsageError("this message is no request: it does not name a client that waits for a reply")
    message = Message(properties[PROPERTY_CLUSTER] + _REPLY_TOPIC_SUFFIX, body)
    message.system_properties = {
        PROPERTY_MSG_TYPE: "reply",
        PROPERTY_CORRELATION_ID: properties.get(PROPERTY_CORRELATION_ID, ""),
        PROPERTY_REPLY_TO_CLIENT: properties[PROPERTY_REPLY_TO_CLIENT],
        PROPERTY_TTL: properties.get(PROPERTY_TTL, "30000"),
    }
    return message


def _message_of(command: RemotingCommand) -> ReceivedMessage:
    """The pushed message in the form of one read from a queue."""
    ext = command.ext_fields()
    born, store = (_host(ext.get(name, "")) for name in ("bornHost", "storeHost"))
    flags = int(ext.get("sysFlag") or 0) & ~(sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6)
    data = encode_record(
        topic=ext.get("topic", "").encode(),
        body=bytes(command.body),
        properties=ext.get("properties", "").encode(),
        queue_id=int(ext.get("queueId") or 0),
        queue_offset=0,
        physical_offset=0,
        born_timestamp=int(ext.get("bornTimestamp") or 0),
        born_host=born,
        store_timestamp=int(ext.get("storeTimestamp") or 0),
        store_host=store,
        flag=int(ext.get("flag") or 0),
        sys_flag=flags | host_flags(born, store),
        reconsume_times=int(ext.get("reconsumeTimes") or 0),
    )
    return ReceivedMessage(memoryview(data), 0, len(data), 0, ext.get("bname", ""))


def _host(text: str) -> bytes:
    address, _, port = text.lstrip("/").rpartition(":")
    try:
        return pack_host(address.strip("[]"), int(port))
    except ValueError:
        return pack_host("0.0.0.0", 0)  # noqa: S104 - stands for an unknown address
