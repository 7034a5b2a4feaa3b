"""``archive``: a store's records to Parquet or another of Spark's formats, a little more with each run.

Each run archives the log from where the last one ended to where it ends now, as one batch. Tasks write files of bounded
size into ``_trimq/staging``; their names come back only from tasks that succeeded. They are moved to their places under
names that carry the batch's number, and then the batch's manifest is put into ``_trimq/batches`` in one step: only with
that is the batch there. A run that finds files of a batch without a manifest deletes them and does the batch again, so
after any kill nothing is there twice and nothing is lost.

Formats other than Parquet are written by Spark: each batch a table in a directory of its own, whose name no other
attempt has. The manifest makes it part of the archive, so that the same holds for any format.
"""

import posixpath
import re
import uuid
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec
import pyarrow as pa
from msgspec import Struct
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f

from trimq.pipeline.jobs.job_support import Target, groups
from trimq.pipeline.schema import COLUMNS, spark_schema
from trimq.pipeline.store.files import DataFile, StoreFiles
from trimq.pipeline.store.walk import Damage, LogWalk, Stretch

FILE_SIZE: Final = 128 << 20
PARQUET: Final = "parquet"
_OF_FILES: Final = ("orc", "json", "csv", "avro", "xml")
"""Formats that are files and nothing else: Spark reads many directories of them at once."""
_STAGING: Final = "_trimq/staging"
_BATCHES: Final = "_trimq/batches"
_TABLES: Final = "tables"
_SCHEMA: Final = "topic string, day string, path string, rows bigint, bytes bigint"
_ARROW: Final = pa.schema(
    [("topic", pa.string()), ("day", pa.string()), ("path", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64())]
)
_ROW_GROUP: Final = 16 << 20
_SAMPLE: Final = 1000
_HEAD: Final = 200
"""Bytes of a row without its body, about; rows so many tell how large the others are."""


class ArchiveError(Exception):
    """The archive cannot go on; the text says why, and what to do."""


class ArchiveOptions(Struct, frozen=True):
    """``file_size`` is about how large a file gets, in bytes. ``broker_name`` keeps archives of several brokers apart.

    ``fail_on_data_loss``: stop where the broker has deleted what was not archived yet. ``format``: one that Spark can
    write, with ``format_options`` of its own; ``compression`` is Parquet's.
    """

    file_size: int = FILE_SIZE
    format: str = PARQUET
    format_options: dict[str, str] = {}
    topics: str = ""
    broker_name: str = "broker"
    compression: str = "zstd"
    fail_on_data_loss: bool = True
    split_size: int = 64 << 20


class Batch(Struct):
    """What one run has archived: log offsets [begin, end), and the files by their paths in the archive.

    In a format other than Parquet, ``files`` is the one directory with all of them.
    """

    number: int
    broker_name: str
    begin: int
    end: int
    rows: int = 0
    files: list[str] = []
    lost: int = 0
    """Bytes of the log that the broker had deleted before they were archived."""
    format: str = PARQUET


def batches(target: str, broker_name: str) -> list[Batch]:
    """The batches that are in an archive, in their order."""
    out = Target(target)
    found = []
    for name in out.names(_BATCHES, quote(broker_name, safe="")):
        if name.endswith(".json"):
            path = out.join(_BATCHES, quote(broker_name, safe=""), name)
            found.append(msgspec.json.decode(out.fs.cat_file(path), type=Batch))
    return sorted(found, key=lambda batch: batch.number)


def archive(spark: SparkSession, store: str, target: str, options: ArchiveOptions | None = None) -> Batch | None:
    """Archive what has come to the log since the last run; None where nothing has.

    Raises ArchiveError, StorePathError.
    """
    options = options or ArchiveOptions()
    out = Target(target)
    done = batches(target, options.broker_name)
    number = done[-1].number + 1 if done else 0
    if done and done[-1].format != options.format:
        raise ArchiveError(f"{target} has {done[-1].format}, not {options.format}: an archive has one format")
    _clear(out, options.broker_name, number)
    begin, end, lost = _range(StoreFiles(store), done, options)
    if begin >= end:
        return None
    reader = spark.read.format("rocketmq-store").option("path", store).option("brokerName", options.broker_name)
    reader = reader.option("startingPosition", begin).option("endingPosition", end)
    reader = reader.option("splitSize", options.split_size)
    if options.topics:
        reader = reader.option("topics", options.topics)
    batch = Batch(number, options.broker_name, begin, end, lost=lost, format=options.format)
    if options.format == PARQUET:
        _add_files(batch, reader.load(), out, options)
    else:
        _add_table(batch, reader.load(), target, options)
    # what a manifest names is there, also after a power cut
    out.sync(*(out.join(name) for name in batch.files))
    manifest = _manifest(out, options.broker_name, number)
    out.write(manifest, msgspec.json.encode(batch))
    out.sync(manifest)
    out.remove(_staging(out, options.broker_name))
    return batch


def _add_files(batch: Batch, table: DataFrame, out: Target, options: ArchiveOptions) -> None:
    """Parquet: written aside, then moved to their places."""
    staging = out.join(_staging(out, batch.broker_name), f"{batch.number}-{uuid.uuid4().hex}")
    written = _write(table, out, staging, options).collect()
    for at, row in enumerate(sorted(written, key=lambda row: str(row.path))):
        place = posixpath.join(f"topic={quote(row.topic, safe='')}", f"day={row.day}")
        name = posixpath.join(place, f"{_prefix(batch.broker_name, batch.number)}-{at:05d}.parquet")
        out.move(row.path, out.join(name))
        batch.files.append(name)
        batch.rows += row.rows


def _add_table(batch: Batch, table: DataFrame, target: str, options: ArchiveOptions) -> None:
    """Another format: a table in a directory that nobody else writes to, written by Spark."""
    name = posixpath.join(*_table(batch.broker_name), f"{_attempt(batch.number)}{uuid.uuid4().hex}")
    size = table.limit(_SAMPLE).agg(f.avg(f.length("body") + _HEAD)).collect()[0][0] or _HEAD
    counted = Observation()
    rows = _arranged(table).observe(counted, f.count("*").alias("rows"))
    writer = rows.write.format(options.format).partitionBy("topic", "day").options(**options.format_options)
    writer.option("maxRecordsPerFile", max(1, int(options.file_size / size))).save(posixpath.join(target, name))
    batch.rows = counted.get["rows"]
    batch.files.append(name)


def _prefix(broker_name: str, number: int) -> str:
    return f"{quote(broker_name, safe='')}-{number:08d}"


def _table(broker_name: str) -> tuple[str, str]:
    """Directories named like those of a partitioned table: Spark reads several only as parts of one."""
    return _TABLES, f"broker={quote(broker_name, safe='')}"


def _attempt(number: int) -> str:
    return f"batch={number:08d}-"


def _staging(out: Target, broker_name: str) -> str:
    return out.join(_STAGING, quote(broker_name, safe=""))


def _manifest(out: Target, broker_name: str, number: int) -> str:
    return out.join(_BATCHES, quote(broker_name, safe=""), f"{number:08d}.json")


def _clear(out: Target, broker_name: str, number: int) -> None:
    """Delete what a run left that did not come to its end: it has no manifest, so it is not there."""
    out.remove(_staging(out, broker_name))
    table = _table(broker_name)
    for name in out.names(*table):
        if name.startswith(_attempt(number)):
            out.remove(out.join(*table, name))
    left = re.compile(re.escape(_prefix(broker_name, number)) + r"-\d+\.parquet")
    for topic in out.names():
        if topic.startswith("topic="):
            for day in out.names(topic):
                for name in out.names(topic, day):
                    if left.fullmatch(name):
                        out.remove(out.join(topic, day, name))


def _range(files: StoreFiles, done: list[Batch], options: ArchiveOptions) -> tuple[int, int, int]:
    """Log offsets of the next batch, and how many bytes before it are gone."""
    log = files.log_files()
    if not log:
        return 0, 0, 0
    begin = done[-1].end if done else log[0].start
    lost = max(0, log[0].start - begin)
    if lost and options.fail_on_data_loss:
        raise ArchiveError(
            f"the log begins at {log[0].start}, the archive ends at {begin}: {lost} bytes were deleted before they "
            "were archived; go on without them with failOnDataLoss=false"
        )
    begin = max(begin, log[0].start)
    end = _log_end(files, log, begin)
    if end < begin and options.fail_on_data_loss:
        raise ArchiveError(
            f"the log ends at {end}, the archive at {begin}: the log was cut, or is another one, and what it gets up "
            "to there would not be archived; archive it into another directory, or go on without that with "
            "failOnDataLoss=false"
        )
    return begin, end, lost


def _log_end(files: StoreFiles, log: Sequence[DataFile], begin: int) -> int:
    """Where the log ends: behind its last record. Only the file that is written to is looked through."""
    for file in reversed(log):
        if file.end == begin:
            return begin
        with files.opened(file) as source:
            # from its beginning: what stands behind the end may be records of an earlier life of the file
            walk = LogWalk(source, Stretch(file, 0, file.size, is_newest=True, followed=False), check_crc=False)
            records = sum(not isinstance(item, Damage) for item in walk)
            if records:
                return file.start + walk.end
    return log[0].start


def _arranged(table: DataFrame) -> DataFrame:
    """The rows with their day, those of a topic and day together."""
    # in UTC whatever the session's time zone is: a batch that is done again gives the same files
    number = "cast(unix_millis(storeTimestamp) div 86400000 as int)"
    day = f.expr(f"cast(date_from_unix_date({number}) as string)").alias("day")
    rows = table.select(*COLUMNS, day)
    # many tasks for a large topic: rows go by topic, day and some digits of their place
    spread = f.expr("commitLogOffset div 1073741824")
    spark = table.sparkSession
    count = max(2, int(spark.conf.get("spark.sql.shuffle.partitions", "200") or 200))
    return rows.repartition(count, "topic", "day", spread).sortWithinPartitions("topic", "day", "commitLogOffset")


def _write(table: DataFrame, out: Target, staging: str, options: ArchiveOptions) -> DataFrame:
    """Write the rows into files by topic and day; a row for each file."""
    return _arranged(table).mapInArrow(
        partial(_write_files, out, staging, options.file_size, options.compression), _SCHEMA
    )


class _Files:
    """Files of one topic and day: a new one where the last is large enough."""

    def __init__(self, out: Target, directory: str, topic: str, day: str, file_size: int, compression: str) -> None:
        self._out = out
        self._directory = directory
        self._place = topic, day
        self._file_size = file_size
        self._compression = compression
        self._writer: Any = None
        self._stream: Any = None
        self._path = ""
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
        """Add rows; tells of each file that is full."""
        import pyarrow.parquet as pq  # noqa: PLC0415 - only tasks that write need it

        step = max(1, int(_ROW_GROUP // max(1, batch.nbytes / max(1, batch.num_rows))))
        for at in range(0, batch.num_rows, step):
            if self._writer is None:
                self._path = posixpath.join(self._directory, f"{uuid.uuid4().hex}.parquet")
                self._out.make_directory(self._directory)
                self._stream = self._out.fs.open(self._path, "wb")
                self._writer = pq.ParquetWriter(self._stream, batch.schema, compression=self._compression)
                self._rows = 0
            piece = batch.slice(at, step)
            self._writer.write_batch(piece)
            self._rows += piece.num_rows
            if self._stream.tell() >= self._file_size:
                yield self.end()

    def end(self) -> tuple[Any, ...]:
        """Close the file."""
        self._writer.close()
        size = self._stream.tell()
        self._stream.close()
        self._writer = None
        return (*self._place, self._path, self._rows, size)

    @property
    def is_open(self) -> bool:
        """There is a file that was not told of."""
        return self._writer is not None


def _write_files(
    out: Target, staging: str, file_size: int, compression: str, found: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    files: _Files | None = None
    key: tuple[Any, ...] = ()
    told: list[tuple[Any, ...]] = []
    for batch in found:
        for place, table in groups(iter([batch]), ("topic", "day")):
            if place != key:
                if files is not None and files.is_open:
                    told.append(files.end())
                key, files = place, _Files(out, staging, place[0], place[1], file_size, compression)
            assert files is not None
            for piece in table.drop_columns(["topic", "day"]).combine_chunks().to_batches():
                told += files.write(piece)
    if files is not None and files.is_open:
        told.append(files.end())
    yield pa.RecordBatch.from_pylist([dict(zip(_ARROW.names, row, strict=True)) for row in told], schema=_ARROW)


def read(spark: SparkSession, target: str) -> DataFrame:
    """An archive as a table: the files of batches that are complete, and nothing else."""
    out = Target(target)
    found = [batch for broker in out.names(_BATCHES) for batch in batches(target, unquote(broker))]
    names = [posixpath.join(target, name) for batch in found for name in batch.files]
    if not names:
        raise ArchiveError(f"{target} has no batch that is complete")
    kinds = {batch.format for batch in found}
    if len(kinds) > 1:
        raise ArchiveError(f"{target} has batches of several formats: {', '.join(sorted(kinds))}")
    (kind,) = kinds
    # without a schema Spark would take a topic named 17 for a number
    reader = spark.read.schema(f"{spark_schema()}, day string").format(kind)
    if kind == PARQUET:
        return reader.option("basePath", target).load(names)
    if kind in _OF_FILES:
        return reader.option("basePath", posixpath.join(target, _TABLES)).load(names).select(*COLUMNS, "day")
    return reduce(DataFrame.unionByName, [spark.read.format(kind).load(name) for name in names])
