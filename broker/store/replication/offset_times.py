"""OffsetTimes: since when a log has had what a slave lacks. It is asked once a second, so that appends pay nothing."""

from bisect import bisect_right
from typing import Final

SAMPLE_SECONDS: Final = 1.0
"""Time between two samples, and so the precision of a recent age."""
_MOST: Final = 512
_SHARE: Final = 0.05
"""By how much of itself an old age may be too small. The samples of a thousand years are fewer than ``_MOST`` then."""


class OffsetTimes:
    """Samples of a log's end, 513 at most: the older they are, the fewer are kept, whatever the time they span."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._times: list[float] = []

    def note(self, end: int, now: float) -> None:
        """The log ends at ``end`` now (seconds). An end that has not grown makes no sample.

        What was noted above ``end`` is forgotten: a slave has another master, with a shorter log.
        """
        while self._ends and self._ends[-1] > end:
            self._ends.pop()
            self._times.pop()
        if self._ends and self._ends[-1] == end:
            return
        self._ends.append(end)
        self._times.append(now)
        if len(self._ends) > _MOST:
            self._thin(now)

    def _thin(self, now: float) -> None:
        """Drop samples whose neighbours are close to each other, compared with their age."""
        kept = [0]
        for place in range(1, len(self._times) - 1):
            following = self._times[place + 1]
            if following - self._times[kept[-1]] > (now - following) * _SHARE:
                kept.append(place)
        kept.append(len(self._times) - 1)
        self._ends = [self._ends[place] for place in kept]
        self._times = [self._times[place] for place in kept]

    def age(self, offset: int, now: float) -> float:
        """Seconds since the log was first seen with a byte at ``offset``; 0 if it was not.

        What the log had before the first sample counts from that sample on.
        """
        place = bisect_right(self._ends, offset)
        return max(0.0, now - self._times[place]) if place < len(self._times) else 0.0
