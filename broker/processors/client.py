"""Group membership: HEART_BEAT (34), UNREGISTER_CLIENT (35), GET_CONSUMER_LIST_BY_GROUP (38), CHECK_CLIENT_CONFIG (46).

Source: RocketMQ's ClientManageProcessor and ConsumerManageProcessor.
"""

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trimq.broker.config import BrokerConfig
from trimq.broker.filters.sql import NOTHING, Compiled
from trimq.broker.filters.tag import SubscriptionError, is_tag_type
from trimq.broker.processors.pull.pull_filters import check_property_filter
from trimq.broker.processors.send.send_checks import UNIT_RETRY
from trimq.broker.services.client_channel import ClientChannel
from trimq.broker.services.consumer_filters import ConsumerFilterManager
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.producers import ProducerManager
from trimq.broker.services.registration import BrokerOuterAPI
from trimq.broker.services.topics import TopicConfigManager
from trimq.protocol.body import (
    PERM_READ,
    PERM_WRITE,
    CheckClientRequestBody,
    ConsumerData,
    HeartbeatData,
    SubscriptionGroupConfig,
    decode_json,
    encode_json,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.client import (
    GetConsumerListByGroupRequestHeader,
    HeartbeatResponseHeader,
    UnregisterClientRequestHeader,
)
from trimq.protocol.json_pieces import BATCH, list_pieces, object_pieces
from trimq.protocol.topic_rules import retry_topic
from trimq.remoting.auth.permit import OPEN, Permit
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import in_slices


class _Left(Struct, eq=False):
    """The groups that a connection has left while a heartbeat of it waits."""

    producers: set[str | None]
    consumers: set[str | None]


class ClientProcessor:
    """Updates the tables of producers and consumers from the heartbeats of clients."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        consumers: ConsumerManager,
        filters: ConsumerFilterManager,
        producers: ProducerManager,
        registration: BrokerOuterAPI,
        permit: Permit = OPEN,
    ) -> None:
        self._permit = permit
        self._section = configuration.section
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._filters = filters
        self._producers = producers
        self._registration = registration
        self._fingerprints: dict[str, int] = {}
        self._waiting: dict[Connection, list[_Left]] = {}
        """The heartbeats whose expressions are being compiled."""

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.HEART_BEAT, self.heartbeat)
        table.register(RequestCode.UNREGISTER_CLIENT, self.unregister)
        table.register(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self.members)
        table.register(RequestCode.CHECK_CLIENT_CONFIG, self.check_config)

    def heartbeat(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """HEART_BEAT (34): the client's groups and their subscriptions.

        The reply is sent after a group's new retry topic is on disk and registered: consumers request its route as
        soon as they have the reply.
        """
        data = decode_json(command.body, HeartbeatData)
        needed: dict[str, None] = {}
        for consumer in data.consumer_data_set:
            needed |= self._filters.to_prepare(consumer.group_name, consumer.subscription_data_set)
        if needed and (first := self._filters.prepare_first(needed)):
            return self._compiled(connection, command, data, first)
        return self._take(connection, command, data, None)

    async def _compiled(
        self, connection: Connection, command: RemotingCommand, data: HeartbeatData, expressions: list[str]
    ) -> Any:
        """Take a heartbeat whose expressions are new, after they were compiled."""
        left = _Left(set(), set())
        waiting = self._waiting.setdefault(connection, [])
        waiting.append(left)
        try:
            compiled = await self._filters.prepare(expressions, connection)
        finally:
            waiting.remove(left)
            if not waiting:
                del self._waiting[connection]
        if connection.closed:
            return None
        # Of the groups that the client has left meanwhile it must not become a member again.
        consumers = [each for each in data.consumer_data_set if each.group_name not in left.consumers]
        producers = [each for each in data.producer_data_set if each.group_name not in left.producers]
        data = replace(data, consumer_data_set=consumers, producer_data_set=producers)
        return self._take(connection, command, data, compiled)

    def _take(
        self, connection: Connection, command: RemotingCommand, data: HeartbeatData, compiled: Compiled | None
    ) -> Outcome:
        # Here, not before expressions are compiled: others of the connection may be taken meanwhile.
        self._producers.check_limit(connection, [producer.group_name for producer in data.producer_data_set])
        before = self._topics.data_version
        changed = False
        for consumer in data.consumer_data_set:
            changed = self._consumer(connection, command, data, consumer, compiled) or changed
        for producer in data.producer_data_set:
            self._producers.register(producer.group_name, self._channel(connection, command, data.client_id))
        header = HeartbeatResponseHeader(
            is_sub_change=changed if data.heartbeat_fingerprint else True, trimq_msgpack=True
        )
        reply = command.reply(header=header)
        return reply if self._topics.data_version is before else self._when_known(reply)

    async def _when_known(self, reply: RemotingCommand) -> Any:
        await self._topics.persisted()
        await self._registration.registered()
        return reply

    def _consumer(
        self,
        connection: Connection,
        command: RemotingCommand,
        data: HeartbeatData,
        consumer: ConsumerData,
        compiled: Compiled | None,
    ) -> bool:
        """Register one consumer group; True if its fingerprint differs from that of the last heartbeat."""
        group = self._groups.find(consumer.group_name)
        if group is None:
            return False  # as in RocketMQ the heartbeat succeeds; the group's pulls are refused with the reason
        self._topics.create_on_send_back(
            retry_topic(consumer.group_name),
            group.retry_queue_nums,
            PERM_READ | PERM_WRITE,
            UNIT_RETRY if consumer.unit_mode else 0,
        )
        with_subscriptions = not (data.heartbeat_fingerprint and data.without_sub)
        self._consumers.register(
            consumer.group_name,
            self._channel(connection, command, data.client_id),
            consumer.consume_type,
            consumer.message_model,
            consumer.consume_from_where,
            consumer.subscription_data_set,
            notify=group.notify_consumer_ids_changed_enable,
            update_subscription=with_subscriptions,
        )
        if with_subscriptions:
            self._filters.register(consumer.group_name, consumer.subscription_data_set, compiled)
        if not data.heartbeat_fingerprint:
            return False
        known = self._fingerprints.get(consumer.group_name)
        self._fingerprints[consumer.group_name] = data.heartbeat_fingerprint
        return known is not None and known != data.heartbeat_fingerprint

    def _channel(self, connection: Connection, command: RemotingCommand, client_id: str) -> ClientChannel:
        user = self._permit.user_name(command)
        return ClientChannel(connection, client_id, command.language, command.version, user=user)

    def unregister(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """UNREGISTER_CLIENT (35): the client leaves the named groups."""
        header = command.header(UnregisterClientRequestHeader)
        for left in self._waiting.get(connection, ()):
            left.producers.add(header.producer_group)
            left.consumers.add(header.consumer_group)
        if header.producer_group:
            self._producers.unregister(header.producer_group, connection)
        if header.consumer_group:
            group: SubscriptionGroupConfig | None = self._groups.get(header.consumer_group)
            notify = group is None or group.notify_consumer_ids_changed_enable
            self._consumers.unregister(header.consumer_group, connection, notify=notify)
        return command.reply()

    def members(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_CONSUMER_LIST_BY_GROUP (38): ids of the members; SYSTEM_ERROR if there are none, as clients expect."""
        group = command.header(GetConsumerListByGroupRequestHeader).consumer_group
        info = self._consumers.group(group)
        ids = info.client_ids() if info is not None else []
        if not ids:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}")
        if len(ids) <= BATCH:  # consumers send this at every rebalance: reply without starting a task
            return command.reply(body=encode_json({"consumerIdList": ids}))
        return in_slices(connection, command, object_pieces(("consumerIdList", list_pieces(ids))))

    async def check_config(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """CHECK_CLIENT_CONFIG (46): whether the broker can serve a subscription.

        SYSTEM_ERROR for an expression without enablePropertyFilter, SUBSCRIPTION_PARSE_FAILED for one that is wrong.
        """
        subscription = decode_json(command.body, CheckClientRequestBody).subscription_data
        if subscription is not None and not is_tag_type(subscription.expression_type):
            check_property_filter(self._section(BrokerConfig), subscription.expression_type)
            kind, text = subscription.expression_type, subscription.sub_string
            compiled: Compiled = NOTHING
            if self._filters.is_slow(kind, text):
                compiled = await self._filters.prepare([text], connection)
                if text not in compiled:
                    raise RemotingError(
                        ResponseCode.SYSTEM_BUSY, "too many expressions of this client wait to be compiled: try again"
                    )
            try:
                self._filters.filter(kind, text, compiled)
            except SubscriptionError as error:
                raise RemotingError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from None
        return command.reply()
