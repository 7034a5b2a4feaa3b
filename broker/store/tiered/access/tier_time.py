"""Finds a message of the tier by its store time. The queue narrows the search, so that few records are read."""

from collections.abc import Awaitable, Callable

from trimq.broker.store.tiered.container.tiered_queue import TieredQueue


async def first_stored_from(
    queue: TieredQueue, first: int, end: int, later: int, time_of: Callable[[int], Awaitable[int]]
) -> int:
    """The first offset in [first, end) of a message stored at ``later`` (ms) or after it; ``end`` if there is none.

    ``time_of`` gives the store time at an offset, -1 if it has no message: then the next one that has a time counts.
    Raises OSError.
    """
    low, high = await queue.narrow(first, end, later)
    while low < high:
        middle = (low + high) // 2
        at, time = middle, -1
        while at < high and time < 0:
            following = queue.behind_gap(at)
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
