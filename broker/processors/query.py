"""Queries: QUERY_MESSAGE (12) by key, VIEW_MESSAGE_BY_ID (33) by log offset (RocketMQ's QueryMessageProcessor)."""

import struct
from typing import Any, Final

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import QueryMessageResult
from trimq.protocol.auth.rules import GET
from trimq.protocol.codes import VERSION, RequestCode, ResponseCode
from trimq.protocol.command import LANGUAGE, RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import MAX_FRAME, encode_head
from trimq.protocol.headers.query import (
    QueryMessageRequestHeader,
    ViewMessageRequestHeader,
    ViewMessageResponseHeader,
)
from trimq.protocol.message_keys import TAG_KEY
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.auth.permit import OPEN, Permit
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import FastHandler, Outcome

_pack_words: Final = struct.Struct(">II").pack
_TEMPLATE: Final = (
    '{"code":0,"extFields":{"indexLastUpdatePhyoffset":"%d","indexLastUpdateTimestamp":"%d"},"flag":1,'
    f'"language":"{LANGUAGE}","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
).encode()


_LARGEST: Final = MAX_FRAME - 4096
_TAG: Final = "T"
"""The index type of a query by tag."""
_COPIED: Final = 32 * 1024
"""Up to this size the records are copied into one buffer with the reply's header."""


class QueryMessageProcessor:
    """Replies with records as the commit log holds them."""

    def __init__(self, *, configuration: Configuration, store: MessageStore, permit: Permit = OPEN) -> None:
        self._configuration = configuration
        self._store = store
        self._permit = permit

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.QUERY_MESSAGE, self.query, header=QueryMessageRequestHeader, fast=self._fast_path())
        table.register(RequestCode.VIEW_MESSAGE_BY_ID, self.view)

    def _fast_path(self) -> FastHandler:
        """The fast path: from the header to the bytes of the reply, if the records are few and all in memory."""
        query = self._store.query_in_memory

        def serve(_connection: Connection, request: TypedRequest[Any]) -> bytes | None:
            header = request.header
            if request.flag or header.unique_key_query or header.index_type == _TAG:
                return None
            times = header.begin_timestamp, header.end_timestamp
            found = query(header.topic, header.key, header.max_num, *times, _COPIED)
            if found is None:
                return None
            records, size, timestamp, last_phy = found
            text = _TEMPLATE % (last_phy, timestamp, request.opaque)
            length = len(text)
            return b"".join([_pack_words(length + 4 + size, length), text, *records])

        return serve

    def query(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """QUERY_MESSAGE (12): messages of a topic with a key in a time range; QUERY_NOT_FOUND if there are none.

        With the index type T the key is a tag. Other types are ignored, as RocketMQ does with index files.
        """
        header = command.header(QueryMessageRequestHeader)
        key, limit = header.key, header.max_num
        if header.unique_key_query:
            limit = self._configuration.section(MessageStoreConfig).default_query_max_num
        elif header.index_type == _TAG:
            key = TAG_KEY + key
        arguments = (header.topic, key, limit, header.begin_timestamp, header.end_timestamp)
        result = self._store.query_message(*arguments)
        if result is None:
            return self._query_cold(connection, command, arguments)
        return self._found(connection, command, result)

    async def _query_cold(
        self, connection: Connection, command: RemotingCommand, arguments: tuple[str, str, int, int, int]
    ) -> Any:
        return self._found(connection, command, await self._store.query_message_cold(*arguments))

    def _found(self, connection: Connection, command: RemotingCommand, result: QueryMessageResult) -> Outcome:
        if result.size > _LARGEST:
            count = len(result.buffers)
            result.release()
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                f"the {count} messages found do not fit into a frame ({MAX_FRAME} bytes): request fewer (maxNum)",
            )
        if result.size and not command.encoding and not command.flag & 2:
            return self._found_json(connection, command, result)
        ext = {
            "indexLastUpdateTimestamp": str(result.last_update_timestamp),
            "indexLastUpdatePhyoffset": str(result.last_update_physical_offset),
        }
        if not result.size:
            result.release()
            return command.reply(
                ResponseCode.QUERY_NOT_FOUND, "no message of the topic has this key in the requested time range", ext
            )
        if command.is_oneway:
            result.release()
            return None
        head = encode_head(command.reply(header=ext), result.size)
        connection.reply_with([head, *result.buffers], result.release)
        return None

    def _found_json(self, connection: Connection, command: RemotingCommand, result: QueryMessageResult) -> Outcome:
        """The reply that most clients get: a header from the template. Few records go out in one buffer with it."""
        if result.size <= _COPIED:
            return _joined(result, command.opaque)
        connection.reply_with([*_head(result, command.opaque), *result.buffers], result.release)
        return None

    def view(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """VIEW_MESSAGE_BY_ID (33): the record at an offset of the commit log; SYSTEM_ERROR if none starts there."""
        header = command.header(ViewMessageRequestHeader)
        if header.trimq_sha256 is not None:
            return self._compare(connection, command, header.offset, header.trimq_sha256)
        record = self._store.look_message(header.offset)
        if record is None:
            return self._view_cold(connection, command, header.offset)
        return self._record_reply(connection, command, record, header.offset)

    async def _view_cold(self, connection: Connection, command: RemotingCommand, offset: int) -> Any:
        return self._record_reply(connection, command, await self._store.look_message_cold(offset), offset)

    async def _compare(self, connection: Connection, command: RemotingCommand, offset: int, digest: str) -> Any:
        # A right hash says what a record is, so the answer needs what the record itself needs. Slaves ask as a
        # Super, also for what is not readable yet.
        record = self._store.look_message(offset)
        if record is None:
            record = await self._store.look_message_cold(offset)
        self._permit.require_record(connection, command, b"" if record is None else record, GET)
        try:
            same = await self._store.same_record(offset, bytes.fromhex(digest))
        except ValueError as error:
            raise RemotingError(ResponseCode.INVALID_PARAMETER, f"trimqSha256={digest[:100]!r}: {error}") from error
        text = "expired" if same is None else "true" if same else "false"
        return command.reply(header=ViewMessageResponseHeader(trimq_same=text))

    def _record_reply(
        self, connection: Connection, command: RemotingCommand, record: Any, offset: int
    ) -> RemotingCommand:
        if record is None or not len(record):
            raise RemotingError(ResponseCode.SYSTEM_ERROR, self._store.why_missing(offset))
        self._permit.require_record(connection, command, record, GET)  # the offset may lead to another topic
        return command.reply(body=bytes(record))


def _head(result: QueryMessageResult, opaque: int) -> tuple[bytes, bytes]:
    header = _TEMPLATE % (result.last_update_physical_offset, result.last_update_timestamp, opaque)
    size = len(header)
    return _pack_words(size + 4 + result.size, size), header


def _joined(result: QueryMessageResult, opaque: int) -> bytes:
    """The whole reply as one buffer. Releases the result: its views are not needed after the copy."""
    reply = b"".join([*_head(result, opaque), *result.buffers])
    result.buffers.clear()
    result.release()
    return reply
