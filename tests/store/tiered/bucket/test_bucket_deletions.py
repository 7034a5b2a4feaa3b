"""What is deleted while something else goes on: a topic, an object that someone has deleted, an index file."""

import errno

import pytest
import trio
import trio.testing

from tests.store.replication.pairs import SLAVE
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.bucket.test_bucket_index import found, upload_index
from tests.store.tiered.bucket.test_bucket_message_store import nothing
from tests.store.tiered.bucket.test_store_edges import corrupt
from tests.store.tiered.test_tiered_message_store import drop_local
from trimq.broker.store.tiered.bucket.bucket_message_store import DAMAGED, BucketMessageStore
from trimq.broker.store.tiered.bucket.object_store import ObjectInfo
from trimq.remoting.runtime.clock import ManualClock

SMALL = {"tiered_store_index_file_max_hash_slot_num": 16, "tiered_store_index_file_max_index_num": 41}


async def create_anew(store: BucketMessageStore, nursery: trio.Nursery) -> None:
    """Send to a topic whose deletion has begun: nothing is served of the old one."""
    nursery.start_soon(store.delete_topic, TOPIC)
    await trio.testing.wait_all_tasks_blocked()
    await fill(store, 3)
    await until_dispatched(store)
    await store.flush()
    await store.uploads._drop_uploaded()
    result = store.get_message(TOPIC, 0, 3, 32, 1 << 20, None)
    assert result is not None
    assert not result.buffers


async def test_messages_of_a_new_topic_while_the_old_one_waits_for_its_deletion() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await uploaded(store)
        async with trio.open_nursery() as nursery, store.bucket_queues._changing():  # as a join of many queues does
            await create_anew(store, nursery)
        await uploaded(store)
        assert store.tier_range(TOPIC, 0) == (0, 3)


async def test_uploads_begin_although_an_object_with_keys_is_not_there(autojump_clock: trio.testing.MockClock) -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as store:
        for first in (0, 5, 10):
            await fill(store, 5, first=first)
            await uploaded(store)
    objects.delete([objects.named("/log/")[1]])
    async with opened(SimDisk(), objects, tier(tiered_store_group_commit=False)) as store:
        await trio.sleep(100)
        await fill(store, 5, first=15)
        await until_dispatched(store)
        await store.flush()
        await trio.sleep(100)
        assert store.tier_range(TOPIC, 0) == (0, 20)
        # The keys of the others are there.
        await found(store, 5)
        await found(store, 20, first=10)


async def test_a_search_leaves_an_index_file_that_is_named_meanwhile() -> None:
    clock = ManualClock()

    class Old(Objects):
        """Index files were written long ago."""

        def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
            ages = {True: 7_200_000, False: 0}
            listed = super().list(prefix, after, count)
            return [info._replace(modified_ms=clock.wall_ms() - ages["/index/" in info.name]) for info in listed]

    def lose(call: str, name: str, done: bool) -> None:
        if done and call == "create" and "/index/" in name:
            objects.fail = nothing
            raise OSError(errno.ETIMEDOUT, "no reply")

    objects = Old()
    async with opened(SimDisk(), objects, tier(**SMALL), clock=clock) as store:
        await fill(store, 30)
        await uploaded(store)
        await drop_local(store)
        assert store.tier_index is not None
        objects.fail = lose
        try:
            await store.tier_index.upload_next()
        except OSError:
            pass
        assert objects.fail is nothing
        listing = store.bucket.list

        async def slow(prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
            listed = await listing(prefix, after, count)
            await upload_index(store)
            return listed

        store.bucket.list = slow  # type: ignore[method-assign]
        await store.upkeep.delete_garbage()
        assert store.manifest.indexes
        there = {name.removeprefix(store.bucket.prefix) for name in objects.named("/index/")}
        assert set(store.manifest.indexes) <= there


async def test_messages_of_a_new_topic_while_the_deletion_of_the_old_one_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await uploaded(store)
        noted = trio.Event()
        monkeypatch.setattr(store._clean, "_save_checkpoint", noted.wait)
        async with trio.open_nursery() as nursery:
            await create_anew(store, nursery)
            monkeypatch.undo()
            noted.set()
        await uploaded(store)
        assert store.tier_range(TOPIC, 0) == (0, 3)


async def test_an_idle_queue_keeps_its_offsets_although_the_bucket_is_away(
    autojump_clock: trio.testing.MockClock,
) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await fill(store, 60, topic="Other")
        await uploaded(store)
        await drop_local(store)
        await store.clean_expired_consume_queues()

    def away(_call: str, _name: str, _done: bool) -> None:
        raise OSError(errno.EIO, "no way")

    objects.fail = away
    async with opened(disk, objects) as store:
        assert store.next_offset(TOPIC, 0) == 20
        await fill(store, 3, first=20)
        objects.fail = nothing
        await trio.sleep(200)
        await uploaded(store)
        assert store.tier_range(TOPIC, 0) == (0, 23)


async def test_a_new_topic_that_is_uploaded_while_the_old_one_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await uploaded(store)
        destroy = store.bucket_queues.destroy_topic

        async def late(topic: str) -> None:
            await fill(store, 3)
            await uploaded(store)
            assert store.tier_range(TOPIC, 0) == (0, 3)
            await destroy(topic)

        monkeypatch.setattr(store.bucket_queues, "destroy_topic", late)
        await store.delete_topic(TOPIC)
        assert store.tier_range(TOPIC, 0) == (0, 3)
        await uploaded(store)
    async with opened(SimDisk(), objects) as store:
        assert store.tier_range(TOPIC, 0) == (0, 3)


async def test_a_slave_reads_a_manifest_that_was_damaged_again(autojump_clock: trio.testing.MockClock) -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as store:
        await fill(store, 20)
        await uploaded(store)
    corrupt(objects, "C1/broker-a/manifest/root")
    async with opened(SimDisk(), objects, replication=SLAVE) as slave:
        await trio.testing.wait_all_tasks_blocked()
        trouble = slave.tier_trouble()
        assert trouble is not None
        assert trouble.code == DAMAGED
        corrupt(objects, "C1/broker-a/manifest/root")  # flips the same bit back
        await slave.is_loaded.wait()
        assert slave.tier_range(TOPIC, 0) == (0, 20)
        assert slave.tier_trouble() is None
