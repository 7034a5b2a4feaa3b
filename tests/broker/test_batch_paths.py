"""The fast path of a batch: the same records and replies as the full path, and no side effects where it declines."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.broker.fast_paths import fast_paths
from tests.broker.test_send_fast_path import ask as ask_any
from tests.broker.test_send_fast_path import v2
from tests.broker.wire_client import WireClient, hashes_of, pull_ext
from trimq.broker.controller import BrokerController
from trimq.broker.store.running_flags import Flag
from trimq.broker.testing import running_broker
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.native import NATIVE

pytestmark = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")

COUNT = 20
TEXT = "KEYS\x01k{at:04d}\x02UNIQ_KEY\x017F0000010001AABBCCDD00000001{at:04X}\x02TAGS\x01TagA\x02"
_opaque = iter(range(300_000, 400_000))


def fields(**more: str) -> dict[str, str]:
    return v2("WAIT\x01true\x02", m="true") | more


def batch(text: str = TEXT, count: int = COUNT, body: bytes = b"body", start: int = 0) -> bytes:
    return encode_batch([(at, body + b"%04d" % at, text.format(at=at).encode()) for at in range(start, start + count)])


async def ask(
    client: WireClient, ext: dict[str, str], body: bytes, *, fast: bool, flag: int = 0
) -> RemotingCommand | None:
    return await ask_any(client, ext, fast=fast, code=320, flag=flag, body=body)


async def both(client: WireClient, ext: dict[str, str], body: bytes) -> list[tuple[int, str | None, dict[str, Any]]]:
    """The replies to a batch on the fast path and on the full path."""
    replies = []
    for fast in (True, False):
        reply = await ask(client, ext, body, fast=fast)
        assert reply is not None
        replies.append((reply.code, reply.remark, reply.ext_fields()))
    return replies


def taken(broker: BrokerController) -> bool:
    """Whether a batch has taken the fast path since the first call."""
    return RequestCode.SEND_BATCH_MESSAGE in fast_paths(broker)


async def made(client: WireClient, broker: BrokerController) -> None:
    """The topic exists, with its queue 1 empty."""
    reply = await ask(client, fields(e="0"), batch(), fast=False)
    assert reply is not None
    assert reply.code == 0
    assert not taken(broker)


@pytest.mark.parametrize("shared", ["", "WAIT\x01true\x02", "WAIT\x01true", "UNIQ_KEY\x01ABC1\x02TAGS\x01x"])
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_both_paths_store_and_answer_the_same(tmp_path: Path, flush: str, shared: str) -> None:
    async with running_broker(tmp_path, flushDiskType=flush) as broker, WireClient.connect(broker.endpoint) as client:
        await made(client, broker)
        assert (await ask(client, fields(), batch(start=100), fast=False)) is not None
        assert not taken(broker)
        (code, _, first), (_, _, second) = await both(client, fields(i=shared, j="3"), batch())
        assert code == 0
        assert taken(broker)
        assert (first.pop("queueOffset"), second.pop("queueOffset")) == (str(COUNT), str(2 * COUNT))
        ids, others = first.pop("msgId").split(","), second.pop("msgId").split(",")
        assert first == second
        messages = []
        for begin in (COUNT, 2 * COUNT):
            wanted = {"queueId": 1, "subscription": "TagA", "maxMsgNums": COUNT}
            messages += await client.pull_messages("Orders", begin, **wanted)
        assert [message.offset_message_id for message in messages] == ids + others
        own = {"queue_offset", "commit_log_offset", "store_timestamp", "offset_message_id"}
        for one, two in zip(messages[:COUNT], messages[COUNT:], strict=True):
            assert {name: getattr(one, name) for name in one.__struct_fields__ if name not in own} == {
                name: getattr(two, name) for name in two.__struct_fields__ if name not in own
            }
        assert [message.queue_offset for message in messages] == list(range(COUNT, 3 * COUNT))
        hashes = await hashes_of(broker, messages)
        assert hashes[:COUNT] == hashes[COUNT:]
        assert set(map(len, hashes)) == {3}  # including the tag's hash
        assert [message.body for message in messages[:COUNT]] == [b"body%04d" % at for at in range(COUNT)]
        index = broker.context.store.index
        assert index is not None
        await index.flush_pending()
        for key in ("k0003", f"7F0000010001AABBCCDD00000001{3:04X}"):
            found = broker.context.store.query_message("Orders", key, 32, 0, 1 << 62)
            assert found is not None
            assert found.count == 3  # one in the batch that created the topic
            found.release()


@pytest.mark.parametrize(
    ("change", "body", "code"),
    [
        ({"e": "-1"}, batch(), 0),
        ({"e": "99"}, batch(), 29),
        ({"f": "4"}, batch(), 13),
        ({"f": "128"}, batch(), 13),
        ({"g": "x"}, batch(), 1),
        ({"j": str(1 << 40)}, batch(), 1),
        ({"g": str(1 << 63)}, batch(), 1),
        ({"i": "WAIT\x01false\x02"}, batch(), 0),
        ({"i": "TRAN_MSG\x01true\x02"}, batch(), 13),
        ({"i": "x" * 40_000}, batch(), 13),
        ({}, b"", 13),
        ({}, b"no batch", 13),
        ({}, batch()[:-1], 13),
        ({}, batch(TEXT + "DELAY\x011\x02"), 13),
        ({}, batch(TEXT + "TRAN_MSG\x01true\x02"), 13),
        ({}, batch(body=b"b" * (4 << 20) + b"b", count=16)[: 1 << 20], 13),
    ],
)
async def test_what_is_not_ordinary_is_left_to_the_full_path(
    client: WireClient, broker: BrokerController, change: dict[str, str], body: bytes, code: int
) -> None:
    await made(client, broker)
    before = broker.context.store.max_phy_offset
    fast, full = await both(client, fields(**change), body)
    assert fast[:2] == full[:2]
    assert fast[0] == code
    assert not taken(broker)
    assert (broker.context.store.max_phy_offset > before) is (code == 0)


async def test_a_batch_that_is_larger_than_a_message_may_be_is_refused_by_both(
    client: WireClient, broker: BrokerController
) -> None:
    await made(client, broker)
    assert (await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"maxMessageSize=3000")).code == 0
    before = broker.context.store.max_phy_offset
    fast, full = await both(client, fields(), batch(body=b"b" * 200))
    assert fast[:2] == full[:2]
    assert fast[0] != 0
    assert broker.context.store.max_phy_offset == before
    assert not taken(broker)


@pytest.mark.parametrize(
    "body",
    [
        batch("UNIQ_KEY\x01{at:032X}\x02", 40, b""),
        batch(TEXT, 40, b"b" * 3000),
        batch(TEXT[:-1], 40, b"b"),
        batch(count=1),
        batch(TEXT.replace("TagA", "Tag{at:04d}")),
        batch(TEXT.replace("k{", "k {")),
        batch("colour\x01blue\x02"),
        batch("KEYS\x01" + "k" * 200 + "\x02"),
        batch(count=3) + batch("", 2, b"b" * 40_000),
    ],
    ids=range(9),
)
async def test_messages_of_all_kinds_take_it(client: WireClient, broker: BrokerController, body: bytes) -> None:
    await made(client, broker)
    before = broker.context.store.max_offset("Orders", 1)
    (code, _, first), _ = await both(client, fields(), body)
    assert code == 0
    assert first["queueOffset"] == str(before)
    assert taken(broker)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_batches_of_one_layout_that_come_together_do_not_mix(tmp_path: Path, flush: str) -> None:
    async with running_broker(tmp_path, flushDiskType=flush) as broker, WireClient.connect(broker.endpoint) as client:
        await made(client, broker)
        frames, opaques = b"", []
        for number in range(6):
            text = TEXT.replace("TagA", "TagB") if number % 2 else TEXT
            opaques.append(opaque := next(_opaque))
            body = batch(text, start=100 * number)
            header = json.dumps({"code": 320, "extFields": fields(), "opaque": opaque}, separators=(",", ":")).encode()
            frames += struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body
        await client.stream.send_all(frames)
        replies = [await client.reply(opaque) for opaque in opaques]
        assert [reply.ext_fields()["queueOffset"] for reply in replies] == [str(COUNT * at) for at in range(6)]
        assert taken(broker)
        for tag, first in (("TagA", 0), ("TagB", 1)):
            bodies: list[bytes] = []
            for begin in range(0, 6 * COUNT, COUNT):
                wanted = {"queueId": 1, "subscription": tag, "maxMsgNums": COUNT}
                if begin // COUNT % 2 == first:
                    bodies += [message.body for message in await client.pull_messages("Orders", begin, **wanted)]
            expected = [b"body%04d" % (100 * number + at) for number in range(first, 6, 2) for at in range(COUNT)]
            assert bodies == expected


async def test_oneways_and_refusals(client: WireClient, broker: BrokerController) -> None:
    await made(client, broker)
    await ask(client, fields(), batch(), fast=True, flag=2)
    assert len(await client.pull_messages("Orders", queueId=1)) == COUNT  # so the batch has been served
    broker.context.store.flags.set(Flag.DISK_FULL, "the disk is full")
    fast, full = await both(client, fields(), batch())
    assert fast[:2] == full[:2]
    assert fast[0] == 14
    broker.context.store.flags.clear(Flag.DISK_FULL)
    assert not taken(broker)
    assert broker.context.store.max_offset("Orders", 1) == COUNT
    assert (await both(client, fields(), batch()))[0][0] == 0
    assert taken(broker)


async def test_they_are_counted_as_any_others(client: WireClient, broker: BrokerController) -> None:
    await made(client, broker)
    items = [broker.context.stats.items(name)["Orders"] for name in ("TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE")]
    steps = []
    for fast in (True, False):
        before = [item.value for item in items]
        assert (await ask(client, fields(), batch(), fast=fast)) is not None
        steps.append([item.value - value for item, value in zip(items, before, strict=True)])
    assert steps[0] == steps[1]
    assert steps[0][0] == COUNT


async def test_consumers_that_wait_hear_of_it(client: WireClient, broker: BrokerController) -> None:
    await made(client, broker)
    async with WireClient.connect(broker.endpoint) as other:
        wait = pull_ext("Orders", queueId=1, sysFlag=6)
        opaque = await other.post(RequestCode.PULL_MESSAGE, wait)
        assert (await other.pull("Orders", queueId=3)).code == 19  # the first pull is held by now
        assert (await ask(client, fields(), batch(), fast=True)) is not None
        reply = await other.reply(opaque)
        assert reply.code == 0
        assert taken(broker)
