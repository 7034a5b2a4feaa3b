"""Objects as the builder makes them: blocks, their limits, times and checksums; and the looks at many records."""

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.tiered.bucket.records import TOPIC, Message, add, messages, record
from trimq.broker.store.read.record_look import is_message, place_of
from trimq.broker.store.tiered.bucket import object_builder
from trimq.broker.store.tiered.bucket.object_builder import ObjectBuilder
from trimq.broker.store.tiered.bucket.record_columns import are_messages, store_times
from trimq.protocol.bucket_object import HEADER_SIZE, Block, Directory, Kind, ObjectHeader, block_crc, decode_end
from trimq.protocol.bucket_object import decode_header as decode
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE
from trimq.protocol.record import decode_head
from trimq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6

HEADER = ObjectHeader(Kind.LOG, 3, 1000, 9000, 77)


def parts(data: bytes, block: Block) -> tuple[bytes, bytes]:
    """Units and records of a block."""
    at = block.position + block.messages * UNIT_SIZE
    return data[block.position : at], data[at : at + block.size]


def check_block(data: bytes, block: Block, expected: list[Message]) -> None:
    units, records = parts(data, block)
    assert units == b"".join(message.unit for message in expected)
    assert records == b"".join(message.record for message in expected)
    assert block.crc == block_crc(units, [records])
    assert block.offset == expected[0].offset
    places, times = [message.physical for message in expected], [message.time for message in expected]
    assert (block.first_physical, block.last_physical) == (min(places), max(places))
    assert (block.begin_ms, block.end_ms) == (min(times), max(times))


def test_an_object_of_several_queues() -> None:
    builder = ObjectBuilder(HEADER)
    a0, b, a1 = messages([5, 3]), messages([9], first=4, physical=8000, queue_id=1), messages([8, 1], first=2)
    add(builder, b, queue_id=1)
    add(builder, a0)
    add(builder, messages([2], first=9, topic="Other"), topic="Other")
    add(builder, a1)
    pieces, directory = builder.finish(b"topics")
    data = b"".join(pieces)
    assert decode(data) == HEADER
    assert directory.length == len(data)
    assert builder.messages == 6
    again = decode_end(data, len(data))
    assert list(again.blocks()) == list(directory.blocks())
    assert again.checked_state(data[again.state_position :][: again.state_length]) == b"topics"
    other, first, second = directory.blocks()
    assert other.topic == "Other"
    assert (first.topic, first.queue_id, first.position) == (TOPIC, 0, other.position + other.length)
    check_block(data, first, [*a0, *a1])
    check_block(data, second, b)


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(100, 900),
    st.integers(1, 7),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=200)
def test_blocks_are_cut_by_bytes_and_messages(
    bodies: list[int], batches: list[int], most_bytes: int, most_messages: int, pieces: int, takes: bool
) -> None:
    expected: list[Message] = []
    physical = 1000
    for number, length in enumerate(bodies):
        time = (number * 7919) % 13
        sys_flag = (0, BORN_HOST_V6, STORE_HOST_V6, BORN_HOST_V6 | STORE_HOST_V6)[number % 4]
        data = record(number, physical, time, body=bytes(length), sys_flag=sys_flag)
        expected.append(Message(number, physical, time, number, data))
        physical += len(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_builder, "BLOCK_BYTES", most_bytes)
        patch.setattr(object_builder, "BLOCK_MESSAGES", most_messages)
        builder = ObjectBuilder(HEADER)
        written: list[Any] = []
        at = 0
        while at < len(expected):
            batch = expected[at : at + batches[at % len(batches)]]
            at += len(batch)
            data = b"".join(message.record for message in batch)
            edges = [len(data) * part // pieces for part in range(pieces + 1)]
            its = [data[begin:end] for begin, end in pairwise(edges)]
            times = [message.time for message in batch]
            units = b"".join(message.unit for message in batch)
            builder.add(TOPIC, 0, batch[0].offset, units, its, min(times), max(times))
            if takes:
                written += builder.take()
        rest, directory = builder.finish()
    whole = b"".join([*written, *rest])
    check_cuts(whole, directory, expected, most_bytes, most_messages)


def check_cuts(whole: bytes, directory: Directory, expected: list[Message], most_bytes: int, most: int) -> None:
    at, position = 0, HEADER_SIZE
    blocks = list(directory.blocks())
    for number, block in enumerate(blocks):
        assert block.position == position
        check_block(whole, block, expected[at : at + block.messages])
        assert block.size <= most_bytes or block.messages == 1
        assert block.messages <= most
        at, position = at + block.messages, position + block.length
        if number + 1 < len(blocks):
            # It ends because the next message has no room.
            assert block.messages == most or block.size + len(expected[at].record) > most_bytes
    assert at == len(expected)


def test_what_is_taken_is_not_kept() -> None:
    builder = ObjectBuilder(HEADER)
    add(builder, messages([1, 2]))
    first = b"".join(builder.take())
    assert len(first) == HEADER_SIZE, "the queue may go on"
    add(builder, messages([3], queue_id=1), queue_id=1)
    second = b"".join(builder.take())
    assert len(second) > 0
    rest, directory = builder.finish()
    whole = b"".join([first, second, *rest])
    assert [block.position for block in directory.blocks()] == [HEADER_SIZE, HEADER_SIZE + len(second)]
    assert directory.length == len(whole)


def test_a_gap_begins_a_block() -> None:
    builder = ObjectBuilder(HEADER)
    batches = [messages([1, 2]), messages([3], first=2), messages([4], first=9)]
    for batch in batches:
        add(builder, batch)
    pieces, directory = builder.finish()
    data = b"".join(pieces)
    first, second = directory.blocks()
    check_block(data, first, [*batches[0], *batches[1]])
    check_block(data, second, batches[2])


def test_units_that_do_not_fit_their_records_are_refused() -> None:
    builder = ObjectBuilder(HEADER)
    message = messages([1])[0]
    for units, data in (
        (message.unit, message.record[:-1]),
        (b"", b""),
        (UNIT.pack(1, -5, 0) + UNIT.pack(1, len(message.record) + 5, 0), message.record),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            builder.add(TOPIC, 0, 0, units, data, 1, 1)


def test_large_pieces_are_not_copied() -> None:
    builder = ObjectBuilder(HEADER)
    body = bytes(100_000)
    message = Message(0, 1, 5, 0, record(0, 1, 5, body=body))
    builder.add(TOPIC, 0, 0, message.unit, message.record, 5, 5)
    pieces, _ = builder.finish()
    assert any(isinstance(piece, memoryview) and piece.obj is message.record for piece in pieces)


@given(st.integers(0, 2**32), st.integers(1, 30))
@settings(max_examples=300)
def test_many_records_are_looked_at_as_one_is(seed: int, count: int) -> None:
    chance = random.Random(seed)
    first, physical = chance.randrange(100), chance.randrange(5000)
    place = place_of(TOPIC, 1)
    pieces, units = [], []
    for number in range(count):
        data = bytearray(
            record(
                first + number + (chance.random() < 0.1),
                physical,
                chance.randrange(1000),
                body=bytes(chance.randrange(20)),
                queue_id=1 if chance.random() < 0.9 else 2,
                topic=TOPIC if chance.random() < 0.9 else "TX",
                sys_flag=chance.choice((0, 0, BORN_HOST_V6, STORE_HOST_V6, BORN_HOST_V6 | STORE_HOST_V6)),
                properties=b"KEYS\x01k" * chance.randrange(2),
                v2=chance.random() < 0.3,
            )
        )
        if chance.random() < 0.2:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.1:
            data = data[: chance.randrange(1, len(data))]
        pieces.append(bytes(data))
        units.append(UNIT.pack(physical, len(data), 0))
        physical += len(data)
    joined = b"".join(pieces)
    table = np.frombuffer(b"".join(units), UNIT_TYPE)
    at, expected = 0, []
    for number, (phy, size, _) in enumerate(UNIT.iter_unpack(b"".join(units))):
        expected.append(is_message(joined, at, phy, size, first + number, place))
        at += size
    assert are_messages(joined, table, first, place).tolist() == expected
    times = store_times(joined, table["size"].astype(np.int64)).tolist()
    for time, piece, good in zip(times, pieces, expected, strict=True):
        if good:
            assert decode_head(piece).queue_id == 1, "what is a message can be decoded"
            at = 68 if int.from_bytes(piece[36:40], "big") & BORN_HOST_V6 else 56
            assert time == int.from_bytes(piece[at : at + 8], "big", signed=True)
