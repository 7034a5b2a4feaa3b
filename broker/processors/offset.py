"""Consumer offsets, and the smallest and end offsets of queues: 14, 15, 29, 30, 31, 32, 43, 45.

Source: RocketMQ's ConsumerManageProcessor and AdminBrokerProcessor.
"""

from trimq.broker.processors.common import check_commit_offset, check_queue, check_range
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.schedule import ScheduleMessageService
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import GetMessageStatus
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.offset import (
    GetEarliestMsgStoretimeRequestHeader,
    GetMaxOffsetRequestHeader,
    GetMinOffsetRequestHeader,
    QueryConsumerOffsetRequestHeader,
    SearchOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import in_slices

_ONE_MESSAGE_BYTES = 4096


class OffsetProcessor:
    """Commits and returns the offsets of groups, and returns those of queues."""

    def __init__(
        self,
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        schedule: ScheduleMessageService,
        store: MessageStore,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._schedule = schedule
        self._store = store

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.QUERY_CONSUMER_OFFSET, self.query)
        table.register(RequestCode.UPDATE_CONSUMER_OFFSET, self.update)
        table.register(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, self.search_by_time)
        table.register(RequestCode.GET_MAX_OFFSET, self.max_offset)
        table.register(RequestCode.GET_MIN_OFFSET, self.min_offset)
        table.register(RequestCode.GET_EARLIEST_MSG_STORETIME, self.earliest_store_time)
        table.register(RequestCode.GET_ALL_CONSUMER_OFFSET, self.all_offsets)
        table.register(RequestCode.GET_ALL_DELAY_OFFSET, self.all_delay_offsets)

    def query(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_CONSUMER_OFFSET (14): the group's offset; 0 for a young queue it never read; else QUERY_NOT_FOUND.

        A young queue is one whose first message still exists and is in memory. A new group reads it from its start.
        """
        header = command.header(QueryConsumerOffsetRequestHeader)
        offset = self._offsets.query(header.consumer_group, header.topic, header.queue_id)
        if offset >= 0:
            return _offset_reply(command, offset)
        if header.set_zero_if_not_found is not False and self._starts_at_zero(header.topic, header.queue_id):
            return _offset_reply(command, 0)
        raise RemotingError(
            ResponseCode.QUERY_NOT_FOUND,
            f"the group {header.consumer_group} has no offset in queue {header.queue_id} of {header.topic}",
        )

    def _starts_at_zero(self, topic: str, queue_id: int) -> bool:
        if self._store.min_offset(topic, queue_id) > 0:
            return False
        first = self._store.get_message(topic, queue_id, 0, 1, _ONE_MESSAGE_BYTES, None)
        if first is None:
            return False
        first.release()
        return first.status is GetMessageStatus.FOUND

    def update(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_CONSUMER_OFFSET (15): commits an offset, also a smaller one. Ignored while a reset is pending.

        SUBSCRIPTION_GROUP_NOT_EXIST, TOPIC_NOT_EXIST, INVALID_PARAMETER for an impossible queue or offset,
        NO_PERMISSION and SYSTEM_BUSY as ConsumerOffsetManager.check_group. Refused commits are counted, because most
        commits are one-way and get no reply.
        """
        header = command.header(UpdateConsumerOffsetRequestHeader)
        try:
            self._check_commit(header)
            taken = self._offsets.commit(
                connection.peer_text, header.consumer_group, header.topic, header.queue_id, header.commit_offset
            )
        except RemotingError:
            self._offsets.refused += 1
            raise
        return command.reply(remark=None if taken else "ignored: a reset of this offset is pending")

    def _check_commit(self, header: UpdateConsumerOffsetRequestHeader) -> None:
        if header.consumer_group not in self._groups.table:
            raise RemotingError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"the consumer group {header.consumer_group} does not exist"
            )
        topic = self._topics.table.get(header.topic)
        if topic is None:
            raise RemotingError(ResponseCode.TOPIC_NOT_EXIST, f"the topic {header.topic} does not exist")
        check_queue(topic, header.queue_id, self._store.queue_exists)
        check_commit_offset(header.commit_offset)
        self._offsets.check_group(header.consumer_group)

    async def search_by_time(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """SEARCH_OFFSET_BY_TIMESTAMP (29): the first message stored at a time or later.

        With boundaryType UPPER it is the last one stored at that time or earlier. SYSTEM_BUSY: see check_range.
        """
        header = command.header(SearchOffsetRequestHeader)
        check_range(self._store, header.topic, header.queue_id)
        upper = (header.boundary_type or "").upper() == "UPPER"
        offset = await self._store.offset_by_time(header.topic, header.queue_id, header.timestamp, upper=upper)
        return _offset_reply(command, offset)

    def max_offset(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_MAX_OFFSET (30): the offset that the next message will get; 0 for a queue that does not exist."""
        header = command.header(GetMaxOffsetRequestHeader)
        return _offset_reply(command, self._store.max_offset(header.topic, header.queue_id))

    def min_offset(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_MIN_OFFSET (31): the offset of the oldest message; 0 for a queue that is not there.

        SYSTEM_BUSY: see check_range.
        """
        header = command.header(GetMinOffsetRequestHeader)
        check_range(self._store, header.topic, header.queue_id)
        return _offset_reply(command, self._store.min_offset(header.topic, header.queue_id))

    async def earliest_store_time(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_EARLIEST_MSG_STORETIME (32): the oldest message's store time in ms; -1 for a queue without messages.

        SYSTEM_BUSY: see check_range.
        """
        header = command.header(GetEarliestMsgStoretimeRequestHeader)
        check_range(self._store, header.topic, header.queue_id)
        timestamp = await self._store.earliest_store_time(header.topic, header.queue_id)
        return command.reply(header={"timestamp": str(timestamp)})

    async def all_offsets(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_ALL_CONSUMER_OFFSET (43): the content that consumerOffset.json would have if it were written now."""
        return await in_slices(connection, command, self._offsets.pieces())

    def all_delay_offsets(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_ALL_DELAY_OFFSET (45): the content that delayOffset.json would have if it were written now."""
        return command.reply(body=self._schedule.encode())


def _offset_reply(command: RemotingCommand, offset: int) -> RemotingCommand:
    return command.reply(header={"offset": str(max(0, offset))})
