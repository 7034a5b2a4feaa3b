"""Requests that the broker forwards to clients: 223 (sent to them as 221), 307, 309.

Source: RocketMQ's AdminBrokerProcessor and Broker2Client.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec
import trio

from trimq.broker.identity import BrokerIdentity
from trimq.broker.services.client_channel import ClientChannel
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.auth.rules import SUB
from trimq.protocol.auth.signature import without_signature
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import MAX_FRAME
from trimq.protocol.headers.client import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
)
from trimq.protocol.json_pieces import BATCH
from trimq.protocol.message_id import decode_offset_id
from trimq.remoting.auth.permit import OPEN, Permit
from trimq.remoting.errors import RemotingTimeoutError, RemotingTransportError
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import LargeReply

CLIENT_TIMEOUT: Final = 10.0
"""Seconds that a client has to answer a forwarded request."""
_SIGNS: Final = re.compile(rb'[{}"]|\\.', re.DOTALL)
_BACKSLASHES: Final = re.compile(rb"\\+")
_BACKSLASH: Final = ord("\\")
_BRACES: Final = {b"{": 1, b"}": -1}
_WINDOW: Final = 16 * 1024
_V3_1_8: Final = 62


class ClientAdminProcessor:
    """Forwards requests to the members of consumer groups."""

    def __init__(
        self,
        *,
        identity: BrokerIdentity,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        consumers: ConsumerManager,
        store: MessageStore,
        permit: Permit = OPEN,
    ) -> None:
        self._identity = identity
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._store = store
        self._permit = permit

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, self.consumer_status)
        table.register(RequestCode.GET_CONSUMER_RUNNING_INFO, self.running_info)
        table.register(RequestCode.CONSUME_MESSAGE_DIRECTLY, self.consume_directly)

    async def consumer_status(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223): the offsets that the members of a group hold, by client.

        CONSUMER_NOT_ONLINE if the group has no member, or none with the requested address.
        """
        header = command.header(GetConsumerStatusRequestHeader)
        wanted = header.client_addr
        members = [c for c in self._consumers.channels(header.group) if not wanted or c.client_id == wanted]
        if not members:
            raise RemotingError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"no consumer {wanted or ''} of the group {header.group} is online"
            )
        tables: dict[str, bytes] = {}
        size = 0
        ext = {"topic": header.topic, "group": header.group}

        async def ask(client: ClientChannel) -> None:
            request = RemotingCommand.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, ext)
            try:
                reply = await client.connection.request(request, CLIENT_TIMEOUT / 2)
            except (RemotingTransportError, FrameError):
                return  # the reply has the members that did answer, as in RocketMQ
            if reply.code == ResponseCode.SUCCESS:
                nonlocal size
                size += len(reply.body)
                if size > MAX_FRAME:  # do not collect more than one reply can hold: every body is in memory
                    nursery.cancel_scope.cancel()
                else:
                    tables[client.client_id] = bytes(reply.body)

        async with trio.open_nursery() as nursery:
            for client in members:
                nursery.start_soon(ask, client)
        if size > MAX_FRAME:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                "the replies of the group's members do not fit into one frame: request a single client",
            )
        async with LargeReply(connection, command) as answer:
            lead = b'{"consumerTable":{'
            for name, body in tables.items():
                start = end = 0
                for start, end in inner_table(body):  # noqa: B007 - the last pair is the result
                    await answer.pause()
                answer.add(lead + msgspec.json.encode(name) + b":" + (body[start:end] or b"{}"))
                lead = b","
            answer.add((b"" if tables else lead) + b'},"messageQueueTable":{}}')
            return answer.end()

    async def running_info(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_CONSUMER_RUNNING_INFO (307), forwarded to the client unsigned; its reply is relayed unchanged."""
        header = command.header(GetConsumerRunningInfoRequestHeader)
        return await self._forward(command, header.consumer_group, header.client_id, command.ext_fields(), b"")

    async def consume_directly(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """CONSUME_MESSAGE_DIRECTLY (309): a client consumes one stored message now; its result is relayed."""
        header = command.header(ConsumeMessageDirectlyRequestHeader)
        ext = command.ext_fields()
        ext["brokerName"] = self._identity.broker_name
        topic = self._topics.get(header.topic) if header.topic else None
        if topic is not None:
            ext["topicSysFlag"] = str(topic.topic_sys_flag)
        group = self._groups.find(header.consumer_group)
        if group is not None:
            ext["groupSysFlag"] = str(group.group_sys_flag)
        try:
            _, offset = decode_offset_id(header.msg_id or "")
        except ValueError as error:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, str(error)) from None
        checks = self._permit.checks_records(command)
        record = await self._store.look_queued(offset) if checks else self._store.look_message(offset)
        if record is None:
            record = await self._store.look_message_cold(offset)
        if record is None or not len(record):
            raise RemotingError(ResponseCode.SYSTEM_ERROR, self._store.why_missing(offset))
        self._permit.require_record(connection, command, record, SUB)  # the offset may lead to another topic
        return await self._forward(command, header.consumer_group, header.client_id or "", ext, bytes(record))

    async def _forward(
        self, command: RemotingCommand, group: str, client_id: str, ext: dict[str, str], body: bytes
    ) -> RemotingCommand:
        client = self._consumers.find_channel(group, client_id)
        if client is None:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the consumer {client_id} of {group} is not online")
        if client.version < _V3_1_8:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the consumer {client_id} is too old for this request")
        # The client is another user's, and chooses its own id: with the signature it could do what the caller may do.
        request = RemotingCommand.request(command.code, without_signature(ext), body)
        try:
            reply = await client.connection.request(request, CLIENT_TIMEOUT)
        except RemotingTimeoutError:
            raise RemotingError(
                ResponseCode.CONSUME_MSG_TIMEOUT,
                f"the consumer {client_id} did not answer within {CLIENT_TIMEOUT:.0f} s",
            ) from None
        except (RemotingTransportError, FrameError) as error:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR, f"the connection to the consumer {client_id} failed: {error}"
            ) from None
        return command.reply(reply.code, reply.remark, reply.ext_fields() or None, bytes(reply.body))


def inner_table(body: bytes) -> Iterator[tuple[int, int]]:
    """Find the start and the end of ``messageQueueTable``'s value in a client's reply.

    The keys of that table may be objects (fastjson's form), so no JSON parser reads it: braces outside of strings are
    counted. The last pair is the result, (0, 0) if there is none. Each earlier pair marks a slice of work, after which
    the caller may let other tasks run.
    """
    name = b'"messageQueueTable":'
    at = body.find(name)
    if at < 0:
        return
    start = at = at + len(name)
    depth = 0
    quoted = False
    while at < len(body):
        yield 0, 0
        stop = min(at + _WINDOW, len(body))
        if body[stop - 1] == _BACKSLASH:  # a window must not end inside an escape sequence
            stop = _BACKSLASHES.match(body, stop - 1).end() + 1  # type: ignore[union-attr]
        for count, sign in enumerate(_SIGNS.finditer(body, at, stop), 1):
            found = sign.group()
            if found == b'"':
                quoted = not quoted
            elif not quoted and found in _BRACES:
                depth += _BRACES[found]
                if depth <= 0:
                    yield (start, sign.end()) if not depth else (0, 0)
                    return
            if count % BATCH == 0:
                yield 0, 0
        at = stop
    yield 0, 0
