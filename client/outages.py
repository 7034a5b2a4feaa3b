"""Outages: what goes wrong with a server is told once, and how often it went wrong when it is over.

Heartbeats, pulls, commits and rebalancing all fail while a server is away, and each goes on trying.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from trimq.client.errors import PerhapsStoredError, RocketMQError, UnreachableError
from trimq.remoting.client.client_log import StandardLog

K = TypeVar("K")

_AGAIN: Final = 60.0
"""Seconds after which a refusal that goes on is told once more."""
_MOST: Final = 1024
"""Addresses, and kinds of refusals, that are remembered; of one more the oldest is forgotten."""


@dataclass(slots=True)
class _Trouble:
    began: float
    count: int = 0


class Outages:
    """What is wrong with the servers of one client. ``clock`` gives monotonic seconds.

    An outage is a server that does not answer: a warning for its address when it begins, whatever was tried, and one
    when it is over. A refusal is told at most once a minute for each thing that was tried.
    """

    def __init__(self, log: StandardLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._refusals: dict[tuple[str, int | None, str | None], _Trouble] = {}
        self.open: dict[str, _Trouble] = {}

    def note(self, event: str, error: RocketMQError, *, level: int = logging.WARNING, **facts: object) -> None:
        """Something failed that is tried again. ``level`` is that of a refusal; an outage is a warning."""
        unanswered = isinstance(error, UnreachableError | PerhapsStoredError) and error.code is None
        if unanswered and error.address is not None:
            self._outage(event, error, error.address, facts)
        else:
            self._refusal(event, error, level, facts)

    def over(self, address: str) -> None:
        """A server has answered."""
        trouble = self.open.pop(address, None)
        if trouble is not None:
            self._log.warning(
                "a server answers again",
                address=address,
                after=f"{self._clock() - trouble.began:.1f} s",
                failures=trouble.count,
            )

    def _outage(self, event: str, error: RocketMQError, address: str, facts: dict[str, object]) -> None:
        trouble = self.open.get(address)
        if trouble is None:
            trouble = _kept(self.open, address, _Trouble(self._clock()))
            self._log.warning("a server does not answer", address=address, reason=error.text, tried=event, **facts)
        trouble.count += 1

    def _refusal(self, event: str, error: RocketMQError, level: int, facts: dict[str, object]) -> None:
        key = (event, error.code, error.address)
        trouble = self._refusals.get(key)
        if trouble is not None and self._clock() - trouble.began < _AGAIN:
            trouble.count += 1
            return
        if trouble is not None and trouble.count:
            facts["repeated"] = trouble.count
        self._refusals.pop(key, None)
        _kept(self._refusals, key, _Trouble(self._clock()))
        self._log.say(level, event, reason=str(error), **facts)


def _kept(table: dict[K, _Trouble], key: K, trouble: _Trouble) -> _Trouble:
    if len(table) >= _MOST:
        del table[next(iter(table))]
    table[key] = trouble
    return trouble
