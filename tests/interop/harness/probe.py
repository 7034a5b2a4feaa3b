"""A small remoting client of the harness's own, so that no code under test is used to check the servers."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import re
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.canary import look_at_reply

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


@dataclass(frozen=True)
class Credentials:
    """A user's access key and secret key. Empty: nothing is signed."""

    access_key: str = ""
    secret_key: str = ""

    def sign(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        """The fields of a request with access key and signature: the HMAC of their values in the order of the names."""
        if not self.access_key:
            return dict(fields)
        signed = {**fields, "AccessKey": self.access_key}
        content = "".join(signed[key] for key in sorted(signed)).encode() + body
        digest = hmac.new(self.secret_key.encode(), content, hashlib.sha1).digest()
        return {**signed, "Signature": base64.b64encode(digest).decode()}


@dataclass(frozen=True)
class Access:
    """How a server is spoken to: with TLS if there is a context, and as which user."""

    context: ssl.SSLContext | None = None
    user: Credentials = Credentials()


#: The access to the servers that are not open to all, by address. The one who starts them says so.
ACCESS: dict[str, Access] = {}

#: Addresses of Apache's brokers, whose replies have the passwords of users.
SHOWS_PASSWORDS: set[str] = set()


@contextlib.contextmanager
def connected(address: str, timeout: float, access: Access) -> Iterator[socket.socket]:
    """A connection, with TLS if the server's access has a context."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout) as plain:
        if access.context is None:
            yield plain
            return
        with access.context.wrap_socket(plain, server_hostname=host) as secure:
            yield secure


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the server closed the connection")
        data += part
    return bytes(data)


def call(
    address: str,
    code: int,
    ext: Mapping[str, str] | None = None,
    body: bytes = b"",
    timeout: float = 10.0,
    access: Access | None = None,
) -> Reply:
    """Send one request over a new connection and return the reply. ``access`` replaces the one that ACCESS has."""
    access = access or ACCESS.get(address, Access())
    fields = access.user.sign(ext or {}, body)
    header = json.dumps(
        {"code": code, "language": "PYTHON", "version": 479, "opaque": 1, "flag": 0, "extFields": fields}
    ).encode()
    with connected(address, timeout, access) as connection:
        connection.sendall(struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body)
        total, word = struct.unpack(">II", _read(connection, 8))
        length = word & 0xFFFFFF
        rest = _read(connection, total - 4)
    if address not in SHOWS_PASSWORDS:
        look_at_reply(rest)
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
