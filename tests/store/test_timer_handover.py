"""The timers of a slave: what its master hands over, and the start that goes on with it."""

import errno

import msgspec
import pytest

from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.timers import NOW, SIZE, Records, add, all_waiting, recovered, save
from trimq.protocol.timer_handover import NOTHING_PENDING, TimerHandover
from trimq.protocol.timer_layout import TimerCheckpoint

FOUND = TimerHandover(TimerCheckpoint(NOW - 3000, 999, 8, 8, 0, NOW, 5), 8, NOW - 4000, 3 * SIZE)


async def test_a_master_says_what_is_pending_and_delivered() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    assert store.handover() == TimerHandover(TimerCheckpoint(), 0, 0, NOTHING_PENDING)
    await add(store, records, [200, 5])
    await save(store)
    found = store.handover()
    assert found.checkpoint == store.checkpoint
    assert (found.found_until, found.found_read_time, found.lowest) == (2, store.read_time, 0)
    # What is not in the checkpoint yet is not promised.
    store.move_read_time(NOW + 1000)
    await add(store, records, [7])
    assert store.handover() == found
    # Late messages wait in slots that are not delivered.
    store.wait_late(NOW - 2000, NOW + 9000)
    assert store.handover().found_read_time == NOW - 2000


async def test_a_master_that_reads_its_queue_again_says_what_it_had_delivered_before() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [200, 5, 6])
    await save(store)
    for name in disk.list("/store/timerlog"):
        disk.delete(f"/store/timerlog/{name}")
    store = await recovered(disk, records, now=NOW + 2000)
    assert store.is_read_again
    found = store.handover()
    assert (found.found_until, found.found_read_time) == (3, store.found_read_time)


@pytest.mark.parametrize("loss", [Loss.NOTHING, Loss.ALL])
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_slave_begins_where_its_master_was_whatever_its_own_wheel_says(loss: Loss, is_first: bool) -> None:
    """A power cut at any write: the start knows the wheel, or what the master said; never one with the other."""
    before = SimDisk()
    records = Records()
    store = await recovered(before, records)
    await add(store, records, [200, 5, 6, 7, 8, 9, 10, 11])
    await save(store)
    if not is_first:
        await store.follow(FOUND, 2)
    store.close()
    begins: list[int] = []
    cut_at, alive = 0, False
    while not alive:
        cut_at += 1
        disk = before.copy()
        store = await recovered(disk, records)
        disk.loss, disk.cut_at = loss, disk.calls + cut_at
        try:
            await store.follow(FOUND, 3)
            alive = True
        except PowerCut:
            pass
        store = await recovered(disk.power_cut(loss), records)
        if await all_waiting(store):
            assert is_first
            assert (await all_waiting(store), store.next_offset, store.found_until) == (list(range(8)), 8, 0)
            begins.append(-1)
        else:
            assert (store.found_until, store.found_read_time) == (8, NOW - 4000), cut_at
            begins.append(store.next_offset)
    assert begins[-1] == 3
    # Its own wheel, then all of the queue while wheel and log go, then where the master said.
    assert list(dict.fromkeys(begins)) == ([-1, 0, 3] if is_first else [2, 0, 3])
    assert store.read_time == NOW - 3000
    assert await all_waiting(store) == []


async def test_a_checkpoint_that_cannot_be_written_changes_nothing_in_memory() -> None:
    disk, records = SimDisk(), Records(8)
    store = await recovered(disk, records)
    await store.follow(FOUND, 2)
    disk.fail("rename", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        await store.follow(msgspec.structs.replace(FOUND, found_until=9), 3)
    assert (store.next_offset, store.found_until, store.checkpoint.queue_offset) == (2, 8, 2)
    await store.follow(FOUND, 3)
    assert (store.next_offset, store.unsaved_offset) == (3, 3)
