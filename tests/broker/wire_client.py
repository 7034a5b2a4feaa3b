"""A frame-level client: a test controls every request exactly and sees every reply as it came."""

import itertools
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec
import trio

from tests.canary import look_at_reply
from trimq.broker.controller import BrokerController
from trimq.protocol import frame
from trimq.protocol.codes import VERSION, RequestCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.message import StoredMessage, decode_messages


class WireClient:
    """One connection. Replies are matched by opaque; the broker's own requests are stored in ``asked``."""

    def __init__(self, stream: trio.abc.Stream, encoding: Encoding = Encoding.JSON) -> None:
        self.stream = stream
        self.encoding = encoding
        self.asked: list[RemotingCommand] = []
        self.replies: dict[int, RemotingCommand] = {}
        self._decoder = frame.FrameDecoder()
        self._opaque = itertools.count(1)
        self._arrived = trio.Condition()

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: tuple[str, int], encoding: Encoding = Encoding.JSON) -> AsyncIterator[Self]:
        stream = await trio.open_tcp_stream(*address)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with cls.over(stream, encoding) as client:
            yield client

    @property
    def plain(self) -> trio.SocketStream:
        """The stream of a connection without TLS."""
        assert isinstance(self.stream, trio.SocketStream)
        return self.stream

    @classmethod
    @asynccontextmanager
    async def over(cls, stream: trio.abc.Stream, encoding: Encoding = Encoding.JSON) -> AsyncIterator[Self]:
        """A client on a stream that is connected."""
        client = cls(stream, encoding)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client._read)
            try:
                yield client
            finally:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await stream.aclose()

    async def _read(self) -> None:
        while True:
            try:
                data = await self.stream.receive_some(1 << 20)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            look_at_reply(data)
            async with self._arrived:
                for command in self._decoder.feed(data) if data else []:
                    if command.is_reply:
                        self.replies[command.opaque] = command
                    else:
                        self.asked.append(command)
                self.closed = not data
                self._arrived.notify_all()
            if not data:
                return

    closed = False

    async def post(
        self,
        code: int,
        ext: dict[str, Any] | None = None,
        body: bytes = b"",
        *,
        flag: int = 0,
        version: int = VERSION,
        language: str = "JAVA",
    ) -> int:
        """Send a request and return its opaque."""
        opaque = next(self._opaque)
        command = RemotingCommand(
            int(code),
            opaque,
            flag,
            version,
            language,
            ext={name: str(value) for name, value in (ext or {}).items() if value is not None},
            body=body,
            encoding=self.encoding,
        )
        await self.stream.send_all(frame.encode(command))
        return opaque

    async def reply(self, opaque: int, timeout: float = 50) -> RemotingCommand:
        """Wait for the reply to a request sent earlier."""
        with trio.fail_after(timeout):
            async with self._arrived:
                while opaque not in self.replies:
                    assert not self.closed, "the broker closed the connection"
                    await self._arrived.wait()
        return self.replies.pop(opaque)

    async def ask(
        self, code: int, ext: dict[str, Any] | None = None, body: bytes = b"", **more: Any
    ) -> RemotingCommand:
        """Send a request and return its reply."""
        return await self.reply(await self.post(code, ext, body, **more))

    async def asked_for(self, code: int, timeout: float = 50) -> RemotingCommand:
        """Wait for the broker's next request with this code."""
        with trio.fail_after(timeout):
            async with self._arrived:
                while True:
                    for at, command in enumerate(self.asked):
                        if command.code == code:
                            return self.asked.pop(at)
                    await self._arrived.wait()

    async def answer(
        self, request: RemotingCommand, code: int = 0, body: bytes = b"", remark: str | None = None
    ) -> None:
        """Answer a request of the broker."""
        await self.send_command(request.reply(code, remark, body=body))

    async def send_command(self, command: RemotingCommand) -> None:
        """Send a command as it is."""
        await self.stream.send_all(frame.encode(command))

    async def until_closed(self, timeout: float = 50) -> None:
        """Wait for the broker to close the connection."""
        with trio.fail_after(timeout):
            async with self._arrived:
                while not self.closed:
                    await self._arrived.wait()

    # what most tests do

    async def send(
        self,
        topic: str,
        body: bytes = b"hello",
        properties: dict[str, str] | str | None = None,
        *,
        queue_id: int = 0,
        code: int = RequestCode.SEND_MESSAGE_V2,
        flag: int = 0,
        **more: Any,
    ) -> RemotingCommand:
        """Send one message and return the reply."""
        return await self.ask(code, send_ext(topic, properties, queue_id=queue_id, **more), body, flag=flag)

    async def pull(self, topic: str, offset: int = 0, *, group: str = "G", **more: Any) -> RemotingCommand:
        """Pull once, with a subscription to all messages in the request."""
        return await self.ask(RequestCode.PULL_MESSAGE, pull_ext(topic, offset, group=group, **more))

    async def pull_messages(self, topic: str, offset: int = 0, **more: Any) -> list[StoredMessage]:
        """The messages of one pull."""
        reply = await self.pull(topic, offset, **more)
        assert reply.code == 0, (reply.code, reply.remark)
        return decode_messages(bytes(reply.body))

    async def heartbeat(
        self,
        client_id: str,
        *,
        consumers: Iterable[dict[str, Any]] = (),
        producers: Iterable[str] = (),
        **more: Any,
    ) -> RemotingCommand:
        """Send a heartbeat of these groups."""
        body = {
            "clientID": client_id,
            "consumerDataSet": list(consumers),
            "producerDataSet": [{"groupName": name} for name in producers],
            **more,
        }
        return await self.ask(RequestCode.HEART_BEAT, body=msgspec.json.encode(body))


async def hashes_of(broker: BrokerController, messages: list[StoredMessage]) -> list[list[int]]:
    """The key hashes that the index has of each message, in index order."""
    index = broker.context.store.index
    assert index is not None
    await index.flush_pending()
    entries = [entry for file in index.files for entry in file.entries()]
    return [[entry.key_hash for entry in entries if entry.phy == message.commit_log_offset] for message in messages]


def properties_text(properties: dict[str, str]) -> str:
    """The text form of properties in a record."""
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items())


LETTERS = {
    "producer_group": ("a", "producerGroup"),
    "topic": ("b", "topic"),
    "default_topic": ("c", "defaultTopic"),
    "default_topic_queue_nums": ("d", "defaultTopicQueueNums"),
    "queue_id": ("e", "queueId"),
    "sys_flag": ("f", "sysFlag"),
    "born_timestamp": ("g", "bornTimestamp"),
    "flag": ("h", "flag"),
    "properties": ("i", "properties"),
    "reconsume_times": ("j", "reconsumeTimes"),
    "unit_mode": ("k", "unitMode"),
    "max_reconsume_times": ("l", "maxReconsumeTimes"),
    "batch": ("m", "batch"),
}


def send_ext(
    topic: str, properties: dict[str, str] | str | None = None, *, v1: bool = False, **changes: Any
) -> dict[str, Any]:
    """Ext fields of a send as Java sends them; with ``v1`` the full names of code 10."""
    text = properties_text(properties) if isinstance(properties, dict) else properties
    fields: dict[str, Any] = {
        "producer_group": "P",
        "topic": topic,
        "default_topic": "TBW102",
        "default_topic_queue_nums": 4,
        "queue_id": 0,
        "sys_flag": 0,
        "born_timestamp": 1_700_000_000_000,
        "flag": 0,
        "properties": text,
        "reconsume_times": 0,
        "unit_mode": "false",
        "batch": "false",
    } | changes
    return {LETTERS[name][v1]: value for name, value in fields.items() if value is not None}


def pull_ext(topic: str, offset: int = 0, *, group: str = "G", **changes: Any) -> dict[str, Any]:
    """Ext fields of a pull with the subscription in the request (bit 4) and no long poll."""
    return {
        "consumerGroup": group,
        "topic": topic,
        "queueId": 0,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": 4,
        "commitOffset": 0,
        "suspendTimeoutMillis": 15_000,
        "subscription": "*",
        "subVersion": 0,
        "expressionType": "TAG",
    } | changes


def consumer(group: str, topic: str, expression: str = "*", **changes: Any) -> dict[str, Any]:
    """A consumer group for a heartbeat."""
    tags = [] if expression == "*" else [tag.strip() for tag in expression.split("||")]
    return {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "subscriptionDataSet": [
            {
                "topic": topic,
                "subString": expression,
                "tagsSet": tags,
                "codeSet": [java_hash(tag) for tag in tags],
                "subVersion": 1,
                "expressionType": "TAG",
            }
        ],
        "unitMode": False,
    } | changes


def java_hash(text: str) -> int:
    """String.hashCode."""
    value = 0
    for char in text:
        value = (31 * value + ord(char)) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
