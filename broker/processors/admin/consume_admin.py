"""Progress of consumer groups: 208, 303, 308, 317 (RocketMQ's AdminBrokerProcessor, ConsumeStats)."""

from typing import Final

import msgspec

from trimq.broker.identity import BrokerIdentity
from trimq.broker.processors.admin.queue_table import QueueTable
from trimq.broker.processors.common import check_range, no_such_topic, require_topics
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.stats import GROUP_GET_NUMS, BrokerStats
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.auth.rules import GET
from trimq.protocol.body import Body, MessageQueue, encode_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.admin import (
    GetBrokerConsumeStatsRequestHeader,
    GetConsumeStatsRequestHeader,
    QueryConsumeTimeSpanRequestHeader,
    QueryCorrectionOffsetRequestHeader,
)
from trimq.protocol.json_pieces import object_pieces, table_pieces
from trimq.remoting.auth.permit import OPEN, Permit
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import LargeReply

_MAX_LONG: Final = 2**63 - 1


class OffsetWrapper(Body):
    """A group's progress in a queue.

    ``broker_offset`` is the queue's end, ``last_timestamp`` the store time of the last message consumed (ms).
    """

    broker_offset: int
    consumer_offset: int
    pull_offset: int
    last_timestamp: int


class QueueTimeSpan(Body):
    """A queue in the reply to QUERY_CONSUME_TIME_SPAN (303). Times are in ms."""

    message_queue: MessageQueue
    min_time_stamp: int
    max_time_stamp: int
    consume_time_stamp: int
    delay_time: int


class ConsumeAdminProcessor:
    """Reports the progress of groups from the store, the offsets and the statistics."""

    def __init__(  # noqa: PLR0913 - progress is known to many
        self,
        *,
        identity: BrokerIdentity,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        consumers: ConsumerManager,
        stats: BrokerStats,
        store: MessageStore,
        clock: Clock,
        permit: Permit = OPEN,
    ) -> None:
        self._identity = identity
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers
        self._stats = stats
        self._store = store
        self._clock = clock
        self._permit = permit

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.GET_CONSUME_STATS, self.consume_stats)
        table.register(RequestCode.GET_BROKER_CONSUME_STATS, self.all_consume_stats)
        table.register(RequestCode.QUERY_CONSUME_TIME_SPAN, self.time_span)
        table.register(RequestCode.QUERY_CORRECTION_OFFSET, self.correction_offset)

    async def consume_stats(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_CONSUME_STATS (208): the queues of the requested topics, else of all in which the group has offsets.

        NO_PERMISSION also for one of the latter: the ends of its queues are shown.
        """
        header = command.header(GetConsumeStatsRequestHeader)
        group = header.consumer_group
        named = [topic.strip() for topic in (header.topic_list or "").split(";") if topic.strip()]
        if named:
            topics = named
        elif header.topic and header.topic.strip():
            topics = [header.topic] if self._consumers.may_consume(group, header.topic) else []
        else:
            topics = sorted(
                topic
                for topic in self._offsets.topics_of(group)
                if topic in self._topics.table and self._consumers.may_consume(group, topic)
            )
            await require_topics(self._permit, connection, command, topics, GET)
        tps = 0.0
        async with LargeReply(connection, command) as reply:
            table = QueueTable(reply, b'{"offsetTable":{')
            table.open()
            for topic in topics:
                tps += await self._add_topic(table, group, topic) or 0.0
            reply.add(b'},"consumeTps":%b}' % encode_json(tps))
            return reply.end()

    async def all_consume_stats(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_BROKER_CONSUME_STATS (317): the progress of each group in each topic."""
        only_ordered = command.header(GetBrokerConsumeStatsRequestHeader).is_order
        total = 0
        async with LargeReply(connection, command) as reply:
            reply.add(b'{"brokerAddr":%b,"consumeStatsList":[' % msgspec.json.encode(self._identity.address))
            for number, group in enumerate(list(self._groups.table)):
                reply.add(b"%b{%b:[" % (b"," if number else b"", msgspec.json.encode(group)))
                lead = b'{"offsetTable":{'
                for topic in self._topics_shown(group, only_ordered):
                    table = QueueTable(reply, lead)
                    tps = await self._add_topic(table, group, topic)
                    if tps is not None:
                        total += table.behind
                        reply.add(b'},"consumeTps":%b}' % encode_json(tps))
                        lead = b',{"offsetTable":{'
                reply.add(b"]}")
                await reply.pause()
            reply.add(b'],"totalDiff":%d,"totalInflightDiff":0}' % total)
            return reply.end()

    def _topics_shown(self, group: str, only_ordered: bool) -> list[str]:
        topics = []
        for topic in sorted(self._offsets.topics_of(group)):
            config = self._topics.get(topic)
            ordered = config is not None and config.order
            if (ordered or not only_ordered) and self._consumers.may_consume(group, topic):
                topics.append(topic)
        return topics

    async def _add_topic(self, table: QueueTable, group: str, topic: str) -> float | None:
        """Write the progress of ``group`` in all read queues of ``topic``; returns its messages per second.

        Returns None and writes nothing if the topic does not exist.
        """
        config = self._topics.get(topic)
        if config is None:
            return None
        table.open()
        for queue_id in range(config.read_queue_nums):
            wrapper = await self._queue(group, topic, queue_id)
            table.behind += wrapper.broker_offset - wrapper.consumer_offset
            await table.add(self._identity.queue(topic, queue_id), wrapper)
        return self._stats.tps(GROUP_GET_NUMS, f"{topic}@{group}")

    async def _queue(self, group: str, topic: str, queue_id: int) -> OffsetWrapper:
        store, offsets = self._store, self._offsets
        consumed = max(0, offsets.query(group, topic, queue_id))
        last = await store.message_store_time(topic, queue_id, consumed - 1) if consumed else 0
        return OffsetWrapper(
            broker_offset=max(0, store.max_offset(topic, queue_id)),
            consumer_offset=consumed,
            pull_offset=max(consumed, offsets.query_pull(group, topic, queue_id)),
            last_timestamp=max(0, last),
        )

    async def time_span(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """QUERY_CONSUME_TIME_SPAN (303): the store times of each queue's first, last and last consumed message."""
        header = command.header(QueryConsumeTimeSpanRequestHeader)
        config = self._topics.get(header.topic)
        if config is None:
            raise no_such_topic(header.topic)
        async with LargeReply(connection, command) as reply:
            reply.add(b'{"consumeTimeSpanSet":[')
            for number in range(config.write_queue_nums):
                span = await self._span(header.group, header.topic, number)
                reply.add((b"," if number else b"") + encode_json(span))
                await reply.pause()
            reply.add(b"]}")
            return reply.end()

    async def _span(self, group: str, topic: str, queue_id: int) -> QueueTimeSpan:
        store = self._store
        first = await store.earliest_store_time(topic, queue_id)
        end = store.max_offset(topic, queue_id)
        consumed = self._offsets.query(group, topic, queue_id)
        delay = 0
        if consumed < end:
            following = await store.message_store_time(topic, queue_id, max(0, consumed))
            delay = max(0, self._clock.wall_ms() - following) if following > 0 else 0
        return QueueTimeSpan(
            message_queue=self._identity.queue(topic, queue_id),
            min_time_stamp=first,
            max_time_stamp=await store.message_store_time(topic, queue_id, end - 1) if end else -1,
            consume_time_stamp=await store.message_store_time(topic, queue_id, consumed - 1) if consumed > 0 else first,
            delay_time=delay,
        )

    async def correction_offset(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """QUERY_CORRECTION_OFFSET (308): the smallest offset of each queue among all groups but ``filter_groups``.

        It is 2**63 - 1 for a queue in which ``compare_group`` has a smaller offset. RocketMQ's broker also deletes the
        offsets of ``filter_groups``; here they stay, since this is a query. SYSTEM_BUSY: see check_range.
        """
        header = command.header(QueryCorrectionOffsetRequestHeader)
        left_out = frozenset((header.filter_groups or "").split(","))
        smallest: dict[int, int] = {}
        async with LargeReply(connection, command) as reply:
            for queue_id, offset in self._offsets.of_others(header.topic, left_out):
                if offset < self._store.min_offset(header.topic, queue_id):
                    check_range(self._store, header.topic, queue_id)  # its message may be there all the same
                else:
                    smallest[queue_id] = min(offset, smallest.get(queue_id, offset))
                await reply.pause()
            for queue_id, offset in (self._offsets.query_all(header.compare_group, header.topic) or {}).items():
                if queue_id in smallest and smallest[queue_id] > offset:
                    smallest[queue_id] = _MAX_LONG
            await reply.add_all(object_pieces(("correctionOffsets", table_pieces(smallest))))
            return reply.end()
