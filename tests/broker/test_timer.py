"""Timed messages through a real broker: sends, delivery, restarts, recalls."""

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.broker.timers import ASYNC, RECALLS, TIMER, Life, all_there, comes, recalled, there, timed
from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.timer.recovery import TimerRecovery
from trimq.broker.store.timer.timer_store import TimerStore
from trimq.broker.store.timer.wheel import TimerWheel
from trimq.broker.unsupported_config import INERT
from trimq.protocol.codes import ResponseCode
from trimq.protocol.timer_layout import decode_checkpoint

PRECISIONS = [1000, 100]


@pytest.mark.parametrize("end", ["", "stop", "kill"])
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("precision", PRECISIONS)
async def test_a_timed_message_comes_on_time(tmp_path: Path, end: str, flush: str, precision: int) -> None:
    life = Life(tmp_path / "store", ASYNC | {"flushDiskType": flush, "timerPrecisionMs": precision})
    async with life.running() as client:
        sent_at = life.clock.wall_ms()
        await timed(client, b"later", 10_500, KEYS="k")
        await life.advance(2)
        (waiting,) = await there(client, TIMER)
        out = int(waiting.properties["TIMER_OUT_MS"])
        assert sent_at + 10_500 - precision <= out < sent_at + 10_500
        assert waiting.properties["REAL_TOPIC"] == "Orders"
        if end == "kill":
            await life.kill()
        if not end:
            await arrives(life, client, out, precision, sent_at)
    if end:
        async with life.running() as client:
            await arrives(life, client, out, precision, sent_at)


async def arrives(life: Life, client: Any, out: int, precision: int, sent_at: int) -> None:
    await life.advance((out + precision - 1 - life.clock.wall_ms()) / 1000)
    assert await there(client, "Orders") == []
    await life.advance(0.001)
    found = await comes(client, "Orders", 0)
    assert found.body == b"later"
    assert life.clock.wall_ms() >= sent_at + 10_500
    assert found.properties["TIMER_OUT_MS"] == str(out)
    assert found.properties["TIMER_DEQUEUE_MS"] == str(life.clock.wall_ms())
    assert int(found.properties["TIMER_ENQUEUE_MS"]) == sent_at - sent_at % precision
    assert found.properties["KEYS"] == "k"
    assert found.properties["REAL_TOPIC"] == "Orders"  # as in RocketMQ's records
    await life.advance(20)
    assert len(await all_there(client)) == 1


def test_defaults() -> None:
    """Those of RocketMQ 5.5.0's MessageStoreConfig and BrokerConfig."""
    store, broker = MessageStoreConfig(), BrokerConfig()
    assert {key: getattr(store, key) for key in dir(store) if key.startswith("timer_")} == {
        "timer_wheel_enable": True,
        "timer_precision_ms": 1000,
        "timer_roll_window_slot": 172_800,
        "timer_max_delay_sec": 259_200,
        "timer_flush_interval_ms": 1000,
        "timer_congest_num_each_slot": 2**31 - 1,
        "timer_stop_enqueue": False,
        "timer_stop_dequeue": False,
        "timer_skip_unknown_error": False,
    }
    assert store.append_topic_for_timer_delete_key is False
    assert store.mapped_file_size_timer_log == 100 * 1024 * 1024
    assert (broker.recall_message_enable, broker.allow_recall_when_broker_not_writeable) == (False, True)


def test_the_key_that_rocketmq_does_not_use_either() -> None:
    """timerInterceptDelayLevel: nothing reads it in RocketMQ 5.5.0, so that delay levels stay what they are."""
    assert "timerInterceptDelayLevel" in INERT


async def notes_of(life: Life) -> list[str]:
    """The codes of the health notes about timed messages."""
    found = [note.code for notes in life.broker.health.notes for note in notes()]
    return [code for code in found if "time" in code]


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("files", ["there", "of another size", "unreadable"])
async def test_messages_wait_while_timers_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, read: bool, files: str
) -> None:
    """Whether they were ``read`` from the queue or not: the cleaner keeps their log files, and health says so."""
    options = ASYNC | {"timerStopEnqueue": str(not read).lower()}
    life = Life(tmp_path / "store", options)
    async with life.running() as client:
        await client.send("Orders", b"ordinary")
        await timed(client, b"later", 100_000)
        await life.advance(2)
        await life.advance(2)
        (waiting,) = await there(client, TIMER)
    other_size = {"mappedFileSizeTimerLog": 4096} if files == "of another size" else {}
    if files == "unreadable":
        error = OSError(errno.EIO, "broken")
        monkeypatch.setattr(TimerRecovery, "_fill_floor", Mock(side_effect=error))
    for _ in range(2):
        off = Life(tmp_path / "store", ASYNC | {"timerWheelEnable": "false"} | other_size)
        async with off.running() as client:
            holds = off.broker.context.store.log_holds
            assert await holds.lowest() == waiting.commit_log_offset
            await holds.note_deletion("file", 0, waiting.commit_log_offset + 1)
            assert holds.deleted["timed messages"] == 1
            assert await notes_of(off) == ["timed_messages_unserved"]
    monkeypatch.undo()
    again = Life(tmp_path / "store", ASYNC)
    async with again.running() as client:
        assert await notes_of(again) == []
        await again.advance(200)
        assert (await comes(client, "Orders", 1)).body == b"later"
        for _ in range(3):
            await again.advance(2)
    off = Life(tmp_path / "store", ASYNC | {"timerWheelEnable": "false"})
    async with off.running():
        assert await off.broker.context.store.log_holds.lowest() is None
        assert await notes_of(off) == []


async def test_delete_marks_hide_no_message_of_another_slot_while_timers_are_off(tmp_path: Path) -> None:
    life = Life(tmp_path / "store", RECALLS)
    async with life.running() as client:
        handle = (await timed(client, b"recalled", 100_000))["recallHandle"]
        for _ in range(3):
            assert (await recalled(client, handle)).code == ResponseCode.SUCCESS
        await timed(client, b"later", 200_000)
        await life.advance(2)
        await life.advance(2)
        assert life.broker.context.timer.pending == -1
    off = Life(tmp_path / "store", ASYNC | {"timerWheelEnable": "false"})
    async with off.running():
        assert off.broker.context.timer.unserved == 1


async def test_what_was_deleted_does_not_count_while_timers_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer's files cannot be read: all of the queue counts, which begins behind what the cleaner has deleted."""
    life = Life(tmp_path / "store", ASYNC)
    async with life.running() as client:
        for _ in range(3):
            await timed(client, b"later", 100_000)
        await life.advance(2)
    off = Life(tmp_path / "store", ASYNC | {"timerWheelEnable": "false", "mappedFileSizeTimerLog": 4096})
    async with off.running():
        assert off.broker.context.timer.unserved == 3
        monkeypatch.setattr(off.broker.context.store, "min_offset", lambda _topic, _queue_id: 2)
        assert off.broker.context.timer.unserved == 1
        monkeypatch.setattr(off.broker.context.store, "min_offset", lambda _topic, _queue_id: 4)
        assert off.broker.context.timer.unserved == 0


async def test_files_that_could_not_be_read_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path / "store", ASYNC)
    async with life.running() as client:
        await timed(client, b"later", 100_000)
        await life.advance(2)
    monkeypatch.setattr(TimerRecovery, "_fill_floor", Mock(side_effect=OSError(errno.EIO, "broken")))
    closed: list[TimerStore] = []
    close = TimerStore.close

    def noted(self: TimerStore) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(TimerStore, "close", noted)
    off = Life(tmp_path / "store", ASYNC | {"timerWheelEnable": "false"})
    async with off.running():
        assert len(closed) == 1
        assert off.broker.context.store.timer_data not in closed


@pytest.mark.parametrize("enabled", ["true", "false"])
async def test_a_start_with_another_precision_leaves_a_wheel(tmp_path: Path, enabled: str) -> None:
    """RocketMQ makes a wheel that is not there from the end of the timer log only: older timers would be lost there."""
    life = Life(tmp_path / "store", ASYNC | {"timerPrecisionMs": 100})
    async with life.running() as client:
        for after_ms in (100_000, 100_400, 100_200):
            await timed(client, b"later", after_ms)
        await life.advance(2)
        await life.advance(2)
    other = Life(tmp_path / "store", ASYNC | {"timerPrecisionMs": 1000, "timerWheelEnable": enabled})
    async with other.running():
        timers = other.broker.context.store.timer_data
        assert timers.notes
        found = TimerWheel(RealDisk(), f"{tmp_path}/store/timerwheel", 1000, timers.wheel.slots)
        checkpoint = decode_checkpoint((tmp_path / "store" / "config" / "timercheck").read_bytes())
        assert found.load(checkpoint.read_time) == ""
        assert list(found.all_slots()) == list(timers.wheel.all_slots()) != []
        assert checkpoint.log_position == timers.log.end
