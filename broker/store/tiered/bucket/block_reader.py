"""Reads blocks of objects in the bucket and keeps them in memory for the next reads.

Two caches, both bounded by bytes: directories of objects, and blocks or the units of blocks. What several tasks want at
the same time is read once. A few messages are read alone, without the rest of their block, unless a reader goes on
where such a read has ended.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.loaded_block import (
    NO_CRC,
    BlockTable,
    DamagedObjectError,
    LoadedBlock,
    LoadedUnits,
    checked_blocks,
    has_all,
)
from trimq.broker.store.tiered.bucket.sized_cache import SizedCache
from trimq.protocol.bucket_manifest import StoredObject, Stretch
from trimq.protocol.bucket_object import Block
from trimq.protocol.queue_unit import UNIT_SIZE

_T = TypeVar("_T")
_Key = tuple[StoredObject, int]

BLOCK_CACHE: Final = 32 * 1024 * 1024
DIRECTORY_CACHE: Final = 16 * 1024 * 1024
_FEW: Final = 256
"""Most messages that are read without the rest of their block."""
_FEW_PART: Final = 8
"""They are at most this part of it."""
_READERS: Final = 4096
_SMALL: Final = 256 * 1024
"""What is shorter is read as a whole."""


class GoneError(FileNotFoundError):
    """An object is not in the bucket (any more)."""

    def __init__(self, stored: StoredObject) -> None:
        super().__init__(f"{stored.name} is not in the bucket")
        self.stored = stored


async def _no_refresh() -> None:
    await trio.lowlevel.checkpoint()


class BlockReader:
    """See above. Belongs to the event loop. Reads raise GoneError, DamagedObjectError, OSError."""

    def __init__(
        self,
        bucket: Bucket,
        disk: Disk,
        refresh: Callable[[], Awaitable[None]] = _no_refresh,
        *,
        block_bytes: int = BLOCK_CACHE,
        directory_bytes: int = DIRECTORY_CACHE,
    ) -> None:
        """``disk``: has threads for the checks. ``refresh``: reads the manifest again and tells the queues."""
        self._bucket = bucket
        self._disk = disk
        self._refresh = refresh
        self._refreshing: trio.Event | None = None
        self._under_way: dict[_Key, trio.Event] = {}
        """Reads under way, by object and position in it."""
        self.directories: SizedCache[StoredObject, BlockTable] = SizedCache(directory_bytes, 1)
        self.blocks: SizedCache[_Key, LoadedUnits] = SizedCache(block_bytes)
        """Whole blocks, and units of blocks."""
        self._ends: SizedCache[tuple[str, int, int], None] = SizedCache(_READERS)
        """Where the last reads of messages have ended, by topic, queue and offset."""

    async def refresh(self) -> None:
        """Read the manifest again, once for all that wait for it. Raises OSError."""
        if self._refreshing is not None:
            await self._refreshing.wait()
            return
        done = self._refreshing = trio.Event()
        try:
            await self._refresh()
        finally:
            self._refreshing = None
            done.set()

    async def in_thread(self, fn: Callable[[], _T]) -> _T:
        """Call what takes long and waits for nothing."""
        return await self._disk.run(fn)

    async def _get(self, stored: StoredObject, begin: int, length: int) -> Any:
        try:
            return await self._bucket.read_range(stored.name, begin, length)
        except FileNotFoundError as error:
            raise GoneError(stored) from error

    async def _once(self, keys: Sequence[_Key], read: Callable[[], Awaitable[_T]]) -> _T:
        """Let others that want one of these wait while it is read."""
        done = trio.Event()
        self._under_way.update(dict.fromkeys(keys, done))
        try:
            return await read()
        finally:
            for key in keys:
                del self._under_way[key]
            done.set()

    # -- directories

    async def _table(self, stored: StoredObject) -> BlockTable:
        key = stored, stored.directory
        while True:
            found = self.directories.get(stored)
            if found is not None:
                return found
            under_way = self._under_way.get(key)
            if under_way is None:
                break
            await under_way.wait()

        async def read() -> BlockTable:
            data = await self._get(stored, stored.directory, stored.length - stored.directory)
            table = await self._disk.run(BlockTable, stored, data)
            self.directories.put(stored, table, table.cost)
            return table

        return await self._once([key], read)

    async def _rows(self, stored: StoredObject, stretch: Stretch) -> tuple[BlockTable, int, Any]:
        table = await self._table(stored)
        first, rows = table.rows_at(stretch.position, stretch.blocks)
        block = table.directory.block(first)
        if (block.topic, block.queue_id, block.offset) != (stretch.topic, stretch.queue_id, stretch.offset) or (
            int(rows["messages"].sum()) != stretch.messages
        ):
            raise DamagedObjectError(f"{stored.name} has other messages than the manifest says")
        return table, first, rows

    async def block(self, stored: StoredObject, stretch: Stretch, offset: int) -> Block:
        """The block with an offset of the stretch. If it is the only one, its checksum may be missing (NO_CRC)."""
        if stretch.blocks == 1 and stored not in self.directories:
            numbers = stretch.first_physical, stretch.last_physical, stretch.begin_ms, stretch.end_ms
            place = stretch.topic, stretch.queue_id, stretch.offset
            return Block(*place, stretch.messages, stretch.size, stretch.position, *numbers, NO_CRC)
        return (await self.blocks_from(stored, stretch, offset, 1, 0))[0]

    async def blocks_from(
        self, stored: StoredObject, stretch: Stretch, offset: int, max_count: int, max_bytes: int
    ) -> list[Block]:
        """The block with an offset, and those behind it that still belong to a read of so many messages and bytes."""
        table, first, rows = await self._rows(stored, stretch)
        at = int(np.searchsorted(rows["offset"].astype(np.int64), offset, "right")) - 1
        found = [table.directory.block(first + at)]
        messages, length = found[0].offset + found[0].messages - offset, found[0].length
        for number in range(first + at + 1, first + len(rows)):
            block = table.directory.block(number)
            length += block.length
            if messages >= max_count or length > max_bytes:
                break
            messages += block.messages
            found.append(block)
        return found

    async def blocks_with_physical(self, stored: StoredObject, stretch: Stretch, physical: int) -> list[Block]:
        """The blocks that may have the record of a log offset."""
        if stretch.blocks == 1:
            return [await self.block(stored, stretch, stretch.offset)]
        table, first, rows = await self._rows(stored, stretch)
        chosen = (rows["first_physical"] <= physical) & (physical <= rows["last_physical"])
        return [table.directory.block(first + int(number)) for number in np.flatnonzero(chosen)]

    async def blocks_until(self, stored: StoredObject, stretch: Stretch, offset: int, later: int) -> list[Block]:
        """The blocks, from the one with an offset on, that may have messages stored at ``later`` (ms) or after it."""
        if stretch.blocks == 1:
            return [await self.block(stored, stretch, offset)]
        table, first, rows = await self._rows(stored, stretch)
        at = max(0, int(np.searchsorted(rows["offset"].astype(np.int64), offset, "right")) - 1)
        return [
            table.directory.block(first + at + int(number)) for number in np.flatnonzero(rows["end_ms"][at:] >= later)
        ]

    # -- blocks

    def cached(self, stored: StoredObject, block: Block) -> LoadedBlock | None:
        """The whole block if it is in memory."""
        found = self.blocks.get((stored, block.position))
        return found if isinstance(found, LoadedBlock) else None

    async def load(self, stored: StoredObject, blocks: Sequence[Block]) -> list[LoadedBlock]:
        """The first of blocks that follow each other, and as many behind it as are in memory or come with it."""
        while True:
            found: list[LoadedBlock] = []
            for block in blocks:
                loaded = self.cached(stored, block)
                if loaded is None:
                    break
                found.append(loaded)
            if found:
                return found
            under_way = self._under_way.get((stored, blocks[0].position))
            if under_way is None:
                break
            await under_way.wait()
        wanted = [blocks[0]]
        for block in blocks[1:]:
            if self.cached(stored, block) is not None or (stored, block.position) in self._under_way:
                break
            wanted.append(block)
        begin, end = wanted[0].position, wanted[-1].position + wanted[-1].length

        async def read() -> list[LoadedBlock]:
            data = await self._get(stored, begin, end - begin)
            found = await self._disk.run(checked_blocks, stored, wanted, data)
            for block, loaded in zip(wanted, found, strict=True):
                self.blocks.put((stored, block.position), loaded, loaded.cost)
            return found

        return await self._once([(stored, block.position) for block in wanted], read)

    async def load_from(
        self, stored: StoredObject, stretch: Stretch, offset: int, max_count: int = 1, max_bytes: int = 0
    ) -> list[LoadedBlock]:
        """The block with an offset of the stretch, and those behind it as ``blocks_from`` and ``load`` say."""
        block = await self.block(stored, stretch, offset)
        if block.crc == NO_CRC and block.messages <= _FEW and stored.length - stored.directory > _SMALL:
            # A hundred thousand queues have a directory of megabytes: each message is checked instead.
            try:
                return await self.load(stored, [block])
            except DamagedObjectError:
                pass  # maybe it was damaged before the upload already
        return await self.load(stored, await self.blocks_from(stored, stretch, offset, max_count, max_bytes))

    # -- a few messages

    def is_alone(self, stored: StoredObject, block: Block, offset: int, count: int, max_bytes: int) -> bool:
        """Whether messages from an offset on are read without the rest of their block."""
        size = max(1, block.size // block.messages)
        count = min(count, max(1, max_bytes // size))
        return (
            count <= _FEW
            and count * size * _FEW_PART <= block.length
            and (block.topic, block.queue_id, offset) not in self._ends
            and self.is_long(stored, block)
        )

    def note_end(self, topic: str, queue_id: int, offset: int) -> None:
        """A reader has read up to an offset: it may go on there."""
        self._ends.put((topic, queue_id, offset), None, 1)

    def is_long(self, stored: StoredObject, block: Block) -> bool:
        """Whether it saves something not to read the whole block for one message."""
        whole = block.length
        if stored not in self.directories:
            whole += stored.length - stored.directory
        return whole > _SMALL and self.cached(stored, block) is None

    async def units(self, stored: StoredObject, block: Block) -> LoadedUnits:
        """The units of a block. They are not checked."""
        key = stored, block.position
        while True:
            found = self.blocks.get(key)
            if found is not None:
                return found
            under_way = self._under_way.get(key)
            if under_way is None:
                break
            await under_way.wait()

        async def read() -> LoadedUnits:
            data = await self._get(stored, block.position, block.messages * UNIT_SIZE)
            if len(data) != block.messages * UNIT_SIZE:
                raise DamagedObjectError(f"{stored.name} is shorter than the manifest says")
            units = LoadedUnits(data, block.messages)
            self.blocks.put(key, units, units.cost)
            return units

        return await self._once([key], read)

    async def records(
        self, stored: StoredObject, block: Block, units: LoadedUnits, first: int, last: int
    ) -> bytes | None:
        """The records of these numbers, checked; None if one is not right: the whole block says what is damaged."""
        if not units.fit(block):
            return None
        begin, end = units.begin(first), int(units.ends[last - 1])
        data = bytes(await self._get(stored, block.position + block.messages * UNIT_SIZE + begin, end - begin))
        return data if await self._disk.run(has_all, data, units, block, first, last) else None

    async def head(
        self, stored: StoredObject, block: Block, units: LoadedUnits, number: int, length: int
    ) -> bytes | None:
        """The first bytes of a record; None as in ``records``."""
        if not units.fit(block):
            return None
        begin = block.position + block.messages * UNIT_SIZE + units.begin(number)
        return bytes(await self._get(stored, begin, min(length, int(units.table["size"][number]))))
