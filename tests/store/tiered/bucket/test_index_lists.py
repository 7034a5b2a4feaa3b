"""The list of index files: an object of its own that the root names, written when it changes."""

import pytest
import structlog.testing
import trio
import trio.testing

from tests.store.replication.pairs import SLAVE
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, by_key, fill
from tests.store.tiered.bucket.faulty_store import PREFIX, FaultyStore
from tests.store.tiered.bucket.history import manifest, upload
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.bucket.test_store_edges import corrupt
from tests.store.tiered.test_tiered_message_store import all_offsets, drop_local
from trimq.broker.store.tiered.bucket import bucket_message_store
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.index_objects import IndexName
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.object_store import Read
from trimq.protocol.bucket_manifest import decode_indexes
from trimq.protocol.bucket_names import INDEX_LISTS, ROOT, indexes_name
from trimq.remoting.runtime.clock import ManualClock

HOUR_MS = 3_600_000
YEAR = [str(IndexName(hour * HOUR_MS, hour * HOUR_MS, hour, 5000, 1)) for hour in range(365 * 24)]
FILES = YEAR[:1002]
"""More than one answer to a listing has."""


def list_of(owner: Manifest) -> str:
    assert owner.root is not None
    return owner.root.indexes


async def test_a_year_of_hourly_files() -> None:
    store = FaultyStore()
    owner = manifest(store.bucket())
    await owner.claim()
    await owner.save(indexes=YEAR)
    assert len(store.get(ROOT)) < 400
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.indexes == tuple(YEAR)
    second = manifest(store.bucket())
    await second.claim()
    assert (second.indexes, list_of(second)) == (tuple(YEAR), list_of(owner))


async def test_the_list_is_written_only_when_it_changes() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    reader = manifest(store.bucket())
    for names, listed in ((["a"], [indexes_name(2, 1)]), (["a"], []), (None, []), (["a", "b"], [indexes_name(5, 1)])):
        since = len(store.calls)
        await owner.save(indexes=names)
        assert store.names("create", since) == listed
        since = len(store.calls)
        await reader.load()
        assert [name for name in store.names("read", since) if name != ROOT] == listed
        assert reader.indexes == owner.indexes == (tuple(names) if names else ("a",))
    await upload(bucket, owner, 1)
    await owner.save()
    await reader.load()
    assert (reader.indexes, list_of(reader)) == (("a", "b"), indexes_name(5, 1))
    assert indexes_name(2, 1) in owner.garbage_pages()
    await owner.save(indexes=[])
    await reader.load()
    assert (owner.indexes, reader.indexes, list_of(reader)) == ((), (), "")
    assert owner.garbage_pages() == [indexes_name(5, 1)]


@pytest.mark.parametrize("names", [None, ["a"], ["b"], ["c"], []])
@pytest.mark.parametrize("after", [False, True])
async def test_a_save_that_fails(names: list[str] | None, *, after: bool) -> None:
    """Its list may be named already: the next save names what it should, whatever has become of this one."""
    store = FaultyStore()
    owner = manifest(store.bucket())
    await owner.claim()
    await owner.save(indexes=["a"])
    store.fail_method("replace", OSError("cut"), after=after)
    with pytest.raises(OSError, match="cut"):
        await owner.save(indexes=["b"])
    assert owner.indexes == ("a",)
    await owner.save(indexes=names)
    expected = ("b",) if names is None else tuple(names)
    assert owner.indexes == expected
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.indexes == expected
    lists = {name for name in store.objects() if name.startswith(INDEX_LISTS)}
    assert lists - set(owner.garbage_pages()) == {list_of(owner)} - {""}
    # A load begins anew.
    second = manifest(store.bucket())
    await second.claim()
    await second.save()
    assert second.indexes == expected


async def test_a_list_that_is_replaced_during_a_load() -> None:
    store = FaultyStore()
    owner = manifest(store.bucket())
    await owner.claim()
    await owner.save(indexes=["a"])

    first = list_of(owner)

    class Late(Bucket):
        """The owner replaces the list, and deletes the one before, just before it is read."""

        async def read(self, name: str) -> Read:
            if name == first:
                await owner.save(indexes=["b"])
                store.remove(first)
            return await super().read(name)

    since = len(store.calls)
    reader = manifest(Late(store, SimDisk(), PREFIX))
    await reader.load()
    assert (reader.indexes, reader.lost_list) == (("b",), "")
    assert "index/" not in store.names("list", since)
    store.remove(list_of(owner))
    await reader.load()  # it is known
    assert (reader.indexes, reader.lost_list) == (("b",), "")


async def with_lost_list(store: FaultyStore, *, damaged: bool) -> Manifest:
    """An owner whose list of index files is lost."""
    owner = manifest(store.bucket())
    await owner.claim()
    await upload(store.bucket(), owner, 3)
    await owner.save(indexes=FILES)
    for name in FILES:
        store.put(name, b"x")
    if damaged:
        store.put(list_of(owner), store.get(list_of(owner))[:-1])
    else:
        store.remove(list_of(owner))
    return owner


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_lost_list_is_made_anew_from_the_files(*, damaged: bool) -> None:
    store = FaultyStore()
    before = await with_lost_list(store, damaged=damaged)
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.indexes == tuple(FILES)
    assert list_of(before) in reader.lost_list
    since = len(store.calls)
    await reader.load()
    assert "index/" not in store.names("list", since)
    owner = manifest(store.bucket())
    await owner.load()
    await owner.claim()
    assert (owner.indexes, owner.lost_list) == (tuple(FILES), "")
    assert list_of(owner) != list_of(before)
    assert list_of(before) in owner.garbage_pages()
    await reader.load()
    assert (reader.indexes, reader.lost_list) == (tuple(FILES), "")


async def test_what_a_fenced_owner_wrote_is_not_taken_for_a_lost_list() -> None:
    """The first owner was fenced at log offset 3000, and has uploaded messages and keys up to 5000 since then."""
    store = FaultyStore()
    await with_lost_list(store, damaged=False)
    second = manifest(store.bucket(), "b")
    await second.load()
    await second.claim()
    await upload(store.bucket(), second, 3)
    await second.save()
    others = [
        IndexName(HOUR_MS * 2000, HOUR_MS * 3000, 3000, 1, 1),
        IndexName(HOUR_MS * 3000, HOUR_MS * 4000, 5000, 1, 1),
        IndexName(HOUR_MS * 4000, HOUR_MS * 5000, 5000, 1, 2),
        IndexName(HOUR_MS * 5000, HOUR_MS * 6000, 5000, 1, 3),  # of an owner that has not got the bucket
        IndexName(HOUR_MS * 4000, HOUR_MS * 6000, 5000, 2, 2),  # a second attempt
    ]
    for name in map(str, others):
        store.put(name, b"x")
    store.put("index/strange", b"x")
    store.remove(list_of(second))
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.indexes == (*FILES, str(others[0]), str(others[4]))


SMALL = {"tiered_store_index_file_max_hash_slot_num": 16, "tiered_store_index_file_max_index_num": 41}


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("restored", [False, True])
async def test_a_store_whose_list_is_lost_goes_on(*, damaged: bool, restored: bool) -> None:
    """Messages and keys are found, by a slave too, and uploads go on."""
    disk, objects, config = SimDisk(), Objects(), tier(**SMALL)
    async with opened(disk, objects, config) as store:
        await fill(store, 60)
        await uploaded(store)
        assert store.tier_index is not None
        while await store.tier_index.upload_next():
            pass
        await drop_local(store)
        await fill(store, 30, first=60)
        await uploaded(store)
        names = store.manifest.indexes
        assert names
    lost = store.bucket.prefix + list_of(store.manifest)
    if damaged:
        corrupt(objects, lost)
    else:
        objects.delete([lost])
    with structlog.testing.capture_logs() as logs:
        async with opened(SimDisk(), objects, config, replication=SLAVE) as slave:
            await slave.is_loaded.wait()
            await slave.bucket_queues.load()  # it is said once
            assert (slave.tier_trouble(), slave.manifest.indexes) == (None, names)
            assert len(await all_offsets(slave, 0, 90)) == 90
        async with opened(SimDisk() if restored else disk, objects, config) as store:
            await store.is_loaded.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert store.tier_trouble() is None
            await fill(store, 5, first=90)
            await uploaded(store)
            assert len(await all_offsets(store, 0, 95)) == 95
            for number in range(95):
                (message,) = await by_key(store, f"u{TOPIC}0-{number}")
                assert message.queue_offset == number
            assert set(names) <= set(decode_indexes(objects.read(store.bucket.prefix + list_of(store.manifest)).data))
            assert store.bucket.prefix + list_of(store.manifest) != lost
    said = [one for one in logs if one["event"] == "tiered_index_list_lost"]
    assert [(one["log_level"], one["files"]) for one in said] == [("warning", len(names))] * 2


async def test_a_store_with_a_year_of_hourly_files(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects, clock = SimDisk(), Objects(), ManualClock()
    config = tier(tiered_store_file_reserved_time=10**6)
    async with opened(disk, objects, config, clock=clock) as store:
        start = clock.wall_ms() - len(YEAR) * HOUR_MS
        assert store.tier_index is not None
        for number in range(len(YEAR)):
            stamp = start + number * HOUR_MS
            parts = IndexName(stamp, stamp + HOUR_MS, 0, 5000, 1)
            store._index_objects._add(str(parts), parts)
        await fill(store, 3)
        await uploaded(store)
        assert store.manifest.indexes == tuple(store._index_objects.names or ())
        before = len(objects.calls)
        clock.set_wall_ms(clock.wall_ms() + bucket_message_store._SEAL_AFTER_MS)
        await trio.sleep(60)
        assert store.tier_trouble() is None
        assert len(store.manifest.indexes) == len(YEAR) + 1
        written = [name for call, name in objects.calls[before:] if call in {"create", "replace"}]
        assert len(written) == 3  # the file, the list, the root
        (listed,) = (name for name in written if f"/{INDEX_LISTS}" in name)
        assert decode_indexes(objects.read(listed).data) == store.manifest.indexes
    async with opened(disk, objects, config, clock=clock) as store:
        await store.is_loaded.wait()
        assert len(store.manifest.indexes) == len(YEAR) + 1
