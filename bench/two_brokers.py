"""The throughput of one broker, and of two on the same machine: each is a process with one loop on one core.

python -m bench.two_brokers [--seconds 6] [--json FILE]. Each broker has its own load generator (bench/rmqload, needs
Go), which shares the cores with the brokers.
"""

import argparse
import json
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.processes import BrokerProcess, load_tool, our_command

LOADS = {
    "sends, pipelined": "-mode send -conns 8 -window 32",
    "pulls, 8 connections": "-mode pull -conns 8",
}
FILL = "-mode send -conns 8 -window 32 -n 40000 -dur 60s -warm 0s"


def together(tool: Path, brokers: list[BrokerProcess], load: str) -> float:
    """The total messages a second of all brokers, each under the same load at the same time."""
    runs = [
        subprocess.Popen(
            [str(tool), "-addr", f"127.0.0.1:{broker.port}", "-queues", "4", *load.split()],
            stdout=subprocess.PIPE,
            text=True,
        )
        for broker in brokers
    ]
    return sum(float(json.loads(run.communicate(timeout=120)[0].splitlines()[-1])["msg_s"]) for run in runs)


def measure(seconds: int) -> dict[str, dict[str, float]]:
    """Measure each load with one broker, then with two."""
    results: dict[str, dict[str, float]] = {name: {} for name in LOADS}
    with tempfile.TemporaryDirectory(prefix="trimq-two-") as directory:
        root = Path(directory)
        for count in (1, 2):
            with ExitStack() as stack:
                tool = stack.enter_context(load_tool(root))
                brokers = [
                    stack.enter_context(BrokerProcess(f"broker{count}{number}", our_command(), root))
                    for number in range(count)
                ]
                together(tool, brokers, FILL)
                for name, load in LOADS.items():
                    rate = together(tool, brokers, f"{load} -dur {seconds}s -warm 1s")
                    results[name]["one" if count == 1 else "two together"] = rate
                    print(f"{name}: {rate:,.0f} messages/s by {count}", flush=True)
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.seconds)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
