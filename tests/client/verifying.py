"""A scripted broker that verifies signatures by itself: from the bytes of each frame, by the rule of RocketMQ.

None of the product's signing, and none of its header decoding, is used for that.
"""

import base64
import hashlib
import hmac
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgpack  # type: ignore[import-untyped]
from anyio.abc import SocketStream

from tests.client.scripted import Answer, ScriptedBroker, listening
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import decode

USER, SECRET = "orders-service", "a-s3cret, which no server may see"


def wire_fields(frame: bytes) -> tuple[dict[str, str], bytes]:
    """The ext fields of a frame (without its length word) as they are on the wire, and its body."""
    word = struct.unpack_from(">I", frame)[0]
    end = 4 + (word & 0xFFFFFF)
    header, body = frame[4:end], frame[end:]
    if word >> 24 == 0:
        return json.loads(header).get("extFields") or {}, body
    if word >> 24 == 2:
        return msgpack.unpackb(header).get("ext") or {}, body
    at = 17 + struct.unpack_from(">I", header, 13)[0]
    at += 4  # the length of all fields
    fields = {}
    while at < len(header):
        size = struct.unpack_from(">H", header, at)[0]
        key, at = header[at + 2 : at + 2 + size].decode(), at + 2 + size
        size = struct.unpack_from(">I", header, at)[0]
        fields[key], at = header[at + 4 : at + 4 + size].decode(), at + 4 + size
    return fields, body


def expected_signature(fields: dict[str, str], body: bytes, secret: str) -> str:
    """The signature: values in the order of their keys (UTF-16 units, as Java compares), then the body."""
    order = sorted((key for key in fields if key != "Signature"), key=lambda key: key.encode("utf-16-be"))
    text = "".join(fields[key] for key in order).encode() + body
    return base64.b64encode(hmac.new(secret.encode(), text, hashlib.sha1).digest()).decode()


def problem(frame: bytes, users: dict[str, str]) -> str | None:
    """The text by which RocketMQ refuses the sender of a frame; None if it is one of ``users`` (name: password)."""
    fields, body = wire_fields(frame)
    name = fields.get("AccessKey")
    if not name:
        return "username cannot be null."
    if name not in users:
        return f"User:{name} is not found."
    if fields.get("Signature") != expected_signature(fields, body, users[name]):
        return "check signature failed."
    return None


class VerifyingBroker(ScriptedBroker):
    """Refuses (16) every request that is not signed by one of ``users``; ``refused`` are those, ``accepted`` counts.

    ``open_codes`` are request codes that are served to anybody.
    """

    def __init__(self, queues: int = 1) -> None:
        super().__init__(queues)
        self.users = {USER: SECRET}
        self.open_codes: set[int] = set()
        self.accepted = 0
        self.refused: list[tuple[RemotingCommand, str]] = []
        self.fields: list[tuple[int, dict[str, str]]] = []
        self.encodings: set[Encoding] = set()

    async def serve(self, stream: SocketStream) -> None:
        """Serve one connection until it ends."""
        await super().serve(_Whole(stream, self))  # type: ignore[arg-type] # what it needs of a stream

    def check(self, frame: bytes) -> None:
        """Note whether a frame is accepted; called with each before its command is answered."""
        fields, _ = wire_fields(frame)
        command = decode(memoryview(frame))
        self.fields.append((command.code, fields))
        self.encodings.add(command.encoding)
        text = None if command.code in self.open_codes or command.is_reply else problem(frame, self.users)
        self._verdict = text
        if text is None:
            self.accepted += 1
        else:
            self.refused.append((command, text))

    def refusing(self) -> None:
        """From now on, answer with 16 what is not accepted, and the rest by ``answers``."""
        self.answers = _Gate(self, self.answers)

    @property
    def verdict(self) -> str | None:
        """Why the frame that was received last is refused; None if it is accepted."""
        return self._verdict

    _verdict: str | None = None


class _Gate(dict[int, Answer]):
    def __init__(self, broker: VerifyingBroker, answers: dict[int, Answer]) -> None:
        super().__init__(answers)
        self._broker = broker

    def get(self, code: int, default: Answer) -> Answer:  # type: ignore[override] # as ScriptedBroker calls it
        verdict = self._broker.verdict
        if verdict is not None:
            return lambda command: command.reply(16, verdict)
        return super().get(code, default)


class _Whole:
    """A stream that returns one frame at a time, and shows it to the broker first."""

    def __init__(self, stream: SocketStream, broker: VerifyingBroker) -> None:
        self._stream = stream
        self._broker = broker
        self._data = b""

    async def receive(self) -> bytes:
        while len(self._data) < 4 or len(self._data) < 4 + struct.unpack_from(">I", self._data)[0]:
            self._data += await self._stream.receive()
        end = 4 + struct.unpack_from(">I", self._data)[0]
        frame, self._data = self._data[:end], self._data[end:]
        self._broker.check(frame[4:])
        return frame

    async def send(self, data: bytes) -> None:
        await self._stream.send(data)

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def verifying_broker(queues: int = 1) -> AsyncIterator[VerifyingBroker]:
    """A broker that refuses unsigned requests while the block runs."""
    broker = VerifyingBroker(queues)
    broker.refusing()
    async with listening(broker):
        yield broker
