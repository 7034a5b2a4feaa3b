"""Stores as Spark tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from tests.spark.logs import START, LogWriter, Sent
from tests.spark.stores import some
from trimq.pipeline.schema import COLUMNS
from trimq.protocol.file_names import offset_name

# PySpark 4.0 leaves sockets to its clients open
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_store_is_a_table_found_by_its_name(spark: SparkSession, tmp_path: Path) -> None:
    """The source is not registered: Spark searches for modules whose names start with pyspark_."""
    writer = LogWriter(tmp_path / "store").put_all(some(100))
    table = spark.read.format("rocketmq-store").option("splitSize", "2k").load(str(writer.write()))
    assert table.columns == list(COLUMNS)
    found = table.orderBy("commitLogOffset").collect()
    assert [bytes(row.body) for row in found] == [one.body for one in writer.sent]
    assert [row.properties for row in found] == [one.properties for one in writer.sent]
    assert [row.queueOffset for row in found] == [one.queue_offset for one in writer.sent]
    assert table.rdd.getNumPartitions() > 2


def test_only_the_columns_of_a_schema_are_made(spark: SparkSession, tmp_path: Path) -> None:
    root = LogWriter(tmp_path / "store").put_all(some(10)).write()
    table = spark.read.format("rocketmq-store").schema("queueOffset bigint, topic string").load(str(root))
    assert table.columns == ["queueOffset", "topic"]
    assert sorted(row.topic for row in table.collect()) == sorted(f"T{number % 5}" for number in range(10))


def test_topics_with_sql(spark: SparkSession, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "store").put_all(some(100))
    writer.write_queues()
    spark.read.format("rocketmq-store").load(str(writer.write())).createOrReplaceTempView("log")
    rows = spark.sql("select topic, count(*) as n, max(storeTimestamp) as t from log group by topic").collect()
    assert {row.topic: row.n for row in rows} == {f"T{number}": 20 for number in range(5)}
    assert max(row.t for row in rows).timestamp() * 1000 == START + 99


def test_damage_is_a_table_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "store").put_all(some(50))
    hurt = writer.sent[20]
    writer.files[0][hurt.phy + 90] ^= 1
    root = str(writer.write())
    assert spark.read.format("rocketmq-store").load(root).count() == 49
    (row,) = spark.read.format("rocketmq-store").option("damage", "true").load(root).collect()
    assert (row.commitLogOffset, row.length) == (hurt.phy, hurt.size)
    assert row.file.endswith(offset_name(0))
    assert "CRC" in row.why


def test_an_empty_log_has_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    assert spark.read.format("rocketmq-store").load(str(tmp_path)).count() == 0
    assert spark.read.format("rocketmq-store").option("damage", "true").load(str(tmp_path)).count() == 0


def test_a_wrong_option_is_an_error_before_anything_is_read(spark: SparkSession, tmp_path: Path) -> None:
    root = str(LogWriter(tmp_path / "store").put_all(some(3)).write())
    with pytest.raises(Exception, match=r"splitSize = 'many': expected bytes"):
        spark.read.format("rocketmq-store").option("splitSize", "many").load(root)
    with pytest.raises(Exception, match=r"schema = 'price': expected columns"):
        spark.read.format("rocketmq-store").schema("price int").load(root).count()


def test_a_query_after_one_with_conditions_sees_all_rows(spark: SparkSession, tmp_path: Path) -> None:
    """If Spark pushes conditions down to a source, it reuses the source's reader for the next query on the table."""
    writer = LogWriter(tmp_path / "store", file_size=4096).put_all(some(50))
    table = spark.read.format("rocketmq-store").load(str(writer.write()))
    assert table.where("topic = 'none'").count() == 0
    assert table.where("topic = 'T1'").count() == 10
    assert table.count() == 50


def test_a_large_record_is_read_whole(spark: SparkSession, tmp_path: Path) -> None:
    """The record is larger than the block decoded in one step."""
    writer = LogWriter(tmp_path / "store", file_size=16 << 20)
    writer.put_all([Sent(body=b"a"), Sent(body=b"b" * (6 << 20)), Sent(body=b"c")])
    table = spark.read.format("rocketmq-store").load(str(writer.write()))
    assert sorted(len(row.body) for row in table.collect()) == [1, 1, 6 << 20]


def test_the_tier_of_a_store(spark: SparkSession, tmp_path: Path) -> None:
    """One table of log and tier, with Spark's tasks; and an archive of it."""
    from tests.spark.test_store_tier import ALL, write  # noqa: PLC0415 - its store needs trio only
    from trimq.pipeline.jobs.archive import ArchiveOptions, archive, read  # noqa: PLC0415 - PySpark may be missing

    trio.run(write, tmp_path)
    store, tier = str(tmp_path / "store"), str(tmp_path / "tier")
    table = (
        spark.read.format("rocketmq-store").option("tieredStoreFilePath", tier).option("splitSize", 3000).load(store)
    )
    found = [(row.topic, row.queueId, row.queueOffset) for row in table.collect()]
    assert sorted(found) == ALL
    assert spark.read.format("rocketmq-store").load(store).count() < len(ALL)
    batch = archive(spark, store, str(tmp_path / "archive"), ArchiveOptions(tiered_store_file_path=tier))
    assert batch is not None
    assert (batch.rows, batch.lost) == (len(ALL), 0)
    rows = read(spark, str(tmp_path / "archive")).collect()
    assert sorted((row.topic, row.queueId, row.queueOffset) for row in rows) == ALL
    assert archive(spark, store, str(tmp_path / "archive"), ArchiveOptions(tiered_store_file_path=tier)) is None
