"""Ranges of messages that were read from the tier, kept in memory for the next reads.

A range is read once: all that want a message of it wait for the same fetch. Fetches and memory are divided between
consumer groups. Each group that waits has its turn, and may have half of the fetches under way. If memory is needed,
the group that uses most gives it, its least recently used range first: a group keeps its share, however much another
one reads. A range counts for the group that used it last. Memory of fetches under way counts too.

Source: the cache of RocketMQ's MessageStoreFetcherImpl, which has no groups and reads a range again for each reader.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from trimq.broker.store.tiered.access.ranges import MESSAGE_COST, Fetch, Group, Queue, Range, Ranges
from trimq.broker.store.tiered.access.timed_reads import TierHangsError, TimedReads
from trimq.remoting.runtime.clock import Clock

FETCHES: Final = 6
"""Fetches under way at the same time."""
FETCHES_OF_GROUP: Final = FETCHES // 2
_COPIES: Final = 2
"""A fetch holds the bytes that it has read and the records made of them."""
_GIVEN_BACK: Final = 16 * 1024 * 1024
"""No more than these bytes and one range expire together: to give them back can stop the loop for 3 ms."""
_LAST_PART: Final = 4
"""The next range is read once a reader is in the last quarter of a range."""


async def _keep_it() -> None:
    await trio.lowlevel.checkpoint()


class ReadAheadCache:
    """See above. Belongs to the event loop; ``run`` owns the tasks that read. Sizes in bytes, ``expire_ms`` in ms.

    ``limit`` bounds the memory of all ranges and fetches. A message so large that a fetch exceeds what was reserved for
    it is only known when it is there; it is given to those who wait, and kept if there is room. Without ``run``, each
    reader reads for itself and nothing is kept.
    """

    def __init__(
        self,
        clock: Clock,
        reads: TimedReads,
        limit: int,
        expire_ms: int,
        *,
        max_count: int,
        max_bytes: int,
        give_back: Callable[[], Awaitable[None]] = _keep_it,
    ) -> None:
        """``max_count`` and ``max_bytes``: the most messages and bytes of one range.

        ``give_back`` gives the memory of what has expired back to the system.
        """
        self._give_back = give_back
        self.limit = limit
        reserved = limit // FETCHES
        self.max_count = max(1, min(max_count, reserved // (2 * MESSAGE_COST) - 1))
        self._max_bytes = max(1, min(max_bytes, (reserved - MESSAGE_COST * (self.max_count + 1)) // _COPIES))
        self._clock = clock
        self._reads = reads
        self._expire = expire_ms / 1000
        self._queues: dict[Queue, Ranges] = {}
        self._groups: dict[str, Group] = {}
        self._turns: deque[Group] = deque()
        """Groups with fetches that have not started."""
        self._nursery: trio.Nursery | None = None
        self._running = 0
        self.bytes = 0
        """Memory of the ranges and of the fetches under way."""
        self.count = 0
        """Messages in memory."""
        self.accesses = 0
        self.hits = 0
        self.fetches = 0
        self.failures = 0

    # -- lifecycle

    async def run(self) -> None:
        """Own the fetches, and drop what expires, until it is cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                while True:
                    await self._clock.sleep(self._expire / 2)
                    while self.expire():
                        await self._give_back()
        finally:
            self._nursery = None
            for group in list(self._turns):
                for item in list(group.waiting):
                    self._finish(item, OSError("the tier is being closed"))

    # -- reads

    def get(self, group: str, queue: Queue, offset: int) -> Range | None:
        """The range with the message at ``offset`` if it is in memory. Counts as a use of it."""
        ranges = self._queues.get(queue)
        item = None if ranges is None else ranges.at(offset)
        if item is None or item.fetch is not None:
            return None
        now = self._clock.monotonic()
        if item.used + self._expire <= now:
            self._drop(item)
            return None
        self._use(item, group, now)
        return item

    def look(self, queue: Queue, offset: int) -> Range | None:
        """As ``get``, but it is no use of the range."""
        ranges = self._queues.get(queue)
        item = None if ranges is None else ranges.at(offset)
        return item if item is not None and item.fetch is None else None

    async def fetch(
        self, group: str, queue: Queue, offset: int, count: int, max_bytes: int | None = None, *, keep: bool = True
    ) -> Range:
        """The range with the message at ``offset``; it is read, up to ``count`` messages, if it is not in memory.

        ``max_bytes``: fewer bytes than usual. ``keep``: whether it stays in memory; it waits for its turn in any case.
        Raises OSError, LookupError: the read has failed. The next call tries again.
        """
        while True:
            item = self.get(group, queue, offset)
            if item is not None:
                return item
            if self._nursery is None:
                return await self._read_alone(queue, offset, min(count, self.max_count), self._bytes(max_bytes))
            ranges = self._queues.get(queue)
            item = None if ranges is None else ranges.at(offset)
            if item is None:
                item = self._request(group, queue, offset, count, max_bytes, keep=keep)
            await self._wait(item)
            if offset < item.end:
                if item.is_kept:
                    self._use(item, group, self._clock.monotonic())
                return item

    async def _wait(self, item: Range) -> None:
        fetch = item.fetch
        if fetch is None:
            return
        fetch.waiters += 1
        try:
            self._start_waiting()
            await fetch.done.wait()
        finally:
            fetch.waiters -= 1
            if not fetch.waiters and not fetch.is_started and item.fetch is fetch:
                self._finish(item, OSError("no task waits for it any more"))
        error = fetch.error
        if error is not None:
            # A new one for each waiter: an exception collects the frames of each task that it goes through.
            raise _kind_of(error)(*error.args) from error

    async def _read_alone(self, queue: Queue, offset: int, count: int, max_bytes: int) -> Range:
        item = Range(queue, offset, max(offset + 1, min(offset + count, queue.commit_offset)), Group(""), None)
        item.fill(await queue.read_messages(offset, item.end - offset, max_bytes))
        return item

    def advance(self, group: str, queue: Queue, begin: int, end: int, count: int) -> None:
        """A group has read [begin, end). If it reads one after the other, the next range may be read ahead.

        ``count``: the most messages of that range.
        """
        ranges = self._queues.get(queue)
        if ranges is None:
            return
        follows = ranges.readers.get(group) == begin
        ranges.readers[group] = end
        item = ranges.at(end - 1)
        if not follows or item is None or item.fetch is not None:
            return
        following = item.next_offset
        if end < item.end - (item.end - item.begin) // _LAST_PART or following >= queue.commit_offset:
            return
        if ranges.at(following) is None:
            self._read_ahead(group, queue, following, count)

    def _read_ahead(self, name: str, queue: Queue, offset: int, count: int) -> None:
        """Read a range that no task waits for yet, if that takes nothing from others."""
        group = self._group(name)
        if (
            self._nursery is None
            or self._turns
            or self._running >= FETCHES - 1
            or group.running >= FETCHES_OF_GROUP - 1
            or group.used + self._reservation(count) > self._share()
        ):
            self._forget(group)
            return
        item = self._request(name, queue, offset, count)
        self._start_waiting()
        fetch = item.fetch
        if fetch is not None and not fetch.is_started:
            self._finish(item, OSError("there is no memory to read ahead"))

    # -- fetches

    def _bytes(self, max_bytes: int | None) -> int:
        return self._max_bytes if max_bytes is None else max(1, min(max_bytes, self._max_bytes))

    def _reservation(self, count: int, max_bytes: int | None = None) -> int:
        return _COPIES * self._bytes(max_bytes) + MESSAGE_COST * (min(count, self.max_count) + 1)

    def _request(
        self, name: str, queue: Queue, offset: int, count: int, max_bytes: int | None = None, *, keep: bool = True
    ) -> Range:
        """A range that waits for its turn."""
        ranges = self._queues.setdefault(queue, Ranges())
        end = ranges.end_before(offset, min(offset + max(1, min(count, self.max_count)), queue.commit_offset))
        end = max(end, offset + 1)
        group = self._group(name)
        fetch = Fetch(end - offset, self._bytes(max_bytes), self._reservation(end - offset, max_bytes), keeps=keep)
        item = Range(queue, offset, end, group, fetch)
        ranges.add(item)
        if not group.waiting:
            self._turns.append(group)
        group.waiting.append(item)
        return item

    def _start_waiting(self) -> None:
        """Start fetches, one of each group in turn, as far as there are free ones and memory."""
        skipped = 0
        while self._nursery is not None and self._running < FETCHES and skipped < len(self._turns):
            group = self._turns.popleft()
            item = group.waiting[0]
            fetch = item.fetch
            assert fetch is not None  # a range waits only while it is fetched
            if group.running < FETCHES_OF_GROUP and self._make_room(group, fetch.reserved, must=not group.running):
                skipped = 0
                group.waiting.popleft()
                self._start(item, fetch, self._nursery)
            else:
                skipped += 1
            if group.waiting:
                self._turns.append(group)

    def _start(self, item: Range, fetch: Fetch, nursery: trio.Nursery) -> None:
        fetch.is_started = True
        item.owner.running += 1
        self._running += 1
        self._count_bytes(item.owner, fetch.reserved)
        self.fetches += 1
        nursery.start_soon(self._run_fetch, item, fetch)

    async def _run_fetch(self, item: Range, fetch: Fetch) -> None:
        error: Exception | None = OSError("the tier is being closed")
        try:
            read = item.queue.read_messages
            item.fill(await self._reads.read(item.queue, read, item.begin, fetch.count, fetch.max_bytes))
            error = None
        except (OSError, LookupError) as problem:
            error = problem
            self.failures += 1
        finally:
            item.owner.running -= 1
            self._running -= 1
            self._count_bytes(item.owner, -fetch.reserved)
            self._finish(item, error)

    def _finish(self, item: Range, error: Exception | None) -> None:
        """The fetch of a range has ended, or is given up before it started: keep the range or remove it."""
        fetch, group = item.fetch, item.owner
        if fetch is None:
            return
        item.fetch = None
        fetch.error = error
        fetch.done.set()
        if not fetch.is_started:
            group.waiting.remove(item)
            if not group.waiting:
                self._turns.remove(group)
        if error is None and fetch.keeps and item.size <= self.limit and self._make_room(group, item.size, must=True):
            item.is_kept = True
            item.used = self._clock.monotonic()
            group.ranges[item] = None
            self.count += len(item.messages)
            self._count_bytes(group, item.size)
        else:
            self._remove(item)
        self._forget(group)
        self._start_waiting()

    # -- memory

    def _share(self) -> int:
        return self.limit // max(1, len(self._groups))

    def _group(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name)
        return group

    def _forget(self, group: Group) -> None:
        if not group.ranges and not group.running and not group.waiting:
            self._groups.pop(group.name, None)

    def _count_bytes(self, group: Group, size: int) -> None:
        group.used += size
        self.bytes += size

    def _make_room(self, group: Group, size: int, *, must: bool) -> bool:
        """Drop ranges until a group can have ``size`` bytes more. False if that is not possible.

        Only its own ranges are dropped and those of groups with more than their share; with ``must`` also others, still
        of the group that uses most.
        """
        if self.bytes + size > self.limit:
            self.expire()
        while self.bytes + size > self.limit:
            most = -1
            victim = group
            for other in self._groups.values():
                used = other.used + size if other is group else other.used
                if other.ranges and used > most:
                    victim, most = other, used
            if most < 0 or not (must or victim is group or most > self._share()):
                return False
            self._drop(next(iter(victim.ranges)))
        # Its last range may just have been dropped.
        self._groups.setdefault(group.name, group)
        return True

    def expire(self) -> bool:
        """Drop ranges that no group has used for some time. Returns False if there are none; see _GIVEN_BACK."""
        before = self._clock.monotonic() - self._expire
        held = self.bytes
        for group in list(self._groups.values()):
            while group.ranges:
                item = next(iter(group.ranges))
                if item.used > before:
                    break
                self._drop(item)
                if held - self.bytes >= _GIVEN_BACK:
                    return True
        return self.bytes < held

    def _use(self, item: Range, name: str, now: float) -> None:
        """The range becomes the last used one of a group."""
        owner = item.owner
        del owner.ranges[item]
        if owner.name != name:
            self._count_bytes(owner, -item.size)
            self._forget(owner)
            item.owner = self._group(name)
            self._count_bytes(item.owner, item.size)
        item.owner.ranges[item] = None
        item.used = now

    def _drop(self, item: Range) -> None:
        item.is_kept = False
        del item.owner.ranges[item]
        self.count -= len(item.messages)
        self._count_bytes(item.owner, -item.size)
        self._remove(item)
        self._forget(item.owner)

    def _remove(self, item: Range) -> None:
        ranges = self._queues[item.queue]
        ranges.remove(item)
        if not ranges.ranges:
            del self._queues[item.queue]

    @property
    def groups(self) -> dict[str, int]:
        """The bytes that each group uses."""
        return {name: group.used for name, group in self._groups.items()}


def _kind_of(error: Exception) -> type[Exception]:
    return next((kind for kind in (TierHangsError, LookupError) if isinstance(error, kind)), OSError)


def cache_limit(memory: int, rate: float, most: int) -> int:
    """The bytes for the cache: a part of the memory of this process, up to ``most``."""
    return max(1, min(int(memory * rate), most))
