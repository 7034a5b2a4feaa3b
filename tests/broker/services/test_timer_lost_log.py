"""Starts without the timer log: the queue is read again, and stops and crashes may come before that is done."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio.testing

from tests.broker.services.timer_rig import SMALL, Rig
from tests.store.simdisk import Loss
from trimq.broker.testing import configuration
from trimq.protocol.timer_layout import decode_checkpoint
from trimq.protocol.timer_notes import NO_NOTES, decode_notes
from trimq.protocol.topic_rules import TIMER_TOPIC


def without_log(rig: Rig) -> None:
    for name in rig.disk.list("/store/timerlog"):
        rig.disk.delete(f"/store/timerlog/{name}")


async def test_a_wheel_that_was_lost_with_its_log(autojump_clock: trio.testing.MockClock) -> None:
    """The queue is read again; what was delivered according to the checkpoint does not come again."""
    rig = Rig()
    async with rig.running():
        for number in range(10):
            await rig.send(b"%d" % number, 2_000 + number * 10_000)
        await rig.advance(35)
        assert len(await rig.bodies()) == 4
    without_log(rig)
    async with rig.running():
        await rig.advance(30)
        assert len(await rig.bodies()) == 7
        await rig.advance(60)
        assert sorted(await rig.bodies()) == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("ending", [None, *Loss])
async def test_ends_while_the_queue_is_read_again(
    ending: Loss | None, lost: int, autojump_clock: trio.testing.MockClock
) -> None:
    """What was delivered according to the checkpoint before does not come again at any of the next starts."""
    rig = Rig()
    async with rig.running():
        for number in range(6):
            await rig.send(b"%d" % number, 2_000)
        await rig.advance(3)
        assert len(await rig.bodies()) == 6
        await rig.send(b"later", 600_000)
        await rig.advance(2)
    rig.configuration.apply("timerStopEnqueue", "true", "test")
    for life in range(3):
        if life < lost:
            without_log(rig)
        async with rig.running(ending=ending):
            await rig.advance(2)
            assert rig.timers.next_offset == 0
    rig.configuration.apply("timerStopEnqueue", "false", "test")
    for _ in range(2):
        async with rig.running():
            await rig.advance(2)
            assert len(await rig.bodies()) == 6
            assert rig.timers.wheel.count == 1
    assert decode_notes(rig.disk.content("/store/config/timercheck")) == NO_NOTES


def without_checkpoint(rig: Rig) -> None:
    rig.disk.delete("/store/config/timercheck")


@pytest.mark.parametrize("lose", [without_log, without_checkpoint])
@pytest.mark.parametrize("stops", [0, 1, 2])
async def test_what_has_rolled_comes_once(
    stops: int, lose: Callable[[Rig], None], autojump_clock: trio.testing.MockClock
) -> None:
    """The message and its copies are in the queue. Also if stops come before they are read."""
    rig = Rig(timerRollWindowSlot="10")
    async with rig.running():
        await rig.send(b"far", 60_000)
        for _ in range(30):
            await rig.advance(1)
        assert rig.store.max_offset(TIMER_TOPIC, 0) == 3
    lose(rig)
    rig.configuration.apply("timerStopEnqueue", "true", "test")
    for _ in range(stops):
        async with rig.running():
            await rig.advance(2)
            assert rig.timers.next_offset == 0
    rig.configuration.apply("timerStopEnqueue", "false", "test")
    async with rig.running():
        await rig.advance(1)
        assert rig.timers.wheel.count == 1
        for _ in range(60):
            await rig.advance(1)
        assert await rig.bodies() == [b"far"]


@pytest.mark.parametrize("enabled", ["true", "false"])
async def test_a_checkpoint_at_the_end_of_the_start_leads_to_the_queue(
    enabled: str, autojump_clock: trio.testing.MockClock
) -> None:
    """RocketMQ, where there is no log, goes on at its queue offset: what is before that would be lost there."""
    rig = Rig()
    async with rig.running():
        for number in range(3):
            await rig.send(b"%d" % number, 2_000 if number == 0 else 600_000)
        await rig.advance(3)
        await rig.advance(2)
    without_log(rig)
    rig.configuration = configuration(Path("/store"), SMALL | {"timerWheelEnable": enabled})
    async with rig.store_alone():
        data = rig.disk.content("/store/config/timercheck")
    checkpoint, notes = decode_checkpoint(data), decode_notes(data)
    assert (checkpoint.log_position, checkpoint.queue_offset, checkpoint.master_queue_offset) == (0, 0, 0)
    assert (notes.log_begin, notes.found_until) == (0, 3)
    rig.configuration = configuration(Path("/store"), SMALL)
    async with rig.running():
        for _ in range(70):
            await rig.advance(10)
        assert await rig.bodies() == [b"0", b"1", b"2"]
