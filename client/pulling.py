"""Pulls: the request, the decoded reply, and the loop of pulls of one queue."""

import struct
from enum import Enum
from typing import Final, Protocol, TypeVar

import anyio

from trimq.client.core import Client, no_reply
from trimq.client.errors import PerhapsStoredError, UnreachableError, error_for
from trimq.client.message import MessageQueue, ReceivedMessage
from trimq.client.message_block import MessageBlock
from trimq.client.signed_template import SignedTemplate
from trimq.client.subscription import Subscription
from trimq.protocol import sysflag
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand, to_ext
from trimq.protocol.frame import encode
from trimq.protocol.headers.pull import PullMessageRequestHeader, PullMessageResponseHeader
from trimq.remoting.client.remoting_client import CallbackCall, ClientConnection

M = TypeVar("M", bound=ReceivedMessage)

HOLD: Final = 15.0
"""Default seconds for which a broker may hold a pull that finds no message."""
HOLD_SLACK: Final = 15.0
"""Seconds after the end of the hold until the reply must have come. Brokers check held pulls only every few seconds."""


class PullStatus(Enum):
    """The result of a pull; the values are response codes."""

    FOUND = 0
    NO_NEW_MESSAGE = 19
    NO_MATCHED_MESSAGE = 20
    OFFSET_MOVED = 21


_WORDS = struct.Struct(">II")
_OFFSET: Final = -7_777_777_777_777_777_777
_OPAQUE: Final = 2_147_480_001
"""Placeholders for a pull's variable numbers: no queue has the offset, and no topic or group is named after them."""

_STATUS: Final = {status.value: status for status in PullStatus}


class PullCall:
    """The constant part of a queue's pulls. ``receiver`` takes the acknowledgements of the messages.

    ``with_subscription`` puts the filter into each pull, for groups whose heartbeats have none. ``hold`` is in seconds;
    0 asks for an immediate reply.
    """

    __slots__ = ("_fields", "_fragments", "hold", "queue", "receiver", "tags")

    def __init__(
        self,
        group: str,
        queue: MessageQueue,
        subscription: Subscription,
        max_messages: int,
        *,
        with_subscription: bool,
        hold: float = HOLD,
        receiver: object = None,
    ) -> None:
        self.queue: MessageQueue = queue
        self.tags: frozenset[str] = subscription.tags
        self.hold: float = hold
        self.receiver: object = receiver
        data = subscription.data
        flags = (sysflag.PULL_SUSPEND if hold else 0) | (sysflag.PULL_SUBSCRIPTION if with_subscription else 0)
        header = PullMessageRequestHeader(
            consumer_group=group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=0,
            max_msg_nums=max_messages,
            sys_flag=flags,
            commit_offset=0,
            suspend_timeout_millis=int(hold * 1000),
            sub_version=data.sub_version,
            subscription=data.sub_string if with_subscription else None,
            expression_type=data.expression_type,
        )
        self._fields = to_ext(header)
        self._fragments = self._split()

    def command(self, offset: int) -> RemotingCommand:
        """The request for messages starting at ``offset``."""
        fields = self._fields.copy()
        fields["queueOffset"] = str(offset)
        return RemotingCommand.request(RequestCode.PULL_MESSAGE, fields)

    def frame(self, offset: int, opaque: int) -> bytes:
        """The request as a frame with a JSON header, made by inserting the two numbers into a template."""
        before, between, behind = self._fragments
        header = b"%b%d%b%d%b" % (before, offset, between, opaque, behind)
        return _WORDS.pack(len(header) + 4, len(header)) + header

    def _split(self) -> tuple[bytes, bytes, bytes]:
        command = self.command(_OFFSET)
        command.opaque = _OPAQUE
        before, _, rest = encode(command)[_WORDS.size :].partition(b"%d" % _OFFSET)
        between, _, behind = rest.partition(b'"opaque":%d' % _OPAQUE)
        return before, between + b'"opaque":', behind


class Pulled:
    """The reply to a pull. Its messages are split only by ``block``.

    Raises the error for a code that is not a result of a pull (``error_for``).
    """

    __slots__ = ("_address", "_body", "_call", "max_offset", "min_offset", "next_offset", "status", "suggested_broker")

    def __init__(self, reply: RemotingCommand, call: PullCall, address: str) -> None:
        status = _STATUS.get(reply.code)
        if status is None:
            raise error_for(reply.code, reply.remark, address, RequestCode.PULL_MESSAGE)
        answer = reply.header(PullMessageResponseHeader)
        self.status: PullStatus = status
        self.next_offset: int = answer.next_begin_offset
        self.min_offset: int = answer.min_offset
        self.max_offset: int = answer.max_offset
        self.suggested_broker: int = answer.suggest_which_broker_id
        self._body: memoryview = reply.body
        self._call = call
        self._address = address

    @property
    def size(self) -> int:
        """The size of all its messages in bytes."""
        return len(self._body)

    def block(self, kind: type[M]) -> MessageBlock[M] | None:
        """Its messages that have one of the wanted tags; None if there are none.

        Raises RecordError (a ValueError) if the records do not fill the body, and PerhapsStoredError for a FOUND
        without a message.
        """
        if self.status is not PullStatus.FOUND:
            return None
        call = self._call
        found = MessageBlock.split(self._body, call.queue.broker_name, kind, call.receiver)
        if not found.offsets:
            raise PerhapsStoredError("the broker answered FOUND without a message", address=self._address)
        tags = call.tags
        if tags:  # brokers compare only hash codes of tags, so a message with another tag may be among them
            found = MessageBlock.of([message for message in found if message.tags in tags])
        return found if found.offsets else None


async def pull(client: Client, address: str, call: PullCall, offset: int) -> Pulled:
    """Pulls once, starting at ``offset``. The broker may hold the request until there are messages.

    Raises RocketMQError if no reply comes, or for a refusal.
    """
    reply = await client.invoke(address, call.command(offset), call.hold + HOLD_SLACK)
    return Pulled(reply, call, address)


class Puller(Protocol):
    """The queue for which Pulls pulls; implemented by ProcessQueue."""

    @property
    def position(self) -> int:
        """The offset of the next pull."""

    def pull_more(self) -> None:
        """Calls ``Pulls.next`` as soon as another pull is within the bounds, now or later."""

    def absorb(self, result: Pulled) -> None:
        """Takes the result of a pull. Calls ``pull_more`` or ``Pulls.stop``."""


class Pulls:
    """The pulls of a queue, one at a time.

    A reply is handled in the task that reads the connection, which immediately sends the next request. No other task is
    scheduled in between: with small messages that would cost more than the messages.
    """

    __slots__ = ("_address", "_call", "_client", "_connection", "_error", "_in_flight", "_over", "_puller", "_signed")

    def __init__(self, client: Client, call: PullCall, puller: Puller) -> None:
        self._client = client
        self._call = call
        self._puller = puller
        self._connection: ClientConnection | None = None
        self._in_flight: CallbackCall | None = None
        self._address = ""
        self._over = anyio.Event()
        self._error: Exception | None = None
        signer = client.signer
        self._signed = None if signer is None else SignedTemplate(signer, call.command(0), ("queueOffset",))

    async def run(self, address: str) -> None:
        """Pulls from ``address`` until ``stop``.

        Raises RocketMQError for a failed pull, and ValueError for a reply that cannot be decoded.
        """
        connection = await self._client.connection(address)
        self._over, self._error, self._address, self._connection = anyio.Event(), None, address, connection
        try:
            self._puller.pull_more()
            await self._over.wait()
        finally:
            self.forget()
            self._connection = None
        if self._error is not None:
            raise self._error

    @property
    def is_in_flight(self) -> bool:
        """Whether a pull is in flight."""
        return self._in_flight is not None

    def next(self) -> None:
        """Sends the next pull, unless one is in flight or ``run`` is not running."""
        connection = self._connection
        if connection is None or self._in_flight is not None:
            return
        call = self._call
        if connection.closed:
            self.stop(UnreachableError(f"the connection is closed: {connection.close_reason}", address=self._address))
        else:
            self._in_flight = in_flight = CallbackCall(self._arrived)
            self._client.begin(connection, self._frame, call.hold + HOLD_SLACK, in_flight)

    def _frame(self, opaque: int, encoding: Encoding) -> bytes:
        if encoding is Encoding.JSON:
            if self._signed is not None:
                return self._signed.frame((str(self._puller.position),), b"", opaque)
            return self._call.frame(self._puller.position, opaque)
        command = self._call.command(self._puller.position)
        command.opaque, command.encoding = opaque, encoding
        return self._client.encode(command)

    def forget(self) -> None:
        """Abandons the pull in flight: its reply will be ignored."""
        call, self._in_flight = self._in_flight, None
        if call is not None and self._connection is not None:
            self._connection.end(call)

    def stop(self, error: Exception | None = None) -> None:
        """Ends ``run``, which raises ``error`` if it is given."""
        self.forget()
        self._connection = None
        self._error = error
        self._over.set()

    def _arrived(self, call: CallbackCall) -> None:
        connection, reply = self._connection, call.reply
        if self._in_flight is not call or connection is None:  # abandoned
            return
        self.forget()  # first: absorb() sends the next pull
        if reply is None:
            self.stop(no_reply(connection, call, RequestCode.PULL_MESSAGE, self._call.hold + HOLD_SLACK))
            return
        try:
            self._puller.absorb(Pulled(reply, self._call, self._address))
        except Exception as error:  # noqa: BLE001 - raised by run; it must not end the task that reads the connection
            self.stop(error)


NOT_KNOWN_YET: Final = frozenset(
    {
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    }
)
"""Refusals of a pull that a heartbeat resolves: the broker does not know the group's current subscription."""
