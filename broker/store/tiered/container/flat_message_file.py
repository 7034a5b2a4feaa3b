"""A queue in the tier: the stream of its records, the stream of its units, and the offsets they have in the log.

Source: RocketMQ's FlatMessageFile. In the tier a record carries its stream position where the log's offset stands
elsewhere; readers get the log's offset back from the side file beside each segment of units.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import trio

from trimq.broker.store.read.query import store_timestamp_of
from trimq.broker.store.read.record_look import HEAD_SIZE, is_message, place_of
from trimq.broker.store.tiered.container.flat_append_file import FlatAppendFile
from trimq.broker.store.tiered.container.message_runs import Fetched, MessageRun, Messages, TieredMessage, restored
from trimq.broker.store.tiered.container.physical_offsets import ENTRY_SIZE, PhysicalOffsets
from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.file_segment import Piece
from trimq.broker.store.tiered.driver.metadata import DefaultMetadataStore
from trimq.protocol.hashing import crc32
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE
from trimq.protocol.record import (
    AT_BODY_CRC,
    AT_PHYSICAL_OFFSET,
    AT_QUEUE_OFFSET,
    RecordError,
    decode_head,
)
from trimq.protocol.tiered_layout import APACHE_UPLOADED, PHYSICAL, SegmentType, queue_path

_LONG: Final = struct.Struct(">q")
_U32: Final = struct.Struct(">I")
_TOGETHER: Final = 128
_TOGETHER_BYTES: Final = 256 * 1024
"""So many records, and bytes of them unless one is larger, are restored in one turn of the event loop."""
_HEAD_READ: Final = 128
"""Enough bytes of a record for its store time, with IPv6 hosts too."""


class Batch(NamedTuple):
    """Messages of consecutive offsets that are uploaded together. The bytes are those of the tier.

    ``records``: with stream positions counted from the end of the stream; ``units`` and ``physical`` (entries of the
    side file) belong to them. Times in ms.
    """

    offset: int
    records: Sequence[Piece]
    size: int
    units: bytes
    physical: bytes
    begin_ms: int
    end_ms: int


class FlatMessageFile:
    """One queue. ``recover`` comes first. Offsets are those of the queue unless they are said to be of a stream."""

    def __init__(
        self,
        factory: FileSegmentFactory,
        metadata: DefaultMetadataStore,
        broker_name: str,
        topic: str,
        queue_id: int,
        *,
        check_crc: bool = False,
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.topic_id = metadata.topic_id(topic)
        metadata.add_queue(topic, queue_id)
        self._metadata = metadata
        self._check_crc = check_crc
        self._place = place_of(topic, queue_id)
        path = queue_path(broker_name, topic, queue_id)
        self.commit_log = FlatAppendFile(factory, metadata, SegmentType.COMMIT_LOG, path)
        self.consume_queue = FlatAppendFile(factory, metadata, SegmentType.CONSUME_QUEUE, path)
        self.physical = PhysicalOffsets(factory, self.consume_queue)
        self._first_offset = 0
        """The queue offset of the first record of the stream; units below it lead nowhere any more."""
        self.uploaded = 0
        """Messages uploaded since the start."""
        self.is_destroyed = False
        """Set before its segments are deleted: what is appended then is dropped."""
        self._changes = trio.Lock()
        """Appends, expiry and deletion come one after the other."""

    # -- what is there

    @property
    def is_initialized(self) -> bool:
        """Whether the queue has a begin in the tier."""
        return bool(self.consume_queue.segments)

    @property
    def min_offset(self) -> int:
        """The first message that can be read."""
        return max(self.consume_queue.min_offset // UNIT_SIZE, self._first_offset)

    @property
    def commit_offset(self) -> int:
        """Behind the last message that can be read."""
        return self.consume_queue.commit_offset // UNIT_SIZE

    @property
    def oldest_ms(self) -> int:
        """See TieredQueue."""
        return self.commit_log.min_timestamp

    @property
    def newest_ms(self) -> int:
        """See TieredQueue."""
        return self.commit_log.max_timestamp

    @property
    def sizes(self) -> tuple[int, int]:
        """See TieredQueue."""
        return self.commit_log.size, self.consume_queue.size

    # -- start

    async def recover(self) -> None:
        """Load both streams and cut what a power cut left of an upload. Raises OSError."""
        await self.commit_log.recover()
        await self.consume_queue.recover()
        if not self.is_initialized:
            return
        await self._recover_units()
        if not self.commit_log.segments:
            await self.commit_log.init_offset(0)
        await self.physical.recover()
        await self._find_first()

    async def _recover_units(self) -> None:
        """Cut units that are torn or have no record, then records that have no unit.

        Records are durable before their units are written, so a unit whose record is there stands for all of it.
        """
        queue, log = self.consume_queue, self.commit_log
        last = queue.segments[-1]
        await queue.cut(last.base_offset + last.commit_position // UNIT_SIZE * UNIT_SIZE)
        at = min(queue.confirmed // UNIT_SIZE * UNIT_SIZE, last.commit_position)
        while at < last.commit_position:
            position, size, _ = UNIT.unpack(await last.read(at, UNIT_SIZE))
            offset = (last.base_offset + at) // UNIT_SIZE
            data = await self._read_log(position, size) if size >= HEAD_SIZE else b""
            if len(data) != size or not is_message(data, 0, position, size, offset, self._place):
                await queue.cut(last.base_offset + at)
                break
            at += UNIT_SIZE
        end = log.commit_offset
        units = next((segment for segment in reversed(queue.segments) if segment.commit_position), None)
        if units is not None and log.segments:
            position, size, _ = UNIT.unpack(await units.read(units.commit_position - UNIT_SIZE, UNIT_SIZE))
            if log.segments[-1].base_offset <= position + size < end:
                await log.cut(position + size)

    async def _find_first(self) -> None:
        """Find the queue offset of the first record, below which units lead nowhere."""
        log = self.commit_log
        if log.commit_offset <= log.min_offset:
            self._first_offset = self.commit_offset if log.min_offset else 0
            return
        data = await log.read(log.min_offset, _HEAD_READ)
        if len(data) >= AT_PHYSICAL_OFFSET:
            self._first_offset = _LONG.unpack_from(data, AT_QUEUE_OFFSET)[0]

    # -- growth

    async def init_offset(self, offset: int) -> None:
        """Begin the queue in the tier at an offset. Raises OSError."""
        async with self._changes:
            if not self.is_destroyed:
                await self.commit_log.init_offset(0)
                await self.consume_queue.init_offset(offset * UNIT_SIZE)

    @property
    def room(self) -> tuple[int, int]:
        """The bytes of records and the number of units that fit the last segments. 0: a new segment is needed."""
        log, queue = self.commit_log.room, self.consume_queue.room
        return (1 << 62 if log is None else log), (1 << 62 if queue is None else queue // UNIT_SIZE)

    async def skip_to(self, offset: int) -> None:
        """Leave a gap: the messages before ``offset`` were deleted before they were uploaded. Raises OSError."""
        async with self._changes:
            if not self.is_destroyed:
                await self.consume_queue.roll(offset * UNIT_SIZE)

    async def roll(self, *, records: bool, units: bool) -> None:
        """Begin new segments at the ends of the streams. Raises OSError."""
        async with self._changes:
            if records and not self.is_destroyed:
                await self.commit_log.roll()
            if units and not self.is_destroyed:
                await self.consume_queue.roll()

    async def append(self, batch: Batch) -> bool:
        """Append messages. They are durable and can be read when it returns. False if the queue is deleted.

        Raises OSError: then none of them counts, and the next attempt writes at the same positions again.
        """
        async with self._changes:
            if not self.is_destroyed:
                await self._append(batch)
        return not self.is_destroyed

    async def _append(self, batch: Batch) -> None:
        log, queue = self.commit_log, self.consume_queue
        if batch.offset != self.commit_offset:
            raise ValueError(f"{self.topic}/{self.queue_id} goes on at {self.commit_offset}, not at {batch.offset}")
        at = await log.append(batch.records, batch.size, batch.begin_ms, batch.end_ms)
        try:
            await self.physical.append(batch.physical, len(batch.units) // UNIT_SIZE)
            await queue.append((batch.units,), len(batch.units), batch.begin_ms, batch.end_ms)
        except BaseException:
            log.take_back(at)
            raise

    # -- reads

    async def read_units(self, offset: int, count: int) -> bytes:
        """Up to ``count`` units, 20 bytes each; fewer at the end and before a gap. Raises LookupError, OSError."""
        data = await self.consume_queue.read(offset * UNIT_SIZE, count * UNIT_SIZE)
        return data[: len(data) // UNIT_SIZE * UNIT_SIZE]

    async def read_messages(self, offset: int, count: int, max_bytes: int) -> Fetched:
        """Messages from ``offset`` on: at least one if there is one, at most ``count``, together up to ``max_bytes``.

        Damaged records are skipped, and so is a gap. Raises LookupError outside [min_offset, commit_offset), OSError.
        """
        if not self.min_offset <= offset < self.commit_offset:
            raise LookupError(f"{self.topic}/{self.queue_id} has no message {offset} in the tier")
        count = min(count, self.commit_offset - offset)
        try:
            units = await self.read_units(offset, count)
        except LookupError:
            return Fetched(Messages(), self.behind_gap(offset))
        if not units:  # taken back meanwhile
            return Fetched(Messages(), offset)
        table = np.frombuffer(units, UNIT_TYPE)
        # A damaged size must not make the sums fall: they are searched, and the lengths of reads are made of them.
        ends = np.cumsum(np.maximum(table["size"], 0), dtype=np.int64)
        count = max(1, int(np.searchsorted(ends, max_bytes, "right")))
        positions, ends = table["phy"][:count].astype(np.int64), ends[:count]
        entries = await self.physical.read(offset, count)
        runs: list[MessageRun] = []
        for begin, end in _joined(positions, ends):
            start = int(positions[begin])
            before = int(ends[begin - 1]) if begin else 0
            data = memoryview(await self._read_log(start, int(ends[end - 1]) - before))
            for first, last in _pieces(ends, begin, end):
                at = int(ends[first - 1]) if first else 0
                bounds = [0, *(ends[first:last] - at).tolist()]
                its_units = units[first * UNIT_SIZE : last * UNIT_SIZE]
                its_entries = entries[first * ENTRY_SIZE : last * ENTRY_SIZE]
                tags_codes = table["tags_code"][first:last].tolist()
                piece = data[at - before : at - before + bounds[-1]]
                run = offset + first, tags_codes, bounds
                runs += self._restore(piece, int(positions[first]), its_units, its_entries, *run)
                await trio.lowlevel.checkpoint()
        return Fetched(Messages(runs), offset + count)

    async def _read_log(self, position: int, length: int) -> bytes:
        try:
            return await self.commit_log.read(position, length)
        except LookupError:
            return b""

    def behind_gap(self, offset: int) -> int:
        """See TieredQueue."""
        return self.consume_queue.behind_gap(offset * UNIT_SIZE) // UNIT_SIZE

    async def narrow(self, first: int, end: int, later: int) -> tuple[int, int]:
        """See TieredQueue. Times of segments narrow the search."""
        low, high = self.consume_queue.narrowed(first * UNIT_SIZE, end * UNIT_SIZE, later)
        return low // UNIT_SIZE, high // UNIT_SIZE

    def _restore(
        self,
        data: memoryview,
        position: int,
        units: bytes,
        entries: bytes,
        offset: int,
        tags_codes: Sequence[int],
        bounds: Sequence[int],
    ) -> Sequence[MessageRun]:
        """The messages of units that follow each other, with the log's offsets put back.

        ``data`` has their records as the tier has them, the first of which stands at ``position`` in the stream. The
        rest is as in MessageRun. Records that are not the messages of their units are left out.
        """
        records = None if self._check_crc else restored(data, position, units, entries, offset, self._place)
        if records is not None:
            return [MessageRun(offset, tags_codes, bounds, records)]
        messages = []
        for number, (begin, end) in enumerate(pairwise(bounds)):
            entry = entries[number * ENTRY_SIZE : (number + 1) * ENTRY_SIZE]
            record = self._restored(bytes(data[begin:end]), position + begin, end - begin, offset + number, entry)
            if record is not None:
                messages.append(TieredMessage(offset + number, tags_codes[number], record))
        return Messages.of(messages).runs

    def _restored(self, data: bytes, position: int, size: int, offset: int, entry: bytes) -> bytes | None:
        """The record with the log's offset put back; None if it is not the message of its unit."""
        if len(data) != size or size < HEAD_SIZE or not is_message(data, 0, position, size, offset, self._place):
            return None
        if self._check_crc and not _has_body(data):
            return None
        physical, its_size, crc = PHYSICAL.unpack(entry)
        if its_size != size or crc != _U32.unpack_from(data, AT_BODY_CRC)[0] or physical < 0:
            # RocketMQ's broker has uploaded it: its offset in the log is not known any more.
            physical = APACHE_UPLOADED + position
        return b"".join((data[:AT_PHYSICAL_OFFSET], _LONG.pack(physical), data[AT_PHYSICAL_OFFSET + 8 :]))

    async def read_record(self, position: int, size: int) -> bytes | None:
        """The record at a position of the stream; None if it is not there or is another one. Raises OSError."""
        if size < HEAD_SIZE:
            return None
        data = await self._read_log(position, size)
        if len(data) != size:
            return None
        offset = _LONG.unpack_from(data, AT_QUEUE_OFFSET)[0]
        if not self.min_offset <= offset < self.commit_offset:
            return None
        entry = await self.physical.read(offset, 1)
        return self._restored(data, position, size, offset, entry)

    def has_physical(self, physical: int) -> bool:  # noqa: ARG002 - only the side file knows
        """See TieredQueue."""
        return True

    async def read_physical(self, physical: int) -> bytes | None:
        """The record that had an offset in the log; None if this queue has none. Raises OSError."""
        offset = await self.physical.find(physical, self.min_offset)
        if offset is None or not self.min_offset <= offset < self.commit_offset:
            return None
        found = await self.read_messages(offset, 1, 1)
        message = found.messages.get(offset)
        record = None if message is None else message.record
        if record is None or _LONG.unpack_from(record, AT_PHYSICAL_OFFSET)[0] != physical:
            return None
        return record

    async def store_time(self, offset: int) -> int:
        """Store time in ms of a message; -1 if there is none. Raises OSError."""
        if not self.min_offset <= offset < self.commit_offset:
            return -1
        try:
            position, size, _ = UNIT.unpack(await self.read_units(offset, 1))
            data = await self.commit_log.read(position, min(size, _HEAD_READ))
        except LookupError:
            return -1
        return store_timestamp_of(data, position)

    # -- deletion

    async def destroy_expired(self, before_ms: int) -> int:
        """Delete whole segments whose messages were all stored before a time. Returns their number. Raises OSError."""
        async with self._changes:
            deleted = await self.commit_log.destroy_expired(before_ms)
            if deleted:
                await self._find_first()
            gone = await self.consume_queue.destroy_below(self._first_offset * UNIT_SIZE)
            for base in gone:
                await self.physical.delete(base)
            return len(deleted) + len(gone)

    async def destroy(self) -> None:
        """Delete the queue from the tier. Raises OSError."""
        self.is_destroyed = True
        async with self._changes:
            for base in [segment.base_offset for segment in self.consume_queue.segments]:
                await self.physical.delete(base)
            await self.consume_queue.destroy()
            await self.commit_log.destroy()
            self._metadata.delete_queue(self.topic, self.queue_id)


def _joined(positions: Any, ends: Any) -> Iterator[tuple[int, int]]:
    """The messages in groups whose records follow each other in the stream: (begin, end) of each group.

    ``ends`` are the sums of the sizes, so a record follows the one before it if both have grown by the same. A damaged
    position before the stream leads nowhere, and is read alone.
    """
    others = np.diff(positions)[: len(ends) - 1] != np.diff(ends, prepend=0)[:-1]
    edges = np.flatnonzero(others | (positions[:-1] < 0)) + 1
    return pairwise((0, *edges.tolist(), len(ends)))


def _pieces(ends: Any, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Messages of a group that are restored in one turn of the event loop: (begin, end) of each part."""
    while begin < end:
        most = (ends[begin - 1] if begin else 0) + _TOGETHER_BYTES
        last = min(end, begin + _TOGETHER, max(begin + 1, int(np.searchsorted(ends, most, "right"))))
        yield begin, last
        begin = last


def _has_body(data: bytes) -> bool:
    try:
        head = decode_head(data)
    except RecordError:
        return False
    return crc32(data[head.body_at : head.body_end]) == head.body_crc
