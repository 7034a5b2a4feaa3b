"""Topics in real Spark: streams, sinks, and pitfalls of PySpark's Python Data Source API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from msgspec import structs
from pyspark.errors import StreamingQueryException

from pyspark_rocketmq import register
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until
from tests.spark.tables import read
from trimq.client.message import Message, MessageQueue
from trimq.client.sync import Admin, Producer
from trimq.pipeline.topics.stream import HAS_ADMISSION_CONTROL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

T = TypeVar("T")


def table(spark: SparkSession, cluster: Cluster, topic: str, **options: str) -> DataFrame:
    return spark.read.format("rocketmq").options(namesrv=cluster.namesrv, topics=topic, **options).load()


def table_stream(spark: SparkSession, cluster: Cluster, topic: str, **options: str) -> DataFrame:
    return spark.readStream.format("rocketmq").options(namesrv=cluster.namesrv, topics=topic, **options).load()


def send(producer: Producer, topic: str, count: int, first: int = 0) -> None:
    for queue in producer.queues(topic):
        name = f"{queue.broker_name}/{queue.queue_id}"
        messages = [Message(topic, f"{name}/{number:04d}".encode()) for number in range(first, first + count)]
        producer.send_batch(messages, queue=queue)


def patiently(run: Callable[[], T]) -> T:
    """Run a stream, and once more if its planning process did not start within Spark's fixed limit of ten seconds."""
    for _ in range(4):
        try:
            return run()
        except StreamingQueryException as error:
            if "failed to connect back" not in str(error):
                raise
    return run()


def to_its_end(writer: DataStreamWriter) -> StreamingQuery:
    def run() -> StreamingQuery:
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        return query

    return patiently(run)


def available_now(frame: DataFrame, checkpoint: Path, **options: str) -> StreamingQuery:
    return to_its_end(frame.writeStream.format("rocketmq").options(checkpointLocation=str(checkpoint), **options))


def test_a_stream_reads_writes_and_goes_on_from_its_checkpoint(
    spark: SparkSession, cluster: Cluster, producer: Producer, admin: Admin, tmp_path: Path
) -> None:
    source, target = cluster.create_topic("FlowIn", 1), cluster.create_topic("FlowOut", 2)
    send(producer, source, 10)
    limit = {"maxOffsetsPerTrigger": "8"} if HAS_ADMISSION_CONTROL else {}
    frame = table_stream(spark, cluster, source, startingOffsets="earliest", group="flow", **limit).select("body")
    sink = {"namesrv": cluster.namesrv, "topic": target, "idempotent": "true"}
    first = available_now(frame, tmp_path / "flow", **sink)
    sizes = [int(progress["numInputRows"]) for progress in first.recentProgress if progress["numInputRows"]]
    assert sizes == ([8, 8, 4] if HAS_ADMISSION_CONTROL else [20])
    send(producer, source, 3, first=10)
    second = available_now(frame, tmp_path / "flow", **sink)
    assert sum(int(progress["numInputRows"]) for progress in second.recentProgress) == 6
    found = sorted(bytes(row.body).decode() for row in table(spark, cluster, target).select("body").collect())
    assert found == sorted(f"broker-{name}/0/{number:04d}" for name in "ab" for number in range(13))
    # Spark does not commit the last batch of a run, only the ones before it.
    committed = {
        queue: wrapper.consumer_offset for queue, wrapper in admin.consume_stats("flow", source).offsets.items()
    }
    assert min(committed.values()) >= 8


def test_a_query_that_is_started_again_reads_a_new_queue_from_its_begin(
    spark: SparkSession, cluster: Cluster, producer: Producer, admin: Admin, tmp_path: Path
) -> None:
    """Also with versions of PySpark that do not pass the start of a batch; "latest" would skip messages there."""
    topic = cluster.create_topic("FlowGrown", 1)
    send(producer, topic, 4)
    frame = table_stream(spark, cluster, topic).select("body")
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "grown"))

    def rows() -> int:
        return sum(int(progress["numInputRows"]) for progress in to_its_end(writer).recentProgress)

    assert rows() == 0
    address = cluster.brokers[0].address
    config = admin.topic_config(address, topic)
    config = structs.replace(config, read_queue_nums=2, write_queue_nums=2)
    admin.update_topic(address, config)
    for number, count in ((0, 3), (1, 50)):
        queue = MessageQueue(topic=topic, broker_name="broker-a", queue_id=number)
        producer.send_batch([Message(topic, b"new")] * count, queue=queue)
    assert rows() == 53
    assert rows() == 0


def test_a_topic_made_anew_ends_each_run_and_nothing_is_left_out(
    spark: SparkSession, cluster: Cluster, producer: Producer, admin: Admin, tmp_path: Path
) -> None:
    """Issue 19.3: there was a run without rows and errors, then one that started at message 30 of 40 new ones."""
    topic = cluster.create_topic("FlowAnew", 1)
    queue = MessageQueue(topic=topic, broker_name="broker-a", queue_id=0)

    def more(count: int) -> None:
        producer.send_batch([Message(topic, b"%04d" % number) for number in range(count)], queue=queue)

    def rows(**options: str) -> int:
        frame = table_stream(spark, cluster, topic, startingOffsets="earliest", pollTimeoutMs="2000", **options)
        writer = frame.select("body").writeStream.format("noop").option("checkpointLocation", str(tmp_path / "anew"))
        return sum(int(progress["numInputRows"]) for progress in to_its_end(writer).recentProgress)

    more(30)
    assert rows() == 30
    admin.delete_topic(topic)
    cluster.create_topic(topic, 1)
    more(10)
    with pytest.raises(
        StreamingQueryException, match=rf"{topic}/broker-a/0 .* ends at 10, the stream has read it up to 30"
    ):
        rows()
    more(30)
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match=rf"{topic}/broker-a/0 .* has another message at 29"):
            rows()
    assert rows(failOnDataLoss="false") == 40
    more(2)
    assert rows() == 2


def test_a_running_stream_takes_what_comes_and_shows_it_to_the_group(
    spark: SparkSession, cluster: Cluster, producer: Producer, tmp_path: Path
) -> None:
    topic = cluster.create_topic("FlowLive", 1)
    frame = table_stream(spark, cluster, topic)
    writer = (
        frame.groupBy()
        .count()
        .writeStream.format("memory")
        .queryName("live")
        .outputMode("complete")
        .option("checkpointLocation", str(tmp_path / "live"))
        .trigger(processingTime="0 seconds")
    )
    pinned = tmp_path / "live" / "commits" / "0"

    def begun() -> StreamingQuery:
        """Wait for a batch without rows, which pins the position of "latest": later messages are not missed."""
        query = writer.start()
        wait_until(lambda: pinned.exists() or not query.isActive, "the first batch", 90)
        if not query.isActive:
            query.awaitTermination()
        return query

    query = patiently(begun)
    try:
        send(producer, topic, 25)
        wait_until(lambda: [row["count"] for row in spark.table("live").collect()] == [50], "the count", 90)
    finally:
        query.stop()


def test_a_failed_sink_is_run_again_with_the_same_rows_and_ids(
    spark: SparkSession, cluster: Cluster, producer: Producer, tmp_path: Path
) -> None:
    """After a failure Spark repeats the batch with the same query, batch, partitions and order, as another attempt."""
    from pyspark.sql import functions  # noqa: PLC0415 - PySpark may be missing

    source, target = cluster.create_topic("FlowAgainIn", 1), cluster.create_topic("FlowAgainOut", 2)
    send(producer, source, 400)
    failed, stored = tmp_path / "failed", tmp_path / "stored"

    def fails_once(body: bytes) -> bytes:
        if body.endswith(b"a/0/0399") and not failed.exists():
            # Fail only after the other task, which reads the other broker's queue, has stored rows.
            limit = time.monotonic() + 100
            while not stored.exists() and time.monotonic() < limit:
                time.sleep(0.05)
            failed.touch()
            raise RuntimeError("on purpose")
        return bytes(body)

    udf = functions.udf(
        fails_once, "binary", useArrow=False
    )  # from 4.3 on type hints would select another kind of function
    frame = table_stream(spark, cluster, source, startingOffsets="earliest").select(udf("body").alias("body"))
    sink = {"namesrv": cluster.namesrv, "topic": target, "idempotent": "true", "batchBytes": "4000"}
    writer = frame.writeStream.format("rocketmq").options(checkpointLocation=str(tmp_path / "again"), **sink)

    def fails() -> None:
        query = writer.trigger(availableNow=True).start()
        wait_until(lambda: read(cluster, topics=target) or not query.isActive, "rows of the run that will fail", 100)
        if query.isActive:
            stored.touch()
        query.awaitTermination(120)

    with pytest.raises(Exception, match="on purpose"):
        patiently(fails)
    assert read(cluster, topics=target), "the rows stored now would be duplicated"
    available_now(frame, tmp_path / "again", **sink)
    rows = table(spark, cluster, target).select("body").collect()
    assert len(rows) == 800
    assert len({bytes(row.body) for row in rows}) == 800


def test_a_batch_write_appends_and_keeps_what_the_columns_say(spark: SparkSession, cluster: Cluster) -> None:
    topic = cluster.create_topic("FlowBatch", 2)
    rows = [(f"order {number}", "paid", [f"o-{number}"], {"shop": "north"}) for number in range(100)]
    frame = spark.createDataFrame(rows, "body string, tags string, keys array<string>, properties map<string,string>")
    frame.write.format("rocketmq").options(namesrv=cluster.namesrv, topic=topic).mode("append").save()
    found = table(spark, cluster, topic)
    assert found.where("tags = 'paid' and properties['shop'] = 'north' and array_contains(keys, 'o-7')").count() == 1
    assert found.count() == 100


def test_a_schema_chooses_columns(spark: SparkSession, cluster: Cluster, producer: Producer) -> None:
    topic = cluster.create_topic("FlowSchema", 1)
    send(producer, topic, 5)
    reader = spark.read.schema("queueOffset bigint, body binary").format("rocketmq")
    frame = reader.options(namesrv=cluster.namesrv, topics=topic).load()
    assert frame.columns == ["queueOffset", "body"]
    assert sorted(row.queueOffset for row in frame.collect()) == sorted([*range(5)] * 2)


def test_wrong_options_are_clean_errors_in_spark(spark: SparkSession, cluster: Cluster) -> None:
    # Spark passes option names in lower case.
    with pytest.raises(Exception, match=r"(?i)option startingOffset = 'x': expected an option of the rocketmq source"):
        table(spark, cluster, "T", startingOffset="x").count()
    stream = table_stream(spark, cluster, "T", endingOffsets="latest").writeStream.format("noop")
    with pytest.raises(Exception, match=r"option endingOffsets = 'latest': expected to be given for a batch read only"):
        patiently(lambda: stream.start().awaitTermination(60))


def test_a_pushed_filter_does_not_break_reads(spark: SparkSession, cluster: Cluster, producer: Producer) -> None:
    """A source that defines pushFilters fails if spark.sql.python.filterPushdown.enabled is off, as by default."""
    topic = cluster.create_topic("FlowFilter", 1)
    send(producer, topic, 5)
    assert table(spark, cluster, topic).where("queueOffset >= 3 and brokerName = 'broker-a'").count() == 2


def test_workers_keep_no_thread_and_no_connection(spark: SparkSession, cluster: Cluster, producer: Producer) -> None:
    """Python workers are reused, so the next task would inherit what a task leaves open."""
    from pyspark.sql import functions  # noqa: PLC0415 - PySpark may be missing

    topic = cluster.create_topic("FlowThreads", 2)
    send(producer, topic, 5)

    def counts(_: Any) -> str:
        tasks = sum(1 for _ in Path("/proc/self/task").iterdir())
        sockets = sum("socket:" in str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir())
        return f"{tasks} {sockets}"

    def seen() -> set[str]:
        probe = spark.range(4, numPartitions=2).select(functions.udf(counts, "string", useArrow=False)("id").alias("n"))
        return {row.n for row in probe.collect()}

    before = seen()
    for _ in range(3):
        assert table(spark, cluster, topic).count() == 20
    assert seen() == before


def test_progress_reports_have_rows_and_offsets_and_nothing_of_ours(
    spark: SparkSession, cluster: Cluster, producer: Producer, tmp_path: Path
) -> None:
    """A Python source has no metrics of its own in Spark's reports; its lag has to be computed from the offsets."""
    topic = cluster.create_topic("FlowReports", 1)
    send(producer, topic, 4)
    frame = table_stream(spark, cluster, topic, startingOffsets="earliest")
    query = to_its_end(frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "reports")))
    report = next(progress for progress in query.recentProgress if progress["numInputRows"])
    source = report["sources"][0]
    ends = {topic: {"broker-a": {"0": 4}, "broker-b": {"0": 4}}}
    assert report["numInputRows"] == source["numInputRows"] == 8
    assert offsets_of(source["endOffset"]) == ends
    assert offsets_of(source["startOffset"]) == {}
    if HAS_ADMISSION_CONTROL:
        assert offsets_of(source["latestOffset"]) == ends
    assert not source["metrics"]


def offsets_of(reported: Any) -> Any:
    """Parse an offset, which is a text or an object depending on the version of PySpark, as is a missing one."""
    if reported in (None, "null", "None"):
        return {}
    return (json.loads(reported) if isinstance(reported, str) else reported)["q"]


def test_both_sources_are_found_by_the_names_of_their_modules(spark: SparkSession, cluster: Cluster) -> None:
    """The test does not register them: Spark imports modules named pyspark_* and uses their DefaultSource."""
    with pytest.raises(Exception, match="option namesrv is not given"):
        spark.read.format("rocketmq").option("topics", "T").load().count()
    with pytest.raises(Exception, match="option"):
        spark.read.format("rocketmq-store").option("noSuchOption", "1").load("/nowhere").count()
    # PySpark 4.0 refuses to register a source that it has found by its module.
    register(spark)
    with pytest.raises(Exception, match="option namesrv is not given"):
        spark.read.format("rocketmq").option("topics", "T").load().count()
