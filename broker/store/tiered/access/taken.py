"""The messages that one pull gets from the ranges in memory."""

from bisect import bisect_right
from collections.abc import Generator
from typing import Final

from trimq.broker.store.read.record_look import Place, properties_of
from trimq.broker.store.tiered.container.message_runs import MessageRun
from trimq.broker.store.types import MessageFilter
from trimq.protocol.sql92.cost import SLICE, cost

_EVALUATED_TAG: Final = SLICE >> 12
"""The cost of a message whose tags do not match: 4096 of them are a slice."""


class Taken:
    """Takes messages up to ``max_count`` and ``max_bytes``, but at least one; ``end``: only those below this offset.

    The bytes are copied: a client that is slow to read its reply holds no more of a range than that.
    """

    def __init__(self, max_count: int, max_bytes: int, end: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._end = end
        self._left = SLICE
        self.buffers: list[bytes] = []
        self.count = 0
        self.size = 0

    def take(self, run: MessageRun, first: int) -> int:
        """Take messages of a run from a number on. Returns the number behind the last; less than all: it is full."""
        bounds = run.bounds
        last = bisect_right(bounds, bounds[first] + self._max_bytes - self.size, first) - 1
        last = min(last, first + self._max_count - self.count)
        if not self.count:
            last = max(last, first + 1)
        last = max(first, min(last, len(run.tags_codes), self._end - run.offset))
        if last > first:
            self._add(run, first, last)
        return last

    def take_matching(
        self, run: MessageRun, first: int, filter: MessageFilter, place: Place
    ) -> Generator[None, None, int]:
        """As ``take``, of the messages that a filter takes. Yields where others have to run."""
        bounds, data = run.bounds, run.data
        for number in range(first, min(len(run.tags_codes), self._end - run.offset)):
            begin, size = bounds[number], bounds[number + 1] - bounds[number]
            if self.count and (self.count >= self._max_count or self.size + size > self._max_bytes):
                return number
            if self._left <= 0:
                self._left = SLICE
                yield
            if not filter.match_tags(run.tags_codes[number]):
                self._left -= _EVALUATED_TAG
                continue
            if filter.needs_properties:
                properties = properties_of(data, begin, size, place)
                self._left -= cost(len(properties), filter.terms)
                if not filter.match_record(properties):
                    continue
            self._add(run, number, number + 1)
        return max(first, min(len(run.tags_codes), self._end - run.offset))

    def _add(self, run: MessageRun, first: int, last: int) -> None:
        begin, end = run.bounds[first], run.bounds[last]
        self.buffers.append(run.data[begin:end])
        self.count += last - first
        self.size += end - begin
