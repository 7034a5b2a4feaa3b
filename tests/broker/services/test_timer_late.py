"""Messages that are due long before they can enter the wheel, and have to wait in it all the same."""

from collections.abc import Callable

import pytest
import trio.testing

from tests.broker.services.apache_timer import read_by_apache
from tests.broker.services.timer_rig import NOW, Rig, use
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.timer_layout import out_time
from trimq.protocol.timer_notes import NO_NOTES, decode_notes

BUSY = PutMessageResult(PutMessageStatus.OS_PAGE_CACHE_BUSY, remark="busy")


def switch(rig: Rig, **values: str) -> None:
    for name, value in values.items():
        rig.configuration.apply(name, value, "test")


def without_log(rig: Rig) -> None:
    for name in rig.disk.list("/store/timerlog"):
        rig.disk.delete(f"/store/timerlog/{name}")


def without_wheel(rig: Rig) -> None:
    rig.disk.delete("/store/timerwheel")


async def put_off(rig: Rig, late_by: int) -> None:
    """One life: a message is found late, and the store refuses it until the stop. Others were delivered before."""
    async with rig.running():
        await rig.send(b"later", 10_000_000)
        for number in range(4):
            await rig.send(b"%d" % number, 5_000 + 1000 * number)
        await rig.advance(1)
        switch(rig, timerStopEnqueue="true")
        await rig.send(b"late", 2_000)
        await rig.advance(late_by)
        assert await rig.bodies() == [b"0", b"1", b"2", b"3"]
        rig.refuse = {b"late": [BUSY] * 99}
        switch(rig, timerStopEnqueue="false")
        await rig.advance(0.1)
        assert len(await rig.bodies()) == 4
    assert rig.timers.next_offset >= 6
    rig.refuse = {}


@pytest.mark.parametrize("lose", [without_log, without_wheel])
@pytest.mark.parametrize("lives", [1, 3])
async def test_a_late_message_that_a_stop_puts_off_outlives_the_files(
    lose: Callable[[Rig], None], lives: int, autojump_clock: trio.testing.MockClock
) -> None:
    """What is due before the read time counts as delivered where the log is lost, but for what waits late."""
    rig = Rig()
    await put_off(rig, 20)
    for _ in range(lives - 1):
        rig.refuse = {b"late": [BUSY] * 99}
        async with rig.running():
            await rig.advance(3)
            assert len(await rig.bodies()) == 4
        rig.refuse = {}
    lose(rig)
    async with rig.running():
        await rig.advance(1)
        found = await rig.bodies()
        # The log is lost: what was delivered since its time comes again.
        again = [b"0", b"1", b"2", b"3"] if lose is without_log else []
        assert sorted(found) == sorted([b"0", b"1", b"2", b"3", *again, b"late"])
        await rig.advance(10_000)
        assert await rig.bodies() == [*found, b"later"]


async def test_what_was_late_counts_as_delivered_afterwards(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    await put_off(rig, 20)
    assert decode_notes(rig.disk.content("/store/config/timercheck")).late_since == out_time(NOW + 3_000, 1000)
    async with rig.running():
        await rig.advance(2)
    assert decode_notes(rig.disk.content("/store/config/timercheck")) == NO_NOTES
    without_log(rig)
    async with rig.running():
        await rig.advance(2)
        assert await rig.bodies() == [b"0", b"1", b"2", b"3", b"late"]


@pytest.mark.parametrize("back", [0, 10])
async def test_a_late_message_outlives_the_log_after_the_clock_was_set_back(
    back: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Its slot is later than the read time of the checkpoint then: it waits until that slot is delivered."""
    rig = Rig()
    await put_off(rig, 20)
    rig.clock.set_wall_ms(rig.clock.wall_ms() - back * 1000)
    rig.refuse = {b"late": [BUSY] * 99}
    for seconds in (1, 2):
        async with rig.running():
            await rig.advance(seconds)
    rig.refuse = {}
    without_log(rig)
    async with rig.running():
        await rig.advance(60)
        assert b"late" in await rig.bodies()


async def late_in_two_precisions(rig: Rig) -> None:
    """Lives with 100, 1000 and 100 ms: the late message's slot is behind the read time, which was rounded down."""
    async with rig.running():
        switch(rig, timerStopEnqueue="true")
        await rig.send(b"late", 2_000)
        await rig.advance(10.35)
        await rig.send(b"later", 100_000)
        switch(rig, timerStopDequeue="true", timerStopEnqueue="false")
        await rig.advance(1)
        assert min(slot.time for slot in rig.timers.wheel.all_slots()) % 1000
    use(rig, 1000, timerStopDequeue=True)
    async with rig.running():
        await rig.advance(1)
    use(rig, 100)


async def test_a_late_message_outlives_the_log_after_two_precisions(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(timerPrecisionMs=100)
    await late_in_two_precisions(rig)
    rig.refuse = {b"late": [BUSY] * 99}
    async with rig.running():
        await rig.advance(1)
        assert not await rig.bodies()
    rig.refuse = {}
    without_log(rig)
    async with rig.running():
        await rig.advance(5)
        assert await rig.bodies() == [b"late"]


async def test_a_recall_finds_a_late_message_after_two_precisions(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(timerPrecisionMs=100)
    due = out_time(NOW + 2_000, 100)
    await late_in_two_precisions(rig)
    switch(rig, timerStopDequeue="true")
    async with rig.running():
        await rig.recall(b"late", due)
        await rig.advance(1)
        assert rig.timers.next_offset == 3
        switch(rig, timerStopDequeue="false")
        await rig.advance(2)
        assert not await rig.bodies()


@pytest.mark.parametrize("late_by", [20, 4096 + 500])
async def test_apaches_broker_delivers_what_waits_and_nothing_else(
    late_by: int, autojump_clock: trio.testing.MockClock
) -> None:
    """It would read delivered slots again behind an earlier read time, and skips those before half of a wheel ago."""
    rig = Rig()
    await put_off(rig, late_by)
    offsets, queue_offset = read_by_apache(rig)
    assert queue_offset == rig.timers.next_offset
    assert sorted(offsets) == await pending_offsets(rig)
    assert len(offsets) == 2


async def test_apaches_broker_delivers_what_waits_while_deliveries_are_stopped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig()
    async with rig.running():
        for number in range(4):
            await rig.send(b"%d" % number, 5_000 + 1000 * number)
        await rig.advance(1)
        switch(rig, timerStopEnqueue="true")
        await rig.send(b"late", 2_000)
        await rig.advance(20)
        switch(rig, timerStopDequeue="true", timerStopEnqueue="false")
        await rig.advance(2)
        assert (rig.timers.wheel.count, len(await rig.bodies())) == (1, 4)
    offsets, queue_offset = read_by_apache(rig)
    assert (len(offsets), queue_offset) == (1, 5)


async def pending_offsets(rig: Rig) -> list[int]:
    """The places of the pending messages in the commit log."""
    async with rig.store_alone():
        slots = list(rig.timers.wheel.all_slots())
        return sorted([offset for slot in slots for offset in (await rig.timers.due(slot)).offsets])


async def test_a_recall_of_a_late_message_in_the_wheel(autojump_clock: trio.testing.MockClock) -> None:
    """The mark is read from the queue when the delivery goes on: it has to find the message in its own slot."""
    rig = Rig(timerStopEnqueue="true")
    async with rig.running():
        await rig.send(b"M", 2_000)
        due = out_time(NOW + 2_000, 1000)
        await rig.advance(10)
        switch(rig, timerStopDequeue="true", timerStopEnqueue="false")
        await rig.advance(2)
        assert rig.timers.wheel.count == 1
        switch(rig, timerStopEnqueue="true")
        await rig.recall(b"M", due)
        switch(rig, timerStopEnqueue="false", timerStopDequeue="false")
        await rig.advance(5)
        assert await rig.bodies() == []
        assert rig.service.puts.cancelled == 1
        assert (rig.timers.wheel.count, rig.counts) == (0, {})


async def test_a_recall_of_a_late_message_that_was_delivered_meanwhile(autojump_clock: trio.testing.MockClock) -> None:
    """Another one waits: the mark waits in its slot, where it cancels nothing."""
    rig = Rig(timerStopEnqueue="true")
    async with rig.running():
        await rig.send(b"M", 3_000)
        due = out_time(NOW + 3_000, 1000)
        await rig.advance(10)
        switch(rig, timerStopEnqueue="false")
        await rig.advance(1)
        assert await rig.bodies() == [b"M"]
        switch(rig, timerStopEnqueue="true")
        await rig.send(b"other", due - 1000 + 1 - rig.clock.wall_ms())
        switch(rig, timerStopDequeue="true", timerStopEnqueue="false")
        await rig.advance(2)
        switch(rig, timerStopEnqueue="true")
        await rig.recall(b"M", due)
        switch(rig, timerStopEnqueue="false", timerStopDequeue="false")
        await rig.advance(5)
        assert await rig.bodies() == [b"M", b"other"]
        assert (rig.timers.wheel.count, rig.counts) == (0, {})


async def test_a_message_that_is_overdue_by_a_whole_turn_of_the_wheel(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(timerStopEnqueue="true", timerRollWindowSlot="1000")
    async with rig.running():
        await rig.send(b"late", 2_000)
        await rig.send(b"later", 10_000_000)
        await rig.advance(rig.timers.wheel.slots + 1000)
        switch(rig, timerStopDequeue="true", timerStopEnqueue="false")
        await rig.advance(2)
        assert (rig.timers.wheel.count, rig.service.behind_messages) == (2, 0)
        switch(rig, timerStopDequeue="false")
        await rig.advance(2)
        assert await rig.bodies() == [b"late"]
        assert (rig.timers.wheel.count, rig.service.behind_messages) == (1, 0)


async def test_delivered_messages_do_not_count_as_pending_when_the_read_time_goes_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"later", 600_000)
        await rig.send(b"delivered", 5_000)
        await rig.advance(10)
        assert await rig.bodies() == [b"delivered"]
        rig.clock.set_wall_ms(NOW + 1000)
        await rig.send(b"new", 2_000)
        await rig.advance(1)
        assert rig.timers.read_time < NOW + 5_000
        assert rig.timers.wheel.count == 2
        assert await rig.timers.count_between(0, 1 << 60) == 2
