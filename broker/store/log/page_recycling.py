"""Recycles memory from the old end of the log for its new end, where new memory is expensive and the log fills it fast.

Every byte written needs memory first, which costs 0.1 to 0.7 ms a MiB if memory is free. If the kernel has to reclaim
it (memory is short), or the hypervisor has to provide it (it hands out a page when the guest first touches it, and
takes free pages back), it costs 2 to 4 ms: more than all other work for a message of 64 KiB, and more than reading it
again from a device. In that case each allocation evicts as many bytes as it took, from the parts that were written at a
quarter of such a pace or more and are no longer read through the map: the kernel hands out the same memory again.
Parts that are being read stay in memory, and so do all that were written slowly, and as much of the unread messages as
fits.
"""

import sys
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue

_log = structlog.get_logger(__name__)

_MIB: Final = 1 << 20
_EXPENSIVE: Final = 0.00125
"""Seconds of processor time for a MiB from which on new memory counts as expensive."""
_PROBE_AFTER: Final = 64
"""Steps for which one expensive step is believed; after them one step takes memory from the kernel again."""
_REMEMBERED: Final = 4096
_BULK: Final = 4
"""Parts written at this fraction of the bulk pace may be evicted too, once the log grows at the full pace."""


class _Part(NamedTuple):
    file: MappedFile
    begin: int
    end: int


class PageRecycling:
    """Notified of each allocated step of the log; ``settle`` evicts as much where that saves time."""

    def __init__(self, files: MappedFileQueue, bulk_pace: int, unread_bytes: int) -> None:
        """``bulk_pace``: bytes a second; a log that grows more slowly keeps its memory.

        ``unread_bytes``: this much of the log's end stays in memory for consumers that have yet to read it.
        """
        self._files = files
        self._bulk_pace = bulk_pace
        self._unread_bytes = unread_bytes
        self.unread_from: Callable[[], int] = lambda: sys.maxsize
        """Returns the lowest log offset that a consumer has yet to read."""
        self._parts: deque[_Part] = deque(maxlen=_REMEMBERED)
        self._believed = 0
        self._to_evict = 0
        self._is_off = False

    def made(self, file: MappedFile, begin: int, end: int, *, cost: float, pace: float) -> None:
        """[begin, end) of ``file`` was allocated for ``cost`` seconds of a processor; the log grows at ``pace``."""
        parts = self._parts
        while parts and self._is_removed(parts[0].file):
            parts.popleft()
        self._to_evict = 0
        size = end - begin
        if pace < self._bulk_pace / _BULK or self._is_off:
            return
        self._parts.append(_Part(file, begin, end))
        if pace < self._bulk_pace:
            return
        if cost >= _EXPENSIVE * size / _MIB:
            if not self._believed:
                _log.info("log_memory_recycled", cost_us_per_mib=round(cost * 1e6 * _MIB / size))
            self._believed = _PROBE_AFTER
        elif self._believed:
            self._believed -= 1
        self._to_evict = size if self._believed else 0

    async def settle(self) -> None:
        """Evict as many bytes as the last step allocated, as far as there are parts that are not needed."""
        while self._to_evict > 0:
            part = self._next()
            if part is None:
                return
            self._to_evict -= part.end - part.begin
            try:
                await self._evict(part)
            except Exception as error:  # noqa: BLE001 - recycling only saves time: the log goes on without it
                self._is_off = True
                self._parts.clear()
                self._to_evict = 0
                _log.warning("log_memory_not_given_back", file=part.file.path, error=repr(error))

    def _next(self) -> _Part | None:
        """The oldest part that is not needed in memory; None while the map is read there, or it is not yet flushed."""
        parts = self._parts
        wanted = max(self.unread_from(), self._files.max_offset - self._unread_bytes) if parts else 0
        while parts:
            part = parts[0]
            file, begin, end = part
            is_removed = self._is_removed(file)
            # Parts are in log order: if the oldest one must stay, so must all later ones.
            if not is_removed and (end > min(file.in_memory_from, file.flushed, wanted - file.start) or file.is_held):
                return None
            parts.popleft()
            if not is_removed and not self._files.page_cache.is_read(file, begin, end):
                return part
        return None

    def _is_removed(self, file: MappedFile) -> bool:
        """True if the file is no longer in the queue of files: a thread may close it at any time."""
        return self._files.find(file.start) is not file

    async def _evict(self, part: _Part) -> None:
        file, begin, end = part
        file.hold()
        try:
            await self._files.disk.run(file.evict, begin, end)
        finally:
            file.release()
        self._files.page_cache.forget(file, begin, end)
