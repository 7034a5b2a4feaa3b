"""PendingTimers: the messages in the timer wheel, as far as the cleaner has to know them."""

from typing import Final

from trimq.broker.store.message_store import TimerStore

TIMED_MESSAGES: Final = "timed messages"
"""Of those in the wheel, and of those in the timer's queue that are not in it yet."""


class PendingTimers:
    """Implements log_holds.PendingMessages."""

    name = TIMED_MESSAGES

    def __init__(self, timers: TimerStore) -> None:
        self._timers = timers

    async def lowest(self) -> int | None:
        """The log offset of the first message that may be pending; None if no message waits."""
        return self._timers.lowest_offset()

    async def count(self, start: int, end: int) -> int:
        """The number of waiting messages whose records are in the log between ``start`` and ``end``."""
        return await self._timers.count_between(start, end)
