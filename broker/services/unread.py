"""The oldest log position that a group with members has yet to read. The store keeps the log after it in memory.

It is needed only while the log recycles the memory of its old part for new messages
(broker/store/log/page_recycling.py). It is then computed about once a second, in slices, so the value may be that old.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Final

import trio

from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.offsets import NOT_FOUND, SEPARATOR, ConsumerOffsetManager
from trimq.remoting.runtime.clock import Clock

INTERVAL_SECONDS: Final = 1.0
_SLICE: Final = 64
"""Queues that are looked up before other tasks run: about half a millisecond."""
_SHARE: Final = 20
"""Computing the position takes at most this fraction (1/20) of the time."""

LookUnits = Callable[[str, int, int, int], list[tuple[int, int, int]] | None]


class UnreadPositions:
    """The log position of the slowest group that has members.

    A group without members does not count, nor does one in a queue that it never pulled from or committed to.
    """

    def __init__(
        self, consumers: ConsumerManager, offsets: ConsumerOffsetManager, look_units: LookUnits, clock: Clock
    ) -> None:
        """``look_units``: as MessageStore.look_units."""
        self._consumers = consumers
        self._offsets = offsets
        self._look = look_units
        self._clock = clock
        self._oldest = 0
        self._requested = trio.Event()

    def oldest(self) -> int:
        """The log offset from which on some group has yet to read; ``sys.maxsize`` if all groups have read everything.

        0 while it is not known: then nothing counts as read. Never waits; a call starts the next computation.
        """
        self._requested.set()
        return self._oldest

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Recompute the position while ``oldest`` is called."""
        task_status.started()
        while True:
            await self._requested.wait()
            self._requested = trio.Event()
            began = self._clock.monotonic()
            self._oldest = await self._find()
            took = self._clock.monotonic() - began
            await self._clock.sleep(max(INTERVAL_SECONDS, _SHARE * took))
            if not self._requested.is_set():
                self._oldest = 0  # no call in this interval: the value would be stale at the next one

    async def _find(self) -> int:
        oldest = sys.maxsize
        looked = 0
        for group, info in list(self._consumers.table.items()):
            for topic in list(info.subscriptions):
                for queue_id, offset in list(self._read_up_to(group, topic)):
                    looked += 1
                    if looked % _SLICE == 0:
                        await trio.lowlevel.checkpoint()
                    oldest = min(oldest, self._place(topic, queue_id, offset))
        return oldest

    def _read_up_to(self, group: str, topic: str) -> Iterator[tuple[int, int]]:
        """The queues that a group reads, each with the first offset that was not sent to it yet."""
        key = f"{topic}{SEPARATOR}{group}"
        pulled = self._offsets.pull_offset_table.get(key, {})
        for queue_id in pulled.keys() | self._offsets.offset_table.get(key, {}).keys():
            offset = self._offsets.query_pull(group, topic, queue_id)
            if offset != NOT_FOUND:
                yield queue_id, offset

    def _place(self, topic: str, queue_id: int, offset: int) -> int:
        """The log offset of a queue's message; ``sys.maxsize`` if there is none, 0 if it cannot be determined."""
        try:
            units = self._look(topic, queue_id, offset, 1)
        except OSError:
            return 0
        if units is None:
            return 0
        return units[0][0] if units else sys.maxsize
