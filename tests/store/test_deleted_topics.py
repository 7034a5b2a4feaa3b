import errno

import pytest
import trio
import trio.testing

from tests.store.builders import batch
from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.slowdisk import SlowDisk
from tests.store.stores import TOPIC, drain, fill, killed, opened, put, settings
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.remoting.runtime.clock import ManualClock

PATH = "/store/topics.dropped"
OTHER = "Other"


def forget_mark(disk: SimDisk) -> None:
    """Make the next start read the whole log."""
    disk.delete("/store/checkpoint")


async def offsets(disk: SimDisk, topic: str = TOPIC) -> list[int] | None:
    """Queue offsets that a consumer gets; None if the topic does not exist."""
    async with opened(disk) as store:
        return [one.queue_offset for one in await drain(store, topic)] if topic in store.topics() else None


async def test_a_deleted_topic_does_not_come_back_from_the_log() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 5)
        await fill(store, 3, topic=OTHER)
        await store.delete_topic(TOPIC)
    disk = disk.power_cut()
    forget_mark(disk)
    assert await offsets(disk.copy()) is None
    assert await offsets(disk, OTHER) == [0, 1, 2]


@pytest.mark.parametrize("loss", [Loss.NOTHING, Loss.ALL])
async def test_a_topic_that_was_made_again_has_its_own_messages_and_no_others(loss: Loss) -> None:
    """Whether or not the deletion of the old queue's files has reached the device."""
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 5)
    async with killed(disk, settings(sync=True), loss=loss) as store:
        await store.delete_topic(TOPIC)
        await fill(store, 2)
    assert await offsets(disk.power_cut()) == [0, 1]


async def test_a_log_that_lost_its_end_does_not_lose_what_comes_then() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 2)
    async with killed(disk, loss=Loss.ALL) as store:
        await fill(store, 8)
        end = store.max_phy_offset
        disk.fail("data_sync", errno.EIO, 2)  # the note of the deletion is durable, the deletion of the files is not
        await store.delete_topic(TOPIC)
        assert not disk.pending_failures()
    disk = disk.power_cut()
    async with killed(disk) as store:
        assert store.max_phy_offset < end
        first = store.max_offset(TOPIC, 0)
        await fill(store, 3, first=first)
    disk = disk.power_cut()
    forget_mark(disk)
    async with opened(disk) as store:
        assert [one.queue_offset for one in await drain(store)] == [first, first + 1, first + 2]


async def test_a_clock_that_is_set_back_brings_no_deleted_topic_back() -> None:
    disk = SimDisk()
    clock = ManualClock()
    try:
        async with opened(disk, clock=clock) as store:
            await fill(store, 5)
            clock.set_wall_ms(clock.wall_ms() - 3_600_000)
            await store.delete_topic(TOPIC)
            disk.power_cut(Loss.NOTHING)
    except* PowerCut:
        disk = disk.power_cut()
    forget_mark(disk)
    assert await offsets(disk) is None


async def test_what_waits_for_its_sync_when_its_topic_goes_makes_no_queue() -> None:
    """One message and a batch are in the log, not yet durable, and are dispatched after the topic's deletion."""
    disk = SlowDisk()
    async with opened(disk, settings(sync=True)) as store, trio.open_nursery() as nursery:
        await fill(store, 3)
        disk.held = True
        answers: list[PutMessageResult] = []
        nursery.start_soon(put, store)
        store.put_message(batch([b"a", b"b"], topic=OTHER), answers.append)
        await trio.testing.wait_all_tasks_blocked()
        for topic in (TOPIC, OTHER):
            nursery.start_soon(store.delete_topic, topic)
        await trio.testing.wait_all_tasks_blocked()
        disk.held = False
        disk.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert [answer.status for answer in answers] == [PutMessageStatus.PUT_OK]
        assert store.topics() == {}
        await fill(store, 2)
        assert [one.queue_offset for one in await drain(store, TOPIC)] == [0, 1]


async def test_what_waits_for_its_sync_is_nothing_to_a_topic_of_its_name_made_meanwhile() -> None:
    """The new topic's queues exist before the old topic's messages are durable."""
    disk = SlowDisk()
    async with opened(disk, settings(sync=True)) as store, trio.open_nursery() as nursery:
        await fill(store, 3)
        disk.held = True
        answers: list[PutMessageResult] = []
        nursery.start_soon(put, store, b"old")
        store.put_message(batch([b"a", b"b"], topic=OTHER), answers.append)
        await trio.testing.wait_all_tasks_blocked()
        for topic in (TOPIC, OTHER):
            nursery.start_soon(store.delete_topic, topic)
        await trio.testing.wait_all_tasks_blocked()
        for topic in (TOPIC, OTHER):
            store.create_queues(topic, 1)
            store.put_message(batch([b"new"], topic=topic), answers.append)
        disk.held = False
        disk.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        for topic in (TOPIC, OTHER):
            assert [(one.queue_offset, one.body) for one in await drain(store, topic)] == [(0, b"new")]


async def test_an_emptied_store_forgets_it() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 5)
        await store.delete_topic(TOPIC)
    for name in disk.list("/store/commitlog"):
        disk.delete(f"/store/commitlog/{name}")
    async with killed(disk, accept_missing_log=True) as store:
        await fill(store, 4)
    disk = disk.power_cut()
    forget_mark(disk)
    assert await offsets(disk) == [0, 1, 2, 3]


async def test_a_full_disk_does_not_keep_a_topic() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 5)
        disk.fail("rename", errno.ENOSPC)
        disk.fail("rename", errno.ENOSPC)
        await store.delete_topic(TOPIC)
        assert not disk.pending_failures()
        assert TOPIC not in store.topics()
        assert disk.stat(PATH) is None


@pytest.mark.parametrize("method", ["create", "pwrite", "data_sync", "rename", "sync_directory"])
async def test_an_error_in_noting_it_does_not_bring_it_back(method: str) -> None:
    """One device error, then the topic is created again, then a power cut loses the deletion of the old files."""
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 5)
    async with killed(disk, settings(sync=True), loss=Loss.ALL) as store:
        disk.fail(method, errno.EIO)
        await store.delete_topic(TOPIC)
        assert not disk.pending_failures()
        await fill(store, 2)
    assert await offsets(disk.power_cut()) == [0, 1]


async def test_a_file_that_cannot_be_read_counts_as_none() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 5)
    fd = disk.create(PATH, 0)
    disk.pwrite(fd, b"{", 0)
    disk.close(fd)
    forget_mark(disk)
    assert await offsets(disk) == [0, 1, 2, 3, 4]
