"""Holds pulls that wait for a message (RocketMQ's PullRequestHoldService).

A pull that finds nothing is parked under its queue. It is woken by a message that is appended there and matches its
tags or its expression (held_filters.py), or when its time is over. Woken pulls are served again at the end of the
reactor's round, so that a burst of messages goes out in one reply.

Deadlines are kept in buckets of 200 ms: the cost of parking and waking a pull does not depend on the number of held
pulls, and no table is scanned.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Final

import structlog
import trio
from msgspec import Struct

from trimq.broker.config import BrokerConfig
from trimq.broker.services.held_filters import HeldFilters
from trimq.broker.store.types import MessageFilter
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.pull import PullMessageRequestHeader
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.connection import Connection

_log = structlog.get_logger("broker.long_polling")

BUCKETS_PER_SECOND: Final = 5
LONGEST_HOLD_MS: Final = 120_000
"""No pull is held longer, even if the client requests it: its connection would be idle by then."""

_HELD_KEY: Final = "held_pulls"


class PullRequest(Struct, eq=False, gc=True):
    """A held pull. ``filter`` None accepts any message. ``terms`` are those on which the gate let it through."""

    connection: Connection
    command: RemotingCommand
    header: PullMessageRequestHeader
    topic: str
    queue_id: int
    offset: int
    filter: MessageFilter | None = None
    terms: object = None
    bucket: int = -1
    checked: int = 0
    """The offset up to which ``filter`` wants no message, if it needs their properties."""

    @property
    def needs_properties(self) -> bool:
        """Whether the tags code of a message does not decide if it answers the pull."""
        return self.filter is not None and self.filter.needs_properties


class PullRequestHoldService:
    """Held pulls by queue.

    The owner sets ``again`` and ``in_round``. ``again`` serves a pull that was woken or whose time is over, and does
    not hold it a second time. ``in_round`` returns whether the reactor is in a round: woken pulls then wait for
    ``serve_woken``, which is to be in the reactor's at_round_end. Otherwise the service's own task serves them.
    """

    def __init__(self, configuration: Configuration, clock: Clock) -> None:
        self._configuration = configuration
        self._clock = clock
        self._queues: dict[tuple[str, int], dict[PullRequest, None]] = {}
        self.awaited: Collection[tuple[str, int]] = self._queues
        """The queues that have a held pull."""
        self._buckets: dict[int, dict[PullRequest, None]] = {}
        self._woken: list[PullRequest] = []
        self._by_properties = 0
        """Number of held pulls that need properties."""
        self.filters = HeldFilters(self._queues, self._wake_up)
        self._wake = trio.Event()
        self._first = trio.Event()
        self.again: Callable[[PullRequest], None] = _not_set
        self.in_round: Callable[[], bool] = lambda: False
        self.held = 0
        self.refused = 0

    def hold(self, request: PullRequest, suspend_ms: int) -> bool:
        """Hold a pull. False if too many are held already: the caller replies immediately.

        Call it without an await after the read of the store that found nothing: a message that arrives in between would
        not wake the pull.
        """
        config = self._configuration.section(BrokerConfig)
        if self.held >= config.max_held_requests or request.connection.closed:
            self.refused += 1
            return False
        if not config.long_polling_enable:
            suspend_ms = config.short_polling_time_mills
        seconds = min(max(suspend_ms, 0), LONGEST_HOLD_MS) / 1000
        request.bucket = int((self._clock.monotonic() + seconds) * BUCKETS_PER_SECOND) + 1
        self._queues.setdefault((request.topic, request.queue_id), {})[request] = None
        self._buckets.setdefault(request.bucket, {})[request] = None
        mine = request.connection.data.get(_HELD_KEY)
        if mine is None:  # one close listener per connection, not one per pull
            mine = request.connection.data[_HELD_KEY] = {}
            request.connection.on_close.append(self._connection_closed)
        mine[request] = None
        if not self.held:
            self._first.set()
        self.held += 1
        if request.needs_properties:
            request.checked = request.offset
            self._by_properties += 1
        return True

    def notify_arriving(
        self, topic: str, queue_id: int, next_offset: int, tags_code: int, _store_timestamp: int
    ) -> None:
        """Wake the pulls that accept a message. The store calls it when the message can be read."""
        if not self.held:
            return
        waiting = self._queues.get((topic, queue_id))
        if waiting is None:
            return
        fits = [
            request
            for request in waiting
            if request.offset < next_offset and (request.filter is None or request.filter.match_tags(tags_code))
        ]
        if fits and self._by_properties:
            fits = self._without_properties(fits, next_offset)
        if fits:
            self._wake_up(fits)

    def _without_properties(self, requests: list[PullRequest], next_offset: int) -> list[PullRequest]:
        """Those that need no properties. For the others the message is noted, to be evaluated later."""
        ready = [request for request in requests if not request.needs_properties]
        if len(ready) < len(requests):
            self.filters.arrived(requests[0].topic, requests[0].queue_id, next_offset)
            if not self.in_round():
                self._wake.set()
        return ready

    def wake_topic(self, topic: str) -> None:
        """Wake all pulls of a topic: it was deleted, or its permission or a group's offset has changed."""
        self._wake_up([r for (name, _), waiting in self._queues.items() if name == topic for r in waiting])

    def wake_all(self) -> None:
        """Wake all pulls: the broker stops, or the gate's features have changed."""
        self._wake_up([request for waiting in self._queues.values() for request in waiting])

    def held_by_queue(self, topic: str, queue_id: int) -> int:
        """The number of pulls held for a queue."""
        return len(self._queues.get((topic, queue_id), ()))

    def serve_woken(self) -> None:
        """Serve the woken pulls, after a slice of the evaluations that are due (see HeldFilters)."""
        if self.filters.is_pending:
            self.filters.check()
            if self.filters.is_pending:
                self._wake.set()
        while self._woken:  # serving one may wake others
            woken, self._woken = self._woken, []
            for request in woken:
                connection = request.connection
                if connection.closed:
                    continue
                if connection.is_over():  # the client does not read its replies: do not queue another one
                    connection.when_drained(request, partial(self._serve_later, request))
                else:
                    self._serve(request)

    def _serve_later(self, request: PullRequest) -> None:
        self._woken.append(request)
        self._wake.set()

    def _serve(self, request: PullRequest) -> None:
        try:
            self.again(request)
        except RemotingError as error:
            reply = request.command.reply(error.code, error.remark)
        except Exception as error:  # noqa: BLE001 - a failure of one request must not stop the others
            _log.exception("held_pull_failed", topic=request.topic, queue=request.queue_id)
            reply = request.command.reply(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")
        else:
            return
        request.connection.settle(request.command, reply)

    def _wake_up(self, requests: list[PullRequest]) -> None:
        for request in requests:
            self._take_out(request)
        self._woken += requests
        if self._woken and not self.in_round():
            self._wake.set()

    def _take_out(self, request: PullRequest) -> None:
        key = (request.topic, request.queue_id)
        waiting = self._queues[key]
        del waiting[request]
        if not waiting:
            del self._queues[key]
        bucket = self._buckets[request.bucket]
        del bucket[request]
        if not bucket:
            del self._buckets[request.bucket]
        del request.connection.data[_HELD_KEY][request]
        self.held -= 1
        if request.needs_properties:
            self._by_properties -= 1

    def _connection_closed(self, connection: Connection) -> None:
        for request in list(connection.data.get(_HELD_KEY, ())):
            self._take_out(request)

    # time

    def expire(self) -> None:
        """Wake the pulls whose time is over."""
        now = int(self._clock.monotonic() * BUCKETS_PER_SECOND)
        over = [request for bucket, waiting in self._buckets.items() if bucket <= now for request in waiting]
        if over:
            self._wake_up(over)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wake pulls whose time is over, and serve those woken outside of the reactor's rounds, forever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_woken)
            task_status.started()
            while True:
                if not self._buckets:  # no held pull, no ticks
                    self._first = trio.Event()
                    await self._first.wait()
                await self._clock.sleep(1 / BUCKETS_PER_SECOND)
                self.expire()

    async def _run_woken(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            self.serve_woken()


def _not_set(_: PullRequest) -> None:
    raise RuntimeError("PullRequestHoldService.again is not set: held pulls cannot be served")
