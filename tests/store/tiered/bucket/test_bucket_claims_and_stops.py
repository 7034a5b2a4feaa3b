"""A claim that meets other troubles, and a stop in the middle of what takes long."""

import errno
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from tests.store.replication.pairs import SLAVE
from tests.store.simdisk import Loss, SimDisk
from tests.store.stores import TOPIC, fill, put, settings, until_dispatched
from tests.store.tiered.bucket.faulty_store import FaultyStore
from tests.store.tiered.bucket.history import epoch_of, late_upload, manifest, upload
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.bucket.test_bucket_message_store import nothing
from tests.store.tiered.test_tiered_message_store import drop_local
from trimq.broker.store.tiered.bucket import joiner
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.joiner import SPOOL
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.object_store import ChangedError
from trimq.broker.store.tiered.bucket.restore import restore
from trimq.broker.store.types import GetMessageStatus
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.protocol.bucket_names import ROOT
from trimq.remoting.runtime.clock import ManualClock


async def test_a_claim_whose_reply_was_lost_adopts_what_came_meanwhile() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    first = manifest(bucket)
    await first.claim()
    await upload(bucket, first, 1)
    second = manifest(store.bucket())
    late_upload(store, first, OSError(errno.ETIMEDOUT, "no reply"))
    with pytest.raises(OSError, match="no reply"):
        await second.claim()
    await second.claim()
    assert epoch_of(second) == 3
    assert second.end == 2000


async def test_an_epoch_is_not_used_again_after_an_older_root_came_back() -> None:
    store = FaultyStore()
    bucket = store.bucket()
    first = manifest(bucket)
    await first.claim()
    await upload(bucket, first, 1)
    await first.save()
    old = store.get(ROOT)
    second = manifest(store.bucket())
    await second.claim()
    await upload(bucket, second, 2)
    store.put(ROOT, old)
    third = manifest(store.bucket())
    await third.claim()
    assert third.end == 1000
    fourth = manifest(store.bucket())
    await fourth.load()
    assert fourth.end == 1000


async def test_a_topic_deleted_before_the_claim_is_not_served_from_the_bucket(
    autojump_clock: trio.testing.MockClock,
) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await uploaded(store)
        await drop_local(store)

    def no_claim(call: str, _name: str, _done: bool) -> None:
        if call == "replace" or not is_open:
            raise OSError(errno.EIO, "no way")

    is_open = False
    objects.fail = no_claim
    async with opened(disk, objects) as store:
        await store.delete_topic(TOPIC)
        await fill(store, 3)
        await until_dispatched(store)
        is_open = True
        await trio.sleep(200)
        assert store.manifest.root is not None
        assert not store.is_loaded.is_set()
        result = store.get_message(TOPIC, 0, 3, 32, 1 << 20, None)
        if result is None:
            result = await store.get_message_cold(TOPIC, 0, 3, 32, 1 << 20, None)
        assert not result.buffers
        assert result.status is GetMessageStatus.OFFSET_OVERFLOW_ONE
        objects.fail = nothing
        await trio.sleep(200)
        assert store.is_loaded.is_set()


async def test_a_stop_in_the_middle_of_a_join_leaves_no_spool(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 3)
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        for number in range(6):
            await fill(store, 30, first=30 * number)
            await uploaded(store)
        await drop_local(store)
        reading = trio.Event()

        async def never(name: str, begin: int, length: int) -> Any:
            if name.startswith("log/"):
                reading.set()
                await trio.sleep_forever()

        monkeypatch.setattr(store.bucket, "read_range", never)
        await reading.wait()
        assert disk.stat(f"{store.root}/{SPOOL}") is not None
    assert disk.stat(f"{store.root}/{SPOOL}") is None


async def first_body(store: BucketMessageStore, offset: int) -> bytes:
    result = store.get_message(TOPIC, 0, offset, 1, 1 << 20, None, "group")
    if result is None:
        result = await store.get_message_cold(TOPIC, 0, offset, 1, 1 << 20, None, "group")
    return bytes(result.buffers[0]) if result.buffers else b""


async def test_a_slave_has_nothing_in_memory_of_a_topic_that_was_created_anew(
    autojump_clock: trio.testing.MockClock,
) -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as master:
        for number in range(100):
            await put(master, b"old %d" % number)
        await uploaded(master)
        level = tier(tiered_storage_level=TieredStorageLevel.FORCE)
        async with opened(SimDisk(), objects, level, replication=SLAVE) as slave:
            await slave.is_loaded.wait()
            assert b"old 0" in await first_body(slave, 0)
            queue = slave.bucket_queues.find(TOPIC, 0)
            await put(master, b"old 100")
            await uploaded(master)
            await slave.bucket_queues.load()
            assert slave.bucket_queues.find(TOPIC, 0) is queue
            await master.delete_topic(TOPIC)
            for number in range(200):
                await put(master, b"new %d" % number)
            await uploaded(master)
            await slave.bucket_queues.load()
            for number in (0, 50, 99, 199):
                assert b"new %d" % number in await first_body(slave, number)


async def test_a_fenced_broker_serves_nothing_of_a_deleted_topic(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await fill(store, 5, topic="Other")
        await uploaded(store)
    old = disk.copy()
    async with opened(disk, objects) as store:
        await fill(store, 5, topic="Other", first=5)
        await uploaded(store)

    def away(_call: str, _name: str, _done: bool) -> None:
        raise OSError(errno.EIO, "no way")

    objects.fail = away
    async with opened(old, objects) as store:
        await store.delete_topic(TOPIC)
        await fill(store, 3)
        await until_dispatched(store)
        objects.fail = nothing
        await trio.sleep(200)
        trouble = store.tier_trouble()
        assert trouble is not None
        assert trouble.code == "tier_fenced"
        assert store.tier_range("Other", 0) == (0, 10)
        for _ in range(2):
            assert await first_body(store, 2)
            assert await first_body(store, 3) == b""
            await store.bucket_queues.load()


async def test_a_fence_that_the_upkeep_finds_ends_all_that_writes(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects, clock = SimDisk(), Objects(), ManualClock()
    async with opened(disk, objects, clock=clock) as first:
        await fill(first, 20)
        await uploaded(first)
        async with opened(SimDisk(), objects):
            pass
        with structlog.testing.capture_logs() as logs:
            first.manifest.unsaved_changes += 1
            clock.advance(3601)
            await trio.sleep(11)
            assert first.uploads.fenced
            objects.calls.clear()
            clock.advance(3601)
            await trio.sleep(600)
            assert objects.calls == []
        assert [log["event"] for log in logs].count("tier_fenced") == 1


@pytest.mark.parametrize("moment", ["create", "data_sync", "sync_directory", "end"])
async def test_a_power_cut_at_the_end_of_a_restore(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the log's file may be durable and its length not."""
    objects, disk = Objects(), SimDisk()
    async with opened(SimDisk(), objects) as store:
        await fill(store, 20)
        await uploaded(store)
        bucket, end = store.bucket, store.manifest.end
    found = Manifest(bucket, "C1", "broker-a")
    await found.load()
    config = settings()
    disks: list[SimDisk] = []

    def cut(*_: object) -> None:
        if moment != "end" and disk.list(str(config.commit_log_path)):
            SimDisk.sync_directory(disk, str(config.commit_log_path))  # the file system may do that at any time
            disks.append(disk.copy_after_cut(Loss.ALL))

    if moment != "end":
        call = getattr(disk, moment)

        def then(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            cut()
            return result

        monkeypatch.setattr(disk, moment, then)
    await restore(disk, config, bucket, found)
    (name,) = disk.list(str(config.commit_log_path))
    assert len(disk.durable_content(f"{config.commit_log_path}/{name}")) == config.mapped_file_size_commit_log
    disks.append(disk.copy_after_cut(Loss.ALL))
    for after in disks:
        async with opened(after, objects.copy()) as store:
            assert store.tier_trouble() is None
            assert store.min_phy_offset >= end
            assert store.next_offset(TOPIC, 0) == 20


async def test_a_store_that_refuses_each_replacement_is_not_asked_for_ever() -> None:
    """For example a proxy that changes ETags: the root stays this owner's, and each condition is refused."""
    store = FaultyStore()
    bucket = store.bucket()
    owner = manifest(bucket)
    await owner.claim()
    await upload(bucket, owner, 1)
    asked = 0

    def refuse(name: str, _data: bytes, _version: str | None) -> str:
        nonlocal asked
        asked += 1
        if asked > 100:
            raise AssertionError("it is asked for ever")
        raise ChangedError(name)

    replace = store.store.replace
    store.store.replace = refuse  # type: ignore[assignment, method-assign]
    with pytest.raises(OSError, match="refuses") as caught:
        await owner.save()
    assert not isinstance(caught.value, ChangedError)
    assert owner.is_owner
    store.store.replace = replace  # type: ignore[method-assign]
    await owner.save()
    assert owner.unsaved == 0
