"""The timer's data while several calls are under way: writes during a sync, reads during closes, callers that end."""

import errno
from collections.abc import Callable
from typing import Any, Final

import pytest
import trio

from tests.store.simdisk import Loss, SimDisk
from tests.store.timers import FILE, NOW, SIZE, TOPIC_HASH, Records, add, recovered, save, synced, waiting
from trimq.broker.store.timer.timer_store import TimerStore
from trimq.protocol.timer_layout import MAGIC_DEFAULT, NO_POSITION, UNIT_SIZE, TimerUnit, pack_unit

_AWAITS: Final = ("the sync of the commit log", "the sync of the timer log", "the write of the wheel")


@pytest.mark.parametrize("number", range(len(_AWAITS)), ids=_AWAITS)
async def test_a_checkpoint_whose_caller_is_cancelled_leaves_its_pages_to_the_next(number: int) -> None:
    """A stop may cancel the task that writes checkpoints at any of its awaits, and then writes the last one itself."""
    disk: Any = SimDisk()
    records = Records()
    store = await recovered(disk, records)
    await add(store, records, [3])
    await save(store)  # the first checkpoint has all pages, whatever was taken before
    await add(store, records, [70])
    run, calls = disk.run, 0

    async def cancelled_at(fn: Callable[..., Any], *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            scope.cancel()
        return await run(fn, *args)

    async def sync_commit_log() -> bool:
        if not number:
            scope.cancel()
            await trio.lowlevel.checkpoint()
        return True

    disk.run = cancelled_at
    with trio.CancelScope() as scope:
        await store.save(sync_commit_log, NOW)
    assert scope.cancelled_caught
    disk.run = run
    assert await store.save(synced, NOW, last=True)
    again = await recovered(disk.power_cut(Loss.ALL), records)
    assert await waiting(again) == {3: [0], 70: [1]}
    assert again.notes == []


def _write_one(store: TimerStore, records: Records, slots: int) -> None:
    """What ``TimerStore.add`` does: its write in a thread."""
    (position,) = store.log.place(1)
    time = NOW + slots * 1000
    unit = TimerUnit(NO_POSITION, MAGIC_DEFAULT, NOW, time, records.count * SIZE, SIZE, TOPIC_HASH)
    for piece in store.log.pieces([position], [pack_unit(unit)]):
        store.log.write(piece)
    store.log.wrote(position + UNIT_SIZE)
    store.wheel.put(time, position, 1)
    records.count += 1
    store.next_offset = records.count
    store.changed = True


async def test_a_write_during_the_sync_of_its_file_is_in_the_next_sync() -> None:
    disk: Any = SimDisk()
    records = Records()
    store = await recovered(disk, records, file=1 << 20)
    await add(store, records, [3])
    sync = disk.data_sync

    def with_a_write(fd: int, *args: Any) -> None:
        sync(fd, *args)
        disk.data_sync = sync
        _write_one(store, records, 4)

    disk.data_sync = with_a_write
    await save(store)
    await save(store)
    again = await recovered(disk.copy_after_cut(Loss.ALL), records, file=1 << 20)
    assert await waiting(again) == {3: [0], 4: [1]}
    assert again.notes == []


async def test_a_file_that_is_made_during_the_sync_of_names_is_in_the_next_sync() -> None:
    disk: Any = SimDisk()
    records = Records()
    store = await recovered(disk, records)
    await add(store, records, [3] * 5)
    sync = disk.sync_directory

    def with_a_new_file(path: str) -> None:
        sync(path)
        if path == "/store/timerlog" and store.log.starts == [0]:
            _write_one(store, records, 4)

    disk.sync_directory = with_a_new_file
    await save(store)
    assert len(store.log.starts) == 2
    await save(store)
    again = await recovered(disk.copy_after_cut(Loss.ALL), records)
    assert await waiting(again) == {3: [0, 1, 2, 3, 4], 4: [5]}
    assert again.notes == []


async def test_a_file_is_made_when_the_one_before_is_durable() -> None:
    """A start refuses a gap between the files, which a power cut could leave otherwise."""
    disk: Any = SimDisk()
    records = Records()
    store = await recovered(disk, records)
    create = disk.create
    found: list[list[str]] = []

    def with_those_before(path: str, size: int) -> int:
        left = disk.copy_after_cut(Loss.ALL)
        found.append(left.list("/store/timerlog"))
        assert all(len(left.content(f"/store/timerlog/{name}")) == FILE for name in found[-1])
        return create(path, size)  # type: ignore[no-any-return]

    disk.create = with_those_before
    await add(store, records, [3] * 17)
    await add(store, records, [4] * 5)
    assert [len(names) for names in found] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("method", ["data_sync", "sync_directory"])
async def test_what_a_failed_sync_has_not_covered_is_in_the_next_one(method: str) -> None:
    disk: Any = SimDisk()
    records = Records()
    store = await recovered(disk, records)
    await add(store, records, [3])
    disk.fail(method, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        store.log.sync()
    store.log.sync()
    assert not disk.pending_failures()
    assert len(disk.copy_after_cut(Loss.ALL).content("/store/timerlog/00000000000000000000")) == FILE


@pytest.mark.parametrize("deletes", [True, False], ids=["deleted", "closed for others"])
async def test_a_file_that_is_being_read_stays_open(*, deletes: bool) -> None:
    """Its descriptor may be another file's as soon as it is closed."""
    disk: Any = SimDisk()
    records = Records()
    store = await recovered(disk, records)
    await add(store, records, [1] * 5 * 8)
    await save(store)
    await add(store, records, [1])
    assert disk.open_files() == 4
    pread = disk.pread

    def during(fd: int, length: int, at: int) -> Any:
        disk.pread = pread
        if deletes:
            store.log.delete_before(2 * FILE)
        else:
            for start in store.log.starts[1:]:
                store.log._read_cold(start, 10, 0)
        return pread(fd, length, at)  # raises for a descriptor that is closed

    disk.pread = during
    assert len((await store.log.units_from(0, FILE))[0]) == 5
    assert disk.pread is not during
    await add(store, records, [1] * 5)
    assert disk.open_files() <= 5
    store.close()
    assert not disk.open_files()


class Thread:
    """Stands for the disk's threads: ``is_running`` while a function runs in one."""

    is_running = False

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self.is_running = True
        try:
            return fn(*args)
        finally:
            self.is_running = False


async def test_the_loop_opens_no_file() -> None:
    disk: Any = SimDisk()
    records = Records()
    store = await recovered(disk, records)
    await add(store, records, [1] * 5 * 12)
    await save(store)
    await add(store, records, [1])
    assert disk.open_files() <= 5
    run, opened = disk.run, disk.open
    thread, opens = Thread(), 0

    def in_a_thread(path: str, *, writable: bool = True) -> Any:
        nonlocal opens
        assert thread.is_running
        opens += 1
        return opened(path, writable=writable)

    disk.run, disk.open = thread.run, in_a_thread
    assert await waiting(store) == {1: list(range(61))}
    assert (await store.counts())[TOPIC_HASH].messages == 61
    assert opens > 7
    disk.run = run


async def test_a_start_looks_for_the_wheel_in_a_thread() -> None:
    disk: Any = SimDisk()
    records = Records()
    store = await recovered(disk, records)
    await add(store, records, [1])
    await save(store)
    disk.delete("/store/config/timercheck")
    stat = disk.stat
    thread = Thread()
    run = disk.run

    def in_a_thread(path: str) -> Any:
        assert thread.is_running or path == "/store"
        return stat(path)

    disk.run, disk.stat = thread.run, in_a_thread
    again = await recovered(disk, records)
    assert again.next_offset == 0
    disk.run = run
