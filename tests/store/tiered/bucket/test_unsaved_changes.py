"""After a failure: what a save could not write is saved by the next one, and any success ends the trouble."""

import pytest
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, settings, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.bucket.test_bucket_message_store import until
from trimq.broker.store.tiered.bucket import upkeep, uploader
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.remoting.runtime.clock import ManualClock

HOUR_MS = 3_600_000
AT_ONCE = tier(tiered_store_group_commit=False)


def refuse(objects: Objects, part: str) -> list[str]:
    """Let writes of objects with ``part`` in their names fail; return the names of those that did."""
    refused: list[str] = []

    def fail(call: str, name: str, done: bool) -> None:
        if call in {"create", "replace"} and part in name and not done:
            refused.append(name)
            raise OSError(f"{name} is refused")

    objects.fail = fail
    return refused


def accept(objects: Objects) -> None:
    objects.fail = lambda *_: None


async def topics_of_root(store: BucketMessageStore, objects: Objects) -> set[str]:
    """The topics that another broker would find."""
    reader = Manifest(Bucket(objects, SimDisk(), store.bucket.prefix), "C1", "broker-a")
    await reader.load()
    assert not reader.chain
    return {stretch.topic for entry in reader.entries for stretch in entry.stretches}


async def test_a_root_that_could_not_be_saved_is_saved_without_new_messages(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "OBJECTS_A_ROOT", 1)
    objects = Objects()
    async with opened(SimDisk(), objects, AT_ONCE) as store:
        refused = refuse(objects, "manifest/root")
        await fill(store, 3)
        await until_dispatched(store)
        await store.flush()
        await until(lambda: bool(refused))
        assert store.tier_trouble() is not None
        await until(lambda: not store.uploads.waiting.pending, 600)
        accept(objects)
        await until(lambda: store.tier_trouble() is None)
        assert await topics_of_root(store, objects) == {TOPIC}


async def test_a_failure_behind_the_last_object(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = Objects()
    async with opened(SimDisk(), objects, AT_ONCE) as store:
        assert store.tier_index is not None
        fill_index, failures = store.tier_index.fill, [OSError("no space for keys")]

        async def fail_once() -> None:
            if failures:
                raise failures.pop()
            await fill_index()

        monkeypatch.setattr(store.tier_index, "fill", fail_once)
        await fill(store, 3)
        await until_dispatched(store)
        await store.flush()
        await until(lambda: store.tier_trouble() is not None)
        await until(lambda: store.tier_trouble() is None)
        assert (store.uploads.failures, store.uploads.objects) == (1, 1)
        assert await topics_of_root(store, objects) == {TOPIC}


@pytest.mark.parametrize("success", ["save", "expiry"])
async def test_any_success_ends_the_trouble(success: str) -> None:
    objects, clock = Objects(), ManualClock()
    async with opened(SimDisk(), objects, AT_ONCE, clock=clock) as store:
        await fill(store, 3)
        await uploaded(store)
        refuse(objects, "/log/")
        await fill(store, 3, first=3)
        await until_dispatched(store)
        await store.flush()
        await store.uploads._try(force=True)
        assert store.tier_trouble() is not None
        if success == "save":
            await store.uploads.save()
        else:
            clock.set_wall_ms(clock.wall_ms() + 100 * HOUR_MS)
            assert await store.expire_tier() == 1
        assert store.tier_trouble() is None
        accept(objects)
    # The stop has uploaded the rest.
    assert len(objects.named("/log/")) == 2


@pytest.mark.parametrize("way", ["hour", "stop"])
async def test_a_deletion_whose_save_failed_is_saved(autojump_clock: trio.testing.MockClock, way: str) -> None:
    objects, clock = Objects(), ManualClock()
    # An index file is sealed after an hour too, and then named.
    local = settings(message_index_enable=False)
    async with opened(SimDisk(), objects, local=local, clock=clock) as store:
        await fill(store, 3)
        await fill(store, 3, topic="Other")
        await uploaded(store)
        clock.advance(upkeep.SEARCH_AFTER)
        await trio.sleep(60)  # the search for garbage saves the root too
        refuse(objects, "manifest/root")
        await store.delete_topic("Other")
        accept(objects)
        assert await topics_of_root(store, objects) == {TOPIC, "Other"}
        assert not store.bucket_queues.is_saved
        if way == "hour":
            await trio.sleep(60)
            assert not store.bucket_queues.is_saved
            clock.advance(upkeep.SAVE_AFTER)
            await until(lambda: store.bucket_queues.is_saved)
            assert await topics_of_root(store, objects) == {TOPIC}
    assert await topics_of_root(store, objects) == {TOPIC}


async def test_a_change_during_a_save_waits_for_the_next() -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as store:
        await fill(store, 3)
        await fill(store, 3, topic="Other")
        await uploaded(store)
        manifest = store.manifest

        def change(call: str, name: str, done: bool) -> None:
            if call == "replace" and not done and len(manifest.entries):
                manifest.change([manifest.entries[0].object], [])

        objects.fail = change
        await store.uploads.save()
        accept(objects)
        assert (manifest.unsaved_changes, store.bucket_queues.is_saved) == (1, False)
        await store.uploads.upload_all()
        assert store.bucket_queues.is_saved
        assert await topics_of_root(store, objects) == set()
