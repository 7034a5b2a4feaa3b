"""TraceHooks: the interceptor that makes message traces.

It follows RocketMQ's SendMessageTraceHookImpl, ConsumeMessageTraceHookImpl and EndTransactionTraceHookImpl. Unlike
there, failed sends are traced too. Sends without a reply are not traced, since it is unknown whether the message is
stored. What brokers with ``traceOn=false`` store is not traced, nor are messages of the trace topic itself.
"""

import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from trimq.client.core import Client, wall_ms
from trimq.client.interceptors import EndTransactionContext, Interceptor, ProcessContext, RecallContext, SendContext
from trimq.client.message import Message, ReceivedMessage, SendReceipt, SendStatus
from trimq.client.trace.dispatcher import TraceDispatcher
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.send import SendMessageResponseHeader
from trimq.protocol.message_id import decode_offset_id
from trimq.protocol.message_trace import (
    DEFAULT_REGION,
    ConsumeReturnType,
    EndState,
    EndTransactionTrace,
    MessageType,
    PubTrace,
    RecallTrace,
    SubAfterTrace,
    SubBeforeTrace,
)
from trimq.protocol.property_names import (
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_MSG_REGION,
    PROPERTY_START_DELIVER_TIME,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRACE_ON,
    PROPERTY_TRAN_MSG,
    PROPERTY_UNIQ_KEY,
)
from trimq.protocol.record import unpack_host
from trimq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK

_DELAYS: Final = frozenset(
    {
        PROPERTY_DELAY,
        PROPERTY_TIMER_DELIVER_MS,
        PROPERTY_TIMER_DELAY_SEC,
        PROPERTY_TIMER_DELAY_MS,
        PROPERTY_START_DELIVER_TIME,
    }
)
_STATES: Final = {TRANSACTION_COMMIT: EndState.COMMIT, TRANSACTION_ROLLBACK: EndState.ROLLBACK}


class _Began(NamedTuple):
    """The start of a send or of the processing of messages: ms since the epoch, and monotonic seconds."""

    wall: int
    monotonic: float

    def cost(self) -> int:
        """Milliseconds since then."""
        return int((time.monotonic() - self.monotonic) * 1000)


class TraceHooks(Interceptor):
    """Makes the traces of one producer or consumer and gives them to its dispatcher."""

    def __init__(self, client: Client, dispatcher: TraceDispatcher) -> None:
        self._client = client
        self._dispatcher = dispatcher
        self._brokers: dict[str, tuple[str, bool]] = {}
        """Each broker's region, and whether it wants traces, by its last reply to a send."""

    def replied(self, broker_name: str, reply: RemotingCommand) -> None:
        """Takes note of the region and the trace switch in a broker's reply to a send."""
        header = reply.header(SendMessageResponseHeader)
        self._brokers[broker_name] = (header.msg_region, _is_on(header.trace_on))

    def _broker(self, broker_name: str | None) -> tuple[str, bool]:
        return self._brokers.get(broker_name or "", (DEFAULT_REGION, True))

    # -- producers -------------------------------------------------------------------------------------------------

    def before_send(self, context: SendContext) -> None:
        """Notes the time."""
        if context.message.topic != self._dispatcher.topic:
            context.data[self] = _Began(wall_ms(), time.monotonic())

    def after_send(self, context: SendContext) -> None:
        """Traces a send that has a result, once the message has an id."""
        began: _Began | None = context.data.pop(self, None)
        receipt = context.receipt
        message_id = receipt.message_id if receipt is not None else context.properties.get(PROPERTY_UNIQ_KEY)
        if began is None or message_id is None or (receipt is None and context.error is None):
            return
        queue = context.queue if receipt is None else receipt.queue
        region, wanted = self._broker(queue.broker_name if queue is not None else None)
        if not wanted:
            return
        self._dispatcher.append(
            PubTrace(
                timestamp=began.wall,
                region=region,
                group=context.group,
                topic=context.message.topic,
                message_id=message_id,
                tags=context.properties.get(PROPERTY_TAGS),
                keys=context.properties.get(PROPERTY_KEYS),
                store_host=context.address or _store_host(receipt),
                body_length=len(context.message.body),
                cost=began.cost(),
                message_type=_message_type(context.properties),
                offset_message_id=receipt.offset_message_id if receipt is not None else None,
                success=receipt is not None and receipt.status is SendStatus.SEND_OK,
            )
        )

    def after_end_transaction(self, context: EndTransactionContext) -> None:
        """Traces the end of a transaction, whether or not the request has reached the broker, as RocketMQ does."""
        message = context.message
        if message.topic == self._dispatcher.topic:
            return
        region, wanted = self._broker(context.queue.broker_name if context.queue is not None else None)
        if isinstance(message, ReceivedMessage):
            region, wanted = _of_received(message)
        if not wanted:
            return
        self._dispatcher.append(
            EndTransactionTrace(
                timestamp=wall_ms(),
                region=region,
                group=context.group,
                topic=message.topic,
                message_id=context.message_id,
                tags=message.tags,
                keys=_keys_text(message),
                store_host=context.address or "",
                message_type=MessageType.TRANS_COMMIT,
                transaction_id=context.transaction_id,
                state=_STATES.get(context.state, EndState.UNKNOWN),
                from_transaction_check=context.checked,
            )
        )

    def after_recall(self, context: RecallContext) -> None:
        """Traces a recall (RocketMQ's DefaultRecallMessageTraceHook, which only a system property switches on)."""
        region, wanted = self._broker(context.broker_name)
        if not wanted or context.topic == self._dispatcher.topic:
            return
        self._dispatcher.append(
            RecallTrace(wall_ms(), region, context.group, context.topic, context.message_id, context.error is None)
        )

    # -- consumers -------------------------------------------------------------------------------------------------

    def before_process(self, context: ProcessContext) -> None:
        """Traces the start of the processing of each message."""
        began = _Began(wall_ms(), time.monotonic())
        request_id = self._client.unique_ids.next()
        traced: list[ReceivedMessage] = []
        for message in context.messages:
            region, wanted = _of_received(message)
            if not wanted or message.stored_topic == self._dispatcher.topic:
                continue
            traced.append(message)
            self._dispatcher.append(
                SubBeforeTrace(
                    timestamp=began.wall,
                    region=region,
                    group=context.group,
                    request_id=request_id,
                    message_id=message.message_id,
                    retry_times=message.reconsume_times,
                    keys=_keys_text(message),
                )
            )
        if traced:
            context.data[self] = (began, request_id, traced)

    def after_process(self, context: ProcessContext) -> None:
        """Traces the end of the processing; of several messages, each gets its share of the time."""
        found: tuple[_Began, str, list[ReceivedMessage]] | None = context.data.pop(self, None)
        if found is None:
            return
        began, request_id, traced = found
        code = ConsumeReturnType.SUCCESS
        if not context.acknowledged:
            # None: the processing was cancelled, and the messages are delivered again.
            code = ConsumeReturnType.FAILED if context.acknowledged is None else ConsumeReturnType.EXCEPTION
        cost = began.cost() // len(context.messages)
        now = wall_ms()
        for message in traced:
            self._dispatcher.append(
                SubAfterTrace(
                    request_id=request_id,
                    message_id=message.message_id,
                    cost=cost,
                    success=context.acknowledged is True,
                    keys=_keys_text(message),
                    context_code=code,
                    timestamp=now,
                    group=context.group,
                )
            )

    def polled(self, group: str, messages: list[ReceivedMessage]) -> None:
        """Traces messages that a program has polled: their processing cannot be seen, and counts as a success."""
        context = ProcessContext(group, messages)
        self.before_process(context)
        context.acknowledged = True
        self.after_process(context)


def _is_on(switch: str | None) -> bool:
    return switch != "false"


def _of_received(message: ReceivedMessage) -> tuple[str, bool]:
    """The region of the broker that stored a message, and whether that broker wants it traced."""
    properties = message.all_properties
    return properties.get(PROPERTY_MSG_REGION) or DEFAULT_REGION, _is_on(properties.get(PROPERTY_TRACE_ON))


def _keys_text(message: Message | ReceivedMessage) -> str | None:
    return " ".join(message.keys) or None


def _store_host(receipt: SendReceipt | None) -> str:
    """The address in the receipt of a message that was sent in a batch."""
    if receipt is None:
        return ""
    try:
        host, _ = decode_offset_id(receipt.offset_message_id)
    except ValueError:
        return ""
    return "{}:{}".format(*unpack_host(host))


def _message_type(properties: Mapping[str, str]) -> MessageType:
    if not _DELAYS.isdisjoint(properties):
        return MessageType.DELAY
    return MessageType.TRANS_HALF if properties.get(PROPERTY_TRAN_MSG) == "true" else MessageType.NORMAL
