"""``compact``: the newest record of each key, of a store, an archive, or any table with their columns.

The semantics are those of a compaction topic: a key's later record replaces the earlier ones, and one with an empty
body deletes the key. Records without a key are left out; compaction topics refuse them.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f


def compact(
    table: DataFrame, *, key: str = "get(keys, 0)", order: str = "commitLogOffset", tombstones: bool = True
) -> DataFrame:
    """The newest row of each ``key`` of each topic, by ``order``; both are SQL expressions.

    With ``tombstones`` keys whose newest row has an empty body are left out. Log offsets of several brokers cannot be
    compared; their rows need an order such as ``struct(storeTimestamp, brokerName, commitLogOffset)``.
    """
    columns = table.columns
    by = ["topic", "compactKey"] if "topic" in columns else ["compactKey"]
    rows = table.withColumn("compactKey", f.expr(key)).where(
        "compactKey is not null and cast(compactKey as string) <> ''"
    )
    newest = rows.groupBy(*by).agg(f.max_by(f.struct(*columns), f.expr(order)).alias("newest")).select("newest.*")
    return newest.where("length(body) > 0") if tombstones else newest
