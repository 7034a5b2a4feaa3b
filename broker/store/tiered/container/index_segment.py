"""An uploaded index file (state UPLOAD): a segment of type INDEX in the compacted format.

A key costs two reads of a range: its slot and the group of its items. Blocks of slots are cached, so it is often one.
The number of slots is read from the first slot, once: it need not be the configured one.
Source: RocketMQ's IndexStoreFile.
"""

from collections import OrderedDict
from typing import Final

from trimq.broker.store.tiered.container.index_marks import FileMark
from trimq.broker.store.tiered.container.index_store_file import MAX_CHAIN, IndexStatus
from trimq.broker.store.tiered.driver.file_segment import FileSegment
from trimq.protocol.tiered_index_batch import matching
from trimq.protocol.tiered_index_layout import (
    COMPACT_ITEM_SIZE,
    GROUP,
    HEADER_SIZE,
    SLOT_SIZE,
    Header,
    IndexItem,
    compacted_size,
    slot_at,
    slot_of,
)

SLOT_CACHE_BYTES: Final = 8 << 20
_BLOCK: Final = 4096
_READ: Final = 1024 * COMPACT_ITEM_SIZE
"""Bytes of a group that are read together."""


class SlotCache:
    """Blocks of slots that were read from segments, limited by their bytes; the least used ones leave it."""

    def __init__(self, max_bytes: int = SLOT_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self.bytes = 0

    def get(self, base_offset: int, block: int) -> bytes | None:
        """A block of the segment with a base offset; None if it is not cached."""
        found = self._blocks.get((base_offset, block))
        if found is not None:
            self._blocks.move_to_end((base_offset, block))
        return found

    def add(self, base_offset: int, block: int, data: bytes) -> None:
        """Keep a block."""
        if (base_offset, block) not in self._blocks:
            self._blocks[base_offset, block] = data
            self.bytes += len(data)
            while self.bytes > self._max_bytes:
                self.bytes -= len(self._blocks.popitem(last=False)[1])

    def forget(self, base_offset: int) -> None:
        """Drop the blocks of a segment that was deleted."""
        for key in [key for key in self._blocks if key[0] == base_offset]:
            self.bytes -= len(self._blocks.pop(key))


class IndexSegment:
    """``first_ms``: no message in it is older; None if that is not known."""

    status = IndexStatus.UPLOAD

    def __init__(self, segment: FileSegment, cache: SlotCache, first_ms: int | None = None) -> None:
        self.segment = segment
        self.stamp = segment.min_timestamp
        self.first_ms = first_ms
        self._cache = cache
        self._slots = -1
        """Number of slots; -1 not read yet, 0 for a segment that is damaged."""
        self._count = 0

    @property
    def end_ms(self) -> int:
        """The largest store time, as far as the broker that uploaded it knew."""
        return self.segment.max_timestamp

    async def load(self) -> bool:
        """Read the shape. Returns False if this is not a complete index file. Raises OSError."""
        if self._slots < 0:
            head = await self.segment.read(0, HEADER_SIZE + SLOT_SIZE)
            self._slots, self._count = _shape(head, self.segment.commit_position)
        return self._slots > 0

    def set_known(self, slots: int, count: int, first_ms: int) -> None:
        """Set what the local file knew that was uploaded as this one."""
        self._slots, self._count, self.first_ms = slots, count, first_ms

    def mark(self) -> FileMark | None:
        """What the next start should know of it; None if that is no more than what stands in it."""
        if self.first_ms is None or self._slots <= 0:
            return None
        return FileMark(self.stamp, self._slots, self._count + 1, self._count, self.first_ms)

    def has_shape(self, slots: int, count: int) -> bool:
        """Whether its size is the one of that many slots and items."""
        return self.segment.commit_position == compacted_size(slots, count)

    async def select(self, key_hash: int, first_ms: int, last_ms: int, limit: int) -> list[IndexItem]:
        """Up to ``limit`` items of a hash, newest first. Raises OSError."""
        if not await self.load():
            return []
        position, length = await self._group(slot_of(key_hash, self._slots))
        end = position + min(length, MAX_CHAIN * COMPACT_ITEM_SIZE)
        if position < slot_at(self._slots) or length % COMPACT_ITEM_SIZE or end > self.segment.commit_position:
            return []  # damaged
        found: list[IndexItem] = []
        while position < end and len(found) < limit:
            data = await self.segment.read(position, min(_READ, end - position))
            found += matching(data, key_hash, self.stamp, first_ms, last_ms, limit - len(found))
            position += len(data)
        return found

    async def _group(self, slot: int) -> tuple[int, int]:
        """Position and length of a slot's group."""
        block, within = divmod(slot * SLOT_SIZE, _BLOCK)
        base_offset = self.segment.base_offset
        data = self._cache.get(base_offset, block)
        if data is None:
            begin = HEADER_SIZE + block * _BLOCK
            data = await self.segment.read(begin, min(_BLOCK, slot_at(self._slots) - begin))
            self._cache.add(base_offset, block, data)
        position, length = GROUP.unpack_from(data, within)
        return position, length


def _shape(head: bytes, size: int) -> tuple[int, int]:
    """Slots and items of a compacted file of ``size`` bytes; zeros if it is none, or not complete."""
    if len(head) < HEADER_SIZE + SLOT_SIZE:
        return 0, 0
    try:
        header = Header.decode(head)
    except ValueError:
        return 0, 0
    first = GROUP.unpack_from(head, HEADER_SIZE)[0]  # of slot 0: where the items begin, whether it has some or not
    slots, rest = divmod(first - HEADER_SIZE, SLOT_SIZE)
    if rest or slots <= 0 or header.items < 0 or compacted_size(slots, header.items) != size:
        return 0, 0
    return slots, header.items
