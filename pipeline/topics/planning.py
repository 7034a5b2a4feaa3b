"""Plans a read: ranges of offsets from options and bounds, and tasks from ranges."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trimq.client.core import Client
from trimq.client.errors import NoBrokerError
from trimq.client.message import MessageQueue
from trimq.pipeline.options import OptionError
from trimq.pipeline.topics import places
from trimq.pipeline.topics.places import Bounds, Patience
from trimq.pipeline.topics.settings import EARLIEST, LATEST, Position, ReadSettings


class DataLossError(RuntimeError):
    """Messages to be read do not exist any more; the text says which, and what can be done."""


class Range(NamedTuple):
    """Messages of one queue: offsets in [begin, end)."""

    queue: MessageQueue
    begin: int
    end: int

    @property
    def size(self) -> int:
        """The number of offsets."""
        return self.end - self.begin


def missing_offsets(settings: ReadSettings, what: str) -> str | None:
    """Raises DataLossError with failOnDataLoss; else returns the text of a warning."""
    text = f"{what}. Messages were deleted before they were read (fileReservedTime, a deleted topic or a new store)"
    if settings.fail_on_data_loss:
        raise DataLossError(f"{text}; with failOnDataLoss=false the read continues with the messages that exist")
    return text


def replaced(settings: ReadSettings, queue: MessageQueue, what: str) -> str:
    """As ``missing_offsets``, for a queue that is not the one any more whose offsets are in the checkpoint."""
    text = (
        f"{name_of(queue)} (topic/broker/queue) {what}: the topic was deleted and created again, or the broker lost "
        "its newest messages or its store"
    )
    if settings.fail_on_data_loss:
        raise DataLossError(
            f"{text}. Nothing is read and the checkpoint is unchanged. To continue with the messages that exist now, "
            "use failOnDataLoss=false, which reads such a queue from its new begin, or a new checkpoint"
        )
    return text


async def known_bounds(client: Client, settings: ReadSettings) -> dict[MessageQueue, Bounds]:
    """The bounds of all selected queues. Waits for brokers that do not answer.

    Raises OptionError for a topic or queue that does not exist.
    """
    found = await places.persistently(
        Patience(settings.poll_timeout), lambda: _bounds(client, settings), also=NoBrokerError
    )
    for queue in settings.queues or ():
        if queue not in found:
            raise OptionError("queues", name_of(queue), f"queues that can be read; there are {_names(found)}")
    return found


async def _bounds(client: Client, settings: ReadSettings) -> dict[MessageQueue, Bounds]:
    found, missing = await places.routes(client, settings)
    if missing:
        topics = ", ".join(missing)
        if not (await places.cluster(client)).broker_addr_table:
            raise NoBrokerError(
                f"no broker is registered at {settings.servers.namesrv}, so there is no route for {topics}"
            )
        raise OptionError("topics", ",".join(settings.topics), f"topics that exist; no broker has {topics}")
    return await places.bounds(client, settings, found.values())


def name_of(queue: MessageQueue) -> str:
    """A queue as ``topic/broker/id``."""
    return f"{queue.topic}/{queue.broker_name}/{queue.queue_id}"


def _names(queues: Iterable[MessageQueue]) -> str:
    return ", ".join(name_of(queue) for queue in sorted(queues)) or "none"


async def resolve(
    client: Client,
    position: Position,
    option: str,
    found: Mapping[MessageQueue, Bounds],
    *,
    every_queue: bool = True,
) -> dict[MessageQueue, int]:
    """The offset of ``position`` in each queue.

    Raises OptionError for a table without an offset for some queue; with ``every_queue`` False such a queue is read
    from its begin.
    """
    if position.kind == "earliest":
        return {queue: bounds.first for queue, bounds in found.items()}
    if position.kind == "latest":
        return {queue: bounds.end for queue, bounds in found.items()}
    if position.kind == "time":
        return await places.at_time(client, found, position.time_ms)
    offsets = {}
    for queue, bounds in found.items():
        offset = position.table.get(queue, None if every_queue else EARLIEST)
        if offset is None:
            raise OptionError(option, "JSON", f"an offset for every queue; there is none for {name_of(queue)}")
        offsets[queue] = bounds.first if offset == EARLIEST else bounds.end if offset == LATEST else offset
    for queue in position.table:
        if queue not in found and every_queue:
            raise OptionError(option, "JSON", f"queues that can be read; {name_of(queue)} is none of {_names(found)}")
    return offsets


async def batch_ranges(client: Client, settings: ReadSettings) -> list[Range]:
    """The ranges of a batch read, without empty ones, in the order of their queues.

    Raises OptionError if an end is before its start, DataLossError for given offsets that do not exist.
    """
    found = await known_bounds(client, settings)
    starts = await resolve(client, settings.start, "startingOffsets", found)
    ends = await resolve(client, settings.end, "endingOffsets", found)
    ranges = []
    for queue, bounds in found.items():
        begin, end = starts[queue], ends[queue]
        # Ends from times or "latest" may lie before the start without any error in the options: an empty range.
        if begin > end and "table" in (settings.start.kind, settings.end.kind):
            name = name_of(queue)
            raise OptionError("startingOffsets", f"{begin} for {name}", f"an offset that is not after the end {end}")
        begin, end = within(settings, queue, begin, end, bounds)
        if begin < end:
            ranges.append(Range(queue, begin, end))
    return ranges


def within(settings: ReadSettings, queue: MessageQueue, begin: int, end: int, bounds: Bounds) -> tuple[int, int]:
    """The part of [begin, end) that the queue has. Raises DataLossError with failOnDataLoss if that is less."""
    if begin < min(bounds.first, end):
        missing_offsets(settings, f"{name_of(queue)} begins at {bounds.first}, offsets from {begin} were to be read")
        begin = min(bounds.first, end)
    if end > bounds.end:
        missing_offsets(settings, f"{name_of(queue)} ends at {bounds.end}, offsets up to {end} were to be read")
        end = max(begin, bounds.end)
    return begin, end


def split(ranges: list[Range], min_partitions: int | None) -> list[Range]:
    """At least ``min_partitions`` ranges, if there are so many messages: large ranges are cut into equal parts.

    >>> queue = MessageQueue(topic="T", broker_name="b", queue_id=0)
    >>> [(part.begin, part.end) for part in split([Range(queue, 0, 10)], 3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    total = sum(one.size for one in ranges)
    if min_partitions is None or len(ranges) >= min_partitions or not total:
        return ranges
    parts = []
    for one in ranges:
        # Rounded up: with shares rounded down there could be fewer tasks than requested.
        count = min(one.size, max(1, -(-one.size * min_partitions // total)))
        cuts = [one.begin + one.size * number // count for number in range(count + 1)]
        parts += [Range(one.queue, cuts[number], cuts[number + 1]) for number in range(count)]
    return parts
