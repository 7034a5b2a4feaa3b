"""The source without a JVM: these helpers call the functions that Spark's workers call."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StringType, StructField, StructType

from tests.interop.harness.servers import Cluster
from trimq.client.sync import Admin
from trimq.pipeline.options import Options
from trimq.pipeline.schema import COLUMNS
from trimq.pipeline.topics.delivery import Identity, WriteSettings, deliver
from trimq.pipeline.topics.source import TopicDataSource
from trimq.pipeline.topics.stream import stream_reader


def options_of(cluster: Cluster, **options: object) -> dict[str, str]:
    given = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    return {"namesrv": cluster.namesrv, **given}


def batch_reader(cluster: Cluster, **options: object) -> Any:
    source = TopicDataSource(options_of(cluster, **options))
    return source.reader(columns_of(source))


def columns_of(source: TopicDataSource) -> StructType:
    """All columns as Spark would pass them; the types do not matter here."""
    names = COLUMNS if " properties " in source.schema() else COLUMNS[:-1]
    return StructType([StructField(name, StringType()) for name in names])


def read_partitions(reader: Any, partitions: Iterable[Any]) -> list[dict[str, Any]]:
    return [row for partition in partitions for batch in reader.read(partition) for row in batch.to_pylist()]


def read(cluster: Cluster, **options: object) -> list[dict[str, Any]]:
    reader = batch_reader(cluster, **options)
    return read_partitions(reader, reader.partitions())


def bodies(rows: Iterable[dict[str, Any]]) -> list[bytes]:
    return sorted(row["body"] for row in rows)


def stream(cluster: Cluster, **options: object) -> Any:
    return stream_reader(Options(options_of(cluster, **options)), dict.fromkeys(COLUMNS, False))


def write(
    cluster: Cluster, rows: list[dict[str, Any]], *, task: str = "query/0/0", again: bool = False, **options: object
) -> tuple[int, int]:
    """Write rows like a task of a sink; return how many were sent and how many were already stored."""
    settings = WriteSettings.of(Options(options_of(cluster, **options)))
    return deliver([pa.RecordBatch.from_pylist(rows)] if rows else [], settings, Identity(task, again))


def shown(admin: Admin, topic: str, count: int) -> None:
    """Wait until a topic's queues have ``count`` messages: Apache's broker answers a send before it dispatches it."""
    deadline = time.monotonic() + 60
    while (found := sum(offset.max_offset for offset in admin.topic_stats(topic).values())) != count:
        assert found < count, f"{topic} has more messages than were sent: {found}"
        assert time.monotonic() < deadline, f"{topic} has {found} messages, not {count}"
        time.sleep(0.02)


def open_sockets() -> int:
    """The number of open sockets in this process."""
    # A socket's link has no target, which resolve() accepts.
    return sum("socket:" in str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir())
