"""The process ends, or a request fails, at each call of a claim and of a save: nothing is missing, nothing is twice.

The one whose process ended goes on later, as a frozen one does: it must find that it is fenced.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from tests.store.tiered.bucket.faulty_store import Cut, FaultyStore
from tests.store.tiered.bucket.history import (
    built,
    check_history,
    check_named,
    epoch_of,
    join,
    manifest,
    name,
    upload,
)
from trimq.broker.store.tiered.bucket import manifest_pages
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.manifest import FencedError, Manifest
from trimq.broker.store.tiered.bucket.manifest_reads import may_be_named
from trimq.protocol.bucket_names import parse_saved


class World(NamedTuple):
    """A bucket, its owner, and what a test does."""

    store: FaultyStore
    bucket: Bucket
    owner: Manifest
    act: Callable[[], Awaitable[None]]
    end: int


async def _history(store: FaultyStore) -> Manifest:
    """An owner with several pages, a segment, a state, and objects that it has not saved."""
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 5, queues=2)
    await owner.save(b"first")
    await upload(bucket, owner, 5)
    await join(bucket, owner, owner.entries[1:3])
    await owner.save()
    await upload(bucket, owner, 2, state=b"of an upload")
    # Garbage of a broker that claimed the bucket in vain, and of one that was fenced.
    store.put("manifest/page-000000000004-00000002-0000", b"garbage")
    store.put("state/000000000004-00000002", b"garbage")
    store.put(name(12_000, 0), built(12_000, epoch=0)[1])
    return owner


async def _first_claim() -> World:
    store = FaultyStore()
    owner = manifest(store.bucket())
    return World(store, store.bucket(), owner, owner.claim, 0)


async def _claim() -> World:
    store = FaultyStore()
    old = await _history(store)
    bucket = store.bucket()
    owner = manifest(bucket)
    return World(store, bucket, owner, owner.claim, old.end)


async def _save() -> World:
    store = FaultyStore()
    owner = await _history(store)
    return World(store, store.bucket(), owner, lambda: owner.save(b"second", ["index/7"]), owner.end)


async def _upload_and_save() -> World:
    store = FaultyStore()
    owner = await _history(store)
    bucket = store.bucket()

    async def act() -> None:
        for _ in range(3):
            await upload(bucket, owner)
        await owner.save()

    return World(store, bucket, owner, act, owner.end)


async def _join() -> World:
    store = FaultyStore()
    owner = await _history(store)
    bucket = store.bucket()

    async def act() -> None:
        await join(bucket, owner, owner.entries[3:8])
        await join(bucket, owner, owner.entries[0:2])
        await owner.save()

    return World(store, bucket, owner, act, owner.end)


WORLDS = [_first_claim, _claim, _save, _upload_and_save, _join]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_pages, "PAGE_ROWS", 3 * (48 + 80))


async def _calls(make: Callable[[], Awaitable[World]]) -> int:
    world = await make()
    since = len(world.store.calls)
    await world.act()
    return len(world.store.calls) - since


async def _check_after(world: World, epoch: int) -> None:
    """Another process claims the bucket: it finds everything, and it alone may save then."""
    reader = manifest(world.store.bucket())
    await reader.load()
    heir = manifest(world.store.bucket())
    await heir.claim()
    assert epoch_of(heir) > epoch
    for loaded in (reader, heir):
        assert loaded.end >= world.end
        check_history(loaded.entries, loaded.end)
    assert reader.entries == heir.entries
    check_named(world.store, heir)
    if world.end:
        assert heir.root is not None
        assert world.store.get(heir.root.state) in {b"of an upload", b"second"}
    with pytest.raises(FencedError):
        await world.owner.save()
    await upload(world.store.bucket(), heir, 2)
    await heir.save(b"of the heir")
    again = manifest(world.store.bucket())
    await again.load()
    assert again.entries == heir.entries
    check_history(again.entries, heir.end)
    _check_garbage(world.store, again)


def _check_garbage(store: FaultyStore, loaded: Manifest) -> None:
    """What the root does not name, and no save may name any more, is of older roots only."""
    assert loaded.root is not None
    named = {ref.name for ref in loaded.root.pages} | {loaded.root.state, loaded.root.indexes}
    for found in store.objects():
        saved = parse_saved(found)
        if saved is not None:
            assert (found in named) <= (not may_be_named(found, loaded.root))
            assert saved[1] <= loaded.root.epoch


@pytest.mark.parametrize("make", WORLDS)
@pytest.mark.parametrize("after", [False, True])
async def test_the_process_ends_at_each_call(make: Callable[[], Awaitable[World]], after: bool) -> None:
    calls = await _calls(make)
    assert calls > 1
    for call in range(1, calls + 1):
        world = await make()
        epoch = epoch_of(world.owner) if world.owner.root is not None else 0
        world.store.fail(call, Cut(), after=after)
        with pytest.raises(Cut):
            await world.act()
        await _check_after(world, epoch)


@pytest.mark.parametrize("make", WORLDS)
@pytest.mark.parametrize("after", [False, True])
async def test_each_call_fails_once_and_all_is_done_again(make: Callable[[], Awaitable[World]], after: bool) -> None:
    calls = await _calls(make)
    for call in range(1, calls + 1):
        world = await make()
        owner, store = world.owner, world.store
        store.fail(call, OSError("away"), after=after)
        with pytest.raises(OSError, match="away"):
            await world.act()
        assert not owner.fenced
        if make in {_first_claim, _claim}:
            await owner.claim()
        elif make in {_save, _join}:
            assert make is _join or owner.unsaved == 2
            await owner.save(b"again")
            assert owner.unsaved == 0
        else:
            entry, data = built(owner.end, epoch=epoch_of(owner))
            store.put(entry.object.name, data)
            owner.add(entry)
            await owner.save()
        reader = manifest(store.bucket())
        await reader.load()
        assert reader.entries == owner.entries
        check_history(reader.entries, owner.end)
        assert reader.root == owner.root
        check_named(store, owner)
        # All pages, states and lists of failed attempts are in the list of the garbage, and nothing that is in use.
        assert owner.root is not None
        garbage = owner.garbage_pages()
        assert len(garbage) == len(set(garbage))
        assert not set(garbage) & ({ref.name for ref in owner.root.pages} | {owner.root.state, owner.root.indexes})
        if make not in {_first_claim, _claim}:
            old = {"manifest/page-000000000004-00000002-0000", "state/000000000004-00000002"}
            left = {found for found in store.objects() if parse_saved(found) is not None} - old - set(garbage)
            assert left == {ref.name for ref in owner.root.pages} | {owner.root.state, owner.root.indexes} - {""}, call


async def test_the_reply_to_a_root_is_lost_again_and_again() -> None:
    store = FaultyStore()
    owner = await _history(store)
    for attempt in range(3):
        since = len(store.calls)
        store.fail_method("replace", OSError("away"), after=True, nth=min(attempt, 1) + 1)
        with pytest.raises(OSError, match="away"):
            await owner.save(b"state %d" % attempt)
        assert len(store.names("replace", since)) == min(attempt, 1) + 1
    await owner.save()
    assert owner.root is not None
    # The state that could not be saved is in the root now.
    assert store.get(owner.root.state) == b"state 2"
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.root == owner.root
    assert reader.entries == owner.entries
