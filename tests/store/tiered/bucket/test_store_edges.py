"""Rare ways of a store with a bucket: what fails while it opens, joins, expires or restores; a slave."""

import errno
from collections.abc import Sequence

import pytest
import structlog.testing
import trio
import trio.testing

from tests.store.replication.pairs import SLAVE
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, by_key, fill, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.bucket.test_bucket_message_store import away, nothing, trouble, until, write
from tests.store.tiered.test_tiered_message_store import all_offsets, drop_local
from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.tiered.bucket import bucket_message_store, join_sources, joiner
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.join_sources import LogSource, NotLocalError, Source
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.queue_starts import RESTORED
from trimq.broker.store.tiered.bucket.restore import read_state
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.protocol.bucket_manifest import Entry
from trimq.protocol.bucket_object import BucketFormatError
from trimq.remoting.runtime.clock import ManualClock

FORCE = {"tiered_storage_level": TieredStorageLevel.FORCE}


def corrupt(objects: Objects, name: str, at: int = -20) -> None:
    found = objects.read(name)
    data = bytearray(found.data)
    data[at] ^= 1
    objects.replace(name, bytes(data), found.version)


async def in_objects(store: BucketMessageStore, count: int, first: int = 0) -> None:
    """Each message in an object of its own."""
    for number in range(first, first + count):
        await fill(store, 1, first=number)
        await uploaded(store)


async def test_a_slave_reads_and_writes_nothing(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_message_store, "_READ_AGAIN", 10.0)
    objects = Objects()
    async with opened(SimDisk(), objects) as master:
        await fill(master, 20)
        await uploaded(master)
        objects.calls.clear()
        async with opened(SimDisk(), objects, tier(**FORCE), replication=SLAVE) as slave:
            await slave.is_loaded.wait()
            assert len(await all_offsets(slave, 0, 20)) == 20
            assert {call for call, _ in objects.calls} <= {"read", "read_range", "list"}
            await fill(master, 5, first=20)
            await uploaded(master)
            await trio.sleep(11)
            assert len(await all_offsets(slave, 0, 25)) == 25
            assert await slave.clean_unused_topics(set()) == [TOPIC]
        assert len(await all_offsets(master, 0, 25)) == 25
    async with opened(SimDisk(), objects) as restored:
        assert len(await all_offsets(restored, 0, 25)) == 25


async def test_a_damaged_root_is_said_and_the_local_store_serves() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await uploaded(store)
    corrupt(objects, "C1/broker-a/manifest/root")
    async with opened(disk, objects) as store:
        assert trouble(store)[0] == "tier_damaged"
        assert "root" in trouble(store)[1]
        await fill(store, 5, first=20)
        await until_dispatched(store)
        assert len(await all_offsets(store, 0, 25)) == 25


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_keys_that_cannot_be_put_again(autojump_clock: trio.testing.MockClock, is_damaged: bool) -> None:
    """An object that cannot be read delays the uploads; one that is damaged costs its keys only."""
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await in_objects(store, 3)
        name = objects.named("/log/")[1]
    if is_damaged:
        corrupt(objects, name, 70)
    else:
        objects.fail = lambda call, of, done: away("read_range")(call, of, done) if of == name else None
    with structlog.testing.capture_logs() as logs:
        async with opened(SimDisk(), objects) as store:
            await store.is_loaded.wait()
            await trio.sleep(5)
            assert any(one["event"] == "tiered_index_not_completed" for one in logs)
            objects.fail = nothing
            await fill(store, 1, first=3)
            await until_dispatched(store)
            await store.flush()
            await trio.sleep(100)
            await uploaded(store)
            assert [message.queue_offset for message in await by_key(store, f"u{TOPIC}0-3")] == [3]
            assert [message.queue_offset for message in await by_key(store, f"u{TOPIC}0-0")] == [0]
            found = [message.queue_offset for message in await by_key(store, f"u{TOPIC}0-1")]
            assert found == ([] if is_damaged else [1])


async def test_upkeep_that_fails_is_repeated(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    disk, objects = SimDisk(), Objects()

    def fail(call: str, name: str, done: bool) -> None:
        if "/segments/" in name and not done:
            raise OSError(errno.EIO, "no segment")

    with structlog.testing.capture_logs() as logs:
        async with opened(disk, objects) as store:
            objects.fail = fail
            await in_objects(store, 5)
            await trio.sleep(300)
            assert not objects.named("/segments/")
            assert [one["event"] for one in logs].count("tier_upkeep_failed") == 1
            objects.fail = nothing
            await until(lambda: bool(objects.named("/segments/")), 200)
            await trio.sleep(20)
            assert [one["event"] for one in logs].count("tier_upkeep_resumed") == 1


async def test_an_expiry_that_fails_deletes_nothing() -> None:
    disk, objects, clock = SimDisk(), Objects(), ManualClock()
    async with opened(disk, objects, tier(tiered_store_file_reserved_time=1), clock=clock) as store:
        await fill(store, 20)
        await uploaded(store)
        clock.set_wall_ms(clock.wall_ms() + 4_000_000)
        before = objects.named("/log/")
        objects.fail = away("replace")
        assert await store.expire_tier() == 0
        clock.advance(3600)
        await store.bucket_queues.garbage.delete_due()
        assert objects.named("/log/") == before
        objects.fail = nothing


async def test_a_fenced_owner_learns_it_by_what_it_does_next() -> None:
    for act in ("expire", "clean", "index"):
        disk, objects, clock = SimDisk(), Objects(), ManualClock()
        small = {"tiered_store_index_file_max_hash_slot_num": 16, "tiered_store_index_file_max_index_num": 20}
        async with opened(disk, objects, tier(tiered_store_file_reserved_time=1, **small), clock=clock) as store:
            await fill(store, 30)
            await uploaded(store)
            other = Manifest(store.bucket, "C1", "broker-a")
            await other.claim()
            clock.set_wall_ms(clock.wall_ms() + 4_000_000)
            if act == "expire":
                assert await store.expire_tier() == 0
            elif act == "clean":
                assert await store.clean_unused_topics(set()) == []
            else:
                assert store.tier_index is not None
                with pytest.raises(OSError, match="owner"):
                    await store.tier_index.upload_next()
            assert trouble(store)[0] == "tier_fenced", act


# -- joins


async def test_a_log_that_loses_messages_during_a_join_is_not_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The join goes on with the objects."""
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(**FORCE)) as store:
        await in_objects(store, 80)
        before = await all_offsets(store, 0, 80)
        local = store.joiner._local

        async def then_lost(entries: Sequence[Entry]) -> Source:
            source = await local(entries)
            await drop_local(store)
            return source

        monkeypatch.setattr(store.joiner, "_local", then_lost)
        while await store.upkeep.join():
            pass
        assert any(call == "read_range" and "/log/" in name for call, name in objects.calls)
        assert any(entry.object.generation for entry in store.manifest.entries)
        assert await all_offsets(store, 0, 80) == before


async def test_another_queue_of_the_name_is_no_source_of_a_join() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 5)
        await uploaded(store)
        entries = list(store.manifest.entries)
        (stretch,) = entries[0].stretches
        for changed in (
            stretch._replace(first_physical=stretch.first_physical + 1),
            stretch._replace(last_physical=stretch.last_physical + 1),
            stretch._replace(offset=3),
        ):
            wrong = [entries[0]._replace(stretches=[changed])]
            source: LogSource = await store.joiner._local(wrong)  # type: ignore[assignment]
            with pytest.raises(NotLocalError):
                async for _ in source.batches(source.pieces[0]):
                    pass


async def test_an_object_that_is_cut_off_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await in_objects(store, 60)
        await drop_local(store)
        read_range = objects.read_range

        def short(name: str, begin: int, length: int) -> object:
            return bytes(read_range(name, begin, length))[: length // 2 if begin == 64 else length]

        monkeypatch.setattr(objects, "read_range", short)
        with pytest.raises(BucketFormatError, match="cut off"):
            await store.joiner.join_next(0)
        assert joiner.SPOOL not in disk.list(store.root)


async def test_a_disk_without_room_for_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    monkeypatch.setattr(join_sources, "_SLICE", 1)
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await in_objects(store, 60)
        await drop_local(store)

        def full(_fd: int, _offset: int, _length: int) -> None:
            raise OSError(errno.ENOSPC, "no room")

        with monkeypatch.context() as patched:
            patched.setattr(disk, "allocate", full)
            with pytest.raises(OSError, match="no room"):
                await store.joiner.join_next(0)
        assert joiner.SPOOL not in disk.list(store.root)
        assert await store.joiner.join_next(0)


# -- restore


async def test_the_state_of_the_last_upload_is_restored_before_a_root_names_it() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 3)
        disk.make_directory(f"{store.root}/config")
        write(disk, f"{store.root}/config/topics.json", b'{"old":1}')
        await uploaded(store)
        assert isinstance(store.clock, ManualClock)
        for number, text in enumerate((b'{"new":2}', b"")):
            store.clock.advance(60)
            if text:
                disk.delete(f"{store.root}/config/topics.json")
                write(disk, f"{store.root}/config/topics.json", text)
            await fill(store, 1, first=3 + number)
            await until_dispatched(store)
            await store.flush()
            await store.uploads._upload_object(force=True)
        left = objects.copy()
    manifest = Manifest(store.bucket.__class__(left, disk, store.bucket.prefix), "C1", "broker-a")
    await manifest.load()
    assert len(manifest.chain) == 2
    state = await read_state(manifest._bucket, manifest)
    assert state["topics.json"] == b'{"new":2}'


async def test_damaged_state_refuses_a_restore() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 3)
        disk.make_directory(f"{store.root}/config")
        write(disk, f"{store.root}/config/consumerOffset.json", b'{"offsetTable":[1]}')
        await uploaded(store)
    with pytest.raises(StoreLoadError, match=r"consumerOffset\.json in the bucket is damaged"):
        async with opened(SimDisk(), objects):
            pass
    write(disk, f"/store/{RESTORED}", b"{")
    with pytest.raises(StoreLoadError, match="restore the store from the bucket again"):
        async with opened(disk, objects):
            pass
