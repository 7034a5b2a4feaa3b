"""A queue whose messages are in objects of a bucket.

The records are those of the log, with their offsets there: what is read is what clients get. An object may go while it
is read, because a join has replaced it or its messages have expired: then the manifest is read again.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import trio

from trimq.broker.store.read.query import store_timestamp_of
from trimq.broker.store.tiered.bucket.block_reader import BlockReader, GoneError
from trimq.broker.store.tiered.bucket.loaded_block import run_of
from trimq.broker.store.tiered.bucket.stretch_table import Part, StretchTable
from trimq.broker.store.tiered.container.message_runs import Fetched, MessageRun, Messages
from trimq.protocol.bucket_manifest import StoredObject, Stretch
from trimq.protocol.bucket_object import Block
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.tiered_layout import UNSET_TIME

_T = TypeVar("_T")
_ATTEMPTS: Final = 4
"""So often a read begins anew because its object is gone."""
_HEAD_READ: Final = 128
"""Enough bytes of a record for its store time, with IPv6 hosts too."""


class BucketQueue:
    """One queue: see TieredQueue. Its stretches may change while it is read."""

    __slots__ = ("_blocks", "_end", "_table", "is_destroyed", "queue_id", "topic", "topic_id", "uploaded")

    def __init__(self, topic: str, queue_id: int, topic_id: int, blocks: BlockReader) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.topic_id = topic_id
        self.is_destroyed = False
        self.uploaded = 0
        """Messages uploaded since the start."""
        self._blocks = blocks
        self._table = StretchTable()
        self._end = 0

    # -- what is there

    def add(self, stored: StoredObject, stretch: Stretch) -> None:
        """Add messages. Where stretches overlap, the later generation has them, then the later epoch.

        A stretch without messages says where the queue ended when its last messages expired.
        """
        if stretch.messages:
            self._table.add(stored, stretch)
        self._end = max(self._end, stretch.end)

    def replace(self, gone: Collection[StoredObject], new: Sequence[tuple[StoredObject, Stretch]]) -> None:
        """Take the stretches of some objects away and add others: after a join, or because messages have expired."""
        self._table.replace(gone, [(stored, stretch) for stored, stretch in new if stretch.messages])
        self._end = max([self._end, *(stretch.end for _, stretch in new)])

    def reset(self, stretches: Iterable[tuple[StoredObject, Stretch]]) -> None:
        """Have these stretches instead: those of a manifest that was read again.

        The queue may end before, if its topic was deleted and created anew.
        """
        self._table = StretchTable()
        self._end = 0
        for stored, stretch in stretches:
            self.add(stored, stretch)

    def take(self, table: StretchTable, end: int) -> None:
        """Have the stretches of a table instead; ``end``: where they end. See ``reset``."""
        self._table = table
        self._end = end

    def is_other(self, table: StretchTable, end: int) -> bool:
        """Whether a table is that of another queue of this name: its topic was deleted and created anew.

        Its messages have offsets that were those of others. A queue that goes on does not end before.
        """
        first, own, other = table.first, self._table.log_range, table.log_range
        if first is None or own is None or other is None:
            return end < self._end
        return end < self._end or (first < self._end and other[0] > own[1])

    def destroy(self) -> None:
        """Have no messages any more: the topic was deleted."""
        self.is_destroyed = True
        self._table = StretchTable()

    @property
    def min_offset(self) -> int:
        """The first message that can be read; ``commit_offset`` if there is none."""
        first = self._table.first
        return self._end if first is None else first

    @property
    def commit_offset(self) -> int:
        """Behind the last message. It does not fall when messages expire: they do not come again."""
        return self._end

    @property
    def last_physical(self) -> int:
        """The log offset of the last message; -1 if there is none."""
        places = self._table.log_range
        return -1 if places is None else places[1]

    @property
    def size(self) -> int:
        """Bytes of all records."""
        return self._table.size

    @property
    def oldest_ms(self) -> int:
        """See TieredQueue."""
        return self._table.begin_ms if self._table.first is not None else UNSET_TIME

    @property
    def newest_ms(self) -> int:
        """See TieredQueue."""
        return self._table.end_ms if self._table.first is not None else UNSET_TIME

    @property
    def sizes(self) -> tuple[int, int]:
        """See TieredQueue."""
        return self.size, UNIT_SIZE * self._table.messages

    @property
    def stretches(self) -> Iterator[tuple[StoredObject, Stretch]]:
        """The stretches and their objects, in the order of offsets."""
        return self._table.items(self.topic, self.queue_id)

    def has_physical(self, physical: int) -> bool:
        """Whether the queue may have the record of a log offset."""
        return self._table.has_physical(physical)

    def behind_gap(self, offset: int) -> int:
        """See TieredQueue."""
        if self._at(offset) is not None:
            return offset
        following = self._table.next_begin(offset)
        return self._end if following is None else following

    def _at(self, offset: int) -> Part | None:
        return self._table.at(offset, self.topic, self.queue_id)

    async def _tried(self, read: Callable[[], Awaitable[_T]]) -> _T:
        """Do a read; do it again if its object is gone and the stretches name another one."""
        is_refreshed = False
        attempts = _ATTEMPTS
        while True:
            try:
                return await read()
            except GoneError as error:
                attempts -= 1
                if error.stored in self._table:
                    if is_refreshed:
                        raise
                    is_refreshed = True
                    await self._blocks.refresh()
                elif not attempts:
                    raise

    # -- messages

    async def read_messages(self, offset: int, count: int, max_bytes: int) -> Fetched:
        """See TieredQueue. May give fewer messages than would fit: those that come with one request."""
        if not self.min_offset <= offset < self._end:
            raise LookupError(f"{self.topic}/{self.queue_id} has no message {offset} in the tier")
        return await self._tried(partial(self._read, offset, count, max_bytes))

    async def _read(self, offset: int, count: int, max_bytes: int) -> Fetched:
        part = self._at(offset)
        if part is None:
            await trio.lowlevel.checkpoint()
            return Fetched(Messages(), self.behind_gap(offset))
        end, stored, stretch = part
        count = min(count, end - offset)
        block = await self._blocks.block(stored, stretch, offset)
        if self._blocks.is_alone(stored, block, offset, count, max_bytes):
            run = await self._read_alone(stored, block, offset, count, max_bytes)
            if run is not None:
                self._blocks.note_end(self.topic, self.queue_id, run.end)
                return Fetched(Messages([run]), run.end)
        runs: list[MessageRun] = []
        at = offset
        # All blocks but the first fit as a whole: see blocks_from.
        for loaded in await self._blocks.load_from(stored, stretch, offset, count, max_bytes):
            first = at - loaded.offset
            last = loaded.last(first, count - (at - offset), max_bytes)
            for run in loaded.runs(first, last):
                runs.append(run)
                await trio.lowlevel.checkpoint()
            at = loaded.offset + last
            if last < len(loaded.table) or at >= offset + count:
                break
        self._blocks.note_end(self.topic, self.queue_id, at)
        return Fetched(Messages(runs), at)

    async def _read_alone(
        self, stored: StoredObject, block: Block, offset: int, count: int, max_bytes: int
    ) -> MessageRun | None:
        """Messages without the rest of their block; None if what was read is not right."""
        units = await self._blocks.units(stored, block)
        first = offset - block.offset
        last = units.last(first, count, max_bytes)
        data = await self._blocks.records(stored, block, units, first, last)
        if data is None:
            return None
        return run_of(units, block.offset, first, last, data)

    async def read_units(self, offset: int, count: int) -> bytes:
        """Up to ``count`` units, 20 bytes each; fewer at the end and before a gap. Raises LookupError, OSError."""
        found: list[Any] = []
        end = offset + count
        while offset < end:
            data = await self._tried(partial(self._units, offset, end - offset))
            if not data:
                break
            found.append(data)
            offset += len(data) // UNIT_SIZE
        if not found:
            raise LookupError(f"{self.topic}/{self.queue_id} has no message {offset} in the tier")
        return b"".join(found)

    async def _units(self, offset: int, count: int) -> Any:
        part = self._at(offset)
        if part is None:
            return b""
        block = await self._blocks.block(part.stored, part.stretch, offset)
        units = await self._blocks.units(part.stored, block)
        first = offset - block.offset
        last = min(first + min(count, part.end - offset), block.messages)
        return memoryview(units.data)[first * UNIT_SIZE : last * UNIT_SIZE]

    # -- single messages

    async def read_record(self, position: int, size: int) -> bytes | None:
        """The record of ``size`` bytes at a log offset; None if this queue has none. Raises OSError."""
        record = await self.read_physical(position)
        return record if record is not None and len(record) == size else None

    async def read_physical(self, physical: int) -> bytes | None:
        """The record of a log offset; None if this queue has none. Raises OSError."""
        if not self.has_physical(physical):
            return None
        return await self._tried(partial(self._physical, physical))

    async def _physical(self, physical: int) -> bytes | None:
        for stored, stretch in self._table.with_physical(physical, self.topic, self.queue_id):
            for block in await self._blocks.blocks_with_physical(stored, stretch, physical):
                record = await self._physical_in(stored, stretch, block, physical)
                if record is not None:
                    return record
        return None

    async def _physical_in(self, stored: StoredObject, stretch: Stretch, block: Block, physical: int) -> bytes | None:
        if self._blocks.is_long(stored, block):
            units = await self._blocks.units(stored, block)
            numbers = np.flatnonzero(units.table["phy"] == physical)
            if len(numbers):
                number = int(numbers[0])
                data = await self._blocks.records(stored, block, units, number, number + 1)
                if data is not None:
                    return data
            elif units.fit(block):
                return None
        (loaded,) = await self._blocks.load_from(stored, stretch, block.offset)
        numbers = np.flatnonzero(loaded.table["phy"] == physical)
        return loaded.record(int(numbers[0])) if len(numbers) else None

    async def store_time(self, offset: int) -> int:
        """See TieredQueue."""
        if not self.min_offset <= offset < self._end:
            return -1
        return await self._tried(partial(self._time, offset))

    async def _time(self, offset: int) -> int:
        part = self._at(offset)
        if part is None:
            return -1
        stored, stretch = part.stored, part.stretch
        if stretch.begin_ms == stretch.end_ms:
            await trio.lowlevel.checkpoint()
            return stretch.begin_ms
        block = await self._blocks.block(stored, stretch, offset)
        if block.begin_ms == block.end_ms:
            return block.begin_ms
        if self._blocks.is_long(stored, block):
            units = await self._blocks.units(stored, block)
            number = offset - block.offset
            data = await self._blocks.head(stored, block, units, number, _HEAD_READ)
            time = -1 if data is None else store_timestamp_of(data, int(units.table["phy"][number]))
            if time >= 0:
                return time
        (loaded,) = await self._blocks.load_from(stored, stretch, offset)
        return int(loaded.times()[offset - loaded.offset])

    # -- by time

    async def narrow(self, first: int, end: int, later: int) -> tuple[int, int]:
        """See TieredQueue: the search itself. The times of stretches and blocks leave one block to read, or none."""
        found = await self._tried(partial(self._first_from, first, end, later))
        return found, found

    async def _first_from(self, first: int, end: int, later: int) -> int:
        behind = at = first
        """``behind``: behind the last message that was stored before."""
        await trio.lowlevel.checkpoint()
        while at < end:
            part = self._at(at)
            if part is None:
                following = self._table.next_begin(at)
                if following is None:
                    break
                at = following
                continue
            last = min(part.end, end)
            if part.stretch.end_ms >= later:
                found = await self._first_in(part, at, last, later)
                if found is not None:
                    return behind if found == at else found
            behind = at = last
        return behind

    async def _first_in(self, part: Part, at: int, end: int, later: int) -> int | None:
        """The first message of [at, end) in a stretch that was stored at ``later`` or after it."""
        stored, stretch = part.stored, part.stretch
        if stretch.begin_ms >= later:
            return at
        for block in await self._blocks.blocks_until(stored, stretch, at, later):
            first, last = max(at, block.offset), min(end, block.offset + block.messages)
            if first >= end:
                break
            if block.begin_ms >= later:
                return first
            (loaded,) = await self._blocks.load_from(stored, stretch, block.offset)
            times = await self._blocks.in_thread(loaded.times)
            hits = np.flatnonzero(times[first - block.offset : last - block.offset] >= later)
            if len(hits):
                return first + int(hits[0])
        return None
