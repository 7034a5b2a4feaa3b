"""A service that works when there is enough to do, or when the last time is long enough ago."""

from abc import ABC, abstractmethod

import trio


class IntervalService(ABC):
    """Looks every ``interval`` seconds and when ``wake`` is called; works at least every ``thorough`` seconds."""

    def __init__(self, interval: float, thorough: float) -> None:
        self._interval = interval
        self._thorough = thorough
        self._event = trio.Event()
        self._stopping = False

    def wake(self) -> None:
        """Look now."""
        self._event.set()

    async def run(self) -> None:
        """Work until the end."""
        last = trio.current_time()
        while not self._stopping:
            with trio.move_on_after(self._interval):
                await self._event.wait()
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
        """Whether there is so much to do that it is worth it."""

    @abstractmethod
    async def _work(self) -> None:
        """Do it."""
