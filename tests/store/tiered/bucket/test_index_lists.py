"""The list of index files: an object of its own that the root names, written when it changes."""

import pytest
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import fill
from tests.store.tiered.bucket.faulty_store import FaultyStore
from tests.store.tiered.bucket.history import manifest, upload
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from trimq.broker.store.tiered.bucket import bucket_message_store
from trimq.broker.store.tiered.bucket.index_objects import IndexName
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.protocol.bucket_manifest import decode_indexes
from trimq.protocol.bucket_names import INDEX_LISTS, ROOT, indexes_name
from trimq.protocol.bucket_object import BucketFormatError
from trimq.remoting.runtime.clock import ManualClock

HOUR_MS = 3_600_000
YEAR = [str(IndexName(hour * HOUR_MS, hour * HOUR_MS, hour, 5000, 1)) for hour in range(365 * 24)]


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


async def test_a_list_that_is_deleted_during_a_load() -> None:
    store = FaultyStore()
    owner = manifest(store.bucket())
    await owner.claim()
    await owner.save(indexes=["a"])
    reader = manifest(store.bucket())
    store.fail(2, FileNotFoundError("gone"), after=False)
    await reader.load()
    assert reader.indexes == ("a",)
    store.remove(list_of(owner))
    await reader.load()  # it is known
    with pytest.raises(BucketFormatError, match=r"manifest/indexes-.*Restore it from a backup"):
        await manifest(store.bucket()).load()


async def test_a_damaged_list() -> None:
    store = FaultyStore()
    owner = manifest(store.bucket())
    await owner.claim()
    await owner.save(indexes=["a"])
    store.put(list_of(owner), store.get(list_of(owner))[:-1])
    with pytest.raises(BucketFormatError, match=r"manifest/indexes-.* the list of index files is damaged"):
        await manifest(store.bucket()).load()


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
