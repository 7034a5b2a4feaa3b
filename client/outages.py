"""Outages: logs an unavailable server once when the outage starts, and once with the number of failures when it ends.

Heartbeats, pulls, commits and rebalancing all fail while a server is down, and all keep retrying; a log line for each
failure would hide everything else.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from trimq.client.errors import NoPermissionError, PerhapsStoredError, RocketMQError, UnreachableError
from trimq.remoting.client.client_log import StandardLog

K = TypeVar("K")
V = TypeVar("V")

_AGAIN: Final = 60.0
"""Seconds after which a continuing refusal is logged again."""
_MOST: Final = 1024
"""Most addresses, and kinds of refusals, that are remembered; beyond that the oldest is forgotten."""


@dataclass(slots=True)
class _Trouble:
    began: float
    count: int = 0


class Denied(NamedTuple):
    """An operation that a server did not permit: its description, the last error, and when (monotonic seconds)."""

    event: str
    error: NoPermissionError
    at: float


class Outages:
    """The current outages and refusals of one client's servers. ``clock`` returns monotonic seconds.

    An outage is a server that does not answer. Whatever requests fail, it is logged with one warning for the address
    when it starts, and one when the server answers again. A refusal is an error reply; it is logged at most once a
    minute for each event, code and address. A refusal for want of permission is always a warning.
    """

    def __init__(self, log: StandardLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._refusals: dict[tuple[str, int | None, str | None], _Trouble] = {}
        self._denied: dict[tuple[str, str | None], Denied] = {}
        self.open: dict[str, _Trouble] = {}

    @property
    def denied(self) -> list[Denied]:
        """The operations that servers did not permit within the last minute. All of them are tried again more often."""
        return [denied for denied in self._denied.values() if self._clock() - denied.at <= _AGAIN]

    def note(self, event: str, error: RocketMQError, *, level: int = logging.WARNING, **facts: object) -> None:
        """Notes a failure of an operation that will be retried.

        ``event`` and ``facts`` describe the operation in the log. ``level`` is used for a refusal; an outage is a
        warning.
        """
        unanswered = isinstance(error, UnreachableError | PerhapsStoredError) and error.code is None
        if unanswered and error.address is not None:
            self._outage(event, error, error.address, facts)
        else:
            self._refusal(event, error, level, facts)

    def over(self, address: str) -> None:
        """Notes that a server has answered, which ends its outage."""
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
            trouble = _remember(self.open, address, _Trouble(self._clock()))
            self._log.warning("a server does not answer", address=address, reason=error.text, tried=event, **facts)
        trouble.count += 1

    def _refusal(self, event: str, error: RocketMQError, level: int, facts: dict[str, object]) -> None:
        if isinstance(error, NoPermissionError):
            level = max(level, logging.WARNING)
            self._denied.pop((event, error.address), None)
            _remember(self._denied, (event, error.address), Denied(event, error, self._clock()))
        key = (event, error.code, error.address)
        trouble = self._refusals.get(key)
        if trouble is not None and self._clock() - trouble.began < _AGAIN:
            trouble.count += 1
            return
        if trouble is not None and trouble.count:
            facts["repeated"] = trouble.count
        self._refusals.pop(key, None)  # to insert it as the newest
        _remember(self._refusals, key, _Trouble(self._clock()))
        self._log.say(level, event, reason=str(error), **facts)


def _remember(table: dict[K, V], key: K, trouble: V) -> V:
    """Adds an entry, and forgets the oldest one if there are too many."""
    if len(table) >= _MOST:
        del table[next(iter(table))]
    table[key] = trouble
    return trouble
