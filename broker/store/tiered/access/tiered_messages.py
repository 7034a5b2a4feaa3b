"""Holds the log for messages that are not uploaded: the cleaner keeps their files (LogHolds)."""

from trimq.broker.store.tiered.access.dispatcher import MessageStoreDispatcher


class TieredMessages:
    """The messages that are not uploaded yet, as LogHolds asks for them: their log files are kept."""

    name = "messages that are not in the tier"

    def __init__(self, dispatcher: MessageStoreDispatcher) -> None:
        self._dispatcher = dispatcher

    async def lowest(self) -> int | None:
        """See PendingMessages. Raises OSError."""
        return await self._dispatcher.lowest_waiting()

    async def count(self, start: int, end: int) -> int:
        """See PendingMessages. Raises OSError."""
        return await self._dispatcher.count_waiting(start, end)
