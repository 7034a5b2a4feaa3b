"""Reads of a queue in a bucket, against a model over all layouts; and what a queue costs."""

import random
import tracemalloc
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.tiered.bucket.buckets import MemoryBucket
from tests.store.tiered.bucket.queues import first_stored_from, put, queue_of, read_all
from tests.store.tiered.bucket.records import TOPIC, Message, messages
from trimq.broker.store.tiered.bucket import block_reader, object_builder, stretch_table
from trimq.broker.store.tiered.bucket.block_reader import BlockReader
from trimq.broker.store.tiered.bucket.bucket_queue import BucketQueue
from trimq.protocol.bucket_manifest import StoredObject, Stretch

NO_BYTES = 1 << 40


class Layout(NamedTuple):
    """Objects, and which message counts at each offset."""

    entries: list[tuple[int, int, list[Message]]]
    """Generation, epoch, messages."""
    most_bytes: int
    most_messages: int
    alone: bool


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    chance = random.Random(draw(st.integers(0, 2**32)))
    entries: list[tuple[int, int, list[Message]]] = []
    at, physical = chance.choice((0, 5)), 1000
    for _ in range(draw(st.integers(1, 6))):
        at += chance.choice((0, 0, 0, 1, 30))
        if entries and chance.random() < 0.3:
            at = max(0, at - chance.randrange(8))
        times = [chance.randrange(20) for _ in range(chance.randrange(1, 15))]
        if draw(st.booleans()):
            times.sort()
        generation, epoch = chance.choice((0, 0, 1, 2)), chance.choice((1, 1, 2))
        its = messages(
            times, first=at, physical=physical, apart=chance.choice((0, 7)), body=bytes(chance.randrange(99))
        )
        # Other messages at the same offsets have other log offsets here, so that it can be seen which were read.
        entries.append((generation, epoch, its))
        at, physical = at + len(its), physical + 10_000
    return Layout(entries, draw(st.integers(100, 2000)), draw(st.integers(1, 9)), draw(st.booleans()))


def model_of(entries: Sequence[tuple[int, int, Sequence[Message]]]) -> dict[int, Message]:
    found: dict[int, Message] = {}
    for _, _, its in sorted(entries, key=lambda entry: (entry[0], entry[1], entry[2][0].physical)):
        found |= {message.offset: message for message in its}
    return dict(sorted(found.items()))


@given(layouts(), st.integers(0, 2**32))
@settings(max_examples=120)
def test_reads_are_those_of_the_model(layout: Layout, seed: int) -> None:
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_builder, "BLOCK_BYTES", layout.most_bytes)
        patch.setattr(object_builder, "BLOCK_MESSAGES", layout.most_messages)
        patch.setattr(stretch_table, "_EXACT", 2)
        if layout.alone:
            patch.setattr(block_reader, "_SMALL", 0)
            patch.setattr(block_reader, "_FEW_PART", 1)
        trio.run(check_layout, layout, chance)


async def check_layout(layout: Layout, chance: random.Random) -> None:
    bucket = MemoryBucket()
    reader = BlockReader(bucket, bucket.disk, block_bytes=chance.choice((0, 1000, 1 << 20)))
    kept = [await put(bucket, [its], generation, epoch) for generation, epoch, its in layout.entries]
    chance.shuffle(kept)
    queue = queue_of(bucket, *kept, reader=reader)
    commit = queue.commit_offset
    while True:
        entries = [(entry.object.generation, entry.object.epoch, entry.messages) for entry in kept]
        await check_queue(queue, model_of(entries), commit, chance)
        if not kept:
            break
        gone = kept.pop(chance.randrange(len(kept)))
        if chance.random() < 0.3:
            new = await put(bucket, [gone.messages], gone.object.generation + 1, gone.object.epoch)
            queue.replace([gone.object], [(new.object, stretch) for stretch in new.stretches])
            entries = [(e.object.generation, e.object.epoch, e.messages) for e in (*kept, new)]
            await check_queue(queue, model_of(entries), commit, chance)
            gone = new
        queue.replace({gone.object}, [])


async def check_queue(queue: BucketQueue, model: dict[int, Message], commit: int, chance: random.Random) -> None:
    assert queue.commit_offset == commit
    assert queue.min_offset == min(model, default=commit)
    assert await read_all(queue, chance.randrange(1, 12), chance.choice((1, 300, NO_BYTES))) == list(model.values())
    for _ in range(4):
        offset = chance.randrange(-1, commit + 2)
        message = model.get(offset)
        count, most = chance.randrange(1, 9), chance.randrange(1, 900)
        if not queue.min_offset <= offset < commit:
            with pytest.raises(LookupError):
                await queue.read_messages(offset, count, most)
        else:
            fetched = await queue.read_messages(offset, count, most)
            found = list(fetched.messages)
            assert [m.record for m in found] == [model[m.offset].record for m in found]
            assert len(found) <= count
            assert len(found) <= 1 or sum(len(m.record) for m in found) <= most
            following = min((other for other in model if other > offset), default=commit)
            assert fetched.next_offset == (offset + len(found) if message else following)
            assert bool(found) == bool(message)
        assert await queue.store_time(offset) == (message.time if message else -1)
        following = min((other for other in model if other > offset), default=commit)
        assert queue.behind_gap(offset) == (offset if message else following)
        if message is None:
            with pytest.raises(LookupError):
                await queue.read_units(offset, count)
        else:
            wanted = []
            for other in range(offset, offset + count):
                if other not in model:
                    break
                wanted.append(model[other].unit)
            assert await queue.read_units(offset, count) == b"".join(wanted)
            assert await queue.read_physical(message.physical) == message.record
            assert await queue.read_record(message.physical, len(message.record)) == message.record
            assert await queue.read_record(message.physical, len(message.record) + 1) is None
            assert await queue.read_physical(message.physical + 1) is None
    for later in range(-1, 22, 3):
        first = chance.randrange(queue.min_offset, commit + 1)
        end = chance.randrange(first, commit + 1)
        for begin, stop in ((queue.min_offset, commit), (first, end)):
            found_at = first_stored_from(model, begin, stop, later)
            assert await queue.narrow(begin, stop, later) == (found_at, found_at), (begin, stop, later)


def test_a_hundred_thousand_queues_cost_little() -> None:
    bucket = MemoryBucket()
    reader = BlockReader(bucket, bucket.disk)
    found = StoredObject(1 << 40, 1 << 41, 0, 1, 0, 1 << 24, 1 << 23)
    numbers = range(1 << 33, (1 << 33) + 8000, 1000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        queues = []
        for number in range(10_000):
            queue = BucketQueue(TOPIC, number, 5, reader)
            offset, messages_, size, position, first, last, begin, end = (n + number for n in numbers)
            queue.add(found, Stretch(TOPIC, number, 1, offset, messages_, size, position, first, last, begin, end))
            queues.append(queue)
        cost = (tracemalloc.get_traced_memory()[0] - before) / len(queues)
    finally:
        tracemalloc.stop()
    assert cost < 450, cost
