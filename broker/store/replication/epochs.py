"""EpochFileCache: the epochs of a store's log, and their file.

An entry is on disk before the first record of its epoch is appended: a log that has been in other hands is recognized
by its epochs. Source: RocketMQ's EpochFileCache. There an epoch without records is kept instead of the one that follows
it, and a file that cannot be written is only logged.
"""

from collections.abc import Callable
from typing import Final

import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import delete_durably, read_whole, write_durably
from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.protocol.epoch_file import MOST_EPOCHS, Epoch, consistent_point, decode, encode, entry_at

_log = structlog.get_logger(__name__)

_REMEDY: Final = "restore it from a copy, or empty this store: then it copies its master's log"


class EpochFileCache:
    """The list in memory and on disk. ``entries`` is never changed in place.

    What changes it raises OSError if the file cannot be written; the list is as before then.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self.path = path
        self.entries: list[Epoch] = []
        self._lock = trio.Lock()

    @property
    def last_epoch(self) -> int:
        """The number of the newest epoch; -1 if there is none."""
        return self.entries[-1].number if self.entries else -1

    def load(self) -> None:
        """Read the file, before anything in the store is changed. Blocks. Raises StoreLoadError, OSError."""
        data = read_whole(self._disk, self.path)
        if data is None:
            # RocketMQ renames the old file before the new one has its name. The old one may lack the last epoch.
            if self._disk.stat(self.path + ".bak") is not None:
                raise StoreLoadError(f"{self.path} is missing, but there is {self.path}.bak: {_REMEDY}")
            self.entries = []
            return
        try:
            self.entries = decode(data)
        except ValueError as error:
            raise StoreLoadError(f"{self.path} is damaged, {error}: {_REMEDY}") from error

    async def append(self, number: int, start: int) -> None:
        """An epoch begins at the end of the log. A last one that begins there too has no records, and is replaced.

        Raises ValueError if the last epoch is not older, or begins later.
        """
        async with self._lock:
            entries = self.entries
            while entries and entries[-1].start == start and entries[-1].number < number:
                entries = entries[:-1]
            if entries and (entries[-1].number >= number or entries[-1].start > start):
                raise ValueError(f"epoch {number} from {start} on cannot follow {entries[-1]}")
            # The oldest is forgotten if there are too many: no list in a handshake may be longer.
            await self._save([*entries[-MOST_EPOCHS + 1 :], Epoch(number, start)])
        _log.info("epoch_begun", epoch=number, start=start)

    async def truncate_suffix(self, log_end: int, *, empty: bool = True) -> None:
        """The log ends at ``log_end``: forget the epochs that begin later, and with ``empty`` one that begins there."""
        await self._keep(lambda entry, _end: entry.start < log_end or (not empty and entry.start == log_end))

    async def truncate_prefix(self, log_min: int) -> None:
        """The log begins at ``log_min`` now: forget the epochs that have ended by then."""
        await self._keep(lambda _entry, end: end is None or end > log_min)

    async def _keep(self, keeps: Callable[[Epoch, int | None], bool]) -> None:
        async with self._lock:
            entries = self.entries
            ends: list[int | None] = [entry.start for entry in entries[1:]]
            kept = [entry for entry, end in zip(entries, [*ends, None], strict=False) if keeps(entry, end)]
            if kept != entries:
                await self._save(kept)

    async def _save(self, entries: list[Epoch]) -> None:
        if self._disk.stat(self.path + ".bak") is not None:  # of RocketMQ, which reads it if the file is missing
            await self._disk.run(delete_durably, self._disk, self.path + ".bak")
        if entries:
            await self._disk.run(write_durably, self._disk, self.path, encode(entries))
        else:
            await self._disk.run(delete_durably, self._disk, self.path)
        self.entries = entries

    def entry_of(self, offset: int) -> tuple[Epoch, int | None] | None:
        """The epoch that the byte at ``offset`` is of, and where it ends (None: it is the last). None if not known."""
        return entry_at(self.entries, offset)

    def consistent_point(self, log_end: int, others: list[Epoch], others_end: int) -> int | None:
        """Up to where this log, which ends at ``log_end``, is the same as another one; None if nowhere."""
        return consistent_point(self.entries, log_end, others, others_end)
