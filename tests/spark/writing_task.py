"""A task of the sink as a separate process, for tests that kill it. Arguments: NAMESRV TOPIC COUNT.

It writes a hundred rows for each line of its standard input, and all remaining rows at the end of the input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pyarrow as pa

from trimq.pipeline.options import Options
from trimq.pipeline.topics.delivery import Identity, WriteSettings, deliver


def main() -> None:
    namesrv, topic, count = sys.argv[1:]
    given = {"namesrv": namesrv, "topic": topic, "idempotent": "true", "batchBytes": "1500"}
    rows = [{"body": b"%06d" % number, "tags": f"t{number % 3}"} for number in range(int(count))]

    def batches() -> Iterator[pa.RecordBatch]:
        for at in range(0, len(rows), 100):
            sys.stdin.readline()
            yield pa.RecordBatch.from_pylist(rows[at : at + 100])

    deliver(batches(), WriteSettings.of(Options(given)), Identity("query/7/3"))


if __name__ == "__main__":
    main()
