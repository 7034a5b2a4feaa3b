"""CONSUMER_SEND_MSG_BACK (36): a message that a consumer could not handle is stored again.

It goes to the group's retry topic with a delay level that grows with each try, or to its dead-letter topic once the
tries are used up. Source: RocketMQ's AbstractSendMessageProcessor.consumerSendMsgBack.
"""

import random
from typing import Any

from trimq.broker.config import BrokerConfig
from trimq.broker.processors.send.message_properties import tag_hash
from trimq.broker.processors.send.send_checks import UNIT_RETRY, V3_4_9, SendChecks
from trimq.broker.processors.send.send_codes import refusal_code
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.auth.rules import SUB
from trimq.protocol.body import PERM_READ, PERM_WRITE, SubscriptionGroupConfig, TopicConfig
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.send import ConsumerSendMsgBackRequestHeader
from trimq.protocol.message import StoredMessage, decode_message
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_names import (
    PROPERTY_DELAY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_WAIT,
)
from trimq.protocol.property_text import join_properties
from trimq.protocol.record import RecordError, pack_host
from trimq.protocol.topic_rules import dlq_topic, retry_topic
from trimq.remoting.auth.permit import OPEN, Permit
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import DEFERRED, Outcome

_FIRST_LEVEL = 3
"""Delay level of the first retry when the consumer leaves it to the broker (10 s with the default levels)."""
_READ_WRITE = PERM_READ | PERM_WRITE


class SendBackProcessor:
    """Stores messages that consumers send back."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        store: MessageStore,
        stats: BrokerStats,
        checks: SendChecks,
        store_host: bytes,
        permit: Permit = OPEN,
    ) -> None:
        """``store_host`` is the packed address that clients connect to, as in SendMessageProcessor."""
        self._permit = permit
        self._configuration = configuration
        self._topics = topics
        self._groups = groups
        self._store = store
        self._stats = stats
        self._checks = checks
        self._store_host = store_host

    def register(self, table: HandlerTable) -> None:
        """Register the handler."""
        table.register(RequestCode.CONSUMER_SEND_MSG_BACK, self.send_back)

    def send_back(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """CONSUMER_SEND_MSG_BACK (36). Replies once the copy is stored, without waiting for the disk (WAIT=false)."""
        header = command.header(ConsumerSendMsgBackRequestHeader)
        group = self._groups.find(header.group)
        if group is None:
            raise self._groups.missing(header.group)
        if not self._configuration.section(BrokerConfig).broker_permission & PERM_WRITE:
            raise RemotingError(ResponseCode.NO_PERMISSION, "this broker does not permit writing (brokerPermission)")
        if group.retry_queue_nums <= 0:
            return command.reply()  # as in RocketMQ: the group wants no retries, so the message is dropped
        # A new retry or dead-letter topic changes the data version: the reply then waits until it is on disk.
        before = self._topics.data_version
        retry = self._topics.create_on_send_back(
            retry_topic(header.group), group.retry_queue_nums, _READ_WRITE, UNIT_RETRY if header.unit_mode else 0
        )
        if not retry.perm & PERM_WRITE:
            raise RemotingError(
                ResponseCode.NO_PERMISSION, f"the topic {retry.topic_name} does not permit writing (perm)"
            )
        record = None if self._permit.checks_records(command) else self._store.look_message(header.offset)
        if record is None:
            return self._send_back_cold(connection, command, header, group, before)
        message = self._message(connection, command, record, header.offset)
        return self._again(connection, command, header, group, message, before)

    async def _send_back_cold(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: ConsumerSendMsgBackRequestHeader,
        group: SubscriptionGroupConfig,
        before: Any,
    ) -> Any:
        checks = self._permit.checks_records(command)
        look = self._store.look_queued if checks else self._store.look_message_cold
        record = await look(header.offset)
        message = self._message(connection, command, record, header.offset)
        return self._again(connection, command, header, group, message, before)

    def _message(self, connection: Connection, command: RemotingCommand, record: Any, offset: int) -> StoredMessage:
        if record is not None and len(record):
            try:
                message = decode_message(record)
            except RecordError:
                pass
            else:
                # The offset may lead to another topic: its message must not get into the group's retry topic.
                self._permit.require_record(connection, command, record, SUB)
                return message
        raise RemotingError(ResponseCode.SYSTEM_ERROR, self._store.why_missing(offset))

    def _again(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: ConsumerSendMsgBackRequestHeader,
        group: SubscriptionGroupConfig,
        message: StoredMessage,
        before: Any,
    ) -> Outcome:
        limit = group.retry_max_times
        if command.version >= V3_4_9 and header.max_reconsume_times is not None:
            limit = header.max_reconsume_times
        properties = message.properties
        # setdefault: at the second retry these name the first topic and message, not those of the last retry.
        properties.setdefault(PROPERTY_RETRY_TOPIC, message.topic)
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, message.offset_message_id)
        properties[PROPERTY_WAIT] = "false"
        if message.reconsume_times >= limit or header.delay_level < 0:
            topic = self._topics.create_on_send_back(dlq_topic(header.group), 1, _READ_WRITE).topic_name
            queue_id = 0
            properties[PROPERTY_DELAY] = "0"
        else:
            topic = retry_topic(header.group)
            queue_id = _random_queue(self._topics.get(topic), group)
            properties[PROPERTY_DELAY] = str(header.delay_level or _FIRST_LEVEL + message.reconsume_times)
        copy = self._copy(message, properties, topic, queue_id)
        if self._topics.data_version is not before:
            return self._put_when_persisted(connection, command, header, copy)
        return self._put(connection, command, header, copy)

    def _copy(self, message: StoredMessage, properties: dict[str, str], topic: str, queue_id: int) -> MessageInner:
        stored_topic, stored_queue = self._checks.place(properties, topic, queue_id)
        return MessageInner(
            stored_topic,
            stored_queue,
            message.body,
            join_properties(properties).encode(),
            message.born_timestamp,
            pack_host(*message.born_host),
            self._store_host,
            message.flag,
            message.sys_flag,
            message.reconsume_times + 1,
            0,
            tag_hash(properties),
            index_keys(properties, tags=self._store.indexes_tags),
            wait=False,
        )

    async def _put_when_persisted(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: ConsumerSendMsgBackRequestHeader,
        copy: MessageInner,
    ) -> Any:
        await self._topics.persisted()
        return self._put(connection, command, header, copy)

    def _put(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: ConsumerSendMsgBackRequestHeader,
        copy: MessageInner,
    ) -> Outcome:
        def done(result: PutMessageResult) -> None:
            connection.complete(self._answer(command, header, copy, result))

        result = self._store.put_message(copy, done)
        if result is None:
            command.drop_buffers()
            return DEFERRED
        return self._answer(command, header, copy, result)

    def _answer(
        self,
        command: RemotingCommand,
        header: ConsumerSendMsgBackRequestHeader,
        copy: MessageInner,
        result: PutMessageResult,
    ) -> RemotingCommand:
        if result.ok:
            self._stats.topic_put(copy.topic, 1, result.size)
            dead = copy.topic == dlq_topic(header.group)
            self._stats.send_back(header.group, header.origin_topic or copy.topic, dead=dead)
            return command.reply()
        return command.reply(refusal_code(result.status), result.remark or result.status.name)


def _random_queue(topic: TopicConfig | None, group: SubscriptionGroupConfig) -> int:
    queues = min(group.retry_queue_nums, topic.write_queue_nums) if topic is not None else 1
    return random.randrange(queues) if queues > 1 else 0  # noqa: S311 - spreads load
