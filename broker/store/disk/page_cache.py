"""Which parts of the log behind its newest end are in memory, as far as a recent check can know.

A page fault on cold data stops the event loop, so a record may only be read through the map if its pages are in memory.
Recently written pages are (``MappedFile.in_memory_from``). Of others, a chunk that a check has just found in memory
counts as in memory for two seconds. If memory is short, the kernel may evict unread pages within that time.
"""

from array import array
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, TypeAlias

from trimq.broker.store.disk.mapped_file import MappedFile

CHUNK: Final = 32 * 1024
"""Bytes that are treated as in memory, or not, as one unit."""
AHEAD: Final = 8
"""Chunks that are checked together for a consumer, which will go on: the call costs more than each further chunk."""
CACHED_SECONDS: Final = 2
_TICKS: Final = 8
"""Clock ticks per second."""
_MOST: Final = 1 << 20
"""Chunks remembered (32 GiB of log, 4 MiB of memory); beyond that all are forgotten and checked again."""
_SPARSE: Final = 8
"""Records spread over more than this many times their size are checked one by one."""

Chunks: TypeAlias = "array[int]"
"""For each chunk of a file the tick at which its last check expires; 0 if it was not checked."""


def is_dense(span: int, size: int) -> bool:
    """Whether ``size`` bytes of records within ``span`` bytes of the log should be treated as one piece."""
    return span <= _SPARSE * (size + CHUNK)


class PageCache:
    """Chunks of the log's files that were found in memory. Belongs to the event loop; never waits."""

    def __init__(self) -> None:
        self._chunks: dict[int, Chunks] = {}
        self._count = 0
        self.marks: dict[tuple[int, int], Callable[[], None]] = {}
        """Callbacks for the first check of a chunk, by the file's start and the chunk's number (see ``mark``)."""

    @staticmethod
    def tick() -> int:
        """The current time for comparison with ``chunks_of``: chunks with a later tick are in memory."""
        return int(monotonic() * _TICKS)

    def chunks_of(self, file: MappedFile) -> Chunks:
        """The checks of a file's chunks. After another call it may no longer be updated, but what it holds stays true.

        An array: a dict of as many chunks cost two or three cache misses for each record of a query.
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
        """True if [begin, end) of a file, which is written, is in memory. A check covers ``ahead`` chunks."""
        if begin >= file.in_memory_from:
            return True
        chunks = self.chunks_of(file)
        tick = int(monotonic() * _TICKS)
        first, last = begin // CHUNK, (min(end, file.in_memory_from) - 1) // CHUNK
        if chunks[first] > tick and (last <= first or min(chunks[first : last + 1]) > tick):
            return True
        for number in range(first, max(first, last) + 1):  # a corrupt unit may have no bytes: end <= begin
            if chunks[number] <= tick and not self._look(file, chunks, number, ahead, tick):
                return False
        return True

    def _look(self, file: MappedFile, chunks: Chunks, number: int, count: int, tick: int) -> bool:
        """Record which of ``count`` chunks are in memory. Returns False if the first of them is not."""
        at, wrote = number * CHUNK, file.wrote
        seen = file.in_memory(at, min(at + count * CHUNK, wrote))
        if seen < min(at + CHUNK, wrote):
            return False
        # A chunk counts only if all of its pages are in memory; the last chunk ends where the records end.
        end = seen // CHUNK if seen < wrote else -(-seen // CHUNK)
        chunks[number:end] = array("I", [tick + CACHED_SECONDS * _TICKS]) * (end - number)
        if self.marks:
            self._notify(file, number, end)
        return True

    def _notify(self, file: MappedFile, number: int, end: int) -> None:
        for chunk in range(number, end):
            on_check = self.marks.pop((file.start, chunk), None)
            if on_check is not None:
                on_check()

    def note(self, file: MappedFile, begin: int, end: int) -> None:
        """[begin, end) of a file has just been read from the device. Only whole chunks count."""
        chunks = self.chunks_of(file)
        first, last = -(-begin // CHUNK), end // CHUNK if end < file.wrote else -(-end // CHUNK)
        if first < last:
            chunks[first:last] = array("I", [self.tick() + CACHED_SECONDS * _TICKS]) * (last - first)

    def mark(self, file: MappedFile, begin: int, end: int, on_check: Callable[[], None]) -> list[tuple[int, int]]:
        """Call ``on_check`` when a reader reaches a chunk of [begin, end), once for each. Returns the ``marks`` keys.

        Other readers pay nothing for it: the marked chunks count as not checked, so that a reader has to check them.
        """
        self.forget(file, begin, end)
        keys = [(file.start, number) for number in range(begin // CHUNK, -(-end // CHUNK))]
        self.marks.update(dict.fromkeys(keys, on_check))
        return keys

    def is_read(self, file: MappedFile, begin: int, end: int) -> bool:
        """True if a reader has checked a part of [begin, end) of a file recently."""
        chunks = self._chunks.get(file.start)
        return chunks is not None and max(chunks[begin // CHUNK : -(-end // CHUNK)], default=0) > self.tick()

    def forget(self, file: MappedFile, begin: int, end: int) -> None:
        """[begin, end) of a file has been evicted from memory."""
        chunks = self._chunks.get(file.start)
        if chunks is not None:
            for number in range(begin // CHUNK, -(-end // CHUNK)):
                chunks[number] = 0

    def covers_all(self, file: MappedFile, places: Sequence[int], sizes: Sequence[int]) -> bool:
        """True if records at rising log offsets are all in memory."""
        start = file.start
        begin, end = places[0] - start, places[-1] + sizes[-1] - start
        if begin >= file.in_memory_from or is_dense(end - begin, sum(sizes)):
            return self.covers(file, begin, end, AHEAD)
        return all(
            self.covers(file, place - start, place - start + size) for place, size in zip(places, sizes, strict=True)
        )
