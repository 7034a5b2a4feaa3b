"""Checks arriving messages for held pulls whose filter needs properties (SQL92).

A queue unit's tags code does not decide for them, so each message has to be looked at. That is not done while it is
dispatched: a burst of messages, or a queue on which many groups wait, would keep the event loop busy. The queue is
noted, and its messages are evaluated in slices (protocol/sql92/cost.py), once for each held pull, at the end of the
reactor's round and then by the task of the hold service.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from trimq.protocol.sql92.cost import LEAST, SLICE, cost

if TYPE_CHECKING:
    from trimq.broker.services.long_polling import PullRequest

Queue = tuple[str, int]
"""Topic and queue id."""


class _Arrivals:
    """The messages of a queue before ``end``. Up to ``until`` ``pulls`` have to be checked, from the last one on."""

    __slots__ = ("end", "pulls", "until")

    def __init__(self, end: int) -> None:
        self.end = end
        self.until = -1
        self.pulls: list[PullRequest] = []


class HeldFilters:
    """The queues with messages that have not been evaluated for the pulls held there.

    ``waiting``: all held pulls by queue. ``wake``: takes a pull that gets a message. The owner sets ``look``, the
    store's ``look_properties``.
    """

    def __init__(
        self, waiting: Mapping[Queue, "dict[PullRequest, None]"], wake: "Callable[[list[PullRequest]], None]"
    ) -> None:
        self._waiting = waiting
        self._wake = wake
        self._arrivals: dict[Queue, _Arrivals] = {}
        self._looked: dict[tuple[Queue, int], bytes | None] = {}
        """The properties that the current slice has looked at: the pulls of a queue need the same ones."""
        self.look: Callable[[str, int, int], bytes | None] = lambda _topic, _queue_id, _offset: None

    def arrived(self, topic: str, queue_id: int, next_offset: int) -> None:
        """A message before ``next_offset`` has arrived in a queue."""
        arrivals = self._arrivals.get((topic, queue_id))
        if arrivals is None:
            self._arrivals[topic, queue_id] = _Arrivals(next_offset)
        else:
            arrivals.end = next_offset

    @property
    def is_pending(self) -> bool:
        """Whether messages have to be checked."""
        return bool(self._arrivals)

    def check(self) -> None:
        """Evaluate one slice of messages, and wake the pulls that accept one."""
        left = SLICE
        while self._arrivals and left > 0:
            queue, arrivals = next(iter(self._arrivals.items()))
            left = self._check_queue(queue, arrivals, left)
            del self._arrivals[queue]
            if left <= 0:  # to be continued, after the other queues
                self._arrivals[queue] = arrivals
        self._looked.clear()

    def _check_queue(self, queue: Queue, arrivals: _Arrivals, left: int) -> int:
        """Evaluate for a cost of ``left``. Returns how much is left; 0 if the queue is to be continued."""
        while arrivals.pulls or arrivals.until < arrivals.end:
            if not arrivals.pulls:
                arrivals.until = arrivals.end
                held = [pull for pull in self._waiting.get(queue, ()) if pull.needs_properties]
                arrivals.pulls = held[::-1]
                continue
            left = self._check_pull(queue, arrivals.pulls[-1], arrivals.until, left)
            if left <= 0:
                return 0
            arrivals.pulls.pop()
        return left

    def _check_pull(self, queue: Queue, pull: "PullRequest", until: int, left: int) -> int:
        while pull.checked < until and pull in self._waiting.get(queue, ()):
            if left <= 0:
                return 0
            place = queue, pull.checked
            if place not in self._looked:
                self._looked[place] = self.look(*queue, pull.checked)
                left -= LEAST
            properties = self._looked[place]
            terms = 0 if pull.filter is None else pull.filter.terms
            left -= cost(0 if properties is None else len(properties), terms)
            if _accepts(pull, properties):
                self._wake([pull])
                break
            pull.checked += 1
        return left


def _accepts(pull: "PullRequest", properties: bytes | None) -> bool:
    """Whether a message answers the pull. True also where that is not known here: serving the pull finds it out."""
    if properties is None or pull.filter is None:  # the record is not in memory
        return True
    try:
        return pull.filter.match_record(properties)
    except Exception:  # noqa: BLE001 - must not end the reactor's round; the pull is answered with the error
        return True
