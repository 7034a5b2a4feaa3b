"""Request and reply over topics (RocketMQ's RPC), both roles.

A request is an ordinary message that names its client. A consumer replies through the broker that the request came
from, which pushes the reply over a connection of that client: the one over which it has sent heartbeats as a producer.
So the client greets all brokers of the topic before it sends a request, and again when a connection breaks meanwhile.
"""

import struct
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import anyio

from trimq.client.attempts import Attempts
from trimq.client.core import Client
from trimq.client.errors import (
    ClosedError,
    NoReplyError,
    NotDeliveredError,
    NotStoredError,
    PerhapsStoredError,
    RocketMQError,
    UsageError,
)
from trimq.client.interceptors import SendContext
from trimq.client.message import Message, ReceivedMessage, SendOutcome, SendReceipt
from trimq.client.routes import TopicRoute
from trimq.client.sending import Prepared
from trimq.protocol import sysflag
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.send import ReplyMessageRequestHeader
from trimq.protocol.property_names import (
    PROPERTY_CLUSTER,
    PROPERTY_CORRELATION_ID,
    PROPERTY_MSG_TYPE,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TTL,
)
from trimq.protocol.property_text import property_of
from trimq.protocol.record import encode_record, host_flags, pack_host

CHECK_SECONDS: Final = 0.5
"""While requests wait: seconds between two looks whether the brokers still know this client."""
_REPLY_TOPIC_SUFFIX: Final = "_REPLY_TOPIC"
_MAX_TTL: Final = 2**31 / 1000


class Answer:
    """The future reply to one request."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._result: ReceivedMessage | RocketMQError | None = None

    @property
    def is_set(self) -> bool:
        """Whether the reply, or an error instead, is there."""
        return self._result is not None

    def set(self, result: ReceivedMessage | RocketMQError) -> None:
        """Sets the reply, or the error to raise instead, and wakes the waiting task. Only the first one counts."""
        if self._result is None:
            self._result = result
            self._event.set()

    async def wait(self) -> ReceivedMessage:
        """Waits for the reply and returns it. Raises the error that was set instead."""
        await self._event.wait()
        assert self._result is not None
        if isinstance(self._result, RocketMQError):
            raise self._result
        return self._result


class Requests:
    """A producer's requests that wait for replies, by correlation id.

    ``route`` finds the route of a topic, ``send`` sends a message, ``spawn`` starts a background task: the producer's.
    """

    def __init__(
        self,
        client: Client,
        *,
        route: Callable[[str], Awaitable[TopicRoute]],
        send: Callable[[Message], Awaitable[SendReceipt]],
        spawn: Callable[[Callable[[], Awaitable[None]]], None],
    ) -> None:
        self._client = client
        self._route = route
        self._send = send
        self._spawn = spawn
        self._waiting: dict[str, Answer] = {}
        self._asked: Counter[str] = Counter()  # addresses of brokers: how many of the requests they may push a reply to
        self._watching = False

    async def request(self, message: Message, ttl: float) -> ReceivedMessage:
        """Sends ``message`` as a request and returns the reply to it; see Producer.request."""
        if not 0.001 <= ttl <= _MAX_TTL:
            raise UsageError(f"ttl={ttl}: a request waits from 0.001 to {_MAX_TTL:.0f} seconds for its reply")
        if message.system_properties:
            raise UsageError(
                "this message is being sent as a request or in a transaction: use a message of its own for each request"
            )
        with self._opened(message, ttl) as answer, anyio.move_on_after(ttl):
            masters = await self._masters(message.topic)
            with self._asking(masters):
                await self._greet(masters)
                try:
                    await self._send(message)
                except PerhapsStoredError:
                    if not answer.is_set:  # the reply proves that the request was stored
                        raise
                return await answer.wait()
        if message.outcome is SendOutcome.NOT_STORED:
            raise NotStoredError(f"the request to {message.topic} was not sent within {ttl:g} s")
        raise NoReplyError(
            f"no reply to the request {message.message_id} to {message.topic} within {ttl:g} s: see whether a consumer"
            " of the topic is running, replies, and needs less time than that"
        )

    @contextmanager
    def _opened(self, message: Message, ttl: float) -> Iterator[Answer]:
        """Makes ``message`` a request, and takes the reply to it until the block ends. ``ttl`` is in seconds."""
        correlation = str(uuid.uuid4())
        message.outcome = SendOutcome.NOT_STORED
        message.system_properties = {
            PROPERTY_CORRELATION_ID: correlation,
            PROPERTY_REPLY_TO_CLIENT: self._client.id,
            PROPERTY_TTL: str(int(ttl * 1000)),
        }
        answer = self._waiting[correlation] = Answer()
        try:
            yield answer
        finally:
            del self._waiting[correlation]
            message.system_properties = {}

    async def _masters(self, topic: str) -> list[str]:
        """The addresses of the topic's masters: each of them may push the reply."""
        route = await self._route(topic)
        names = dict.fromkeys(queue.broker_name for queue in route.write_queues)
        return [address for name in names if (address := route.master(name)) is not None]

    @contextmanager
    def _asking(self, masters: list[str]) -> Iterator[None]:
        """Brokers stay known to this client until the block ends."""
        self._asked.update(masters)
        if not self._watching:
            self._watching = True
            self._spawn(self._stay_known)
        try:
            yield
        finally:
            for address in masters:
                self._asked[address] -= 1
                if not self._asked[address]:
                    del self._asked[address]

    async def _greet(self, masters: list[str]) -> None:
        """Sends a heartbeat to those masters that do not know this producer yet."""
        unknown = [address for address in masters if not self._client.has_greeted(address)]
        if unknown:
            async with anyio.create_task_group() as group:
                for address in unknown:
                    group.start_soon(self._client.heartbeat, address)

    async def _stay_known(self) -> None:
        """While requests wait, greets brokers again whose connection has ended: they could not push a reply."""
        greeting: set[str] = set()

        async def greet(address: str) -> None:
            try:
                await self._client.heartbeat(address)
            finally:
                greeting.discard(address)

        try:
            # Each broker has a task of its own: one that does not answer must not delay the others.
            async with anyio.create_task_group() as group:
                while self._waiting:
                    await anyio.sleep(CHECK_SECONDS)
                    for address in self._asked:
                        if address not in greeting and not self._client.has_greeted(address):
                            greeting.add(address)
                            group.start_soon(greet, address)
                self._watching = False  # before this task yields: the next request starts another one
                group.cancel_scope.cancel()
        finally:
            self._watching = False

    async def pushed(self, command: RemotingCommand) -> RemotingCommand | None:
        """Takes a reply pushed by a broker. None if no request of this producer waits for it: it is dropped."""
        header = command.header(ReplyMessageRequestHeader)
        answer = self._waiting.get(property_of(header.properties or "", PROPERTY_CORRELATION_ID))
        if answer is None:
            return None
        answer.set(_message_of(header, bytes(command.body), command.ext_fields().get("bname", "")))
        return command.reply()

    def close(self) -> None:
        """Ends the requests that wait: the producer is being closed."""
        for answer in self._waiting.values():
            answer.set(ClosedError("the producer was closed while the request waited for its reply"))


def reply_message(request: ReceivedMessage, body: bytes, properties: Mapping[str, str] | None = None) -> Message:
    """The message that answers ``request``. Raises UsageError if the message is not a request."""
    asked = request.all_properties
    if not request.wants_reply:
        raise UsageError("this message is no request: it does not name a client that waits for a reply")
    message = Message(asked[PROPERTY_CLUSTER] + _REPLY_TOPIC_SUFFIX, body, properties=properties)
    message.system_properties = {
        PROPERTY_MSG_TYPE: "reply",
        PROPERTY_CORRELATION_ID: asked.get(PROPERTY_CORRELATION_ID, ""),
        PROPERTY_REPLY_TO_CLIENT: asked[PROPERTY_REPLY_TO_CLIENT],
        PROPERTY_TTL: asked.get(PROPERTY_TTL, "30000"),
    }
    return message


async def deliver_reply(
    attempts: Attempts, prepared: Prepared, message: Message, request: ReceivedMessage, context: SendContext
) -> SendReceipt:
    """Sends a reply to the broker that the request came from; to another one only if that one takes no reply now.

    The client that asked is known to the broker of its request for sure, and to others if it uses topics there.
    ``attempts`` must not retry after an unknown outcome: the client may have the reply.

    Raises NotDeliveredError if the client cannot be reached, and the errors of a send.
    """
    prepared = prepared._replace(code=RequestCode.SEND_REPLY_MESSAGE_V2)
    route = await attempts.route(prepared.topic)
    queue = next((queue for queue in route.write_queues if queue.broker_name == request.broker_name), None)
    try:
        try:
            return (await attempts.deliver(prepared, queue, (message,), context))[0]
        except NotStoredError:
            if queue is None or all(other.broker_name == queue.broker_name for other in route.write_queues):
                raise
            return (await attempts.deliver(prepared, None, (message,), context))[0]
    except PerhapsStoredError as error:
        if error.code == ResponseCode.SYSTEM_ERROR:
            raise NotDeliveredError(error.text, code=error.code, address=error.address) from None
        raise


def _message_of(header: ReplyMessageRequestHeader, body: bytes, broker_name: str) -> ReceivedMessage:
    """The pushed message in the form of one read from a queue. Raises SYSTEM_ERROR if it cannot be one."""
    born, store = _host(header.born_host), _host(header.store_host)
    flags = header.sys_flag & ~(sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6)
    try:
        data = encode_record(
            topic=header.topic.encode(),
            body=body,
            properties=(header.properties or "").encode(),
            queue_id=header.queue_id,
            queue_offset=0,
            physical_offset=0,
            born_timestamp=header.born_timestamp,
            born_host=born,
            store_timestamp=header.store_timestamp,
            store_host=store,
            flag=header.flag,
            sys_flag=flags | host_flags(born, store),
            reconsume_times=header.reconsume_times or 0,
        )
    except (ValueError, struct.error) as error:
        raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the reply is no message: {error}") from None
    return ReceivedMessage(memoryview(data), 0, len(data), 0, broker_name)


def _host(text: str) -> bytes:
    address, _, port = text.lstrip("/").rpartition(":")
    try:
        return pack_host(address.strip("[]"), int(port))
    except ValueError:
        return pack_host("0.0.0.0", 0)  # noqa: S104 - stands for an unknown address
