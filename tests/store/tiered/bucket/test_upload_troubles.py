"""What ends or delays the uploads of a store that runs: it goes on serving, and says why."""

import errno
import json

import pytest
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, put, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier
from tests.store.tiered.bucket.test_bucket_message_store import nothing, read, trouble, until, uploaded, write
from tests.store.tiered.test_tiered_message_store import all_offsets
from trimq.broker.store.tiered.bucket import uploader
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore


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
