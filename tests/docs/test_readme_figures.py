"""README's figures are those of the latest benchmarks, each with its date and machine."""

import json
from typing import Any

from tests.docs.examples import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
LOADS = {
    "send1": "sends a second, 1 connection",
    "pipelined": "sends a second, 8 connections, 32 in flight on each",
    "large8": "sends a second, 8 connections, bodies of 64 KiB",
    "sync64": "sends a second, 64 connections, SYNC_FLUSH",
    "pull8": "pulled messages a second, 8 connections",
}
"""Rows of the comparison with Apache's broker, in README's words."""


def measured(part: str) -> tuple[Any, str]:
    """The numbers of a benchmark, with the date and the machine of the measurement."""
    found = json.loads((ROOT / "bench" / "results" / f"{part}.json").read_text(encoding="utf-8"))
    machine = found["machine"]
    return found["numbers"], f"{machine['when'][:10]}, {machine['cpu']}, {machine['memory']}"


def table() -> list[str]:
    numbers, _ = measured("side_by_side")
    apache, ours = (numbers["processes"]["ASYNC_FLUSH"][broker] for broker in ("apache", "ours"))
    start = [found["boot_s"] for found in (apache, ours)]
    memory = [found["rss_anon_mib"] for found in (apache, ours)]
    lines = [
        "| | Apache RocketMQ 5.5.0 | TriMQ | ratio |",
        "|---|--:|--:|--:|",
        f"| start, seconds | {start[0]:.2f} | {start[1]:.2f} | {start[1] / start[0]:.2f} |",
        f"| memory after the loads, MiB | {memory[0]:,.0f} | {memory[1]:,.0f} | {memory[1] / memory[0]:.2f} |",
    ]
    for row, words in LOADS.items():
        found = numbers["rows"][row]
        lines.append(
            f"| {words} | {found['apache']['msg_s']:,.0f} | {found['ours']['msg_s']:,.0f} |"
            f" {found['ratios']['ours']['throughput']:.2f} |"
        )
    return lines


def others() -> list[str]:
    """Figures outside the table, among them those in which TriMQ is behind."""
    sdk, sdk_taken = measured("sdk")
    brokers, brokers_taken = measured("two_brokers")
    sends = brokers["sends, pipelined"]
    java = max(sdk["rates"][name] for name in ("java sync64", "java async64"))
    ratio, with_linger = (f"{sdk['ratios'][name]:.2f}" for name in ("send64", "linger64"))
    return [
        f"({measured('side_by_side')[1]})",
        f"sends {sdk['rates']['send64']:,.0f} messages a second, the Java client {java:,.0f}: {ratio} times its rate,",
        f"or {with_linger} times with `linger` ({sdk_taken})",
        f"two on two cores send {sends['two together'] / sends['one']:.2f} times as much as one ({brokers_taken})",
    ]


def test_the_table_has_the_last_figures() -> None:
    assert "\n".join(table()) in README, "README.md, Measured, should have:\n" + "\n".join(table())


def test_the_sentences_have_the_last_figures() -> None:
    text = " ".join(README.split())
    for figure in others():
        assert figure in text, f"README.md, Measured, should have: {figure}"


def test_what_readme_calls_behind_is_behind() -> None:
    # if this fails after a new measurement, rewrite that sentence of README
    assert measured("sdk")[0]["ratios"]["send64"] < 1
