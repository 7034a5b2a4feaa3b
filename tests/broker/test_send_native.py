"""Sends and batches by the native extension: the same records, replies, queues, keys and counts as by Python."""

import json
import os
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.broker.wire_client import WireClient, consumer, pull_ext, send_ext
from tests.store.stores import until_dispatched
from trimq.broker.controller import BrokerController
from trimq.broker.processors.send.send_native import GroupedSends, NativeBatches
from trimq.broker.testing import running_broker
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import decode, encode
from trimq.protocol.message import StoredMessage
from trimq.protocol.native import NATIVE, Extension, NativeExtension
from trimq.protocol.property_text import decode_properties
from trimq.protocol.topic_rules import TRACE_TOPIC
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.grouping import LEAST
from trimq.remoting.server.handlers import Served, Span

pytestmark = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")

TOPIC = "Orders"
OTHER = "Payments"
QUEUES = 4
QUEUES_OF = {TOPIC: QUEUES, OTHER: QUEUES, TRACE_TOPIC: 1}
"""The topics of the tests. The broker itself creates that of message traces."""
MANY = LEAST + 8
USUAL = {
    "KEYS": "k{0:06d}",
    "UNIQ_KEY": "7F0000010001AABB{0:016X}",
    "TAGS": "TagA",
    "WAIT": "true",
    "colour": "b{0:04d}",
}
Frame = bytes
EXAMPLES = max(8, settings().max_examples // 20)
"""Fewer examples than other tests: each of them starts two brokers."""


def send_frame(
    number: int,
    properties: dict[str, str] | str | None = None,
    *,
    v1: bool = False,
    body: bytes | None = None,
    opaque: int | None = None,
    flag: int = 0,
    topic: str = TOPIC,
    binary: bool = False,
    code: int | None = None,
    ascii_only: bool = True,
    **changes: Any,
) -> Frame:
    """A send as Java's client writes it. ``{0}`` in a property's value is replaced by the number."""
    if isinstance(properties, str):
        texts: Any = {}
    else:
        texts = {name: value.format(number) for name, value in (USUAL if properties is None else properties).items()}
    fields = {"queue_id": number % QUEUES, "born_timestamp": 1_700_000_000_000 + number} | changes
    ext = {name: str(value) for name, value in send_ext(topic, texts, v1=v1, **fields).items()}
    if isinstance(properties, str):
        ext["properties" if v1 else "i"] = properties
    code = (10 if v1 else 310) if code is None else code
    opaque = number if opaque is None else opaque
    data = b"body%6d" % number if body is None else body
    if binary:
        command = RemotingCommand(code, opaque, flag, 479, "JAVA", ext=ext, body=data, encoding=Encoding.ROCKETMQ)
        return encode(command)
    header = {"code": code, "extFields": ext, "flag": flag, "language": "JAVA"}
    header |= {"opaque": opaque, "serializeTypeCurrentRPC": "JSON", "version": 479}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=ascii_only).encode()
    return struct.pack(">II", 4 + len(raw) + len(data), len(raw)) + raw + data


def opaque_of(frame: Frame) -> int:
    return decode(memoryview(frame)[4:]).opaque


class Side:
    """A broker and one of its clients."""

    def __init__(self, broker: BrokerController, client: WireClient) -> None:
        self.broker = broker
        self.client = client

    async def burst(self, frames: Iterable[Frame], expected: Iterable[int]) -> dict[int, RemotingCommand]:
        """Send all frames in one write; return the replies by request number."""
        await self.client.stream.send_all(b"".join(frames))
        return {opaque: await self.client.reply(opaque) for opaque in expected}

    async def one_by_one(self, frames: Iterable[Frame], expected: Iterable[int]) -> dict[int, RemotingCommand]:
        """Send each frame after the reply to the one before; return the replies by request number."""
        replies = {}
        expected = set(expected)
        for frame in frames:
            await self.client.stream.send_all(frame)
            opaque = opaque_of(frame)
            if opaque in expected:
                replies[opaque] = await self.client.reply(opaque)
        return replies


class Sides:
    """Two brokers, and what the first one's extension served: ``served`` grouped, ``single`` alone, ``batches``."""

    def __init__(self) -> None:
        self.both: list[Side] = []
        self.served = 0
        self.batches = 0
        self.single = 0

    def __getitem__(self, at: int) -> Side:
        return self.both[at]


async def make_topic(side: Side, topic: str, queues: int = QUEUES) -> None:
    ext = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": queues, "writeQueueNums": queues}
    ext |= {"perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}
    assert (await side.client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)).code == 0


def only_python(table: Any) -> None:
    """Remove the extension's routes from a table. Batches have no other fast path."""
    for code, route in list(table.routes.items()):
        batches = code == RequestCode.SEND_BATCH_MESSAGE
        table.route(code, replace(route, grouped=None, fast=None if batches else route.fast))


@asynccontextmanager
async def sides(path: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> AsyncIterator[Sides]:
    """Two brokers, of which the second serves each send separately and in Python."""
    found = Sides()
    sends, one_send, batch = GroupedSends.serve, GroupedSends.serve_one, NativeBatches.serve

    def counted(self: GroupedSends, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        result = sends(self, frames, spans, most)
        found.served += sum(count for count, _ in result.parts) if result is not None else 0
        return result

    def counted_one(self: GroupedSends, connection: Connection, frame: memoryview) -> Any:
        result = one_send(self, connection, frame)
        found.single += result is not None
        return result

    def counted_batch(self: NativeBatches, connection: Connection, request: TypedRequest[Any]) -> Any:
        result = batch(self, connection, request)
        found.batches += result is not None
        return result

    monkeypatch.setattr(GroupedSends, "serve", counted)
    monkeypatch.setattr(GroupedSends, "serve_one", counted_one)
    monkeypatch.setattr(NativeBatches, "serve", counted_batch)
    async with (
        running_broker(path / "together", traceTopicEnable=True, **config) as one,
        running_broker(path / "alone", traceTopicEnable=True, **config) as other,
        WireClient.connect(one.endpoint) as first,
        WireClient.connect(other.endpoint) as second,
    ):
        found.both = [Side(one, first), Side(other, second)]
        for side in found.both:
            for topic in (TOPIC, OTHER):
                await make_topic(side, topic)
            await side.burst([send_frame(1)], [1])  # creates the log's first file
        for connection in other.reactor.connections.values():
            only_python(connection.table)
        found.single = 0
        yield found


def of_reply(reply: RemotingCommand) -> Any:
    fields = reply.ext_fields()
    offset = fields.pop("msgId", "")[16:]
    return reply.code, reply.remark, offset, fields


def of_message(message: StoredMessage) -> dict[str, Any]:
    own = {"store_timestamp", "offset_message_id", "store_host", "born_host"}
    return {name: getattr(message, name) for name in message.__struct_fields__ if name not in own}


async def stored(side: Side) -> dict[str, Any]:
    """All side effects of sends."""
    store = side.broker.context.store
    assert store.index is not None
    await until_dispatched(store)
    await store.index.flush_pending()
    found: dict[str, Any] = {"end": store.max_phy_offset, "dispatched": store.dispatched_offset}
    found["index"] = [(entry.phy, entry.key_hash) for file in store.index.files for entry in file.entries()]
    messages: list[StoredMessage] = []
    for topic, queues in QUEUES_OF.items():
        for queue_id in range(queues):
            offset = 0
            while (
                reply := await side.client.pull(topic, offset, queueId=queue_id, suspendTimeoutMillis=0, sysFlag=4)
            ).code == 0:
                more = await side.client.pull_messages(topic, offset, queueId=queue_id)
                messages += more
                offset = int(reply.ext_fields()["nextBeginOffset"])
            found[f"units {topic} {queue_id}"] = await store.queue_units(topic, queue_id, 0, 10_000)
    found["messages"] = [of_message(message) for message in messages]
    for message in messages:
        for key in [message.properties["UNIQ_KEY"], *message.properties.get("KEYS", "").split(" ")]:
            result = await store.query_message_cold(message.topic, key, 64, 0, 1 << 62)
            found[f"key {key}"] = result.count
            result.release()
    stats = side.broker.context.stats
    for topic in QUEUES_OF:
        nums, sizes = stats.topic_counters(topic)
        found[f"counted {topic}"] = (stats.put_total, nums.value, nums.times, sizes.value, sizes.times)
    found["store"] = (store.stats.put_message_times_total, store.stats.put_message_size_total)
    return found


async def same(
    found: Sides, frames: list[Frame], expected: list[int], *, alone: bool = False
) -> dict[int, RemotingCommand]:
    """Send the same frames to both, together or one by one, and check that they answer and store the same."""
    both = found.both
    replies = [await (side.one_by_one if alone else side.burst)(frames, expected) for side in both]
    assert {at: of_reply(reply) for at, reply in replies[0].items()} == {
        at: of_reply(reply) for at, reply in replies[1].items()
    }
    assert await stored(both[0]) == await stored(both[1])
    return replies[0]


TRACES = {"KEYS": " ".join(f"7F{{0:06d}}{each:024X}" for each in range(100)), "UNIQ_KEY": "7F02{0:028X}"}
"""Reports of a client about 100 messages, whose ids are the keys."""
KINDS = [
    USUAL,
    {"UNIQ_KEY": "7F00{0:08X}"},
    {"UNIQ_KEY": "{0:08d}", "KEYS": "a{0:04d} b{0:03d}  c-{0:02d}", "TAGS": "ä{0}"},
    {"TAGS": "TagA", "one.two": '{0:03d} [x] "\\/\n😀', "UNIQ_KEY": "{0:08d}", "KEYS": "ö{0:04d}"},
    TRACES,
]


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
@pytest.mark.parametrize("v1", [False, True], ids=["v2", "v1"])
@pytest.mark.parametrize("properties", KINDS, ids=["all", "least", "several keys", "other order", "traces"])
@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
async def test_the_extension_s_path_is_as_python_s(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flush: str,
    binary: bool,
    v1: bool,
    properties: dict[str, str],
    alone: bool,
) -> None:
    async with sides(tmp_path, monkeypatch, flushDiskType=flush) as both:
        numbers = list(range(1001, 1001 + MANY))
        usual = (OTHER, TOPIC, TOPIC)
        frames = [
            send_frame(
                number,
                properties,
                v1=v1,
                binary=binary,
                ascii_only=number % 2 == 0,
                reconsume_times=3,
                sys_flag=0x301,
                flag=0,
                **({"topic": TRACE_TOPIC, "queue_id": 0} if properties is TRACES else {"topic": usual[number % 3]}),
                body=b"b" * (number % 7 * 300 + 1),
            )
            for number in numbers
        ]
        replies = await same(both, frames, numbers, alone=alone)
        assert {reply.code for reply in replies.values()} == {0}
        if alone:
            assert (both.single, both.served) == (0 if binary else MANY, 0)
        else:
            assert both.served >= LEAST


def changed(number: int, change: dict[str, Any]) -> Frame:
    more = dict(change)
    texts = more.pop("properties", {})
    texts = texts if isinstance(texts, str) else USUAL | texts
    old, new = more.pop("swap", (b"", b""))
    frame = send_frame(number, texts, **more)
    return with_head(frame, old, new) if old else frame


def with_head(frame: Frame, old: bytes, new: bytes) -> Frame:
    (size,) = struct.unpack_from(">I", frame, 4)
    head, body = frame[8 : 8 + size], frame[8 + size :]
    assert head.count(old) == 1
    head = head.replace(old, new)
    return struct.pack(">II", 4 + len(head) + len(body), len(head)) + head + body


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize(
    "change",
    [
        {"sys_flag": 4},
        {"sys_flag": 8},
        {"sys_flag": 0x10},
        {"flag": 2, "oneway": True},
        {"queue_id": 9},
        {"queue_id": 1 << 40},
        {"born_timestamp": -1},
        {"born_timestamp": 1 << 63},
        {"properties": {"WAIT": "false"}},
        {"properties": {"DELAY": "14"}},
        {"properties": {"INNER_X": "1"}},
        {"properties": {"__SHARDINGKEY": "1"}},
        {"properties": {"__other": "1"}},
        {"properties": {"POP_CK": "1"}},
        {"properties": {"KEYS": "\t0{0:04d}"}},
        {"properties": {"KEYS": "   "}},
        {"properties": {"UNIQ_KEY": "7F-000010001AAB{0:016X}"}},
        {"properties": {"UNIQ_KEY": "ä"}},
        {"properties": {"UNIQ_KEY": "A" * 257}},
        {"properties": {"UNIQ_KEY": "A" * 256}},
        {"properties": {"UNIQ_KEY": "A" * 1100}},
        {"properties": "UNIQ_KEY\x01A1\x02TAGS\x01a"},
        {"properties": "UNIQ_KEY\x01A1\x02TAGS\x01a\x02TAGS\x01b\x02UNIQ_KEY\x01A2\x02"},
        {"properties": "UNIQ_KEY\x01A1\x02x\x01y\x01z\x02"},
        {"properties": "UNIQ_KEY\x01A1\x02\x02"},
        {"properties": "UNIQ_KEY\x01A1\x02x\x01\x02"},
        {"properties": "UNIQ_KEY\x01A1\x02x\x01" + "y" * 32_600 + "\x02"},
        {"properties": "UNIQ_KEY\x01A1\x02x\x01" + "y" * 32_740 + "\x02"},
        {"properties": "UNIQ_KEY\x01A1\x02x\x01" + "ä" * 17_000 + "\x02"},
        {"swap": (b'"flag":0', b'"flag":4')},
        {"swap": (b'"extFields"', b'"extfields"')},
        {"swap": (b'"m":"false"', b'"m":"true"')},
        {"swap": (b'"m":"false"', b'"m":"x"')},
        {"swap": (b'"e":"', b'"E":"')},
        {"swap": (b'"e":"', b'"e":"3","e":"')},
        {"swap": (b'"e":"', rb'"\u0065":"3","e":"')},
        {"swap": (b'"g":"17', b'"g":"+17')},
        {"swap": (b'"g":"17', b'"g":" 17')},
        {"swap": (b'"b":"Orders"', b'"b":"Ord\\u0065rs"')},
        {"swap": (b'"b":"Orders"', b'"b":"Orders","bname":"broker-a"')},
        {"swap": (b'"b":"Orders"', b'"b":"Or{}ders"')},
        {"swap": (b'"version":479', b'"version":479,"remark":null')},
        {"swap": (b'"version":479', b'"version":479,"remark":"r"')},
        {"swap": (b'"version":479', b'"version":479,"code":12')},
        {"swap": (b'"version":479', b'"version": 479 ')},
        {"swap": (b'"language":"JAVA"', b'"language":7')},
        {"swap": (b'"language":"JAVA",', b"")},
        {"default_topic_queue_nums": "x"},
        {"producer_group": "Q"},
        {"reconsume_times": 1 << 33},
        {"unit_mode": "False"},
        {"unit_mode": "1"},
        {"body": b"BODY000000"},
        {"body": b""},
        {"body": b"b" * 70_000},
        {"topic": OTHER},
        {"topic": "SCHEDULE_TOPIC_XXXX"},
        {"topic": "%RETRY%g"},
    ],
    ids=lambda change: str(change)[:60],
)
async def test_one_that_is_different_is_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str, change: dict[str, Any]
) -> None:
    """Among many usual sends or alone, whatever the difference is."""
    change = dict(change)
    oneway = change.pop("oneway", False)
    async with sides(tmp_path, monkeypatch, flushDiskType=flush, autoCreateTopicEnable="false") as both:
        numbers = list(range(1001, 1001 + MANY))
        odd = numbers[MANY // 2]
        frames = [changed(number, change) if number == odd else send_frame(number) for number in numbers]
        await same(both, frames, [number for number in numbers if not (oneway and number == odd)])
        frames = [send_frame(1501), changed(1502, change), send_frame(1503)]
        await same(both, frames, [1501, 1503] if oneway else [1501, 1502, 1503], alone=True)
        assert both.single >= (1 if oneway else 2)
        # and the brokers continue to serve
        numbers = list(range(2001, 2001 + 2 * MANY))
        await same(both, [send_frame(number) for number in numbers], numbers)
        assert both.served >= MANY


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_a_log_file_that_is_full_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str) -> None:
    config = {"flushDiskType": flush, "mappedFileSizeCommitLog": 1 << 16, "commitLogReserveStep": 1 << 16}
    async with sides(tmp_path, monkeypatch, **config) as both:
        for turn in range(24):
            numbers = list(range(1001 + turn * MANY, 1001 + (turn + 1) * MANY))
            for side in both.both:
                replies = await side.burst([send_frame(number, body=bytes(300)) for number in numbers], numbers)
                assert {reply.code for reply in replies.values()} == {0}
        found = [await stored(side) for side in both.both]
        assert found[0].pop("end") >= 3 << 16
        found[1].pop("end")
        assert found[0]["messages"] == found[1]["messages"]
        assert both.served >= LEAST


NAMES = st.sampled_from(
    [
        "UNIQ_KEY",
        "KEYS",
        "TAGS",
        "WAIT",
        "colour",
        "DELAY",
        "__SHARDINGKEY",
        "__x",
        "INNER_Y",
        "ä",
        "PGROUP",
        "TRAN_MSG",
    ]
)
TEXTS = st.one_of(
    st.sampled_from(["true", "A1", "A2", "a b", " ", "a\x01b", "", "T#", "0"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\x02"), max_size=8),
)
PROPERTIES = st.lists(st.tuples(NAMES, TEXTS), max_size=5).map(
    lambda pairs: "".join(f"{name}\x01{value}\x02" for name, value in pairs)
)
SENDS = st.tuples(
    st.one_of(
        st.just("UNIQ_KEY\x01A1\x02"),
        PROPERTIES.map(lambda text: f"UNIQ_KEY\x01A7\x02{text}"),
        PROPERTIES,
        st.integers(0, 100).map(lambda count: f"UNIQ_KEY\x01A8\x02KEYS\x01{' '.join(map(hex, range(count)))}\x02"),
    ),
    st.sampled_from([0, 0, 1, 2, 3, 4, -1]),
    st.sampled_from([b"0123456789", b"a", b"", b"long" * 999]),
    st.sampled_from([0, 0, 0, 1, 0x100, 8]),
    st.sampled_from([TOPIC, TOPIC, OTHER, TRACE_TOPIC]),
    st.booleans(),
    st.sampled_from([310, 310, 310, 10]),
    st.booleans(),
)


def run_with_sides(work: Callable[[Sides], Any], **config: Any) -> None:
    async def run(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        async with sides(path, monkeypatch, **config) as both:
            await work(both)

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        trio.run(run, monkeypatch, Path(name))


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(messages=st.lists(SENDS, min_size=4, max_size=3 * LEAST), alone=st.booleans())
def test_twins_of_sends(flush: str, messages: list[Any], alone: bool) -> None:
    """Whatever their contents, and whatever sends are beside them."""

    async def work(both: Sides) -> None:
        numbers = list(range(1001, 1001 + len(messages)))
        frames = [
            send_frame(
                number,
                text,
                queue_id=queue_id,
                body=body,
                sys_flag=sys_flag,
                topic=topic,
                binary=binary,
                v1=code == 10,
                ascii_only=ascii_only,
            )
            for number, (text, queue_id, body, sys_flag, topic, binary, code, ascii_only) in zip(
                numbers, messages, strict=True
            )
        ]
        replies = [await (side.one_by_one if alone else side.burst)(frames, numbers) for side in both.both]
        for number, (text, queue_id, *_) in zip(numbers, messages, strict=True):
            one, other = (of_reply(found[number]) for found in replies)
            if queue_id < 0 or "UNIQ_KEY" not in decode_properties(
                text
            ):  # a random queue, or a key that the broker makes
                assert one[0] == other[0]
            else:
                assert one[:2] == other[:2]
                assert one[3].get("transactionId") == other[3].get("transactionId")
        by_chance = any(queue_id < 0 for _, queue_id, *_ in messages)
        found = [await stored_texts(side) for side in both.both]
        if by_chance:  # some go to different queues
            found = [sorted((topic, body, text) for topic, _, body, text in one) for one in found]  # type: ignore[misc]
        assert found[0] == found[1]

    run_with_sides(work, flushDiskType=flush)


async def stored_texts(side: Side) -> list[tuple[str, int, bytes, str]]:
    """Topic, queue, body and properties of all messages, without the keys that the broker made."""
    await until_dispatched(side.broker.context.store)
    found = []
    for topic, queues in QUEUES_OF.items():
        for queue_id in range(queues):
            offset = 0
            while (
                reply := await side.client.pull(topic, offset, queueId=queue_id, suspendTimeoutMillis=0, sysFlag=4)
            ).code == 0:
                for message in await side.client.pull_messages(topic, offset, queueId=queue_id):
                    texts = {name: value for name, value in message.properties.items() if len(value) != 32}
                    found.append((topic, queue_id, bytes(message.body), repr(texts)))
                offset = int(reply.ext_fields()["nextBeginOffset"])
    return found


BATCHED = st.tuples(
    st.one_of(
        PROPERTIES, PROPERTIES.map(lambda text: text[:-1]), st.just(""), st.just("KEYS\x01a b\x02TAGS\x01\x03\x02")
    ),
    st.sampled_from([b"0123456789", b"a", b"long" * 999, b""]),
    st.integers(0, 3),
)


def batch_frame(number: int, body: bytes, shared: str, **changes: Any) -> Frame:
    return send_frame(number, shared, body=body, code=320, batch="true", **changes)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    messages=st.lists(BATCHED, max_size=12),
    shared=st.sampled_from(["", "UNIQ_KEY\x01A1\x02", "UNIQ_KEY\x01A1", "WAIT\x01false\x02", "UNIQ_KEY\x01ä\x02"]),
    cut=st.sampled_from([0, 0, 0, 1, 5]),
)
@example(messages=[("TAGS\x01a\x02UNIQ_KEY\x01U\x02", b"b", 1)] * 3, shared="UNIQ_KEY\x01A1\x02", cut=0)
def test_twins_of_batches(flush: str, messages: list[tuple[str, bytes, int]], shared: str, cut: int) -> None:
    body = encode_batch([(flag, data, text.encode()) for text, data, flag in messages])
    body = body[: len(body) - cut]

    async def work(both: Sides) -> None:
        frames = [batch_frame(number, body, shared, queue_id=number % QUEUES) for number in (1, 2, 6)]
        await same_batches(both, frames, [1, 2, 6])

    run_with_sides(work, flushDiskType=flush)


async def same_batches(both: Sides, frames: list[Frame], expected: list[int]) -> None:
    replies = [await side.burst(frames, expected) for side in both.both]
    for number in expected:
        one, other = (found[number] for found in replies)
        assert (one.code, one.remark) == (other.code, other.remark)
        fields = [reply.ext_fields() for reply in (one, other)]
        for own in fields:  # the address is part of an id, and each broker has its own port
            own["msgId"] = ",".join(part[16:] for part in own.get("msgId", "").split(","))
        assert fields[0] == fields[1]
    found = []
    for side in both.both:
        store = side.broker.context.store
        assert store.index is not None
        await until_dispatched(store)
        await store.index.flush_pending()
        index = [(entry.phy, entry.key_hash) for file in store.index.files for entry in file.entries()]
        units = [await store.queue_units(TOPIC, queue_id, 0, 1000) for queue_id in range(QUEUES)]
        nums, sizes = side.broker.context.stats.topic_counters(TOPIC)
        counted = (nums.value, nums.times, sizes.value, sizes.times, store.stats.put_message_times_total)
        found.append((store.max_phy_offset, index, units, counted, await stored_texts(side)))
    assert found[0] == found[1]


async def test_an_ordinary_batch_takes_the_extension_s_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"KEYS\x01k{at}\x02UNIQ_KEY\x01A{at}\x02TAGS\x01t{at % 2}\x02".encode() for at in range(32)]
    body = encode_batch([(at, b"b" * (at * 100 + 1), text) for at, text in enumerate(texts)])
    async with sides(tmp_path, monkeypatch) as both:
        await same_batches(both, [batch_frame(number, body, "UNIQ_KEY\x01B\x02") for number in (1, 2)], [1, 2])
        assert both.batches == 2


async def test_a_batch_that_is_too_large_gets_the_full_path_s_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = encode_batch([(0, b"b" * 3000, b"UNIQ_KEY\x01A\x02")] * 4)
    async with sides(tmp_path, monkeypatch, maxMessageSize=10_000) as both:
        await same_batches(both, [batch_frame(1, body, "")], [1])
        assert not both.batches


async def test_the_topic_s_end_and_another_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sides(tmp_path, monkeypatch) as both:
        numbers = list(range(1001, 1001 + MANY))
        await same(both, [send_frame(number) for number in numbers], numbers)
        for side in both.both:
            reply = await side.client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"regionId=Elsewhere")
            assert reply.code == 0
        only_python(next(iter(both[1].broker.reactor.connections.values())).table)
        replies = await same(both, [send_frame(number) for number in numbers], numbers)
        assert {reply.ext_fields()["MSG_REGION"] for reply in replies.values()} == {"Elsewhere"}
        assert both.served == 2 * MANY
        for side in both.both:
            assert (await side.client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": TOPIC})).code == 0
        for side in both.both:  # the first send creates it again
            replies = await side.burst([send_frame(number) for number in numbers], numbers)
            assert {reply.code for reply in replies.values()} == {0}
        numbers = list(range(5001, 5001 + MANY))
        before = both.served
        await both[0].burst([send_frame(number) for number in numbers], numbers)
        assert both.served == before + MANY
        queues = [both[0].broker.context.store.queues.find(TOPIC, queue_id) for queue_id in range(QUEUES)]
        assert sum(queue.next_offset for queue in queues if queue is not None) == 2 * MANY  # none in the deleted queues


async def test_a_topic_that_changes_between_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target of messages is known from earlier rounds as long as no topic has changed."""
    async with sides(tmp_path, monkeypatch) as both:
        numbers = list(range(1001, 1001 + MANY))
        frames = [send_frame(number) for number in numbers]
        await same(both, frames, numbers)
        for side in both.both:
            await make_topic(side, TOPIC, 2)
        replies = await same(both, frames, numbers)
        assert {number % QUEUES for number, reply in replies.items() if reply.code} == {2, 3}
        for side in both.both:
            await make_topic(side, TOPIC, 3)
        replies = await same(both, frames, numbers)
        assert {number % QUEUES for number, reply in replies.items() if reply.code} == {3}
        before = both.served
        for side in both.both:  # the topic is created again while its deletion is under way
            side.broker.context.store.commit_log.forget_topic(TOPIC)
        good = [number for number in numbers if number % QUEUES != 3]
        replies = await same(both, [send_frame(number) for number in good], good)
        assert {reply.code for reply in replies.values()} == {0}
        assert both.served == before + len(good)
        for side in both.both:
            assert side.broker.context.topics.delete(TOPIC)
        replies = await same(both, [send_frame(number, default_topic="None") for number in numbers], numbers)
        assert all(reply.code for reply in replies.values())


async def test_fewer_write_queues_are_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sides(tmp_path, monkeypatch) as both:
        numbers = list(range(1001, 1001 + MANY))
        for side in both.both:
            await make_topic(side, TOPIC, 2)
        replies = await same(both, [send_frame(number) for number in numbers], numbers)
        codes = {number % QUEUES: reply.code for number, reply in replies.items()}
        assert codes[0] == codes[1] == 0
        assert codes[2] == codes[3] != 0


@asynccontextmanager
async def pulls_held(side: Side, subscription: str = "*") -> AsyncIterator[list[RemotingCommand]]:
    """A consumer waits for the next message of each queue of TOPIC; yields the replies it has got by the end."""
    found: list[RemotingCommand] = []
    async with WireClient.connect(side.broker.endpoint) as waiting:
        await waiting.heartbeat("c", consumers=[consumer("G", TOPIC)])
        asked = [
            await waiting.post(
                RequestCode.PULL_MESSAGE,
                pull_ext(TOPIC, int(queue_id == 1), queueId=queue_id, sysFlag=6, subscription=subscription),
            )
            for queue_id in range(QUEUES)
        ]
        while side.broker.reactor.stats.held < QUEUES:  # noqa: ASYNC110 - a counter has no event
            await trio.sleep(0.001)
        yield found
        with trio.fail_after(10):  # after 15 s they look again without being woken
            found += [await waiting.reply(opaque) for opaque in asked]


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("subscription", ["*", "TagA"])
async def test_long_polls_hear_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str, subscription: str
) -> None:
    async with sides(tmp_path, monkeypatch, flushDiskType=flush) as both:
        numbers = list(range(1001, 1001 + MANY))
        async with pulls_held(both[0], subscription) as found:
            await both[0].burst([send_frame(number) for number in numbers], numbers)
        assert [reply.code for reply in found] == [0] * QUEUES
        assert both.served >= LEAST


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_long_polls_hear_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str) -> None:
    async with sides(tmp_path, monkeypatch, flushDiskType=flush) as both:
        body = encode_batch([(0, b"b", b"UNIQ_KEY\x01A\x02TAGS\x01TagA\x02")] * 4)
        async with pulls_held(both[0], "TagA") as found:
            for queue_id in range(QUEUES):
                opaque = 100 + queue_id
                await both[0].burst([batch_frame(opaque, body, "", queue_id=queue_id)], [opaque])
        assert [reply.code for reply in found] == [0] * QUEUES
        assert both.batches == QUEUES


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_each_client_gets_its_own_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str) -> None:
    """Many clients in one round, with equal request numbers; each record has the address of its own client."""
    async with sides(tmp_path, monkeypatch, flushDiskType=flush) as both, AsyncExitStack() as stack:
        side = both[0]
        clients = [await stack.enter_async_context(WireClient.connect(side.broker.endpoint)) for _ in range(4)]
        of_each = LEAST // 2
        queue_of = {(at, opaque): (at + opaque) % QUEUES for at in range(len(clients)) for opaque in range(of_each)}
        for turn in range(3):
            await side.burst(
                [send_frame(number) for number in range(MANY)], range(MANY)
            )  # from here on rounds have many sends
            before = both.served
            for at, client in enumerate(
                clients
            ):  # without a checkpoint: the broker, which runs in this thread, sees all of them together
                frames = [
                    send_frame(
                        opaque,
                        {"UNIQ_KEY": f"{turn}x{at}x{opaque}", "TAGS": "own"},
                        queue_id=queue_of[at, opaque],
                        binary=at % 2 == 0,
                    )
                    for opaque in range(of_each)
                ]
                raw = b"".join(frames)
                assert os.write(client.plain.socket.fileno(), raw) == len(raw)
            for at, client in enumerate(clients):
                for opaque in range(of_each):
                    reply = await client.reply(opaque)
                    fields = reply.ext_fields()
                    assert (reply.code, fields["transactionId"]) == (0, f"{turn}x{at}x{opaque}")
                    assert fields["queueId"] == str(queue_of[at, opaque])
            assert both.served == before + of_each * len(clients)
        addresses = [client.plain.socket.getsockname()[:2] for client in clients]
        found = {}
        for queue_id in range(QUEUES):
            for message in await side.client.pull_messages(TOPIC, 0, queueId=queue_id, maxMsgNums=200):
                if message.properties.get("TAGS") == "own":
                    found[message.properties["UNIQ_KEY"]] = (queue_id, message.born_host)
        assert found == {
            f"{turn}x{at}x{opaque}": (queue_id, addresses[at])
            for (at, opaque), queue_id in queue_of.items()
            for turn in range(3)
        }


@pytest.mark.parametrize("outcome", ["failed", "late"])
async def test_a_device_that_fails_or_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    """Under SYNC_FLUSH each send gets the reply it would have got alone."""
    timeout = {"syncFlushTimeout": 50} if outcome == "late" else {}
    async with sides(tmp_path, monkeypatch, flushDiskType="SYNC_FLUSH", **timeout) as both:
        numbers = list(range(1001, 1001 + MANY))
        found = []
        for side in both.both:
            sync = side.broker.context.store.write_path.sync
            stuck = trio.Event()

            async def flush(event: trio.Event = stuck) -> bool:
                if outcome == "late":
                    await event.wait()
                return False

            monkeypatch.setattr(sync, "flush_inline", lambda: None)
            monkeypatch.setattr(sync, "advance", flush)
            monkeypatch.setattr(sync, "flush", flush)
            monkeypatch.setattr(sync, "failed", "the device is gone")
            replies = await side.burst([send_frame(number, binary=number % 2 == 0) for number in numbers], numbers)
            found.append({number: (of_reply(reply), reply.encoding) for number, reply in replies.items()})
            stuck.set()
        assert found[0] == found[1]
        expected = ResponseCode.SERVICE_NOT_AVAILABLE if outcome == "failed" else ResponseCode.FLUSH_DISK_TIMEOUT
        assert {code for (code, *_), _ in found[0].values()} == {expected}
        assert both.served >= LEAST


@pytest.mark.parametrize("limit", ["maxRequestsInFlight", "maxRequestsInFlightPerConnection"])
async def test_no_more_wait_for_the_disk_than_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Under SYNC_FLUSH all sends of a round are in flight at its end: those over the limit are refused, not stored."""
    most = LEAST + 2
    async with sides(tmp_path, monkeypatch, flushDiskType="SYNC_FLUSH", **{limit: most}) as both:
        numbers = list(range(1001, 1001 + MANY))
        found = []
        for side in both.both:
            sync = side.broker.context.store.write_path.sync
            stuck, flush_inline, advance = trio.Event(), sync.flush_inline, sync.advance

            async def flush(event: trio.Event = stuck, then: Any = advance) -> Any:
                await event.wait()
                return await then()

            monkeypatch.setattr(sync, "flush_inline", lambda: None)
            monkeypatch.setattr(sync, "advance", flush)
            monkeypatch.setattr(sync, "flush", flush)
            before = side.broker.context.store.stats.put_message_times_total
            await side.client.stream.send_all(b"".join(map(send_frame, numbers)))
            refused = {number: await side.client.reply(number) for number in numbers[most:]}
            assert side.broker.reactor.stats.inflight == most
            stuck.set()
            monkeypatch.setattr(sync, "flush_inline", flush_inline)
            stored_ones = {number: await side.client.reply(number) for number in numbers[:most]}
            assert side.broker.context.store.stats.put_message_times_total == before + most
            found.append({number: of_reply(reply) for number, reply in (stored_ones | refused).items()})
        assert found[0] == found[1]
        codes = [code for code, *_ in (found[0][number] for number in numbers)]
        assert codes == [0] * most + [ResponseCode.SYSTEM_BUSY] * (MANY - most)
        assert both.served == most


# -- an extension that fails


class Failing:
    """The extension, except that one of its calls raises NativeFault."""

    def __init__(self, call: str) -> None:
        assert NATIVE.extension is not None
        self.VERSION = NATIVE.extension.VERSION
        self.NativeFault = NATIVE.extension.NativeFault
        self._call = call

    def Reader(self, **rules: Any) -> Any:  # noqa: N802 - a class there
        assert NATIVE.extension is not None
        return Wrapped(NATIVE.extension.Reader(**rules), self._call, self.NativeFault)


class Wrapped:
    """Forwards calls and wraps their results too."""

    def __init__(self, inner: Any, call: str, fault: type[Exception]) -> None:
        self._inner, self._call, self._fault = inner, call, fault

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def called(*arguments: Any) -> Any:
            result = found(*arguments)
            if name == self._call:
                raise self._fault("asked for")
            return Wrapped(result, self._call, self._fault) if type(result).__name__ == "Messages" else result

        return called


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize(
    "call", ["read", "queues", "parts", "write", "units", "keys", "physical_offsets", "replies", "leave_out"]
)
async def test_a_fault_of_the_extension_costs_its_speed_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str, call: str
) -> None:
    """No message is stored twice or lost, and the log is the same as without the fault."""
    native = NativeExtension(cast("Extension", Failing(call)))
    async with sides(tmp_path, monkeypatch, flushDiskType=flush) as both:
        processor = find_processor(both[0].broker)
        processor._native._native = native
        processor._register()
        numbers = list(range(1001, 1001 + MANY))
        # a refused message is left out, and consumers wait: the extension gets no more calls than usual
        frames = [send_frame(number, queue_id=9 if number == 1005 else number % QUEUES) for number in numbers]
        async with pulls_held(both[0]) as one, pulls_held(both[1]) as other:
            replies = await same(both, frames, numbers)
        assert [reply.code for reply in one] == [reply.code for reply in other] == [0] * QUEUES
        assert {number for number, reply in replies.items() if reply.code} == {1005}
        assert not native.is_on
        assert native.reason == "a fault: asked for"
        assert both.served == 0
        numbers = list(range(2001, 2001 + MANY))
        await same(both, [send_frame(number) for number in numbers], numbers)
        assert both.served == 0


async def test_a_fault_of_the_extension_where_the_device_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no longer known which requests wait for the disk; still no client waits forever."""
    native = NativeExtension(cast("Extension", Failing("requests")))
    async with sides(tmp_path, monkeypatch, flushDiskType="SYNC_FLUSH") as both:
        side = both[0]
        processor = find_processor(side.broker)
        processor._native._native = native
        processor._register()
        sync = side.broker.context.store.write_path.sync

        async def flush() -> bool:
            return False

        monkeypatch.setattr(sync, "flush_inline", lambda: None)
        monkeypatch.setattr(sync, "advance", flush)
        monkeypatch.setattr(sync, "flush", flush)
        monkeypatch.setattr(sync, "failed", "the device is gone")
        async with await trio.open_tcp_stream(*side.broker.endpoint) as stream:
            await stream.send_all(b"".join(map(send_frame, range(1001, 1001 + MANY))))
            with trio.fail_after(50):
                assert await stream.receive_some(1) == b""
        assert not native.is_on
        assert side.broker.reactor.stats.inflight == 0


async def test_a_fault_that_others_have_met_ends_the_extension_s_paths_of_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fault in the index or a pull, Python serves the next sends although no route has been rebuilt."""
    native = NativeExtension(NATIVE.extension)
    body = encode_batch([(0, b"b", b"UNIQ_KEY\x01A\x02")] * 4)
    async with sides(tmp_path, monkeypatch) as both:
        processor = find_processor(both[0].broker)
        processor._native._native = native
        processor._register()
        numbers = list(range(1001, 1001 + MANY))
        frames = [send_frame(number) for number in numbers]
        await same(both, frames, numbers)
        await same(both, frames[:1], numbers[:1])
        await same_batches(both, [batch_frame(1, body, "")], [1])
        before = both.served, both.single, both.batches
        assert all(before)
        native.turn_off("a test")
        await same(both, frames, numbers)
        await same(both, frames[:1], numbers[:1])
        await same_batches(both, [batch_frame(1, body, "")], [1])
        assert (both.served, both.single, both.batches) == before
        assert NATIVE.extension is not None
        processor._native.failed(NATIVE.extension.NativeFault("of a call that was under way"))  # does not raise


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_a_fault_of_the_extension_where_a_send_comes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str
) -> None:
    native = NativeExtension(cast("Extension", Failing("send")))
    async with sides(tmp_path, monkeypatch, flushDiskType=flush) as both:
        processor = find_processor(both[0].broker)
        processor._native._native = native
        processor._register()
        numbers = [1001, 1002, 1003]
        replies = await same(both, [send_frame(number) for number in numbers], numbers, alone=True)
        assert {reply.code for reply in replies.values()} == {0}
        assert native.reason == "a fault: asked for"
        assert both.single == 0


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("call", ["batch", "write", "units", "keys", "physical_offsets"])
async def test_a_fault_in_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str, call: str) -> None:
    native = NativeExtension(cast("Extension", Failing(call)))
    body = encode_batch([(0, b"b", b"UNIQ_KEY\x01A\x02")] * 4)
    async with sides(tmp_path, monkeypatch, flushDiskType=flush) as both:
        processor = find_processor(both[0].broker)
        processor._native._native = native
        processor._register()
        await same_batches(both, [batch_frame(number, body, "") for number in (1, 2)], [1, 2])
        assert not native.is_on


def find_processor(broker: BrokerController) -> Any:
    """The send processor."""
    (connection,) = broker.reactor.connections.values()
    handler: Any = connection.table.routes[RequestCode.SEND_MESSAGE_V2].full
    return handler.__self__
