"""The whole store with a bucket, on a simulated disk: uploads, reads, restarts, restore, fencing, faults."""

import errno
import json
from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, put, settings, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.test_tiered_message_store import all_offsets, drop_local, get
from trimq.broker.services.auth_file import DiskAuthFile
from trimq.broker.store.message_store import MessageStore, StoreLoadError
from trimq.broker.store.tiered.bucket import object_contents
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.restore import read_state
from trimq.broker.store.types import GetMessageStatus
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.protocol.auth.model import UserChange, UserType
from trimq.protocol.message import decode_messages
from trimq.protocol.topic_rules import SCHEDULE_TOPIC
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.secrets import KeyRing, Secrets
from trimq.remoting.runtime.clock import ManualClock


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait on the clock that jumps: an upload has no event."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.1)


async def test_messages_that_left_the_disk_are_read_from_the_bucket() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 60)
        await until_dispatched(store)
        before = await all_offsets(store, 0, 60)
        await uploaded(store)
        assert store.uploads.messages == 60
        await drop_local(store)
        local = MessageStore.min_offset(store, TOPIC, 0)
        assert 0 < local < 60
        assert store.min_offset(TOPIC, 0) == 0
        assert await all_offsets(store, 0, 60) == before  # log offsets too
        physical = before[0][1]
        assert store.look_message(physical) is None
        record = await store.look_message_cold(physical)
        assert decode_messages(record)[0].queue_offset == 0
    async with opened(disk, objects) as store:
        assert await all_offsets(store, 0, 60) == before
        await fill(store, 10, first=60)
        await uploaded(store)
        assert store.uploads.messages == 10
        assert len(await all_offsets(store, 0, 70)) == 70


async def test_a_stretch_of_the_log_is_one_object_however_many_queues_it_has() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        for queue_id in range(40):
            await fill(store, 2, queue_id=queue_id)
        await uploaded(store)
        assert len(objects.named("/log/")) == 1
        assert store.uploads.objects == 1
        assert store.uploads.behind == 0
    for level in TieredStorageLevel.FORCE, TieredStorageLevel.NOT_IN_MEM:
        async with opened(disk, objects, tier(tiered_storage_level=level)) as store:
            for queue_id in range(40):
                assert len(await all_offsets(store, 0, 2, queue_id=queue_id)) == 2
            assert len(objects.named("/log/")) == 1


@pytest.mark.parametrize("size", [700, 1000, 5000])
async def test_objects_end_between_records(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Also a record that is larger than an object has its place."""
    monkeypatch.setattr(object_contents, "OBJECT_BYTES", size)
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        for number in range(20):
            await put(store, bytes(number * 97), queue_id=number % 3)
        await put(store, bytes(10), topic=SCHEDULE_TOPIC)
        await put(store, bytes(2000))
        await put(store, bytes(2000), topic=SCHEDULE_TOPIC)
        await put(store, bytes(5))
        await uploaded(store)
        assert store.uploads.messages == 22
        expected = {number: await all_offsets(store, 0, end, queue_id=number) for number, end in enumerate((9, 7, 6))}
    names = sorted(objects.named("/log/"))
    assert len(names) > 1
    async with opened(disk, objects, tier(tiered_storage_level=TieredStorageLevel.FORCE)) as store:
        ends = [entry.object.end for entry in store.manifest.entries]
        assert [entry.object.begin for entry in store.manifest.entries] == [0, *ends[:-1]]
        assert store.tier_queues.find(SCHEDULE_TOPIC, 0) is None
        for queue_id, messages in expected.items():
            assert await all_offsets(store, 0, len(messages), queue_id=queue_id) == messages


async def test_messages_wait_for_their_time(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()
    clock = ManualClock()
    async with opened(disk, objects, tier(tiered_store_group_commit_timeout=30_000), clock=clock) as store:
        await fill(store, 3)
        await until_dispatched(store)
        await store.flush()
        await trio.sleep(5)
        assert not objects.named("/log/")
        assert store.uploads.behind == 3
        clock.set_wall_ms(clock.wall_ms() + 30_000)
        await trio.sleep(5)
        assert len(objects.named("/log/")) == 1
        assert store.uploads.behind == 0


async def test_an_empty_disk_gets_the_history(autojump_clock: trio.testing.MockClock) -> None:
    objects = Objects()
    disk = SimDisk()
    async with opened(disk, objects) as store:
        await fill(store, 60)
        await fill(store, 5, queue_id=1)
        await uploaded(store)
        expected = await all_offsets(store, 0, 60)
        end = store.commit_log.max_offset
        config = f"{store.root}/config"
        disk.make_directory(config)
        state = {"offsetTable": {f"{TOPIC}@g": {"0": 60, "1": 9}, "Gone@g": {"3": 4}}}
        write(disk, f"{config}/consumerOffset.json", json.dumps(state).encode())
        write(disk, f"{config}/topics.json", b"{}")
        await fill(store, 1, queue_id=1, first=5)
        await until_dispatched(store)
        await store.flush()
    new = SimDisk()
    async with opened(new, objects) as store:
        assert await all_offsets(store, 0, 60) == expected
        assert store.min_phy_offset >= end
        assert store.min_phy_offset % settings().mapped_file_size_commit_log == 0
        assert store.next_offset(TOPIC, 0) == 60
        assert store.next_offset(TOPIC, 1) == 9  # behind the group, whose messages 6 to 8 are lost
        assert store.next_offset("Gone", 3) == 4
        assert read(new, f"{store.root}/config/topics.json") == b"{}"
        assert json.loads(read(new, f"{store.root}/config/consumerOffset.json")) == state
        assert len(await all_offsets(store, 0, 6, queue_id=1)) == 6
    # Nothing was put yet: the queues begin there after another start too, and after a kill.
    async with opened(new.power_cut(), objects) as store:
        assert store.next_offset(TOPIC, 1) == 9
        await fill(store, 2, queue_id=1, first=9)
        result = await get(store, 6, queue_id=1)
        assert result.status is not GetMessageStatus.FOUND
        assert result.next_begin_offset == 9
        await uploaded(store)
        assert [offset for offset, _ in await all_offsets(store, 9, 11, queue_id=1)] == [9, 10]
        assert store.min_offset(TOPIC, 1) == 0


async def test_a_restored_broker_has_its_users(autojump_clock: trio.testing.MockClock) -> None:
    """With the key file, which is not in the bucket. What the bucket has is encrypted."""
    secrets = Secrets(KeyRing([b"k" * 32]))
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        auth = AuthStore(DiskAuthFile(disk, f"{store.root}/config"), secrets)
        await auth.create_user("root", UserChange("canary-91c2", UserType.SUPER))
        await fill(store, 3)
        await uploaded(store)
        state = await state_in(store)
    assert b'"root"' in state["auth.json"]
    assert b"canary-91c2" not in state["auth.json"]
    new = PrivateDisk()
    async with opened(new, objects) as store:
        restored = AuthStore(DiskAuthFile(new, f"{store.root}/config"), secrets)
        await restored.load()
        assert restored.list_users() == auth.list_users()
    assert [path for path, private in new.made.items() if private] == [f"{store.root}/config/auth.json.tmp"]


async def test_passwords_in_clear_do_not_leave_the_machine(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        auth = AuthStore(DiskAuthFile(disk, f"{store.root}/config"), Secrets(allow_clear=True))
        await auth.create_user("root", UserChange("canary-91c2", UserType.SUPER))
        write(disk, f"{store.root}/config/topics.json", b"{}")
        await fill(store, 3)
        await uploaded(store)
        assert list(await state_in(store)) == ["topics.json"]
    new = SimDisk()
    async with opened(new, objects) as store:
        assert new.list(f"{store.root}/config") == ["tierRestored.json", "topics.json"]


async def state_in(store: BucketMessageStore) -> dict[str, bytes]:
    """The state files in the bucket, as a restore gets them."""
    manifest = Manifest(store.bucket, "C1", "broker-a")
    await manifest.load()
    return await read_state(store.bucket, manifest)


class PrivateDisk(SimDisk):
    """Notes which files only their owner may read."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, bool] = {}

    def create(self, path: str, size: int, *, private: bool = False) -> int:
        self.made[path] = private
        return super().create(path, size, private=private)


def write(disk: SimDisk, path: str, data: bytes) -> None:
    fd = disk.create(path, 0)
    disk.pwrite(fd, data, 0)
    disk.data_sync(fd)
    disk.close(fd)
    disk.sync_directory(path.rpartition("/")[0])


def read(disk: SimDisk, path: str) -> bytes:
    fd = disk.open(path, writable=False)
    try:
        return disk.pread(fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def away(*calls: str) -> Any:
    def fail(call: str, name: str, done: bool) -> None:
        if not done and (not calls or call in calls):
            raise OSError(errno.EHOSTUNREACH, f"no way to {name}")

    return fail


def waiting(store: BucketMessageStore) -> int:
    return store.uploads.behind


def trouble(store: BucketMessageStore) -> tuple[str, str]:
    found = store.tier_trouble()
    assert found is not None
    return found


def nothing(call: str, name: str, done: bool) -> None:
    pass


async def test_an_empty_disk_waits_for_the_bucket() -> None:
    objects = Objects()
    async with opened(SimDisk(), objects) as store:
        await fill(store, 1)
        await uploaded(store)
    objects.fail = away()
    disk = SimDisk()
    with pytest.raises(StoreLoadError, match=r"is empty.*memory://test.*no way to"):
        async with opened(disk, objects):
            pass
    objects.fail = nothing
    async with opened(disk, objects) as store:
        assert len(await all_offsets(store, 0, 1)) == 1


async def test_a_bucket_that_is_away_costs_local_disk_only(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(tiered_store_group_commit=False)) as store:
        await fill(store, 30)
        await until_dispatched(store)
        await store.flush()
        await until(lambda: not store.uploads.behind, 60)
        objects.fail = away("create", "replace")
        await fill(store, 30, first=30)
        await until_dispatched(store)
        await store.flush()
        await trio.sleep(300)
        assert waiting(store) == 30
        assert trouble(store)[0] == "tier_away"
        assert "no way to" in trouble(store)[1]
        assert 3 < store.uploads.failures < 60  # the pauses grow
        assert await store.log_holds.lowest() == await store.uploads.lowest_waiting() is not None
        objects.fail = nothing
        await until(lambda: not store.uploads.behind, 200)
        assert store.tier_trouble() is None
        await drop_local(store)
        assert len(await all_offsets(store, 0, 60)) == 60


async def test_a_consumer_of_old_messages_waits_until_the_bucket_answers(
    autojump_clock: trio.testing.MockClock,
) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 60)
        await uploaded(store)
        await drop_local(store)
    objects.fail = away()
    async with opened(disk, objects) as store:
        result = await get(store, 0)
        # The client asks again, at the same place: it is not sent to the first local message.
        assert (result.status, result.next_begin_offset) == (GetMessageStatus.OFFSET_FOUND_NULL, 0)
        local = MessageStore.min_offset(store, TOPIC, 0)
        assert (await get(store, local)).status is GetMessageStatus.FOUND
        assert "may have older messages" in store.range_problem(TOPIC, 0)
        await fill(store, 1, topic="New")
        assert not store.range_problem("New", 0)
        objects.fail = nothing
        with trio.fail_after(100):
            await store.is_loaded.wait()
        assert not store.range_problem(TOPIC, 0)
        assert len(await all_offsets(store, 0, 60)) == 60


async def test_a_lost_reply_to_an_upload(autojump_clock: trio.testing.MockClock) -> None:
    """The object is there: the next attempt finds it, and more messages go into the next object."""
    disk, objects = SimDisk(), Objects()

    def lose(call: str, name: str, done: bool) -> None:
        if done and call == "create" and "/log/" in name:
            objects.fail = nothing
            raise OSError(errno.ETIMEDOUT, "no reply")

    async with opened(disk, objects, tier(tiered_store_group_commit=False)) as store:
        objects.fail = lose
        await fill(store, 20)
        await until_dispatched(store)
        await store.flush()
        await until(lambda: bool(store.uploads.failures), 10)
        await fill(store, 20, first=20)
        await until_dispatched(store)
        await store.flush()
        await until(lambda: not store.uploads.behind, 60)
        assert store.uploads.failures == 1
        assert store.uploads.messages == 40
        await drop_local(store)
        assert len(await all_offsets(store, 0, 40)) == 40
    async with opened(disk, objects, tier(tiered_storage_level=TieredStorageLevel.FORCE)) as store:
        assert len(await all_offsets(store, 0, 40)) == 40


async def test_another_broker_of_the_name_ends_the_uploads_of_the_first() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as first:
        await fill(first, 20)
        await uploaded(first)
        async with opened(SimDisk(), objects) as second:  # restored
            assert second.manifest.root is not None
            assert first.manifest.root is not None
            assert second.manifest.root.epoch > first.manifest.root.epoch
            await fill(first, 20, first=20)
            await until_dispatched(first)
            await first.flush()
            with pytest.raises(Exception, match="own"):
                await first.uploads.upload_all()
            # The second does not see what the first has uploaded since then.
            assert len(await all_offsets(second, 0, 20)) == 20
            await fill(second, 3, first=20)
            await uploaded(second)
            assert len(await all_offsets(second, 0, 23)) == 23
    async with opened(SimDisk(), objects) as third:
        assert third.next_offset(TOPIC, 0) == 23
        assert len(await all_offsets(third, 0, 23)) == 23


async def test_a_log_that_ends_before_the_bucket_uploads_nothing() -> None:
    """An older copy of the disk: its next messages would have the log offsets of others."""
    objects, disk = Objects(), SimDisk()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await until_dispatched(store)
        await store.flush()
    old = disk.copy()
    async with opened(disk, objects) as store:
        await fill(store, 20, first=20)
        await uploaded(store)
        owner = store.manifest.root
    async with opened(old, objects) as store:
        assert trouble(store)[0] == "tier_fenced"
        assert "restore" in trouble(store)[1]
        await fill(store, 5, first=20)
        await until_dispatched(store)
        assert len(await all_offsets(store, 0, 25)) == 25
        assert store.manifest.root == owner


async def test_a_deleted_topic_begins_anew() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await fill(store, 20, topic="Other")
        await uploaded(store)
        await store.delete_topic(TOPIC)
        await put(store, b"new")
        await uploaded(store)
        assert store.next_offset(TOPIC, 0) == 1
    async with opened(disk, objects, tier(tiered_storage_level=TieredStorageLevel.FORCE)) as store:
        queue = store.tier_queues.find(TOPIC, 0)
        assert queue is not None
        assert (queue.min_offset, queue.commit_offset) == (0, 1)
        found = await get(store, 0)
        assert decode_messages(b"".join(bytes(buffer) for buffer in found.buffers))[0].body == b"new"
        assert len(await all_offsets_of(store, "Other", 20)) == 20


async def test_a_topic_that_was_deleted_before_the_bucket_answered(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await fill(store, 20, topic="Other")
        await uploaded(store)
    objects.fail = away()
    async with opened(disk, objects) as store:
        await store.delete_topic(TOPIC)
        assert await store.clean_unused_topics({TOPIC, "Other"}) == []
        await put(store, b"new")
        objects.fail = nothing
        with trio.fail_after(100):
            await store.is_loaded.wait()
        await uploaded(store)
    async with opened(disk, objects, tier(tiered_storage_level=TieredStorageLevel.FORCE)) as store:
        found = await get(store, 0)
        assert decode_messages(b"".join(bytes(buffer) for buffer in found.buffers))[0].body == b"new"
        assert store.next_offset(TOPIC, 0) == 1
        assert len(await all_offsets_of(store, "Other", 20)) == 20


async def test_a_fenced_broker_goes_on_without_its_bucket(autojump_clock: trio.testing.MockClock) -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects, tier(tiered_store_group_commit=False)) as first:
        await fill(first, 20)
        await until_dispatched(first)
        await first.flush()
        await until(lambda: not first.uploads.behind)
        async with opened(SimDisk(), objects):
            pass
        await first.delete_topic(TOPIC)
        assert trouble(first)[0] == "tier_fenced"
        assert await first.clean_unused_topics(set()) == []
        await fill(first, 3)
        await until_dispatched(first)
        assert [offset for offset, _ in await all_offsets(first, 0, 3)] == [0, 1, 2]
        await trio.sleep(100)
        assert await first.expire_tier() == 0


async def test_messages_that_are_not_dispatched_yet_are_not_passed_over() -> None:
    """The log is ahead of the queues, as after a start that catches up: an object must not cover what they lack."""
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 10)
        await until_dispatched(store)
        await store.flush()
        behind = store.dispatched_offset // 2
        type(store).dispatched_offset, real = property(lambda _: behind), type(store).dispatched_offset  # type: ignore[method-assign,assignment]
        try:
            await store.uploads.upload_all()
        finally:
            type(store).dispatched_offset = real  # type: ignore[method-assign]
        assert store.manifest.end <= behind
        await store.uploads.upload_all()
        assert store.uploads.messages == 10


async def test_a_topic_that_was_deleted_while_the_bucket_was_away_begins_anew() -> None:
    """The manifest still has its messages after a kill: those of the new topic of its name take their place."""
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await fill(store, 20, topic="Other")
        await uploaded(store)
        objects.fail = away("replace")
        with structlog.testing.capture_logs() as logs:
            await store.delete_topic(TOPIC)  # its client need not know
        assert [one["topic"] for one in logs if one["event"] == "topic_deletion_waits_for_bucket"] == [TOPIC]
        await put(store, b"new")
        await until_dispatched(store)
        await store.flush()
        await store.uploads._upload_object(force=True)
        left = disk.copy()
    objects.fail = nothing
    for _ in range(2):
        async with opened(left, objects, tier(tiered_storage_level=TieredStorageLevel.FORCE)) as store:
            await store.is_loaded.wait()
            queue = store.tier_queues.find(TOPIC, 0)
            assert queue is not None
            await store.uploads.save()
            assert (queue.min_offset, queue.commit_offset) == (0, 1)
            found = await get(store, 0)
            assert decode_messages(b"".join(bytes(buffer) for buffer in found.buffers))[0].body == b"new"
            assert len(await all_offsets_of(store, "Other", 20)) == 20


async def all_offsets_of(store: MessageStore, topic: str, end: int) -> list[int]:
    found: list[int] = []
    while len(found) < end:
        result = await get(store, len(found), topic=topic)
        assert result.status is GetMessageStatus.FOUND
        found += [m.queue_offset for m in decode_messages(b"".join(bytes(b) for b in result.buffers))]
        result.release()
    return found


async def test_what_was_deleted_locally_before_its_upload_is_a_gap() -> None:
    disk, objects = SimDisk(), Objects()
    async with opened(disk, objects) as store:
        await fill(store, 10)
        await uploaded(store)
        await fill(store, 100, first=10)
        await until_dispatched(store)
        await store.flush()
        await drop_local(store)
        first = MessageStore.min_offset(store, TOPIC, 0)
        assert first > 10
        await uploaded(store)
        assert store.uploads.skipped == first - 10
    async with opened(disk, objects, tier(tiered_storage_level=TieredStorageLevel.FORCE)) as store:
        assert len(await all_offsets(store, 0, 10)) == 10
        result = await get(store, 10)
        assert result.next_begin_offset == first
        assert len(await all_offsets(store, first, 110)) == 110 - first
