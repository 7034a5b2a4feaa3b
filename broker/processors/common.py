"""Small things that several processors need."""

from collections.abc import Callable
from typing import Final

from trimq.protocol.body import TopicConfig
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.queue_unit import MAX_OFFSET
from trimq.protocol.record import pack_host
from trimq.remoting.server.connection import Connection

UNKNOWN_HOST: Final = bytes(8)


def born_host(connection: Connection) -> bytes:
    """The packed address of a client, kept with its connection."""
    host: bytes = connection.data.get("host", b"")
    if not host:
        try:
            host = pack_host(connection.peer[0], connection.peer[1])
        except (ValueError, IndexError):
            host = UNKNOWN_HOST
        connection.data["host"] = host
    return host


def check_commit_offset(offset: int) -> None:
    """Raises INVALID_PARAMETER for an offset that no group can have.

    RocketMQ takes any number. Here -1 is one of them, which Go's client commits for "none" and which is later read as
    not found, and so is anything behind a queue's end, as a queue may be ahead elsewhere.
    """
    if not -1 <= offset <= MAX_OFFSET:
        raise invalid(f"commitOffset is {offset}, and an offset is a number from -1 to {MAX_OFFSET}")


def check_queue(config: TopicConfig, queue_id: int, exists: Callable[[str, int], bool]) -> None:
    """Raises INVALID_PARAMETER for a queue that a topic does not have: neither one of its numbers, nor one on disk.

    The latter are those of a topic that had more queues before; groups may still be at work on them.
    """
    count = max(config.read_queue_nums, config.write_queue_nums)
    if not 0 <= queue_id < count and not exists(config.topic_name, queue_id):
        raise invalid(f"queueId is {queue_id}, and the topic {config.topic_name} has the queues 0 to {count - 1}")


def no_such_topic(topic: str) -> RemotingError:
    """TOPIC_NOT_EXIST."""
    return RemotingError(ResponseCode.TOPIC_NOT_EXIST, f"the topic {topic} does not exist on this broker")


def no_such_group(group: str) -> RemotingError:
    """SUBSCRIPTION_GROUP_NOT_EXIST."""
    return RemotingError(
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"the consumer group {group} does not exist on this broker"
    )


def invalid(problem: str) -> RemotingError:
    """INVALID_PARAMETER."""
    return RemotingError(ResponseCode.INVALID_PARAMETER, problem)
