"""What is read of a manifest: root, pages, objects behind its end, directories; and what of them is damaged."""

from dataclasses import replace

import pytest

from tests.store.tiered.bucket.faulty_store import FaultyStore
from tests.store.tiered.bucket.history import (
    built,
    manifest,
    name,
    pages_of,
    upload,
)
from trimq.broker.store.tiered.bucket import manifest_reads
from trimq.broker.store.tiered.bucket.manifest_reads import may_be_named
from trimq.protocol.bucket_manifest import Root, encode_root
from trimq.protocol.bucket_names import ROOT, ObjectName, page_name, parse_name, state_name
from trimq.protocol.bucket_object import BucketFormatError, decode_header, encode_header


async def test_objects_behind_the_root_are_found() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 2)
    await owner.save()
    await upload(bucket, owner, 3)
    # None of these belongs to the history: another epoch, a gap, not at an end, another kind of name.
    for begin, epoch in ((5000, 2), (2500, 1), (9000, 1)):
        entry, data = built(begin, epoch=epoch)
        store.put(entry.object.name, data)
    store.put("log/other", b"x")
    reader = manifest(store.bucket())
    since = len(store.calls)
    await reader.load()
    assert reader.entries == owner.entries
    assert (reader.end, reader.unsaved) == (5000, 3)
    assert [entry.object.begin for entry in reader.chain] == [2000, 3000, 4000]
    assert len(store.names("list", since)) == 1
    since = len(store.calls)
    await reader.load()  # what was read once is not read again
    assert [called for called, _ in store.calls[since:]] == ["read", "list"]
    assert reader.entries == owner.entries
    await upload(bucket, owner, 1)
    await owner.save()
    await reader.load()
    assert reader.entries == owner.entries


async def test_a_long_list_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_reads, "_LISTED", 2)
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 5)
    for begin in (0, 1000, 2000, 4000):
        for epoch in (0, 2, 3):
            store.put(name(begin, epoch), b"garbage")
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.entries == owner.entries


async def test_a_bucket_that_was_emptied_and_begun_anew() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 1)
    await owner.save()
    await owner.save()
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.root is not None
    # Its names are those of before, and its pages are others.
    store.put(ROOT, encode_root(replace(reader.root, sequence=2)))
    since = len(store.calls)
    await reader.load()
    assert store.names("read", since) == [ROOT, pages_of(owner)[0].name]


async def test_the_first_root_is_written_during_a_load() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 1)
    store.fail(1, FileNotFoundError("not yet"), after=False)
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.entries == owner.entries


async def test_directories_are_read_by_one_request() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 1)
    await upload(bucket, owner, 1, queues=2_000)  # a directory of more than 64 KiB
    for entry, requests in zip(owner.entries, (1, 2), strict=True):
        since = len(store.calls)
        directory = await owner.read_directory(entry.object)
        assert store.names("read_range", since) == [entry.object.name]
        assert len(directory) == len(entry.stretches)
        unknown = entry.object._replace(length=0, directory=0)
        since = len(store.calls)
        again = await owner.read_directory(unknown, entry.object.length)
        assert store.names("read_range", since) == [entry.object.name] * requests
        assert list(again.blocks()) == list(directory.blocks())
        assert await owner.read_entry(_parsed(entry.object.name)) == entry
    with pytest.raises(FileNotFoundError):
        await owner.read_directory(built(5000)[0].object)
    with pytest.raises(FileNotFoundError):
        await owner.read_entry(_parsed(name(5000)))


def _parsed(text: str) -> ObjectName:
    parsed = parse_name(text)
    assert parsed is not None
    return parsed


async def test_an_object_that_the_owner_deletes_during_a_load() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 3)
    await owner.save()
    store.fail(2, FileNotFoundError("page"), after=False)
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.entries == owner.entries
    store.remove(owner.root.pages[0].name if owner.root is not None else "")
    other = manifest(store.bucket())
    with pytest.raises(BucketFormatError, match=r"names what is not there: .*page-.*backup"):
        await other.load()
    await reader.load()  # it has read the page before


def test_pages_that_a_save_may_still_name() -> None:
    root = Root("c", "b", epoch=5, owner="o", sequence=40)
    for sequence, epoch, expected in ((40, 5, False), (41, 5, True), (1, 6, True), (90, 4, False), (39, 5, False)):
        assert may_be_named(page_name(sequence, epoch, 3), root) is expected
        assert may_be_named(state_name(sequence, epoch), root) is expected
    assert not may_be_named(name(0, 9), root)


async def _damaged(store: FaultyStore, match: str) -> None:
    for act in ("load", "claim"):
        with pytest.raises(BucketFormatError, match=match):
            await getattr(manifest(store.bucket()), act)()


async def test_damage_names_the_object_and_what_to_do() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 1)
    await owner.save()
    await upload(bucket, owner, 1)
    assert owner.root is not None
    root, page = store.get(ROOT), owner.root.pages[0].name

    store.put(ROOT, root[:-1])
    await _damaged(store, r"tier/C1/broker-a/manifest/root .*damaged.*backup")
    store.put(ROOT, encode_root(replace(owner.root, broker="other")))
    await _damaged(store, r"manifest/root .*that of broker other in cluster C1")
    store.remove(ROOT)
    await _damaged(store, r"manifest/root is not in the bucket, but log/.* is: .*backup")
    store.put(ROOT, root)

    good = store.get(page)
    for data, text in (
        (good[:-1], "and the root says"),
        (good[:-1] + bytes([good[-1] ^ 1]), "damaged"),
    ):
        store.put(page, data)
        await _damaged(store, rf"{page} .*{text}.*backup")
    store.put(page, good)
    store.put(ROOT, encode_root(replace(owner.root, pages=(owner.root.pages[0]._replace(objects=2),))))
    await _damaged(store, rf"{page} .*lists 1 objects, and the root says 2")
    store.put(ROOT, root)

    last = name(1000)
    good = store.get(last)
    header = decode_header(good)
    for data, text in (
        (good[:100], "cut off"),
        (good[:-1], "no end"),
        (bytes(64) + good[64:], "no object of TriMQ"),
        (encode_header(header._replace(begin=999)) + good[64:], "another object"),
        (encode_header(header._replace(end=1000)) + good[64:], "from 1000 to 1000"),
        (good[:-60] + bytes([good[-60] ^ 1]) + good[-59:], "damaged"),
    ):
        store.put(last, data)
        await _damaged(store, rf"{last} .*{text}.*delete the object")
    store.put(last, good)
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.entries == owner.entries
    store.put(owner.entries[0].object.name, good)
    with pytest.raises(BucketFormatError, match=rf"{name(0)} .*verify"):
        await reader.read_directory(owner.entries[0].object._replace(length=5000))
