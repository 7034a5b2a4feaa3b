"""Administration of consumption: 208, 222, 223, 303, 307, 308, 309, 314, and what is passed on to clients (220, 221).

Source: RocketMQ's AdminBrokerProcessor and Broker2Client.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from trimq.broker.config import BrokerConfig
from trimq.broker.processors.admin.consume_stats import ConsumeStatsReader, QueueTable
from trimq.broker.processors.common import check_queue, invalid, no_such_group, no_such_topic
from trimq.broker.services.client_channel import ClientChannel
from trimq.protocol.body import Body, MessageQueue, TopicConfig, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import MAX_FRAME
from trimq.protocol.headers.admin import (
    CloneGroupOffsetRequestHeader,
    GetConsumeStatsRequestHeader,
    QueryConsumeTimeSpanRequestHeader,
    QueryCorrectionOffsetRequestHeader,
)
from trimq.protocol.headers.client import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    ResetOffsetRequestHeader,
)
from trimq.protocol.json_pieces import BATCH, object_pieces, table_pieces
from trimq.protocol.message_id import decode_offset_id
from trimq.protocol.topic_rules import group_problem
from trimq.remoting.errors import RemotingTimeoutError, RemotingTransportError
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import LargeReply

if TYPE_CHECKING:
    from trimq.broker.parts import BrokerParts

CLIENT_TIMEOUT: Final = 10.0
"""Seconds that a client has to answer what is passed on to it."""
_SIGNS: Final = re.compile(rb'[{}"]|\\.', re.DOTALL)
_BACKSLASHES: Final = re.compile(rb"\\+")
_BACKSLASH: Final = ord("\\")
_BRACES: Final = {b"{": 1, b"}": -1}
_WINDOW: Final = 16 * 1024
_V3_0_7: Final = 24
_V3_1_8: Final = 62
_MAX_LONG: Final = 2**63 - 1


class QueueTimeSpan(Body):
    """A queue in the reply to QUERY_CONSUME_TIME_SPAN (303); times in ms."""

    message_queue: MessageQueue
    min_time_stamp: int
    max_time_stamp: int
    consume_time_stamp: int
    delay_time: int


class ConsumeAdminProcessor:
    """Shows how far groups are, moves them, and passes questions on to their members."""

    def __init__(self, parts: "BrokerParts") -> None:
        self._parts = parts
        self._store = parts.store
        self._offsets = parts.offsets
        self._consumers = parts.consumers
        self._stats = ConsumeStatsReader(parts)

    def register(self, table: HandlerTable) -> None:
        """Take the codes of this family."""
        table.register(RequestCode.GET_CONSUME_STATS, self.consume_stats)
        table.register(RequestCode.QUERY_CONSUME_TIME_SPAN, self.time_span)
        table.register(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, self.reset_offset)
        table.register(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, self.consumer_status)
        table.register(RequestCode.GET_CONSUMER_RUNNING_INFO, self.running_info)
        table.register(RequestCode.CONSUME_MESSAGE_DIRECTLY, self.consume_directly)
        table.register(RequestCode.QUERY_CORRECTION_OFFSET, self.correction_offset)
        table.register(RequestCode.CLONE_GROUP_OFFSET, self.clone_offset)

    async def consume_stats(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_CONSUME_STATS (208): the queues of the topics asked for, or of all in which the group has offsets."""
        header = command.header(GetConsumeStatsRequestHeader)
        group = header.consumer_group
        named = [topic.strip() for topic in (header.topic_list or "").split(";") if topic.strip()]
        if named:
            topics = named
        elif header.topic and header.topic.strip():
            topics = [header.topic] if self._stats.subscribed(group, header.topic) else []
        else:
            topics = sorted(topic for topic in self._offsets.topics_of(group) if self._stats.subscribed(group, topic))
        tps = 0.0
        async with LargeReply(connection, command) as reply:
            table = QueueTable(reply, b'{"offsetTable":{')
            table.open()
            for topic in topics:
                tps += await self._stats.add_topic(table, group, topic) or 0.0
            reply.add(b'},"consumeTps":%b}' % encode_json(tps))
            return reply.end()

    async def time_span(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """QUERY_CONSUME_TIME_SPAN (303): for each queue the times of its first, last and last consumed message."""
        header = command.header(QueryConsumeTimeSpanRequestHeader)
        config = self._topic(header.topic)
        async with LargeReply(connection, command) as reply:
            reply.add(b'{"consumeTimeSpanSet":[')
            for number in range(config.write_queue_nums):
                span = await self._span(header.group, header.topic, number)
                reply.add((b"," if number else b"") + encode_json(span))
                await reply.pause()
            reply.add(b"]}")
            return reply.end()

    async def _span(self, group: str, topic: str, queue_id: int) -> QueueTimeSpan:
        store = self._store
        first = await store.earliest_store_time(topic, queue_id)
        end = store.max_offset(topic, queue_id)
        consumed = self._offsets.query(group, topic, queue_id)
        delay = 0
        if consumed < end:
            following = await store.message_store_time(topic, queue_id, max(0, consumed))
            delay = max(0, self._parts.clock.wall_ms() - following) if following > 0 else 0
        return QueueTimeSpan(
            message_queue=self._parts.queue(topic, queue_id),
            min_time_stamp=first,
            max_time_stamp=await store.message_store_time(topic, queue_id, end - 1) if end else -1,
            consume_time_stamp=await store.message_store_time(topic, queue_id, consumed - 1) if consumed > 0 else first,
            delay_time=delay,
        )

    def _topic(self, name: str) -> TopicConfig:
        config: TopicConfig | None = self._parts.topics.get(name)
        if config is None:
            raise no_such_topic(name)
        return config

    # resets

    async def reset_offset(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """INVOKE_BROKER_TO_RESET_OFFSET (222): to a time (-1: the end) or an offset, in one queue or all.

        By default the broker keeps the new offsets and hands each out at the next pull of its queue
        (PULL_OFFSET_MOVED).
        With useServerSideResetOffset=false the members of the group are told to move (220). TOPIC_NOT_EXIST,
        SUBSCRIPTION_GROUP_NOT_EXIST, INVALID_PARAMETER for a queue that the topic does not have, SYSTEM_ERROR for an
        offset that the queue does not have, SYSTEM_BUSY for one group more than maxOffsetGroups, CONSUMER_NOT_ONLINE.
        """
        header = command.header(ResetOffsetRequestHeader)
        config = self._topic(header.topic)
        if header.group not in self._parts.groups.table:
            raise no_such_group(header.group)
        if self._parts.configuration.section(BrokerConfig).use_server_side_reset_offset:
            self._offsets.check_room(header.group)
        async with LargeReply(connection, command) as reply:
            targets = await self._targets(header, config, reply)
            table = QueueTable(reply, b'{"offsetTable":{')
            table.open()
            for queue_id, offset in targets.items():
                await table.add(self._parts.queue(header.topic, queue_id), offset)
            reply.add(b"}}")

        if self._parts.configuration.section(BrokerConfig).use_server_side_reset_offset:
            for count, (queue_id, offset) in enumerate(targets.items(), 1):  # all of them, though the client may go
                self._offsets.assign_reset(header.topic, header.group, queue_id, offset)
                if count % BATCH == 0:
                    await trio.lowlevel.checkpoint()
            await self._offsets.persisted()
            self._parts.long_polling.wake_topic(header.topic)
        else:
            self._tell_members(header, reply.body())
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
        if not first <= header.offset <= end + 1:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                f"queue {queue_id} of {header.topic} has the offsets {first} to {end}, not {header.offset}",
            )
        return {queue_id: header.offset}

    async def _target(self, header: ResetOffsetRequestHeader, queue_id: int) -> int:
        if header.timestamp < 0:
            return max(0, self._store.max_offset(header.topic, queue_id))
        found = max(0, await self._store.offset_by_time(header.topic, queue_id, header.timestamp))
        if (
            header.is_force is False
            and not self._parts.configuration.section(BrokerConfig).use_server_side_reset_offset
        ):
            current = self._offsets.query(header.group, header.topic, queue_id)
            return min(found, current) if current >= 0 else found
        return found

    def _tell_members(self, header: ResetOffsetRequestHeader, body: bytes) -> None:
        members = [client for client in self._members(header.group) if client.version >= _V3_0_7]
        if not members:
            raise RemotingError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"no consumer of the group {header.group} is online to be moved"
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
                f"these consumers do not take what they are sent, and were not told to move: {', '.join(missed[:10])}",
            )

    def _members(self, group: str) -> list[ClientChannel]:
        info = self._consumers.group(group)
        return list(info.channels.values()) if info is not None else []

    # what clients are asked

    async def consumer_status(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223): the offsets that the members of a group hold, by client.

        CONSUMER_NOT_ONLINE where there is no member, or none with the address asked for.
        """
        header = command.header(GetConsumerStatusRequestHeader)
        wanted = header.client_addr
        members = [c for c in self._members(header.group) if not wanted or c.client_id == wanted]
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
                return
            if reply.code == ResponseCode.SUCCESS:
                nonlocal size
                size += len(reply.body)
                if size > MAX_FRAME:
                    nursery.cancel_scope.cancel()
                else:
                    tables[client.client_id] = bytes(reply.body)

        async with trio.open_nursery() as nursery:
            for client in members:
                nursery.start_soon(ask, client)
        if size > MAX_FRAME:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR, "the answers of the group's members do not fit into a reply: ask for one"
            )
        async with LargeReply(connection, command) as answer:
            lead = b'{"consumerTable":{'
            for name, body in tables.items():
                start = end = 0
                for start, end in inner_table(body):  # noqa: B007 - the last one counts
                    await answer.pause()
                answer.add(lead + msgspec.json.encode(name) + b":" + (body[start:end] or b"{}"))
                lead = b","
            answer.add((b"" if tables else lead) + b'},"messageQueueTable":{}}')
            return answer.end()

    async def running_info(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_CONSUMER_RUNNING_INFO (307), passed on to the client; its reply is relayed as it comes."""
        header = command.header(GetConsumerRunningInfoRequestHeader)
        return await self._pass_on(command, header.consumer_group, header.client_id, command.ext_fields(), b"")

    async def consume_directly(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """CONSUME_MESSAGE_DIRECTLY (309): a client handles one message now; its result is relayed."""
        header = command.header(ConsumeMessageDirectlyRequestHeader)
        ext = command.ext_fields()
        ext["brokerName"] = self._parts.configuration.section(BrokerConfig).broker_name
        topic = self._parts.topics.get(header.topic) if header.topic else None
        if topic is not None:
            ext["topicSysFlag"] = str(topic.topic_sys_flag)
        group = self._parts.groups.find(header.consumer_group)
        if group is not None:
            ext["groupSysFlag"] = str(group.group_sys_flag)
        try:
            _, offset = decode_offset_id(header.msg_id or "")
        except ValueError as error:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, str(error)) from None
        record = self._store.look_message(offset)
        if record is None:
            record = await self._store.look_message_cold(offset)
        if record is None or not len(record):
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"no message begins at the commit log offset {offset}")
        return await self._pass_on(command, header.consumer_group, header.client_id or "", ext, bytes(record))

    async def _pass_on(
        self, command: RemotingCommand, group: str, client_id: str, ext: dict[str, str], body: bytes
    ) -> RemotingCommand:
        client = self._consumers.find_channel(group, client_id)
        if client is None:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the consumer {client_id} of {group} is not online")
        if client.version < _V3_1_8:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the consumer {client_id} is too old for this question")
        request = RemotingCommand.request(command.code, ext, body)
        try:
            reply = await client.connection.request(request, CLIENT_TIMEOUT)
        except RemotingTimeoutError:
            raise RemotingError(
                ResponseCode.CONSUME_MSG_TIMEOUT, f"the consumer {client_id} did not answer in {CLIENT_TIMEOUT:.0f} s"
            ) from None
        except RemotingTransportError as error:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the consumer {client_id} is gone: {error}") from None
        return command.reply(reply.code, reply.remark, reply.ext_fields() or None, bytes(reply.body))

    # offsets between groups

    async def clone_offset(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """CLONE_GROUP_OFFSET (314): give a group the offsets of another, in one topic or all.

        INVALID_PARAMETER for a name that no group can have, SYSTEM_BUSY for one group more than maxOffsetGroups.
        """
        header = command.header(CloneGroupOffsetRequestHeader)
        problem = group_problem(header.dest_group)
        if problem is not None:
            raise invalid(problem)
        self._offsets.check_room(header.dest_group)
        named = [header.topic] if header.topic and header.topic.strip() else None
        for topic in named or sorted(self._offsets.topics_of(header.src_group)):
            if topic not in self._parts.topics.table:
                continue
            if header.offline or self._stats.subscribed(header.src_group, topic):
                self._offsets.clone(header.src_group, header.dest_group, topic)
        await self._offsets.persisted()
        return command.reply()

    async def correction_offset(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """QUERY_CORRECTION_OFFSET (308): per queue the smallest offset of all groups but some, against one group's."""
        header = command.header(QueryCorrectionOffsetRequestHeader)
        left_out = frozenset((header.filter_groups or "").split(","))
        smallest: dict[int, int] = {}
        async with LargeReply(connection, command) as reply:
            for queue_id, offset in self._offsets.of_others(header.topic, left_out):
                if offset >= self._store.min_offset(header.topic, queue_id):
                    smallest[queue_id] = min(offset, smallest.get(queue_id, offset))
                await reply.pause()
            for queue_id, offset in (self._offsets.query_all(header.compare_group, header.topic) or {}).items():
                if queue_id in smallest and smallest[queue_id] > offset:
                    smallest[queue_id] = _MAX_LONG
            await reply.add_all(object_pieces(("correctionOffsets", table_pieces(smallest))))
            return reply.end()


def inner_table(body: bytes) -> Iterator[tuple[int, int]]:
    """Where the text of ``messageQueueTable`` begins and ends in a client's answer, whose keys may be objects.

    The last pair is the answer, (0, 0) where there is none; those before say that there was work.
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
        if body[stop - 1] == _BACKSLASH:  # an escape is looked at as a whole
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
