"""The oldest log offset that a consumer has yet to read: of groups with members only, computed on request."""

import errno
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio.testing

from tests.broker.services.fakes import FakeConnection, channel, configuration
from tests.store.simdisk import SimDisk
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.unread import INTERVAL_SECONDS, UnreadPositions
from trimq.protocol.body import SubscriptionData
from trimq.remoting.runtime.clock import ManualClock


class World:
    """Queues of 100 messages. The message at queue offset n is at log offset 1000 times the queue id plus n."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.consumers = ConsumerManager(configuration(), self.clock)
        self.offsets = ConsumerOffsetManager(configuration(), SimDisk(), self.clock)
        self.unread = UnreadPositions(self.consumers, self.offsets, self.look, self.clock)
        self.looks = 0
        self.cold: set[int] = set()
        self.broken = False

    def look(self, topic: str, queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]] | None:
        assert (topic, count) == ("T", 1)
        self.looks += 1
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if queue_id in self.cold:
            return None
        return [(1000 * queue_id + offset, 1, 0)] if 0 <= offset < 100 else []

    def join(self, group: str = "G") -> FakeConnection:
        connection = FakeConnection()
        self.consumers.register(
            group, channel(connection, group), "", "CLUSTERING", "", [SubscriptionData(topic="T", sub_string="*")]
        )
        return connection

    async def asked(self) -> int:
        """The answer a moment after the request."""
        self.unread.oldest()
        await trio.testing.wait_all_tasks_blocked()
        return self.unread.oldest()

    async def later(self) -> int:
        """The answer that is computed next."""
        self.clock.advance(INTERVAL_SECONDS)
        return await self.asked()


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    async with trio.open_nursery() as nursery:
        await nursery.start(made.unread.run)
        yield made
        nursery.cancel_scope.cancel()


async def test_the_slowest_queue_of_the_groups_with_members() -> None:
    async with world() as it:
        it.offsets.commit("me", "G", "T", 3, 50)
        it.offsets.commit("me", "G", "T", 2, 60)
        it.offsets.commit("me", "Gone", "T", 1, 10)
        assert it.unread.oldest() == 0, "not known yet"
        assert await it.asked() == sys.maxsize
        member = it.join()
        assert await it.later() == 2060
        it.offsets.commit_pull("G", "T", 2, 100)
        assert await it.later() == 3050, "messages already sent need not be read again"
        it.offsets.commit_pull("G", "T", 3, 100)
        assert await it.later() == sys.maxsize
        it.offsets.commit_pull("G", "T", 3, 99)
        assert await it.later() == 3099
        member.close("it goes")
        assert await it.later() == sys.maxsize


async def test_queues_that_a_group_has_never_read_do_not_count() -> None:
    async with world() as it:
        it.join()
        it.offsets.commit("me", "G", "T", 0, -1)
        assert await it.asked() == sys.maxsize
        assert it.looks == 0


async def test_where_it_is_unknown_nothing_counts_as_read() -> None:
    async with world() as it:
        it.join()
        it.offsets.commit("me", "G", "T", 1, 5)
        it.cold = {1}
        assert await it.asked() == 0
        it.cold = set()
        assert await it.later() == 1005
        it.broken = True
        assert await it.later() == 0


async def test_it_is_computed_once_a_second_and_only_while_requested() -> None:
    async with world() as it:
        it.join()
        it.offsets.commit("me", "G", "T", 1, 5)
        await trio.testing.wait_all_tasks_blocked()
        assert it.looks == 0
        for _ in range(5):
            assert await it.asked() == 1005
        assert it.looks == 1
        it.clock.advance(INTERVAL_SECONDS)
        await trio.testing.wait_all_tasks_blocked()
        assert it.looks == 2
        it.clock.advance(10 * INTERVAL_SECONDS)
        await trio.testing.wait_all_tasks_blocked()
        assert it.looks == 2
        assert it.unread.oldest() == 0, "an old value is not used"


async def test_many_queues_are_looked_up_in_slices() -> None:
    async with world() as it:
        it.join()
        for queue_id in range(1000):
            it.offsets.commit("me", "G", "T", queue_id, 1)
        turns = 0
        it.unread.oldest()
        while it.looks < 1000:
            await trio.lowlevel.checkpoint()
            turns += 1
        assert turns > 10
