"""Attempts: choosing the queue of a prepared send, sending it, and retrying where that can help."""

import random
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple, TypeAlias

import anyio

from trimq.client.core import Client, no_reply
from trimq.client.errors import NotStoredError, PerhapsStoredError, RocketMQError, UsageError
from trimq.client.interceptors import SendContext
from trimq.client.latency_fault_tolerance import LatencyFaultTolerance
from trimq.client.message import Message, MessageQueue, SendOutcome, SendReceipt
from trimq.client.routes import DEFAULT_QUEUES, TopicRoute
from trimq.client.send_template import SendTemplate
from trimq.client.sending import Prepared, receipts, send_command
from trimq.client.signed_template import SignedSends
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError
from trimq.remoting.client.remoting_client import CallbackCall, ClientConnection

_RETRY_CODES: Final = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_PERMISSION,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
    }
)
"""Refusals by one broker that another broker of the same topic may not share."""
_TEMPLATES: Final = 1024
"""Templates that are cached, one for each pair of request code and queue."""
_SPREAD: Final = 8
"""Most queues over which a burst of messages is spread."""
_PERHAPS: Final = SendOutcome.PERHAPS_STORED
_NOT_STORED: Final = SendOutcome.NOT_STORED


class Failure(NamedTuple):
    """A failed attempt: the queue it went to, and its error."""

    queue: MessageQueue
    error: RocketMQError


AttemptResult: TypeAlias = list[SendReceipt] | Failure
"""The result of an attempt: the receipts, or its failure."""

OnResult: TypeAlias = Callable[[AttemptResult], None]
"""Receives the result of an attempt that no task waits for."""


class Attempts:
    """The sends of a producer's ``group``.

    A failed send is retried up to ``retries`` times, also after an attempt with an unknown outcome if
    ``retry_unknown``. ``timeout`` (seconds) is that of one attempt.
    """

    def __init__(
        self, client: Client, group: str, *, retries: int, retry_unknown: bool, timeout: float, create_topics: bool
    ) -> None:
        self._client = client
        self._group = group
        self._retries = retries
        self._retry_unknown = retry_unknown
        self._timeout = timeout
        self._create_topics = create_topics
        self._fault_tolerance = LatencyFaultTolerance(time.monotonic)
        self.on_reply: Callable[[str, RemotingCommand], None] | None = None
        """Called with the broker's name and its reply to a send that is stored."""
        signer = client.signer
        template: Callable[[int, MessageQueue], SendTemplate | SignedSends] = (
            partial(SendTemplate, group) if signer is None else partial(SignedSends, signer, group)
        )
        self._template = lru_cache(maxsize=_TEMPLATES)(template)

    async def route(self, topic: str) -> TopicRoute:
        """The topic's route, with at least one queue to send to. Waits up to ``timeout`` for a broker to register.

        Raises TopicNotFoundError, NoBrokerError, UnreachableError, and NotStoredError if no queue is writable.
        """
        route = self._client.routes.known(topic)
        if route is None or not route.write_queues:
            route = await self._client.routes.refresh(topic, create=self._create_topics, patience=self._timeout)
        if not route.write_queues:
            raise NotStoredError(f"no broker accepts messages of the topic {topic} now: none has write permission")
        return route

    def select(self, route: TopicRoute) -> MessageQueue:
        """The next queue in turn, on an available broker if there is one."""
        return self._fault_tolerance.select(route.write_queues)

    async def deliver(
        self,
        prepared: Prepared,
        queue: MessageQueue | None,
        messages: Sequence[Message],
        context: SendContext | None = None,
        failure: Failure | None = None,
    ) -> list[SendReceipt]:
        """Sends, with retries, and returns the receipts. ``failure`` is the result of a first attempt already made.

        Raises the last attempt's error, or PerhapsStoredError if an earlier attempt may have stored the message.
        """
        # The newest error after which the message may be stored. Once it is set, a later refusal must not be reported
        # as "not stored".
        perhaps = failure.error if failure is not None and isinstance(failure.error, PerhapsStoredError) else None
        avoid: str | None = None
        attempt = 0
        while True:
            route = self._client.routes.known(prepared.topic)
            if route is None or not route.write_queues:
                try:
                    route = await self.route(prepared.topic)
                except RocketMQError as missing:  # a topic to be created has no cached route: asked before each attempt
                    if perhaps is None:
                        raise
                    raise perhaps from missing
            if failure is None:
                target = queue or self._fault_tolerance.select(route.write_queues, avoid)
                try:
                    return await self._attempt(prepared, target, route, messages, context)
                except RocketMQError as caught:
                    failure = Failure(target, caught)
            (target, error), failure = failure, None
            if not isinstance(error, UsageError) or error.code in _RETRY_CODES:  # else the broker is not to blame
                self._fault_tolerance.failed(target.broker_name)
                self._client.routes.doubt(error.address or "")
            if isinstance(error, PerhapsStoredError):
                perhaps = error
            elif perhaps is None:  # set before the next await: a caller cancelled there reads it
                for message in messages:
                    message.outcome = _NOT_STORED
            attempt += 1
            others = len({other.broker_name for other in route.write_queues}) > 1
            if attempt > self._retries or not self._worth_repeating(error, elsewhere=others and queue is None):
                if perhaps is not None and perhaps is not error:
                    raise perhaps from error
                raise error
            avoid = target.broker_name
            # The same broker gets the next attempt only after a pause; another one may get it immediately.
            if not others or queue is not None:
                await anyio.sleep(random.random() * min(1.0, 0.05 * 2**attempt))  # noqa: S311 - spreads load

    def spread(self, topic: str) -> int:
        """The number of queues over which a burst of messages for the topic is spread."""
        route = self._client.routes.known(topic)
        return min(_SPREAD, len(route.write_queues)) or 1 if route is not None else DEFAULT_QUEUES

    def _worth_repeating(self, error: RocketMQError, *, elsewhere: bool) -> bool:
        if isinstance(error, UsageError):
            return elsewhere and error.code in _RETRY_CODES
        return self._retry_unknown or not isinstance(error, PerhapsStoredError)

    async def _attempt(
        self,
        prepared: Prepared,
        queue: MessageQueue,
        route: TopicRoute,
        messages: Sequence[Message],
        context: SendContext | None,
    ) -> list[SendReceipt]:
        address = route.master(queue.broker_name)
        if address is None:
            address = await self._client.master(route, queue.broker_name)
        if context is not None:
            context.queue, context.address = queue, address
            context.attempts += 1
        began = time.monotonic()
        left = self._timeout
        # A ready connection needs no await. Connecting, or waiting for a slot, counts towards the attempt's timeout.
        connection = self._client.ready(address)
        if connection is None:
            connection = await self._client.with_space(address, prepared.code, self._timeout)
            left = max(0.0, began + self._timeout - time.monotonic())
        call = connection.new_call()
        try:
            self._client.begin(connection, partial(self._frame, prepared, queue), left, call)
        except FrameError as error:
            raise UsageError(str(error), code=ResponseCode.MESSAGE_ILLEGAL) from None
        # From here on the request may have been sent. The outcome is set before the await, where the caller may be
        # cancelled.
        for message in messages:
            message.outcome = _PERHAPS
        try:
            await call.wait()
        finally:
            connection.end(call)
        if call.reply is None:
            raise no_reply(connection, call, prepared.code, self._timeout)
        found = receipts(call.reply, prepared, queue, address)
        if self.on_reply is not None:
            self.on_reply(queue.broker_name, call.reply)
        self._fault_tolerance.took(queue.broker_name, time.monotonic() - began)
        return found

    def begin(
        self, prepared: Prepared, queue: MessageQueue | None, messages: Sequence[Message], on_result: OnResult
    ) -> bool:
        """Starts the first attempt if that is possible without waiting. If it returns False, there are no side effects.

        ``on_result`` is called with the result, never from within this call, and must not raise.
        """
        route = self._client.routes.known(prepared.topic)
        if route is None or not route.write_queues:
            return False
        target = queue or self._fault_tolerance.select(route.write_queues)
        address = route.master(target.broker_name)
        connection = None if address is None else self._client.ready(address)
        if connection is None:
            return False
        call = CallbackCall(partial(self._ended, prepared, target, connection, time.monotonic(), on_result))
        try:
            self._client.begin(connection, partial(self._frame, prepared, target), self._timeout, call)
        except FrameError:  # too long: deliver() meets the error again and raises it to its caller
            return False
        for message in messages:
            message.outcome = _PERHAPS
        return True

    def _frame(self, prepared: Prepared, queue: MessageQueue, opaque: int, encoding: Encoding) -> bytes:
        if encoding is Encoding.JSON and prepared.is_usual and prepared.topic == queue.topic:
            return self._template(prepared.code, queue).frame(prepared, opaque)
        command = send_command(self._group, prepared, queue)
        command.opaque, command.encoding = opaque, encoding
        return self._client.encode(command)

    def _ended(
        self,
        prepared: Prepared,
        queue: MessageQueue,
        connection: ClientConnection,
        began: float,
        on_result: OnResult,
        call: CallbackCall,
    ) -> None:
        connection.end(call)
        found: AttemptResult
        try:
            if call.reply is None:
                raise no_reply(connection, call, prepared.code, self._timeout)
            found = receipts(call.reply, prepared, queue, connection.address)
            if self.on_reply is not None:
                self.on_reply(queue.broker_name, call.reply)
            self._fault_tolerance.took(queue.broker_name, time.monotonic() - began)
        except RocketMQError as error:
            found = Failure(queue, error)
        on_result(found)
