"""Replies of request-reply calls: SEND_REPLY_MESSAGE (324), SEND_REPLY_MESSAGE_V2 (325).

A request is an ordinary message that names the client that sent it (REPLY_TO_CLIENT). Its reply goes to the broker,
which pushes it to that client as PUSH_REPLY_MESSAGE_TO_CLIENT (326) and stores it. The answer to the replier, once the
client has answered or cannot be asked, says whether the client has the reply; whether it is stored shows in ``msgId``.
While authentication is on, the client is a connection of the user who has sent the request.

Source: RocketMQ's ReplyMessageProcessor. Different from it: a reply that no record could hold is refused before it is
pushed, and a stored reply keeps the flags that say how its body is compressed.
"""

from functools import partial
from typing import Final, Literal

import structlog

from trimq.broker.auth.request_users import RequestUsers
from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.identity import BrokerIdentity
from trimq.broker.processors.common import born_host
from trimq.broker.processors.send.message_properties import tag_hash, waits_for_store
from trimq.broker.processors.send.send_checks import (
    SendChecks,
    SendHeader,
    illegal_queue,
    properties_too_long,
    random_queue,
)
from trimq.broker.services.client_calls import ClientCalls
from trimq.broker.services.producers import ProducerManager
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageResult
from trimq.protocol import sysflag
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.headers.send import (
    ReplyMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
from trimq.protocol.message_id import encode_offset_id
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_names import (
    PROPERTY_CORRELATION_ID,
    PROPERTY_INNER_NUM,
    PROPERTY_MSG_REGION,
    PROPERTY_POP_CK,
    PROPERTY_PUSH_REPLY_TIME,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TRACE_ON,
)
from trimq.protocol.property_text import closed, decode_properties, join_properties
from trimq.protocol.record import MAX_PROPERTIES
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.errors import RemotingTransportError
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import DEFERRED, Later, Outcome

_log = structlog.get_logger("broker.replies")

_PROPERTY_BYTES: Final = 256
"""What one decoded property takes besides its text: two strings, and its entries in two dicts."""
_COMPRESSION: Final = sysflag.COMPRESSED | sysflag.COMPRESSION_MASK


class _Reply:
    """A checked reply: what is pushed and stored, and what the answer to the replier says."""

    __slots__ = (
        "client_id",
        "command",
        "connection",
        "header",
        "place",
        "problem",
        "properties",
        "queue_id",
        "stored_properties",
        "text",
        "wait_for_topic",
    )

    def __init__(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: SendHeader,
        text: str,
        properties: dict[str, str],
        queue_id: int,
        *,
        wait_for_topic: bool,
    ) -> None:
        self.connection = connection
        self.command = command
        self.header = header
        self.text = text
        self.properties = properties
        self.queue_id = queue_id
        self.wait_for_topic = wait_for_topic
        self.client_id = properties.get(PROPERTY_REPLY_TO_CLIENT)
        self.problem: str | None = None  # why the client does not have the reply; None if it has it
        # A reply with a delay is pushed now, and stored where all delayed messages wait.
        self.stored_properties = properties.copy()
        self.stored_properties.pop(PROPERTY_POP_CK, None)  # only the broker makes handles of popped messages
        self.place = header.topic, queue_id


class ReplyMessageProcessor:
    """Pushes replies to the clients that wait for them, and stores them."""

    def __init__(  # noqa: PLR0913 - a reply is both a send and a call of a client
        self,
        *,
        configuration: Configuration,
        identity: BrokerIdentity,
        topics: TopicConfigManager,
        producers: ProducerManager,
        calls: ClientCalls,
        store: MessageStore,
        stats: BrokerStats,
        checks: SendChecks,
        clock: Clock,
        store_host: bytes,
        request_users: RequestUsers | None = None,
    ) -> None:
        """``store_host`` is the packed address that clients connect to, as in SendMessageProcessor.

        ``request_users``: the users of requests; None if they are not known, because heartbeats need no signature.
        """
        self._configuration = configuration
        self._identity = identity
        self._topics = topics
        self._producers = producers
        self._calls = calls
        self._store = store
        self._stats = stats
        self._checks = checks
        self._clock = clock
        self._store_host = store_host
        self._request_users = request_users

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.SEND_REPLY_MESSAGE, self.reply_v1)
        table.register(RequestCode.SEND_REPLY_MESSAGE_V2, self.reply_v2)

    def reply_v1(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """SEND_REPLY_MESSAGE (324): full field names in the header."""
        return self._reply(connection, command, command.header(SendMessageRequestHeader))

    def reply_v2(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """SEND_REPLY_MESSAGE_V2 (325): one-letter field names."""
        return self._reply(connection, command, command.header(SendMessageRequestHeaderV2))

    def _reply(self, connection: Connection, command: RemotingCommand, header: SendHeader) -> Outcome:
        try:
            return self._checked(connection, command, header)
        except RemotingError as error:
            return command.reply(error.code, error.remark, self._ext())

    def _checked(self, connection: Connection, command: RemotingCommand, header: SendHeader) -> Outcome:
        before = self._topics.data_version  # replaced if the checks create the topic
        self._checks.started()
        self._checks.permission(header)
        config = self._checks.topic(header)
        queue_id = header.queue_id
        if queue_id >= config.write_queue_nums and queue_id >= config.read_queue_nums:
            raise illegal_queue(header, config)
        if queue_id < 0:
            queue_id = random_queue(config)
        text = self._text(command, header)
        properties = decode_properties(text)
        if PROPERTY_INNER_NUM in properties:
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "a reply cannot be an inner batch")
        reply = _Reply(
            connection,
            command,
            header,
            text,
            properties,
            queue_id,
            wait_for_topic=self._topics.data_version is not before,
        )
        reply.place = self._checks.place(reply.stored_properties, header.topic, queue_id)
        client = None
        if reply.client_id is None:
            reply.problem = f"reply message properties[{PROPERTY_REPLY_TO_CLIENT}] is null"
        else:
            client = self._client(reply.client_id, properties)
            if client is None:
                reply.problem = f"push reply message fail, channel of <{reply.client_id}> not found."
        if client is None:
            self._calls.note(reply.client_id or "", reply.problem)
            if not reply.wait_for_topic:
                return self._put(reply)
        size = len(command.body) + 4 * len(text) + _PROPERTY_BYTES * len(properties)
        # Started before the body is copied: over a limit nothing is held.
        self._calls.start(connection, client or connection, size, partial(self._serve, reply, client))
        command.copy_buffers()
        return DEFERRED

    def _client(self, client_id: str, properties: dict[str, str]) -> Connection | None:
        """The connection that gets the reply; None if there is none that may."""
        if self._request_users is None:
            return self._producers.find_by_client_id(client_id)
        user = self._request_users.user_of(client_id, properties.get(PROPERTY_CORRELATION_ID, ""))
        return self._producers.find_of_user(client_id, user)

    def _text(self, command: RemotingCommand, header: SendHeader) -> str:
        """The reply's properties with those that the broker adds.

        Raises MESSAGE_ILLEGAL for a reply that no record can hold: it is refused before the client gets it.
        """
        given = header.properties or ""
        if len(given) > MAX_PROPERTIES:
            raise properties_too_long(len(given))
        text = closed(given) + join_properties(self._ext())
        if len(text) > MAX_PROPERTIES or (len(text) * 4 > MAX_PROPERTIES and len(text.encode()) > MAX_PROPERTIES):
            raise properties_too_long(len(text))
        size, most = len(command.body), self._configuration.section(MessageStoreConfig).max_message_size
        if not size:
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "the reply has no body")
        if size > most:
            raise RemotingError(
                ResponseCode.MESSAGE_ILLEGAL, f"the body has {size} bytes, the limit (maxMessageSize) is {most}"
            )
        return text

    async def _serve(self, reply: _Reply, client: Connection | None) -> None:
        """Push, store, answer the replier."""
        connection, command = reply.connection, reply.command
        answer: RemotingCommand | Literal[Later.DEFERRED]
        try:
            if client is not None:
                await self._push(reply, client)
            if reply.wait_for_topic:
                await self._topics.persisted()
            answer = self._put(reply)
        except Exception as error:  # noqa: BLE001 - else the request would count as in flight forever
            _log.exception("reply_failed")
            answer = command.reply(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}", self._ext())
        if answer is not DEFERRED:
            connection.complete(None if command.is_oneway else answer)

    async def _push(self, reply: _Reply, client: Connection) -> None:
        """Give the client the reply; ``reply.problem`` says why it does not have it."""
        problem = f"push reply message to {reply.client_id}fail."  # the words by which clients of RocketMQ know it
        request = RemotingCommand.request(
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, self._pushed_header(reply), reply.command.body
        )
        try:
            answer = await self._calls.ask(client, request)
        except (RemotingTransportError, FrameError) as error:
            reply.problem = problem
            self._calls.note(reply.client_id or "", str(error))
            return
        refused = answer.code != ResponseCode.SUCCESS
        reply.problem = problem if refused else None
        self._calls.note(reply.client_id or "", f"it answered with code {answer.code}" if refused else None)

    def _pushed_header(self, reply: _Reply) -> ReplyMessageRequestHeader:
        header, now = reply.header, self._clock.wall_ms()
        return ReplyMessageRequestHeader(
            producer_group=header.producer_group,
            topic=header.topic,
            default_topic=header.default_topic,
            default_topic_queue_nums=header.default_topic_queue_nums,
            queue_id=header.queue_id,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            flag=header.flag,
            properties=join_properties(reply.properties | {PROPERTY_PUSH_REPLY_TIME: str(now)}),
            reconsume_times=header.reconsume_times,
            unit_mode=bool(header.unit_mode),
            born_host=reply.connection.peer_text,
            store_host=self._identity.address,
            store_timestamp=now,
        )

    def _put(self, reply: _Reply) -> RemotingCommand | Literal[Later.DEFERRED]:
        """Store the reply unless that is switched off. Returns the answer, or DEFERRED if it comes later."""
        if not self._configuration.section(BrokerConfig).store_reply_message_enable:
            return self._answer(reply, None, None)
        message = self._message(reply)
        result = self._store.put_message(message, partial(self._stored, reply, message.topic))
        if result is None:
            reply.command.drop_buffers()
            return DEFERRED
        return self._answer(reply, message.topic, result)

    def _stored(self, reply: _Reply, topic: str, result: PutMessageResult) -> None:
        """Answer after a put that had to wait."""
        answer = self._answer(reply, topic, result)
        reply.connection.complete(None if reply.command.is_oneway else answer)

    def _message(self, reply: _Reply) -> MessageInner:
        header, properties = reply.header, reply.stored_properties
        # As it came, unless the broker has changed them: then they are encoded again.
        text = reply.text if properties == reply.properties else join_properties(properties)
        topic, queue_id = reply.place
        return MessageInner(
            topic,
            queue_id,
            reply.command.body,
            text.encode(),
            header.born_timestamp,
            born_host(reply.connection),
            self._store_host,
            header.flag,
            header.sys_flag & _COMPRESSION,
            header.reconsume_times or 0,
            0,
            tag_hash(properties),
            index_keys(properties, tags=self._store.indexes_tags),
            waits_for_store(properties),
        )

    def _answer(self, reply: _Reply, topic: str | None, result: PutMessageResult | None) -> RemotingCommand:
        """The answer to the replier.

        As in RocketMQ a failed put changes nothing in it: the client has the reply, and that is what the replier asked
        for. ``msgId`` "0" says that the reply is not stored.
        """
        ext = self._ext()
        stored = result is not None and result.ok
        if stored and topic is not None and result is not None:
            self._stats.topic_put(topic, 1, result.size)
            ext["msgId"] = encode_offset_id(self._store_host, result.physical_offset)
            ext["queueOffset"] = str(result.queue_offset)
            ext["queueId"] = str(reply.queue_id)
        elif reply.problem is None:
            ext |= {"msgId": "0", "queueOffset": "0", "queueId": str(reply.queue_id)}
        if reply.problem is not None:
            return reply.command.reply(ResponseCode.SYSTEM_ERROR, reply.problem, ext)
        return reply.command.reply(ResponseCode.SUCCESS, None, ext)

    def _ext(self) -> dict[str, str]:
        config = self._configuration.section(BrokerConfig)
        return {PROPERTY_MSG_REGION: config.region_id, PROPERTY_TRACE_ON: "true" if config.trace_on else "false"}
