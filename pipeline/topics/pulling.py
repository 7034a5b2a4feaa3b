"""The full path for pulling one range of a queue: raw replies in order, with retries and the reports of lost messages.

Without a filter nearly every offset of a range is a message, so that the range is divided into parts whose requests are
in flight together. Offsets without a message (in a queue that was rebuilt over a damaged log, or a compaction topic)
make a reply extend behind its part; those messages are discarded, because the request for the next part returns them
too. With a filter only the reply says where to continue, and requests are sent one after the other.

Long ranges take this path only after the fast path has ended (see direct_connection): if brokers are away, or messages
were deleted.
"""

import struct
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple

import anyio
import structlog

from trimq.client.core import Client, wall_ms
from trimq.client.errors import PerhapsStoredError, RocketMQError, TopicNotFoundError, UnreachableError, error_for
from trimq.client.pulling import PullStatus
from trimq.client.subscription import Subscription
from trimq.pipeline.topics.places import Patience, is_passing
from trimq.pipeline.topics.planning import Range, missing_offsets, name_of
from trimq.pipeline.topics.settings import DEFAULT_GROUP, ReadSettings
from trimq.protocol import sysflag
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.pull import PullMessageRequestHeader, PullMessageResponseHeader

_ASK_FOR: Final = 1024
"""Messages that one pull requests; brokers return fewer (32 and 256 KiB unless configured otherwise)."""
_DEPTH: Final = 6
"""Pulls in flight."""
_FEW: Final = 32
"""Offsets of a part if no reply has shown yet how many messages the broker returns."""
_QUEUE_OFFSET: Final = struct.Struct(">i16xq")
"""The size of an encoded message, and its offset in the queue."""
_READABLE: Final = {status.value: status for status in PullStatus}

_log = structlog.get_logger("pipeline")


class Reply(NamedTuple):
    """A pull's reply: its encoded messages, the offset to continue at, and the bounds of the queue."""

    status: PullStatus
    body: bytes
    next_offset: int
    first: int
    end: int


@dataclass
class _Part:
    """Offsets [at, end) that are read by one task. ``bodies`` have arrived; ``done`` is set at the end or an error."""

    at: int
    end: int
    bodies: list[bytes]
    done: anyio.Event
    error: BaseException | None = None


def _between(body: bytes, begin: int, end: int) -> bytes:
    """The messages of a reply with offsets in [begin, end). Bytes that are no message stay; decoding reports them."""
    inside: list[bytes] = []
    at = 0
    whole = True
    while at + _QUEUE_OFFSET.size <= len(body):
        size, offset = _QUEUE_OFFSET.unpack_from(body, at)
        if size < _QUEUE_OFFSET.size:
            break
        if begin <= offset < end:
            inside.append(body[at : at + size])
        else:
            whole = False
        at += size
    return body if whole else b"".join([*inside, body[at:]])


class RangeReader:
    """Reads one range. Raises DataLossError, and RocketMQError if brokers do not answer for pollTimeoutMs."""

    def __init__(self, client: Client, settings: ReadSettings, span: Range) -> None:
        self._client = client
        self._settings = settings
        self._span = span
        self._subscription = Subscription(span.queue.topic, settings.wanted, wall_ms())
        self._patience = Patience(settings.poll_timeout)
        self._step = 0

    async def bodies(self) -> AsyncGenerator[bytes]:
        """The bodies of replies in the order of offsets. With a filter the last one may extend beyond the range."""
        if self._settings.is_filtered:
            async with aclosing(self._one_by_one()) as bodies:
                async for body in bodies:
                    yield body
            return
        # One pull alone first: its reply shows how many messages the broker returns, which is the size of parts.
        first = _Part(self._span.begin, self._span.end, [], anyio.Event())
        following = await self._advance(first, only_one=True)
        for body in first.bodies:
            yield body
        if following < self._span.end:
            async with aclosing(self._pipelined(following)) as bodies:
                async for body in bodies:
                    yield body

    async def _one_by_one(self) -> AsyncGenerator[bytes]:
        part = _Part(self._span.begin, self._span.end, [], anyio.Event())
        while part.at < part.end:
            part.at = await self._advance(part, only_one=True)
            for body in part.bodies:
                yield body
            part.bodies.clear()

    async def _pipelined(self, at: int) -> AsyncGenerator[bytes]:
        """Read the rest in parts of as many offsets as the first reply had messages, several at the same time."""
        step = self._step or _FEW
        under_way: deque[_Part] = deque()
        error: BaseException | None = None
        async with anyio.create_task_group() as group:
            try:
                while under_way or at < self._span.end:
                    while at < self._span.end and len(under_way) < _DEPTH:
                        part = _Part(at, min(self._span.end, at + step), [], anyio.Event())
                        at = part.end
                        under_way.append(part)
                        group.start_soon(self._fetch, part)
                    # In the order of the range, whichever part is complete first.
                    part = under_way.popleft()
                    await part.done.wait()
                    if part.error is not None:
                        error = part.error
                        break
                    for body in part.bodies:
                        yield body
            finally:
                group.cancel_scope.cancel()
        if error is not None:  # raised here, because the task group would wrap it in an ExceptionGroup
            raise error

    async def _fetch(self, part: _Part) -> None:
        try:
            await self._advance(part)
        except Exception as error:  # noqa: BLE001 - raised by _pipelined when this part's turn comes
            part.error = error
        finally:
            part.done.set()

    async def _advance(self, part: _Part, *, only_one: bool = False) -> int:
        """Pull until the part is complete, or with ``only_one`` until one reply; returns the offset to continue at."""
        at = part.at
        while at < part.end:
            reply = await self._pull(at, part.end - at)
            if reply is None:
                await self._patience.wait()
                continue
            following = self._checked(reply, at, part.end)
            if following is None:
                await self._patience.wait()
                continue
            self._patience.worked()
            if reply.status is PullStatus.FOUND:
                part.bodies.append(_between(reply.body, at, part.end))
                self._step = max(self._step, following - at)
            at = min(following, part.end)
            if only_one:
                break
        return at

    def _checked(self, reply: Reply, at: int, end: int) -> int | None:
        """The offset to continue at after a reply; None to pull again. Raises DataLossError."""
        if reply.first > at:
            self._missing_offsets(f"begins at {reply.first}, {at} was to be read")
            # Beyond the deleted messages, but not beyond the part: the next part reports its own.
            return min(max(reply.next_offset, reply.first), max(end, at + 1))
        if reply.status is PullStatus.FOUND or reply.next_offset > at:
            return reply.next_offset
        # The queue ends before the range. The queue of a broker that has just started may still be growing.
        if reply.end < end and self._patience.is_over:
            self._missing_offsets(f"ends at {reply.end}, offsets up to {end} were to be read")
            return end
        if self._patience.is_over:
            raise PerhapsStoredError(
                f"{name_of(self._span.queue)} has messages at {at}, but the broker does not return them"
            )
        return None

    def _missing_offsets(self, what: str) -> None:
        text = missing_offsets(self._settings, f"{name_of(self._span.queue)} {what}")
        _log.warning("messages were deleted", reason=text)

    async def _pull(self, at: int, count: int) -> Reply | None:
        """Pull once; None if a retry may succeed. Raises RocketMQError."""
        queue = self._span.queue
        try:
            route = await self._client.routes.get(queue.topic)
            address = route.member(queue.broker_name)
            if address is None:
                raise TopicNotFoundError(f"the route of {queue.topic} has no broker {queue.broker_name}")
            reply = await self._client.invoke(address, self._request(at, count))
            status = _READABLE.get(reply.code)
            if status is None:
                raise error_for(reply.code, reply.remark, address)
        except RocketMQError as error:
            may_pass = is_passing(error) or isinstance(error, TopicNotFoundError)
            if not may_pass or self._patience.is_over:
                raise
            _log.info("pull failed", queue=queue, reason=str(error))
            await self._refresh_route()
            return None
        answer = reply.header(PullMessageResponseHeader)
        body = bytes(reply.body) if status is PullStatus.FOUND else b""
        return Reply(status, body, answer.next_begin_offset, answer.min_offset, answer.max_offset)

    def _request(self, at: int, count: int) -> RemotingCommand:
        data = self._subscription.data
        header = PullMessageRequestHeader(
            consumer_group=self._settings.group or DEFAULT_GROUP,
            topic=self._span.queue.topic,
            queue_id=self._span.queue.queue_id,
            queue_offset=at,
            max_msg_nums=min(count, _ASK_FOR) if not self._settings.is_filtered else _ASK_FOR,
            sys_flag=sysflag.PULL_SUBSCRIPTION,
            commit_offset=0,
            suspend_timeout_millis=0,
            sub_version=data.sub_version,
            subscription=data.sub_string,
            expression_type=data.expression_type,
        )
        return RemotingCommand.request(RequestCode.PULL_MESSAGE, header)

    async def _refresh_route(self) -> None:
        try:
            await self._client.routes.refresh(self._span.queue.topic)
        except (TopicNotFoundError, UnreachableError):
            return
