"""Departures: the broker names that have left, so that the reply "no route" can say what happened to a topic."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from trimq.protocol.topic_rules import AUTO_CREATE_TOPIC

MAX_BROKERS: Final = 256
MAX_TOPICS: Final = 100_000
"""The most topic names to remember, over all brokers that have left."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A broker name that has left. ``at``: the clock's monotonic time in seconds."""

    broker_name: str
    topics: frozenset[str]
    at: float
    reason: str


class Departures:
    """The broker names that left last, newest last. They are removed when they come back or when there are too many."""

    def __init__(self, max_brokers: int = MAX_BROKERS, max_topics: int = MAX_TOPICS) -> None:
        self._departed: OrderedDict[str, Departure] = OrderedDict()
        self._max_brokers = max_brokers
        self._max_topics = max_topics
        self._topics = 0

    def __len__(self) -> int:
        return len(self._departed)

    def add(self, broker_name: str, topics: Iterable[str], at: float, reason: str) -> None:
        """Record that ``broker_name`` left with these topics."""
        self.forget(broker_name)
        departure = Departure(broker_name, frozenset(topics), at, reason)
        self._departed[broker_name] = departure
        self._topics += len(departure.topics)
        while len(self._departed) > self._max_brokers or self._topics > self._max_topics:
            self.forget(next(iter(self._departed)))

    def forget(self, broker_name: str) -> None:
        """Remove a broker name that has come back or is too old."""
        departure = self._departed.pop(broker_name, None)
        if departure is not None:
            self._topics -= len(departure.topics)

    def last(self) -> Departure | None:
        """The newest departure."""
        return next(reversed(self._departed.values()), None)

    def with_topic(self, topic: str) -> list[Departure]:
        """The departures of brokers that had ``topic``, newest first."""
        return [departure for departure in reversed(self._departed.values()) if topic in departure.topics]


def why_no_route(
    topic: str, broker_names: Sequence[str], departures: Departures, *, auto_create: bool, now: float
) -> str:
    """The reason why no broker has ``topic``, and what to do about it.

    ``broker_names`` are registered, ``auto_create``: one of them creates topics automatically, ``now``: the clock's
    monotonic time.
    """

    def words(departure: Departure) -> str:
        ago = max(0, round(now - departure.at))
        return f"broker {departure.broker_name} left {ago} s ago: {departure.reason}"

    head = f"no route for topic {topic}: "
    departed = departures.with_topic(topic)
    if departed:
        return head + "no live broker has it; " + "; ".join(words(each) for each in departed[:3])
    if not broker_names:
        last = departures.last()
        tail = f"; the last one: {words(last)}" if last else ""
        return head + "no broker is registered with this name server" + tail
    brokers = f"the {len(broker_names)} registered broker name(s) ({', '.join(broker_names[:5])})"
    if topic == AUTO_CREATE_TOPIC:
        return f"{head}{brokers} do not create topics automatically (autoCreateTopicEnable=false)"
    if not auto_create:
        return (
            f"{head}{brokers} do not have it and do not create topics automatically (autoCreateTopicEnable=false); "
            "create it with mqadmin updateTopic"
        )
    return f"{head}{brokers} do not have it; the first message sent to it creates it, or mqadmin updateTopic"
