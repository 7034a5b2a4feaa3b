"""Which brokers to leave alone for a while, learned from how long sends took and from those that failed.

Follows RocketMQ's MQFaultStrategy and LatencyFaultTolerance: a slow answer takes a broker out for a time that grows
with the latency, a failure counts as ten seconds. Nobody is ever left without a broker: where all are out, any will do.
"""

from collections.abc import Callable, Sequence
from typing import Final

from protocol.body import MessageQueue

_LATENCY: Final = ((15.0, 600.0), (3.0, 180.0), (2.0, 120.0), (1.0, 60.0), (0.55, 30.0))
"""A send that took so long (seconds) takes its broker out for so long."""
_FAILURE_LATENCY: Final = 10.0


class FaultTable:
    """Brokers that are out, by name. ``clock`` gives monotonic seconds.

    >>> table = FaultTable(clock=lambda: 100.0)
    >>> table.failed("broker-a")
    >>> table.is_available("broker-a"), table.is_available("broker-b")
    (False, True)
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self._turn = 0

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
        """The next queue in turn on a broker that is neither out nor ``avoid``; failing that, the next at all.

        >>> queues = [MessageQueue(topic="T", broker_name=name, queue_id=0) for name in ("a", "b")]
        >>> FaultTable(lambda: 0.0).select(queues, avoid="b").broker_name
        'a'
        """
        self._turn = turn = self._turn + 1
        count = len(queues)
        if not self._until and avoid is None:
            return queues[turn % count]
        second: MessageQueue | None = None
        for step in range(count):
            queue = queues[(turn + step) % count]
            if queue.broker_name != avoid:
                if self.is_available(queue.broker_name):
                    return queue
                second = second or queue
        return second or queues[turn % count]
