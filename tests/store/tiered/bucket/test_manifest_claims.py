"""Claims of a bucket: what the new owner adopts, and what it does if requests fail."""

from dataclasses import replace
from typing import Any

import pytest

from tests.store.tiered.bucket.faulty_store import FaultyStore
from tests.store.tiered.bucket.history import (
    built,
    check_history,
    check_named,
    epoch_of,
    late_upload,
    manifest,
    upload,
)
from trimq.broker.store.tiered.bucket.manifest import FencedError
from trimq.protocol.bucket_manifest import decode_root, encode_root
from trimq.protocol.bucket_names import MOST_EPOCH, ROOT
from trimq.protocol.bucket_object import BucketFormatError


async def test_a_claim_adopts_what_the_owner_before_has_uploaded() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    first = manifest(bucket)
    await first.claim()
    await upload(bucket, first, 1)
    await first.save(b"of the root")
    await upload(bucket, first, 1, state=b"newest")
    await upload(bucket, first, 1)
    second = manifest(store.bucket())
    await second.claim()
    assert second.entries == first.entries
    assert second.root is not None
    assert (second.root.epoch, second.root.end, second.unsaved) == (2, 3000, 0)
    # Nothing looks for a state in these objects any more: the root names what the newest one had.
    assert store.get(second.root.state) == b"newest"
    with pytest.raises(FencedError, match="epoch 2"):
        await first.save()
    assert "epoch 2" in first.fenced
    assert not first.is_owner
    for refused in (first.save(), first.claim()):
        with pytest.raises(FencedError):
            await refused
    with pytest.raises(FencedError):
        first.add(built(3000)[0])
    with pytest.raises(FencedError):
        first.change([], [])
    assert first.garbage_pages() == []
    await first.load()  # it may still read
    assert first.root == second.root


async def test_a_claim_adopts_what_came_meanwhile() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    first = manifest(bucket)
    await first.claim()
    await upload(bucket, first, 1)
    second = manifest(store.bucket())
    late_upload(store, first)
    await second.claim()
    assert epoch_of(second) == 2
    assert second.root is not None
    assert second.root.end == second.end == 2000
    assert store.get(second.root.state) == b"late"
    check_history(second.entries, 2000)
    check_named(store, second)


async def _until_it_succeeds(claimer: Any) -> None:
    for _ in range(3):
        try:
            await claimer.claim()
        except OSError:
            continue
        return
    raise AssertionError


@pytest.mark.parametrize("call", range(1, 12))
@pytest.mark.parametrize("after", [False, True])
async def test_a_claim_that_fails_is_repeated(call: int, after: bool) -> None:
    store = FaultyStore()
    bucket = store.bucket()
    first = manifest(bucket)
    await first.claim()
    await upload(bucket, first, 2, state=b"s")
    late = built(first.end, state=b"late")
    second = manifest(store.bucket())
    replaced = store.store.replace

    def late_object(name: str, data: bytes, version: str | None) -> str:
        store.put(late[0].object.name, late[1])
        return replaced(name, data, version)

    store.store.replace = late_object  # type: ignore[method-assign]
    store.fail(call, OSError("away"), after=after)
    await _until_it_succeeds(second)
    assert second.is_owner
    assert second.unsaved == 0
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.entries == second.entries
    assert reader.root is not None
    # The late object is lost to the history only if another claim had to begin anew in between.
    check_history(reader.entries, 3000 if epoch_of(second) == 2 else reader.end)
    if epoch_of(second) == 2:
        assert store.get(reader.root.state) == b"late"


async def test_the_second_look_of_a_claim_is_repeated() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    first = manifest(bucket)
    await first.claim()
    second = manifest(store.bucket())
    store.fail_method("list", OSError("away"), after=False, nth=2)
    with pytest.raises(OSError, match="away"):
        await second.claim()
    await upload(bucket, first, 1, state=b"late")
    await second.claim()
    assert epoch_of(second) == 2
    check_history(second.entries, 1000)
    assert second.root is not None
    assert second.root.end == 1000
    assert store.get(second.root.state) == b"late"


async def test_the_least_epoch() -> None:
    store = FaultyStore()
    owner = manifest(store.bucket())
    await owner.claim(7)
    assert epoch_of(owner) == 7
    await owner.claim(3)
    assert epoch_of(owner) == 8
    with pytest.raises(BucketFormatError, match=str(MOST_EPOCH)):
        await owner.claim(MOST_EPOCH + 1)
    assert not owner.is_owner


async def test_others_are_always_faster() -> None:
    store = FaultyStore()
    replaced = store.store.replace

    def faster(name: str, data: bytes, version: str | None) -> str:
        old = version if version is None else store.store.read(name).version
        mine = decode_root(data)
        replaced(name, encode_root(replace(mine, owner="other")), old)
        return replaced(name, data, version)

    store.store.replace = faster  # type: ignore[method-assign]
    loser = manifest(store.bucket(), "loser")
    with pytest.raises(FencedError, match="8 times"):
        await loser.claim()
    assert not loser.is_owner
    assert decode_root(store.get(ROOT)).epoch == 8


async def test_the_owner_does_not_load() -> None:
    owner = manifest(FaultyStore().bucket())
    await owner.claim()
    with pytest.raises(RuntimeError, match="does not load"):
        await owner.load()
