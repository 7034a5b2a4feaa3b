"""Where a join gets its messages from: the local log, as long as it has all of them, or the objects in the bucket.

From the local log no request is needed: with few messages there are as many upload objects as requests in an hour, and
to read each again would double them. From the bucket the objects are first copied to a file on the local disk, so that
each byte is read once.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Protocol

import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.tiered.access.batch import AS_IN_LOG, BatchBuilder, Buffer, Limits
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.stretch_groups import runs_of
from trimq.protocol.bucket_manifest import Entry, StoredObject
from trimq.protocol.bucket_object import (
    BLOCK_BYTES,
    BLOCK_MESSAGES,
    HEADER_SIZE,
    Block,
    BucketFormatError,
    Directory,
    block_crc,
)
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE

_READ: Final = 4 * 1024 * 1024
_SLICE: Final = 200
"""So many queues, stretches or blocks are looked at between two turns of the loop."""


class NotLocalError(Exception):
    """The local log does not have all messages of a join any more."""


class DamagedSourceError(BucketFormatError):
    """An object cannot be joined: it is damaged, or it is not there."""

    def __init__(self, stored: StoredObject, reason: object) -> None:
        super().__init__(str(reason))
        self.stored = stored


class Piece(NamedTuple):
    """Consecutive messages of a queue. ``offset``: of the first; ``length``: bytes of records and units."""

    topic: str
    queue_id: int
    offset: int
    messages: int
    length: int
    source: Any


class Batch(NamedTuple):
    """Messages as ObjectBuilder.add takes them. The records are valid until the next batch."""

    offset: int
    units: bytes
    records: Any
    begin_ms: int
    end_ms: int


class Source(Protocol):
    """Gives the messages of a join."""

    pieces: list[Piece]
    """Sorted by queue and offset."""

    def batches(self, piece: Piece) -> AsyncIterator[Batch]:
        """The messages of a piece. Raises OSError, BucketFormatError, NotLocalError."""
        ...


class LogSource:
    """The messages of some entries, from the local log."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder
        self.pieces: list[Piece] = []

    @classmethod
    async def of(
        cls,
        entries: Sequence[Entry],
        builder: BatchBuilder,
        queues: ConsumeQueueStore,
        disk: Disk,
        log_begin: Callable[[], int],
    ) -> "LogSource":
        """``disk``: has threads; ``log_begin``: where the log begins. Raises NotLocalError.

        Stretches that follow each other are one piece: a join of many small objects has hundreds of each queue.
        """
        source = cls(builder)
        for number, run in enumerate(await disk.run(runs_of, entries)):
            if number % _SLICE == _SLICE - 1:
                await trio.lowlevel.checkpoint()
            queue = queues.find(run.topic, run.queue_id)
            if queue is None or queue.min_offset > run.offset or run.first_physical < log_begin():
                raise NotLocalError
            length = run.size + UNIT_SIZE * run.messages
            source.pieces.append(Piece(*run[:4], length, (queue, run)))
        return source

    async def batches(self, piece: Piece) -> AsyncIterator[Batch]:
        """See Source."""
        queue, run = piece.source
        offset, physical, end = piece.offset, -1, piece.offset + piece.messages
        while offset < end:
            limits = Limits(min(end - offset, BLOCK_MESSAGES), BLOCK_BYTES, 1 << 62)
            # Memory of its own: it is in use until the part of the object with it was sent.
            memory = Buffer()
            try:
                built = await self._builder.build(queue, offset, AS_IN_LOG, limits, 0, memory, keys=False)
            except OSError as error:  # of this disk: the bucket has them too
                raise NotLocalError from error
            if built is None or built.batch is None or queue.deleted:
                raise NotLocalError
            batch = built.batch
            units = list(UNIT.iter_unpack(batch.units))
            if offset == run.offset and units[0][0] != run.first_physical:
                raise NotLocalError  # another queue of its name
            physical = units[-1][0]
            yield Batch(offset, batch.units, batch.records, batch.begin_ms, batch.end_ms)
            offset += len(units)
        if physical != run.last_physical:
            raise NotLocalError


class SpoolSource:
    """The messages of some entries, from their objects: copied to a file on the local disk."""

    def __init__(self, disk: Disk, fd: int) -> None:
        self._disk = disk
        self._fd = fd
        self.pieces: list[Piece] = []

    @classmethod
    @asynccontextmanager
    async def copied(
        cls, disk: Disk, path: str, bucket: Bucket, manifest: Manifest, entries: Sequence[Entry]
    ) -> AsyncIterator["SpoolSource"]:
        """Copy the objects to a file, which is deleted at the end. Raises OSError, BucketFormatError."""
        size = sum(entry.object.length for entry in entries)
        fd = await disk.run(_create, disk, path, size)
        try:
            source = cls(disk, fd)
            await source._copy(bucket, manifest, entries)
            yield source
        finally:
            disk.close(fd)
            with trio.CancelScope(shield=True):  # it may have a GiB
                await disk.run(disk.delete, path)

    async def _copy(self, bucket: Bucket, manifest: Manifest, entries: Sequence[Entry]) -> None:
        at = 0
        queues: dict[str, dict[int, list[Piece]]] = {}
        for entry in entries:
            stored = entry.object
            try:
                directory = await self._copy_object(bucket, manifest, stored, at)
            except (BucketFormatError, FileNotFoundError) as error:
                raise DamagedSourceError(stored, error) from error
            async for block in _living(entry, directory):
                place = block.topic, block.queue_id, block.offset, block.messages, block.length
                piece = Piece(*place, (stored, block, at + block.position - HEADER_SIZE))
                queues.setdefault(block.topic, {}).setdefault(block.queue_id, []).append(piece)
            at += stored.directory - HEADER_SIZE
        await self._sort(queues)

    async def _sort(self, queues: dict[str, dict[int, list[Piece]]]) -> None:
        """Sort by queue and offset: queue by queue, because a sort of a million pieces is one call of half a second."""
        count = 0
        for topic in sorted(queues):
            for queue_id in sorted(queues[topic]):
                its = sorted(queues[topic][queue_id], key=_offset)
                self.pieces += its
                count += len(its)
                if count >= _SLICE:
                    count = 0
                    await trio.lowlevel.checkpoint()

    async def _copy_object(self, bucket: Bucket, manifest: Manifest, stored: StoredObject, at: int) -> Directory:
        directory = await manifest.read_directory(stored)
        begin = HEADER_SIZE
        while begin < stored.directory:
            length = min(_READ, stored.directory - begin)
            data = await bucket.read_range(stored.name, begin, length)
            if memoryview(data).nbytes != length:
                raise BucketFormatError(f"{stored.name} in the bucket is cut off")
            await self._disk.run(self._disk.pwrite, self._fd, data, at + begin - HEADER_SIZE)
            begin += length
        return directory

    async def batches(self, piece: Piece) -> AsyncIterator[Batch]:
        """See Source."""
        stored, block, at = piece.source
        try:
            units, records = await self._disk.run(_read_block, self._disk, self._fd, block, at)
        except BucketFormatError as error:
            raise DamagedSourceError(stored, error) from error
        yield Batch(block.offset, units, records, block.begin_ms, block.end_ms)


def _offset(piece: Piece) -> int:
    return piece.offset


def _create(disk: Disk, path: str, size: int) -> int:
    if disk.stat(path) is not None:  # left by a process that was killed
        disk.delete(path)
    fd = disk.create(path, 0)
    try:
        disk.allocate(fd, 0, size)
    except BaseException:
        disk.close(fd)
        disk.delete(path)
        raise
    return fd


async def _living(entry: Entry, directory: Directory) -> AsyncIterator[Block]:
    """The blocks of an object that its stretches in the manifest have: not those of deleted topics."""
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for at in range(0, len(entry.stretches), _SLICE):
        for stretch in entry.stretches[at : at + _SLICE]:
            ranges.setdefault((stretch.topic, stretch.queue_id), []).append((stretch.offset, stretch.end))
        await trio.lowlevel.checkpoint()
    for number, block in enumerate(directory.blocks()):
        if any(begin <= block.offset < end for begin, end in ranges.get((block.topic, block.queue_id), ())):
            yield block
        if number % _SLICE == _SLICE - 1:
            await trio.lowlevel.checkpoint()


def _read_block(disk: Disk, fd: int, block: Block, at: int) -> tuple[bytes, Any]:
    """Units and records of a block in the spool. Blocks: for a thread."""
    data = disk.pread(fd, block.length, at)
    if len(data) != block.length or block_crc(data, ()) != block.crc:
        raise BucketFormatError(
            f"the messages of {block.topic}/{block.queue_id} from {block.offset} on are damaged in the bucket, and are "
            "not joined"
        )
    size = block.messages * UNIT_SIZE
    return data[:size], memoryview(data)[size:]
