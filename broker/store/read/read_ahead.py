"""Read-ahead for consumers that work through a part of the log that is no longer in memory.

A record that has to come from the device costs one turn of a thread, whatever its size, and devices are fast with large
reads. So if a consumer requests cold records right behind those of its last request, more than these are brought into
memory: 256 KiB, then twice as much each time, 8 MiB at most. The following pulls are served from memory. The next
window is started when a reader is in the middle of the current one (a mark in PageCache), so that it need not wait at
its end.

Readers are distinguished by their position in the log, not by their names: consumers of several queues, or several
consumers of one queue, that are at the same place share the reads. The bytes that were read ahead are in the system's
page cache, which evicts them when it needs the memory; a stream itself is a few numbers.
"""

import sys
from functools import partial
from typing import Final

import structlog
import trio

from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.disk.page_cache import CHUNK

_log = structlog.get_logger(__name__)

STEP: Final = 1 << 20
"""Bytes of one read: small enough for waiting readers, large enough for a device to be fast."""
FIRST_WINDOW: Final = 1 << 18
LARGEST_WINDOW: Final = 1 << 23
_MEMORY_SHARE: Final = 1 << 11
"""A window is at most this part of the memory: two windows for each of all streams are a sixteenth of it."""
_MARK: Final = 8 * CHUNK
"""Length of the mark: a reader may skip records of other queues."""
MOST_STREAMS: Final = 64
_GAP: Final = STEP
"""A reader that continues this far behind the end of a stream belongs to it: the bytes between are of other queues."""
CONCURRENT_READS: Final = 4
"""Reads at the same time: the other threads of the disk stay free for syncs, and for reads of single records."""


_Piece = tuple[MappedFile, int, int]
"""A file, and a range of positions in it."""


class _Stream:
    """Readers that go through the log at one place. All positions are offsets in the log.

    [begin, end) was read recently, up to ``goal`` will be read; a reader that reaches ``mark`` moves the goal.
    ``keys``: see PageCache.mark.
    """

    __slots__ = ("begin", "changed", "end", "goal", "is_busy", "keys", "mark", "window")

    def __init__(self, begin: int) -> None:
        self.restart(begin)
        self.window = 0
        self.keys: list[tuple[int, int]] = []
        self.is_busy = False
        self.changed = trio.Event()

    def restart(self, begin: int) -> None:
        """Continue at another place."""
        self.begin = self.end = self.goal = begin
        self.mark = sys.maxsize

    def widen(self, position: int, wanted: int, largest: int) -> None:
        """Read one more window for a reader at ``position`` that wants some bytes, unless enough is ahead of it.

        The window is twice as large as the last one, and as ``wanted``: else the reader would never be in its middle.
        """
        if self.window and self.goal - position >= self.window:
            return
        self.window = min(max(2 * self.window, 2 * (wanted + -wanted % CHUNK), FIRST_WINDOW), largest)
        self.begin = max(self.begin, self.goal - self.window)
        self.mark = self.goal + self.window // 2
        self.goal += self.window

    def wake(self) -> None:
        """Wake the waiting readers to check again."""
        self.changed.set()
        self.changed = trio.Event()


class ReadAhead:
    """Brings cold parts of the log into memory. Belongs to the event loop; ``run`` owns the tasks that read."""

    def __init__(self, files: MappedFileQueue, memory: int) -> None:
        """``memory``: bytes of RAM that this process may count on."""
        self._files = files
        self._page_cache = files.page_cache
        self._largest = min(LARGEST_WINDOW, max(memory // _MEMORY_SHARE // CHUNK * CHUNK, FIRST_WINDOW))
        self._streams: list[_Stream] = []
        """In order of use: the last one was used most recently."""
        self._nursery: trio.Nursery | None = None
        self._reads = trio.Semaphore(CONCURRENT_READS)
        self._stopped = trio.Event()
        self._reported: set[str] = set()

    async def run(self) -> None:
        """Own the tasks that read, until ``stop`` and the end of the reads that are under way."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await self._stopped.wait()
        finally:
            self.stop()

    def stop(self) -> None:
        """Start no more reads. Waiting readers return; the reads under way finish on their own."""
        self._nursery = None
        self._stopped.set()
        for stream in list(self._streams):
            self._drop(stream)

    async def bring_in(self, begin: int, end: int) -> None:
        """Return when [begin, end) of the log is in memory, or cannot be brought there: a read of it then reports why.

        The following bytes are read too if a reader has recently read up to ``begin``.
        """
        file = self._files.find(begin)
        if self._nursery is None or file is None or begin >= end:
            return
        at = begin - file.start
        if end <= file.end and self._page_cache.covers(file, at, end - file.start):
            return
        stream = self._stream_at(begin - at % CHUNK, end)
        if stream is None:
            return
        stream.goal = max(stream.goal, end + (file.start - end) % CHUNK)
        self._fill_soon(stream, self._nursery)
        # The event is replaced at each wake-up, so it has to be looked up again each time.
        while stream.end < end and stream.is_busy:
            await stream.changed.wait()

    # -- streams

    def _stream_at(self, begin: int, end: int) -> _Stream | None:
        """The stream that a cold read of [begin, end) belongs to, or a new one; None while all are busy."""
        for stream in reversed(self._streams):
            if stream.begin <= begin <= stream.goal + _GAP:
                if not stream.is_busy:
                    if begin < stream.end:  # evicted again before it was used: start over with a small window
                        stream.window = 0
                    self._forget_mark(stream)
                    stream.restart(begin)
                self._use(stream, begin, end - begin)
                return stream
        if len(self._streams) >= MOST_STREAMS:
            idle = next((stream for stream in self._streams if not stream.is_busy), None)
            if idle is None:
                return None
            self._drop(idle)
        stream = _Stream(begin)
        self._streams.append(stream)
        return stream

    def _use(self, stream: _Stream, position: int, wanted: int) -> None:
        self._streams.remove(stream)
        self._streams.append(stream)
        stream.widen(position, wanted, self._largest)

    def _reached(self, stream: _Stream) -> None:
        """Called when a reader has reached a stream's mark."""
        self._forget_mark(stream)
        if self._nursery is not None:
            self._use(stream, stream.mark, 0)
            self._fill_soon(stream, self._nursery)

    def _drop(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        self._forget_mark(stream)
        # A task that reads for this stream finds its goal reached, and ends after the current read.
        stream.goal = stream.end
        stream.is_busy = False
        stream.wake()

    def _forget_mark(self, stream: _Stream) -> None:
        for key in stream.keys:
            self._page_cache.marks.pop(key, None)
        stream.keys = []

    # -- reading

    def _fill_soon(self, stream: _Stream, nursery: trio.Nursery) -> None:
        """Continue up to the goal. Skip bytes in memory now, so that the mark is set before the reader reaches it."""
        if stream.is_busy:
            return
        piece = self._next(stream)
        if piece is not None:
            stream.is_busy = True
            nursery.start_soon(self._fill, stream, piece)

    async def _fill(self, stream: _Stream, piece: _Piece | None) -> None:
        """Read up to the stream's goal, which may move while this task reads."""
        try:
            while piece is not None:
                file, begin, end = piece
                got = await self._read(file, begin, end)
                # During the read the file may have expired, and this service may have been stopped.
                if self._nursery is None or self._files.find(file.start) is not file:
                    return
                self._take(stream, file, begin, got)
                if got < end:
                    return
                piece = self._next(stream)
                stream.wake()
        finally:
            stream.goal = stream.end
            stream.is_busy = False
            stream.wake()

    def _next(self, stream: _Stream) -> _Piece | None:
        """Skip bytes that are in memory. Returns the next range to read; None at the goal or where nothing is cold."""
        while stream.end < stream.goal:
            file = self._files.find(stream.end)
            if file is None:
                break
            begin = stream.end - file.start
            end = min(begin + STEP, stream.goal - file.start, file.in_memory_from, file.wrote)
            if end <= begin:
                break
            seen = file.in_memory(begin, end)
            if seen < end:
                seen = max(begin, seen - seen % CHUNK)
            self._take(stream, file, begin, seen)
            if seen < end:
                return file, seen, end
        stream.goal = stream.end
        if not stream.window:  # not known yet whether this reader continues: a mark behind the end will show it
            stream.mark = stream.end
            self._mark(stream, stream.end, stream.end + _MARK)
        return None

    def _take(self, stream: _Stream, file: MappedFile, begin: int, end: int) -> None:
        """[begin, end) of a file is in memory: move the end of the stream."""
        self._page_cache.note(file, begin, end)
        self._mark(stream, file.start + begin, file.start + end)
        stream.end = file.start + end

    def _mark(self, stream: _Stream, begin: int, end: int) -> None:
        """Set the part of the mark that is in [begin, end)."""
        begin, end = max(begin, stream.mark), min(end, stream.mark + _MARK)
        file = self._files.find(begin)
        if file is not None:
            end = min(end, file.start + min(file.in_memory_from, file.wrote))
            if begin < end:
                on_check = partial(self._reached, stream)
                stream.keys += self._page_cache.mark(file, begin - file.start, end - file.start, on_check)

    async def _read(self, file: MappedFile, begin: int, end: int) -> int:
        """Read [begin, end); returns the position reached. After an error the read of a record will report it again."""
        file.hold()
        try:
            async with self._reads:
                if self._nursery is None:
                    return begin
                return await self._files.disk.run(file.read_ahead, begin, end)
        except OSError as error:
            if file.path not in self._reported:
                self._reported.add(file.path)
                _log.warning("read_ahead_failed", file=file.path, error=str(error))
            return begin
        finally:
            file.release()
