"""A master that waits for its slave (SYNC_MASTER), beside Apache's pair in one run; and how far slaves are behind.

``python -m bench.replication [--rows repl64,replpipelined] [--seconds 6] [--rounds 3] [--json FILE]``. While a pair is
measured, the other one is paused (SIGSTOP). Master, slave and load generator of a pair share the cores. For the lag,
messages are sent to an ASYNC_MASTER at a fixed rate, and the ends of both logs are read every 50 ms. Needs Go, a JDK
and Maven.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.processes import BrokerProcess, free_port, load_tool, our_command, port_open
from bench.quiet import settle
from bench.side_by_side import FIGURES, WARM_UP, apache_command, load
from tests.interop.harness.wire import connected
from trimq.protocol.codes import RequestCode

ROWS = {
    "repl1": ("ASYNC_FLUSH", "-mode send -conns 1"),
    "repl64": ("ASYNC_FLUSH", "-mode send -conns 64"),
    "replpipelined": ("ASYNC_FLUSH", "-mode send -conns 8 -window 32"),
    "replmixed64": ("ASYNC_FLUSH", "-mode send -conns 64 -mixed {mixed}"),
    "replsync64": ("SYNC_FLUSH", "-mode send -conns 64"),
    "replsyncpipelined": ("SYNC_FLUSH", "-mode send -conns 8 -window 32"),
}
"""A flush mode, of the master and of the slave, and a load."""
FLOORS = {"repl64": (1.5, 0.7), "replpipelined": (1.5, 0.7)}
"""The least throughput and the largest p99 latency, ours divided by Apache's."""
MOST_BEHIND_KIB = 8192
"""The most that our slave may lack, as the median while messages come at RATE."""
LAG_LOAD = "-mode send -conns 8 -window 32 -pace {rate}"
RATE = 50_000
LOOK_SECONDS = 0.05
# A pair that is paused must not take its connection for a dead one.
COMMON = {"haHousekeepingInterval": 3_600_000, "inSyncReplicas": 2, "slaveTimeout": 60_000}
ONLY: dict[str, dict[str, object]] = {
    "apache": {"brokerIP2": "127.0.0.1"},
    "ours": {"embeddedNamesrvEnable": "false", "haAllowedAddresses": "127.0.0.1"},
}


class Pair(NamedTuple):
    """A master and its slave."""

    name: str
    master: BrokerProcess
    slave: BrokerProcess

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop both for the time of the block."""
        with self.master.paused(), self.slave.paused():
            yield

    def end(self, broker: BrokerProcess) -> int:
        """The end of a broker's log; -1 if it does not say it: Apache's broker does not while its log is empty."""
        with connected("127.0.0.1", broker.port) as wire:
            reply = wire.call(RequestCode.GET_BROKER_RUNTIME_INFO, {})
        if reply.code:
            return -1
        return int(json.loads(reply.body)["table"]["commitLogMaxOffset"])


@contextmanager
def running(name: str, root: Path, namesrv: int, role: str, flush: str) -> Iterator[Pair]:
    """Start a pair, and wait until the slave has a message of the master."""
    command = apache_command(root / "apache-home") if name == "apache" else our_command()
    common: dict[str, object] = {
        **COMMON,
        **ONLY[name],
        "flushDiskType": flush,
        "brokerName": name,
        "namesrvAddr": f"127.0.0.1:{namesrv}",
    }
    with ExitStack() as stack:
        master = stack.enter_context(BrokerProcess(f"{name}-master", command, root, **common, brokerRole=role))
        # The slave connects to where the name server says.
        more = {"brokerRole": "SLAVE", "brokerId": 1}
        slave = stack.enter_context(BrokerProcess(f"{name}-slave", command, root, **common, **more))
        pair = Pair(name, master, slave)
        until(lambda: sends(pair), f"the slave of {name} has connected")
        yield pair


def sends(pair: Pair) -> bool:
    """Whether a message is stored, and the slave has it."""
    with connected("127.0.0.1", pair.master.port) as wire:
        reply = wire.call(
            RequestCode.SEND_MESSAGE,
            {
                "producerGroup": "load",
                "topic": "BenchmarkTest",
                "defaultTopic": "TBW102",
                "defaultTopicQueueNums": "8",
                "queueId": "0",
                "sysFlag": "0",
                "bornTimestamp": "0",
                "flag": "0",
            },
            b"hello",
        )
    return reply.code == 0 and 0 < pair.end(pair.master) == pair.end(pair.slave)


def until(condition: Any, what: str, seconds: float = 90) -> None:
    """Wait for a condition of another process."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"not in {seconds:g} s: {what}")
        time.sleep(0.2)


@contextmanager
def name_server(root: Path) -> Iterator[int]:
    """A name server of ours for both pairs; its port."""
    port = free_port()
    conf = root / "namesrv.conf"
    conf.write_text(f"listenPort={port}\nbindAddress=127.0.0.1\n", encoding="utf-8")
    command = [str(Path(sys.executable).parent / "mqnamesrv"), "-c", str(conf)]
    with (root / "namesrv.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=root)
    try:
        until(lambda: port_open(port), "the name server is up", 20)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def compare(tool: Path, pairs: list[Pair], row: str, rounds: int, seconds: int) -> dict[str, Any]:
    """Measure a row: medians of each pair, and ours divided by Apache's."""
    got: dict[str, list[dict[str, Any]]] = {pair.name: [] for pair in pairs}
    for _ in range(rounds):
        for pair in pairs:
            os.sync()
            with ExitStack() as stack:
                for other in pairs:
                    if other is not pair:
                        stack.enter_context(other.paused())
                until(lambda pair=pair: sends(pair), f"{pair.name} serves")
                got[pair.name].append(load(tool, pair.master.port, ROWS[row][1], seconds))
    result: dict[str, Any] = {
        name: {figure: statistics.median(run[figure] for run in runs) for figure in FIGURES}
        for name, runs in got.items()
    }
    apache, ours = result["apache"], result["ours"]
    result["ratios"] = {
        "throughput": round(ours["msg_s"] / apache["msg_s"], 3),
        "p99": round(ours["p99_ms"] / apache["p99_ms"], 3),
    }
    result["raw"] = got
    print(
        f"{row:18s} apache {apache['msg_s']:9.0f}/s p99 {apache['p99_ms']:8.2f} ms   ours {ours['msg_s']:9.0f}/s "
        f"p99 {ours['p99_ms']:8.2f} ms   throughput x{result['ratios']['throughput']:5.2f}   "
        f"p99 x{result['ratios']['p99']:5.2f}   failed {apache['failed']:.0f}/{ours['failed']:.0f}",
        flush=True,
    )
    return result


def lag(tool: Path, pair: Pair, rate: int, seconds: int) -> dict[str, float]:
    """Send at a rate; bytes that the slave's log lacks (median, worst), and the seconds until it has all at the end."""
    command = [
        str(tool),
        "-addr",
        f"127.0.0.1:{pair.master.port}",
        "-queues",
        "4",
        "-dur",
        f"{seconds}s",
        "-warm",
        "2s",
    ]
    run = subprocess.Popen([*command, *LAG_LOAD.format(rate=rate).split()], stdout=subprocess.PIPE, text=True)
    behind: list[int] = []
    try:
        began = time.monotonic()
        while run.poll() is None:
            slave = pair.end(pair.slave)
            if time.monotonic() - began > 1:
                behind.append(max(0, pair.end(pair.master) - slave))
            time.sleep(LOOK_SECONDS)
        ended = time.monotonic()
        until(lambda: pair.end(pair.slave) == pair.end(pair.master), "the slave has it all")
        caught_up = time.monotonic() - ended
        figures = json.loads((run.stdout.read() if run.stdout else "").splitlines()[-1])
    finally:
        run.kill()
        run.wait()
    found = {
        "msg_s": figures["msg_s"],
        "p99_ms": figures["p99_ms"],
        "behind_kib": round(statistics.median(behind) / 1024, 1),
        "worst_behind_kib": round(max(behind) / 1024, 1),
        "caught_up_s": round(caught_up, 2),
    }
    print(f"lag at {rate}/s  {pair.name:6s} {found}", flush=True)
    return found


def measure(rows: list[str], rounds: int, seconds: int, rate: int) -> dict[str, Any]:
    """Measure the rows, and then the lag."""
    results: dict[str, Any] = {"rows": {}, "lag": {}, "memory_mib": {}, "rate": rate}
    for flush in ("ASYNC_FLUSH", "SYNC_FLUSH"):
        todo = [row for row in rows if ROWS[row][0] == flush]
        if not todo:
            continue
        with _pairs("SYNC_MASTER", flush) as (tool, pairs):
            for pair in pairs:
                load(tool, pair.master.port, WARM_UP, 60)
            for row in todo:
                results["rows"][row] = compare(tool, pairs, row, rounds, seconds)
            results["memory_mib"][flush] = {
                pair.name: [round(pair.master.memory_mib(), 1), round(pair.slave.memory_mib(), 1)] for pair in pairs
            }
            print(flush, "MiB of master and slave:", results["memory_mib"][flush], flush=True)
    if rate:
        with _pairs("ASYNC_MASTER", "ASYNC_FLUSH") as (tool, pairs):
            for pair in pairs:
                load(tool, pair.master.port, WARM_UP, 60)
            for pair, other in ((pairs[0], pairs[1]), (pairs[1], pairs[0])):
                with other.paused():
                    results["lag"][pair.name] = lag(tool, pair, rate, seconds)
    return results


def missed(numbers: dict[str, Any]) -> list[str]:
    """The limits that were missed, as texts."""
    texts = []
    for row, (least, most) in FLOORS.items():
        ratios = numbers["rows"].get(row, {}).get("ratios")
        if ratios and (ratios["throughput"] < least or ratios["p99"] > most):
            texts.append(f"{row}: {ratios['throughput']:.2f} (floor {least}), p99 {ratios['p99']:.2f} (ceiling {most})")
    ours = numbers["lag"].get("ours")
    if ours and (ours["behind_kib"] > MOST_BEHIND_KIB or ours["msg_s"] < 0.95 * numbers["rate"]):
        texts.append(f"{numbers['rate']:,} messages/s: {ours['msg_s']:,.0f} came, {ours['behind_kib']:,.0f} KiB behind")
    return texts


@contextmanager
def _pairs(role: str, flush: str) -> Iterator[tuple[Path, list[Pair]]]:
    settle()
    with tempfile.TemporaryDirectory(prefix="trimq-replication-") as directory, ExitStack() as stack:
        root = Path(directory)
        tool = stack.enter_context(load_tool(root))
        port = stack.enter_context(name_server(root))
        yield tool, [stack.enter_context(running(name, root, port, role, flush)) for name in ("apache", "ours")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=int, default=RATE, help="messages a second while the lag is measured; 0: not")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for row in arguments.rows.split(",") if row]
    if set(rows) - set(ROWS):
        parser.error(f"--rows accepts {', '.join(ROWS)}")
    results = measure(rows, arguments.rounds, arguments.seconds, arguments.rate)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if texts := missed(results):
        sys.exit("; ".join(texts))


if __name__ == "__main__":
    main()
