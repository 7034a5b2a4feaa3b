"""All ways of a request decide alike: fast handlers, grouped servers and full handlers, in Rust and in Python.

The same requests go to three brokers: one where everything takes the full path, one that verifies in Python in front of
its fast paths, and one with the native extension. Their replies, messages and counters of refusals have to be equal.
No request with a stamp may be served twice.
"""

import json
import re
import struct
import time
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
from trimq.protocol.auth.stamp import STAMP, stamp_text
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
    "once": ("Topic:T Pub|Sub", "Group:G Sub"),
}
"""``there`` may send to T from another address only, ``off`` is disabled, ``once`` is served with a stamp only."""
WHITELISTED = 361
ON: dict[str, Any] = {
    "authenticationWhitelist": str(WHITELISTED),
    "authRequireReplayProtection": "once",
    "brokerIP1": "127.0.0.1",
}
FIRST = 1 << 20
"""The opaque of the first request."""


class Request(NamedTuple):
    """What is sent, by whom, and what is wrong with it; with which stamp, and whether it was sent before.

    ``again``: send the request anew that was sent so many before this one; ``other``: with another code, or with other
    names of fields.
    """

    kind: str
    topic: str
    user: str
    flaw: str
    binary: bool
    address: int
    stamp: str = ""
    again: int = 0
    other: str = ""


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

STAMPS = (*("",) * 6, *("new",) * 6, "second sender", "code", "old", "ahead", "before", "none", "renamed")

REQUESTS = st.builds(
    Request,
    st.sampled_from(KINDS),
    st.sampled_from(TOPICS),
    st.sampled_from([*USERS, "app", "app", "unknown"]),
    st.sampled_from(FLAWS),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from(STAMPS),
    st.sampled_from([0, 0, 0, 0, 1, 2, 3, 20]),
    st.sampled_from(["", "", "code", "names"]),
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


class Sent(NamedTuple):
    """A request as it is sent. ``origin`` is the number of the one that it repeats, else its own."""

    request: Request
    origin: int
    opaque: int
    stamped_at: int
    other: str = ""


class History:
    """All requests that were made, so that one can be sent again."""

    def __init__(self) -> None:
        self._sent: list[Sent] = []

    def take(self, request: Request, opaque: int) -> Sent:
        if 0 < request.again <= len(self._sent):
            found = self._sent[-request.again]
            one = found._replace(opaque=opaque, other=request.other)
        else:
            one = Sent(request, opaque, opaque, time.time_ns() // 1_000_000)
        self._sent.append(one)
        return one

    def stamped(self) -> set[bytes]:
        """The bodies of messages that may be there once."""
        return {b"body %d" % one.origin for one in self._sent if one.request.stamp not in ("", "none")}


def stamp_of(sent: Sent) -> dict[str, str]:
    """The ext field of the stamp."""
    request = sent.request
    sender = f"{request.user:_<15}{'B' if request.stamp == 'second sender' else 'A'}"
    code = 3003 if request.stamp == "code" else parts_of(request, sent.origin)[0]
    made_at = sent.stamped_at + {"old": -600_000, "ahead": 600_000, "before": -200_000}.get(request.stamp, 0)
    text = stamp_text(code, made_at, sender, sent.origin - FIRST + 1)
    match request.stamp:
        case "":
            return {}
        case "none":
            return {STAMP: text[:-1]}
        case "renamed":
            return {"!": text[:7], "!!": text[7:]}
    return {STAMP: text}


def frame_of(sent: Sent) -> bytes:  # noqa: C901, PLR0912 - a list of flaws
    """The frame with its flaw."""
    request, number = sent.request, sent.origin
    code, ext, body = parts_of(request, number)
    flaw, version = request.flaw, 393 if request.flaw == "old query" else 479
    fields = {name: str(value) for name, value in ext.items() if value is not None} | {ACCESS_KEY: request.user}
    fields |= stamp_of(sent)
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
    if sent.other == "code":
        code = 10 if code == 310 else 310
    elif sent.other == "names" and STAMP in fields:
        fields["1"] = fields.pop(STAMP)  # not "0", which the flaw "number" looks for
    if request.binary:
        command = RemotingCommand(
            code, sent.opaque, 0, version, "JAVA", ext=fields, body=body, encoding=Encoding.ROCKETMQ
        )
        return encode(command)
    header = {"code": code, "extFields": fields, "flag": 0, "language": "JAVA", "opaque": sent.opaque}
    header["version"] = version
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

    async def send(self, how: str, requests: list[Sent]) -> list[tuple[int, int, str]]:
        """Send requests and return the replies without what differs between brokers: the places of messages.

        Connections do not wait for each other, so which of two equal requests is the first one is left open.
        """
        places = [self.clients[one.request.address][one.opaque % 3 if how == "spread" else 0] for one in requests]
        frames = [frame_of(one) for one in requests]
        replies = []
        if how == "single":
            for client, frame, one in zip(places, frames, requests, strict=True):
                await client.stream.send_all(frame)
                replies.append(await client.reply(one.opaque))
        else:
            for client in dict.fromkeys(places):
                await client.stream.send_all(
                    b"".join(frame for place, frame in zip(places, frames, strict=True) if place is client)
                )
            for client, one in zip(places, requests, strict=True):
                replies.append(await client.reply(one.opaque))
        found = [
            (one.origin, reply.code, re.sub(r"\d+ s ", "n s ", reply.remark or ""))
            for one, reply in zip(requests, replies, strict=True)
        ]
        return sorted(found) if how == "spread" else found

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
            broker, root = await stack.enter_async_context(closed_broker(directory / name, **ON))
            side = found[name] = Side(broker, root, await stack.enter_async_context(clients(broker)))
            feature = side.access.feature
            if name == "full":
                features = list(broker.gate.features)
                for one in features:
                    broker.gate.remove(one)
                for one in features:  # in the same order
                    broker.gate.register(Feature("access", feature.check) if one is feature else one)
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
ONCE = SEND._replace(stamp="new")


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
@example(
    [
        ("", "pipelined", many(ONCE)),
        ("", "pipelined", many(ONCE, ONCE._replace(again=1), ONCE._replace(binary=True), SEND, count=40)),
        ("", "spread", many(ONCE, ONCE._replace(again=1), ONCE._replace(again=20, other="names"), count=40)),
        ("disable app", "spread", many(ONCE)),
        ("enable app", "spread", many(ONCE, SEND, ONCE._replace(again=20), ONCE._replace(stamp="second sender"))),
    ]
)
@example(
    [
        ("", "single", [ONCE._replace(kind=kind, user=user) for kind in KINDS for user in ("app", "root")]),
        ("", "single", [ONCE._replace(again=2 * len(KINDS), other=other) for other in ("", "code", "names")]),
        ("", "spread", many(*[SEND._replace(user="once", stamp=stamp) for stamp in ("new", "", "renamed", "new")])),
        ("", "pipelined", [ONCE._replace(stamp=stamp, binary=binary) for stamp in STAMPS for binary in (False, True)]),
        ("", "pipelined", [ONCE._replace(flaw=flaw) for flaw in FLAWS]),
    ]
)
def test_the_ways_decide_alike(rounds: list[tuple[str, str, list[Request]]]) -> None:
    async def run(directory: Path) -> None:
        async with sides(directory) as found:
            history, number = History(), FIRST
            for change, how, requests in rounds:
                made = [history.take(one, opaque) for opaque, one in enumerate(requests, number)]
                number += len(requests)
                replies = {}
                for name, side in found.items():
                    await side.change(change)
                    replies[name] = await side.send(how, made)
                for name in found:
                    assert replies[name] == replies["full"], name
            messages = await found["full"].messages()
            for body in history.stamped():
                assert sum(body == other for _, other in messages) <= 1
            for name, side in found.items():
                assert await side.messages() == messages, name
                assert side.counters == found["full"].counters, name

    with TemporaryDirectory() as directory:
        trio.run(run, Path(directory))
