"""The delay of the event loop under load, including file rolls, syncs, cleaning and garbage collection.

python -m bench.stalls [--seconds 10] [--json FILE]. The broker runs in this process, the load generator (bench/rmqload,
needs Go) in another one. A task sleeps for a millisecond at a time and records how late it wakes up. A loop that uses a
full core is late by the length of its turns (``limits.turn``), so the tail matters. With fewer processors than threads
that are ready, the loop's thread waits for a processor too; a delay without that wait is the loop's own.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from bench.frames import BIG
from bench.processes import load_tool
from trimq.broker.testing import running_broker

LOADS = {
    "sends, pipelined": ("ASYNC_FLUSH", "-mode send -conns 8 -window 32"),
    "sends of 64 KiB": ("ASYNC_FLUSH", "-mode send -conns 8 -size 65536"),
    "sync sends, 64 connections": ("SYNC_FLUSH", "-mode send -conns 64"),
    "pulls": ("ASYNC_FLUSH", "-mode pull -conns 8"),
}
ENDS_MS = (0.25, 0.5, 1, 2, 3, 5, 10, 20, 50)
"""The upper ends of the histogram's classes; the last class has none."""


def waited_ms() -> float:
    """The time that this thread has waited for a processor so far: the second field of Linux's schedstat, in ns."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e6


async def probe(late: list[float], own: list[float]) -> None:
    """Sleep for a millisecond at a time, forever, and record the delays.

    ``own`` may be too large but not too small: one millisecond of the wait for a processor is taken to be before the
    task was due.
    """
    while True:
        waited = waited_ms()
        wanted = time.perf_counter() + 0.001
        await trio.sleep(0.001)
        delay = (time.perf_counter() - wanted) * 1000
        late.append(delay)
        own.append(max(0.0, delay - max(0.0, waited_ms() - waited - 1)))


def figures(late: list[float]) -> dict[str, Any]:
    """Quantiles in milliseconds, and the number of probes in each class."""
    late = sorted(late)
    found: dict[str, Any] = {
        name: round(late[int(part * (len(late) - 1))], 2)
        for name, part in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))
    }
    counts = [0] * (len(ENDS_MS) + 1)
    for value in late:
        counts[next((at for at, end in enumerate(ENDS_MS) if value <= end), len(ENDS_MS))] += 1
    return found | {"looks": len(late), "classes": counts}


async def run(arguments: argparse.Namespace) -> None:
    """Measure all loads, each with its own broker, whose log rolls over every 256 MiB."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, load_tool(Path(directory)) as tool:
        for name, (flush, load) in LOADS.items():
            fields = BIG | {"mappedFileSizeCommitLog": 256 << 20, "flushDiskType": flush}
            late: list[float] = []
            own: list[float] = []
            with tempfile.TemporaryDirectory() as store:
                async with (
                    running_broker(Path(store), clock=None, disk=None, **fields) as broker,
                    trio.open_nursery() as nursery,
                ):
                    command = [str(tool), "-addr", f"127.0.0.1:{broker.endpoint[1]}", "-queues", "4"]
                    fill = ["-mode", "send", "-conns", "8", "-window", "32", "-n", "40000", "-warm", "0s"]
                    await trio.run_process([*command, *fill], capture_stdout=True)
                    nursery.start_soon(probe, late, own)
                    seconds = ["-dur", f"{arguments.seconds}s", "-warm", "0s"]
                    done = await trio.run_process([*command, *load.split(), *seconds], capture_stdout=True)
                    nursery.cancel_scope.cancel()
            rate = json.loads(done.stdout.splitlines()[-1])["msg_s"]
            results[name] = figures(late) | {"msg_s": rate, "own": figures(own)}
            print(name, results[name], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
