"""Cells of docs/fault-model.md that no other test shows: a clock that is set back, flipped bits in lock and abort."""

from itertools import pairwise

import pytest
import trio
from structlog.testing import capture_logs

from broker.store.message_store import MessageStore, StoreInUseError
from broker.store.store_lock import StoreLock
from remoting.clock import ManualClock
from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.stores import TOPIC, check_all, fill, opened, put, settings

DAY = 86_400_000
NOW = 1_700_000_000_000
DELAYED = "SCHEDULE_TOPIC_XXXX"


async def _stop(disk: SimDisk, store: MessageStore, loss: Loss | None) -> SimDisk:
    """The power goes away, or (None) nothing happens: the store closes in order."""
    assert await store.write_path.sync.flush()
    if loss is not None:
        disk.power_cut(loss)
    return disk


@pytest.mark.parametrize("loss", [None, Loss.NOTHING, Loss.ALL], ids=["stop", "kill", "power cut"])
async def test_a_clock_that_goes_back_by_days(loss: Loss | None) -> None:
    """Log, queues, index and checkpoint: set back while it runs, at a restart, and at the next; set on in the end."""
    disk = SimDisk()
    count = 0
    for wall in (NOW, NOW - DAY, NOW - 30 * DAY, NOW + DAY):
        clock = ManualClock(wall)
        try:
            async with opened(disk, settings(), clock) as store:
                assert store.recovered is not None
                assert not store.recovered.damaged
                await check_all(store, {(TOPIC, 0): count})
                await fill(store, 30, first=count)
                clock.set_wall_ms(wall - 7 * DAY)
                await fill(store, 30, first=count + 30)
                count += 60
                await check_all(store, {(TOPIC, 0): count})
                await _stop(disk, store, loss)
        except* PowerCut:
            disk = disk.power_cut()
    async with opened(disk, settings(), ManualClock(NOW - 60 * DAY)) as store:
        assert store.recovered is not None
        assert not store.recovered.damaged
        await check_all(store, {(TOPIC, 0): count})
    names = disk.list("/store/index")
    assert len(names) > 8
    assert all(before < after for before, after in pairwise(names))


async def test_the_time_of_a_delayed_message_is_its_records(autojump_clock: trio.testing.MockClock) -> None:
    """A queue unit made anew after a kill, with the clock set back, says the time that the first one said."""
    disk = SimDisk()
    units: list[tuple[int, int, int]] = []
    try:
        async with opened(disk, settings(), ManualClock(NOW)) as store:
            stored = await put(store, b"later", topic=DELAYED, queue_id=2, more="DELAY\x013\x02")
            units = await store.queue_units(DELAYED, 2, 0, 1)
            assert units[0][2] == stored.store_timestamp + 10_000 == NOW + 10_000
            await _stop(disk, store, Loss.ALL)
    except* PowerCut:
        disk = disk.power_cut()
    async with opened(disk, settings(), ManualClock(NOW - DAY)) as store:
        assert store.recovered is not None
        assert store.recovered.units_rebuilt
        assert units
        assert await store.queue_units(DELAYED, 2, 0, 1) == units


async def _killed() -> SimDisk:
    disk = SimDisk()
    try:
        async with opened(disk) as store:
            await fill(store, 20)
            disk.power_cut(Loss.NOTHING)
    except* PowerCut:
        pass
    return disk.power_cut()


@pytest.mark.parametrize("name", ["lock", "abort"])
async def test_every_flipped_bit_of_lock_and_abort(name: str) -> None:
    """Their names count: a start takes a kill for a kill and a stop for a stop whatever stands in them."""
    found = await _killed()
    path = f"/store/{name}"
    bits = 8 * len(found.content(path))
    assert bits >= 8
    for bit in range(bits):
        disk = found.copy()
        disk.flip(path, bit // 8, bit % 8)
        with capture_logs() as logs:
            async with opened(disk) as store:
                await check_all(store, {(TOPIC, 0): 20})
        told = next(entry for entry in logs if entry["event"] == "store_recovered")
        assert told["clean_exit"] is False
        disk.flip("/store/lock", bit // 8 % 4, bit % 8)
        async with opened(disk) as store:
            assert store.recovered is not None
            assert store.recovered.clean


def test_a_store_in_use_is_refused_whatever_its_files_say() -> None:
    disk = SimDisk()
    lock = StoreLock.acquire(disk, "/store")
    for bit in range(32):
        disk.flip("/store/lock", bit // 8, bit % 8)
        with pytest.raises(StoreInUseError):
            StoreLock.acquire(disk, "/store")
    lock.release()
    StoreLock.acquire(disk, "/store").release()
