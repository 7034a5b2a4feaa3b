"""A store with a bucket, where two rare things meet: a lost reply and a deletion, a fence and a read, and others."""

import errno
from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing

from tests.store.replication.pairs import SLAVE
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, put, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.bucket.test_bucket_message_store import nothing
from tests.store.tiered.bucket.test_joins import advance
from tests.store.tiered.bucket.test_store_edges import corrupt
from tests.store.tiered.test_tiered_message_store import drop_local
from trimq.broker.store.tiered.bucket import joiner, object_contents
from trimq.broker.store.tiered.bucket.bucket_queues import BucketQueues
from trimq.broker.store.tiered.bucket.manifest import FencedError, Manifest
from trimq.broker.store.tiered.bucket.object_store import ObjectInfo
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.remoting.runtime.clock import ManualClock

FORCE = {"tiered_storage_level": TieredStorageLevel.FORCE}


async def test_an_object_of_one_large_message_ends_where_the_log_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_contents, "OBJECT_BYTES", 1000)
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await put(store, bytes(1200))
        await uploaded(store)
        assert store.manifest.end == store.flushed_offset
    async with opened(disk, objects) as store:
        assert store.tier_trouble() is None


async def test_a_topic_that_was_deleted_after_the_reply_was_lost(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()

    def lose(call: str, name: str, done: bool) -> None:
        if done and call == "create" and "/log/" in name:
            objects.fail = nothing
            raise OSError(errno.ETIMEDOUT, "no reply")

    async with opened(disk, objects) as store:
        await fill(store, 5, topic="Other")
        await fill(store, 20)
        await until_dispatched(store)
        await store.flush()
        objects.fail = lose
        with pytest.raises(OSError, match="no reply"):
            await store.uploads.upload_all()
        await store.delete_topic(TOPIC)
        await uploaded(store)
        assert store.tier_range("Other", 0) == (0, 5)
        assert store.tier_range(TOPIC, 0) is None
        await fill(store, 3)
        await uploaded(store)
        assert store.tier_range(TOPIC, 0) == (0, 3)
    async with opened(disk, objects) as store:
        assert store.tier_range(TOPIC, 0) == (0, 3)


async def test_the_root_names_no_index_file_that_is_being_uploaded(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()
    config = tier(tiered_store_index_file_max_hash_slot_num=16, tiered_store_index_file_max_index_num=41)
    async with opened(disk, objects, config) as store:
        await fill(store, 60)
        await uploaded(store)
        create = store.bucket.create
        missing: list[set[str]] = []

        async def slow(name: str, data: Sequence[Any]) -> None:
            if name.startswith("index/"):
                await store.uploads.save()
                there = {one.removeprefix(store.bucket.prefix) for one in objects.named("/index/")}
                missing.append(set(store.manifest.indexes) - there)
            await create(name, data)

        store.bucket.create = slow  # type: ignore[method-assign]
        assert store.tier_index is not None
        while await store.tier_index.upload_next():
            pass
        assert missing
        assert not any(missing)


async def test_a_read_of_an_object_that_is_gone_waits_for_a_claim() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await uploaded(store)
        manifest = Manifest(store.bucket, "C1", "broker-a")
        queues = BucketQueues(store.bucket, manifest, tier(), disk, store.clock.monotonic)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queues.claim)
            while not manifest._lock.locked():
                await trio.lowlevel.checkpoint()
            assert not manifest.is_owner
            await queues._refresh()
        assert queues.epoch == 2
        assert queues.end == store.manifest.end


async def test_a_fenced_owner_that_reads_the_manifest_keeps_its_local_files() -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as first:
        await fill(first, 20)
        await uploaded(first)
        async with opened(SimDisk(), objects) as second:
            await fill(first, 20, first=20)
            await until_dispatched(first)
            await first.flush()
            with pytest.raises(FencedError) as caught:
                await first.uploads.upload_all()
            first._fenced(caught.value)
            waiting = await first.uploads.lowest_waiting()
            assert waiting is not None
            await fill(second, 60, first=20)
            await uploaded(second)
            await first.bucket_queues._refresh()
            after = await first.uploads.lowest_waiting()
            assert after is not None
            assert after <= waiting


async def test_a_slave_whose_manifest_is_damaged_goes_on(autojump_clock: trio.testing.MockClock) -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as master:
        await fill(master, 20)
        await uploaded(master)
        async with opened(SimDisk(), objects, tier(**FORCE), replication=SLAVE) as slave:
            await slave.is_loaded.wait()
            for name in objects.named("/log/"):
                objects.delete([name])
            corrupt(objects, objects.named("/root")[0])
            result = await slave.get_message_cold(TOPIC, 0, 0, 32, 1 << 20, None)
            assert not result.buffers


async def test_a_damaged_block_ends_no_other_upkeep(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 3)
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(**FORCE)) as store:
        for number in range(60):
            await fill(store, 10, first=10 * number)
            await store.flush()
            await uploaded(store)
        await drop_local(store)
        corrupt(objects, objects.named("/log/")[1], 300)
        objects.calls.clear()
        await trio.sleep(3600)
        # What stands beside the damaged object is joined, and that one is not copied again and again.
        assert [entry.object.generation > 0 for entry in store.manifest.entries].count(False) <= 4
        assert sum(call == "read_range" for call, _ in objects.calls) < 200
        assert store.joiner.joins
        advance(store, 3601)
        await trio.sleep(20)
        assert len(objects.named("/log/")) <= 4


async def test_what_expires_while_the_root_cannot_be_replaced_waits_for_its_grace() -> None:
    clock = ManualClock()

    class Old(Objects):
        """The root is new, all else was written long ago."""

        def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
            found = super().list(prefix, after, count)
            return [
                info._replace(modified_ms=clock.wall_ms() - (0 if info.name.endswith("/root") else 7_200_000))
                for info in found
            ]

    def fail(call: str, _name: str, _done: bool) -> None:
        if call == "replace":
            raise OSError(errno.EIO, "no way")

    objects = Old()
    async with opened(SimDisk(), objects, clock=clock) as store:
        await fill(store, 3)
        await uploaded(store)
        objects.fail = fail
        clock.advance(80 * 3600)
        assert await store.expire_tier() == 0
        objects.fail = nothing
        assert await store.upkeep.delete_garbage() == 0
        assert len(objects.named("/log/")) == 1
        clock.advance(3601)
        await store.bucket_queues.garbage.delete_due()
        assert not objects.named("/log/")


@pytest.mark.parametrize(("place", "size"), [(None, 1 << 30), (5, 1 << 30)])
async def test_a_damaged_unit_makes_no_object_larger(
    place: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit of a consume queue whose record would end behind the log: the others go on as if it were not there."""
    monkeypatch.setattr(object_contents, "OBJECT_BYTES", 2000)
    async with opened(SimDisk(), Objects()) as store:
        for number in range(50):
            await fill(store, 1, first=number)
            await fill(store, 1, queue_id=1, first=number)
        builder = store.uploads._builder
        unit_bytes = builder._unit_bytes

        async def damaged(queue: Any, offset: int, count: int) -> bytes:
            data = bytearray(await unit_bytes(queue, offset, count))
            at = (3 - offset) * UNIT_SIZE
            if queue.queue_id == 0 and 0 <= at < len(data):
                phy, _, tags = UNIT.unpack_from(data, at)
                UNIT.pack_into(data, at, phy if place is None else place, size, tags)
            return bytes(data)

        monkeypatch.setattr(builder, "_unit_bytes", damaged)
        await uploaded(store)
        assert store.tier_range(TOPIC, 1) == (0, 50)
        assert max(entry.object.end - entry.object.begin for entry in store.manifest.entries) <= 4000
