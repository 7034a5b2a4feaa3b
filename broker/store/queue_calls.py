"""QueueCalls: the part of the store's interface that is about topics and their queues."""

from collections.abc import Container, Iterator

from trimq.broker.store.clean import CleanService
from trimq.broker.store.in_memory_calls import InMemoryCalls
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.topic_queue import TopicQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.read.query import BoundaryType, MessageFinder
from trimq.broker.store.types import TierTrouble
from trimq.protocol.topic_rules import is_system_topic


class QueueCalls(InMemoryCalls):
    """MessageStore makes the parts."""

    commit_log: CommitLog
    queues: ConsumeQueueStore
    _finder: MessageFinder
    _clean: CleanService
    _held_places: dict[str, int]
    """Topics of records that wait since before the start, or to which such records go, with the highest queue id."""

    def topics(self) -> dict[str, list[int]]:
        """All topics that have queues, with their queue ids."""
        return self.queues.topics()

    def needed_queues(self) -> dict[str, int]:
        """How many queues each topic needs: for those that exist, and at a start for records that wait for slaves."""
        found = {topic: max(ids) + 1 for topic, ids in self.topics().items() if ids}
        for topic, queue_id in self._held_places.items():
            found[topic] = max(found.get(topic, 0), queue_id + 1)
        return found

    def has_queue(self, topic: str, queue_id: int) -> bool:
        """True if the queue exists."""
        return self.queues.find(topic, queue_id) is not None

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Offset of the first message of a queue that is still in the log."""
        return self.queues.min_offset(topic, queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Offset behind the last readable message of a queue."""
        return self.queues.next_offset(topic, queue_id)

    def next_offset(self, topic: str, queue_id: int) -> int:
        """The offset that the next message of a queue gets: behind those too that are stored and not readable yet."""
        readable, queue = self.max_offset(topic, queue_id), self.commit_log.queues.get((topic, queue_id))
        return readable if queue is None else max(readable, queue.next_offset)

    def local_min_offset(self, topic: str, queue_id: int) -> int:
        """As ``min_offset``, without what only a tier has."""
        return self.queues.min_offset(topic, queue_id)

    def tier_range(self, topic: str, queue_id: int) -> tuple[int, int] | None:  # noqa: ARG002 - see TieredMessageStore
        """The first offset of a queue in the tier and the one behind its last; None if the tier has nothing of it."""
        return None

    async def tier_info(self) -> dict[str, str]:
        """The tier's part of a broker's runtime information; nothing without a tier."""
        return {}

    def tier_trouble(self) -> TierTrouble | None:
        """Why nothing is uploaded to the tier at the moment; None if all is well, or if there is no tier."""
        return None

    async def message_store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Store timestamp of a queue's message; -1 if there is none."""
        return await self._finder.store_time(topic, queue_id, offset)

    async def earliest_store_time(self, topic: str, queue_id: int) -> int:
        """Store timestamp of a queue's first message; -1 if it has none."""
        return await self._finder.earliest_store_time(topic, queue_id)

    async def offset_by_time(self, topic: str, queue_id: int, timestamp: int, *, upper: bool = False) -> int:
        """The offset for a time: the first message stored then or later; ``upper``: the last one then or earlier."""
        boundary = BoundaryType.UPPER if upper else BoundaryType.LOWER
        return await self._finder.offset_by_time(topic, queue_id, timestamp, boundary)

    def look_units(self, topic: str, queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]] | None:
        """As ``queue_units``, possibly fewer; None if they have to come from the device."""
        return self._finder.look_units(topic, queue_id, offset, count)

    async def queue_units(self, topic: str, queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]]:
        """(log offset, size, tags code) of up to ``count`` units from ``offset`` on."""
        return await self._finder.units(topic, queue_id, offset, count)

    def topic_queue(self, topic: str, queue_id: int) -> TopicQueue:
        """The queue as puts of MessageRows refer to it. Raises TopicIllegalError if no record can carry the topic."""
        return self.commit_log.queue(topic, queue_id)

    @property
    def limits(self) -> tuple[int, int]:
        """The largest body and the largest record, in bytes."""
        return self.commit_log.limits

    def create_queues(self, topic: str, count: int) -> None:
        """Create the first ``count`` queues of a topic."""
        self.queues.create_queues(topic, count)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic's queues; its records stay in the log until they expire. A new one of its name starts at 0."""
        # In this order and without an await between them, so that no put uses the old offsets after the deletion.
        self._forget_topic(topic)
        await self._clean.delete_topics([topic])

    def _forget_topic(self, topic: str) -> None:
        """Called in the turn in which the queues of a topic are dropped."""
        self.commit_log.forget_topic(topic)

    async def clean_unused_topics(self, known: Container[str]) -> list[str]:
        """Delete the queues of topics that are neither ``known`` nor the system's. Returns the deleted topics.

        Each topic is checked again when its turn comes: a send may have created it in the meantime.
        """
        deleted: list[str] = []
        if all(topic in known or is_system_topic(topic) for topic in self.topics()):
            return deleted

        def unused() -> Iterator[str]:
            for topic in self.topics():
                if topic not in known and not is_system_topic(topic):
                    self._forget_topic(topic)
                    deleted.append(topic)
                    yield topic

        await self._clean.delete_topics(unused())
        return deleted

    @property
    def deleted_topics(self) -> dict[str, int]:
        """Topics that were deleted, and the log offset below which their records belong to the deleted one."""
        return {topic: deleted.position for topic, deleted in self.queues.deleted_topics.topics.items()}

    async def follow_deletions(self, deleted: dict[str, int]) -> list[str]:
        """On a slave: delete queues that have records of a deleted topic only, as far as the log is dispatched.

        Returns the topics that were not known to be deleted.
        """
        return await self._clean.follow_deletions(deleted)

    async def clean_expired_consume_queues(self) -> int:
        """Delete queues of ordinary topics that have no message left in the log. Returns their number."""
        return await self._clean.clean_expired_consume_queues()

    async def delete_expired_now(self) -> None:
        """Delete expired files at any hour; returns before they are deleted."""
        self._clean.delete_expired_now()
