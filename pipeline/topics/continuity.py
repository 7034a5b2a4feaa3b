"""Detects that a queue was replaced: that it is not the queue any more whose offsets are in the checkpoint.

A topic that is deleted and created again starts at offset 0. A broker whose disk lost its newest messages, or that got
an empty store, assigns their offsets to other messages. A stream that continued such a queue at the checkpoint's offset
would silently skip its first messages. There are two symptoms:

- The queue ends before the offset up to which it was read. A broker that is starting, or a slave that replaces its
  master for a time, may lag behind for a moment; ``Progress.bounds`` waits for that.
- The checkpoint has the store time of a message (``offsets.Seen``), and the queue has another message at that offset.
  This detects a replaced queue that has already grown past the old offset.

No state is carried from one run to the next: everything that is compared is in the checkpoint.
"""

from collections.abc import Mapping
from typing import Final

import structlog

from trimq.client.core import Client
from trimq.client.errors import RocketMQError, TopicNotFoundError
from trimq.client.message import MessageQueue
from trimq.pipeline.topics import places, session
from trimq.pipeline.topics.offsets import Positions, Seen, Sightings
from trimq.pipeline.topics.places import Bounds, Patience, is_passing
from trimq.pipeline.topics.planning import name_of, replaced
from trimq.pipeline.topics.settings import ReadSettings

CLOCKS_MS: Final = 60_000
"""The step back of a broker's clock up to which no message of a replaced queue is lost."""

_log = structlog.get_logger("pipeline")


def is_shorter(known: int, bound: Bounds) -> bool:
    """Whether a queue ends before the offset ``known``, up to which it was read."""
    return bound.end < known


def may_grow(bound: Bounds, seen: Seen | None) -> bool:
    """Whether a queue that is shorter than it was may only be lagging behind.

    It is not if it ends before the known message, and its last message is newer than that one.

    >>> may_grow(Bounds(0, 3, last_ms=2000), Seen(9, 1000))
    False
    """
    return seen is None or bound.end > seen.offset or bound.last_ms <= seen.time_ms


def others(
    settings: ReadSettings, seen: Mapping[MessageQueue, Seen], bounds: Mapping[MessageQueue, Bounds], patience: Patience
) -> tuple[dict[MessageQueue, int], set[MessageQueue]]:
    """Compare the messages at the known offsets with ``seen``.

    Returns the queues that have another message there, with its store time in ms, and the queues that cannot be
    compared now, because a broker does not answer. Raises RocketMQError if a broker refuses.
    """
    # Only offsets that the queue has: a message that expired proves nothing.
    wanted = {
        queue: known.offset
        for queue, known in seen.items()
        if queue in bounds and bounds[queue].first <= known.offset < bounds[queue].end
    }
    if not wanted:
        return {}, set()
    found = times(settings, wanted, patience)
    if found is None:
        return {}, set(wanted)
    return {queue: time_ms for queue, time_ms in found.items() if time_ms != seen[queue].time_ms}, set()


def times(settings: ReadSettings, wanted: Positions, patience: Patience) -> dict[MessageQueue, int] | None:
    """The store times of the messages at these offsets, as far as they exist; None if brokers do not answer."""

    async def ask(client: Client) -> dict[MessageQueue, int]:
        return await places.persistently(
            patience, lambda: places.store_times(client, settings, wanted), also=TopicNotFoundError
        )

    try:
        return session.ask(settings.servers, ask)
    except RocketMQError as error:
        if not (is_passing(error) or isinstance(error, TopicNotFoundError)):
            raise
        _log.warning("queues cannot be compared with the checkpoint now", reason=str(error))
        return None


def report_shorter(settings: ReadSettings, queue: MessageQueue, known: int, bound: Bounds) -> None:
    """Report that a queue ends before ``known``: a warning, or DataLossError with failOnDataLoss."""
    text = replaced(settings, queue, f"ends at {bound.end}, the stream has read it up to {known}")
    _log.warning("a queue is shorter than it was", reason=text)


def report_other(settings: ReadSettings, queue: MessageQueue, seen: Seen, time_ms: int, bound: Bounds) -> None:
    """Report that a queue has another message at a known offset: a warning, or DataLossError with failOnDataLoss."""
    what = (
        f"has another message at {seen.offset} than the stream has seen there (stored at {time_ms}, not "
        f"{seen.time_ms} ms); it is from {bound.first} to {bound.end} now"
    )
    _log.warning("a queue was replaced", reason=replaced(settings, queue, what))


def new_begins(settings: ReadSettings, bounds: Mapping[MessageQueue, Bounds], seen: Sightings) -> Positions:
    """The offsets from which replaced queues are read: their first messages.

    If the checkpoint has the time of a message, the messages since that time, less CLOCKS_MS: if the broker has only
    lost its last messages, most rows are not read a second time. Raises RocketMQError.
    """
    begins = {queue: bound.first for queue, bound in bounds.items()}
    dated = {queue: known.time_ms + 1 - CLOCKS_MS for queue, known in seen.items() if queue in bounds}
    if dated:
        patience = Patience(settings.poll_timeout)
        for queue, offset in session.ask(settings.servers, lambda client: _at_times(client, dated, patience)).items():
            # The offset was looked up after the bounds; it may lie outside of them if messages came or expired since.
            begins[queue] = min(bounds[queue].end, max(bounds[queue].first, offset))
    for queue, begin in sorted(begins.items()):
        _log.warning("a queue is read from a new begin", queue=name_of(queue), begin=begin, end=bounds[queue].end)
    return begins


async def _at_times(client: Client, wanted: Mapping[MessageQueue, int], patience: Patience) -> Positions:
    found: Positions = {}
    for queue, time_ms in wanted.items():
        found |= await places.persistently(
            patience,
            lambda queue=queue, time_ms=time_ms: places.at_time(client, [queue], time_ms),  # type: ignore[misc] # bound now
            also=TopicNotFoundError,
        )
    return found
