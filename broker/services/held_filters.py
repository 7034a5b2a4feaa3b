"""Checks arriving messages for held pulls whose filter needs properties (SQL92).

A queue unit's tags code does not decide for them, so each message has to be looked at. That is not done while it is
dispatched: a burst of messages, or a queue on which many groups wait, would keep the event loop busy. The queue is
noted, and its messages are evaluated in slices, once for each held pull, at the end of the reactor's round and then by
the task of the hold service.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from trimq.broker.services.long_polling import PullRequest

SLICE: Final = 64
"""Evaluations and looks at records in one slice."""

Queue = tuple[str, int]
"""Topic and queue id."""


class HeldFilters:
    """The queues with messages that have not been evaluated for the pulls held there.

    ``waiting``: all held pulls by queue. ``wake``: takes the pulls that get a message. The owner sets ``look``, the
    store's ``look_properties``.
    """

    def __init__(
        self, waiting: Mapping[Queue, "dict[PullRequest, None]"], wake: "Callable[[list[PullRequest]], None]"
    ) -> None:
        self._waiting = waiting
        self._wake = wake
        self._arrived: dict[Queue, int] = {}
        self.look: Callable[[str, int, int], bytes | None] = lambda _topic, _queue_id, _offset: None

    def arrived(self, topic: str, queue_id: int, next_offset: int) -> None:
        """A message before ``next_offset`` has arrived in a queue."""
        self._arrived[topic, queue_id] = next_offset

    @property
    def is_pending(self) -> bool:
        """Whether messages have to be checked."""
        return bool(self._arrived)

    def check(self) -> None:
        """Evaluate one slice of messages, and wake the pulls that accept one."""
        left = SLICE
        while self._arrived and left > 0:
            queue, end = next(iter(self._arrived.items()))
            # Taken out first and put back at the end: queues take turns, and serving a pull may add another one.
            del self._arrived[queue]
            left = self._check_queue(queue, end, left)
            if left <= 0:
                self._arrived.setdefault(queue, end)

    def _check_queue(self, queue: Queue, end: int, left: int) -> int:
        """Evaluate up to ``left`` times. Returns how many are left; 0 if the queue is to be continued."""
        pulls = [pull for pull in self._waiting.get(queue, ()) if pull.needs_properties]
        offset = min((pull.checked for pull in pulls), default=end)
        woken: list[PullRequest] = []
        while offset < end and pulls and left > 0:
            properties = self.look(*queue, offset)
            left -= 1
            for pull in pulls:
                if pull.checked > offset:
                    continue
                if left <= 0:
                    break
                left -= 1
                pull.checked = offset + 1
                if _accepts(pull, properties):
                    woken.append(pull)
            else:
                offset += 1
            pulls = [pull for pull in pulls if pull not in woken] if woken else pulls
        if woken:
            self._wake(woken)
        return left


def _accepts(pull: "PullRequest", properties: bytes | None) -> bool:
    """Whether a message answers the pull. True also where that is not known here: serving the pull finds it out."""
    if properties is None or pull.filter is None:  # the record is not in memory
        return True
    try:
        return pull.filter.match_record(properties)
    except Exception:  # noqa: BLE001 - must not end the reactor's round; the pull is answered with the error
        return True
