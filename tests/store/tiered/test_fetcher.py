"""Reads from the tier: statuses, filters, limits, searches by time and by key; over a fake queue and over segments."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from tests.store.simdisk import SimDisk
from tests.store.tiered.fake_queue import TOPIC, FakeQueue, filled, record
from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.read.get_limits import GetLimits
from trimq.broker.store.tiered.access import fetcher as fetcher_module
from trimq.broker.store.tiered.access.fetcher import FEW, OPERATIONS, MessageStoreFetcher
from trimq.broker.store.tiered.access.timed_reads import TierHangsError
from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.flat_message_file import Batch, FlatMessageFile
from trimq.broker.store.tiered.container.message_runs import TieredMessage
from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.metadata import DefaultMetadataStore
from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.broker.tiered_config import PLUG_IN, TieredStoreConfig
from trimq.protocol.hashing import crc32
from trimq.protocol.message import decode_messages
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.record import decode_head
from trimq.protocol.sql92.cost import AT_ONCE
from trimq.protocol.tiered_index_layout import IndexItem
from trimq.protocol.tiered_layout import PHYSICAL
from trimq.remoting.runtime.clock import ManualClock

MEMORY = 1 << 30
LARGE = MessageStoreConfig(
    max_transfer_bytes_on_message_in_memory=1 << 20,
    max_transfer_count_on_message_in_memory=1000,
    max_transfer_bytes_on_message_in_disk=1 << 20,
    max_transfer_count_on_message_in_disk=1000,
)
S = GetMessageStatus


class FakeFiles:
    """Stands for FlatFileStore."""

    def __init__(self, *queues: FakeQueue) -> None:
        self.queues = {(queue.topic, queue.queue_id): queue for queue in queues}

    def find(self, topic: str, queue_id: int) -> FakeQueue | None:
        return self.queues.get((topic, queue_id))

    def topic_id(self, topic: str) -> int | None:
        return 4 if topic == TOPIC else None


class Accept:
    """A filter by tags code and properties."""

    terms = 1

    def __init__(self, tags: set[int] | None = None, by_record: Callable[[bytes], bool] | None = None) -> None:
        self.tags = tags
        self.needs_properties = by_record is not None
        self.match_record = by_record or (lambda _: True)

    def match_tags(self, tags_code: int) -> bool:
        return self.tags is None or tags_code in self.tags


@asynccontextmanager
async def opened(
    files: Any, index: Any = None, local: MessageStoreConfig | None = None, **options: Any
) -> AsyncIterator[MessageStoreFetcher]:
    config = TieredStoreConfig(**options)
    limits = GetLimits(local or LARGE, MEMORY)
    fetcher = MessageStoreFetcher(
        config, files, index, clock=ManualClock(), memory=MEMORY, limits=limits, disk=SimDisk()
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetcher.run)
        await wait_all_tasks_blocked()
        yield fetcher
        nursery.cancel_scope.cancel()


async def get(
    fetcher: MessageStoreFetcher,
    offset: int,
    count: int = 32,
    size: int = 1 << 20,
    accept: Accept | None = None,
    group: str = "g",
    topic: str = TOPIC,
) -> GetMessageResult:
    arguments = group, topic, 0, offset, count, size, accept
    result = fetcher.get(*arguments)
    return await fetcher.get_cold(*arguments) if result is None else result


def offsets(result: GetMessageResult) -> list[int]:
    found = decode_messages(b"".join(result.buffers))
    assert result.count == len(found)
    assert result.size == sum(map(len, result.buffers))
    return [message.queue_offset for message in found]


async def test_memory_of_messages_that_are_read_no_more_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(fetcher_module, "give_back_memory", lambda: called.append(True))
    async with opened(FakeFiles(filled(10))) as fetcher:
        await get(fetcher, 0)
        assert fetcher.cache.count == 10
        clock = fetcher.cache._clock
        assert isinstance(clock, ManualClock)
        for _ in range(3):
            clock.advance(7.5)
            await wait_all_tasks_blocked()
        assert (fetcher.cache.count, called) == (0, [True])


@pytest.mark.parametrize("is_cached", [True, False])
async def test_statuses_at_each_border(is_cached: bool) -> None:
    queue = filled(10, first=5)
    empty = FakeQueue([], queue_id=0)
    empty.topic = "empty"
    async with opened(FakeFiles(queue, empty), read_ahead_cache_enable=is_cached) as fetcher:
        expected = {
            4: (S.OFFSET_TOO_SMALL, 5, []),
            5: (S.FOUND, 15, list(range(5, 15))),
            14: (S.FOUND, 15, [14]),
            15: (S.OFFSET_OVERFLOW_ONE, 15, []),
            16: (S.OFFSET_OVERFLOW_BADLY, 15, []),
        }
        for offset, (status, following, found) in expected.items():
            for _ in range(2):
                result = await get(fetcher, offset)
                assert (result.status, result.next_begin_offset, offsets(result)) == (status, following, found)
                assert (result.min_offset, result.max_offset) == (5, 15)
        result = await get(fetcher, 3, topic="empty")
        assert (result.status, result.next_begin_offset) == (S.NO_MESSAGE_IN_QUEUE, 3)
        result = await get(fetcher, 3, topic="none")
        assert (result.status, result.next_begin_offset) == (S.NO_MATCHED_LOGIC_QUEUE, 3)


@pytest.mark.parametrize("is_cached", [True, False])
async def test_a_failed_read_is_found_null_and_the_next_one_tries_again(is_cached: bool) -> None:
    queue = filled(10)
    queue.failing.add(2)
    async with opened(FakeFiles(queue), read_ahead_cache_enable=is_cached) as fetcher:
        result = await get(fetcher, 2)
        assert (result.status, result.next_begin_offset) == (S.OFFSET_FOUND_NULL, 2)
        queue.failing.clear()
        assert offsets(await get(fetcher, 2)) == list(range(2, 10))


async def test_a_queue_that_lost_the_message_meanwhile_is_offset_too_small() -> None:
    queue = filled(10)
    gate = queue.gates[2] = trio.Event()
    results: list[GetMessageResult] = []

    async def read() -> None:
        results.append(await get(fetcher, 2))

    async with opened(FakeFiles(queue)) as fetcher, trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        queue.min_offset = 6
        gate.set()
    assert (results[0].status, results[0].next_begin_offset) == (S.OFFSET_TOO_SMALL, 6)


async def test_limits_with_one_message_at_least_and_reads_from_memory() -> None:
    queue = filled(100)
    each = len(record(0))
    async with opened(FakeFiles(queue)) as fetcher:
        for size, count, number in (
            (1, 32, 1),
            (each, 32, 1),
            (3 * each, 32, 3),
            (3 * each - 1, 32, 2),
            (1 << 20, 7, 7),
        ):
            result = await get(fetcher, 10, count, size)
            assert offsets(result) == list(range(10, 10 + number))
            assert result.next_begin_offset == 10 + number
        assert queue.reads == [(10, 90)]
        assert (fetcher.cache.accesses, fetcher.cache.hits) == (5, 4)
        assert fetcher.messages == 1 + 1 + 3 + 2 + 7
        assert set(fetcher.latency) == set(OPERATIONS)
        assert sum(fetcher.latency["get_message"].counts) == 5


async def test_a_pull_gets_no_more_than_the_broker_allows_in_memory_and_from_the_tier() -> None:
    queue = filled(100)
    each = len(record(0))
    local = MessageStoreConfig(
        max_transfer_bytes_on_message_in_memory=20 * each,
        max_transfer_count_on_message_in_memory=30,
        max_transfer_bytes_on_message_in_disk=7 * each,
        max_transfer_count_on_message_in_disk=5,
    )
    async with opened(FakeFiles(queue), local=local) as fetcher:
        assert len(offsets(await get(fetcher, 0, 64))) == 5
        assert len(offsets(await get(fetcher, 5, 64))) == 20
        by_properties = await get(fetcher, 5, 64, accept=Accept(None, lambda _: True))
        assert len(offsets(by_properties)) == 20
        assert queue.reads == [(0, 100)]
    queue = filled(100)
    async with opened(FakeFiles(queue), local=local, read_ahead_cache_enable=False) as fetcher:
        for begin in (0, 5):
            assert offsets(await get(fetcher, begin, 64)) == list(range(begin, begin + 5))
        assert queue.reads == [(0, 5), (5, 5)]
        assert len(offsets(await get(fetcher, 5, 2))) == 2


async def test_a_provider_that_hangs_fails_each_kind_of_read_in_time() -> None:
    files, file = await flat_files([1000, 1005], 3, 50)

    async def hangs(*_: object) -> Any:
        await trio.sleep_forever()

    class HangingIndex(FakeIndex):
        async def query(self, *arguments: Any, **_: Any) -> list[IndexItem]:
            await hangs(*arguments)
            return []

    record_there = IndexItem(1, file.topic_id, 0, 0, len(record(0)), 1000)
    for name, call in {
        "read_messages": lambda f: get(f, 3),
        "store_time": lambda f: f.store_time(TOPIC, 0, 3),
        "read_record": lambda f: f.query(TOPIC, "a", 3, 0, 1 << 50),
        "query": lambda f: f.query(TOPIC, "a", 3, 0, 1 << 50),
    }.items():
        index = HangingIndex([]) if name == "query" else FakeIndex([record_there], file.topic_id)
        found: list[Any] = []

        async def run(fetcher: MessageStoreFetcher, call: Any = call, found: list[Any] = found) -> None:
            try:
                found.append(await call(fetcher))
            except TierHangsError as error:
                found.append(error)

        with pytest.MonkeyPatch.context() as patch:
            if name != "query":
                patch.setattr(file, name, hangs)
            async with opened(files, index) as fetcher, trio.open_nursery() as nursery:
                nursery.start_soon(run, fetcher)
                await wait_all_tasks_blocked()
                assert not found
                fetcher.cache._clock.advance(12.5)  # type: ignore[attr-defined]
                await wait_all_tasks_blocked()
                assert len(found) == 1, name
                assert fetcher.reads.timeouts == 1


async def test_requests_of_one_message_read_few() -> None:
    queue = filled(100)
    async with opened(FakeFiles(queue)) as fetcher:
        assert offsets(await get(fetcher, 10, 1)) == [10]
        assert queue.reads == [(10, FEW)]


async def test_a_read_goes_on_over_ranges() -> None:
    queue = filled(100)
    async with opened(FakeFiles(queue), read_ahead_message_count_threshold=20) as fetcher:
        await get(fetcher, 0)
        await get(fetcher, 20)
        assert offsets(await get(fetcher, 15, 10)) == list(range(15, 25))
        assert queue.reads == [(0, 20), (20, 20)]


async def test_filters_by_tag_and_by_properties() -> None:
    messages: list[TieredMessage | None] = [
        TieredMessage(offset, offset % 3, record(offset, properties=b"k\x01%d\x02" % (offset % 4)))
        for offset in range(300)
    ]
    messages[6] = None
    queue = FakeQueue(messages)
    async with opened(FakeFiles(queue)) as fetcher:
        assert offsets(await get(fetcher, 1, 3, accept=Accept({0}))) == [3, 9, 12]
        result = await get(fetcher, 1, accept=Accept({9}))
        assert (result.status, result.next_begin_offset) == (S.NO_MATCHED_MESSAGE, 300)

        def match(properties: bytes) -> bool:
            return properties == b"k\x010\x02"

        assert offsets(await get(fetcher, 1, 3, accept=Accept({0}, match))) == [12, 24, 36]


async def test_many_properties_are_matched_with_pauses() -> None:
    queue = filled(1000)
    calls: list[int] = []
    others: list[int] = []

    async def other() -> None:
        while True:
            others.append(len(calls))
            await trio.lowlevel.checkpoint()

    def match(_: bytes) -> bool:
        calls.append(1)
        return False

    async with opened(FakeFiles(queue)) as fetcher:
        await get(fetcher, 0)
        assert fetcher.get("g", TOPIC, 0, 0, 32, 1 << 20, Accept(None, match)) is None
        assert len(calls) <= AT_ONCE
        calls.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            result = await fetcher.get_cold("g", TOPIC, 0, 0, 32, 1 << 20, Accept(None, match))
            nursery.cancel_scope.cancel()
        assert result.status is S.NO_MATCHED_MESSAGE
        assert len(calls) == 1000
        steps = [two - one for one, two in pairwise(others)]
        assert len(steps) > 3
        assert max(steps) <= 2 * AT_ONCE


class FakeIndex:
    def __init__(self, items: list[IndexItem], topic_id: int = 4) -> None:
        self.items = items
        self.topic_id = topic_id

    async def query(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int, *, topic_id: int | None = None
    ) -> list[IndexItem]:
        await trio.lowlevel.checkpoint()
        assert topic_id == self.topic_id
        return list(self.items)


async def test_query_returns_the_newest_that_have_the_key_oldest_first() -> None:
    messages: list[TieredMessage | None] = [
        TieredMessage(n, 0, record(n, time=100 * n, properties=b"KEYS\x01%s\x02" % (b"a b" if n % 2 else b"c")))
        for n in range(200)
    ]
    queue = FakeQueue(messages)
    sizes = [len(message.record) for message in messages if message is not None]
    items = [IndexItem(1, 4, 0, n, sizes[n], n // 10 * 1000) for n in range(200)]
    random.Random(3).shuffle(items)
    items += [IndexItem(1, 4, 3, 5, 100, 5000), IndexItem(1, 4, 0, 7, 3, 5000)]
    queue.failing_records = {197}
    async with opened(FakeFiles(queue), FakeIndex(items)) as fetcher:
        found = await fetcher.query(TOPIC, "a", 3, 0, 100_000)
        assert [decode_head(data).queue_offset for data in found] == [193, 195, 199]
        found = await fetcher.query(TOPIC, "b", 64, 0, 15_000)
        assert [decode_head(data).queue_offset for data in found] == list(range(23, 150, 2))
        assert await fetcher.query(TOPIC, "d", 3, 0, 100_000) == []
        assert await fetcher.query("none", "a", 3, 0, 100_000) == []


# -- over segments in memory


async def flat_files(times: list[int], first: int, per_segment: int) -> tuple[FlatFileStore, FlatMessageFile]:
    """A queue with messages of these store times."""
    disk = SimDisk()
    size = len(record(0))
    config = TieredStoreConfig(
        message_store_plug_in=PLUG_IN,
        tiered_store_consume_queue_max_size=20 * per_segment,
        tiered_store_commit_log_max_size=4096 if per_segment > 20 else max(4096, size * per_segment),
    )
    metadata = DefaultMetadataStore(disk, "/store", "b", lambda: 1000)
    files = FlatFileStore(FileSegmentFactory(config, disk, "C"), metadata, "b")
    await files.load()
    file = files.find_or_create(TOPIC, 0)
    await file.init_offset(first)
    for number, time in enumerate(times):
        position = file.commit_log.commit_offset
        data = bytearray(record(first + number, time=time))
        data[28:36] = position.to_bytes(8, "big")
        entry = PHYSICAL.pack(77_000 + number, len(data), crc32(b"b"))
        unit = UNIT.pack(position, len(data), number % 10)
        await file.append(Batch(first + number, [bytes(data)], len(data), unit, entry, time, time))
    return files, file


def naive(times: list[int], first: int, timestamp: int, *, upper: bool) -> int:
    """As MessageFinder.offset_by_time for queues of rising times."""
    later = timestamp + 1 if upper else timestamp
    at = next((n for n, time in enumerate(times) if time >= later), len(times))
    return first + max(0, at - 1 if upper else at)


@given(st.lists(st.integers(0, 12), max_size=40).map(sorted), st.integers(0, 3), st.integers(1, 15), st.booleans())
@settings(max_examples=60, deadline=None)
def test_offset_by_time_is_the_naive_one(times: list[int], first: int, per_segment: int, is_cached: bool) -> None:
    times = [1000 + time for time in times]

    async def check() -> None:
        files, _ = await flat_files(times, first, per_segment)
        async with opened(files) as fetcher:
            if is_cached and times:
                await get(fetcher, first)
            for timestamp in range(998, 1015):
                for upper in (False, True):
                    found = await fetcher.offset_by_time(TOPIC, 0, timestamp, upper=upper)
                    assert found == naive(times, first, timestamp, upper=upper), (timestamp, upper)
                    part = times[: len(times) // 2]
                    end = first + len(part)
                    found = await fetcher.offset_by_time(TOPIC, 0, timestamp, upper=upper, end=end)
                    assert found == naive(part, first, timestamp, upper=upper), (timestamp, upper)

    trio.run(check)


async def test_offset_by_time_reads_few_records_and_passes_over_gaps() -> None:
    times = list(range(1000, 1400))
    files, file = await flat_files(times, 0, 50)
    reads = 0
    store_time = file.store_time

    async def counted(offset: int) -> int:
        nonlocal reads
        reads += 1
        return await store_time(offset)

    file.store_time = counted  # type: ignore[method-assign]
    async with opened(files) as fetcher:
        assert await fetcher.offset_by_time(TOPIC, 0, 1234, upper=False) == 234
        assert reads <= 7
        await file.skip_to(1_000_000)
        reads = 0
        assert await fetcher.offset_by_time(TOPIC, 0, 1399, upper=True) == 399
        assert await fetcher.offset_by_time(TOPIC, 0, 1400, upper=False) == 400
        assert reads == 0
        assert await fetcher.offset_by_time("none", 0, 1399, upper=True) == 0


async def test_times_of_messages() -> None:
    files, _ = await flat_files([1000, 1005], 3, 50)
    async with opened(files) as fetcher:
        for _ in range(2):
            assert [await fetcher.store_time(TOPIC, 0, offset) for offset in (2, 3, 4, 5)] == [-1, 1000, 1005, -1]
            assert await fetcher.earliest_store_time(TOPIC, 0) == 1000
            assert await fetcher.earliest_store_time(TOPIC, 1) == -1
            await get(fetcher, 3)


async def test_gets_over_segments() -> None:
    files, file = await flat_files([1000 + n for n in range(100)], 3, 7)
    async with opened(files) as fetcher:
        result = await get(fetcher, 3, 200)
        assert offsets(result) == list(range(3, 103))
        found = decode_messages(b"".join(result.buffers))
        assert [message.commit_log_offset for message in found] == [77_000 + n for n in range(100)]
        await file.skip_to(500)
        result = await get(fetcher, 103)
        assert (result.status, result.next_begin_offset) == (S.NO_MATCHED_MESSAGE, 500)


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=25, deadline=None)
def test_random_gets_of_groups_return_the_messages_of_the_queue(seed: int, is_cached: bool) -> None:
    chance = random.Random(seed)
    queue = filled(200, first=3)
    for index in range(0, 200, 17):
        queue.messages[index] = None

    async def consume(fetcher: MessageStoreFetcher, group: str) -> None:
        offset = chance.randrange(3, 100)
        accept = chance.choice((None, Accept({1, 2})))
        expected = [
            m.offset
            for m in queue.messages[offset - 3 :]
            if m is not None and (accept is None or accept.match_tags(m.tags_code))
        ]
        found: list[int] = []
        while offset < queue.commit_offset:
            if chance.random() < 0.1:
                queue.failing.symmetric_difference_update({offset})
            most = chance.choice((1, 1000))
            result = await get(fetcher, offset, chance.choice((1, 10, 64)), most, accept, group)
            if result.status is S.OFFSET_FOUND_NULL:
                queue.failing.clear()
                continue
            assert result.next_begin_offset > offset
            assert result.count <= 1 or result.size <= most
            assert result.status is (S.FOUND if result.buffers else S.NO_MATCHED_MESSAGE)
            found += offsets(result)
            offset = result.next_begin_offset
        assert found == expected

    async def check() -> None:
        options = {"read_ahead_cache_enable": is_cached, "read_ahead_message_count_threshold": 20}
        files = FakeFiles(queue)
        async with opened(files, None, None, **options) as fetcher, trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(consume, fetcher, f"g{number % 3}")

    trio.run(check)
