"""Counters of the store: plain numbers that the hot path increments, sampled once a second.

Keys and formats of ``runtime_info`` are those of RocketMQ's StoreStatsService, as ``mqadmin brokerStatus`` shows them.
"""

from bisect import bisect_left
from collections import deque
from typing import Final, NamedTuple

from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.durations import Durations

_SAMPLES_KEPT: Final = 601
_WINDOWS: Final = (10, 60, 600)
_BUCKET_NAMES: Final = (
    "[<=0ms]",
    "[0~10ms]",
    "[10~50ms]",
    "[50~100ms]",
    "[100~200ms]",
    "[200~500ms]",
    "[500ms~1s]",
    "[1~2s]",
    "[2~3s]",
    "[3~4s]",
    "[4~5s]",
    "[5~10s]",
    "[10s~]",
)
_BUCKET_ENDS: Final = (0, 10, 50, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 10_000)
_LATENCY_BUCKETS: Final = 1000


class _Sample(NamedTuple):
    at: float
    put: int
    found: int
    missed: int
    transferred: int


class StoreStats:
    """Counters of one store since its start; times are ms."""

    __slots__ = (
        "_boot_wall_ms",
        "_samples",
        "dispatch_max_buffer",
        "flush_waits",
        "found_times_total",
        "get_message_entire_time_max",
        "latency_counts",
        "missed_times_total",
        "put_distribution",
        "put_message_entire_time_max",
        "put_message_failed_times",
        "put_message_size_total",
        "put_message_times_total",
        "transferred_messages_total",
    )

    def __init__(self, boot_wall_ms: int = 0) -> None:
        self._boot_wall_ms = boot_wall_ms
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES_KEPT)
        self.put_message_times_total = 0
        """Messages stored; each message of a batch counts."""
        self.put_message_size_total = 0
        """Bytes of their records."""
        self.put_message_failed_times = 0
        self.put_message_entire_time_max = 0
        self.get_message_entire_time_max = 0
        self.dispatch_max_buffer = 0
        """The most bytes of the log that were waiting for dispatch at any time."""
        self.found_times_total = 0
        """Gets that found messages."""
        self.missed_times_total = 0
        """Gets that found none."""
        self.transferred_messages_total = 0
        """Messages found by gets."""
        self.put_distribution = [0] * len(_BUCKET_NAMES)
        self.flush_waits = Durations()
        """How long replies waited for the device."""
        self.latency_counts = [0] * (_LATENCY_BUCKETS + 1)
        """Puts by their duration in ms; the last element counts all longer ones."""

    def put_took(self, elapsed_ms: int, count: int = 1) -> None:
        """Count ``count`` puts by the time until their reply was ready. Not called for replies ready immediately."""
        if elapsed_ms > self.put_message_entire_time_max:  # noqa: PLR1730 - max() takes three times as long
            self.put_message_entire_time_max = elapsed_ms
        self.put_distribution[bisect_left(_BUCKET_ENDS, elapsed_ms)] += count
        self.latency_counts[elapsed_ms if elapsed_ms < _LATENCY_BUCKETS else _LATENCY_BUCKETS] += count  # noqa: FURB136

    def sample(self, now: float) -> None:
        """Store the totals at ``now`` (monotonic seconds); called once a second."""
        self._samples.append(
            _Sample(
                now,
                self.put_message_times_total,
                self.found_times_total,
                self.missed_times_total,
                self.transferred_messages_total,
            )
        )

    async def run(self, clock: Clock) -> None:
        """Take samples until cancelled."""
        while True:
            self.sample(clock.monotonic())
            await clock.sleep(1)

    def _rates(self, *fields: int) -> str:
        """Rates per second over the last 10, 60 and 600 s, or as far back as there are samples."""
        texts = []
        for window in _WINDOWS:
            rate = 0.0
            if len(self._samples) > 1:
                newest = self._samples[-1]
                oldest = self._samples[max(0, len(self._samples) - 1 - window)]
                seconds = newest.at - oldest.at
                if seconds > 0:
                    rate = sum(newest[field] - oldest[field] for field in fields) / seconds
            texts.append(f"{rate:.6g}")
        return " ".join(texts)

    def _same_turn(self) -> int:
        """Puts without a call of ``put_took``: their reply was ready in the turn of the request."""
        return max(0, self.put_message_times_total - sum(self.put_distribution))

    def latency_percentile(self, share: float) -> float:
        """The time in ms that ``share`` of all puts did not exceed."""
        total = self.put_message_times_total
        seen = self._same_turn()
        if not total or seen >= share * total:
            return 0.0
        for elapsed, count in enumerate(self.latency_counts):
            seen += count
            if seen >= share * total:
                return float(elapsed)
        return float(self.put_message_entire_time_max)

    def runtime_info(self, now_wall_ms: int) -> dict[str, str]:
        """The store's part of a broker's runtime information."""
        seconds = max(0, now_wall_ms - self._boot_wall_ms) // 1000
        times = self.put_message_times_total
        distribution = [self.put_distribution[0] + self._same_turn(), *self.put_distribution[1:]]
        return {
            "bootTimestamp": str(self._boot_wall_ms),
            "runtime": (
                f"[ {seconds // 86400} days, {seconds // 3600 % 24} hours, "
                f"{seconds // 60 % 60} minutes, {seconds % 60} seconds ]"
            ),
            "putMessageEntireTimeMax": str(self.put_message_entire_time_max),
            "putMessageTimesTotal": str(times),
            "putMessageFailedTimes": str(self.put_message_failed_times),
            "putMessageSizeTotal": str(self.put_message_size_total),
            "putMessageDistributeTime": "".join(
                [f"{name}:{count} " for name, count in zip(_BUCKET_NAMES, distribution, strict=True)]
            ),
            "putMessageAverageSize": str(self.put_message_size_total / times if times else 0.0),
            "dispatchMaxBuffer": str(self.dispatch_max_buffer),
            "getMessageEntireTimeMax": str(self.get_message_entire_time_max),
            "putTps": self._rates(1),
            "getFoundTps": self._rates(2),
            "getMissTps": self._rates(3),
            "getTotalTps": self._rates(2, 3),
            "getTransferredTps": self._rates(4),
            "putLatency99": f"{self.latency_percentile(0.99):.2f}",
            "putLatency999": f"{self.latency_percentile(0.999):.2f}",
        }
