"""What the manifest of a broker in a bucket names: the stretches of its queues, as columns.

Only the root and its pages are read: what the root names is the table. Upload objects that no root names yet are not.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from trimq.pipeline.store.bucket import BucketError, BucketReader
from trimq.pipeline.store.files import StorePathError
from trimq.pipeline.store.heads import Array
from trimq.pipeline.store.options import StoreOptions
from trimq.protocol.bucket_manifest import (
    STRETCH,
    Entry,
    PageRef,
    Root,
    StoredObject,
    StretchRows,
    decode_page,
    decode_root,
)
from trimq.protocol.bucket_names import ROOT, broker_prefix
from trimq.protocol.bucket_object import BucketFormatError

ROWS: Final = STRETCH.newbyteorder("=")
_READS: Final = 4
"""How often a read begins again because the owner has deleted what an older root named."""
_THREADS: Final = 8


class History(NamedTuple):
    """What a root names of the selected queues.

    ``prefix`` stands before the names of the broker's objects. ``rows`` (of type ROWS) are all stretches; ``object``
    and ``topic`` in them are numbers in ``objects`` and ``topics``. An object of length 0 has expired: its stretches
    say where queues ended.
    """

    broker: str
    prefix: str
    root: Root
    objects: Sequence[StoredObject]
    topics: Sequence[str]
    rows: Array


class Shown(NamedTuple):
    """The messages that a table has of stretches: ``rows`` with ``begins`` and ``ends``, which are queue offsets."""

    rows: Array
    begins: Array
    ends: Array

    def take(self, which: Array) -> "Shown":
        """Some of them, selected by a mask or by numbers."""
        return Shown(self.rows[which], self.begins[which], self.ends[which])


def read_history(reader: BucketReader, broker: str, options: StoreOptions) -> History:
    """Read the manifest of a broker. Raises StorePathError if there is none, BucketError."""
    prefix = broker_prefix(reader.place.prefix, reader.place.cluster, broker)
    missing = ""
    for _ in range(_READS):
        root = _read_root(reader, prefix, broker)
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                pages = pool.map(partial(_read_page, reader, prefix, options), root.pages)
                return _history(broker, prefix, root, pages)
        except FileNotFoundError as error:  # the owner has replaced the root meanwhile
            missing = str(error)
    raise BucketError(f"the manifest names what is not there: {missing}. Restore it from a backup of the bucket")


def _read_root(reader: BucketReader, prefix: str, broker: str) -> Root:
    place = reader.place
    try:
        root = decode_root(reader.read(prefix + ROOT))
    except FileNotFoundError:
        raise StorePathError(
            f"{place.url} has no tier of broker {broker} in cluster {place.cluster}: there is no {prefix}{ROOT}"
        ) from None
    except BucketFormatError as error:
        raise _damaged(prefix + ROOT, error) from error
    if (root.cluster, root.broker) != (place.cluster, broker):
        raise BucketError(f"{prefix}{ROOT} is that of broker {root.broker} in cluster {root.cluster}")
    return root


def _damaged(name: str, error: BucketFormatError) -> BucketError:
    return BucketError(f"{name} in the bucket: {error}. Restore it from a backup of the bucket")


def _read_page(reader: BucketReader, prefix: str, options: StoreOptions, ref: PageRef) -> list[Entry]:
    """The entries of a page, with the stretches of selected queues only."""
    try:
        entries = decode_page(reader.read(prefix + ref.name))
    except BucketFormatError as error:
        raise _damaged(prefix + ref.name, error) from error
    if len(entries) != ref.objects:
        raise BucketError(f"{prefix}{ref.name} lists {len(entries)} objects, and the root says {ref.objects}")
    found = []
    for entry in entries:
        stretches = StretchRows.of(entry.stretches)
        # The entries of a page have one table of topics, but each may use only some.
        wanted = np.array([options.wants_topic(topic) for topic in stretches.topics], dtype=bool)
        rows = stretches.rows[wanted[stretches.rows["topic"]]] if len(stretches.rows) else stretches.rows
        if options.queue_ids:
            rows = rows[np.isin(rows["queue_id"], list(options.queue_ids))]
        found.append(Entry(entry.object, StretchRows(stretches.topics, rows)))
    return found


def _history(broker: str, prefix: str, root: Root, pages: Iterable[Sequence[Entry]]) -> History:
    objects: dict[StoredObject, int] = {}
    topics: dict[str, int] = {}
    found: list[Array] = []
    for entry in (entry for page in pages for entry in page):
        # The stretches of an object that did not fit one page are in several.
        number = objects.setdefault(entry.object, len(objects))
        stretches = StretchRows.of(entry.stretches)
        if len(stretches.rows):
            rows = stretches.rows.astype(ROWS)
            used, places = np.unique(rows["topic"], return_inverse=True)
            numbers = [topics.setdefault(stretches.topics[topic], len(topics)) for topic in used.tolist()]
            rows["topic"] = np.array(numbers, dtype=np.uint32)[places]
            rows["object"] = number
            found.append(rows)
    return History(broker, prefix, root, list(objects), list(topics), np.concatenate([np.empty(0, ROWS), *found]))


def shown(history: History) -> Shown:
    """The messages of each stretch that count, sorted by queue and offset.

    If stretches of a queue overlap, that of the greatest rank has the messages.
    """
    rows = history.rows[history.rows["messages"] > 0]
    rows = rows[np.lexsort((rows["offset"], rows["queue_id"], rows["topic"]))]
    whole = Shown(rows, rows["offset"].copy(), rows["offset"] + rows["messages"])
    if not len(rows):
        return whole
    same = (rows["topic"][1:] == rows["topic"][:-1]) & (rows["queue_id"][1:] == rows["queue_id"][:-1])
    if not (same & (whole.ends[:-1] > whole.begins[1:])).any():
        return whole
    overlap = np.append(same & (whole.ends[:-1] > whole.begins[1:]), False)
    starts = np.append(0, np.flatnonzero(~same) + 1)
    harmed = np.flatnonzero(np.add.reduceat(overlap, starts) > 0).tolist()
    limits = [*starts.tolist(), len(rows)]
    mine = np.zeros(len(rows), dtype=bool)
    parts: list[tuple[int, int, int]] = []
    for number in harmed:
        mine[limits[number] : limits[number + 1]] = True
        parts += _without_overlaps(history.objects, whole, range(limits[number], limits[number + 1]))
    which, begins, ends = (np.array(column, dtype=np.int64) for column in zip(*parts, strict=True))
    others = whole.take(~mine)
    return Shown(
        np.concatenate([others.rows, rows[which]]),
        np.concatenate([others.begins, begins]),
        np.concatenate([others.ends, ends]),
    )


def _without_overlaps(objects: Sequence[StoredObject], whole: Shown, queue: range) -> Iterator[tuple[int, int, int]]:
    """(row, begin, end) for all messages that the stretches of a queue show."""
    begins: list[int] = []
    stops: list[int] = []
    """What stretches of greater ranks have, ascending."""
    for row in sorted(queue, key=lambda row: objects[int(whole.rows["object"][row])].rank, reverse=True):
        at, end = int(whole.begins[row]), int(whole.ends[row])
        number = bisect_right(stops, at)
        while at < end:
            begin = min(begins[number], end) if number < len(begins) else end
            if at < begin:
                yield row, at, begin
                begins.insert(number, at)
                stops.insert(number, begin)
                number += 1
            at = stops[number] if number < len(stops) else end
            number += 1
