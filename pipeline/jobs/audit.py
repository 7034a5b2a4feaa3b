"""``audit``: checks a store for consistency: records, the chain of the log, queues, index. The report has plots.

The log is read once, with the checksum of every record, and queues, index and checkpoint are compared with it. The end
of the log is checked too, against the offsets that checkpoint, queues and index contain. On one machine, ``mqstore
verify`` finds the same faults, and checks the state files as well.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from msgspec import Struct, field
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from trimq.pipeline.jobs import audit_files
from trimq.pipeline.jobs.audit_files import Finding, LogBounds, Verdict
from trimq.pipeline.jobs.dispatch import DELAY_LEVELS, delay_table, dispatched
from trimq.pipeline.jobs.index_files import read_index_file
from trimq.pipeline.jobs.job_support import groups, on_parts
from trimq.pipeline.jobs.page import Page
from trimq.pipeline.jobs.rebuild import ENTRIES, SLOTS
from trimq.pipeline.store.files import DataFile, StoreFiles
from trimq.pipeline.store.options import StoreOptions
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE
from trimq.protocol.topic_rules import SCHEDULE_TOPIC

_SHOWN: Final = 20
_FAULT_SCHEMA: Final = "kind string, count bigint, example string"
_FAULT_ARROW: Final = pa.schema([("kind", pa.string()), ("count", pa.int64()), ("example", pa.string())])
_INDEX_SCHEMA: Final = "hash int, phy bigint, kind string, example string"


class Fault(Struct):
    """The faults of one kind: how many there are, and some examples as text."""

    kind: str
    count: int
    examples: list[str]


class AuditReport(Struct):
    """The result of an audit. ``hours`` are (hour, records, bytes), ``topics`` (topic, records, bytes)."""

    records: int = 0
    bytes: int = 0
    queues: int = 0
    units: int = 0
    superseded: int = 0
    """Records of a topic that was deleted and created again: a later record has their offset in the queue."""
    keys: int = 0
    index_files: int = 0
    faults: list[Fault] = field(default_factory=list)
    hours: list[tuple[Any, int, int]] = field(default_factory=list)
    topics: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether no fault was found."""
        return not self.faults

    @property
    def verdict(self) -> Verdict:
        """The severity of the faults, and the exit code of the command."""
        return audit_files.verdict([fault.kind for fault in self.faults])


def audit(
    spark: SparkSession,
    store: str,
    *,
    delay_levels: str = DELAY_LEVELS,
    slots: int = SLOTS,
    entries: int = ENTRIES,
    split_size: int = 64 << 20,
) -> AuditReport:
    """Audit the store at ``store``. Raises StorePathError.

    ``delay_levels``, ``slots`` and ``entries`` are those of the broker's configuration.
    """
    files = StoreFiles(store)
    report = AuditReport()
    # Before the log is read: a running broker moves both on, and a newer checkpoint would name records not seen here.
    checkpoint = audit_files.read_checkpoint(files)
    reading = StoreOptions(path=store, split_size=split_size)
    table, _, gaps = dispatched(spark, files, reading, delay_table(delay_levels), tags=False)
    table.persist(StorageLevel.DISK_ONLY)  # each check below is a query of its own; the log is read once
    try:
        bounds, newest_ms = _totals(table, report, files)
        _count(report, [(audit_files.CHAIN, 1, f"{gap.length} bytes at {gap.phy}: {gap.why}") for gap in gaps])
        log, path = files.log_files(), files.join("checkpoint")
        _count(report, audit_files.log_file_faults(log))
        _count(report, audit_files.checkpoint_faults(path, checkpoint, log, bounds.end, newest_ms))
        add_faults(
            report, table.where("why is not null").select(fault_column(audit_files.RECORD, "why", "phy", "size"))
        )
        add_faults(report, _times(table))
        _queues(spark, files, table, report, bounds)
        _index(spark, files, table, report, bounds, partial(read_index_file, files, slots, entries))
    finally:
        table.unpersist()
    return report


def fault_column(kind: str, *columns: str) -> Any:
    """A column with a fault for each row; the values of ``columns`` are its example."""
    texts = [f.concat(f.lit(f"{name}="), f.col(name).cast("string")) for name in columns]
    return f.struct(
        f.lit(kind).alias("kind"), f.lit(1).cast("bigint").alias("count"), f.concat_ws(" ", *texts).alias("example")
    ).alias("fault")


def add_faults(report: AuditReport, faults: DataFrame) -> None:
    """Add a table of faults to the report: counted by kind, with two examples of each."""
    rows = faults.select("fault.*") if faults.columns == ["fault"] else faults
    found = rows.groupBy("kind").agg(f.sum("count").alias("count"), f.min("example"), f.max("example"))
    for row in found.orderBy("kind").collect():
        if row["count"]:
            report.faults.append(Fault(row.kind, row["count"], sorted({row[2], row[3]})))


def _count(report: AuditReport, findings: Iterable[Finding]) -> None:
    """Add findings that were made on the driver to the report."""
    for kind, count, example in findings:
        fault = next((known for known in report.faults if known.kind == kind), None)
        if fault is None:
            fault = Fault(kind, 0, [])
            report.faults.append(fault)
        fault.count += count
        if len(fault.examples) < _SHOWN:
            fault.examples.append(example)


def _totals(table: DataFrame, report: AuditReport, files: StoreFiles) -> tuple[LogBounds, int]:
    """Fill in the totals of the report; returns the bounds of the log and the store time of its newest record."""
    fill_totals(table, report)
    # Damaged records count for the end: their queue units must not be reported as units behind the log's end.
    end, newest = table.agg(f.max(f.expr("phy + size")), f.max("storeTime")).collect()[0]
    log = files.log_files()
    start = log[0].start if log else 0
    return LogBounds(start, max(start, end or 0)), newest or 0


def fill_totals(table: DataFrame, report: AuditReport) -> None:
    """Fill in the numbers of records, bytes and keys."""
    records = table.where("why is null")
    hour = f.date_trunc("hour", f.timestamp_millis("storeTime")).alias("hour")
    size = f.sum("size").alias("bytes")
    for row in records.groupBy(hour).agg(f.count("*").alias("records"), size).orderBy("hour").collect():
        report.hours.append((row.hour, row.records, row.bytes))
    for row in records.groupBy("topic").agg(f.count("*").alias("records"), size).orderBy(f.desc("records")).collect():
        report.topics.append((row.topic, row.records, row.bytes))
    report.records = sum(records for _, records, _ in report.topics)
    report.bytes = sum(size for _, _, size in report.topics)
    report.keys = table.agg(f.sum(f.expr("case when why is null then size(hashes) end"))).collect()[0][0] or 0


def _times(table: DataFrame) -> DataFrame:
    """Parts with records older than those of an earlier part: searches by time assume an order and miss them."""
    parts = table.where("why is null").groupBy("part")
    rows = parts.agg(f.min("storeTime").alias("first"), f.max("storeTime").alias("last"), f.min("phy").alias("phy"))
    found = sorted(rows.collect(), key=lambda row: int(row.part))
    newest = 0
    faults = []
    for row in found:
        if row.first < newest:
            faults.append(("store time goes back", 1, f"by {newest - row.first} ms behind log offset {row.phy}"))
        newest = max(newest, row.last)
    return table.sparkSession.createDataFrame(faults, _FAULT_SCHEMA)


# -- queues


def _queues(spark: SparkSession, files: StoreFiles, table: DataFrame, report: AuditReport, bounds: LogBounds) -> None:
    """Check that each unit leads to its record, that each record has its unit, and that offsets have no gaps."""
    stored = {
        (topic, queue_id): files.queue_files(topic, queue_id)
        for topic in files.topics()
        for queue_id in files.queue_ids(topic)
    }
    size = audit_files.usual_size(stored)
    units = size // UNIT_SIZE
    _count(report, audit_files.queue_file_faults(stored, size))
    paths = {(topic, queue_id, file.start // size): file for (topic, queue_id), own in stored.items() for file in own}
    # Each file gets a marker row (offset -1), so that files whose range has no records are checked too.
    expected = table.where("queued").select(
        "topic", "queueId", f.expr(f"queueOffset div {units}").alias("file"), "queueOffset", "phy", "size", "tagsCode"
    )
    marks = [(topic, queue_id, number, -1, -1, 0, 0) for topic, queue_id, number in paths]
    if marks:
        expected = expected.union(spark.createDataFrame(marks, expected.schema))
    work = partial(check_queue_files, files, paths, units, bounds)
    checked = (
        expected.repartition("topic", "queueId", "file")
        .sortWithinPartitions("topic", "queueId", "file", "queueOffset", "phy")
        .mapInArrow(work, _FAULT_SCHEMA)
    ).cache()
    # Kinds that begin with "=" are not faults but counts of units in order.
    totals = {row.kind: row["count"] for row in checked.groupBy("kind").agg(f.sum("count").alias("count")).collect()}
    report.units, report.superseded = totals.get("=units", 0), totals.get("=superseded", 0)
    report.queues = len(stored)
    add_faults(report, checked.where("kind not like '=%'"))
    checked.unpersist()
    add_faults(report, offset_gaps(table))


def offset_gaps(table: DataFrame) -> DataFrame:
    """The queues between whose first and last record offsets are missing."""
    density = (
        table.where("queued")
        .groupBy("topic", "queueId")
        .agg(
            f.count_distinct("queueOffset").alias("offsets"),
            (f.max("queueOffset") - f.min("queueOffset") + 1).alias("span"),
        )
    )
    gaps = density.where("offsets < span")
    return gaps.select(fault_column("offsets without a record", "topic", "queueId", "offsets", "span"))


def check_queue_files(
    files: StoreFiles,
    paths: dict[tuple[str, int, int], DataFile],
    units: int,
    bounds: LogBounds,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Compare each queue file with the records of its range, which come sorted by queue offset and log offset."""
    for (topic, queue_id, number), table in groups(batches, ("topic", "queueId", "file")):
        name = f"{topic}/{queue_id}"
        offset = table["queueOffset"].to_numpy()
        real = offset >= 0  # without the marker row
        offset = offset[real]
        wanted = np.empty(len(offset), UNIT_TYPE)
        wanted["phy"], wanted["size"] = table["phy"].to_numpy()[real], table["size"].to_numpy()[real]
        wanted["tags_code"] = table["tagsCode"].to_numpy()[real]
        # Several records may have one offset, if the topic was deleted and created again: the unit is the last one's.
        last = np.append(offset[1:] != offset[:-1], True)[: len(offset)]
        superseded = int((~last).sum())
        offset, wanted = offset[last], wanted[last]
        file = paths.get((topic, queue_id, number))
        rows = [("=superseded", superseded, "")]
        if file is None:
            rows.append(("record without queue unit", len(offset), f"{name}: the file of offset {number * units}"))
        else:
            begin = number * units
            held = np.frombuffer(files.units([file], begin, begin + units), UNIT_TYPE)
            rows += audit_files.compare_units(
                name, begin, held, offset, wanted, bounds, delayed=topic == SCHEDULE_TOPIC
            )
        yield pa.RecordBatch.from_pylist(
            [dict(zip(_FAULT_ARROW.names, row, strict=True)) for row in rows], schema=_FAULT_ARROW
        )


# -- index


def _index(
    spark: SparkSession,
    files: StoreFiles,
    table: DataFrame,
    report: AuditReport,
    bounds: LogBounds,
    read: Callable[..., Any],
) -> None:
    """Check that a query finds every key of every record: an entry in the chain of its slot leads to the record.

    Each entry has to lead to a record too, except below the log's first offset: an index file is deleted only when all
    of its records are.
    """
    found = files.index_files()
    report.index_files = len(found)
    if not found:
        return
    entries = on_parts(spark, found, read, _INDEX_SCHEMA).persist(StorageLevel.DISK_ONLY)
    wrong = entries.where("kind is not null")
    add_faults(report, wrong.select("kind", f.lit(1).cast("bigint").alias("count"), "example"))
    keys = table.where("size(hashes) > 0").select("topic", "phy", f.explode("hashes").alias("hash"))
    reached = entries.where("kind is null").select("hash", "phy")
    records = table.where("why is null").select("phy")
    nowhere = reached.where(f.col("phy") >= bounds.start).join(records, "phy", "left_anti")
    add_faults(report, nowhere.select(fault_column("index entry without record", "phy", "hash")))
    missing = keys.join(reached, ["hash", "phy"], "left_anti")
    add_faults(report, missing.select(fault_column("key that a query does not find", "topic", "phy", "hash")))
    entries.unpersist()


def write_page(report: AuditReport, path: str | Path) -> None:
    """Write a page with the faults and plots."""
    page = Page("Audit of a store")
    page.text(
        f"{report.records} records with {report.bytes} bytes; {report.queues} queues with {report.units} units that "
        f"lead to their records; {report.index_files} index files for {report.keys} keys; {report.superseded} records "
        "of topics that were deleted and created again."
    )
    page.text("The store is sound." if report.is_sound else "The store has faults.")
    rows = [
        {"kind": fault.kind, "count": fault.count, "examples": "; ".join(fault.examples)} for fault in report.faults
    ]
    page.table("faults", rows)
    page.line("Records by hour", [hour for hour, _, _ in report.hours], [count for _, count, _ in report.hours])
    top = report.topics[:_SHOWN]
    page.bars("Bytes by topic", [name for name, _, _ in top], [size for _, _, size in top])
    page.bars("Faults by kind", [fault.kind for fault in report.faults], [fault.count for fault in report.faults])
    page.write(path)
