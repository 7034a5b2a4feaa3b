"""A service that works when there is enough to do, or when its last work was long enough ago."""

from abc import ABC, abstractmethod

import trio


class IntervalService(ABC):
    """Checks every ``interval`` seconds and when ``wake`` is called; works at least every ``thorough`` seconds."""

    def __init__(self, interval: float, thorough: float) -> None:
        self._interval = interval
        self._thorough = thorough
        self._event = trio.Event()
        self._stopping = False

    def wake(self) -> None:
        """Check now."""
        self._event.set()

    async def run(self) -> None:
        """Work until ``_end``."""
        last = trio.current_time()
        while not self._stopping:
            with trio.move_on_after(self._interval):
                await self._event.wait()
            # A new event before the work: a wake-up during the work is not lost.
            self._event = trio.Event()
            now = trio.current_time()
            if now - last >= self._thorough or self._enough():
                last = now
                await self._work()

    def _end(self) -> None:
        """End the task."""
        self._stopping = True
        self.wake()

    @abstractmethod
    def _enough(self) -> bool:
        """Whether there is enough to do."""

    @abstractmethod
    async def _work(self) -> None:
        """Do the work."""
