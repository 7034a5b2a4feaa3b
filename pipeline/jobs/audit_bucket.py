"""``audit`` of a bucket: all that the manifest names is read and checked, as a broker would find it."""

from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from trimq.pipeline.jobs import audit_files
from trimq.pipeline.jobs.audit import AuditReport, add_faults, fault_column, fill_totals, offset_gaps
from trimq.pipeline.jobs.dispatch import SCHEMA, damage_row, dispatch_batch
from trimq.pipeline.jobs.job_support import on_parts
from trimq.pipeline.options import OptionError
from trimq.pipeline.store.bucket_plan import BucketPart, plan_bucket
from trimq.pipeline.store.options import parse
from trimq.pipeline.store.table import walk
from trimq.pipeline.store.walk import Damage


def audit_bucket(
    spark: SparkSession, store: str, bucket: Mapping[str, str], *, split_size: int = 64 << 20
) -> AuditReport:
    """Audit the tier of one broker; ``bucket`` are the options of ``rocketmq-store`` for it.

    Checked are directories and blocks with their checksums, each unit against its record, each body, and the offsets of
    each queue. Raises StorePathError, BucketError, OptionError.
    """
    options = parse({"path": store, "splitSize": str(split_size), "damage": "true", **bucket})
    if options.bucket is None or len(options.bucket.brokers) != 1:
        raise OptionError("broker", bucket.get("broker"), "the name of one broker")
    parts = plan_bucket(options)

    def work(number: int, part: BucketPart) -> Iterator[pa.RecordBatch]:
        for item in walk(None, part, options):
            if isinstance(item, Damage):
                yield damage_row(number, item._replace(why=f"{item.file}: {item.why}"))
            elif len(item.heads):
                yield dispatch_batch(item, number, 0, [0], tags=False)[0]

    report = AuditReport()
    table = on_parts(spark, parts, work, SCHEMA).persist(StorageLevel.DISK_ONLY)
    try:
        fill_totals(table, report)
        queues = table.where("queued").groupBy("topic", "queueId").agg(f.count("*").alias("units"))
        counted = queues.agg(f.count("*"), f.sum("units")).collect()[0]
        report.queues, report.units = counted[0], counted[1] or 0
        add_faults(
            report, table.where("why is not null").select(fault_column(audit_files.RECORD, "why", "phy", "size"))
        )
        add_faults(report, offset_gaps(table))
    finally:
        table.unpersist()
    return report
