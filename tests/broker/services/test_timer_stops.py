"""Orderly stops in the middle of a slot: what was delivered does not come again, and what was not comes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from tests.broker.services.timer_rig import SMALL, Rig
from tests.store.simdisk import Loss
from trimq.broker.services import timer_put
from trimq.broker.services.timer_ahead import TimerAhead
from trimq.broker.services.timer_put import TimerPuts
from trimq.broker.store.disk.durable_files import write_durably
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.broker.testing import configuration
from trimq.protocol.timer_layout import decode_checkpoint, encode_checkpoint
from trimq.protocol.timer_notes import MOST_LEFT

BUSY = PutMessageResult(PutMessageStatus.OS_PAGE_CACHE_BUSY, remark="busy")
AWAY = PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark="away")
ALL = [b"%d" % number for number in range(6)]


async def stopped(rig: Rig, refused: dict[bytes, list[PutMessageResult]], *, taken: list[bytes]) -> None:
    """One life: six messages become due in a slot, and the store does not take some until the stop."""
    async with rig.running():
        for name in ALL:
            await rig.send(name, 2_000)
        rig.refuse = refused
        await rig.advance(2)
        assert await rig.bodies() == taken
    rig.refuse = {}


async def test_a_stop_while_one_put_is_refused_repeats_no_other(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    await stopped(rig, {b"2": [BUSY] * 99}, taken=[b"0", b"1", b"3", b"4", b"5"])
    async with rig.running():
        assert await rig.bodies() == [b"0", b"1", b"3", b"4", b"5", b"2"]
        assert (rig.timers.wheel.count, rig.counts, rig.timers.rests) == (0, {}, {})
        await rig.advance(2)
    async with rig.running():
        assert len(await rig.bodies()) == 6


@pytest.mark.parametrize("refusal", [BUSY, AWAY])
async def test_a_stop_while_a_message_is_refused_that_was_due_when_it_was_found(
    refusal: PutMessageResult, autojump_clock: trio.testing.MockClock
) -> None:
    """It waits in the wheel, with a mark that cancels one behind it, which the store may not have been asked for."""
    rig = Rig(timerStopEnqueue="true")
    async with rig.running():
        for name in ALL:
            await rig.send(name, 2_000)
        await rig.send(b"later", 600_000)
        await rig.send(b"mark", 2_000, UNIQ_KEY="4", TIMER_DEL_UNIQKEY="4")
        await rig.advance(10)
        rig.refuse = {b"2": [refusal] * 99}
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        await rig.advance(0.1)
        assert await rig.bodies() == ([b"0", b"1", b"3", b"5"] if refusal is BUSY else [b"0", b"1"])
    assert rig.timers.next_offset == 8
    rig.refuse = {}
    async with rig.running():
        units, _ = await rig.timers.log.units_from(0, rig.timers.log.end)
        offsets = [unit.offset for _, unit in units]
        assert offsets == sorted(offsets)
        await rig.advance(1)
        assert await rig.bodies() == ([b"0", b"1", b"3", b"5", b"2"] if refusal is BUSY else ALL[:4] + ALL[5:])
        assert rig.counts == {"Orders": 1}
        assert rig.timers.wheel.count == 1


@pytest.mark.parametrize("ending", [None, *Loss])
async def test_lives_in_which_the_put_is_still_refused(
    ending: Loss | None, autojump_clock: trio.testing.MockClock
) -> None:
    """The note is in each further checkpoint, and an end without one finds the old one."""
    rig = Rig(flushDiskType="SYNC_FLUSH")
    await stopped(rig, {b"2": [BUSY] * 99, b"4": [BUSY] * 99}, taken=[b"0", b"1", b"3", b"5"])
    for life in range(3):
        async with rig.running(ending=ending if life else None):
            rig.refuse = {b"2": [BUSY] * 99, b"4": [BUSY] * 99}
            await rig.send(b"later %d" % life, 600_000)
            await rig.advance(2)
            await rig.advance(2)
        rig.refuse = {}
    async with rig.running():
        assert await rig.bodies() == [b"0", b"1", b"3", b"5", b"2", b"4"]
        assert rig.timers.wheel.count == 3


async def test_a_stop_when_the_store_takes_nothing_more(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    await stopped(rig, {b"3": [AWAY] * 99}, taken=[b"0", b"1", b"2"])
    async with rig.running():
        assert await rig.bodies() == ALL


async def test_more_refusals_than_the_note_has_room_for(autojump_clock: trio.testing.MockClock) -> None:
    """Only messages behind those come again."""
    rig = Rig()
    names = [b"%04d" % number for number in range(2 * MOST_LEFT + 20)]
    async with rig.running():
        for name in names:
            await rig.send(name, 2_000)
        rig.refuse = {name: [BUSY] * 99 for name in names[:-10:2]}
        await rig.advance(2)
        assert len(await rig.bodies()) == MOST_LEFT + 15
    rig.refuse = {}
    async with rig.running():
        found = await rig.bodies()
        assert set(found) == set(names)
        assert {name for name in names if found.count(name) > 1} == {
            *names[2 * MOST_LEFT + 1 : -10 : 2],
            *names[-10:],
        }


@pytest.mark.parametrize("first", [True, False])
async def test_equal_messages_one_of_which_was_stored_again_before_the_stop(
    *, first: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """They roll. The copy in the queue is that of the one that was stored, not of the one that was refused."""
    rig = Rig(timerRollWindowSlot="10")
    async with rig.running():
        for _ in range(2):
            await rig.send(b"far", 60_000)
        put: Any = rig.store.put_message
        asked: list[bytes] = []

        def refuse_one(inner: Any, done: Any) -> Any:
            if inner.topic == "rmq_sys_wheel_timer":
                asked.append(bytes(inner.body))
                if len(asked) != (2 if first else 1):
                    return BUSY
            return put(inner, done)

        rig.store.put_message = refuse_one
        for _ in range(30):
            await rig.advance(1)
        assert len(asked) > 2
        assert len(rig.timers.rests) == 0
    assert len(rig.timers.rests) == 1
    async with rig.running():
        for _ in range(40):
            await rig.advance(1)
        assert await rig.bodies() == [b"far"] * 2


@pytest.mark.parametrize("stops", [True, False])
async def test_the_copies_of_a_slot_that_was_begun_are_found_in_slices(
    monkeypatch: pytest.MonkeyPatch, *, stops: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """Others have a turn between its messages, also one that stops the timer: then the rest is not looked at."""
    rig = Rig(timerRollWindowSlot="10")
    count = 30
    async with rig.running():
        for number in range(count):
            await rig.send(b"far %d" % number, 60_000)
        rig.refuse = {b"far %d" % number: [BUSY] * 99 for number in (3, count - 1)}
        for _ in range(12):
            await rig.advance(1)
    assert len(rig.timers.rests) == 1
    rig.refuse = {}
    turns = looks = 0
    looked_at = []
    leave_out, roll_of = TimerPuts.leave_out, TimerAhead.roll_of

    def counted(self: TimerAhead, *message: Any) -> bytes | None:
        nonlocal looks
        looks += 1
        return roll_of(self, *message)

    async def watched(self: TimerPuts, due: Any, numbers: Any) -> None:
        nonlocal looks
        looks = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other, self)
            await leave_out(self, due, numbers)
            nursery.cancel_scope.cancel()
        looked_at.append(looks)

    async def other(puts: TimerPuts) -> None:
        nonlocal turns
        while True:
            turns += 1
            if stops and turns == 3:
                puts.stop()
            await trio.lowlevel.checkpoint()

    monkeypatch.setattr(timer_put, "_SLICE_SECONDS", 0)
    monkeypatch.setattr(TimerAhead, "roll_of", counted)
    monkeypatch.setattr(TimerPuts, "leave_out", watched)
    async with rig.running():
        if stops:
            assert 0 < looked_at[0] < 6
        else:
            assert looked_at == [count - 2]
            assert turns >= count - 2


@pytest.mark.parametrize("by", ["RocketMQ", "precision", "repair"])
async def test_a_note_that_does_not_fit_does_not_count(by: str, autojump_clock: trio.testing.MockClock) -> None:
    """The checkpoint is another one, or slots have other messages: all of the slot comes again, and nothing is lost."""
    rig = Rig()
    await stopped(rig, {b"2": [BUSY] * 99}, taken=[b"0", b"1", b"3", b"4", b"5"])
    if by == "RocketMQ":
        path = "/store/config/timercheck"
        data = rig.disk.content(path)
        checkpoint = decode_checkpoint(data)
        changed = msgspec.structs.replace(checkpoint, counter=checkpoint.counter + 1)
        write_durably(rig.disk, path, encode_checkpoint(changed, padded=False) + data[56:])
    elif by == "repair":
        rig.disk.delete("/store/timerwheel")
    else:
        rig.configuration = configuration(Path("/store"), SMALL | {"timerPrecisionMs": 100})
    async with rig.running():
        assert sorted(await rig.bodies()) == sorted([b"0", b"1", b"3", b"4", b"5", *ALL])
