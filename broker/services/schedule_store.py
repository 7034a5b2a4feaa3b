"""The part of the message store that delayed messages use."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import GetMessageResult, MessageFilter, PutCallback, PutMessageResult

Unit = tuple[int, int, int]
"""(log offset, size, due time in ms since the epoch) of a delayed message."""


class ScheduleStore(Protocol):
    """The part of the message store that ScheduleMessageService uses."""

    @property
    def put_message(self) -> Callable[[MessageInner, PutCallback], PutMessageResult | None]:
        """Store a message; None if the result comes by the callback."""
        ...

    @property
    def look_units(self) -> Callable[[str, int, int, int], list[Unit] | None]:
        """(topic, queue id, offset, count): units from the offset on; None if they are not in memory."""
        ...

    @property
    def queue_units(self) -> Callable[[str, int, int, int], Awaitable[list[Unit]]]:
        """The same for units that have to be read from the disk."""
        ...

    @property
    def get_message(self) -> Callable[[str, int, int, int, int, MessageFilter | None], GetMessageResult | None]:
        """(topic, queue id, offset, max count, max bytes, filter): None if the records are not in memory."""
        ...

    @property
    def get_message_cold(
        self,
    ) -> Callable[[str, int, int, int, int, MessageFilter | None], Awaitable[GetMessageResult]]:
        """The same for records that have to be read from the disk."""
        ...

    @property
    def indexes_tags(self) -> bool:
        """Whether the keys of a message have to include its tag."""
        ...

    @property
    def flushed_offset(self) -> int:
        """Everything below is on the device."""
        ...

    async def flush(self) -> bool:
        """Make the log durable. False if the device refused."""
        ...

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The smallest offset of a queue that still exists."""
        ...

    def max_offset(self, topic: str, queue_id: int) -> int:
        """The offset behind the last readable message of a queue."""
        ...

    def next_offset(self, topic: str, queue_id: int) -> int:
        """The offset that the next message of a queue will get."""
        ...
