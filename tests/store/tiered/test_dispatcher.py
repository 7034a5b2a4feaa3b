"""Which queues are uploaded, when, and how much at a time."""

import errno
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, put, settings, until_dispatched
from tests.store.tiered.test_tiered_message_store import all_offsets, drop_local, opened, tier, uploaded_store
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.tiered.access import dispatcher, waiting_queues
from trimq.broker.store.tiered.access.dispatcher import MessageStoreDispatcher
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.store.tiered.access.tiered_messages import TieredMessages
from trimq.broker.store.tiered.access.waiting_queues import Waiting, WaitingQueues
from trimq.protocol.queue_unit import FILLER_SIZE


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop starts no uploads: the tests do."""

    async def run(uploads: MessageStoreDispatcher) -> None:
        while not uploads._stopping:
            uploads._wake = trio.Event()
            await uploads._wake.wait()

    monkeypatch.setattr(MessageStoreDispatcher, "run", run)


async def ready(store: TieredMessageStore, count: int, **place: Any) -> None:
    await fill(store, count, **place)
    await until_dispatched(store)
    await store.flush()


async def start_due(store: TieredMessageStore, *, force: bool = False) -> None:
    async with trio.open_nursery() as nursery:
        await store.uploads._start_due(nursery, force=force)


def uploaded(store: TieredMessageStore, topic: str = TOPIC, queue_id: int = 0) -> int:
    file = store.flat_files.find(topic, queue_id)
    return 0 if file is None else file.commit_offset


async def test_system_topics_stay_local_also_those_found_at_the_start() -> None:
    disk = SimDisk()
    names = ("RMQ_SYS_TRANS_HALF_TOPIC", " ", "rmq_sys_wheel_timer")
    async with opened(disk) as store:
        for name in names:
            await ready(store, 2, topic=name)
        await ready(store, 3)
    async with opened(disk) as store:
        await store.uploads.upload_all()
        assert store.flat_files.topics() == [TOPIC]


async def test_a_queue_is_due_by_time_count_and_bytes() -> None:
    config = tier(tiered_store_group_commit_timeout=5_000, tiered_store_group_commit_size=3_000)
    async with opened(SimDisk(), config) as store:
        await ready(store, 5)
        await start_due(store)
        assert uploaded(store) == 0
        await ready(store, 20, first=5)
        await start_due(store)
        assert uploaded(store) > 5
        await store.uploads.upload_all()
        await ready(store, 1, first=25)
        await start_due(store)
        assert uploaded(store) == 25
        store.clock.advance(6.0)  # type: ignore[attr-defined]
        await start_due(store)
        assert uploaded(store) == 26


async def test_a_queue_is_due_by_its_messages() -> None:
    config = tier(tiered_store_group_commit_count=10, tiered_store_max_group_commit_count=10)
    async with opened(SimDisk(), config) as store:
        await ready(store, 9)
        await start_due(store)
        assert uploaded(store) == 0
        await ready(store, 1, first=9)
        await start_due(store)
        assert uploaded(store) == 10


async def test_units_that_are_not_in_memory_do_not_count_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SimDisk(), tier(tiered_store_group_commit_size=100)) as store:
        await ready(store, 5)
        monkeypatch.setattr(store.queues, "read", lambda *_: None)
        (waiting,) = store.uploads.waiting.pending.values()
        assert not store.uploads._is_due(waiting, store.clock.wall_ms())


@pytest.mark.parametrize("queues", [1, 3])
async def test_uploads_have_a_limit_of_bytes_a_second(queues: int, autojump_clock: trio.testing.MockClock) -> None:
    config = tier(tiered_store_group_commit_count=5, tiered_store_max_upload_bytes_per_second=1 << 20)
    async with opened(SimDisk(), config) as store:
        for queue_id in range(queues):
            await ready(store, 50, queue_id=queue_id)
        began = trio.current_time()
        await start_due(store, force=True)
        took = trio.current_time() - began
        # The last group waits for those before it, not for its own time.
        size = store.uploads.bytes
        groups = 10 * queues
        assert store.uploads.messages == 50 * queues
        assert took == pytest.approx(size / (1 << 20) * (groups - 1) / groups, rel=0.02)
        assert took == pytest.approx(size / (1 << 20), rel=0.15)


@pytest.mark.parametrize("ends_by", ["stop", "deletion"])
async def test_a_stop_does_not_wait_for_the_limit_and_what_is_deleted_meanwhile_is_not_uploaded(
    ends_by: str, mock_clock: trio.testing.MockClock
) -> None:
    config = tier(tiered_store_group_commit_count=5, tiered_store_max_upload_bytes_per_second=1 << 20)
    async with opened(SimDisk(), config) as store, trio.open_nursery() as nursery:
        await ready(store, 50)
        await store.uploads._start_due(nursery, force=True)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert store.uploads.messages == 5
        if ends_by == "stop":
            store.uploads.stop()
        else:
            await store.delete_topic(TOPIC)
            mock_clock.jump(3600)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not nursery.child_tasks
        assert store.uploads.messages == 5


async def test_queues_have_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue with a long backlog gives way to others, and no more are uploaded at a time than there are turns."""
    monkeypatch.setattr(dispatcher, "_GROUPS", 2)
    monkeypatch.setattr(dispatcher, "SLICE", 1)
    monkeypatch.setattr(waiting_queues, "SLICE", 1)
    config = tier(tiered_store_max_pending_limit=1, tiered_store_group_commit_count=5)
    async with opened(SimDisk(), config) as store:
        store.uploads._turns = trio.CapacityLimiter(1)
        await ready(store, 50)
        await ready(store, 50, queue_id=1)
        first = store.uploads._wake
        await start_due(store)
        assert first.is_set()
        assert sorted((uploaded(store), uploaded(store, queue_id=1))) == [0, 10]
        await start_due(store)
        assert (uploaded(store), uploaded(store, queue_id=1)) == (10, 10)
        await start_due(store, force=True)
        assert (uploaded(store), uploaded(store, queue_id=1)) == (50, 50)


async def test_only_queues_with_something_new_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others there are, also after a start, which has to find those with messages that wait."""
    disk = SimDisk()
    looked: list[int] = []
    begin = WaitingQueues.begin

    def counted(waiting: WaitingQueues[Waiting], queue: ConsumeQueue) -> int:
        looked.append(queue.queue_id)
        return begin(waiting, queue)

    async with opened(disk) as store:
        for queue_id in range(40):
            await ready(store, 1, queue_id=queue_id)
        await store.uploads.upload_all()
        await store.flush_queues.write()
        await start_due(store)  # a queue that is flushed, and has nothing new, is forgotten
        monkeypatch.setattr(WaitingQueues, "begin", counted)
        await ready(store, 1, queue_id=7)
        await start_due(store, force=True)
        assert set(looked) == {7}
        assert uploaded(store, queue_id=7) == 2
    async with opened(disk) as store:
        await store.uploads.upload_all()
        looked.clear()
        await ready(store, 1, queue_id=9)
        await start_due(store, force=True)
        assert set(looked) == {9}


async def test_a_deleted_queue_is_forgotten() -> None:
    async with opened(SimDisk()) as store:
        await ready(store, 5)
        (waiting,) = store.uploads.waiting.pending.values()
        waiting.queue.deleted = True
        assert store.uploads.behind == 5
        await start_due(store, force=True)
        assert store.uploads.behind == 0
        assert uploaded(store) == 0


async def test_the_queue_of_a_new_topic_is_not_forgotten_with_the_one_before_it() -> None:
    """Both have one name, and a look at all queues may have begun before the topic was deleted."""
    async with opened(SimDisk()) as store:
        await ready(store, 5)
        (old,) = store.uploads.waiting.pending.values()
        await store.delete_topic(TOPIC)
        await ready(store, 3)
        assert store.uploads.waiting.drop_done((TOPIC, 0), old)
        assert store.uploads.behind == 3


async def test_a_queue_whose_files_are_being_deleted_waits() -> None:
    async with opened(SimDisk()) as store:
        await uploaded_store(store, 5)
        await ready(store, 5, first=5)
        file = store.flat_files.find(TOPIC, 0)
        assert file is not None
        file.is_destroyed = True
        await start_due(store, force=True)
        assert file.commit_offset == 5
        file.is_destroyed = False
        await start_due(store, force=True)
        assert uploaded(store) == 10


async def test_messages_that_wait_are_counted_by_place() -> None:
    async with opened(SimDisk()) as store:
        await ready(store, 60)
        queue = store.find_queue(TOPIC, 0)
        assert queue is not None
        units = await store.uploads._builder.units(queue, 0, 60)
        waiting = TieredMessages(store.uploads)
        await store.uploads.scan()
        assert await waiting.lowest() == 0
        assert await waiting.count(0, 1 << 40) == 60
        assert await waiting.count(units[3][0], units[10][0]) == 7
        await store.uploads.upload_all()
        assert (await waiting.lowest(), await waiting.count(0, 1 << 40)) == (None, 0)


async def test_units_without_a_message_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SimDisk()) as store:
        await ready(store, 30)
        read = store.queues.read

        def with_fillers(queue: Any, offset: int, count: int) -> bytes | None:
            data = bytearray(read(queue, offset, count) or b"")
            for number in (0, 1, 7):
                if 0 <= (at := (number - offset) * 20 + 8) < len(data):
                    data[at : at + 4] = FILLER_SIZE.to_bytes(4, "big")
            return bytes(data)

        monkeypatch.setattr(store.queues, "read", with_fillers)
        await store.uploads.upload_all()
        assert uploaded(store) == 30
        assert store.uploads.messages == 27
        assert store.uploads.skipped == 3


async def test_segments_roll_by_their_age() -> None:
    config = tier(
        tiered_store_group_commit_size=1 << 20, commit_log_rolling_interval=1, commit_log_rolling_minimum_size=100
    )
    async with opened(SimDisk(), config) as store:
        await uploaded_store(store, 3)
        await ready(store, 1, first=3)
        await store.uploads.upload_all()
        file = store.flat_files.find(TOPIC, 0)
        assert file is not None
        assert len(file.commit_log.segments) == 1
        store.clock.advance(3_700.0)  # type: ignore[attr-defined]
        await ready(store, 2, first=4)
        await store.uploads.upload_all()
        assert len(file.commit_log.segments) == 2
        await drop_local(store)
        assert [offset for offset, _ in await all_offsets(store, 0, 6)] == list(range(6))


async def test_uploads_wait_for_the_index_if_too_many_keys_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_MOST_WAITING", 3)
    async with opened(SimDisk()) as store:
        index = store.tier_index
        assert index is not None
        await ready(store, 5)
        fill_index, error = index.fill, OSError(errno.ENOSPC, "full")

        async def full() -> None:
            raise error

        monkeypatch.setattr(index, "fill", full)
        with capture_logs():
            for _ in range(3):
                await store.uploads.upload_all()
                await ready(store, 2, first=100)
        # The first group is uploaded; its keys wait, and no further group is.
        assert (uploaded(store), index.waiting) == (5, 10)
        monkeypatch.setattr(index, "fill", fill_index)
        await store.uploads.upload_all()
        assert (uploaded(store), index.waiting) == (11, 0)


async def test_without_an_index_messages_are_uploaded() -> None:
    disk = SimDisk()
    local = settings(message_index_enable=False)
    async with opened(disk, local=local) as store:
        assert store.tier_index is None
        await put(store, b"one", unique="u")
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        assert uploaded(store) == 1
    async with opened(disk, local=local) as store:
        assert uploaded(store) == 1
