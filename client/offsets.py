"""Offsets: queries to brokers, the offset at which a group starts, and the stores of committed offsets."""

import json
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import anyio

from trimq.client.core import Client
from trimq.client.errors import NoPermissionError, RocketMQError, UsageError
from trimq.client.message import MessageQueue
from trimq.protocol.body import encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.headers.offset import (
    GetMaxOffsetRequestHeader,
    GetMinOffsetRequestHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    SearchOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from trimq.protocol.topic_rules import RETRY_PREFIX

StartFrom: TypeAlias = Literal["first", "last"] | datetime | float
"""Where a group without a committed offset starts: at the queue's first message, at its end (``"last"``: only messages
that are stored from now on), or at a time (float: seconds since the epoch)."""


async def queue_master(client: Client, queue: MessageQueue) -> str:
    """The address of the queue's master. Raises TopicNotFoundError or UnreachableError."""
    return await client.master(await client.routes.get(queue.topic), queue.broker_name)


async def max_offset(client: Client, queue: MessageQueue) -> int:
    """The offset that the queue's next message will get."""
    header = GetMaxOffsetRequestHeader(topic=queue.topic, queue_id=queue.queue_id)
    reply = await client.request(await queue_master(client, queue), RequestCode.GET_MAX_OFFSET, header)
    return reply.header(OffsetResponseHeader).offset


async def min_offset(client: Client, queue: MessageQueue) -> int:
    """The offset of the queue's first message."""
    header = GetMinOffsetRequestHeader(topic=queue.topic, queue_id=queue.queue_id)
    reply = await client.request(await queue_master(client, queue), RequestCode.GET_MIN_OFFSET, header)
    return reply.header(OffsetResponseHeader).offset


async def offset_by_time(client: Client, queue: MessageQueue, when: datetime | float) -> int:
    """The offset of the first message stored at ``when`` or later; the queue's end if there is none."""
    header = SearchOffsetRequestHeader(topic=queue.topic, queue_id=queue.queue_id, timestamp=to_ms(when))
    reply = await client.request(await queue_master(client, queue), RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)
    return reply.header(OffsetResponseHeader).offset


async def committed_offset(client: Client, group: str, queue: MessageQueue) -> int | None:
    """The group's committed offset; None if it has none."""
    header = QueryConsumerOffsetRequestHeader(
        consumer_group=group, topic=queue.topic, queue_id=queue.queue_id, set_zero_if_not_found=False
    )
    reply = await client.request(
        await queue_master(client, queue),
        RequestCode.QUERY_CONSUMER_OFFSET,
        header,
        accept=(0, ResponseCode.QUERY_NOT_FOUND),
    )
    if reply.code != 0:
        return None
    offset = reply.header(OffsetResponseHeader).offset
    return offset if offset >= 0 else None


async def commit_offset(
    client: Client, group: str, queue: MessageQueue, offset: int, *, confirmed: bool = True
) -> None:
    """Commits an offset for a group. ``confirmed`` waits for the broker's reply, otherwise the request is one-way."""
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group=group, topic=queue.topic, queue_id=queue.queue_id, commit_offset=offset
    )
    address = await queue_master(client, queue)
    if confirmed:
        await client.request(address, RequestCode.UPDATE_CONSUMER_OFFSET, header)
    else:
        await client.oneway(address, RequestCode.UPDATE_CONSUMER_OFFSET, header)


async def first_offset(client: Client, queue: MessageQueue, start: StartFrom) -> int:
    """The offset at which to start in a queue without a committed one. A retry topic is always read from its start."""
    if queue.topic.startswith(RETRY_PREFIX):
        return 0
    if start == "first":
        try:
            return await min_offset(client, queue)
        except NoPermissionError:
            # A user who may consume (Sub) but not ask for offsets (Get), as Java's consumers need not. A pull at 0 is
            # answered with the first offset if that is another.
            return 0
    if start == "last":
        return await max_offset(client, queue)
    return await offset_by_time(client, queue, start)


def to_ms(when: datetime | float) -> int:
    """Milliseconds since the epoch. Raises UsageError for a datetime without a time zone.

    >>> to_ms(1.5)
    1500
    """
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise UsageError("the time has no time zone; datetime.now(UTC) has one")
        when = when.timestamp()
    return int(when * 1000)


class OffsetStore(Protocol):
    """The store of a consumer's committed offsets."""

    async def load(self, queue: MessageQueue) -> int | None:
        """The stored offset; None if there is none."""

    async def save(self, offsets: dict[MessageQueue, int], *, confirmed: bool) -> None:
        """Stores offsets. ``confirmed`` waits until they are stored."""


class BrokerOffsets:
    """Offsets at the brokers, which the members of a clustering group share."""

    def __init__(self, client: Client, group: str) -> None:
        self._client = client
        self._group = group

    async def load(self, queue: MessageQueue) -> int | None:
        """The group's committed offset."""
        return await committed_offset(self._client, self._group, queue)

    async def save(self, offsets: dict[MessageQueue, int], *, confirmed: bool) -> None:
        """Commits the offsets. With ``confirmed``, a queue's failure is logged and does not affect the others."""
        if not confirmed:
            for queue, offset in offsets.items():
                await commit_offset(self._client, self._group, queue, offset, confirmed=False)
            return
        async with anyio.create_task_group() as group:
            for queue, offset in offsets.items():
                group.start_soon(self._save_one, queue, offset)

    async def _save_one(self, queue: MessageQueue, offset: int) -> None:
        try:
            await commit_offset(self._client, self._group, queue, offset)
        except RocketMQError as error:
            self._client.outages.note("an offset cannot be committed", error, group=self._group, queue=queue)


class LocalOffsets:
    """Offsets of one broadcasting consumer, in the JSON file ``path``, or in memory if that is None."""

    def __init__(self, path: Path | None) -> None:
        self._path = anyio.Path(path) if path is not None else None
        self._offsets: dict[str, int] | None = None
        self._reading = anyio.Lock()
        self._lock = anyio.Lock()

    async def load(self, queue: MessageQueue) -> int | None:
        """The offset saved for the queue; None if there is none."""
        return (await self._table()).get(_name(queue))

    async def save(self, offsets: dict[MessageQueue, int], *, confirmed: bool) -> None:  # noqa: ARG002 - no difference
        """Replaces the file, by renaming a new one."""
        table = await self._table()
        table.update({_name(queue): offset for queue, offset in offsets.items()})
        if self._path is not None:
            fresh = self._path.with_name(self._path.name + ".new")
            async with self._lock:
                await fresh.write_bytes(encode_json({"offsets": table}))
                await fresh.replace(self._path)

    async def _table(self) -> dict[str, int]:
        # Queues are opened at the same time. The lock keeps a second one from setting a table of its own, which would
        # discard what was saved in the first.
        async with self._reading:
            if self._offsets is None:
                known = {}
                if self._path is not None and await self._path.exists():
                    known = dict(json.loads(await self._path.read_bytes())["offsets"])
                self._offsets = known
        return self._offsets


def _name(queue: MessageQueue) -> str:
    return f"{queue.topic}@{queue.broker_name}@{queue.queue_id}"
