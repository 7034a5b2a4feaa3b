"""Guards consumers against messages of another queue: each read path, for units and records damaged by the device.

A unit points to a valid record of another topic, or a record has another queue, offset, place or topic length than it
was stored with. The wrong message is skipped and reported once; the others are delivered, and the consumer continues.
"""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.raw_client import Raw, json_frame
from tests.broker.test_pull_fast_path import FIELDS
from tests.broker.wire_client import WireClient
from tests.store.simdisk import SimDisk
from tests.store.stores import FAR, TOPIC, by_key, fill, opened, settings
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.read.record_look import is_message, place_of
from trimq.broker.store.types import GetMessageStatus, MessageFilter
from trimq.broker.testing import running_broker
from trimq.protocol.message import StoredMessage, decode_message, decode_messages
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6

LOG = f"/store/commitlog/{0:020d}"
QUEUE = f"/store/consumequeue/{TOPIC}/0/{0:020d}"
COUNT = 12
WRONG = 5
FAULTS = ["unit", "offset", "high offset", "queue", "place", "topic length", "properties length", "body length"]


class Everything:
    """A filter that accepts all messages; with ``records`` by their properties, so that pulls take the full path."""

    def __init__(self, *, records: bool) -> None:
        self.needs_properties = records
        self.terms = 1

    def match_tags(self, _code: int) -> bool:
        return True

    def match_record(self, _properties: bytes) -> bool:
        return True


FILTERS = [None, Everything(records=False), Everything(records=True)]


def _spoil(disk: SimDisk, fault: str, phy: int, other: int, size: int) -> None:
    """Damage the message at ``phy``, or make its unit point to the record at ``other``, which has the same size."""
    body_length = int.from_bytes(disk.content(LOG)[phy + 84 : phy + 88], "big")
    topic_at = phy + 88 + body_length
    if fault == "unit":
        place = next(
            at for at in range(0, 20_000, UNIT_SIZE) if disk.content(QUEUE)[at : at + 8] == phy.to_bytes(8, "big")
        )
        for at, (old, new) in enumerate(zip(UNIT.pack(phy, size, 0), UNIT.pack(other, size, 0), strict=True)):
            for bit in range(8):
                if (old ^ new) >> bit & 1:
                    disk.flip(QUEUE, place + at, bit)
        return
    at, bit = {
        "offset": (phy + 27, 1),
        "high offset": (phy + 22, 3),
        "queue": (phy + 15, 0),
        "place": (phy + 35, 2),
        "topic length": (topic_at, 1),
        "body length": (phy + 84, 6),
        "properties length": (topic_at + 1 + len(TOPIC) + 1, 0),
    }[fault]
    disk.flip(LOG, at, bit)


@asynccontextmanager
async def spoilt(fault: str, *, spread: bool, sync: bool = False) -> AsyncIterator[tuple[MessageStore, SimDisk, int]]:
    """A store that was stopped in order and restarts with one fault; yields also the log offset of the wrong message.

    ``spread``: each message of the queue stands alone in the log, a message of another topic with its offset beside it;
    otherwise they are one run.
    """
    disk, config = (
        SimDisk(),
        settings(sync=sync, mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000),
    )
    async with opened(disk, config) as store:
        other = "TopicElse"  # as long as TOPIC, so that its records have the same size
        for number in range(COUNT):
            await fill(store, 1, first=number)
            if spread:
                await fill(store, 1, topic=other, first=number)
        if not spread:
            await fill(store, COUNT, topic=other)
        records = [found for name in (TOPIC, other) for found in await _all(store, name)]
    mine, theirs = records[WRONG], records[COUNT + WRONG]
    phy = mine.commit_log_offset
    size = int.from_bytes(disk.content(LOG)[phy : phy + 4], "big")
    _spoil(disk, fault, phy, theirs.commit_log_offset, size)
    async with opened(disk, config) as store:
        yield store, disk, phy


async def _all(store: MessageStore, topic: str) -> list[StoredMessage]:
    result = store.get_message(topic, 0, 0, 32, 1 << 20, None)
    assert result is not None
    messages = decode_messages(b"".join(map(bytes, result.buffers)))
    result.release()
    return messages


async def _walk(
    store: MessageStore, count: int, filter: MessageFilter | None, *, cold: bool
) -> tuple[list[tuple[str, int]], list[int]]:
    """Read a queue as a consumer does; return the messages, and the offsets at which none came."""
    offset, found, nothing = 0, [], []
    while offset < COUNT:
        result = None if cold else store.get_message(TOPIC, 0, offset, count, 1 << 20, filter)
        if result is None:
            result = await store.get_message_cold(TOPIC, 0, offset, count, 1 << 20, filter)
        messages = decode_messages(b"".join(map(bytes, result.buffers)))
        assert result.count == len(messages)
        assert result.size == sum(len(data) for data in result.buffers)
        assert (result.status is GetMessageStatus.FOUND) is bool(messages)
        found += [(message.topic, message.queue_offset) for message in messages]
        if not messages:
            assert result.status is GetMessageStatus.MESSAGE_WAS_REMOVING
            nothing.append(offset)
        result.release()
        assert result.next_begin_offset > offset, "a consumer would stay here forever"
        offset = result.next_begin_offset
    return found, nothing


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_pulls(fault: str, spread: bool, sync: bool, cold: bool) -> None:
    """The fast path for units from files (in memory, no filter) and the full path (filters, or cold)."""
    right = [(TOPIC, offset) for offset in range(COUNT) if offset != WRONG]
    async with spoilt(fault, spread=spread, sync=sync) as (store, disk, phy):
        disk.cold = cold
        with capture_logs() as logs:
            for wanted in FILTERS:
                assert await _walk(store, 32, wanted, cold=cold) == (right, []), wanted
                found, nothing = await _walk(store, 1, wanted, cold=cold)
                assert found == right, wanted
                # a filter of properties may have found already that the record is wrong
                assert nothing == [WRONG] or (wanted is not None and wanted.needs_properties and not nothing)
            assert not any(file.is_held for file in store.files.files)
        skipped = [entry for entry in logs if entry["event"] == "message_skipped"]
        assert [(entry["topic"], entry["queue"], entry["offset"]) for entry in skipped] == [(TOPIC, 0, WRONG)]
        if fault != "unit":
            assert skipped[0]["log_offset"] == phy


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_the_fast_path_is_taken_where_nothing_is_wrong(fault: str, spread: bool) -> None:
    """So that the test above covers it, and the prepared pulls, which use the same call."""
    async with spoilt(fault, spread=spread) as (store, _, _):
        queue = store.queues.find(TOPIC, 0)
        assert queue is not None
        (await store.get_message_cold(TOPIC, 0, 0, 1, 1 << 20, None)).release()
        before = store.get_ahead(queue, 0, WRONG, 1 << 20)
        assert before is not None
        assert before[1][1] == WRONG
        behind = store.get_ahead(queue, WRONG + 1, 32, 1 << 20)
        assert behind is not None
        assert behind[1][1] == COUNT - WRONG - 1
        for offset, count in ((0, 32), (WRONG, 1), (WRONG, 32)):
            assert store.get_ahead(queue, offset, count, 1 << 20) is None


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_by_key_and_by_id(fault: str, cold: bool) -> None:
    """A key or an id finds no record with a wrong place, but does find one of which only the unit is damaged."""
    async with spoilt(fault, spread=True) as (store, disk, phy):
        disk.cold = cold
        found = [message.queue_offset for message in await by_key(store, f"k{WRONG}")]
        assert found == ([WRONG] if fault == "unit" else []) + ([COUNT] if WRONG + 7 < COUNT else [])
        data = await store.look_message_cold(phy) if cold else store.look_message(phy)
        if data is None:
            data = await store.look_message_cold(phy)
        assert bool(data) is (fault == "unit")
        if data:
            assert decode_message(bytes(data)).topic == TOPIC


async def test_a_record_of_another_place_than_its_own_is_not_taken_for_a_spoilt_unit() -> None:
    """An offset flipped to that of another message: the other one is found by its key, the damaged one is not."""
    async with spoilt("offset", spread=False) as (store, _, phy):
        assert not store.look_message(phy)
        (result,) = await by_key(store, f"u{TOPIC}0-7")
        assert result.queue_offset == WRONG ^ 2 == 7
        assert store.query_in_memory(TOPIC, f"u{TOPIC}0-{WRONG}", 32, 0, FAR, 1 << 20) is None


@pytest.mark.parametrize("flags", [0, BORN_HOST_V6, STORE_HOST_V6, BORN_HOST_V6 | STORE_HOST_V6])
@pytest.mark.parametrize("topic", ["T", "t" * 127, "t" * 200])
def test_what_is_a_message(flags: int, topic: str) -> None:
    """Every compared field, in records of both kinds and with hosts of both kinds; one wrong bit is enough."""
    name, body, text = topic.encode(), b"body", b"KEYS\x01k\x02"
    wide = len(name) > 127
    hosts = [bytes(20 if flags & bit else 8) for bit in (BORN_HOST_V6, STORE_HOST_V6)]
    rest = (
        struct.pack(">IiiqqIq", 0, 3, 0, 9, 1000, flags, 0) + hosts[0] + bytes(8) + hosts[1] + bytes(12)
        + len(body).to_bytes(4, "big") + body
        + len(name).to_bytes(2 if wide else 1, "big") + name
        + len(text).to_bytes(2, "big") + text
    )  # fmt: skip
    size = len(rest) + 8
    data = struct.pack(">II", size, 0xDAA320AB if wide else 0xDAA320A7) + rest
    place = place_of(topic, 3)
    for padded, at in ((data, 0), (b"xx" + data + b"yy", 2)):
        assert is_message(padded, at, 1000, size, 9, place)
        assert not is_message(padded, at, 1001, size, 9, place)
        assert not is_message(padded, at, 1000, size, 8, place)
        assert not is_message(padded, at, 1000, size, 9, place_of(topic, 2))
        assert not is_message(padded, at, 1000, size, 9, place_of(topic[:-1] + "u", 3))
    assert not is_message(data, 0, 1000, 90, 9, place)
    topic_at = len(data) - len(text) - 2 - len(name) - (2 if wide else 1)
    compared = [*range(8), *range(12, 16), *range(20, 36), *range(topic_at - 8, topic_at - 4)]
    for at in [*compared, *range(topic_at, len(data) - len(text))]:
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            assert not is_message(bytes(flipped), 0, 1000, size, 9, place), (at, bit)


@pytest.mark.parametrize("fault", ["unit", "offset", "topic length"])
async def test_the_whole_broker_after_a_restart(tmp_path: Path, fault: str) -> None:
    """The fast path of a pull and the prepared pull: code 20 makes the consumer continue at the next offset."""
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        for number in range(COUNT):
            for topic in ("Orders", "Others"):
                await client.send(topic, b"%04d" % number)
        phys = [[m.commit_log_offset for m in await client.pull_messages(name)] for name in ("Orders", "Others")]
    phy = phys[0][WRONG]
    log, queue = tmp_path / f"commitlog/{0:020d}", tmp_path / f"consumequeue/Orders/0/{0:020d}"
    path, at, new = {
        "unit": (queue, UNIT_SIZE * WRONG, phys[1][WRONG].to_bytes(8, "big")),
        "offset": (log, phy + 27, bytes([WRONG ^ 2])),
        "topic length": (log, phy + 92, bytes([4])),
    }[fault]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(new)
    async with running_broker(tmp_path) as broker:
        stream = await trio.open_tcp_stream(*broker.endpoint)
        async with stream:
            raw = Raw(stream)
            for count in (1, 2, 32, 1, 2, 32):
                offset, found = 0, []
                while offset < COUNT:
                    fields = FIELDS | {"queueOffset": str(offset), "maxMsgNums": str(count)}
                    reply = await raw.ask(json_frame(11, fields, fast=True))
                    length = int.from_bytes(reply[4:8], "big") & 0xFFFFFF
                    following = int(reply.split(b'"nextBeginOffset":"')[1].split(b'"')[0])
                    assert following > offset
                    if len(reply) > 8 + length:
                        found += [(m.topic, m.queue_offset) for m in decode_messages(reply[8 + length :])]
                    else:
                        assert b'"code":20' in reply
                    offset = following
                assert found == [("Orders", number) for number in range(COUNT) if number != WRONG], count
