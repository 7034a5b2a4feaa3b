"""The disk of a simulated machine: SimDisk, whose calls in threads take a drawn time."""

from collections.abc import Callable
from random import Random
from typing import TypeVar, TypeVarTuple, cast

import trio

from tests.simulation.times import VirtualClock
from tests.store.simdisk import SimDisk

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class NodeDisk(SimDisk):
    """``longest``: the most seconds that a call in a thread takes, apart from a few that take five times as long."""

    rng: Random
    longest = 0.002

    @classmethod
    def of(cls, disk: SimDisk) -> "NodeDisk":
        """Another disk with the content of ``disk``, which is not used any more."""
        found = cls()
        found.__dict__.update(disk.__dict__)
        return found

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        """See Disk. The call happens at the begin or at the end of the time that it takes."""
        await trio.lowlevel.checkpoint_if_cancelled()
        rng = self.rng
        seconds = rng.random() * self.longest * (5 if rng.random() < 0.03 else 1)
        result: _T | None = None
        before = rng.random() < 0.5
        if before:
            result = fn(*args)
        clock = cast("VirtualClock", trio.lowlevel.current_clock())
        await clock.wait_until(clock.now + seconds, shielded=True)
        return cast("_T", result) if before else fn(*args)
