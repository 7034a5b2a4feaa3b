# ruff: noqa: INP001 - a script of the image, in no package
"""Counts the messages of a topic by tag and writes the counts as Parquet.

Use: count_by_tag.py [TOPIC [TABLE]], with the name servers (HOST:PORT separated by semicolons) in TRIMQ_NAMESRV.
"""

import os
import sys

from pyspark.sql import SparkSession


def main(topic: str = "orders", table: str = "/tables/orders_by_tag") -> None:
    """Count the messages that are in the topic now. An existing table is replaced."""
    spark = SparkSession.builder.appName(f"count {topic} by tag").getOrCreate()
    messages = (
        spark.read.format("rocketmq").option("namesrv", os.environ["TRIMQ_NAMESRV"]).option("topics", topic).load()
    )
    messages.groupBy("tags").count().coalesce(1).write.mode("overwrite").parquet(table)
    spark.read.parquet(table).orderBy("tags").show(truncate=False)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
