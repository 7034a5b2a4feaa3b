"""From where on groups that have members have yet to read the log: the store keeps that in memory while it can.

Only asked for while the log takes its memory for new messages out of its old part (broker/store/log/page_recycling.py),
and then worked out about once a second, in slices: the answer is from then.
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
"""Queues looked up before others have their turn: about half a millisecond."""
_SHARE: Final = 20
"""A look takes at most one part in so many of the time."""

LookUnits = Callable[[str, int, int, int], list[tuple[int, int, int]] | None]


class UnreadPositions:
    """The place in the log that the slowest group with members has come to.

    A group that has no members now, or has never pulled from a queue nor committed an offset there, does not count.
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
        self._asked = trio.Event()

    def oldest(self) -> int:
        """Log offset from which on some group has yet to read; ``sys.maxsize`` where all have read everything.

        0 while that is not known. Never waits.
        """
        self._asked.set()
        return self._oldest

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the answer fresh while somebody asks."""
        task_status.started()
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            began = self._clock.monotonic()
            self._oldest = await self._find()
            took = self._clock.monotonic() - began
            await self._clock.sleep(max(INTERVAL_SECONDS, _SHARE * took))
            if not self._asked.is_set():
                self._oldest = 0

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
        """Queues that a group reads, each with the offset of what it has not been sent yet."""
        key = f"{topic}{SEPARATOR}{group}"
        pulled = self._offsets.pull_offset_table.get(key, {})
        for queue_id in pulled.keys() | self._offsets.offset_table.get(key, {}).keys():
            offset = self._offsets.query_pull(group, topic, queue_id)
            if offset != NOT_FOUND:
                yield queue_id, offset

    def _place(self, topic: str, queue_id: int, offset: int) -> int:
        """Where in the log a queue's message lies; ``sys.maxsize`` where there is none, 0 where nobody can say."""
        try:
            units = self._look(topic, queue_id, offset, 1)
        except OSError:
            return 0
        if units is None:
            return 0
        return units[0][0] if units else sys.maxsize
