"""``make bench``: micro-benchmarks, footprint and the comparison with Apache's broker; writes bench/REPORT.md.

python -m bench [--skip side_by_side,footprint] [--rows send64,batch] [--rounds 3] [--seconds 6] [--runs 1]
[--beside PYTHON]. Raw numbers go to bench/results/, one JSON file for each part. For a part that is skipped the report
shows the numbers of its last run. Exits with 1 if a part missed its limits; the report is written all the same.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from bench import bucket_report, failover, micro_benchmarks, replication, security_report, spark_report, tier, timers
from bench.plots import Bar, Plots, bars, lines
from bench.processes import describe
from bench.stalls import ENDS_MS
from bench.sweeps import UNITS
from trimq.protocol.native import NATIVE

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PARTS = (
    "micro_benchmarks",
    "requests",
    "sweeps",
    "stalls",
    "two_brokers",
    "footprint",
    "scrape",
    "timers",
    "tier",
    "bucket",
    "side_by_side",
    "transactions",
    "replication",
    "failover",
    "sdk",
    "security",
)

PLOTS = Plots(HERE / "plots")

FLOORS = {
    "send1": (2.0, 0.6),
    "send64": (2.7, 0.5),
    "pipelined": (2.8, 0.6),
    "small64": (2.7, 0.5),
    "large8": (2.2, 0.5),
    "batch": (2.0, 0.6),
    "pull1": (1.8, 0.7),
    "pull8": (1.4, 0.8),
    "query8": (2.5, 0.6),
    "mixed64": (3.0, 0.5),
    "mixedpipelined": (2.5, 0.6),
    "mixedbatch": (1.8, 0.6),
    "topics1000": (2.0, 0.5),
    "transactions64": (2.0, 0.6),
    "transactionspipelined": (2.0, 0.6),
    "mixedtransactions": (2.0, 0.6),
    "e2e": (0.9, 0.4),
    "catchup1": (1.5, 0.7),
    "catchup8": (1.2, 0.8),
    "sync1": (1.6, 0.7),
    "sync64": (2.4, 0.7),
    "syncpipelined": (2.4, 0.7),
}
"""The least throughput and the largest p99 latency, ours divided by Apache's, with the native extension.

e2e sends at the same rate to both brokers: only its latency matters, and messages that do not arrive are failures.
"""


def run_part(name: str, extra: list[str], software: dict[str, str] | None = None) -> bool:
    """Run one benchmark in its own process; write its numbers and a description of the machine to its file.

    Returns whether it kept its limits. Raises CalledProcessError if it failed, and has no numbers.
    """
    print(f"== {name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="trimq-bench-") as directory:
        path = Path(directory) / "numbers.json"
        done = subprocess.run([sys.executable, "-m", f"bench.{name}", "--json", str(path), *extra], check=False)
        if not path.exists():
            done.check_returncode()
        numbers = json.loads(path.read_text(encoding="utf-8"))
    found = {"machine": {**machine(), **(software or {})}, "numbers": numbers}
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return done.returncode == 0


def machine() -> dict[str, str]:
    """A description of the machine and software, on which the numbers depend."""
    cpu = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "?")
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip() or "?",
        "cpu": f"{os.cpu_count()} x {cpu}",
        "memory": f"{memory / 2**20:.1f} GiB",
        "kernel": platform.release(),
        "python": _build(describe(sys.executable)),
        "trio": version("trio"),
        "sends and batches": NATIVE.status,
        "load when it ended": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def _build(found: dict[str, Any]) -> str:
    """An interpreter as text. A distributor's build may not report how it was built (Debian's does not)."""
    marks = [mark for mark in ("profile-guided", "link-time optimised") if found[mark]]
    text = ", ".join(marks) or "its configuration reports neither profile-guided nor link-time optimisation"
    text += "" if found["global lock"] else ", without the global lock"
    text += ", with its just-in-time compiler" if found.get("just-in-time compiler") else ""
    return f"{found['version']} ({text})"


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def report() -> str:
    """The text of REPORT.md, made of the stored numbers."""
    text = ["# Benchmarks", "", "Written by `make bench`; raw numbers in `bench/results/`. Ratios are ours / Apache's."]
    for title, name, table in (
        ("Side by side with Apache RocketMQ 5.5.0", "side_by_side", _side_by_side),
        ("Transactions beside Apache RocketMQ 5.5.0", "transactions", partial(_side_by_side, plots="transactions_")),
        ("A master that waits for its slave, beside Apache RocketMQ 5.5.0", "replication", _replication),
        ("Failover by controllers, beside Apache RocketMQ 5.5.0", "failover", _failover),
        ("The SDK beside the Java client", "sdk", _sdk),
        ("TLS and access control, beside Apache RocketMQ 5.5.0", "security", security_report.security),
        ("Footprint", "footprint", _footprint),
        ("Sends with and without scrapes of a page of 10,000 topics", "scrape", _footprint),
        ("CPU time of one request, in process", "requests", _requests),
        ("How the cost of a request grows", "sweeps", _sweeps),
        ("Delay of the event loop under load", "stalls", _stalls),
        ("Timed messages", "timers", _timers),
        ("Tiered storage beside Apache RocketMQ 5.5.0", "tier", _tier),
        ("A bucket beside a tier of POSIX files", "bucket", bucket_report.bucket),
        ("Two brokers on one machine", "two_brokers", _two_brokers),
        ("Other interpreters", "interpreters", _interpreters),
        ("Micro-benchmarks", "micro_benchmarks", _micro_benchmarks),
        *spark_report.SECTIONS,
    ):
        found = _read(name)
        text += ["", f"## {title}", ""]
        if found is None:
            text.append("Not run yet.")
            continue
        text.append("; ".join(f"{key}: {value}" for key, value in found["machine"].items()) + ".")
        text += ["", *table(found["numbers"])]
    return "\n".join(text) + "\n"


def _read(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _side_by_side(numbers: dict[str, Any], plots: str = "") -> list[str]:
    """``plots``: the start of the plots' names."""
    text = [
        "Medians of all rounds. Loads with failures and floors that are not reached are marked.",
        "Brokers that are not measured are idle."
        if numbers["together"]
        else "Brokers that are not measured are paused, and everything that they wrote is on the device.",
        "",
        "| row | Apache msg/s | ours msg/s | throughput | floor | Apache p99 ms | ours p99 ms | p99 | ceiling | |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row, found in numbers["rows"].items():
        apache, ours = found["apache"], found["ours"]
        throughput, latency = found["ratios"]["ours"]["throughput"], found["ratios"]["ours"]["p99"]
        least, most = FLOORS[row]
        marks = [mark for mark, bad in (("slower", throughput < least), ("later", latency > most)) if bad]
        marks += ["failures"] if ours["failed"] or apache["failed"] else []
        text.append(
            f"| {row} | {apache['msg_s']:,.0f} | {ours['msg_s']:,.0f} | {throughput:.2f} | {least:.1f} |"
            f" {apache['p99_ms']:.2f} | {ours['p99_ms']:.2f} | {latency:.2f} | {most:.1f} | {', '.join(marks)} |"
        )
    text += ["", *_written(numbers["rows"]), *_ratios(numbers["rows"], plots), *_runs(numbers)]
    for flush, processes in numbers["processes"].items():
        for broker, found in processes.items():
            text.append(
                f"- {flush}, {broker}: start {found['boot_s']} s, anonymous memory {found['rss_anon_mib']} MiB after it"
            )
    return text


def _written(rows: dict[str, Any]) -> list[str]:
    """The backlogs that consumers have read: they differ, because a faster broker takes more in the same time."""
    text = []
    for row, found in rows.items():
        for broker, loads in found.get("written", {}).items():
            amounts = " and ".join(f"{load['messages']:,} of {load['size']:,} bytes" for load in loads)
            text.append(f"- {row}, {broker}: backlog that was written before: {amounts}")
    return [*text, ""] if text else []


def _runs(numbers: dict[str, Any]) -> list[str]:
    """A table of throughput and p99 ratios for each interpreter: a column for each run, and the medians.

    Ratios that reach their floor are bold.
    """
    text = []
    for name, python in numbers["pythons"].items():
        count = len(numbers["runs"])
        text += [f"All runs with {_build(python)}, throughput / p99; ratios that reach their floor are bold:", ""]
        text += ["| row | floor |" + "".join(f" run {number + 1} |" for number in range(count)) + " median |"]
        text += ["|---|--:|" + "--:|" * (count + 1)]
        for row in numbers["rows"]:
            least, most = FLOORS[row]
            found = [(run[row][name]["throughput"], run[row][name]["p99"]) for run in numbers["runs"]]
            throughputs, latencies = zip(*found, strict=True)
            cells = []
            for throughput, latency in [*found, (median(throughputs), median(latencies))]:
                faster = f"**{throughput:.2f}**" if throughput >= least else f"{throughput:.2f}"
                earlier = f"**{latency:.2f}**" if latency <= most else f"{latency:.2f}"
                cells.append(f" {faster} / {earlier} |")
            text.append(f"| {row} | {least} / {most} |" + "".join(cells))
        text.append("")
    return text


def _ratios(rows: dict[str, Any], plots: str) -> list[str]:
    """Plots of both ratios. The black mark of a bar is its floor, the line across all bars is Apache's broker."""
    fast = [Bar(row, found["ratios"]["ours"]["throughput"], FLOORS[row][0]) for row, found in rows.items()]
    late = [Bar(row, found["ratios"]["ours"]["p99"], FLOORS[row][1]) for row, found in rows.items()]
    return [
        *PLOTS.show(
            f"{plots}throughput",
            "throughput",
            lambda: bars("Throughput, ours / Apache's (more is better)", fast, "", 1),
        ),
        *PLOTS.show(
            f"{plots}latency",
            "p99",
            lambda: bars("p99 latency, ours / Apache's (less is better)", late, "", 1, least=True),
        ),
    ]


def _footprint(numbers: dict[str, Any]) -> list[str]:
    return [f"- {key}: {value}" for key, value in numbers.items() if not isinstance(value, dict)]


def _requests(numbers: dict[str, Any]) -> list[str]:
    rows = ["| request | path | us a request | us a message | index work afterwards, us |", "|---|---|--:|--:|--:|"]
    for name, found in numbers.items():
        costs = f"{found['us_request']:.1f} | {found['us_message']:.2f} | {found['us_index']:.2f}"
        rows.append(f"| {name} | {found.get('path', '')} | {costs} |")
    return rows


def _sdk(numbers: dict[str, Any]) -> list[str]:
    text = [
        "Against the same broker of ours, 1 KiB, medians. Sends: relative to the faster of Java's two methods.",
        "Consuming: relative to a loop that receives the same frames and reads only the next offset.",
        "",
        "| load | msg/s | ratio | floor | |",
        "|---|--:|--:|--:|---|",
    ]
    for name, rate in numbers["rates"].items():
        ratio, floor = numbers["ratios"].get(name), numbers["floors"].get(name)
        cells = ["" if value is None else f"{value:.2f}" for value in (ratio, floor)]
        mark = "slower" if floor is not None and ratio < floor else ""
        text.append(f"| {name} | {rate:,.0f} | {cells[0]} | {cells[1]} | {mark} |")
    for name, functions in numbers["profiles"].items():
        text += ["", f"The functions in which `{name}` spends its time (own time, without waiting):", ""]
        text += [f"- {share:.1%} `{function}`" for share, function in functions]
    return text


def _sweeps(numbers: dict[str, dict[str, list[tuple[float, float]]]]) -> list[str]:
    """A plot for each quantity that the cost of a request may grow with."""
    text = ["CPU time of the loop for one request, in microseconds.", ""]
    for name, rows in numbers.items():
        picture = partial(lines, f"By {UNITS[name]}", UNITS[name], "us of a request", rows)
        text += PLOTS.show(f"by_{name}", f"cost by {UNITS[name]}", picture)
    return text[:-1]


def _stalls(numbers: dict[str, Any]) -> list[str]:
    """The delays of a task that sleeps for a millisecond at a time."""
    text = [
        "Own delay: without the time in which the loop's thread was ready but the kernel ran others (schedstat).",
        "",
        "| load | messages/s | p50 ms | p99 | p99.9 | worst | own p50 | p99 | p99.9 | worst |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for load, found in numbers.items():
        places = [f"{part[place]:.2f}" for part in (found, found["own"]) for place in ("p50", "p99", "p99.9", "max")]
        text.append(f"| {load} | {found['msg_s']:,.0f} | {' | '.join(places)} |")
    text += ["", "The probes by their delay:", ""]
    names = [f"up to {end:g} ms" for end in ENDS_MS] + [f"over {ENDS_MS[-1]:g} ms"]
    for load, found in numbers.items():
        shares = [100 * count / max(1, found["looks"]) for count in found["classes"]]
        rows = [Bar(name, share) for name, share in zip(names, shares, strict=True)]
        text += PLOTS.show(f"late_{load.split()[0].rstrip(',')}_{len(load)}", load, partial(bars, load, rows, " %"))
    return text[:-1]


def _timers(numbers: dict[str, dict[str, Any]]) -> list[str]:
    """Memory, rates, and the lateness with its limit."""
    pending, delivery, late = numbers["pending"], numbers["delivery"], numbers["lateness"]
    memory = [f"{pending[f'anonymous_mib_{when}']:.1f}" for when in ("before", "stored", "pending")]
    beside = f"{late['pending']:,} that wait and {late['load_a_second']:,} sends a second"
    return [
        f"- {pending['messages']:,} timed messages",
        f"- anonymous memory: idle {memory[0]} MiB, all stored {memory[1]} MiB, all in the timer {memory[2]} MiB",
        f"- into the timer: {pending['enqueued_a_second']:,} messages a second",
        f"- out of it: {delivery['delivered_a_second']:,} overdue messages a second",
        f"- {late['messages']:,} messages that are due in {late['seconds']} s, beside {beside}, from TIMER_OUT_MS on:",
        f"  p50 {late['ms_p50']:,} ms, p99 {late['ms_p99']:,} ms (limit {late['ms_p99_limit']:,}),",
        f"  p99.9 {late['ms_p99.9']:,} ms",
        *(f"- **{text}**" for text in timers.missed(numbers)),
    ]


def _tier(numbers: dict[str, dict[str, Any]]) -> list[str]:
    """Uploads, catching up, the first cold message, and sends beside uploads."""
    rows = ["| part | figure | Apache | ours | ratio | limit |", "|---|---|--:|--:|--:|--:|"]
    for part, figure, text in (
        ("upload", "msg_s", "messages/s uploaded"),
        ("upload", "mib_s", "MiB/s uploaded"),
        ("upload", "anonymous_mib", "anonymous memory, MiB"),
        ("catchup1", "msg_s", "messages/s read by 1 consumer"),
        ("catchup8", "msg_s", "messages/s read by 8 consumers"),
        ("catchup8", "anonymous_mib", "anonymous memory, MiB"),
        ("cold", "ms_first", "ms to the first message of the first queue"),
        ("cold", "ms_median", "ms to the first message of a queue, median"),
    ):
        apache, ours = (numbers[part][name][figure] for name in ("apache", "ours"))
        limit = f"{tier.LEAST:g}" if figure == "msg_s" else ""
        rows.append(f"| {part} | {text} | {apache:,} | {ours:,} | {ours / apache:.2f} | {limit} |")
    rows += ["", "| part | messages/s | without the plug-in | with it | meanwhile uploaded | ratio | limit |"]
    rows.append("|---|---|--:|--:|--:|--:|--:|")
    for part in tier.SENDS:
        for name, text in (("apache", "Apache"), ("ours", "ours")):
            found = numbers[part][name]
            figures = [f"{found[figure]:,}" for figure in ("msg_s_without", "msg_s_with", "uploaded_msg_s")]
            limit = f"{tier.LEAST_SENDS:g}" if (part, name) == ("sends", "ours") else ""
            # A broker that uploaded nothing has nothing to compare.
            ratio = f"{found['ratio']:.2f}" if found["uploaded_msg_s"] else ""
            rows.append(f"| {part} | {text} | {' | '.join(figures)} | {ratio} | {limit} |")
    return [*rows, "", *(f"- **{text}**" for text in tier.missed(numbers))]


def _replication(numbers: dict[str, Any]) -> list[str]:
    """Rows as side by side, the lag of slaves, and memory."""
    text = [
        "SYNC_MASTER with one slave (inSyncReplicas=2); the pair that is not measured is paused.",
        "",
        "| row | Apache msg/s | ours msg/s | throughput | floor | Apache p99 ms | ours p99 ms | p99 | ceiling |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row, found in numbers["rows"].items():
        apache, ours, ratios = found["apache"], found["ours"], found["ratios"]
        least, most = replication.FLOORS.get(row, ("", ""))
        text.append(
            f"| {row} | {apache['msg_s']:,.0f} | {ours['msg_s']:,.0f} | {ratios['throughput']:.2f} | {least} |"
            f" {apache['p99_ms']:.2f} | {ours['p99_ms']:.2f} | {ratios['p99']:.2f} | {most} |"
        )
    text += ["", f"How far the log of a slave of an ASYNC_MASTER is behind at {numbers['rate']:,} messages/s:", ""]
    text += ["| pair | messages/s | KiB behind, median | worst | s until it had all |", "|---|--:|--:|--:|--:|"]
    for name, found in numbers["lag"].items():
        behind = f"{found['behind_kib']:,.0f} | {found['worst_behind_kib']:,.0f}"
        text.append(f"| {name} | {found['msg_s']:,.0f} | {behind} | {found['caught_up_s']:.2f} |")
    for flush, by_name in numbers["memory_mib"].items():
        pairs = ", ".join(f"{name} {master} and {slave}" for name, (master, slave) in by_name.items())
        text += ["", f"- {flush}: anonymous memory of master and slave in MiB: {pairs}"]
    return [*text, "", *(f"- **{text}**" for text in replication.missed(numbers))]


def _failover(numbers: dict[str, Any]) -> list[str]:
    text = [
        f"Seconds until another broker stores a message: {numbers['rounds']} rounds in turns, half of them with a",
        "master that is killed, half with one that is frozen.",
        "",
        "| row | median | worst | ceilings |",
        "|---|--:|--:|--:|",
    ]
    for row, (middle, worst) in failover.summary(numbers).items():
        name, _, fault = row.partition("_")
        limits = {
            "ours": f"{failover.MEDIAN_SECONDS:g}, {failover.WORST_SECONDS:g}",
            "sdk": f", {failover.SDK_SECONDS:g}",
        }
        who = {"ours": "ours", "apache": "Apache's", "sdk": "our SDK goes on, after that"}[name]
        text.append(f"| {fault}: {who} | {middle:.2f} | {worst:.2f} | {limits.get(name, '')} |")
    return [*text, "", *(f"- **{text}**" for text in failover.missed(numbers))]


def _two_brokers(numbers: dict[str, dict[str, float]]) -> list[str]:
    rows = ["| load | one broker, messages/s | two together | |", "|---|--:|--:|--:|"]
    for load, found in numbers.items():
        one, two = found["one"], found["two together"]
        rows.append(f"| {load} | {one:,.0f} | {two:,.0f} | {two / one:.2f} |")
    return rows


def _interpreters(numbers: dict[str, Any]) -> list[str]:
    """The same broker and loads with several interpreters, in turns."""
    text = [f"- {name}: {_build(found)}" for name, found in numbers["pythons"].items()]
    text += ["", "| load | interpreter | messages/s | p99 ms | us of CPU a request |", "|---|---|--:|--:|--:|"]
    for row, by_name in numbers["rows"].items():
        for name, found in by_name.items():
            text.append(f"| {row} | {name} | {found['msg_s']:,.0f} | {found['p99_ms']:.2f} | {found['cpu_us']:.1f} |")
    return [*text, "", *numbers.get("notes", [])]


def _micro_benchmarks(numbers: dict[str, float]) -> list[str]:
    rows = ["| function | us | calls/s | floor | |", "|---|--:|--:|--:|---|"]
    slower = micro_benchmarks.missed(numbers)
    for name, value in numbers.items():
        floor = micro_benchmarks.FLOORS.get(name)
        mark = "slower" if name in slower else ""
        rows.append(f"| {name} | {value:.2f} | {1e6 / value:,.0f} | {'' if floor is None else f'{floor:,}'} | {mark} |")
    return rows


def main() -> None:
    """Run the selected parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip", default="", help="parts not to run: " + ", ".join(PARTS))
    parser.add_argument("--rows", default="", help="those of side_by_side")
    parser.add_argument("--rounds", type=int, default=3, help="those of side_by_side and security")
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--runs", type=int, default=1, help="number of runs of the comparison with Apache's broker")
    parser.add_argument("--beside", help="another interpreter, for a second broker of ours in that comparison")
    parser.add_argument("--together", action="store_true", help="do not pause idle brokers in that comparison")
    arguments = parser.parse_args()
    skipped = set(filter(None, arguments.skip.split(",")))
    if skipped - set(PARTS):
        parser.error(f"--skip accepts {', '.join(PARTS)}")
    RESULTS.mkdir(exist_ok=True)
    comparison = ["--seconds", str(arguments.seconds), "--runs", str(arguments.runs)]
    comparison += ["--beside", arguments.beside] if arguments.beside else []
    comparison += ["--together"] if arguments.together else []
    rows = ["--rows", arguments.rows] if arguments.rows else []
    extra = {
        "side_by_side": [*comparison, "--rounds", str(arguments.rounds), *rows],
        "transactions": comparison,
        "sdk": ["--profile"],
        "security": ["--seconds", str(arguments.seconds), "--rounds", str(arguments.rounds)],
    }
    bad = [name for name in PARTS if name not in skipped and not run_part(name, extra.get(name, []))]
    (HERE / "REPORT.md").write_text(report(), encoding="utf-8")
    print(f"written: {HERE / 'REPORT.md'}")
    if bad:
        sys.exit(f"limits were missed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
