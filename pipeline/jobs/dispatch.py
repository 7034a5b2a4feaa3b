"""Dispatch as a table: the queue unit and the hashes of the index keys of each record of a log, computed column-wise.

Layouts and rules: trimq.protocol.queue_unit, index_layout and dispatch_rules; RocketMQ's
CommitLogDispatcherBuildConsumeQueue and CommitLogDispatcherBuildIndex.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute
from pyspark.sql import DataFrame, SparkSession

from trimq.pipeline.jobs.job_support import on_parts
from trimq.pipeline.store.columns import Rows
from trimq.pipeline.store.files import StoreFiles
from trimq.pipeline.store.gather import as_text
from trimq.pipeline.store.heads import Array
from trimq.pipeline.store.options import StoreOptions
from trimq.pipeline.store.plan import plan
from trimq.pipeline.store.table import walk
from trimq.pipeline.store.walk import Chunk, Damage, Stretch
from trimq.protocol.dispatch_rules import IN_INDEX, IN_QUEUE, KIND, due_time
from trimq.protocol.hashing import tags_code
from trimq.protocol.index_batch import make_batch
from trimq.protocol.message_keys import TAG_KEY
from trimq.protocol.topic_rules import SCHEDULE_TOPIC

DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
"""The default of messageDelayLevel. It is needed because the tag slot of a delayed message's unit is its due time."""
_UNIT_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DROPPED: Final = "topics.dropped"
_log = logging.getLogger(__name__)

SCHEMA: Final = (
    "part int, topic string, queueId int, queueOffset bigint, phy bigint, size int, tagsCode bigint, "
    "storeTime bigint, queued boolean, keyNumber bigint, hashes array<int>, why string"
)
"""``queued``: the record has a queue unit; records of a deleted topic do not. ``keyNumber``: the number of keys in
front of this record's in its part. ``why``: the row is not a record but damage, and this says what is wrong.
"""
_ARROW: Final = pa.schema(
    [
        ("part", pa.int32()),
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("queueOffset", pa.int64()),
        ("phy", pa.int64()),
        ("size", pa.int32()),
        ("tagsCode", pa.int64()),
        ("storeTime", pa.int64()),
        ("queued", pa.bool_()),
        ("keyNumber", pa.int64()),
        ("hashes", pa.list_(pa.field("element", pa.int32()))),
        ("why", pa.string()),
    ]
)


class Dropped(NamedTuple):
    """A deleted topic: its records below log offset ``position``, stored up to ``wall_ms``, do not count any more."""

    position: int
    wall_ms: int


def dropped_topics(files: StoreFiles) -> dict[str, Dropped]:
    """The topics that a TriMQ broker recorded as deleted; empty without the file, or if it cannot be read."""
    if not files.exists(_DROPPED):
        return {}
    data = files.fs.cat_file(files.join(_DROPPED))
    try:
        return msgspec.json.decode(data, type=dict[str, Dropped])
    except msgspec.DecodeError as error:
        _log.warning("%s cannot be read, deleted topics reappear: %s", files.join(_DROPPED), error)
        return {}


def delay_table(levels: str) -> list[int]:
    """The milliseconds of each delay level; level 0 is no delay.

    >>> delay_table("1s 5m")
    [0, 1000, 300000]
    """
    return [0, *(int(level[:-1]) * _UNIT_MS[level[-1]] for level in levels.split())]


def dispatched(
    spark: SparkSession, files: StoreFiles, options: StoreOptions, delays: Sequence[int], *, tags: bool
) -> tuple[DataFrame, int, list[Damage]]:
    """A table with a row for each record and each damaged place of a store, its number of parts, and the log's gaps.

    ``tags``: a record's tag is an index key too.
    """
    found = plan(files, options)
    dropped = dropped_topics(files)
    parts = [part for part in found.parts if isinstance(part, Stretch)]

    def work(number: int, part: Stretch) -> Iterator[pa.RecordBatch]:
        keys = 0  # numbered within the part, since parts run in parallel; the reader adds the keys of earlier parts
        for item in walk(files, part, options):
            if isinstance(item, Damage):
                yield damage_row(number, item)
            elif len(item.heads):
                batch, more = dispatch_batch(item, number, keys, delays, dropped, tags=tags)
                keys += more
                yield batch

    return on_parts(spark, parts, work, SCHEMA), len(parts), found.damages


def damage_row(number: int, damage: Damage) -> pa.RecordBatch:
    """A damaged place as a row."""
    row = dict.fromkeys(_ARROW.names)
    row |= {"part": number, "phy": damage.phy, "size": min(damage.length, 0x7FFFFFFF), "why": damage.why}
    return pa.RecordBatch.from_pylist([row], schema=_ARROW)


def dispatch_batch(
    chunk: Chunk,
    number: int,
    keys: int,
    delays: Sequence[int],
    dropped: Mapping[str, Dropped] | None = None,
    *,
    tags: bool = True,
) -> tuple[pa.RecordBatch, int]:
    """The rows of one window, and how many keys they have; ``keys`` is the number of keys in front of the window."""
    heads = chunk.heads
    rows = Rows(chunk.view, heads, None)
    count = len(heads)
    topics = rows.topics()
    kind = heads.sys_flag & KIND
    queued = np.array(IN_QUEUE)[kind]
    for topic, last in (dropped or {}).items():
        # Both limits: after the log was truncated, new records may lie below the position, and have later times.
        deleted = (heads.phy < last.position) & (heads.store_timestamp <= last.wall_ms)
        if deleted.any():
            queued &= ~(deleted & pa.compute.equal(topics, topic).to_numpy(zero_copy_only=False))
    offsets, hashes = key_hashes(rows, topics, np.array(IN_INDEX)[kind], tags=tags)
    arrays = [
        pa.array(np.full(count, number, dtype=np.int32)),
        topics,
        pa.array(heads.queue_id, pa.int32()),
        pa.array(heads.queue_offset),
        pa.array(heads.phy),
        pa.array(heads.size.astype(np.int32)),
        pa.array(tag_slots(rows, topics, delays)),
        pa.array(heads.store_timestamp),
        pa.array(queued),
        pa.array(keys + offsets[:-1].astype(np.int64)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(hashes, pa.int32()), type=_ARROW.field("hashes").type),
        pa.nulls(count, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_ARROW), int(offsets[-1])


def tag_slots(rows: Rows, topics: pa.StringArray, delays: Sequence[int]) -> Array:
    """The tag slot of each record's unit: the hash of the tag, or for a delayed message its due time."""
    tags = rows.properties.column(b"TAGS").dictionary_encode()
    codes = np.array([tags_code(tag) for tag in tags.dictionary.to_pylist()] or [0], dtype=np.int64)
    slots: Array = codes[tags.indices.fill_null(0).to_numpy(zero_copy_only=False)]
    slots[tags.indices.is_null().to_numpy(zero_copy_only=False)] = 0
    delayed = np.flatnonzero(pa.compute.equal(topics, SCHEDULE_TOPIC).to_numpy(zero_copy_only=False))
    if len(delayed):
        texts = rows.properties.column(b"DELAY").take(pa.array(delayed)).to_pylist()
        for row, text in zip(delayed.tolist(), texts, strict=True):
            due = due_time(text or "", int(rows.heads.store_timestamp[row]), delays)
            if due is not None:
                slots[row] = due
    return slots


def key_hashes(rows: Rows, topics: pa.StringArray, indexed: Array, *, tags: bool) -> tuple[Array, list[int]]:
    """The offsets of each record's key hashes (one more than records), and all hashes in the order of the index.

    A record's keys are its unique key, then the words of KEYS, and with ``tags`` its tag.
    """
    found = rows.properties
    unique_rows, which = found.named(b"UNIQ_KEY")
    word_offsets, words = found.words(b"KEYS")
    word_rows = np.repeat(np.arange(found.count), np.diff(word_offsets))
    uniques = as_text(found.raw_values(which))
    row = np.concatenate((unique_rows, word_rows))
    texts = pa.concat_arrays([uniques, words])
    if tags:
        tag_rows, which = found.named(b"TAGS")
        row = np.concatenate((row, tag_rows))
        tagged = pa.compute.binary_join_element_wise(TAG_KEY, as_text(found.raw_values(which)), "")
        texts = pa.concat_arrays([texts, tagged])
    order = np.argsort(row, kind="stable")  # stable: the keys of one record keep the order above
    order = order[indexed[row[order]]]
    row = row[order]
    keyed = pa.compute.binary_join_element_wise(topics.take(pa.array(row)), texts.take(pa.array(order)), "#")
    offsets = np.zeros(found.count + 1, dtype=np.int32)
    np.cumsum(np.bincount(row, minlength=found.count), out=offsets[1:])
    return offsets, make_batch().key_hashes(keyed.to_pylist()) if len(row) else []
