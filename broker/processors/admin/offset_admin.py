"""Moving the offsets of groups: reset (222, carried out by clients as 220) and clone (314).

Source: RocketMQ's AdminBrokerProcessor and Broker2Client.
"""

from typing import Final

import trio

from trimq.broker.config import BrokerConfig
from trimq.broker.identity import BrokerIdentity
from trimq.broker.processors.admin.queue_table import QueueTable
from trimq.broker.processors.common import (
    check_queue,
    check_range,
    invalid,
    no_such_group,
    no_such_topic,
    require_topics,
)
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.long_polling import PullRequestHoldService
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.auth.rules import UPDATE
from trimq.protocol.body import TopicConfig
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.admin import CloneGroupOffsetRequestHeader
from trimq.protocol.headers.client import ResetOffsetRequestHeader
from trimq.protocol.json_pieces import BATCH
from trimq.protocol.topic_rules import group_problem, retry_topic
from trimq.remoting.auth.permit import OPEN, Permit
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import LargeReply

_V3_0_7: Final = 24


class OffsetAdminProcessor:
    """Moves groups to a time, to an offset, or to the offsets of another group."""

    def __init__(  # noqa: PLR0913 - all are passed by name
        self,
        *,
        identity: BrokerIdentity,
        configuration: Configuration,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        consumers: ConsumerManager,
        long_polling: PullRequestHoldService,
        store: MessageStore,
        permit: Permit = OPEN,
    ) -> None:
        self._identity = identity
        self._configuration = configuration
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers
        self._long_polling = long_polling
        self._store = store
        self._permit = permit

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, self.reset_offset)
        table.register(RequestCode.CLONE_GROUP_OFFSET, self.clone_offset)

    async def reset_offset(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """INVOKE_BROKER_TO_RESET_OFFSET (222): reset to a time (-1: the end) or an offset, in one queue or all.

        By default the broker stores the new offsets and returns each one to the next pull of its queue
        (PULL_OFFSET_MOVED). With useServerSideResetOffset=false it sends them to the members of the group (220).

        TOPIC_NOT_EXIST, SUBSCRIPTION_GROUP_NOT_EXIST, INVALID_PARAMETER for a queue that the topic does not have,
        SYSTEM_ERROR for an offset that the queue does not have, SYSTEM_BUSY (see check_range), CONSUMER_NOT_ONLINE if a
        member has to be reached and none is connected. Where the broker stores the offsets: NO_PERMISSION and
        SYSTEM_BUSY, see ConsumerOffsetManager.check_group.
        """
        header = command.header(ResetOffsetRequestHeader)
        config = self._topics.get(header.topic)
        if config is None:
            raise no_such_topic(header.topic)
        if header.group not in self._groups.table:
            raise no_such_group(header.group)
        stores = self._configuration.section(BrokerConfig).use_server_side_reset_offset
        if stores:
            self._offsets.check_group(header.group)
        # The reply is made before the first offset is assigned: a reply that is too long, or a client that has closed
        # its connection, raises here, and nothing has changed.
        async with LargeReply(connection, command) as reply:
            targets = await self._targets(header, config, reply)
            table = QueueTable(reply, b'{"offsetTable":{')
            table.open()
            for queue_id, offset in targets.items():
                await table.add(self._identity.queue(header.topic, queue_id), offset)
            reply.add(b"}}")

        if stores:
            # From here on the reset is finished even if the client closes its connection: no queue is left out.
            for count, (queue_id, offset) in enumerate(targets.items(), 1):
                self._offsets.assign_reset(header.topic, header.group, queue_id, offset)
                if count % BATCH == 0:
                    await trio.lowlevel.checkpoint()
            # Persist before the reply: a reset that was confirmed is still pending after a kill. Held pulls wake last.
            await self._offsets.persisted()
            self._long_polling.wake_topic(header.topic)
        else:
            self._send_to_members(header, reply.body())
        return reply.end()

    async def _targets(
        self, header: ResetOffsetRequestHeader, config: TopicConfig, reply: LargeReply
    ) -> dict[int, int]:
        queue_id = -1 if header.queue_id is None else header.queue_id
        if queue_id < 0:
            targets = {}
            for number in range(config.read_queue_nums):
                targets[number] = await self._target(header, number)
                await reply.pause()
            return targets
        check_queue(config, queue_id, self._store.queue_exists)
        if header.offset is None or header.offset == -1:
            return {queue_id: await self._target(header, queue_id)}
        first = self._store.min_offset(header.topic, queue_id)
        end = self._store.max_offset(header.topic, queue_id)
        if header.offset < first:
            check_range(self._store, header.topic, queue_id)
        if not first <= header.offset <= end + 1:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                f"queue {queue_id} of {header.topic} has the offsets {first} to {end}, not {header.offset}",
            )
        return {queue_id: header.offset}

    async def _target(self, header: ResetOffsetRequestHeader, queue_id: int) -> int:
        if header.timestamp < 0:
            return max(0, self._store.max_offset(header.topic, queue_id))
        check_range(self._store, header.topic, queue_id)
        found = max(0, await self._store.offset_by_time(header.topic, queue_id, header.timestamp))
        if header.is_force is False and not self._configuration.section(BrokerConfig).use_server_side_reset_offset:
            current = self._offsets.query(header.group, header.topic, queue_id)
            return min(found, current) if current >= 0 else found
        return found

    def _send_to_members(self, header: ResetOffsetRequestHeader, body: bytes) -> None:
        members = [client for client in self._consumers.channels(header.group) if client.version >= _V3_0_7]
        if not members:
            raise RemotingError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"no consumer of the group {header.group} is online to be reset"
            )
        ext = {"topic": header.topic, "group": header.group, "timestamp": str(header.timestamp)}
        missed = [
            client.client_id
            for client in members
            if not client.connection.send_oneway(
                RemotingCommand.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, ext, body, oneway=True)
            )
        ]
        if missed:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                "the reset was not sent to these consumers, because they do not read from their connections, or it "
                f"has no form in the encoding that they use: {', '.join(missed[:10])}",
            )

    async def clone_offset(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """CLONE_GROUP_OFFSET (314): copy the offsets of a group to another group, in one topic or all.

        INVALID_PARAMETER for an invalid group name, NO_PERMISSION for a topic that the request does not name and its
        user may not update; NO_PERMISSION and SYSTEM_BUSY as ConsumerOffsetManager.check_group.
        """
        header = command.header(CloneGroupOffsetRequestHeader)
        problem = group_problem(header.dest_group)
        if problem is not None:
            raise invalid(problem)
        named = bool(header.topic and header.topic.strip())
        topics = [header.topic or ""] if named else self._unnamed(connection, command, header.src_group)
        topics = [
            topic
            for topic in topics
            if topic in self._topics.table and (header.offline or self._consumers.may_consume(header.src_group, topic))
        ]
        if not named:
            # All of them before the first copy: nothing is copied if one is refused. The gate has checked ``Topic:*``,
            # which a Deny of a single topic does not change.
            await require_topics(self._permit, connection, command, topics, UPDATE)
        self._offsets.check_group(header.dest_group)  # after the last wait: others may come up to the limit meanwhile
        for topic in topics:
            self._offsets.clone(header.src_group, header.dest_group, topic)
        await self._offsets.persisted()
        return command.reply()

    def _unnamed(self, connection: Connection, command: RemotingCommand, source: str) -> list[str]:
        """The topics in which a group has offsets: all are to be copied.

        Its retry topic is left out for a user who may not update the group, since no other group can use these offsets.
        """
        topics = self._offsets.topics_of(source)
        if not self._permit.may_on_group(connection, command, source, UPDATE):
            topics.discard(retry_topic(source))
        return sorted(topics)
