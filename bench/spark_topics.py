"""Topics on Spark, relative to the ceiling of the API: ratios in one run, with 1 KiB bodies and two cores.

    .venv-spark-newest/bin/python -m bench.spark_topics [--rows 1000000] [--rounds 3] [--leave GIB] [--json FILE]

Reading: a live broker, relative to a Python source that yields ready-made Arrow batches of the same rows. Writing: the
sink, relative to one that drops its batches, both with that source. The broker is a separate process on the same cores.
``--leave``: measure writing a second time, with all memory allocated but so many GiB (memory_in_use).
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from bench.memory_in_use import in_use, page_us
from bench.spark_report import FLOORS
from pyspark_rocketmq import register
from tests.interop.harness.servers import Cluster, running_cluster
from trimq.client.message import Message
from trimq.client.sync import Producer
from trimq.pipeline.schema import ARROW_SCHEMA, SPARK_SCHEMA

BODY: Final = 1024
PARTITIONS: Final = 4
ROWS_A_BATCH: Final = 2000
RATIOS: Final = (
    ("read", "live broker", "ready-made batches"),
    ("read, bodies only", "live broker, bodies only", "ready-made batches"),
    ("write", "sink", "dropping sink"),
)
SINK_SCHEMA: Final = "body binary not null, tags string"


class ReadySource(DataSource):
    """Ready-made rows: the cost of Spark and the Arrow transport alone."""

    @classmethod
    def name(cls) -> str:
        """``ready``."""
        return "ready"

    def schema(self) -> str:
        """The columns of a topic, or those of a sink."""
        return SINK_SCHEMA if "sink" in self.options else SPARK_SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:  # noqa: ARG002 - Spark passes it
        """A batch read."""
        return ReadyReader(int(self.options["rows"]), "sink" in self.options)


class ReadyReader(DataSourceReader):
    """Makes one batch and yields it repeatedly."""

    def __init__(self, rows: int, sink: bool) -> None:
        self.rows = rows
        self.sink = sink

    def partitions(self) -> list[InputPartition]:
        """As many partitions as the topic has queues."""
        return [InputPartition(number) for number in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - all are alike
        """This partition's share of the rows."""
        names = ["body", "tags"] if self.sink else ARROW_SCHEMA.names
        batch = topic_batch(ROWS_A_BATCH).select(names)
        for _ in range(self.rows // PARTITIONS // ROWS_A_BATCH):
            yield batch


class DroppingSource(DataSource):
    """A sink that drops its batches."""

    @classmethod
    def name(cls) -> str:
        """``dropping``."""
        return "dropping"

    def writer(self, schema: Any, overwrite: bool) -> "DroppingWriter":  # noqa: ARG002 - Spark passes them
        """A batch write."""
        return DroppingWriter()


class DroppingWriter(DataSourceArrowWriter):
    """Takes all batches and drops them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Take all batches of a task."""
        for _ in iterator:
            pass
        return WriterCommitMessage()


def topic_batch(count: int) -> pa.RecordBatch:
    """Rows like those of the measured topic."""
    moment = 1_700_000_000_000_000
    values = {
        "topic": ["Bench"] * count,
        "brokerName": ["broker-a"] * count,
        "body": [os.urandom(BODY)] * count,
        "tags": ["t1"] * count,
        "keys": [[]] * count,
        "msgId": ["7F00000100002A9F0000000000000000"] * count,
        "uniqId": ["C0000202ADEADBEEF00000000000000A"] * count,
        "bornHost": ["127.0.0.1:50000"] * count,
        "storeHost": ["127.0.0.1:10911"] * count,
        "properties": [[("UNIQ_KEY", "C0000202ADEADBEEF00000000000000A"), ("WAIT", "true"), ("TAGS", "t1")]] * count,
    }
    arrays = []
    for field in ARROW_SCHEMA:
        numbers = [moment] * count if pa.types.is_timestamp(field.type) else list(range(count))
        arrays.append(pa.array(values.get(field.name, numbers), field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def fill(cluster: Cluster, topic: str, rows: int) -> None:
    body = os.urandom(BODY)
    with Producer("bench", namesrv=cluster.namesrv) as producer:
        queues = producer.queues(topic)
        for number in range(rows // 200):
            queue = queues[number % len(queues)]
            producer.send_batch([Message(topic, body, tags="t1") for _ in range(200)], queue=queue)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def measure(spark: SparkSession, folder: Path, rows: int, rounds: int, *, only_writing: bool = False) -> dict[str, Any]:
    folder.mkdir()
    properties = {"mappedFileSizeCommitLog": str(1 << 30), "mappedFileSizeConsumeQueue": str(6_000_000)}
    page = page_us(folder)
    with running_cluster(folder, properties=properties) as cluster:
        actions = writing(spark, cluster, rows)
        if not only_writing:
            actions = reading(spark, cluster, rows) | actions
        for action in actions.values():  # warm-up: Spark compiles its plans, the broker creates its files
            action()
        times: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(rounds):
            for name, action in actions.items():
                times[name].append(seconds(action))
    page = statistics.median((page, page_us(folder)))
    shutil.rmtree(folder)
    rates = {name: rows / statistics.median(found) for name, found in times.items()}
    return {
        "us a page": page,
        "rows a second": rates,
        "ratio": {name: rates[part] / rates[whole] for name, part, whole in RATIOS if part in rates},
    }


def reading(spark: SparkSession, cluster: Cluster, rows: int) -> dict[str, Callable[[], object]]:
    topic = cluster.create_topic("Bench", PARTITIONS)
    fill(cluster, topic, rows)
    live = spark.read.format("rocketmq").options(namesrv=cluster.namesrv, topics=topic)
    bodies = spark.read.schema("body binary").format("rocketmq").options(namesrv=cluster.namesrv, topics=topic)
    return {
        "ready-made batches": lambda: drain(spark.read.format("ready").option("rows", rows).load()),
        "live broker": lambda: drain(live.load()),
        "live broker, bodies only": lambda: drain(bodies.load()),
    }


def writing(spark: SparkSession, cluster: Cluster, rows: int) -> dict[str, Callable[[], object]]:
    target = cluster.create_topic("BenchSink", PARTITIONS)
    ready = spark.read.format("ready").option("rows", rows).option("sink", "1").load()
    return {
        "dropping sink": lambda: ready.write.format("dropping").mode("append").save(),
        "sink": lambda: (
            ready.write.format("rocketmq").options(namesrv=cluster.namesrv, topic=target).mode("append").save()
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--leave", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    with tempfile.TemporaryDirectory(prefix="trimq-bench-") as folder:
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.driver.memory", "2g")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .config("spark.local.dir", folder)
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        register(spark)
        for source in (ReadySource, DroppingSource):
            spark.dataSource.register(source)
        found = {"rows": arguments.rows} | measure(spark, Path(folder) / "as it is", arguments.rows, arguments.rounds)
        if arguments.leave:
            with in_use(arguments.leave, Path(folder)):
                again = measure(spark, Path(folder) / "in use", arguments.rows, arguments.rounds, only_writing=True)
            found["memory in use"] = {"left GiB": arguments.leave} | again
        spark.stop()
    for title, part in (("", found), ("memory in use", found.get("memory in use"))):
        if part is not None:
            print_figures(title, part)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def print_figures(title: str, found: dict[str, Any]) -> None:
    print(f"{title:28} {found['us a page']:12.1f} us a page")
    for name, rate in found["rows a second"].items():
        print(f"{name:28} {rate:12,.0f} rows/s")
    for name, ratio in found["ratio"].items():
        target = FLOORS.get(name)
        print(f"{name:28} {ratio:12.2f} {'' if target is None else f'(target {target})'}")


if __name__ == "__main__":
    sys.exit(main())
