"""What ends or delays the uploads of a store that runs: it goes on serving, and says why."""

import errno
import json
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import pytest
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, put, settings, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.bucket.test_bucket_message_store import nothing, read, trouble, until, write
from tests.store.tiered.test_tiered_message_store import all_offsets
from trimq.broker.store.tiered.bucket import uploader
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.remoting.runtime.clock import ManualClock

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


async def fill_durably(store: BucketMessageStore, count: int, first: int = 0) -> None:
    await fill(store, count, first=first)
    await until_dispatched(store)
    await store.flush()


async def test_an_owner_that_is_fenced_while_it_uploads_goes_on_serving(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "OBJECTS_A_ROOT", 1)
    objects = Objects()
    async with opened(SimDisk(), objects, tier(tiered_store_group_commit=False)) as first:
        await fill_durably(first, 20)
        await until(lambda: not first.uploads.behind)
        async with opened(SimDisk(), objects):
            await fill_durably(first, 20, first=20)
            await until(lambda: first.uploads.fenced)
            assert trouble(first)[0] == "tier_fenced"
            assert "the bucket has another owner: epoch 2" in trouble(first)[1]
            assert len(await all_offsets(first, 0, 40)) == 40
            await put(first, b"more")
            assert first.next_offset(TOPIC, 0) == 41


async def test_an_owner_with_a_few_objects_learns_in_time_that_it_is_fenced(
    autojump_clock: trio.testing.MockClock,
) -> None:
    objects, clock = Objects(), ManualClock()
    # An index file is uploaded once an hour, and shows it too.
    async with opened(SimDisk(), objects, local=settings(message_index_enable=False), clock=clock) as first:
        await fill(first, 20)
        await uploaded(first)
        async with opened(SimDisk(), objects):
            await fill_durably(first, 20, first=20)
            clock.advance(60)  # and so an object is due
            await until(lambda: not first.uploads.behind)
            assert first.tier_trouble() is None
            clock.advance(3600)
            await until(lambda: first.uploads.fenced)
            assert trouble(first)[0] == "tier_fenced"


def damage_next_upload(objects: Objects) -> None:
    """The reply to the next upload is lost, and the bytes in the bucket are not those that were sent."""

    def damage(call: str, name: str, done: bool) -> None:
        if not done and call == "create" and "/log/" in name:
            objects.fail = nothing
            objects.create(name, [bytes(1000)])
            raise OSError(errno.ETIMEDOUT, "no reply")

    objects.fail = damage


async def test_a_damaged_object_delays_uploads_until_it_is_deleted(autojump_clock: trio.testing.MockClock) -> None:
    objects = Objects()
    async with opened(SimDisk(), objects, tier(tiered_store_group_commit=False)) as store:
        damage_next_upload(objects)
        await fill_durably(store, 20)
        await until(lambda: store.uploads.failures >= 2)
        assert trouble(store)[0] == "tier_away"
        assert "delete the object" in trouble(store)[1]
        assert store.uploads.behind == 20
        objects.delete(objects.named("/log/"))
        await until(lambda: not store.uploads.behind, 120)
        assert store.tier_trouble() is None


async def test_a_stop_with_a_damaged_object_is_orderly(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(tiered_store_group_commit=False)) as store:
        damage_next_upload(objects)
        await fill_durably(store, 20)
        await until(lambda: store.uploads.failures == 1)
    objects.delete(objects.named("/log/"))
    async with opened(disk, objects) as store:
        await uploaded(store)
        assert store.uploads.messages == 20


async def test_a_stop_uploads_a_state_that_has_changed_alone() -> None:
    objects, disk = Objects(), SimDisk()
    state = json.dumps({"offsetTable": {f"{TOPIC}@g": {"0": 3}}}).encode()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await uploaded(store)
        disk.make_directory(f"{store.root}/config")
    async with opened(disk, objects) as store:
        write(disk, f"{store.root}/config/consumerOffset.json", state)
    new = SimDisk()
    async with opened(new, objects) as store:
        assert read(new, f"{store.root}/config/consumerOffset.json") == state


class HeldDisk(SimDisk):
    """Holds uploads until the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go_on = trio.Event(), trio.Event()

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        if getattr(fn, "__name__", "") == "create" and any("/log/" in str(one) for one in args):
            self.began.set()
            await self.go_on.wait()
        return await super().run(fn, *args)


async def test_a_topic_that_is_deleted_during_an_upload_does_not_come_back() -> None:
    disk, objects = HeldDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill_durably(store, 20)
        await fill(store, 5, topic="Other")
        await until_dispatched(store)
        await store.flush()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.uploads.upload_all)
            await disk.began.wait()
            await store.delete_topic(TOPIC)
            disk.go_on.set()
        assert store.tier_queues.find("Other", 0) is not None
        assert store.tier_queues.find(TOPIC, 0) is None or not list(store.tier_queues.of_topic(TOPIC)[0].stretches)
        left = disk.copy()
        await put(store, b"new")
        await uploaded(store)
        assert [offset for offset, _ in await all_offsets(store, 0, 1)] == [0]
    for of in (left, SimDisk()):  # after a kill, and on an empty disk, before the new topic and with it
        async with opened(of, objects, tier(tiered_storage_level=TieredStorageLevel.FORCE)) as store:
            queue = store.tier_queues.find(TOPIC, 0)
            assert queue is None or queue.commit_offset <= 1
            other = store.tier_queues.find("Other", 0)
            assert other is not None
            assert (other.min_offset, other.commit_offset) == (0, 5)


async def test_an_index_without_room_does_not_repeat_an_upload(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill_durably(store, 5)
        index = store.tier_index
        assert index is not None
        fill_index, failures = index.fill, 2

        async def full() -> None:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise OSError(errno.ENOSPC, "no room for keys")
            await fill_index()

        index.fill = full  # type: ignore[method-assign]
        for first in (5, 10, 15):
            await store.uploads._try(force=True)
            await fill_durably(store, 5, first=first)
        await uploaded(store)
        ends = [entry.object.end for entry in store.manifest.entries]
        assert [entry.object.begin for entry in store.manifest.entries] == [0, *ends[:-1]]
        assert store.uploads.messages == 20
        topic_id = store.bucket_queues.topic_id(TOPIC)
        for number in range(20):  # what waited for room is in the index now
            found = await index.query(TOPIC, f"u{TOPIC}0-{number}", 9, 0, 1 << 62, topic_id=topic_id)
            assert len(found) == 1, number
    async with opened(disk, objects, tier(tiered_storage_level=TieredStorageLevel.FORCE)) as store:
        assert len(await all_offsets(store, 0, 20)) == 20
