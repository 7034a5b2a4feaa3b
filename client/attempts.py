"""Attempts: where what is prepared goes, and what is done where that does not work."""

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
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import encode
from trimq.remoting.client.remoting_client import CallbackCall, ClientConnection

_RETRY_CODES: Final = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_PERMISSION,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
    }
)
"""Refusals that another broker of the same topic may not share."""
_TEMPLATES: Final = 1024
_SPREAD: Final = 8
_PERHAPS: Final = SendOutcome.PERHAPS_STORED
_NOT_STORED: Final = SendOutcome.NOT_STORED


class Failure(NamedTuple):
    """An attempt that did not work."""

    queue: MessageQueue
    error: RocketMQError


AttemptResult: TypeAlias = list[SendReceipt] | Failure
"""What has become of an attempt."""

OnResult: TypeAlias = Callable[[AttemptResult], None]
"""Learns what has become of an attempt that no task waits for."""


class Attempts:
    """The sends of a producer's ``group``; ``timeout`` (seconds) is that of one attempt."""

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
        self._template = lru_cache(maxsize=_TEMPLATES)(partial(SendTemplate, group))

    async def route(self, topic: str) -> TopicRoute:
        """The topic's route, with a queue at least; waits as long as an attempt may take for a broker to come back.

        Raises RocketMQError.
        """
        route = self._client.routes.known(topic)
        if route is None or not route.write_queues:
            route = await self._client.routes.refresh(topic, create=self._create_topics, patience=self._timeout)
        if not route.write_queues:
            raise NotStoredError(f"no broker takes messages of the topic {topic} now: none with write permission")
        return route

    def select(self, route: TopicRoute) -> MessageQueue:
        """The next queue in turn."""
        return self._fault_tolerance.select(route.write_queues)

    async def deliver(
        self,
        prepared: Prepared,
        queue: MessageQueue | None,
        messages: Sequence[Message],
        context: SendContext | None = None,
        failure: Failure | None = None,
    ) -> list[SendReceipt]:
        """Sends, with repetitions: the receipts. ``failure`` is that of an attempt which was made already.

        Raises the last attempt's error; PerhapsStoredError where an earlier attempt may have worked.
        """
        perhaps = failure.error if failure is not None and isinstance(failure.error, PerhapsStoredError) else None
        avoid: str | None = None
        attempt = 0
        while True:
            route = self._client.routes.known(prepared.topic)
            if route is None or not route.write_queues:
                try:
                    route = await self.route(prepared.topic)
                except RocketMQError as missing:  # a template's route is asked for before each attempt
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
            if not isinstance(error, UsageError) or error.code in _RETRY_CODES:  # else it is not the broker's fault
                self._fault_tolerance.failed(target.broker_name)
            if isinstance(error, PerhapsStoredError):
                perhaps = error
            elif perhaps is None:  # who is cancelled now learns that it is certain
                for message in messages:
                    message.outcome = _NOT_STORED
            attempt += 1
            others = len({other.broker_name for other in route.write_queues}) > 1
            if attempt > self._retries or not self._worth_repeating(error, elsewhere=others and queue is None):
                if perhaps is not None and perhaps is not error:
                    raise perhaps from error
                raise error
            avoid = target.broker_name
            if not others or queue is not None:
                await anyio.sleep(random.random() * min(1.0, 0.05 * 2**attempt))  # noqa: S311 - spreads load

    def spread(self, topic: str) -> int:
        """Over how many queues a burst of messages for the topic is spread."""
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
        connection = self._client.ready(address)
        if connection is None:
            connection = await self._client.with_room(address, prepared.code, self._timeout)
            left = max(0.0, began + self._timeout - time.monotonic())
        call = connection.new_call()
        try:
            self._client.begin(connection, partial(self._frame, prepared, queue), left, call)
        except FrameError as error:
            raise UsageError(str(error), code=ResponseCode.MESSAGE_ILLEGAL) from None
        for message in messages:
            message.outcome = _PERHAPS
        try:
            await call.wait()
        finally:
            connection.end(call)
        if call.reply is None:
            raise no_reply(connection, call, prepared.code, self._timeout)
        found = receipts(call.reply, prepared, queue, address)
        self._fault_tolerance.took(queue.broker_name, time.monotonic() - began)
        return found

    def begin(
        self, prepared: Prepared, queue: MessageQueue | None, messages: Sequence[Message], on_result: OnResult
    ) -> bool:
        """The first attempt, where it can be made now, without waiting; False where it cannot: nothing has been done.

        ``on_result`` learns of its end, never within this call, and must not raise.
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
        except FrameError:  # too long: is found again, where somebody waits for it
            return False
        for message in messages:
            message.outcome = _PERHAPS
        return True

    def _frame(self, prepared: Prepared, queue: MessageQueue, opaque: int, encoding: Encoding) -> bytes:
        if encoding is Encoding.JSON and prepared.is_usual and prepared.topic == queue.topic:
            return self._template(prepared.code, queue).frame(prepared, opaque)
        command = send_command(self._group, prepared, queue)
        command.opaque, command.encoding = opaque, encoding
        return encode(command)

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
            self._fault_tolerance.took(queue.broker_name, time.monotonic() - began)
        except RocketMQError as error:
            found = Failure(queue, error)
        on_result(found)
