"""The index at start: cut back to what the checkpoint vouches for, or compared with the log entry by entry.

Nothing is thrown away: where entries are missing or wrong, the index is cut there and goes on from the log.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from trimq.broker.store.index.index_file import IndexEntry, IndexFile
from trimq.broker.store.index.index_service import IndexService
from trimq.broker.store.log.log_scan import LogRecord
from trimq.protocol.checkpoint_layout import CheckpointMark
from trimq.protocol.message_keys import TAG_KEY, index_keys_of
from trimq.protocol.property_names import PROPERTY_TAGS
from trimq.protocol.property_text import property_of

_BATCH: Final = 512


def is_known_index(files: Sequence[IndexFile], mark: CheckpointMark) -> bool:
    """True where there are all the index files, with all the entries, that a checkpoint vouches for."""
    at = next((at for at, file in enumerate(files) if file.stamp == mark.index_file), -1)
    return at >= 0 and at == mark.index_files - 1 and files[at].count >= mark.index_count


class _Waiting:
    """Records whose keys are still to be looked for."""

    def __init__(self) -> None:
        self.records: list[LogRecord] = []
        self.keys: list[tuple[str, ...]] = []
        self.tagged: list[bool] = []
        """Whether the last key is that of the tag."""
        self.texts: list[str] = []


class IndexRecovery:
    """Hears of every record from ``load``'s offset on, in the order of the log. Blocks: nobody is served yet."""

    def __init__(self, index: IndexService, note: Callable[[str], None]) -> None:
        self._index = index
        self._note = note
        self._entries: Iterator[tuple[int, int, IndexEntry]] | None = None
        self._current: tuple[int, int, IndexEntry] | None = None
        self._waiting = _Waiting()
        self._last_timestamp = 0
        self.rebuilt = 0
        """Keys that were missing."""

    def load(self, mark: CheckpointMark | None, log_min: int, *, clean_exit: bool) -> int:
        """Take the index as far as it is known to be right; where in the log to go on. The files are loaded."""
        if mark is not None and self._take(mark, clean_exit=clean_exit):
            return mark.position
        self._entries = self._walk()
        self._current = next(self._entries, None)
        return log_min

    def _take(self, mark: CheckpointMark, *, clean_exit: bool) -> bool:
        files = self._index.files
        if mark.index_file < 0:
            self._note("the index was not kept the last time")
            return False
        if mark.index_file == 0:
            self._index.clear()
            return True
        at = mark.index_files - 1
        if not is_known_index(files, mark):
            self._note("the index files are not those that the checkpoint knows")
            return False
        if not (clean_exit and mark.clean) or len(files) > at + 1 or files[at].count != mark.index_count:
            self._index.cut(at, mark.index_count, mark.store_timestamp)
        return True

    def _walk(self) -> Iterator[tuple[int, int, IndexEntry]]:
        """All entries with their file's position in the list and their number."""
        for at, file in enumerate(list(self._index.files)):
            for number, entry in enumerate(file.entries(), start=1):
                yield at, number, entry

    def put(self, found: LogRecord) -> None:
        """A record whose keys belong into the index; in the order of the log."""
        if not found.properties:
            return
        keys = index_keys_of(found.properties)
        tag = property_of(found.properties, PROPERTY_TAGS) if self._index.tags else ""
        if tag:
            keys = (*keys, TAG_KEY + tag)
        elif not keys:
            return
        if self._entries is None:
            self._index.put(found.topic, keys, found.phy, found.store_timestamp)
            self.rebuilt += len(keys)
            return
        waiting = self._waiting
        waiting.records.append(found)
        waiting.keys.append(keys)
        waiting.tagged.append(bool(tag))
        waiting.texts += [f"{found.topic}#{key}" for key in keys]
        if len(waiting.records) >= _BATCH:
            self._compare()

    def _compare(self) -> None:
        """Look whether the entries of the waiting records are all there; from the first that is not on, put them."""
        waiting, self._waiting = self._waiting, _Waiting()
        hashes = self._index.batch.key_hashes(waiting.texts)
        done = 0
        for found, keys, tagged in zip(waiting.records, waiting.keys, waiting.tagged, strict=True):
            wanted = hashes[done : done + len(keys)]
            done += len(keys)
            if self._entries is not None and not self._has(found.phy, wanted, tagged=tagged):
                self._cut()
            if self._entries is None:
                self._index.put(found.topic, keys, found.phy, found.store_timestamp)
                self.rebuilt += len(keys)
            else:
                self._last_timestamp = found.store_timestamp

    def _has(self, phy: int, wanted: list[int], *, tagged: bool) -> bool:
        """Go on to the entries of the record at ``phy``; True where all of its hashes are among them.

        ``tagged``: the last one is that of its tag, which not every writer puts. It may only be missing where entries
        of other records follow: else the end of the index may be what is missing.
        """
        assert self._entries is not None
        current = self._current
        while current is not None and current[2].phy < phy:
            current = next(self._entries, None)
        self._current = first = current
        found = set()
        while current is not None and current[2].phy == phy:
            found.add(current[2].key_hash)
            current = next(self._entries, None)
        needed = wanted[:-1] if tagged and current is not None else wanted
        if not found.issuperset(needed):
            self._current = first
            return False
        self._current = current
        return True

    def _cut(self) -> None:
        """The index ends in front of the current entry; from here on keys are put."""
        self._entries = None
        if self._current is not None:
            file, number, _ = self._current
            self._note(f"the index is built anew from entry {number} of file {self._index.files[file].path} on")
            self._index.cut(file, number, self._last_timestamp)
        self._link_all()

    def _link_all(self) -> None:
        for file in self._index.files:
            if not file.link(self._index.batch):
                self._note(f"chains of the index file {file.path} were mended")

    async def flush(self) -> bool:
        """Put what waits into files; False where the disk has no room."""
        return not self._index.pending or await self._index.flush_pending()

    def finish(self, position: int) -> None:
        """The log has been read to its end."""
        if self._waiting.records:
            self._compare()
        if self._entries is None:
            return
        while self._current is not None and self._current[2].phy < position:
            self._current = next(self._entries, None)
        self._cut()
