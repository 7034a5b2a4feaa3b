"""How many requests, and how many bytes, the reads of queues in a bucket need."""

import random

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.store.tiered.bucket.buckets import MemoryBucket
from tests.store.tiered.bucket.queues import first_stored_from, put, queue_of, read_all
from tests.store.tiered.bucket.records import TOPIC, messages, stored
from trimq.broker.store.tiered.bucket import block_reader, object_builder
from trimq.broker.store.tiered.bucket.block_reader import BlockReader
from trimq.broker.store.tiered.bucket.bucket_queue import BucketQueue
from trimq.protocol.queue_unit import UNIT_SIZE

MIB = 1024 * 1024


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
    bucket.reset()
    other = queue_of(bucket, entry)
    first, second = entry.messages[95], entry.messages[50]
    assert await other.read_physical(first.physical) == first.record
    assert bucket.gets == 2, "only the block that has it"
    assert len((await other.read_messages(40, 20, 1 << 20)).messages) == 20
    assert await other.read_physical(second.physical) == second.record
    assert bucket.gets == 3
    read = bucket.bytes_read
    assert read < entry.object.length // 2, "no more blocks than the messages need"
    assert len(await read_all(other)) == 100
    assert bucket.bytes_read <= entry.object.length, "each block once, whichever was in memory"
    other = queue_of(bucket, entry)
    bucket.reset()
    found = await other.read_messages(0, 100, 3000)
    assert len(b"".join(m.record for m in found.messages)) <= 3000
    assert bucket.bytes_read < entry.object.length // 2 + 2000


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
    # Many messages come with their block, however small they are.
    other = queue_of(bucket, entry)
    bucket.reset()
    assert len((await other.read_messages(0, 400, 1 << 20)).messages) == 400
    assert bucket.gets == 2
    assert bucket.bytes_read > 4 * MIB
    bucket.requests["get"] = 5
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
    end = queue.commit_offset
    assert await queue.narrow(0, end, entries[1].messages[0].time) == (30_000, 30_000)
    assert await queue.narrow(0, end, 5000) == (end, end)
    assert bucket.gets == 0, "the times of the objects suffice"
    between = await put(bucket, [messages([1] * 30_000 + [7] * 30_000, body=bytes(300), physical=7 << 40)], 1)
    steps = queue_of(bucket, between)
    bucket.reset()
    assert await steps.store_time(0) == 1
    assert await steps.narrow(0, 60_000, 7) == (30_000, 30_000)
    assert bucket.gets == 2, "a directory, and the block with both times"
    assert await steps.narrow(59_000, 60_000, 7) == (59_000, 59_000)
    assert await steps.store_time(59_999) == 7
    assert bucket.gets == 2, "the times of the blocks suffice"
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


async def test_a_stretch_with_more_messages_is_checked_with_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "_SMALL", 50_000)
    bucket = MemoryBucket()
    queues = {(TOPIC, number): messages([1], queue_id=number) for number in range(1000)}
    found, stretches = await stored(bucket, queues | {(TOPIC, 1000): messages([1] * 257, queue_id=1000)})
    queue = BucketQueue(TOPIC, 1000, 0, BlockReader(bucket, bucket.disk))
    queue.add(found, stretches[-1])
    assert len(await read_all(queue)) == 257
    assert [begin for _, begin, _ in bucket.ranges] == [found.directory, stretches[-1].position]


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
