"""How late the event loop comes under load: file rolls, syncs, cleaning and garbage collection included.

python -m bench.stalls [--seconds 10] [--json FILE]. The broker runs here, the load generator (bench/rmqload, needs Go)
in a process of its own; a task asks for the loop every millisecond and notes how late it is served. A loop that works
on a full core comes late by its turns (``limits.turn``): what matters is the tail. With fewer processors than threads
that want one, the loop's thread waits for a processor too; what is left of a delay without that is the loop's own.
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
"""Upper ends of the histogram's classes; the last one has none."""


def waited_ms() -> float:
    """How long this thread has waited for a processor so far: Linux's schedstat, second field, nanoseconds."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e6


async def probe(late: list[float], own: list[float]) -> None:
    """Ask for the loop every millisecond, for ever.

    ``own`` is at most too large: of the wait for a processor a millisecond is taken to lie before the look was due.
    """
    while True:
        waited = waited_ms()
        wanted = time.perf_counter() + 0.001
        await trio.sleep(0.001)
        delay = (time.perf_counter() - wanted) * 1000
        late.append(delay)
        own.append(max(0.0, delay - max(0.0, waited_ms() - waited - 1)))


def figures(late: list[float]) -> dict[str, Any]:
    """Milliseconds at the usual places, and how many looks fell into each class."""
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
    """All loads, each with a broker of its own whose log rolls every 256 MiB."""
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
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
