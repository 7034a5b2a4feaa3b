"""Brings log, queues and index of a store into agreement at start, after an orderly stop, a kill or a power cut.

The part that the checkpoint's mark vouches for is taken as it is. From there on (without a mark, or if the store does
not match it: from the start of the log) every record is read and checked, and its queue unit and index entries are
compared or created. Times are never used to decide what is complete. Afterwards each record in the log is in its queue
at its offset and in the index under its keys, and behind the last record there are only zeros.
"""

import sys
import time
from typing import Final

import structlog
import trio
from msgspec import Struct, field

from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.dispatch.dispatcher import StoreDispatcher
from trimq.broker.store.index.index_service import IndexService
from trimq.broker.store.log.log_scan import Blank, Damage, LogRecord, LogWalk, NoRecordError, RecordReader, erase_behind
from trimq.broker.store.queue.consume_queue_flush import FlushConsumeQueueService
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.queue.queue_files import delete_queue_files
from trimq.broker.store.queue.queue_sizes import file_lengths, queue_directories
from trimq.broker.store.recovery.checkpoint import StoreCheckpoint
from trimq.broker.store.recovery.index_recovery import IndexRecovery
from trimq.broker.store.recovery.queue_recovery import QueueRecovery
from trimq.protocol.checkpoint_layout import CheckpointMark
from trimq.protocol.dispatch_rules import IN_INDEX, IN_QUEUE, KIND, unit_tags_code
from trimq.protocol.real_place import WAITING_TOPICS, waiting_for

_log = structlog.get_logger(__name__)

_SLICE: Final = 0.001
_CLOCK_EVERY: Final = 32
"""Records between two reads of the clock."""
_WRITE_EVERY: Final = 64 << 20


class RecoveryReport(Struct):
    """What recovery found and did; ``position`` is the end of the log."""

    position: int = 0
    last_store_timestamp: int = 0
    clean: bool = False
    """The log had nothing to read and nothing to repair."""
    clean_exit: bool = False
    """The store was closed in order before."""
    trusted: bool = False
    """The mark of the checkpoint was valid for log and queues."""
    scanned_from: int = 0
    bytes_total: int = 0
    bytes_done: int = 0
    records: int = 0
    queues: int = 0
    damaged: list[Damage] = field(default_factory=list)
    erased: int = 0
    """Bytes behind the last record that were not zero."""
    units_rebuilt: int = 0
    keys_rebuilt: int = 0
    notes: list[str] = field(default_factory=list)
    """Why parts of the store were not taken as they were."""
    seconds: float = 0.0


class StoreRecovery:
    """One recovery. ``files`` are loaded. No client is served, and no other code touches the store while it runs."""

    def __init__(  # noqa: PLR0913 - the parts of a store meet here
        self,
        files: MappedFileQueue,
        queues: ConsumeQueueStore,
        flush_queues: FlushConsumeQueueService,
        index: IndexService | None,
        checkpoint: StoreCheckpoint,
        dispatcher: StoreDispatcher,
        *,
        clean_exit: bool,
        check_crc: bool = True,
        holds: bool = False,
        cuts: bool = False,
        truncate_at: int | None = None,
    ) -> None:
        """``clean_exit``: the abort file did not exist.

        ``holds``: what the queues do not know yet is not dispatched. That is for a master whose messages are readable
        only when slaves have them: it cannot know whether they have these. Without a checkpoint it does not know either
        what was readable before, and all of the log is dispatched.
        ``cuts``: the log ends at its first damage, even if records follow. Slaves take whole records only.
        ``truncate_at``: records that end behind this offset are erased, even those that were dispatched.
        """
        self._files = files
        self._disk = files.disk
        self._queues = queues
        self._flush_queues = flush_queues
        self._index = index
        self._checkpoint = checkpoint
        self._dispatcher = dispatcher
        self._clean_exit = clean_exit
        self._reader = RecordReader(files.size, check_crc=check_crc)
        self._queue_recovery = QueueRecovery(queues, files, self._note)
        self._index_recovery = IndexRecovery(index, self._note) if index is not None else None
        self._last_record = -1
        self._holds = holds
        self._cuts = cuts
        self._end_at = sys.maxsize
        """Where the log ends at the latest."""
        self._limit = sys.maxsize
        """Records from this log offset on are not dispatched."""
        self._last_timestamp = 0
        self._end_timestamp = 0
        """The store time of the last record, dispatched or not."""
        self._truncate_at = sys.maxsize if truncate_at is None else truncate_at
        self.held: dict[tuple[str, int], int] = {}
        """The next offset of each queue that has records which are not dispatched."""
        self.held_places: dict[str, int] = {}
        """Topics of these records, and topics that records wait for, with the highest queue id."""
        self.report = RecoveryReport(clean_exit=clean_exit)
        """Updated while ``run`` is going on, for a progress bar."""

    @property
    def held_back(self) -> bool:
        """Whether nothing was dispatched that the queues did not know before (``holds``)."""
        return self._limit != sys.maxsize

    async def run(self) -> RecoveryReport:
        """Recover. Raises OSError, StoreLoadError."""
        started = time.perf_counter()
        report = self.report
        if self._index is not None and self._index.load():
            self._note("damaged index files were deleted")
        self._queues.deleted_topics.load()
        if self._files.files:
            mark = self._trusted_mark()
            report.trusted = mark is not None
            log_min = self._files.min_offset
            queues_from = await self._load_queues(mark)
            index_from = queues_from
            if self._holds and mark is not None and queues_from == mark.position:
                self._limit = queues_from
            if self._index_recovery is not None:
                index_from = self._index_recovery.load(mark, log_min, clean_exit=self._clean_exit)
            start = min(log_min if mark is None else mark.position, queues_from, index_from)
            # Files below the old mark will change. If this start is killed, the next one must not trust that mark.
            known = self._checkpoint.mark
            if known is not None and start < known.position:
                await self._checkpoint.forget()
            await self._scan(start, mark, queues_from, index_from)
        else:
            await self._start_empty()
        self._queues.deleted_topics.settle(self._files.min_offset, report.position)
        report.queues = sum(map(len, self._queues.topics().values()))
        report.seconds = time.perf_counter() - started
        self._log_report()
        return report

    async def _start_empty(self) -> None:
        """Start without a log: there are no messages, so queues and index start empty, as in RocketMQ."""
        if self._checkpoint.known_log:
            await self._checkpoint.forget()  # accepted for this start only: the next one compares with its own mark
        left = [directory for _, _, directory in queue_directories(self._disk, self._queues.directory)]
        if any(file_lengths(self._disk, directory) for directory in left):
            self._note("there is no commit log: queues and index start empty")
        for directory in left:
            delete_queue_files(self._disk, directory)
        if self._index is not None:
            self._index.clear()
        self._dispatcher.start_at(0, -1, 0)
        self.report.clean = True

    # -- the mark

    def _trusted_mark(self) -> CheckpointMark | None:
        """The mark, if it belongs to this log."""
        mark = self._checkpoint.mark
        if mark is None:
            self._note("no checkpoint of this broker")
            return None
        end = self._files.files[-1].end
        if not self._files.min_offset <= mark.position <= end:
            self._note(f"the checkpoint is of a log that ended at {mark.position}, this is another log")
            return None
        if mark.position > self._truncate_at:
            self._note(f"the checkpoint is of a log up to {mark.position}, which has to end at {self._truncate_at}")
            return None
        if mark.last_record >= self._files.min_offset and not self._is_last_record(mark):
            self._note(f"the record at {mark.last_record} is not the one the checkpoint knows")
            return None
        return mark

    def _is_last_record(self, mark: CheckpointMark) -> bool:
        file = self._files.find(mark.last_record)
        if file is None:
            return False
        try:
            found = self._reader.read(file.view, mark.last_record - file.start, mark.last_record)
        except NoRecordError:
            return False
        if not isinstance(found, LogRecord) or found.store_timestamp != mark.store_timestamp:
            return False
        # The mark may be behind the BLANK that follows the record.
        return found.phy + found.size == mark.position or file.end == mark.position

    async def _load_queues(self, mark: CheckpointMark | None) -> int:
        """Take or load the queues. Returns the log offset to continue at."""
        recovery = self._queue_recovery
        if mark is not None and recovery.take(mark, clean_exit=self._clean_exit):
            return mark.position
        recovery.check_size()  # before any file is changed
        if self._checkpoint.mark is not None:  # loading deletes files of wrong queues: the mark no longer holds
            await self._checkpoint.forget()
        return recovery.load()

    def _note(self, text: str) -> None:
        self.report.notes.append(text)

    # -- the log

    async def _scan(self, start: int, mark: CheckpointMark | None, queues_from: int, index_from: int) -> None:
        """Read the log to its end and update queues and index."""
        report = self.report
        report.scanned_from = start
        report.bytes_total = self._files.files[-1].end - start
        last_timestamp = 0
        if mark is not None and start == mark.position:
            self._last_record = mark.last_record
            last_timestamp = self._last_timestamp = self._end_timestamp = mark.store_timestamp
        walk = LogWalk(self._disk, self._files.files, start, self._reader, last_timestamp)
        written_at = start
        while await self._slice(walk, queues_from, index_from):
            report.bytes_done = walk.position - start
            if walk.position - written_at >= _WRITE_EVERY:
                written_at = walk.position
                await self._write()
        report.bytes_done = walk.position - start
        await self._end(walk)

    def _hold(self, found: LogRecord) -> None:
        """Note a record that is dispatched only when slaves have it."""
        if IN_QUEUE[found.sys_flag & KIND]:
            self.held[found.topic, found.queue_id] = found.queue_offset + 1
        self._need(found, found.topic, found.queue_id)
        self._need_where_it_goes(found)

    def _need_where_it_goes(self, found: LogRecord) -> None:
        """Note where a record that waits goes in the end. The creation of that topic may be lost."""
        place = waiting_for(found.topic, found.properties)
        if place is not None:
            self._need(found, *place)

    def _need(self, found: LogRecord, topic: str, queue_id: int) -> None:
        if not self._queues.deleted_topics.has(topic, found.phy, found.store_timestamp):
            self.held_places[topic] = max(self.held_places.get(topic, 0), queue_id)

    async def _slice(self, walk: LogWalk, queues_from: int, index_from: int) -> bool:
        """Work for about a millisecond. False at the end of the log."""
        until = time.perf_counter() + _SLICE
        index = self._index_recovery
        delays = self._dispatcher.delay_ms
        while True:
            for _ in range(_CLOCK_EVERY):
                found = walk.step()
                if isinstance(found, LogRecord | Blank) and walk.position > self._truncate_at:
                    self._end_at = found.phy
                    return False
                if isinstance(found, LogRecord):
                    self.report.records += 1
                    self._end_timestamp = max(self._end_timestamp, found.store_timestamp)
                    if found.phy >= self._limit:
                        self._hold(found)
                        continue
                    if found.topic in WAITING_TOPICS:
                        self._need_where_it_goes(found)
                    self._last_record = found.phy
                    self._last_timestamp = found.store_timestamp
                    kind = found.sys_flag & KIND
                    if found.phy >= queues_from and IN_QUEUE[kind]:
                        code = unit_tags_code(found.topic, found.properties, found.store_timestamp, delays)
                        self._queue_recovery.put(found, code)
                    if index is not None and found.phy >= index_from and IN_INDEX[kind]:
                        index.put(found)
                elif isinstance(found, Damage):
                    self.report.damaged.append(found)
                    if self._cuts:
                        self._end_at = found.phy
                        return False
                    _log.error("commit_log_damaged", offset=found.phy, length=found.length, why=found.why)
                elif found is None:
                    return False
            if time.perf_counter() >= until:
                await trio.lowlevel.checkpoint()
                return True

    async def _write(self) -> None:
        """Write the rebuilt units and keys to their files, so that memory stays bounded."""
        await self._flush_queues.write()
        if self._index_recovery is not None:
            await self._index_recovery.flush()

    async def _end(self, walk: LogWalk) -> None:
        """End the log where the walk ended: no bytes that look like a record may stay behind it."""
        report = self.report
        position = min(walk.position, self._end_at)
        files = self._files.files
        # Newest file first, each deletion durable before the next one: a crash in between leaves no gap in the log.
        for file in self._files.truncate_after(position):
            file.destroy()
            self._disk.sync_directory(self._files.directory)
        last = files[-1]
        if position < last.end:
            report.erased = erase_behind(self._disk, last, position - last.start)
        # A killed process may have left bytes of any file in memory only: sync all files before anything is served.
        for file in files:
            await self._disk.run(file.sync)
        await self._disk.run(self._disk.sync_directory, self._files.directory)
        if self._queue_recovery.finish():
            for queue in self._queues.loaded_queues():
                self._flush_queues.note_found(queue)
        if self._index_recovery is not None:
            self._index_recovery.finish(position)
        await self._write()
        report.position = position
        report.last_store_timestamp = walk.last_timestamp if position == walk.position else self._end_timestamp
        report.bytes_done = report.bytes_total = position - report.scanned_from
        report.units_rebuilt = self._queue_recovery.rebuilt
        report.keys_rebuilt = self._index_recovery.rebuilt if self._index_recovery is not None else 0
        report.clean = not (report.records or report.damaged or report.erased or report.notes)
        self._dispatcher.start_at(min(position, self._limit), self._last_record, self._last_timestamp)

    def _log_report(self) -> None:
        report = self.report
        log = _log.info if report.clean else _log.warning
        log(
            "store_recovered",
            clean_exit=self._clean_exit,
            log_end=report.position,
            read_from=report.scanned_from,
            records=report.records,
            queues=report.queues,
            units_rebuilt=report.units_rebuilt,
            keys_rebuilt=report.keys_rebuilt,
            damaged=len(report.damaged),
            erased=report.erased,
            notes=report.notes,
            seconds=round(report.seconds, 3),
        )
