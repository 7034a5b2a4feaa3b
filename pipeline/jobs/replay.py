"""``replay``: sends the rows of a query to a topic, at a limited rate, rows with the same key in their order.

One task sends all rows of a key to one queue, one after the other. Delivery is at least once: the next attempt of a
failed task sends all of its rows again. Where duplicates matter, write to the topic's table with ``idempotent=true``.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from msgspec import Struct
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from trimq.client import Tls
from trimq.protocol.hashing import string_hash

_BATCH: Final = 32


class ReplayOptions(Struct, frozen=True):
    """``rate``: messages a second of all tasks together, 0 for no limit. ``key``: an SQL expression, "" for any order.

    ``order``: an SQL expression by which the rows of one key are sorted. ``tls``: as of trimq.client.ClientOptions.
    ``credentials_file``: a file that each task reads (see trimq.client.credentials_file), "" for none.
    """

    namesrv: str
    topic: str
    rate: float = 0.0
    key: str = "get(keys, 0)"
    order: str = "commitLogOffset"
    tasks: int = 2
    group: str = "trimq-replay"
    tls: Tls | bool = False
    credentials_file: str = ""


def replay(table: DataFrame, options: ReplayOptions) -> int:
    """Send the rows (column ``body``, and ``tags``, ``keys``, ``properties`` if present); returns their number."""
    names = [name for name in ("body", "tags", "keys", "properties") if name in table.columns]
    key = f.expr(options.key).cast("string") if options.key else f.lit(None).cast("string")
    rows = table.select(*names, key.alias("replayKey"), f.expr(options.order).alias("replayOrder"))
    # All rows of a key in one task. Rows without a key have no order to keep and are spread over the tasks.
    place = f.coalesce("replayKey", f.col("replayOrder").cast("string"))
    rows = rows.repartition(options.tasks, place).sortWithinPartitions("replayOrder")
    counts = rows.mapInArrow(_Sender(options), "sent bigint")  # type: ignore[arg-type] # as in jobs.job_support
    return int(counts.agg(f.sum("sent")).collect()[0][0] or 0)


class Pace:
    """A rate limit: ``rate`` messages a second, evenly spaced. Unused time is not made up for."""

    def __init__(self, rate: float, clock: Any = time.monotonic, sleep: Any = time.sleep) -> None:
        self._step = 1 / rate if rate else 0.0
        self._clock = clock
        self._sleep = sleep
        self._next = clock()

    def wait(self, count: int) -> None:
        """Wait until ``count`` more messages may be sent."""
        if not self._step:
            return
        now = self._clock()
        if self._next > now:
            self._sleep(self._next - now)
        self._next = max(now, self._next) + count * self._step


class _Sender:
    """Sends the rows of one task."""

    def __init__(self, options: ReplayOptions) -> None:
        self._options = options

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Send the rows of ``batches``; yields one row with their number."""
        from trimq.client import ClientOptions  # noqa: PLC0415 - as below
        from trimq.client.credentials_file import read_credentials  # noqa: PLC0415 - as below
        from trimq.client.sync import Producer  # noqa: PLC0415 - only executors that have rows need the SDK

        options = self._options
        pace = Pace(options.rate / options.tasks)
        sent = 0
        credentials = read_credentials(Path(options.credentials_file)) if options.credentials_file else None
        settings = ClientOptions(tls=options.tls, credentials=credentials)
        with Producer(options.group, namesrv=options.namesrv, options=settings) as producer:
            queues = sorted(producer.queues(options.topic))
            for batch in batches:
                rows = batch.to_pylist()
                for at in range(0, len(rows), _BATCH):
                    part = rows[at : at + _BATCH]
                    pace.wait(len(part))
                    for row in part:
                        self._send(producer, queues, row)
                        sent += 1
        yield pa.RecordBatch.from_pydict({"sent": pa.array([sent], pa.int64())})

    def _send(self, producer: Any, queues: list[Any], row: dict[str, Any]) -> None:
        from trimq.client.message import RESERVED, Message  # noqa: PLC0415 - as above

        properties = {name: value for name, value in (row.get("properties") or []) if name not in RESERVED}
        message = Message(
            self._options.topic,
            row["body"],
            tags=row.get("tags") or None,
            keys=row.get("keys") or (),
            properties=properties,
        )
        key = row["replayKey"]
        queue = queues[string_hash(key) % len(queues)] if key is not None else None
        producer.send(message, queue=queue)
