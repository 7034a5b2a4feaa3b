"""Administration of clients: the connected producers and consumers, and the state that they report."""

from trimq.client.admin.base import AdminBase, each, first_that_knows
from trimq.client.admin.groups import GroupAdmin
from trimq.client.admin.models import (
    ConsumerConnection,
    ConsumerRunningInfo,
    ProducerConnection,
    ProducerInfo,
    as_kind,
    queue_table,
)
from trimq.client.errors import RocketMQError, UsageError
from trimq.client.message import MessageQueue
from trimq.protocol import lenient_json
from trimq.protocol.body import SubscriptionData
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.headers.admin import ConsumerGroupRequestHeader, ProducerGroupRequestHeader
from trimq.protocol.headers.client import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
)


class ClientAdmin(GroupAdmin, AdminBase):
    """Connected producers and consumers."""

    async def consumer_connection(self, group: str) -> ConsumerConnection:
        """The members of a consumer group. Raises UsageError (CONSUMER_NOT_ONLINE) if there are none.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return [one.client_id for one in (await admin.consumer_connection("billing")).connection_set]
        """

        async def ask(address: str) -> ConsumerConnection:
            header = ConsumerGroupRequestHeader(consumer_group=group)
            return await self._ask(address, RequestCode.GET_CONSUMER_CONNECTION_LIST, header, ConsumerConnection)

        return await first_that_knows(await self.group_masters(group), ask)

    async def producer_connection(self, group: str, topic: str) -> ProducerConnection:
        """The members of a producer group that are connected to a broker of ``topic``.

        >>> async def example(admin: "Admin") -> int:
        ...     return len((await admin.producer_connection("orders", "Orders")).connection_set)
        """

        async def ask(address: str) -> ProducerConnection:
            header = ProducerGroupRequestHeader(producer_group=group)
            return await self._ask(address, RequestCode.GET_PRODUCER_CONNECTION_LIST, header, ProducerConnection)

        return await first_that_knows(await self.topic_masters(topic), ask)

    async def producers(self, address: str) -> dict[str, list[ProducerInfo]]:
        """All producers that are connected to a broker, by group.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return sorted(await admin.producers("127.0.0.1:10911"))
        """
        answer = await self._ask(
            address, RequestCode.GET_ALL_PRODUCER_INFO, None, dict[str, dict[str, list[ProducerInfo]] | None]
        )
        return answer.get("data") or {}

    async def running_info(self, group: str, client_id: str, *, stacks: bool = False) -> ConsumerRunningInfo:
        """The state of a consumer, which a broker requests from it. ``stacks`` adds its threads' stacks (Java only).

        >>> async def example(admin: "Admin", client_id: str) -> dict[str, str]:
        ...     return (await admin.running_info("billing", client_id)).properties
        """

        async def ask(address: str) -> ConsumerRunningInfo:
            header = GetConsumerRunningInfoRequestHeader(
                consumer_group=group, client_id=client_id, jstack_enable=stacks
            )
            reply = await self.client.request(address, RequestCode.GET_CONSUMER_RUNNING_INFO, header, timeout=15.0)
            body = lenient_json.loads(bytes(reply.body))
            return ConsumerRunningInfo(
                {name: str(value) for name, value in (body.get("properties") or {}).items()},
                [as_kind(one, SubscriptionData) for one in body.get("subscriptionSet") or []],
                queue_table(body.get("mqTable")),
                body.get("statusTable") or {},
                body.get("jstack"),
            )

        return await first_that_knows(await self.group_masters(group), ask)

    async def consume_directly(
        self, group: str, client_id: str, topic: str, offset_message_id: str, *, broker_name: str | None = None
    ) -> dict[str, str]:
        """Makes one consumer consume a stored message immediately, outside of its queues; returns the result.

        ``consumeResult`` is CR_SUCCESS if the consumer has acknowledged the message. No offset is committed.

        >>> async def example(admin: "Admin", client_id: str, message_id: str) -> str:
        ...     return (await admin.consume_directly("billing", client_id, "Orders", message_id))["consumeResult"]
        """
        header = ConsumeMessageDirectlyRequestHeader(
            consumer_group=group, client_id=client_id, msg_id=offset_message_id, topic=topic, broker_name=broker_name
        )

        async def ask(address: str) -> dict[str, str]:
            reply = await self.client.request(address, RequestCode.CONSUME_MESSAGE_DIRECTLY, header, timeout=15.0)
            return {name: str(value) for name, value in lenient_json.loads(bytes(reply.body)).items()}

        return await first_that_knows(await self.topic_masters(topic), ask)

    async def consumer_offsets(
        self, topic: str, group: str, client_id: str | None = None
    ) -> dict[str, dict[MessageQueue, int]]:
        """The offsets that running consumers would commit now, by client id and queue.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return sorted(await admin.consumer_offsets("Orders", "billing"))
        """

        async def ask(address: str) -> dict[str, dict[MessageQueue, int]]:
            header = GetConsumerStatusRequestHeader(topic=topic, group=group, client_addr=client_id)
            reply = await self.client.request(
                address, RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header, timeout=15.0
            )
            table = lenient_json.loads(bytes(reply.body)).get("consumerTable") or {}
            return {client: queue_table(queues) for client, queues in table.items()}

        found: dict[str, dict[MessageQueue, int]] = {}
        for part in (await each(await self.topic_masters(topic), ask)).values():
            for client, queues in part.items():
                found.setdefault(client, {}).update(queues)
        return found

    async def is_online(self, group: str) -> bool:
        """Whether a consumer of the group is connected.

        >>> async def example(admin: "Admin") -> bool:
        ...     return await admin.is_online("billing")
        """
        try:
            await self.consumer_connection(group)
        except UsageError:
            return False
        except RocketMQError as error:
            if error.code == ResponseCode.SYSTEM_ERROR:  # the answer of old brokers for a group without members
                return False
            raise
        return True
