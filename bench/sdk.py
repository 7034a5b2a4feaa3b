"""Compares the SDK with the Java client, against the same broker of ours in the same minutes; prints the ratios.

``python -m bench.sdk [--seconds 4] [--rounds 3] [--messages 1000000] [--profile] [--json FILE]``. Each load is a
separate process; messages have 1 KiB.

Sends: awaited, 64 in flight, relative to the faster of Java's two methods to have 64 in flight. Consuming: from a topic
in the page cache, relative to a loop that receives the same frames and reads only the next offset. Needs a JDK and
Maven.
"""

import argparse
import json
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.processes import BrokerProcess, free_port, our_command
from tests.interop.harness import partners, probe

HERE = Path(__file__).resolve().parent
QUEUES = 4
FLOORS = {"send64": 0.5, "linger64": 1.0, "linger1024": 1.0, "process": 0.25, "batches": 0.75}
"""The least ratio of each row: sends relative to Java's, consuming relative to the raw loop."""

SENDS = {
    "java sync64": ("java", "sync", 64),
    "java async64": ("java", "async", 64),
    "java autobatch64": ("java", "autobatch", 64),
    "send64": ("trio", "send", 64),
    "send64 asyncio": ("asyncio", "send", 64),
    "linger64": ("trio", "linger", 64),
    "linger64 asyncio": ("asyncio", "linger", 64),
    "linger1024": ("trio", "linger", 1024),
}
CONSUMES = {
    "raw pull loop": ("trio", "raw_pull"),
    "process": ("trio", "process"),
    "process asyncio": ("asyncio", "process"),
    "batches": ("trio", "batches"),
    "batches asyncio": ("asyncio", "batches"),
    "poll": ("trio", "poll"),
}
JAVA = ("sync64", "async64")
PROFILED = ("send64", "linger64", "process", "batches")
TOP = 14


def figures(command: list[str], seconds: float) -> dict[str, float]:
    """The figures that a load prints. Raises RuntimeError if it failed, or any of its sends."""
    run = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120, check=False)
    if run.returncode or not run.stdout.strip():
        raise RuntimeError(f"{' '.join(command)[-200:]} failed: {run.stderr[-2000:]}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    if found.get("failed"):
        raise RuntimeError(f"{' '.join(command)[-200:]}: {found['failed']} sends failed")
    return found


def our_figures(namesrv: str, topic: str, load: str, seconds: float, *options: str) -> dict[str, float]:
    """The figures of a load of bench.sdk_load: ``msg_s``, and ``cpu_us`` of this client for a message."""
    return figures([sys.executable, "-m", "bench.sdk_load", namesrv, topic, load, str(seconds), *options], seconds)


def ours(namesrv: str, topic: str, load: str, seconds: float, *options: str) -> float:
    return our_figures(namesrv, topic, load, seconds, *options)["msg_s"]


def java(namesrv: str, topic: str, mode: str, in_flight: int, seconds: float) -> float:
    source = str(HERE / "java" / "SdkLoad.java")
    command = ["java", "-Xms512m", "-Xmx512m", "-cp", partners.java_driver("5.5.0"), source]
    return figures([*command, namesrv, topic, mode, str(in_flight), str(seconds), "1024"], seconds)["msg_s"]


def sends(namesrv: str, seconds: float) -> dict[str, float]:
    """Measure each method to send once."""
    found = {}
    for name, (who, mode, in_flight) in SENDS.items():
        if who == "java":
            found[name] = java(namesrv, "Sends", mode, in_flight, seconds)
        else:
            options = ("--backend", who, "--in-flight", str(in_flight))
            found[name] = ours(namesrv, "Sends", mode, seconds, *options)
        print(f"{name:20s} {found[name]:10,.0f} msg/s", flush=True)
    return found


def consumes(namesrv: str, seconds: float, messages: int) -> dict[str, float]:
    """Measure each method to consume once."""
    found = {}
    for name, (backend, load) in CONSUMES.items():
        options = ("--backend", backend, "--messages", str(messages))
        found[name] = ours(namesrv, "Warm", load, seconds, *options)
        print(f"{name:20s} {found[name]:10,.0f} msg/s", flush=True)
    return found


def profiles(namesrv: str, root: Path, seconds: float, messages: int) -> dict[str, list[list[Any]]]:
    """Profile some loads: the functions with the largest own time, as shares of the total."""
    found = {}
    for name in PROFILED:
        path = root / "profile"
        _, load, *in_flight = SENDS.get(name) or CONSUMES[name]
        options = ["--profile", str(path)]
        options += ["--in-flight", str(in_flight[0])] if in_flight else ["--messages", str(messages)]
        ours(namesrv, "Sends" if in_flight else "Warm", str(load), seconds, *options)
        found[name] = _top(path)
    return found


def _top(path: Path) -> list[list[Any]]:
    stats: Any = pstats.Stats(str(path))
    entries = [(own, function) for function, (_, _, own, _, _) in stats.stats.items() if "epoll" not in function[2]]
    total = sum(own for own, _ in entries)
    return [
        [round(own / total, 3), f"{'/'.join(Path(file).parts[-2:])}:{function}" if line else function]
        for own, (file, line, function) in sorted(entries, reverse=True)[:TOP]
    ]


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds against one broker; the medians of the rates, and of the ratios within a round."""
    root = Path(tempfile.mkdtemp(prefix="trimq-sdk-"))
    port = free_port()
    settings: dict[str, object] = {"namesrvAddr": "", "embeddedNamesrvPort": port, "brokerName": "broker-a"}
    namesrv = f"127.0.0.1:{port}"
    rounds: list[dict[str, float]] = []
    try:
        with BrokerProcess("ours", our_command(), root, **settings) as broker:
            for topic in ("Sends", "Warm"):
                probe.create_topic(f"127.0.0.1:{broker.port}", topic, QUEUES)
            ours(namesrv, "Warm", "fill", 0, "--messages", str(arguments.messages))
            while len(rounds) < arguments.rounds:
                rounds += [consumes(namesrv, arguments.seconds, arguments.messages) | sends(namesrv, arguments.seconds)]
            found = profiles(namesrv, root, arguments.seconds, arguments.messages) if arguments.profile else {}
    finally:
        shutil.rmtree(root, ignore_errors=True)
    rates = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    ratios = {
        name: round(statistics.median(one[name] / _base(name, one) for one in rounds), 3)
        for name in rates
        if not name.startswith(("java", "raw"))
    }
    for name, floor in FLOORS.items():
        print(f"{name:20s} x{ratios[name]:5.2f}, at least {floor:.2f}{'' if ratios[name] >= floor else '   TOO SLOW'}")
    return {"rates": rates, "ratios": ratios, "floors": FLOORS, "rounds": rounds, "profiles": found}


def _base(name: str, rates: dict[str, float]) -> float:
    if name in CONSUMES:
        return rates["raw pull loop"]
    return max(rates[f"java {method}"] for method in JAVA)


def main() -> None:
    """Run the comparison as given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = run_all(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
