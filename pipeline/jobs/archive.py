"""``archive``: copies a store's records to Parquet or another of Spark's formats, incrementally.

Each run archives the log from the end of the last batch to its present end, as one batch. Tasks write files of bounded
size into ``_trimq/staging``, and only tasks that succeed return the names of their files. The driver moves these files
to their final names, which contain the batch's number, and then writes the batch's manifest into ``_trimq/batches``
atomically. The manifest is the commit: files without one do not belong to the archive. A run that finds such files
deletes them and runs the batch again, so a kill at any point neither duplicates nor loses records.

Formats other than Parquet are written by Spark: each batch is a table in its own directory, with a name that no other
attempt uses. The manifest makes the directory part of the archive, so that the same holds for any format.
"""

import posixpath
import re
import uuid
from collections.abc import Sequence
from functools import partial, reduce
from typing import Final
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f

from trimq.pipeline.jobs.archive_bucket import bucket_bounds
from trimq.pipeline.jobs.archive_files import FILES_SCHEMA, write_files
from trimq.pipeline.jobs.job_support import Target
from trimq.pipeline.schema import COLUMNS, spark_schema
from trimq.pipeline.store.files import DataFile, StoreFiles
from trimq.pipeline.store.options import StoreOptions, parse
from trimq.pipeline.store.tier import plan_tier, possible_losses, tier_files, without_offset
from trimq.pipeline.store.walk import Damage, LogWalk, Stretch

FILE_SIZE: Final = 128 << 20
PARQUET: Final = "parquet"
_OF_FILES: Final = ("orc", "json", "csv", "avro", "xml")
"""Formats whose tables are only files: Spark reads many directories of them as one table."""
_STAGING: Final = "_trimq/staging"
_BATCHES: Final = "_trimq/batches"
_TABLES: Final = "tables"
_SAMPLE: Final = 1000
_HEAD: Final = 200
"""Approximate bytes of a row without its body. The mean size of ``_SAMPLE`` rows gives the rows of a file."""


class ArchiveError(Exception):
    """The archive cannot be continued; the text says why, and what to do."""


class ArchiveOptions(Struct, frozen=True):
    """``file_size`` is the approximate size of a file in bytes. ``broker_name`` separates archives of several brokers.

    ``bucket``: the options of ``rocketmq-store`` for a bucket (cluster, broker, endpoint, ...), if the store is one.

    ``fail_on_data_loss``: stop if the broker has deleted records before they were archived; with a tier, if it has
    messages whose log offset is not known, or may not have all that the log has no longer. ``format``: any that Spark
    can write, with the ``format_options`` of its writer; ``compression`` applies to Parquet.
    """

    file_size: int = FILE_SIZE
    format: str = PARQUET
    format_options: dict[str, str] = {}
    topics: str = ""
    broker_name: str = ""
    """Empty for the name of the bucket's broker, or "broker"."""
    compression: str = "zstd"
    fail_on_data_loss: bool = True
    split_size: int = 64 << 20
    tiered_store_file_path: str = ""
    """The directory of the tier, for records that the log does not have any more."""
    bucket: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The broker's name in the archive."""
        return self.broker_name or self.bucket.get("broker") or "broker"


class Batch(Struct):
    """The result of one run and the content of its manifest: log offsets [begin, end), and paths in the archive.

    In a format other than Parquet, ``files`` has one entry, the batch's directory.
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
    """The committed batches of an archive, by their number."""
    out = Target(target)
    found = []
    for name in out.names(_BATCHES, quote(broker_name, safe="")):
        if name.endswith(".json"):
            path = out.join(_BATCHES, quote(broker_name, safe=""), name)
            found.append(msgspec.json.decode(out.fs.cat_file(path), type=Batch))
    return sorted(found, key=lambda batch: batch.number)


def archive(spark: SparkSession, store: str, target: str, options: ArchiveOptions | None = None) -> Batch | None:
    """Archive the records that were appended since the last run; returns None if there are none.

    Raises ArchiveError if the archive does not continue the log, StorePathError if ``store`` is no store, BucketError.
    """
    options = options or ArchiveOptions()
    out = Target(target)
    done = batches(target, options.name)
    number = done[-1].number + 1 if done else 0
    if done and done[-1].format != options.format:
        raise ArchiveError(f"{target} has {done[-1].format}, not {options.format}: an archive has one format")
    # Before anything of this batch is written: files of a killed attempt have the same number, and a manifest written
    # now must not coexist with them.
    _clear(out, options.name, number)
    begin, end, lost = _next(store, done, options)
    if begin >= end:
        return None
    reader = spark.read.format("rocketmq-store").option("path", store).option("brokerName", options.name)
    reader = reader.option("startingPosition", begin).option("endingPosition", end)
    reader = reader.option("splitSize", options.split_size)
    if options.topics:
        reader = reader.option("topics", options.topics)
    if options.tiered_store_file_path:
        reader = reader.option("tieredStoreFilePath", options.tiered_store_file_path)
    reader = reader.options(**options.bucket)
    batch = Batch(number, options.name, begin, end, lost=lost, format=options.format)
    if options.format == PARQUET:
        _add_files(batch, reader.load(), out, options)
    else:
        _add_table(batch, reader.load(), target, options)
    if options.bucket:
        # What has expired before the table was planned is not in it.
        _check_bucket(store, begin, options)
    # The order matters: the files are durable before the manifest that names them exists, so that after a power cut
    # no manifest refers to a missing file.
    out.sync(*(out.join(name) for name in batch.files))
    manifest = _manifest(out, options.name, number)
    out.write(manifest, msgspec.json.encode(batch))
    out.sync(manifest)
    # The batch is committed. A kill before this line leaves files of failed tasks; the next run's _clear deletes them.
    out.remove(_staging(out, options.name))
    return batch


def _add_files(batch: Batch, table: DataFrame, out: Target, options: ArchiveOptions) -> None:
    """Parquet: the files are written into the staging directory, then moved to their final names."""
    # A directory of this attempt: a task of a killed run that still runs writes into another one.
    staging = out.join(_staging(out, batch.broker_name), f"{batch.number}-{uuid.uuid4().hex}")
    written = _write(table, out, staging, options).collect()
    for at, row in enumerate(sorted(written, key=lambda row: str(row.path))):
        place = posixpath.join(f"topic={quote(row.topic, safe='')}", f"day={row.day}")
        name = posixpath.join(place, f"{_prefix(batch.broker_name, batch.number)}-{at:05d}.parquet")
        out.move(row.path, out.join(name))
        batch.files.append(name)
        batch.rows += row.rows


def _add_table(batch: Batch, table: DataFrame, target: str, options: ArchiveOptions) -> None:
    """Another format: Spark writes a table into a directory that no other attempt uses."""
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
    """The directory of a broker's tables, named like a partition: Spark loads several directories only as one table."""
    return _TABLES, f"broker={quote(broker_name, safe='')}"


def _attempt(number: int) -> str:
    return f"batch={number:08d}-"


def _staging(out: Target, broker_name: str) -> str:
    return out.join(_STAGING, quote(broker_name, safe=""))


def _manifest(out: Target, broker_name: str, number: int) -> str:
    return out.join(_BATCHES, quote(broker_name, safe=""), f"{number:08d}.json")


def _clear(out: Target, broker_name: str, number: int) -> None:
    """Delete the files of an attempt at batch ``number`` that did not finish: without a manifest they do not count."""
    out.remove(_staging(out, broker_name))
    table = _table(broker_name)
    for name in out.names(*table):
        if name.startswith(_attempt(number)):
            out.remove(out.join(*table, name))
    unfinished = re.compile(re.escape(_prefix(broker_name, number)) + r"-\d+\.parquet")
    for topic in out.names():
        if topic.startswith("topic="):
            for day in out.names(topic):
                for name in out.names(topic, day):
                    if unfinished.fullmatch(name):
                        out.remove(out.join(topic, day, name))


def _next(store: str, done: list[Batch], options: ArchiveOptions) -> tuple[int, int, int]:
    """The log offsets of the next batch, and how many bytes in front of it were deleted unarchived."""
    if not options.bucket:
        return _range(StoreFiles(store), done, options)
    archived = done[-1].end if done else None
    start, end = _check_bucket(store, archived, options)
    begin = start if archived is None else archived
    return _checked(max(begin, start), end, max(0, start - begin), options)


def _range(files: StoreFiles, done: list[Batch], options: ArchiveOptions) -> tuple[int, int, int]:
    """As ``_next``, of a store's files."""
    log = files.log_files()
    if not log and options.tiered_store_file_path:
        raise ArchiveError("the log is empty, and archives are made of log offsets: read the tier with rocketmq-store")
    if not log:
        return 0, 0, 0
    if options.tiered_store_file_path:
        begin = done[-1].end if done else 0
        if begin < log[0].start and options.fail_on_data_loss:
            _check_tier(files, log, begin, options)
        return _checked(begin, _log_end(files, log, max(begin, log[0].start)), 0, options)
    begin = done[-1].end if done else log[0].start
    lost = max(0, log[0].start - begin)
    if lost and options.fail_on_data_loss:
        raise ArchiveError(
            f"the log begins at {log[0].start}, the archive ends at {begin}: {lost} bytes were deleted before they "
            "were archived; to continue without them, use failOnDataLoss=false"
        )
    begin = max(begin, log[0].start)
    return _checked(begin, _log_end(files, log, begin), lost, options)


def _check_bucket(store: str, begin: int | None, options: ArchiveOptions) -> tuple[int, int]:
    """The log offsets between which the bucket has objects.

    Raises ArchiveError if it may not have all messages from ``begin`` on.
    """
    wanted = parse({"path": store, "topics": options.topics, **options.bucket})
    if wanted.bucket is None or len(wanted.bucket.brokers) != 1:
        raise ArchiveError("an archive is that of one broker: give the options cluster and broker")
    found = bucket_bounds(wanted, begin)
    if found.why and options.fail_on_data_loss:
        raise ArchiveError(
            f"messages may have expired, or their topics been deleted, before they were archived: {found.why}; to "
            "continue without them, use failOnDataLoss=false"
        )
    return found.start, found.end


def _check_tier(files: StoreFiles, log: Sequence[DataFile], begin: int, options: ArchiveOptions) -> None:
    """Raises ArchiveError if the tier may not have all messages from ``begin`` on that the log has no longer."""
    topics = frozenset(filter(None, options.topics.split(",")))
    wanted = StoreOptions(files.path, topics=topics, tier=options.tiered_store_file_path)
    tier = tier_files(wanted)
    count = without_offset(tier, plan_tier(files, tier, log, wanted))
    if count:
        raise ArchiveError(
            f"the tier has {count} messages that RocketMQ's broker has uploaded, which does not keep their log offset: "
            "they belong to no batch. Read them with rocketmq-store; to archive the others, use failOnDataLoss=false"
        )
    queues = possible_losses(files, tier, log, wanted, begin)
    if queues:
        raise ArchiveError(
            f"the log begins at {log[0].start}, the archive ends at {begin}, and the tier may not have all messages "
            f"between, of {len(queues)} queues (as {queues[0]}): they may have expired before they were archived; to "
            "continue without them, use failOnDataLoss=false"
        )


def _checked(begin: int, end: int, lost: int, options: ArchiveOptions) -> tuple[int, int, int]:
    if end < begin and options.fail_on_data_loss:
        raise ArchiveError(
            f"the log ends at {end}, the archive at {begin}: the log was truncated or replaced, and records appended "
            f"below offset {begin} would not be archived; archive it into another directory, or continue without those "
            "records with failOnDataLoss=false"
        )
    return begin, end, lost


def _log_end(files: StoreFiles, log: Sequence[DataFile], begin: int) -> int:
    """The offset behind the log's last record. Only the newest file that has records is read."""
    for file in reversed(log):
        # Everything from here down is archived, and the newer files had no record.
        if file.end == begin:
            return begin
        with files.opened(file) as source:
            # From the file's first record on: bytes behind the end may look like records, if the file was recycled.
            walk = LogWalk(source, Stretch(file, 0, file.size, is_newest=True, followed=False), check_crc=False)
            records = sum(not isinstance(item, Damage) for item in walk)
            if records:
                return file.start + walk.end
    return log[0].start


def _arranged(table: DataFrame) -> DataFrame:
    """The rows with a column ``day``, sorted so that rows of one topic and day are adjacent."""
    # The day is in UTC, independent of the session's time zone, so that a batch that runs again makes the same files.
    number = "cast(unix_millis(storeTimestamp) div 86400000 as int)"
    day = f.expr(f"cast(date_from_unix_date({number}) as string)").alias("day")
    rows = table.select(*COLUMNS, day)
    # By topic and day alone, one task would write all of a large topic; each GiB of the log may go to another task.
    spread = f.expr("commitLogOffset div 1073741824")
    spark = table.sparkSession
    count = max(2, int(spark.conf.get("spark.sql.shuffle.partitions", "200") or 200))
    return rows.repartition(count, "topic", "day", spread).sortWithinPartitions("topic", "day", "commitLogOffset")


def _write(table: DataFrame, out: Target, staging: str, options: ArchiveOptions) -> DataFrame:
    """Write the rows into files by topic and day. The result has a row for each file."""
    return _arranged(table).mapInArrow(
        partial(write_files, out, staging, options.file_size, options.compression), FILES_SCHEMA
    )


def read(spark: SparkSession, target: str) -> DataFrame:
    """An archive as a table: only the files that manifests name.

    Raises ArchiveError for an archive without a complete batch, or with several formats.
    """
    out = Target(target)
    found = [batch for broker in out.names(_BATCHES) for batch in batches(target, unquote(broker))]
    names = [posixpath.join(target, name) for batch in found for name in batch.files]
    if not names:
        raise ArchiveError(f"{target} has no complete batch")
    kinds = {batch.format for batch in found}
    if len(kinds) > 1:
        raise ArchiveError(f"{target} has batches of several formats: {', '.join(sorted(kinds))}")
    (kind,) = kinds
    # Without a schema Spark infers the type of partition columns, and a topic named 17 would become a number.
    reader = spark.read.schema(f"{spark_schema()}, day string").format(kind)
    if kind == PARQUET:
        return reader.option("basePath", target).load(names)
    if kind in _OF_FILES:
        return reader.option("basePath", posixpath.join(target, _TABLES)).load(names).select(*COLUMNS, "day")
    return reduce(DataFrame.unionByName, [spark.read.format(kind).load(name) for name in names])
