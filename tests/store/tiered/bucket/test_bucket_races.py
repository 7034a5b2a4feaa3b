"""A store with a bucket, when something else happens in the middle: a failed request, a deletion, another owner."""

import errno
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, put, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.tiered.access import tiered_store
from trimq.broker.store.tiered.bucket import joiner
from trimq.broker.store.tiered.bucket.bucket_queues import BucketQueues
from trimq.broker.store.tiered.bucket.manifest import FencedError, Manifest
from trimq.broker.store.tiered.bucket.object_store import ObjectInfo
from trimq.protocol.bucket_manifest import Entry, Stretch
from trimq.remoting.runtime.clock import ManualClock


async def test_a_claim_goes_on_after_a_failure_behind_its_root(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 5)
        await uploaded(store)
    objects.calls.clear()
    failed: list[str] = []

    def fail(call: str, name: str, _done: bool) -> None:
        if call == "list" and not failed and any(one == "replace" for one, _ in objects.calls):
            failed.append(name)
            raise OSError(errno.EIO, "no way")

    objects.fail = fail
    async with opened(disk, objects) as store:
        with trio.fail_after(100):
            await store.is_loaded.wait()
        assert failed
        await fill(store, 5, first=5)
        await uploaded(store)
        assert store.tier_trouble() is None
        assert store.tier_range(TOPIC, 0) == (0, 10)


async def test_a_topic_that_is_deleted_during_its_upload_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await put(store, b"other", topic="Other")
        await fill(store, 20)
        await until_dispatched(store)
        await store.flush()
        create = store.bucket.create

        async def slow(name: str, data: Sequence[Any]) -> None:
            await create(name, data)
            if name.startswith("log/"):
                monkeypatch.undo()
                await store.delete_topic(TOPIC)

        monkeypatch.setattr(store.bucket, "create", slow)
        await store.uploads.upload_all()
        assert store.tier_range(TOPIC, 0) is None
        assert store.tier_range("Other", 0) == (0, 1)
        await fill(store, 5)
        await uploaded(store)
        assert store.tier_range(TOPIC, 0) == (0, 5)


async def test_a_topic_of_a_restored_store_that_was_created_anew_keeps_its_offsets() -> None:
    objects, disk = Objects(), SimDisk()
    async with opened(SimDisk(), objects) as store:
        await fill(store, 100)
        await uploaded(store)
    async with opened(disk, objects) as store:
        assert store.next_offset(TOPIC, 0) == 100
        await store.delete_topic(TOPIC)
        await fill(store, 3)
        await uploaded(store)
    async with opened(disk, objects) as store:
        assert store.next_offset(TOPIC, 0) == 3


async def test_a_search_leaves_what_waits_for_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    clock = ManualClock()

    class Old(Objects):
        def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
            ages = {True: 7_200_000, False: 0}
            found = super().list(prefix, after, count)
            return [info._replace(modified_ms=clock.wall_ms() - ages["/log/" in info.name]) for info in found]

    objects = Old()
    async with opened(SimDisk(), objects, clock=clock) as store:
        for number in range(4):
            await fill(store, 3, first=3 * number)
            await uploaded(store)
        while await store.upkeep.join():
            pass
        assert len(store.bucket_queues.garbage) >= 4
        assert await store.upkeep.delete_garbage() == 0
        assert len(objects.named("/log/")) == 4


async def test_an_owner_that_is_fenced_by_its_upkeep_writes_no_object(autojump_clock: trio.testing.MockClock) -> None:
    objects = Objects()
    async with opened(SimDisk(), objects, tier(tiered_store_group_commit=False)) as first:
        await fill(first, 5)
        await uploaded(first)
        async with opened(SimDisk(), objects):
            pass
        with pytest.raises(FencedError) as caught:
            await first.bucket_queues.save(b"state")
        first._fenced(caught.value)
        before = objects.named("/log/")
        await fill(first, 5, first=5)
        await until_dispatched(first)
        await first.flush()
        await trio.sleep(100)
        assert objects.named("/log/") == before


class Counted(Sequence[Stretch]):
    """Stretches that count how often they are gone through."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches, self.times = stretches, 0

    def __iter__(self) -> Iterator[Stretch]:
        self.times += 1
        return iter(self.stretches)

    def __len__(self) -> int:
        return len(self.stretches)

    def __getitem__(self, index: Any) -> Any:
        return self.stretches[index]


async def test_a_join_of_many_queues_goes_through_them_a_few_times() -> None:
    async with opened(SimDisk(), Objects()) as store:
        for queue_id in range(50):
            await fill(store, 1, queue_id=queue_id)
        await uploaded(store)
        (entry,) = store.manifest.entries
        joined = Counted(list(entry.stretches))
        assert await store.bucket_queues.replace([entry], [Entry(entry.object._replace(generation=1), joined)])
        assert joined.times < 10
        assert store.tier_range(TOPIC, 49) == (0, 1)


async def test_a_slave_has_the_queue_of_a_topic_that_was_created_anew() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await uploaded(store)
        slave = BucketQueues(store.bucket, Manifest(store.bucket, "C1", "broker-a"), store.tier, disk, lambda: 0.0)
        await slave.load()
        queue = slave.find(TOPIC, 0)
        assert queue is not None
        assert (queue.min_offset, queue.commit_offset) == (0, 20)
        await store.delete_topic(TOPIC)
        await uploaded(store)
        await slave.load()
        assert slave.find(TOPIC, 0) is None
        await fill(store, 5)
        await uploaded(store)
        await slave.load()
        # Another object: what was read ahead of the old queue is not that of the new one.
        assert queue.is_destroyed
        queue = slave.find(TOPIC, 0)
        assert queue is not None
        assert (queue.min_offset, queue.commit_offset) == (0, 5)


async def test_a_topic_that_is_deleted_while_queues_continue_is_not_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_store, "_SLICE", 2)
    topics = [f"T{number:02}" for number in range(30)]
    async with opened(SimDisk(), Objects()) as store:
        for topic in topics:
            await fill(store, 3, topic=topic)
        await uploaded(store)
        for topic in topics:
            store.queues.drop_topic(topic)  # their files are lost
        begun = trio.Event()
        create = store.queues.find_or_create

        def creating(topic: str, queue_id: int) -> ConsumeQueue:
            begun.set()
            return create(topic, queue_id)

        monkeypatch.setattr(store.queues, "find_or_create", creating)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store._continue_queues)
            await begun.wait()
            await store.bucket_queues.destroy_topic(topics[-1])
        assert sorted(store.topics()) == topics[:-1]
        assert {store.next_offset(topic, 0) for topic in topics[:-1]} == {3}
