"""Makes rows of pulled records: the bodies of replies become Arrow batches, column by column."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute

from trimq.client.core import Client
from trimq.client.errors import RocketMQError
from trimq.pipeline.store.columns import Rows
from trimq.pipeline.store.heads import Array, read_heads, values_at
from trimq.pipeline.store.scan import chain
from trimq.pipeline.topics import places
from trimq.pipeline.topics.direct_connection import MIN_MESSAGES, DirectConnection
from trimq.pipeline.topics.planning import Range
from trimq.pipeline.topics.pulling import RangeReader
from trimq.pipeline.topics.session import REQUEST_TIMEOUT, ask, open_client, stream
from trimq.pipeline.topics.settings import DEFAULT_GROUP, ReadSettings
from trimq.protocol.record import AT_PHYSICAL_OFFSET, OVERHEAD_V1, RecordError

BATCH_BYTES: Final = 4 << 20
"""An Arrow batch is made when so many bytes of records have arrived."""

_WORD: Final = np.dtype(">u4")


class UndecodableError(RuntimeError):
    """A message that cannot become a row; the text says where it is and why."""


def batch_of(
    data: bytes | memoryview, span: Range, settings: ReadSettings, pieces: Sequence[tuple[int, int]] | None = None
) -> pa.RecordBatch:
    """The rows of records of one queue: those in the range that have a selected tag.

    The records fill ``data``, or the ``pieces`` [begin, end) of it. Raises RecordError for bytes that are no records,
    UndecodableError for a body that cannot be decompressed.
    """
    view = memoryview(data)
    pieces = [(0, len(view))] if pieces is None else pieces
    if any(later < end for (_, end), (later, _) in pairwise(pieces)):  # gather copies only ascending ranges
        view = memoryview(b"".join([view[begin:end] for begin, end in pieces]))
        pieces = [(0, len(view))]
    at = _positions(view, pieces, span)
    window = np.frombuffer(view, dtype=np.uint8)
    physical = values_at(window, at + AT_PHYSICAL_OFFSET, np.dtype(">i8")).astype(np.int64)
    heads = read_heads(window, at, physical)
    if not heads.ok.all():
        raise RecordError(f"the lengths of a message of {span.queue} do not match")
    inside = (heads.queue_offset >= span.begin) & (heads.queue_offset < span.end)
    if not inside.all():
        heads = heads.take(inside)
    rows = Rows(view, heads, span.queue.broker_name)
    # The nullability of a user's schema has to be in the batch: Spark compares the schemas exactly.
    batch, bad = rows.batch(settings.columns, settings.nullable)
    if bad:
        number, why = bad[0]
        raise UndecodableError(f"{span.queue}, offset {heads.queue_offset[number]}: {why}")
    if settings.tags:  # brokers filter by the hashes of tags, so that other tags may pass
        batch = batch.filter(pa.compute.is_in(rows.column("tags"), pa.array(sorted(settings.tags))))
    return batch


def _positions(view: memoryview, pieces: Sequence[tuple[int, int]], span: Range) -> Array:
    """The positions of the records that fill the pieces. Raises RecordError for other bytes."""
    at = _of_one_size(view, *np.array(pieces, dtype=np.int64).T)
    if at is not None:
        return at
    found = []
    for begin, end in pieces:
        at, stop = chain(view[begin:end], 0, end - begin)
        if begin + stop != end:
            raise RecordError(f"a reply for {span.queue} has no message at byte {stop}")
        found.append(at + begin)
    return np.concatenate(found)


def _of_one_size(view: memoryview, begins: Array, ends: Array) -> Array | None:
    """As ``_positions``, if all records of each piece have the size of its first one; None if not."""
    lengths = ends - begins
    if not len(begins) or int(lengths.min()) < OVERHEAD_V1:
        return None
    sizes = values_at(view, begins, _WORD).astype(np.int64)
    if int(sizes.min()) < OVERHEAD_V1 or (lengths % sizes).any():
        return None
    counts = lengths // sizes
    sizes = np.repeat(sizes, counts)
    firsts = np.cumsum(counts) - counts
    at: Array = np.repeat(begins, counts) + sizes * (np.arange(len(sizes)) - np.repeat(firsts, counts))
    # So far only the first record's size is known; each record has to have it.
    return at if (values_at(view, at, _WORD) == sizes).all() else None


class _Bodies:
    """Collects the bodies of replies for Arrow batches of about ``BATCH_BYTES``."""

    def __init__(self, span: Range, settings: ReadSettings) -> None:
        self._span = span
        self._settings = settings
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, body: bytes) -> bool:
        """Add a body; returns whether there are enough for a batch."""
        self._parts.append(body)
        self._size += len(body)
        return self._size >= BATCH_BYTES

    def batches(self) -> Iterator[pa.RecordBatch]:
        """A batch of the collected bodies, or none if there are none."""
        parts, self._parts, self._size = self._parts, [], 0
        if parts:
            yield batch_of(b"".join(parts), self._span, self._settings)


async def _batches(client: Client, span: Range, settings: ReadSettings) -> AsyncGenerator[pa.RecordBatch]:
    held = _Bodies(span, settings)
    async with aclosing(RangeReader(client, settings, span).bodies()) as bodies:
        async for body in bodies:
            if held.add(body):
                for batch in held.batches():
                    yield batch
    for batch in held.batches():
        yield batch


def _direct_batches(connection: DirectConnection, span: Range, settings: ReadSettings) -> Iterator[pa.RecordBatch]:
    for view, pieces in connection.reply_batches():
        yield batch_of(view, span, settings, pieces)


def _address(span: Range, settings: ReadSettings) -> str | None:
    """The address of the range's broker; None if it is not known immediately."""

    async def look(client: Client) -> str | None:
        try:
            return (await client.routes.get(span.queue.topic)).member(span.queue.broker_name)
        except RocketMQError:
            return None

    return ask(settings.servers, look)


def read_range(span: Range, settings: ReadSettings, *, commit: bool) -> Iterator[pa.RecordBatch]:
    """The rows of a range as Arrow batches, for a Spark task.

    ``commit``: commit the end of the range for the group, after all rows were taken.
    """
    # The fast path reads as far as it gets, the full path the rest: all errors and waits are the full path's.
    rest = span
    if span.size >= MIN_MESSAGES and not settings.is_filtered:
        address = _address(span, settings)
        if address is not None:
            group = settings.group or DEFAULT_GROUP
            connection = DirectConnection(address, group, span, REQUEST_TIMEOUT, settings.servers)
            yield from _direct_batches(connection, span, settings)
            rest = span._replace(begin=connection.at)

    async def run() -> AsyncGenerator[pa.RecordBatch]:
        async with open_client(settings.servers) as client:
            async with aclosing(_batches(client, rest, settings)) as batches:
                async for batch in batches:
                    if batch.num_rows:
                        yield batch
            # Only here, when Spark has taken the last row: the commit must not be ahead of the rows.
            if commit and settings.group is not None:
                await places.commit(client, settings.group, [(span.queue, span.end)])

    if rest.size or (commit and settings.group is not None):
        yield from stream(run)
