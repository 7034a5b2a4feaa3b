"""Kills the broker with SIGKILL under full load, again and again, and looks what has become of every message.

    python -m tests.crash.kill --kills 50

Flush modes alternate from life to life. ``--pool`` runs ASYNC_FLUSH with the transient store pool, where a kill may
take what had not been committed; how much that was is in the figures.
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
from tests.crash.ledger import ACKNOWLEDGED, SEEN, Lane, Losses
from tests.crash.load import Load

_FAULTS: Final = 40
POOL: Final = {
    "transientStorePoolEnable": "true",
    "mappedFileSizeCommitLog": str(256 << 10),  # the last file of a start has no buffer, the following ones have
    "maxMessageSize": str(64 << 10),
    "commitIntervalCommitLog": "500",
    "commitCommitLogThoroughInterval": "500",
    "commitCommitLogLeastPages": "1000",
}
"""Commits by time only, so that there is something to lose."""


class Report(Struct):
    """What a run found. ``faults`` is empty where all promises were kept."""

    seed: int
    kills: int = 0
    sent: int = 0
    acknowledged: int = 0
    stored: int = 0
    queries: int = 0
    lost: int = 0
    """Acknowledged and gone: 0 but for the transient store pool."""
    lost_seconds: float = 0.0
    """How long before its kill the oldest of them was acknowledged."""
    refused: dict[str, int] = field(default_factory=dict)
    unanswered: int = 0
    longest_start: float = 0.0
    """Seconds from a start to the first connection."""
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


async def run(
    directory: Path, *, kills: int, seed: int, pool: bool = False, messages: int = 300, lanes: int = 8
) -> Report:
    """``kills`` lives under load, then an orderly stop and a look at everything.

    A life ends after up to ``messages`` acknowledged ones, at a moment that the seed draws.
    """
    random = Random(seed)
    began = time.monotonic()
    broker = BrokerProcess(directory, **(POOL if pool else {}))
    queues = [Lane(f"Kill{at % 2}", at // 2) for at in range(lanes)]
    load = Load(broker.address, queues, seed=seed, asks_for=SEEN if pool else ACKNOWLEDGED)
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
            for lane in load.lanes:
                lane.killed(time.monotonic())
        load.stop()
        await broker.start()
    try:
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
    """Fill in what was counted."""
    report.sent = sum(len(lane.state) for lane in load.lanes)
    report.acknowledged = sum(lane.acknowledged for lane in load.lanes)
    report.stored = sum(lane.seen for lane in load.lanes)
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
@click.option("--seed", default=0, help="Draws the moments; 0 takes the time of day.")
@click.option("--pool", is_flag=True, help="With the transient store pool.")
@click.option("--messages", default=300, show_default=True, help="A life ends after up to so many acknowledged ones.")
def main(kills: int, seed: int, pool: bool, messages: int) -> None:
    """Run it and print the figures as JSON; exit code 1 where a promise was broken."""
    with tempfile.TemporaryDirectory(prefix="trimq-kill-") as directory:
        report = trio.run(_run, Path(directory), kills, seed or int(time.time()), pool, messages)
    sys.stdout.write(json.dumps(to_builtins(report), indent=2) + "\n")
    raise SystemExit(bool(report.faults or (report.lost and not pool)))


async def _run(directory: Path, kills: int, seed: int, pool: bool, messages: int) -> Report:
    return await run(directory, kills=kills, seed=seed, pool=pool, messages=messages)


if __name__ == "__main__":
    main()
