"""The cost of scrapes: sends with and without a scraper that fetches a large page, in turns; prints the ratios.

``python -m bench.scrape [--topics 10000] [--every 5] [--seconds 10] [--rounds 4] [--json FILE]``. The broker runs in
this process, and its counters have that many topics and groups. The load (Go) and the scraper are separate processes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import trio

from bench.frames import BIG
from bench.processes import load_tool
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker

LOAD = "-mode send -conns 8 -window 8 -queues 4 -warm 1s"
SCRAPER = """
import sys, time, urllib.request
while True:
    began = time.monotonic()
    with urllib.request.urlopen(sys.argv[1]) as page:
        size = len(page.read())
    print(size, time.monotonic() - began, flush=True)
    time.sleep(max(0, began + float(sys.argv[2]) - time.monotonic()))
"""


def fill(broker: BrokerController, topics: int) -> None:
    """Set the broker's counters as if so many topics had been written and read."""
    for number in range(topics):
        name = f"topic-{number:05}"
        broker.context.stats.topic_put(name, 1, 100)
        broker.context.stats.group_get("G", name, 1, 100)
        broker.context.offsets.commit("c", "G", name, 0, 0)


@contextmanager
def scraped(broker: BrokerController, every: float, pages: list[tuple[int, float]]) -> Iterator[None]:
    """Run a scraper that fetches the page each ``every`` seconds; appends (bytes, seconds) to ``pages``."""
    host, port = broker.web_endpoints[0]
    command = [sys.executable, "-c", SCRAPER, f"http://{host}:{port}/metrics", str(every)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield
        finally:
            process.terminate()
            printed, _ = process.communicate()
            pages += [(int(line.split()[0]), float(line.split()[1])) for line in printed.splitlines()]


async def load(tool: Path, broker: BrokerController, seconds: int) -> dict[str, Any]:
    """Run the load generator once; its figures, and the CPU time of this process."""
    command = [str(tool), "-addr", f"127.0.0.1:{broker.endpoint[1]}", "-dur", f"{seconds}s", *LOAD.split()]
    began = time.process_time()
    run = await trio.to_thread.run_sync(
        partial(subprocess.run, command, capture_output=True, text=True, timeout=seconds + 60, check=True)
    )
    figures: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    figures["cpu_seconds"] = time.process_time() - began
    return figures


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run rounds of one load with and one without scrapes; each round in the opposite order of the last."""
    got: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    pages: list[tuple[int, float]] = []
    changes: dict[str, Any] = {**BIG, "metricsExporterType": "PROM", "metricsPromExporterPort": 0}
    with tempfile.TemporaryDirectory(prefix="trimq-scrape-") as directory:
        root = Path(directory)
        with load_tool(root) as tool:
            async with running_broker(root / "store", **changes) as broker:
                fill(broker, arguments.topics)
                await load(tool, broker, 2)
                for number in range(arguments.rounds):
                    for scraping in (False, True) if number % 2 else (True, False):
                        if scraping:
                            with scraped(broker, arguments.every, pages):
                                figures = await load(tool, broker, arguments.seconds)
                        else:
                            figures = await load(tool, broker, arguments.seconds)
                        got[scraping].append(figures)
    return summary(arguments, got, pages)


def summary(
    arguments: argparse.Namespace, got: dict[bool, list[dict[str, Any]]], pages: list[tuple[int, float]]
) -> dict[str, Any]:
    """The medians of the rounds' ratios, with scrapes divided by without."""

    def ratio(figure: str) -> float:
        ratios: list[float] = [one[figure] / other[figure] for one, other in zip(got[True], got[False], strict=True)]
        return round(statistics.median(ratios), 3)

    return {
        "topics": arguments.topics,
        "seconds between scrapes": arguments.every,
        "scrapes": len(pages),
        "page bytes": max(size for size, _ in pages),
        "seconds for a page, median": round(statistics.median(took for _, took in pages), 3),
        "sends a second, without": round(statistics.median(one["msg_s"] for one in got[False])),
        "sends a second, scraped": round(statistics.median(one["msg_s"] for one in got[True])),
        "throughput ratio": ratio("msg_s"),
        "p99 ratio": ratio("p99_ms"),
        "CPU seconds of the broker, ratio": ratio("cpu_seconds"),
        "failed": sum(one["failed"] for one in [*got[True], *got[False]]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--every", type=float, default=5.0, help="seconds; docker/monitoring has 15")
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    result = trio.run(measure, arguments)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
