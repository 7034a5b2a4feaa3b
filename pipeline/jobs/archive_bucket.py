"""What a bucket has for an archive: the log offsets between which its objects are, and whether some may be missing."""

from typing import NamedTuple

import numpy as np

from trimq.pipeline.store.bucket import BucketReader
from trimq.pipeline.store.history import History, read_history, shown
from trimq.pipeline.store.options import StoreOptions


class BucketBounds(NamedTuple):
    """The log offsets at which the oldest object begins and the root ends. ``why``: what may be missing, or empty."""

    start: int
    end: int
    why: str


def bucket_bounds(options: StoreOptions, begin: int | None) -> BucketBounds:
    """What a bucket has of its one broker; ``begin`` is the log offset at which the archive ends.

    Raises StorePathError, BucketError.
    """
    assert options.bucket is not None
    (broker,) = options.bucket.brokers
    history = read_history(BucketReader(options.bucket), broker, options)
    there = [stored for stored in history.objects if stored.length]
    start = min((stored.begin for stored in there), default=history.root.end)
    return BucketBounds(start, history.root.end, "" if begin is None else _missing(history, start, begin))


def _missing(history: History, start: int, begin: int) -> str:
    """Which messages with log offsets from ``begin`` on may have expired; empty if none have."""
    if start > begin:
        return f"the bucket begins at {start}, the archive ends at {begin}"
    rows = history.rows
    ends = rows[rows["messages"] == 0]
    late = ends[ends["last_physical"] >= begin]
    if len(late):
        return f"the last messages of {len(late)} queues (as {_queue(history, late)}) have expired"
    # Only of the oldest window, some segments may have expired and others not.
    oldest = max((stored.end for stored in history.objects if stored.length and stored.begin == start), default=start)
    if begin >= oldest:
        return ""
    found = shown(history)
    is_first = np.ones(len(found.rows), dtype=bool)
    is_first[1:] = (found.rows["topic"][1:] != found.rows["topic"][:-1]) | (
        found.rows["queue_id"][1:] != found.rows["queue_id"][:-1]
    )
    # What expired of such a queue may be newer than the archive, except where its end is known.
    known = {(int(row["topic"]), int(row["queue_id"]), int(row["offset"])) for row in ends}
    rows = found.rows[is_first & (found.begins > 0) & (found.rows["first_physical"] >= oldest)]
    rows = np.array(
        [row for row in rows if (int(row["topic"]), int(row["queue_id"]), int(row["offset"])) not in known], rows.dtype
    )
    return f"{len(rows)} queues (as {_queue(history, rows)}) begin later" if len(rows) else ""


def _queue(history: History, rows: np.ndarray) -> str:  # type: ignore[type-arg]
    return f"{history.topics[int(rows[0]['topic'])]}/{int(rows[0]['queue_id'])}"
