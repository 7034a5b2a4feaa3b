"""The data source ``rocketmq-store``: a store directory, its commit log, or a tier in a bucket, as a table.

    spark.read.format("rocketmq-store").load("/var/lib/rocketmq/store")
    spark.read.format("rocketmq-store").option("cluster", "DefaultCluster").load("s3://bucket/prefix")

A schema with some of the columns, ``spark.read.schema("topic string, storeTimestamp timestamp")``, saves making the
others: PySpark does not report to a source which columns a query needs. ``damage=true`` selects the side table of
damaged places.

Filters of a query are not pushed down. PySpark 4.1 to 4.3 passes them to a source, but reuses the filtered result for
the next query on the same DataFrame, which may have no filter (seen on 4.3.0: rows were missing).
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from trimq.pipeline.options import OptionError
from trimq.pipeline.schema import COLUMNS, spark_schema
from trimq.pipeline.store.options import StoreOptions, parse

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from trimq.pipeline.store.plan import Part
    from trimq.pipeline.store.walk import Damage

NAME: Final = "rocketmq-store"
_log = logging.getLogger(__name__)


@dataclass
class StorePart(InputPartition):
    """The part that one task reads, or None, and damages that were found while planning."""

    part: "Part | None"
    damages: "tuple[Damage, ...]" = ()


class StoreReader(DataSourceReader):
    """A batch read: ``partitions`` runs on the driver, ``read`` in tasks."""

    def __init__(self, options: StoreOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[StorePart]:
        """The parts that can be read in parallel. Raises StorePathError, BucketError, OptionError."""
        from trimq.pipeline.store.plan import plan_of  # noqa: PLC0415 - ``schema`` does not need this module

        found = plan_of(self.options)
        parts = [StorePart(part) for part in found.parts]
        if found.damages:
            parts.append(StorePart(None, tuple(found.damages)))
        # For an empty list Spark calls ``read`` with None.
        return parts or [StorePart(None)]

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """The rows of a part, as Arrow batches."""
        assert isinstance(partition, StorePart)
        from trimq.pipeline.store import table  # noqa: PLC0415 - as above

        options, part = self.options, partition.part
        files = table.files_of(options)
        if options.damage:
            found = list(partition.damages)
            if part is not None:
                found += table.damages(files, part, options)
            yield table.damage_batch(found)
            return
        for damage in partition.damages:
            _log.warning("%s: %d bytes from log offset %d: %s", damage.file, damage.length, damage.phy, damage.why)
        if part is not None:
            yield from table.batches(files, part, options)


class RocketMQStoreDataSource(DataSource):
    """The data source; docs/pipeline-jobs.md describes its options."""

    @classmethod
    def name(cls) -> str:
        """``rocketmq-store``."""
        return NAME

    def schema(self) -> str:
        """The columns of trimq.pipeline.schema, or those of the side table."""
        from trimq.pipeline.store.table import DAMAGE_SPARK_SCHEMA  # noqa: PLC0415 - as above

        options = parse(self.options)
        return DAMAGE_SPARK_SCHEMA if options.damage else spark_schema(properties=options.columns == COLUMNS)

    def reader(self, schema: "StructType") -> StoreReader:
        """A reader of all columns, or of those in a schema that the user gave. Raises OptionError."""
        options = parse(self.options)
        names = tuple(schema.fieldNames())
        if not options.damage:
            unknown = [name for name in names if name not in COLUMNS]
            if unknown:
                raise OptionError("schema", ", ".join(unknown), f"columns of {NAME}: {', '.join(COLUMNS)}")
            nullable = frozenset(field.name for field in schema if field.nullable)
            options = msgspec.structs.replace(options, columns=names, nullable=nullable)
        return StoreReader(options)


def register(spark: Any) -> None:
    """Register ``rocketmq-store`` with a session that has not found it automatically."""
    from trimq.pipeline.registration import make_known  # noqa: PLC0415 - as above

    make_known(spark, RocketMQStoreDataSource)
