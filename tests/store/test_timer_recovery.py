"""Recovery of the timer's data: after crashes, truncations, damage, another precision, and after RocketMQ."""

import struct

import msgspec
import pytest

from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.timers import FILE, NOW, ROOT, SIZE, Records, add, all_waiting, recovered, save, timer_store, waiting
from trimq.broker.store.disk.durable_files import write_durably
from trimq.broker.store.message_store import StoreLoadError
from trimq.protocol.timer_layout import (
    SLOT,
    UNIT_SIZE,
    TimerUnit,
    decode_checkpoint,
    encode_checkpoint,
    pack_unit,
)

CHECK = f"{ROOT}/config/timercheck"
WHEEL = f"{ROOT}/timerwheel"
FIRST_LOG = f"{ROOT}/timerlog/{0:020}"


async def filled(records: Records, *, extra: int = 0) -> SimDisk:
    """A store with a checkpoint at seven messages, and ``extra`` ones after it."""
    disk = SimDisk()
    store = await recovered(disk, records)
    await add(store, records, [3, 4, 3, 90, 4, 3, 5])
    await save(store)
    await add(store, records, [3 + number % 4 for number in range(extra)])
    store.close()
    return disk


FILLED = {3: [0, 2, 5], 4: [1, 4], 5: [6], 90: [3]}


def change_checkpoint(disk: SimDisk, **changes: int) -> None:
    found = decode_checkpoint(disk.content(CHECK))
    changed = msgspec.structs.replace(found, **changes)
    write_durably(disk, CHECK, encode_checkpoint(changed))


def write(disk: SimDisk, path: str, position: int, data: bytes) -> None:
    fd = disk.open(path)
    disk.pwrite(fd, data, position)
    disk.data_sync(fd)
    disk.close(fd)


# -- the commit log ends earlier than the timer knows


@pytest.mark.parametrize("left", range(8))
async def test_units_whose_records_were_truncated_are_cut_off(left: int) -> None:
    records = Records()
    disk = await filled(records)
    records.count = left
    store = await recovered(disk, records)
    assert await waiting(store) == {
        slot: kept for slot, numbers in FILLED.items() if (kept := [number for number in numbers if number < left])
    }
    assert store.next_offset == left
    assert store.wheel.count == left
    await add(store, records, [4, 8])  # other records take the places of those that are gone
    await save(store)
    again = await recovered(disk.power_cut(Loss.ALL), records)
    assert (await waiting(again))[8] == [left + 1]
    assert again.next_offset == left + 2


@pytest.mark.parametrize("left", range(7))
async def test_other_records_at_the_places_of_truncated_ones_are_not_delivered(left: int) -> None:
    """The log was truncated and has grown since, without the timer: its units lead to records of other topics."""
    records = Records()
    disk = await filled(records)
    records.foreign = set(range(left, 7))
    store = await recovered(disk, records)
    assert await all_waiting(store) == list(range(left))
    assert store.next_offset == left
    assert any("records that are gone" in note for note in store.notes)


async def test_the_search_for_the_end_stops_at_the_first_good_record() -> None:
    records = Records()
    disk = await filled(records)
    records.reads = 0
    await recovered(disk, records)
    assert records.reads == 1


async def test_units_of_deleted_log_files_are_kept_until_they_are_due() -> None:
    """The disk was too full to keep them: the delivery counts them."""
    records = Records()
    disk = await filled(records)
    records.first = 7
    records.count = 9
    store = await recovered(disk, records)
    assert await waiting(store) == FILLED
    assert store.next_offset == 7


async def test_deleted_and_truncated() -> None:
    records = Records()
    disk = await filled(records)
    records.first, records.count, records.foreign = 5, 7, {5, 6}
    store = await recovered(disk, records)
    assert await all_waiting(store) == [0, 1, 2, 3, 4]
    assert store.next_offset == 5


async def test_a_queue_that_is_shorter_than_the_checkpoint() -> None:
    """The last message was delivered without the wheel, and the log lost it."""
    records = Records()
    disk = await filled(records)
    change_checkpoint(disk, queue_offset=9)
    store = await recovered(disk, records)
    assert store.next_offset == 7
    assert await waiting(store) == FILLED


# -- units behind the checkpoint


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("extra", [1, 4, 13])
async def test_units_behind_the_checkpoint_are_cut_off(loss: Loss, extra: int) -> None:
    records = Records()
    disk = await filled(records, extra=extra)
    disk = disk.power_cut(loss)
    store = await recovered(disk, records)
    assert await waiting(store) == FILLED
    assert (store.next_offset, store.wheel.count) == (7, 7)
    await add(store, Records(7), [3 + number % 4 for number in range(extra)])
    assert await all_waiting(store) == list(range(7 + extra))
    await save(store)
    again = await recovered(disk.power_cut(Loss.ALL), records)
    assert await all_waiting(again) == list(range(7 + extra))


async def test_nothing_is_left_behind_the_end_for_rocketmq_to_find() -> None:
    records = Records()
    disk = await filled(records, extra=9)
    store = await recovered(disk.copy_after_cut(Loss.NOTHING), records)
    assert isinstance(store.disk, SimDisk)
    content = b"".join(store.disk.content(f"{ROOT}/timerlog/{start:020}") for start in store.log.starts)
    assert any(content[store.log.end - UNIT_SIZE :])
    assert not any(content[store.log.end :])


async def test_rocketmq_notes_its_log_position_before_it_syncs_the_log() -> None:
    """Units of messages before the checkpoint's queue offset follow; later ones are read from the queue again."""
    records = Records()
    disk = await filled(records, extra=6)
    change_checkpoint(disk, queue_offset=10, master_queue_offset=10)
    store = await recovered(disk, records)
    assert await all_waiting(store) == list(range(10))
    assert store.next_offset == 10
    assert store.wheel.count == 10


@pytest.mark.parametrize("known", [0, 2])
@pytest.mark.parametrize("again", [1, 2, 7])
async def test_rocketmq_was_killed_twice_and_has_written_units_again(again: int, known: int) -> None:
    """Then the units of new messages follow, ``known`` of them before those that it wrote once more."""
    records = Records()
    disk = await filled(records)
    store = await recovered(disk, records)
    await add(store, records, [6] * known)
    await add(store, Records(7 + known - again), [6] * (again + 2))
    store.log.sync()
    store.close()
    records.count = 9 + known
    change_checkpoint(disk, queue_offset=9 + known, master_queue_offset=9 + known)
    store = await recovered(disk, records)
    assert await all_waiting(store) == list(range(7 + known))
    assert store.next_offset == 7 + known
    await add(store, Records(7 + known), [6, 8])
    await save(store)
    last = await recovered(disk.power_cut(Loss.ALL), records)
    assert await all_waiting(last) == list(range(9 + known))
    assert (last.next_offset, last.notes) == (9 + known, [])


async def test_a_damaged_unit_behind_the_checkpoint_costs_no_other_message() -> None:
    """Not even its own: it is read from the queue again, with those behind it."""
    records = Records()
    disk = await filled(records, extra=2)
    change_checkpoint(disk, queue_offset=9, master_queue_offset=9)
    write(disk, f"{ROOT}/timerlog/{FILE:020}", 2 * UNIT_SIZE, bytes(UNIT_SIZE))
    store = await recovered(disk, records)
    assert await all_waiting(store) == list(range(7))
    assert store.next_offset == 7


@pytest.mark.parametrize("damage", [b"\xff", b"\0"])
@pytest.mark.parametrize("known", range(7))
async def test_a_damaged_unit_at_the_end_of_a_file(known: int, damage: bytes) -> None:
    """The next one is in another file, as those are of a start that writes the units again; but the log went on."""
    records = Records()
    disk = await filled(records, extra=5)
    change_checkpoint(disk, log_position=known * UNIT_SIZE if known < 5 else FILE + (known - 5) * UNIT_SIZE)
    change_checkpoint(disk, queue_offset=12, master_queue_offset=12)
    number = 4 if known < 5 else 9
    write(disk, f"{ROOT}/timerlog/{number // 5 * FILE:020}", 4 * UNIT_SIZE, damage * UNIT_SIZE)
    store = await recovered(disk, records)
    assert await all_waiting(store) == list(range(number))
    assert store.next_offset == number
    await add(store, Records(number), [9] * (12 - number))
    await save(store)
    last = await recovered(disk.power_cut(Loss.ALL), records)
    assert await all_waiting(last) == list(range(12))


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("precision", [1000, 100])
@pytest.mark.parametrize("damaged", [3, 4])
async def test_a_power_cut_while_the_units_behind_a_damaged_one_are_cut_off(
    loss: Loss, precision: int, damaged: int
) -> None:
    """Its start has found out that the queue has to be read again; the next one finds no such units any more."""
    records = Records()
    filled_disk = await filled(records)
    change_checkpoint(filled_disk, log_position=2 * UNIT_SIZE)
    write(filled_disk, FIRST_LOG, damaged * UNIT_SIZE, b"\xff" * UNIT_SIZE)
    cut_at, alive = 0, False
    while not alive:
        cut_at += 1
        disk = filled_disk.copy()
        disk.loss, disk.cut_at = loss, disk.calls + cut_at
        try:
            await save(await recovered(disk, records, precision))
            alive = True
        except PowerCut:
            pass
        again = await recovered(disk.power_cut(loss), records, precision)
        assert again.next_offset == damaged, cut_at
        assert await all_waiting(again) == list(range(damaged)), cut_at
    assert cut_at > 10


async def test_units_that_do_not_follow_a_unit_whose_record_is_gone() -> None:
    records = Records()
    disk = await filled(records)
    store = await recovered(disk, records)
    await add(store, Records(6), [6, 6])
    store.log.sync()
    store.close()
    records.count, records.first = 9, 7
    change_checkpoint(disk, queue_offset=9, master_queue_offset=9)
    write(disk, f"{ROOT}/timerlog/{FILE:020}", 2 * UNIT_SIZE, bytes(UNIT_SIZE))
    store = await recovered(disk, records)
    assert await all_waiting(store) == list(range(7))
    assert store.next_offset == 7


async def test_delivered_slots_that_rocketmq_left_in_the_wheel() -> None:
    records = Records()
    disk = await filled(records)
    change_checkpoint(disk, read_time=NOW + 5000)
    store = await recovered(disk, records, now=NOW + 10_000)
    assert await waiting(store) == {5: [6], 90: [3]}
    assert store.wheel.count == 2
    assert store.floor.offset == 3 * SIZE  # of the step that 5 and 90 share no unit is earlier


async def test_the_read_time_of_a_clock_that_was_ahead() -> None:
    records = Records()
    disk = await filled(records)
    change_checkpoint(disk, read_time=NOW + 3000)
    store = await recovered(disk, records, now=NOW)
    assert store.read_time == NOW
    assert await waiting(store) == {3: [0, 2, 5], 4: [1, 4], 5: [6], 90: [3]}


@pytest.mark.parametrize("loss", list(Loss))
async def test_delivered_slots_that_rocketmq_left_and_a_clock_that_is_behind(loss: Loss) -> None:
    """The read time goes back to before them: they must not be in the file when a checkpoint says so."""
    records = Records()
    disk = await filled(records)
    change_checkpoint(disk, read_time=NOW + 5000)
    store = await recovered(disk, records, now=NOW)
    assert await waiting(store) == {5: [6], 90: [3]}
    assert store.read_time == NOW
    await add(store, records, [200])
    await save(store)
    again = await recovered(disk.power_cut(loss), records, now=NOW)
    assert await waiting(again) == {5: [6], 90: [3], 200: [7]}
    assert (again.wheel.count, again.notes) == (3, [])


# -- files that cannot be used


def _no_wheel(disk: SimDisk) -> None:
    disk.delete(WHEEL)


def _short_wheel(disk: SimDisk) -> None:
    fd = disk.open(WHEEL)
    disk.truncate(fd, 96)
    disk.close(fd)


def _wrong_place(disk: SimDisk) -> None:
    number = NOW // 1000 + 3
    write(disk, WHEEL, (number % 256) * 32, SLOT.pack(number + 1, 0, 0, 1, 0))


def _wrong_positions(disk: SimDisk) -> None:
    number = NOW // 1000 + 3
    write(disk, WHEEL, (number % 256) * 32, SLOT.pack(number, 5, 4, 1, 0))


def _beyond_the_log(disk: SimDisk) -> None:
    number = NOW // 1000 + 3
    write(disk, WHEEL, (number % 256) * 32, SLOT.pack(number, 0, 999 * UNIT_SIZE, 1, 0))


@pytest.mark.parametrize("damage", [_no_wheel, _short_wheel, _wrong_place, _wrong_positions, _beyond_the_log])
async def test_a_wheel_that_cannot_be_used_is_made_from_the_log(damage: object) -> None:
    records = Records()
    disk = await filled(records)
    damage(disk)  # type: ignore[operator]
    store = await recovered(disk, records)
    assert await waiting(store) == FILLED
    assert (store.next_offset, store.wheel.count) == (7, 7)
    assert len(store.notes) == 1
    await save(store)
    again = await recovered(disk.power_cut(Loss.ALL), records)
    assert (await waiting(again), again.notes) == (FILLED, [])


async def test_a_log_that_is_gone_is_made_from_the_queue() -> None:
    """Messages that were delivered according to the checkpoint are left out by the task: see ``found_until``."""
    records = Records()
    disk = await filled(records)
    for name in disk.list(f"{ROOT}/timerlog"):
        disk.delete(f"{ROOT}/timerlog/{name}")
    store = await recovered(disk, records)
    assert store.is_empty
    assert (store.next_offset, store.found_until, store.found_read_time) == (0, 7, NOW)
    await add(store, Records(), [3, 4])
    await save(store)
    again = await recovered(disk.power_cut(Loss.ALL), records)
    assert await waiting(again) == {3: [0], 4: [1]}


async def test_a_log_that_is_lost_once_more_while_it_is_made() -> None:
    """The checkpoint in between knows little of the queue: the one before is the one that counts."""
    records = Records()
    disk = await filled(records)
    for name in disk.list(f"{ROOT}/timerlog"):
        disk.delete(f"{ROOT}/timerlog/{name}")
    store = await recovered(disk, records, now=NOW + 2000)
    await add(store, Records(), [3, 4])
    await save(store)
    store.close()
    assert (await recovered(disk.copy(), records)).found_until == 7
    for name in disk.list(f"{ROOT}/timerlog"):
        disk.delete(f"{ROOT}/timerlog/{name}")
    store = await recovered(disk, records, now=NOW + 2000)
    assert (store.next_offset, store.found_until, store.found_read_time) == (0, 7, NOW)


async def test_delivered_messages_are_not_known_by_places_that_others_get() -> None:
    """The commit log was truncated too: messages that come now are not those that were delivered."""
    records = Records()
    disk = await filled(records)
    for name in disk.list(f"{ROOT}/timerlog"):
        disk.delete(f"{ROOT}/timerlog/{name}")
    records.count = 4
    assert (await recovered(disk, records)).found_until == 4


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_power_cut_while_a_log_that_was_lost_is_made(loss: Loss) -> None:
    """Its first units do not count as those that the old checkpoint knows."""
    records = Records()
    filled_disk = await filled(records)
    for name in filled_disk.list(f"{ROOT}/timerlog"):
        filled_disk.delete(f"{ROOT}/timerlog/{name}")
    cut_at, alive = 0, False
    while not alive:
        cut_at += 1
        disk = filled_disk.copy()
        disk.loss, disk.cut_at = loss, disk.calls + cut_at
        try:
            cut = await recovered(disk, records)
            await add(cut, Records(), [3] * 5)
            await add(cut, Records(5), [4] * 2)
            await save(cut)
            alive = True
        except PowerCut:
            pass
        again = await recovered(disk.power_cut(loss), records)
        assert await all_waiting(again) == list(range(again.next_offset)), cut_at
    assert cut_at > 20


@pytest.mark.parametrize("content", [None, b"", bytes(55), bytes(4096), struct.pack(">7q", 1, -1, 0, 0, 0, 0, 0)])
async def test_a_checkpoint_that_is_gone(content: bytes | None) -> None:
    """The queue is read from its beginning: messages that are due are delivered, perhaps once more."""
    records = Records()
    disk = await filled(records)
    if content is None:
        disk.delete(CHECK)
    else:
        write_durably(disk, CHECK, content)
    store = await recovered(disk, records)
    assert store.is_empty
    assert (store.next_offset, store.found_read_time, store.read_time) == (0, 0, NOW)
    assert store.notes
    await add(store, Records(), [3, 4])
    await save(store)
    again = await recovered(disk.power_cut(Loss.ALL), records)
    assert await waiting(again) == {3: [0], 4: [1]}


async def test_a_log_of_another_file_size_is_refused() -> None:
    records = Records()
    disk = await filled(records)
    with pytest.raises(StoreLoadError, match="the configured file size"):
        await recovered(disk, records, file=FILE + 52)


# -- another precision


@pytest.mark.parametrize(("before", "after"), [(1000, 100), (100, 1000), (200, 500), (500, 200)])
@pytest.mark.parametrize("wheel", [True, False])
async def test_another_precision(before: int, after: int, *, wheel: bool) -> None:
    """The units are written again, for the slots of the new wheel; none is delivered before its time."""
    records, disk = Records(), SimDisk()
    store = await recovered(disk, records, before, slots=2048)
    times = [3, 4, 13, 4, 3, 14, 8]
    await add(store, records, times)
    await save(store)
    store.close()
    if not wheel:
        disk.delete(WHEEL)
    again = await recovered(disk, records, after, slots=2048)
    due = {number: NOW + time * before for number, time in enumerate(times)}
    found = {number: NOW + slot * after for slot, numbers in (await waiting(again)).items() for number in numbers}
    assert found == {number: time - time % after for number, time in due.items()}
    assert again.wheel.count == 7
    assert again.next_offset == 7
    for numbers in (await waiting(again)).values():
        assert numbers == sorted(numbers)
    for loss in Loss:
        cut = await recovered(disk.copy_after_cut(loss), records, after, slots=2048)
        assert await waiting(cut) == await waiting(again)
    await save(again)
    last = await recovered(disk.copy_after_cut(Loss.ALL), records, after, slots=2048)
    assert await waiting(last) == await waiting(again)
    assert last.notes == []


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("then", [0, 1])
@pytest.mark.parametrize("precisions", [(1000, 100), (100, 1000), (500, 200)])
async def test_a_power_cut_at_any_call_of_a_start_with_another_precision(
    loss: Loss, then: int, precisions: tuple[int, int]
) -> None:
    """And of the first checkpoint after it; the next start has that precision, or the one from before, again.

    All messages are pending once: also those of units that the old checkpoint does not know, from the queue.
    """
    before, after = precisions
    last, extra = precisions[then], 3
    records, filled_disk = Records(), SimDisk()
    store = await recovered(filled_disk, records, before, slots=2048)
    await add(store, records, [3, 4, 13, 4, 3, 14, 8, 370, 35, 4])
    await save(store)
    await add(store, records, [3 + number % 4 for number in range(extra)])
    store.close()

    cut_at, alive = 0, False
    while not alive:
        cut_at += 1
        disk = filled_disk.after_kill()
        disk.loss, disk.cut_at = loss, disk.calls + cut_at
        try:
            cut = await recovered(disk, records, after, slots=2048)
            await add(cut, Records(10), [9] * extra)
            await save(cut)
            alive = True
        except PowerCut:
            pass
        left = disk.power_cut(loss)
        again = await recovered(left, records, last, slots=2048)
        await add(again, Records(again.next_offset), [9] * (10 + extra - again.next_offset))
        assert await all_waiting(again) == list(range(10 + extra)), cut_at
        assert again.wheel.count == 10 + extra
        third = await recovered(left.copy_after_cut(loss), records, last, slots=2048)
        await add(third, Records(third.next_offset), [9] * (10 + extra - third.next_offset))
        assert await all_waiting(third) == list(range(10 + extra)), cut_at
    assert cut_at > 25


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_power_cut_while_a_wheel_that_was_lost_is_written(loss: Loss) -> None:
    records = Records()
    filled_disk = await filled(records)
    filled_disk.delete(WHEEL)
    cut_at, alive = 0, False
    while not alive:
        cut_at += 1
        disk = filled_disk.copy()
        cut = await recovered(disk, records)
        disk.loss, disk.cut_at = loss, disk.calls + cut_at
        try:
            await save(cut)
            alive = True
        except PowerCut:
            pass
        assert await waiting(await recovered(disk.power_cut(loss), records)) == FILLED, cut_at
    assert cut_at > 8


@pytest.mark.parametrize(("times", "left"), [([3, 15], {1: [1]}), ([3, 5, 6], {0: [1, 2]})])
async def test_what_was_delivered_with_a_finer_precision_does_not_come_again(
    times: list[int], left: dict[int, list[int]]
) -> None:
    """The read time is in the middle of a slot of the new precision, whose slots the units would fit, or not."""
    records, disk = Records(), SimDisk()
    store = await recovered(disk, records, 100)
    await add(store, records, times)
    await save(store)
    change_checkpoint(disk, read_time=NOW + 500)
    for _ in range(2):
        again = await recovered(disk, records, 1000, now=NOW + 10_000)
        assert await waiting(again) == left
        disk = disk.copy_after_cut(Loss.ALL)


@pytest.mark.parametrize(("first", "last"), [(2, 5), (1, 5), (0, 4), (99, 99)])
async def test_a_damaged_slot_of_another_precision(first: int, last: int) -> None:
    """Which units are pending is not learned from a wheel that does not fit them. The slot had 0, 2 and 5."""
    records = Records()
    disk = await filled(records)
    number = NOW // 1000 + 3
    places = timer_store(disk).log.place(7) + [999 * UNIT_SIZE] * 93
    write(disk, WHEEL, (number % 256) * 32, SLOT.pack(number, places[first], places[last], 3, 0))
    again = await recovered(disk, records, 500)
    assert await all_waiting(again) == list(range(7))


async def test_what_was_delivered_is_in_no_log_of_another_precision() -> None:
    """The wheel is lost before the precision changes and once more after that; the read time is rounded down then."""
    records, disk = Records(), SimDisk()
    store = await recovered(disk, records, 100)
    await add(store, records, [3, 15])
    await save(store)
    change_checkpoint(disk, read_time=NOW + 500)
    for _ in range(2):
        disk.delete(WHEEL)
        again = await recovered(disk, records, 1000, now=NOW + 10_000)
        assert await waiting(again) == {1: [1]}
        await save(again)
        assert again.checkpoint.read_time == NOW


async def test_a_finer_precision_whose_wheel_is_too_small_for_all() -> None:
    records, disk = Records(), SimDisk()
    store = await recovered(disk, records, 1000)
    await add(store, records, [3, 60])
    await save(store)
    again = await recovered(disk, records, 100)
    found = await waiting(again)
    assert found.pop(30) == [0]
    ((slot, numbers),) = found.items()
    assert numbers == [1]
    assert slot <= again.window == 68  # it rolls
    unit = again.wheel.find(NOW + slot * 100)
    assert unit is not None
    assert list((await again.due(unit)).magics) == [3]


# -- log ends that are special


@pytest.mark.parametrize("count", range(1, 12))
async def test_every_end_of_the_log(count: int) -> None:
    """In the middle of a file, at its last unit, at the start of the next one."""
    records, disk = Records(), SimDisk()
    store = await recovered(disk, records)
    await add(store, records, [3] * count)
    await save(store)
    again = await recovered(disk.copy_after_cut(Loss.ALL), records)
    assert await waiting(again) == {3: list(range(count))}
    await add(again, records, [3])
    assert await waiting(again) == {3: list(range(count + 1))}


async def test_a_stored_position_at_the_end_of_a_file() -> None:
    """RocketMQ counts the BLANK as written: then its position is the start of the next file."""
    records, disk = Records(), SimDisk()
    store = await recovered(disk, records)
    await add(store, records, [3] * 5)
    await save(store)
    change_checkpoint(disk, log_position=FILE)
    again = await recovered(disk.copy_after_cut(Loss.ALL), records)
    assert await waiting(again) == {3: [0, 1, 2, 3, 4]}
    await add(again, records, [3])
    assert await waiting(again) == {3: [0, 1, 2, 3, 4, 5]}


async def test_units_of_the_same_slot_in_a_checkpoint_of_zeros() -> None:
    """RocketMQ was killed before its first checkpoint."""
    disk, records = SimDisk(), Records(2)
    store = timer_store(disk)
    store.log.write(*store.log.pieces([0], [pack_unit(TimerUnit(-1, 1, NOW, NOW + 3000, 0, SIZE, 0))]))
    store.log.sync()
    store.close()
    disk.make_directory(f"{ROOT}/config")
    write_durably(disk, CHECK, bytes(4096))
    again = await recovered(disk, records)
    assert (again.next_offset, again.is_empty) == (0, True)
