"""Cuts the power at every disk call of the script, with every kind of loss, and again while the store recovers.

The script runs once; an image of the disk is stored for each call. Each kind of loss derives another disk from that
image. A store opened on it must hold everything that had been promised by then; recovery's own disk calls are cut in
the same manner.

Many states are equal to another one: the disk has the same names, contents, blocks and times, the same changes are
unsynced if the machine stayed up, and the same is promised. Only the first of them is checked; the others are counted
apart. What a check chooses by chance, such as the flush mode of its store, is chosen for the first one.
"""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from random import Random
from typing import Any, Final, NamedTuple, TypeVar
from unittest import mock

import trio
import trio.testing
from structlog.testing import capture_logs

from tests.crash.images import DiskImage, Found, RecordingDisk
from tests.crash.losses import Damage, Loss, Survivor, survivor
from tests.crash.promises import Checker, check_state
from tests.crash.script import (
    CHAPTERS,
    PRECISIONS,
    START_MS,
    Event,
    Moment,
    Promise,
    Script,
    Start,
    load_state,
    open_store,
    promise,
)
from trimq.remoting.runtime.clock import ManualClock

T = TypeVar("T")

_PARTS: Final = 8
SECOND_CUTS: Final = 10
"""Upper limit for the number of cuts tried during one recovery."""


class State(NamedTuple):
    """One state: everything needed to reproduce it."""

    seed: int
    cut: int
    loss: Loss
    again: tuple[tuple[int, Loss], ...] = ()
    """Cuts during recovery, with their losses."""

    def __str__(self) -> str:
        parts = [f"{self.seed}:{self.cut}:{self.loss.name}", *(f"{cut}:{loss.name}" for cut, loss in self.again)]
        return "+".join(parts)

    @classmethod
    def parse(cls, text: str) -> "State":
        """Inverse of ``str``."""
        first, *again = text.split("+")
        seed, cut, loss = first.split(":")
        cuts = [one.split(":") for one in again]
        return cls(int(seed), int(cut), Loss[loss], tuple((int(at), Loss[kind]) for at, kind in cuts))


class BrokenStateError(AssertionError):
    """A state breaks a promise; the text contains the command that reproduces it."""

    def __init__(self, state: str, why: str) -> None:
        super().__init__(state, why)
        self.state = state
        self.why = why

    def __str__(self) -> str:
        return f"{self.why}\nagain: python -m tests.crash --replay {self.state}"


@dataclass
class Tally:
    """Counts of what has been checked.

    ``states`` are those that were checked themselves, ``second`` those of them with a cut during recovery. ``equal``
    states were not checked because an equal one had been.
    """

    states: int = 0
    second: int = 0
    equal: int = 0
    calls: int = 0
    by_loss: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        """Add the counts of another part of the same script."""
        self.states += other.states
        self.second += other.second
        self.equal += other.equal
        self.calls = max(self.calls, other.calls)
        self.by_loss += other.by_loss
        self.operations = other.operations

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.by_loss.items()))
        return (
            f"{self.states} states ({self.second} of them after a cut during recovery) and {self.equal} equal to one "
            f"of them, {self.calls} disk calls, "
            f"{sum(self.operations.values())} operations; by loss: {kinds}"
        )


# -- the recorded run


@dataclass(frozen=True)
class Recording:
    """One run of the script, with a disk image for each disk call."""

    images: dict[int, DiskImage]
    events: list[Event]
    operations: dict[str, int]
    chapters: list[tuple[int, Start]]
    """The first disk call of each chapter, and the script's state at that call."""


def simulate(run: Callable[..., Awaitable[T]], *arguments: Any, seed: object = 0) -> T:
    """Run an async function on an auto-jumping clock with a fixed task order, so that the run is reproducible.

    The store measures durations for its time slices and for its choice of how to sync; on this clock every duration
    is zero, so that neither depends on the machine.
    """
    scheduler: Any = trio._core._run
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    clock = trio.testing.MockClock(autojump_threshold=0)
    with (
        mock.patch.object(scheduler, "_r", _OfThisThread(seed, scheduler._r)),
        mock.patch.object(time, "perf_counter", clock.current_time),
    ):
        return trio.run(run, *arguments, clock=clock)


class _OfThisThread(Random):
    """Random numbers for trio's scheduler: a seeded generator in this thread, the original one in all others.

    The patched generator is global to the process, and a test may run another broker's loop in another thread.
    """

    def __init__(self, seed: object, others: Random) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._own = Random(repr(seed))
        self._others = others

    def _dice(self) -> Random:
        return self._own if threading.get_ident() == self._thread else self._others

    def random(self) -> float:
        return self._dice().random()

    def getrandbits(self, k: int, /) -> int:
        return self._dice().getrandbits(k)


DiskKind = Callable[[int], RecordingDisk]


def sound_disk(seed: int) -> RecordingDisk:
    """A disk that keeps all of its rules; now and then it writes a dirty page back without a sync, as a kernel does."""
    disk = RecordingDisk(seed=seed)
    disk.write_back = 0.05
    return disk


def record(seed: int, make_disk: DiskKind = sound_disk) -> Recording:
    """Run the script once and store an image of the disk before each of its calls, and one at the end."""

    async def run() -> Recording:
        disk = make_disk(seed)
        script = Script(disk, seed)
        disk.moment, disk.wanted = script.moment, lambda _call: True
        chapters = []
        for at in range(len(CHAPTERS)):
            chapters.append((disk.calls + 1, script.start()))
            await script.chapter(at)
        disk.images[disk.calls + 1] = disk.picture("the end", script.moment())
        return Recording(disk.images, script.events, script.operations, chapters)

    with capture_logs():
        return simulate(run, seed=("script", seed))


# -- one state


class Recovered(NamedTuple):
    """Result of a recovery: disk images at some of its calls, and whether it found damage in the log."""

    images: dict[int, DiskImage]
    damaged: bool


class Reservoir:
    """Reservoir sampling: chooses ``size`` calls of an unknown number, each with the same probability."""

    def __init__(self, size: int, seed: str) -> None:
        self._size = size
        self._random = Random(f"cuts of {seed}")
        self._number = 0
        self.chosen: list[int] = []

    def __call__(self, call: int) -> bool:
        self._number += 1
        if len(self.chosen) < self._size:
            self.chosen.append(call)
            return True
        at = self._random.randrange(self._number)
        if at < self._size:
            self.chosen[at] = call
        return at < self._size


async def _recover(
    found: Found, expected: "Expected", promised: Promise, seed: str, wanted: Callable[[int], bool] | None
) -> Recovered:
    """Open a store on the surviving disk, check all promises, and append to it."""
    disk = found.disk(seed=Random(seed).getrandbits(32), kind=RecordingDisk)
    assert isinstance(disk, RecordingDisk)
    disk.write_back = 0.05
    disk.wanted = wanted
    check_state(promised, await load_state(disk))
    clock = ManualClock(START_MS)
    precision = Random(f"precision {seed}").choice(PRECISIONS)
    store = open_store(disk, sync=Random(f"mode {seed}").random() < 0.5, clock=clock, precision=precision)
    async with store.opened():
        await trio.testing.wait_all_tasks_blocked()
        disk.wanted = None  # only the calls of the recovery are cut again, not those of the checks
        checker = Checker(store, promised, expected.damage, expected.damaged)
        await checker.check()
        await checker.put_one()
        await checker.check_timed(disk, clock, 1 + seed.count("+"))
    disk.check_mapped_stores()
    assert not disk.open_files(), "descriptors were not closed"
    assert store.recovered is not None
    return Recovered(disk.images, bool(store.recovered.damaged))


class Expected(NamedTuple):
    """What a store is checked against. ``damaged``: an earlier recovery already reported damage."""

    moment: Moment
    killed: bool
    """The bytes not yet synced are still in the page cache or on the device: every answer counts."""
    damage: tuple[Damage, ...] = ()
    damaged: bool = False


class Enumeration:
    """All states of one seed's script."""

    def __init__(self, seed: int, recording: Recording | None = None) -> None:
        self.seed = seed
        self.recording = recording or record(seed)
        self.tally = Tally(calls=len(self.recording.images), operations=Counter(self.recording.operations))
        self._seen: set[tuple[int, Expected, int]] = set()

    def run(self, part: int, parts: int, *, second: int, losses: Sequence[Loss] = tuple(Loss)) -> Tally:
        """Check one of ``parts`` stretches of the script: all cuts, all losses, ``second`` cuts of each recovery.

        A part is a contiguous stretch because neighbouring calls often leave equal disks, which are checked only once.
        """
        count = len(self.recording.images)
        for cut in range(1 + count * part // parts, 1 + count * (part + 1) // parts):
            for loss in losses:
                self.state(State(self.seed, cut, loss), second)
        return self.tally

    def state(self, state: State, second: int) -> None:
        """Check a state, unless an equal one was checked before, and ``second`` cuts of its recovery."""
        image = self.recording.images[state.cut]
        left = survivor(image, state.loss, Random(str(state)))
        if left is None:
            return
        expected = _expected(state, image.moment, left)
        if not self._is_new(state, left, expected):
            return
        cuts = Reservoir(min(second, SECOND_CUTS), str(state))
        recovered = self._check(state, left.found, expected, cuts)
        random = Random(f"losses of {state}")
        for cut in cuts.chosen:
            again = State(*state[:3], ((cut, random.choice(list(Loss))),))
            left = survivor(recovered.images[cut], again.again[0][1], Random(str(again)))
            if left is None:
                continue
            further = _expected(again, image.moment, left, expected, damaged=recovered.damaged)
            if self._is_new(again, left, further):
                self._check(again, left.found, further, None)

    def _is_new(self, state: State, left: Survivor, expected: Expected) -> bool:
        """False if an equal state was checked, after as many crashes or fewer: a timed message may come after each."""
        key, crashes = left.found.key(), 1 + len(state.again)
        if any((key, expected, fewer) in self._seen for fewer in range(1, crashes + 1)):
            self.tally.equal += 1
            return False
        self._seen.add((key, expected, crashes))
        return True

    def _check(self, state: State, found: Found, expected: Expected, wanted: Callable[[int], bool] | None) -> Recovered:
        promised = promise(self.recording.events, expected.moment, killed=expected.killed)
        recovered = _check(state, found, expected, promised, wanted)
        self.tally.states += 1
        if state.again:
            self.tally.second += 1
        else:
            self.tally.by_loss[state.loss.value] += 1
        return recovered

    def replay(self, state: State) -> None:
        """Check a single state again. Raises ValueError if its loss does not apply there."""
        image = self.recording.images[state.cut]
        first = State(*state[:3])
        left = survivor(image, state.loss, Random(str(first)))
        if left is None:
            raise ValueError(f"{state}: this loss does not apply there")
        expected = _expected(first, image.moment, left)
        recovered = self._check(first, left.found, expected, lambda call: call in [cut for cut, _ in state.again])
        if state.again:
            ((cut, loss),) = state.again
            left = survivor(recovered.images[cut], loss, Random(str(state)))
            if left is None:
                raise ValueError(f"{state}: the second loss does not apply there")
            further = _expected(state, image.moment, left, expected, damaged=recovered.damaged)
            self._check(state, left.found, further, None)


def _expected(
    state: State, moment: Moment, left: Survivor, before: Expected | None = None, *, damaged: bool = False
) -> Expected:
    """What holds for a state with this survivor; ``before``: what held before the cut during recovery."""
    losses = {state.loss, *(loss for _, loss in state.again)}
    killed = losses <= {Loss.NOTHING, Loss.FLIP, Loss.ROT}
    damage = before.damage if before is not None else ()
    if left.damage is not None:
        damage = (*damage, left.damage)
    return Expected(moment, killed, damage, damaged or (before is not None and before.damaged))


def _check(
    state: State, found: Found, expected: Expected, promised: Promise, wanted: Callable[[int], bool] | None
) -> Recovered:
    try:
        with capture_logs():
            return simulate(_recover, found, expected, promised, str(state), wanted, seed=str(state))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BrokenStateError(str(state), _reason(error)) from error


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


# -- all states, in several processes


def part_of(seed: int, part: int, parts: int, second: int) -> Tally:
    """Check one part of a seed's states; the work of one process."""
    found = Enumeration(seed)
    # The disk images live until the end, and a state leaves little behind: most passes of the collector find nothing.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    return found.run(part, parts, second=second)


def enumerate_states(seeds: Sequence[int], *, second: int, workers: int | None = None) -> Iterator[Tally]:
    """Check all states of several seeds and yield a tally for each seed. Raises BrokenStateError."""
    calls = [(seed, part, _PARTS, second) for seed in seeds for part in range(_PARTS)]
    tally = Tally()
    for number, found in enumerate(in_processes(part_of, calls, workers), start=1):
        tally.add(found)
        if number % _PARTS == 0:
            yield tally
            tally = Tally()


def in_processes(work: Callable[..., T], calls: Sequence[tuple[Any, ...]], workers: int | None = None) -> Iterator[T]:
    """Yield the results of the calls in their order, computed on all cores; the first error cancels the rest."""
    with ProcessPoolExecutor(workers or os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(work, *arguments) for arguments in calls]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
