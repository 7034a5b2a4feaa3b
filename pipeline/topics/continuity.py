"""Whether a queue is still the one that a checkpoint speaks of.

A topic that is deleted and made anew begins at offset 0 again; a broker whose disk lost its newest messages, or that
was given an empty store, gives their offsets to other ones. Read on from the checkpoint's offset, such a queue would
lack its first messages, and nobody would be told. Two things show it:

- The queue ends before the offset up to which it was read. A broker that is starting, or a slave that stands in for its
  master, may be behind for a moment: that is waited for, see ``Progress.bounds``.
- The checkpoint knows the store time of a message (``offsets.Seen``), and the queue has another message at its offset.
  So it is seen too where the new queue has grown past the old offset.

Nothing here needs memory from one run to the next: all that is compared is in the checkpoint.
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
"""By how much a broker's clock may have gone back, so that no message of a queue that was made anew is left out."""

_log = structlog.get_logger("pipeline")


def is_shorter(known: int, bound: Bounds) -> bool:
    """Whether a queue ends before what is known of it."""
    return bound.end < known


def may_grow(bound: Bounds, seen: Seen | None) -> bool:
    """Whether a queue that is shorter than it was may only be behind.

    Not one that ends in front of a message that is known, and has a newer one than that.

    >>> may_grow(Bounds(0, 3, last_ms=2000), Seen(9, 1000))
    False
    """
    return seen is None or bound.end > seen.offset or bound.last_ms <= seen.time_ms


def others(
    settings: ReadSettings, seen: Mapping[MessageQueue, Seen], bounds: Mapping[MessageQueue, Bounds], patience: Patience
) -> tuple[dict[MessageQueue, int], set[MessageQueue]]:
    """Queues whose message at the known offset is another one, with its store time; those of which nobody can tell now.

    Raises RocketMQError for a refusal.
    """
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
    """Store times of the messages at these offsets, as far as they are there; None where brokers do not answer."""

    async def ask(client: Client) -> dict[MessageQueue, int]:
        return await places.persistently(
            patience, lambda: places.store_times(client, settings, wanted), also=TopicNotFoundError
        )

    try:
        return session.ask(settings.namesrv, ask)
    except RocketMQError as error:
        if not (is_passing(error) or isinstance(error, TopicNotFoundError)):
            raise
        _log.warning("queues cannot be compared with the checkpoint now", reason=str(error))
        return None


def tell_shorter(settings: ReadSettings, queue: MessageQueue, known: int, bound: Bounds) -> None:
    """Raises DataLossError where the table asks for that; else tells it."""
    text = replaced(settings, queue, f"ends at {bound.end}, the stream has read it up to {known}")
    _log.warning("a queue is shorter than it was", reason=text)


def tell_other(settings: ReadSettings, queue: MessageQueue, seen: Seen, time_ms: int, bound: Bounds) -> None:
    """Raises DataLossError where the table asks for that; else tells it."""
    what = (
        f"has another message at {seen.offset} than the stream has seen there (stored at {time_ms}, not "
        f"{seen.time_ms} ms); it is from {bound.first} to {bound.end} now"
    )
    _log.warning("a queue is not the one that was read", reason=replaced(settings, queue, what))


def new_begins(settings: ReadSettings, bounds: Mapping[MessageQueue, Bounds], seen: Sightings) -> Positions:
    """Where queues are read from that were made anew or lost their end: from their first message.

    Where the checkpoint knows the time of a message, from the messages since then, so that rows do not come twice for a
    broker that has lost its last messages only. Raises RocketMQError.
    """
    begins = {queue: bound.first for queue, bound in bounds.items()}
    dated = {queue: known.time_ms + 1 - CLOCKS_MS for queue, known in seen.items() if queue in bounds}
    if dated:
        patience = Patience(settings.poll_timeout)
        for queue, offset in session.ask(settings.namesrv, lambda client: _at_times(client, dated, patience)).items():
            begins[queue] = min(bounds[queue].end, max(bounds[queue].first, offset))
    for queue, begin in sorted(begins.items()):
        _log.warning("a queue is read again", queue=name_of(queue), begin=begin, end=bounds[queue].end)
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
