"""Administration of messages: finding them by id, key, queue offset and time."""

from trimq.client.admin.base import AdminBase
from trimq.client.decode import split_messages
from trimq.client.errors import RocketMQError, UsageError
from trimq.client.message import MessageQueue, ReceivedMessage
from trimq.client.offsets import queue_master
from trimq.client.pulling import PullCall, pull
from trimq.client.subscription import ALL, Subscription
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.headers.query import QueryMessageRequestHeader, ViewMessageRequestHeader
from trimq.protocol.message_id import decode_offset_id
from trimq.protocol.record import unpack_host

TOOLS_GROUP = "TOOLS_CONSUMER"
FOREVER = 2**63 - 1


class MessageAdmin(AdminBase):
    """Messages by id, key, queue offset and time."""

    async def message_by_id(self, offset_message_id: str, topic: str | None = None) -> ReceivedMessage:
        """The message with an offset message id, from the broker whose address is in the id.

        Raises UsageError for an invalid id. For a producer's id use ``messages_by_unique_key``.

        >>> async def example(admin: "Admin", receipt: SendReceipt) -> bytes:
        ...     return (await admin.message_by_id(receipt.offset_message_id)).body
        """
        try:
            host, offset = decode_offset_id(offset_message_id)
            address = "{}:{}".format(*unpack_host(host))
        except ValueError as error:
            raise UsageError(f"this is no offset message id: {error}") from None
        header = ViewMessageRequestHeader(offset=offset, topic=topic)
        reply = await self.client.request(address, RequestCode.VIEW_MESSAGE_BY_ID, header)
        return split_messages(reply.body, await self._broker_name(address), ReceivedMessage)[0]

    async def _broker_name(self, address: str) -> str:
        for broker in (await self.cluster_info()).broker_addr_table.values():
            if address in broker.broker_addrs.values():
                return broker.broker_name
        return ""

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        begin: float = 0.0,
        end: float | None = None,
        max_messages: int = 64,
        unique: bool = False,
    ) -> list[ReceivedMessage]:
        """Messages with a key, stored between ``begin`` and ``end`` (seconds since the epoch), ordered by store time.

        ``unique`` searches for a producer's message id instead of a key. Raises TopicNotFoundError.

        >>> async def example(admin: "Admin") -> list[bytes]:
        ...     return [message.body for message in await admin.messages_by_key("Orders", "o-1")]
        """
        header = QueryMessageRequestHeader(
            topic=topic,
            key=key,
            max_num=max_messages,
            begin_timestamp=int(begin * 1000),
            end_timestamp=FOREVER if end is None else int(end * 1000),
            unique_key_query=unique or None,
        )
        found: list[ReceivedMessage] = []
        route = await self.route(topic)
        for broker in sorted(route.broker_datas, key=lambda broker: broker.broker_name):
            for address in list(broker.broker_addrs.values())[:1]:
                try:
                    reply = await self.client.request(address, RequestCode.QUERY_MESSAGE, header)
                except RocketMQError as error:
                    if error.code == ResponseCode.QUERY_NOT_FOUND:
                        continue
                    raise
                found += split_messages(reply.body, broker.broker_name, ReceivedMessage)
        # The index stores hash codes, so a broker may return messages with another key.
        wanted = [message for message in found if key == message.message_id] if unique else found
        wanted = wanted if unique else [message for message in found if key in message.keys]
        return sorted(wanted, key=lambda message: message.store_time)[:max_messages]

    async def messages_by_unique_key(self, topic: str, message_id: str) -> list[ReceivedMessage]:
        """The messages with a producer's id; several if it was stored twice by a retried send, or retried by a group.

        >>> async def example(admin: "Admin", receipt: SendReceipt) -> int:
        ...     return len(await admin.messages_by_unique_key("Orders", receipt.message_id))
        """
        return await self.messages_by_key(topic, message_id, unique=True)

    async def message_by_offset(self, queue: MessageQueue, offset: int) -> ReceivedMessage | None:
        """The message at an offset of a queue; None if there is none.

        >>> async def example(admin: "Admin", queue: MessageQueue) -> bytes | None:
        ...     found = await admin.message_by_offset(queue, 7)
        ...     return found.body if found else None
        """
        call = PullCall(TOOLS_GROUP, queue, Subscription(queue.topic, ALL, 0), 1, with_subscription=True, hold=0.0)
        address = await queue_master(self.client, queue)
        found = (await pull(self.client, address, call, offset)).block(ReceivedMessage)
        return found[0] if found and found.offsets[0] == offset else None
