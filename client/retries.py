"""Retries: hands messages back to the group's retry topic, and after the last retry to its dead-letter topic."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

import anyio

from trimq.client.core import Client, wall_ms
from trimq.client.delivery import ConsumerMessage
from trimq.client.errors import RocketMQError
from trimq.client.message import MessageQueue, ReceivedMessage
from trimq.client.process_queue import ProcessQueue
from trimq.client.sending import Prepared, receipts, send_command
from trimq.protocol.codes import RequestCode
from trimq.protocol.headers.send import ConsumerSendMsgBackRequestHeader
from trimq.protocol.property_names import (
    PROPERTY_DELAY,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TRAN_MSG,
)
from trimq.protocol.property_text import encode_properties
from trimq.protocol.topic_rules import retry_topic

DEFAULT_MAX_RETRIES: Final = 16
"""The limit that a copy carries if the consumer sets none. It takes precedence over the group's configuration."""

LOCAL_RETRY_DELAY: Final = 5.0
"""Seconds until a message that could not be handed back to a broker is delivered by this consumer again."""

Spawn: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]
"""Starts a background task."""


class Retries:
    """Hands back the messages of a consumer.

    ``max_retries`` None leaves the limit to the group's configuration. ``suspend`` is the pause in seconds before an
    orderly consumer's retry. ``spawn`` starts a background task.
    """

    def __init__(self, client: Client, group: str, max_retries: int | None, suspend: float, spawn: Spawn) -> None:
        self._client = client
        self._group = group
        self._max_retries = max_retries
        self._suspend = suspend
        self._spawn = spawn

    async def to_retry_topic(
        self, process_queue: ProcessQueue, messages: list[ReceivedMessage], delay_level: int
    ) -> None:
        """Hands messages back to the retry topic, for any member of the group.

        A message that could not be handed back is delivered by this consumer again after LOCAL_RETRY_DELAY.
        """
        most = -1 if self._max_retries is None else self._max_retries
        stay = [
            message
            for message in messages
            if not await send_back(self._client, self._group, message, delay_level, most)
        ]
        # Only now: the retry topic has them, so their offsets may be committed. Messages that stay hold the commit
        # back.
        process_queue.finished([message for message in messages if message not in stay])
        if stay:
            self._spawn(partial(self._put_back_later, process_queue, stay, LOCAL_RETRY_DELAY))

    async def in_place(self, process_queue: ProcessQueue, messages: list[ReceivedMessage], delay_level: int) -> None:
        """Retries messages in their queue, which waits for them; after the last retry they become dead letters."""
        most = self._max_retries
        spent: list[ReceivedMessage] = []
        for message in messages:
            assert isinstance(message, ConsumerMessage)
            dead = delay_level < 0 or (most is not None and message.delivery_attempt > most)
            if dead and await send_back(self._client, self._group, message, -1, -1 if most is None else most):
                spent.append(message)
            else:
                message.attempts += 1
        left = [message for message in messages if message not in spent]
        if spent:
            process_queue.finished(spent)
        if left:
            process_queue.busy = True  # finished() may have set it to False, but the queue has to wait for these
            self._spawn(partial(self._put_back_later, process_queue, left, self._suspend))

    async def _put_back_later(
        self, process_queue: ProcessQueue, messages: list[ReceivedMessage], seconds: float
    ) -> None:
        await anyio.sleep(seconds)
        process_queue.put_back(messages)


async def send_back(client: Client, group: str, message: ReceivedMessage, delay_level: int, max_retries: int) -> bool:
    """Asks the broker to store the message for a retry by the group. If that fails, sends a copy to the retry topic.

    ``max_retries`` below 0 leaves the limit to the group's configuration, ``delay_level`` below 0 makes the message a
    dead letter. Returns False if both failed: the message must stay with its consumer.
    """
    try:
        await _ask_broker(client, group, message, delay_level, max_retries)
    except RocketMQError as error:
        client.outages.note("handing a message back; a copy is sent", error, group=group, message=message)
    else:
        return True
    try:
        await _send_copy(client, group, message, delay_level, max_retries)
    except RocketMQError as error:
        client.outages.note("sending a copy; the message stays here", error, group=group, message=message)
        return False
    return True


async def _ask_broker(client: Client, group: str, message: ReceivedMessage, delay_level: int, max_retries: int) -> None:
    route = await client.routes.get(message.stored_topic)
    header = ConsumerSendMsgBackRequestHeader(
        offset=message.commit_log_offset,
        group=group,
        delay_level=delay_level,
        origin_msg_id=message.offset_message_id,
        origin_topic=message.topic,
        unit_mode=False,
        max_reconsume_times=max_retries if max_retries >= 0 else None,
    )
    address = await client.master(route, message.broker_name)
    await client.request(address, RequestCode.CONSUMER_SEND_MSG_BACK, header, timeout=5.0)


async def _send_copy(client: Client, group: str, message: ReceivedMessage, delay_level: int, max_retries: int) -> None:
    times = message.reconsume_times + 1
    most = max_retries if max_retries >= 0 else DEFAULT_MAX_RETRIES
    if delay_level < 0:
        times = most + 1
    properties = dict(message.all_properties)
    properties.pop(PROPERTY_TRAN_MSG, None)  # else the broker would treat the copy as a prepared message
    properties |= {
        PROPERTY_RETRY_TOPIC: message.topic,
        PROPERTY_ORIGIN_MESSAGE_ID: properties.get(PROPERTY_ORIGIN_MESSAGE_ID) or message.offset_message_id,
        PROPERTY_RECONSUME_TIME: str(times),
        PROPERTY_MAX_RECONSUME_TIMES: str(most),
        PROPERTY_DELAY: str(delay_level if delay_level > 0 else 3 + message.reconsume_times),  # RocketMQ's default
    }
    prepared = Prepared(
        RequestCode.SEND_MESSAGE_V2,
        retry_topic(group),
        message.body,
        encode_properties(properties),
        0,
        message.flag,
        wall_ms(),
        (message.message_id,),
        times,
        most,
    )
    route = await client.routes.refresh(prepared.topic, create=True)
    error: RocketMQError | None = None
    for name in route.brokers:
        queue = MessageQueue(topic=prepared.topic, broker_name=name, queue_id=0)
        try:
            address = await client.master(route, name)
            reply = await client.invoke(address, send_command(group, prepared, queue), 5.0)
            receipts(reply, prepared, queue, address)
        except RocketMQError as failure:
            error = failure
        else:
            return
    raise error or RocketMQError("the retry topic has no broker")
