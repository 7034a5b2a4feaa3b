from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import trio

from tests.store.simdisk import SimDisk

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class SlowDisk(SimDisk):
    """A disk whose data syncs, or the other thread calls that ``slow`` names, return when the test says so."""

    def __init__(self, slow: str = "_timed_sync") -> None:
        super().__init__()
        self.slow = slow
        self.held = False
        self.gate = trio.Event()
        self.syncs = 0

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        if fn.__name__ == self.slow:
            self.syncs += 1
            if self.held:
                with trio.CancelScope(shield=True):
                    await self.gate.wait()
        return await super().run(fn, *args)
