"""Administration of brokers."""

from typing import Any

from trimq.client.admin.base import AdminBase, properties_of, text_of
from trimq.client.admin.models import BrokerStatsData
from trimq.protocol import lenient_json
from trimq.protocol.body import KVTable
from trimq.protocol.codes import RequestCode
from trimq.protocol.headers.admin import GetBrokerConsumeStatsRequestHeader, ViewBrokerStatsDataRequestHeader


class BrokerAdmin(AdminBase):
    """Brokers: their state, configuration and counters."""

    async def runtime_info(self, address: str) -> dict[str, str]:
        """A broker's state, with RocketMQ's names.

        >>> async def example(admin: "Admin") -> str:
        ...     return (await admin.runtime_info("127.0.0.1:10911"))["brokerVersionDesc"]
        """
        return (await self._ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, None, KVTable)).table

    async def broker_config(self, address: str) -> dict[str, str]:
        """A broker's configuration.

        >>> async def example(admin: "Admin") -> str:
        ...     return (await admin.broker_config("127.0.0.1:10911"))["flushDiskType"]
        """
        reply = await self.client.request(address, RequestCode.GET_BROKER_CONFIG, {})
        return properties_of(reply.body)

    async def update_broker_config(self, address: str, changes: dict[str, str]) -> None:
        """Changes a broker's configuration at run time. Raises UsageError for a key that cannot be changed.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.update_broker_config("127.0.0.1:10911", {"autoCreateTopicEnable": "false"})
        """
        await self.client.request(address, RequestCode.UPDATE_BROKER_CONFIG, {}, text_of(changes))

    async def broker_stats(self, address: str, name: str, key: str) -> BrokerStatsData:
        """A broker's counter ``name`` for ``key``, as TOPIC_PUT_NUMS for a topic or GROUP_GET_NUMS for ``topic@group``.

        >>> async def example(admin: "Admin") -> float:
        ...     stats = await admin.broker_stats("127.0.0.1:10911", "TOPIC_PUT_NUMS", "Orders")
        ...     return stats.stats_minute.tps
        """
        header = ViewBrokerStatsDataRequestHeader(stats_name=name, stats_key=key)
        return await self._ask(address, RequestCode.VIEW_BROKER_STATS_DATA, header, BrokerStatsData)

    async def broker_consume_stats(self, address: str, *, orderly: bool = False) -> dict[str, Any]:
        """The progress of all groups on a broker, or of orderly groups only, in RocketMQ's JSON form.

        >>> async def example(admin: "Admin") -> int:
        ...     return (await admin.broker_consume_stats("127.0.0.1:10911"))["totalDiff"]
        """
        header = GetBrokerConsumeStatsRequestHeader(is_order=orderly)
        reply = await self.client.request(address, RequestCode.GET_BROKER_CONSUME_STATS, header)
        found: dict[str, Any] = lenient_json.loads(bytes(reply.body))
        return found

    async def ha_status(self, address: str) -> dict[str, Any]:
        """A broker's replication state, in RocketMQ's JSON form.

        >>> async def example(admin: "Admin") -> bool:
        ...     return (await admin.ha_status("127.0.0.1:10911"))["master"]
        """
        reply = await self.client.request(address, RequestCode.GET_BROKER_HA_STATUS, {})
        found: dict[str, Any] = lenient_json.loads(bytes(reply.body))
        return found

    async def all_offsets(self, address: str) -> dict[str, dict[int, int]]:
        """The committed offsets of all groups on a broker, by ``topic@group`` and queue id.

        >>> async def example(admin: "Admin") -> dict[int, int]:
        ...     return (await admin.all_offsets("127.0.0.1:10911"))["Orders@billing"]
        """
        reply = await self.client.request(address, RequestCode.GET_ALL_CONSUMER_OFFSET, {})
        table = lenient_json.loads(bytes(reply.body)).get("offsetTable") or {}
        return {name: {int(queue): int(offset) for queue, offset in offsets.items()} for name, offsets in table.items()}
