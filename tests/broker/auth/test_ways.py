"""All ways of a request decide alike: fast handlers, grouped servers and full handlers, in Rust and in Python.

The same requests go to three brokers: one where everything takes the full path, one that verifies in Python in front of
its fast paths, and one with the native extension. Their replies, messages and counters of refusals have to be equal.
"""

import json
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.broker.auth.signed import User, closed_broker, secret_of
from tests.broker.wire_client import WireClient, pull_ext, send_ext
from trimq.broker.controller import BrokerController
from trimq.protocol.auth.signature import ACCESS_KEY, SIGNATURE, sign
from trimq.protocol.batch import encode_batch
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.message import decode_messages
from trimq.protocol.native import NATIVE, NativeExtension
from trimq.remoting.server.gate import Feature

EXAMPLES = max(8, settings().max_examples // 20)
"""Fewer examples than other tests: each of them starts three brokers."""
TOPICS = ("T", "U")
UNIQUE = "UNIQ_KEY\x017F0000010001AABB{:016X}\x02"
USERS = {
    "root": (),
    "app": ("Topic:T Pub|Sub", "Group:G Sub"),
    "deny": ("Topic:* Pub|Sub", "Deny Topic:U Pub", "Group:* Sub"),
    "there": (),
    "off": ("Topic:T Pub",),
}
"""``there`` may send to T from another address only, ``off`` is disabled."""
WHITELISTED = 361


class Request(NamedTuple):
    """What is sent, by whom, and what is wrong with it."""

    kind: str
    topic: str
    user: str
    flaw: str
    binary: bool
    address: int


KINDS = ("send", "send", "send", "send v1", "batch", "pull", "lite", "query", "end", "offset", "config")
FLAWS = (
    *("",) * 12,
    "signature",
    "secret",
    "unsigned",
    "nameless",
    "body",
    "field",
    "added",
    "order",
    "twice",
    "name",
    "escape",
    "number",
    "query",
    "old query",
    "letters",
)

REQUESTS = st.builds(
    Request,
    st.sampled_from(KINDS),
    st.sampled_from(TOPICS),
    st.sampled_from([*USERS, "app", "app", "unknown"]),
    st.sampled_from(FLAWS),
    st.booleans(),
    st.integers(1, 2),
)
CHANGES = st.sampled_from(["", "", "disable app", "enable app", "deny app", "allow app", "delete deny", "make another"])
ROUNDS = st.lists(
    st.tuples(CHANGES, st.sampled_from(["single", "pipelined", "spread"]), st.lists(REQUESTS, max_size=40)),
    min_size=1,
    max_size=4,
)


def parts_of(request: Request, number: int) -> tuple[int, dict[str, Any], bytes]:
    """Code, ext fields and body."""
    text, body, topic = UNIQUE.format(number), b"body %d" % number, request.topic
    match request.kind:
        case "send":
            return 310, send_ext(topic, text), body
        case "send v1":
            return 10, send_ext(topic, text, v1=True), body
        case "batch":
            return 320, send_ext(topic, batch="true"), encode_batch([(0, body, text.encode())])
        case "pull":
            return 11, pull_ext(topic), b""
        case "lite":
            return WHITELISTED, pull_ext(topic, 1 << 40), b""
        case "query":
            times = {"beginTimestamp": 0, "endTimestamp": 1 << 50}
            return 12, {"topic": topic, "key": "none", "maxNum": 1, **times}, b""
        case "end":
            end = {"producerGroup": "P", "tranStateTableOffset": 0, "commitLogOffset": 0, "commitOrRollback": 12}
            return 37, {**end, "msgId": "x"} | ({} if topic == "U" else {"topic": topic}), b""
        case "offset":
            return 30, {"topic": topic, "queueId": 0}, b""
        case _:
            return 25, {}, b"autoCreateTopicEnable=true"


def framed(head: str, body: bytes) -> bytes:
    raw = head.encode()
    return struct.pack(">II", 4 + len(raw) + len(body), len(raw)) + raw + body


def frame_of(request: Request, number: int) -> bytes:  # noqa: C901, PLR0912 - a list of flaws
    """The frame with its flaw."""
    code, ext, body = parts_of(request, number)
    flaw, version = request.flaw, 393 if request.flaw == "old query" else 479
    fields = {name: str(value) for name, value in ext.items() if value is not None} | {ACCESS_KEY: request.user}
    if flaw == "query":
        fields["_UNIQUE_KEY_QUERY"] = "false"
    if flaw == "letters":
        fields |= {"é": "ü", "e\u0301": "x"}
    secret = "root secret canary-7f3a91" if request.user == "root" else secret_of(request.user)
    fields[SIGNATURE] = sign("guess" if flaw == "secret" else secret, fields, body, version)
    match flaw:
        case "signature":
            fields[SIGNATURE] = fields[SIGNATURE][::-1]
        case "unsigned":
            del fields[SIGNATURE]
        case "nameless":
            del fields[ACCESS_KEY]
        case "body":
            body += b"!"
        case "field":
            fields["b" if "b" in fields else "topic"] = "T2"
        case "added":
            fields["zz"] = "more"
        case "old query":
            fields["_UNIQUE_KEY_QUERY"] = "false"
        case "order":
            fields = dict(sorted(fields.items(), reverse=True))
    if request.binary:
        command = RemotingCommand(code, number, 0, version, "JAVA", ext=fields, body=body, encoding=Encoding.ROCKETMQ)
        return encode(command)
    header = {"code": code, "extFields": fields, "flag": 0, "language": "JAVA", "opaque": number, "version": version}
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=number % 2 == 0)
    match flaw:
        case "twice":
            head = head.replace(f'"{ACCESS_KEY}":', f'"{ACCESS_KEY}":"root","{ACCESS_KEY}":')
        case "name":
            head = head.replace(f'"{ACCESS_KEY}"', '"Access\\u004bey"')
        case "escape":
            head = head.replace('"T"', '"\\u0054"')
        case "number":
            head = head.replace('"0"', "0")
    return framed(head, body)


class Side:
    """A broker with the clients of two addresses."""

    def __init__(self, broker: BrokerController, root: User, clients: dict[int, list[WireClient]]) -> None:
        assert broker.context.users is not None
        self.broker = broker
        self.root = root
        self.clients = clients
        self.access = broker.context.users.access

    async def send(self, how: str, requests: list[tuple[Request, int]]) -> list[tuple[int, str | None]]:
        """Send requests and return the replies without what differs between brokers: the places of messages."""
        places = [self.clients[one.address][number % 3 if how == "spread" else 0] for one, number in requests]
        frames = [frame_of(one, number) for one, number in requests]
        replies = []
        if how == "single":
            for client, frame, (_, number) in zip(places, frames, requests, strict=True):
                await client.stream.send_all(frame)
                replies.append(await client.reply(number))
        else:
            for client in dict.fromkeys(places):
                await client.stream.send_all(
                    b"".join(frame for place, frame in zip(places, frames, strict=True) if place is client)
                )
            for client, (_, number) in zip(places, requests, strict=True):
                replies.append(await client.reply(number))
        return [(reply.code, reply.remark) for reply in replies]

    async def change(self, text: str) -> None:
        root = self.root
        match text.split():
            case ["disable", name]:
                assert (await root.ask(3002, {"username": name}, b'{"userStatus":"disable"}')).code == 0
            case ["enable", name]:
                assert (await root.ask(3002, {"username": name}, b'{"userStatus":"enable"}')).code == 0
            case ["deny", name]:
                await root.grant(name, "Deny Topic:T Pub|Sub")
            case ["allow", name]:
                await root.grant(name, "Topic:T Pub|Sub")
            case ["delete", name]:
                assert (await root.ask(3003, {"username": name})).code == 0
                await root.make(name, "Topic:U Pub")
            case ["make", name]:
                await root.ask(3001, {"username": name}, b'{"password":"a password"}')

    async def messages(self) -> list[tuple[str, bytes]]:
        """All messages, in any order: connections do not wait for each other."""
        found: list[tuple[str, bytes]] = []
        for topic in TOPICS:
            at = 0
            while True:
                reply = await self.root.ask(11, pull_ext(topic, at))
                if reply.code != 0:
                    break
                for message in decode_messages(bytes(reply.body)):
                    found.append((topic, bytes(message.body)))
                    at = message.queue_offset + 1
        return sorted(found)

    @property
    def counters(self) -> tuple[dict[str, int], int]:
        return dict(self.access.refused), self.access._authenticator.failures


@asynccontextmanager
async def clients(broker: BrokerController) -> AsyncIterator[dict[int, list[WireClient]]]:
    """Three clients of each address: 127.0.0.1 and 127.0.0.2."""
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        found: dict[int, list[WireClient]] = {1: [], 2: []}
        for address, own in found.items():
            for _ in range(3):
                stream = await trio.open_tcp_stream(*broker.endpoint, local_address=f"127.0.0.{address}")
                stack.push_async_callback(stream.aclose)
                own.append(WireClient(stream))
                nursery.start_soon(own[-1]._read)
        yield found
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def sides(directory: Path) -> AsyncIterator[dict[str, Side]]:
    async with AsyncExitStack() as stack:
        found = {}
        for name in ("full", "python", *(("native",) if NATIVE.is_on else ())):
            broker, root = await stack.enter_async_context(
                closed_broker(directory / name, authenticationWhitelist=str(WHITELISTED), brokerIP1="127.0.0.1")
            )
            side = found[name] = Side(broker, root, await stack.enter_async_context(clients(broker)))
            feature = side.access.feature
            if name == "full":
                broker.gate.remove(feature)
                broker.gate.register(Feature("access", feature.check))
            elif name == "python":
                side.access._fast._native = NativeExtension(None, "a test")
            for topic in TOPICS:
                assert (await root.ask(310, send_ext(topic), b"makes the topic")).code == 0
            for user, entries in USERS.items():
                if user != "root":
                    await root.make(user, *entries)
            await root.grant("there", "Topic:T Pub", ips=["127.0.0.2"])
            assert (await root.ask(3002, {"username": "off"}, b'{"userStatus":"disable"}')).code == 0
        yield found


def many(*requests: Request, count: int = 30) -> list[Request]:
    return [requests[number % len(requests)] for number in range(count)]


SEND = Request("send", "T", "app", "", False, 1)


@settings(max_examples=EXAMPLES)
@given(ROUNDS)
@example(
    [
        ("", "pipelined", many(SEND)),
        ("", "pipelined", many(SEND, SEND._replace(binary=True), SEND._replace(topic="U"))),
        ("disable app", "pipelined", many(SEND)),
        ("enable app", "spread", many(SEND, SEND, SEND, SEND._replace(flaw="body"))),
    ]
)
@example(
    [
        ("", "single", [SEND._replace(user="there", address=address) for address in (2, 2, 1, 2, 1)]),
        ("", "spread", many(SEND, SEND._replace(user="there"), SEND._replace(user="there", address=2), count=39)),
        ("deny app", "single", many(SEND, SEND._replace(user="deny"), count=8)),
        ("allow app", "single", [SEND._replace(kind=kind, user=user) for kind in KINDS for user in ("app", "off")]),
        ("", "pipelined", [SEND._replace(flaw=flaw, binary=binary) for flaw in FLAWS for binary in (False, True)]),
    ]
)
def test_the_ways_decide_alike(rounds: list[tuple[str, str, list[Request]]]) -> None:
    async def run(directory: Path) -> None:
        async with sides(directory) as found:
            number = 1 << 20
            for change, how, requests in rounds:
                numbered = list(zip(requests, range(number, number + len(requests)), strict=True))
                number += len(requests)
                replies = {}
                for name, side in found.items():
                    await side.change(change)
                    replies[name] = await side.send(how, numbered)
                for name in found:
                    assert replies[name] == replies["full"], name
            messages = await found["full"].messages()
            for name, side in found.items():
                assert await side.messages() == messages, name
                assert side.counters == found["full"].counters, name

    with TemporaryDirectory() as directory:
        trio.run(run, Path(directory))
