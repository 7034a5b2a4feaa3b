"""The index at start: cut back to the part the checkpoint vouches for, or compared with the log entry by entry.

Valid entries are never discarded: where entries are missing or wrong, the index is cut and rebuilt from the log.
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
    """True if all index files, with all entries, that a checkpoint vouches for exist."""
    at = next((at for at, file in enumerate(files) if file.stamp == mark.index_file), -1)
    return at >= 0 and at == mark.index_files - 1 and files[at].count >= mark.index_count


class _Waiting:
    """Records whose keys are still to be compared."""

    def __init__(self) -> None:
        self.records: list[LogRecord] = []
        self.keys: list[tuple[str, ...]] = []
        self.tagged: list[bool] = []
        """Whether the last key is the tag's."""
        self.texts: list[str] = []


class IndexRecovery:
    """Gets every record from ``load``'s offset on, in log order. Blocks: no client is served yet."""

    def __init__(self, index: IndexService, note: Callable[[str], None]) -> None:
        self._index = index
        self._note = note
        self._entries: Iterator[tuple[int, int, IndexEntry]] | None = None
        self._current: tuple[int, int, IndexEntry] | None = None
        self._waiting = _Waiting()
        self._last_timestamp = 0
        self.rebuilt = 0
        """Keys that were missing in the index."""

    def load(self, mark: CheckpointMark | None, log_min: int, *, clean_exit: bool) -> int:
        """Take the index as far as it is known to be right. Returns the log offset to continue at. Files are loaded."""
        if mark is not None and self._take(mark, clean_exit=clean_exit):
            return mark.position
        self._entries = self._walk()
        self._current = next(self._entries, None)
        return log_min

    def _take(self, mark: CheckpointMark, *, clean_exit: bool) -> bool:
        files = self._index.files
        if mark.index_file < 0:
            self._note("the index was switched off at the last run")
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
        """All entries, each with the position of its file in the list and its number."""
        for at, file in enumerate(list(self._index.files)):
            for number, entry in enumerate(file.entries(), start=1):
                yield at, number, entry

    def put(self, found: LogRecord) -> None:
        """Process a record whose keys belong in the index; called in log order."""
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
        """Compare the waiting records with the entries. From the first record with a missing entry on, put all keys."""
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
        """Advance to the entries of the record at ``phy``. True if all of its hashes are among them.

        ``tagged``: the last hash is the tag's, which not every writer puts. It may only be missing if entries of other
        records follow: otherwise the index may have lost its end.
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
        """End the index in front of the current entry; from here on keys are put."""
        self._entries = None
        if self._current is not None:
            file, number, _ = self._current
            self._note(f"the index is rebuilt from entry {number} of file {self._index.files[file].path} on")
            self._index.cut(file, number, self._last_timestamp)
        self._link_all()

    def _link_all(self) -> None:
        for file in self._index.files:
            if not file.link(self._index.batch):
                self._note(f"chains of the index file {file.path} were repaired")

    async def flush(self) -> bool:
        """Put waiting keys into files; False if the disk has no space."""
        return not self._index.pending or await self._index.flush_pending()

    def finish(self, position: int) -> None:
        """Called at the end of the log: compare the last records and cut what is behind them."""
        if self._waiting.records:
            self._compare()
        if self._entries is None:
            return
        while self._current is not None and self._current[2].phy < position:
            self._current = next(self._entries, None)
        self._cut()
