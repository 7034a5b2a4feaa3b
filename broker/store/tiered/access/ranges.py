"""What the cache of the tier consists of: ranges of messages, the fetches that bring them, and who uses them."""

from bisect import bisect_right
from collections import deque
from typing import Final, Protocol

import trio

from trimq.broker.store.tiered.container.message_runs import Fetched, Messages

MESSAGE_COST: Final = 256
"""Bytes of memory of a message besides its record."""


class Queue(Protocol):
    """What ranges are read from: see TieredQueue."""

    @property
    def commit_offset(self) -> int:
        """Behind the last message."""
        ...

    async def read_messages(self, offset: int, count: int, max_bytes: int) -> Fetched:
        """See TieredQueue."""
        ...


class Range:
    """Messages of the queue offsets [begin, end); some offsets may have none. ``next_offset``: where to continue.

    ``fetch`` is set until the messages are there: until then ``end`` is the end that was requested.
    """

    __slots__ = ("begin", "end", "fetch", "is_kept", "messages", "next_offset", "owner", "queue", "size", "used")

    def __init__(self, queue: Queue, begin: int, end: int, owner: "Group", fetch: "Fetch | None") -> None:
        self.queue = queue
        self.begin = begin
        self.end = self.next_offset = end
        self.owner = owner
        self.fetch = fetch
        self.messages = Messages()
        self.size = 0
        self.used = 0.0
        self.is_kept = False

    def fill(self, fetched: Fetched) -> None:
        """Take the messages. Raises OSError if the queue has given nothing."""
        if fetched.next_offset <= self.begin:
            raise OSError(f"nothing could be read at offset {self.begin}")
        self.messages, self.next_offset = fetched
        self.end = min(self.end, self.next_offset)
        self.size = self.messages.size + MESSAGE_COST * (1 + len(self.messages))


class Fetch:
    """A range that is waited for. ``reserved``: the memory that counts for it while it is under way.

    ``keeps``: whether its messages stay in memory.
    """

    __slots__ = ("count", "done", "error", "is_started", "keeps", "max_bytes", "reserved", "waiters")

    def __init__(self, count: int, max_bytes: int, reserved: int, *, keeps: bool) -> None:
        self.keeps = keeps
        self.count = count
        self.max_bytes = max_bytes
        self.reserved = reserved
        self.done = trio.Event()
        self.error: Exception | None = None
        self.is_started = False
        self.waiters = 0


class Group:
    """A consumer group: its ranges, the least recently used first, its fetches, and the bytes of both."""

    __slots__ = ("name", "ranges", "running", "used", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ranges: dict[Range, None] = {}
        self.waiting: deque[Range] = deque()
        self.running = 0
        self.used = 0


class Ranges:
    """Ranges of one queue, disjoint and in order. ``readers``: where each group's last read has ended."""

    __slots__ = ("begins", "ranges", "readers")

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.ranges: list[Range] = []
        self.readers: dict[str, int] = {}

    def at(self, offset: int) -> Range | None:
        """The range with an offset."""
        index = bisect_right(self.begins, offset) - 1
        return self.ranges[index] if index >= 0 and offset < self.ranges[index].end else None

    def end_before(self, offset: int, end: int) -> int:
        """``end``, or where the next range behind ``offset`` begins."""
        index = bisect_right(self.begins, offset)
        return min(end, self.begins[index]) if index < len(self.begins) else end

    def add(self, item: Range) -> None:
        """Insert a range."""
        index = bisect_right(self.begins, item.begin)
        self.begins.insert(index, item.begin)
        self.ranges.insert(index, item)

    def remove(self, item: Range) -> None:
        """Remove a range."""
        index = bisect_right(self.begins, item.begin) - 1
        del self.begins[index], self.ranges[index]
