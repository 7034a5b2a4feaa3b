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
from protocol.command import RemotingCommand
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


class PullCall(NamedTuple):
    """What stays the same from pull to pull of one queue."""

    group: str
    queue: MessageQueue
    subscription: Subscription
    max_messages: int
    with_subscription: bool
    hold: float = HOLD


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
    hold = call.hold
    data = call.subscription.data
    flags = sysflag.PULL_SUSPEND if hold else 0
    if call.with_subscription:
        flags |= sysflag.PULL_SUBSCRIPTION
    if commit is not None:
        flags |= sysflag.PULL_COMMIT_OFFSET
    header = PullMessageRequestHeader(
        consumer_group=call.group,
        topic=call.queue.topic,
        queue_id=call.queue.queue_id,
        queue_offset=offset,
        max_msg_nums=call.max_messages,
        sys_flag=flags,
        commit_offset=commit or 0,
        suspend_timeout_millis=int(hold * 1000),
        sub_version=data.sub_version,
        subscription=data.sub_string if call.with_subscription else None,
        expression_type=data.expression_type,
    )
    command = RemotingCommand.request(RequestCode.PULL_MESSAGE, header)
    reply = await client.invoke(address, command, hold + HOLD_SLACK)
    status = _STATUS.get(reply.code)
    if status is None:
        raise error_for(reply.code, reply.remark, address)
    answer = reply.header(PullMessageResponseHeader)
    messages: list[ReceivedMessage] = []
    if status is PullStatus.FOUND:
        messages = list(split_messages(reply.body, call.queue.broker_name, kind))
        if not messages:
            raise PerhapsStoredError("the broker says FOUND and sends no message", address=address)
        tags = call.subscription.tags
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
