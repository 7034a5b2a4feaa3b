"""Producer: sends messages, many at the same time, and reports the outcome of each."""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Final

from trimq.client.attempts import Attempts
from trimq.client.batching import Batcher
from trimq.client.compression import Compression
from trimq.client.core import Client, ClientOptions, Push
from trimq.client.errors import NotStoredError, PerhapsStoredError, RocketMQError, UsageError
from trimq.client.in_flight_limit import InFlightLimit
from trimq.client.interceptors import Interceptor, RecallContext, SendContext, call_all
from trimq.client.member import GroupMember
from trimq.client.message import Message, MessageQueue, ReceivedMessage, SendOutcome, SendReceipt
from trimq.client.request_reply import Requests, deliver_reply, reply_message
from trimq.client.routes import TopicRoute
from trimq.client.sending import (
    BatchEntry,
    Limits,
    Prepared,
    entry_text,
    prepare,
    prepare_batch,
    prepare_entry,
    send_command,
)
from trimq.protocol.body import ConsumerData, ProducerData
from trimq.protocol.codes import RequestCode
from trimq.protocol.hashing import string_hash
from trimq.protocol.headers.send import RecallMessageRequestHeader, RecallMessageResponseHeader
from trimq.protocol.recall_handle import RecallHandleError, decode_handle

MAX_MESSAGE_SIZE: Final = 4 * 1024 * 1024
"""Largest body in bytes, as brokers have it by default."""
_NOT_STORED: Final = SendOutcome.NOT_STORED
_STORED: Final = SendOutcome.STORED


class Producer(GroupMember):
    """Sends messages. Opened by ``async with``; any number of tasks may send at the same time.

    A failed send is retried up to ``retries`` times, on another broker if there is one. With ``retry_unknown=False`` it
    is not retried after an attempt that may have stored the message. ``send_timeout`` (seconds) bounds one attempt; for
    a timeout of the whole send, use a cancel scope. A send waits while ``max_in_flight`` messages or
    ``max_in_flight_bytes`` of bodies are in flight.

    ``linger`` (seconds) collects messages of the same topic into batches of up to ``batch_bytes``; None sends each
    message in a request of its own. ``compression`` is applied to bodies of at least ``compress_over`` bytes, but not
    in batches. ``max_message_size`` (bytes) should not be larger than the brokers'. ``create_topics=False`` does not
    send to topics that do not exist, even if brokers would create them. ``enable_msg_trace`` reports each send to the
    trace topic, or to ``customized_trace_topic``; ``trace_dispatcher`` counts the reports.

    Raises UsageError for an invalid group name, and if no name server is given.

    >>> async def example(namesrv: str) -> None:
    ...     async with Producer("orders", namesrv=namesrv) as producer:
    ...         receipt = await producer.send(Message("Orders", b"1 book", tags="paid", keys=["o-1"]))
    ...         print(receipt.message_id, receipt.queue, receipt.queue_offset)
    """

    def __init__(  # noqa: PLR0913 - settings, each by keyword
        self,
        group: str,
        *,
        namesrv: str | Iterable[str] | None = None,
        client: Client | None = None,
        options: ClientOptions | None = None,
        retries: int = 2,
        retry_unknown: bool = True,
        send_timeout: float = 3.0,
        max_in_flight: int = 4096,
        max_in_flight_bytes: int = 64 * 1024 * 1024,
        linger: float | None = None,
        batch_bytes: int = 256 * 1024,
        compression: Compression | None = "zlib",
        compress_over: int = 4096,
        compression_level: int = 5,
        max_message_size: int = MAX_MESSAGE_SIZE,
        create_topics: bool = True,
        interceptors: Sequence[Interceptor] = (),
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
    ) -> None:
        super().__init__(group, namesrv, client, options)
        self._attempts = Attempts(
            self.client,
            group,
            retries=retries,
            retry_unknown=retry_unknown,
            timeout=send_timeout,
            create_topics=create_topics,
        )
        self._send_timeout = send_timeout
        self._ids = self.client.unique_ids
        self._limits = Limits(max_message_size, compression, compress_over, compression_level)
        # A reply after which the outcome is unknown is not sent again: the client that asked may have it.
        self._replies = Attempts(
            self.client, group, retries=retries, retry_unknown=False, timeout=send_timeout, create_topics=False
        )
        if enable_msg_trace:
            hooks = self._traced("PRODUCE", customized_trace_topic)
            self._attempts.on_reply = self._replies.on_reply = hooks.replied
            interceptors = (*interceptors, hooks)
        self._interceptors = tuple(interceptors)
        self._before = [hook.before_send for hook in interceptors]
        self._after = [hook.after_send for hook in interceptors]
        self._in_flight = InFlightLimit(max_in_flight, max_in_flight_bytes)
        self._batcher = None
        if linger is not None:
            self._batcher = Batcher(linger, min(batch_bytes, max_message_size), self._attempts, self.spawn)
        self._requests = Requests(self.client, route=self._route, send=self.send, spawn=self.spawn)

    async def _open(self) -> None:
        self.client.join(self)
        self._start_trace()
        if self._batcher is not None:
            self._batcher.start()
            self.spawn(self._batcher.run)

    async def _close(self) -> None:
        self._requests.close()
        if self._batcher is not None:
            await self._batcher.flush()
        if self.client.is_open:
            await self.client.leave(self)
        await self._end_trace()

    # -- the interface to the client instance ----------------------------------------------------------------------

    def producer_data(self) -> ProducerData | None:
        """Its part of the heartbeat."""
        return ProducerData(group_name=self.group)

    def consumer_data(self) -> ConsumerData | None:
        """None: a producer does not consume."""
        return None

    def pushes(self) -> dict[int, Push]:
        """Handles the replies to its requests, which a broker pushes as requests of its own."""
        return {RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self._requests.pushed}

    # -- sending ---------------------------------------------------------------------------------------------------

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues to which messages of ``topic`` can be sent, in the order in which sharding keys index them.

        Raises TopicNotFoundError, NoBrokerError, UnreachableError, and NotStoredError if no queue is writable.

        >>> async def last_queue(producer: Producer) -> MessageQueue:
        ...     return (await producer.queues("Orders"))[-1]
        """
        self._check_open()
        return list((await self._route(topic)).write_queues)

    async def send(self, message: Message, *, queue: MessageQueue | None = None) -> SendReceipt:
        """Sends a message and returns the broker's receipt: the message is stored.

        The message goes to ``queue`` if given, else to the queue of its sharding key, else to the next queue in turn.

        Raises UsageError (fix the call), NotStoredError (safe to retry) or PerhapsStoredError (a retry may store the
        message twice). After a cancellation, ``message.outcome`` says whether the message may be stored.

        >>> async def in_time(producer: Producer, message: Message) -> bool:
        ...     with anyio.move_on_after(1):
        ...         await producer.send(message)
        ...     return message.outcome is SendOutcome.STORED
        """
        self._check_open()
        message.outcome = _NOT_STORED
        context = self._observed(message, queue) if self._interceptors else None
        properties = None
        if context is not None:
            properties, queue = context.properties, context.queue
        in_flight, size = self._in_flight, len(message.body)
        try:
            if not in_flight.try_enter(size):
                await in_flight.enter(size)
            try:
                if queue is None and message.sharding_key is not None:
                    queue = await self._ordered_queue(message)
                # Brokers refuse delayed messages in a batch, and handle transactions and requests one by one.
                if self._batcher is not None and not message.is_delayed and not message.system_properties:
                    text = entry_text(message, properties, self._ids, self._limits.max_message_size)
                    receipt = await self._batcher.send(message, text, queue)
                else:
                    prepared = prepare(message, properties, self._ids, self._limits)
                    receipt = (await self.deliver(prepared, queue, (message,), context))[0]
            finally:
                in_flight.leave(size)
        except BaseException as error:
            # A cancellation is no RocketMQError: the outcome stays as the attempt has set it.
            if isinstance(error, PerhapsStoredError):
                message.outcome = SendOutcome.PERHAPS_STORED
            elif isinstance(error, RocketMQError):
                message.outcome = SendOutcome.NOT_STORED
            if context is not None:
                context.error = error
                call_all(self._after, context)
            raise
        message.outcome = _STORED
        if context is not None:
            context.receipt = receipt
            call_all(self._after, context)
        return receipt

    def _observed(self, message: Message, queue: MessageQueue | None) -> SendContext:
        context = SendContext(self.group, message, message.wire_properties(), queue)
        call_all(self._before, context)
        return context

    async def _ordered_queue(self, message: Message) -> MessageQueue | None:
        if message.sharding_key is None:
            return None
        queues = (await self._route(message.topic)).write_queues
        return queues[abs(string_hash(message.sharding_key)) % len(queues)]

    async def _route(self, topic: str) -> TopicRoute:
        return await self._attempts.route(topic)

    def deliver(
        self,
        prepared: Prepared,
        queue: MessageQueue | None,
        messages: Sequence[Message],
        context: SendContext | None = None,
    ) -> Awaitable[list[SendReceipt]]:
        """Sends a prepared message or batch, with retries, and returns the receipts of its messages.

        Raises the last attempt's error, or PerhapsStoredError if an earlier attempt may have stored the message.
        """
        return self._attempts.deliver(prepared, queue, messages, context)

    async def send_oneway(self, message: Message, *, queue: MessageQueue | None = None) -> None:
        """Sends a message to which the broker does not reply, so it is unknown whether the message is stored.

        There are no retries. Raises UsageError, and NotStoredError if the message was certainly not sent.

        >>> async def hint(producer: Producer) -> None:
        ...     await producer.send_oneway(Message("Metrics", b"cpu=3"))
        """
        self._check_open()
        message.outcome = _NOT_STORED
        context = SendContext(self.group, message, message.wire_properties(), queue)
        call_all(self._before, context)
        prepared = prepare(message, context.properties, self._ids, self._limits)
        route = await self._route(message.topic)
        target = queue or await self._ordered_queue(message) or self._attempts.select(route)
        address = await self.client.master(route, target.broker_name)
        command = send_command(self.group, prepared, target)
        message.outcome = SendOutcome.PERHAPS_STORED
        try:
            await self.client.oneway(address, command.code, command.ext, prepared.body)
        except (NotStoredError, UsageError):
            message.outcome = _NOT_STORED
            raise
        finally:
            call_all(self._after, context)

    async def send_batch(self, messages: Iterable[Message], *, queue: MessageQueue | None = None) -> list[SendReceipt]:
        """Sends messages in as few requests as their sizes allow, and returns a receipt for each, in order.

        A batch has messages of one topic and goes to one queue; messages of several topics make several batches. The
        batches are sent one after the other. If one fails, its error is raised: the batches before it are stored, those
        after it are not sent, and each message's ``outcome`` says what is known. Raises the same errors as ``send``.

        >>> async def import_all(producer: Producer, lines: list[bytes]) -> int:
        ...     return len(await producer.send_batch(Message("Import", line) for line in lines))
        """
        self._check_open()
        every = list(messages)
        found: dict[int, SendReceipt] = {}
        contexts: dict[int, SendContext] = {}
        for message in every:
            message.outcome = SendOutcome.NOT_STORED
        try:
            if self._interceptors:
                for number, message in enumerate(every):
                    contexts[number] = self._observed(message, queue)
            for batch in self._split(every, contexts):
                members = [every[number] for number, _ in batch]
                receipts = await self._send_batch(members, [entry for _, entry in batch], queue)
                for (number, _), receipt in zip(batch, receipts, strict=True):
                    found[number] = receipt
                    if contexts:
                        context = contexts.pop(number)
                        context.queue, context.receipt = receipt.queue, receipt
                        call_all(self._after, context)
        except BaseException as error:
            for context in contexts.values():  # those of the messages without a receipt
                context.error = error
                call_all(self._after, context)
            raise
        return [found[number] for number in range(len(every))]

    async def _send_batch(
        self, messages: list[Message], entries: list[BatchEntry], queue: MessageQueue | None
    ) -> list[SendReceipt]:
        """Sends one batch and sets the outcome of its messages."""
        wait_stored = all(message.wait_stored for message in messages)
        prepared = prepare_batch(messages[0].topic, entries, wait_stored=wait_stored)
        size = len(prepared.body)
        await self._in_flight.enter(size)
        try:
            receipts = await self.deliver(prepared, queue, messages)
        except RocketMQError as error:
            unknown = isinstance(error, PerhapsStoredError)
            for message in messages:
                message.outcome = SendOutcome.PERHAPS_STORED if unknown else SendOutcome.NOT_STORED
            raise
        finally:
            self._in_flight.leave(size)
        for message in messages:
            message.outcome = SendOutcome.STORED
        return receipts

    def _split(self, messages: list[Message], contexts: dict[int, SendContext]) -> list[list[tuple[int, BatchEntry]]]:
        """Splits messages into batches of one topic each, none larger than ``max_message_size``.

        A batch entry has the message's position in ``messages`` beside it. The order within each topic is preserved.
        ``contexts`` has the properties to send, if interceptors may have added to them.
        """
        batches: list[list[tuple[int, BatchEntry]]] = []
        current: dict[str, tuple[list[tuple[int, BatchEntry]], int]] = {}
        limit = self._limits.max_message_size
        for number, message in enumerate(messages):
            properties = contexts[number].properties if contexts else None
            entry = prepare_entry(message, properties, self._ids, limit)
            batch, size = current.get(message.topic, ([], limit + 1))
            if size + entry.size > limit:
                batch, size = [], 0
                batches.append(batch)
            batch.append((number, entry))
            current[message.topic] = (batch, size + entry.size)
        return batches

    # -- timed messages --------------------------------------------------------------------------------------------

    async def recall(self, receipt: SendReceipt | str) -> str:
        """Recalls a message that was sent with ``delay`` or ``deliver_at``, and returns its message id.

        ``receipt`` is that of the send, or its ``recall_handle``, which may be stored. The message is not delivered,
        unless its time comes before the broker has the recall. Brokers must have recallMessageEnable=true.

        Raises UsageError for a message that is not timed, or that is due already, and the same errors as ``send``. A
        recall may be repeated.

        >>> async def cancel(producer: Producer, receipt: SendReceipt) -> None:
        ...     await producer.recall(receipt)
        """
        self._check_open()
        handle = receipt if isinstance(receipt, str) else receipt.recall_handle
        if handle is None:
            raise UsageError("only a message that was sent with delay or deliver_at can be recalled")
        try:
            message = decode_handle(handle)
        except RecallHandleError as error:
            raise UsageError(str(error)) from None
        context = RecallContext(self.group, message.topic, message.unique_key, message.broker_name)
        header = RecallMessageRequestHeader(topic=message.topic, recall_handle=handle, producer_group=self.group)
        try:
            address = await self.client.master(await self._route(message.topic), message.broker_name)
            reply = await self.client.request(address, RequestCode.RECALL_MESSAGE, header, timeout=self._send_timeout)
            return reply.header(RecallMessageResponseHeader).msg_id
        except BaseException as error:
            context.error = error
            raise
        finally:
            call_all([hook.after_recall for hook in self._interceptors], context)

    # -- request and reply -----------------------------------------------------------------------------------------

    async def request(self, message: Message, *, ttl: float = 30.0) -> ReceivedMessage:
        """Sends a request and returns the reply of the consumer that processes it.

        ``ttl`` (seconds) bounds all of it, and is sent to the consumer with the request. A reply that comes later is
        dropped. Any number of requests may wait at the same time, each with a message of its own.

        Raises NoReplyError, which is also a TimeoutError, if no reply comes in time; NotStoredError if the request
        could not even be sent in time; and the same errors as ``send``.

        >>> async def price(producer: Producer) -> bytes:
        ...     return (await producer.request(Message("Prices", b"book"), ttl=3)).body
        """
        self._check_open()
        return await self._requests.request(message, ttl)

    async def reply(
        self, request: ReceivedMessage, body: bytes, *, properties: Mapping[str, str] | None = None
    ) -> SendReceipt:
        """Replies to a received request, through the broker that it came from. ``properties`` are the program's own.

        Raises UsageError if ``request`` is no request (see ``ReceivedMessage.wants_reply``), NotDeliveredError if the
        client that asked is not connected any more or does not answer, and the same errors as ``send``. A client that
        has stopped waiting drops the reply: that is no error here.

        >>> async def serve(producer: Producer, message: ReceivedMessage) -> None:
        ...     await producer.reply(message, b"9.90")
        """
        self._check_open()
        message = reply_message(request, body, properties)
        context = self._observed(message, None)
        try:
            prepared = prepare(message, context.properties, self._ids, self._limits)
            size = len(message.body)
            if not self._in_flight.try_enter(size):
                await self._in_flight.enter(size)
            try:
                context.receipt = await deliver_reply(self._replies, prepared, message, request, context)
            finally:
                self._in_flight.leave(size)
        except BaseException as error:
            context.error = error
            raise
        finally:
            call_all(self._after, context)
        return context.receipt

    async def flush(self) -> None:
        """Sends all batches that still linger now, and waits until the brokers have answered all batches.

        Errors are raised by the sends, not here. Without ``linger`` there is nothing to flush.

        >>> async def checkpoint(producer: Producer) -> None:
        ...     await producer.flush()
        """
        if self._batcher is not None:
            await self._batcher.flush()
