"""The rows of one part of a store as Arrow batches, and its damaged places as a separate table."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from trimq.pipeline.store.bucket import BucketReader
from trimq.pipeline.store.bucket_plan import BucketPart
from trimq.pipeline.store.bucket_walk import BucketWalk
from trimq.pipeline.store.columns import Rows
from trimq.pipeline.store.files import StoreFiles
from trimq.pipeline.store.heads import Array, Heads
from trimq.pipeline.store.options import FAR, StoreOptions
from trimq.pipeline.store.plan import Part
from trimq.pipeline.store.queues import QueueStretch, QueueWalk
from trimq.pipeline.store.tier import TierStretch, TierWalk, tier_files
from trimq.pipeline.store.walk import Chunk, Damage, LogWalk, Stretch

DAMAGE_SPARK_SCHEMA: Final = (
    "file string not null, commitLogOffset bigint not null, length bigint not null, why string not null"
)
"""The side table of damage: bytes of the log that are no record although records follow, and what is wrong."""

DAMAGE_SCHEMA: Final = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("commitLogOffset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("why", pa.string(), nullable=False),
    ]
)


def files_of(options: StoreOptions) -> StoreFiles | None:
    """The files that the options name; None for a bucket."""
    return StoreFiles(options.path, options.storage_options) if options.bucket is None else None


def walk(files: StoreFiles | None, part: Part, options: StoreOptions) -> Iterator[Chunk | Damage]:
    """The records of a part that the options select, and the damage in it."""
    if isinstance(part, BucketPart):
        assert options.bucket is not None
        for item in BucketWalk(BucketReader(options.bucket), part, options):
            yield _wanted(item, options, all_topics=True) if isinstance(item, Chunk) else item
        return
    assert files is not None
    if isinstance(part, TierStretch):
        for item in TierWalk(tier_files(options), part, check_crc=options.check_crc):
            yield _wanted(item, options, all_topics=True) if isinstance(item, Chunk) else item
        return
    if isinstance(part, QueueStretch):
        found: Iterable[Chunk | Damage] = QueueWalk(files, part, check_crc=options.check_crc)
        for item in found:
            yield _wanted(item, options, all_topics=True) if isinstance(item, Chunk) else item
        return
    source = files.source(part.file)
    try:
        for item in LogWalk(source, part, check_crc=options.check_crc):
            yield _wanted(item, options, all_topics=not options.names_topics) if isinstance(item, Chunk) else item
    finally:
        source.close()


def _wanted(chunk: Chunk, options: StoreOptions, *, all_topics: bool) -> Chunk:
    """The records of a window that the options select."""
    heads = chunk.heads
    wanted = np.ones(len(heads), dtype=bool)
    if options.starting_time > 0:
        wanted &= heads.store_timestamp >= options.starting_time
    if options.ending_time < FAR:
        wanted &= heads.store_timestamp <= options.ending_time
    if options.starting_position:
        wanted &= heads.phy >= options.starting_position
    if options.ending_position < FAR:
        wanted &= heads.phy < options.ending_position
    if options.queue_ids:
        wanted &= np.isin(heads.queue_id, list(options.queue_ids))
    if not wanted.all():
        heads = heads.take(np.flatnonzero(wanted))
    if len(heads) and not (all_topics and not options.starting_offsets and not options.ending_offsets):
        heads = heads.take(np.flatnonzero(_of_topics(chunk.view, heads, options)))
    return Chunk(chunk.view, heads)


def _of_topics(view: memoryview, heads: Heads, options: StoreOptions) -> Array:
    """A mask of the records of selected topics and queue offsets."""
    topics = Rows(view, heads, None).topics().dictionary_encode()
    names = topics.dictionary.to_pylist()
    number = topics.indices.to_numpy(zero_copy_only=False)
    wanted: Array = np.array([options.wants_topic(name) for name in names], dtype=bool)[number]
    for limits, first in ((options.starting_offsets, True), (options.ending_offsets, False)):
        for (topic, queue_id), offset in limits.items():
            if topic in names:
                mine = (number == names.index(topic)) & (heads.queue_id == queue_id)
                wanted &= ~mine | ((heads.queue_offset >= offset) if first else (heads.queue_offset < offset))
    return wanted


def batches(files: StoreFiles | None, part: Part, options: StoreOptions) -> Iterator[pa.RecordBatch]:
    """The rows of a part. Damage in it is skipped."""
    matches = _matcher(options.sql)
    broker_name = options.broker_name
    if broker_name is None and isinstance(part, BucketPart):
        broker_name = part.broker
    for found in walk(files, part, options):
        item = _matching(found, matches) if matches is not None and isinstance(found, Chunk) else found
        if isinstance(item, Chunk) and len(item.heads):
            batch, _ = Rows(item.view, item.heads, broker_name).batch(options.columns, options.nullable)
            if batch.num_rows:
                yield batch


def _matcher(text: str) -> Callable[[memoryview], bool] | None:
    if not text:
        return None
    from trimq.protocol.sql92 import compile_expression  # noqa: PLC0415 - few tables have an expression

    return compile_expression(text).matches_text


def _matching(chunk: Chunk, matches: Callable[[memoryview], bool]) -> Chunk:
    """The records of a window whose properties fulfil an expression, which a broker would evaluate in the same way."""
    heads, view = chunk.heads, chunk.view
    spans = zip(heads.properties_at.tolist(), heads.properties_end.tolist(), strict=True)
    wanted = np.array([matches(view[begin:end]) for begin, end in spans], dtype=bool)
    return chunk if wanted.all() else Chunk(view, heads.take(np.flatnonzero(wanted)))


def damages(files: StoreFiles | None, part: Part, options: StoreOptions) -> Iterator[Damage]:
    """The damaged places of a part, including bodies that cannot be decompressed."""
    path = part.file.path if isinstance(part, Stretch) else ""
    for item in walk(files, part, options):
        if isinstance(item, Damage):
            yield item
            continue
        _, bad = Rows(item.view, item.heads, None).bodies()
        for number, why in bad:
            yield Damage(path, int(item.heads.phy[number]), int(item.heads.size[number]), why)


def damage_batch(found: Iterable[Damage]) -> pa.RecordBatch:
    """Damaged places as rows of the side table."""
    rows = list(found)
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, DAMAGE_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=DAMAGE_SCHEMA)
