"""Requests to the brokers: which queues exist, their first and last offsets, the offset of a time.

Name servers remove a broker from the routes as soon as it is down. Topics that are named in the options are waited for;
those found by a pattern are missing as long as their brokers are.
"""

import re
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeVar

import anyio

from trimq.client import offsets
from trimq.client.admin.models import TopicOffset, as_kind, queue_table
from trimq.client.core import Client, wall_ms
from trimq.client.errors import (
    NoBrokerError,
    PerhapsStoredError,
    RocketMQError,
    TopicNotFoundError,
    UnreachableError,
    error_for,
)
from trimq.client.message import MessageQueue
from trimq.client.pulling import PullCall, PullStatus
from trimq.client.routes import TopicRoute
from trimq.client.subscription import ALL, Subscription
from trimq.pipeline.topics.settings import DEFAULT_GROUP, ReadSettings
from trimq.protocol import lenient_json
from trimq.protocol.body import ClusterInfo, TopicList, decode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.headers.admin import TopicRequestHeader
from trimq.protocol.record import store_time_at
from trimq.protocol.topic_rules import DLQ_PREFIX, RETRY_PREFIX, is_system_topic

T = TypeVar("T")

_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
_AT_ONCE: Final = 32
"""The most concurrent requests to brokers."""
_PASSING: Final = frozenset(
    {
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    }
)
_NOT_THERE: Final = frozenset(status.value for status in PullStatus)
_HEAD: Final = struct.Struct(">20xq8xi")
"""A record's queue offset and system flag (layout: trimq.protocol.record)."""


class Bounds(NamedTuple):
    """The first offset of a queue, and the offset that its next message will get.

    ``last_ms`` is the store time of the message before ``end``; 0 if the broker does not report it.
    """

    first: int
    end: int
    last_ms: int = 0


class Patience:
    """A time limit for retries: ``seconds`` from the first failure after the last success.

    >>> Patience(0.0).is_over
    True
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._pause = _PAUSE
        self._until: float | None = None

    def worked(self) -> None:
        """Report a success: the next failure is a first one."""
        self._pause = _PAUSE
        self._until = None

    @property
    def is_over(self) -> bool:
        """Whether the time is over. The first call after a success starts it, so call this after each failure."""
        return self._left() <= 0

    async def wait(self) -> None:
        """Sleep before a retry, longer each time, but not beyond the limit."""
        await anyio.sleep(min(self._pause, max(0.0, self._left())))
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    def _left(self) -> float:
        now = time.monotonic()
        if self._until is None:
            self._until = now + self.seconds
        return self._until - now


def is_passing(error: RocketMQError) -> bool:
    """Whether a retry later may succeed: a peer did not answer, or a broker reported that it is busy."""
    unanswered = isinstance(error, UnreachableError | PerhapsStoredError) and error.code is None
    return unanswered or error.code in _PASSING


async def persistently(patience: Patience, action: Callable[[], Awaitable[T]], *, also: type[Exception]) -> T:
    """The result of ``action``, retried while its errors are passing or of type ``also``. Raises the last error."""
    while True:
        try:
            result = await action()
        except RocketMQError as error:
            if not (is_passing(error) or isinstance(error, also)) or patience.is_over:
                raise
            await patience.wait()
        else:
            patience.worked()
            return result


async def matching_topics(client: Client, pattern: str) -> list[str]:
    """The topics whose whole name matches, without system topics, retry and dead-letter topics."""
    reply = await client.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    brokers = set((await cluster(client)).broker_addr_table)
    expression = re.compile(pattern)
    return [
        topic
        for topic in sorted(decode_json(reply.body, TopicList).topic_list)
        if expression.fullmatch(topic)
        and not is_system_topic(topic)
        and not topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
        and topic not in brokers
    ]


async def cluster(client: Client) -> ClusterInfo:
    """The brokers that are registered at the name server."""
    reply = await client.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
    return decode_json(reply.body, ClusterInfo)


async def routes(client: Client, settings: ReadSettings) -> tuple[dict[str, TopicRoute], list[str]]:
    """The routes of the selected topics, and the names of topics that were requested but have no route."""
    topics = settings.topics
    if settings.pattern is not None:
        topics = tuple(await matching_topics(client, settings.pattern))
    found: dict[str, TopicRoute] = {}
    missing: list[str] = []
    for topic in topics:
        try:
            found[topic] = await client.routes.refresh(topic)
        except (TopicNotFoundError, NoBrokerError):
            missing.append(topic)
    return found, missing


async def bounds(client: Client, settings: ReadSettings, found: Iterable[TopicRoute]) -> dict[MessageQueue, Bounds]:
    """The bounds of all selected queues that can be read. Sends one request for each topic and broker."""
    table: dict[MessageQueue, Bounds] = {}
    limiter = anyio.CapacityLimiter(_AT_ONCE)
    errors: list[RocketMQError] = []

    async def one(route: TopicRoute, address: str) -> None:
        async with limiter:
            try:
                table.update(await _topic_bounds(client, route.topic, address))
            except RocketMQError as error:
                errors.append(error)

    wanted: set[MessageQueue] = set()
    async with anyio.create_task_group() as group:
        for route in found:
            wanted.update(route.read_queues)
            for broker in {queue.broker_name for queue in route.read_queues}:
                address = route.member(broker)
                if address is not None:
                    group.start_soon(one, route, address)
    if errors:
        raise errors[0]
    if settings.queues is not None:
        wanted &= settings.queues
    return {queue: table[queue] for queue in sorted(wanted) if queue in table}


async def _topic_bounds(client: Client, topic: str, address: str) -> dict[MessageQueue, Bounds]:
    header = TopicRequestHeader(topic=topic)
    reply = await client.request(address, RequestCode.GET_TOPIC_STATS_INFO, header)
    table = queue_table(lenient_json.loads(bytes(reply.body)).get("offsetTable"))
    found = {}
    for queue, value in table.items():
        offset: TopicOffset = as_kind(value, TopicOffset)
        first = max(0, offset.min_offset)
        last_ms = offset.last_update_timestamp if offset.max_offset > first else 0
        found[queue] = Bounds(first, max(first, offset.max_offset), max(0, last_ms))
    return found


async def at_time(client: Client, queues: Iterable[MessageQueue], time_ms: int) -> dict[MessageQueue, int]:
    """For each queue the offset of its first message stored at ``time_ms`` or later; its end if there is none."""
    found: dict[MessageQueue, int] = {}
    limiter = anyio.CapacityLimiter(_AT_ONCE)
    errors: list[RocketMQError] = []

    async def one(queue: MessageQueue) -> None:
        async with limiter:
            try:
                found[queue] = await offsets.offset_by_time(client, queue, time_ms / 1000)
            except RocketMQError as error:
                errors.append(error)

    async with anyio.create_task_group() as group:
        for queue in queues:
            group.start_soon(one, queue)
    if errors:
        raise errors[0]
    return found


async def store_times(
    client: Client, settings: ReadSettings, places: Mapping[MessageQueue, int]
) -> dict[MessageQueue, int]:
    """For each queue the store time (ms) of its message at an offset, without queues that have no message there.

    Raises RocketMQError.
    """
    found: dict[MessageQueue, int] = {}
    limiter = anyio.CapacityLimiter(_AT_ONCE)
    errors: list[RocketMQError] = []

    async def one(queue: MessageQueue, offset: int) -> None:
        async with limiter:
            try:
                time_ms = await _store_time(client, settings, queue, offset)
            except RocketMQError as error:
                errors.append(error)
            else:
                if time_ms is not None:
                    found[queue] = time_ms

    async with anyio.create_task_group() as group:
        for queue, offset in places.items():
            group.start_soon(one, queue, offset)
    if errors:
        raise errors[0]
    return found


async def _store_time(client: Client, settings: ReadSettings, queue: MessageQueue, offset: int) -> int | None:
    """Pull that one message. No cheaper request returns the exact time on all versions of brokers."""
    everything = Subscription(queue.topic, ALL, wall_ms())
    call = PullCall(settings.group or DEFAULT_GROUP, queue, everything, 1, with_subscription=True, hold=0.0)
    address = (await client.routes.get(queue.topic)).member(queue.broker_name)
    if address is None:
        raise UnreachableError(f"the route of {queue.topic} has no broker {queue.broker_name}")
    reply = await client.invoke(address, call.command(offset))
    if reply.code != PullStatus.FOUND.value:
        if reply.code in _NOT_THERE:
            return None
        raise error_for(reply.code, reply.remark, address)
    body = bytes(reply.body)
    # A pull returns the next message if there is none at the offset, as in a compaction topic.
    if len(body) < _HEAD.size or _HEAD.unpack_from(body)[0] != offset:
        return None
    at = store_time_at(_HEAD.unpack_from(body)[1])
    return int.from_bytes(body[at : at + 8], "big", signed=True)


async def commit(client: Client, group: str, positions: Iterable[tuple[MessageQueue, int]]) -> None:
    """Commit offsets for the group, which only shows its progress; never backwards. Raises RocketMQError."""
    for queue, offset in positions:
        known = await offsets.committed_offset(client, group, queue)
        if known is None or known < offset:
            await offsets.commit_offset(client, group, queue, offset)
