"""Joins, expiry and garbage of a whole store with a bucket: nothing is missing, twice, or left over."""

import errno
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, put, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.test_tiered_message_store import all_offsets, drop_local, get
from trimq.broker.store.tiered.bucket import joiner, object_contents
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.garbage import find_garbage
from trimq.broker.store.tiered.bucket.joiner import Window, choose, windows_of
from trimq.broker.store.types import GetMessageStatus
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.protocol.bucket_manifest import Entry, StoredObject
from trimq.protocol.bucket_names import ObjectName, page_name, state_name
from trimq.remoting.runtime.clock import ManualClock

FORCE = {"tiered_storage_level": TieredStorageLevel.FORCE}
QUEUES = 3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects, joins and parts of a few kilobytes."""
    monkeypatch.setattr(object_contents, "OBJECT_BYTES", 2000)
    monkeypatch.setattr(joiner, "JOIN_BYTES", 16_000)
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 6)
    monkeypatch.setattr(joiner, "JOIN_SEGMENTS", 3)
    monkeypatch.setattr(joiner, "PART_SIZE", 1500)


async def filled(store: BucketMessageStore, count: int, first: int = 0) -> None:
    """Messages of ``count`` offsets of each queue, between each other, uploaded."""
    for number in range(first, first + count):
        for queue_id in range(QUEUES):
            await fill(store, 1, queue_id=queue_id, first=number)
    await uploaded(store)


async def joined(store: BucketMessageStore) -> int:
    """Do all joins; return their number."""
    count = 0
    while await store.upkeep.join():
        count += 1
    return count


async def everything(store: BucketMessageStore, end: int) -> dict[int, list[tuple[int, int]]]:
    return {queue_id: await all_offsets(store, 0, end, queue_id=queue_id) for queue_id in range(QUEUES)}


def advance(store: BucketMessageStore, seconds: float) -> None:
    clock = store.clock
    assert isinstance(clock, ManualClock)
    clock.advance(seconds)


@pytest.mark.parametrize("is_local", [True, False])
async def test_joins_keep_every_message_once(is_local: bool) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(**FORCE)) as store:
        await filled(store, 40)
        before = await everything(store, 40)
        uploads = set(objects.named("/log/"))
        assert len(uploads) > 10
        if not is_local:
            await drop_local(store)
        objects.calls.clear()
        assert await joined(store) >= 2
        # The local log has all that was uploaded only: a join of segments reads these.
        assert any(call == "read_range" and "/log/" in name for call, name in objects.calls) is not is_local
        windows = windows_of(store.manifest.entries)
        assert any(window.generation >= 1 for window in windows)
        assert any(len(window.entries) > 1 for window in windows)  # large queues have segments of their own
        assert await everything(store, 40) == before
        # What was joined stays for the grace, and then it goes.
        assert uploads <= set(objects.named("/log/"))
        advance(store, 3600)
        assert await store.bucket_queues.garbage.delete_due() > 0
        named = {store.bucket.prefix + entry.object.name for entry in store.manifest.entries}
        assert {*objects.named("/log/"), *objects.named("/segments/")} == named
        assert await everything(store, 40) == before
        await filled(store, 10, first=40)
        longer = await everything(store, 50)
    async with opened(disk, objects, tier(**FORCE)) as store:
        assert await everything(store, 50) == longer
    async with opened(SimDisk(), objects) as store:
        assert await everything(store, 50) == longer


async def test_small_segments_are_joined_again() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(**FORCE)) as store:
        for number in range(40):
            await put(store, b"x", queue_id=number % QUEUES)
            await uploaded(store)
        before = {queue: await all_offsets(store, 0, end, queue_id=queue) for queue, end in enumerate((14, 13, 13))}
        await joined(store)
        windows = windows_of(store.manifest.entries)
        assert max(window.generation for window in windows) == 2
        assert len(windows) < 10
        for queue_id, messages in before.items():
            assert await all_offsets(store, 0, len(messages), queue_id=queue_id) == messages


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_deleted_topic_is_left_out(is_local: bool) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(**FORCE)) as store:
        await filled(store, 10)
        for number in range(30):
            await fill(store, 1, topic="Gone", first=number)
        await filled(store, 30, first=10)
        await store.delete_topic("Gone")
        if not is_local:
            await drop_local(store)
        await joined(store)
        expected = await everything(store, 40)
        segments = [entry for entry in store.manifest.entries if entry.object.generation]
        assert segments[0].object.begin == 0
        for entry in segments:
            directory = await store.manifest.read_directory(entry.object)
            assert "Gone" not in directory.topics
    async with opened(disk, objects, tier(**FORCE)) as store:
        assert await everything(store, 40) == expected
        assert store.tier_queues.find("Gone", 0) is None


async def test_a_topic_that_is_deleted_during_a_join_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(**FORCE)) as store:
        await fill(store, 10, topic="Gone")
        await filled(store, 30)

        write = store.joiner._write

        async def forget(*arguments: Any) -> Entry:
            await store.bucket_queues.forget("Gone", 0, 0)
            return await write(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(store.joiner, "_write", forget)
            replaced = await store.joiner.join_next(0)
        assert replaced
        assert all(name.startswith("segments/") for name in replaced)  # what it has written is garbage
        assert not any(entry.object.generation for entry in store.manifest.entries)
        assert await joined(store)
        assert not any(stretch.topic == "Gone" for entry in store.manifest.entries for stretch in entry.stretches)
        expected = await everything(store, 30)
    async with opened(disk, objects, tier(**FORCE)) as store:
        assert await everything(store, 30) == expected
        assert store.tier_queues.find("Gone", 0) is None


@pytest.mark.parametrize("call", ["read_range", "create", "writer"])
async def test_a_join_that_fails_is_repeated(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    local = call != "read_range"
    if call == "create":  # each segment is one request
        monkeypatch.setattr(joiner, "PART_SIZE", 1 << 20)
        monkeypatch.setattr(joiner, "JOIN_BYTES", 4000)
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(**FORCE)) as store:
        await filled(store, 40)
        before = await everything(store, 40)
        if not local:
            await drop_local(store)
        seen = 0

        def fail(name: str, of: str, done: bool) -> None:
            nonlocal seen
            if name == call and done and (call == "read_range" or "/segments/" in of):
                seen += 1
                if seen == 2:
                    raise OSError(errno.EIO, "no")

        objects.fail = fail
        while True:
            entries = list(store.manifest.entries)
            try:
                if not await store.joiner.join_next(0):
                    break
            except OSError:
                assert store.manifest.entries == entries
                break
        assert seen >= 2
        objects.fail = lambda *_: None
        assert disk.list(store.root).count(joiner.SPOOL) == 0
        await joined(store)
        assert await everything(store, 40) == before
        advance(store, 3600)
        await store.bucket_queues.garbage.delete_due()
        # What the failed attempt has written is found by name.
        left = await find_garbage(store.bucket, store.manifest, 1 << 60, 0)
        await store.bucket.delete([info.name for info in left])
        named = {store.bucket.prefix + entry.object.name for entry in store.manifest.entries}
        assert {*objects.named("/log/"), *objects.named("/segments/")} - {"x"} >= named
        assert await everything(store, 40) == before


async def test_a_damaged_block_is_not_joined() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(**FORCE)) as store:
        await filled(store, 40)
        await drop_local(store)
        name = objects.named("/log/")[1]
        data = bytearray(objects.read(name).data)
        data[300] ^= 1
        objects.replace(name, bytes(data), objects.read(name).version)
        with pytest.raises(ValueError, match="damaged in the bucket"):
            await joined(store)
        assert not any(entry.object.generation for entry in store.manifest.entries)


async def test_expired_objects_go_and_queues_keep_their_ends() -> None:
    disk, objects = SimDisk(), Objects()
    clock = ManualClock()
    config = tier(tiered_store_file_reserved_time=1)
    async with opened(disk, objects, config, clock=clock) as store:
        await fill(store, 20)
        await uploaded(store)
        clock.set_wall_ms(clock.wall_ms() + 3_500_000)
        await fill(store, 20, queue_id=1)
        await uploaded(store)
        assert await store.expire_tier() == 0
        clock.set_wall_ms(clock.wall_ms() + 200_000)
        count = len(objects.named("/log/"))
        gone = await store.expire_tier()
        assert 0 < gone < count
        assert await store.expire_tier() == 0
        clock.advance(3600)
        await store.bucket_queues.garbage.delete_due()
        assert len(objects.named("/log/")) == count - gone
        queue = store.tier_queues.find(TOPIC, 0)
        assert queue is not None
        assert (queue.min_offset, queue.commit_offset) == (20, 20)
        # The messages are in the local log still, and are not uploaded again.
        await fill(store, 1, first=20)
        await uploaded(store)
        assert (queue.min_offset, queue.commit_offset) == (20, 21)
        clock.set_wall_ms(clock.wall_ms() + 7_200_000)
        await store.expire_tier()
    async with opened(SimDisk(), objects, config, clock=clock) as store:
        assert store.next_offset(TOPIC, 0) == 21
        assert store.next_offset(TOPIC, 1) == 20
        assert (await get(store, 0)).status is not GetMessageStatus.FOUND
        await fill(store, 3, first=21)
        await uploaded(store)
        assert [offset for offset, _ in await all_offsets(store, 21, 24)] == [21, 22, 23]


async def test_what_interrupted_writes_left_is_found_and_nothing_else() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await filled(store, 20)
        await joined(store)
        advance(store, 3600)
        await store.bucket_queues.garbage.delete_due()
        everything_there = set(objects.named(""))
        prefix = store.bucket.prefix
        for name in (
            "log/00000000000000000000-00000000",
            "segments/00000000000000000000-00000000000000002000-0001-00000001-0099",
            "manifest/page-000000000001-00000000-0000",
            "index/" + "-".join(["0" * 20] * 3 + ["0" * 12, "00000001"]),
        ):
            objects.create(prefix + name, [b"left"])
        await until_dispatched(store)
        found = await find_garbage(store.bucket, store.manifest, 1 << 60, -1)
        left = {prefix + info.name for info in found}
        assert {name for name in everything_there if name in left} == set()
        assert len(left) == 4
        assert await find_garbage(store.bucket, store.manifest, 1 << 60, 3_600_000) == []  # they are too young
        # What a broker that was only frozen may still name is not garbage, however old it is.
        root = store.manifest.root
        assert root is not None
        for name in (
            str(ObjectName(store.manifest.end, 0, 0, root.epoch, 0)),
            str(ObjectName(0, 0, 0, root.epoch + 1, 0)),
            str(ObjectName(0, 2000, 1, root.epoch + 1, 7)),
            page_name(root.sequence + 1, root.epoch, 0),
            state_name(root.sequence, root.epoch + 1),
        ):
            objects.create(prefix + name, [b"under way"])
        found = await find_garbage(store.bucket, store.manifest, 1 << 60, -1)
        assert {prefix + info.name for info in found} == left


WINDOWS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9000)), max_size=30)


@given(WINDOWS)
def test_joins_come_to_an_end_and_make_few_windows(sizes: list[tuple[int, int]]) -> None:
    windows: list[Window] = []
    for number, (generation, size) in enumerate(sizes):
        stored = StoredObject(number, number + 1, generation, 1, 0, size, 0)
        windows.append(Window(number, number + 1, generation, [Entry(stored, [])]))
    total = sum(window.size for window in windows)
    for _ in range(200):
        chosen = choose(windows, len(sizes))
        if not chosen:
            break
        assert len(chosen) > 1
        assert all(one.end == two.begin for one, two in pairwise(chosen))
        assert len({window.generation for window in chosen}) == 1
        assert sum(window.size for window in chosen) <= 2 * joiner.JOIN_BYTES
        begin, end, generation = chosen[0].begin, chosen[-1].end, chosen[0].generation + 1
        stored = StoredObject(begin, end, generation, 1, 0, sum(window.size for window in chosen), 0)
        at = windows.index(chosen[0])
        windows[at : at + len(chosen)] = [Window(begin, end, generation, [Entry(stored, [])])]
    else:
        raise AssertionError("the joins do not come to an end")
    assert sum(window.size for window in windows) == total
    assert [window.begin for window in windows] == sorted(window.begin for window in windows)
