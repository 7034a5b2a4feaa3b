"""A store goes on with a bucket only if both have the same history; what another broker has uploaded is not taken."""

from typing import Any

import pytest
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, put, settings, until_dispatched
from tests.store.stores import opened as opened_locally
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.bucket.test_bucket_message_store import away, nothing, trouble
from tests.store.tiered.test_tiered_message_store import all_offsets, drop_local, get
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.tiered.bucket import bucket_message_store
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.bucket_queues import BucketQueues
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.restore import restore
from trimq.protocol.bucket_manifest import Entry, Stretch
from trimq.protocol.bucket_names import broker_prefix
from trimq.protocol.message import decode_messages
from trimq.remoting.runtime.clock import ManualClock


async def upload_object(store: BucketMessageStore) -> None:
    """Upload what there is; the root does not name it yet."""
    await until_dispatched(store)
    await store.flush()
    while await store.uploads._upload_object(force=True):
        pass


async def restored(objects: Objects) -> SimDisk:
    """A disk as mqstore tiered restore makes it."""
    disk = SimDisk()
    bucket = Bucket(objects, disk, broker_prefix("", "C1", "broker-a"))
    manifest = Manifest(bucket, "C1", "broker-a")
    await manifest.load()
    await restore(disk, settings(), bucket, manifest)
    return disk


async def bodies(store: MessageStore, end: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < end:
        result = await get(store, len(found))
        found += [message.body for message in decode_messages(b"".join(bytes(one) for one in result.buffers))]
        result.release()
    return found


async def test_a_restore_takes_the_bucket_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the owner before uploads after the restore is garbage: it must not hide what was restored."""
    objects = Objects()
    async with opened(SimDisk(), objects) as first:
        await fill(first, 20)
        await uploaded(first)
        assert first.manifest.root is not None

        async def slow(*arguments: Any) -> Any:
            found = await restore(*arguments)
            await fill(first, 10, first=20)
            await upload_object(first)
            return found

        monkeypatch.setattr(bucket_message_store, "restore", slow)
        async with opened(SimDisk(), objects) as second:
            assert len(objects.named("/log/")) == 2
            assert second.tier_trouble() is None
            assert second.manifest.root is not None
            assert second.manifest.root.epoch == first.manifest.root.epoch + 1  # one claim
            assert second.tier_range(TOPIC, 0) == (0, 20)
            await fill(second, 3, first=20)
            await uploaded(second)
            assert len(await all_offsets(second, 0, 23)) == 23


@pytest.mark.parametrize("grown", [False, True])
async def test_a_restored_store_is_fenced_if_more_was_uploaded_since(
    autojump_clock: trio.testing.MockClock, grown: bool
) -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as first:
        await fill(first, 20)
        await uploaded(first)
        disk = await restored(objects)
        await fill(first, 10, first=20)
        await uploaded(first)
    root = first.manifest.root
    objects.fail = away() if grown else nothing
    async with opened(disk, objects) as second:
        if grown:  # past the bucket, before it answers
            await fill(second, 60, first=20)
            objects.fail = nothing
            with trio.fail_after(100):
                await second.is_loaded.wait()
            await trio.testing.wait_all_tasks_blocked()
        assert trouble(second)[0] == "tier_fenced"
        assert "tiered restore) again" in trouble(second)[1]
        assert second.manifest.root == root
    async with opened(SimDisk(), objects) as third:
        assert len(await all_offsets(third, 0, 30)) == 30


async def test_a_restored_store_goes_on_after_each_start() -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as first:
        await fill(first, 20)
        await uploaded(first)
    disk = await restored(objects)
    for end in 20, 30, 40:
        async with opened(disk, objects) as store:
            assert store.tier_trouble() is None
            await fill(store, 10, first=end)
            await uploaded(store)
            assert store.tier_range(TOPIC, 0) == (0, end + 10)


async def test_a_log_that_has_grown_past_the_bucket_is_still_another_one() -> None:
    objects, other = Objects(), SimDisk()
    async with opened(SimDisk(), objects) as store:
        await fill(store, 10)
        await fill(store, 10, queue_id=1)
        await uploaded(store)
        root = store.manifest.root
    async with opened_locally(other) as local:  # a slave's that was behind
        await fill(local, 5)
    async with opened(other, objects) as store:
        assert trouble(store)[0] == "tier_fenced"
        await fill(store, 45, first=5)
        assert store.commit_log.max_offset > store.manifest.end
    async with opened(other, objects) as store:
        assert trouble(store)[0] == "tier_fenced"
        assert "another history" in trouble(store)[1]
        assert store.tier_range(TOPIC, 1) == (0, 10)
        assert store.manifest.root == root
    async with opened(SimDisk(), objects) as store:
        assert store.tier_range(TOPIC, 0) == (0, 10)


async def test_other_messages_of_the_same_sizes() -> None:
    objects, other, clock = Objects(), SimDisk(), ManualClock()
    async with opened(SimDisk(), objects, clock=clock) as store:
        await fill(store, 10)
        await uploaded(store)
    clock.set_wall_ms(clock.wall_ms() + 1)
    async with opened_locally(other, clock=clock) as local:
        await fill(local, 20)
    async with opened(other, objects, clock=clock) as store:
        assert trouble(store)[0] == "tier_fenced"


@pytest.mark.parametrize("same", [False, True])
async def test_a_log_that_begins_behind_the_bucket(same: bool) -> None:
    """Its queues still know where the messages were."""
    objects, disk = Objects(), SimDisk()
    config = settings(mapped_file_size_consume_queue=4000)
    async with opened(disk, objects, local=config) as store:
        await fill(store, 10)
        await uploaded(store)
        end = store.manifest.end
    if not same:
        disk = SimDisk()
    async with opened_locally(disk, config) as local:
        await put(local, b"other", topic="Other")
        await fill(local, 100, first=10)
        await until_dispatched(local)
        await local.flush()
        await drop_local(local)
        assert local.min_phy_offset > end
    async with opened(disk, objects, local=config) as store:
        assert (store.tier_trouble() is None) is same


async def test_objects_that_come_before_the_claim_are_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as first:
        await fill(first, 20)
        await uploaded(first)
        left = disk.copy()
        claim = BucketQueues.claim

        async def late(queues: BucketQueues, least_epoch: int = 0) -> None:
            await fill(first, 20, first=20)
            await upload_object(first)
            await claim(queues, least_epoch)

        monkeypatch.setattr(BucketQueues, "claim", late)
        async with opened(left, objects) as second:
            assert trouble(second)[0] == "tier_fenced"
            calls = len(objects.calls)
            await second.delete_topic(TOPIC)
            await uploaded_in_vain(second)
            assert {call for call, _ in objects.calls[calls:]} <= {"read", "list", "read_range"}
    monkeypatch.undo()
    async with opened(SimDisk(), objects) as third:
        assert third.tier_range(TOPIC, 0) == (0, 40)


async def uploaded_in_vain(store: BucketMessageStore) -> None:
    await put(store, b"more")
    await until_dispatched(store)
    await store.flush()
    await trio.testing.wait_all_tasks_blocked()


async def test_a_topic_created_anew_that_is_longer_than_the_old_one() -> None:
    """It was deleted after an upload that the root did not name before the process was killed."""
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await put(store, b"other", topic="Other")
        await uploaded(store)
        objects.fail = away("replace")
        await fill(store, 20)
        await upload_object(store)
        await store.delete_topic(TOPIC)
        gone, before = disk.copy(), objects.copy()
        for number in range(25):
            await put(store, b"new %d" % number)
        await until_dispatched(store)
        await store.flush()
        left, not_uploaded = disk.copy(), objects.copy()
    objects.fail = nothing  # the stop has uploaded the new ones too
    for bucket in not_uploaded, objects:
        async with opened(left.copy(), bucket) as store:
            await uploaded(store)
            assert store.tier_range(TOPIC, 0) == (0, 25)
        async with opened(SimDisk(), bucket) as store:  # only the bucket has them
            assert await bodies(store, 25) == [b"new %d" % number for number in range(25)]
            assert store.tier_range("Other", 0) == (0, 1)
    async with opened(gone, before) as store:  # not created anew
        assert store.tier_trouble() is None
        assert store.find_queue(TOPIC, 0) is None
        assert store.tier_range(TOPIC, 0) is None
        assert store.tier_range("Other", 0) == (0, 1)


async def test_a_queue_that_is_behind_its_log_is_not_taken_for_another_one() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(tiered_store_group_commit=False)) as store:
        await fill(store, 20)
        await uploaded(store)
        queue = store.find_queue(TOPIC, 0)
        assert queue is not None
        places = await all_offsets(store, 0, 20)
        queue.cut(10, places[10][1])
        await store.uploads.scan()
        assert store.tier_range(TOPIC, 0) == (0, 20)


async def test_a_topic_created_anew_whose_deletion_was_not_noted() -> None:
    """A full disk does not prevent a deletion: then the units of the queue show it."""
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await put(store, b"other", topic="Other")
        await fill(store, 20)
        await uploaded(store)
        objects.fail = away()
        await store.delete_topic(TOPIC)
        for number in range(5):
            await put(store, b"new %d" % number)
        await until_dispatched(store)
        await store.flush()
        left = disk.copy()
        left.delete(f"{store.root}/topics.dropped")
    objects.fail = nothing
    async with opened(left, objects) as store:
        await uploaded(store)
        assert store.tier_range(TOPIC, 0) == (0, 5)
    async with opened(SimDisk(), objects) as store:
        assert await bodies(store, 5) == [b"new %d" % number for number in range(5)]


async def test_what_counts_as_the_same_message() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 5)
        await put(store, b"0123" + bytes((0, 0, 0, 100)) + bytes(100))
        await uploaded(store)
        (entry,) = store.manifest.entries
        (stretch,) = entry.stretches
        last = stretch.last_physical
        like_record = last + bytes(store.commit_log.read(last, 400) or b"").index(b"0123") + 4
        assert stretch.messages == 6

        async def why_not(other: Stretch) -> str:
            return await store._history.why_not([Entry(entry.object, [other])], entry.object.end, None)

        assert not await why_not(stretch)
        for place in last - 1, last + 1, like_record, entry.object.end - 4:
            assert "another history" in await why_not(stretch._replace(last_physical=place))
        assert "another history" in await why_not(stretch._replace(topic="Other"))
        assert "another history" in await why_not(stretch._replace(queue_id=1))
        assert "another history" in await why_not(stretch._replace(messages=7))
        assert "another history" in await why_not(stretch._replace(end_ms=stretch.begin_ms - 1))
        expired = stretch._replace(offset=6, messages=0, size=0)  # says where the queue ended
        assert not await why_not(expired)
