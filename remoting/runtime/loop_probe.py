"""Delays of the event loop: a task sleeps for a short time and measures how much longer it took.

A stall of the loop of ``INTERVAL`` or longer is always detected, a shorter one with a probability proportional to
its length.
"""

from time import perf_counter
from typing import Final

import trio

from trimq.remoting.runtime.durations import Durations

INTERVAL: Final = 0.05
"""Seconds between two measurements."""
ENDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class LoopProbe:
    """Measures delays of the loop. ``lateness`` counts them in seconds; ``longest`` is the worst of the last minute."""

    def __init__(self) -> None:
        self.lateness = Durations(ENDS)
        self._worst = [0.0, 0.0]
        self._turned = perf_counter()

    @property
    def longest(self) -> float:
        """The longest delay of the last 30 to 60 seconds."""
        return max(self._worst)

    def look(self, expected: float, now: float) -> None:
        """Record that a sleep until ``expected`` ended at ``now`` (seconds of perf_counter)."""
        late = max(0.0, now - expected)
        self.lateness.add(late)
        if now - self._turned > 30:
            self._worst = [0.0, self._worst[0]]
            self._turned = now
        self._worst[0] = max(self._worst[0], late)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Measure until cancelled."""
        task_status.started()
        while True:
            expected = perf_counter() + INTERVAL
            await trio.sleep(INTERVAL)
            self.look(expected, perf_counter())
