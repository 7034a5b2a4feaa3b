"""The lowest commit log offset that a pending timer needs, in little memory.

Units come in the order of their commit log offsets. A unit matters only if none before it is due as late or later: the
earlier one keeps the log anyway, for as long. So a list of units with rising due times is enough, and due times are
compared in steps of 64 slots: that is at most 9,450 entries for any number of timers.
"""

from collections import deque
from typing import Final

STEP: Final = 64


class PendingFloor:
    """Knows the first unit that may still be pending."""

    def __init__(self, precision: int) -> None:
        self._step = precision * STEP
        self._rising: deque[tuple[int, int, int]] = deque()
        self._last = -1

    def add(self, time: int, offset: int, position: int) -> None:
        """A unit for a message at a commit log offset. Units come in the order of their positions."""
        step = time // self._step
        if step > self._last:
            self._rising.append((step, offset, position))
            self._last = step

    def would_add(self, time: int) -> bool:
        """Whether a unit with this time changes anything."""
        return time // self._step > self._last

    def passed(self, read_time: int) -> None:
        """All slots before ``read_time`` are delivered."""
        rising, step = self._rising, read_time // self._step
        while rising and rising[0][0] < step:
            rising.popleft()
        if not rising:
            self._last = -1

    def clear(self) -> None:
        """No unit is pending."""
        self._rising.clear()
        self._last = -1

    @property
    def offset(self) -> int | None:
        """The commit log offset below which no pending unit's message is; None if none is pending."""
        return self._rising[0][1] if self._rising else None

    @property
    def position(self) -> int | None:
        """The position in the timer log before which no unit is pending; None if none is pending."""
        return self._rising[0][2] if self._rising else None

    def __len__(self) -> int:
        return len(self._rising)
