"""A small remoting client of the harness's own, so that no code under test is used to check the servers."""

from __future__ import annotations

import json
import re
import socket
import struct
from dataclasses import dataclass
from typing import Any

CREATE_TOPIC = 17
UPDATE_OFFSET = 15
CREATE_GROUP = 200
PRODUCERS = 204
DELETE_TOPIC = 215
QUERY_OFFSET = 14
ROUTE = 105
CLUSTER_INFO = 106

_BARE_KEY = re.compile(r"([{,])(-?\d+):")


@dataclass(frozen=True)
class Reply:
    """One reply, header and body."""

    code: int
    remark: str
    ext: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Decode the body as JSON; fastjson, which Apache's older versions use, writes numeric keys without quotes."""
        return json.loads(_BARE_KEY.sub(r'\1"\2":', self.body.decode()))


class RefusedError(Exception):
    """The server answered with a code other than success."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"code {reply.code}: {reply.remark}")
        self.code = reply.code


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the server closed the connection")
        data += part
    return bytes(data)


def call(address: str, code: int, ext: dict[str, str] | None = None, body: bytes = b"", timeout: float = 10.0) -> Reply:
    """Send one request over a new connection and return the reply."""
    header = json.dumps(
        {"code": code, "language": "PYTHON", "version": 479, "opaque": 1, "flag": 0, "extFields": ext or {}}
    ).encode()
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout) as connection:
        connection.sendall(struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body)
        total, word = struct.unpack(">II", _read(connection, 8))
        length = word & 0xFFFFFF
        rest = _read(connection, total - 4)
    reply = json.loads(rest[:length])
    return Reply(reply["code"], reply.get("remark") or "", reply.get("extFields") or {}, rest[length:])


def ask(address: str, code: int, ext: dict[str, str] | None = None, body: bytes = b"") -> Reply:
    """Like ``call``. Raises RefusedError for any code other than success."""
    reply = call(address, code, ext, body)
    if reply.code != 0:
        raise RefusedError(reply)
    return reply


def has_producer(address: str, group: str) -> bool:
    """Whether the broker has had a heartbeat of a producer of the group."""
    return call(address, PRODUCERS, {"producerGroup": group}).code == 0


def accepts(address: str) -> bool:
    """Whether a server listens at the address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1.0):
            return True
    except OSError:
        return False


def create_topic(broker: str, topic: str, queues: int = 4, perm: int = 6) -> None:
    """Create a topic on one broker; the name servers have its route when this returns."""
    ask(
        broker,
        CREATE_TOPIC,
        {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": str(queues),
            "writeQueueNums": str(queues),
            "perm": str(perm),
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        },
    )


def create_group(broker: str, group: str) -> None:
    """Create a consumer group on one broker."""
    ask(broker, CREATE_GROUP, body=json.dumps({"groupName": group}).encode())


def commit_offset(broker: str, group: str, topic: str, queue: int, offset: int) -> None:
    """Commit a group's offset of one queue; the group must exist."""
    place = {"consumerGroup": group, "topic": topic, "queueId": str(queue), "commitOffset": str(offset)}
    ask(broker, UPDATE_OFFSET, place)


def cluster(name_server: str) -> dict[str, Any]:
    """The brokers that a name server knows, by name; empty if it cannot be reached."""
    try:
        reply = call(name_server, CLUSTER_INFO)
    except OSError:
        return {}
    found: dict[str, Any] = reply.json().get("brokerAddrTable") or {} if reply.code == 0 else {}
    return found


def has_route(name_server: str, topic: str) -> bool:
    """Whether the name server has a route for the topic."""
    return call(name_server, ROUTE, {"topic": topic}).code == 0


def committed_offset(broker: str, group: str, topic: str, queue: int) -> int | None:
    """A group's stored offset of one queue, or None."""
    reply = call(
        broker,
        QUERY_OFFSET,
        {"consumerGroup": group, "topic": topic, "queueId": str(queue), "setZeroIfNotFound": "false"},
    )
    return int(reply.ext["offset"]) if reply.code == 0 else None
