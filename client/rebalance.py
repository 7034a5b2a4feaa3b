"""Rebalancer: determines which queues a consumer has, whenever members or routes change, and regularly."""

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from logging import INFO
from typing import Any, Final

import anyio
from msgspec import Struct, field

from trimq.client.allocation import Allocation
from trimq.client.core import Client
from trimq.client.errors import NoBrokerError, RocketMQError, TopicNotFoundError
from trimq.client.lifecycle import CLOSE_TIMEOUT
from trimq.client.message import MessageQueue
from trimq.client.process_queue import ProcessQueue
from trimq.client.routes import TopicRoute
from trimq.protocol.body import LockBatchBody, decode_json, encode_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.headers.client import GetConsumerListByGroupRequestHeader
from trimq.remoting.client.client_log import StandardLog

_log = StandardLog("trimq.client.rebalance")

INTERVAL: Final = 20.0
"""Seconds between two rebalances if nothing is known to have changed."""
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
"""Seconds after which an incomplete rebalance is repeated, first and at most: a topic has no route yet, or another
consumer has locked a queue. There is no notification when a consumer unlocks a queue."""
LOCK_RENEWAL: Final = 20.0
LOCK_LIFETIME: Final = 30.0
"""Seconds after which a lock that could not be renewed is no longer trusted. Brokers keep it for 60."""
TENURE: Final = 1.0
"""Shortest time in seconds for which an orderly consumer keeps a queue, unless it closes. Each takeover costs the next
owner several requests, and if members came and went all the time, no member would get to read the queue."""
LEAVE_TIMEOUT: Final = CLOSE_TIMEOUT / 2
"""Seconds for which a closing consumer waits for its commits, so that time is left to unlock: messages without a
committed offset are delivered again, but a lock that remains blocks its queue for all members for a minute."""
NEVER: Final = float("-inf")


class _Members(Struct, rename="camel"):
    consumer_id_list: list[str] = []


class _LockedQueues(Struct):
    lock_ok_mq_set: list[MessageQueue] = field(name="lockOKMQSet", default_factory=list)


class Rebalancer:
    """The queues of a consumer.

    ``open_process_queue`` creates the process queue of a queue, ``close_process_queue`` commits its offset and discards
    it. ``allocation`` None takes all queues (broadcasting).

    An orderly consumer locks its queues at their brokers. Every queue that it may have locked is unlocked when it is no
    longer wanted, also if opening it was interrupted: a lock that remains blocks its queue for all members for a
    minute. If the program is still processing a message of a queue, an orderly consumer gives the queue up only when
    that is finished, so that no other member starts with the next message before.
    """

    def __init__(
        self,
        client: Client,
        group: str,
        topics: Callable[[], list[str]],
        allocation: Allocation | None,
        open_process_queue: Callable[[MessageQueue], Awaitable[ProcessQueue]],
        close_process_queue: Callable[[ProcessQueue], Coroutine[Any, Any, None]],
        *,
        orderly: bool,
    ) -> None:
        self._client = client
        self._group = group
        self._topics = topics
        self._allocation = allocation
        self._open_process_queue = open_process_queue
        self._close_process_queue = close_process_queue
        self._orderly = orderly
        self._wanted = anyio.Event()
        self._lock = anyio.Lock()
        self._locked_at: dict[MessageQueue, float] = {}  # NEVER: a lock was requested, and may be held unconfirmed
        self._opened: dict[MessageQueue, float] = {}
        self._leaving: dict[MessageQueue, ProcessQueue] = {}  # taken away, but not committed and unlocked yet
        self._incomplete = False  # whether the last rebalance has to be repeated soon
        self._scope: anyio.CancelScope | None = None
        self.process_queues: dict[MessageQueue, ProcessQueue] = {}
        self.closed: bool = False

    def now(self) -> None:
        """Requests a rebalance, since members or queues have changed."""
        self._wanted.set()

    def route_changed(self, route: TopicRoute) -> None:
        """Requests a rebalance if the route is that of a subscribed topic."""
        if route.topic in self._topics():
            self._wanted.set()

    async def run(self) -> None:
        """Rebalances when requested and regularly, until it is cancelled."""
        pause = FIRST_PAUSE
        while True:
            with anyio.move_on_after(pause if self._incomplete else INTERVAL) as waiting:
                await self._wanted.wait()
            pause = min(LONGEST_PAUSE, 2 * pause) if waiting.cancelled_caught and self._incomplete else FIRST_PAUSE
            self._wanted = anyio.Event()  # before the rebalance: a change while it runs must cause another one
            try:
                await self.rebalance()
            except Exception as error:  # noqa: BLE001 - an invalid reply of a broker must not end it
                self._incomplete = True
                _log.failed("rebalance failed", error, group=self._group)

    async def rebalance(self) -> None:
        """Opens and closes process queues so that they match this member's share of each topic.

        A topic whose share cannot be determined now stays as it is. Each step makes one request to a broker for all
        topics and queues, since a queue that changes its owner is not read for as long as the steps take.
        """
        async with self._lock:
            if not self.closed:  # stop_all sets it first, and cancels the scope of a rebalance that is running
                with anyio.CancelScope() as self._scope:
                    await self._rebalance()

    async def _rebalance(self) -> None:
        # Give up before taking: another member waits for the queues that this one must release. A topic that is missing
        # in shares is not touched by any step, since an unknown share is not an empty one.
        self._incomplete = False
        await self._release()
        shares = await self._shares()
        for queue, process_queue in list(self.process_queues.items()):
            if queue.topic in shares and (queue not in shares[queue.topic] or process_queue.dropped):
                if self._orderly and not process_queue.dropped and time.monotonic() - self._opened[queue] < TENURE:
                    self._incomplete = True
                else:
                    self._stop(queue)
        await self._release()  # those just stopped whose messages are all finished
        wanted = {queue for queues in shares.values() for queue in queues}
        # A queue that is leaving and wanted again waits for its release: the old process queue must commit first.
        fresh = [queue for queue in sorted(wanted) if queue not in self.process_queues and queue not in self._leaving]
        if self._orderly:
            # Locks without a process queue remain from a rebalance that was interrupted between locking and opening.
            await self._unlock(
                [queue for queue in self._locked_at if queue.topic in shares and self._is_unused(queue, wanted)]
            )
            held = await self._lock_queues(fresh)
            self._incomplete |= len(held) < len(fresh)
            fresh = [queue for queue in fresh if queue in held]
        async with anyio.create_task_group() as group:
            for queue in fresh:
                group.start_soon(self._open, queue)

    async def _shares(self) -> dict[str, list[MessageQueue]]:
        """This member's queues of each topic; topics for which they cannot be determined now are missing."""
        shares: dict[str, list[MessageQueue]] = {}
        asked: dict[str, list[str]] = {}
        asking = anyio.Lock()

        async def ask(topic: str) -> None:
            with self._skipping(topic):
                route = await self._client.routes.get(topic)
                queues = sorted(route.read_queues)
                if self._allocation is not None:
                    async with asking:  # one after the other: topics on the same broker share one answer in ``asked``
                        members = await self._members(route, asked)
                    queues = self._allocation(self._client.id, queues, members)
                shares[topic] = queues

        async with anyio.create_task_group() as group:
            for topic in self._topics():
                group.start_soon(ask, topic)
        return shares

    @contextmanager
    def _skipping(self, topic: str) -> Iterator[None]:
        """Skips a topic or queue that fails, and marks the rebalance as incomplete; the others are not affected."""
        try:
            yield
        except (TopicNotFoundError, NoBrokerError):
            self._incomplete = True
        except RocketMQError as error:
            self._incomplete = True
            self._client.outages.note("a rebalance", error, level=INFO, group=self._group, topic=topic)

    async def _open(self, queue: MessageQueue) -> None:
        with self._skipping(queue.topic):
            self.process_queues[queue] = await self._open_process_queue(queue)
            self._opened[queue] = time.monotonic()

    def _is_unused(self, queue: MessageQueue, wanted: set[MessageQueue]) -> bool:
        return queue not in wanted and queue not in self.process_queues and queue not in self._leaving

    async def _members(self, route: TopicRoute, asked: dict[str, list[str]]) -> list[str]:
        """The group's members as one of the route's brokers knows them; ``asked`` has the answers of this rebalance."""
        error: RocketMQError | None = None
        for name in route.brokers:
            address = route.member(name)
            if address is None:
                continue
            if address in asked:
                return asked[address]
            header = GetConsumerListByGroupRequestHeader(consumer_group=self._group)
            try:
                if not self._client.has_greeted(address):  # else the answer would not include this client
                    await self._client.heartbeat(address)
                reply = await self._client.request(address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
            except RocketMQError as failure:
                error = failure
                continue
            asked[address] = sorted(decode_json(reply.body, _Members).consumer_id_list)
            return asked[address]
        raise error or TopicNotFoundError(f"the route of {route.topic} has no broker")

    def _stop(self, queue: MessageQueue) -> None:
        """Stops a process queue. It is released when the program has finished the messages taken from it."""
        process_queue = self.process_queues.pop(queue)
        process_queue.drop()  # no further message is handed out
        process_queue.on_idle = self.now
        self._leaving[queue] = process_queue

    async def _release(self) -> None:
        """Commits and unlocks the stopped queues that the program has finished with."""
        idle = {queue: process_queue for queue, process_queue in self._leaving.items() if not process_queue.busy}
        await self._give_up(idle)
        for queue in idle:
            del self._leaving[queue]

    async def _give_up(self, process_queues: dict[MessageQueue, ProcessQueue], patience: float | None = None) -> None:
        # Commit before unlock: the next owner loads the committed offset as soon as it has the lock.
        with anyio.move_on_after(patience):
            async with anyio.create_task_group() as group:
                for process_queue in process_queues.values():
                    group.start_soon(self._close_process_queue, process_queue)
        if self._orderly:
            await self._unlock(list(process_queues))

    async def stop_all(self) -> None:
        """Commits and unlocks every queue, for a consumer that closes."""
        # A running rebalance holds the lock and may wait for a broker that is down. It is cancelled, and none starts
        # after it, so that closing has its bounded time for commits and unlocks.
        self.closed = True
        if self._scope is not None:
            self._scope.cancel()
        for process_queue in self.process_queues.values():
            process_queue.drop()
        async with self._lock:
            await self._give_up(self.process_queues | self._leaving, LEAVE_TIMEOUT)
            self.process_queues.clear()
            self._leaving.clear()
            if self._orderly:
                await self._unlock(list(self._locked_at))  # also queues that were locked and not opened yet

    # -- locks of orderly consumers --------------------------------------------------------------------------------

    async def keep_locks(self) -> None:
        """Renews the locks every LOCK_RENEWAL seconds until it is cancelled."""
        while True:
            await anyio.sleep(LOCK_RENEWAL)
            try:
                async with self._lock:
                    await self._renew()
            except Exception as error:  # noqa: BLE001 - as in run
                _log.failed("locks cannot be renewed", error, group=self._group)

    async def _renew(self) -> None:
        held = await self._lock_queues(list(self.process_queues))
        for queue, process_queue in self.process_queues.items():
            if queue in held:
                process_queue.resume()
            # A refused lock has no entry and pauses the queue immediately. Without a reply the lock counts as held
            # until LOCK_LIFETIME, well before the broker may give it to another member.
            elif time.monotonic() - self._locked_at.get(queue, NEVER) > LOCK_LIFETIME:
                process_queue.pause()

    async def _lock_queues(self, queues: list[MessageQueue]) -> set[MessageQueue]:
        """Locks ``queues`` at their brokers, or renews the locks; returns those whose locks are confirmed."""
        held: set[MessageQueue] = set()
        for name, ours in _by_broker(queues).items():
            body = LockBatchBody(consumer_group=self._group, client_id=self._client.id, mq_set=ours)
            # Noted before the request: if it is cancelled or its reply is lost, the locks may be held all the same and
            # have to be released.
            for queue in ours:
                self._locked_at.setdefault(queue, NEVER)
            asked = time.monotonic()  # before the request: the broker's lifetime of the lock starts later than this
            try:
                route = await self._client.routes.get(ours[0].topic)
                address = await self._client.master(route, name)
                reply = await self._client.request(address, RequestCode.LOCK_BATCH_MQ, {}, encode_json(body))
            except RocketMQError as error:
                self._client.outages.note("locking queues", error, level=INFO, group=self._group)
                continue
            got = set(decode_json(reply.body, _LockedQueues).lock_ok_mq_set)
            held |= got
            for queue in ours:
                if queue in got:
                    self._locked_at[queue] = asked
                else:
                    del self._locked_at[queue]
        return held

    async def _unlock(self, queues: list[MessageQueue]) -> None:
        for name, ours in _by_broker(queues).items():
            body = LockBatchBody(consumer_group=self._group, client_id=self._client.id, mq_set=ours)
            try:
                route = await self._client.routes.get(ours[0].topic)
                address = await self._client.master(route, name)
                await self._client.request(address, RequestCode.UNLOCK_BATCH_MQ, {}, encode_json(body))
                for queue in ours:
                    self._locked_at.pop(queue, None)
            except RocketMQError as error:
                self._client.outages.note("unlocking queues", error, level=INFO, group=self._group)


def _by_broker(queues: list[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        found.setdefault(queue.broker_name, []).append(queue)
    return found
