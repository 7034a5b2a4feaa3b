"""Start-up time and memory: ``python -m bench.footprint [--messages 1000000] [--json FILE]``.

Prints the seconds from the start of the process to the first accepted connection (the median of several starts on an
empty store), then the resident anonymous memory when idle and after that many messages of 1 KiB. Needs Go for the load.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench.processes import BrokerProcess, load_tool, our_command

STARTS = 5


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trimq-footprint-") as directory:
        root = Path(directory)
        boots = []
        for attempt in range(STARTS):
            with BrokerProcess(f"start{attempt}", our_command(), root) as broker:
                boots.append(broker.boot_seconds)
        with load_tool(root) as tool, BrokerProcess("ours", our_command(), root) as broker:
            idle = broker.memory_mib()
            load = ["-addr", f"127.0.0.1:{broker.port}", "-mode", "send", "-conns", "8", "-window", "32", "-warm", "0s"]
            limits = ["-n", str(arguments.messages), "-dur", "600s"]
            printed = subprocess.run([tool, *load, *limits], capture_output=True, text=True, check=True).stdout
            loaded = broker.memory_mib()
        result = {
            "start_seconds_median": round(statistics.median(boots), 3),
            "start_seconds_all": [round(boot, 3) for boot in boots],
            "anonymous_mib_idle": round(idle, 1),
            "anonymous_mib_after_load": round(loaded, 1),
            "messages": arguments.messages,
            "load": json.loads(printed.splitlines()[-1]),
        }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
