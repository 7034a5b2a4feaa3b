"""The timer's task on a simulated disk: order, restarts, outages, refusals, lost records."""

import errno
from itertools import count
from typing import Any

import pytest
import trio
import trio.testing

from tests.broker.services.timer_rig import NOW, Rig
from tests.store.builders import message
from tests.store.simdisk import Loss, PowerCut
from trimq.broker.health import timer_notes
from trimq.broker.services import timer_ahead, timer_enqueue, timer_put
from trimq.broker.services.pending_timers import PendingTimers
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.timer_layout import SLOTS, fits
from trimq.protocol.topic_rules import TIMER_TOPIC

HOUR = 3600
DAY = 24 * HOUR
BUSY = PutMessageResult(PutMessageStatus.OS_PAGE_CACHE_BUSY, remark="busy")
AWAY = PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark="away")
ILLEGAL = PutMessageResult(PutMessageStatus.MESSAGE_ILLEGAL, remark="illegal")
UNKNOWN = PutMessageResult(PutMessageStatus.UNKNOWN_ERROR, remark="?")


async def test_messages_of_a_slot_come_in_the_order_of_their_sends(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        for number in range(300):
            await rig.send(b"%d" % number, 5_000 + number % 3 * 1000)
        await rig.advance(4.999)
        assert await rig.bodies() == []
        await rig.advance(0.001)
        assert await rig.bodies() == [b"%d" % number for number in range(0, 300, 3)]
        await rig.advance(10)
        assert await rig.bodies() == [b"%d" % n for start in range(3) for n in range(start, 300, 3)]
        for one in await rig.delivered():
            assert one.store_timestamp >= int(one.properties["TIMER_OUT_MS"]) + 1000
            assert one.store_host == ("10.9.9.9", 10911)


async def test_a_message_that_is_due_when_the_timer_finds_it(autojump_clock: trio.testing.MockClock) -> None:
    """It never is in the wheel, and its TIMER_ENQUEUE_MS says so, as in RocketMQ."""
    rig = Rig(timerStopEnqueue="true")
    async with rig.running():
        await rig.send(b"late", 3_000)
        await rig.advance(10)
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        await rig.advance(1)
        (found,) = await rig.delivered()
        assert found.properties["TIMER_ENQUEUE_MS"] == str(2**63 - 1)
        assert rig.service.metrics.counts == {}
        assert rig.timers.is_empty


@pytest.mark.parametrize("delivered", [True, False])
@pytest.mark.parametrize("ending", [None, Loss.ALL])
async def test_no_message_comes_while_deliveries_are_stopped(
    *, delivered: bool, ending: Loss | None, autojump_clock: trio.testing.MockClock
) -> None:
    """Also none that is due when the timer finds it, whether its slot was ``delivered`` or not. Its recall counts."""
    rig = Rig(flushDiskType="SYNC_FLUSH")
    async with rig.running(ending=ending):
        if delivered:
            await rig.send(b"before", 8_000)
            await rig.settled()
        rig.configuration.apply("timerStopEnqueue", "true", "test")
        for name in (b"late", b"recalled"):
            await rig.send(name, 3_000)
        await rig.send(b"mark", 3_000, UNIQ_KEY="recalled", TIMER_DEL_UNIQKEY="recalled")
        await rig.advance(10)
        came = [b"before"] if delivered else []
        assert await rig.bodies() == came
        rig.configuration.apply("timerStopDequeue", "true", "test")
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        await rig.send(b"later", 600_000)
        for _ in range(5):
            await rig.advance(1)
        assert await rig.bodies() == came
        assert rig.service.behind_messages == 0
    async with rig.running():
        await rig.advance(1)
        assert await rig.bodies() == came
        rig.configuration.apply("timerStopDequeue", "false", "test")
        await rig.advance(2)
        assert await rig.bodies() == [*came, b"late"]
        assert rig.counts == {"Orders": 1}


async def test_a_message_beyond_the_window_rolls(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(timerRollWindowSlot="10")
    async with rig.running():
        await rig.send(b"far", 42_000)
        for _ in range(41):
            await rig.advance(1)
        await rig.advance(0.999)
        assert await rig.bodies() == []
        await rig.advance(0.001)
        (found,) = await rig.delivered()
        rolled = await rig.delivered(TIMER_TOPIC)
        assert len(rolled) > 2
        assert found.properties["TIMER_ROLL_TIMES"] == str(len(rolled) - 1)
        assert {one.properties["TIMER_OUT_MS"] for one in rolled} == {found.properties["TIMER_OUT_MS"]}
        assert rig.service.metrics.counts["Orders"].count == 0


# -- starts


@pytest.mark.parametrize("ending", [None, *Loss])
async def test_a_start_after_slots_became_due(ending: Loss | None, autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(flushDiskType="SYNC_FLUSH")
    async with rig.running(ending=ending):
        for number in range(20):
            await rig.send(b"%d" % number, 3_000 + number * 500)
        await rig.advance(6)
        await rig.advance(1.5)
        before = await rig.bodies()
        assert before
    rig.clock.advance(60)
    async with rig.running():
        assert sorted(set(await rig.bodies()), key=int) == [b"%d" % number for number in range(20)]
        if ending is None:
            assert len(await rig.bodies()) == 20
        await rig.advance(5)
    async with rig.running():
        await rig.advance(60)
        if ending is None:
            assert len(await rig.bodies()) == 20
        assert all(one.store_timestamp >= int(one.properties["TIMER_OUT_MS"]) for one in await rig.delivered())


async def test_a_stop_during_a_checkpoint(autojump_clock: trio.testing.MockClock) -> None:
    """It waits for the commit log's sync, as it does in most stops of a broker that is busy."""
    rig = Rig()
    async with rig.running():
        await rig.send(b"x", 60_000)
        await rig.settled()
        flush, under_way = rig.store.flush, trio.Event()

        async def takes_long() -> bool:
            under_way.set()
            with trio.CancelScope(shield=True):  # a sync in a thread
                await trio.sleep(0.05)
            return await flush()

        rig.store.flush = takes_long  # type: ignore[method-assign]
        rig.clock.advance(1)
        await under_way.wait()
        rig.store.flush = flush  # type: ignore[method-assign]
    async with rig.running():
        assert rig.service.pending == 1
        await rig.advance(61)
        assert await rig.bodies() == [b"x"]


@pytest.mark.parametrize(("precision", "outage"), [(1000, 8 * DAY), (100, 3 * DAY), (1000, 40 * DAY)])
@pytest.mark.parametrize("ending", [None, Loss.ALL])
async def test_an_outage_loses_nothing(
    precision: int, outage: int, ending: Loss | None, autojump_clock: trio.testing.MockClock
) -> None:
    """The retention is a day: all log files are older than that when the broker comes back.

    Some messages are in the wheel, and some are only in the timer's queue.
    """
    rig = Rig(
        slots=SLOTS,
        timerPrecisionMs=precision,
        fileReservedTime=24,
        deleteWhen="0;1;2;3;4;5;6;7;8;9;10;11;12;13;14;15;16;17;18;19;20;21;22;23",
        flushDiskType="SYNC_FLUSH",
    )
    bodies = [b"%03d" % number + bytes(b"x" * 1500) for number in range(200)]
    async with rig.running(ending=ending):
        for number, body in enumerate(bodies):
            if number == 120:
                rig.configuration.apply("timerStopEnqueue", "true", "test")
            await rig.send(body, 10_000 + number % 50 * 4_000_000)  # up to 54 hours
        await rig.advance(2)
        await rig.advance(2)
        assert rig.service.behind_messages >= 80
        assert len(rig.store.files.files) > 3
    rig.configuration.apply("timerStopDequeue", "true", "test")
    rig.clock.advance(outage)
    async with rig.running():
        # The cleaner looks before anything is delivered or has entered the wheel.
        await rig.store._clean.look()
        await rig.store.delete_expired_now()
        assert rig.store.min_phy_offset == 0
        assert rig.store.log_holds.files_held == len(rig.store.files.files) - 1
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        rig.configuration.apply("timerStopDequeue", "false", "test")
        await rig.send(b"new", 6 * DAY * 1000 if precision == 1000 else 20 * HOUR * 1000)
        await rig.store.delete_expired_now()
        await rig.advance(61)
        assert sorted(await rig.bodies()) == sorted(bodies)
        await rig.store._clean.look()
        assert rig.store.min_phy_offset > 0  # now the old files could go
        assert rig.service.puts.deleted == 0


async def test_a_pending_message_outlives_the_retention(autojump_clock: trio.testing.MockClock) -> None:
    """The cleaner deletes files of the log by age: not those from the first pending message on."""
    rig = Rig(slots=16_384, fileReservedTime=1, deleteWhen=";".join(map(str, range(24))))
    async with rig.running():
        for number in range(30):
            await rig.store_one(message(b"old %d" % number + b"x" * 3000, "Other"))
        await rig.send(b"pending", 5_400_000)
        for number in range(60):
            await rig.store_one(message(b"new %d" % number + b"x" * 3000, "Other"))
        assert len(rig.store.files.files) == 5
        await rig.advance(HOUR * 1.4)
        await rig.store._clean.look()
        assert rig.store.min_phy_offset == 64 * 1024
        assert rig.store.log_holds.files_held == 3
        await rig.advance(HOUR * 0.2)
        assert await rig.bodies() == [b"pending"]
        await rig.advance(1)  # a checkpoint that does not need it
        await rig.store._clean.look()
        assert rig.store.min_phy_offset == 4 * 64 * 1024


@pytest.mark.parametrize("in_wheel", [True, False])
async def test_a_delivered_message_is_held_until_a_checkpoint_knows_that(
    *, in_wheel: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """The copy may not be on disk yet: after a power cut the message is delivered from its old place."""
    hours = ";".join(map(str, range(24)))
    rig = Rig(slots=16_384, fileReservedTime=1, deleteWhen=hours, timerFlushIntervalMs=1_000_000_000)
    async with rig.running(ending=Loss.ALL):
        await rig.send(b"first", 5_000)
        await rig.advance(6)
        assert await rig.timers.save(rig.store.flush, rig.clock.wall_ms())
        rig.configuration.apply("timerStopEnqueue", str(not in_wheel).lower(), "test")
        await rig.send(b"pending", 5_400_000)
        for number in range(60):
            await rig.store_one(message(b"%d" % number + b"x" * 3000, "Other"))
        await rig.advance(10)
        assert await rig.store.flush()
        if in_wheel:
            assert await rig.timers.save(rig.store.flush, rig.clock.wall_ms())
        await rig.advance(HOUR * 2)
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        await rig.advance(1)
        assert b"pending" in await rig.bodies()
        await rig.store._clean.look()
        assert rig.store.min_phy_offset == 0
    async with rig.running():
        assert b"pending" in await rig.bodies()


async def test_overdue_slots_come_before_messages_that_need_their_places(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """After 14 days the place of an overdue slot is that of a new message's slot."""
    rig = Rig(slots=256)
    async with rig.running(ending=Loss.ALL):
        await rig.send(b"overdue", 20_000)
        await rig.advance(2)
        await rig.advance(2)
    rig.clock.advance(256)
    rig.configuration.apply("timerStopDequeue", "true", "test")
    async with rig.running():
        await rig.send(b"new", 20_000)  # the same place, one turn later
        await rig.advance(1)
        assert rig.service.behind_messages == 1  # it waits in the queue
        assert await rig.bodies() == []
        rig.configuration.apply("timerStopDequeue", "false", "test")
        await rig.advance(1)
        assert await rig.bodies() == [b"overdue"]
        await rig.advance(20)
        assert await rig.bodies() == [b"overdue", b"new"]


@pytest.mark.parametrize("damage", [None, "gone", "unreadable", "older"])
async def test_counts_that_may_not_fit_are_made_again(
    damage: str | None, autojump_clock: trio.testing.MockClock
) -> None:
    """After a kill, and where the file is lost or does not fit the wheel."""
    rig = Rig()
    async with rig.running(ending=Loss.NOTHING if damage is None else None):
        await rig.send(b"1", 60_000)
        await rig.send(b"2", 60_000, "Payments")
        await rig.advance(1)
        await rig.advance(1)
        older = rig.disk.content("/store/config/timermetrics")
        await rig.send(b"3", 60_000)
        await rig.send(b"-", 60_000, "Payments", TIMER_DEL_UNIQKEY="2")
        await rig.send(b"4", 600_000, "Payments")
        if damage is not None:
            await rig.advance(1)
            await rig.advance(1)
    if damage is not None:
        for name in ("timermetrics", "timermetrics.bak"):
            path = f"/store/config/{name}"
            if rig.disk.stat(path) is not None:
                rig.disk.delete(path)
            if damage != "gone":
                fd = rig.disk.create(path, 0)
                rig.disk.pwrite(fd, older if damage == "older" else b'{"timingCount": 7}', 0)
                rig.disk.close(fd)
    async with rig.running():
        await rig.advance(1)
        assert rig.counts == {"Orders": 2, "Payments": 1}
        assert rig.service.metrics.total == rig.timers.wheel.count == 3
        await rig.advance(70)
        assert await rig.bodies() == [b"1", b"3"]
        assert rig.counts == {"Payments": 1}
        await rig.advance(600)
        assert rig.counts == {}
        assert rig.service.metrics.total == 0


async def test_counts_whose_sum_fits_are_made_again_after_a_kill(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"1", 60_000)
        await rig.advance(1)
        await rig.advance(1)
    fd = rig.disk.open("/store/config/timermetrics")
    text = rig.disk.pread(fd, 1000, 0).replace(b"Orders", b"Foreig")
    rig.disk.pwrite(fd, text, 0)
    rig.disk.data_sync(fd)
    rig.disk.close(fd)
    async with rig.running(ending=Loss.ALL):
        assert rig.counts == {"Foreig": 1}  # it is believed after an orderly stop
    async with rig.running():
        assert rig.counts == {"Orders": 1}


async def test_a_deleted_topic_counts_in_the_sum_as_long_as_its_messages_wait(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"1", 5_000)
        await rig.settled()
        rig.service.metrics.remove("Orders")
        rig.service.metrics.remove("Unknown")
        assert (rig.service.metrics.counts, rig.service.metrics.total) == ({}, 1)
        await rig.advance(6)
        assert (rig.service.metrics.counts, rig.service.metrics.total) == ({}, 0)
        await rig.send(b"2", 5_000)
        await rig.settled()
        rig.service.metrics.remove("Orders")
        await rig.send(b"3", 5_000)  # the topic exists again
        await rig.settled()
        assert rig.counts == {"Orders": 2}


# -- recalls and crashes


def counted(rig: Rig) -> int:
    """The number of waiting messages according to the counts of topics."""
    return sum(one.count for one in rig.service.metrics.counts.values())


@pytest.mark.parametrize("outage", [0, 60, 40 * DAY])
@pytest.mark.parametrize("ending", [Loss.ALL, Loss.NOTHING])
@pytest.mark.parametrize("with_topic", ["false", "true"])
async def test_a_recall_that_no_checkpoint_has(
    ending: Loss, outage: float, with_topic: str, autojump_clock: trio.testing.MockClock
) -> None:
    """The overdue slots are delivered before the mark enters the wheel."""
    rig = Rig(flushDiskType="SYNC_FLUSH", appendTopicForTimerDeleteKey=with_topic)
    async with rig.running(ending=ending):
        for name in (b"recalled", b"kept", b"other"):
            await rig.send(name, 20_000)
        await rig.advance(2)
        await rig.advance(2)
        await rig.recall(b"recalled", NOW + 19_000)
        await rig.recall(b"other", NOW + 18_000)  # not the slot of that message
    rig.clock.advance(outage)
    async with rig.running():
        assert rig.timers.checkpoint.queue_offset == 3
        await rig.advance(17)
        assert await rig.bodies() == [b"kept", b"other"]
        assert rig.service.puts.cancelled == 1
        await rig.advance(1)
        assert counted(rig) == 0


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_power_cut_while_the_checkpoint_after_a_recall_is_written(
    loss: Loss, autojump_clock: trio.testing.MockClock
) -> None:
    """The wheel is written before the checkpoint. It must not forget a mark whose message is in the queue as a copy."""
    rig = Rig(flushDiskType="SYNC_FLUSH", timerRollWindowSlot="10", timerFlushIntervalMs=500)
    async with rig.running():
        await rig.send(b"recalled", 42_000)
        await rig.send(b"kept", 42_000)
        for _ in range(32):
            await rig.advance(1)
        await rig.recall(b"recalled", NOW + 41_000)
        await rig.settled()
        # The messages roll once more, the mark does not.
        assert [slot.messages for slot in rig.timers.wheel.all_slots()] == [2, -1]
    rig.clock.advance(60)
    before, wall = rig.disk, rig.clock.wall_ms()
    for cut_at in count(1):
        rig.disk = before.copy()
        rig.clock.set_wall_ms(wall)
        rig.disk.loss, rig.disk.cut_at = loss, cut_at
        is_over = False
        try:
            async with rig._running():
                await rig.advance(2)
                is_over = True
        except* PowerCut:
            pass
        rig.disk = rig.disk.power_cut(loss)
        async with rig.running():
            await rig.advance(60)
            assert set(await rig.bodies()) == {b"kept"}, cut_at
        if is_over:
            break
    assert cut_at > 30


@pytest.mark.parametrize("flush_ms", [500, 30_000])
@pytest.mark.parametrize("recalled_after", [1, 11, 25, 38])
@pytest.mark.parametrize("ended_after", [0, 1, 6])
@pytest.mark.parametrize("ending", [None, Loss.ALL, Loss.NOTHING])
async def test_a_recall_of_a_message_that_rolls(
    ending: Loss | None, ended_after: int, recalled_after: int, flush_ms: int, autojump_clock: trio.testing.MockClock
) -> None:
    """The outage has both the times at which message or mark roll, and that at which they are due."""
    rig = Rig(flushDiskType="SYNC_FLUSH", timerRollWindowSlot="10", timerFlushIntervalMs=flush_ms)
    async with rig.running(ending=ending):
        await rig.send(b"recalled", 42_000)
        await rig.send(b"kept", 42_000)
        for _ in range(recalled_after):
            await rig.advance(1)
        await rig.recall(b"recalled", NOW + 41_000)
        for _ in range(min(ended_after, 41 - recalled_after)):
            await rig.advance(1)
    rig.clock.advance(60)
    async with rig.running():
        await rig.advance(60)
        assert await rig.bodies() == [b"kept"]
        assert rig.timers.is_empty
        assert not rig.timers.is_between


@pytest.mark.parametrize("ending", [None, Loss.ALL])
async def test_a_mark_that_is_reached_before_the_rolled_copy(
    ending: Loss | None, autojump_clock: trio.testing.MockClock
) -> None:
    """A crash between the two: no checkpoint may say that the mark is done."""
    rig = Rig(flushDiskType="SYNC_FLUSH", timerRollWindowSlot="10")
    async with rig.running(ending=Loss.ALL):
        await rig.send(b"recalled", 15_000)
        await rig.advance(5)
        await rig.recall(b"recalled", NOW + 14_000)  # in the slot in which it is due; the message rolls before that
        await rig.advance(2)
        await rig.advance(2)
    rig.clock.advance(60)
    rig.configuration.apply("timerStopEnqueue", "true", "test")
    async with rig.running(ending=ending):
        for _ in range(4):
            await rig.advance(1)
        assert rig.service.behind_messages == 1
        assert rig.timers.is_empty
    rig.configuration.apply("timerStopEnqueue", "false", "test")
    async with rig.running():
        for _ in range(4):
            await rig.advance(1)
        assert await rig.bodies() == []
        assert (rig.service.behind_messages, rig.timers.is_between) == (0, False)
        assert rig.timers.checkpoint.queue_offset == 3


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_mark_that_comes_between_the_end_of_its_slot_and_the_delivery(
    *, at_once: bool, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"recalled", 5_000)
        await rig.send(b"kept", 5_000)
        await rig.settled()
        for name in ("timerStopEnqueue", "timerStopDequeue"):
            rig.configuration.apply(name, "true", "test")
        await rig.recall(b"recalled", NOW + 4_000)
        await rig.advance(40 * DAY)
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        if not at_once:
            await rig.advance(1)
            assert rig.service.behind_messages == 0
        rig.configuration.apply("timerStopDequeue", "false", "test")
        await rig.advance(1)
        assert await rig.bodies() == [b"kept"]
        assert rig.service.metrics.counts["Orders"].count == 0


async def test_a_message_and_its_mark_that_are_found_when_both_are_due(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(timerStopEnqueue="true")
    async with rig.running():
        await rig.send(b"recalled", 5_000)
        await rig.send(b"kept", 5_000)
        await rig.recall(b"recalled", NOW + 4_000)
        await rig.advance(10)
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        await rig.advance(1)
        assert await rig.bodies() == [b"kept"]
        assert counted(rig) == 0


async def test_a_mark_that_comes_while_its_message_rolls(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Its place in the queue is before the rolled copy, and both are read when they are due."""
    monkeypatch.setattr(timer_enqueue, "_READS", 1)
    monkeypatch.setattr(timer_ahead, "_MAX_COUNT", 1)
    rig = Rig(timerRollWindowSlot="10")
    async with rig.running():
        await rig.send(b"recalled", 15_000)
        await rig.advance(5)
        rig.configuration.apply("timerStopEnqueue", "true", "test")
        due = rig.timers.due

        async def recall_first(slot: Any) -> Any:
            await rig.recall(b"recalled", NOW + 14_000)
            return await due(slot)

        with monkeypatch.context() as patched:
            patched.setattr(rig.timers, "due", recall_first)
            await rig.advance(6)
        assert rig.service.behind_messages == 2
        await rig.advance(30)
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        await rig.advance(1)
        assert await rig.bodies() == []


@pytest.mark.parametrize("flush_ms", [500, 100_000])
@pytest.mark.parametrize("ended_after", [1, 8, 10, 11, 12, 21, 22, 31, 39, 41, 42, 43])
@pytest.mark.parametrize("ending", [None, Loss.ALL, Loss.NOTHING])
async def test_a_start_repeats_no_roll(
    ending: Loss | None, ended_after: int, flush_ms: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Without a checkpoint all steps are repeated, but for the rolls whose copies are in the queue."""
    rig = Rig(flushDiskType="SYNC_FLUSH", timerRollWindowSlot="10", timerFlushIntervalMs=flush_ms)
    async with rig.running(ending=ending):
        await rig.send(b"far", 42_000)
        for _ in range(ended_after):
            await rig.advance(1)
        before = len(await rig.bodies())
    async with rig.running(ending=ending):
        await rig.settled()
    async with rig.running():
        for _ in range(45):
            await rig.advance(1)
        rolls = [one.properties.get("TIMER_ROLL_TIMES", "0") for one in await rig.delivered(TIMER_TOPIC)]
        assert rolls == [str(number) for number in range(len(rolls))]
        assert len(rolls) > 2
        copies = await rig.bodies()
        assert copies == [b"far"] * max(1, len(copies))
        assert len(copies) <= (1 + 2 * before if ending is not None else 1)
        assert counted(rig) == 0


@pytest.mark.parametrize("checkpoint", [True, False])
async def test_equal_messages_whose_rolls_were_lost_in_part(
    *, checkpoint: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """Two messages that nothing tells apart, and one rolled copy: the other one is rolled again."""
    rig = Rig(flushDiskType="SYNC_FLUSH", timerRollWindowSlot="10", timerFlushIntervalMs=100_000)
    async with rig.running(ending=Loss.ALL):
        for _ in range(2):
            await rig.send(b"same", 15_000)
        await rig.settled()
        if checkpoint:
            assert await rig.timers.save(rig.store.flush, rig.clock.wall_ms())
        rig.refuse = {b"same": [BUSY]}
        for _ in range(11):
            await rig.advance(1)
        assert len(await rig.delivered(TIMER_TOPIC)) == 3  # the other one waits for its next attempt
    async with rig.running():
        for _ in range(20):
            await rig.advance(1)
        assert await rig.bodies() == [b"same"] * 2


@pytest.mark.parametrize("reads", range(1, 7))
async def test_a_record_that_cannot_be_read_once(
    reads: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """At any read: it is tried again, and no other message of its slot comes twice or rolls twice."""
    rig = Rig(timerRollWindowSlot="10")
    async with rig.running():
        await rig.send(b"recalled", 30_000)
        await rig.send(b"kept", 30_000)
        await rig.send(b"mark", 30_000, UNIQ_KEY="recalled", TIMER_DEL_UNIQKEY="recalled")  # rolls in the same slot
        await rig.settled()
        read, left = rig.service.puts._read, [reads]

        async def fail(*place: int) -> Any:
            left[0] -= 1
            if not left[0]:
                raise OSError(errno.EIO, "broken")
            return await read(*place)

        monkeypatch.setattr(rig.service.puts, "_read", fail)
        rig.clock.advance(60)
        for _ in range(5):
            await rig.advance(0.1)
        assert left[0] <= 0
        assert await rig.bodies() == [b"kept"]
        assert [one.body for one in await rig.delivered(TIMER_TOPIC)].count(b"kept") == 2
        assert counted(rig) == 0


async def test_an_error_between_the_slots_of_a_message_and_its_mark(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """The mark's slot is tried again before the rolled copy of the message is read."""
    rig = Rig(timerRollWindowSlot="10")
    async with rig.running():
        await rig.send(b"recalled", 15_000)
        await rig.advance(5)
        await rig.recall(b"recalled", NOW + 14_000)
        await rig.settled()
        find, failures = rig.timers.due, [None, OSError(errno.EIO, "broken")]

        async def fail(slot: Any) -> Any:
            if failures and (error := failures.pop(0)) is not None:
                raise error
            return await find(slot)

        monkeypatch.setattr(rig.timers, "due", fail)
        for _ in range(5):
            await rig.advance(12 if failures else 0.1)
        assert not failures
        assert await rig.bodies() == []
        assert rig.service.puts.cancelled == 1


async def test_a_rolled_copy_that_the_checkpoint_counts_as_rolled(autojump_clock: trio.testing.MockClock) -> None:
    """Its message is not in the wheel any more: the copy is not taken for a message that has rolled."""
    rig = Rig(flushDiskType="SYNC_FLUSH", timerRollWindowSlot="10")
    async with rig.running(ending=Loss.ALL):
        await rig.send(b"far", 42_000)
        await rig.advance(2)
        await rig.advance(2)
    rig.clock.advance(10)
    rig.configuration.apply("timerStopEnqueue", "true", "test")
    async with rig.running(ending=Loss.ALL):
        assert await rig.timers.save(rig.store.flush, rig.clock.wall_ms())
        assert (rig.timers.is_empty, rig.service.behind_messages) == (True, 1)
    rig.configuration.apply("timerStopEnqueue", "false", "test")
    async with rig.running():
        for _ in range(45):
            await rig.advance(1)
        assert await rig.bodies() == [b"far"]


async def test_an_equal_message_that_rolls_after_the_checkpoint(autojump_clock: trio.testing.MockClock) -> None:
    """The copy of the first, which the checkpoint counts as rolled, is not taken for that of the second."""
    rig = Rig(flushDiskType="SYNC_FLUSH", timerRollWindowSlot="10")
    async with rig.running(ending=Loss.ALL):
        await rig.send(b"same", 21_000)
        for _ in range(3):
            await rig.advance(1)
        await rig.send(b"same", 18_000)
        await rig.advance(1)
        rig.configuration.apply("timerStopEnqueue", "true", "test")
        for _ in range(8):
            await rig.advance(1)
        await rig.advance(0.6)
        assert len(await rig.delivered(TIMER_TOPIC)) == 3
        assert rig.timers.checkpoint.read_time == NOW + 12_000
    async with rig.running():
        for _ in range(5):
            await rig.advance(1)
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        for _ in range(15):
            await rig.advance(1)
        assert await rig.bodies() == [b"same"] * 2


async def test_more_recalls_and_rolls_ahead_than_are_remembered(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(timer_ahead, "MOST_MARKS", 2)
    monkeypatch.setattr(timer_ahead, "MOST_ROLLS", 1)
    monkeypatch.setattr(timer_ahead, "_MAX_COUNT", 1)
    rig = Rig(flushDiskType="SYNC_FLUSH", timerRollWindowSlot="10", timerFlushIntervalMs=100_000)
    async with rig.running(ending=Loss.ALL):
        for number in range(6):
            await rig.send(b"%d" % number, 5_000)
        for number in range(3):
            await rig.send(b"far %d" % number, 30_000)
        await rig.settled()
        assert await rig.timers.save(rig.store.flush, rig.clock.wall_ms())
        rig.configuration.apply("timerStopDequeue", "true", "test")
        for number in range(4):
            await rig.recall(b"%d" % number, NOW + 4_000)
    rig.configuration.apply("timerStopDequeue", "false", "test")
    rig.clock.advance(6)
    async with rig.running(ending=Loss.ALL):
        assert await rig.bodies() == [b"2", b"3", b"4", b"5"]
        for _ in range(5):
            await rig.advance(1)
    monkeypatch.setattr(timer_ahead, "MOST_MARKS", 100)
    async with rig.running():
        for _ in range(40):
            await rig.advance(1)
        assert {b"far 0", b"far 1", b"far 2"} < set(await rig.bodies())
        rolled = [one.properties.get("TIMER_ROLL_TIMES") for one in await rig.delivered(TIMER_TOPIC)]
        assert rolled.count("1") == 3 + 2


@pytest.mark.parametrize(
    "topic",
    [
        "",
        " ",
        "rmq_sys_wheel_timer",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "SCHEDULE_TOPIC_XXXX",
        "../config",
        "a b",
        "x" * 128,
    ],
)
async def test_a_real_topic_that_no_client_may_send_to(topic: str, autojump_clock: trio.testing.MockClock) -> None:
    """RocketMQ lets a client write to the timer's topic, so a store may have such messages."""
    rig = Rig(timerRollWindowSlot="10")
    async with rig.running():
        await rig.send(b"foreign", 2_000, topic)
        await rig.send(b"foreign, far", 12_000, topic)
        await rig.send(b"own", 2_000)
        await rig.store_one(message(b"no time", TIMER_TOPIC, properties=b"REAL_TOPIC\x01Orders\x02"))
        for _ in range(14):
            await rig.advance(1)
        assert await rig.bodies() == [b"own"]
        assert rig.service.puts.dropped == 2
        assert set(rig.store.topics()) == {TIMER_TOPIC, "Orders"}
        (note,) = timer_notes(rig.service)
        assert note.code == "timed_messages_lost"


@pytest.mark.parametrize("queue", ["", "x", "-1", "99999999999"])
async def test_a_real_queue_that_is_none(queue: str, autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"x", 2_000, REAL_QID=queue)
        await rig.advance(3)
        assert await rig.bodies() == [b"x"]


async def test_a_recall_in_the_same_batch_as_its_overdue_message(autojump_clock: trio.testing.MockClock) -> None:
    """Both waited in the queue while the timer was behind."""
    rig = Rig(timerStopEnqueue="true")
    async with rig.running():
        await rig.send(b"recalled", 3_000)
        await rig.send(b"kept", 3_000)
        await rig.recall(b"recalled", NOW + 2_000)
        await rig.advance(10)
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        await rig.advance(1)
        assert await rig.bodies() == [b"kept"]
        assert (rig.service.puts.cancelled, rig.counts, rig.timers.wheel.count) == (1, {}, 0)


# -- clocks


async def test_a_clock_that_is_set_back(autojump_clock: trio.testing.MockClock) -> None:
    """Messages sent by the corrected clock come by it, and none that is delivered comes again."""
    rig = Rig()
    async with rig.running():
        rig.clock.set_wall_ms(NOW + HOUR * 1000)
        await rig.send(b"ahead", 2_000)
        await rig.advance(3)
        assert await rig.bodies() == [b"ahead"]
        rig.clock.set_wall_ms(NOW)
        await rig.send(b"now", 5_000)
        await rig.advance(4.9)
        await rig.advance(0.2)
        assert await rig.bodies() == [b"ahead", b"now"]
        for _ in range(4):
            await rig.advance(HOUR / 3)
        assert await rig.bodies() == [b"ahead", b"now"]
    async with rig.running():
        await rig.advance(HOUR)
        assert await rig.bodies() == [b"ahead", b"now"]


@pytest.mark.parametrize("ending", [None, Loss.NOTHING, Loss.ALL])
async def test_a_clock_that_is_set_back_while_nothing_is_delivered(
    ending: Loss | None, autojump_clock: trio.testing.MockClock
) -> None:
    """The slots between the two times are not counted as delivered by the checkpoint."""
    rig = Rig(flushDiskType="SYNC_FLUSH")
    async with rig.running(ending=ending):
        rig.clock.set_wall_ms(NOW + HOUR * 1000)
        await rig.send(b"ahead", 2_000)
        await rig.advance(3)
        assert await rig.bodies() == [b"ahead"]
        rig.configuration.apply("timerStopDequeue", "true", "test")
        rig.clock.set_wall_ms(NOW)
        await rig.send(b"now", 50_000)
        await rig.advance(2)
        await rig.advance(2)
        assert rig.timers.checkpoint.queue_offset == 2
    rig.configuration.apply("timerStopDequeue", "false", "test")
    async with rig.running():
        await rig.advance(47)
        assert await rig.bodies() == [b"ahead", b"now"]


@pytest.mark.parametrize("ending", [None, Loss.ALL])
async def test_a_clock_that_is_set_back_before_a_checkpoint_and_the_end(
    ending: Loss | None, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """The end comes when the first message by the corrected clock has entered the wheel."""
    rig = Rig(flushDiskType="SYNC_FLUSH")
    async with rig.running(ending=ending):
        rig.clock.set_wall_ms(NOW + HOUR * 1000)
        await rig.send(b"ahead", 2_000)
        await rig.advance(3)
        await rig.advance(2)
        rig.clock.set_wall_ms(NOW)
        attempt = rig.service._attempt

        async def end_when_it_is_in(step: Any) -> bool | None:
            if rig.timers.next_offset == 2:
                assert await rig.timers.save(rig.store.flush, rig.clock.wall_ms())
                rig.service._stopping = True
            return await attempt(step)

        monkeypatch.setattr(rig.service, "_attempt", end_when_it_is_in)
        await rig.send(b"now", 50_000)
        await rig.settled()
        assert rig.timers.checkpoint.queue_offset == 2
    async with rig.running():
        await rig.advance(51)
        assert await rig.bodies() == [b"ahead", b"now"]


@pytest.mark.parametrize("back", [60, 199, 200, 201, 240, 5000])
async def test_a_clock_that_is_set_back_by_most_of_the_wheel(back: int, autojump_clock: trio.testing.MockClock) -> None:
    """The place of a message may then be that of one which is due a whole turn later.

    It gets an earlier one and rolls. Where all before it are taken, it waits in the queue, and others behind it.
    """
    rig = Rig(slots=256)
    async with rig.running():
        for number in range(40):
            await rig.send(b"far %d" % number, 50_000 + number * 1000)
        await rig.advance(1)
        rig.clock.set_wall_ms(NOW - back * 1000)
        await rig.advance(2)
        start = rig.clock.wall_ms()
        due = {}
        for after in range(1, 102, 4):
            due[b"near %d" % after] = start + after * 1000
            await rig.send(b"near %d" % after, after * 1000)
        came: dict[bytes, int] = {}
        for _ in range(110):
            before = len(rig.put)
            await rig.advance(1)
            came |= {body: rig.clock.wall_ms() for body in rig.put[before:]}  # the last time is that of the delivery
        assert rig.service.behind_messages == 0
        assert {body: late for body in due if not 0 <= (late := came[body] - due[body]) <= 10_000} == {}
        for _ in range((back + 100) // 10):
            await rig.advance(10)
        assert sorted(await rig.bodies()) == sorted([*due, *(b"far %d" % number for number in range(40))])
        assert (rig.timers.wheel.count, rig.counts) == (0, {})


async def test_a_clock_that_is_set_ahead(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"x", HOUR * 1000)
        await rig.settled()
        rig.clock.set_wall_ms(NOW + HOUR * 1000)
        await rig.advance(1)
        assert await rig.bodies() == [b"x"]


# -- refusals


async def test_one_failed_put_does_not_repeat_the_others(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        for number in range(6):
            await rig.send(b"%d" % number, 2_000)
        await rig.send(b"next", 3_000)
        rig.refuse = {b"2": [BUSY, BUSY], b"4": [BUSY]}
        await rig.advance(2)
        assert await rig.bodies() == [b"0", b"1", b"3", b"5"]
        await rig.advance(0.1)
        assert await rig.bodies() == [b"0", b"1", b"3", b"5", b"4"]
        await rig.advance(0.2)
        assert await rig.bodies() == [b"0", b"1", b"3", b"5", b"4", b"2"]
        assert sorted(rig.put) == [b"0", b"1", b"2", b"2", b"2", b"3", b"4", b"4", b"5"]
        await rig.advance(1)
        assert (await rig.bodies())[6:] == [b"next"]


async def test_a_store_that_takes_nothing_is_asked_once_a_pause(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        for number in range(50):
            await rig.send(b"%02d" % number, 2_000)
        rig.refuse = {b"00": [AWAY] * 4}
        await rig.advance(2)
        assert rig.put == [b"00"]
        for seconds in (0.1, 0.2, 0.4):
            await rig.advance(seconds)
        assert rig.put == [b"00"] * 4
        await rig.advance(0.8)
        assert await rig.bodies() == [b"%02d" % number for number in range(50)]


async def test_a_message_that_no_store_takes_is_dropped(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        for name in (b"a", b"b", b"c"):
            await rig.send(name, 2_000)
        rig.refuse = {b"b": [ILLEGAL]}
        await rig.advance(3)
        assert await rig.bodies() == [b"a", b"c"]
        assert rig.service.puts.dropped == 1
        assert rig.service.metrics.counts["Orders"].count == 0


@pytest.mark.parametrize("skip", [True, False])
async def test_unknown_errors(*, skip: bool, autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(timerSkipUnknownError=str(skip).lower())
    async with rig.running():
        for name in (b"a", b"b"):
            await rig.send(name, 2_000)
        rig.refuse = {b"a": [UNKNOWN]}
        await rig.advance(3)
        await rig.advance(1)
        assert sorted(await rig.bodies()) == ([b"b"] if skip else [b"a", b"b"])


async def test_a_stop_during_refusals_delivers_after_the_start(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        for name in (b"a", b"b"):
            await rig.send(name, 2_000)
        rig.refuse = {b"a": [AWAY] * 99}
        await rig.advance(2)
        with trio.fail_after(60):
            await rig.service.stop()
    rig.refuse = {}
    async with rig.running():
        assert await rig.bodies() == [b"a", b"b"]


async def test_a_stop_does_not_wait_for_a_slot_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    monkeypatch.setattr(timer_put, "_STOP_SECONDS", 0.0)
    monkeypatch.setattr(timer_put, "_SLICE_SECONDS", 0.0)
    async with rig.running():
        for number in range(50):
            await rig.send(b"%02d" % number, 2_000)
        put = rig.store.put_message

        def stop_after_ten(inner: Any, done: Any) -> Any:
            if len(rig.put) == 10:
                rig.service.puts.stop()
            return put(inner, done)

        rig.store.put_message = stop_after_ten
        await rig.advance(2)
        assert rig.timers.wheel.count == 50
    async with rig.running():
        assert sorted(await rig.bodies()) == [b"%02d" % number for number in range(50)]


@pytest.mark.parametrize("method", ["create", "pwrite"])
async def test_a_disk_that_takes_no_units(method: str, autojump_clock: trio.testing.MockClock) -> None:
    """The message stays in the queue and enters the wheel later."""
    rig = Rig()
    async with rig.running():
        await rig.send(b"x", 5_000)
        await rig.settled()
        assert rig.timers.wheel.count == 1
        while method == "create" and fits(rig.timers.log.end % 4096, 4096):  # the next unit needs a new file
            await rig.send(b"fill", 5_000)
            await rig.settled()
        rig.disk.fail(method, errno.ENOSPC)
        await rig.send(b"y", 5_000)
        await rig.settled()
        assert not rig.disk.pending_failures()
        assert rig.service.behind_messages == 1
        await rig.advance(0.1)
        assert rig.service.behind_messages == 0
        await rig.advance(6)
        assert (await rig.bodies())[-1] == b"y"


async def test_an_error_that_is_not_expected(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"x", 2_000)
        await rig.settled()
        find = rig.timers.wheel.find
        failures = [RuntimeError("?")]

        def fail(time: int) -> Any:
            if failures:
                raise failures.pop()
            return find(time)

        monkeypatch.setattr(rig.timers.wheel, "find", fail)
        await rig.advance(2)
        assert await rig.bodies() == []
        await rig.advance(0.2)
        assert await rig.bodies() == [b"x"]


# -- records


async def test_a_message_of_maximum_size(autojump_clock: trio.testing.MockClock) -> None:
    """The longest body and the longest properties, which leave no room for the timer's own."""
    rig = Rig(maxMessageSize=40_000, timerRollWindowSlot="10")
    async with rig.running():
        body = b"b" * 20_000
        own = {"TIMER_OUT_MS": str(NOW + 41_000), "REAL_TOPIC": "Orders", "REAL_QID": "0"}
        text = "".join(f"{name}\x01{value}\x02" for name, value in own.items())
        text += "long\x01" + "x" * (32_767 - len(text) - 6) + "\x02"
        await rig.store_one(message(body, TIMER_TOPIC, properties=text.encode()))
        await rig.advance(42)
        (found,) = await rig.delivered()
        assert found.body == body
        assert len(found.properties["long"]) > 32_000


async def test_records_that_were_deleted_are_counted_and_do_not_stop_the_timer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig()
    async with rig.running():
        for number in range(60):
            await rig.send(b"%d" % number + b"x" * 3000, 2_000 + number % 2 * 1000)
        await rig.settled()
        await rig.store._clean.look()
        assert await rig.store.log_holds.lowest() == 0
        first = rig.store.files.files[0]
        lost = await PendingTimers(rig.timers).count(first.start, first.end)
        assert lost == 10
        rig.disk.delete(first.path)
        rig.store.files.remove_first().close()
        await rig.advance(4)
        assert rig.service.puts.deleted == lost
        assert len(await rig.bodies()) == 60 - lost
        (note,) = timer_notes(rig.service)
        assert (note.code, f"{lost} timed messages" in note.text) == ("timed_messages_lost", True)


async def test_a_timer_without_checkpoints_says_so(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "broken")

    rig = Rig()
    async with rig.running():
        await rig.send(b"x", 5_000)
        assert list(timer_notes(rig.service)) == []
        monkeypatch.setattr(rig.timers.log, "sync", fail)
        await rig.advance(1)
        (note,) = timer_notes(rig.service)
        assert note.code == "timer_broken"
        await rig.advance(5)
        assert await rig.bodies() == [b"x"]


async def test_a_queue_whose_first_messages_were_deleted(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(timerStopEnqueue="true")
    async with rig.running():
        for number in range(60):
            await rig.send(b"%d" % number + b"x" * 3000, 20_000)
        await rig.settled()
        rig.disk.delete(rig.store.files.files[0].path)
        rig.store.files.remove_first().close()
        await rig.store._clean._follow()
        lost = rig.store.min_offset(TIMER_TOPIC, 0)
        assert lost > 0
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        await rig.advance(30)
        assert len(await rig.bodies()) == 60 - lost
        assert rig.service.puts.deleted == lost


async def test_records_that_come_from_the_device(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        for number in range(40):
            await rig.send(b"%d" % number + b"x" * 3000, 2_000)
        await rig.send(b"marked", 2_000)
        await rig.send(b"mark", 2_000, TIMER_DEL_UNIQKEY="marked")
        await rig.advance(0.5)
        for file in rig.store.files.files:
            file.in_memory_from = file.size
        rig.disk.cold = True
        await rig.advance(2)
        with trio.fail_after(50):
            while rig.service.puts.delivered < 40:  # noqa: ASYNC110 - reads in threads, and a counter
                await trio.sleep(0.01)
        rig.disk.cold = False
        assert len(await rig.bodies()) == 40
        assert rig.service.puts.cancelled == 1


@pytest.mark.parametrize("window", [10, 3_600])
@pytest.mark.parametrize("topic", ["Orders", "Payments"])
async def test_a_mark_cancels_no_message_of_another_topic(
    topic: str, window: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Who may send to one topic only could make messages of others disappear. At once, and after both have rolled."""
    rig = Rig(timerRollWindowSlot=str(window))
    async with rig.running():
        await rig.send(b"theirs", 15_000)
        await rig.advance(5)
        await rig.send(b"mark", 10_000, topic, UNIQ_KEY="theirs", TIMER_DEL_UNIQKEY="theirs")
        await rig.settled()
        for _ in range(20):
            await rig.advance(1)
        assert await rig.bodies() == ([] if topic == "Orders" else [b"theirs"])
        assert rig.service.puts.cancelled == (topic == "Orders")


async def test_a_mark_ahead_cancels_no_message_of_another_topic(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        assert rig.service._ahead is not None
        key = rig.service._ahead._key
        due = {"TIMER_OUT_MS": str(NOW), "REAL_TOPIC": "Orders"}
        assert key("theirs", due) == key("theirs", dict(due))
        assert key("theirs", due) != key("theirs", due | {"REAL_TOPIC": "Payments"})
