"""Cells of docs/fault-model.md that no other test covers: a clock that is set back, flipped bits in lock and abort."""

from itertools import pairwise
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.stores import TOPIC, check_all, fill, opened, put, settings
from trimq.broker.store.disk.store_lock import StoreLock
from trimq.broker.store.message_store import MessageStore, StoreInUseError
from trimq.broker.store.types import PutMessageResult
from trimq.remoting.runtime.clock import ManualClock

DAY = 86_400_000
NOW = 1_700_000_000_000
DELAYED = "SCHEDULE_TOPIC_XXXX"


async def _stop(disk: SimDisk, store: MessageStore, loss: Loss | None) -> SimDisk:
    """The power fails, or (None) the store closes in order."""
    assert await store.write_path.sync.flush()
    if loss is not None:
        disk.power_cut(loss)
    return disk


@pytest.mark.parametrize("loss", [None, Loss.NOTHING, Loss.ALL], ids=["stop", "kill", "power cut"])
async def test_a_clock_that_goes_back_by_days(loss: Loss | None) -> None:
    """Log, queues, index and checkpoint: set back while it runs and at two restarts; set forward in the end."""
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


async def _parked(store: MessageStore, body: bytes = b"later") -> PutMessageResult:
    return await put(store, body, topic=DELAYED, queue_id=2, more="DELAY\x013\x02")


async def _due(store: MessageStore, count: int = 1) -> list[int]:
    with trio.fail_after(10):
        while store.max_offset(DELAYED, 2) < count:  # noqa: ASYNC110 - with the pool this waits for the commit
            await trio.sleep(0.01)
    return [due for _, _, due in await store.queue_units(DELAYED, 2, 0, count)]


@pytest.mark.parametrize(
    "more",
    [{}, {"sync": True}, {"transient_store_pool_enable": True}, {"flush_commit_log_timed": False}],
    ids=["async", "sync", "pool", "not timed"],
)
async def test_a_delayed_message_is_due_by_the_wall_clock(
    more: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    """After a time in which the clock was ahead: the store time continues from there, due times do not."""
    clock = ManualClock(NOW + DAY)
    async with opened(SimDisk(), settings(mapped_file_size_commit_log=16384, **more), clock) as store:
        await put(store, b"from the future")
        clock.set_wall_ms(NOW)
        async with trio.open_nursery() as nursery:
            for number in range(60):  # some of them wait for space
                nursery.start_soon(_parked, store, b"%d" % number * 300)
        assert set(await _due(store, 60)) == {NOW + 10_000}
        clock.advance(7)
        assert (await _parked(store)).store_timestamp == NOW + DAY
        assert (await _due(store, 61))[-1] == NOW + 17_000


async def test_the_due_time_is_that_of_the_append(autojump_clock: trio.testing.MockClock) -> None:
    """Not of the time when the record is durable, or committed to its file, and can be dispatched."""
    for more in ({"sync": True}, {"transient_store_pool_enable": True}):
        clock = ManualClock(NOW)
        async with opened(SimDisk(), settings(**more), clock) as store:  # type: ignore[arg-type]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_parked, store)
                while not store.commit_log.last_store_timestamp:
                    await trio.lowlevel.checkpoint()
                clock.advance(3)
            assert await _due(store) == [NOW + 10_000]


async def test_a_unit_made_anew_is_due_later_and_never_earlier(autojump_clock: trio.testing.MockClock) -> None:
    """After a kill the unit has the record's time, the only one in the log; a further restart makes it no later."""
    disk = SimDisk()
    due: list[int] = []
    clock = ManualClock(NOW + DAY)
    try:
        async with opened(disk, settings(), clock) as store:
            await put(store, b"from the future")
            clock.set_wall_ms(NOW)
            await _parked(store)
            due = await _due(store)
            await _stop(disk, store, Loss.ALL)
    except* PowerCut:
        disk = disk.power_cut()
    assert due == [NOW + 10_000]
    for _ in range(2):
        async with opened(disk, settings(), ManualClock(NOW - DAY)) as store:
            assert await _due(store) == [NOW + DAY + 10_000]


@pytest.mark.parametrize("change", [None, -1, 1], ids=["as it was", "earlier", "later"])
async def test_a_due_time_that_nothing_vouches_for_is_made_anew(change: int | None) -> None:
    """Without a checkpoint a flipped bit looks like a clock that was set back: the later time is safe."""
    disk = SimDisk()
    clock = ManualClock(NOW)
    async with opened(disk, settings(), clock) as store:
        await _parked(store)
        clock.set_wall_ms(NOW - DAY)
        await _parked(store)
        assert await _due(store, 2) == [NOW + 10_000, NOW - DAY + 10_000]
    disk.delete("/store/checkpoint")
    if change is not None:
        path = f"/store/consumequeue/{DELAYED}/2/{0:020d}"
        units = bytearray(disk.content(path))
        units[12:20] = (NOW + 10_000 + change).to_bytes(8, "big")
        fd = disk.open(path, writable=True)
        disk.pwrite(fd, bytes(units), 0)
        disk.close(fd)
    async with opened(disk, settings(), clock) as store:
        assert store.recovered is not None
        assert store.recovered.units_rebuilt == (1 if change is None else 2)
        assert await _due(store, 2) == [NOW + 10_000, NOW + 10_000]


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
    """Only their names count: a start distinguishes a kill from an orderly stop whatever their contents."""
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
        recovered = next(entry for entry in logs if entry["event"] == "store_recovered")
        assert recovered["clean_exit"] is False
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
