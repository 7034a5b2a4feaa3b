"""Joins objects in the background: the messages of a queue that were uploaded in many objects come to stand together.

A join takes objects that follow each other in the log, up to 1 GiB, and writes segments: one for each queue with much
in them, and one for all others. The objects are first copied to a file on the local disk, so that each byte is read
once; memory stays at a part of an upload. Then the manifest names the segments, and after the grace the old objects
go. What an interrupted join has written is garbage.

Segments are joined again while they are small: with many queues or few messages they grow over generations.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import structlog

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.bucket_queues import BucketQueues
from trimq.broker.store.tiered.bucket.object_builder import ObjectBuilder
from trimq.protocol.bucket_manifest import Entry, StoredObject, stretches_of
from trimq.protocol.bucket_object import (
    BLOCK_BYTES,
    HEADER_SIZE,
    Block,
    BucketFormatError,
    Directory,
    Kind,
    ObjectHeader,
    block_crc,
)
from trimq.protocol.queue_unit import UNIT_SIZE

_log: Final = structlog.get_logger(__name__)

JOIN_BYTES: Final = 1024 * 1024 * 1024
"""A join takes no more than this, and what has half of it is not joined again."""
JOIN_OBJECTS: Final = 256
"""So many upload objects are joined, however small they are."""
JOIN_SEGMENTS: Final = 16
"""The same for the results of earlier joins."""
PART_SIZE: Final = 16 * 1024 * 1024
LARGE_PART: Final = 32
"""A queue with this part of a join, or more, gets a segment of its own, if that is PART_SIZE at least."""
SPOOL: Final = "tier.join"
_READ: Final = 4 * 1024 * 1024


class Window(NamedTuple):
    """What one upload or one join has written: entries of one stretch of the log."""

    begin: int
    end: int
    generation: int
    entries: list[Entry]

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(entry.object.length for entry in self.entries)


def windows_of(entries: Sequence[Entry]) -> list[Window]:
    """The windows of a manifest in the order of the log, without what has expired."""
    found: list[Window] = []
    for entry in entries:
        begin, end, generation = entry.object[:3]
        if not entry.object.length:
            continue
        if found and found[-1][:3] == (begin, end, generation):
            found[-1].entries.append(entry)
        else:
            found.append(Window(begin, end, generation, [entry]))
    return found


def choose(windows: Sequence[Window], saved: int) -> list[Window]:
    """The windows that are joined next; empty if none are.

    ``saved``: only what lies before this log offset, which the root's pages have.
    """
    run: list[Window] = []
    for window in [window for window in windows if window.end <= saved]:
        if window.generation and window.size >= JOIN_BYTES // 2:
            run = []
            continue
        if run and window.generation != run[-1].generation:
            run = []
        run.append(window)
        most = JOIN_SEGMENTS if window.generation else JOIN_OBJECTS
        size = sum(one.size for one in run)
        if len(run) > 1 and (size >= JOIN_BYTES or len(run) >= most):
            return run[:-1] if size > JOIN_BYTES and len(run) > 2 else run
    return []


class _Source(NamedTuple):
    """A block, and where it stands in the spool."""

    block: Block
    at: int


class Joiner:
    """The joins of an owner. Belongs to the event loop."""

    def __init__(self, bucket: Bucket, queues: BucketQueues, disk: Disk, root: str) -> None:
        """``root``: the directory of the store, where the spool is."""
        self._bucket = bucket
        self._queues = queues
        self._disk = disk
        self._spool = f"{root}/{SPOOL}"
        self._number = 0
        self.joins = 0
        self.bytes = 0
        """Bytes of messages that were joined."""

    async def join_next(self, now_ms: int) -> list[str]:
        """Do the next join. Returns the names of what is not needed any more; empty if there is nothing to join.

        The manifest has the result then. Once the root names it, these objects are garbage. Raises OSError,
        BucketFormatError.
        """
        manifest = self._queues.manifest
        saved = manifest.root.end if manifest.root is not None else 0
        chosen = choose(windows_of(manifest.entries), saved)
        if not chosen:
            return []
        entries = [entry for window in chosen for entry in window.entries]
        header = ObjectHeader(Kind.SEGMENT, self._queues.epoch, chosen[0].begin, chosen[-1].end, now_ms)
        generation = chosen[0].generation + 1
        async with self._opened_spool(sum(entry.object.length for entry in entries)) as fd:
            sources = await self._copy(fd, entries)
            new = [await self._write(fd, part, header, generation) for part in _parts(sources) if part]
        if self._has_changed(entries):
            return [entry.object.name for entry in new]
        self._queues.replace(entries, new)
        self.joins += 1
        self.bytes += sum(source.block.size for source in sources)
        return [entry.object.name for entry in entries]

    def _has_changed(self, entries: Sequence[Entry]) -> bool:
        """Whether some objects have expired meanwhile, or lost a topic that was deleted."""
        now = {entry.object: entry for entry in self._queues.manifest.entries}
        return any(
            entry.object not in now or len(now[entry.object].stretches) != len(entry.stretches) for entry in entries
        )

    @asynccontextmanager
    async def _opened_spool(self, size: int) -> AsyncIterator[int]:
        disk = self._disk

        def create() -> int:
            if disk.stat(self._spool) is not None:  # left by a process that was killed
                disk.delete(self._spool)
            fd = disk.create(self._spool, 0)
            try:
                disk.allocate(fd, 0, size)
            except BaseException:
                disk.close(fd)
                disk.delete(self._spool)
                raise
            return fd

        fd = await disk.run(create)
        try:
            yield fd
        finally:
            disk.close(fd)
            await disk.run(disk.delete, self._spool)

    async def _copy(self, fd: int, entries: Sequence[Entry]) -> list[_Source]:
        """Copy objects to the spool; return the blocks that are still part of the history, sorted by queue."""
        sources: list[_Source] = []
        at = 0
        for entry in entries:
            stored = entry.object
            directory = await self._queues.manifest.read_directory(stored)
            begin = HEADER_SIZE
            while begin < stored.directory:
                length = min(_READ, stored.directory - begin)
                data = await self._bucket.read_range(stored.name, begin, length)
                if memoryview(data).nbytes != length:
                    raise BucketFormatError(f"{stored.name} in the bucket is cut off")
                await self._disk.run(self._disk.pwrite, fd, data, at + begin - HEADER_SIZE)
                begin += length
            sources += [_Source(block, at + block.position - HEADER_SIZE) for block in _living(entry, directory)]
            at += stored.directory - HEADER_SIZE
        sources.sort(key=_by_queue)
        return sources

    async def _write(self, fd: int, sources: Sequence[_Source], header: ObjectHeader, generation: int) -> Entry:
        """Write a segment of the blocks."""
        self._number = (self._number + 1) % 10_000
        stored = StoredObject(header.begin, header.end, generation, header.epoch, self._number, 0, 0)
        builder = ObjectBuilder(header)
        size = sum(source.block.length for source in sources)
        writer = self._bucket.writer(stored.name, PART_SIZE) if size > PART_SIZE else None
        waiting = 0
        for source in sources:
            units, records = await self._disk.run(_read_block, self._disk, fd, source, stored.name)
            block = source.block
            builder.add(block.topic, block.queue_id, block.offset, units, records, block.begin_ms, block.end_ms)
            waiting += block.length
            if writer is not None and waiting >= BLOCK_BYTES:
                for piece in await self._disk.run(builder.take):
                    await writer.write(piece)
                waiting = 0
        pieces, directory = await self._disk.run(builder.finish)
        if writer is None:
            await self._bucket.create(stored.name, pieces)
        else:
            for piece in pieces:
                await writer.write(piece)
            await writer.finish()
        stored = stored._replace(length=directory.length, directory=directory.position)
        return Entry(stored, stretches_of(directory))


def _by_queue(source: _Source) -> tuple[str, int, int]:
    block = source.block
    return block.topic, block.queue_id, block.offset


def _living(entry: Entry, directory: Directory) -> list[Block]:
    """The blocks of an object that its stretches in the manifest have: not those of deleted topics."""
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for stretch in entry.stretches:
        ranges.setdefault((stretch.topic, stretch.queue_id), []).append((stretch.offset, stretch.end))
    return [
        block
        for block in directory.blocks()
        if any(begin <= block.offset < end for begin, end in ranges.get((block.topic, block.queue_id), ()))
    ]


def _parts(sources: Sequence[_Source]) -> list[list[_Source]]:
    """The blocks of each segment: a queue with much has one of its own."""
    sizes: dict[tuple[str, int], int] = {}
    for block, _ in sources:
        key = block.topic, block.queue_id
        sizes[key] = sizes.get(key, 0) + block.length
    least = max(PART_SIZE, sum(sizes.values()) // LARGE_PART)
    shared: list[_Source] = []
    own: dict[tuple[str, int], list[_Source]] = {}
    for source in sources:
        key = source.block.topic, source.block.queue_id
        (own.setdefault(key, []) if sizes[key] >= least else shared).append(source)
    return [*own.values(), shared]


def _read_block(disk: Disk, fd: int, source: _Source, name: str) -> tuple[bytes, Any]:
    """Units and records of a block in the spool. Blocks: for a thread."""
    block = source.block
    data = disk.pread(fd, block.length, source.at)
    if len(data) != block.length or block_crc(data, ()) != block.crc:
        raise BucketFormatError(
            f"{name} cannot be written: the messages of {block.topic}/{block.queue_id} from {block.offset} on are "
            "damaged in the bucket"
        )
    size = block.messages * UNIT_SIZE
    return data[:size], memoryview(data)[size:]
