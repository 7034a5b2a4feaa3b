"""The broker itself: its configuration (25, 26), how it is doing (28, 315, 317), its queues' units (321)."""

from typing import TYPE_CHECKING, Final

import msgspec

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.processors.admin.consume_stats import ConsumeStatsReader, QueueTable
from trimq.broker.processors.common import invalid
from trimq.broker.services.state_file import StateFileError
from trimq.broker.store.disk.disk import DiskSpace
from trimq.protocol.body import DataVersion, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.admin import (
    GetBrokerConsumeStatsRequestHeader,
    QueryConsumeQueueRequestHeader,
    ViewBrokerStatsDataRequestHeader,
)
from trimq.protocol.topic_rules import SCHEDULE_TOPIC
from trimq.remoting.config.configuration import parse_changes
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import LargeReply

if TYPE_CHECKING:
    from trimq.broker.parts import BrokerParts

_MOST_UNITS: Final = 65_536
"""Units that one reply shows."""
_UNITS_AT_ONCE: Final = 500
_UNIT_TEXT: Final = b'{"physicOffset":%d,"physicSize":%d,"tagsCode":%d}'
VERSION_TEXT: Final = "V5_3_3"
"""What clusterList shows as this broker's version: the protocol version that replies carry."""


class BrokerAdminProcessor:
    """Shows and changes what concerns the whole broker."""

    def __init__(self, parts: "BrokerParts") -> None:
        self._parts = parts
        self._configuration = parts.configuration
        self._store = parts.store
        self._stats = parts.stats
        self._consume_stats = ConsumeStatsReader(parts)

    def register(self, table: HandlerTable) -> None:
        """Take the codes of this family."""
        table.register(RequestCode.UPDATE_BROKER_CONFIG, self.update_config, copy_body=True)
        table.register(RequestCode.GET_BROKER_CONFIG, self.config)
        table.register(RequestCode.GET_BROKER_RUNTIME_INFO, self.runtime_info)
        table.register(RequestCode.VIEW_BROKER_STATS_DATA, self.stats_data)
        table.register(RequestCode.GET_BROKER_CONSUME_STATS, self.consume_stats)
        table.register(RequestCode.QUERY_CONSUME_QUEUE, self.consume_queue)

    # configuration

    async def update_config(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_BROKER_CONFIG (25): all changes or none, live and for the next start.

        NO_PERMISSION for protected keys, INVALID_PARAMETER for values and for keys that need a restart. Unknown keys
        are ignored, as RocketMQ does.
        """
        try:
            changes = parse_changes(bytes(command.body).decode("utf-8", "replace"))
        except ConfigError as error:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the body is not properties text: {error}") from None
        refusals = self._configuration.check_change(changes)
        if refusals:
            text = "nothing was changed: " + "; ".join(f"{refusal.key} {refusal.reason}" for refusal in refusals)
            forbidden = any(refusal.protected for refusal in refusals)
            raise RemotingError(ResponseCode.NO_PERMISSION if forbidden else ResponseCode.INVALID_PARAMETER, text)
        known = {option.key for option in self._configuration.options()}
        try:
            await self._parts.config_file.save({key: value for key, value in changes.items() if key in known})
        except StateFileError as error:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"nothing was changed: {error}") from None
        if "brokerPermission" in self._configuration.change(changes):
            await self._parts.registration.registered()
        return command.reply()

    def config(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_CONFIG (26): the effective configuration as properties text, sorted."""
        version = DataVersion(counter=self._configuration.counter, timestamp=self._parts.started_wall_ms)
        return command.reply(
            header={"version": encode_json(version).decode()}, body=self._configuration.properties_text().encode()
        )

    # how it is doing

    async def runtime_info(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_RUNTIME_INFO (28): a table of texts; clusterList and brokerStatus show it."""
        info = dict(self._store.runtime_info())
        info |= self._stats.runtime_info()
        info |= self._delays_info()
        info |= self._queues_info()
        info |= await self._disk_info()
        info |= {
            "brokerActive": "true",
            "brokerVersionDesc": VERSION_TEXT,
            "earliestMessageTimeStamp": str(await self._store.earliest_message_time()),
            "startAcceptSendRequestTimeStamp": str(
                self._configuration.section(BrokerConfig).start_accept_send_request_time_stamp
            ),
            "timerReadBehind": "0",
            "timerOffsetBehind": "0",
            "timerCongestNum": "0",
            "timerEnqueueTps": "0.0",
            "timerDequeueTps": "0.0",
        }
        return command.reply(body=encode_json({"table": info}))

    def _delays_info(self) -> dict[str, str]:
        store = self._store
        return {
            f"scheduleMessageOffset_{level}": f"{offset},{store.max_offset(SCHEDULE_TOPIC, level - 1)}"
            for level, offset in self._parts.schedule.offsets().items()
        }

    def _queues_info(self) -> dict[str, str]:
        """There are no thread pools here: what waits is requests in flight."""
        info = {}
        for name in ("send", "pull", "litePull", "query", "ack"):
            info[f"{name}ThreadPoolQueueSize"] = "0"
            info[f"{name}ThreadPoolQueueCapacity"] = "10000"
            info[f"{name}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        info["sendThreadPoolQueueSize"] = str(max(0, self._parts.requests_in_flight() - 1))  # but for this one
        info["EndTransactionQueueSize"] = "0"
        info["EndTransactionThreadPoolQueueCapacity"] = "0"
        return info

    async def _disk_info(self) -> dict[str, str]:
        disk = self._parts.disk
        config = self._configuration.section(MessageStoreConfig)
        try:
            log = await disk.run(disk.space, str(config.commit_log_path))
            root = await disk.run(disk.space, str(config.root))
        except OSError as error:
            return {"commitLogDiskRatio": "-1", "commitLogDirCapacity": f"unknown: {error.strerror}"}
        return {
            "commitLogDiskRatio": _used(log),
            "consumeQueueDiskRatio": _used(root),
            "commitLogDirCapacity": f"Total : {human_size(log.total)}, Free : {human_size(log.free)}.",
        }

    def stats_data(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """VIEW_BROKER_STATS_DATA (315): sums and rates of the last minute, hour and day; SYSTEM_ERROR for none."""
        header = command.header(ViewBrokerStatsDataRequestHeader)
        data = self._stats.view(header.stats_name, header.stats_key)
        if data is None:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR, f"there are no statistics {header.stats_name} of {header.stats_key}"
            )
        return command.reply(body=encode_json(data))

    async def consume_stats(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_BROKER_CONSUME_STATS (317): for each group and topic how far it is."""
        only_ordered = command.header(GetBrokerConsumeStatsRequestHeader).is_order
        total = 0
        async with LargeReply(connection, command) as reply:
            reply.add(b'{"brokerAddr":%b,"consumeStatsList":[' % msgspec.json.encode(self._parts.address))
            for number, group in enumerate(list(self._parts.groups.table)):
                reply.add(b"%b{%b:[" % (b"," if number else b"", msgspec.json.encode(group)))
                lead = b'{"offsetTable":{'
                for topic in self._topics_shown(group, only_ordered):
                    table = QueueTable(reply, lead)
                    tps = await self._consume_stats.add_topic(table, group, topic)
                    if tps is not None:
                        total += table.behind
                        reply.add(b'},"consumeTps":%b}' % encode_json(tps))
                        lead = b',{"offsetTable":{'
                reply.add(b"]}")
                await reply.pause()
            reply.add(b'],"totalDiff":%d,"totalInflightDiff":0}' % total)
            return reply.end()

    def _topics_shown(self, group: str, only_ordered: bool) -> list[str]:
        topics = []
        for topic in sorted(self._parts.offsets.topics_of(group)):
            config = self._parts.topics.get(topic)
            ordered = config is not None and config.order
            if (ordered or not only_ordered) and self._consume_stats.subscribed(group, topic):
                topics.append(topic)
        return topics

    async def consume_queue(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """QUERY_CONSUME_QUEUE (321): units of a queue as they lie in its files.

        INVALID_PARAMETER where more than 65,536 would have to be shown: there is no reply of a part.
        """
        header = command.header(QueryConsumeQueueRequestHeader)
        topic, queue_id = header.topic, header.queue_id
        if not self._store.has_queue(topic, queue_id):
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"there is no queue {queue_id} of {topic}")
        first, end = self._store.min_offset(topic, queue_id), self._store.max_offset(topic, queue_id)
        count = min(header.count, end - header.index) if header.index >= first else 0
        if count > _MOST_UNITS:
            raise invalid(
                f"queue {queue_id} of {topic} has {count} units from {header.index} on: ask for {_MOST_UNITS} at most"
            )
        async with LargeReply(connection, command) as reply:
            reply.add(b'{"maxQueueIndex":%d,"minQueueIndex":%d,"queueData":[' % (end, first))
            lead = b""
            for at in range(header.index, header.index + count, _UNITS_AT_ONCE):
                most = min(_UNITS_AT_ONCE, header.index + count - at)
                units = await self._store.queue_units(topic, queue_id, at, most)
                if units:
                    reply.add(lead + b",".join([_UNIT_TEXT % unit for unit in units]))
                    lead = b","
                await reply.pause()
            reply.add(b"]")
            if header.consumer_group:
                subscription = self._parts.consumers.find_subscription(header.consumer_group, topic)
                if subscription is None:
                    text = encode_json(f"{header.consumer_group}@{topic} is not online!")
                    reply.add(b',"filterData":' + text)
                else:
                    reply.add(b',"subscriptionData":' + encode_json(subscription))
            reply.add(b"}")
            return reply.end()


def _used(space: DiskSpace) -> str:
    """The share of a file system that is taken, as ``0.25``."""
    return f"{1 - space.free / space.total:.4f}" if space.total else "-1"


def human_size(count: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"
        size /= 1024
    return f"{size:.1f} TiB"
