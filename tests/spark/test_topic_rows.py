"""Records in pieces of a buffer: whatever their sizes and the order of the pieces, each is a row, in that order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from trimq.client.message import MessageQueue
from trimq.pipeline.options import Options
from trimq.pipeline.store.heads import read_heads
from trimq.pipeline.topics.planning import Range
from trimq.pipeline.topics.rows import batch_of
from trimq.pipeline.topics.settings import ReadSettings
from trimq.protocol.record import RecordError, encode_record, pack_host

pytestmark = pytest.mark.one_pyspark

SPAN = Range(MessageQueue(topic="T", broker_name="b", queue_id=0), 0, 1000)
SETTINGS = ReadSettings.of(Options({"namesrv": "127.0.0.1:1", "topics": "T"}), {"queueOffset": False, "body": False})
HOST = pack_host("127.0.0.1", 10911)


def record(offset: int, size: int, topic: bytes = b"T") -> bytes:
    return encode_record(
        topic=topic,
        body=b"%d" % offset + b"." * size,
        properties=b"",
        queue_id=0,
        queue_offset=offset,
        physical_offset=offset * 5000,
        born_timestamp=1,
        born_host=HOST,
        store_timestamp=2,
        store_host=HOST,
    )


def laid_out(sizes: Sequence[Sequence[int]], chance: random.Random) -> tuple[bytes, list[tuple[int, int]], list[bytes]]:
    """A buffer with other bytes in front of each piece, the pieces, and the bodies of their records."""
    buffer, pieces, offset, bodies = b"", [], 100, []
    for piece in sizes:
        buffer += chance.randbytes(chance.randrange(1, 300))
        begin = len(buffer)
        for size in piece:
            buffer += record(offset, size)
            bodies.append(b"%d" % offset + b"." * size)
            offset += 1
        pieces.append((begin, len(buffer)))
    return buffer, pieces, bodies


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "sizes", [[[7] * 32] * 5, [[7] * 32, [900] * 3, [0], [7] * 40], [[7] * 31 + [8]] * 4, [[3, 900, 3, 17]] * 9]
)
def test_pieces_are_rows_in_their_order(sizes: list[list[int]], seed: int) -> None:
    chance = random.Random(seed)
    buffer, pieces, bodies = laid_out(sizes, chance)
    assert batch_of(memoryview(buffer), SPAN, SETTINGS, pieces).column("body").to_pylist() == bodies
    given = {begin: buffer[begin:end] for begin, end in pieces}
    chance.shuffle(pieces)
    found = batch_of(memoryview(buffer), SPAN, SETTINGS, pieces).column("body").to_pylist()
    assert sorted(found) == sorted(bodies)
    assert b"".join(found) == b"".join(b"".join(body for body in bodies if body in given[begin]) for begin, _ in pieces)


@pytest.mark.parametrize("missing", [1, 60, 109])
def test_a_piece_that_is_cut_short_is_reported(missing: int) -> None:
    buffer, pieces, _ = laid_out([[7] * 3, [9] * 3], random.Random(1))
    for number, (begin, end) in enumerate(pieces):
        cut = [*pieces]
        cut[number] = begin, end - missing
        with pytest.raises(RecordError):
            batch_of(memoryview(buffer), SPAN, SETTINGS, cut)


@pytest.mark.parametrize("topic", [b"T", b"T" * 200])
@pytest.mark.parametrize("short", range(4))
def test_a_body_that_reaches_to_the_end_is_reported(topic: bytes, short: int) -> None:
    """Whatever number of bytes a damaged length leaves behind the body, no byte behind the last record is read."""
    first, last = record(0, 300, topic), bytearray(record(1, 300, topic))
    last[84:88] = (len(last) - 88 - short).to_bytes(4, "big")
    buffer = bytes(first + last)
    heads = read_heads(np.frombuffer(buffer, np.uint8), np.array([0, len(first)]), np.array([0, 5000]))
    assert heads.ok.tolist() == [True, False]
    with pytest.raises(RecordError):
        batch_of(memoryview(buffer), SPAN, SETTINGS)
