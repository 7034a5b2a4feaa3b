"""Reads of a queue in a bucket: against a model over all layouts; by time, by log offset; while objects change."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from tests.store.tiered.bucket.buckets import MemoryBucket
from tests.store.tiered.bucket.records import TOPIC, Message, messages, stored
from trimq.broker.store.tiered.bucket import block_reader, object_builder
from trimq.broker.store.tiered.bucket.block_reader import BlockReader, GoneError
from trimq.broker.store.tiered.bucket.bucket_queue import BucketQueue
from trimq.protocol.bucket_manifest import StoredObject, Stretch, stretches_of
from trimq.protocol.bucket_object import (
    HEADER_SIZE,
    Block,
    Kind,
    ObjectHeader,
    block_crc,
    decode_end,
    encode_end,
    encode_header,
)
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE

MIB = 1024 * 1024


class Entry(NamedTuple):
    """An object with messages of a queue."""

    object: StoredObject
    stretches: list[Stretch]
    messages: list[Message]


async def put(bucket: MemoryBucket, batches: Sequence[Sequence[Message]], generation: int = 0, epoch: int = 1) -> Entry:
    """One object with these batches of queue 0, and something of other queues before and behind it."""
    everything = [message for batch in batches for message in batch]
    physical = everything[0].physical
    queues = {
        ("A", 0): messages([1], physical=physical),
        (TOPIC, 0): everything,
        ("Z", 1): messages([1, 2], first=4, physical=physical),
    }
    found, stretches = await stored(bucket, queues, generation=generation, epoch=epoch)
    return Entry(found, [s for s in stretches if s.topic == TOPIC], everything)


def queue_of(bucket: MemoryBucket, *entries: Entry, reader: BlockReader | None = None) -> BucketQueue:
    queue = BucketQueue(TOPIC, 0, 7, reader or BlockReader(bucket, bucket.disk))
    for entry in entries:
        for stretch in entry.stretches:
            queue.add(entry.object, stretch)
    return queue


async def read_all(queue: BucketQueue, count: int = 4096, max_bytes: int = 16 * MIB) -> list[Message]:
    """What a reader from the first message to the last gets."""
    found: list[Message] = []
    at = queue.min_offset
    while at < queue.commit_offset:
        fetched = await queue.read_messages(at, count, max_bytes)
        assert fetched.next_offset > at
        for message in fetched.messages:
            assert message.offset >= at
            data = message.record
            physical, time = int.from_bytes(data[28:36], "big"), int.from_bytes(data[56:64], "big")
            found.append(Message(message.offset, physical, time, message.tags_code, data))
        at = fetched.next_offset
    return found


# -- against a model

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


def first_stored_from(model: dict[int, Message], first: int, end: int, later: int) -> int:
    """Behind the last message before the first one stored at that time or after it."""
    behind = first
    for offset, message in model.items():
        if first <= offset < end:
            if message.time >= later:
                return offset if offset - 1 in model and offset > first else behind
            behind = offset + 1
    return behind


@given(layouts(), st.integers(0, 2**32))
@settings(max_examples=120)
def test_reads_are_those_of_the_model(layout: Layout, seed: int) -> None:
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_builder, "BLOCK_BYTES", layout.most_bytes)
        patch.setattr(object_builder, "BLOCK_MESSAGES", layout.most_messages)
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


# -- requests


@pytest.mark.parametrize(("body", "count"), [(100, 60_000), (1024, 12_000), (102_400, 120)])
async def test_a_joined_segment_is_read_with_one_request_for_four_mebibytes(body: int, count: int) -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages([1] * count, body=bytes(body))], 1)
    queue = queue_of(bucket, entry)
    found = await read_all(queue)
    assert [message.offset for message in found] == list(range(count))
    data = b"".join([message.record for message in found])
    assert data == b"".join([message.record for message in entry.messages])
    assert queue.size == len(data)
    assert bucket.gets <= 1 + -(-len(data) // (4 * MIB)) + 1
    assert bucket.bytes_read < len(data) + count * UNIT_SIZE + 10_000, "each byte once"


async def test_adjacent_blocks_come_with_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_builder, "BLOCK_BYTES", 1000)
    bucket = MemoryBucket()
    entry = await put(bucket, [messages([1] * 100)], 1)
    queue = queue_of(bucket, entry)
    assert entry.stretches[0].blocks > 9
    assert len((await queue.read_messages(0, 100, 1 << 20)).messages) == 100
    assert bucket.gets == 2
    assert len(await read_all(queue)) == 100
    assert bucket.gets == 2
    other = queue_of(bucket, entry)
    found = await other.read_messages(0, 100, 3000)
    assert len(b"".join(m.record for m in found.messages)) <= 3000
    assert bucket.bytes_read < 2 * entry.object.length


async def test_a_few_messages_of_a_large_block_are_read_alone() -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages(range(30_000), body=bytes(300))], 1)
    queue = queue_of(bucket, entry)
    assert await queue.store_time(7000) == 7000
    found = await queue.read_messages(7000, 1, 1)
    assert [m.record for m in found.messages] == [entry.messages[7000].record]
    message = entry.messages[7100]
    assert await queue.read_record(message.physical, len(message.record)) == message.record
    units = sum(stretch.messages for stretch in entry.stretches) * UNIT_SIZE
    assert bucket.bytes_read < units + 10_000
    assert bucket.gets == 2 + 3, "directory, units, and the bytes of each"
    # A reader that goes on gets the whole block.
    found = await queue.read_messages(7001, 32, 1 << 20)
    found = await queue.read_messages(7033, 32, 1 << 20)
    assert bucket.gets == 6
    assert [m.offset for m in found.messages] == list(range(7033, 7065))
    assert await queue.store_time(7200) == 7200
    assert await queue.read_physical(entry.messages[7201].physical) == entry.messages[7201].record
    assert bucket.gets == 6


async def test_a_search_by_time_needs_three_requests_at_most() -> None:
    bucket = MemoryBucket()
    chance = random.Random(5)
    entries = []
    for number in range(4):
        times = sorted(chance.randrange(number * 1000, number * 1000 + 900) for _ in range(30_000))
        first = number * 30_000
        entries.append(await put(bucket, [messages(times, first=first, physical=number << 30, body=bytes(300))], 1))
    for later in (-5, 0, 444, 950, 2500, 3899, 3999, 9999):
        queue = queue_of(bucket, *entries)
        bucket.reset()
        model = {message.offset: message for entry in entries for message in entry.messages}
        found = first_stored_from(model, 0, queue.commit_offset, later)
        assert await queue.narrow(0, queue.commit_offset, later) == (found, found)
        assert bucket.gets <= 3
        assert bucket.bytes_read < 6 * MIB
    queue = queue_of(bucket, *entries)
    bucket.reset()
    assert await queue.store_time(0) == entries[0].messages[0].time
    assert bucket.gets <= 3


async def test_a_thousand_queues_of_an_object_read_its_directory_once() -> None:
    bucket = MemoryBucket()
    queues = {(TOPIC, number): messages([1, 2], queue_id=number) for number in range(1000)}
    found, stretches = await stored(bucket, queues)
    reader = BlockReader(bucket, bucket.disk)
    everything = [BucketQueue(TOPIC, number, 0, reader) for number in range(1000)]
    for stretch in stretches:
        everything[stretch.queue_id].add(found, stretch)
    async with trio.open_nursery() as nursery:
        for queue in everything:
            nursery.start_soon(queue.read_messages, 0, 9, 9999)
    directory = [begin for _, begin, _ in bucket.ranges if begin == found.directory]
    assert len(directory) == 1
    assert bucket.gets == 1001


async def test_a_small_stretch_does_not_need_a_large_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "_SMALL", 50_000)
    bucket = MemoryBucket()
    queues = {(TOPIC, number): messages([1, 2, 3], queue_id=number) for number in range(1000)}
    broken = list(queues[TOPIC, 5])
    broken[1] = broken[1]._replace(record=bytes(len(broken[1].record)))
    queues[TOPIC, 5] = broken
    found, stretches = await stored(bucket, queues)
    assert found.length - found.directory > 50_000
    reader = BlockReader(bucket, bucket.disk)
    first, second = (BucketQueue(TOPIC, number, 0, reader) for number in (0, 5))
    for stretch in stretches:
        if stretch.queue_id == 0:
            first.add(found, stretch)
        if stretch.queue_id == 5:
            second.add(found, stretch)
    assert [m.record for m in await read_all(first)] == [m.record for m in queues[TOPIC, 0]]
    assert await first.narrow(0, 3, 2) == (1, 1)
    assert bucket.gets == 1
    assert bucket.bytes_read < 1000
    assert [m.offset for m in await read_all(second)] == [0, 2]
    assert bucket.gets == 4, "its checksum says that it was damaged before the upload"

    def harm(data: bytearray) -> None:
        if bucket.ranges[-1][1] < found.directory:
            data[3 * UNIT_SIZE + 88] ^= 1

    other = BucketQueue(TOPIC, 0, 0, BlockReader(bucket, bucket.disk))
    other.add(*next(first.stretches))
    bucket.harm = harm
    with pytest.raises(OSError, match="is damaged in the bucket"):
        await other.read_messages(0, 9, 9999)


async def test_readers_of_few_messages_share_directory_and_units() -> None:
    bucket = MemoryBucket()
    queue = queue_of(bucket, await put(bucket, [messages(range(30_000), body=bytes(300))], 1))
    bucket.gate = trio.Event()
    times: list[int] = []

    async def read(offset: int) -> None:
        times.append(await queue.store_time(offset))

    async with trio.open_nursery() as nursery:
        for offset in (7, 8, 9):
            nursery.start_soon(read, offset)
        await wait_all_tasks_blocked()
        bucket.gate.set()
    assert sorted(times) == [7, 8, 9]
    assert bucket.gets == 1 + 1 + 3


async def test_readers_of_a_block_share_a_request() -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages([1] * 5000, body=bytes(100))], 1)
    queue = queue_of(bucket, entry)
    bucket.gate = trio.Event()
    got: list[int] = []

    async def read(offset: int) -> None:
        got.append(next(iter((await queue.read_messages(offset, 4096, 1 << 20)).messages)).offset)

    async with trio.open_nursery() as nursery:
        leader = nursery.start_soon
        leader(read, 0)
        await wait_all_tasks_blocked()
        leader(read, 1000)
        leader(read, 3000)
        await wait_all_tasks_blocked()
        bucket.gate.set()
    assert sorted(got) == [0, 1000, 3000]
    assert bucket.gets == 2


async def test_those_that_wait_read_for_themselves_if_the_first_reader_is_cancelled() -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages([1] * 50)], 1)
    queue = queue_of(bucket, entry)
    bucket.gate = trio.Event()
    got: list[int] = []

    async def read(scope: trio.CancelScope) -> None:
        with scope:
            got.append(len((await queue.read_messages(0, 4096, 1 << 20)).messages))

    first, second = trio.CancelScope(), trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, first)
        await wait_all_tasks_blocked()
        nursery.start_soon(read, second)
        await wait_all_tasks_blocked()
        first.cancel()
        await wait_all_tasks_blocked()
        bucket.gate.set()
    assert got == [50]


# -- objects that go


async def test_a_join_replaces_an_object_while_it_is_read() -> None:
    bucket = MemoryBucket()
    its = messages([5] * 10)
    old = await put(bucket, [its])
    queue = queue_of(bucket, old)
    new = await put(bucket, [its], 1)

    def join(_: str) -> None:
        bucket.before_read = None
        queue.replace({old.object}, [(new.object, stretch) for stretch in new.stretches])
        bucket.memory.delete("p/C/b/" + old.object.name)

    bucket.before_read = join
    assert [m.offset for m in await read_all(queue)] == list(range(10))
    assert [found for found, _ in queue.stretches] == [new.object]


async def test_the_manifest_is_read_again_once_for_all_if_an_object_is_gone() -> None:
    bucket = MemoryBucket()
    its = messages([5] * 10)
    old, new = await put(bucket, [its]), await put(bucket, [its], 1)
    refreshed = 0
    queue: BucketQueue

    async def refresh() -> None:
        nonlocal refreshed
        refreshed += 1
        await wait_all_tasks_blocked()
        queue.replace({old.object}, [(new.object, stretch) for stretch in new.stretches])

    queue = queue_of(bucket, old, reader=BlockReader(bucket, bucket.disk, refresh))
    bucket.memory.delete("p/C/b/" + old.object.name)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(read_all, queue)
    assert refreshed == 1
    assert [m.offset for m in await read_all(queue)] == list(range(10))
    assert await queue.store_time(3) == 5


async def test_an_object_that_stays_gone_is_an_error() -> None:
    bucket = MemoryBucket()
    old = await put(bucket, [messages([5, 6] * 5)])
    refreshed = 0

    async def refresh() -> None:
        nonlocal refreshed
        refreshed += 1
        await trio.lowlevel.checkpoint()

    queue = queue_of(bucket, old, reader=BlockReader(bucket, bucket.disk, refresh))
    bucket.memory.delete("p/C/b/" + old.object.name)
    with pytest.raises(FileNotFoundError, match=old.object.name):
        await queue_of(bucket, old).read_messages(0, 9, 99)
    for number, read in enumerate((lambda: queue.read_messages(0, 9, 99), lambda: queue.store_time(1)), 1):
        with pytest.raises(FileNotFoundError, match=old.object.name):
            await read()  # type: ignore[no-untyped-call]
        assert refreshed == number


async def test_a_failed_look_at_the_manifest_is_an_error_of_the_read() -> None:
    bucket = MemoryBucket()
    old = await put(bucket, [messages([5] * 10)])

    async def refresh() -> None:
        await trio.lowlevel.checkpoint()
        raise PermissionError("forbidden")

    queue = queue_of(bucket, old, reader=BlockReader(bucket, bucket.disk, refresh))
    bucket.memory.delete("p/C/b/" + old.object.name)
    with pytest.raises(PermissionError):
        await read_all(queue)


async def test_a_manifest_that_always_names_other_objects_ends_in_an_error() -> None:
    bucket = MemoryBucket()
    its = messages([5] * 10)
    entry = await put(bucket, [its])
    queue = queue_of(bucket, entry)
    bucket.memory.delete("p/C/b/" + entry.object.name)
    generation = 0

    def change(_: str) -> None:
        nonlocal generation
        generation += 1
        gone = [found for found, _ in queue.stretches]
        new = entry.object._replace(generation=generation)
        queue.replace(gone, [(new, stretch) for stretch in entry.stretches])

    bucket.before_read = change
    with pytest.raises(GoneError):
        await read_all(queue)
    assert generation == 4


async def test_messages_that_expire_while_they_are_read_are_a_gap() -> None:
    bucket = MemoryBucket()
    old, kept = await put(bucket, [messages([5] * 10)]), await put(bucket, [messages([6] * 3, first=10, physical=9000)])
    queue = queue_of(bucket, old, kept)

    def expire(_: str) -> None:
        bucket.before_read = None
        queue.replace({old.object}, [])
        bucket.memory.delete("p/C/b/" + old.object.name)

    bucket.before_read = expire
    found = await queue.read_messages(4, 9, 9999)
    assert (len(found.messages), found.next_offset) == (0, 10)
    assert (queue.min_offset, queue.commit_offset) == (10, 13)
    queue.replace({kept.object}, [])
    assert (queue.min_offset, queue.commit_offset, queue.size) == (13, 13, 0)
    assert await queue.store_time(12) == -1
    assert not queue.has_physical(9000)


# -- damage


@pytest.mark.parametrize("at", [3, 450, -1])
async def test_a_damaged_block_is_an_error_that_names_it(at: int) -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages([5] * 10)], 1)
    queue = queue_of(bucket, entry)
    assert await queue.read_units(0, 1)
    bucket.reset()

    def harm(data: bytearray) -> None:
        if bucket.ranges[-1][1] == entry.stretches[0].position:
            data[at] ^= 1

    bucket.harm = harm
    with pytest.raises(OSError, match=rf"{entry.object.name} is damaged in the bucket: {TOPIC}/0, offsets 0 to 9"):
        await queue.read_messages(0, 99, 99_999)
    bucket.harm = None
    assert len(await read_all(queue)) == 10, "what was damaged is not kept"


async def test_damage_among_a_few_messages_is_found_too() -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages(range(5_000), body=bytes(300))], 1)
    begin = entry.stretches[0].position
    size = len(entry.messages[0].record)
    for at in (20 * 77 + 8, 20 * 77 + 11, 5_000 * 20 + size * 77 + 25, 5_000 * 20 + size * 77 + 95):

        def harm(data: bytearray, at: int = at) -> None:
            _, first, length = bucket.ranges[-1]
            if first <= begin + at < first + length:
                data[begin + at - first] ^= 1

        bucket.harm = harm
        for call in ("read_messages", "read_physical", "store_time"):
            queue = queue_of(bucket, entry)
            arguments = {
                "read_messages": (77, 1, 1),
                "read_physical": (entry.messages[77].physical,),
                "store_time": (77,),
            }[call]
            if at > 5_000 * 20 and call == "store_time":
                assert await queue.store_time(77) == 77, "the damaged byte is none that it looks at"
                continue
            with pytest.raises(OSError, match="is damaged in the bucket"):
                await getattr(queue, call)(*arguments)


async def test_a_damaged_or_strange_directory_is_an_error() -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages([5, 6] * 5)], 1)
    bucket.harm = lambda data: data.__setitem__(0, data[0] ^ 1)
    with pytest.raises(OSError, match="damaged"):
        await queue_of(bucket, entry).read_messages(0, 99, 99_999)
    bucket.harm = None
    for changed in ({"position": 70}, {"messages": 9}, {"offset": 1}, {"topic": "A"}):
        stretch = entry.stretches[0]._replace(**changed)
        queue = BucketQueue(TOPIC, 0, 0, BlockReader(bucket, bucket.disk))
        queue.topic = stretch.topic
        queue.add(entry.object, stretch)
        with pytest.raises(OSError, match="the manifest"):
            await queue.read_messages(queue.min_offset, 99, 99_999)


async def test_an_object_that_is_too_short_is_an_error() -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages([5, 6] * 5)], 1)
    bucket.harm = lambda data: data.__delitem__(-1)
    with pytest.raises(OSError, match="shorter than the manifest says"):
        await queue_of(bucket, entry).read_units(0, 5)


async def test_a_few_messages_that_come_short_are_an_error() -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages(range(5_000), body=bytes(300))], 1)
    queue = queue_of(bucket, entry)
    assert await queue.read_units(0, 1)
    bucket.harm = lambda data: data.__delitem__(-1)
    with pytest.raises(OSError, match="damaged"):
        await queue.read_messages(100, 1, 1)


async def test_a_block_whose_units_do_not_fit_its_records_is_an_error() -> None:
    """It has the checksum with which it was written."""
    bucket = MemoryBucket()
    its = messages([5] * 3)
    records = b"".join(m.record for m in its)
    units = b"".join(m.unit for m in its[:2]) + UNIT.pack(1, len(its[2].record) + 1, 0)
    header = encode_header(ObjectHeader(Kind.SEGMENT, 1, 0, 9999, 1))
    block = Block(TOPIC, 0, 0, 3, len(records), HEADER_SIZE, 1, 2, 5, 6, block_crc(units, [records]))
    end = encode_end([block], HEADER_SIZE + block.length)
    data = header + units + records + end
    found = StoredObject(0, 9999, 1, 1, 0, len(data), HEADER_SIZE + block.length)
    await bucket.create(found.name, [data])
    stretches = stretches_of(decode_end(end, len(data)))
    queue = queue_of(bucket, Entry(found, stretches, its))
    with pytest.raises(OSError, match="units that do not fit"):
        await queue.read_messages(0, 9, 9999)


async def test_a_stretch_that_is_there_is_not_added_again() -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages([5] * 3)])
    queue = queue_of(bucket, entry, entry)
    assert [found for found, _ in queue.stretches] == [entry.object]
    assert list(queue.stretches) == [(entry.object, entry.stretches[0])]


async def test_records_that_were_damaged_before_the_upload_are_left_out() -> None:
    bucket = MemoryBucket()
    its = messages([5, 6, 7, 8, 9, 10])
    for number in (0, 3, 4):
        harmed = bytearray(its[number].record)
        harmed[12] ^= 1
        its[number] = its[number]._replace(record=bytes(harmed))
    queue = queue_of(bucket, await put(bucket, [its]))
    found = await queue.read_messages(0, 99, 99_999)
    assert [m.offset for m in found.messages] == [1, 2, 5]
    assert found.next_offset == 6
    assert [run.offset for run in found.messages.runs] == [1, 5]
    assert await queue.read_physical(its[3].physical) is None
    assert await queue.read_physical(its[2].physical) == its[2].record
    assert [await queue.store_time(n) for n in range(6)] == [-1, 6, 7, -1, -1, 10]
    assert await queue.narrow(0, 6, 8) == (5, 5)
    found = await queue.read_messages(3, 2, 99_999)
    assert (len(found.messages), found.next_offset) == (0, 5)


# -- memory


def test_a_hundred_thousand_queues_cost_little() -> None:
    import tracemalloc  # noqa: PLC0415 - only here

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
    assert cost < 500, cost
