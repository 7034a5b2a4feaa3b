"""How many messages of each topic wait in the timer: ``config/timermetrics`` (RocketMQ's TimerMetrics).

A delete mark counts -1. The file is also the body of GET_TIMER_METRICS (61).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
        self._by_hash: dict[int, str] = {}
        """The topics by their hashes, which are all that the timer's log has. Topics with the same count together."""
        self._removed: set[str] = set()
        """Deleted topics whose messages still wait; they are not shown."""
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
        self._by_hash = {tags_code(topic): topic for topic in self._counts}

    async def run(self) -> None:
        """Write the file at intervals, forever."""
        await self._file.run(self._clock.sleep)

    async def persist(self) -> None:
        """Write the file if it is not current."""
        await self._file.persist()

    @property
    def counts(self) -> Mapping[str, Metric]:
        """The counts by topic."""
        if not self._removed:
            return self._counts
        return {topic: metric for topic, metric in self._counts.items() if topic not in self._removed}

    @property
    def total(self) -> int:
        """The sum of all counts, also of messages for deleted topics."""
        return sum(metric.count for metric in self._counts.values())

    def add(self, changes: Mapping[str, int]) -> None:
        """Change counts, by topic."""
        for topic in changes:
            self._removed.discard(topic)
            self._by_hash.setdefault(tags_code(topic), topic)
        self.add_hashes({tags_code(topic): change for topic, change in changes.items()})

    def add_hashes(self, changes: Mapping[int, int]) -> None:
        """Change counts, by the hash of the topic. Unknown topics are left out."""
        now = self._clock.wall_ms()
        for topic_hash, change in changes.items():
            topic = self._by_hash.get(topic_hash)
            if topic is None:
                continue
            metric = self._counts.setdefault(topic, Metric())
            metric.count += change
            metric.time_stamp = now
            if topic in self._removed and not metric.count:
                self._forget(topic)
        if changes:
            self.data_version = self.data_version.next(now)
            self._file.changed()

    def knows(self, topic_hash: int) -> bool:
        """Whether there is a topic with that hash."""
        return topic_hash in self._by_hash

    def replace(self, by_hash: Mapping[int, int], topics: Iterable[str]) -> None:
        """Set the counts to those of the timer's log, by hash; ``topics`` has those that are not known yet."""
        for topic in topics:
            self._by_hash.setdefault(tags_code(topic), topic)
            self._counts.setdefault(self._by_hash[tags_code(topic)], Metric())
        known = {tags_code(topic): metric.count for topic, metric in self._counts.items()}
        self.add_hashes({topic_hash: by_hash.get(topic_hash, 0) - count for topic_hash, count in known.items()})

    def remove(self, topic: str) -> None:
        """Forget a deleted topic: now for those who ask, in fact when none of its messages waits any more."""
        metric = self._counts.get(topic)
        if metric is None:
            return
        if metric.count:
            self._removed.add(topic)
        else:
            self._forget(topic)
        self._file.changed()

    def _forget(self, topic: str) -> None:
        del self._counts[topic]
        self._removed.discard(topic)
        if self._by_hash.get(tags_code(topic)) == topic:
            del self._by_hash[tags_code(topic)]

    def encode(self) -> bytes:
        """The text of the file."""
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        return encode_pieces({"dataVersion": self.data_version, "timingCount": dict(self.counts)} | self._rest)


class Rate:
    """The rate of a counter between two requests that are at least a second apart."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.monotonic()
        self._count = 0
        self._rate = 0.0

    def per_second(self, count: int) -> float:
        """``count`` is the counter's value now."""
        now = self._clock.monotonic()
        if now - self._since >= 1:
            self._rate = (count - self._count) / (now - self._since)
            self._since, self._count = now, count
        return self._rate
