"""Holds the log for messages that are not uploaded: the cleaner keeps their files (LogHolds)."""

from trimq.broker.store.tiered.access.tier_parts import TierUploads


class TieredMessages:
    """The messages that are not uploaded yet, as LogHolds asks for them: their log files are kept."""

    name = "messages that are not in the tier"

    def __init__(self, uploads: TierUploads) -> None:
        self._uploads = uploads

    async def lowest(self) -> int | None:
        """See PendingMessages. Raises OSError."""
        return await self._uploads.lowest_waiting()

    async def count(self, start: int, end: int) -> int:
        """See PendingMessages. Raises OSError."""
        return await self._uploads.count_waiting(start, end)
