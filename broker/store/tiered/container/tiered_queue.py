"""What reads of the tier need of its queues, whatever holds these: segments of a provider, or objects of a bucket."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from trimq.broker.store.tiered.container.message_runs import Fetched
from trimq.broker.store.tiered.driver.provider_stats import CallStats
from trimq.broker.tiered_config import TieredStoreConfig


class TieredQueue(Protocol):
    """A queue in the tier: FlatMessageFile, BucketQueue."""

    @property
    def topic(self) -> str:
        """Its topic."""
        ...

    @property
    def queue_id(self) -> int:
        """Its number in the topic."""
        ...

    @property
    def min_offset(self) -> int:
        """The first message that can be read."""
        ...

    @property
    def commit_offset(self) -> int:
        """Behind the last message that can be read."""
        ...

    @property
    def uploaded(self) -> int:
        """Messages uploaded since the start."""
        ...

    @property
    def oldest_ms(self) -> int:
        """Store time in ms of the first message; UNSET_TIME if there is none."""
        ...

    @property
    def newest_ms(self) -> int:
        """The largest store time in ms of a message, as far as it is known without reading; or UNSET_TIME."""
        ...

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of all records and of all units."""
        ...

    async def read_messages(self, offset: int, count: int, max_bytes: int) -> Fetched:
        """Messages from ``offset`` on: at least one if there is one, at most ``count``, together up to ``max_bytes``.

        Damaged records are skipped, and so is a gap. Raises LookupError outside [min_offset, commit_offset), OSError.
        """
        ...

    async def store_time(self, offset: int) -> int:
        """Store time in ms of a message; -1 if there is none. Raises OSError."""
        ...

    async def read_record(self, position: int, size: int) -> bytes | None:
        """The record that an entry of the index names; None if it is not there or is another one. Raises OSError.

        ``position``: in the queue's stream, or in the log, as what wrote the entry counts.
        """
        ...

    def has_physical(self, physical: int) -> bool:
        """Whether the queue may have the record of a log offset, as far as that is known without reading."""
        ...

    async def read_physical(self, physical: int) -> bytes | None:
        """The record that had an offset in the log; None if this queue has none. Raises OSError."""
        ...

    async def narrow(self, first: int, end: int, later: int) -> tuple[int, int]:
        """Where a search has to look for the first message of [first, end) stored at ``later`` (ms) or after it.

        If the result is one offset twice, that is what the search finds. Raises OSError.
        """
        ...

    def behind_gap(self, offset: int) -> int:
        """``offset``, or the next one that may have a message if it is in a gap."""
        ...


class TieredQueues(Protocol):
    """The queues of a broker in the tier."""

    config: TieredStoreConfig

    def find(self, topic: str, queue_id: int) -> TieredQueue | None:
        """The queue; None if nothing of it was uploaded."""
        ...

    def topic_id(self, topic: str) -> int | None:
        """The number of a topic in the index; None if nothing of it was uploaded."""
        ...

    def all(self) -> Iterator[TieredQueue]:
        """Every queue."""
        ...

    def of_topic(self, topic: str) -> Sequence[TieredQueue]:
        """The queues of a topic."""
        ...

    @property
    def queues(self) -> int:
        """The number of queues."""
        ...

    def calls(self) -> Iterator[tuple[str, str, CallStats]]:
        """The requests to what keeps the tier: kind of file, operation, durations and sizes. For metrics."""
        ...

    def topics(self) -> list[str]:
        """The topics with queues in the tier."""
        ...

    def drop_topic(self, topic: str) -> None:
        """Serve nothing of a topic any more, which is about to be deleted."""
        ...

    async def destroy_topic(self, topic: str) -> None:
        """Delete a topic from the tier. Raises OSError."""
        ...
