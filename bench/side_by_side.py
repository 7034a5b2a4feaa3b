"""Compares Apache's broker with ours under the same loads, in turns within the same minutes; prints the ratios.

``python -m bench.side_by_side [--rows send64,batch] [--seconds 6] [--rounds 3] [--runs 1] [--python PATH]
[--beside PATH] [--together] [--json FILE]``. All brokers get the same properties file except for ports and directories.
While one broker is measured, the others are paused (SIGSTOP), and everything that they wrote is on the device. An idle
broker of Apache's uses a tenth of a core, with so many wake-ups that another broker loses up to a fifth of its
throughput. Needs Go, a JDK and Maven, and about 60 GB of disk for all rows.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench import mixed
from bench.processes import HERE, BrokerProcess, describe, load_tool, our_command
from bench.quiet import settle
from tests.interop.harness import partners
from tests.interop.harness.servers import APACHE_OPENINGS


class Row(NamedTuple):
    """A load of the comparison.

    ``load``: arguments of the load generator; ``{mixed}`` is the file of mixed messages. ``stores``: rows with the same
    flush mode and name run one after the other on the same stores, which are new for the first of them. ``writes``:
    loads that write the backlog that the row reads, behind the messages of the warm-up.
    """

    flush: str
    load: str
    stores: str = ""
    writes: tuple[str, ...] = ()


BACKLOG = (
    "-mode send -conns 8 -window 32 -warm 0s",
    "-mode send -conns 8 -size 65536 -topic LargeBodies -warm 0s",
)
"""The backlog of late consumers: messages of 1 KiB, which they read from the start of the log, and behind them bodies
of 64 KiB. They are written at the highest rate, within limits of time and disk space."""
BACKLOG_BYTES = (1300, 65_900)
"""Approximate bytes of such a message in the log."""

ROWS = {
    "send1": Row("ASYNC_FLUSH", "-mode send -conns 1"),
    "send64": Row("ASYNC_FLUSH", "-mode send -conns 64"),
    "pipelined": Row("ASYNC_FLUSH", "-mode send -conns 8 -window 32"),
    "small64": Row("ASYNC_FLUSH", "-mode send -conns 64 -size 128 -topic SmallBodies"),
    "pull1": Row("ASYNC_FLUSH", "-mode pull -conns 1"),
    "pull8": Row("ASYNC_FLUSH", "-mode pull -conns 8"),
    "query8": Row("ASYNC_FLUSH", "-mode query -conns 8"),
    "batch": Row("ASYNC_FLUSH", "-mode batch -conns 4"),
    "large8": Row("ASYNC_FLUSH", "-mode send -conns 8 -size 65536 -topic LargeBodies"),
    "mixed64": Row("ASYNC_FLUSH", "-mode send -conns 64 -mixed {mixed}", "mixed"),
    "mixedpipelined": Row("ASYNC_FLUSH", "-mode send -conns 8 -window 32 -mixed {mixed}", "mixed"),
    "mixedbatch": Row("ASYNC_FLUSH", "-mode batch -conns 4 -mixed {mixed}", "mixed"),
    "topics1000": Row("ASYNC_FLUSH", "-mode send -conns 64 -topics 1000 -topic Topics", "topics1000"),
    "transactions64": Row("ASYNC_FLUSH", "-mode transaction -conns 64 -topic Transactions", "transactions"),
    "transactionspipelined": Row(
        "ASYNC_FLUSH", "-mode transaction -conns 8 -window 32 -topic Transactions", "transactions"
    ),
    "mixedtransactions": Row("ASYNC_FLUSH", "-mode transaction -conns 64 -mixed {mixed}", "transactions"),
    "e2e": Row("ASYNC_FLUSH", "-mode e2e -conns 80 -topics 10 -queues 8 -topic EndToEnd -rate 2000", "e2e"),
    "catchup1": Row("ASYNC_FLUSH", "-mode pull -conns 1", "catchup1", BACKLOG),
    "catchup8": Row("ASYNC_FLUSH", "-mode pull -conns 8", "catchup8", BACKLOG),
    "sync1": Row("SYNC_FLUSH", "-mode send -conns 1"),
    "sync64": Row("SYNC_FLUSH", "-mode send -conns 64"),
    "syncpipelined": Row("SYNC_FLUSH", "-mode send -conns 8 -window 32"),
}
"""The names are used wherever these figures are quoted.

batch and large8 come after the rows that read, because they push older messages out of memory. Where new memory is
expensive, our broker evicts old parts of a log that is written in bulk. Apache's broker takes messages that lie more
than accessMessageInMemoryMaxRatio (40 %) of the memory before the end of the log as being on disk, and returns 8 of
them in a pull instead of 32; ours asks the kernel whether they are in memory. catchup1 and catchup8 measure exactly
this: the broker that writes more in the same time has a larger backlog that is no longer in memory. The figures include
the amount written.
"""

APACHE_MEMORY = ("-Xms2g", "-Xmx2g", "-XX:+UseG1GC", "-XX:MaxDirectMemorySize=4g")
FIGURES = ("msg_s", "mb_s", "p50_ms", "p99_ms", "p999_ms", "failed")
WARM_UP = "-mode send -conns 8 -window 32 -n 60000"


def apache_command(home: Path, *options: str) -> list[str]:
    """The command that starts Apache's broker, with a heap of 2 GiB and more options of the JVM."""
    jars = partners.apache_servers()
    main = "org.apache.rocketmq.broker.BrokerStartup"
    java = ["java", *APACHE_MEMORY, *options, f"-Duser.home={home}", *APACHE_OPENINGS]
    return [*java, "-cp", f"{jars}/*", main, "-c", "{conf}"]


def load(tool: Path, port: int, arguments: str, seconds: int) -> dict[str, Any]:
    """Run the load generator once; returns its figures."""
    command = [str(tool), "-addr", f"127.0.0.1:{port}", "-queues", "4", "-dur", f"{seconds}s", "-warm", "2s"]
    command += [word.format(mixed=tool.with_name(mixed.FILE)) for word in arguments.split()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 90, check=False)
    if run.returncode or not run.stdout.strip():
        raise RuntimeError(f"load on port {port} failed: {run.stderr[-500:]}")
    figures: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return figures


def in_turns(
    brokers: list[BrokerProcess],
    rounds: int,
    measure: Callable[[BrokerProcess], dict[str, Any]],
    *,
    together: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """The figures of each broker by its name, one for each round; the brokers take turns.

    ``together``: do not pause those that are not measured.
    """
    got: dict[str, list[dict[str, Any]]] = {broker.name: [] for broker in brokers}
    for _ in range(rounds):
        for broker in brokers:
            os.sync()  # else dirty pages of the previous broker would be written during this measurement
            with ExitStack() as stack:
                for other in brokers:
                    if other is not broker and not together:
                        stack.enter_context(other.paused())
                got[broker.name].append(measure(broker))
    return got


def compare(
    tool: Path, brokers: list[BrokerProcess], row: str, rounds: int, seconds: int, *, together: bool = False
) -> dict[str, Any]:
    """Measure a row: medians of each broker, and ours divided by Apache's. ``together``: do not pause the others."""

    def measure(broker: BrokerProcess) -> dict[str, Any]:
        return load(tool, broker.port, ROWS[row].load, seconds)

    got = in_turns(brokers, rounds, measure, together=together)
    result: dict[str, Any] = {
        name: {figure: statistics.median(run[figure] for run in runs) for figure in FIGURES}
        for name, runs in got.items()
    }
    apache = result["apache"]
    result["ratios"] = {
        name: {
            "throughput": round(found["msg_s"] / apache["msg_s"], 3),
            "p99": round(found["p99_ms"] / apache["p99_ms"], 3),
        }
        for name, found in result.items()
        if name != "apache"
    }
    result["raw"] = got
    for name, ratios in result["ratios"].items():
        ours = result[name]
        print(
            f"{row:14s} apache {apache['msg_s']:9.0f}/s p99 {apache['p99_ms']:8.2f} ms   "
            f"{name} {ours['msg_s']:9.0f}/s p99 {ours['p99_ms']:8.2f} ms   throughput x{ratios['throughput']:5.2f}   "
            f"p99 x{ratios['p99']:5.2f}   failed {apache['failed']:.0f}/{ours['failed']:.0f}",
            flush=True,
        )
    return result


def write_backlog(
    tool: Path, brokers: list[BrokerProcess], row: str, seconds: int, most: int
) -> dict[str, list[dict[str, Any]]]:
    """Write the backlog that a row reads, to one broker after the other; returns the figures of each broker's loads.

    Each load ends after ``seconds``. Together they write at most ``most`` bytes, a quarter of it with the first load.
    """
    got: dict[str, list[dict[str, Any]]] = {}
    shares = (most // 4, most - most // 4)
    for broker in brokers:
        with ExitStack() as stack:
            for other in brokers:
                if other is not broker:
                    stack.enter_context(other.paused())
            got[broker.name] = [
                load(tool, broker.port, f"{write} -n {max(1, share // each)}", seconds)
                for write, share, each in zip(ROWS[row].writes, shares, BACKLOG_BYTES, strict=True)
            ]
            os.sync()
        print(row, broker.name, "has", [found["messages"] for found in got[broker.name]], "messages", flush=True)
    return got


def most_bytes(root: Path, brokers: int) -> int:
    """The most bytes to write to each broker: three quarters of memory, and half of the free disk for all brokers."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory * 3 // 4, shutil.disk_usage(root).free // (2 * brokers))


def shared_stores(rows: list[str]) -> list[list[str]]:
    """The rows in the order in which they run: asynchronous flush first, and each list on new stores."""
    found: dict[tuple[str, str], list[str]] = {}
    for flush in ("ASYNC_FLUSH", "SYNC_FLUSH"):
        for row in rows:
            if ROWS[row].flush == flush:
                found.setdefault((flush, ROWS[row].stores), []).append(row)
    return list(found.values())


def run_all(
    rows: list[str], rounds: int, seconds: int, pythons: dict[str, str | None], *, together: bool = False
) -> dict[str, Any]:
    """Measure all rows. ``pythons``: the interpreter of each broker of ours, None for this one."""
    results: dict[str, Any] = {"rows": {}, "processes": {}}
    for todo in shared_stores(rows):
        settle()  # the previous stores have just been deleted
        root = Path(tempfile.mkdtemp(prefix="trimq-sidebyside-"))
        try:
            _run_on(root, todo, results, rounds, seconds, pythons, together=together)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    return results


def _run_on(
    root: Path,
    todo: list[str],
    results: dict[str, Any],
    rounds: int,
    seconds: int,
    pythons: dict[str, str | None],
    *,
    together: bool,
) -> None:
    """Measure the rows that share the stores in ``root``; adds to ``results``."""
    flush, _, stores, writes = ROWS[todo[0]]
    with ExitStack() as stack:
        tool = stack.enter_context(load_tool(root))
        commands = {"apache": apache_command(root / "apache-home")}
        commands |= {name: our_command(python) for name, python in pythons.items()}
        brokers = [
            stack.enter_context(BrokerProcess(name, command, root, flushDiskType=flush))
            for name, command in commands.items()
        ]
        for broker in brokers:  # messages for pulls and queries; this warms up the JIT compiler too
            load(tool, broker.port, WARM_UP, 60)
        for row in todo:
            written = None
            if writes:  # for as long as a row of sends with these rounds would write
                most = most_bytes(root, len(brokers))
                written = write_backlog(tool, brokers, row, rounds * (seconds + 2), most)
            results["rows"][row] = compare(tool, brokers, row, rounds, seconds, together=together)
            if written is not None:
                results["rows"][row]["written"] = written
        if not stores:
            results["processes"][flush] = {
                broker.name: {"boot_s": round(broker.boot_seconds, 2), "rss_anon_mib": round(broker.memory_mib(), 1)}
                for broker in brokers
            }
            print(flush, results["processes"][flush], flush=True)


def main(rows: Iterable[str], rounds: int = 3) -> None:
    """Run the comparison as given on the command line; by default these rows, in so many rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(rows))
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--runs", type=int, default=1, help="number of runs; the figures are those of the last one")
    parser.add_argument("--python", help="the interpreter of our broker; it needs the broker's requirements installed")
    parser.add_argument("--beside", help="another interpreter, for a second broker of ours in the same rounds")
    parser.add_argument("--together", action="store_true", help="do not pause idle brokers during a measurement")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chosen = arguments.rows.split(",")
    if set(chosen) - set(ROWS):
        parser.error(f"--rows accepts {', '.join(ROWS)}")
    if arguments.python or arguments.beside:
        os.environ["PYTHONPATH"] = str(HERE.parent)
    pythons = {"ours": arguments.python} | ({"beside": arguments.beside} if arguments.beside else {})
    runs = [
        run_all(chosen, arguments.rounds, arguments.seconds, pythons, together=arguments.together)
        for _ in range(arguments.runs)
    ]
    results = runs[-1]
    results["runs"] = [{row: found["ratios"] for row, found in run["rows"].items()} for run in runs]
    results["together"] = arguments.together
    results["pythons"] = {name: describe(python or sys.executable) for name, python in pythons.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(row for row in ROWS if ROWS[row].stores != "transactions")  # these have a part of their own
