"""Which parts of the log behind its newest end are in memory, as far as a look a moment ago can tell.

A page fault on cold data stops the event loop, so a record may only be read through the map where its pages are in
memory. Those written lately are (``MappedFile.hot_from``); of others a chunk that a look has just found there counts as
warm for two seconds. The kernel may give up within them what was only looked at and not read: where memory is short.
"""

from collections.abc import Sequence
from time import monotonic
from typing import Final

from broker.store.mapped_file import MappedFile

CHUNK: Final = 32 * 1024
"""Bytes that are warm together, or not."""
_AHEAD: Final = 8
"""Chunks that are looked at together for a consumer, which goes on: the call costs more than what it looks at."""
WARM_SECONDS: Final = 2.0
_MOST: Final = 1 << 16
"""Chunks remembered (2 GiB of log); beyond that all are forgotten and looked at again."""
_SPARSE: Final = 8
"""Records spread over more than this many times their size are looked at one by one."""


class WarmRanges:
    """Chunks of the log's files that were found in memory. Belongs to the event loop; never waits."""

    def __init__(self) -> None:
        self.until: dict[int, float] = {}
        """Log offsets at which chunks begin, and when what was seen of each is too old (monotonic seconds)."""

    def covers(self, file: MappedFile, begin: int, end: int, ahead: int = 1) -> bool:
        """True where [begin, end) of a file, which it has written, is in memory; looks ``ahead`` chunks far."""
        if begin >= file.hot_from:
            return True
        until = self.until
        start = file.start
        now = monotonic()
        for at in range(begin - begin % CHUNK, min(end, file.hot_from), CHUNK):
            if until.get(start + at, 0.0) < now and not self._look(file, at, ahead, now + WARM_SECONDS):
                return False
        return True

    def _look(self, file: MappedFile, at: int, count: int, until: float) -> bool:
        """Note which of ``count`` chunks from a position on are in memory; False where the first of them is not."""
        wrote = file.wrote
        seen = file.in_memory(at, min(at + count * CHUNK, wrote))
        if seen < min(at + CHUNK, wrote):
            return False
        if seen < wrote:
            seen -= seen % CHUNK
        if len(self.until) + count > _MOST:
            self.until.clear()
        for place in range(file.start + at, file.start + seen, CHUNK):
            self.until[place] = until
        return True

    def is_read(self, file: MappedFile, begin: int, end: int) -> bool:
        """True where somebody has looked at a part of [begin, end) of a file a moment ago."""
        until, start = self.until, file.start
        now = monotonic()
        chunks = range(begin - begin % CHUNK, end, CHUNK) if until else ()
        return any(until.get(start + at, 0.0) >= now for at in chunks)

    def forget(self, file: MappedFile, begin: int, end: int) -> None:
        """[begin, end) of a file has left memory."""
        for at in range(begin - begin % CHUNK, end, CHUNK) if self.until else ():
            self.until.pop(file.start + at, None)

    def covers_all(self, file: MappedFile, places: Sequence[int], sizes: Sequence[int]) -> bool:
        """True where records at rising log offsets are all in memory."""
        start = file.start
        begin, end = places[0] - start, places[-1] + sizes[-1] - start
        if begin >= file.hot_from or end - begin <= _SPARSE * (sum(sizes) + CHUNK):
            return self.covers(file, begin, end, _AHEAD)
        return all(
            self.covers(file, place - start, place - start + size) for place, size in zip(places, sizes, strict=True)
        )
