"""Finds a message of the tier by its store time. Times of segments narrow the search, so that few records are read."""

from collections.abc import Awaitable, Callable

from trimq.broker.store.tiered.container.flat_message_file import FlatMessageFile
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.tiered_layout import UNSET_TIME


async def first_stored_from(
    file: FlatMessageFile, first: int, end: int, later: int, time_of: Callable[[int], Awaitable[int]]
) -> int:
    """The first offset in [first, end) of a message stored at ``later`` (ms) or after it; ``end`` if there is none.

    ``time_of`` gives the store time at an offset, -1 if it has no message: then the next one that has a time counts.
    Raises OSError.
    """
    low, high = _narrowed(file, first, end, later)
    while low < high:
        middle = (low + high) // 2
        at, time = middle, -1
        while at < high and time < 0:
            following = _behind_gap(file, at)
            if following > at:
                at = following
                continue
            time = await time_of(at)
            at += 1
        if time < 0 or time >= later:
            high = middle
        else:
            low = at
    return low


def _narrowed(file: FlatMessageFile, low: int, high: int, later: int) -> tuple[int, int]:
    """Where the search begins and ends, by the times of the segments."""
    segments = file.consume_queue.segments
    for number, segment in enumerate(segments):
        if segment.min_timestamp == UNSET_TIME:
            continue
        if segment.min_timestamp >= later:
            return low, max(low, min(high, segment.base_offset // UNIT_SIZE))
        # The end time of the last segment may be an old one: it is saved with the next change of the metadata.
        if number + 1 < len(segments) and segment.max_timestamp < later:
            low = max(low, min(high, segment.commit_offset // UNIT_SIZE))
    return low, high


def _behind_gap(file: FlatMessageFile, offset: int) -> int:
    """``offset``, or where the segment behind begins if it is in a gap."""
    if file.consume_queue.segment_at(offset * UNIT_SIZE) is not None:
        return offset
    bases = [segment.base_offset // UNIT_SIZE for segment in file.consume_queue.segments]
    return min((base for base in bases if base > offset), default=file.commit_offset)
