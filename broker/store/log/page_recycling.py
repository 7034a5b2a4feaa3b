"""Memory for the log's new end out of its old one, where new memory is dear and the log would soon fill all of it.

Every byte that is written takes memory first, which costs 0.1 to 0.7 ms a MiB where there is some. Where the kernel has
to find it (memory is short), or the hypervisor has to (it hands out a page when the guest first touches it, and takes
back what is free), it is 2 to 4 ms: more than all the rest that a message of 64 KiB costs, and than reading it again
from a device. What was written at a quarter of such a pace or more, and lies behind what is read through the map, is
given back then, as much as is taken: the kernel hands out the same memory again. Parts that somebody reads stay, and
all that came in slowly; and of what consumers have yet to read, as much as fits in memory.
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
_DEAR: Final = 0.00125
"""Seconds of processor time for a MiB."""
_PROBE_AFTER: Final = 64
"""Steps for which a dear one is believed; the memory for one more is asked of the kernel then."""
_REMEMBERED: Final = 4096
_BULK: Final = 4
"""What was written at this part of the pace may be given back too, once the log grows at all of it."""


class _Part(NamedTuple):
    file: MappedFile
    begin: int
    end: int


class PageRecycling:
    """Hears of each step of room that was made for the log; ``settle`` lets go of as much where that saves time."""

    def __init__(self, files: MappedFileQueue, bulk_pace: int, unread_bytes: int) -> None:
        """``bulk_pace``: bytes a second; a log that grows more slowly keeps its memory.

        ``unread_bytes``: so much of the log's end stays for who has yet to read it.
        """
        self._files = files
        self._bulk_pace = bulk_pace
        self._unread_bytes = unread_bytes
        self.unread_from: Callable[[], int] = lambda: sys.maxsize
        """Tells from which log offset on somebody has yet to read."""
        self._parts: deque[_Part] = deque(maxlen=_REMEMBERED)
        self._believed = 0
        self._owed = 0
        self._is_off = False

    def made(self, file: MappedFile, begin: int, end: int, *, cost: float, pace: float) -> None:
        """[begin, end) of ``file`` is ready, for ``cost`` seconds of a processor; the log grows at ``pace``."""
        parts = self._parts
        while parts and self._has_left(parts[0].file):
            parts.popleft()
        self._owed = 0
        size = end - begin
        if pace < self._bulk_pace / _BULK or self._is_off:
            return
        self._parts.append(_Part(file, begin, end))
        if pace < self._bulk_pace:
            return
        if cost >= _DEAR * size / _MIB:
            if not self._believed:
                _log.info("log_memory_recycled", cost_us_per_mib=round(cost * 1e6 * _MIB / size))
            self._believed = _PROBE_AFTER
        elif self._believed:
            self._believed -= 1
        self._owed = size if self._believed else 0

    async def settle(self) -> None:
        """Give back what the last step is worth, as far as there is something that nobody needs."""
        while self._owed > 0:
            part = self._next()
            if part is None:
                return
            self._owed -= part.end - part.begin
            try:
                await self._let_go(part)
            except Exception as error:  # noqa: BLE001 - it only saves time: the log goes on without it
                self._is_off = True
                self._parts.clear()
                self._owed = 0
                _log.warning("log_memory_not_given_back", file=part.file.path, error=repr(error))

    def _next(self) -> _Part | None:
        """The oldest part that nobody needs in memory; None while the map is read there, or it is not on the device."""
        parts = self._parts
        wanted = max(self.unread_from(), self._files.max_offset - self._unread_bytes) if parts else 0
        while parts:
            part = parts[0]
            file, begin, end = part
            leaves = self._has_left(file)
            if not leaves and (end > min(file.in_memory_from, file.flushed, wanted - file.start) or file.is_held):
                return None
            parts.popleft()
            if not leaves and not self._files.page_cache.is_read(file, begin, end):
                return part
        return None

    def _has_left(self, file: MappedFile) -> bool:
        """A file that is not in the row any more may be closed by a thread at any time."""
        return self._files.find(file.start) is not file

    async def _let_go(self, part: _Part) -> None:
        file, begin, end = part
        file.hold()
        try:
            await self._files.disk.run(file.let_go, begin, end)
        finally:
            file.release()
        self._files.page_cache.forget(file, begin, end)
