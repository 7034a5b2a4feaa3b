"""Callers: who sends requests, by address or by user, with the connections and the requests in a second of each."""

from collections import OrderedDict
from typing import Final

from trimq.remoting.runtime.clock import Clock

MOST_LEFT: Final = 10_000
"""Callers without a connection that are remembered, for a second, so that a new connection is no new allowance."""

_LOG_SECONDS: Final = 60.0


class TokenBucket:
    """``rate`` requests a second on average, and as many at once after a second without any."""

    __slots__ = ("_at", "_rate", "_tokens")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._tokens = float(rate)
        self._at = now

    def room(self, now: float) -> int:
        """How many requests may be served now."""
        tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
        self._tokens, self._at = tokens, now
        return int(tokens)

    def take(self, count: int) -> None:
        """Count ``count`` requests, at most ``room``. A negative number gives back what was taken and not needed."""
        self._tokens -= count

    def seconds_to_next(self) -> float:
        """How long after the last ``room`` there is room for one request."""
        return max(0.0, (1 - self._tokens) / self._rate)


class Caller:
    """One address or user. ``connections`` are open now; ``bucket`` is None without a limit of requests."""

    __slots__ = ("bucket", "connections", "key", "left_at", "logged_at")

    def __init__(self, key: str, bucket: TokenBucket | None) -> None:
        self.key = key
        self.bucket = bucket
        self.connections = 0
        self.left_at = 0.0
        self.logged_at = float("-inf")

    def may_log(self, now: float) -> bool:
        """Whether a refusal is logged: one a minute is."""
        if now - self.logged_at < _LOG_SECONDS:
            return False
        self.logged_at = now
        return True


class Callers:
    """All callers that have a connection. Bounded by the connections, and MOST_LEFT.

    ``rate``: requests a second of each; 0 for no limit.
    """

    def __init__(self, rate: int, clock: Clock, most_left: int = MOST_LEFT) -> None:
        self._rate = rate
        self._clock = clock
        self._most_left = most_left
        self._callers: dict[str, Caller] = {}
        self._left: OrderedDict[str, Caller] = OrderedDict()  # by the time at which they left

    def __len__(self) -> int:
        return len(self._callers) + len(self._left)

    def connections(self, key: str) -> int:
        """Open connections of a caller."""
        caller = self._callers.get(key)
        return caller.connections if caller is not None else 0

    def join(self, key: str) -> Caller:
        """Count a connection of ``key``, until ``leave``."""
        caller = self._callers.get(key)
        if caller is None:
            caller = self._left.pop(key, None)
            if caller is None:
                now = self._clock.monotonic()
                caller = Caller(key, TokenBucket(self._rate, now) if self._rate else None)
            self._callers[key] = caller
        caller.connections += 1
        return caller

    def leave(self, caller: Caller) -> None:
        """Count a connection less."""
        caller.connections -= 1
        if caller.connections:
            return
        del self._callers[caller.key]
        if caller.bucket is None:
            return
        now = caller.left_at = self._clock.monotonic()
        left = self._left
        left[caller.key] = caller
        # After a second a bucket is full again, as that of a new caller is: nothing is lost with it.
        while left and (len(left) > self._most_left or now - next(iter(left.values())).left_at >= 1):
            left.popitem(last=False)
