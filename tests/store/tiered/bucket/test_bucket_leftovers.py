"""What tries that failed leave behind, in the bucket and in memory: it goes, and nothing else does."""

import errno
import gc
import math
import mmap
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import obstore
import pytest
import structlog.testing
import trio
import trio.testing
from obstore.exceptions import GenericError

from tests.store.replication.pairs import SLAVE, until
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, by_key, fill, settings, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.bucket.test_bucket_message_store import away, nothing, read, write
from tests.store.tiered.bucket.test_store_edges import in_objects
from tests.store.tiered.test_tiered_message_store import all_offsets, drop_local
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.tiered.access.batch import BatchBuilder, new_memory
from trimq.broker.store.tiered.bucket import joiner, object_builder, object_contents
from trimq.broker.store.tiered.bucket.object_store import ObjectInfo
from trimq.broker.store.tiered.bucket.stretch_groups import StretchGroups
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.protocol.bucket_object import BucketFormatError
from trimq.protocol.native import NATIVE
from trimq.remoting.runtime.clock import ManualClock

FORCE = {"tiered_storage_level": TieredStorageLevel.FORCE}


class OldObjects(Objects):
    """All objects but the root were written long ago."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock

    def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
        listed = super().list(prefix, after, count)
        now = self.clock.wall_ms()
        return [info._replace(modified_ms=now - 7_200_000 * (not info.name.endswith("root"))) for info in listed]


async def test_an_old_page_that_was_replaced_just_now_stays_for_the_grace() -> None:
    clock = ManualClock()
    objects = OldObjects(clock)
    async with opened(SimDisk(), objects, clock=clock) as store:
        await fill(store, 5)
        await uploaded(store)
        pages = set(objects.named("/manifest/page"))
        await fill(store, 5, first=5)
        await until_dispatched(store)
        await store.flush()
        await store.uploads._try(force=True)
        await store.upkeep.delete_garbage()
        assert pages < set(objects.named("/manifest/page"))
        clock.advance(3601)
        await store.bucket_queues.garbage.delete_due()
        assert not pages & set(objects.named("/manifest/page"))


async def test_a_search_leaves_what_has_expired_and_the_root_still_names() -> None:
    clock = ManualClock()
    objects = OldObjects(clock)
    config = tier(tiered_store_file_reserved_time=1)
    async with opened(SimDisk(), objects, config, clock=clock) as store:
        await fill(store, 5)
        await uploaded(store)
        clock.set_wall_ms(clock.wall_ms() + 3_700_000)
        await fill(store, 1, topic="Other")
        await uploaded(store)
        expired = objects.named("/log/")[0]
        listing = store.bucket.list

        async def slow(prefix: str, after: str = "", count: int = 1000) -> Sequence[ObjectInfo]:
            objects.fail = away("replace")
            await store.expire_tier()
            objects.fail = nothing
            return await listing(prefix, after, count)

        store.bucket.list = slow  # type: ignore[method-assign,assignment]
        await store.upkeep.delete_garbage()
        assert expired in objects.named("/log/")
        store.bucket.list = listing  # type: ignore[method-assign]
        await store.uploads.save()
        clock.advance(3601)
        await store.bucket_queues.garbage.delete_due()
        assert expired not in objects.named("/log/")


async def test_the_segments_of_a_join_that_fails_go_with_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    monkeypatch.setattr(joiner, "PART_SIZE", 200)
    objects = Objects()
    async with opened(SimDisk(), objects, tier(**FORCE)) as store:
        for number in range(5):
            await fill(store, 3, first=3 * number)
            await fill(store, 3, queue_id=1, first=3 * number)
            await uploaded(store)
        before = await all_offsets(store, 0, 15, queue_id=1)
        finished: list[str] = []

        def fail(call: str, name: str, done: bool) -> None:
            if call == "finish":
                finished.append(name)
                if finished[0] != name:
                    finished.clear()
                    raise OSError(errno.EIO, "no")

        objects.fail = fail
        for _ in range(3):
            with pytest.raises(OSError, match="no"):
                await store.joiner.join_next(0)
            assert len(objects.named("/segments/")) == 1
        objects.fail = nothing
        assert await store.upkeep.join()
        named = {store.bucket.prefix + entry.object.name for entry in store.manifest.entries}
        assert set(objects.named("/segments/")) <= named
        assert await all_offsets(store, 0, 15, queue_id=1) == before


async def test_messages_that_the_disk_does_not_give_are_joined_from_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    build = BatchBuilder.build

    async def broken(self: BatchBuilder, *arguments: Any, keys: bool = True) -> Any:
        if not keys:  # only joins need none
            raise OSError(errno.EIO, "a bad sector")
        return await build(self, *arguments, keys=keys)

    async with opened(SimDisk(), Objects(), tier(**FORCE)) as store:
        await in_objects(store, 5)
        before = await all_offsets(store, 0, 5)
        monkeypatch.setattr(BatchBuilder, "build", broken)
        assert await store.upkeep.join()
        assert await all_offsets(store, 0, 5) == before


def cut(objects: Objects, name: str, length: int) -> None:
    """Let an object have only its first bytes, as after a power cut of the object store's machine."""
    data = objects.read(name).data
    objects.delete([name])
    objects.create(name, [data[:length]])


@pytest.mark.parametrize("length", [0, 100])
async def test_uploads_begin_although_an_object_with_keys_is_cut_off(
    autojump_clock: trio.testing.MockClock, length: int
) -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as store:
        await in_objects(store, 3)
    cut(objects, objects.named("/log/")[1], length)
    async with opened(SimDisk(), objects, tier(tiered_store_group_commit=False)) as store:
        await trio.sleep(100)
        await fill(store, 5, first=3)
        await until_dispatched(store)
        await store.flush()
        await trio.sleep(100)
        assert store.tier_range(TOPIC, 0) == (0, 8)
        for number in (0, 2, 7):
            assert [found.queue_offset for found in await by_key(store, f"u{TOPIC}0-{number}")] == [number]


@pytest.mark.parametrize("length", [0, 100])
async def test_an_object_that_is_cut_off_hinders_no_other_join(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    objects = Objects()
    async with opened(SimDisk(), objects) as store:
        await in_objects(store, 60)
        await drop_local(store)
        cut(objects, objects.named("/log/")[1], length)
        with pytest.raises(BucketFormatError):
            await store.joiner.join_next(0)
        assert await store.upkeep.join()


async def test_a_state_that_did_not_come_with_its_object_comes_with_the_next_one() -> None:
    disk, objects = SimDisk(), Objects()

    def lose(call: str, name: str, done: bool) -> None:
        if done and call == "create" and "/log/" in name:
            raise OSError(errno.ETIMEDOUT, "no reply")

    async with opened(disk, objects) as store:
        store.uploads._not_before = math.inf  # only the test uploads
        path = f"{store.root}/config/topics.json"
        disk.make_directory(f"{store.root}/config")
        write(disk, path, b'{"a":1}')
        for number in range(2):
            await fill(store, 5, first=5 * number)
            await until_dispatched(store)
            await store.flush()
            if not number:
                objects.fail = lose
                with pytest.raises(OSError, match="no reply"):
                    await store.uploads._upload_object(force=True)
                objects.fail = nothing
                disk.delete(path)
                write(disk, path, b'{"a":2}')
            assert await store.uploads._upload_object(force=True)
        assert store.bucket_queues.unsaved == len(objects.named("/log/")) == 2
        left = objects.copy()
    new = SimDisk()
    async with opened(new, left):
        assert read(new, path) == b'{"a":2}'


class KeptPieces(Objects):
    """The first upload fails, and its request is still being sent."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Any] = []

    def create(self, name: str, data: Sequence[Any]) -> None:
        if "/log/" in name and not self.pieces:
            self.pieces = list(data)
            raise OSError(errno.ETIMEDOUT, "no reply")
        super().create(name, data)


async def test_what_a_failed_request_may_still_send_does_not_change() -> None:
    objects = KeptPieces()
    local = settings(mapped_file_size_commit_log=1 << 20)
    async with opened(SimDisk(), objects, local=local) as store:
        store.uploads._not_before = math.inf  # only the test uploads
        await fill(store, 500)
        await until_dispatched(store)
        await store.flush()
        with pytest.raises(OSError, match="no reply"):
            await store.uploads._upload_object(force=True)
        sent = b"".join(objects.pieces)
        await store.delete_topic(TOPIC)
        await fill(store, 500, topic="Other")
        await uploaded(store)
        assert store.tier_range("Other", 0) == (0, 500)
        assert b"".join(objects.pieces) == sent


async def test_what_is_deleted_while_the_bucket_is_away_takes_no_memory() -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as store:
        await fill(store, 5)
        await uploaded(store)
    objects.fail = away()
    with structlog.testing.capture_logs():
        async with opened(SimDisk(), objects, replication=SLAVE) as slave:
            for _ in range(5):
                await slave.clean_unused_topics({TOPIC})
            assert not slave._starts._forgotten


async def test_a_search_leaves_what_expires_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    objects = OldObjects(clock)
    config = tier(tiered_store_file_reserved_time=1)
    async with opened(SimDisk(), objects, config, clock=clock) as store, trio.open_nursery() as nursery:
        await fill(store, 5)
        await uploaded(store)
        clock.set_wall_ms(clock.wall_ms() + 3_700_000)
        await fill(store, 1, topic="Other")
        await uploaded(store)
        expired = objects.named("/log/")[0]
        listing, run, go_on = store.bucket.list, store.bucket_queues._disk.run, trio.Event()

        async def slow(prefix: str, after: str = "", count: int = 1000) -> Sequence[ObjectInfo]:
            nursery.start_soon(store.expire_tier)
            await trio.testing.wait_all_tasks_blocked()
            return await listing(prefix, after, count)

        async def held(fn: Any, *arguments: Any) -> Any:
            if fn is StretchGroups:
                await go_on.wait()
            return await run(fn, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(store.bucket, "list", slow)
            patch.setattr(store.bucket_queues._disk, "run", held)
            await store.upkeep.delete_garbage()
            go_on.set()
            assert expired in objects.named("/log/")
        await trio.testing.wait_all_tasks_blocked()
        clock.advance(3601)
        await store.bucket_queues.garbage.delete_due()
        assert expired not in objects.named("/log/")


async def test_a_page_is_written_once_however_often_the_root_is_refused() -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as store:
        await fill(store, 5)
        await until_dispatched(store)
        await store.flush()
        before = len(objects.named("/manifest/page"))
        await store.uploads._try(force=True)
        objects.fail = away("replace")
        for _ in range(5):
            with pytest.raises(OSError, match="no way to"):
                await store.uploads.save()
        assert len(objects.named("/manifest/page")) == before + 1
        objects.fail = nothing
        await fill(store, 5, first=5)
        await uploaded(store)
        left = objects.copy()
    async with opened(SimDisk(), left) as store:
        assert store.tier_range(TOPIC, 0) == (0, 10)


@pytest.mark.parametrize("is_reply_lost", [False, True])
async def test_an_upload_that_fails_keeps_no_memory(is_reply_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error refers to its own frames, and is not collected for a long time: they must not have the records."""
    made: list[weakref.ref[mmap.mmap | memoryview]] = []
    cut = object_builder._cut

    def noted(size: int) -> mmap.mmap:
        memory = new_memory(size)
        made.append(weakref.ref(memory))
        return memory

    def noted_records(pieces: Sequence[memoryview], begin: int, end: int) -> Iterator[memoryview]:
        for piece in cut(pieces, begin, end):
            made.append(weakref.ref(piece))
            yield piece

    # The extension copies records into such memory. The full path has bytes objects: these have no weak references, but
    # the views of them do.
    monkeypatch.setattr(object_contents, "new_memory", noted)
    monkeypatch.setattr(object_builder, "_cut", noted_records)
    monkeypatch.setattr(object_builder, "_SMALL", 1)  # short pieces are copied
    objects = Objects()
    async with opened(SimDisk(), objects, tier(tiered_store_group_commit=False)) as store:
        await store.is_loaded.wait()
        monkeypatch.setattr(store.bucket, "_disk", RealDisk())  # an error of a thread refers to itself
        put = obstore.put

        def failing(bucket: Any, name: str, data: Any, mode: Any) -> Any:
            if is_reply_lost:
                put(bucket, name, data, mode=mode)
            raise GenericError("no way")

        monkeypatch.setattr(obstore, "put", failing)
        objects.fail = away("list")  # what a request whose reply was lost has written cannot be looked for either
        gc.disable()
        try:
            await fill(store, 20)
            await until_dispatched(store)
            await store.flush()
            for _ in range(4):
                assert not await store.uploads._try(force=True)
            a_try = 2 if NATIVE.extension is not None else 1
            assert len(made) >= a_try * (1 + 3 * (not is_reply_lost))
            store.uploads._reader.memory.release()
            # The run loop has the last result until the next one, and the last write's thread has it until it waits.
            await until(lambda: all(one() is None for one in made))
        finally:
            gc.enable()
        monkeypatch.undo()
        objects.fail = nothing
