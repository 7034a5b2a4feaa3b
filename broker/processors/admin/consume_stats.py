"""How far a group is in a topic, queue by queue: what 208 and 317 answer (RocketMQ's ConsumeStats)."""

from typing import TYPE_CHECKING

from trimq.broker.services.stats import GROUP_GET_NUMS
from trimq.protocol.body import Body, MessageQueue, encode_json
from trimq.remoting.server.large_reply import LargeReply

if TYPE_CHECKING:
    from trimq.broker.parts import BrokerParts


class OffsetWrapper(Body):
    """A queue: ``broker_offset`` is its end, ``last_timestamp`` the store time of the last message consumed (ms)."""

    broker_offset: int
    consumer_offset: int
    pull_offset: int
    last_timestamp: int


class QueueTable:
    """The entries of a table of queues, in fastjson's form, written into a reply as they are found.

    ``lead`` is what stands before the first of them; nothing is written before ``open``. ``behind`` sums up by how much
    the group is behind.
    """

    def __init__(self, reply: LargeReply, lead: bytes) -> None:
        self._reply = reply
        self._lead = lead
        self.behind = 0

    def open(self) -> None:
        """Write what stands before the first entry."""
        if self._lead != b",":
            self._reply.add(self._lead)
            self._lead = b""

    async def add(self, queue: MessageQueue, value: Body | int) -> None:
        """One more entry; others may work before the next one."""
        self.open()
        self._reply.add(self._lead + encode_json(queue) + b":" + encode_json(value))
        self._lead = b","
        await self._reply.pause()


class ConsumeStatsReader:
    """Puts together what store, offsets and statistics know."""

    def __init__(self, parts: "BrokerParts") -> None:
        self._parts = parts

    async def add_topic(self, table: QueueTable, group: str, topic: str) -> float | None:
        """Write how far ``group`` is in all read queues of ``topic``; how many messages a second it reads.

        None, and nothing is written, where the topic is gone.
        """
        config = self._parts.topics.get(topic)
        if config is None:
            return None
        table.open()
        for queue_id in range(config.read_queue_nums):
            wrapper = await self._queue(group, topic, queue_id)
            table.behind += wrapper.broker_offset - wrapper.consumer_offset
            await table.add(self._parts.queue(topic, queue_id), wrapper)
        return self._parts.stats.tps(GROUP_GET_NUMS, f"{topic}@{group}")

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
