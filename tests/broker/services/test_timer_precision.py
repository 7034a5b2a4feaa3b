"""A start of the timer with another timerPrecisionMs, and power cuts then."""

from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.broker.services.timer_rig import NOW, SMALL, Rig, use
from tests.store.simdisk import Loss, PowerCut
from trimq.broker.testing import configuration
from trimq.protocol.timer_layout import PRECISIONS, out_time

SYNC = SMALL | {"flushDiskType": "SYNC_FLUSH"}

EXAMPLES: Final = max(30, settings().max_examples // 10)


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
async def test_a_power_cut_after_a_start_with_another_precision(
    before: int, after: int, seconds: int, autojump_clock: trio.testing.MockClock
) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "loss"), [(1000, 100, Loss.ALL), (1000, 100, Loss.PAGES), (100, 1000, Loss.ALL)]
)
async def test_a_power_cut_at_any_call_of_a_start_with_another_precision(
    before: int, after: int, loss: Loss, autojump_clock: trio.testing.MockClock
) -> None:
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


async def delivered_on_time(rig: Rig, due: dict[bytes, int]) -> Counter[bytes]:
    """How often each message was delivered, in a last life that stands still at each time that is too early."""
    async with rig.running():
        for time in sorted({time + after for time in due.values() for after in (0, 1, rig.timers.precision)}):
            if time > rig.clock.wall_ms():
                await rig.advance((time - rig.clock.wall_ms()) / 1000)
        for _ in range(4):  # what has rolled
            await rig.advance(60)
        found = await rig.delivered()
        assert (rig.timers.wheel.count, rig.service.behind_messages, rig.counts) == (0, 0, {})
    for one in found:
        assert due[one.body] == int(one.properties["TIMER_OUT_MS"])
        late_by = one.store_timestamp - due[one.body]
        assert late_by > 0, f"{one.body!r} came {-late_by} ms before its TIMER_OUT_MS, or at it"
    return Counter(one.body for one in found)


@pytest.mark.parametrize("between", [(1000,), (60_000,), (500, 1000, 200)])
@pytest.mark.parametrize("stops_enqueue", [False, True])
async def test_no_precision_in_between_changes_a_time(
    between: Sequence[int], stops_enqueue: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """In the wheel, where the units are written again by each start, and in the timer's queue."""
    rig = Rig(timerPrecisionMs=100, timerStopEnqueue=stops_enqueue)
    async with rig.running():
        for at in range(10):
            await rig.send(b"%d" % at, 20_000 + 100 * at)
        await rig.advance(1)
    for precision in between:
        use(rig, precision)
        async with rig.running():
            assert rig.timers.wheel.count == 10
            await rig.advance(1)
    use(rig, 100)
    due = {b"%d" % at: out_time(NOW + 20_000 + 100 * at, 100) for at in range(10)}
    assert await delivered_on_time(rig, due) == Counter(due.keys())


async def test_units_have_the_times_of_messages(autojump_clock: trio.testing.MockClock) -> None:
    """As RocketMQ writes them; its wheel and ours round them to slots. One that rolls has the time of the roll."""
    rig = Rig(slots=1024, timerPrecisionMs=100, timerStopEnqueue=True)
    async with rig.running():
        for at in (9_500, 9_900, 60_000, 500_000):
            await rig.send(b"%d" % at, at)
    use(rig, 1000)
    async with rig.running():
        units, _ = await rig.timers.log.units_from(0, rig.timers.log.end)
        assert [(unit.time - NOW, unit.write_time - NOW, unit.magic, unit.previous) for _, unit in units] == [
            (9_400, 0, 1, -1),
            (9_800, 0, 1, 0),
            (59_900, 0, 1, -1),
            (226_000, 0, 3, -1),
        ]
        assert [slot.time - NOW for slot in rig.timers.wheel.all_slots()] == [9_000, 59_000, 226_000]


async def test_what_a_stop_has_delivered_does_not_come_by_way_of_another_precision(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """One is delivered of those that a coarser slot has, which is not over when the precision changes back."""
    rig = Rig(timerPrecisionMs=100)
    due = {b"%d" % at: out_time(NOW + at, 100) for at in (1_100, 1_800, 9_000)}
    async with rig.running():
        for at in (1_800, 1_100, 9_000):
            await rig.send(b"%d" % at, at)
        await rig.advance(1.1)
        assert await rig.bodies() == [b"1100"]
    for precision in (1000, 100):
        use(rig, precision)
        async with rig.running():
            assert rig.timers.wheel.count == 2
    assert await delivered_on_time(rig, due) == Counter(due.keys())


async def test_a_late_message_in_the_wheel_brings_nothing_back(autojump_clock: trio.testing.MockClock) -> None:
    """It waits in the slot of the read time: what was delivered before stays so."""
    rig = Rig(timerPrecisionMs=1000)
    due = {b"%d" % at: out_time(NOW + at, 1000) for at in (2_000, 5_000, 6_000, 30_000)}
    async with rig.running():
        for at in (5_000, 6_000, 30_000):
            await rig.send(b"%d" % at, at)
        await rig.advance(0.5)
        rig.configuration.apply("timerStopEnqueue", "true", "test")
        await rig.send(b"2000", 1_500)
        await rig.advance(6.5)
        assert await rig.bodies() == [b"5000", b"6000"]
    use(rig, 1000, timerStopDequeue=True)
    async with rig.running():
        assert rig.timers.wheel.count == 2
    use(rig, 200)
    assert await delivered_on_time(rig, due) == Counter(due.keys())


async def test_a_clock_that_was_set_back_brings_nothing_back(autojump_clock: trio.testing.MockClock) -> None:
    """The read time has gone back too: later messages are delivered, and only the old wheel says so."""
    rig = Rig(timerPrecisionMs=1000)
    due = {b"%d" % at: out_time(NOW + at, 1000) for at in (5_000, 6_000, 30_000)}
    async with rig.running():
        for at in (5_000, 6_000, 30_000):
            await rig.send(b"%d" % at, at)
        await rig.advance(7.5)
        assert await rig.bodies() == [b"5000", b"6000"]
        rig.clock.set_wall_ms(NOW + 2_000)
        await rig.advance(1.5)
        assert rig.timers.read_time == NOW + 3_000
    use(rig, 200)
    assert await delivered_on_time(rig, due) == Counter(due.keys())


async def test_a_late_message_of_a_finer_precision(autojump_clock: trio.testing.MockClock) -> None:
    """It is late by the coarser precision too, and waits in the slot of the read time."""
    rig = Rig(timerPrecisionMs=100, timerStopEnqueue=True)
    async with rig.running():
        await rig.send(b"late", 2_400)
        await rig.advance(5)
    use(rig, 1000, timerStopDequeue=True)
    async with rig.running():
        assert rig.timers.wheel.count == 1
    use(rig, 1000)
    assert await delivered_on_time(rig, {b"late": NOW + 2_300}) == {b"late": 1}


class Turn(NamedTuple):
    """A life: its switches, what is sent (in so many ms), which messages are recalled, and how the clock goes on."""

    precision: int
    stops: frozenset[str]
    sends: list[int]
    recalls: list[int]
    steps: list[int]


TURNS: Final = st.lists(
    st.builds(
        Turn,
        st.sampled_from(PRECISIONS),
        st.frozensets(st.sampled_from(["timerStopEnqueue", "timerStopDequeue"])),
        st.lists(st.integers(1, 5_000) | st.integers(40_000, 60_000), max_size=4),
        st.lists(st.integers(0, 8), max_size=1),
        st.lists(st.integers(1, 2_500), max_size=3),
    ),
    min_size=2,
    max_size=6,
)
NO_STOPS: Final[frozenset[str]] = frozenset()


@given(turns=TURNS)
@example(
    turns=[
        Turn(100, NO_STOPS, [1_800, 1_100], [], [1_100]),
        Turn(1000, NO_STOPS, [], [], []),
        Turn(100, NO_STOPS, [], [], []),
    ]
)
@example(
    turns=[
        Turn(100, NO_STOPS, [2_900, 2_300], [], []),
        Turn(1000, NO_STOPS, [], [0], []),
        Turn(200, NO_STOPS, [], [], []),
    ]
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_precisions(turns: list[Turn]) -> None:
    """Orderly stops between them: each message comes once, later than its TIMER_OUT_MS, unless it was recalled."""
    trio.run(_live, turns, clock=trio.testing.MockClock(autojump_threshold=0))


async def _live(turns: list[Turn]) -> None:
    rig = Rig(slots=1024)
    due: dict[bytes, int] = {}
    recalled: set[bytes] = set()
    for turn in turns:
        use(rig, turn.precision, **dict.fromkeys(turn.stops, "true"))
        async with rig.running():
            for after in turn.sends:
                body = b"%d" % len(due)
                due[body] = out_time(rig.clock.wall_ms() + after, turn.precision)
                await rig.send(body, after)
            for number in turn.recalls:
                if (body := b"%d" % number) in due and due[body] >= rig.clock.wall_ms():
                    recalled.add(body)
                    mark = {"TIMER_OUT_MS": str(due[body]), "TIMER_DEL_UNIQKEY": body.decode()}
                    await rig.send(b"mark of " + body, 1, **mark)
            for step in turn.steps:
                await rig.advance(step / 1000)
    use(rig, turns[-1].precision)
    assert await delivered_on_time(rig, due) == Counter(due.keys() - recalled)
