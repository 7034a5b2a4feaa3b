"""LatencyFaultTolerance: selects a topic's queues in turn, without those of brokers that were slow or failed.

Follows RocketMQ's MQFaultStrategy and LatencyFaultTolerance: a slow reply excludes a broker for a time that grows with
the latency, and a failed send counts as a latency of ten seconds. If all brokers are excluded, any of them is selected:
a send is always attempted.
"""

import random
from collections.abc import Callable, Sequence
from typing import Final

from trimq.protocol.body import MessageQueue

_LATENCY: Final = ((15.0, 600.0), (3.0, 180.0), (2.0, 120.0), (1.0, 60.0), (0.55, 30.0))
"""A send that took at least so many seconds excludes its broker for so many seconds."""
_FAILURE_LATENCY: Final = 10.0
_TOPICS: Final = 1024
"""Most topics whose turn is remembered. Beyond that the oldest is forgotten; its next turn starts at a random queue."""


def random_start() -> int:
    """A topic's first turn: random, so that many producers that each send little use all queues together."""
    return random.getrandbits(16)  # spreads load


class LatencyFaultTolerance:
    """The excluded brokers, by name, and the turn of each topic.

    ``clock`` returns monotonic seconds, ``start`` the first turn of a topic.

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
        """Notes that the broker answered a send after ``seconds``; a fast reply ends its exclusion."""
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
        """Whether the broker is not excluded now."""
        return self._until.get(broker_name, 0.0) <= self._clock()

    def select(self, queues: Sequence[MessageQueue], avoid: str | None = None) -> MessageQueue:
        """The next queue in turn, of those on brokers that are available and not ``avoid``.

        If there is none, the next on a broker other than ``avoid``; if there is none either, the next of all.

        >>> queues = [MessageQueue(topic="T", broker_name=name, queue_id=0) for name in ("a", "b")]
        >>> LatencyFaultTolerance(lambda: 0.0).select(queues, avoid="b").broker_name
        'a'
        """
        topic = queues[0].topic
        turn = self._turns.get(topic)
        if turn is None:
            turn = self._first_turn()
        self._turns[topic] = turn + 1
        # Excluded before the turn is applied. Skipping excluded queues afterwards would give their turns to the next
        # queues in the list; this way the remaining ones get equal shares.
        if self._until or avoid is not None:
            others = [queue for queue in queues if queue.broker_name != avoid]
            queues = [queue for queue in others if self.is_available(queue.broker_name)] or others or queues
        return queues[turn % len(queues)]

    def _first_turn(self) -> int:
        if len(self._turns) >= _TOPICS:
            del self._turns[next(iter(self._turns))]
        return self._start()
