"""Administration of transactions: half messages that wait for their end."""

from collections.abc import AsyncIterator, Iterator
from typing import Final

from msgspec import Struct

from trimq.client.admin.base import AdminBase
from trimq.client.errors import UsageError
from trimq.client.message import MessageQueue, ReceivedMessage
from trimq.client.pulling import PullCall, pull
from trimq.client.subscription import ALL, Subscription
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.headers.offset import OffsetResponseHeader, QueryConsumerOffsetRequestHeader
from trimq.protocol.headers.transaction import ResumeCheckHalfMessageRequestHeader
from trimq.protocol.message_id import decode_offset_id
from trimq.protocol.property_names import (
    PROPERTY_PGROUP,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRAN_PREPARED_QUEUE_OFFSET,
    PROPERTY_TRANSACTION_CHECK_TIMES,
)
from trimq.protocol.record import unpack_host
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from trimq.protocol.transaction import GROUP, QUEUE, number_of, op_offsets

_AT_ONCE: Final = 32
_TOOLS_GROUP: Final = "TOOLS_CONSUMER"


class PendingHalf(Struct):
    """A half message that has not been ended. ``prepared`` is when its producer sent it, in seconds since the epoch."""

    queue_offset: int
    topic: str
    group: str
    checks: int
    prepared: float
    message_id: str
    offset_message_id: str


class TransactionAdmin(AdminBase):
    """Half messages of transactions."""

    async def pending_halves(self, address: str) -> AsyncIterator[PendingHalf]:
        """The half messages of a broker that have not been ended, in the order of their queue.

        An end is known once it is in an op record, which takes up to the broker's transactionOpBatchInterval.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return [half.group async for half in admin.pending_halves("127.0.0.1:10911")]
        """
        first = await self._group_offset(address, TRANS_HALF_TOPIC)
        ended: set[int] = set()
        async for record in self._records(address, TRANS_OP_HALF_TOPIC):
            ended.update(_named(record))
        latest: dict[int, PendingHalf] = {}
        async for message in self._records(address, TRANS_HALF_TOPIC, first):
            properties = message.all_properties
            offset = message.queue_offset
            origin = number_of(properties.get(PROPERTY_TRAN_PREPARED_QUEUE_OFFSET), offset)
            # Of several records of the same half the last one counts, and its end also names the first one.
            latest.pop(origin, None)
            if offset in ended or origin in ended:
                continue
            latest[origin] = PendingHalf(
                offset,
                properties.get(PROPERTY_REAL_TOPIC, ""),
                properties.get(PROPERTY_PGROUP, ""),
                number_of(properties.get(PROPERTY_TRANSACTION_CHECK_TIMES), 0),
                message.born_time,
                message.message_id,
                message.offset_message_id,
            )
        for half in latest.values():
            yield half

    async def _group_offset(self, address: str, topic: str) -> int:
        header = QueryConsumerOffsetRequestHeader(
            consumer_group=GROUP, topic=topic, queue_id=QUEUE, set_zero_if_not_found=False
        )
        reply = await self.client.request(
            address, RequestCode.QUERY_CONSUMER_OFFSET, header, accept=(0, ResponseCode.QUERY_NOT_FOUND)
        )
        return reply.header(OffsetResponseHeader).offset if reply.code == 0 else 0

    async def _records(self, address: str, topic: str, offset: int | None = None) -> AsyncIterator[ReceivedMessage]:
        """The messages of queue 0 of a topic, from an offset or from the group's one on."""
        if offset is None:
            offset = await self._group_offset(address, topic)
        queue = MessageQueue(topic=topic, broker_name="", queue_id=QUEUE)
        subscription = Subscription(topic, ALL, 0)
        call = PullCall(_TOOLS_GROUP, queue, subscription, _AT_ONCE, with_subscription=True, hold=0.0)
        while True:
            pulled = await pull(self.client, address, call, max(offset, 0))
            block = pulled.block(ReceivedMessage)
            for message in block.messages() if block else ():
                yield message
            if pulled.next_offset >= pulled.max_offset or pulled.next_offset <= offset:
                return
            offset = pulled.next_offset

    async def resume_check(self, offset_message_id: str) -> None:
        """Lets a broker check a half message again as if it had never been checked.

        It is one that is pending, or one in TRANS_CHECK_MAX_TIME_TOPIC. Raises UsageError for an invalid id.

        >>> async def example(admin: "Admin", half: PendingHalf) -> None:
        ...     await admin.resume_check(half.offset_message_id)
        """
        try:
            host, _ = decode_offset_id(offset_message_id)
            address = "{}:{}".format(*unpack_host(host))
        except ValueError as error:
            raise UsageError(f"this is no offset message id: {error}") from None
        header = ResumeCheckHalfMessageRequestHeader(msg_id=offset_message_id)
        await self.client.request(address, RequestCode.RESUME_CHECK_HALF_MESSAGE, header)


def _named(record: ReceivedMessage) -> Iterator[int]:
    """The halves that an op record ends; none if it is damaged."""
    try:
        yield from op_offsets(bytes(record.body))
    except ValueError:
        return
