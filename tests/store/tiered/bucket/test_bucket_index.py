"""The key index of a store with a bucket: keys are found before and after restarts, joins, a restore, and a crash."""

import pytest
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, by_key, fill, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.test_tiered_message_store import drop_local
from trimq.broker.store.tiered.bucket import bucket_message_store
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.index_objects import IndexName, parse_index_name
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.remoting.runtime.clock import ManualClock

FORCE = {"tiered_storage_level": TieredStorageLevel.FORCE}
SMALL = {"tiered_store_index_file_max_hash_slot_num": 16, "tiered_store_index_file_max_index_num": 41}


async def found(store: BucketMessageStore, count: int, *, first: int = 0, queue_id: int = 0) -> None:
    """Each message is found by its unique key, once, at its log offset."""
    for number in range(first, count):
        messages = await by_key(store, f"u{TOPIC}{queue_id}-{number}")
        assert [message.queue_offset for message in messages] == [number], number
        assert messages[0].body.startswith(f"{TOPIC}-{queue_id}-{number}-".encode())


async def is_ready(store: BucketMessageStore) -> None:
    """Wait until the index is complete: only then uploads begin."""
    with trio.fail_after(30):
        await store.is_loaded.wait()
        await trio.testing.wait_all_tasks_blocked()


async def upload_index(store: BucketMessageStore) -> None:
    assert store.tier_index is not None
    while await store.tier_index.upload_next():
        pass


@pytest.mark.parametrize("options", [{}, SMALL])
async def test_keys_are_found_after_restart_and_restore(options: dict[str, int]) -> None:
    disk, objects = SimDisk(), Objects()
    config = tier(**options)
    async with opened(disk, objects, config) as store:
        await fill(store, 60)
        await uploaded(store)
        await upload_index(store)
        await drop_local(store)
        await found(store, 60)
        await fill(store, 30, first=60)
        await uploaded(store)
        assert bool(objects.named("/index/")) == bool(options)
    async with opened(disk, objects, config) as store:
        await is_ready(store)
        await found(store, 90)
    async with opened(SimDisk(), objects, config) as store:
        await is_ready(store)
        await found(store, 90)
        await fill(store, 5, first=90)
        await uploaded(store)
        await found(store, 95)


async def test_a_restore_reads_only_the_keys_that_were_not_uploaded() -> None:
    disk, objects = SimDisk(), Objects()
    config = tier(**SMALL)
    async with opened(disk, objects, config) as store:
        for first in range(0, 100, 10):
            await fill(store, 10, first=first)
            await uploaded(store)
        await upload_index(store)
        names = [parse_index_name(name.removeprefix(store.bucket.prefix)) for name in objects.named("/index/")]
        upto = max(name.upto for name in names if name is not None)
        assert 0 < upto < store.manifest.end
        assert len(store.manifest.indexes) == len(names) > 1
    objects.calls.clear()
    async with opened(SimDisk(), objects, config) as store:
        await is_ready(store)
        behind = [entry.object for entry in store.manifest.entries if entry.object.end > upto]
        assert 0 < len(behind) < 10
        # The directory and one range of each object that the uploaded files do not cover.
        read = [name for call, name in objects.calls if call == "read_range" and "/log/" in name]
        assert {name.removeprefix(store.bucket.prefix) for name in read} == {one.name for one in behind}
        await found(store, 100)


async def test_a_file_that_ends_within_an_object_does_not_cover_it() -> None:
    """Keys go into the index queue by queue: others, with lower log offsets, come into the next file."""
    disk, objects = SimDisk(), Objects()
    config = tier(**SMALL)
    async with opened(disk, objects, config) as store:
        for number in range(30):
            for queue_id in range(2):
                await fill(store, 1, queue_id=queue_id, first=number)
        await uploaded(store)
        await upload_index(store)
        assert len(objects.named("/log/")) == 1
        assert len(objects.named("/index/")) > 1
    async with opened(SimDisk(), objects, config) as store:
        await is_ready(store)
        for queue_id in range(2):
            await found(store, 30, queue_id=queue_id)


async def test_a_kill_takes_no_key() -> None:
    disk, objects = SimDisk(), Objects()
    config = tier(**SMALL)
    async with opened(disk, objects, config) as store:
        await fill(store, 30)
        await uploaded(store)
        left = disk.copy()  # nothing of the index is flushed yet but what its marks say
    async with opened(left, objects, config) as store:
        await is_ready(store)
        await drop_local(store)
        await found(store, 30)


async def test_an_index_file_is_uploaded_after_an_hour(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects, clock = SimDisk(), Objects(), ManualClock()
    async with opened(disk, objects, clock=clock) as store:
        await fill(store, 3)
        await uploaded(store)
        await trio.sleep(60)
        assert not objects.named("/index/")
        clock.set_wall_ms(clock.wall_ms() + bucket_message_store._SEAL_AFTER_MS)
        await trio.sleep(60)
        (name,) = objects.named("/index/")
        assert store.manifest.indexes == (name.removeprefix(store.bucket.prefix),)
        await found(store, 3)
        await until_dispatched(store)
        # Without keys there is nothing more to upload.
        clock.set_wall_ms(clock.wall_ms() + 2 * bucket_message_store._SEAL_AFTER_MS)
        await trio.sleep(60)
        assert len(objects.named("/index/")) == 1


async def test_a_large_index_file_is_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimq.broker.store.tiered.bucket.index_objects.PART_SIZE", 512)
    disk, objects = SimDisk(), Objects()
    config = tier(**SMALL)
    async with opened(disk, objects, config) as store:
        await fill(store, 60)
        await uploaded(store)
        await upload_index(store)
        assert ("finish", objects.named("/index/")[0]) in objects.calls
    async with opened(SimDisk(), objects, config) as store:
        await is_ready(store)
        await found(store, 60)


async def test_expired_index_files_go() -> None:
    disk, objects, clock = SimDisk(), Objects(), ManualClock()
    config = tier(**SMALL, tiered_store_file_reserved_time=1)
    async with opened(disk, objects, config, clock=clock) as store:
        await fill(store, 60)
        await uploaded(store)
        await upload_index(store)
        assert objects.named("/index/")
        clock.set_wall_ms(clock.wall_ms() + 3_700_000)
        assert store.tier_index is not None
        await store.tier_index.expire()
        assert store.manifest.root is not None
        assert (store.manifest.indexes, store.manifest.root.indexes) == ((), "")
        clock.advance(3600)
        await store.bucket_queues.garbage.delete_due()
        assert not objects.named("index")


def test_names() -> None:
    name = IndexName(1_700_000_000_000, 1_700_000_001_000, 12345, 678, 9)
    assert parse_index_name(str(name)) == name
    assert parse_index_name(str(name) + "0") is None
    assert parse_index_name("index/x") is None
