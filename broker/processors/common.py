"""Checks and errors that several processors share."""

from collections.abc import Callable, Sequence
from typing import Final

import trio

from trimq.broker.store.message_store import MessageStore
from trimq.protocol.auth.model import Action
from trimq.protocol.body import TopicConfig
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.json_pieces import BATCH
from trimq.protocol.queue_unit import MAX_OFFSET
from trimq.protocol.record import pack_host
from trimq.remoting.auth.permit import Permit
from trimq.remoting.server.connection import Connection

UNKNOWN_HOST: Final = bytes(8)


def born_host(connection: Connection) -> bytes:
    """The packed address of a client. It is packed once per connection."""
    host: bytes = connection.data.get("host", b"")
    if not host:
        try:
            host = pack_host(connection.peer[0], connection.peer[1])
        except (ValueError, IndexError):
            host = UNKNOWN_HOST
        connection.data["host"] = host
    return host


def check_range(store: MessageStore, topic: str, queue_id: int) -> None:
    """Raises SYSTEM_BUSY while the store does not know where a queue begins: the client asks again."""
    problem = store.range_problem(topic, queue_id)
    if problem:
        raise RemotingError(ResponseCode.SYSTEM_BUSY, problem)


def check_commit_offset(offset: int) -> None:
    """Raises INVALID_PARAMETER for an offset that no group can have.

    RocketMQ accepts any number. Allowed here are -1, which the Go client commits for "none" and which a query reports
    as not found, and offsets beyond the queue's end, because the group may have read further on another broker.
    """
    if not -1 <= offset <= MAX_OFFSET:
        raise invalid(f"commitOffset is {offset}; it must be from -1 to {MAX_OFFSET}")


def check_queue(config: TopicConfig, queue_id: int, exists: Callable[[str, int], bool]) -> None:
    """Raises INVALID_PARAMETER for a queue that is neither configured nor on disk.

    A topic that had more queues before still has them on disk, and groups may still consume them.
    """
    count = max(config.read_queue_nums, config.write_queue_nums)
    if not 0 <= queue_id < count and not exists(config.topic_name, queue_id):
        raise invalid(f"queueId is {queue_id}; the topic {config.topic_name} has the queues 0 to {count - 1}")


async def require_topics(
    permit: Permit, connection: Connection, command: RemotingCommand, topics: Sequence[str], actions: tuple[Action, ...]
) -> None:
    """Raises NO_PERMISSION if the user of a request may not use one of ``topics``, which the request does not name."""
    for count, topic in enumerate(topics, 1):
        permit.require_topic(connection, command, topic, actions)
        if count % BATCH == 0:
            await trio.lowlevel.checkpoint()


def no_such_topic(topic: str) -> RemotingError:
    """The error TOPIC_NOT_EXIST."""
    return RemotingError(ResponseCode.TOPIC_NOT_EXIST, f"the topic {topic} does not exist on this broker")


def no_such_group(group: str) -> RemotingError:
    """The error SUBSCRIPTION_GROUP_NOT_EXIST."""
    return RemotingError(
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"the consumer group {group} does not exist on this broker"
    )


def invalid(problem: str) -> RemotingError:
    """The error INVALID_PARAMETER."""
    return RemotingError(ResponseCode.INVALID_PARAMETER, problem)
