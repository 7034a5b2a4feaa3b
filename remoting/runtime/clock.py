"""Clocks, passed to all parts by the composition root: the system's clock, or one that a test moves manually."""

import heapq
import itertools
import time
from typing import Final, Protocol

import anyio
import anyio.lowlevel

_BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Wall time for values that are stored or shown, monotonic time for durations and timeouts."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...

    def boot_seconds(self) -> float:
        """Seconds from an arbitrary start, which go on while the process is stopped, or the machine sleeps."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when ``seconds`` have passed on this clock; a checkpoint if that is zero or less."""
        ...

    async def sleep_until(self, deadline: float) -> None:
        """Return when ``monotonic()`` has reached ``deadline``."""
        ...


class SystemClock:
    """The system's clock. Sleeps in the running loop, trio or asyncio."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Seconds from an arbitrary start."""
        return time.monotonic()

    def boot_seconds(self) -> float:
        """See Clock: CLOCK_BOOTTIME where the system has it."""
        return time.clock_gettime(_BOOT_CLOCK)

    async def sleep(self, seconds: float) -> None:
        """Sleep, at least for one checkpoint."""
        await anyio.sleep(max(seconds, 0))

    async def sleep_until(self, deadline: float) -> None:
        """Sleep until ``monotonic()`` has reached ``deadline``."""
        await self.sleep(deadline - time.monotonic())


class CoarseTime:
    """A clock's monotonic time at the last ``look``. Reading ``now`` costs no call."""

    __slots__ = ("_clock", "now")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now = clock.monotonic()

    def look(self) -> float:
        """Update ``now`` from the clock, and return it."""
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

    def boot_seconds(self) -> float:
        """The same as ``monotonic``."""
        return self.monotonic()

    def advance(self, seconds: float) -> None:
        """Advance both times and wake the sleepers that are due. They run once the caller yields to the loop."""
        step = round(seconds * _NANOS)
        self._wall_ns += step
        self._now_ns += step
        while self._sleepers and self._sleepers[0][0] <= self._now_ns:
            heapq.heappop(self._sleepers)[2].set()

    def set_wall_ms(self, wall_ms: int) -> None:
        """Set only the wall time, as an administrator or NTP does; it may go back."""
        self._wall_ns = wall_ms * 1_000_000

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has been advanced by ``seconds``."""
        await self._sleep_until(self._now_ns + round(seconds * _NANOS))

    async def sleep_until(self, deadline: float) -> None:
        """Wait until ``monotonic()`` has been advanced to ``deadline``."""
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
