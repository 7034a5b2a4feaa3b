"""How many messages of each topic wait in the timer: ``config/timermetrics`` (RocketMQ's TimerMetrics).

A delete mark counts -1. The file is also the body of GET_TIMER_METRICS (61).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from trimq.broker.services.state_file import (
    StateFile,
    StateFileError,
    encode_pieces,
    load_data_version,
    unknown_fields,
)
from trimq.broker.store.disk.disk import Disk
from trimq.protocol.body import DataVersion
from trimq.protocol.hashing import tags_code
from trimq.remoting.runtime.clock import Clock

_KNOWN: Final = frozenset({"dataVersion", "timingCount"})


class Metric(msgspec.Struct):
    """A topic's count and the time of its last change (ms since 1970)."""

    count: int = 0
    time_stamp: int = msgspec.field(name="timeStamp", default=0)


class TimerMetrics:
    """The counts, in memory and in their file."""

    def __init__(self, disk: Disk, path: str, clock: Clock, interval: Callable[[], float]) -> None:
        """``interval`` returns the seconds between two writes of the file."""
        self._clock = clock
        self._counts: dict[str, Metric] = {}
        self._rest: dict[str, Any] = {}
        self.data_version = DataVersion()
        self._file = StateFile(disk, path, self._pieces, interval)

    async def load(self) -> None:
        """Read the file. Raises StateFileError."""
        state = await self._file.load()
        if state is None:
            return
        self.data_version = load_data_version(state.get("dataVersion"), self._file.path)
        self._rest = unknown_fields(state, _KNOWN)
        try:
            self._counts = msgspec.convert(state.get("timingCount") or {}, dict[str, Metric])
        except msgspec.ValidationError as error:
            raise StateFileError(f"{self._file.path}: timingCount: {error}") from None

    async def run(self) -> None:
        """Write the file at intervals, forever."""
        await self._file.run(self._clock.sleep)

    async def persist(self) -> None:
        """Write the file if it is not current."""
        await self._file.persist()

    @property
    def counts(self) -> Mapping[str, Metric]:
        """The counts by topic."""
        return self._counts

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return sum(metric.count for metric in self._counts.values())

    def add(self, changes: Mapping[str, int]) -> None:
        """Change counts, by topic."""
        now = self._clock.wall_ms()
        for topic, change in changes.items():
            metric = self._counts.get(topic)
            if metric is None:
                metric = self._counts[topic] = Metric()
            metric.count += change
            metric.time_stamp = now
        if changes:
            self.data_version = self.data_version.next(now)
            self._file.changed()

    def replace(self, by_hash: Mapping[int, int]) -> None:
        """Set the counts of the known topics to those of the timer's log, which has the hashes of topics only."""
        known = {topic: by_hash.get(tags_code(topic), 0) for topic in self._counts}
        self.add({topic: count - self._counts[topic].count for topic, count in known.items()})

    def remove(self, topic: str) -> None:
        """Forget a deleted topic."""
        if self._counts.pop(topic, None) is not None:
            self._file.changed()

    def encode(self) -> bytes:
        """The text of the file."""
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        return encode_pieces({"dataVersion": self.data_version, "timingCount": self._counts} | self._rest)
