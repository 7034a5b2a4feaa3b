"""A program that copies a topic to another, for tests that kill it.

Arguments: NAMESRV SOURCE TARGET DIRECTORY.

It runs until it is killed. A query that fails, or that cannot be planned because its Python worker was killed, is
restarted, as an operator would do.
"""

from __future__ import annotations

import sys
from pathlib import Path

from py4j.protocol import Py4JJavaError  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.spark.session import spark_session
from trimq.pipeline.topics.stream import HAS_ADMISSION_CONTROL


def copy(spark: SparkSession, namesrv: str, source: str, target: str, checkpoint: Path) -> None:
    options = {"namesrv": namesrv, "topics": source, "startingOffsets": "earliest"}
    if HAS_ADMISSION_CONTROL:
        options["maxOffsetsPerTrigger"] = "25"
    frame = spark.readStream.format("rocketmq").options(**options).load().select("body")
    sink = {"namesrv": namesrv, "topic": target, "idempotent": "true", "batchBytes": "200"}
    writer = frame.writeStream.format("rocketmq").options(checkpointLocation=str(checkpoint), **sink)
    writer.trigger(processingTime="0 seconds").start().awaitTermination()


def main() -> None:
    namesrv, source, target, directory = sys.argv[1:]
    home = Path(directory)
    with spark_session(home / "spark", master="local[2,8]") as spark:
        while True:
            try:
                copy(spark, namesrv, source, target, home / "checkpoint")
            except (PySparkException, Py4JJavaError) as error:
                print(f"the query failed and is started again: {error}", flush=True)  # noqa: T201 - a log for the test


if __name__ == "__main__":
    main()
