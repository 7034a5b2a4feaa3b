"""Counters of messages and bytes by topic and group, with windows of a minute, an hour and a day.

On the hot path a count is a dict look-up and two additions. A task takes samples every 10 s, 10 min and 1 h. A view is
the difference between the counter and the oldest sample of the window.

Source: RocketMQ's BrokerStatsManager, StatsItem and BrokerStats.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final

import trio
from msgspec import Struct

from trimq.protocol.body import Body
from trimq.remoting.runtime.clock import Clock

TOPIC_PUT_NUMS: Final = "TOPIC_PUT_NUMS"
TOPIC_PUT_SIZE: Final = "TOPIC_PUT_SIZE"
GROUP_GET_NUMS: Final = "GROUP_GET_NUMS"
GROUP_GET_SIZE: Final = "GROUP_GET_SIZE"
SNDBCK_PUT_NUMS: Final = "SNDBCK_PUT_NUMS"
DLQ_PUT_NUMS: Final = "DLQ_PUT_NUMS"
BROKER_PUT_NUMS: Final = "BROKER_PUT_NUMS"
BROKER_GET_NUMS: Final = "BROKER_GET_NUMS"
BROKER_GET_FROM_DISK_NUMS: Final = "BROKER_GET_FROM_DISK_NUMS"
GROUP_GET_FROM_DISK_NUMS: Final = "GROUP_GET_FROM_DISK_NUMS"
GROUP_GET_FROM_DISK_SIZE: Final = "GROUP_GET_FROM_DISK_SIZE"
TOPIC_PUT_LATENCY: Final = "TOPIC_PUT_LATENCY"
GROUP_GET_LATENCY: Final = "GROUP_GET_LATENCY"

NAMES: Final = (
    TOPIC_PUT_NUMS,
    TOPIC_PUT_SIZE,
    GROUP_GET_NUMS,
    GROUP_GET_SIZE,
    SNDBCK_PUT_NUMS,
    DLQ_PUT_NUMS,
    BROKER_PUT_NUMS,
    BROKER_GET_NUMS,
    BROKER_GET_FROM_DISK_NUMS,
    GROUP_GET_FROM_DISK_NUMS,
    GROUP_GET_FROM_DISK_SIZE,
    TOPIC_PUT_LATENCY,
    GROUP_GET_LATENCY,
)

SAMPLE_SECONDS: Final = 10.0
_MINUTE_SAMPLES: Final = 7  # 60 s of samples every 10 s
_HOUR_EVERY: Final = 60  # samples: 10 min
_HOUR_SAMPLES: Final = 7
_DAY_EVERY: Final = 360  # samples: 1 h
_DAY_SAMPLES: Final = 25
_SLICE_SECONDS: Final = 0.001

_Sample = tuple[float, int, int]


class BrokerStatsItem(Body):
    """One window: the sum, the sum per second (tps), the average per call (avgpt)."""

    sum: int = 0
    tps: float = 0.0
    avgpt: float = 0.0


class BrokerStatsData(Body):
    """Body of the reply to VIEW_BROKER_STATS_DATA (315)."""

    stats_minute: BrokerStatsItem
    stats_hour: BrokerStatsItem
    stats_day: BrokerStatsItem


class StatsItem(Struct):
    """A counter: the sum of the added values and the number of additions. Samples are (seconds, value, times)."""

    value: int = 0
    times: int = 0
    minute: deque[_Sample] = deque()
    hour: deque[_Sample] = deque()
    day: deque[_Sample] = deque()

    def add(self, value: int, times: int = 1) -> None:
        """Add a value."""
        self.value += value
        self.times += times


def _new_item(now: float) -> StatsItem:
    start = (now, 0, 0)
    return StatsItem(
        minute=deque([start], _MINUTE_SAMPLES), hour=deque([start], _HOUR_SAMPLES), day=deque([start], _DAY_SAMPLES)
    )


def _window(item: StatsItem, samples: deque[_Sample], now: float) -> BrokerStatsItem:
    then, value, times = samples[0]
    total, count, seconds = item.value - value, item.times - times, now - then
    return BrokerStatsItem(
        sum=total,
        tps=round(total / seconds, 4) if seconds > 0 else 0.0,
        avgpt=round(total / count, 4) if count else 0.0,
    )


class BrokerStats:
    """The broker's counters. Names are RocketMQ's; keys are a topic, ``topic@group`` or the cluster's name."""

    def __init__(self, clock: Clock, cluster: str) -> None:
        self._clock = clock
        self._cluster = cluster
        self._ticks = 0
        self._tables: dict[str, dict[str, StatsItem]] = {name: {} for name in NAMES}
        self._put_nums = self._tables[TOPIC_PUT_NUMS]
        self._put_size = self._tables[TOPIC_PUT_SIZE]
        self._get_nums = self._tables[GROUP_GET_NUMS]
        self._get_size = self._tables[GROUP_GET_SIZE]
        self.broker_put = self._item(BROKER_PUT_NUMS, cluster)
        self.broker_get = self._item(BROKER_GET_NUMS, cluster)
        self.boot_timestamp = clock.wall_ms()
        self.put_total_yesterday_morning = 0
        self.put_total_today_morning = 0
        self.get_total_yesterday_morning = 0
        self.get_total_today_morning = 0

    # counting

    def topic_put(self, topic: str, count: int, size: int) -> None:
        """Count messages stored in a topic, and their bytes on disk."""
        nums = self._put_nums.get(topic)
        if nums is None:
            nums = self._item(TOPIC_PUT_NUMS, topic)
            self._item(TOPIC_PUT_SIZE, topic)
        nums.value += count
        nums.times += 1
        sizes = self._put_size[topic]
        sizes.value += size
        sizes.times += 1
        self.broker_put.value += count
        self.broker_put.times += 1

    def topic_counters(self, topic: str) -> tuple[StatsItem, StatsItem]:
        """The counters of messages and bytes that ``topic_put`` uses for a topic, valid until the topic is removed.

        A caller that adds to them directly adds to ``broker_put`` too, which is the sum.
        """
        if topic not in self._put_nums:
            self._item(TOPIC_PUT_NUMS, topic)
            self._item(TOPIC_PUT_SIZE, topic)
        return self._put_nums[topic], self._put_size[topic]

    def group_counters(self, group: str, topic: str) -> tuple[StatsItem, StatsItem]:
        """The counters that ``group_get`` uses for a group in a topic, valid until one of them is removed.

        A caller that adds to them directly adds to ``broker_get`` too, which is the sum.
        """
        key = f"{topic}@{group}"
        if key not in self._get_nums:
            self._item(GROUP_GET_NUMS, key)
            self._item(GROUP_GET_SIZE, key)
        return self._get_nums[key], self._get_size[key]

    def group_get(self, group: str, topic: str, count: int, size: int) -> None:
        """Count messages sent to a group, and their bytes."""
        key = f"{topic}@{group}"
        nums = self._get_nums.get(key)
        if nums is None:
            nums = self._item(GROUP_GET_NUMS, key)
            self._item(GROUP_GET_SIZE, key)
        nums.value += count
        nums.times += 1
        sizes = self._get_size[key]
        sizes.value += size
        sizes.times += 1
        self.broker_get.value += count
        self.broker_get.times += 1

    def add(self, name: str, key: str, value: int, times: int = 1) -> None:
        """Add to any other counter. Raises KeyError for an unknown name."""
        table = self._tables[name]
        item = table.get(key)
        if item is None:
            item = self._item(name, key)
        item.value += value
        item.times += times

    def send_back(self, group: str, topic: str, *, dead: bool = False) -> None:
        """Count a message that a group sent back; ``dead`` if it went to the dead-letter topic."""
        self.add(DLQ_PUT_NUMS if dead else SNDBCK_PUT_NUMS, f"{topic}@{group}", 1)

    def get_from_disk(self, group: str, topic: str, count: int, size: int) -> None:
        """Count messages sent to a group that had to be read from disk."""
        self.add(GROUP_GET_FROM_DISK_NUMS, f"{topic}@{group}", count)
        self.add(GROUP_GET_FROM_DISK_SIZE, f"{topic}@{group}", size)
        self.add(BROKER_GET_FROM_DISK_NUMS, self._cluster, count)

    def _item(self, name: str, key: str) -> StatsItem:
        item = self._tables[name][key] = _new_item(self._clock.monotonic())
        return item

    # queries

    def view(self, name: str, key: str) -> BrokerStatsData | None:
        """The windows of a counter up to now; None for an unknown name or key."""
        item = self._tables.get(name, {}).get(key)
        if item is None:
            return None
        now = self._clock.monotonic()
        return BrokerStatsData(
            stats_minute=_window(item, item.minute, now),
            stats_hour=_window(item, item.hour, now),
            stats_day=_window(item, item.day, now),
        )

    def tps(self, name: str, key: str) -> float:
        """The sum per second over the last minute; 0 for a counter that does not exist."""
        data = self.view(name, key)
        return 0.0 if data is None else data.stats_minute.tps

    def keys(self, name: str) -> list[str]:
        """The keys that have a counter of this name."""
        return list(self._tables.get(name, ()))

    def items(self, name: str) -> Mapping[str, StatsItem]:
        """The counters of a name, oldest first. It is the table itself, which changes while the broker counts."""
        return self._tables[name]

    @property
    def put_total(self) -> int:
        """Messages stored since the start."""
        return self.broker_put.value

    @property
    def get_total(self) -> int:
        """Messages sent to consumers since the start."""
        return self.broker_get.value

    def runtime_info(self) -> dict[str, str]:
        """The part of GET_BROKER_RUNTIME_INFO (28) that comes from the counters."""
        return {
            "bootTimestamp": str(self.boot_timestamp),
            "msgPutTotalYesterdayMorning": str(self.put_total_yesterday_morning),
            "msgPutTotalTodayMorning": str(self.put_total_today_morning),
            "msgPutTotalTodayNow": str(self.put_total),
            "msgGetTotalYesterdayMorning": str(self.get_total_yesterday_morning),
            "msgGetTotalTodayMorning": str(self.get_total_today_morning),
            "msgGetTotalTodayNow": str(self.get_total),
        }

    # removal

    def remove_topic(self, topic: str) -> None:
        """Remove the counters of a deleted topic."""
        self._remove(lambda key: key == topic or key.startswith(topic + "@"))

    def remove_group(self, group: str) -> None:
        """Remove the counters of a deleted group."""
        self._remove(lambda key: key.endswith("@" + group))

    def _remove(self, matches: Callable[[str], bool]) -> None:
        for table in self._tables.values():
            for key in [key for key in table if key != self._cluster and matches(key)]:
                del table[key]

    # time

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take samples, and record the totals at midnight (local time), forever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_midnight)
            task_status.started()
            while True:
                await self._clock.sleep(SAMPLE_SECONDS)
                await self.sample()

    async def sample(self) -> None:
        """Take one round of samples, in slices between which other tasks run."""
        self._ticks += 1
        hour, day = self._ticks % _HOUR_EVERY == 0, self._ticks % _DAY_EVERY == 0
        now = self._clock.monotonic()
        began = time.perf_counter()
        for table in self._tables.values():
            for item in list(table.values()):
                sample = (now, item.value, item.times)
                item.minute.append(sample)
                if hour:
                    item.hour.append(sample)
                if day:
                    item.day.append(sample)
                if time.perf_counter() - began > _SLICE_SECONDS:
                    await trio.lowlevel.checkpoint()
                    began = time.perf_counter()

    async def _run_midnight(self) -> None:
        while True:
            await self._clock.sleep(seconds_to_midnight(self._clock.wall_ms()))
            self.put_total_yesterday_morning = self.put_total_today_morning
            self.get_total_yesterday_morning = self.get_total_today_morning
            self.put_total_today_morning = self.put_total
            self.get_total_today_morning = self.get_total


def seconds_to_midnight(wall_ms: int) -> float:
    """The time until the local day ends, at least one second."""
    now = datetime.fromtimestamp(wall_ms / 1000).astimezone()
    midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return max(1.0, (midnight - now).total_seconds())
