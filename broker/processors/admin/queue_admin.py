"""The queues of topics: their offsets (202) and their units (321)."""

from typing import Final

from trimq.broker.identity import BrokerIdentity
from trimq.broker.processors.admin.queue_table import QueueTable
from trimq.broker.processors.common import check_range, invalid, no_such_topic
from trimq.broker.services.consumer_filters import ConsumerFilterManager
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.stats import TOPIC_PUT_NUMS, BrokerStats
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.body import Body, TopicConfig, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.admin import QueryConsumeQueueRequestHeader, TopicRequestHeader
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import LargeReply

_MOST_UNITS: Final = 65_536
"""Most units in one reply."""
_UNITS_AT_ONCE: Final = 500
_UNIT_TEXT: Final = b'{"physicOffset":%d,"physicSize":%d,"tagsCode":%d}'


class TopicOffset(Body, omit_defaults=True):
    """A queue in the reply to GET_TOPIC_STATS_INFO (202).

    ``min_offset`` is that of local store and tier. The last three are TriMQ's: where the local store begins, and what
    the tier has.
    """

    min_offset: int
    max_offset: int
    last_update_timestamp: int
    local_min_offset: int | None = None
    tier_min_offset: int | None = None
    tier_max_offset: int | None = None


class QueueAdminProcessor:
    """Shows the offsets and units of queues."""

    def __init__(
        self,
        *,
        identity: BrokerIdentity,
        topics: TopicConfigManager,
        consumers: ConsumerManager,
        filters: ConsumerFilterManager,
        stats: BrokerStats,
        store: MessageStore,
    ) -> None:
        self._identity = identity
        self._topics = topics
        self._consumers = consumers
        self._filters = filters
        self._stats = stats
        self._store = store

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.GET_TOPIC_STATS_INFO, self.limits)
        table.register(RequestCode.QUERY_CONSUME_QUEUE, self.consume_queue)

    async def limits(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_TOPIC_STATS_INFO (202): the smallest and end offset of each queue, and its last message's store time.

        SYSTEM_BUSY: see check_range. Readers of whole topics begin at these offsets.
        """
        topic = command.header(TopicRequestHeader).topic
        config = self._topics.get(topic)
        if config is None:
            raise no_such_topic(topic)
        async with LargeReply(connection, command) as reply:
            table = QueueTable(reply, b'{"offsetTable":{')
            table.open()
            for queue_id in range(max(config.read_queue_nums, config.write_queue_nums)):
                await table.add(self._identity.queue(config.topic_name, queue_id), await self._limits(config, queue_id))
            tps = self._stats.tps(TOPIC_PUT_NUMS, config.topic_name)
            reply.add(b'},"topicPutTps":%b}' % encode_json(tps))
            return reply.end()

    async def _limits(self, config: TopicConfig, queue_id: int) -> TopicOffset:
        topic = config.topic_name
        check_range(self._store, topic, queue_id)
        end = max(0, self._store.max_offset(topic, queue_id))
        last = await self._store.message_store_time(topic, queue_id, end - 1) if end else 0
        found = TopicOffset(
            min_offset=max(0, self._store.min_offset(topic, queue_id)),
            max_offset=end,
            last_update_timestamp=max(0, last),
        )
        tier = self._store.tier_range(topic, queue_id)
        if tier is not None:
            found.local_min_offset = self._store.local_min_offset(topic, queue_id)
            found.tier_min_offset, found.tier_max_offset = tier
        return found

    async def consume_queue(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """QUERY_CONSUME_QUEUE (321): units of a queue as its local files hold them, and the range of these.

        INVALID_PARAMETER if the request names more than 65,536 existing units: there are no partial replies.
        """
        header = command.header(QueryConsumeQueueRequestHeader)
        topic, queue_id = header.topic, header.queue_id
        if not self._store.has_queue(topic, queue_id):
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the topic {topic} has no queue {queue_id}")
        first, end = self._store.local_min_offset(topic, queue_id), self._store.max_offset(topic, queue_id)
        count = min(header.count, end - header.index) if header.index >= first else 0
        if count > _MOST_UNITS:
            raise invalid(
                f"queue {queue_id} of {topic} has {count} units from {header.index} on: request at most {_MOST_UNITS}"
            )
        async with LargeReply(connection, command) as reply:
            reply.add(b'{"maxQueueIndex":%d,"minQueueIndex":%d,"queueData":[' % (end, first))
            lead = b""
            for at in range(header.index, header.index + count, _UNITS_AT_ONCE):
                most = min(_UNITS_AT_ONCE, header.index + count - at)
                units = await self._store.queue_units(topic, queue_id, at, most)
                if units:
                    reply.add(lead + b",".join([_UNIT_TEXT % unit for unit in units]))
                    lead = b","
                await reply.pause()
            reply.add(b"]")
            if header.consumer_group:
                subscription = self._consumers.find_subscription(header.consumer_group, topic)
                if subscription is None:
                    text = encode_json(f"{header.consumer_group}@{topic} is not online!")
                    reply.add(b',"filterData":' + text)
                else:
                    reply.add(b',"subscriptionData":' + encode_json(subscription))
                    reply.add(b',"filterData":' + encode_json(self._filters.text(topic, header.consumer_group)))
            reply.add(b"}")
            return reply.end()
