"""FairLock: a lock that clients take in turns, however many of their tasks wait for it."""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class FairLock:
    """Is held by one task at a time. Who waits is served by client: one task of each, then the next one of each."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: OrderedDict[object, deque[trio.Event]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, client: object) -> AsyncIterator[None]:
        """Hold the lock within ``async with``."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._held:
            await self._wait(client)
        self._held = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: object) -> None:
        mine = trio.Event()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine.wait()
        except trio.Cancelled:  # not if its turn has come: then the wait has ended
            tasks = self._waiting[client]
            tasks.remove(mine)
            if not tasks:
                del self._waiting[client]
            raise

    def _pass_on(self) -> None:
        """The next client's turn; the lock stays held meanwhile, so that no task takes it that has not waited."""
        if not self._waiting:
            self._held = False
            return
        client, tasks = self._waiting.popitem(last=False)
        tasks.popleft().set()
        if tasks:
            self._waiting[client] = tasks
