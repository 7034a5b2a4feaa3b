"""The timer's task where files, records and puts fail: nothing comes again and again, nothing waits forever."""

import errno
from collections import Counter
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.broker.services.timer_rig import HOST, NOW, Rig
from tests.store.builders import message
from trimq.broker.health import timer_notes
from trimq.broker.services import timer_put
from trimq.broker.services.stats import BrokerStats
from trimq.broker.store.message_store import MessageStore, TimerStore
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.topic_rules import TIMER_TOPIC

AWAY = PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark="away")


async def _send_late(rig: Rig, *bodies: bytes) -> None:
    """Messages that are due before they enter the wheel, with one behind them that is not."""
    rig.configuration.apply("timerStopEnqueue", "true", "test")
    for body in bodies:
        await rig.send(body, 1_000)
    await rig.send(b"later", 60_000)
    await rig.advance(5)
    rig.configuration.apply("timerStopEnqueue", "false", "test")


def _full(_pieces: Any) -> None:
    raise OSError(errno.ENOSPC, "full")


async def test_a_disk_that_takes_no_units_delivers_nothing_again_and_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Neither what is due already in the same batch, nor because further messages arrive."""
    rig = Rig()
    async with rig.running():
        await rig.send(b"in the wheel", 8_000)
        await rig.settled()
        await _send_late(rig, b"due", b"due too")
        with monkeypatch.context() as patched:
            patched.setattr(rig.timers.log, "write", _full)
            for number in range(20):
                await rig.send(b"%d" % number, 60_000)
                await rig.advance(0.2)
            assert rig.put == [b"in the wheel"]  # its slot is due: it needs no units
        await rig.advance(1)
        assert sorted(rig.put) == [b"due", b"due too", b"in the wheel"]
        assert rig.service.pending == 21
        await rig.advance(70)
        assert len(set(await rig.bodies())) == len(await rig.bodies()) == 24


async def test_a_failure_is_tried_again_after_pauses_that_no_arrival_ends(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"x", 60_000)
        await rig.settled()
        writes = []

        def full(pieces: Any) -> None:
            writes.append(pieces)
            _full(pieces)

        monkeypatch.setattr(rig.timers.log, "write", full)
        with capture_logs() as logs:
            for number in range(50):
                await rig.send(b"%d" % number, 60_000)
                await rig.settled()
            assert len(writes) == 1
            for _ in range(100):
                await rig.advance(0.1)
        assert 10 < len(writes) < 17
        assert 1 <= len([one for one in logs if one["event"] == "timer_files_not_written"]) <= 11


class _BadRecords:
    """Makes reads of some records fail, by their log offsets."""

    def __init__(self, rig: Rig) -> None:
        self.offsets: set[int] = set()
        self.reads = 0
        self.error: Exception = OSError(errno.EIO, "bad sector")
        self._read = rig.service.puts._read
        rig.service.puts._read = self.read  # type: ignore[method-assign]

    async def read(self, offset: int, size: int) -> Any:
        if offset in self.offsets:
            self.reads += 1
            raise self.error
        return await self._read(offset, size)


async def _offsets(rig: Rig) -> list[int]:
    return [one.commit_log_offset for one in await rig.delivered(TIMER_TOPIC)]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad sector"), ValueError("embedded null byte")])
async def test_a_record_that_cannot_be_read_is_lost_after_some_attempts(
    error: Exception, autojump_clock: trio.testing.MockClock
) -> None:
    """The others of its slot come once, at once, and those behind it a little later."""
    rig = Rig()
    async with rig.running():
        bad = _BadRecords(rig)
        bad.error = error
        for number in range(6):
            await rig.send(b"%d" % number, 2_000)
        await rig.send(b"next", 3_000)
        bad.offsets = {(await _offsets(rig))[3]}
        await rig.advance(2)
        assert await rig.bodies() == [b"0", b"1", b"2", b"4", b"5"]
        for _ in range(15):
            await rig.advance(1)
        assert await rig.bodies() == [b"0", b"1", b"2", b"4", b"5"]
        await rig.advance(1)
        await rig.advance(1)
        assert await rig.bodies() == [b"0", b"1", b"2", b"4", b"5", b"next"]
        assert (bad.reads, rig.service.puts.deleted) == (8, 1)
        assert rig.counts == {}
        assert [note.code for note in timer_notes(rig.service)] == ["timed_messages_lost"]


async def test_a_record_that_can_be_read_again_is_delivered(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        bad = _BadRecords(rig)
        for number in range(3):
            await rig.send(b"%d" % number, 2_000)
        bad.offsets = {(await _offsets(rig))[1]}
        await rig.advance(5)
        bad.offsets.clear()
        await rig.advance(7)
        assert await rig.bodies() == [b"0", b"2", b"1"]
        assert rig.service.puts.deleted == 0


async def test_a_put_that_raises_concerns_its_message_only(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    async with rig.running():
        put = rig.store.put_message

        def fail(inner: Any, done: Any) -> Any:
            if bytes(inner.body) == b"1":
                raise ValueError("embedded null byte")
            return put(inner, done)

        monkeypatch.setattr(rig.store, "put_message", fail)
        for number in range(3):
            await rig.send(b"%d" % number, 2_000) if number != 1 else await _put_past(rig, put, b"1")
        for _ in range(20):
            await rig.advance(1)
        assert await rig.bodies() == [b"0", b"2"]
        assert rig.service.puts.deleted == 1


async def _put_past(rig: Rig, put: Any, body: bytes) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rig.store, "put_message", put)
        await rig.send(body, 2_000)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad sector"), ValueError("no record")])
async def test_a_start_with_records_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, error: Exception, autojump_clock: trio.testing.MockClock
) -> None:
    """A record of an overdue slot, the units of that slot, and the timer's log for the counts."""
    rig = Rig()
    async with rig.running():
        for number in range(3):
            await rig.send(b"%d" % number, 2_000)
        await rig.advance(1)
        await rig.advance(0.5)
        bad = (await _offsets(rig))[2]
    for name in rig.disk.list("/store/config"):
        if name.startswith("timermetrics"):
            rig.disk.delete(f"/store/config/{name}")
    rig.clock.advance(100)
    read, due = timer_put.TimerPuts._read, TimerStore.due
    attempts = 0

    async def fail_one(self: Any, offset: int, size: int) -> Any:
        if offset == bad:
            raise error
        return await read(self, offset, size)

    async def fail_twice(self: Any, slot: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts <= 2:
            raise OSError(errno.EIO, "bad sector")
        return await due(self, slot)

    async def fail(_self: Any) -> Any:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(timer_put.TimerPuts, "_read", fail_one)
    monkeypatch.setattr(TimerStore, "due", fail_twice)
    if isinstance(error, OSError):
        monkeypatch.setattr(TimerStore, "counts", fail)
    async with rig.running():
        await rig.send(b"new", 5_000)
        await rig.advance(0.1)
        await rig.advance(0.2)
        assert await rig.bodies() == [b"0", b"1"]
        for _ in range(20):
            await rig.advance(1)
        assert await rig.bodies() == [b"0", b"1", b"new"]


async def test_a_message_of_the_queue_that_cannot_be_read_is_skipped_after_some_attempts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig()
    async with rig.running():
        rig.configuration.apply("timerStopEnqueue", "true", "test")
        for number in range(5):
            await rig.send(b"%d" % number, 20_000)
        await rig.settled()
        cold, asked = rig.store.get_message_cold, []

        async def get(topic: str, queue_id: int, offset: int, count: int, *more: Any) -> Any:
            asked.append((offset, count))
            if offset <= 2 < offset + count:
                raise OSError(errno.EIO, "bad sector")
            return await cold(topic, queue_id, offset, count, *more)

        warm = rig.store.get_message
        rig.store.get_message = lambda *_args: None
        rig.store.get_message_cold = get
        rig.configuration.apply("timerStopEnqueue", "false", "test")
        await rig.advance(0.1)
        assert rig.service.pending == 2  # those before it
        for _ in range(50):
            await rig.advance(0.1)
        assert rig.service.behind_messages == 0
        assert (rig.service.pending, rig.service.puts.deleted) == (4, 1)
        assert asked.count((2, 1)) <= 24
        rig.store.get_message, rig.store.get_message_cold = warm, cold
        await rig.advance(20)
        assert await rig.bodies() == [b"0", b"1", b"3", b"4"]
        assert [note.code for note in timer_notes(rig.service)] == ["timed_messages_lost"]


async def test_a_mark_that_cannot_be_read_at_first_cancels_all_the_same(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        bad = _BadRecords(rig)
        await rig.send(b"recalled", 5_000)
        await rig.send(b"kept", 5_000)
        await rig.settled()
        await rig.recall(b"recalled", NOW + 4_000)
        bad.offsets = {(await _offsets(rig))[2]}
        await rig.advance(5)
        assert await rig.bodies() == []
        bad.offsets.clear()
        await rig.advance(1)
        assert await rig.bodies() == [b"kept"]
        assert rig.service.puts.cancelled == 1


async def test_a_stop_while_a_mark_cannot_be_read_delivers_nothing(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        bad = _BadRecords(rig)
        await rig.send(b"recalled", 5_000)
        await rig.settled()
        await rig.recall(b"recalled", NOW + 4_000)
        bad.offsets = {(await _offsets(rig))[1]}
        await rig.advance(5)
        with trio.fail_after(60):
            await rig.service.stop()
        assert rig.put == []
    async with rig.running():
        assert await rig.bodies() == []
        assert rig.service.puts.cancelled == 1


async def test_many_lost_messages_are_logged_within_a_budget(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        for number in range(200):
            await rig.send(b"%d" % number, 2_000)
        await rig.settled()

        async def gone(_offset: int, _size: int) -> Any:
            return None

        rig.service.puts._read = gone  # type: ignore[method-assign, assignment]
        with capture_logs() as logs:
            for _ in range(200):
                await rig.store_one(message(b"no time", TIMER_TOPIC, properties=b"REAL_TOPIC\x01Orders\x02"))
            await rig.advance(3)
        assert rig.service.puts.deleted == 200
        events = Counter(one["event"] for one in logs)
        assert events["timed_message_lost"] == 20
        assert 0 < events["timer_message_without_time"] <= 20


async def test_a_slot_ends_at_once_where_the_broker_fails(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Its reads, pauses and puts are cancelled; for results of puts it waits a limited time."""
    monkeypatch.setattr(timer_put, "_STOP_SECONDS", 0.5)
    rig = Rig()
    async with rig.running():
        for number in range(10):
            await rig.send(b"%d" % number, 2_000)
        await rig.settled()
        due = await rig.timers.due(rig.timers.wheel.find(NOW + 1_000))  # type: ignore[arg-type]
        puts = timer_put.TimerPuts(rig.configuration, rig.store, rig.clock, BrokerStats(rig.clock, "C"), None, HOST)
        monkeypatch.setattr(rig.store, "put_message", lambda _inner, _done: None)  # its sync never ends
        began = trio.current_time()
        with trio.move_on_after(1) as scope:
            await puts.deliver(due)
        assert scope.cancelled_caught
        assert trio.current_time() - began == pytest.approx(1.5, abs=0.1)
        rig.refuse = {}
        monkeypatch.setattr(rig.store, "put_message", lambda _inner, _done: AWAY)
        with trio.move_on_after(1) as scope:
            await puts.deliver(due)
        assert scope.cancelled_caught
        monkeypatch.undo()


@pytest.mark.parametrize("recalled", [False, True])
async def test_a_record_that_may_not_be_read_yet_is_waited_for(
    recalled: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """After the start of a SYNC_MASTER whose wheel knows it already, until its slaves are there."""
    rig = Rig()
    async with rig.running():
        await rig.send(b"one", 2_000)
        await rig.settled()
        if recalled:
            await rig.recall(b"one", NOW + 1_000)
            await rig.settled()
        with monkeypatch.context() as patched:
            patched.setattr(MessageStore, "readable_offset", 0)
            patched.setattr(MessageStore, "look_own_message", lambda _store, _offset: None)
            patched.setattr(MessageStore, "look_message", lambda _store, _offset: b"")
            for _ in range(30):
                await rig.advance(1)
            assert (rig.service.puts.deleted, rig.put) == (0, [])
        for _ in range(20):
            await rig.advance(1)
        assert await rig.bodies() == ([] if recalled else [b"one"])
        assert rig.service.puts.cancelled == recalled


async def test_a_mark_that_may_not_be_read_yet_delays_no_stop(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"one", 2_000)
        await rig.recall(b"one", NOW + 1_000)
        await rig.settled()
        monkeypatch.setattr(MessageStore, "readable_offset", 0)
        monkeypatch.setattr(MessageStore, "look_own_message", lambda _store, _offset: None)
        monkeypatch.setattr(MessageStore, "look_message", lambda _store, _offset: b"")
        await rig.advance(5)
    assert rig.put == []
    monkeypatch.undo()
    async with rig.running():
        await rig.advance(5)
        assert (await rig.bodies(), rig.service.puts.cancelled) == ([], 1)
