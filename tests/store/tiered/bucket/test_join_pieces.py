"""The pieces of a join: their order, and turns for other tasks while there are very many of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio

from tests.store.simdisk import SimDisk
from tests.store.tiered.bucket.faulty_store import FaultyStore
from tests.store.tiered.bucket.history import built, manifest, upload
from trimq.broker.store.tiered.bucket import join_sources, joiner
from trimq.broker.store.tiered.bucket.join_sources import Piece, SpoolSource
from trimq.protocol.bucket_object import decode_end

MANY = 10_000


def piece(topic: str, queue_id: int, offset: int, length: int = 100) -> Piece:
    return Piece(topic, queue_id, offset, 1, length, None)


@asynccontextmanager
async def turns() -> AsyncIterator[list[int]]:
    """The number of turns of another task meanwhile."""
    count = [0]

    async def other() -> None:
        while True:
            await trio.lowlevel.checkpoint()
            count[0] += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await trio.lowlevel.checkpoint()
        count[0] = 0
        yield count
        nursery.cancel_scope.cancel()


async def test_a_queue_with_much_has_a_segment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner, "PART_SIZE", 1500)
    pieces = [piece("A", 0, 0), piece("A", 1, 0, 1000), piece("A", 1, 1, 500), piece("B", 0, 0, 1499), piece("B", 1, 0)]
    first, shared = await joiner._parts(pieces)
    assert (first.pieces, first.size) == (pieces[1:3], 1500)
    assert (shared.pieces, shared.size) == ([pieces[0], *pieces[3:]], 1699)
    (only,) = await joiner._parts(pieces[1:3])
    assert only.pieces == pieces[1:3]


async def test_pieces_are_divided_in_many_turns() -> None:
    async with turns() as count:
        await joiner._parts([piece("T", number, 0) for number in range(MANY)])
        assert count[0] >= 2 * MANY // joiner._SLICE - 2


async def test_pieces_of_objects_are_sorted_by_queue_and_offset() -> None:
    expected = [piece(f"T{topic}", queue, offset) for topic in range(9) for queue in range(12) for offset in range(100)]
    mixed = Random(1).sample(expected, len(expected))
    queues: dict[str, dict[int, list[Piece]]] = {}
    for one in mixed:
        queues.setdefault(one.topic, {}).setdefault(one.queue_id, []).append(one)
    source = SpoolSource(SimDisk(), -1)
    async with turns() as count:
        await source._sort(queues)
        assert count[0] >= len(expected) // (join_sources._SLICE + 100)
    assert source.pieces == expected


async def test_blocks_of_a_large_object_are_looked_at_in_many_turns() -> None:
    entry, data = built(0, queues=MANY)
    directory = decode_end(data, len(data))
    kept = entry._replace(stretches=[stretch for stretch in entry.stretches if stretch.queue_id % 2])
    async with turns() as count:
        found = [block async for block in join_sources._living(kept, directory)]
        assert count[0] >= (MANY + MANY // 2) // join_sources._SLICE - 2
    assert found == [block for block in directory.blocks() if block.queue_id % 2]


async def test_copied_objects_have_their_pieces_in_order() -> None:
    store = FaultyStore()
    owner = manifest(store.bucket())
    await owner.claim()
    await upload(store.bucket(), owner, 4, queues=30)
    disk = SimDisk()
    disk.make_directory("/store")
    async with SpoolSource.copied(disk, "/store/tier.join", store.bucket(), owner, owner.entries) as source:
        places = [one[:3] for one in source.pieces]
    assert places == [("T", queue, offset) for queue in range(30) for offset in range(4)]
