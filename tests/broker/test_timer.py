"""Timed messages through a real broker: sends, delivery, restarts, recalls."""

from pathlib import Path
from typing import Any

import pytest

from tests.broker.timers import ASYNC, TIMER, Life, all_there, comes, there, timed
from trimq.broker.config import MessageStoreConfig

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
    config = MessageStoreConfig()
    assert (config.timer_precision_ms, config.timer_roll_window_slot, config.timer_max_delay_sec) == (
        1000,
        172_800,
        259_200,
    )
