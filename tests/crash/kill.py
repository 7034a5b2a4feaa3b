"""Kills the broker with SIGKILL under full load, repeatedly, and checks what became of every message.

    python -m tests.crash.kill --kills 50

A life is the time from a start of the broker to its kill; flush modes alternate from life to life. ``--pool`` runs
ASYNC_FLUSH with the transient store pool, where a kill may lose messages that had not been committed; the report says
how many.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Final

import click
import trio
from msgspec import Struct, field, to_builtins

from tests.crash.broker_process import BrokerProcess
from tests.crash.ledger import ACKNOWLEDGED, SEEN, Losses, Stream
from tests.crash.load import Load

_FAULTS: Final = 40
POOL: Final = {
    "transientStorePoolEnable": "true",
    # Small files: the file that is the last one at a start has no buffer of the pool, only the files after it have.
    "mappedFileSizeCommitLog": str(256 << 10),
    "maxMessageSize": str(64 << 10),
    "commitIntervalCommitLog": "500",
    "commitCommitLogThoroughInterval": "500",
    "commitCommitLogLeastPages": "1000",
}
"""Settings of the pool. Commits happen by time only, so that a kill finds uncommitted messages."""


class Report(Struct):
    """Result of a run. ``faults`` is empty if all promises were kept."""

    seed: int
    kills: int = 0
    sent: int = 0
    acknowledged: int = 0
    stored: int = 0
    queries: int = 0
    lost: int = 0
    """Acknowledged messages that were lost: 0 except with the transient store pool."""
    lost_seconds: float = 0.0
    """Seconds between the acknowledgement of the oldest lost message and its kill."""
    refused: dict[str, int] = field(default_factory=dict)
    unanswered: int = 0
    longest_start: float = 0.0
    """Seconds from a start to the first connection."""
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


async def run(
    directory: Path, *, kills: int, seed: int, pool: bool = False, messages: int = 300, streams: int = 8
) -> Report:
    """Run ``kills`` lives under load, then stop the broker in an orderly manner and check every message.

    A life ends after up to ``messages`` acknowledged messages, at a moment drawn from the seed.
    """
    random = Random(seed)
    began = time.monotonic()
    broker = BrokerProcess(directory, **(POOL if pool else {}))
    queues = [Stream(f"Kill{at % 2}", at // 2) for at in range(streams)]
    load = Load(broker.address, queues, seed=seed, queryable=SEEN if pool else ACKNOWLEDGED)
    report = Report(seed)
    async with trio.open_nursery() as nursery:
        for life in range(kills):
            broker.settings["flushDiskType"] = "SYNC_FLUSH" if life % 2 and not pool else "ASYNC_FLUSH"
            await broker.start()
            if not life:
                nursery.start_soon(load.run)
            await load.progress(random.randrange(messages // 3, messages))
            await trio.sleep(random.random() * 0.3)
            await broker.kill()
            for stream in load.streams:
                stream.killed(time.monotonic())
        load.stop()
        await broker.start()
    try:
        # Messages are read after an orderly restart too: the stop must not lose what the last recovery found.
        await broker.stop()
        await broker.start()
        losses = await load.verify()
    finally:
        await broker.stop()
    report.kills = broker.kills
    report.longest_start = round(max(broker.start_seconds), 2)
    report.seconds = round(time.monotonic() - began, 1)
    return judge(report, load, losses)


def judge(report: Report, load: Load, losses: list[Losses]) -> Report:
    """Fill in the counts of a finished load."""
    report.sent = sum(len(stream.state) for stream in load.streams)
    report.acknowledged = sum(stream.acknowledged for stream in load.streams)
    report.stored = sum(stream.seen for stream in load.streams)
    report.queries = load.queries
    report.refused = load.refused
    report.unanswered = load.unanswered
    report.lost = sum(lost.messages for lost in losses)
    report.lost_seconds = round(max(lost.seconds for lost in losses), 3)
    faults = load.faults + [fault for lost in losses for fault in lost.faults]
    report.faults = faults[:_FAULTS] + ([f"and {len(faults) - _FAULTS} more"] if len(faults) > _FAULTS else [])
    return report


@click.command()
@click.option("--kills", default=50, show_default=True, help="How often the broker is killed.")
@click.option("--seed", default=0, help="Seed of the random moments; 0 takes the time of day.")
@click.option("--pool", is_flag=True, help="Use the transient store pool.")
@click.option("--messages", default=300, show_default=True, help="Most acknowledged messages in one life.")
def main(kills: int, seed: int, pool: bool, messages: int) -> None:
    """Run the test and print its report as JSON; the exit code is 1 if a promise was broken."""
    with tempfile.TemporaryDirectory(prefix="trimq-kill-") as directory:
        report = trio.run(_run, Path(directory), kills, seed or int(time.time()), pool, messages)
    sys.stdout.write(json.dumps(to_builtins(report), indent=2) + "\n")
    raise SystemExit(bool(report.faults or (report.lost and not pool)))


async def _run(directory: Path, kills: int, seed: int, pool: bool, messages: int) -> Report:
    return await run(directory, kills=kills, seed=seed, pool=pool, messages=messages)


if __name__ == "__main__":
    main()
