"""Administration of consumer groups and clients: 200, 201, 203, 204, 207, 225, 328, 343, 345, 352, 353."""

from collections.abc import Iterable, Iterator
from typing import Any

from trimq.broker.identity import BrokerIdentity
from trimq.broker.processors.common import invalid
from trimq.broker.services.client_channel import ClientChannel
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.groups import FORBIDDEN_READ, SubscriptionGroupManager
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.producers import ProducerManager
from trimq.broker.services.stats import BrokerStats
from trimq.protocol.auth.rules import CREATE, SUB
from trimq.protocol.body import SubscriptionGroupConfig, SubscriptionGroupList, decode_json, encode_json
from trimq.protocol.codes import LanguageCode, RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.admin import (
    ConsumerGroupRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    GroupRequestHeader,
    ProducerGroupRequestHeader,
    QuerySubscriptionByConsumerRequestHeader,
    UpdateGroupForbiddenRequestHeader,
)
from trimq.protocol.json_pieces import in_order, list_pieces, object_pieces, table_pieces
from trimq.protocol.topic_rules import group_problem
from trimq.remoting.auth.permit import OPEN, Permit
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import in_slices


class GroupAdminProcessor:
    """Creates, changes, shows and deletes consumer groups, and shows which clients are connected."""

    def __init__(
        self,
        *,
        identity: BrokerIdentity,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        consumers: ConsumerManager,
        producers: ProducerManager,
        stats: BrokerStats,
        permit: Permit = OPEN,
    ) -> None:
        self._identity = identity
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers
        self._producers = producers
        self._stats = stats
        self._permit = permit

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, self.update)
        table.register(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, self.update_list)
        table.register(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, self.all_configs)
        table.register(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, self.config)
        table.register(RequestCode.DELETE_SUBSCRIPTIONGROUP, self.delete)
        table.register(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, self.forbid)
        table.register(RequestCode.QUERY_TOPICS_BY_CONSUMER, self.topics)
        table.register(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, self.subscription)
        table.register(RequestCode.GET_CONSUMER_CONNECTION_LIST, self.consumer_connections)
        table.register(RequestCode.GET_PRODUCER_CONNECTION_LIST, self.producer_connections)
        table.register(RequestCode.GET_ALL_PRODUCER_INFO, self.all_producers)

    async def update(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP (200).

        INVALID_PARAMETER for an invalid name, SYSTEM_BUSY beyond maxOffsetGroups.
        """
        await self._put([decode_json(command.body, SubscriptionGroupConfig)])
        return command.reply()

    async def update_list(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225): creates or changes all groups or none. Errors as for 200."""
        await self._put(decode_json(command.body, SubscriptionGroupList).group_config_list)
        return command.reply()

    async def _put(self, configs: list[SubscriptionGroupConfig]) -> None:
        for config in configs:
            problem = group_problem(config.group_name)
            if problem is not None:
                raise invalid(problem)
        if configs:
            self._groups.check_limit([config.group_name for config in configs])
            self._groups.put(*configs)
            await self._groups.persisted()  # the reply promises the change: it is on disk first

    async def all_configs(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201)."""
        return await in_slices(connection, command, self._groups.pieces())

    def config(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_SUBSCRIPTIONGROUP_CONFIG (352): creates an unknown group with the defaults if that is allowed.

        A user who may only read gets SUBSCRIPTION_GROUP_NOT_EXIST for it. RocketMQ's proxy, which asks for the groups
        of its clients, then takes the defaults.
        """
        group = command.header(GroupRequestHeader).group
        found = self._groups.get(group)
        if found is None and self._permit.may_on_group(connection, command, group, SUB + CREATE):
            found = self._groups.find(group)
        if found is None:
            raise self._groups.missing(group)
        return command.reply(body=encode_json(found))

    async def delete(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """DELETE_SUBSCRIPTIONGROUP (207); its offsets too if ``cleanOffset`` is set."""
        header = command.header(DeleteSubscriptionGroupRequestHeader)
        # All tables change in this turn, before the first wait: no request sees the group half deleted.
        self._groups.delete(header.group_name)
        self._stats.remove_group(header.group_name)
        self._offsets.remove_pulls(header.group_name)
        if header.clean_offset:
            self._offsets.remove_group(header.group_name)
            await self._offsets.persisted()
        await self._groups.persisted()
        return command.reply()

    async def forbid(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_AND_GET_GROUP_FORBIDDEN (353): whether a group may read a topic. A given ``readable`` changes it.

        INVALID_PARAMETER and SYSTEM_BUSY: see SubscriptionGroupManager.set_forbidden.
        """
        header = command.header(UpdateGroupForbiddenRequestHeader)
        if header.readable is not None:
            self._groups.set_forbidden(header.group, header.topic, FORBIDDEN_READ, not header.readable)
            await self._groups.persisted()
        readable = self._groups.may_read(header.group, header.topic)
        return command.reply(body=encode_json({"group": header.group, "topic": header.topic, "readable": readable}))

    async def topics(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """QUERY_TOPICS_BY_CONSUMER (343): the topics in which the group has offsets."""
        topics = self._offsets.topics_of(command.header(GroupRequestHeader).group)
        body = object_pieces(("brokerAddr", self._identity.address), ("topicList", list_pieces(in_order(topics))))
        return await in_slices(connection, command, body)

    def subscription(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_SUBSCRIPTION_BY_CONSUMER (345): the group's subscription to the topic, if a member is online."""
        header = command.header(QuerySubscriptionByConsumerRequestHeader)
        body: dict[str, Any] = {"group": header.group, "topic": header.topic}
        found = self._consumers.find_subscription(header.group, header.topic)
        if found is not None:
            body["subscriptionData"] = found
        return command.reply(body=encode_json(body))

    async def consumer_connections(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_CONSUMER_CONNECTION_LIST (203); CONSUMER_NOT_ONLINE if the group has no members."""
        group = command.header(ConsumerGroupRequestHeader).consumer_group
        info = self._consumers.group(group)
        if info is None:
            raise RemotingError(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group {group} is not online")
        body = object_pieces(
            ("connectionSet", list_pieces(_connections(info.channels.values()))),
            ("consumeFromWhere", info.consume_from_where),
            ("consumeType", info.consume_type),
            ("messageModel", info.message_model),
            ("subscriptionTable", table_pieces(info.subscriptions)),
        )
        return await in_slices(connection, command, body)

    async def producer_connections(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_PRODUCER_CONNECTION_LIST (204); SYSTEM_ERROR if the group has no members."""
        group = command.header(ProducerGroupRequestHeader).producer_group
        channels = self._producers.channels(group)
        if not channels:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the producer group {group} is not online")
        body = object_pieces(("connectionSet", list_pieces(_connections(channels))))
        return await in_slices(connection, command, body)

    async def all_producers(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_ALL_PRODUCER_INFO (328)."""
        groups = [
            (group, list_pieces(_producers(members.values()))) for group, members in self._producers.table.items()
        ]
        return await in_slices(connection, command, object_pieces(("data", object_pieces(*groups))))


def _connections(channels: Iterable[ClientChannel]) -> Iterator[dict[str, Any]]:
    """The rows of the clients of this moment. They are copied: the table may change while the rows are encoded."""
    return (
        {
            "clientAddr": channel.connection.peer_text,
            "clientId": channel.client_id,
            "language": _language(channel.language),
            "version": channel.version,
        }
        for channel in list(channels)
    )


def _producers(channels: Iterable[ClientChannel]) -> Iterator[dict[str, Any]]:
    return (
        {
            "clientId": channel.client_id,
            "language": _language(channel.language),
            "lastUpdateTimestamp": channel.last_update_timestamp,
            "remoteIP": "/" + channel.connection.peer_text,
            "version": channel.version,
        }
        for channel in list(channels)
    )


def _language(language: Any) -> str:
    """The language's name, or OTHER if RocketMQ's enum does not have it: RocketMQ's tools cannot read other names."""
    return str(language) if str(language) in LanguageCode.__members__ else LanguageCode.OTHER.name
