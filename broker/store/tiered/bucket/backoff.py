"""Pauses between tries of what the object store did not do."""

from random import Random
from typing import Final

_FIRST: Final = 0.5
_LONGEST: Final = 60.0


class Backoff:
    """Pauses that double, from 0.5 s to 60 s. They are random, so that brokers do not come back together."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._shortest = _FIRST

    def next(self) -> float:
        """Seconds to wait after one more failure."""
        pause = self._random.uniform(self._shortest, 2 * self._shortest)
        self._shortest = min(2 * self._shortest, _LONGEST / 2)
        return pause

    def reset(self) -> None:
        """Begin again with the first pause, after a success."""
        self._shortest = _FIRST
