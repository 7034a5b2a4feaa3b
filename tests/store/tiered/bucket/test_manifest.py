"""Saves of a manifest, what is loaded then, and how many requests they take."""

from dataclasses import replace
from typing import Any

import pytest
import trio

from tests.store.tiered.bucket.faulty_store import FaultyStore
from tests.store.tiered.bucket.history import (
    built,
    check_history,
    join,
    manifest,
    name,
    pages_of,
    upload,
)
from trimq.broker.store.tiered.bucket import manifest_pages
from trimq.broker.store.tiered.bucket.manifest import FencedError
from trimq.broker.store.tiered.bucket.manifest_reads import may_be_named
from trimq.protocol.bucket_manifest import Entry, decode_root, encode_root
from trimq.protocol.bucket_names import ROOT, page_name, state_name


async def test_an_empty_bucket() -> None:
    store = FaultyStore()
    reader = manifest(store.bucket())
    await reader.load()
    assert (reader.root, reader.entries, reader.end, reader.is_owner) == (None, [], 0, False)
    with pytest.raises(FencedError, match="not claimed"):
        await reader.save()
    assert store.objects() == []
    await reader.claim()
    assert reader.is_owner
    assert store.objects() == [ROOT]
    root = decode_root(store.get(ROOT))
    assert root == reader.root
    assert (root.epoch, root.sequence, root.end, root.pages) == (1, 1, 0, ())
    assert len(root.owner) == 16


async def test_what_was_saved_is_loaded() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 3, queues=2)
    assert owner.unsaved == 3
    assert owner.chain == owner.entries
    await owner.save(b"state", ["index/1"])
    assert owner.unsaved == 0
    assert owner.chain == []
    assert owner.root is not None
    assert store.get(owner.root.state) == b"state"
    reader = manifest(store.bucket())
    await reader.load()
    assert (reader.root, reader.end, reader.entries) == (owner.root, 3000, owner.entries)
    assert reader.root is not None
    assert reader.indexes == ("index/1",)
    await upload(bucket, owner, 2)
    await owner.save()
    assert (owner.root.state, owner.root.indexes) == (reader.root.state, reader.root.indexes)
    assert owner.indexes == ("index/1",)


async def test_the_newest_state_of_an_object_gets_into_the_root() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 1, state=b"old")
    await upload(bucket, owner, 1, state=b"new")
    await upload(bucket, owner, 1)
    await owner.save()
    assert owner.root is not None
    saved = owner.root.state
    assert store.get(saved) == b"new"
    await upload(bucket, owner, 1)
    await owner.save()
    assert owner.root.state == saved
    await upload(bucket, owner, 1, state=b"newer")
    await owner.save(b"newest")
    assert store.get(owner.root.state) == b"newest"


async def test_requests_of_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    for number in range(4):
        await upload(bucket, owner, 64, queues=10)
        since = len(store.calls)
        await owner.save(b"state %d" % number if number % 2 else None)
        created = store.names("create", since)
        assert [name.split("/")[0] for name in created] == ["manifest", "state"][: 1 + number % 2]
        assert [called for called, _ in store.calls[since:]] == ["create"] * len(created) + ["replace"]
        assert store.names("replace", since) == [ROOT]
    # All in one page, which is written anew. The pages and states before are garbage, each of which is named once.
    assert owner.root is not None
    assert len(pages_of(owner)) == 1
    garbage = owner.garbage_pages()
    assert len(garbage) == 4
    assert set(garbage) | {owner.root.pages[0].name, owner.root.state} == {
        name for name in store.objects() if name.startswith(("manifest/p", "state/"))
    }
    assert owner.garbage_pages() == []
    assert not any(may_be_named(name, owner.root) for name in garbage)
    # With several pages, only those that changed are written.
    monkeypatch.setattr(manifest_pages, "PAGE_ROWS", 64 * (48 + 800))
    for _ in range(8):
        await upload(bucket, owner, 32, queues=10)
        await owner.save()
    pages = pages_of(owner)
    assert len(pages) == 5  # that of before is too large to be joined
    since = len(store.calls)
    await join(bucket, owner, owner.entries[260:300])
    await owner.save()
    assert len(store.names("create", since)) == 2
    assert len(set(pages) & set(pages_of(owner))) == 4
    since = len(store.calls)
    await join(bucket, owner, owner.entries[258:263])
    await owner.save()
    assert len(store.names("create", since)) <= 3
    await owner.save()
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.entries == owner.entries
    check_history(reader.entries, (4 * 64 + 8 * 32) * 1000)
    since = len(store.calls)
    await reader.load()
    assert [called for called, _ in store.calls[since:]] == ["read", "list"]


async def test_the_root_is_deleted_under_its_owner() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    root = store.get(ROOT)
    store.remove(ROOT)
    for _ in range(2):
        with pytest.raises(OSError, match="has been deleted"):
            await owner.save()
    await upload(bucket, owner, 1)
    with pytest.raises(OSError, match=r"not in the bucket, but log/.* is"):
        await owner.save()
    assert owner.is_owner
    store.put(ROOT, root)  # its version is another one, its owner and sequence are not
    await owner.save()
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.entries == owner.entries
    assert reader.chain == []


async def test_a_root_of_the_owner_that_it_has_not_written() -> None:
    store = FaultyStore()
    owner = manifest(store.bucket())
    await owner.claim()
    assert owner.root is not None
    store.put(ROOT, encode_root(replace(owner.root, sequence=99)))
    with pytest.raises(FencedError):
        await owner.save()


async def test_names_that_exist() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 1)
    for sequence in range(2, 200):
        store.put(page_name(sequence, 1, 0), b"other")
    since = len(store.calls)
    with pytest.raises(FileExistsError):
        await owner.save()
    assert len(store.names("create", since)) == 64
    store.put(state_name(200, 1), b"other")
    for _ in range(3):
        try:
            await owner.save(b"state")
        except FileExistsError:
            continue
        break
    assert owner.root is not None
    assert (pages_of(owner)[0].name, owner.root.state) == (page_name(200, 1, 0), state_name(201, 1))
    assert owner.root.sequence == 201
    assert not set(owner.garbage_pages()) & {pages_of(owner)[0].name, owner.root.state}


async def test_a_save_that_is_cancelled_is_done_by_the_next() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 2)
    for method in ("create", "replace"):
        with trio.CancelScope() as scope:
            called = getattr(store.store, method)

            def cancelled(*arguments: Any, scope: Any = scope, called: Any = called) -> Any:
                scope.cancel()
                return called(*arguments)

            setattr(store.store, method, cancelled)
            await owner.save()
        setattr(store.store, method, called)
    await upload(bucket, owner, 1)
    await owner.save()
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.root == owner.root
    assert reader.entries == owner.entries
    check_history(reader.entries, 3000)


async def test_saves_wait_for_each_other() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 2)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(owner.save)
    assert owner.root is not None
    assert owner.root.sequence == 4
    assert owner.unsaved == 0
    assert len([found for found in store.objects() if "page" in found]) == 1


async def test_expiry_keeps_the_end() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 3)
    await owner.save()
    owner.change([entry.object for entry in owner.entries], [])
    await owner.save()
    assert owner.root is not None
    assert owner.root.pages == ()
    assert owner.entries == []
    second = manifest(store.bucket())
    await second.claim()
    assert (second.end, second.entries) == (3000, [])
    await upload(bucket, second, 1)
    assert second.entries[0].object.begin == 3000


async def test_objects_are_added_while_a_save_is_under_way() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 2)
    created = store.store.create
    more = built(2000)[0]

    def add(name: str, data: Any) -> None:
        if "page" in name:
            owner.add(more, b"late")
            owner.change([owner.entries[0].object], [])
        created(name, data)

    store.store.create = add  # type: ignore[method-assign]
    await owner.save()
    assert owner.root is not None
    assert owner.unsaved == 1
    assert owner.root.end == 2000
    reader = manifest(store.bucket())
    await reader.load()
    check_history(reader.entries, 2000)
    store.store.create = created  # type: ignore[method-assign]
    await owner.save()
    assert owner.root.end == 3000
    assert store.get(owner.root.state) == b"late"
    await reader.load()
    check_history(reader.entries, 3000, 1000)


async def test_an_object_with_more_queues_than_a_page_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_pages, "PAGE_ROWS", 20_000)
    monkeypatch.setattr("trimq.broker.store.tiered.bucket.manifest.MOST_PAGE_BYTES", 1_500)
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 1)
    await upload(bucket, owner, 1, queues=3_000)
    await upload(bucket, owner, 1)
    await owner.save()
    assert owner.root is not None
    assert len(owner.root.pages) > 4
    second = manifest(store.bucket())
    await second.load()
    assert second.entries == owner.entries
    await second.load()
    assert second.entries == owner.entries
    await second.claim()
    await upload(bucket, second, 1)
    await second.save()
    await owner_is_fenced(owner)
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.entries == second.entries
    check_history(reader.entries, 4000)


async def owner_is_fenced(owner: Any) -> None:
    with pytest.raises(FencedError):
        await owner.save()


async def test_the_next_object_begins_where_the_last_one_ends() -> None:
    owner = manifest(FaultyStore().bucket())
    await owner.claim()
    for begin, end in ((1000, 2000), (-5, 5)):
        with pytest.raises(ValueError, match="begins at 0"):
            owner.add(built(begin, end)[0])
    owner.add(built(0)[0])
    with pytest.raises(ValueError, match="begins at 1000"):
        owner.add(built(0, 1500)[0])


async def test_a_change_of_what_is_not_there_changes_nothing() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    missing = built(0)[0]
    with pytest.raises(ValueError, match="is not in the manifest"):
        owner.change([missing.object], [])
    await upload(bucket, owner, 3)
    before = list(owner.entries)
    with pytest.raises(ValueError, match=f"{name(5000)} is not in the manifest"):
        owner.change([before[0].object, built(5000)[0].object], [])
    with pytest.raises(ValueError, match=f"{name(1000)} is in the manifest already"):
        owner.change([before[0].object], [before[1]])
    assert owner.entries == before
    # An object with fewer stretches, as of a deleted topic, takes its own place.
    owner.change([before[1].object], [Entry(before[1].object, [])])
    assert owner.entries == [before[0], Entry(before[1].object, []), before[2]]


async def test_a_root_with_too_many_pages_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifest_pages, "PAGE_ROWS", 1)
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 900)
    await owner.save()
    for _ in range(500):
        owner.add(built(owner.end)[0])
    since = len(store.calls)
    for _ in range(2):
        with pytest.raises(OSError, match="the limit is 65536"):
            await owner.save()
    assert store.calls[since:] == []
    owner.change([entry.object for entry in owner.entries[:700]], [])
    await owner.save()
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.entries == owner.entries
