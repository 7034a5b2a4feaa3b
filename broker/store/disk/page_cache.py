"""Which parts of the log behind its newest end are in memory, as far as a look a moment ago can tell.

A page fault on cold data stops the event loop, so a record may only be read through the map where its pages are in
memory. Those written lately are (``MappedFile.in_memory_from``); of others a chunk that a look has just found there
counts as in memory for two seconds. Where memory is short, the kernel may evict within them pages that were not read.
"""

from array import array
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, TypeAlias

from trimq.broker.store.disk.mapped_file import MappedFile

CHUNK: Final = 32 * 1024
"""Bytes that are in memory together, or not."""
AHEAD: Final = 8
"""Chunks that are looked at together for a consumer, which goes on: the call costs more than what it looks at."""
CACHED_SECONDS: Final = 2
_TICKS: Final = 8
"""Ticks of the clock a second."""
_MOST: Final = 1 << 20
"""Chunks remembered (32 GiB of log, 4 MiB of memory); beyond that all are forgotten and looked at again."""
_SPARSE: Final = 8
"""Records spread over more than this many times their size are looked at one by one."""

Chunks: TypeAlias = "array[int]"
"""For each chunk of a file the tick at which what was seen of it is too old; 0 for what nobody has seen."""


def is_dense(span: int, size: int) -> bool:
    """Whether ``size`` bytes of records that lie in ``span`` bytes of the log are worth to be taken for one piece."""
    return span <= _SPARSE * (size + CHUNK)


class PageCache:
    """Chunks of the log's files that were found in memory. Belongs to the event loop; never waits."""

    def __init__(self) -> None:
        self._chunks: dict[int, Chunks] = {}
        self._count = 0
        self.marks: dict[tuple[int, int], Callable[[], None]] = {}
        """Who hears of the first look at a chunk, by the file's start and the chunk's number (see ``mark``)."""

    @staticmethod
    def tick() -> int:
        """The time for ``chunks_of``: chunks with a later one are in memory."""
        return int(monotonic() * _TICKS)

    def chunks_of(self, file: MappedFile) -> Chunks:
        """What was seen of a file's chunks; after another call it may be out of use, and still says the truth.

        A row of numbers: a dict of as many chunks was two or three cache misses for each record of a query.
        """
        chunks = self._chunks.get(file.start)
        if chunks is None:
            count = -(-file.size // CHUNK)
            if self._count + count > _MOST:
                self._chunks.clear()
                self._count = 0
            chunks = self._chunks[file.start] = array("I", bytes(4 * count))
            self._count += count
        return chunks

    def covers(self, file: MappedFile, begin: int, end: int, ahead: int = 1) -> bool:
        """True where [begin, end) of a file, which it has written, is in memory; looks ``ahead`` chunks far."""
        if begin >= file.in_memory_from:
            return True
        chunks = self.chunks_of(file)
        tick = int(monotonic() * _TICKS)
        first, last = begin // CHUNK, (min(end, file.in_memory_from) - 1) // CHUNK
        if chunks[first] > tick and (last <= first or min(chunks[first : last + 1]) > tick):
            return True
        for number in range(first, max(first, last) + 1):  # a unit that the device has spoilt may tell of no bytes
            if chunks[number] <= tick and not self._look(file, chunks, number, ahead, tick):
                return False
        return True

    def _look(self, file: MappedFile, chunks: Chunks, number: int, count: int, tick: int) -> bool:
        """Note which of ``count`` chunks are in memory; False where the first of them is not."""
        at, wrote = number * CHUNK, file.wrote
        seen = file.in_memory(at, min(at + count * CHUNK, wrote))
        if seen < min(at + CHUNK, wrote):
            return False
        end = seen // CHUNK if seen < wrote else -(-seen // CHUNK)
        chunks[number:end] = array("I", [tick + CACHED_SECONDS * _TICKS]) * (end - number)
        if self.marks:
            self._tell(file, number, end)
        return True

    def _tell(self, file: MappedFile, number: int, end: int) -> None:
        for chunk in range(number, end):
            hear = self.marks.pop((file.start, chunk), None)
            if hear is not None:
                hear()

    def note(self, file: MappedFile, begin: int, end: int) -> None:
        """[begin, end) of a file has just been read from the device; a chunk counts where all of it was."""
        chunks = self.chunks_of(file)
        first, last = -(-begin // CHUNK), end // CHUNK if end < file.wrote else -(-end // CHUNK)
        if first < last:
            chunks[first:last] = array("I", [self.tick() + CACHED_SECONDS * _TICKS]) * (last - first)

    def mark(self, file: MappedFile, begin: int, end: int, hear: Callable[[], None]) -> list[tuple[int, int]]:
        """Call ``hear`` when somebody comes to a chunk of [begin, end), once for each; their keys in ``marks``.

        Nobody else pays for it: these chunks count as not seen, so that a look has to be made there.
        """
        self.forget(file, begin, end)
        keys = [(file.start, number) for number in range(begin // CHUNK, -(-end // CHUNK))]
        self.marks.update(dict.fromkeys(keys, hear))
        return keys

    def is_read(self, file: MappedFile, begin: int, end: int) -> bool:
        """True where somebody has looked at a part of [begin, end) of a file a moment ago."""
        chunks = self._chunks.get(file.start)
        return chunks is not None and max(chunks[begin // CHUNK : -(-end // CHUNK)], default=0) > self.tick()

    def forget(self, file: MappedFile, begin: int, end: int) -> None:
        """[begin, end) of a file has left memory."""
        chunks = self._chunks.get(file.start)
        if chunks is not None:
            for number in range(begin // CHUNK, -(-end // CHUNK)):
                chunks[number] = 0

    def covers_all(self, file: MappedFile, places: Sequence[int], sizes: Sequence[int]) -> bool:
        """True where records at rising log offsets are all in memory."""
        start = file.start
        begin, end = places[0] - start, places[-1] + sizes[-1] - start
        if begin >= file.in_memory_from or is_dense(end - begin, sum(sizes)):
            return self.covers(file, begin, end, AHEAD)
        return all(
            self.covers(file, place - start, place - start + size) for place, size in zip(places, sizes, strict=True)
        )
