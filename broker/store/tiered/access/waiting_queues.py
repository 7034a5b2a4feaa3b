"""Which queues have messages that are not in the tier yet.

A queue says so when it gets its first unit since its last flush, and is looked at until it is flushed and has nothing
new. One that was there at the start is found by a scan: so a queue with nothing new is not looked at again.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Final, Generic, TypeVar

import trio

from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.tiered.access.batch import BatchBuilder
from trimq.broker.store.tiered.access.tier_parts import Backlog
from trimq.broker.store.tiered.container.tiered_queue import TieredQueue
from trimq.protocol.queue_unit import FILLER_SIZE

SLICE: Final = 500
"""Queues that are looked at in one turn of the event loop."""
_UNITS: Final = 4096

Key = tuple[str, int]
"""Topic and queue id."""


class Waiting:
    """A queue with messages that are not uploaded. ``since``: store time in ms of the oldest, or an earlier time."""

    __slots__ = ("queue", "since")

    def __init__(self, queue: ConsumeQueue, since: int) -> None:
        self.queue = queue
        self.since = since


W = TypeVar("W", bound=Waiting)


class WaitingQueues(Generic[W]):
    """See above. ``pending``: the queues that wait, in the order in which they began to."""

    def __init__(
        self,
        make: Callable[[ConsumeQueue, int], W],
        queues: ConsumeQueueStore,
        builder: BatchBuilder,
        find: Callable[[str, int], TieredQueue | None],
        *,
        excluded: Callable[[str], bool],
        wall_ms: Callable[[], int],
    ) -> None:
        """``make``: the class of ``pending``. ``find``: a queue of the tier. ``excluded``: if a topic stays local."""
        self.pending: dict[Key, W] = {}
        self.is_scanned = False
        """Whether the queues that had messages at the start have been looked at."""
        self._make = make
        self._queues = queues
        self._builder = builder
        self._find = find
        self._excluded = excluded
        self._wall_ms = wall_ms

    def note(self, queue: ConsumeQueue) -> bool:
        """A queue has got messages. Returns whether it waits only from now on."""
        key = queue.topic, queue.queue_id
        waiting = self.pending.get(key)
        # The queue of a deleted topic gives way to the one of a new topic of its name.
        if (waiting is not None and waiting.queue is queue) or self._excluded(queue.topic):
            return False
        self.pending[key] = self._make(queue, self._wall_ms())
        return True

    async def scan(self, has_new: Callable[[str, int], Awaitable[bool]]) -> None:
        """Find the queues that had messages before. ``has_new``: whether a queue of a topic has some to upload."""
        for number, (topic, ids) in enumerate(self._queues.topics().items()):
            if number % SLICE == SLICE - 1:
                await trio.lowlevel.checkpoint()
            if self._excluded(topic):
                continue
            for queue_id in ids:
                if await has_new(topic, queue_id):
                    queue = self._queues.find(topic, queue_id)
                    if queue is not None:
                        self.pending.setdefault((topic, queue_id), self._make(queue, 0))
        self.is_scanned = True

    def begin(self, queue: ConsumeQueue) -> int:
        """The first offset of a queue that is not uploaded, of those that are still there."""
        uploaded = self._find(queue.topic, queue.queue_id)
        return queue.min_offset if uploaded is None else max(uploaded.commit_offset, queue.min_offset)

    def backlogs(self) -> Iterator[Backlog]:
        """What waits in each queue that has something new."""
        for (topic, queue_id), waiting in list(self.pending.items()):
            messages = max(0, waiting.queue.next_offset - self.begin(waiting.queue))
            yield Backlog(topic, queue_id, messages, waiting.since)

    async def count(self, start: Callable[[], int], end: int) -> int:
        """The number of messages that wait between two log offsets; the first may grow meanwhile. Raises OSError."""
        count = 0
        for waiting in list(self.pending.values()):
            offset = self.begin(waiting.queue)
            while units := await self._builder.units(waiting.queue, offset, _UNITS):
                low = start()
                count += sum(low <= phy < end and size != FILLER_SIZE for phy, size, _ in units)
                offset += len(units)
                if units[-1][0] >= end:
                    break
        return count

    def drop_done(self, key: Key, waiting: W) -> bool:
        """Forget a queue if it has nothing new; return whether it has nothing new at the moment."""
        queue = waiting.queue
        if not queue.deleted:
            if self.begin(queue) < queue.next_offset:
                return False
            if queue.dirty:
                return True  # it can get units without ``note``: it is looked at until it is flushed
        if self.pending.get(key) is waiting:
            del self.pending[key]
        return True
