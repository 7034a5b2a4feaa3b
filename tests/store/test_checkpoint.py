"""The checkpoint's six numbers: how RocketMQ would recover a store on which this broker was killed."""

import errno
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from tests.store.simdisk import Loss, SimDisk
from tests.store.slowdisk import SlowDisk
from tests.store.stores import TOPIC, check_all, fill, killed, opened, settings
from trimq.protocol import checkpoint_layout
from trimq.protocol.checkpoint_layout import CheckpointFields, CheckpointMark

KEEP = 2**63 - 1


def _fields(disk: SimDisk) -> CheckpointFields:
    return checkpoint_layout.decode(disk.content("/store/checkpoint"))


async def test_after_a_kill_rocketmq_puts_the_keys_of_the_newest_index_file_again() -> None:
    """It deletes that file, which is newer than the index time. The log offset is the start of that file."""
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 30)
        assert await store._checkpoints.save()
        assert store.index is not None
        assert len(store.index.files) > 1
        newest = store.index.files[-1]
        fields = _fields(disk)
        assert fields.logics_physical_offset == newest.begin_phy < store.dispatched_offset
        assert fields.logics_msg_timestamp == newest.begin_timestamp
        assert fields.index_msg_timestamp == newest.end_timestamp


async def test_the_first_index_file_begins_at_an_offset_that_counts() -> None:
    """RocketMQ takes 0 for a checkpoint without the field, and uses the time alone."""
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 5)
        assert await store._checkpoints.save()
        assert _fields(disk).logics_physical_offset == 1


async def test_an_index_file_that_begins_too_far_back_is_to_be_kept() -> None:
    """RocketMQ reads ten files of the log; the keys of records before them would not be put again."""
    disk = SimDisk()
    config = settings(max_index_num=2000, mapped_file_size_commit_log=4096, max_message_size=2000)
    async with killed(disk, config) as store:
        await fill(store, 200)
        assert await store._checkpoints.save()
        fields = _fields(disk)
        assert (fields.index_msg_timestamp, fields.logics_physical_offset) == (KEEP, store.dispatched_offset)


async def test_an_orderly_stop_says_how_far_all_is_complete() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 30)
        end = store.dispatched_offset
    assert _fields(disk).logics_physical_offset == end


async def test_small_log_files_make_checkpoints_frequent() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        assert store._checkpoints._progress == 4 * 8192


# -- this broker's own mark


def _mark(disk: SimDisk) -> CheckpointMark:
    mark = checkpoint_layout.decode_mark(disk.durable_content("/store/checkpoint"))
    assert mark is not None
    return mark


async def test_a_mark_vouches_for_what_is_durable() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 30)
        await fill(store, 5, queue_id=1)
        assert await store._checkpoints.save()
        mark = _mark(disk)
        assert (mark.position, mark.units, mark.queues, mark.clean) == (store.dispatched_offset, 35, 2, False)
        assert store.index is not None
        assert (mark.index_count, mark.index_files) == (store.index.files[-1].count, len(store.index.files))
        for name in disk.list("/store/commitlog")[:1]:
            path = f"/store/commitlog/{name}"
            assert disk.durable_content(path)[: mark.position] == disk.content(path)[: mark.position]
        for queue in store.queues.all_queues():
            for name in disk.list(queue.directory):
                assert disk.durable_content(f"{queue.directory}/{name}") == disk.content(f"{queue.directory}/{name}")


# guards: records dispatched while the checkpoint's syncs run are not on the device when it is written
async def test_a_mark_knows_nothing_that_came_during_its_syncs() -> None:
    disk = SlowDisk()
    async with opened(disk) as store:
        await fill(store, 3)
        position = store.dispatched_offset
        disk.held = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store._checkpoints.save)
            await trio.testing.wait_all_tasks_blocked()
            await fill(store, 2, first=3)
            assert store.dispatched_offset > position
            disk.held = False
            disk.gate.set()
        mark = _mark(disk)
        assert (mark.position, mark.units) == (position, 3)
        assert mark.last_record < position


async def test_a_checkpoint_that_would_say_nothing_new_is_not_written() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 3)
        assert await store._checkpoints.save()
        calls = disk.calls
        assert await store._checkpoints.save()
        assert disk.calls == calls


@pytest.mark.parametrize("path", ["pwrite", "data_sync", "sync_directory", "rename", "create"])
async def test_a_checkpoint_is_not_written_where_something_failed(
    path: str, autojump_clock: trio.testing.MockClock
) -> None:
    # without virtual time a service that becomes due may get the failure
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 3)
        assert await store._checkpoints.save()
        before = _mark(disk)
        await fill(store, 30, first=3)
        await store.flush_queues.write()
        disk.fail(path, errno.EIO)
        assert not await store._checkpoints.save()
        assert _mark(disk) == before or path == "sync_directory"


async def test_checkpoints_come_with_time_and_with_progress(autojump_clock: trio.testing.MockClock) -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 3)
        await trio.sleep(50)
        assert _mark(disk).units == 0
        await trio.sleep(15)
        assert _mark(disk).units == 3
        await fill(store, 200, first=3)
        await trio.sleep(3)
        assert _mark(disk).units == 203


async def test_behind_the_last_checkpoint_nothing_is_written() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 3)
        assert await store._checkpoints.save(clean=True)
        assert _mark(disk).clean
        assert await store._checkpoints.save()
        assert _mark(disk).clean


async def test_no_changed_bit_is_believed() -> None:
    """Neither in the six numbers nor in the mark. The rest of the file is not used."""
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 20)
    data = disk.content("/store/checkpoint")
    end = checkpoint_layout.MARK_AT + checkpoint_layout.MARK.size + 4
    for at in (*range(checkpoint_layout.FIELDS.size), *range(checkpoint_layout.MARK_AT, end)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            assert checkpoint_layout.decode_mark(bytes(changed)) is None
    fd = disk.open("/store/checkpoint")
    disk.pwrite(fd, bytes([data[7] ^ 1]), 7)
    disk.close(fd)
    async with opened(disk) as store:
        assert store.recovered is not None
        assert not store.recovered.trusted
        await check_all(store, {(TOPIC, 0): 20})


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 8, 10, 11])
async def test_a_checkpoint_that_is_cancelled_leaves_its_syncs_to_the_last_one(number: int) -> None:
    """A fault of another task cancels the service's checkpoint at any of its calls; the store then stops in order."""
    disk = SimDisk()
    run, calls = disk.run, 0
    scope = trio.CancelScope()

    async def cancelled_at(fn: Callable[..., Any], *args: Any) -> Any:
        nonlocal calls
        if trio.lowlevel.current_task() is task:
            calls += 1
            if calls == number:
                scope.cancel()
        return await run(fn, *args)

    async with opened(disk) as store:
        await fill(store, 30)
        await fill(store, 10, topic="Other")
        assert store.index is not None
        await store.index.flush_pending()
        await trio.testing.wait_all_tasks_blocked()
        task = trio.lowlevel.current_task()
        disk.run = cancelled_at  # type: ignore[method-assign, assignment]
        with scope:
            await store._checkpoints.save()
        disk.run = run  # type: ignore[method-assign]
        assert calls >= number
        assert await store._checkpoints.save()
        assert _fields(disk).logics_physical_offset > 0
    async with opened(disk.power_cut(Loss.ALL)) as store:
        await check_all(store, {(TOPIC, 0): 30, ("Other", 0): 10})
