"""Durations, or sizes, in buckets: plain counts, in the form of Prometheus's histograms, without its client."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

MICROSECONDS_TO_SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
"""Upper ends of buckets in seconds, for operations that are usually quick."""


class Durations:
    """Counts by upper end; the last one counts all longer durations. ``add`` costs a binary search in a short list."""

    __slots__ = ("counts", "ends", "total")

    def __init__(self, ends: Sequence[float] = MICROSECONDS_TO_SECONDS) -> None:
        self.ends = ends
        self.counts = [0] * (len(ends) + 1)
        self.total = 0.0
        """The sum of all: of durations in seconds."""

    def add(self, seconds: float, count: int = 1) -> None:
        """Count ``count`` durations of ``seconds`` each."""
        self.counts[bisect_left(self.ends, seconds)] += count
        self.total += seconds * count
