"""Which parts of the log behind its newest end are in memory, as far as a look a moment ago can tell.

A page fault on cold data stops the event loop, so a record may only be read through the map where its pages are in
memory. Those written lately are (``MappedFile.hot_from``); of others a chunk that a read without waiting has just found
there counts as warm for two seconds: the kernel does not give up what it has handed out so lately.
"""

from collections.abc import Sequence
from time import monotonic
from typing import Final

from broker.store.disk import Disk
from broker.store.mapped_file import MappedFile

CHUNK: Final = 32 * 1024
"""Bytes that are looked at together: a few microseconds."""
WARM_SECONDS: Final = 2.0
_MOST: Final = 1 << 16
"""Chunks remembered (2 GiB of log); beyond that all are forgotten and looked at again."""
_SPARSE: Final = 8
"""Records spread over more than this many times their size are looked at one by one."""


class WarmRanges:
    """Chunks of the log's files that were found in memory. Belongs to the event loop; never waits."""

    def __init__(self, disk: Disk) -> None:
        self._read = disk.pread_cached
        self._until: dict[int, float] = {}

    def covers(self, file: MappedFile, begin: int, end: int) -> bool:
        """True where [begin, end) of a file, which it has written, is in memory."""
        if begin >= file.hot_from:
            return True
        until = self._until
        start = file.start
        now = monotonic()
        for at in range(begin - begin % CHUNK, min(end, file.hot_from), CHUNK):
            if until.get(start + at, 0.0) < now:
                if self._read(file.fd, min(CHUNK, file.wrote - at), at) is None:
                    return False
                if len(until) >= _MOST:
                    until.clear()
                until[start + at] = now + WARM_SECONDS
        return True

    def covers_all(self, file: MappedFile, places: Sequence[int], sizes: Sequence[int]) -> bool:
        """True where records at rising log offsets are all in memory."""
        start = file.start
        begin, end = places[0] - start, places[-1] + sizes[-1] - start
        if begin >= file.hot_from or end - begin <= _SPARSE * (sum(sizes) + CHUNK):
            return self.covers(file, begin, end)
        return all(
            self.covers(file, place - start, place - start + size) for place, size in zip(places, sizes, strict=True)
        )
