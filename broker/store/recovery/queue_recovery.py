"""The consume queues at start: taken as they are if they are known to be right, else compared with the log."""

from collections.abc import Callable

from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.log.log_scan import LogRecord, NoRecordError, RecordReader
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore, QueueState
from trimq.broker.store.queue.queue_files import LoadedQueue, delete_queue_files, erase_units
from trimq.broker.store.queue.queue_snapshot import read_file_size, read_snapshot, what_changed
from trimq.protocol.checkpoint_layout import CheckpointMark
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE

_CHUNK = 512


class _Seen:
    """How far a queue agrees with the log: units below ``slot`` do; the last of their records ends at ``end``."""

    __slots__ = ("chunk", "chunk_at", "end", "life", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.life = 0
        """Records before this offset belong to an earlier life of the topic, which was deleted and created again."""
        self.end = 0
        self.chunk = b""
        self.chunk_at = 0


class QueueRecovery:
    """Takes or loads the queues, then gets every record from there on. Blocks: no client is served yet."""

    def __init__(self, queues: ConsumeQueueStore, files: MappedFileQueue, note: Callable[[str], None]) -> None:
        self._queues = queues
        self._files = files
        self._note = note
        self._reader = RecordReader(files.size, check_crc=False)
        self._seen: dict[ConsumeQueue, _Seen] | None = None
        self.rebuilt = 0
        """Units that were missing or wrong."""

    # -- loading

    def take(self, mark: CheckpointMark, *, clean_exit: bool) -> bool:
        """Create the queues as the mark knows them. False if the files do not match: then they have to be compared.

        Raises QueueFileError.
        """
        if mark.clean and clean_exit:
            states = read_snapshot(self._queues, mark.position, self._files.min_offset)
            if states is not None:
                return self._take_snapshot(states)
        self.check_size()
        return self._take_files(mark)

    def _take_snapshot(self, states: dict[str, dict[int, QueueState]]) -> bool:
        """Take the ends of the queues from an orderly stop, if the files still match."""
        if why := what_changed(self._queues, states):
            self._note(why)
            return False
        self._queues.put_unloaded(states)
        return True

    def check_size(self) -> None:
        """Raise QueueFileError if the setting of the file size is wrong and not the files."""
        self._queues.check_size(read_file_size(self._queues))

    def load(self) -> int:
        """Load the queues from their files; wrong ones start empty. Returns the log offset to compare all from."""
        self._queues.forget_all()
        for queue, loaded in self._queues.load(self._files.files[-1].end):
            if self._is_of_deleted_topic(queue, loaded):
                self._note(f"queue {queue.topic}/{queue.queue_id} is of a topic that was deleted")
                self._wipe(queue)
                self._queues.drop_queue(queue)
            elif loaded.why:
                self._note(f"queue {queue.topic}/{queue.queue_id} is rebuilt: {loaded.why}")
                self._wipe(queue)
        self._seen = {}
        return self._files.min_offset

    def _is_of_deleted_topic(self, queue: ConsumeQueue, loaded: LoadedQueue) -> bool:
        """True if all units of a queue are older than the deletion of its topic."""
        deleted = self._queues.deleted_topics.topics.get(queue.topic)
        return deleted is not None and loaded.last_phy < deleted.position

    def _take_files(self, mark: CheckpointMark) -> bool:
        """Take the units below the mark, if there are as many as when the mark was written."""
        late = [
            topic for topic, deleted in self._queues.deleted_topics.topics.items() if deleted.position >= mark.position
        ]
        if late:
            self._note(f"topics were deleted after the checkpoint: {', '.join(late)}")
            return False
        for queue, loaded in self._queues.load(mark.position):
            if loaded.why:
                self._note(f"queue {queue.topic}/{queue.queue_id}: {loaded.why}")
                return False
        self._queues.recount()
        if (self._queues.units, self._queues.queues_with_units) != (mark.units, mark.queues):
            self._note(
                f"{self._queues.queues_with_units} queues with {self._queues.units} units, "
                f"the checkpoint knows {mark.queues} with {mark.units}"
            )
            return False
        return True

    # -- records

    def put(self, found: LogRecord, tags_code: int) -> None:
        """Process a record that belongs in a queue; called in log order."""
        if self._queues.deleted_topics.has(found.topic, found.phy, found.store_timestamp):
            return
        queue = self._queues.find_or_create(found.topic, found.queue_id)
        # The checkpoint vouches for the queues up to here: the record is newer, its unit is just put.
        if self._seen is None:
            if not found.queue_offset and self._queues.starts_anew(found.topic, found.queue_id, found.phy):
                self._note_anew(queue)
            self.rebuilt += queue.put(found.phy, found.size, tags_code, found.queue_offset)
            return
        seen = self._seen.get(queue)
        if seen is None:
            seen = self._first_touch(queue, found)
            if seen is None:
                return
        # Part of an earlier life: ``_is_later_life`` has found that the queue's units start behind this record.
        if found.phy < seen.life:
            return
        if not found.queue_offset and seen.slot:
            # The first record of a topic that was deleted and created again, which a slave may know from its log only.
            self._note_anew(queue)
            seen = self._seen[queue] = _Seen(0)
        slot = max(found.queue_offset, seen.slot)
        if slot > seen.slot and queue.next_offset > seen.slot:
            if self._is_later_life(queue, seen, found):
                return
            self._cut(queue, seen.slot, seen.end)  # units of records that are not in the log any more
        if slot < queue.next_offset:
            unit = self._unit(queue, seen, slot)
            # An earlier due time counts as wrong too: nothing here vouches for it, and the record's is never too early.
            if unit == UNIT.pack(found.phy, found.size, tags_code):
                seen.slot = slot + 1
                seen.end = found.phy + found.size
                return
            if self._is_later_life(queue, seen, found):
                return
            self._cut(queue, slot, seen.end)
        queue.put(found.phy, found.size, tags_code, slot)
        self.rebuilt += 1
        seen.slot = queue.next_offset
        seen.end = found.phy + found.size

    def _note_anew(self, queue: ConsumeQueue) -> None:
        self._note(f"queue {queue.topic}/{queue.queue_id} begins again: its topic was deleted and created again")
        self._wipe(queue)

    def _first_touch(self, queue: ConsumeQueue, found: LogRecord) -> _Seen | None:
        """Start to compare at the queue's first record. None if the queue belongs to a later life of its topic."""
        assert self._seen is not None
        slot = found.queue_offset
        # A later life starts at offset 0 and loses its front only together with the log. If the slot is before the
        # queue's front, files of this life are missing, as when a crash kept only some of the rebuilt files.
        if queue.first_offset <= slot and queue.first_offset < queue.next_offset:
            place = min(slot, queue.next_offset - 1)
            if self._is_right(queue, place, self._queues.read_now(queue, place, 1), found.phy):
                return None
        if queue.next_offset and not queue.first_offset <= slot <= queue.next_offset:
            self._note(f"queue {queue.topic}/{queue.queue_id} is rebuilt: its units are not those of the log")
            self._wipe(queue)
        if queue.next_offset:
            queue.min_offset = slot
        elif queue.first_offset:
            self._wipe(queue)
        seen = self._seen[queue] = _Seen(slot)
        return seen

    def _is_later_life(self, queue: ConsumeQueue, seen: _Seen, found: LogRecord) -> bool:
        """True if the next unit belongs to a later record of the log: then ``found`` is not part of the queue."""
        unit = self._unit(queue, seen, seen.slot)
        if not self._is_right(queue, seen.slot, unit, found.phy):
            return False
        seen.life = UNIT.unpack(unit)[0]
        return True

    def _unit(self, queue: ConsumeQueue, seen: _Seen, slot: int) -> bytes:
        at = (slot - seen.chunk_at) * UNIT_SIZE
        if not 0 <= at < len(seen.chunk):
            seen.chunk = self._queues.read_now(queue, slot, _CHUNK)
            seen.chunk_at = slot
            at = 0
        return seen.chunk[at : at + UNIT_SIZE]

    def _is_right(self, queue: ConsumeQueue, slot: int, unit: bytes, after: int) -> bool:
        """True if a unit points to a record behind ``after`` that names exactly this queue and offset."""
        if len(unit) < UNIT_SIZE:
            return False
        phy, size, _ = UNIT.unpack(unit)
        file = self._files.find(phy)
        if phy <= after or file is None:
            return False
        try:
            found = self._reader.read(file.view, phy - file.start, phy)
        except NoRecordError:
            return False
        return (
            isinstance(found, LogRecord)
            and found.size == size
            and (found.topic, found.queue_id, found.queue_offset) == (queue.topic, queue.queue_id, slot)
        )

    # -- end

    def finish(self) -> bool:
        """Called at the end of the log. True if units were found that no checkpoint vouches for."""
        log_min = self._files.min_offset
        for queue in list(self._queues.loaded_queues()):
            seen = self._seen.get(queue) if self._seen is not None else None
            if seen is not None and queue.next_offset > seen.slot:
                self._cut(queue, seen.slot, seen.end)
            elif seen is None and self._seen is not None:
                self._cut_without_records(queue, log_min)
            self._queues.correct_min_offset(queue, log_min)
        self._queues.log_min = log_min
        self._queues.recount()
        return self._seen is not None

    def _cut_without_records(self, queue: ConsumeQueue, log_min: int) -> None:
        """Cut a queue without records in the log: units that point into the log are wrong."""
        queue.min_offset = queue.first_offset
        self._queues.correct_min_offset(queue, log_min)
        if queue.min_offset < queue.next_offset:
            self._cut(queue, queue.min_offset, 0)

    def _cut(self, queue: ConsumeQueue, slot: int, end: int) -> None:
        # The end of the written units, before ``cut`` lowers it: the files must be erased up to there.
        behind = queue.written
        queue.cut(slot, end)
        self._queues.descriptors.drop_in(queue.directory)
        erase_units(self._queues.disk, queue, max(behind, slot), self._queues.file_size)

    def _wipe(self, queue: ConsumeQueue) -> None:
        self._queues.descriptors.drop_in(queue.directory)
        delete_queue_files(self._queues.disk, queue.directory)
        queue.restore(0, 0, 0, 0)
