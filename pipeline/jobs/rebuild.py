"""``rebuild``: builds consume queues, index and checkpoint of a store from its log alone.

The log is read once. One task writes each queue file from the units of its range, and one task each index file from
its entries. Queues whose offsets are not consecutive (records were damaged, or the topic was deleted and created again)
are detected in that pass and written a second time, each by one task in log order.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from msgspec import Struct, field
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from trimq.pipeline.jobs.dispatch import DELAY_LEVELS, delay_table, dispatched
from trimq.pipeline.jobs.index_files import INDEX_SCHEMA, write_index_files
from trimq.pipeline.jobs.job_support import Target, groups, runs
from trimq.pipeline.jobs.queue_slots import QueueImage
from trimq.pipeline.store.files import StoreFiles
from trimq.pipeline.store.options import StoreOptions
from trimq.protocol import checkpoint_layout
from trimq.protocol.file_names import index_name, offset_name
from trimq.protocol.queue_unit import FILLER, UNIT_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE

QUEUE_FILE: Final = 6_000_000
SLOTS: Final = 5_000_000
ENTRIES: Final = 20_000_000
_QUEUE_ARROW: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("file", pa.int64()),
        ("units", pa.int64()),
        ("firstUnit", pa.int64()),
        ("firstPhy", pa.int64()),
        ("lastPhy", pa.int64()),
        ("regular", pa.bool_()),
    ]
)
_QUEUE_SCHEMA: Final = (
    "topic string, queueId int, file bigint, units bigint, firstUnit bigint, firstPhy bigint, lastPhy bigint, "
    "regular boolean"
)


class RebuildOptions(Struct, frozen=True):
    """The broker's configuration: ``queue_file_size`` in bytes, the numbers of slots and entries of an index file."""

    queue_file_size: int = QUEUE_FILE
    slots: int = SLOTS
    entries: int = ENTRIES
    delay_levels: str = DELAY_LEVELS
    index: bool = True
    index_tags: bool = True
    """The broker's indexTagEnable."""


class RebuildReport(Struct):
    """What was read and written. ``damages`` are (log offset, bytes, what is wrong)."""

    records: int = 0
    units: int = 0
    queues: int = 0
    irregular: int = 0
    """Queues that were written record by record, because their offsets are not consecutive."""
    keys: int = 0
    index_files: int = 0
    log_end: int = 0
    damages: list[tuple[int, int, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class RebuildError(Exception):
    """The target cannot be written to; the text says why."""


def rebuild(
    spark: SparkSession, store: str, target: str, options: RebuildOptions | None = None, *, split_size: int = 64 << 20
) -> RebuildReport:
    """Write ``consumequeue/``, ``index/`` and ``checkpoint`` of the store at ``store`` into ``target``.

    ``target`` may be the store itself if it has none of the three. Raises RebuildError if ``target`` has one of them,
    StorePathError if ``store`` is no store.
    """
    options = options or RebuildOptions()
    out = Target(target)
    present = [
        name for name in ("consumequeue", "index", "checkpoint") if out.names(name) or out.fs.exists(out.join(name))
    ]
    if present:
        raise RebuildError(f"{target} has {', '.join(present)} already: move them away, or give another directory")
    return _Rebuild(spark, StoreFiles(store), out, options, split_size).run()


class _Rebuild:
    def __init__(
        self, spark: SparkSession, files: StoreFiles, target: Target, options: RebuildOptions, split_size: int
    ) -> None:
        self._spark = spark
        self._files = files
        self._target = target
        self._options = options
        self._split_size = split_size
        self.report = RebuildReport()

    def run(self) -> RebuildReport:
        report = self.report
        log = self._files.log_files()
        self._log_file_size = max((file.size for file in log), default=1 << 30)
        reading = StoreOptions(path=self._files.path, split_size=self._split_size)
        delays, tags = delay_table(self._options.delay_levels), self._options.index_tags
        table, _, gaps = dispatched(self._spark, self._files, reading, delays, tags=tags)
        # Read the log once: queues and index are several queries over the same table.
        table.persist(StorageLevel.DISK_ONLY)
        try:
            started = time.perf_counter()
            parts = self._read(table)
            report.damages += [(gap.phy, gap.length, gap.why) for gap in gaps]
            report.seconds["read"] = time.perf_counter() - started
            started = time.perf_counter()
            self._write_queues(table.where("queued"))
            report.seconds["queues"] = time.perf_counter() - started
            started = time.perf_counter()
            index_time = self._write_index(table, parts) if self._options.index else 0
            report.seconds["index"] = time.perf_counter() - started
        finally:
            table.unpersist()
        # Last, because a broker that finds a checkpoint takes the queues and the index below it as complete.
        self._write_checkpoint(index_time)
        return report

    def _read(self, table: DataFrame) -> dict[int, int]:
        """Read the log and fill in the report; returns the number of keys in front of each part."""
        report = self.report
        rows = (
            table.groupBy("part")
            .agg(
                f.count("topic").alias("records"),
                f.sum(f.expr("case when why is null then size(hashes) end")).alias("keys"),
                f.max(f.when(f.col("why").isNull(), f.col("phy") + f.col("size"))).alias("end"),
                f.max("storeTime").alias("time"),
            )
            .collect()
        )
        # Tasks number the keys of their own part; with the sum of earlier parts each key gets its number in the index.
        parts: dict[int, int] = {}
        self._last_time = 0
        for row in sorted(rows, key=lambda row: int(row.part)):
            parts[row.part] = report.keys
            report.keys += row["keys"] or 0
            report.records += row.records
            report.log_end = max(report.log_end, row.end or 0)
            self._last_time = max(self._last_time, row.time or 0)
        damages = table.where("why is not null").select("phy", "size", "why").orderBy("phy").collect()
        report.damages = [(row.phy, row["size"], row.why) for row in damages]
        return parts

    # -- queues

    def _write_queues(self, table: DataFrame) -> None:
        size = self._options.queue_file_size
        units = size // UNIT_SIZE
        work = partial(write_queue_files, self._target, size)
        chosen = table.select(
            "topic",
            "queueId",
            f.expr(f"queueOffset div {units}").alias("file"),
            "queueOffset",
            "phy",
            "size",
            "tagsCode",
        )
        written = (
            chosen.repartition("topic", "queueId", "file")
            .sortWithinPartitions("topic", "queueId", "file", "queueOffset", "phy")
            .mapInArrow(work, _QUEUE_SCHEMA)
            .collect()
        )
        queues: dict[tuple[str, int], list[Any]] = {}
        for row in written:
            queues.setdefault((row.topic, row.queueId), []).append(row)
        irregular = [key for key, rows in queues.items() if not _is_regular(rows, units)]
        self.report.queues = len(queues)
        self.report.irregular = len(irregular)
        again = set(irregular)
        self.report.units = sum(row.units for row in written if (row.topic, row.queueId) not in again)
        # Remove all files of an irregular queue first: the second pass may write fewer or other files than the first.
        for topic, queue_id in irregular:
            self._target.remove(self._target.join("consumequeue", topic, str(queue_id)))
        if irregular:
            names = self._spark.createDataFrame(irregular, "topic string, queueId int")
            whole = partial(write_whole_queues, self._target, size, self._log_file_size)
            chosen = chosen.join(f.broadcast(names), ["topic", "queueId"])
            # A topic that was deleted and created again begins at offset 0 again. Its older queue is gone, as in the
            # broker's recovery.
            lives = chosen.where("queueOffset = 0").groupBy("topic", "queueId").agg(f.max("phy").alias("life"))
            chosen = chosen.join(f.broadcast(lives), ["topic", "queueId"], "left").where("phy >= coalesce(life, 0)")
            self.report.units += chosen.count()
            (
                chosen.drop("life")
                .repartition("topic", "queueId")
                .sortWithinPartitions("topic", "queueId", "phy")
                .mapInArrow(whole, _QUEUE_SCHEMA)
                .collect()
            )

    # -- index

    def _write_index(self, table: DataFrame, parts: dict[int, int]) -> int:
        """Write the index files; returns the store time of the newest entry."""
        if not self.report.keys:
            return 0
        capacity = self._options.entries - 1  # entry 0 of a file is never used
        count = -(-self.report.keys // capacity)
        bases = self._spark.createDataFrame(list(parts.items()), "part int, base bigint")
        entries = table.where("size(hashes) > 0").join(f.broadcast(bases), "part")
        entries = entries.select((f.col("base") + f.col("keyNumber")).alias("number"), "hashes", "phy", "storeTime")
        entries = entries.select("number", "phy", "storeTime", f.posexplode("hashes").alias("at", "hash"))
        entries = entries.select((f.col("number") + f.col("at")).alias("number"), "hash", "phy", "storeTime")
        # The last entry of a file is passed to the task of the next file too: its times are relative to that entry's.
        files = f.expr(
            f"case when number % {capacity} = {capacity - 1} and number div {capacity} < {count - 1} "
            f"then array(number div {capacity}, number div {capacity} + 1) else array(number div {capacity}) end"
        )
        entries = entries.select(f.explode(files).alias("file"), "number", "hash", "phy", "storeTime")
        work = partial(write_index_files, self._target, self._options.slots, self._options.entries)
        written = (
            entries.repartition(min(count, 200), "file")
            .sortWithinPartitions("file", "number")
            .mapInArrow(work, INDEX_SCHEMA)
            .collect()
        )
        # A file's name is made of the time of its first entry. Brokers sort files by name: names must be distinct and
        # ascend, even if two files begin in the same millisecond or the clock was set back.
        newest = 0
        for row in sorted(written, key=lambda row: int(row.file)):
            newest = max(int(index_name(row.begin)), newest + 1)
            self._target.move(row.path, self._target.join("index", f"{newest:017d}"))
        self.report.index_files = len(written)
        return max(int(row.end) for row in written)

    def _write_checkpoint(self, index_time: int) -> None:
        fields = checkpoint_layout.CheckpointFields(
            physic_msg_timestamp=self._last_time,
            logics_msg_timestamp=self._last_time,
            index_msg_timestamp=index_time,
            logics_physical_offset=self.report.log_end,
        )
        self._target.write(self._target.join("checkpoint"), checkpoint_layout.encode(fields))


def _is_regular(rows: list[Any], units: int) -> bool:
    """Whether a queue's files are consecutive, without a gap inside or between them, and in log order."""
    rows = sorted(rows, key=lambda row: int(row.file))
    phy = -1
    for number, row in enumerate(rows):
        following = number + 1 < len(rows)
        if not row.regular or row.firstPhy <= phy:
            return False
        if number and row.file != rows[number - 1].file + 1:
            return False
        if following and row.firstUnit + row.units != units:
            return False
        if number and row.firstUnit:
            return False
        phy = row.lastPhy
    return True


def write_queue_files(target: Target, size: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a file for each group of units, which come sorted by topic, queue, file and offset; a row for each file.

    A file with a gap, a duplicate or records out of log order is not written; its row says that it is not ``regular``.
    """
    for (topic, queue_id, number), table in groups(batches, ("topic", "queueId", "file")):
        offset = table["queueOffset"].to_numpy()
        phy = table["phy"].to_numpy()
        units = np.empty(len(offset), UNIT_TYPE)
        units["phy"], units["size"], units["tags_code"] = phy, table["size"].to_numpy(), table["tagsCode"].to_numpy()
        first = int(offset[0]) - number * (size // UNIT_SIZE)
        regular = bool((np.diff(offset) == 1).all() and (np.diff(phy) > 0).all())
        if regular:
            data = FILLER * first + units.tobytes()
            path = target.join("consumequeue", topic, str(queue_id), offset_name(number * size))
            target.write(path, data, size=size)
        yield _file_row(topic, queue_id, number, len(offset), first, int(phy[0]), int(phy[-1]), regular)


def _file_row(
    topic: str, queue_id: int, number: int, units: int, first: int, first_phy: int, last_phy: int, regular: bool
) -> pa.RecordBatch:
    row = (topic, queue_id, number, units, first, first_phy, last_phy, regular)
    return pa.RecordBatch.from_arrays(
        [pa.array([value], kind.type) for value, kind in zip(row, _QUEUE_ARROW, strict=True)], schema=_QUEUE_ARROW
    )


def write_whole_queues(
    target: Target, size: int, log_file_size: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write all files of queues whose records come in log order; a row for each file.

    A queue may have any number of records: at most one batch and the files that it fills are in memory.
    """

    def written(queue: tuple[Any, ...], image: QueueImage, *, to_the_end: bool) -> Iterator[pa.RecordBatch]:
        topic, queue_id = queue
        for first, units in image.take_files(to_the_end=to_the_end):
            name = offset_name(first * UNIT_SIZE)
            target.write(target.join("consumequeue", topic, str(queue_id), name), units, size=size)
            yield _file_row(topic, queue_id, first * UNIT_SIZE // size, len(units) // UNIT_SIZE, 0, 0, 0, True)

    queue: tuple[Any, ...] | None = None
    image = QueueImage(size // UNIT_SIZE, log_file_size)
    for batch in batches:
        for found, rows in runs(batch, ("topic", "queueId")):
            if queue is not None and found != queue:
                yield from written(queue, image, to_the_end=True)
                image = QueueImage(size // UNIT_SIZE, log_file_size)
            queue = found
            columns = [rows.column(name).to_pylist() for name in ("phy", "size", "tagsCode", "queueOffset")]
            for phy, length, tags_code, offset in zip(*columns, strict=True):
                image.put(phy, length, tags_code, offset)
            yield from written(queue, image, to_the_end=False)
    if queue is not None:
        yield from written(queue, image, to_the_end=True)
