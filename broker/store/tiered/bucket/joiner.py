"""Joins objects in the background: the messages of a queue that were uploaded in many objects come to stand together.

A join takes objects that follow each other in the log, up to 1 GiB, and writes segments: one for each queue with much
in them, and one for all others. Memory stays at a part of an upload. Then the manifest names the segments, and after
the grace the old objects go. What an interrupted join has written is garbage.

Segments are joined again while they are small: with many queues or few messages they grow over generations.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from typing import Final, NamedTuple

import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.bucket_queues import BucketQueues
from trimq.broker.store.tiered.bucket.join_sources import DamagedSourceError, NotLocalError, Piece, Source, SpoolSource
from trimq.broker.store.tiered.bucket.object_builder import ObjectBuilder
from trimq.protocol.bucket_manifest import Entry, StoredObject, StretchRows, stretches_of
from trimq.protocol.bucket_object import BLOCK_BYTES, Kind, ObjectHeader

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
_SLICE: Final = 500
"""Pieces that are looked at in one turn of the event loop."""


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


def choose(windows: Sequence[Window], saved: int, damaged: Container[StoredObject] = ()) -> list[Window]:
    """The windows that are joined next; empty if none are.

    ``saved``: only what lies before this log offset, which the root's pages have. Those with ``damaged`` objects stay.
    """
    run: list[Window] = []
    for window in [window for window in windows if window.end <= saved]:
        is_damaged = any(entry.object in damaged for entry in window.entries)
        if is_damaged or (window.generation and window.size >= JOIN_BYTES // 2):
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


class Joiner:
    """The joins of an owner. Belongs to the event loop."""

    def __init__(
        self,
        bucket: Bucket,
        queues: BucketQueues,
        disk: Disk,
        root: str,
        local: Callable[[Sequence[Entry]], Awaitable[Source]],
    ) -> None:
        """``root``: the directory of the store, where the spool is. ``local``: makes a LogSource of entries."""
        self._bucket = bucket
        self._queues = queues
        self._disk = disk
        self._spool = f"{root}/{SPOOL}"
        self._local = local
        self._number = 0
        self._left: list[str] = []
        """What the last try may have written before it failed. No reader knows it."""
        self._damaged: set[StoredObject] = set()
        """Objects that are not joined until the next start: each try would copy all that is joined with them."""
        self.joins = 0
        self.bytes = 0
        """Bytes of messages that were joined."""

    async def join_next(self, now_ms: int) -> list[str]:
        """Do the next join. Returns the names of what is not needed any more; empty if there is nothing to join.

        The manifest has the result then. Once the root names it, these objects are garbage. Raises OSError,
        BucketFormatError.
        """
        if self._left:
            await self._bucket.delete(self._left)
            self._left = []
        manifest = self._queues.manifest
        saved = manifest.root.end if manifest.root is not None else 0
        chosen = choose(windows_of(manifest.entries), saved, self._damaged)
        if not chosen:
            return []
        entries = [entry for window in chosen for entry in window.entries]
        header = ObjectHeader(Kind.SEGMENT, self._queues.epoch, chosen[0].begin, chosen[-1].end, now_ms)
        generation = chosen[0].generation + 1
        written = self._left
        try:
            new = await self._write_all(await self._local(entries), header, generation, written)
        except NotLocalError:
            try:
                async with SpoolSource.copied(self._disk, self._spool, self._bucket, manifest, entries) as source:
                    new = await self._write_all(source, header, generation, written)
            except DamagedSourceError as error:
                self._damaged.add(error.stored)
                raise
        self._left = []
        if not await self._queues.replace(entries, new):
            return written
        self.joins += 1
        self.bytes += sum(int(StretchRows.of(entry.stretches).rows["size"].sum()) for entry in new)
        named = {entry.object.name for entry in new}
        return [*(entry.object.name for entry in entries), *(name for name in written if name not in named)]

    async def _write_all(
        self, source: Source, header: ObjectHeader, generation: int, written: list[str]
    ) -> list[Entry]:
        """Write the segments; ``written`` gets the names of all that may be in the bucket."""
        new: list[Entry] = []
        for part in await _parts(source.pieces):
            self._number = (self._number + 1) % 10_000
            stored = StoredObject(header.begin, header.end, generation, header.epoch, self._number, 0, 0)
            written.append(stored.name)
            new.append(await self._write(source, part, header, stored))
        return new

    async def _write(self, source: Source, part: "_Part", header: ObjectHeader, stored: StoredObject) -> Entry:
        """Write a segment."""
        builder = ObjectBuilder(header)
        writer = self._bucket.writer(stored.name, PART_SIZE) if part.size > PART_SIZE else None
        sent = 0
        for piece in part.pieces:
            async for batch in source.batches(piece):
                times = batch.begin_ms, batch.end_ms
                builder.add(piece.topic, piece.queue_id, batch.offset, batch.units, batch.records, *times)
                if writer is not None and builder.size - sent >= BLOCK_BYTES:
                    for data in await self._disk.run(builder.take):
                        await writer.write(data)
                    sent = builder.size
        rest, directory = await self._disk.run(builder.finish)
        if writer is None:
            await self._bucket.create(stored.name, rest)
        else:
            for data in rest:
                await writer.write(data)
            await writer.finish()
        stored = stored._replace(length=directory.length, directory=directory.position)
        return Entry(stored, stretches_of(directory))


class _Part:
    """The pieces of a segment; ``size``: their bytes."""

    def __init__(self, size: int) -> None:
        self.pieces: list[Piece] = []
        self.size = size


async def _parts(pieces: Sequence[Piece]) -> list[_Part]:
    """The pieces of each segment: a queue with much has one of its own."""
    sizes: dict[tuple[str, int], int] = {}
    async for piece in _slowly(pieces):
        key = piece.topic, piece.queue_id
        sizes[key] = sizes.get(key, 0) + piece.length
    least = max(PART_SIZE, sum(sizes.values()) // LARGE_PART)
    own = {key: _Part(size) for key, size in sizes.items() if size >= least}
    shared = _Part(sum(size for size in sizes.values() if size < least))
    async for piece in _slowly(pieces):
        own.get((piece.topic, piece.queue_id), shared).pieces.append(piece)
    return [*own.values(), shared] if shared.pieces else [*own.values()]


async def _slowly(pieces: Sequence[Piece]) -> AsyncIterator[Piece]:
    """The pieces, with turns for other tasks: with many small queues there are hundreds of thousands."""
    for number, piece in enumerate(pieces):
        if number % _SLICE == _SLICE - 1:
            await trio.lowlevel.checkpoint()
        yield piece
