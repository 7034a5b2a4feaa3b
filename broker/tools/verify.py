"""Checks that a store is consistent: every record, the chain of log files, queues, index, checkpoint, state files.

The log is read once. Queues and index are read in parallel to it in their own order, so memory does not grow with the
log.
"""

import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from trimq.broker.store.index.index_file import IndexEntry, IndexFile
from trimq.broker.store.log.log_scan import Damage, LogRecord, LogWalk, NoRecordError, RecordReader, properties_of
from trimq.broker.store.queue.consume_queue import QueueShape
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.queue.queue_sizes import file_lengths, wrong_file
from trimq.broker.store.queue.queue_snapshot import read_snapshot, what_changed
from trimq.broker.store.recovery.checkpoint import known_log
from trimq.broker.store.recovery.index_recovery import is_known_index
from trimq.broker.tools.offline_store import OfflineStore
from trimq.broker.tools.verdicts import Faults, Verdict
from trimq.protocol import checkpoint_layout, lenient_json
from trimq.protocol.checkpoint_layout import CheckpointMark
from trimq.protocol.dispatch_rules import IN_INDEX, IN_QUEUE, KIND, unit_tags_code
from trimq.protocol.hashing import key_hash
from trimq.protocol.index_layout import HEADER_SIZE, SLOT_SIZE
from trimq.protocol.message_keys import TAG_KEY, index_keys
from trimq.protocol.property_names import PROPERTY_TAGS
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT, UNIT_SIZE, is_unit_of
from trimq.protocol.topic_rules import SCHEDULE_TOPIC

_CHUNK: Final = 512
_FAR: Final = 1 << 62
_PROGRESS_EVERY: Final = 1024

Progress = Callable[[int], None]
"""Called with the number of bytes of the log that have been read."""


class Report(Struct):
    """The result of a verification."""

    root: str
    stopped_in_order: bool
    records: int = 0
    log_files: int = 0
    log_start: int = 0
    log_end: int = 0
    queues: int = 0
    units: int = 0
    index_files: int = 0
    index_entries: int = 0
    keys: int = 0
    tags: int = 0
    """Records whose tag is in the index."""
    untagged: int = 0
    """Records whose tag is not in the index: it was switched off, or a broker before 5.5 wrote them."""
    superseded: int = 0
    """Records that no queue unit points to, because their topic was deleted and created again."""
    log: Faults = field(default_factory=Faults)
    state: Faults = field(default_factory=Faults)
    consume_queues: Faults = field(default_factory=Faults)
    index: Faults = field(default_factory=Faults)
    checkpoint: Faults = field(default_factory=Faults)
    start_mends: bool = True
    """Whether the next start finds and repairs all faults of queues, index and checkpoint.

    False if only a rebuild does: after an orderly stop a start reads only the end of each queue, and after a kill only
    the log behind the checkpoint and the units of its records.
    """
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """The exit code for the faults found."""
        if self.log.count or self.state.count:
            return Verdict.DAMAGED
        return Verdict.REPAIRABLE if self.derived_faults else Verdict.SOUND

    @property
    def derived_faults(self) -> int:
        """The number of faults in files that can be rebuilt from the log."""
        return self.consume_queues.count + self.index.count + self.checkpoint.count


class _Queue:
    """The files of one queue, read in the order of its records."""

    def __init__(self, store: OfflineStore, files: list[tuple[int, str]]) -> None:
        self._store = store
        self._files = dict(files)
        self._size = store.config.consume_queue_file_size
        self._chunk = b""
        self._chunk_at = 0
        self.next = -1
        """The queue offset after the last record seen; -1 before the first."""

    def unit(self, offset: int) -> bytes:
        """The unit at an offset; b"" if no file has it."""
        at = (offset - self._chunk_at) * UNIT_SIZE
        if not 0 <= at < len(self._chunk):
            start = offset * UNIT_SIZE // self._size * self._size
            path = self._files.get(start)
            self._chunk_at, at = offset, 0
            self._chunk = self._read(path, offset * UNIT_SIZE - start) if path is not None else b""
        unit = self._chunk[at : at + UNIT_SIZE]
        return unit if len(unit) == UNIT_SIZE else b""

    def _read(self, path: str, at: int) -> bytes:
        disk = self._store.disk
        fd = disk.open(path)
        try:
            return disk.pread(fd, min(_CHUNK * UNIT_SIZE, self._size - at), at)
        finally:
            disk.close(fd)

    def units_from(self, offset: int) -> int:
        """The number of units from an offset on."""
        count = 0
        while len(unit := self.unit(offset + count)) == UNIT_SIZE and any(unit):
            count += 1
        return count


class Verification:
    """One verification. ``run`` does it and fills ``report``."""

    def __init__(self, store: OfflineStore) -> None:
        self._store = store
        self.report = Report(store.root, store.stopped_in_order)
        self._reader = RecordReader(store.config.mapped_file_size_commit_log)
        shape = QueueShape(store.config.consume_queue_file_size // UNIT_SIZE, store.config.mapped_file_size_commit_log)
        self._consume_queues = ConsumeQueueStore(store.disk, store.root, shape)
        self._delays = store.config.delay_levels_ms
        self._mark: CheckpointMark | None = None
        self._queue_files_wrong = False
        self._index_files_wrong = False
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._entries: Iterator[IndexEntry] = iter(())
        self._entry: IndexEntry | None = None
        self._has_index = False

    def run(self, progress: Progress) -> Report:
        """Check everything. Raises OSError."""
        store, report = self._store, self.report
        for text in store.open_log():
            report.log.add(text)
        report.log_files, report.log_start = len(store.files), store.log_start
        self._open_queues()
        self._open_index()
        self._walk(progress)
        # After the log: units and entries beyond the last record, and a checkpoint beyond the end of the log.
        self._end_queues()
        self._end_index()
        self._check_checkpoint()
        self._predict_start()  # needs all faults of queues and index, and the checkpoint
        self._check_state_files()
        report.notes += store.notes
        if not store.stopped_in_order:
            report.notes.append("the last stop was not an orderly one: the next start recovers the store")
        return report

    # -- the log

    def _walk(self, progress: Progress) -> None:
        report = self.report
        if not self._store.files:
            return
        walk = LogWalk(self._store.disk, self._store.files, report.log_start, self._reader)
        while (found := walk.step()) is not None:
            if isinstance(found, LogRecord):
                report.records += 1
                self._check_unit(found)
                self._check_keys(found)
                if not report.records % _PROGRESS_EVERY:
                    progress(walk.position - report.log_start)
            elif isinstance(found, Damage):
                report.log.add(f"{found.length} bytes at offset {found.phy} are not a record: {found.why}")
        report.log_end = walk.position

    # -- queues

    def _open_queues(self) -> None:
        size = self._store.config.consume_queue_file_size
        for key, files in self._store.queues().items():
            lengths = file_lengths(self._store.disk, self._store.queue_directory(*key))
            if why := wrong_file(self._store.queue_directory(*key), lengths, size):
                self._queue_files_wrong = True
                self.report.consume_queues.add(f"queue {key[0]}/{key[1]}: {why}")
            elif files and lengths[files[-1][0]] != size:
                self.report.consume_queues.add(f"{files[-1][1]} has {lengths[files[-1][0]]} bytes, {size} are expected")
            self._queues[key] = _Queue(self._store, files)
        self.report.queues = len(self._queues)

    def _check_unit(self, found: LogRecord) -> None:
        if not IN_QUEUE[found.sys_flag & KIND]:
            return
        queue = self._queues.get((found.topic, found.queue_id))
        name = f"{found.topic}/{found.queue_id}"
        if queue is None:
            self._queue_files_wrong = True
            self.report.consume_queues.add(f"queue {name} of the record at {found.phy} does not exist")
            return
        unit = queue.unit(found.queue_offset)
        delayed = found.topic == SCHEDULE_TOPIC
        code = unit_tags_code(found.topic, found.properties, found.store_timestamp, self._delays)
        if is_unit_of(unit, found.phy, found.size, code, delayed=delayed):
            self.report.units += 1
            if queue.next not in (-1, found.queue_offset):
                self._gap(queue, name, found)
            queue.next = found.queue_offset + 1
        elif self._is_superseded(found, unit):
            self.report.superseded += 1
        else:
            actual = str(UNIT.unpack(unit)) if len(unit) == UNIT_SIZE else "nothing"
            self.report.consume_queues.add(
                f"queue {name} at {found.queue_offset}: {actual} for the record at {found.phy}"
            )
            queue.next = max(queue.next, found.queue_offset + 1)

    def _gap(self, queue: _Queue, name: str, found: LogRecord) -> None:
        """Check offsets that no record has. Their units must be fillers, which stand for damaged records."""
        missing = range(queue.next, found.queue_offset)
        if not all(UNIT.unpack(queue.unit(offset) or bytes(UNIT_SIZE))[1] == FILLER_SIZE for offset in missing):
            self.report.consume_queues.add(f"queue {name}: no record has the offsets {missing.start} to {missing.stop}")

    def _is_superseded(self, found: LogRecord, unit: bytes) -> bool:
        """True if the unit points to a later record with the same topic, queue and offset."""
        if len(unit) < UNIT_SIZE:
            return False
        phy, size, _ = UNIT.unpack(unit)
        file = next((file for file in self._store.files if file.start <= phy < file.end), None)
        if phy <= found.phy or file is None:
            return False
        try:
            other = self._reader.read(file.view, phy - file.start, phy)
        except NoRecordError:
            return False
        place = (found.topic, found.queue_id, found.queue_offset)
        return (
            isinstance(other, LogRecord)
            and other.size == size
            and (other.topic, other.queue_id, other.queue_offset) == place
        )

    def _end_queues(self) -> None:
        for (topic, queue_id), queue in self._queues.items():
            if queue.next >= 0 and (more := queue.units_from(queue.next)):
                self.report.consume_queues.add(
                    f"queue {topic}/{queue_id}: {more} units from {queue.next} on point to no record"
                )

    # -- index

    def _open_index(self) -> None:
        for text in self._store.open_index():
            self._index_files_wrong = True
            self.report.index.add(text)
        files = self._store.index_files
        self._has_index = bool(files)
        self.report.index_files = len(files)
        for file in files:
            self.report.index_entries += file.count - 1
            self._check_chains(file)
        self._entries = (entry for file in files for entry in file.entries())
        self._entry = next(self._entries, None)

    def _check_chains(self, file: IndexFile) -> None:
        """Check that every entry can be reached: each has to point to the previous one of its slot."""
        slots = file.shape.slots
        heads = array("i", bytes(SLOT_SIZE * slots))
        for number, entry in enumerate(file.entries(), start=1):
            slot = entry.key_hash % slots
            if entry.previous != heads[slot]:
                self.report.index.add(f"{file.path}: entry {number} points to {entry.previous}, not {heads[slot]}")
            heads[slot] = number
        table = array("i", file.view[HEADER_SIZE : HEADER_SIZE + slots * SLOT_SIZE].tobytes())
        if sys.byteorder == "little":
            table.byteswap()
        if table != heads:
            for slot, (actual, number) in enumerate(zip(table, heads, strict=True)):
                if actual != number:
                    self.report.index.add(f"{file.path}: slot {slot} points to {actual}, its newest entry is {number}")

    def _check_keys(self, found: LogRecord) -> None:
        if not self._has_index or not IN_INDEX[found.sys_flag & KIND]:
            return
        properties = properties_of(found)
        keys = index_keys(properties)
        hashes = self._hashes_at(found.phy)
        self.report.keys += len(keys)
        for key in keys:
            wanted = key_hash(found.topic, key)
            if wanted not in hashes and not self._is_found(wanted, found.phy):
                self.report.index.add(f"the record at {found.phy} is not found by {key!r}")
        if tag := properties.get(PROPERTY_TAGS):  # not every writer indexes tags, so a missing one is no fault
            is_there = key_hash(found.topic, TAG_KEY + tag) in hashes
            self.report.tags += is_there
            self.report.untagged += not is_there

    def _hashes_at(self, phy: int) -> set[int]:
        """The key hashes of the entries for a record. Reads on in the index, which is in the order of the log."""
        entry = self._entry
        while entry is not None and entry.phy < phy:
            entry = next(self._entries, None)
        hashes = set()
        while entry is not None and entry.phy == phy:
            hashes.add(entry.key_hash)
            entry = next(self._entries, None)
        self._entry = entry
        return hashes

    def _is_found(self, wanted: int, phy: int) -> bool:
        """Search as a query does: after a kill RocketMQ writes entries again, so one may be earlier in the index."""
        files = self._store.index_files
        return any(phy in file.select(wanted, 0, _FAR, file.count, wait=True) for file in files)

    def _end_index(self) -> None:
        if self._entry is not None:
            more = 1 + sum(1 for _ in self._entries)
            self.report.index.add(f"{more} entries point beyond the end of the log or are out of order")
        if self.report.untagged:
            self.report.notes.append(
                f"the index does not have the tags of {self.report.untagged} records: they were written with "
                "indexTagEnable=false, or by a broker that does not index tags"
            )
        if not self._has_index and self.report.records:
            self.report.notes.append("there is no index file")

    # -- the small files

    def _check_checkpoint(self) -> None:
        report = self.report
        path = self._store.config.root / "checkpoint"
        if not path.exists():
            report.notes.append("there is no checkpoint: the next start reads the whole log")
            return
        data = path.read_bytes()
        if len(data) != checkpoint_layout.SIZE:
            report.checkpoint.add(f"{path} has {len(data)} bytes, {checkpoint_layout.SIZE} are expected")
            return
        mark = self._mark = checkpoint_layout.decode_mark(data)
        if not self._store.files and (known := known_log(checkpoint_layout.decode(data), mark)):
            report.log.add(f"{self._store.config.commit_log_path} holds no log file, but {path} knows {known}")
        elif mark is None:
            report.notes.append("the checkpoint was written by another broker: the next start reads the whole log")
        elif mark.position > report.log_end:
            report.log.add(f"the log ends at {report.log_end}, but the checkpoint knows it up to {mark.position}")

    def _predict_start(self) -> None:
        """Determine whether the next start compares all faulty parts with the log, and so repairs them."""
        mark, report = self._mark, self.report
        if mark is None or not report.log_start <= mark.position <= report.log_end:
            return  # the start reads the whole log
        sees_queues = self._queue_files_wrong
        if mark.clean and self._store.stopped_in_order:
            states = read_snapshot(self._consume_queues, mark.position, report.log_start)
            sees_queues = sees_queues if states is None else bool(what_changed(self._consume_queues, states))
        sees_index = self._index_files_wrong or not is_known_index(self._store.index_files, mark)
        report.start_mends = (sees_queues or not report.consume_queues.count) and (sees_index or not report.index.count)

    def _check_state_files(self) -> None:
        directory = self._store.config.config_path
        for path in sorted(directory.glob("*.json")) if directory.is_dir() else ():
            if problem := _state_problem(path):
                backup = path.with_name(f"{path.name}.bak")
                text = f"{path} cannot be read: {problem}"
                if backup.exists() and not _state_problem(backup):
                    self.report.notes.append(f"{text}; the next start takes {backup.name}")
                else:
                    self.report.state.add(text)


def _state_problem(path: Path) -> str:
    try:
        state = lenient_json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return str(error)
    return "" if isinstance(state, dict) else "not a JSON object"
