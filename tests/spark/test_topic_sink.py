"""Writing to topics without a JVM: rows, order, and repeated tasks."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DoubleType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from tests.interop.harness.servers import Cluster
from tests.spark.tables import bodies, options_of, read, write
from trimq.client.sync import Admin
from trimq.pipeline.options import OptionError, Options
from trimq.pipeline.topics.sink import batch_writer, stream_writer
from trimq.pipeline.topics.sink_rows import RowError


def rows(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"body": b"%05d" % number, **columns} for number in range(count)]


def test_every_column_reaches_the_message(cluster: Cluster) -> None:
    topic = cluster.create_topic("SinkColumns", 4)
    row = {
        "topic": topic,
        "body": "one ö".encode(),
        "tags": "paid",
        "keys": ["a", "b"],
        "properties": {"shop": "north", "UNIQ_KEY": "of the message that was read"}.items(),
        "shardingKey": "customer-7",
    }
    assert write(cluster, [{**row, "properties": list(row["properties"])}]) == (1, 0)
    found = read(cluster, topics=topic)
    assert [(one["body"], one["tags"], one["keys"]) for one in found] == [("one ö".encode(), "paid", ["a", "b"])]
    properties = dict(found[0]["properties"])
    assert (properties["shop"], properties["__SHARDINGKEY"]) == ("north", "customer-7")
    assert properties["UNIQ_KEY"] != "of the message that was read"


def test_rows_of_a_sharding_key_stay_in_order(cluster: Cluster) -> None:
    topic = cluster.create_topic("SinkOrdered", 4)
    some = [{"body": b"%d/%04d" % (n % 5, n), "shardingKey": f"k{n % 5}"} for n in range(1000)]
    assert write(cluster, some, topic=topic, batchBytes=2000) == (1000, 0)
    by_queue: dict[Any, list[bytes]] = {}
    for row in read(cluster, topics=topic):
        by_queue.setdefault((row["brokerName"], row["queueId"]), []).append(row["body"])
    for key in (b"0", b"1", b"2", b"3", b"4"):
        lists = [[body for body in queue if body.startswith(key)] for queue in by_queue.values()]
        (whole,) = (one for one in lists if one)
        assert len(whole) == 200, "one queue has them all"
        assert whole == sorted(whole)


def test_delayed_rows_and_several_topics(cluster: Cluster) -> None:
    one, two = cluster.create_topic("SinkOne", 1), cluster.create_topic("SinkTwo", 1)
    some = [{"topic": one if n % 2 else two, "body": b"%d" % n, "delay": None} for n in range(10)]
    assert write(cluster, some) == (10, 0)
    assert len(read(cluster, topics=one)) == len(read(cluster, topics=two)) == 5


def test_a_task_that_runs_again_stores_nothing_twice(cluster: Cluster) -> None:
    topic = cluster.create_topic("SinkOnce", 4)
    options: dict[str, Any] = {"topic": topic, "idempotent": True, "batchBytes": 600}
    first = write(cluster, rows(60), **options)
    assert first == (60, 0)
    assert write(cluster, rows(60), **options) == (0, 60), "Spark does not mark a batch that the driver repeats"
    assert write(cluster, rows(60), again=True, **options) == (0, 60)
    assert write(cluster, rows(60), task="query/1/0", **options) == (60, 0), "the next batch has ids of its own"
    assert len(read(cluster, topics=topic)) == 120


def test_a_task_that_was_cut_off_goes_on_where_it_was(cluster: Cluster) -> None:
    topic = cluster.create_topic("SinkCut", 4)
    options: dict[str, Any] = {"topic": topic, "idempotent": True, "batchBytes": 600}
    assert write(cluster, rows(37), **options) == (37, 0)
    assert write(cluster, rows(100), again=True, **options) == (63, 37)
    assert bodies(read(cluster, topics=topic)) == [b"%05d" % number for number in range(100)]


def test_ids_are_found_by_the_brokers_index(cluster: Cluster, admin: Admin) -> None:
    topic = cluster.create_topic("SinkIds", 1)
    write(cluster, rows(3), topic=topic, idempotent=True)
    for row in read(cluster, topics=topic):
        assert len(admin.messages_by_unique_key(topic, row["uniqId"])) == 1


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"body": None}, "body is null or empty"),
        ({"body": b""}, "body is null or empty"),
        ({"body": b"x", "topic": None}, "the topic is null"),
        ({"body": b"x", "topic": "a b"}, "characters other than"),
        ({"body": b"x", "keys": ["a b"]}, "contains a blank"),
        ({"body": b"x", "tags": "a\x02b"}, "the character 1 or 2"),
        ({"body": b"x", "tags": "a" * 40_000}, "the limit is 32767"),
        ({"body": b"x", "tags": "\N{GRINNING FACE}" * 9000}, "the limit is 32767"),
    ],
)
def test_a_row_that_no_broker_takes_is_refused(cluster: Cluster, row: dict[str, Any], text: str) -> None:
    options: dict[str, Any] = {} if "topic" in row else {"topic": cluster.create_topic("SinkRefused", 1)}
    with pytest.raises(RowError, match=text):
        write(cluster, [row], **options)


def schema(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


BODY = {"body": BinaryType()}


@pytest.mark.parametrize(
    ("columns", "options", "text"),
    [
        ({"topic": StringType()}, {}, "option column body is not given"),
        (BODY, {}, "option topic is not given: expected the name of a topic, or a column topic"),
        ({**BODY, "price": DoubleType()}, {"topic": "T"}, "option column = 'price': expected one of topic"),
        ({"body": DoubleType()}, {"topic": "T"}, "option column body = 'double': expected binary or string"),
        ({**BODY, "delay": IntegerType()}, {"topic": "T", "idempotent": "true"}, "no column delay"),
        (BODY, {"topic": "T", "topics": "T"}, "option topics = 'T': .*did you mean topic"),
        (BODY, {"topic": "T", "path": "Orders"}, r"option path = 'Orders': expected none: .*\(\) without a path"),
        (BODY, {"topic": "a b"}, "option topic = 'a b': expected the name of a topic"),
        (BODY, {"topic": "T", "batchBytes": "0"}, "option batchBytes = '0'"),
    ],
)
def test_wrong_columns_and_options_are_refused_before_a_row_is_sent(
    cluster: Cluster, columns: dict[str, Any], options: dict[str, str], text: str
) -> None:
    for writer in (batch_writer, stream_writer):
        with pytest.raises(OptionError, match=text):
            writer(Options(options_of(cluster, **options)), schema(**columns), overwrite=False)


def test_a_path_that_spark_gives_to_a_table_is_let_through(cluster: Cluster) -> None:
    options = Options(options_of(cluster, topic="T", path="file:/warehouse/orders"))
    batch_writer(options, schema(**BODY), overwrite=False)


def test_all_columns_are_taken_and_overwriting_is_not(cluster: Cluster) -> None:
    strings = MapType(StringType(), StringType())
    every = schema(
        topic=StringType(),
        tags=StringType(),
        keys=ArrayType(StringType()),
        properties=strings,
        shardingKey=StringType(),
        delay=IntegerType(),
        **BODY,
    )
    options = Options(options_of(cluster))
    batch_writer(options, every, overwrite=False)
    with pytest.raises(OptionError, match="option mode = 'overwrite': expected append"):
        batch_writer(options, every, overwrite=True)


def test_rows_come_as_arrow_batches_where_pyspark_has_that(cluster: Cluster) -> None:
    """Row by row Spark passes only a tenth as many rows in the same time."""
    options = Options(options_of(cluster, topic="T"))
    assert isinstance(batch_writer(options, schema(**BODY), overwrite=False), DataSourceArrowWriter)
    kind = getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter)
    assert isinstance(stream_writer(options, schema(**BODY), overwrite=False), kind)
