"""Blocks of objects in memory, and the checks when they come from the bucket. The checks may run in threads."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from trimq.broker.store.read.record_look import place_of
from trimq.broker.store.tiered.bucket.record_columns import are_messages, store_times
from trimq.broker.store.tiered.container.message_runs import MessageRun
from trimq.protocol.bucket_manifest import StoredObject
from trimq.protocol.bucket_object import Block, BucketFormatError, Directory, block_crc, decode_end
from trimq.protocol.hashing import crc32
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE
from trimq.protocol.record import decode_head

_RUN_BYTES: Final = 1024 * 1024
_RUN_MESSAGES: Final = 4096
"""A run has no more than that: it is made in one turn of the event loop."""
NO_CRC: Final = -1
"""Instead of the checksum of a block, which only the directory has."""
_COST: Final = 512
"""Bytes of memory of a value in a cache besides its data."""


class DamagedObjectError(OSError):
    """Bytes of an object are not those that were written."""


class LoadedUnits:
    """The units of a block. ``ends``: where each record ends, counted from the first."""

    __slots__ = ("data", "ends", "table")

    def __init__(self, data: Any, messages: int) -> None:
        self.data = data
        self.table = np.frombuffer(data, UNIT_TYPE, count=messages)
        self.ends = np.cumsum(self.table["size"], dtype=np.int64)

    def fit(self, block: Block) -> bool:
        """Whether they can be the units of the block."""
        return int(self.table["size"].min()) > 0 and int(self.ends[-1]) == block.size

    def begin(self, number: int) -> int:
        """Where a record begins, counted from the first."""
        return int(self.ends[number - 1]) if number else 0

    def last(self, first: int, count: int, max_bytes: int) -> int:
        """The number behind the last record that fits; the first one always does."""
        last = int(np.searchsorted(self.ends, self.begin(first) + max_bytes, "right"))
        return min(max(first + 1, last), first + count, len(self.table))

    @property
    def cost(self) -> int:
        """Bytes of memory."""
        return len(self.data) + 8 * len(self.table) + _COST


class LoadedBlock(LoadedUnits):
    """A whole block. ``good``: which records are the messages of their units; None if all are."""

    __slots__ = ("good", "offset", "records")

    def __init__(self, block: Block, data: Any) -> None:
        super().__init__(data, block.messages)
        self.offset = block.offset
        self.records = memoryview(data)[block.messages * UNIT_SIZE :]
        good = are_messages(self.records, self.table, block.offset, place_of(block.topic, block.queue_id))
        self.good = None if good.all() else good

    def record(self, number: int) -> bytes | None:
        """A record; None if it is not the message of its unit."""
        if self.good is not None and not self.good[number]:
            return None
        return bytes(self.records[self.begin(number) : int(self.ends[number])])

    def times(self) -> Any:
        """The store times in ms; -1 for records that are not the messages of their units."""
        times = store_times(self.records, self.table["size"].astype(np.int64))
        return times if self.good is None else np.where(self.good, times, -1)

    def runs(self, first: int, last: int) -> Iterator[MessageRun]:
        """The messages of these numbers. Their bytes are copied, so that no run keeps the whole block in memory."""
        for begin, end in self._groups(first, last):
            at = begin
            while at < end:
                to = min(end, self.last(at, _RUN_MESSAGES, _RUN_BYTES))
                yield run_of(self, self.offset, at, to, bytes(self.records[self.begin(at) : int(self.ends[to - 1])]))
                at = to

    def _groups(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        if self.good is None:
            yield first, last
            return
        edges = np.flatnonzero(np.diff(self.good[first:last])) + first + 1
        for begin, end in pairwise((first, *edges.tolist(), last)):
            if self.good[begin]:
                yield begin, end


def run_of(units: LoadedUnits, offset: int, first: int, last: int, data: bytes) -> MessageRun:
    """The messages of these numbers as a run; ``data`` has their records, ``offset`` is that of the block."""
    bounds = [0, *(units.ends[first:last] - units.begin(first)).tolist()]
    return MessageRun(offset + first, units.table["tags_code"][first:last].tolist(), bounds, data)


def checked_blocks(stored: StoredObject, blocks: Sequence[Block], data: Any) -> list[LoadedBlock]:
    """The blocks in ``data``, which follow each other. Raises DamagedObjectError."""
    view = memoryview(data)
    base = blocks[0].position
    found: list[LoadedBlock] = []
    for block in blocks:
        at = block.position - base
        piece: Any = view[at : at + block.length]
        if len(piece) != block.length or not _is_right(piece, block):
            raise DamagedObjectError(f"{stored.name} is damaged in the bucket: {_place(block)}")
        # Blocks leave the cache one by one: none may keep the memory of the others.
        loaded = LoadedBlock(block, bytes(piece) if len(blocks) > 1 else data)
        if not loaded.fit(block):
            raise DamagedObjectError(f"{stored.name} has units that do not fit their records: {_place(block)}")
        found.append(loaded)
    return found


def _is_right(data: Any, block: Block) -> bool:
    if block.crc != NO_CRC:
        return block_crc(data, ()) == block.crc
    units = LoadedUnits(data, block.messages)
    return units.fit(block) and has_all(data[block.messages * UNIT_SIZE :], units, block, 0, block.messages)


def _place(block: Block) -> str:
    return f"{block.topic}/{block.queue_id}, offsets {block.offset} to {block.offset + block.messages - 1}"


def has_all(data: Any, units: LoadedUnits, block: Block, first: int, last: int) -> bool:
    """Whether ``data`` has the messages of these numbers, bodies included: the block's checksum covers more."""
    table, begin = units.table[first:last], units.begin(first)
    if len(data) != int(units.ends[last - 1]) - begin:
        return False
    place = place_of(block.topic, block.queue_id)
    if not are_messages(data, table, block.offset + first, place).all():
        return False
    bounds = (0, *(units.ends[first:last] - begin).tolist())
    heads = [decode_head(data, at) for at in bounds[:-1]]
    return all(crc32(data[head.body_at : head.body_end]) == head.body_crc for head in heads)


class BlockTable:
    """The directory of an object, by the positions of its blocks."""

    __slots__ = ("_order", "_positions", "_stored", "directory")

    def __init__(self, stored: StoredObject, data: Any) -> None:
        """``data``: the end of the object. Raises DamagedObjectError."""
        try:
            self.directory: Directory = decode_end(data, stored.length)
        except BucketFormatError as error:
            raise DamagedObjectError(f"{stored.name} is damaged in the bucket: {error}") from error
        self._stored = stored
        positions = self.directory.rows["position"].astype(np.int64)
        self._order = np.argsort(positions)
        self._positions = positions[self._order]

    @property
    def cost(self) -> int:
        """Bytes of memory."""
        rows: int = self.directory.rows.nbytes
        return rows + 16 * len(self.directory) + 128 * len(self.directory.topics) + _COST

    def rows_at(self, position: int, blocks: int) -> tuple[int, Any]:
        """The rows of the blocks that follow each other from a position on, and the number of the first."""
        number = int(np.searchsorted(self._positions, position))
        if number == len(self._positions) or int(self._positions[number]) != position:
            raise DamagedObjectError(f"{self._stored.name} has no block at {position}, which the manifest names")
        first = int(self._order[number])
        return first, self.directory.rows[first : first + blocks]
