"""LogBudget: limits log events that clients can cause in any number."""

import structlog

from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("remoting")


class LogBudget:
    """Allows ``lines`` events per second and counts the others, whose number is logged in one line of its own."""

    def __init__(self, clock: Clock, lines: int = 20) -> None:
        self._clock = clock
        self._lines = lines
        self._second = 0
        self._used = 0
        self._left_out = 0

    def allows(self) -> bool:
        """Whether one more event may be logged now."""
        second = int(self._clock.monotonic())
        if second != self._second:
            self.sum_up()
            self._second, self._used = second, 0
        self._used += 1
        if self._used > self._lines:
            self._left_out += 1
            return False
        return True

    def sum_up(self) -> None:
        """Log the number of events left out now; otherwise it is logged with the first event of a later second."""
        if self._left_out:
            _log.warning("events_left_out", count=self._left_out)
            self._left_out = 0
