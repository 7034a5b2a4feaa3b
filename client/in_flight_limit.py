"""InFlightLimit: a bound on the messages in flight, by number and by bytes, with waiting tasks served in order."""

from collections import deque

import anyio


class InFlightLimit:
    """Admits up to ``count`` entries with ``size`` bytes in total. An entry larger than ``size`` is admitted alone.

    >>> limit = InFlightLimit(count=1, size=10)
    >>> limit.try_enter(4), limit.try_enter(4)
    (True, False)
    """

    def __init__(self, count: int, size: int) -> None:
        self._max_count = count
        self._max_size = size
        self._count = 0
        self._size = 0
        self._waiting: deque[tuple[anyio.Event, int]] = deque()

    @property
    def inside(self) -> int:
        """The number of entries that were admitted and have not left."""
        return self._count

    def try_enter(self, size: int) -> bool:
        """Enters if that is possible without waiting; returns whether it did."""
        # An entry that would fit must still not overtake a waiting one: small messages would starve a large one.
        if self._waiting or not self._fits(size):
            return False
        self._count += 1
        self._size += size
        return True

    async def enter(self, size: int) -> None:
        """Enters after the entries that already wait. A cancelled call has not entered."""
        if self.try_enter(size):
            return
        entry = (anyio.Event(), size)
        self._waiting.append(entry)
        try:
            await entry[0].wait()
        except BaseException:
            if entry[0].is_set():  # admitted before the cancellation was delivered
                self.leave(size)
            else:
                self._waiting.remove(entry)
                self._admit()  # this entry may have been the first, and a smaller one behind it may fit
            raise

    def leave(self, size: int) -> None:
        """Leaves, and admits waiting entries that now fit."""
        self._count -= 1
        self._size -= size
        if self._waiting:
            self._admit()

    def _fits(self, size: int) -> bool:
        return self._count < self._max_count and (self._size + size <= self._max_size or self._count == 0)

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            event, size = self._waiting.popleft()
            self._count += 1
            self._size += size
            event.set()
