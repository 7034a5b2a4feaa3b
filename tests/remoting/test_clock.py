"""Clocks: the manual one for tests, and the real one, which agrees with the machine's."""

import time

import trio
from trio.testing import wait_all_tasks_blocked

from trimq.remoting.runtime.clock import Clock, ManualClock, SystemClock


async def test_a_manual_clock_stands_still_until_it_is_moved() -> None:
    clock: Clock = ManualClock(wall_ms=5000)
    assert clock.wall_ms() == clock.wall_ms() == 5000
    assert clock.monotonic() == clock.monotonic()


async def test_sleepers_wake_in_the_order_of_their_deadlines_and_not_before() -> None:
    clock = ManualClock()
    woken: list[int] = []

    async def sleep(seconds: int) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with trio.open_nursery() as nursery:
        for seconds in (3, 1, 2):
            nursery.start_soon(sleep, seconds)
        await wait_all_tasks_blocked()
        clock.advance(0.999)
        await wait_all_tasks_blocked()
        assert woken == []
        clock.advance(0.001)
        await wait_all_tasks_blocked()
        assert woken == [1]
        clock.advance(10)
        await wait_all_tasks_blocked()
        assert sorted(woken) == [1, 2, 3]
        assert clock.sleeping == 0


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = ManualClock()
    with trio.CancelScope() as scope:
        scope.cancel()
        await clock.sleep(1)
    assert clock.sleeping == 0


async def test_no_time_at_all_is_a_checkpoint() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await ManualClock().sleep(0)
    assert scope.cancelled_caught
    await ManualClock().sleep_until(0)


def test_wall_time_can_be_set_back_without_touching_the_monotonic_one() -> None:
    clock = ManualClock()
    before = clock.monotonic()
    clock.advance(1)
    clock.set_wall_ms(7)
    assert (clock.wall_ms(), clock.monotonic()) == (7, before + 1)


async def test_the_system_clock_is_the_machines() -> None:
    clock = SystemClock()
    assert abs(clock.wall_ms() - time.time() * 1000) < 1000
    before = clock.monotonic()
    await clock.sleep_until(before + 0.001)
    assert clock.monotonic() >= before + 0.001
