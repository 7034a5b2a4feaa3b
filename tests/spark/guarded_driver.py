"""A program that reads and writes topics of a guarded broker, with executors that are JVMs of their own.

Arguments: a file with a JSON object (see Plan), and the directory of all files. It prints a JSON object (see Found).
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from pyspark_rocketmq import register
from tests.spark.session import QUICK_JAVA, spark_session
from trimq.client import Tls
from trimq.pipeline.jobs.replay import ReplayOptions, replay

EXECUTORS = 1


class Plan(msgspec.Struct):
    """``options``: name servers and TLS. ``writes``, ``reads``: the files with the credentials of two users."""

    options: dict[str, str]
    source: str
    sink: str
    replayed: str
    store: str
    writes: str
    reads: str
    count: int


class Found(msgspec.Struct):
    """``processes``: the JVMs that can run tasks, and that of this program. ``refused``: the errors of who may not."""

    processes: int
    streamed: list[int]
    replayed: int
    refused: list[str]


def run(spark: SparkSession, plan: Plan, directory: Path) -> Found:
    register(spark)
    writes, reads = ({"credentialsFile": user} for user in (plan.writes, plan.reads))
    frame = spark.range(0, plan.count, 1, 4).selectExpr("CAST(id AS STRING) AS body")
    frame.write.format("rocketmq").options(topic=plan.source, **plan.options, **writes).mode("append").save()
    stream(spark, plan, reads, writes, directory / "checkpoint")
    rows = table(spark, plan, plan.sink, reads).select("body").collect()
    sent = replay(spark.read.format("rocketmq-store").load(plan.store), replay_options(plan, plan.writes))
    refused = []
    for attempt in (
        lambda: table(spark, plan, plan.source, writes).collect(),
        lambda: stream(spark, plan, writes, writes, directory / "other"),
        lambda: replay(spark.read.format("rocketmq-store").load(plan.store), replay_options(plan, plan.reads)),
    ):
        try:
            attempt()
        except PySparkException as error:
            refused.append(str(error))
    status = spark.sparkContext._jsc.sc().getExecutorMemoryStatus()  # type: ignore[attr-defined,unused-ignore]
    return Found(status.size(), sorted(int(row.body) for row in rows), sent, refused)


def table(spark: SparkSession, plan: Plan, topic: str, user: dict[str, str]) -> DataFrame:
    reader = spark.read.format("rocketmq").options(**plan.options, **user)
    return reader.options(topics=topic, startingOffsets="earliest").load()


def stream(spark: SparkSession, plan: Plan, reads: dict[str, str], writes: dict[str, str], checkpoint: Path) -> None:
    """Copy what there is in ``source`` to ``sink``."""
    reader = spark.readStream.format("rocketmq").options(**plan.options, **reads)
    frame = reader.options(topics=plan.source, startingOffsets="earliest").load().select("body")
    writer = frame.writeStream.format("rocketmq").options(topic=plan.sink, **plan.options, **writes)
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


def replay_options(plan: Plan, user: str) -> ReplayOptions:
    ca, cert, key = (plan.options[name] for name in ("tlsCaFile", "tlsCertFile", "tlsKeyFile"))
    return ReplayOptions(plan.options["namesrv"], plan.replayed, tls=Tls(ca, cert, key), credentials_file=user)


def main() -> None:
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    directory = Path(sys.argv[2])
    settings = {"spark.executor.memory": "512m", "spark.executor.extraJavaOptions": QUICK_JAVA}
    with spark_session(directory, master=f"local-cluster[{EXECUTORS},2,512]", **settings) as spark:
        sys.stdout.buffer.write(msgspec.json.encode(run(spark, plan, directory)))


if __name__ == "__main__":
    main()
