"""Every column of a sink in a stream, for which PySpark 4.0 passes rows one by one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from tests.interop.harness.servers import Cluster
from tests.spark.tables import read
from tests.spark.test_topic_spark import available_now, table_stream
from trimq.client.message import Message
from trimq.client.sync import Producer
from trimq.pipeline.topics.sink import as_batches
from trimq.pipeline.topics.sink_rows import rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = StringType()
SCHEMA = StructType(
    [
        StructField("body", BinaryType()),
        StructField("tags", TEXT),
        StructField("keys", ArrayType(TEXT)),
        StructField("properties", MapType(TEXT, TEXT)),
        StructField("shardingKey", TEXT),
        StructField("delay", IntegerType()),
    ]
)


def test_rows_that_come_one_by_one_keep_their_columns() -> None:
    """A map is passed as a dictionary; if code iterated over its names, names of two letters would look like pairs."""
    columns = Row(*SCHEMA.names)
    given = [
        columns(bytearray(b"one"), "paid", ["a", "b"], {"shop": "north", "no": "7"}, "customer-7", None),
        columns(b"two", None, None, {"ab": "cd"}, None, 3),
        columns(b"three", None, [], None, None, None),
    ]
    batches = list(as_batches(given * 1500, SCHEMA))
    assert len({batch.schema for batch in batches}) == 1
    rows = [row for batch in batches for row in rows_of(batch, "T")]
    assert len(rows) == 4500
    assert rows[3:6] == rows[:3]
    text = "shop\x01north\x02no\x017\x02TAGS\x01paid\x02KEYS\x01a b\x02__SHARDINGKEY\x01customer-7\x02"
    assert [(row.body, row.properties, row.sharding_key, row.delay) for row in rows[:3]] == [
        (b"one", text, "customer-7", 0),
        (b"two", "ab\x01cd\x02", None, 3),
        (b"three", "", None, 0),
    ]


def test_a_stream_writes_every_column(
    spark: SparkSession, cluster: Cluster, producer: Producer, tmp_path: Path
) -> None:
    source, target = cluster.create_topic("FlowColumnsIn", 1), cluster.create_topic("FlowColumnsOut", 2)
    messages = [
        Message(source, b"%d" % number, tags=f"t{number % 2}", keys=[f"k{number}", "all"], properties={"ab": "cd"})
        for number in range(20)
    ]
    producer.send_batch(messages, queue=producer.queues(source)[0])
    frame = table_stream(spark, cluster, source, startingOffsets="earliest")
    frame = frame.selectExpr("body", "tags", "keys", "properties", "concat('s', tags) as shardingKey")
    available_now(frame, tmp_path / "columns", namesrv=cluster.namesrv, topic=target, idempotent="true")
    found = sorted(read(cluster, topics=target), key=lambda row: int(row["body"]))
    assert [(row["body"], row["tags"], row["keys"]) for row in found] == [
        (b"%d" % number, f"t{number % 2}", [f"k{number}", "all"]) for number in range(20)
    ]
    properties = [dict(row["properties"]) for row in found]
    assert [(one["ab"], one["__SHARDINGKEY"]) for one in properties] == [("cd", f"st{n % 2}") for n in range(20)]
    assert len({(row["brokerName"], row["queueId"]) for row in found if row["tags"] == "t0"}) == 1
