"""Time, as a part that the composition root gives to everybody: the system's, or one that a test moves by hand."""

import heapq
import itertools
import time
from typing import Final, Protocol

import anyio
import anyio.lowlevel


class Clock(Protocol):
    """Wall time for what is stored and shown, monotonic time for how long something took or has to wait."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when ``seconds`` have passed on this clock; a checkpoint where that is zero or less."""
        ...

    async def sleep_until(self, deadline: float) -> None:
        """Return when ``monotonic()`` has reached ``deadline``."""
        ...


class SystemClock:
    """The machine's clock; sleeps in whatever loop runs, trio or asyncio."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds from an arbitrary start."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep, at least for one checkpoint."""
        await anyio.sleep(max(seconds, 0))

    async def sleep_until(self, deadline: float) -> None:
        """Sleep until ``monotonic()`` has reached ``deadline``."""
        await self.sleep(deadline - time.monotonic())


class CoarseTime:
    """A clock's monotonic time as of the last ``look``: ``now`` costs nothing to read."""

    __slots__ = ("_clock", "now")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now = clock.monotonic()

    def look(self) -> float:
        """Set ``now``, and return it."""
        self.now = self._clock.monotonic()
        return self.now


_NANOS: Final = 1_000_000_000


class ManualClock:
    """A clock that stands still until a test moves it; sleepers wake in the order of their deadlines."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._wall_ns = wall_ms * 1_000_000
        self._now_ns = 1000 * _NANOS
        self._sleepers: list[tuple[int, int, anyio.Event]] = []
        self._count = itertools.count()

    @property
    def sleeping(self) -> int:
        """How many tasks sleep on this clock."""
        return len(self._sleepers)

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC, as set."""
        return self._wall_ns // 1_000_000

    def monotonic(self) -> float:
        """Seconds; starts at 1000."""
        return self._now_ns / _NANOS

    def advance(self, seconds: float) -> None:
        """Move both times on and wake who has slept enough. They run when the caller lets the loop run."""
        step = round(seconds * _NANOS)
        self._wall_ns += step
        self._now_ns += step
        while self._sleepers and self._sleepers[0][0] <= self._now_ns:
            heapq.heappop(self._sleepers)[2].set()

    def set_wall_ms(self, wall_ms: int) -> None:
        """Set the wall time alone, as an administrator or NTP does, backwards too."""
        self._wall_ns = wall_ms * 1_000_000

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has been moved on by ``seconds``."""
        await self._sleep_until(self._now_ns + round(seconds * _NANOS))

    async def sleep_until(self, deadline: float) -> None:
        """Wait until the clock has been moved to ``deadline``, in its monotonic seconds."""
        await self._sleep_until(round(deadline * _NANOS))

    async def _sleep_until(self, deadline: int) -> None:
        if deadline <= self._now_ns:
            await anyio.lowlevel.checkpoint()
            return
        entry = (deadline, next(self._count), anyio.Event())
        heapq.heappush(self._sleepers, entry)
        try:
            await entry[2].wait()
        finally:
            if entry in self._sleepers:  # cancelled
                self._sleepers.remove(entry)
                heapq.heapify(self._sleepers)
