"""Administration of topics: 17, 18, 21, 215, 300, 305, 306, 316, 329, 351 (RocketMQ's AdminBrokerProcessor).

A reply that promises a change is sent after the change is on disk and registered with the name servers.
"""

from msgspec import structs

from trimq.broker.config import BrokerConfig
from trimq.broker.processors.common import invalid, no_such_topic
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.long_polling import PullRequestHoldService
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.registration import BrokerOuterAPI
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.topic_attributes import alter, parse_changes
from trimq.broker.services.topic_followers import KNOWN_TOPICS, TopicFollowers
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.body import (
    DELETED_TOPICS,
    WITH_DELETED_TOPICS,
    TopicConfig,
    TopicConfigList,
    decode_json,
    encode_json,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.admin import CreateTopicRequestHeader, TopicRequestHeader
from trimq.protocol.json_pieces import in_order, list_pieces, object_pieces, table_pieces
from trimq.protocol.topic_rules import topic_problem
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import in_slices

_MAX_QUEUES = 65_536


class TopicAdminProcessor:
    """Creates, changes, shows and deletes topics."""

    def __init__(  # noqa: PLR0913 - a topic is known to many
        self,
        *,
        configuration: Configuration,
        topics: TopicConfigManager,
        offsets: ConsumerOffsetManager,
        consumers: ConsumerManager,
        long_polling: PullRequestHoldService,
        registration: BrokerOuterAPI,
        stats: BrokerStats,
        store: MessageStore,
        followers: TopicFollowers,
    ) -> None:
        self._configuration = configuration
        self._topics = topics
        self._offsets = offsets
        self._consumers = consumers
        self._long_polling = long_polling
        self._registration = registration
        self._stats = stats
        self._store = store
        self._followers = followers

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.UPDATE_AND_CREATE_TOPIC, self.update)
        table.register(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, self.update_list)
        table.register(RequestCode.GET_ALL_TOPIC_CONFIG, self.all_configs)
        table.register(RequestCode.GET_TOPIC_CONFIG, self.config)
        table.register(RequestCode.DELETE_TOPIC_IN_BROKER, self.delete)
        table.register(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, self.system_topics)
        table.register(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, self.consumed_by)
        table.register(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, self.clean_consume_queues)
        table.register(RequestCode.CLEAN_UNUSED_TOPIC, self.clean_unused)
        table.register(RequestCode.DELETE_EXPIRED_COMMITLOG, self.delete_expired)

    async def update(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_AND_CREATE_TOPIC (17).

        INVALID_PARAMETER for an invalid name or number, SYSTEM_ERROR for invalid attributes.
        """
        header = command.header(CreateTopicRequestHeader)
        try:
            changes = parse_changes(header.attributes or "")
        except ValueError as error:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, str(error)) from None
        wanted = TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=header.order,
            attributes=changes,
        )
        await self._put([wanted])
        return command.reply()

    async def update_list(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_AND_CREATE_TOPIC_LIST (18): creates or changes all topics or none. Errors as for 17.

        Attributes may have a sign (+name) or none (name), which means +.
        """
        wanted = [
            structs.replace(
                config,
                attributes={
                    name if name[:1] in "+-" else "+" + name: value for name, value in config.attributes.items()
                },
            )
            for config in decode_json(command.body, TopicConfigList).topic_config_list
        ]
        await self._put(wanted)
        return command.reply()

    async def _put(self, wanted: list[TopicConfig]) -> None:
        changed = [config for config in map(self._checked, wanted) if config != self._topics.get(config.topic_name)]
        if not changed:
            return
        self._topics.put(*changed)
        # In this order: mqadmin reads the topic back from a name server as soon as it has the reply.
        await self._topics.persisted()
        await self._registration.registered()

    def _checked(self, wanted: TopicConfig) -> TopicConfig:
        """Check ``wanted`` and return the new configuration. Its attributes are changes: +name, -name."""
        topic = wanted.topic_name
        self._check_name(topic)
        if not (0 <= wanted.read_queue_nums <= _MAX_QUEUES and 0 <= wanted.write_queue_nums <= _MAX_QUEUES):
            raise invalid(f"a topic has 0 to {_MAX_QUEUES} read queues and write queues")
        if not 0 <= wanted.perm <= 15:
            raise invalid(f"perm is a sum of 4 (read), 2 (write), 1 (inherit) and 8 (priority), not {wanted.perm}")
        known = self._topics.get(topic)
        try:
            attributes = alter(known.attributes if known is not None else None, wanted.attributes)
        except ValueError as error:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, str(error)) from None
        return structs.replace(wanted, attributes=attributes)

    def _check_name(self, topic: str) -> None:
        problem = topic_problem(topic)
        if problem is not None:
            raise invalid(problem)
        self._check_not_ours(topic)

    def _check_not_ours(self, topic: str) -> None:
        config = self._configuration.section(BrokerConfig)
        if config.validate_system_topic_when_update_topic and self._topics.is_system(topic):
            raise invalid(f"the topic {topic} belongs to the broker itself (validateSystemTopicWhenUpdateTopic)")

    async def all_configs(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_ALL_TOPIC_CONFIG (21).

        A slave of TriMQ also asks where in the log topics were deleted, and waits for changes: see TopicFollowers.
        """
        known = command.ext_fields().get(KNOWN_TOPICS)
        if known is not None:
            return await self._followers.hold(connection, command, known)
        wrapper = self._topics.serialize_wrapper()
        names = structs.fields(wrapper)
        members = [(each.encode_name, getattr(wrapper, each.name)) for each in names]
        pieces = [(name, table_pieces(value) if isinstance(value, dict) else value) for name, value in members]
        if command.ext_fields().get(WITH_DELETED_TOPICS) == "true":
            pieces.append((DELETED_TOPICS, self._store.deleted_topics))
        return await in_slices(connection, command, object_pieces(*pieces))

    def config(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_TOPIC_CONFIG (351); TOPIC_NOT_EXIST if there is none."""
        return command.reply(body=encode_json(self._existing(command.header(TopicRequestHeader).topic)))

    def _existing(self, topic: str) -> TopicConfig:
        config = self._topics.get(topic)
        if config is None:
            raise no_such_topic(topic)
        return config

    async def delete(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """DELETE_TOPIC_IN_BROKER (215): the topic, its queues and all offsets in it. Succeeds if it does not exist."""
        topic = command.header(TopicRequestHeader).topic
        if not topic.strip():
            raise invalid("the topic is blank")
        self._check_not_ours(topic)
        if self._topics.delete(topic):
            self._offsets.remove_topic(topic)
            self._stats.remove_topic(topic)
            self._long_polling.wake_topic(topic)
            # The store forgets the queues in this turn, before the first wait: a send that creates the topic again a
            # moment later gets new queues.
            await self._store.delete_topic(topic)
            await self._topics.persisted()
            await self._offsets.persisted()
            await self._registration.registered()
        return command.reply()

    def system_topics(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_SYSTEM_TOPIC_LIST_FROM_BROKER (305)."""
        return command.reply(body=encode_json({"topicList": self._topics.system_topics()}))

    async def consumed_by(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """QUERY_TOPIC_CONSUME_BY_WHO (300): the groups that subscribe to the topic or have offsets in it."""
        topic = command.header(TopicRequestHeader).topic
        groups = self._offsets.groups_of(topic) | set(self._consumers.groups_of(topic))
        return await in_slices(connection, command, object_pieces(("groupList", list_pieces(in_order(groups)))))

    async def clean_consume_queues(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """CLEAN_EXPIRED_CONSUMEQUEUE (306): delete queues that have no message left in the log."""
        await self._store.clean_expired_consume_queues()
        return command.reply()

    async def clean_unused(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """CLEAN_UNUSED_TOPIC (316): delete queues whose topic does not exist any more."""
        await self._store.clean_unused_topics(self._topics.table)
        return command.reply()

    async def delete_expired(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """DELETE_EXPIRED_COMMITLOG (329): start deleting expired commit log files, at any hour."""
        await self._store.delete_expired_now()
        return command.reply()
