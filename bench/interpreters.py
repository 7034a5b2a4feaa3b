"""The same broker with several Python interpreters, in turns under the same loads.

python -m bench.interpreters --python PATH --python PATH [--rows send64,batch] [--rounds 2] [--seconds 2] [--json FILE].
Each interpreter needs the broker's requirements installed; the code is that of this checkout. Needs Go.
"""

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.processes import HERE, BrokerProcess, describe, load_tool, our_command
from bench.side_by_side import ROWS, WARM_UP, load

ROWS_HERE = ("send64", "pipelined", "batch", "pull8", "query8")
TICK = os.sysconf("SC_CLK_TCK")
WARM_SECONDS = 2
"""The warm-up of ``load``: its requests are not counted, but the broker's CPU time is."""


def cpu_seconds(pid: int) -> float:
    """The processor time that all threads of a process have used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def measure(pythons: dict[str, str], rows: list[str], rounds: int, seconds: int) -> dict[str, Any]:
    """The medians for each row and interpreter."""
    results: dict[str, Any] = {"pythons": {name: describe(path) for name, path in pythons.items()}, "rows": {}}
    with tempfile.TemporaryDirectory(prefix="trimq-pythons-") as directory, ExitStack() as stack:
        root = Path(directory)
        tool = stack.enter_context(load_tool(root))
        brokers = [stack.enter_context(BrokerProcess(name, our_command(path), root)) for name, path in pythons.items()]
        for broker in brokers:
            load(tool, broker.port, WARM_UP, 60)
        for row in rows:
            got: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
            for _ in range(rounds):
                for broker in brokers:
                    before = cpu_seconds(broker.process.pid)
                    run = load(tool, broker.port, ROWS[row].load, seconds)
                    spent = cpu_seconds(broker.process.pid) - before
                    each = spent / max(1.0, run["req_s"] * (seconds + WARM_SECONDS)) * 1e6
                    got[broker.name].append({"msg_s": run["msg_s"], "p99_ms": run["p99_ms"], "cpu_us": each})
            results["rows"][row] = {
                name: {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}
                for name, runs in got.items()
            }
            for name, found in results["rows"][row].items():
                print(f"{row:10s} {name:12s} {found['msg_s']:9,.0f}/s  {found['cpu_us']:7.1f} us of CPU a request")
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--rows", default=",".join(ROWS_HERE))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(HERE.parent)
    pythons = dict(text.split("=", 1) for text in arguments.python)
    results = measure(pythons, arguments.rows.split(","), arguments.rounds, arguments.seconds)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
