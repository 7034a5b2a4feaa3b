from datetime import datetime

import pytest
import trio
import trio.testing

from trimq.broker.services.stats import GROUP_GET_NUMS, NAMES, TOPIC_PUT_NUMS, BrokerStats, seconds_to_midnight
from trimq.remoting.runtime.clock import ManualClock


async def test_counts_show_at_once_and_in_all_windows() -> None:
    clock = ManualClock()
    stats = BrokerStats(clock, "c")
    stats.topic_put("T", 3, 300)
    clock.advance(1)
    stats.topic_put("T", 1, 100)
    clock.advance(1)
    data = stats.view(TOPIC_PUT_NUMS, "T")
    assert data is not None
    for window in (data.stats_minute, data.stats_hour, data.stats_day):
        assert (window.sum, window.tps, window.avgpt) == (4, 2.0, 2.0)
    size = stats.view("TOPIC_PUT_SIZE", "T")
    assert size is not None
    assert size.stats_minute.sum == 400
    assert stats.put_total == 4
    assert stats.tps(TOPIC_PUT_NUMS, "T") == 2.0


async def test_the_windows_move_on() -> None:
    clock = ManualClock()
    stats = BrokerStats(clock, "c")
    stats.group_get("G", "T", 10, 1000)
    sums = []
    for tick in range(1, 361 * 25):
        clock.advance(10)
        await stats.sample()
        if tick in (5, 6, 7, 359, 360, 361, 419, 420, 8640, 9000):
            data = stats.view(GROUP_GET_NUMS, "T@G")
            assert data is not None
            sums.append((tick, data.stats_minute.sum, data.stats_hour.sum, data.stats_day.sum))
    assert sums == [
        (5, 10, 10, 10),
        (6, 10, 10, 10),
        (7, 0, 10, 10),
        (359, 0, 10, 10),
        (360, 0, 10, 10),
        (361, 0, 10, 10),
        (419, 0, 10, 10),
        (420, 0, 0, 10),
        (8640, 0, 0, 10),
        (9000, 0, 0, 0),
    ]


def test_what_was_never_counted_is_nothing() -> None:
    stats = BrokerStats(ManualClock(), "c")
    assert stats.view(TOPIC_PUT_NUMS, "T") is None
    assert stats.view("NO_SUCH_NAME", "T") is None
    assert stats.tps(TOPIC_PUT_NUMS, "T") == 0
    assert stats.keys("NO_SUCH_NAME") == []
    with pytest.raises(KeyError):
        stats.add("NO_SUCH_NAME", "T", 1)


def test_other_counters() -> None:
    stats = BrokerStats(ManualClock(), "c")
    stats.send_back("G", "T")
    stats.send_back("G", "T", dead=True)
    stats.get_from_disk("G", "T", 2, 20)
    stats.group_get("G", "T", 5, 50)
    found = {name: {key: item.value for key, item in stats._tables[name].items()} for name in NAMES}
    assert found["SNDBCK_PUT_NUMS"] == found["DLQ_PUT_NUMS"] == {"T@G": 1}
    assert found["GROUP_GET_FROM_DISK_SIZE"] == {"T@G": 20}
    assert found["BROKER_GET_NUMS"] == {"c": 5}
    assert stats.keys(GROUP_GET_NUMS) == ["T@G"]
    assert stats.get_total == 5


def test_what_is_deleted_is_forgotten() -> None:
    stats = BrokerStats(ManualClock(), "c")
    for topic in ("T", "TT"):
        stats.topic_put(topic, 1, 1)
        for group in ("G", "GG"):
            stats.group_get(group, topic, 1, 1)
    stats.remove_topic("T")
    stats.remove_group("G")
    assert stats.keys(TOPIC_PUT_NUMS) == ["TT"]
    assert stats.keys(GROUP_GET_NUMS) == ["TT@GG"]
    assert stats.put_total == 2


async def test_totals_are_noted_at_midnight() -> None:
    clock = ManualClock()
    stats = BrokerStats(clock, "c")
    async with trio.open_nursery() as nursery:
        await nursery.start(stats.run)
        for total in (5, 7):
            stats.topic_put("T", total, 1)
            await trio.testing.wait_all_tasks_blocked()
            clock.advance(seconds_to_midnight(clock.wall_ms()))
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    info = stats.runtime_info()
    assert info["msgPutTotalYesterdayMorning"] == "5"
    assert info["msgPutTotalTodayMorning"] == info["msgPutTotalTodayNow"] == "12"


def test_midnight() -> None:
    late = datetime(2026, 3, 1, 23, 59, 50).astimezone()
    assert seconds_to_midnight(int(late.timestamp() * 1000)) == 10
    assert seconds_to_midnight(int(late.timestamp() * 1000) + 9_999) == 1
