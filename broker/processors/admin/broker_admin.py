"""Information about the whole broker: runtime information (28), statistics (315)."""

from typing import Final

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.services.schedule import ScheduleMessageService
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.timer import TimerMessageService
from trimq.broker.store.disk.disk import Disk, DiskSpace
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.body import encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.admin import ViewBrokerStatsDataRequestHeader
from trimq.protocol.topic_rules import SCHEDULE_TOPIC
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.limits import ReactorStats

VERSION_TEXT: Final = "V5_3_3"
"""The version that clusterList shows for this broker: the protocol version that replies carry."""


class BrokerAdminProcessor:
    """Serves requests for information about the whole broker."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        schedule: ScheduleMessageService,
        timer: TimerMessageService,
        stats: BrokerStats,
        store: MessageStore,
        disk: Disk,
        reactor: ReactorStats,
    ) -> None:
        self._configuration = configuration
        self._schedule = schedule
        self._timer = timer
        self._stats = stats
        self._store = store
        self._disk = disk
        self._reactor = reactor

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.GET_BROKER_RUNTIME_INFO, self.runtime_info)
        table.register(RequestCode.VIEW_BROKER_STATS_DATA, self.stats_data)

    async def runtime_info(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_RUNTIME_INFO (28): a table of texts, which clusterList and brokerStatus show."""
        info = dict(self._store.runtime_info())
        info |= await self._store.tier_info()
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
        }
        info |= self._timer.runtime_info()
        return command.reply(body=encode_json({"table": info}))

    def _delays_info(self) -> dict[str, str]:
        store = self._store
        return {
            f"scheduleMessageOffset_{level}": f"{offset},{store.max_offset(SCHEDULE_TOPIC, level - 1)}"
            for level, offset in self._schedule.offsets().items()
        }

    def _queues_info(self) -> dict[str, str]:
        """RocketMQ's fields of thread pools, which do not exist here. Requests in flight stand for the send queue."""
        info = {}
        for name in ("send", "pull", "litePull", "query", "ack"):
            info[f"{name}ThreadPoolQueueSize"] = "0"
            info[f"{name}ThreadPoolQueueCapacity"] = "10000"
            info[f"{name}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        info["sendThreadPoolQueueSize"] = str(max(0, self._reactor.inflight - 1))  # without this request
        info["EndTransactionQueueSize"] = "0"
        info["EndTransactionThreadPoolQueueCapacity"] = "0"
        return info

    async def _disk_info(self) -> dict[str, str]:
        disk = self._disk
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
        """VIEW_BROKER_STATS_DATA (315): sums and rates of the last minute, hour and day.

        SYSTEM_ERROR if the counter does not exist.
        """
        header = command.header(ViewBrokerStatsDataRequestHeader)
        data = self._stats.view(header.stats_name, header.stats_key)
        if data is None:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR, f"there are no statistics {header.stats_name} of {header.stats_key}"
            )
        return command.reply(body=encode_json(data))


def _used(space: DiskSpace) -> str:
    """The used share of a file system, as ``0.25``; "-1" if its size is unknown."""
    return f"{1 - space.free / space.total:.4f}" if space.total else "-1"


def human_size(count: int) -> str:
    """Format a number of bytes: ``1536`` becomes ``1.5 KiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"
        size /= 1024
    return f"{size:.1f} TiB"
