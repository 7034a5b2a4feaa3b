"""What a tier has besides its queues, whatever keeps it."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.tiered_index_batch import KeyItems


class Backlog(NamedTuple):
    """The messages of a queue that wait for their upload.

    ``since``: store time in ms of the oldest, or an earlier time; 0 if it was there at the start.
    """

    topic: str
    queue_id: int
    messages: int
    since: int


class TierUploads(Protocol):
    """What copies messages to the tier: MessageStoreDispatcher, BucketUploads."""

    config: TieredStoreConfig
    messages: int
    bytes: int
    failures: int
    skipped: int
    """Messages that were deleted before they were uploaded."""

    @property
    def behind(self) -> int:
        """The number of messages that wait for their upload."""
        ...

    def backlogs(self) -> Iterator[Backlog]:
        """What waits in each queue that has something new."""
        ...

    async def lowest_waiting(self) -> int | None:
        """The lowest log offset of a message that is not uploaded; None if all are. Raises OSError."""
        ...

    async def count_waiting(self, start: int, end: int) -> int:
        """The number of such messages between two log offsets. Raises OSError."""
        ...


class KeyIndex(Protocol):
    """Where keys are put (IndexStoreService)."""

    @property
    def waiting(self) -> int:
        """The number of keys that are in no file yet."""
        ...

    def put_items(self, topic_id: int, queue_id: int, items: KeyItems, end: int) -> None:
        """Put the keys of the messages of a queue up to a stream position; there may be none."""
        ...

    async def fill(self) -> None:
        """Put the keys that wait into the file. Raises OSError if there is no space for them."""
        ...
