"""A start of the timer with another timerPrecisionMs, and power cuts then."""

from itertools import count
from pathlib import Path

import pytest

from tests.broker.services.timer_rig import SMALL, Rig
from tests.store.simdisk import Loss, PowerCut
from trimq.broker.testing import configuration

SYNC = SMALL | {"flushDiskType": "SYNC_FLUSH"}

pytestmark = pytest.mark.usefixtures("autojump_clock")


async def filled(before: int, after: int) -> Rig:
    """A store with timed messages, stopped in order; it starts with the precision ``after`` next."""
    rig = Rig(slots=1024, timerPrecisionMs=before, flushDiskType="SYNC_FLUSH")
    async with rig.running():
        for number in range(12):
            # Two in a slot, some of which share one with others in coarser slots, and one beyond a finer wheel.
            await rig.send(b"%d" % number, 400_000 if number == 11 else 60_000 + number // 2 * 300)
        await rig.advance(2)
    rig.configuration = configuration(Path("/store"), SYNC | {"timerPrecisionMs": after})
    return rig


@pytest.mark.parametrize(("before", "after"), [(1000, 100), (100, 1000)])
@pytest.mark.parametrize("seconds", [0, 20])
async def test_a_power_cut_after_a_start_with_another_precision(before: int, after: int, seconds: int) -> None:
    """Nothing comes to the queue meanwhile; there is a checkpoint all the same."""
    rig = await filled(before, after)
    for life in range(2):
        async with rig.running(ending=Loss.ALL):
            assert rig.timers.wheel.count == 12
            if life and seconds:
                assert rig.timers.notes == []
            for _ in range(seconds):
                await rig.advance(1)
    async with rig.running():
        for _ in range(45):
            await rig.advance(10)
        assert sorted(await rig.bodies()) == sorted(b"%d" % number for number in range(12))


@pytest.mark.parametrize(
    ("before", "after", "loss"), [(1000, 100, Loss.ALL), (1000, 100, Loss.PAGES), (100, 1000, Loss.ALL)]
)
async def test_a_power_cut_at_any_call_of_a_start_with_another_precision(before: int, after: int, loss: Loss) -> None:
    rig = await filled(before, after)
    disk, now = rig.disk, rig.clock.wall_ms()
    for cut_at in count(1):
        rig.disk = disk.copy()
        rig.disk.loss, rig.disk.cut_at = loss, cut_at
        rig.clock.set_wall_ms(now)
        alive = False
        try:
            async with rig._running():
                await rig.advance(2)  # a checkpoint
                alive = True
        except* PowerCut:
            pass
        rig.disk = rig.disk.power_cut(loss)
        async with rig.running():
            for _ in range(6):
                await rig.advance(70)
            came = {one.body: one for one in await rig.delivered()}
            assert sorted(came) == sorted(b"%d" % number for number in range(12)), cut_at
            assert len(await rig.bodies()) == 12, cut_at
            assert all(one.store_timestamp > int(one.properties["TIMER_OUT_MS"]) for one in came.values())
        if alive:
            break
    assert cut_at > 50
