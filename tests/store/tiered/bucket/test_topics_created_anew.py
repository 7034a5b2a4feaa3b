"""Topics that are deleted, and created anew, while something else goes on: their messages are never mixed."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing

from tests.store.replication.pairs import SLAVE
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, settings, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, uploaded
from tests.store.tiered.bucket.test_bucket_claims_and_stops import first_body
from tests.store.tiered.bucket.test_bucket_message_store import away, nothing
from trimq.broker.store.tiered.bucket import bucket_queues
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.protocol.bucket_manifest import Entry, Stretch


async def fill_durably(store: BucketMessageStore, count: int) -> None:
    await fill(store, count)
    await until_dispatched(store)
    await store.flush()
    await store.flush_queues.write()


async def test_a_topic_is_deleted_while_a_claim_removes_others(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    topics = [f"Topic{number}" for number in range(3)]
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        for topic in topics:
            await fill(store, 5, topic=topic)
        await fill(store, 5)
        await uploaded(store)
    objects.fail = away()
    async with opened(disk, objects) as store, trio.open_nursery() as nursery:
        for topic in topics[:2]:
            await store.delete_topic(topic)
        without, late = store.bucket_queues._without, topics[2:]

        async def slow(*arguments: Any) -> bool:
            if len(arguments) > 1 and late:
                nursery.start_soon(store.delete_topic, late.pop())
                await trio.testing.wait_all_tasks_blocked()
            return await without(*arguments)

        monkeypatch.setattr(store.bucket_queues, "_without", slow)
        objects.fail = nothing
        await store.is_loaded.wait()
        assert not late
    async with opened(SimDisk(), objects) as store:
        assert list(store.topics()) == [TOPIC]


async def test_a_topic_that_is_created_anew_while_unused_ones_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await fill(store, 1, topic="Other")
        await uploaded(store)
        known, noted = {"Other"}, trio.Event()
        monkeypatch.setattr(store._clean, "_save_checkpoint", noted.wait)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.clean_unused_topics, known)
            await trio.testing.wait_all_tasks_blocked()
            known.add(TOPIC)
            await fill_durably(store, 3)
            await store.uploads._drop_uploaded()
            assert await first_body(store, 2)
            assert await first_body(store, 3) == b""
            monkeypatch.undo()
            noted.set()
        await uploaded(store)
        assert store.tier_range(TOPIC, 0) == (0, 3)
        assert await first_body(store, 3) == b""
    async with opened(SimDisk(), objects) as store:
        assert store.tier_range(TOPIC, 0) == (0, 3)
        assert store.tier_range("Other", 0) == (0, 1)


@pytest.mark.parametrize("role", ["master", "slave"])
async def test_an_unused_topic_is_deleted_once(role: str) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 5)
        await fill(store, 5, topic="Other")
        await uploaded(store)
    more: dict[str, Any] = {"replication": SLAVE} if role == "slave" else {}
    async with opened(SimDisk() if more else disk, objects, **more) as store:
        await store.is_loaded.wait()
        assert await store.clean_unused_topics({"Other"}) == [TOPIC]
        assert store.bucket_queues.topics() == ["Other"]
        assert await store.clean_unused_topics({"Other"}) == []


async def test_a_topic_that_is_created_anew_while_an_object_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, local=settings(message_index_enable=False)) as store, trio.open_nursery() as tasks:
        await fill(store, 5, topic="Other")
        await fill_durably(store, 20)
        slowly, began = bucket_queues._slowly, False

        async def deleted(entry: Entry) -> AsyncIterator[Stretch]:
            nonlocal began
            async for stretch in slowly(entry):
                if stretch.topic == TOPIC and not began:
                    began = True
                    tasks.start_soon(store.delete_topic, TOPIC)
                    await trio.testing.wait_all_tasks_blocked()
                    await fill_durably(store, 3)
                yield stretch

        monkeypatch.setattr(bucket_queues, "_slowly", deleted)
        await uploaded(store)
        assert began
        await uploaded(store)
        assert store.tier_range(TOPIC, 0) == (0, 3)
        assert store.tier_range("Other", 0) == (0, 5)
    async with opened(SimDisk(), objects) as store:
        assert store.tier_range(TOPIC, 0) == (0, 3)


async def test_a_slave_serves_nothing_of_a_topic_that_its_master_has_deleted() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as master:
        await fill(master, 20)
        await fill(master, 5, topic="Other")
        await uploaded(master)
    async with opened(disk, objects, replication=SLAVE) as slave:
        await slave.is_loaded.wait()
        assert await first_body(slave, 3)
        assert await slave.follow_deletions({TOPIC: slave.dispatched_offset}) == [TOPIC]
        for _ in range(2):  # also after a look at the bucket, from which its master has not removed it yet
            assert await first_body(slave, 3) == b""
            assert slave.tier_range(TOPIC, 0) is None
            assert slave.tier_range("Other", 0) == (0, 5)
            await slave.bucket_queues.load()


async def test_a_topic_that_is_deleted_before_its_upload_takes_no_memory() -> None:
    async with opened(SimDisk(), Objects()) as store:
        await fill_durably(store, 5)
        await fill(store, 5, topic="Other")
        await store.delete_topic(TOPIC)
        await uploaded(store)
        assert store.bucket_queues.topics() == ["Other"]


async def test_unused_topics_go_from_the_bucket_though_it_fails_meanwhile() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        for topic in ("First", "Second", TOPIC):
            await fill(store, 5, topic=topic)
        await uploaded(store)
        objects.fail = away("replace")
        assert sorted(await store.clean_unused_topics({TOPIC})) == ["First", "Second"]
        objects.fail = nothing
        await store.uploads.save()
    async with opened(SimDisk(), objects) as store:
        assert list(store.topics()) == [TOPIC]
