"""A slave whose master deletes a topic and creates it again: the log is all that the slave may know of it."""

import errno

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.store.replication.pairs import ASYNC_MASTER, SLAVE, SYNC_MASTER, FakeMaster, follow, serve, store_of, until
from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.stores import TOPIC, drain, fill
from trimq.broker.config import ReplicationConfig
from trimq.broker.store.message_store import MessageStore

OTHER = "Other"


async def ends(store: MessageStore) -> tuple[int, int]:
    """Checks the offsets of both queues, and returns their ends."""
    for queue_id in range(2):
        found = await drain(store, queue_id=queue_id)
        assert [one.queue_offset for one in found] == list(range(len(found)))
        assert store.max_offset(TOPIC, queue_id) == len(found)
    return store.max_offset(TOPIC, 0), store.max_offset(TOPIC, 1)


async def killed_behind_the_topic() -> SimDisk:
    """The disk of a slave with the records of a new topic, killed before it dispatched them.

    Its checkpoint vouches for the queue of the old one.
    """
    mine, theirs = SimDisk(), SimDisk()
    async with store_of(mine, ASYNC_MASTER) as master:
        try:
            async with store_of(theirs, SLAVE) as slave, trio.open_nursery() as nursery:
                follow(nursery, slave, serve(nursery, master), FakeMaster(master))
                await fill(master, 5)
                await until(lambda: slave.dispatched_offset == master.appended_offset)
                assert await slave._checkpoints.save()
                slave._reput._goes_on = lambda: False  # type: ignore[method-assign]
                await master.delete_topic(TOPIC)
                await fill(master, 3)
                await until(lambda: slave.appended_offset == master.appended_offset)
                theirs.power_cut(Loss.NOTHING)
        except* PowerCut:
            pass
    return theirs.power_cut()


@pytest.mark.parametrize("role", [SLAVE, ASYNC_MASTER], ids=["slave", "master"])
@pytest.mark.parametrize("loss", [Loss.NOTHING, Loss.ALL])
@pytest.mark.parametrize("all_of_it", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_the_queue_begins_again_also_after_a_crash(
    role: ReplicationConfig, loss: Loss, all_of_it: bool, at_once: bool, autojump_clock: object
) -> None:
    """``at_once``: the slave gets all of it together, and dispatches many records in one call."""
    mine, theirs = SimDisk(), SimDisk()
    async with store_of(mine, ASYNC_MASTER) as master:
        try:
            async with store_of(theirs, SLAVE) as slave, trio.open_nursery() as nursery:
                follow(nursery, slave, serve(nursery, master), FakeMaster(master))
                await fill(master, 5)
                await fill(master, 2, topic=OTHER)
                await until(lambda: slave.dispatched_offset == master.appended_offset)
                assert await slave._checkpoints.save()  # it knows the old queue
                renewed: list[str] = []
                slave.on_anew.append(renewed.append)
                if at_once:
                    slave._reput.behind = lambda: 0  # type: ignore[method-assign]
                await master.delete_topic(TOPIC)
                await fill(master, 1, queue_id=1)
                await fill(master, 3)
                if at_once:
                    await until(lambda: slave.appended_offset == master.appended_offset)
                    del slave._reput.behind
                    slave._reput.wake()
                await until(lambda: slave.dispatched_offset == master.appended_offset)
                assert renewed == [TOPIC]
                assert await ends(slave) == (3, 1)
                assert await slave.flush()
                theirs.power_cut(loss)
        except* PowerCut:
            pass
    theirs = theirs.power_cut()
    if all_of_it:
        theirs.delete("/store/checkpoint")
    async with store_of(theirs, role) as store:
        assert await ends(store) == (3, 1)
        assert store.max_offset(OTHER, 0) == 2


async def test_a_queue_whose_files_stay_is_compared_at_the_next_start(autojump_clock: object) -> None:
    mine, theirs = SimDisk(), SimDisk()
    async with store_of(mine, ASYNC_MASTER) as master:
        try:
            async with store_of(theirs, SLAVE) as slave, trio.open_nursery() as nursery:
                follow(nursery, slave, serve(nursery, master), FakeMaster(master))
                await fill(master, 5)
                await until(lambda: slave.dispatched_offset == master.appended_offset)
                assert await slave._checkpoints.save()
                await master.delete_topic(TOPIC)
                theirs.fail("delete", errno.EIO, 1)
                with capture_logs() as logs:
                    await fill(master, 2)
                    await until(lambda: slave.max_offset(TOPIC, 0) == 2)
                assert "old_queue_not_deleted" in [log["event"] for log in logs]
                assert await slave.flush()
                theirs.power_cut(Loss.NOTHING)
        except* PowerCut:
            pass
    async with store_of(theirs.power_cut(), SLAVE) as store:
        assert await ends(store) == (2, 0)


async def test_queues_of_the_old_topic_go_when_the_master_says_so(autojump_clock: object) -> None:
    """Where the new topic has no message yet the log does not say it."""
    mine, theirs = SimDisk(), SimDisk()
    async with store_of(mine, ASYNC_MASTER) as master, store_of(theirs, SLAVE) as slave:
        await fill(master, 5)
        await fill(master, 5, queue_id=1)
        async with trio.open_nursery() as nursery:
            await master.delete_topic(TOPIC)
            deleted = master.deleted_topics
            assert deleted == {TOPIC: master.appended_offset}
            # Not yet: what is to come may be of the old topic.
            await slave.follow_deletions(deleted)
            assert slave.deleted_topics == {}
            follow(nursery, slave, serve(nursery, master), FakeMaster(master))
            await fill(master, 2)
            await until(lambda: slave.dispatched_offset == master.appended_offset)
            assert await ends(slave) == (2, 5)
            await slave.follow_deletions(deleted)
            assert await ends(slave) == (2, 0)
            assert slave.deleted_topics == deleted
            await fill(master, 1, queue_id=1)
            await until(lambda: slave.dispatched_offset == master.appended_offset)
            await slave.follow_deletions(deleted)  # nothing is new
            assert await ends(slave) == (2, 1)
            nursery.cancel_scope.cancel()


async def test_a_slave_deletes_what_it_has_dispatched_and_no_more(autojump_clock: object) -> None:
    """Its master may have created the topic again, with messages that the slave has and has not dispatched."""
    async with store_of(SimDisk(), SLAVE) as slave:
        slave.dispatcher.position = 7
        await slave.delete_topic(TOPIC)
        assert slave.deleted_topics == {TOPIC: 7}
        slave.dispatcher.position = 0
        assert await slave.clean_unused_topics({TOPIC}) == []


async def test_a_sync_master_that_was_a_slave_begins_the_queue_again(autojump_clock: object) -> None:
    """The records that it had not dispatched as a slave wait for its own slaves now."""
    async with (
        store_of(await killed_behind_the_topic(), SYNC_MASTER) as store,
        store_of(SimDisk(), SLAVE) as other,
        trio.open_nursery() as nursery,
    ):
        assert store.needed_queues() == {TOPIC: 1}
        follow(nursery, other, serve(nursery, store), FakeMaster(store))
        await until(lambda: store.dispatched_offset == store.appended_offset)
        await fill(store, 1)
        await until(lambda: store.dispatched_offset == store.appended_offset)
        assert await ends(store) == (4, 0)
        nursery.cancel_scope.cancel()


async def test_a_file_that_a_waiting_writer_makes_is_not_deleted(autojump_clock: object) -> None:
    """A sync is under way, a writer waits for it, then the deletion does, and a new message comes meanwhile."""
    mine, theirs = SimDisk(), SimDisk()
    async with (
        store_of(mine, ASYNC_MASTER) as master,
        store_of(theirs, SLAVE) as slave,
        trio.open_nursery() as nursery,
    ):
        follow(nursery, slave, serve(nursery, master), FakeMaster(master))
        await fill(master, 5)
        await until(lambda: slave.dispatched_offset == master.appended_offset)
        assert await slave._checkpoints.save()
        await master.delete_topic(TOPIC)
        synced = trio.Event()

        async def sync() -> None:
            async with slave.flush_queues.lock:
                await synced.wait()

        nursery.start_soon(sync)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(slave.flush_queues.write)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(slave.follow_deletions, master.deleted_topics)
        await trio.testing.wait_all_tasks_blocked()
        await fill(master, 2)
        await until(lambda: slave.appended_offset == master.appended_offset)
        synced.set()
        await until(lambda: slave.dispatched_offset == master.appended_offset)
        await fill(master, 1)
        await until(lambda: slave.dispatched_offset == master.appended_offset)
        assert await slave._checkpoints.save()
        assert not slave.flags.is_broken
        assert await ends(slave) == (3, 0)
        nursery.cancel_scope.cancel()


async def test_a_start_dispatches_the_new_topic_behind_the_checkpoint(autojump_clock: object) -> None:
    """The slave had the records, and was killed before it dispatched them: its checkpoint vouches for the old queue."""
    async with store_of(await killed_behind_the_topic(), SLAVE) as store:
        assert store.recovered is not None
        assert store.recovered.trusted
        assert await ends(store) == (3, 0)
