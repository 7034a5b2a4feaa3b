"""What consumers get of a bucket: through the fetcher with its cache and its time limits."""

import random

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from tests.store.tiered.bucket.buckets import MemoryBucket
from tests.store.tiered.bucket.queues import Entry, put, queue_of
from tests.store.tiered.bucket.records import TOPIC, Message, messages
from tests.store.tiered.test_fetcher import FakeIndex, S, get, naive, offsets, opened
from trimq.broker.store.tiered.access.fetcher import FEW, MessageStoreFetcher
from trimq.broker.store.tiered.bucket.bucket_queue import BucketQueue
from trimq.protocol.tiered_index_layout import IndexItem

MIB = 1024 * 1024


class Queues:
    """See TieredQueues."""

    def __init__(self, *queues: BucketQueue) -> None:
        self.queues = {(queue.topic, queue.queue_id): queue for queue in queues}

    def find(self, topic: str, queue_id: int) -> BucketQueue | None:
        return self.queues.get((topic, queue_id))

    def topic_id(self, topic: str) -> int | None:
        return next((queue.topic_id for queue in self.queues.values() if queue.topic == topic), None)


async def consume(fetcher: MessageStoreFetcher, end: int, group: str = "g", count: int = 32) -> list[int]:
    """Pull all messages up to an offset. Returns their offsets."""
    found: list[int] = []
    at = 0
    while at < end:
        result = await get(fetcher, at, count, group=group)
        assert result.status is S.FOUND
        found += offsets(result)
        at = result.next_begin_offset
        await wait_all_tasks_blocked()
    return found


@pytest.mark.parametrize("count", [32, 1000])
@pytest.mark.parametrize("is_cached", [True, False])
async def test_two_consumers_read_a_segment_with_the_requests_of_one(count: int, is_cached: bool) -> None:
    bucket = MemoryBucket()
    total = 10_000
    entry = await put(bucket, [messages([1] * total, body=bytes(1000))], 1)
    queue = queue_of(bucket, entry)
    got: dict[str, list[int]] = {}

    async def read(group: str) -> None:
        got[group] = await consume(fetcher, total, group, count)

    async with opened(Queues(queue), read_ahead_cache_enable=is_cached) as fetcher, trio.open_nursery() as nursery:
        nursery.start_soon(read, "a")
        nursery.start_soon(read, "b")
    assert got == {"a": list(range(total)), "b": list(range(total))}
    # Without the cache the first read is one of a few messages, alone.
    alone = 2 if count == 32 and not is_cached else 0
    assert bucket.gets <= 1 + -(-queue.size // (4 * MIB)) + alone
    assert bucket.bytes_read < queue.size + total * 20 + 10_000 + alone * 100_000


async def test_a_consumer_of_one_message_at_a_time_goes_over_to_whole_blocks() -> None:
    bucket = MemoryBucket()
    entry = await put(bucket, [messages([1] * 5000, body=bytes(300))], 1)
    async with opened(Queues(queue_of(bucket, entry))) as fetcher:
        assert await consume(fetcher, 5 * FEW, count=1) == list(range(5 * FEW))
    assert bucket.gets == 2 + 1 + 1, "a directory or none, units, a few messages, then the block"


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(0, 3), st.booleans(), st.booleans())
@settings(max_examples=100)
def test_offset_by_time_is_the_naive_one(times: list[int], first: int, is_rising: bool, is_cached: bool) -> None:
    times = [1000 + time for time in (sorted(times) if is_rising else times)]

    async def check() -> None:
        bucket = MemoryBucket()
        entries: list[Entry] = []
        for at in range(0, len(times), 13):
            its = messages(times[at : at + 13], first=first + at, physical=1000 + at * 1000)
            entries.append(await put(bucket, [its]))
        queue = queue_of(bucket, *entries)
        async with opened(Queues(queue)) as fetcher:
            if is_cached and times:
                await get(fetcher, first)
            for timestamp in range(998, 1015):
                for upper in (False, True):
                    found = await fetcher.offset_by_time(TOPIC, 0, timestamp, upper=upper)
                    begin = first if times else 0
                    assert found == naive(times, begin, timestamp, upper=upper), (timestamp, upper)
                    part = times[: len(times) // 2]
                    found = await fetcher.offset_by_time(TOPIC, 0, timestamp, upper=upper, end=begin + len(part))
                    assert found == naive(part, begin, timestamp, upper=upper), (timestamp, upper)

    trio.run(check)


async def test_times_and_gaps() -> None:
    bucket = MemoryBucket()
    entries = [
        await put(bucket, [messages([1000, 1005], first=3)]),
        await put(bucket, [messages([1010], first=500, physical=9000)]),
    ]
    async with opened(Queues(queue_of(bucket, *entries))) as fetcher:
        result = await get(fetcher, 3)
        assert (offsets(result), result.next_begin_offset) == ([3, 4], 5)
        result = await get(fetcher, 5)
        assert (result.status, result.next_begin_offset) == (S.NO_MATCHED_MESSAGE, 500)
        for _ in range(2):
            assert [await fetcher.store_time(TOPIC, 0, at) for at in (2, 3, 4, 5, 500)] == [-1, 1000, 1005, -1, 1010]
            assert await fetcher.earliest_store_time(TOPIC, 0) == 1000
            assert offsets(await get(fetcher, 500)) == [500]
        assert await fetcher.offset_by_time(TOPIC, 0, 1007, upper=False) == 5
        assert await fetcher.offset_by_time(TOPIC, 0, 1007, upper=True) == 4
        assert await fetcher.offset_by_time(TOPIC, 0, 1010, upper=False) == 5
        assert await fetcher.offset_by_time(TOPIC, 0, 1010, upper=True) == 500


async def test_a_query_finds_records_by_their_log_offsets() -> None:
    bucket = MemoryBucket()
    its: list[Message] = []
    for number in range(50):
        key = b"KEYS\x01%s\x02" % (b"a" if number % 5 else b"b")
        its += messages([1000 * number], first=number, physical=5000 + 1000 * number, properties=key)
    entry = await put(bucket, [its], 1)
    items = [IndexItem(1, 7, 0, m.physical, len(m.record), m.time // 1000 * 1000) for m in its]
    items.append(IndexItem(1, 7, 0, 77, 99, 5000))
    random.Random(3).shuffle(items)
    queue = queue_of(bucket, entry)
    async with opened(Queues(queue), FakeIndex(items, queue.topic_id)) as fetcher:
        found = await fetcher.query(TOPIC, "b", 3, 0, 100_000)
        assert found == [its[number].record for number in (35, 40, 45)]


async def test_a_read_that_fails_is_tried_again_by_the_next_pull() -> None:
    bucket = MemoryBucket()
    queue = queue_of(bucket, await put(bucket, [messages([1] * 10)]))

    def away(_: str) -> None:
        raise OSError("the object store is away")

    async with opened(Queues(queue)) as fetcher:
        bucket.before_read = away
        result = await get(fetcher, 2)
        assert (result.status, result.next_begin_offset) == (S.OFFSET_FOUND_NULL, 2)
        bucket.before_read = None
        assert offsets(await get(fetcher, 2)) == list(range(2, 10))
