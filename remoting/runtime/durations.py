"""How long things took: plain counts in buckets, as Prometheus's histograms want them, without knowing of those."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

MICROSECONDS_TO_SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
"""Upper ends in seconds, for what is quick on most days."""


class Durations:
    """Counts by upper end; the last one holds all that took longer. ``add`` costs a search in a short row."""

    __slots__ = ("counts", "ends", "total")

    def __init__(self, ends: Sequence[float] = MICROSECONDS_TO_SECONDS) -> None:
        self.ends = ends
        self.counts = [0] * (len(ends) + 1)
        self.total = 0.0
        """Seconds in all."""

    def add(self, seconds: float, count: int = 1) -> None:
        """Count one, or so many that each took that long."""
        self.counts[bisect_left(self.ends, seconds)] += count
        self.total += seconds * count
