"""EIO and ENOSPC at every disk call of the script: no message is acknowledged that is not stored.

Each chapter is run once for each of its calls, on the disk that the previous chapter left, with an error at exactly
that call. The store may refuse any operation; afterwards a restarted process on the same machine, and a machine that
lost its power, must find everything that was promised.
"""

import errno
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

import trio
from structlog.testing import capture_logs

from tests.crash.enumeration import BrokenStateError, Recording, _reason, record, simulate
from tests.crash.images import RecordingDisk, revive
from tests.crash.losses import Loss, survivor
from tests.crash.promises import Checker, check_state
from tests.crash.script import CHAPTERS, Moment, Script, load_state, open_store, promise
from tests.store.simdisk import SimDisk
from trimq.broker.services.state_file import StateFileError
from trimq.broker.store.message_store import StoreLoadError

ERRORS: Final = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
_LOSSES: Final = (Loss.ALL, Loss.PAGES, Loss.SECTORS, Loss.FILES, Loss.NAMES)
_HANGS_SECONDS: Final = 3_600
_REFUSALS: Final = (OSError, StoreLoadError, StateFileError)


class Fault(NamedTuple):
    """One run: the disk call that fails, counted from the chapter's first call, and its error."""

    seed: int
    chapter: int
    call: int
    error: str

    def __str__(self) -> str:
        return f"{self.seed}:{self.chapter}:{self.call}:{self.error}"

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Inverse of ``str``. Raises ValueError for an unknown error name."""
        seed, chapter, call, error = text.split(":")
        if error not in ERRORS:
            raise ValueError(f"{error}: one of {', '.join(ERRORS)} is expected")
        return cls(int(seed), int(chapter), int(call), error)


@dataclass
class FaultTally:
    """Counts of what has been checked."""

    runs: int = 0
    refused_starts: int = 0
    read_only: int = 0
    by_call: Counter[str] = field(default_factory=Counter)

    def add(self, other: "FaultTally") -> None:
        """Add the counts of another part."""
        self.runs += other.runs
        self.refused_starts += other.refused_starts
        self.read_only += other.read_only
        self.by_call += other.by_call

    def __str__(self) -> str:
        calls = ", ".join(f"{name} {count}" for name, count in sorted(self.by_call.items()))
        return (
            f"{self.runs} runs with an error, {self.refused_starts} of them did not start, {self.read_only} ended "
            f"read-only; errors by call: {calls}"
        )


class Faults:
    """All runs of one seed's script."""

    def __init__(self, seed: int, recording: Recording | None = None) -> None:
        self.seed = seed
        self.recording = recording or record(seed)
        self.tally = FaultTally()

    def run(self, part: int, parts: int) -> FaultTally:
        """Check every ``parts``-th fault from ``part`` on."""
        for fault in self.all()[part::parts]:
            self.check(fault)
        return self.tally

    def all(self) -> Sequence[Fault]:
        """All faults: every disk call with every error."""
        starts = [call for call, _ in self.recording.chapters] + [max(self.recording.images)]
        return [
            Fault(self.seed, chapter, call, error)
            for chapter in range(len(CHAPTERS))
            for call in range(1, starts[chapter + 1] - starts[chapter] + 1)
            for error in ERRORS
        ]

    def check(self, fault: Fault) -> None:
        """Run a chapter with one fault and check the store afterwards. Raises BrokenStateError."""
        first, _ = self.recording.chapters[fault.chapter]
        failing = self.recording.images[min(first + fault.call - 1, max(self.recording.images))]
        try:
            with capture_logs():
                simulate(self._run, fault, seed=str(fault))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise BrokenStateError(str(fault), _reason(error)) from error
        self.tally.runs += 1
        self.tally.by_call[failing.call.partition(" ")[0]] += 1

    async def _run(self, fault: Fault) -> None:
        first, start = self.recording.chapters[fault.chapter]
        disk = RecordingDisk(seed=fault.seed)
        revive(self.recording.images[first], disk)
        script = Script(disk, fault.seed)
        script.at_start_of(start)
        script.faults_expected = True
        disk.fail("*", ERRORS[fault.error], fault.call)
        try:
            with trio.fail_after(_HANGS_SECONDS):
                await script.chapter(fault.chapter)
        except* _REFUSALS:
            self.tally.refused_starts += 1
        disk.clear_failures()
        assert not disk.open_files(), "descriptors were not closed"
        if hasattr(script, "store") and script.store.flags.is_broken:
            self.tally.read_only += 1
        moment = script.moment()
        left = survivor(disk.picture("", moment), Random(str(fault)).choice(_LOSSES), Random(str(fault)))
        assert left is not None
        await _restart(script, left.found.disk(), moment, killed=False, loss="a power cut")
        # Only the process ended: every answer counts. After the orderly stop of the restarted store everything must
        # also be on the device, which the third restart checks.
        await _restart(script, disk, moment, killed=True, loss="a restart")
        durable = survivor(disk.picture("", moment), Loss.ALL, Random(0))
        assert durable is not None
        await _restart(script, durable.found.disk(), moment, killed=True, loss="a restart and a power cut")


async def _restart(script: Script, disk: SimDisk, moment: Moment, *, killed: bool, loss: str) -> None:
    promised = promise(script.events, moment, killed=killed)
    try:
        check_state(promised, await load_state(disk))
        store = open_store(disk, sync=script.sync, clock=script.clock)
        async with store.opened():
            await Checker(store, promised, committed=script.committed).check()
            if loss == "a power cut":
                await Checker(store, promised).put_one()
                await Checker(store, promised).check_timed(disk, script.clock, 2)
    except BaseException as error:
        error.add_note(f"after {loss}")
        raise
    disk.check_mapped_stores()


def part_of(seed: int, part: int, parts: int) -> FaultTally:
    """Check one part of a seed's faults; the work of one process."""
    return Faults(seed).run(part, parts)
