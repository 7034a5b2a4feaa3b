"""Reads of objects that a join has replaced, that have expired, or that are damaged."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.store.tiered.bucket.buckets import MemoryBucket
from tests.store.tiered.bucket.queues import Entry, put, queue_of, read_all
from tests.store.tiered.bucket.records import TOPIC, messages
from trimq.broker.store.tiered.bucket.block_reader import BlockReader, GoneError
from trimq.broker.store.tiered.bucket.bucket_queue import BucketQueue
from trimq.protocol.bucket_manifest import StoredObject, stretches_of
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
from trimq.protocol.queue_unit import UNIT


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


async def test_of_two_objects_the_later_generation_gives_a_record() -> None:
    bucket = MemoryBucket()
    its = messages([5] * 10)
    old, new = await put(bucket, [its]), await put(bucket, [its], 1)
    queue = queue_of(bucket, old, new)
    bucket.memory.delete("p/C/b/" + old.object.name)
    assert await queue.read_physical(its[3].physical) == its[3].record


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
    queue = queue_of(bucket, Entry(found, list(stretches), its))
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
