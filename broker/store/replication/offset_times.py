"""OffsetTimes: since when a log has had what a slave lacks. It is asked once a second, so that appends pay nothing."""

from bisect import bisect_right
from typing import Final

SAMPLE_SECONDS: Final = 1.0
"""Time between two samples, and so the precision of a recent age."""
_MOST: Final = 512


class OffsetTimes:
    """Samples of a log's end. The older they are, the fewer are kept: 512 at most, whatever the time they span."""

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
            # Every second one of the older half: an age is then wrong by a small share of itself.
            del self._ends[1 : _MOST // 2 : 2]
            del self._times[1 : _MOST // 2 : 2]

    def age(self, offset: int, now: float) -> float:
        """Seconds since the log was first seen with a byte at ``offset``; 0 if it was not.

        What the log had before the first sample counts from that sample on.
        """
        place = bisect_right(self._ends, offset)
        return max(0.0, now - self._times[place]) if place < len(self._times) else 0.0
