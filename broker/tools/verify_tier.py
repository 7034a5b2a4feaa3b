"""Checks the tier of a store: segments against the metadata, units against their records, side files, index files.

Each segment is read once, in pieces, so memory does not grow with the tier. The index is checked entry by entry: its
form, its chains, and that each entry leads to a record with such a key. That every key has an entry is not checked.
"""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from trimq.broker.store.tiered.driver.metadata import DELETED
from trimq.broker.tools.offline_tier import IndexFile, OfflineTier, Segment, Stream, TierQueue, side_file
from trimq.broker.tools.verdicts import TierFindings
from trimq.protocol.message_keys import index_keys_of
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.record import OVERHEAD_V1, RecordError, RecordState, check_record, decode_head
from trimq.protocol.tiered_index_layout import (
    COMPACT_ITEM,
    COMPACT_ITEM_SIZE,
    END_MAGIC,
    GROUP,
    HEADER,
    HEADER_SIZE,
    ITEM,
    ITEM_SIZE,
    SLOT_SIZE,
    slot_of,
    tiered_key_hash,
)
from trimq.protocol.tiered_layout import PHYSICAL

_LINKED: Final = "a start of TriMQ links all entries again"
_UNITS: Final = 4096
_READ: Final = 1 << 20
_SLOTS: Final = 1 << 16
_SHOWN: Final = 20
"""Most notes on one stream."""

Progress = Callable[[int], None]
"""Called with the number of bytes that have been read."""


class TierReport(TierFindings):
    """The result of a verification of a tier."""

    root: str
    directory: str
    queues: int = 0
    segments: int = 0
    messages: int = 0
    bytes: int = 0
    known_offsets: int = 0
    """Messages whose offset in the log is known: those that TriMQ has uploaded."""
    index_files: int = 0
    index_entries: int = 0


class TierVerification:
    """One verification. ``check_crc``: also compare each body with its checksum."""

    def __init__(self, tier: OfflineTier, *, check_crc: bool = True) -> None:
        self._tier = tier
        self._check_crc = check_crc
        self._report = TierReport(tier.store.root, str(tier.directory))
        self._done = 0
        self._progress: Progress = lambda _: None
        self._queues: dict[tuple[int, int], TierQueue] = {}
        self._last_physical = -1
        """The last log offset of the queue that is being checked."""
        self._unordered = 0

    def run(self, progress: Progress, topics: frozenset[str] = frozenset()) -> TierReport:
        """Check all, or the queues of some topics and no index. Raises OSError."""
        self._progress = progress
        report = self._report
        for queue in self._tier.queues(topics):
            report.queues += 1
            known = self._tier.metadata.topics.get(queue.topic)
            if known is None:
                report.lost.add(f"{queue.topic}: the metadata has segments of it, but not the topic")
            else:
                self._queues[known.topic_id, queue.queue_id] = queue
            self._check_stream(queue.log, is_log=True)
            self._check_stream(queue.units, is_log=False)
            self._check_units(queue)
        if not topics:
            for file in self._tier.index():
                report.index_files += 1
                end = self._done + file.size
                self._check_index(file)
                self._read(end - self._done)  # its header, and what is not filled yet or cannot be checked
        unknown = report.messages - report.known_offsets
        if unknown:
            report.notes.append(
                f"{unknown} messages have lost their offset in the log: RocketMQ's broker has uploaded them, or their "
                "entry in the side file is damaged. Requests by their id are refused"
            )
        return report

    def _read(self, size: int) -> None:
        self._done += size
        self._progress(self._done)

    # -- segments

    def _check_stream(self, stream: Stream, *, is_log: bool) -> None:
        report = self._report
        for number, segment in enumerate(stream.segments):
            report.segments += 1
            is_last = number == len(stream.segments) - 1
            name, size = segment.file, segment.entry.size
            if segment.entry.status == DELETED:
                report.repairable.add(f"{name}: its deletion was interrupted, the next start completes it")
            elif segment.size < 0 and size:
                report.lost.add(f"{name} is missing: {size} bytes")
            elif segment.size < size:
                report.lost.add(f"{name} has {segment.size} bytes, {size} were uploaded")
            elif segment.size > size and not is_last:
                report.repairable.add(f"{name} has {segment.size - size} bytes behind its end, which no broker reads")
            elif segment.size > size and is_last:
                report.notes.append(f"{name}: the metadata says {size} bytes, a start takes the file's {segment.size}")
            follows = stream.segments[number + 1] if not is_last else None
            if follows is not None and follows.begin != segment.begin + size:
                text = f"{follows.file} begins at {follows.begin}, the segment before ends at {segment.begin + size}"
                if is_log or follows.begin < segment.begin + size:
                    report.lost.add(text)
                else:
                    report.notes.append(f"{text}: the messages between were deleted before they were uploaded")
        for unknown in stream.unknown[:_SHOWN]:
            report.notes.append(f"{stream.directory / unknown} is not in the metadata: no broker reads it")

    # -- messages

    def _check_units(self, queue: TierQueue) -> None:
        self._last_physical = -1
        first, end, covered = queue.min_offset, queue.max_offset, queue.log.begin
        for segment in queue.units.live:
            for offset, units, entries in _pieces(segment):
                self._check_piece(queue, max(first - offset, 0), offset, units, entries)
                if units:
                    covered = max(covered, units[-1][0] + units[-1][1])
        if covered < queue.log.end and end:
            more = queue.log.end - covered
            self._report.repairable.add(
                f"{queue.log.directory}: {more} bytes behind the last message, the next start cuts them"
            )
        torn = queue.units.end % UNIT_SIZE
        if torn:
            self._report.repairable.add(f"{queue.units.directory}: a torn unit at its end, the next start cuts it")

    def _check_piece(
        self, queue: TierQueue, begin: int, offset: int, units: list[tuple[int, int, int]], entries: bytes
    ) -> None:
        """Units from queue offset ``offset`` on; those before number ``begin`` lead to records that have expired."""
        base, data = 0, b""
        for number in range(begin, len(units)):
            position, size, _ = units[number]
            if not base <= position <= position + size <= base + len(data):
                base, data = position, queue.log.read(position, max(size, _READ)) if size > 0 else b""
            why = self._why_wrong(queue, data, position - base, units[number], offset + number)
            if why:
                self._report.lost.add(f"{queue.topic}/{queue.queue_id} message {offset + number}: {why}")
                continue
            self._report.messages += 1
            self._report.bytes += size
            self._read(size)
            entry = entries[number * PHYSICAL.size : (number + 1) * PHYSICAL.size]
            if len(entry) == PHYSICAL.size:
                physical, its_size, crc = PHYSICAL.unpack(entry)
                # An entry of another message: RocketMQ's broker has uploaded this one.
                if physical >= 0 and (its_size, crc) == (size, decode_head(data, position - base).body_crc):
                    self._check_physical(queue, offset + number, physical)

    def _check_physical(self, queue: TierQueue, offset: int, physical: int) -> None:
        """Log offsets grow with queue offsets: a broker searches for them in that order."""
        self._report.known_offsets += 1
        before, self._last_physical = self._last_physical, physical
        if physical <= before:
            self._unordered += 1
            if self._unordered <= _SHOWN:
                name = f"{queue.topic}/{queue.queue_id} message {offset}"
                self._report.notes.append(
                    f"{name} had log offset {physical}, one before it {before}: if the log was not begun anew in "
                    "between, an entry is damaged, and messages are not found by id"
                )

    def _why_wrong(self, queue: TierQueue, data: bytes, at: int, unit: tuple[int, int, int], offset: int) -> str:
        position, size, _ = unit
        if size < OVERHEAD_V1 or len(data) - at < size:
            return f"its unit refers to {size} bytes at {position}, where the stream has no record"
        found = check_record(data, at, physical_offset=position, check_crc=self._check_crc)
        head = found.head
        if found.state is not RecordState.RECORD or head is None:
            return f"the record at {position} is damaged: {found.why or found.state.value}"
        topic = data[head.topic_at : head.topic_end]
        if found.size != size or head.queue_offset != offset or head.queue_id != queue.queue_id:
            return (
                f"the record at {position} is message {head.queue_offset} of queue {head.queue_id}, {found.size} bytes"
            )
        if topic != queue.topic.encode():
            return f"the record at {position} is one of topic {topic.decode('utf-8', 'replace')}"
        return ""

    # -- index

    def _check_index(self, file: IndexFile) -> None:
        if file.header is None:
            if file.size or file.state == "UPLOAD":
                self._report.index.add(f"{file.file}: its header cannot be read")
            return
        with file.file.open("rb") as opened:
            magic = HEADER.unpack(opened.read(HEADER_SIZE))[0]
            items = file.header.items
            compacted = file.state == "UPLOAD"
            if compacted and file.segment is not None and file.size < file.segment.size:
                self._report.lost.add(f"{file.file} has {file.size} bytes, {file.segment.size} were uploaded")
                return
            if compacted:
                slots, rest = divmod(file.size - HEADER_SIZE - items * COMPACT_ITEM_SIZE, SLOT_SIZE)
                if magic != END_MAGIC or items < 0 or slots <= 0 or rest:
                    self._report.index.add(f"{file.file}: {items} entries do not make {file.size} bytes")
                    return
                self._check_compacted(file.file, slots, items)
            else:
                shape = self._tier.shape
                if file.size != shape.file_size:
                    self._report.index.add(
                        f"{file.file} has {file.size} bytes, tieredStoreIndexFileMaxHashSlotNum={shape.slots} and "
                        f"tieredStoreIndexFileMaxIndexNum={shape.items} make {shape.file_size}: pass the broker's "
                        "configuration with -c if it has other values"
                    )
                    return
                if not 0 <= items < shape.items:
                    self._report.index.add(
                        f"{file.file}: its header says {items} entries, it takes {shape.items - 1}; {_LINKED}"
                    )
                    return
                self._check_local(file.file, shape.slots, items)

    def _check_compacted(self, path: Path, slots: int, items: int) -> None:
        end = HEADER_SIZE + slots * SLOT_SIZE + items * COMPACT_ITEM_SIZE
        found = 0
        with path.open("rb") as slot_file, path.open("rb") as item_file:
            slot_file.seek(HEADER_SIZE)
            for first in range(0, slots, _SLOTS):
                data = slot_file.read(min(_SLOTS, slots - first) * SLOT_SIZE)
                self._read(len(data))
                for number, (at, length) in enumerate(GROUP.iter_unpack(data)):
                    if not length:
                        continue
                    bad = at < HEADER_SIZE + slots * SLOT_SIZE or length % COMPACT_ITEM_SIZE or at + length > end
                    if bad or length < 0:
                        self._report.index.add(f"{path}: slot {first + number} refers to {length} bytes at {at}")
                        continue
                    item_file.seek(at)
                    for item in COMPACT_ITEM.iter_unpack(item_file.read(length)):
                        found += 1
                        self._check_item(path, item, slots, first + number)
        if found != items:
            self._report.index.add(f"{path}: its slots lead to {found} entries of {items}")
        self._report.index_entries += found

    def _check_local(self, path: Path, slots: int, items: int) -> None:
        heads = array("i", bytes(4 * slots))
        """The newest entry of each slot so far, as the chains have it."""
        with path.open("rb") as file:
            file.seek(HEADER_SIZE + slots * SLOT_SIZE + ITEM_SIZE)
            number = 1
            while number <= items:
                data = file.read(min(_UNITS, items + 1 - number) * ITEM_SIZE)
                if not data:
                    break
                self._read(len(data))
                for *item, previous in ITEM.iter_unpack(data):
                    slot = slot_of(item[0], slots)
                    if previous != heads[slot]:
                        self._report.index.add(
                            f"{path}: entry {number} follows entry {previous}, not {heads[slot]}; {_LINKED}"
                        )
                    heads[slot] = number
                    self._check_item(path, tuple(item), slots, None)
                    number += 1
            self._report.index_entries += number - 1
            self._check_heads(path, file, heads)

    def _check_heads(self, path: Path, file: BinaryIO, heads: "array[int]") -> None:
        """Each slot of a local file has to lead to its newest entry."""
        file.seek(HEADER_SIZE)
        for first in range(0, len(heads), _SLOTS):
            data = file.read(min(_SLOTS, len(heads) - first) * SLOT_SIZE)
            self._read(len(data))
            for number, (head, _) in enumerate(GROUP.iter_unpack(data), start=first):
                if head != heads[number]:
                    self._report.index.add(
                        f"{path}: slot {number} leads to entry {head}, its newest is {heads[number]}; {_LINKED}"
                    )

    def _check_item(self, path: Path, item: tuple[int, ...], slots: int, slot: int | None) -> None:
        key_hash, topic_id, queue_id, position, size, _ = item
        if slot is not None and slot_of(key_hash, slots) != slot:
            self._report.index.add(f"{path}: an entry of slot {slot_of(key_hash, slots)} stands in slot {slot}")
            return
        queue = self._queues.get((topic_id, queue_id))
        if queue is None or position < queue.log.begin:
            return  # deleted or expired meanwhile: queries pass over it
        data = queue.log.read(position, size) if OVERHEAD_V1 <= size < 1 << 30 else b""
        try:
            head = decode_head(data)
        except RecordError:
            keys: tuple[str, ...] = ()
        else:
            keys = index_keys_of(str(data[head.properties_at : head.properties_end], "utf-8", "replace"))
        if len(data) != size or all(tiered_key_hash(queue.topic, key) != key_hash for key in keys):
            place = f"{size} bytes at {position} of {queue.topic}/{queue_id}"
            self._report.index.add(f"{path}: an entry refers to {place}, which has no such key")


def _pieces(segment: Segment) -> Iterator[tuple[int, list[tuple[int, int, int]], bytes]]:
    """Queue offset, units, and the entries of the side file, in pieces."""
    if segment.used < UNIT_SIZE:
        return
    side = side_file(segment)
    count = segment.used // UNIT_SIZE
    with segment.file.open("rb") as file:
        entries_file = side.open("rb") if side.is_file() else None
        try:
            for first in range(0, count, _UNITS):
                wanted = min(_UNITS, count - first)
                units = list(UNIT.iter_unpack(file.read(wanted * UNIT_SIZE)))
                entries = entries_file.read(wanted * PHYSICAL.size) if entries_file is not None else b""
                yield segment.begin // UNIT_SIZE + first, units, entries
        finally:
            if entries_file is not None:
                entries_file.close()
