"""The timer's data on a simulated disk: wheel, log, checkpoints."""

import errno

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.store.simdisk import Loss, SimDisk
from tests.store.timers import (
    FILE,
    NOW,
    ROOT,
    SIZE,
    TOPIC_HASH,
    Records,
    add,
    recovered,
    save,
    synced,
    timer_store,
    waiting,
)
from trimq.broker.store.timer.pending import STEP, PendingFloor
from trimq.broker.store.timer.timer_store import TimerStore
from trimq.broker.store.timer.wheel import TimerWheel
from trimq.protocol.timer_layout import BLANK_SIZE, UNIT_SIZE, Slot, is_blank, unpack_unit

WHEEL = f"{ROOT}/timerwheel"


async def test_nothing_exists_before_the_first_timed_message() -> None:
    disk = SimDisk()
    store = await recovered(disk, Records())
    assert store.is_empty
    await store.save(synced, NOW, last=True)
    assert disk.list("/store") == []


async def test_messages_are_found_in_their_slots_in_log_order() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [3, 5, 3])
    await add(store, records, [3, 4, 5, 3, 3])
    assert await waiting(store) == {3: [0, 2, 3, 6, 7], 4: [4], 5: [1, 5]}
    assert store.wheel.count == 8
    assert (await store.counts())[TOPIC_HASH].messages == 8
    assert await store.count_between(2 * SIZE, 6 * SIZE) == 4
    assert await store.count_between(6 * SIZE, 99 * SIZE) == 2
    store.delivered(NOW + 3000)
    assert await waiting(store) == {4: [4], 5: [1, 5]}
    assert (await store.counts())[TOPIC_HASH].messages == 3
    assert (store.wheel.count, store.next_offset, store.read_time) == (3, 8, NOW + 4000)


async def test_the_log_has_rocketmqs_layout() -> None:
    """Five units and a BLANK in each file; the chains go through files."""
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [1] * 4)
    await add(store, records, [1] * 4)
    first, second = (disk.content(f"/store/timerlog/{start:020}") for start in (0, FILE))
    assert len(first) == len(second) == FILE
    assert is_blank(first, 5 * UNIT_SIZE)
    assert first[5 * UNIT_SIZE :][:4] == (FILE - 5 * UNIT_SIZE).to_bytes(4, "big")
    positions = [0, 52, 104, 156, 208, FILE, FILE + 52, FILE + 104]
    data = first + second
    for number, position in enumerate(positions):
        unit = unpack_unit(data, position)
        assert unit is not None
        assert unit.previous == ([-1, *positions])[number]
        assert (unit.offset, unit.size, unit.time, unit.write_time) == (number * SIZE, SIZE, NOW + 1000, NOW)
    slot = store.wheel.find(NOW + 1000)
    assert slot == Slot(NOW + 1000, 0, FILE + 104, 8)


async def test_a_batch_of_many_files() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [number % 3 for number in range(64)])
    assert await waiting(store) == {slot: list(range(slot, 64, 3)) for slot in range(3)}
    await save(store)
    await add(store, records, [1])
    assert (await waiting(store))[1][-1] == 64
    store.close()
    assert not disk.open_files()


async def test_delete_marks_count_less_than_nothing() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [2, 2])
    await add(store, records, [2], deletes=True)
    assert store.wheel.count == 1
    assert (await store.counts())[TOPIC_HASH].messages == 1
    slot = store.wheel.find(NOW + 2000)
    assert slot is not None
    assert list((await store.due(slot)).magics) == [1, 1, 5]


async def test_a_delete_mark_counts_once_for_all_files_of_the_commit_log() -> None:
    records = Records()
    store = await recovered(SimDisk(), records)
    await add(store, records, [50, 60, 50, 50])
    await add(store, records, [50], deletes=True)
    counts = [await store.count_between(number * SIZE, (number + 1) * SIZE) for number in range(6)]
    assert counts == [0, 1, 1, 1, 0, 0]
    assert await store.count_between(0, 6 * SIZE) == 3


async def test_a_checkpoint_and_a_restart() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [1, 2, 2, 7])
    store.delivered(NOW + 1000)
    await save(store)
    store.close()
    again = await recovered(disk.power_cut(Loss.ALL), records, now=NOW + 60_000)
    assert await waiting(again) == {2: [1, 2], 7: [3]}
    assert (again.next_offset, again.read_time, again.wheel.count) == (4, NOW + 2000, 3)
    assert (store.lowest_offset(), again.lowest_offset()) == (0, SIZE)  # slots that are close count as one
    assert again.notes == []


async def test_what_comes_after_the_checkpoint_is_read_from_the_queue_again() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [3, 3])
    await save(store)
    await add(store, records, [3, 4, 5, 6, 7, 8])
    for loss in (Loss.ALL, Loss.NOTHING, Loss.PAGES, Loss.SECTORS):
        again = await recovered(disk.copy_after_cut(loss), records)
        assert await waiting(again) == {3: [0, 1]}
        assert again.next_offset == 2
        again.close()


@pytest.mark.parametrize("method", ["pwrite", "data_sync", "create", "rename", "sync_directory"])
async def test_a_checkpoint_that_fails(method: str) -> None:
    """The next one has everything; a cut before it finds the one before."""
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [3, 3])
    await save(store)
    await add(store, records, [3, 4])
    store.delivered(NOW + 3000)
    if method == "data_sync":
        disk.fail(method, errno.EIO, 2)  # of the wheel: the first is that of the log
    else:
        disk.fail(method, errno.ENOSPC)
    assert not await store.save(synced, NOW)
    assert not disk.pending_failures()
    before = await recovered(disk.copy_after_cut(Loss.SECTORS), records)
    assert (await waiting(before)).get(4) is None
    assert before.next_offset == 2
    await save(store)
    again = await recovered(disk.copy_after_cut(Loss.ALL), records)
    assert await waiting(again) == {4: [3]}
    assert again.next_offset == 4


async def test_a_failed_sync_of_the_log_ends_the_checkpoints() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [3])
    await save(store)
    await add(store, records, [4])
    disk.fail("data_sync", errno.EIO)
    assert not await store.save(synced, NOW)
    assert store.is_broken
    assert not await store.save(synced, NOW)
    again = await recovered(disk.copy_after_cut(Loss.NOTHING), records)
    assert await waiting(again) == {3: [0]}
    assert again.next_offset == 1


async def test_a_checkpoint_needs_the_delivered_copies_on_disk() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [3])
    await save(store)
    store.delivered(NOW + 3000)

    async def fails() -> bool:
        return False

    assert not await store.save(fails, NOW)
    again = await recovered(disk.copy_after_cut(Loss.NOTHING), records)
    assert await waiting(again) == {3: [0]}
    await save(store)
    again = await recovered(disk.copy_after_cut(Loss.ALL), records)
    assert await waiting(again) == {}


async def test_an_add_that_fails_changes_nothing() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [3, 3])
    for nth in (1, 2):  # a batch that reaches into the next file
        disk.fail("pwrite", errno.ENOSPC, nth)
        count = records.count
        with pytest.raises(OSError, match="No space"):
            await add(store, records, [3] * 5)
        records.count = count
        assert await waiting(store) == {3: [0, 1]}
        assert store.next_offset == 2
    await add(store, records, [3] * 5)
    assert await waiting(store) == {3: [0, 1, 2, 3, 4, 5, 6]}


async def test_old_files_of_the_log_are_deleted() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [200, *[1] * 11])  # three files; the first has a message that waits for long
    store.delivered(NOW + 1000)
    await save(store)
    assert len(disk.list("/store/timerlog")) == 3
    store.delivered(NOW + 200_000)
    await save(store)
    assert len(disk.list("/store/timerlog")) == 1
    again = await recovered(disk.power_cut(Loss.ALL), records)
    assert again.is_empty
    await add(again, records, [250] * 7)
    assert await waiting(again) == {250: list(range(12, 19))}


async def test_a_file_that_cannot_be_deleted_stays() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [1] * 11)
    store.delivered(NOW + 1000)
    disk.fail("delete", errno.EACCES)
    await save(store)
    assert len(disk.list("/store/timerlog")) == 3


async def test_a_broken_chain_is_found_by_the_whole_log() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [3, 4, 3, 3, 4, 3, 3])
    await save(store)
    disk.flip("/store/timerlog/00000000000000000000", 2 * UNIT_SIZE + 11)  # the previous position of the third
    store.log.wrote(store.log.end)  # forget what is in memory
    assert await waiting(store) == {3: [0, 2, 3, 5, 6], 4: [1, 4]}


@pytest.mark.parametrize("byte", [0, 15, 19, 29, 38])
async def test_a_flip_in_a_unit_costs_no_other_message(byte: int) -> None:
    """In its size, magic, time, or in the place of its record."""
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [3, 4, 3, 3, 4, 3, 3])
    await save(store)
    disk.flip("/store/timerlog/00000000000000000000", 2 * UNIT_SIZE + byte, 3)
    again = await recovered(disk.copy_after_cut(Loss.ALL), records)
    found = await waiting(again)
    assert [number for number in found[3] if number < 7 and number != 2] == [0, 3, 5, 6]
    assert found[4] == [1, 4]


@pytest.mark.parametrize("cut", [False, True])
async def test_a_wheel_that_vanishes_while_the_broker_runs_is_written_anew(*, cut: bool) -> None:
    """With all slots: the pages that have changed since would be a wheel without the others."""
    records, disk = Records(), SimDisk()
    store = await recovered(disk, records)
    await add(store, records, [3, 200])
    await save(store)
    if cut:
        fd = disk.open(WHEEL)
        disk.truncate(fd, 96)
        disk.close(fd)
    else:
        disk.delete(WHEEL)
    await add(store, records, [4])
    assert not await store.save(synced, NOW)
    await save(store)
    again = await recovered(disk.power_cut(Loss.ALL), records)
    assert await waiting(again) == {3: [0], 4: [2], 200: [1]}
    assert again.notes == []


async def test_a_wheel_that_vanishes_before_the_end() -> None:
    records, disk = Records(), SimDisk()
    store = await recovered(disk, records)
    await add(store, records, [3, 200])
    await save(store)
    disk.delete(WHEEL)
    await add(store, records, [4])
    assert not await store.save(synced, NOW, last=True)
    again = await recovered(disk.power_cut(Loss.ALL), records)
    assert await waiting(again) == {3: [0], 200: [1]}
    assert again.next_offset == 2


async def test_a_new_wheel_whose_name_could_not_be_synced_is_written_once_more() -> None:
    records, disk = Records(), SimDisk()
    store = await recovered(disk, records)
    await add(store, records, [3, 200])
    await save(store)
    disk.delete(WHEEL)
    await add(store, records, [4])
    assert not await store.save(synced, NOW)
    disk.fail("sync_directory", errno.EIO)
    assert not await store.save(synced, NOW)
    assert disk.stat(WHEEL) is not None
    await save(store)
    again = await recovered(disk.power_cut(Loss.ALL), records)
    assert await waiting(again) == {3: [0], 4: [2], 200: [1]}
    assert again.notes == []


async def test_two_checkpoints_at_the_same_time() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [3])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(save, store)
        nursery.start_soon(save, store)
    assert store.checkpoint.counter == 1


async def test_reads_that_come_from_the_device() -> None:
    disk, records = SimDisk(), Records()
    store = await recovered(disk, records)
    await add(store, records, [3, 4, 3])
    await save(store)
    disk.cold = True
    assert await waiting(store) == {3: [0, 2], 4: [1]}


def test_memory_does_not_grow_with_the_number_of_timers() -> None:
    floor = PendingFloor(100)
    for number in range(300_000):
        floor.add(NOW + number % 172_800 * 100, number * 300, number * 52)
    assert len(floor) <= 172_800 // STEP + 2
    assert (floor.offset, floor.position) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=60))
def test_the_floor_is_below_all_pending_units(steps: list[tuple[int, int]]) -> None:
    """It is exact if times differ by whole steps of it."""
    floor = PendingFloor(1)
    now = 0
    pending: list[tuple[int, int]] = []
    for number, (delay, passes) in enumerate(steps):
        time = (now + delay) * STEP
        floor.add(time, number * 10, number)
        pending.append((time, number * 10))
        now += passes
        floor.passed(now * STEP)
        pending = [one for one in pending if one[0] >= now * STEP]
        assert floor.offset == min((offset for _, offset in pending), default=None)
        assert floor.position == (None if floor.offset is None else floor.offset // 10)
        assert floor.would_add(1 << 60)


@given(st.lists(st.tuples(st.integers(0, 255), st.booleans()), max_size=80))
def test_the_wheel_is_a_map_of_times(steps: list[tuple[int, bool]]) -> None:
    wheel = TimerWheel(SimDisk(), "/wheel", 100, 256)
    model: dict[int, list[int]] = {}
    for position, (number, adds) in enumerate(steps):
        time = NOW + number * 100
        if adds:
            wheel.put(time, position, 1)
            model.setdefault(time, []).append(position)
        else:
            wheel.clear(time)
            model.pop(time, None)
        slots = {slot.time: slot for slot in wheel.all_slots()}
        assert slots == {time: Slot(time, held[0], held[-1], len(held)) for time, held in model.items()}
        assert wheel.count == sum(map(len, model.values()))
        assert wheel.is_empty == (not model)
        first = min(model, default=NOW + 25_600)
        assert wheel.next_time(NOW, NOW + 25_600) == first
        assert wheel.next_time(100, NOW + 25_600) == first, "the wall clock was set from 1970 to now"
        assert wheel.next_time(NOW - 30_000, NOW + 12_000) == min(first, NOW + 12_000)
        assert all(wheel.find(time) == slot for time, slot in slots.items())
        assert wheel.find(NOW + 25_600 + number * 100) is None


def test_units_fill_a_file_as_far_as_a_blank_fits() -> None:
    store = timer_store(SimDisk(), file=3 * UNIT_SIZE + BLANK_SIZE)
    assert store.log.place(5) == [0, 52, 104, 172, 224]
    store = timer_store(SimDisk(), file=3 * UNIT_SIZE + BLANK_SIZE - 1)
    assert store.log.place(4) == [0, 52, 171, 223]


def test_the_wheel_takes_times_up_to_one_turn() -> None:
    store = TimerStore(SimDisk(), "/store", precision=100, log_file_size=FILE, window=0, slots=256)
    store.read_time = NOW
    assert store.free_until() == NOW + 255 * 100
