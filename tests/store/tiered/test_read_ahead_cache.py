"""The cache of ranges: one fetch for a range, the bound on memory, expiry, and shares of groups."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from tests.store.tiered.fake_queue import FakeQueue, filled
from trimq.broker.store.tiered.access import read_ahead_cache
from trimq.broker.store.tiered.access.ranges import MESSAGE_COST
from trimq.broker.store.tiered.access.read_ahead_cache import FETCHES, FETCHES_OF_GROUP, ReadAheadCache, cache_limit
from trimq.broker.store.tiered.access.timed_reads import TierHangsError, TimedReads
from trimq.broker.store.tiered.container.message_runs import TieredMessage
from trimq.remoting.runtime.clock import ManualClock

EXPIRE_MS = 15_000
LIMIT_MS = 10_000


@asynccontextmanager
async def opened(
    clock: ManualClock, limit: int = 1 << 20, count: int = 10, size: int = 1 << 14, **more: Any
) -> AsyncIterator[ReadAheadCache]:
    reads = TimedReads(clock, LIMIT_MS)
    cache = ReadAheadCache(clock, reads, limit, EXPIRE_MS, max_count=count, max_bytes=size, **more)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reads.run)
        nursery.start_soon(cache.run)
        await wait_all_tasks_blocked()
        yield cache
        nursery.cancel_scope.cancel()


async def test_waiters_share_one_fetch_and_later_reads_need_none() -> None:
    async with opened(ManualClock()) as cache:
        queue = filled(40)
        queue.gates[0] = trio.Event()
        async with trio.open_nursery() as nursery:
            for offset in (0, 3, 9, 0):
                nursery.start_soon(cache.fetch, "g", queue, offset, 10)
                await wait_all_tasks_blocked()
            queue.gates[0].set()
        assert queue.reads == [(0, 10)]
        found = cache.get("other", queue, 9)
        assert found is not None
        message = found.messages.get(9)
        assert message is not None
        assert message.offset == 9
        assert cache.get("g", queue, 10) is None


async def test_a_fetch_ends_where_the_next_range_begins() -> None:
    async with opened(ManualClock()) as cache:
        queue = filled(40)
        await cache.fetch("g", queue, 8, 10)
        await cache.fetch("g", queue, 5, 10)
        assert queue.reads == [(8, 10), (5, 3)]


async def test_a_failed_fetch_fails_for_all_who_wait_and_is_tried_again() -> None:
    async with opened(ManualClock()) as cache:
        queue = filled(40)
        queue.failing.add(0)
        failed = 0

        async def read(offset: int) -> None:
            nonlocal failed
            with pytest.raises(OSError, match="provider"):
                await cache.fetch("g", queue, offset, 10)
            failed += 1

        async with trio.open_nursery() as nursery:
            queue.gates[0] = trio.Event()
            for offset in (0, 4):
                nursery.start_soon(read, offset)
                await wait_all_tasks_blocked()
            queue.gates[0].set()
        assert failed == 2
        assert cache.bytes == 0
        queue.failing.clear()
        assert (await cache.fetch("g", queue, 0, 10)).end == 10
        assert len(queue.reads) == 2


async def test_a_cancelled_waiter_leaves_the_fetch_to_the_others() -> None:
    async with opened(ManualClock()) as cache:
        queue = filled(40)
        queue.gates[0] = trio.Event()
        scope = trio.CancelScope()
        found: list[int] = []

        async def cancelled() -> None:
            with scope:
                await cache.fetch("g", queue, 0, 10)

        async def other() -> None:
            found.append((await cache.fetch("g", queue, 1, 10)).end)

        async with trio.open_nursery() as nursery:
            for reader in (cancelled, other):
                nursery.start_soon(reader)
                await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            queue.gates[0].set()
        assert found == [10]
        assert len(queue.reads) == 1


async def test_a_fetch_that_no_task_waits_for_any_more_does_not_start() -> None:
    async with opened(ManualClock()) as cache:
        queue = filled(100)
        async with trio.open_nursery() as nursery:
            for number in range(FETCHES_OF_GROUP + 1):
                queue.gates[10 * number] = trio.Event()
                nursery.start_soon(cache.fetch, "g", queue, 10 * number, 10)
            await wait_all_tasks_blocked()
            assert len(queue.reads) == FETCHES_OF_GROUP
            nursery.cancel_scope.cancel()
        for gate in queue.gates.values():
            gate.set()
        await wait_all_tasks_blocked()
        assert len(queue.reads) == FETCHES_OF_GROUP
        assert set(cache.groups) == {"g"}


async def test_a_fetch_that_hangs_delays_only_its_range_and_others_have_free_ones() -> None:
    async with opened(ManualClock()) as cache:
        queue, other = filled(200), filled(200)
        async with trio.open_nursery() as nursery:
            for number in range(8):
                queue.gates[10 * number] = trio.Event()
                nursery.start_soon(cache.fetch, "busy", queue, 10 * number, 10)
            await wait_all_tasks_blocked()
            with trio.fail_after(5):
                assert (await cache.fetch("calm", queue, 100, 10)).end == 110
                assert (await cache.fetch("calm", other, 0, 10)).end == 10
            assert len(queue.under_way) == FETCHES_OF_GROUP
            nursery.cancel_scope.cancel()


async def test_fetches_that_hang_give_their_places_back() -> None:
    clock = ManualClock()
    async with opened(clock) as cache:
        queues = [filled(200, queue_id=number) for number in range(FETCHES_OF_GROUP)]
        failed = 0

        async def read(queue: FakeQueue) -> None:
            nonlocal failed
            with pytest.raises(TierHangsError):
                await cache.fetch("g", queue, 0, 10)
            failed += 1

        async with trio.open_nursery() as nursery:
            for queue in queues:
                queue.gates[0] = trio.Event()
                nursery.start_soon(read, queue)
            await wait_all_tasks_blocked()
            clock.advance(12.5)
        assert failed == FETCHES_OF_GROUP
        assert cache.bytes == 0
        with trio.fail_after(5):
            assert (await cache.fetch("g", filled(200), 0, 10)).end == 10


async def test_reads_that_are_not_kept_wait_for_their_turn_too() -> None:
    async with opened(ManualClock()) as cache:
        queue = filled(200)
        gate = trio.Event()
        async with trio.open_nursery() as nursery:

            async def read(group: str, offset: int) -> None:
                item = await cache.fetch(group, queue, offset, 10, 600, keep=False)
                assert [message.offset for message in item.messages] == list(range(offset, item.end))
                assert item.size < 5000

            for number in range(4):
                for offset in range(40 * number, 40 * number + 40, 10):
                    queue.gates[offset] = gate
                    nursery.start_soon(read, f"g{number}", offset)
            await wait_all_tasks_blocked()
            assert len(queue.under_way) == FETCHES
            assert max(Counter(span.start // 40 for span in queue.under_way).values()) <= FETCHES_OF_GROUP
            assert 0 < cache.bytes < FETCHES * 5000
            gate.set()
        assert len(queue.reads) == 16
        assert (cache.bytes, cache.count, cache.groups) == (0, 0, {})


async def test_groups_have_their_turns() -> None:
    async with opened(ManualClock()) as cache:
        queue = filled(1000)
        order: list[str] = []
        gate = trio.Event()

        async def read(group: str, offset: int) -> None:
            queue.gates[offset] = gate
            await cache.fetch(group, queue, offset, 10)
            order.append(group)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(read, "busy", 10 * number)
            await wait_all_tasks_blocked()
            for number in range(3):
                nursery.start_soon(read, f"calm{number}", 500 + 10 * number)
            await wait_all_tasks_blocked()
            assert len(queue.under_way) == FETCHES
            gate.set()
        assert max(order.index(f"calm{number}") for number in range(3)) < FETCHES + 3


async def test_a_group_that_reads_a_backlog_does_not_evict_the_share_of_another() -> None:
    limit = 120_000
    async with opened(ManualClock(), limit) as cache:
        calm, hot = filled(400), filled(5000)
        kept = 0
        while cache.groups.get("calm", 0) < limit // 2 - 8_000:
            await cache.fetch("calm", calm, kept, 10)
            kept += 10
        assert kept >= 20
        for offset in range(0, 5000, 10):
            await cache.fetch("hot", hot, offset, 10)
            assert cache.bytes <= limit
        assert all(cache.look(calm, offset) is not None for offset in range(kept))
        assert cache.groups["hot"] > limit // 4
        # The least recently used ranges of the other have gone.
        assert cache.look(hot, 4990) is not None
        assert cache.look(hot, 0) is None


async def test_ranges_expire_after_their_last_use() -> None:
    clock = ManualClock()
    async with opened(clock) as cache:
        queue = filled(40)
        await cache.fetch("g", queue, 0, 10)
        await cache.fetch("g", queue, 10, 10)
        clock.advance(10)
        await wait_all_tasks_blocked()
        assert cache.get("g", queue, 0) is not None
        clock.advance(5)
        assert cache.get("g", queue, 10) is None
        assert cache.get("g", queue, 0) is not None
        for _ in range(3):
            clock.advance(7.5)
            await wait_all_tasks_blocked()
        assert (cache.bytes, cache.count, cache.groups) == (0, 0, {})


async def test_what_expires_is_given_back_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left = ManualClock(), []

    async def give_back() -> None:
        await trio.lowlevel.checkpoint()
        left.append(cache.count)

    async with opened(clock, give_back=give_back) as cache:
        queue = filled(40)
        for offset in (0, 10, 20):
            await cache.fetch("g", queue, offset, 10)
        monkeypatch.setattr(read_ahead_cache, "_GIVEN_BACK", cache.bytes // 3 + 1)
        clock.advance(7.5)
        await wait_all_tasks_blocked()
        assert left == []
        for _ in range(3):
            clock.advance(7.5)
            await wait_all_tasks_blocked()
        assert left == [10, 0]


async def test_the_next_range_is_read_ahead_for_who_reads_in_order() -> None:
    async with opened(ManualClock()) as cache:
        queue = filled(40)
        await cache.fetch("g", queue, 0, 10)
        cache.advance("g", queue, 0, 4, 10)
        cache.advance("g", queue, 6, 9, 10)  # has left some out
        await wait_all_tasks_blocked()
        assert queue.reads == [(0, 10)]
        cache.advance("g", queue, 0, 4, 10)
        cache.advance("g", queue, 4, 8, 10)
        await wait_all_tasks_blocked()
        assert queue.reads == [(0, 10), (10, 10)]
        assert cache.get("g", queue, 10) is not None


async def test_a_message_larger_than_all_memory_is_given_out_but_not_kept() -> None:
    async with opened(ManualClock(), 60_000) as cache:
        queue = filled(3, body=bytes(100_000))
        found = await cache.fetch("g", queue, 1, 10)
        assert [message.offset for message in found.messages] == [1]
        assert cache.bytes == 0


def test_the_limit_is_a_part_of_the_memory() -> None:
    assert cache_limit(1000, 0.3, 1 << 28) == 300
    assert cache_limit(1 << 34, 0.3, 1 << 28) == 1 << 28


class Model:
    """Random readers against plain lists."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.limit = 40_000
        self.queues = [self.queue(number) for number in range(3)]

    def queue(self, number: int) -> FakeQueue:
        queue = filled(120, first=number * 7, queue_id=number)
        for index in range(len(queue.messages)):
            chance = self.random.random()
            if chance < 0.05:
                queue.messages[index] = None
            elif chance < 0.1:
                message = queue.messages[index]
                assert message is not None
                data = message.record + bytes(self.random.choice((3000, 60_000)))
                queue.messages[index] = TieredMessage(message.offset, message.tags_code, data)
        return queue

    def check(self, cache: ReadAheadCache) -> None:
        assert cache.bytes <= self.limit
        ranges = [item for part in cache._queues.values() for item in part.ranges]
        kept = [item for item in ranges if item.fetch is None]
        reserved = sum(i.fetch.reserved for i in ranges if i.fetch is not None and i.fetch.is_started)
        assert cache.bytes == sum(item.size for item in kept) + reserved == sum(cache.groups.values())
        assert cache.count == sum(len(item.messages) for item in kept)
        assert sum(len(queue.under_way) for queue in self.queues) <= FETCHES
        assert all(group.running <= FETCHES_OF_GROUP for group in cache._groups.values())
        for item in kept:
            assert item.size >= sum(len(m.record) for m in item.messages) + MESSAGE_COST * len(item.messages)
        for part in cache._queues.values():
            ends = [(item.begin, item.end) for item in part.ranges]
            assert all(one[1] <= two[0] for one, two in pairwise(ends))

    async def reader(self, cache: ReadAheadCache, group: str, steps: int) -> None:
        for _ in range(steps):
            queue = self.random.choice(self.queues)
            offset = self.random.randrange(queue.first, queue.commit_offset)
            for _ in range(self.random.randint(1, 4)):
                if offset >= queue.commit_offset:
                    break
                count = self.random.choice((1, 5, 20))
                if self.random.random() < 0.2:
                    queue.failing.symmetric_difference_update({offset})
                with trio.move_on_after(0.0 if self.random.random() < 0.1 else 60):
                    try:
                        item = await cache.fetch(group, queue, offset, count)
                    except OSError:
                        continue
                    expected = [m for m in queue.messages[item.begin - queue.first : item.end - queue.first] if m]
                    assert item.begin <= offset < item.end
                    assert list(item.messages) == expected
                    behind = [run.message(number) for run, number in item.messages.behind(offset)]
                    assert behind[:1] == [message for message in expected if message.offset >= offset][:1]
                    cache.advance(group, queue, offset, item.end, count)
                    offset = item.next_offset
                self.check(cache)
            if self.random.random() < 0.1:
                self.clock.advance(self.random.choice((1, 8, 20)))

    async def run(self) -> None:
        async with opened(self.clock, self.limit, 20, 5000) as cache:
            async with trio.open_nursery() as nursery:
                for number in range(5):
                    nursery.start_soon(self.reader, cache, f"g{number % 4}", 20)
            await wait_all_tasks_blocked()
            self.check(cache)
            for _ in range(4):
                self.clock.advance(EXPIRE_MS / 1000)
                await wait_all_tasks_blocked()
            assert (cache.bytes, cache.count, cache.groups) == (0, 0, {})


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_random_readers_get_the_right_messages_within_the_bounds(seed: int) -> None:
    trio.run(Model(seed).run)


async def test_more_fetches_of_a_group_wait_for_memory_instead_of_taking_the_share_of_others() -> None:
    limit = 120_000
    async with opened(ManualClock(), limit, 20, 1 << 20) as cache:
        queues = {"a": filled(2000), "b": filled(2000)}
        kept = {"a": 0, "b": 0}
        for name, queue in queues.items():
            while cache.groups.get(name, 0) < limit // 3 - 12_000:
                kept[name] = (await cache.fetch(name, queue, kept[name], 10)).end
        hot = filled(200)
        async with trio.open_nursery() as nursery:
            for number in range(FETCHES_OF_GROUP):
                hot.gates[20 * number] = trio.Event()
                nursery.start_soon(cache.fetch, "hot", hot, 20 * number, 20)
            await wait_all_tasks_blocked()
            for name, queue in queues.items():
                assert all(cache.look(queue, offset) is not None for offset in range(kept[name])), name
            started = len(hot.under_way)
            assert started > 0
            for gate in hot.gates.values():
                gate.set()
        assert len(hot.reads) == FETCHES_OF_GROUP
        assert started < FETCHES_OF_GROUP
