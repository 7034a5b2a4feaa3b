"""BackOff: how long to wait before the next attempt to connect to a peer that could not be reached."""

import random
from collections.abc import Callable


class BackOff:
    """Full jitter: a random time below a bound that doubles with each failure, from ``first`` to ``most``.

    So clients that lost the same server at the same moment reconnect spread over time. All values are seconds, and
    times are those of one monotonic clock, passed by the caller.
    """

    def __init__(
        self, first: float = 0.1, most: float = 10.0, uniform: Callable[[float, float], float] | None = None
    ) -> None:
        self._first = first
        self._most = most
        self._uniform = uniform or random.uniform  # spreads load
        self.failures = 0
        self._not_before = 0.0

    def failed(self, now: float) -> None:
        """Record a failed attempt at ``now``."""
        bound = min(self._most, self._first * 2.0 ** min(self.failures, 32))
        self.failures += 1
        self._not_before = now + self._uniform(0, bound)

    def succeeded(self) -> None:
        """Record a success: the bound starts from ``first`` again."""
        self.failures = 0
        self._not_before = 0.0

    def delay(self, now: float) -> float:
        """Seconds to wait before the next attempt; 0 if it may be made now."""
        return max(0.0, self._not_before - now)
