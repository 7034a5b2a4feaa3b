"""``stats``: traffic of a store by topic, tag, producer host and hour; sizes, latencies, hot keys; plots."""

from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from trimq.pipeline.jobs.page import Page

_SHARES: Final = (0.5, 0.9, 0.99, 0.999)
_TOP: Final = 20


class Stats(Struct):
    """Tables by name, each a list of rows: topics, tags, hosts, hours, sizes, latencies, keys."""

    tables: dict[str, list[dict[str, Any]]]

    @property
    def records(self) -> int:
        """The number of records."""
        return sum(int(row["messages"]) for row in self.tables["topics"])


def stats(spark: SparkSession, store: str, **options: Any) -> Stats:
    """The statistics of a store; ``options`` are those of ``rocketmq-store``, to select a part of it."""
    columns = (
        "topic string, tags string, keys array<string>, bornHost string, body binary, bornTimestamp timestamp, "
        "storeTimestamp timestamp"
    )
    reader = spark.read.format("rocketmq-store").schema(columns).option("path", store)
    for name, value in options.items():
        reader = reader.option(name, value)
    return stats_of(reader.load())


def stats_of(table: DataFrame) -> Stats:
    """The statistics of any table with the columns of a topic or store: an archive, a stream's output."""
    rows = table.select(
        "topic",
        "tags",
        "keys",
        f.regexp_replace("bornHost", ":[0-9]+$", "").alias("host"),
        f.length("body").alias("size"),
        f.date_trunc("hour", "storeTimestamp").alias("hour"),
        (f.unix_millis("storeTimestamp") - f.unix_millis("bornTimestamp")).alias("latency"),
    ).cache()
    try:
        return Stats(
            {
                "topics": _by(rows, "topic"),
                "tags": _by(rows.where("tags is not null"), "topic", "tags"),
                "hosts": _by(rows, "host"),
                "hours": _by(rows, "hour", limit=None, order="hour"),
                "sizes": _distribution(rows, "size"),
                "latencies": _distribution(rows, "latency"),
                "keys": _by(rows.select("topic", "size", f.explode("keys").alias("key")), "topic", "key"),
            }
        )
    finally:
        rows.unpersist()


def _by(rows: DataFrame, *columns: str, limit: int | None = 1000, order: str = "") -> list[dict[str, Any]]:
    found = rows.groupBy(*columns).agg(f.count("*").alias("messages"), f.sum("size").alias("bytes"))
    found = found.orderBy(order) if order else found.orderBy(f.desc("messages"), *columns)
    return [row.asDict() for row in (found if limit is None else found.limit(limit)).collect()]


def _distribution(rows: DataFrame, column: str) -> list[dict[str, Any]]:
    """For each topic the quantiles, least and largest value, and a histogram over powers of two."""
    shares = f.percentile_approx(column, list(_SHARES), 10_000).alias("shares")
    found = rows.groupBy("topic").agg(shares, f.min(column).alias("least"), f.max(column).alias("most")).collect()
    bucket = f.when(f.col(column) < 1, 0).otherwise(f.floor(f.log2(column)) + 1).cast("int").alias("bucket")
    counted = rows.groupBy("topic", bucket).count().collect()
    counts: dict[str, dict[int, int]] = {}
    for row in counted:
        counts.setdefault(row.topic, {})[row.bucket] = row["count"]
    rows_out = []
    for row in sorted(found, key=lambda row: str(row.topic)):
        values = {f"p{share * 100:g}": value for share, value in zip(_SHARES, row.shares, strict=True)}
        histogram = {str(key): value for key, value in sorted(counts[row.topic].items())}
        rows_out.append({"topic": row.topic, "least": row.least, **values, "most": row.most, "powers": histogram})
    return rows_out


def write_page(found: Stats, path: str | Path) -> None:
    """Write a page with the tables and plots."""
    page = Page("Traffic of the store")
    tables = found.tables
    hours = tables["hours"]
    page.line("Messages by hour", [row["hour"] for row in hours], [row["messages"] for row in hours])
    page.line("Bytes by hour", [row["hour"] for row in hours], [row["bytes"] for row in hours])
    for name, label in (("topics", "topic"), ("hosts", "host"), ("keys", "key"), ("tags", "tags")):
        rows = tables[name][:_TOP]
        page.bars(f"Messages by {label}", [str(row[label]) for row in rows], [row["messages"] for row in rows])
        page.table(name, rows)
    for name, unit in (("sizes", "bytes"), ("latencies", "ms from born to stored")):
        total: dict[int, int] = {}
        for row in tables[name]:
            for key, value in row["powers"].items():
                total[int(key)] = total.get(int(key), 0) + value
        labels = [f"< {1 << key}" for key in sorted(total)]
        page.bars(f"Messages by {unit}", labels, [total[key] for key in sorted(total)], upright=True)
        page.table(name, [{key: value for key, value in row.items() if key != "powers"} for row in tables[name]])
    page.write(path)
