"""Plans a read of a bucket: divides the messages that its manifest names into parts that can be read in parallel.

Nothing but the manifest is read. What a part has are stretches of queues in objects: a large one is divided by its
queue offsets, and each of its blocks belongs to the part that has the block's first offset.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from trimq.pipeline.options import OptionError
from trimq.pipeline.store.bucket import BucketReader
from trimq.pipeline.store.heads import Array
from trimq.pipeline.store.history import History, Shown, read_history, shown
from trimq.pipeline.store.options import FAR, StoreOptions
from trimq.protocol.bucket_manifest import StoredObject
from trimq.protocol.bucket_object import BLOCK_BYTES

_REQUEST: Final = 512 << 10
"""What reading an object costs apart from its bytes, as bytes: a task must not have thousands of tiny objects."""


class BucketPiece(NamedTuple):
    """Stretches of one object, in the order of their positions.

    ``topics`` are those of ``stretches``. Of each only the messages with queue offsets in [begin, end) are read, and
    only those in blocks whose first offset is in [``low``, ``high``).
    """

    stored: StoredObject
    topics: tuple[str, ...]
    stretches: Shown
    low: int = 0
    high: int = FAR


class BucketPart(NamedTuple):
    """What one task reads: of the objects of one broker, whose names begin with ``prefix``."""

    broker: str
    prefix: str
    pieces: tuple[BucketPiece, ...]


def plan_bucket(options: StoreOptions) -> list[BucketPart]:
    """Plan the read of a bucket. Raises StorePathError, BucketError, OptionError."""
    assert options.bucket is not None
    reader = BucketReader(options.bucket)
    brokers = reader.chosen_brokers()
    of_one = (
        ("startingPosition", options.starting_position > 0),
        ("endingPosition", options.ending_position < FAR),
        ("startingOffsets", bool(options.starting_offsets)),
        ("endingOffsets", bool(options.ending_offsets)),
    )
    for name, is_given in of_one:
        if is_given and len(brokers) > 1:
            raise OptionError("broker", ",".join(options.bucket.brokers) or None, f"one broker, with {name}")
    parts: list[BucketPart] = []
    for broker in brokers:
        parts += plan_history(read_history(reader, broker, options), options)
    return parts


def plan_history(history: History, options: StoreOptions) -> Iterator[BucketPart]:
    """The parts of one broker, in log order."""
    held: list[BucketPiece] = []
    size = 0
    for piece, cost in _pieces(history, _selected(history, options), options.split_size):
        if held and (not options.split_size or size + cost > options.split_size):
            yield BucketPart(history.broker, history.prefix, tuple(held))
            held, size = [], 0
        held.append(piece)
        size += cost + _REQUEST
    if held:
        yield BucketPart(history.broker, history.prefix, tuple(held))


def _selected(history: History, options: StoreOptions) -> Shown:
    """The messages that the options may select, as far as the manifest says."""
    found = shown(history)
    rows = found.rows
    wanted = (rows["end_ms"] >= options.starting_time) & (rows["begin_ms"] <= options.ending_time)
    wanted &= (rows["last_physical"] >= options.starting_position) & (rows["first_physical"] < options.ending_position)
    for limits, ends, pick in (
        (options.starting_offsets, found.begins, np.maximum),
        (options.ending_offsets, found.ends, np.minimum),
    ):
        for (topic, queue_id), offset in limits.items():
            if topic in history.topics:
                mine = (rows["topic"] == history.topics.index(topic)) & (rows["queue_id"] == queue_id)
                ends[mine] = pick(ends[mine], offset)
    return found.take(wanted & (found.begins < found.ends))


def _pieces(history: History, found: Shown, split_size: int) -> Iterator[tuple[BucketPiece, int]]:
    """Pieces in log order, each with the approximate number of bytes that are read for it."""
    if not len(found.rows):
        return
    ranks = {number: rank for rank, number in enumerate(_in_log_order(history))}
    place = np.array([ranks[number] for number in range(len(history.objects))])[found.rows["object"]]
    found = found.take(np.lexsort((found.rows["position"], place)))
    number = found.rows["object"]
    starts = np.append(0, np.flatnonzero(number[1:] != number[:-1]) + 1)
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(number)], strict=True):
        stored = history.objects[int(number[first])]
        own = found.take(np.arange(first, last))
        large = own.rows["size"] > max(split_size, BLOCK_BYTES) if split_size else np.zeros(last - first, dtype=bool)
        for row in np.flatnonzero(large).tolist():
            yield from _divided(history, stored, own.take(np.array([row])), split_size)
        small = own.take(~large)
        # Many small stretches in one object: each group of them is read by one task.
        group = np.cumsum(small.rows["size"]) // split_size if split_size else np.zeros(len(small.rows), dtype=np.int64)
        cuts = np.append(0, np.flatnonzero(group[1:] != group[:-1]) + 1)
        for begin, end in zip(cuts.tolist(), [*cuts[1:].tolist(), len(group)], strict=True):
            if begin < end:
                some = small.take(np.arange(begin, end))
                yield _piece(history, stored, some), int(some.rows["size"].sum())


def _in_log_order(history: History) -> list[int]:
    objects = history.objects
    return sorted(range(len(objects)), key=lambda at: (objects[at].begin, objects[at].generation, objects[at].number))


def _divided(history: History, stored: StoredObject, one: Shown, split_size: int) -> Iterator[tuple[BucketPiece, int]]:
    """A large stretch in pieces. Where its blocks begin is not known: their first offsets decide."""
    row = one.rows[0]
    size, first, messages = int(row["size"]), int(row["offset"]), int(row["messages"])
    count = min(-(-size // split_size), int(row["blocks"]))
    for number in range(count):
        low, high = first + messages * number // count, first + messages * (number + 1) // count
        yield _piece(history, stored, one, low, high), size // count


def _piece(history: History, stored: StoredObject, stretches: Shown, low: int = 0, high: int = FAR) -> BucketPiece:
    used, places = np.unique(stretches.rows["topic"], return_inverse=True)
    rows: Array = stretches.rows.copy()
    rows["topic"] = places
    topics = tuple(history.topics[topic] for topic in used.tolist())
    return BucketPiece(stored, topics, Shown(rows, stretches.begins, stretches.ends), low, high)
