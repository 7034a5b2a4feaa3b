"""Which queue is next: the topic's queues in turn, those of brokers left out that are to be left alone for a while.

Which brokers those are is learned from how long sends took and from those that failed.

Follows RocketMQ's MQFaultStrategy and LatencyFaultTolerance: a slow answer takes a broker out for a time that grows
with the latency, a failure counts as ten seconds. Nobody is ever left without a broker: where all are out, any will do.
"""

import random
from collections.abc import Callable, Sequence
from typing import Final

from trimq.protocol.body import MessageQueue

_LATENCY: Final = ((15.0, 600.0), (3.0, 180.0), (2.0, 120.0), (1.0, 60.0), (0.55, 30.0))
"""A send that took so long (seconds) takes its broker out for so long."""
_FAILURE_LATENCY: Final = 10.0
_TOPICS: Final = 1024
"""Topics whose turn is remembered; of one more the oldest is forgotten and begins anew, somewhere."""


def random_start() -> int:
    """Where a topic's turn begins: by chance, so that many producers that send little use all queues."""
    return random.getrandbits(16)  # spreads load


class LatencyFaultTolerance:
    """Brokers that are out, by name, and each topic's turn. ``clock`` gives monotonic seconds, ``start`` a first turn.

    >>> tolerance = LatencyFaultTolerance(clock=lambda: 100.0)
    >>> tolerance.failed("broker-a")
    >>> tolerance.is_available("broker-a"), tolerance.is_available("broker-b")
    (False, True)
    """

    def __init__(self, clock: Callable[[], float], start: Callable[[], int] | None = None) -> None:
        self._clock = clock
        self._start = start or random_start
        self._until: dict[str, float] = {}
        self._turns: dict[str, int] = {}

    def took(self, broker_name: str, seconds: float) -> None:
        """A send to the broker was answered after so long."""
        if seconds < _LATENCY[-1][0]:
            if self._until:
                self._until.pop(broker_name, None)
            return
        for bound, out in _LATENCY:
            if seconds >= bound:
                self._until[broker_name] = self._clock() + out
                return

    def failed(self, broker_name: str) -> None:
        """A send to the broker failed."""
        self.took(broker_name, _FAILURE_LATENCY)

    def is_available(self, broker_name: str) -> bool:
        """False while the broker is out."""
        return self._until.get(broker_name, 0.0) <= self._clock()

    def select(self, queues: Sequence[MessageQueue], avoid: str | None = None) -> MessageQueue:
        """The next of a topic's queues in turn on a broker that is neither out nor ``avoid``; else the next at all.

        >>> queues = [MessageQueue(topic="T", broker_name=name, queue_id=0) for name in ("a", "b")]
        >>> LatencyFaultTolerance(lambda: 0.0).select(queues, avoid="b").broker_name
        'a'
        """
        topic = queues[0].topic
        turn = self._turns.get(topic)
        if turn is None:
            turn = self._first_turn()
        self._turns[topic] = turn + 1
        if self._until or avoid is not None:  # left out before the turn: the queues that are left share alike
            others = [queue for queue in queues if queue.broker_name != avoid]
            queues = [queue for queue in others if self.is_available(queue.broker_name)] or others or queues
        return queues[turn % len(queues)]

    def _first_turn(self) -> int:
        if len(self._turns) >= _TOPICS:
            del self._turns[next(iter(self._turns))]
        return self._start()
