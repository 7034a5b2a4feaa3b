"""The queues of topics on all brokers of the cluster, as the name servers know them (RocketMQ's TopicRouteInfoManager).

A route is asked for when a client needs it, and used for loadBalancePollNameServerInterval. If no name server answers
then, the old one is used on. Routes in memory and questions to name servers are bounded, whatever topics clients name.
"""

from collections.abc import Iterator
from typing import Final

import structlog
import trio
from msgspec import Struct

from trimq.broker.config import BrokerConfig
from trimq.broker.services.registration import BrokerOuterAPI
from trimq.protocol.body import PERM_READ, MessageQueue, TopicRouteData, decode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.headers.namesrv import GetRouteInfoRequestHeader
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.errors import RemotingTransportError
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget

_log = structlog.get_logger("broker.routes")

MAX_ROUTES: Final = 10_000
"""Most routes in memory. Beyond it the oldest one is dropped."""
MAX_QUESTIONS: Final = 32
"""Most questions to name servers at a time. Beyond it a topic counts as unknown for now."""
UNKNOWN_SECONDS: Final = 1.0
"""How long an unknown topic, or one that no name server could be asked about, is not asked about again."""
ANSWER_SECONDS: Final = 1.0
"""Seconds that a name server has to answer. Clients wait 3 s for their queues."""


class QueueRoute(Struct, frozen=True):
    """The readable queues of a topic in the order of their names: on each broker, with their number there."""

    topic: str
    brokers: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """The number of queues."""
        return sum(count for _, count in self.brokers)

    def queues(self, numbers: range) -> Iterator[MessageQueue]:
        """The queues with these numbers, an increasing range, in that order."""
        first = 0
        for name, count in self.brokers:
            # The positions in ``numbers`` at which this broker's numbers begin and end.
            begin, end = (
                (max(0, at - numbers.start) + numbers.step - 1) // numbers.step for at in (first, first + count)
            )
            for number in numbers[begin:end]:
                yield MessageQueue(topic=self.topic, broker_name=name, queue_id=number - first)
            first += count


class _Entry(Struct):
    route: QueueRoute | None
    until: float


class TopicRouteInfoManager:
    """Routes by topic."""

    def __init__(self, configuration: Configuration, registration: BrokerOuterAPI, clock: Clock) -> None:
        self._configuration = configuration
        self._registration = registration
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._asking: dict[str, trio.Event] = {}
        self._log_budget = LogBudget(clock)

    def known(self, topic: str) -> tuple[bool, QueueRoute | None]:
        """Whether the route is known and recent enough, and the route: None for a topic that does not exist."""
        entry = self._entries.get(topic)
        if entry is None or entry.until <= self._clock.monotonic():
            return False, None
        return True, entry.route

    async def find(self, topic: str) -> QueueRoute | None:
        """The topic's route; None if no name server knows one, or none could be asked."""
        while not (found := self.known(topic))[0]:
            asking = self._asking.get(topic)
            if asking is not None:
                await asking.wait()
            elif len(self._asking) >= MAX_QUESTIONS:
                entry = self._entries.get(topic)
                return entry.route if entry is not None else None
            else:
                await self._ask(topic)
        return found[1]

    async def _ask(self, topic: str) -> None:
        asking = self._asking[topic] = trio.Event()
        try:
            self._store(topic, await self._fetched(topic))
        finally:  # also if this task is cancelled: then one that waits asks itself
            del self._asking[topic]
            asking.set()

    async def _fetched(self, topic: str) -> _Entry:
        now = self._clock.monotonic()
        try:
            route = await self._fetch(topic)
        except (RemotingTransportError, RemotingError, FrameError) as error:
            if self._log_budget.allows():
                _log.warning("route_not_fetched", topic=topic, reason=str(error))
            before = self._entries.get(topic)
            return _Entry(before.route if before is not None else None, now + UNKNOWN_SECONDS)
        interval = self._configuration.section(BrokerConfig).load_balance_poll_name_server_interval / 1000
        return _Entry(route, now + (UNKNOWN_SECONDS if route is None else interval))

    def _store(self, topic: str, entry: _Entry) -> None:
        self._entries.pop(topic, None)  # so that it becomes the newest one
        if len(self._entries) >= MAX_ROUTES:
            del self._entries[next(iter(self._entries))]
        self._entries[topic] = entry

    async def _fetch(self, topic: str) -> QueueRoute | None:
        header = GetRouteInfoRequestHeader(topic=topic, accept_standard_json_only=True)
        command = RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        reply = await self._registration.ask(command, ANSWER_SECONDS)
        if reply.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        if reply.code != ResponseCode.SUCCESS:
            raise RemotingError(reply.code, reply.remark or "")
        data = decode_json(reply.body, TopicRouteData)
        brokers = {item.broker_name: item.read_queue_nums for item in data.queue_datas if item.perm & PERM_READ}
        return QueueRoute(topic, tuple(sorted((name, count) for name, count in brokers.items() if count > 0)))
