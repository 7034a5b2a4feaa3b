"""RECALL_MESSAGE (370): a producer cancels a timed message that it sent (RocketMQ's RecallMessageProcessor).

The broker stores a delete mark that is due in the same slot as the message. The slot's delivery leaves out both.
"""

from typing import Any, Final

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.processors.common import born_host
from trimq.broker.processors.send.message_properties import tag_hash
from trimq.broker.processors.send.send_checks import SendChecks
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.body import PERM_WRITE
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.send import RecallMessageRequestHeader
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_names import (
    PROPERTY_BORN_TIMESTAMP,
    PROPERTY_MSG_REGION,
    PROPERTY_PGROUP,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_UNIQ_KEY,
)
from trimq.protocol.property_text import encode_properties
from trimq.protocol.recall_handle import RecallHandle, RecallHandleError, decode_handle
from trimq.protocol.timer_message import RECALL_TAG, delete_key
from trimq.protocol.topic_rules import NO_SEND_TOPICS
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import DEFERRED, Outcome

_BODY: Final = b"0"


class RecallMessageProcessor:
    """Stores delete marks."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        topics: TopicConfigManager,
        store: MessageStore,
        stats: BrokerStats,
        checks: SendChecks,
        clock: Clock,
        store_host: bytes,
    ) -> None:
        self._configuration = configuration
        self._topics = topics
        self._store = store
        self._stats = stats
        self._checks = checks
        self._clock = clock
        self._store_host = store_host

    def register(self, table: HandlerTable) -> None:
        """Register the handler."""
        table.register(RequestCode.RECALL_MESSAGE, self.recall)

    def recall(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """RECALL_MESSAGE (370). The reply has the message's UNIQ_KEY as ``msgId``.

        NO_PERMISSION unless recallMessageEnable is true, and for the broker's own topics; SERVICE_NOT_AVAILABLE while
        the broker takes no sends; TOPIC_NOT_EXIST; ILLEGAL_OPERATION for a handle that is invalid, of another topic or
        broker, or too late.
        """
        ext = {PROPERTY_MSG_REGION: self._configuration.section(BrokerConfig).region_id}
        try:
            header = command.header(RecallMessageRequestHeader)
            handle = self._checked(header)
            message = self._delete_mark(connection, header, handle)
        except RemotingError as error:
            return command.reply(error.code, error.remark, ext)

        def answer(result: PutMessageResult) -> RemotingCommand:
            if not result.ok:
                return command.reply(ResponseCode.SYSTEM_ERROR, result.remark or result.status.name, ext)
            self._stats.topic_put(message.topic, 1, result.size)
            return command.reply(header=ext | {"msgId": handle.unique_key})

        def later(result: PutMessageResult) -> None:
            reply = answer(result)
            if not command.is_oneway:
                connection.complete(reply)

        result = self._store.put_message(message, later)
        if result is None:
            command.drop_buffers()
            return None if command.is_oneway else DEFERRED
        return answer(result)

    def _checked(self, header: RecallMessageRequestHeader) -> RecallHandle:
        broker = self._configuration.section(BrokerConfig)
        if not broker.recall_message_enable:
            raise RemotingError(
                ResponseCode.NO_PERMISSION, "recalls are off on this broker: set recallMessageEnable=true"
            )
        now = self._clock.wall_ms()
        if now < broker.start_accept_send_request_time_stamp:
            raise _unavailable(
                f"it accepts requests from {broker.start_accept_send_request_time_stamp} ms since 1970 on"
            )
        if not broker.broker_permission & PERM_WRITE and not broker.allow_recall_when_broker_not_writeable:
            raise _unavailable(
                f"brokerPermission={broker.broker_permission} and allowRecallWhenBrokerNotWriteable=false"
            )
        if header.topic in NO_SEND_TOPICS:
            raise RemotingError(
                ResponseCode.NO_PERMISSION, f"clients may not send to the broker's own topic {header.topic}"
            )
        if self._topics.get(header.topic) is None:
            raise RemotingError(ResponseCode.TOPIC_NOT_EXIST, f"the topic {header.topic} does not exist")
        try:
            handle = decode_handle(header.recall_handle)
        except RecallHandleError as error:
            raise _illegal(str(error)) from None
        if handle.topic != header.topic:
            raise _illegal(f"the recall handle belongs to the topic {handle.topic}, not to {header.topic}")
        if handle.broker_name != broker.broker_name:
            raise _illegal(f"the recall handle belongs to the broker {handle.broker_name}, not to {broker.broker_name}")
        left = handle.deliver_ms - now
        if left <= 0:
            raise _illegal("the message is already due")
        most = self._configuration.section(MessageStoreConfig).timer_max_delay_sec * 1000
        if left >= most:
            raise _illegal(f"the recall handle names a time in {left} ms, the longest delay is {most} ms")
        return handle

    def _delete_mark(self, connection: Connection, header: Any, handle: RecallHandle) -> MessageInner:
        now = self._clock.wall_ms()
        with_topic = self._configuration.section(MessageStoreConfig).append_topic_for_timer_delete_key
        properties = {
            PROPERTY_TAGS: RECALL_TAG,
            PROPERTY_TIMER_DEL_UNIQKEY: delete_key(handle.topic, handle.unique_key, with_topic=with_topic),
            PROPERTY_UNIQ_KEY: handle.unique_key,
            PROPERTY_TIMER_DELIVER_MS: str(handle.deliver_ms),
            PROPERTY_BORN_TIMESTAMP: str(now),
        }
        if header.producer_group:
            properties[PROPERTY_PGROUP] = header.producer_group
        topic, queue_id = self._checks.place(properties, handle.topic, 0)
        # Exactly that of the message, which another precision may have: the two stay in one slot then.
        properties[PROPERTY_TIMER_OUT_MS] = str(handle.out_ms)
        try:
            text = encode_properties(properties).encode()
        except ValueError as error:
            raise _illegal(str(error)) from None
        return MessageInner(
            topic=topic,
            queue_id=queue_id,
            body=_BODY,
            properties=text,
            born_timestamp=now,
            born_host=born_host(connection),
            store_host=self._store_host,
            tags_code=tag_hash(properties),
            keys=index_keys(properties, tags=self._store.indexes_tags),
        )


def _unavailable(why: str) -> RemotingError:
    return RemotingError(ResponseCode.SERVICE_NOT_AVAILABLE, f"the broker takes no recalls now: {why}")


def _illegal(why: str) -> RemotingError:
    return RemotingError(ResponseCode.ILLEGAL_OPERATION, f"nothing can be recalled: {why}")
