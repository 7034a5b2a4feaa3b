"""How far a group is in a topic, queue by queue: what 208 and 317 answer (RocketMQ's ConsumeStats)."""

from typing import TYPE_CHECKING, NamedTuple

from broker.services.stats import GROUP_GET_NUMS
from protocol.body import Body, MessageQueue

if TYPE_CHECKING:
    from broker.parts import BrokerParts


class OffsetWrapper(Body):
    """A queue: ``broker_offset`` is its end, ``last_timestamp`` the store time of the last message consumed (ms)."""

    broker_offset: int
    consumer_offset: int
    pull_offset: int
    last_timestamp: int


class ConsumeStats(NamedTuple):
    """A topic's queues and how fast the group reads them (messages a second)."""

    entries: list[tuple[MessageQueue, OffsetWrapper]]
    tps: float


class ConsumeStatsReader:
    """Puts together what store, offsets and statistics know."""

    def __init__(self, parts: "BrokerParts") -> None:
        self._parts = parts

    async def of_topic(self, group: str, topic: str) -> ConsumeStats | None:
        """How far ``group`` is in all read queues of ``topic``; None where the topic is gone."""
        config = self._parts.topics.get(topic)
        if config is None:
            return None
        entries = [
            (self._parts.queue(topic, queue_id), await self._queue(group, topic, queue_id))
            for queue_id in range(config.read_queue_nums)
        ]
        return ConsumeStats(entries, self._parts.stats.tps(GROUP_GET_NUMS, f"{topic}@{group}"))

    def subscribed(self, group: str, topic: str) -> bool:
        """False only where the group is online and does not subscribe to the topic."""
        info = self._parts.consumers.group(group)
        return info is None or not info.subscriptions or topic in info.subscriptions

    async def _queue(self, group: str, topic: str, queue_id: int) -> OffsetWrapper:
        store, offsets = self._parts.store, self._parts.offsets
        consumed = max(0, offsets.query(group, topic, queue_id))
        last = await store.message_store_time(topic, queue_id, consumed - 1) if consumed else 0
        return OffsetWrapper(
            broker_offset=max(0, store.max_offset(topic, queue_id)),
            consumer_offset=consumed,
            pull_offset=max(consumed, offsets.query_pull(group, topic, queue_id)),
            last_timestamp=max(0, last),
        )
