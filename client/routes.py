"""Routes: the queues of a topic and the addresses of their brokers, cached and refreshed from the name servers.

A topic without a route may be one that the broker creates on the first send. Such a send uses the route of TBW102, the
template topic, with at most four queues on each broker (RocketMQ's MQClientInstance).

A name server forgets the topics of a broker that is down, and one that has just started does not know any. Therefore
"no route" means that the topic does not exist only if brokers are registered; else it is an outage (NoBrokerError).
"""

import random
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import anyio

from trimq.client.errors import (
    NoBrokerError,
    NoPermissionError,
    NotStoredError,
    RocketMQError,
    TopicNotFoundError,
    copied,
)
from trimq.protocol.body import PERM_READ, PERM_WRITE, BrokerData, MessageQueue, TopicRouteData
from trimq.protocol.topic_rules import AUTO_CREATE_TOPIC
from trimq.remoting.client.client_log import StandardLog

_log = StandardLog("trimq.client.routes")

MASTER_ID: Final = "0"
DEFAULT_QUEUES: Final = 4
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 0.5
"""Seconds between two queries of a caller that waits for a broker to register; the pause doubles up to the longest."""


class TopicRoute:
    """A topic's queues and brokers. ``at_most`` limits the queues on each broker, for a template topic's route.

    ``write_queues`` has only queues with a master, since only a master accepts messages.

    >>> route = TopicRoute("T", TopicRouteData())
    >>> route.write_queues, route.read_queues
    ([], [])
    """

    def __init__(self, topic: str, data: TopicRouteData, *, at_most: int | None = None) -> None:
        self.topic = topic
        self.data = data
        self.brokers: dict[str, BrokerData] = {broker.broker_name: broker for broker in data.broker_datas}
        self.read_queues: list[MessageQueue] = []
        self.write_queues: list[MessageQueue] = []
        for queues in sorted(data.queue_datas, key=lambda queues: queues.broker_name):
            broker = self.brokers.get(queues.broker_name)
            if broker is None:
                continue
            limit = queues.read_queue_nums if at_most is None else min(at_most, queues.read_queue_nums)
            if queues.perm & PERM_READ:
                self.read_queues += self._queues(queues.broker_name, limit)
            if queues.perm & PERM_WRITE and MASTER_ID in broker.broker_addrs:
                self.write_queues += self._queues(
                    queues.broker_name, queues.write_queue_nums if at_most is None else limit
                )

    def _queues(self, broker: str, count: int) -> list[MessageQueue]:
        return [MessageQueue(topic=self.topic, broker_name=broker, queue_id=number) for number in range(count)]

    def master(self, broker_name: str) -> str | None:
        """The address of a broker's master; None if none is registered."""
        broker = self.brokers.get(broker_name)
        return broker.broker_addrs.get(MASTER_ID) if broker else None

    def member(self, broker_name: str, broker_id: int = 0) -> str | None:
        """The address of the broker with this name and id, or of any other with this name; None if there is none."""
        broker = self.brokers.get(broker_name)
        if broker is None or not broker.broker_addrs:
            return None
        return broker.broker_addrs.get(str(broker_id)) or next(iter(broker.broker_addrs.values()))

    def any_address(self) -> str | None:
        """The address of any broker of the topic, preferably a master; None if the route has no broker."""
        for name in self.brokers:
            address = self.member(name)
            if address is not None:
                return address
        return None


_LOOK_AGAIN: Final = 0.4
_LONGEST_LOOK: Final = 1.0
"""Seconds between two rounds of queries because a broker is doubted, first and at most."""
_DOUBTED: Final = 15.0
"""Seconds for which a broker is doubted: longer than it takes to replace a master."""
_LONG_OUTAGE: Final = 10.0
"""Seconds between two rounds at most, once the same brokers have been doubted for ``_DOUBTED``: an outage."""
_FORGOTTEN: Final = 30.0
"""Seconds after which a broker that is doubted again is doubted as if for the first time."""
_MOST_DOUBTED: Final = 200
"""Topics whose routes are queried in one round, because a broker of theirs is doubted."""

FetchRoute = Callable[[str], Awaitable[TopicRouteData | None]]
"""Asks the name servers for a topic's route; None if they do not know the topic."""


class _Answer(NamedTuple):
    """The result of a query for a route: the route or the error."""

    route: TopicRoute | None
    error: RocketMQError | None

    def get(self) -> TopicRoute:
        if self.route is None:
            assert self.error is not None
            raise copied(self.error)
        return self.route


class _Query:
    """The queries for a topic's route, one at a time: their number so far, and the answer to the last one."""

    __slots__ = ("answer", "lock", "number")

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.number = 0
        self.answer: _Answer


class RouteCache:
    """The routes of a client. ``fetch`` queries a route, ``any_broker`` returns whether any broker is registered.

    The callbacks in ``on_change`` are called with each route that differs from the one before.
    """

    def __init__(self, fetch: FetchRoute, any_broker: Callable[[], Awaitable[bool]]) -> None:
        self._fetch = fetch
        self._any_broker = any_broker
        self._routes: dict[str, TopicRoute] = {}
        self._queries: dict[tuple[str, bool], _Query] = {}
        self._doubted: dict[str, float] = {}
        """Addresses, and until when they are doubted."""
        self._doubts = anyio.Event()
        self._suspects: dict[str, float] = {}
        """Addresses that are doubted or were lately, and when last."""
        self._quick_until = 0.0
        """Until when the rounds are short: a while from the first doubt of the newest suspect."""
        self._suspected = anyio.Event()
        """Set when there is another suspect."""
        self._looked_at = 0
        """Where the next round goes on in a long list of topics."""
        self._stored = anyio.Event()
        self.on_change: list[Callable[[TopicRoute], None]] = []

    def known(self, topic: str) -> TopicRoute | None:
        """The cached route, without a query; None if there is none."""
        return self._routes.get(topic)

    async def get(self, topic: str, *, create: bool = False) -> TopicRoute:
        """The topic's route, from the cache or else from the name servers.

        ``create`` returns the template topic's route for a topic that does not exist. Raises TopicNotFoundError,
        NoBrokerError, and UnreachableError if no name server answers.
        """
        route = self._routes.get(topic)
        return route if route is not None else await self.refresh(topic, create=create)

    async def refresh(self, topic: str, *, create: bool = False, patience: float = 0.0) -> TopicRoute:
        """Queries the topic's route. Callers that refresh the same topic at the same time share one query.

        If no broker is registered, queries again for up to ``patience`` seconds, since a broker may be restarting.
        Raises the same errors as ``get``.
        """
        deadline = anyio.current_time() + patience
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._shared(topic, create=create)
            except NoBrokerError:
                if anyio.current_time() + pause >= deadline:
                    raise
            await anyio.sleep(random.uniform(0.5, 1.0) * pause)  # noqa: S311 - spreads load
            pause = min(_LONGEST_PAUSE, 2 * pause)

    async def _shared(self, topic: str, *, create: bool) -> TopicRoute:
        query = self._queries.setdefault((topic, create), _Query())
        before = query.number
        async with query.lock:
            # A changed number means that a query ended while this caller waited for the lock: its answer is fresh.
            if query.number == before:
                try:
                    query.answer = _Answer(await self._ask(topic, create=create), None)
                except RocketMQError as error:
                    query.answer = _Answer(None, error)
                query.number += 1
            return query.answer.get()

    async def _ask(self, topic: str, *, create: bool) -> TopicRoute:
        data = await self._fetch(topic)
        if data is not None:
            return self._store(TopicRoute(topic, data))
        known = self._routes.get(topic)
        if known is not None:
            # A name server that has just started knows no topic until the brokers have registered, so a known route
            # stays in use. If the topic was deleted, the brokers refuse requests for it.
            return known
        template = await self._fetch(AUTO_CREATE_TOPIC) if create else None
        if template is not None:
            # Not cached: the next send queries again and finds the topic that the first one has created.
            return TopicRoute(topic, template, at_most=DEFAULT_QUEUES)
        raise await self.missing(topic)

    async def missing(self, topic: str) -> RocketMQError:
        """The error for a topic that the name servers do not know, which depends on whether a broker is registered."""
        if not await self._any_broker():
            return NoBrokerError(f"no broker is registered at the name servers: the topic {topic} cannot be looked up")
        return TopicNotFoundError(f"no name server has a route for the topic {topic}", code=17)

    def _store(self, route: TopicRoute) -> TopicRoute:
        old = self._routes.get(route.topic)
        if old is not None and old.data == route.data:
            return old
        self._routes[route.topic] = route
        self._stored.set()
        self._stored = anyio.Event()
        for callback in self.on_change:
            callback(route)
        return route

    async def refresh_all(self) -> None:
        """Refreshes every cached route. A route that cannot be queried now stays as it is."""
        for topic in list(self._routes):
            try:
                await self.refresh(topic)
            except (TopicNotFoundError, NoPermissionError, NotStoredError):
                continue

    def doubt(self, address: str) -> None:
        """A broker has not answered as a master does: perhaps another one leads now, or will soon."""
        now = anyio.current_time()
        if now - self._suspects.get(address, -_FORGOTTEN) >= _FORGOTTEN:
            self._suspects = {each: at for each, at in self._suspects.items() if now - at < _FORGOTTEN}
            self._quick_until = now + _DOUBTED
            self._suspected.set()
        self._suspects[address] = now
        self._doubted[address] = now + _DOUBTED
        self._doubts.set()

    async def differs(self, topic: str, route: TopicRoute | None) -> None:
        """Returns when the cached route of a topic is another one than ``route``."""
        while self._routes.get(topic) is route:
            await self._stored.wait()

    async def look_again(self) -> None:
        """Queries routes at once when a broker is doubted, and again while they still name it. Until cancelled."""
        pause = _LOOK_AGAIN
        while True:
            if not self._doubted:
                self._doubts = anyio.Event()
                await self._doubts.wait()
                pause = _LOOK_AGAIN
            self._suspected = anyio.Event()
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001 - a callback's, for example: the next round may succeed
                _log.failed("routes were not queried", error)
            seconds = random.uniform(0.75, 1.0) * pause  # noqa: S311 - spreads load
            await anyio.sleep(min(_LONGEST_LOOK, seconds))
            with anyio.move_on_after(seconds - _LONGEST_LOOK):
                await self._suspected.wait()
            longest = _LONGEST_LOOK if anyio.current_time() < self._quick_until else _LONG_OUTAGE
            pause = min(longest, 1.5 * pause)

    async def _look(self) -> None:
        now = anyio.current_time()
        self._doubted = {address: until for address, until in self._doubted.items() if until > now}
        topics = self._at(set(self._doubted)) if self._doubted else []
        if not topics:
            if self._doubted:
                self._suspects.clear()
            self._doubted.clear()  # no route names them, and none lacks a master
            return
        at = self._looked_at % len(topics)
        self._looked_at = at + _MOST_DOUBTED
        for topic in (topics[at:] + topics[:at])[:_MOST_DOUBTED]:
            try:
                await self.refresh(topic)
            except (TopicNotFoundError, NoPermissionError):
                continue
            except RocketMQError:
                return  # no name server answers

    def _at(self, addresses: set[str]) -> list[str]:
        """The topics with a route to one of the brokers at ``addresses``, and those whose master is missing."""
        return [
            topic
            for topic, route in self._routes.items()
            if any(
                MASTER_ID not in broker.broker_addrs or not addresses.isdisjoint(broker.broker_addrs.values())
                for broker in route.brokers.values()
            )
        ]

    def addresses(self, *, masters_only: bool = False) -> dict[str, str]:
        """The broker addresses of all routes, each with its broker's name."""
        found: dict[str, str] = {}
        for route in self._routes.values():
            for broker in route.brokers.values():
                for number, address in broker.broker_addrs.items():
                    if number == MASTER_ID or not masters_only:
                        found[address] = broker.broker_name
        return found

    def address_of(self, broker_name: str, broker_id: int = 0) -> str | None:
        """The address of a broker by its name, from any route; None if no route has it."""
        for route in self._routes.values():
            address = route.member(broker_name, broker_id)
            if address is not None:
                return address
        return None
