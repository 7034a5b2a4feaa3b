"""Where queues without a local message begin: those of a restored store, and those that only the bucket has.

A topic that was deleted since then does not come back.
"""

import errno
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from tests.store.replication.pairs import SLAVE
from tests.store.simdisk import Loss, SimDisk
from tests.store.stores import TOPIC, fill
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.bucket.test_bucket_message_store import away, nothing, write
from tests.store.tiered.test_tiered_message_store import drop_local
from trimq.broker.store.tiered.bucket import queue_starts
from trimq.broker.store.tiered.bucket.queue_starts import idle_queues, read_restored
from trimq.remoting.runtime.clock import ManualClock

GROUP_AT_50 = b'{"offsetTable":{"Read@G":{"0":50}}}'
"""A topic without a message in the bucket."""


async def with_a_topic_that_was_read(objects: Objects) -> None:
    disk = SimDisk()
    async with opened(disk, objects) as store:
        await fill(store, 100)
        disk.make_directory(f"{store.root}/config")
        write(disk, f"{store.root}/config/consumerOffset.json", GROUP_AT_50)
        await uploaded(store)


@pytest.mark.parametrize("act", ["delete", "clean"])
@pytest.mark.parametrize("topic", [TOPIC, "Read"])
async def test_a_topic_that_was_deleted_after_a_restore_does_not_come_back(act: str, topic: str) -> None:
    objects, disk = Objects(), SimDisk()
    await with_a_topic_that_was_read(objects)
    other = ({TOPIC, "Read"} - {topic}).pop()
    async with opened(disk, objects) as store:
        assert (store.next_offset(TOPIC, 0), store.next_offset("Read", 0)) == (100, 50)
        if act == "delete":
            await store.delete_topic(topic)
        else:
            assert await store.clean_unused_topics({other}) == [topic]
        disk = disk.copy_after_cut(Loss.ALL)
    for _ in range(2):
        async with opened(disk, objects) as store:
            assert list(store.topics()) == [other]
            assert store.next_offset(other, 0) == {TOPIC: 100, "Read": 50}[other]
            assert store._starts.origin is not None


async def test_a_deletion_whose_start_was_not_forgotten_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    objects, disk = Objects(), SimDisk()
    await with_a_topic_that_was_read(objects)
    async with opened(disk, objects) as store:
        await fill(store, 1, topic="Log")  # a log without records keeps no notes
        with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
            patch.setattr(queue_starts, "write_durably", refuse)
            await store.delete_topic("Read")
        assert [one["topics"] for one in logs if one["event"] == "deleted_topic_not_noted"] == [["Read"]]
        assert ("Read", 0) in read_restored(disk, store.root).starts
    async with opened(disk, objects) as store:
        assert not store.queue_exists("Read", 0)
        assert store.next_offset(TOPIC, 0) == 100
        assert ("Read", 0) not in read_restored(disk, store.root).starts


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space")


async def test_a_start_is_forgotten_though_the_bucket_is_away() -> None:
    objects, disk = Objects(), SimDisk()
    await with_a_topic_that_was_read(objects)
    async with opened(disk, objects) as store:
        objects.fail = away()
        await store.delete_topic(TOPIC)
        objects.fail = nothing
        assert (TOPIC, 0) not in read_restored(disk, store.root).starts


# -- queues that only the bucket has


async def with_an_idle_queue(disk: SimDisk, objects: Objects) -> None:
    """20 messages whose files of the log have expired, and whose local queue is lost."""
    async with opened(disk, objects) as store:
        await fill(store, 20)
        await fill(store, 100, topic="Other")
        await uploaded(store)
        assert read_restored(disk, store.root).starts == {}
        await drop_local(store)
    for name in disk.list(f"{store.root}/consumequeue/{TOPIC}/0"):
        disk.delete(f"{store.root}/consumequeue/{TOPIC}/0/{name}")


async def check_it_goes_on_while_the_bucket_is_away(disk: SimDisk, objects: Objects) -> None:
    objects.fail = away()
    async with opened(disk, objects) as store:
        assert not store.is_loaded.is_set()
        assert store.next_offset(TOPIC, 0) == 20
        await fill(store, 3, first=20)
        objects.fail = nothing
        await store.is_loaded.wait()
        await uploaded(store)
        assert store.tier_range(TOPIC, 0) == (0, 23)


async def test_an_owner_notes_where_idle_queues_go_on(autojump_clock: trio.testing.MockClock) -> None:
    objects, disk = Objects(), SimDisk()
    await with_an_idle_queue(disk, objects)
    async with opened(disk, objects) as store:
        await store.is_loaded.wait()
        await trio.sleep(700)
        assert read_restored(disk, store.root).starts == {(TOPIC, 0): 20}
        disk = disk.copy_after_cut(Loss.ALL)
    await check_it_goes_on_while_the_bucket_is_away(disk, objects)


async def test_a_slave_that_never_had_a_queue_goes_on_with_it_as_master(autojump_clock: trio.testing.MockClock) -> None:
    objects, disk = Objects(), SimDisk()
    await with_an_idle_queue(disk, objects)
    async with opened(disk, objects, replication=SLAVE) as store:
        await store.is_loaded.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert store.next_offset(TOPIC, 0) == 0  # its master says where it goes on
    await check_it_goes_on_while_the_bucket_is_away(disk, objects)


@pytest.mark.parametrize("replication", [None, SLAVE])
async def test_a_topic_that_is_deleted_meanwhile_is_not_noted(
    replication: Any, autojump_clock: trio.testing.MockClock
) -> None:
    objects, disk = Objects(), SimDisk()
    await with_an_idle_queue(disk, objects)
    async with opened(disk, objects, **({"replication": replication} if replication else {})) as store:
        await store.is_loaded.wait()

        async def slow() -> dict[tuple[str, int], int]:
            found = await idle_queues(store.bucket_queues, store.min_phy_offset)
            assert (TOPIC, 0) in found
            nursery.start_soon(store.clean_unused_topics, {"Other"})
            await trio.testing.wait_all_tasks_blocked()
            return found

        async with trio.open_nursery() as nursery:
            await store._starts.note(slow)
        assert (TOPIC, 0) not in store._starts.starts
        await store.bucket_queues.load() if replication else None
        assert (TOPIC, 0) not in await idle_queues(store.bucket_queues, store.min_phy_offset)


async def test_a_note_that_cannot_be_written_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    objects, disk = Objects(), SimDisk()
    await with_an_idle_queue(disk, objects)
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(queue_starts, "write_durably", refuse)
        async with opened(disk, objects) as store:
            await store.is_loaded.wait()
            await trio.sleep(700)
            assert [one["queues"] for one in logs if one["event"] == "queue_starts_not_noted"] == [1, 1]
            assert store._starts.starts == {}
            patch.undo()
            await trio.sleep(700)
            assert read_restored(disk, store.root).starts == {(TOPIC, 0): 20}


async def test_a_queue_whose_messages_have_all_expired_goes_on(autojump_clock: trio.testing.MockClock) -> None:
    objects, disk, clock = Objects(), SimDisk(), ManualClock()
    async with opened(disk, objects, tier(tiered_store_file_reserved_time=1), clock=clock) as store:
        await fill(store, 20)
        await fill(store, 100, topic="Other")
        await uploaded(store)
        await drop_local(store)
        clock.set_wall_ms(clock.wall_ms() + 7_200_000)
        assert await store.expire_tier()
    for name in disk.list(f"{store.root}/consumequeue/{TOPIC}/0"):
        disk.delete(f"{store.root}/consumequeue/{TOPIC}/0/{name}")
    async with opened(disk, objects, replication=SLAVE) as store:
        await store.is_loaded.wait()
        await trio.testing.wait_all_tasks_blocked()
    objects.fail = away()
    async with opened(disk, objects) as store:
        assert store.next_offset(TOPIC, 0) == 20
