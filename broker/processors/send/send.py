"""Sends: SEND_MESSAGE (10), SEND_MESSAGE_V2 (310), SEND_BATCH_MESSAGE (320), with and without a reply.

This is the full path, which knows every case. Ordinary sends are served by send_fast_path.py and send_native.py if the
gate permits it. Requests that these decline come here with their header already decoded.

Source: RocketMQ's SendMessageProcessor; batches as 5.5.0 stores them (each message with its own properties only).
"""

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from trimq.broker.config import BrokerConfig
from trimq.broker.processors.common import born_host
from trimq.broker.processors.end_transaction import EndTransactionProcessor
from trimq.broker.processors.send.message_properties import tag_hash, waits_for_store
from trimq.broker.processors.send.send_batch import SentBatch, batch_reply, message_ids, parts_of
from trimq.broker.processors.send.send_checks import (
    SendChecks,
    SendHeader,
    illegal_queue,
    properties_too_long,
    random_queue,
)
from trimq.broker.processors.send.send_codes import STORED, refusal_code
from trimq.broker.processors.send.send_fast_path import HEADERS, SendFastPath
from trimq.broker.processors.send.send_native import GroupedSends, NativeBatches, NativeSends
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.log.puts import MessageBatch, MessageInner
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol import sysflag
from trimq.protocol.batch import BatchError
from trimq.protocol.body import TopicConfig
from trimq.protocol.codes import VERSION, RequestCode, ResponseCode
from trimq.protocol.command import LANGUAGE, RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.send import SendMessageRequestHeader, SendMessageRequestHeaderV2
from trimq.protocol.message_id import UniqueIdGenerator
from trimq.protocol.message_keys import index_keys
from trimq.protocol.native import NATIVE, NativeExtension
from trimq.protocol.property_names import (
    PROPERTY_CLUSTER,
    PROPERTY_DELAY,
    PROPERTY_MSG_REGION,
    PROPERTY_POP_CK,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TRACE_ON,
    PROPERTY_TRAN_MSG,
    PROPERTY_UNIQ_KEY,
)
from trimq.protocol.property_text import closed, decode_properties, join_properties
from trimq.protocol.recall_handle import encode_handle
from trimq.protocol.record import MAX_PROPERTIES
from trimq.protocol.topic_rules import RETRY_PREFIX, TIMER_TOPIC, TRANS_HALF_TOPIC
from trimq.protocol.transaction import MAX_HALF_PROPERTIES, make_half
from trimq.protocol.transaction import QUEUE as HALF_QUEUE
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature, Gate, Sees
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import DEFERRED, Outcome

_pack_words: Final = struct.Struct(">II").pack


def _no_body() -> RemotingError:
    return RemotingError(ResponseCode.MESSAGE_ILLEGAL, "the message has no body")


def _properties(text: str) -> dict[str, str]:
    """Parse properties. Raises MESSAGE_ILLEGAL if no record can hold them, before any work is spent on parsing."""
    if len(text) > MAX_PROPERTIES:
        raise properties_too_long(len(text))
    return decode_properties(text)


def _ignore_result(_result: PutMessageResult) -> None:
    """Receives the result of a one-way send that had to wait."""


class SendMessageProcessor:
    """Checks a send, builds and stores its message, and replies with the message's place."""

    def __init__(  # noqa: PLR0913 - all are passed by name
        self,
        *,
        configuration: Configuration,
        topics: TopicConfigManager,
        store: MessageStore,
        stats: BrokerStats,
        checks: SendChecks,
        unique_ids: UniqueIdGenerator,
        store_host: bytes,
        ends: EndTransactionProcessor,
        native: NativeExtension = NATIVE,
    ) -> None:
        """``ends`` serves the ends of transactions, which may be served together with sends.

        ``store_host`` is the packed address that clients connect to: it is part of records and message ids.
        """
        self._configuration = configuration
        self._topics = topics
        self._checks = checks
        self._put_message = store.put_message
        self._tags = store.indexes_tags
        self._count = stats.topic_put
        self._store_host = store_host
        self._host_hex = store_host.hex().upper()
        self._next_unique = unique_ids.next
        self._fast_path = SendFastPath(
            configuration=configuration,
            topics=topics,
            store=store,
            stats=stats,
            store_host=store_host,
            answer=self._answer,
        )
        self._native = NativeSends(
            native=native,
            fast_path=self._fast_path,
            store=store,
            answer_batch=self._answer_batch,
            most_halves=checks.most_halves,
            ends=ends,
        )
        self._ends = ends
        self._handlers: HandlerTable | None = None
        self._configure()
        configuration.listeners.append(lambda _keys: self._configure())

    def _configure(self) -> None:
        config = self._configuration.section(BrokerConfig)
        self._ext = {PROPERTY_MSG_REGION: config.region_id, PROPERTY_TRACE_ON: "true" if config.trace_on else "false"}
        self._added = self._ext | {PROPERTY_CLUSTER: config.broker_cluster_name}
        region = config.region_id
        self._added_text = join_properties(self._added)
        self._templated = region.isascii() and region.isprintable() and not set('"\\%') & set(region)
        self._template = (
            f'{{"code":0,"extFields":{{"MSG_REGION":"{region}","TRACE_ON":"{self._ext[PROPERTY_TRACE_ON]}",'
            f'"msgId":"{self._host_hex}%016X","queueId":"%d","queueOffset":"%d","transactionId":"%s"}},"flag":1,'
            f'"language":"{LANGUAGE}","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
        ).encode()

        self._register()

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        self._handlers = table
        table.gate.listeners.append(self._register)
        self._register()

    def _register(self) -> None:
        """Register the routes that the configuration and the gate's features permit now."""
        table = self._handlers
        if table is None:
            return
        fast_path, native = self._fast_path, self._native
        fast_path.configure(table.gate.properties)
        native.configure()
        fast = fast_path.serve if fast_path.usable else None
        codes = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.END_TRANSACTION)
        grouped = {} if native.reader is None else self._grouped(table.gate, codes)
        for code, full in zip(codes, (self.send_v1, self.send_v2), strict=False):
            header = HEADERS[code]
            table.register(code, full, header=header, fast=fast, grouped=grouped.get(code), offers=Sees.PROPERTIES)
        group = grouped.get(RequestCode.END_TRANSACTION)
        table.register(RequestCode.END_TRANSACTION, self._ends.end, grouped=group, offers=Sees.PROPERTIES)
        fast = None if native.reader is None else NativeBatches(native).serve
        header = HEADERS[RequestCode.SEND_MESSAGE_V2]
        table.register(RequestCode.SEND_BATCH_MESSAGE, self.send_v2, header=header, fast=fast, offers=Sees.PROPERTIES)

    def _grouped(self, gate: Gate, codes: Sequence[int]) -> dict[int, GroupedSends]:
        """The servers of many requests: one for all codes that the same features have to see."""
        together: dict[tuple[Feature, ...], list[int]] = {}
        for code in codes:
            together.setdefault(gate.about(code), []).append(code)
        servers = [GroupedSends(self._native, own) for own in together.values()]
        return {code: server for own, server in zip(together.values(), servers, strict=True) for code in own}

    def send_v1(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """SEND_MESSAGE (10): full field names in the header."""
        return self._send(connection, command, command.header(SendMessageRequestHeader))

    def send_v2(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """SEND_MESSAGE_V2 (310), SEND_BATCH_MESSAGE (320): one-letter field names; the field ``m`` marks a batch."""
        return self._send(connection, command, command.header(SendMessageRequestHeaderV2))

    def _send(self, connection: Connection, command: RemotingCommand, header: SendHeader) -> Outcome:
        try:
            return self._checked(connection, command, header)
        except RemotingError as error:
            return self._refuse(command, error)

    def _checked(self, connection: Connection, command: RemotingCommand, header: SendHeader) -> Outcome:
        # The checks may create topics. Each creation replaces the data version, so identity shows it afterwards.
        before = self._topics.data_version
        self._checks.started()
        self._checks.permission(header)
        config = self._checks.topic(header)
        dead: TopicConfig | None = None
        if header.topic.startswith(RETRY_PREFIX) and not header.batch:
            dead = self._checks.dead_letter(command, header)
        if self._topics.data_version is not before:
            command.body = bytes(command.body)  # the view of the receive buffer ends when this handler returns
            return self._when_persisted(connection, command, header, config, dead)
        return self._put(connection, command, header, config, dead)

    async def _when_persisted(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: SendHeader,
        config: TopicConfig,
        dead: TopicConfig | None,
    ) -> Any:
        """Store once the topic that the send created is on disk: a kill must not lose it after the reply."""
        try:
            await self._topics.persisted()
            return self._put(connection, command, header, config, dead)
        except RemotingError as error:
            return self._refuse(command, error)

    def _put(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: SendHeader,
        config: TopicConfig,
        dead: TopicConfig | None,
    ) -> Outcome:
        if header.batch:
            return self._put_batch(connection, command, header, config)
        text = header.properties or ""
        if dead is not None:
            properties = _properties(text)
            properties[PROPERTY_DELAY] = "-1"  # a dead letter is not delayed again
            return self._put_one(connection, command, header, properties, dead.topic_name, 0)
        queue_id = header.queue_id
        if queue_id >= config.write_queue_nums and queue_id >= config.read_queue_nums:
            raise illegal_queue(header, config)
        if queue_id < 0:
            queue_id = random_queue(config)
        if not len(command.body):
            raise _no_body()
        properties = _properties(text)
        as_it_came = text if self._fast_path.ordinary(closed(text)) else None
        return self._put_one(connection, command, header, properties, header.topic, queue_id, as_it_came)

    def _put_one(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: SendHeader,
        properties: dict[str, str],
        topic: str,
        queue_id: int,
        as_it_came: str | None = None,
    ) -> Outcome:
        """Store one message.

        ``as_it_came`` is the text of ordinary ``properties``: it is stored as the client wrote it, as the fast path
        does. Encoding ``properties`` again would give another text only if a property occurs twice.
        """
        if not len(command.body):
            raise _no_body()
        sys_flag = self._checks.flags(header.sys_flag, properties)
        half = topic == header.topic and self._checks.half(header, properties)
        properties.pop(PROPERTY_POP_CK, None)
        unique = properties.get(PROPERTY_UNIQ_KEY)
        if unique is None:
            unique = properties[PROPERTY_UNIQ_KEY] = self._next_unique()  # the index needs one, and the reply names it
            if as_it_came is not None:
                as_it_came = closed(as_it_came) + join_properties({PROPERTY_UNIQ_KEY: unique})
        properties |= self._added
        # Place last: it may redirect a delayed message, which changes topic, queue and properties.
        if half:
            make_half(properties, topic, queue_id, header.producer_group)
            stored_topic, stored_queue, as_it_came = TRANS_HALF_TOPIC, HALF_QUEUE, None
        else:
            stored_topic, stored_queue = self._checks.place(properties, topic, queue_id)
        recall = self._recall_handle(properties, topic) if stored_topic == TIMER_TOPIC != topic else None
        text = join_properties(properties) if as_it_came is None else closed(as_it_came) + self._added_text
        if half and len(text.encode()) > MAX_HALF_PROPERTIES:
            raise properties_too_long(len(text))
        message = MessageInner(
            stored_topic,
            stored_queue,
            command.body,
            text.encode(),
            header.born_timestamp,
            born_host(connection),
            self._store_host,
            header.flag,
            sys_flag,
            header.reconsume_times or 0,
            0,
            tag_hash(properties),
            index_keys(properties, tags=self._tags),
            waits_for_store(properties),
        )
        return self._store(connection, command, message, queue_id, unique, recall)

    def _recall_handle(self, properties: dict[str, str], topic: str) -> str | None:
        """The handle of a timed message; none in a retry topic, as in RocketMQ."""
        if topic.startswith(RETRY_PREFIX):
            return None
        name = self._configuration.section(BrokerConfig).broker_name
        return encode_handle(topic, name, int(properties[PROPERTY_TIMER_OUT_MS]), properties[PROPERTY_UNIQ_KEY])

    def _store(
        self,
        connection: Connection,
        command: RemotingCommand,
        message: MessageInner,
        queue_id: int,
        unique: str,
        recall: str | None,
    ) -> Outcome:
        topic = message.topic
        if command.flag & 2:  # one-way
            result = self._put_message(message, _ignore_result)
            if result is not None and result.ok:
                self._count(topic, 1, result.size)
            return None

        result = self._put_message(message, partial(self._later, connection, command, topic, queue_id, unique, recall))
        if result is None:
            command.drop_buffers()  # the waiting reply needs only the opaque, not the receive buffer
            return DEFERRED
        return self._answer(command, topic, queue_id, unique, result, recall)

    def _later(
        self,
        connection: Connection,
        command: RemotingCommand,
        topic: str,
        queue_id: int,
        unique: str,
        recall: str | None,
        result: PutMessageResult,
    ) -> None:
        """Reply to a put that had to wait."""
        connection.complete(self._answer(command, topic, queue_id, unique, result, recall))

    def _answer(
        self,
        command: RemotingCommand,
        topic: str,
        queue_id: int,
        unique: str,
        result: PutMessageResult,
        recall: str | None = None,
    ) -> bytes | RemotingCommand:
        status = result.status
        if status > PutMessageStatus.SLAVE_NOT_AVAILABLE:
            return command.reply(refusal_code(status), result.remark or status.name, self._ext)
        self._count(topic, 1, result.size)
        if not status and not command.encoding and recall is None:
            text = unique.encode()
            if text.isalnum() and self._templated:
                header = self._template % (
                    result.physical_offset,
                    queue_id,
                    result.queue_offset,
                    text,
                    command.opaque,
                )
                size = len(header)
                return _pack_words(size + 4, size) + header
        ext = self._ext | {
            "msgId": self._message_id(result.physical_offset),
            "queueId": str(queue_id),
            "queueOffset": str(result.queue_offset),
            "transactionId": unique,
        }
        if recall is not None:
            ext["recallHandle"] = recall
        return command.reply(STORED[status], None, ext)

    def _message_id(self, physical_offset: int) -> str:
        return f"{self._host_hex}{physical_offset:016X}"

    def _refuse(self, command: RemotingCommand, error: RemotingError) -> RemotingCommand:
        return command.reply(error.code, error.remark, self._ext)

    # batches

    def _put_batch(
        self, connection: Connection, command: RemotingCommand, header: SendHeader, config: TopicConfig
    ) -> Outcome:
        batch, unique = self._batch(connection, command, header, config)
        sent = SentBatch(command, batch.topic, batch.queue_id, len(batch.keys), unique)
        if command.is_oneway:
            result = self._put_message(batch, _ignore_result)
            if result is not None and result.ok:
                self._count(sent.topic, sent.messages, result.size)
            return None

        def done(result: PutMessageResult) -> None:
            connection.complete(self._answer_batch(sent, result))

        result = self._put_message(batch, done)
        if result is None:
            command.drop_buffers()
            return DEFERRED
        return self._answer_batch(sent, result)

    def _batch(
        self, connection: Connection, command: RemotingCommand, header: SendHeader, config: TopicConfig
    ) -> tuple[MessageBatch, str | None]:
        queue_id = header.queue_id
        if queue_id >= config.write_queue_nums and queue_id >= config.read_queue_nums:
            raise illegal_queue(header, config)
        self._checks.batch(header)
        shared = _properties(header.properties or "")
        sys_flag = self._checks.flags(header.sys_flag, shared)
        if header.sys_flag & sysflag.TRANSACTION_MASK or shared.get(PROPERTY_TRAN_MSG, "").lower() == "true":
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "a batch cannot be part of a transaction")
        try:
            parts = parts_of(command.body, self._checks.batch_item, tags_too=self._tags)
        except BatchError as error:
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from None
        if not parts.keys:
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "the batch has no message")
        batch = MessageBatch(
            header.topic,
            queue_id if queue_id >= 0 else random_queue(config),
            *parts,
            header.born_timestamp,
            born_host(connection),
            self._store_host,
            sys_flag,
            header.reconsume_times or 0,
            waits_for_store(shared),
        )
        return batch, shared.get(PROPERTY_UNIQ_KEY)

    def _answer_batch(self, sent: SentBatch, result: PutMessageResult) -> bytes | RemotingCommand:
        command, topic, queue_id, count, unique = sent
        if not result.ok:
            return command.reply(refusal_code(result.status), result.remark or result.status.name, self._ext)
        self._count(topic, count, result.size)
        ids = message_ids(self._store_host, result.offsets or [result.physical_offset])
        added = self._ext
        is_plain = unique is None or (unique.isascii() and unique.isalnum())
        if is_plain and not result.status and not command.encoding and self._templated:
            region, trace = added[PROPERTY_MSG_REGION], added[PROPERTY_TRACE_ON]
            return batch_reply(region, trace, ids, queue_id, result.queue_offset, command.opaque, unique)
        ext = added | {"msgId": ids, "queueId": str(queue_id), "queueOffset": str(result.queue_offset)}
        if unique is not None:
            ext["transactionId"] = unique
        return command.reply(STORED[result.status], None, ext)
