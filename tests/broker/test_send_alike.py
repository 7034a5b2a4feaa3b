"""Sends served together: the same records, replies, queues, keys and counts as where each is served by itself."""

import json
import re
import struct
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.broker.wire_client import WireClient, consumer, pull_ext, send_ext
from trimq.broker.controller import BrokerController
from trimq.broker.processors.send.send_alike import AlikeSends
from trimq.broker.processors.send.send_layout import NotAlikeError, SendLayout
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.send import SendMessageRequestHeaderV2
from trimq.protocol.message import StoredMessage
from trimq.protocol.typed_request import decoder
from trimq.remoting.server.handler_table import json_front
from trimq.remoting.server.handlers import Served, Span
from trimq.remoting.server.held_frames import FEW, LEAST

TOPIC = "Orders"
QUEUES = 4
MANY = LEAST + 8
USUAL = {
    "KEYS": "k{0:06d}",
    "UNIQ_KEY": "7F0000010001AABB{0:016X}",
    "TAGS": "TagA",
    "WAIT": "true",
    "colour": "b{0:04d}",
}
Frame = bytes


def send_frame(
    number: int,
    properties: dict[str, str] | None = None,
    *,
    v1: bool = False,
    body: bytes | None = None,
    opaque: int | None = None,
    flag: int = 0,
    **changes: Any,
) -> Frame:
    """A send as Java's client writes it; ``{0}`` in a property's value stands for the number."""
    texts = {name: value.format(number) for name, value in (USUAL if properties is None else properties).items()}
    fields = {"queue_id": number % QUEUES, "born_timestamp": 1_700_000_000_000 + number} | changes
    ext = {name: str(value) for name, value in send_ext(TOPIC, texts, v1=v1, **fields).items()}
    header = {"code": 10 if v1 else 310, "extFields": ext, "flag": flag, "language": "JAVA"}
    header |= {"opaque": number if opaque is None else opaque, "serializeTypeCurrentRPC": "JSON", "version": 479}
    raw = json.dumps(header, separators=(",", ":")).encode()
    data = b"body%6d" % number if body is None else body
    return struct.pack(">II", 4 + len(raw) + len(data), len(raw)) + raw + data


class Side:
    """A broker, a client of it, and how many sends it has served together."""

    def __init__(self, broker: BrokerController, client: WireClient, served: dict[int, int]) -> None:
        self.broker = broker
        self.client = client
        self._served = served
        (connection,) = broker.reactor.connections.values()
        self._alike = id(connection.table.grouped.get(json_front(RequestCode.SEND_MESSAGE_V2)))

    @property
    def together(self) -> int:
        return self._served.get(self._alike, 0)

    async def burst(self, frames: Iterable[Frame], expected: Iterable[int]) -> dict[int, RemotingCommand]:
        """Send all of it in one write; the replies by request number."""
        await self.client.stream.send_all(b"".join(frames))
        return {opaque: await self.client.reply(opaque) for opaque in expected}

    async def learn(self, frame: Frame) -> None:
        """So many of them that the next ones are known. Their opaque stays that of the frame."""
        (opaque,) = re.findall(rb'"opaque":(\d+)', frame)
        for _ in range(2):
            await self.client.stream.send_all(frame * FEW)
            await self.client.reply(int(opaque))
        await self.client.ask(RequestCode.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": 0})


@asynccontextmanager
async def sides(path: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> AsyncIterator[tuple[Side, Side]]:
    """Two brokers, of which the second serves each send by itself."""
    served: dict[int, int] = {}
    original = AlikeSends.serve

    def counted(self: AlikeSends, frames: memoryview, spans: Sequence[Span]) -> Served | None:
        result = original(self, frames, spans)
        if result is not None:
            served[id(self)] = served.get(id(self), 0) + sum(span.frames for span in spans)
        return result

    monkeypatch.setattr(AlikeSends, "serve", counted)
    async with (
        running_broker(path / "together", **config) as one,
        running_broker(path / "alone", **config) as other,
        WireClient.connect(one.endpoint) as first,
        WireClient.connect(other.endpoint) as second,
    ):
        both = Side(one, first, served), Side(other, second, served)
        for side in both:
            ext = {"topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": QUEUES, "writeQueueNums": QUEUES}
            ext |= {"perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}
            assert (await side.client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)).code == 0
        for connection in other.reactor.connections.values():
            for code, route in list(connection.table.routes.items()):
                connection.table.route(code, replace(route, grouped=None))
        yield both


def of_reply(reply: RemotingCommand) -> Any:
    fields = reply.ext_fields()
    offset = fields.pop("msgId", "")[16:]
    return reply.code, reply.remark, offset, fields


def of_message(message: StoredMessage) -> dict[str, Any]:
    own = {"store_timestamp", "offset_message_id", "store_host", "born_host"}
    return {name: getattr(message, name) for name in message.__struct_fields__ if name not in own}


async def stored(side: Side) -> dict[str, Any]:
    """All that sends leave behind."""
    store = side.broker.parts.store
    assert store.index is not None
    await store.index.flush_pending()
    found: dict[str, Any] = {"end": store.max_phy_offset, "dispatched": store.dispatched_offset}
    found["index"] = [(entry.phy, entry.key_hash) for file in store.index.files for entry in file.entries()]
    messages: list[StoredMessage] = []
    for queue_id in range(QUEUES):
        offset = 0
        while (
            reply := await side.client.pull(TOPIC, offset, queueId=queue_id, suspendTimeoutMillis=0, sysFlag=4)
        ).code == 0:
            more = await side.client.pull_messages(TOPIC, offset, queueId=queue_id)
            messages += more
            offset = int(reply.ext_fields()["nextBeginOffset"])
        found[f"units {queue_id}"] = await store.queue_units(TOPIC, queue_id, 0, 10_000)
    found["messages"] = [of_message(message) for message in messages]
    for message in messages:
        for key in [message.properties["UNIQ_KEY"], *message.properties.get("KEYS", "").split()]:
            result = await store.query_message_cold(TOPIC, key, 64, 0, 1 << 62)
            found[f"key {key}"] = result.count
            result.release()
    stats = side.broker.parts.stats
    nums, sizes = stats.topic_counters(TOPIC)
    found["counted"] = (stats.put_total, nums.value, nums.times, sizes.value, sizes.times)
    found["store"] = (store.stats.put_message_times_total, store.stats.put_message_size_total)
    return found


async def same(both: tuple[Side, Side], frames: list[Frame], expected: list[int]) -> dict[int, RemotingCommand]:
    """Send the same to both: they answer and store the same."""
    replies = [await side.burst(frames, expected) for side in both]
    assert {at: of_reply(reply) for at, reply in replies[0].items()} == {
        at: of_reply(reply) for at, reply in replies[1].items()
    }
    assert await stored(both[0]) == await stored(both[1])
    return replies[0]


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("v1", [False, True], ids=["v2", "v1"])
@pytest.mark.parametrize(
    "properties",
    [
        USUAL,
        {"UNIQ_KEY": "7F00{0:08X}"},
        {"UNIQ_KEY": "{0:08d}", "KEYS": "a{0:04d} b{0:03d}  c-{0:02d}", "TAGS": "ä".encode().hex()},
        {"TAGS": "TagA", "one.two": "{0:03d} [x]", "UNIQ_KEY": "{0:08d}", "KEYS": "{0:04d}"},
    ],
    ids=["all", "least", "several keys", "other order"],
)
async def test_together_is_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str, v1: bool, properties: dict[str, str]
) -> None:
    async with sides(tmp_path, monkeypatch, flushDiskType=flush) as both:
        for side in both:
            await side.learn(send_frame(1000, properties, v1=v1, flag=0, reconsume_times=3))
        numbers = list(range(1001, 1001 + MANY))
        frames = [send_frame(number, properties, v1=v1, reconsume_times=3) for number in numbers]
        replies = await same(both, frames, numbers)
        assert {reply.code for reply in replies.values()} == {0}
        assert both[0].together >= LEAST
        assert not both[1].together


def changed(number: int, change: dict[str, Any]) -> Frame:
    more = dict(change)
    texts = USUAL | more.pop("properties", {})
    old, new = more.pop("swap", (b"", b""))
    frame = send_frame(number, texts, **more)
    assert old in frame
    assert len(old) == len(new)
    return frame.replace(old, new, 1)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize(
    "change",
    [
        {"sys_flag": 4},
        {"sys_flag": 1},
        {"flag": 2, "oneway": True},
        {"queue_id": 9},
        {"born_timestamp": 1_600_000_000_000},
        {"properties": {"TAGS": "TagB"}},
        {"properties": {"WAIT": "fals"}},
        {"properties": {"KEYS": "k 0{0:04d}"}},
        {"properties": {"KEYS": "\t0{0:04d}"}},
        {"properties": {"KEYS": "ä1"}},
        {"swap": (b"k00", "kä".encode())},
        {"properties": {"UNIQ_KEY": "7F-000010001AAB{0:016X}"}},
        {"swap": (b"7F0000010001AABB", "7F0000010001AAä".encode())},
        {"properties": {"colour": "x" * 5}},
        {"properties": {"colour": '"abc'}},
        {"properties": {"colour": "a bcd"}},
        {"properties": {"PGROUP": "x", "colour": "b"}},
        {"swap": (b"TAGS", b"tags")},
        {"swap": (b"WAIT", b"KEYS")},
        {"swap": (b'"flag":0', b'"flag":4')},
        {"swap": (b'"extFields"', b'"extfields"')},
        {"swap": (b'"m":"false"', b'"m":"true" ')},
        {"swap": (b'"e":"', b'"E":"')},
        {"default_topic_queue_nums": 5},
        {"producer_group": "Q"},
        {"reconsume_times": 1},
        {"batch": "False"},
        {"unit_mode": "False"},
        {"body": b"BODY000000"},
        {"body": b""},
    ],
    ids=str,
)
async def test_one_that_is_different_is_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str, change: dict[str, Any]
) -> None:
    """Among many that are alike: whatever it differs in, and whether or not its frame has the length of the others."""
    change = dict(change)
    oneway = change.pop("oneway", False)
    async with sides(tmp_path, monkeypatch, flushDiskType=flush) as both:
        for side in both:
            await side.learn(send_frame(1000))
        numbers = list(range(1001, 1001 + MANY))
        odd = numbers[MANY // 2]
        frames = [changed(number, change) if number == odd else send_frame(number) for number in numbers]
        await same(both, frames, [number for number in numbers if not (oneway and number == odd)])
        # and all goes on
        numbers = list(range(2001, 2001 + 2 * MANY))
        await same(both, [send_frame(number) for number in numbers], numbers)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_a_log_file_that_is_full_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str) -> None:
    config = {"flushDiskType": flush, "mappedFileSizeCommitLog": 1 << 16, "commitLogReserveStep": 1 << 16}
    async with sides(tmp_path, monkeypatch, **config) as both:
        for side in both:
            await side.learn(send_frame(1000, body=bytes(300)))
        for turn in range(12):
            numbers = list(range(1001 + turn * MANY, 1001 + (turn + 1) * MANY))
            for side in both:
                replies = await side.burst([send_frame(number, body=bytes(300)) for number in numbers], numbers)
                assert {reply.code for reply in replies.values()} == {0}
        found = [await stored(side) for side in both]
        assert found[0].pop("end") >= 3 << 16
        found[1].pop("end")
        assert found[0]["messages"] == found[1]["messages"]
        assert both[0].together >= LEAST


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9999), st.integers(0, QUEUES - 1), st.sampled_from([b"0123456789", b"abcdefghij"])),
        min_size=LEAST,
        max_size=3 * LEAST,
    )
)
def test_whatever_stands_in_the_places(messages: list[tuple[int, int, bytes]]) -> None:
    """Keys, queues and bodies of all kinds, repeated ones too."""

    async def run(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        async with sides(path, monkeypatch) as both:
            for side in both:
                await side.learn(send_frame(1000))
            numbers = list(range(1001, 1001 + len(messages)))
            frames = [
                send_frame(key, opaque=number, queue_id=queue_id, body=body)
                for number, (key, queue_id, body) in zip(numbers, messages, strict=True)
            ]
            await same(both, frames, numbers)
            assert both[0].together >= LEAST

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        trio.run(run, monkeypatch, Path(name))


async def test_the_topic_s_end_and_another_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sides(tmp_path, monkeypatch) as both:
        for side in both:
            await side.learn(send_frame(1000))
        numbers = list(range(1001, 1001 + MANY))
        await same(both, [send_frame(number) for number in numbers], numbers)
        for side in both:
            reply = await side.client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"regionId=Elsewhere")
            assert reply.code == 0
            await side.learn(send_frame(1000))
        replies = await same(both, [send_frame(number) for number in numbers], numbers)
        assert {reply.ext_fields()["MSG_REGION"] for reply in replies.values()} == {"Elsewhere"}
        before = both[0].together
        for side in both:
            assert (await side.client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": TOPIC})).code == 0
        for side in both:  # the first of them makes it again
            replies = await side.burst([send_frame(number) for number in numbers], numbers)
            assert {reply.code for reply in replies.values()} == {0}
        assert both[0].together == before
        numbers = list(range(5001, 5001 + MANY))
        await both[0].learn(send_frame(1000))
        await both[0].burst([send_frame(number) for number in numbers], numbers)
        assert both[0].together > before


async def test_fewer_write_queues_are_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sides(tmp_path, monkeypatch) as both:
        numbers = list(range(1001, 1001 + MANY))
        for side in both:
            await side.learn(send_frame(1000))
            ext = {"topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": 2, "writeQueueNums": 2}
            ext |= {"perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}
            assert (await side.client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)).code == 0
        replies = await same(both, [send_frame(number) for number in numbers], numbers)
        codes = {number % QUEUES: reply.code for number, reply in replies.items()}
        assert codes[0] == codes[1] == 0
        assert codes[2] == codes[3] != 0


async def test_long_polls_hear_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sides(tmp_path, monkeypatch) as both:
        side = both[0]
        await side.learn(send_frame(1000))
        numbers = list(range(1001, 1001 + MANY))
        async with WireClient.connect(side.broker.endpoint) as waiting:
            await waiting.heartbeat("c", consumers=[consumer("G", TOPIC)])
            asked = {
                queue_id: await waiting.post(
                    RequestCode.PULL_MESSAGE,
                    pull_ext(TOPIC, 2 * FEW if queue_id == 0 else 0, queueId=queue_id, sysFlag=6),
                )
                for queue_id in range(QUEUES)
            }
            while side.broker.reactor.stats.held < QUEUES:  # noqa: ASYNC110 - a counter has no event
                await trio.sleep(0.001)
            await side.burst([send_frame(number) for number in numbers], numbers)
            for opaque in asked.values():
                assert (await waiting.reply(opaque)).code == 0
        assert side.together >= LEAST


@pytest.mark.parametrize("outcome", ["failed", "late"])
async def test_a_device_that_fails_or_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    """Under SYNC_FLUSH each gets the reply it would have got alone."""
    timeout = {"syncFlushTimeout": 50} if outcome == "late" else {}
    async with sides(tmp_path, monkeypatch, flushDiskType="SYNC_FLUSH", **timeout) as both:
        numbers = list(range(1001, 1001 + MANY))
        found = []
        for side in both:
            await side.learn(send_frame(1000))
            sync = side.broker.parts.store.write_path.sync
            stuck = trio.Event()

            async def flush(event: trio.Event = stuck) -> bool:
                if outcome == "late":
                    await event.wait()
                return False

            monkeypatch.setattr(sync, "flush_inline", lambda: None)
            monkeypatch.setattr(sync, "advance", flush)
            monkeypatch.setattr(sync, "flush", flush)
            monkeypatch.setattr(sync, "failed", "the device is gone")
            replies = await side.burst([send_frame(number) for number in numbers], numbers)
            found.append({number: of_reply(reply) for number, reply in replies.items()})
            stuck.set()
        assert found[0] == found[1]
        expected = ResponseCode.SERVICE_NOT_AVAILABLE if outcome == "failed" else ResponseCode.FLUSH_DISK_TIMEOUT
        assert {code for code, *_ in found[0].values()} == {expected}
        assert both[0].together >= LEAST


DECODE = decoder(SendMessageRequestHeaderV2)


@pytest.mark.parametrize(
    "properties",
    [
        {"UNIQ_KEY": "ABC", "KEYS": "ä"},
        {"UNIQ_KEY": "ABC", "KEYS": 'a"b'},
        {"UNIQ_KEY": "ABC", "KEYS": "a\\b"},
    ],
    ids=str,
)
def test_texts_that_have_other_lengths_in_json_are_not_learnt(properties: dict[str, str]) -> None:
    frame = send_frame(1, properties)
    with pytest.raises(NotAlikeError):
        SendLayout(frame, DECODE, bytes(8), b"", 64)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"e":"1"', b'"e":"1","e":"1"'),
        (b'"opaque":1,', b'"opaque":1,"opaque":1,'),
        (b'"opaque":1,', b'"opaque":1e0,'),
        (b'"g":"17', b'"g":"-17'),
        (b'"e":"1"', rb'"e":"1","\u0065":"1"'),
        (b'"opaque":1,', rb'"opaque":1,"opaqu\u0065":1,'),
        (b"UNIQ_KEY", b"UNIQ_KEY\\u0001A\\u0002UNIQ_KEY"),
    ],
    ids=str,
)
def test_headers_that_mean_something_else_are_not_learnt(old: bytes, new: bytes) -> None:
    """Names that come twice, numbers of another kind: what is changed for a trial has to be what is decoded."""
    frame = send_frame(1)
    with pytest.raises(NotAlikeError):
        SendLayout(with_head(frame, old, new), DECODE, bytes(8), b"", 64)


def with_head(frame: Frame, old: bytes, new: bytes) -> Frame:
    (size,) = struct.unpack_from(">I", frame, 4)
    head, body = frame[8 : 8 + size], frame[8 + size :]
    assert head.count(old) == 1
    head = head.replace(old, new)
    return struct.pack(">II", 4 + len(head) + len(body), len(head)) + head + body


@pytest.mark.parametrize("fake", ["5", "TAGS\x01A\x02", "UNIQ_KEY\x01A\x02"])
def test_the_other_form_s_properties_are_not_learnt(fake: str) -> None:
    """The real ones have a quote in them, so that they are not found."""
    field = json.dumps(fake).encode()
    frame = send_frame(1, USUAL | {"colour": '"'})
    with pytest.raises(NotAlikeError):
        SendLayout(with_head(frame, b'"a":"P"', b'"a":"P","properties":' + field), DECODE, bytes(8), b"", 64)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_very_long_unique_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str) -> None:
    """No reply of the fast ways has room for them."""
    properties = USUAL | {"UNIQ_KEY": "A" * 1100 + "{0:08d}"}
    async with sides(tmp_path, monkeypatch, flushDiskType=flush) as both:
        for side in both:
            await side.learn(send_frame(1000, properties))
        numbers = list(range(1001, 1001 + MANY))
        replies = await same(both, [send_frame(number, properties) for number in numbers], numbers)
        assert {reply.code for reply in replies.values()} == {0}
        assert not both[0].together


def test_what_only_looks_like_a_field_does_not_matter() -> None:
    frame = with_head(send_frame(1), b'"a":"P"', rb'"a":"\"e\":\"1\""')
    assert SendLayout(frame, DECODE, bytes(8), b"", 64).topic == TOPIC
