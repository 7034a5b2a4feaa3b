import errno
import time
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, by_key, check_all, drain, fill, killed, opened, put, settings
from trimq.broker.store.disk.disk import DiskSpace
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.running_flags import Flag
from trimq.protocol.topic_rules import SCHEDULE_TOPIC
from trimq.remoting.runtime.clock import ManualClock

HOUR = 3_600_000
NOON = 1_700_000_000_000 // (24 * HOUR) * 24 * HOUR
DUE_IN = 5
"""Hours from noon to the hour in which the model's expired files are deleted."""


def _hour_of(wall_ms: int) -> str:
    return f"{time.localtime(wall_ms / 1000).tm_hour:02d}"


class Rig:
    """A disk whose file dates come from the same clock as the store's."""

    def __init__(self, *, capacity: int = 1 << 40) -> None:
        self.clock = ManualClock(NOON)
        self.disk = SimDisk(capacity=capacity, now_ms=self.clock.wall_ms)

    def settings(self, **more: Any) -> Any:
        never = f"{(int(_hour_of(NOON)) + 12) % 24:02d}"
        fields: dict[str, Any] = {
            "delete_when": never,
            "file_reserved_time": 72,
            "delete_commit_log_files_interval": 0,
            "delete_consume_queue_files_interval": 0,
        }
        return settings(**(fields | more))

    def age(self, store: MessageStore, hours: float, count: int = 99) -> None:
        """Make the oldest files older."""
        for file in store.files.files[:count]:
            inode = self.disk._names[file.path]
            assert inode is not None
            inode.modified_ms = self.clock.wall_ms() - int(hours * HOUR)


def _starts(store: MessageStore) -> list[int]:
    return [file.start for file in store.files.files]


async def test_nothing_goes_before_its_time_or_its_hour() -> None:
    rig = Rig()
    hour = _hour_of(NOON)
    async with opened(rig.disk, rig.settings(delete_when=hour), rig.clock) as store:
        await fill(store, 150)
        assert len(_starts(store)) > 3
        assert await store._clean.look() == 0
        rig.age(store, 71.9)
        assert await store._clean.look() == 0
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        rig.age(store, 500)
        assert await store._clean.look() == 0, "another hour"


async def test_expired_files_go_in_their_hour_and_queues_and_index_follow() -> None:
    rig = Rig()
    config = rig.settings(delete_when=f"02; {_hour_of(NOON)}")
    async with opened(rig.disk, config, rig.clock) as store:
        await fill(store, 150)
        await fill(store, 3, queue_id=1)
        files = len(_starts(store))
        await store._checkpoints.save()
        index_files = len(rig.disk.list("/store/index"))
        rig.age(store, 73, count=2)
        assert await store._clean.look() == 2
        assert store.min_phy_offset == 2 * 8192
        assert len(rig.disk.list("/store/commitlog")) >= files - 2
        low = store.min_offset(TOPIC, 0)
        stored = await drain(store)
        assert [one.queue_offset for one in stored] == list(range(low, 150))
        assert stored[0].commit_log_offset >= store.min_phy_offset
        assert min(int(name) for name in rig.disk.list(f"/store/consumequeue/{TOPIC}/0")) // 200 == low // 10
        assert len(rig.disk.list("/store/index")) < index_files
        assert await by_key(store, f"u{TOPIC}0-0") == []
        assert len(await by_key(store, f"u{TOPIC}0-{low}")) == 1
    async with opened(rig.disk, config, rig.clock) as store:
        assert store.recovered is not None
        assert store.recovered.trusted
        assert store.min_offset(TOPIC, 0) == low
        await check_all(store, {(TOPIC, 1): 3})


async def test_the_last_file_stays_and_a_batch_is_a_batch() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(delete_file_batch_max=2), rig.clock) as store:
        await fill(store, 200)
        rig.age(store, 1000)
        files = len(_starts(store))
        store._clean._manual_rounds = 20
        rounds = []
        while deleted := await store._clean.look():
            rounds.append(deleted)
        assert rounds[0] == 2
        assert sum(rounds) == files - 1
        assert len(_starts(store)) == 1
        await fill(store, 5, first=200)
        assert [one.queue_offset for one in await drain(store)][-5:] == [200, 201, 202, 203, 204]


async def test_an_administrators_word_holds_for_twenty_looks() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        await fill(store, 150)
        store._clean._manual_rounds = 20
        for _ in range(20):
            assert await store._clean.look() == 0
        rig.age(store, 100)
        assert await store._clean.look() == 0


@pytest.mark.parametrize(
    ("used", "forcibly", "expired", "fresh", "refused"),
    [
        (74, True, 0, 0, False),
        (76, True, 1, 0, False),
        (86, True, 1, 1, False),
        (86, False, 1, 0, False),
        (91, True, 1, 1, True),
    ],
)
async def test_pressure(used: int, forcibly: bool, expired: int, fresh: int, refused: bool) -> None:
    rig = Rig()
    config = rig.settings(clean_file_forcibly_enable=forcibly, delete_file_batch_max=1)
    async with opened(rig.disk, config, rig.clock) as store:
        await fill(store, 150)
        rig.age(store, 73, count=1)
        await store._checkpoints.save()
        await trio.testing.wait_all_tasks_blocked()
        rig.disk.capacity = rig.disk.used() * 100 // used
        assert await store._clean.look() == expired
        assert store.flags.has(Flag.DISK_FULL) is refused
        if refused:
            assert "diskSpaceWarningLevelRatio" in store.flags.reason
        await trio.testing.wait_all_tasks_blocked()
        rig.disk.capacity = rig.disk.used() * 100 // used
        assert await store._clean.look() == fresh
        rig.disk.capacity = 1 << 40
        await store._clean.look()
        assert store.flags.writable


async def test_readers_keep_their_file() -> None:
    rig = Rig()
    overdue: list[MappedFile] = []
    config = rig.settings(destroy_maped_file_interval_forcibly=5000)
    async with opened(rig.disk, config, rig.clock) as store:
        await fill(store, 150)
        held = store.get_message(TOPIC, 0, 0, 5, 1 << 20, None)
        assert held is not None
        bytes_before = [bytes(data) for data in held.buffers]
        store.on_overdue.append(overdue.append)
        rig.age(store, 100)
        store._clean._manual_rounds = 20
        assert await store._clean.look() > 1
        assert rig.disk.stat(f"/store/commitlog/{0:020d}") is None
        assert [bytes(data) for data in held.buffers] == bytes_before
        assert not overdue
        store._clean._hanging = [(file, since - 10) for file, since in store._clean._hanging]
        await store._clean.look()
        assert [file.start for file in overdue] == [0]
        held.buffers.clear()
        held.release()
        await store._clean.look()
        assert not store._clean._hanging
    assert rig.disk.open_files() == 0


async def test_what_is_not_dispatched_yet_stays() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        await fill(store, 150)
        rig.age(store, 100)
        position, store.dispatcher.position = store.dispatcher.position, 8192 + 10
        store._clean._manual_rounds = 20
        assert await store._clean.look() == 1
        store.dispatcher.position = position


async def test_a_file_that_cannot_be_deleted_stays_in_the_row() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        await fill(store, 100)
        rig.age(store, 100)
        store._clean._manual_rounds = 20
        rig.disk.fail("delete", errno.EACCES)
        with pytest.raises(OSError, match="denied"):
            await store._clean.look()
        assert store.min_phy_offset == 0
        assert (await drain(store))[0].queue_offset == 0
        assert await store._clean.look() > 0


async def test_queues_catch_up_where_they_could_not_follow_the_log() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        await fill(store, 90)
        await store._checkpoints.save()
        rig.age(store, 100)
        rig.disk.fail("pread", errno.EIO)
        store._clean.delete_expired_now()
        with pytest.raises(OSError, match="Input/output"):
            await store._clean.look()
        assert store.min_phy_offset
        first = (await drain(store))[0].queue_offset
        assert store.min_offset(TOPIC, 0) < first
        await store._clean.look()
        assert store.min_offset(TOPIC, 0) == first


async def test_a_stop_before_queues_could_follow_the_log() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        await fill(store, 90)
        await store._checkpoints.save()
        rig.age(store, 100)
        rig.disk.fail("pread", errno.EIO)
        store._clean.delete_expired_now()
        with pytest.raises(OSError, match="Input/output"):
            await store._clean.look()
        first = (await drain(store))[0].queue_offset
        assert store.min_offset(TOPIC, 0) < first
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        assert store.min_offset(TOPIC, 0) == first


async def test_an_administrators_word_is_heard_at_once() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        await fill(store, 100)
        rig.age(store, 100)
        await store.delete_expired_now()
        await trio.testing.wait_all_tasks_blocked()
        assert store.min_phy_offset > 0


async def test_the_service_looks_by_itself(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(delete_when=_hour_of(NOON)), rig.clock) as store:
        await fill(store, 100)
        rig.age(store, 100)
        await trio.sleep(50)
        assert store.min_phy_offset == 0
        await trio.sleep(50)
        assert store.min_phy_offset > 0


async def test_topics_and_queues_can_be_dropped() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        await fill(store, 3)
        await fill(store, 3, topic="Gone")
        await fill(store, 3, topic="Unknown")
        await put(store, topic=SCHEDULE_TOPIC)
        await store.flush_queues.write()
        await store.delete_topic("Gone")
        assert sorted(store.topics()) == [SCHEDULE_TOPIC, TOPIC, "Unknown"]
        assert await store.clean_unused_topics({TOPIC}) == ["Unknown"]
        assert rig.disk.list("/store/consumequeue") == [SCHEDULE_TOPIC, TOPIC]
        await fill(store, 100, topic="Later")
        rig.age(store, 100, count=1)
        store._clean._manual_rounds = 20
        await store._clean.look()
        await store._clean.look()
        if store.min_offset(TOPIC, 0) == 3:
            assert await store.clean_expired_consume_queues() == 1
            assert sorted(store.topics()) == ["Later", SCHEDULE_TOPIC]
        await put(store, topic=TOPIC)
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        assert store.recovered is not None
        assert store.recovered.trusted


async def test_a_kill_between_deletion_and_checkpoint() -> None:
    rig = Rig()
    async with killed(rig.disk, rig.settings()) as store:
        await fill(store, 150)
        await store._checkpoints.save()
        rig.age(store, 100, count=2)
        store._clean._manual_rounds = 20

        async def nothing() -> bool:
            return True

        store._clean._save_checkpoint = nothing
        assert await store._clean.look() == 2
        low = store.min_offset(TOPIC, 0)
    async with opened(rig.disk.power_cut(), rig.settings(), rig.clock) as store:
        assert [one.queue_offset for one in await drain(store)] == list(range(low, 150))
        for number in range(low, 150):
            assert len(await by_key(store, f"u{TOPIC}0-{number}")) == 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(1, 60)),
            st.tuples(st.just("age"), st.integers(0, 100)),
            st.tuples(st.just("clock"), st.sampled_from([1, DUE_IN, 24, 24 + DUE_IN, 80])),
            st.tuples(st.just("look"), st.integers(0, 1)),
            st.tuples(st.just("read"), st.integers(0, 200)),
            st.tuples(st.just("release"), st.just(0)),
            st.tuples(st.just("used"), st.sampled_from([50, 70, 80, 88, 95])),
        ),
        max_size=14,
    )
)
@examples(max_examples=40)
def test_retention_against_a_model(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        rig = Rig()
        due = _hour_of(NOON + DUE_IN * HOUR)
        async with opened(rig.disk, rig.settings(delete_when=due), rig.clock) as store:
            total = 0
            held = []
            for what, number in steps:
                if what == "put" and store.flags.writable:
                    await fill(store, number, first=total)
                    total += number
                elif what == "age":
                    rig.age(store, number)
                elif what == "clock":
                    rig.clock.advance(number * 3600)
                elif what == "used":
                    # only the report changes, not the capacity: other tests cover puts that find no space
                    rig.disk.space = lambda _path, used=number: DiskSpace(100, 100 - used)  # type: ignore[method-assign, misc]
                elif what == "read" and total:
                    offset = max(store.min_offset(TOPIC, 0), min(number, total - 1))
                    result = store.get_message(TOPIC, 0, offset, 3, 1 << 20, None)
                    if result is not None:
                        held.append((result, [bytes(data) for data in result.buffers]))
                elif what == "release":
                    for result, _ in held:
                        result.buffers.clear()
                        result.release()
                    held.clear()
                elif what == "look":
                    if number:
                        store._clean._manual_rounds = 20
                    await _look_and_compare(rig, store, due)
                for result, before in held:
                    assert [bytes(data) for data in result.buffers] == before
                low = store.min_offset(TOPIC, 0)
                assert [one.queue_offset for one in await drain(store)] == list(range(low, total))
                assert total == 0 or low < total, "the last file always stays"
            for result, _ in held:
                result.buffers.clear()
                result.release()
        assert rig.disk.open_files() == 0

    trio.run(run)


async def _look_and_compare(rig: Rig, store: MessageStore, due: str) -> None:
    """Check that the deleted files follow from their ages, the disk, the hour and an administrator's request."""
    manual = store._clean._manual_rounds > 0
    space = rig.disk.space("/store")
    used = -(-100 * (space.total - space.free) // space.total)
    ages = []
    for file in store.files.files[:-1]:
        info = rig.disk.stat(file.path)
        assert info is not None
        ages.append((rig.clock.wall_ms() - info.modified_ms) / HOUR)
    expected = 0
    if used > 75 or manual or _hour_of(rig.clock.wall_ms()) == due:
        for age in ages:
            if expected == 10 or not (used > 85 or age >= 72):
                break
            expected += 1
    assert await store._clean.look() == expected
    assert store.flags.has(Flag.DISK_FULL) is (used > 90)
