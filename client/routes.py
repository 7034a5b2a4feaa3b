"""Routes: where a topic's queues are, learned from name servers and kept for a while.

A topic without a route may be one that the broker creates on the first send: its route is then that of TBW102, the
template topic, with at most four queues (RocketMQ's MQClientInstance).

A name server forgets the topics of a broker that is away, and a new one knows none yet. So "no route" means that there
is no such topic only where brokers are registered; where none is, it is an outage (NoBrokerError).
"""

import random
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import anyio

from trimq.client.errors import NoBrokerError, NotStoredError, RocketMQError, TopicNotFoundError, again
from trimq.protocol.body import PERM_READ, PERM_WRITE, BrokerData, MessageQueue, TopicRouteData
from trimq.protocol.topic_rules import AUTO_CREATE_TOPIC

MASTER_ID: Final = "0"
DEFAULT_QUEUES: Final = 4
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 0.5
"""Between two questions of who waits for a broker to come back."""


class TopicRoute:
    """What is known of where a topic is.

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
        """The address of a broker's master; None where none is registered."""
        broker = self.brokers.get(broker_name)
        return broker.broker_addrs.get(MASTER_ID) if broker else None

    def member(self, broker_name: str, broker_id: int = 0) -> str | None:
        """The address of one member of a broker name, of any other where that one is not there."""
        broker = self.brokers.get(broker_name)
        if broker is None or not broker.broker_addrs:
            return None
        return broker.broker_addrs.get(str(broker_id)) or next(iter(broker.broker_addrs.values()))

    def any_address(self) -> str | None:
        """Some broker that serves the topic, a master where there is one."""
        for name in self.brokers:
            address = self.member(name)
            if address is not None:
                return address
        return None


FetchRoute = Callable[[str], Awaitable[TopicRouteData | None]]
"""Asks the name servers for a topic: None where they do not know it."""


class _Answer(NamedTuple):
    """What came of a question for a route."""

    route: TopicRoute | None
    error: RocketMQError | None

    def get(self) -> TopicRoute:
        if self.route is None:
            assert self.error is not None
            raise again(self.error)
        return self.route


class _Question:
    """The questions for a topic's route, one at a time: how many there were, and what came of the last one."""

    __slots__ = ("answer", "lock", "number")

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.number = 0
        self.answer: _Answer


class RouteCache:
    """The routes that a client has asked for. ``fetch`` asks the name servers, ``any_broker`` whether they know one."""

    def __init__(self, fetch: FetchRoute, any_broker: Callable[[], Awaitable[bool]]) -> None:
        self._fetch = fetch
        self._any_broker = any_broker
        self._routes: dict[str, TopicRoute] = {}
        self._questions: dict[tuple[str, bool], _Question] = {}
        self.on_change: list[Callable[[TopicRoute], None]] = []

    def known(self, topic: str) -> TopicRoute | None:
        """The route as it was last seen, without asking."""
        return self._routes.get(topic)

    async def get(self, topic: str, *, create: bool = False) -> TopicRoute:
        """The topic's route, asked for where it is not known.

        ``create`` takes the template topic's route for a topic that nobody knows. Raises TopicNotFoundError,
        NoBrokerError, and UnreachableError where no name server answers.
        """
        route = self._routes.get(topic)
        return route if route is not None else await self.refresh(topic, create=create)

    async def refresh(self, topic: str, *, create: bool = False, patience: float = 0.0) -> TopicRoute:
        """Asks anew. Callers that ask for the same topic at the same time share one request and its answer.

        With no broker there it is asked again for up to ``patience`` seconds: one that restarts comes back.
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
        question = self._questions.setdefault((topic, create), _Question())
        before = question.number
        async with question.lock:
            if question.number == before:
                try:
                    question.answer = _Answer(await self._ask(topic, create=create), None)
                except RocketMQError as error:
                    question.answer = _Answer(None, error)
                question.number += 1
            return question.answer.get()

    async def _ask(self, topic: str, *, create: bool) -> TopicRoute:
        data = await self._fetch(topic)
        if data is not None:
            return self._keep(TopicRoute(topic, data))
        known = self._routes.get(topic)
        if known is not None:
            # A name server that has just started knows no topic before the brokers have registered. For one that was
            # deleted the brokers say so.
            return known
        template = await self._fetch(AUTO_CREATE_TOPIC) if create else None
        if template is not None:
            # Not kept: the next send asks again and finds the topic that the first one has created.
            return TopicRoute(topic, template, at_most=DEFAULT_QUEUES)
        raise await self.missing(topic)

    async def missing(self, topic: str) -> RocketMQError:
        """The error for a topic that the name servers do not know: there is none such, or no broker is there to ask."""
        if not await self._any_broker():
            return NoBrokerError(f"no broker is registered at the name servers, so nobody knows the topic {topic}")
        return TopicNotFoundError(f"no name server has a route for the topic {topic}", code=17)

    def _keep(self, route: TopicRoute) -> TopicRoute:
        old = self._routes.get(route.topic)
        if old is not None and old.data == route.data:
            return old
        self._routes[route.topic] = route
        for callback in self.on_change:
            callback(route)
        return route

    async def refresh_all(self) -> None:
        """Asks anew for every topic that was asked for; what cannot be learned now stays as it was."""
        for topic in list(self._routes):
            try:
                await self.refresh(topic)
            except (TopicNotFoundError, NotStoredError):
                continue

    def addresses(self, *, masters_only: bool = False) -> dict[str, str]:
        """Every broker address in all routes, with its broker's name."""
        found: dict[str, str] = {}
        for route in self._routes.values():
            for broker in route.brokers.values():
                for number, address in broker.broker_addrs.items():
                    if number == MASTER_ID or not masters_only:
                        found[address] = broker.broker_name
        return found

    def address_of(self, broker_name: str, broker_id: int = 0) -> str | None:
        """The address of a broker by its name, from any route."""
        for route in self._routes.values():
            address = route.member(broker_name, broker_id)
            if address is not None:
                return address
        return None
