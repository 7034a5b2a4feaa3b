"""Which queues a consumer has: found out anew when members or routes change, and from time to time."""

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
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
"""How soon a topic without a route is looked for again, or a queue that another consumer has locked, at first and at
last: whoever unlocks a queue tells nobody."""
LOCK_RENEWAL: Final = 20.0
LOCK_LIFETIME: Final = 30.0
"""Seconds after which a lock that could not be renewed is not trusted any more; brokers keep it for 60."""
TENURE: Final = 1.0
"""Seconds for which an orderly consumer keeps a queue at least, unless it leaves: taking one over costs its next owner
several requests, and with members that come and go all the time nobody would come to read it."""
LEAVE_TIMEOUT: Final = CLOSE_TIMEOUT / 2
"""Seconds that who leaves waits for its commits: what is not confirmed comes again, but a lock that is left behind
keeps everybody off its queue for a minute."""
NEVER: Final = float("-inf")


class _Members(Struct, rename="camel"):
    consumer_id_list: list[str] = []


class _LockedQueues(Struct):
    lock_ok_mq_set: list[MessageQueue] = field(name="lockOKMQSet", default_factory=list)


class Rebalancer:
    """The queues of a consumer.

    ``open_process_queue`` makes the process queue of one, ``close_process_queue`` commits and forgets it.
    An orderly consumer locks its queues at their brokers. What it may have locked is unlocked when it is not wanted,
    however far the opening had come: a lock that is left behind keeps everybody off its queue for a minute. A queue
    whose message is still in the program's hands is given up when that is finished.
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
        self._locked_at: dict[MessageQueue, float] = {}  # NEVER: perhaps locked, nobody has said so
        self._opened: dict[MessageQueue, float] = {}
        self._leaving: dict[MessageQueue, ProcessQueue] = {}
        self._incomplete = False
        self._scope: anyio.CancelScope | None = None
        self.process_queues: dict[MessageQueue, ProcessQueue] = {}
        self.closed: bool = False

    def now(self) -> None:
        """Something has changed: look again at once."""
        self._wanted.set()

    def route_changed(self, route: TopicRoute) -> None:
        """As now, where the topic is one of ours."""
        if route.topic in self._topics():
            self._wanted.set()

    async def run(self) -> None:
        """Keeps the queues right until it is cancelled."""
        pause = FIRST_PAUSE
        while True:
            with anyio.move_on_after(pause if self._incomplete else INTERVAL) as waiting:
                await self._wanted.wait()
            pause = min(LONGEST_PAUSE, 2 * pause) if waiting.cancelled_caught and self._incomplete else FIRST_PAUSE
            self._wanted = anyio.Event()
            try:
                await self.rebalance()
            except Exception as error:  # noqa: BLE001 - a broker that talks nonsense must not end it
                self._incomplete = True
                _log.failed("rebalance failed", error, group=self._group)

    async def rebalance(self) -> None:
        """Makes the process queues those that the members' shares say; a topic that cannot be asked for stays as it is.

        Every step is one request to a broker, for all topics and queues: with members that come and go, a queue is
        read by nobody for as long as the steps take.
        """
        async with self._lock:
            if not self.closed:
                with anyio.CancelScope() as self._scope:
                    await self._rebalance()

    async def _rebalance(self) -> None:
        self._incomplete = False
        await self._release()
        shares = await self._shares()
        for queue, process_queue in list(self.process_queues.items()):
            if queue.topic in shares and (queue not in shares[queue.topic] or process_queue.dropped):
                if self._orderly and not process_queue.dropped and time.monotonic() - self._opened[queue] < TENURE:
                    self._incomplete = True
                else:
                    self._stop(queue)
        await self._release()
        wanted = {queue for queues in shares.values() for queue in queues}
        fresh = [queue for queue in sorted(wanted) if queue not in self.process_queues and queue not in self._leaving]
        if self._orderly:
            await self._unlock(
                [queue for queue in self._locked_at if queue.topic in shares and self._is_spare(queue, wanted)]
            )
            held = await self._lock_queues(fresh)
            self._incomplete |= len(held) < len(fresh)
            fresh = [queue for queue in fresh if queue in held]
        async with anyio.create_task_group() as group:
            for queue in fresh:
                group.start_soon(self._open, queue)

    async def _shares(self) -> dict[str, list[MessageQueue]]:
        """What is ours of each topic, those left out that cannot be asked for."""
        shares: dict[str, list[MessageQueue]] = {}
        asked: dict[str, list[str]] = {}
        asking = anyio.Lock()

        async def ask(topic: str) -> None:
            with self._passed_over(topic):
                route = await self._client.routes.get(topic)
                queues = sorted(route.read_queues)
                if self._allocation is not None:
                    async with asking:
                        members = await self._members(route, asked)
                    queues = self._allocation(self._client.id, queues, members)
                shares[topic] = queues

        async with anyio.create_task_group() as group:
            for topic in self._topics():
                group.start_soon(ask, topic)
        return shares

    @contextmanager
    def _passed_over(self, topic: str) -> Iterator[None]:
        """What goes wrong for one topic or queue is tried again soon; the others go on."""
        try:
            yield
        except (TopicNotFoundError, NoBrokerError):
            self._incomplete = True
        except RocketMQError as error:
            self._incomplete = True
            self._client.outages.note("a rebalance", error, level=INFO, group=self._group, topic=topic)

    async def _open(self, queue: MessageQueue) -> None:
        with self._passed_over(queue.topic):
            self.process_queues[queue] = await self._open_process_queue(queue)
            self._opened[queue] = time.monotonic()

    def _is_spare(self, queue: MessageQueue, wanted: set[MessageQueue]) -> bool:
        return queue not in wanted and queue not in self.process_queues and queue not in self._leaving

    async def _members(self, route: TopicRoute, asked: dict[str, list[str]]) -> list[str]:
        """The group's members by one of the route's brokers; ``asked`` has what brokers have said in this turn."""
        error: RocketMQError | None = None
        for name in route.brokers:
            address = route.member(name)
            if address is None:
                continue
            if address in asked:
                return asked[address]
            header = GetConsumerListByGroupRequestHeader(consumer_group=self._group)
            try:
                if not self._client.has_greeted(address):
                    await self._client.heartbeat(address)
                reply = await self._client.request(address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
            except RocketMQError as failure:
                error = failure
                continue
            asked[address] = sorted(decode_json(reply.body, _Members).consumer_id_list)
            return asked[address]
        raise error or TopicNotFoundError(f"the route of {route.topic} has no broker")

    def _stop(self, queue: MessageQueue) -> None:
        """Its next owner may begin when the program has finished what it has of it in its hands."""
        process_queue = self.process_queues.pop(queue)
        process_queue.drop()
        process_queue.on_idle = self.now
        self._leaving[queue] = process_queue

    async def _release(self) -> None:
        """Gives up what was taken away, as far as the program has finished with it."""
        idle = {queue: process_queue for queue, process_queue in self._leaving.items() if not process_queue.busy}
        await self._give_up(idle)
        for queue in idle:
            del self._leaving[queue]

    async def _give_up(self, process_queues: dict[MessageQueue, ProcessQueue], patience: float | None = None) -> None:
        with anyio.move_on_after(patience):
            async with anyio.create_task_group() as group:
                for process_queue in process_queues.values():
                    group.start_soon(self._close_process_queue, process_queue)
        if self._orderly:
            await self._unlock(list(process_queues))

    async def stop_all(self) -> None:
        """Gives up every queue."""
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
                await self._unlock(list(self._locked_at))

    # -- locks of orderly consumers --------------------------------------------------------------------------------

    async def keep_locks(self) -> None:
        """Renews the locks until it is cancelled."""
        while True:
            await anyio.sleep(LOCK_RENEWAL)
            try:
                async with self._lock:
                    await self._renew()
            except Exception as error:  # noqa: BLE001 - as above
                _log.failed("locks cannot be renewed", error, group=self._group)

    async def _renew(self) -> None:
        held = await self._lock_queues(list(self.process_queues))
        for queue, process_queue in self.process_queues.items():
            if queue in held:
                process_queue.resume()
            elif time.monotonic() - self._locked_at.get(queue, NEVER) > LOCK_LIFETIME:  # another has it, or nobody says
                process_queue.pause()

    async def _lock_queues(self, queues: list[MessageQueue]) -> set[MessageQueue]:
        """The ones of ``queues`` that are ours now, by their brokers' word."""
        held: set[MessageQueue] = set()
        for name, ours in _by_broker(queues).items():
            body = LockBatchBody(consumer_group=self._group, client_id=self._client.id, mq_set=ours)
            for queue in ours:
                self._locked_at.setdefault(queue, NEVER)
            asked = time.monotonic()
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
