"""A client with one open connection: sends, pulls and queries for which the test chooses every field.

The official clients refuse or hide cases that the store tests need (long retry topics, chosen queues, half messages
that stay open, IPv6). This client encodes its own requests and uses no code under test.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.interop.harness.probe import Reply

TIMEOUT = 30.0
SEND = 10
SEND_BATCH = 320
PULL = 11
QUERY = 12
UPDATE_OFFSET = 15
MAX_OFFSET = 30
MIN_OFFSET = 31
VIEW = 33
SEND_BACK = 36
END_TRANSACTION = 37

PREPARED = 4
COMMIT = 8
ROLLBACK = 12

_SUCCESS = 0
_PULL_NOTHING = (19, 20, 21)
_QUERY_NOTHING = 22
_NO_TOPIC = 17


class Sent(NamedTuple):
    """A stored message and its offsets; ``key`` is its unique key."""

    topic: str
    queue: int
    offset: int
    phy: int
    key: str
    body: bytes


class RefusedError(Exception):
    """The broker answered with a code other than success; the text has code and remark."""


def encode_properties(properties: Mapping[str, str]) -> str:
    return "".join(f"{key}\x01{value}\x02" for key, value in properties.items())


def _batch_entry(body: bytes, properties: str) -> bytes:
    text = properties.encode()
    crc = zlib.crc32(body) & 0x7FFFFFFF
    return b"".join(
        (
            struct.pack(">iiiii", 22 + len(body) + len(text), 0, crc, 0, len(body)),
            body,
            struct.pack(">h", len(text)),
            text,
        )
    )


class Wire:
    """One connection to a broker, with at most one pending request."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=TIMEOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._opaque = itertools.count(1)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the server closed the connection")
            data += part
        return bytes(data)

    def call(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> Reply:
        """Send a request and return its answer; requests that the broker sends in between are skipped."""
        opaque = next(self._opaque)
        fields = {key: value if isinstance(value, str) else json.dumps(value) for key, value in ext.items()}
        command = {"code": code, "language": "PYTHON", "version": 479, "opaque": opaque, "flag": 0, "extFields": fields}
        header = json.dumps(command).encode()
        self._socket.sendall(struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body)
        while True:
            total, word = struct.unpack(">II", self._read(8))
            rest = self._read(total - 4)
            length = word & 0xFFFFFF
            reply = json.loads(rest[:length])
            if reply["opaque"] == opaque and reply["flag"] & 1:
                return Reply(reply["code"], reply.get("remark") or "", reply.get("extFields") or {}, rest[length:])

    def ask(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> Reply:
        """Like ``call``. Raises RefusedError for any code other than success."""
        reply = self.call(code, ext, body)
        if reply.code != _SUCCESS:
            raise RefusedError(f"request {code} {ext}: {reply.code} {reply.remark}")
        return reply

    # -- sending

    def send(
        self, topic: str, queue: int, body: bytes, properties: Mapping[str, str], *, sys_flag: int = 0, flag: int = 0
    ) -> Sent:
        """Send one message to one queue."""
        header = {
            "producerGroup": properties.get("PGROUP", "exchange"),
            "topic": topic,
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": 4,
            "queueId": queue,
            "sysFlag": sys_flag,
            "bornTimestamp": int(time.time() * 1000),
            "flag": flag,
            "properties": encode_properties(properties),
            "reconsumeTimes": 0,
            "unitMode": False,
            "batch": False,
        }
        return _sent(topic, body, properties, self.ask(SEND, header, body))

    def send_batch(self, topic: str, queue: int, messages: Sequence[tuple[bytes, Mapping[str, str]]]) -> list[Sent]:
        """Send several messages in one request."""
        header = {
            "a": "exchange",
            "b": topic,
            "c": "TBW102",
            "d": 4,
            "e": queue,
            "f": 0,
            "g": int(time.time() * 1000),
            "h": 0,
            "i": "",
            "j": 0,
            "k": False,
            "m": True,
        }
        body = b"".join(_batch_entry(body, encode_properties(properties)) for body, properties in messages)
        reply = self.ask(SEND_BATCH, header, body)
        first = int(reply.ext["queueOffset"])
        ids = reply.ext["msgId"].split(",")
        return [
            Sent(topic, queue, first + number, int(one[-16:], 16), properties["UNIQ_KEY"], text)
            for number, (one, (text, properties)) in enumerate(zip(ids, messages, strict=True))
        ]

    def end_transaction(self, half: Sent, reply_offset: int, outcome: int, group: str) -> None:
        """Commit or roll back a half message."""
        self.ask(
            END_TRANSACTION,
            {
                "producerGroup": group,
                "tranStateTableOffset": reply_offset,
                "commitLogOffset": half.phy,
                "commitOrRollback": outcome,
                "fromTransactionCheck": False,
                "msgId": half.key,
                "transactionId": half.key,
            },
        )

    def send_back(self, sent: Sent, group: str, level: int) -> None:
        """Send a message back for a retry."""
        self.ask(
            SEND_BACK,
            {
                "offset": sent.phy,
                "group": group,
                "delayLevel": level,
                "originMsgId": sent.key,
                "originTopic": sent.topic,
                "unitMode": False,
                "maxReconsumeTimes": 16,
            },
        )

    # -- reading

    def pull(self, topic: str, queue: int, offset: int, count: int, group: str = "exchange_reader") -> bytes | None:
        """The records of one pull, or None if there are none at that offset."""
        reply = self.call(
            PULL,
            {
                "consumerGroup": group,
                "topic": topic,
                "queueId": queue,
                "queueOffset": offset,
                "maxMsgNums": count,
                "sysFlag": 4,
                "commitOffset": 0,
                "suspendTimeoutMillis": 0,
                "subscription": "*",
                "subVersion": 0,
                "expressionType": "TAG",
            },
        )
        if reply.code in _PULL_NOTHING:
            return None
        if reply.code != _SUCCESS:
            raise RefusedError(f"pull of {topic}/{queue} at {offset}: {reply.code} {reply.remark}")
        return reply.body

    def query(self, topic: str, key: str, count: int = 64) -> bytes:
        """The records that the broker finds by a key."""
        header = {"topic": topic, "key": key, "maxNum": count, "beginTimestamp": 0, "endTimestamp": 2**62}
        reply = self.call(QUERY, header)
        if reply.code == _QUERY_NOTHING:
            return b""
        if reply.code != _SUCCESS:
            raise RefusedError(f"query of {topic} by {key}: {reply.code} {reply.remark}")
        return reply.body

    def view(self, phy: int) -> bytes:
        """The record at a log offset."""
        return self.ask(VIEW, {"offset": phy}).body

    def commit_offset(self, group: str, topic: str, queue: int, offset: int) -> None:
        header = {"consumerGroup": group, "topic": topic, "queueId": queue, "commitOffset": offset}
        self.ask(UPDATE_OFFSET, header)

    def offsets(self, topic: str, queue: int) -> tuple[int, int]:
        """Smallest and largest offset of a queue."""
        ext = {"topic": topic, "queueId": queue}
        return int(self.ask(MIN_OFFSET, ext).ext["offset"]), int(self.ask(MAX_OFFSET, ext).ext["offset"])


def _sent(topic: str, body: bytes, properties: Mapping[str, str], reply: Reply) -> Sent:
    phy = int(reply.ext["msgId"][-16:], 16)
    key = properties.get("UNIQ_KEY", "")
    return Sent(topic, int(reply.ext["queueId"]), int(reply.ext["queueOffset"]), phy, key, body)


@contextlib.contextmanager
def connected(host: str, port: int) -> Iterator[Wire]:
    """Open a connection and close it afterwards."""
    wire = Wire(host, port)
    try:
        yield wire
    finally:
        wire.close()
