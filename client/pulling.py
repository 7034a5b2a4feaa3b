"""One pull: the request, and what its reply says."""

from enum import Enum
from typing import Final, NamedTuple, TypeVar

from client.core import Client
from client.decode import split_messages
from client.errors import PerhapsStoredError, error_for
from client.message import MessageQueue, ReceivedMessage
from client.subscription import Subscription
from protocol import sysflag
from protocol.codes import RequestCode, ResponseCode
from protocol.command import RemotingCommand, to_ext
from protocol.headers.pull import PullMessageRequestHeader, PullMessageResponseHeader

M = TypeVar("M", bound=ReceivedMessage)

HOLD: Final = 15.0
"""Seconds that a broker may hold a pull that finds nothing."""
HOLD_SLACK: Final = 15.0
"""Seconds beyond that in which the answer has to be there: brokers look only every few seconds."""


class PullStatus(Enum):
    """What a pull came back with."""

    FOUND = 0
    NO_NEW_MESSAGE = 19
    NO_MATCHED_MESSAGE = 20
    OFFSET_MOVED = 21


_STATUS: Final = {status.value: status for status in PullStatus}


class PullResult(NamedTuple):
    """A pull's messages, where to go on, and the queue's bounds."""

    status: PullStatus
    messages: list[ReceivedMessage]
    next_offset: int
    min_offset: int
    max_offset: int
    suggested_broker: int


class PullCall:
    """What stays the same from pull to pull of one queue. ``receiver`` takes the messages' acknowledgement."""

    __slots__ = ("_commit", "_fields", "hold", "queue", "receiver", "tags")

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
        self._commit = str(flags | sysflag.PULL_COMMIT_OFFSET)
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

    def command(self, offset: int, commit: int | None) -> RemotingCommand:
        """The request for messages from ``offset`` on; ``commit`` is an offset to commit on the way."""
        fields = self._fields.copy()
        fields["queueOffset"] = str(offset)
        if commit is not None:
            fields["sysFlag"], fields["commitOffset"] = self._commit, str(commit)
        return RemotingCommand.request(RequestCode.PULL_MESSAGE, fields)


async def pull(
    client: Client,
    address: str,
    call: PullCall,
    offset: int,
    kind: type[M],
    *,
    commit: int | None = None,
) -> PullResult:
    """Asks for messages from ``offset`` on; the broker may hold the request until there are some.

    ``commit`` is an offset to commit on the way. Raises RocketMQError.
    """
    reply = await client.invoke(address, call.command(offset, commit), call.hold + HOLD_SLACK)
    status = _STATUS.get(reply.code)
    if status is None:
        raise error_for(reply.code, reply.remark, address)
    answer = reply.header(PullMessageResponseHeader)
    messages: list[ReceivedMessage] = []
    if status is PullStatus.FOUND:
        messages += split_messages(reply.body, call.queue.broker_name, kind, call.receiver)
        if not messages:
            raise PerhapsStoredError("the broker says FOUND and sends no message", address=address)
        tags = call.tags
        if tags:  # brokers compare hashes of tags
            messages = [message for message in messages if message.tags in tags]
    return PullResult(
        status,
        messages,
        answer.next_begin_offset,
        answer.min_offset,
        answer.max_offset,
        answer.suggest_which_broker_id,
    )


NOT_KNOWN_YET: Final = frozenset(
    {
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    }
)
"""Answers to a pull that a heartbeat mends."""
