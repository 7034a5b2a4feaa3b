"""Log files that must not be deleted yet, because services of the broker still have to read messages in them.

Delayed messages, timers and half messages are pending in the log until a service stores them again. A log file that is
older than fileReservedTime stays while it holds one of them. Only when the disk is so full that files are deleted
forcibly (diskSpaceCleanForciblyRatio) are pending messages deleted with their file; they are counted.

RocketMQ does not hold such files: a message that is due later than fileReservedTime is lost there.
"""

from typing import Final, Protocol

import structlog

_log: Final = structlog.get_logger(__name__)


class PendingMessages(Protocol):
    """The messages in the log that one service still has to read."""

    @property
    def name(self) -> str:
        """What they are, in the plural, for texts and metrics."""
        ...

    async def lowest(self) -> int | None:
        """The lowest log offset of a pending message that is still in the log; None if there is none.

        Raises OSError.
        """
        ...

    async def count(self, start: int, end: int) -> int:
        """The number of pending messages whose records are in the log between ``start`` and ``end``. Raises OSError."""
        ...


class LogHolds:
    """The services that hold log files. ``deleted`` counts their messages that were deleted all the same, by name.

    ``files_held`` is the number of files that the last cleaning would have deleted without them.
    """

    def __init__(self) -> None:
        self._pending: list[PendingMessages] = []
        self._unknown: set[str] = set()  # names of those whose messages cannot be found at the moment
        self.deleted: dict[str, int] = {}
        self.files_held = 0

    def add(self, pending: PendingMessages) -> None:
        """Hold the files in which ``pending`` has messages."""
        self._pending.append(pending)
        self.deleted[pending.name] = 0

    async def lowest(self) -> int | None:
        """The lowest log offset that is still needed; None if no message is pending.

        All of the log is needed while the device does not give the place of a pending message.
        """
        found = [await self._lowest_of(pending) for pending in self._pending]
        return min((offset for offset in found if offset is not None), default=None)

    async def _lowest_of(self, pending: PendingMessages) -> int | None:
        try:
            lowest = await pending.lowest()
        except OSError as error:
            if pending.name not in self._unknown:
                self._unknown.add(pending.name)
                _log.error("pending_messages_not_found", what=pending.name, reason=str(error))
            return 0
        self._unknown.discard(pending.name)
        return lowest

    async def note_deletion(self, path: str, start: int, end: int) -> None:
        """Count the pending messages in a file that is about to be deleted forcibly."""
        for pending in self._pending:
            try:
                count = await pending.count(start, end)
            except OSError as error:
                _log.error("pending_messages_not_counted", path=path, what=pending.name, reason=str(error))
                continue
            if count:
                self.deleted[pending.name] += count
                _log.error("pending_messages_deleted", path=path, what=pending.name, count=count)
