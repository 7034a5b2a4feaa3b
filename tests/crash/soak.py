"""Half an hour of mixed load with random kills and restarts: memory, descriptors and latencies must not grow.

    python -m tests.crash.soak --minutes 30

The load consists of single messages and batches, pulls, long polls and queries by key at a bounded rate; the flush mode
changes with each life of the broker. Four of five lives end with SIGKILL, the others with SIGTERM. At the end every
queue is read once more from the start. The report compares the figures of the first and the last part of the run.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

import click
import trio
from msgspec import Struct, field, to_builtins

from tests.crash.broker_process import BrokerProcess
from tests.crash.kill import Report, judge
from tests.crash.ledger import Stream
from tests.crash.load import Load

_SAMPLE_SECONDS: Final = 5.0
_WARM_SECONDS: Final = 10.0
"""No samples are taken before a life is this old: they would measure the start."""
_MIB: Final = 1 << 20


class Sample(Struct):
    """Figures of one sampling interval."""

    at: float
    mode: str
    private: int
    resident: int
    descriptors: int
    files: int
    busy: float
    latencies: list[float]


class Figures(Struct):
    """Figures of one part of the run and one flush mode: medians, and percentiles of all sends."""

    private_mib: float
    resident_mib: float
    descriptors: int
    mapped_files: int
    """Mapped files of log and index: each needs two descriptors before Python 3.13, one from then on."""
    load_average: float
    """The machine's load average over one minute, for judging the latencies."""
    send_p50_ms: float
    send_p99_ms: float
    sends: int


class SoakReport(Struct):
    """Result of the run."""

    report: Report
    minutes: float
    stops: int = 0
    store_mib: int = 0
    start: dict[str, Figures] = field(default_factory=dict)
    end: dict[str, Figures] = field(default_factory=dict)


class Soak:
    """One run."""

    def __init__(self, directory: Path, *, minutes: float, rate: float, seed: int, life: tuple[float, float]) -> None:
        """``life``: the shortest and the longest life of the broker, in seconds."""
        self.random = Random(seed)
        self.seconds = 60 * minutes
        self.life = life
        self.directory = directory
        self.broker = BrokerProcess(directory)
        streams = [Stream(f"Soak{at % 4}", at // 4) for at in range(16)]
        self.load = Load(self.broker.address, streams, seed=seed, rate=rate)
        self.samples: list[Sample] = []
        self.outcome = SoakReport(Report(seed), minutes)

    async def run(self) -> SoakReport:
        """Run the load for the given time, then verify all messages and return the report."""
        began = time.monotonic()
        lives = 0
        async with trio.open_nursery() as nursery:
            while time.monotonic() - began < self.seconds:
                self.broker.settings["flushDiskType"] = "SYNC_FLUSH" if lives % 2 else "ASYNC_FLUSH"
                await self.broker.start()
                if not lives:
                    nursery.start_soon(self.load.run)
                lives += 1
                left = self.seconds - (time.monotonic() - began)
                with trio.move_on_after(min(left, self.random.uniform(*self.life))):
                    await self._sample(began)
                await self._end_life()
            self.load.stop()
            await self.broker.start()
        try:
            losses = await self.load.verify(keys=2000)
        finally:
            await self.broker.stop()
        outcome = self.outcome
        outcome.report.kills = self.broker.kills
        outcome.report.longest_start = round(max(self.broker.start_seconds), 2)
        outcome.report.seconds = round(time.monotonic() - began, 1)
        outcome.store_mib = sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file()) // _MIB
        judge(outcome.report, self.load, losses)
        part = min(300.0, self.seconds / 3)
        outcome.start = _figures([sample for sample in self.samples if sample.at < part])
        outcome.end = _figures([sample for sample in self.samples if sample.at >= self.seconds - part])
        return outcome

    async def _sample(self, began: float) -> None:
        await trio.sleep(_WARM_SECONDS)
        self.load.take_latencies()
        while True:
            await trio.sleep(_SAMPLE_SECONDS)
            found = self.broker.footprint()
            mode = str(self.broker.settings["flushDiskType"])
            store = self.directory / "store"
            files = sum(1 for part in ("commitlog", "index") for _ in (store / part).iterdir())
            busy = os.getloadavg()[0]
            self.samples.append(Sample(time.monotonic() - began, mode, *found, files, busy, self.load.take_latencies()))

    async def _end_life(self) -> None:
        if self.random.random() < 0.8:
            await self.broker.kill()
        else:
            self.outcome.stops += 1
            code = await self.broker.stop()
            if code:
                self.load.faults.append(f"an orderly stop ended with exit code {code}:\n{self.broker.tail()}")
        for stream in self.load.streams:
            stream.killed(time.monotonic())


def _figures(samples: list[Sample]) -> dict[str, Figures]:
    """Summarize samples by flush mode."""
    found = {}
    for mode in sorted({sample.mode for sample in samples}):
        chosen = [sample for sample in samples if sample.mode == mode]
        latencies = sorted(seconds for sample in chosen for seconds in sample.latencies) or [0.0]
        found[mode] = Figures(
            private_mib=round(median(sample.private for sample in chosen) / _MIB, 1),
            resident_mib=round(median(sample.resident for sample in chosen) / _MIB, 1),
            descriptors=round(median(sample.descriptors for sample in chosen)),
            mapped_files=round(median(sample.files for sample in chosen)),
            load_average=round(median(sample.busy for sample in chosen), 1),
            send_p50_ms=round(1000 * latencies[len(latencies) // 2], 2),
            send_p99_ms=round(1000 * latencies[len(latencies) * 99 // 100], 2),
            sends=len(latencies),
        )
    return found


@click.command()
@click.option("--minutes", default=30.0, show_default=True, help="Duration of the load.")
@click.option("--rate", default=300.0, show_default=True, help="Messages per second.")
@click.option("--seed", default=0, help="Seed of the random moments; 0 takes the time of day.")
@click.option(
    "--life",
    nargs=2,
    type=float,
    default=(20.0, 120.0),
    show_default=True,
    help="Shortest and longest life in seconds.",
)
def main(minutes: float, rate: float, seed: int, life: tuple[float, float]) -> None:
    """Run the soak test and print its report as JSON; the exit code is 1 if a promise was broken."""
    with tempfile.TemporaryDirectory(prefix="trimq-soak-") as directory:
        soak = Soak(Path(directory), minutes=minutes, rate=rate, seed=seed or int(time.time()), life=life)
        outcome = trio.run(soak.run)
    sys.stdout.write(json.dumps(to_builtins(outcome), indent=2) + "\n")
    raise SystemExit(bool(outcome.report.faults or outcome.report.lost))


if __name__ == "__main__":
    main()
