"""A benchmark whose limit is missed exits with 1, and its figures are stored and marked in the report all the same."""

import json
import sys
from pathlib import Path
from subprocess import CalledProcessError, CompletedProcess
from typing import Any

import pytest

import bench.__main__ as page
from bench import micro_benchmarks, replication, tier, timers
from bench.plots import Plots

SQL = "SQL92 filter, 3 terms, 8 properties"
COMMIT = {"commit": "abc"}


def timer_figures(p99: int) -> dict[str, Any]:
    late = {"messages": 10, "pending": 100, "seconds": 3, "load_a_second": 7, "ms_least": 1000}
    return {
        "pending": {
            "messages": 100,
            "sends_a_second": 1,
            "enqueued_a_second": 22_222,
            "anonymous_mib_before": 30.0,
            "anonymous_mib_stored": 31.0,
            "anonymous_mib_pending": 32.0,
        },
        "delivery": {"messages": 100, "delivered_a_second": 33_333},
        "lateness": late | {"ms_p50": 1030, "ms_p99": p99, "ms_p99.9": p99, "ms_p99_limit": 1100},
    }


def exit_code(main: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """0, or 1 for a text, which Python prints."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    try:
        main()
    except SystemExit as end:
        return 1 if isinstance(end.code, str) else int(end.code or 0)
    return 0


@pytest.mark.parametrize(("p99", "code"), [(1100, 0), (1101, 1)])
def test_timers_that_come_too_late_fail(p99: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "measure", lambda *_, **__: timer_figures(p99))
    stored = tmp_path / "timers.json"
    assert exit_code(timers.main, monkeypatch, "--json", str(stored)) == code
    assert json.loads(stored.read_text()) == timer_figures(p99)


def tier_figures(**changes: float) -> dict[str, Any]:
    rate = {"msg_s": 100, "mib_s": 7.5, "anonymous_mib": 300.0}
    sends = {"msg_s_without": 90_000, "msg_s_with": 81_000, "uploaded_msg_s": 50_000, "ratio": 0.9}
    cold = {"ms_first": 12.5, "ms_median": 3.25}
    figures: dict[str, Any] = {
        **{part: {"apache": rate, "ours": rate, "ratio": 2.0} for part in ("upload", "catchup1", "catchup8")},
        "cold": {"apache": cold, "ours": cold},
        "sends": {"apache": sends, "ours": dict(sends)},
        "sendsmost": {"apache": sends, "ours": {**sends, "ratio": 0.5}},  # without a limit
    }
    for name, value in changes.items():
        where = figures["sends"]["ours"] if name in sends else figures[name]
        where[name if name in sends else "ratio"] = value
    return figures


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"upload": 1.99}, "upload: 1.99 times Apache's, at least 2.0 are wanted"),
        ({"catchup1": 1.5}, "catchup1: 1.5 times"),
        ({"catchup8": 1.5}, "catchup8: 1.5 times"),
        ({"ratio": 0.89}, "sends while uploading: 0.89 of"),
        ({"uploaded_msg_s": 49_999}, "uploaded meanwhile: 49,999 messages/s"),
    ],
)
def test_a_tier_that_is_too_slow_fails(
    changes: dict[str, float], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tier_figures(**changes)
    monkeypatch.setattr(tier, "measure", lambda *_, **__: figures)
    monkeypatch.setattr(tier, "apache_command", lambda _: [])
    assert exit_code(tier.main, monkeypatch, "--json", str(tmp_path / "tier.json")) == int(bool(text))
    assert json.loads((tmp_path / "tier.json").read_text()) == figures
    assert [missed.startswith(text) for missed in tier.missed(figures)] == [True] * int(bool(text))
    table = "\n".join(page._tier(figures))
    assert f"- **{text}" in table if text else "**" not in table
    assert "| cold | ms to the first message of the first queue | 12.5 | 12.5 | 1.00 |" in table


def replication_figures(**changes: float) -> dict[str, Any]:
    """Figures that keep all limits, except for the given changes."""
    row = {"msg_s": 100, "p99_ms": 1.0}
    ratios = {"throughput": changes.get("throughput", 1.5), "p99": changes.get("p99", 0.7)}
    lag = {"msg_s": 47_500, "behind_kib": 8192, "worst_behind_kib": 9000, "caught_up_s": 0.1}
    return {
        "rows": {
            "repl64": {"apache": row, "ours": row, "ratios": ratios},
            "repl1": {"apache": row, "ours": row, "ratios": ratios},
        },
        "lag": {
            "apache": lag | {"msg_s": 9},
            "ours": lag | {key: value for key, value in changes.items() if key in lag},
        },
        "memory_mib": {"ASYNC_FLUSH": {"apache": [1500.0, 800.0], "ours": [43.0, 42.0]}},
        "rate": 50_000,
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"throughput": 1.49}, "repl64: 1.49 (floor 1.5), p99 0.70 (ceiling 0.7)"),
        ({"p99": 0.71}, "repl64: 1.50 (floor 1.5), p99 0.71 (ceiling 0.7)"),
        ({"behind_kib": 8193}, "50,000 messages/s: 47,500 came, 8,193 KiB behind"),
        ({"msg_s": 47_499}, "50,000 messages/s: 47,499 came, 8,192 KiB behind"),
    ],
)
def test_replication_that_is_too_slow_fails(
    changes: dict[str, float], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = replication_figures(**changes)
    monkeypatch.setattr(replication, "measure", lambda *_: figures)
    assert exit_code(replication.main, monkeypatch, "--json", str(tmp_path / "replication.json")) == int(bool(text))
    assert json.loads((tmp_path / "replication.json").read_text()) == figures
    assert replication.missed(figures) == ([text] if text else [])
    table = "\n".join(page._replication(figures))
    assert f"- **{text}" in table if text else "**" not in table
    assert "| apache | 9 | 8,192 | 9,000 | 0.10 |" in table


@pytest.mark.parametrize(("seconds", "code"), [(4.9e-6, 0), (5.1e-6, 1)])
def test_a_function_below_its_floor_fails(
    seconds: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_benchmarks, "micro_benchmarks", lambda: {SQL: (lambda: None, 1)})
    monkeypatch.setattr("timeit.repeat", lambda _call, *, number, repeat: [seconds * number] * repeat)
    stored = tmp_path / "micro.json"
    assert exit_code(micro_benchmarks.main, monkeypatch, "--json", str(stored)) == code
    assert json.loads(stored.read_text()) == {SQL: pytest.approx(seconds * 1e6)}


class Parts:
    """Replaces the processes of the parts: writes figures, and exits with a code."""

    def __init__(self, figures: dict[str, Any], code: int) -> None:
        self.figures = figures
        self.code = code
        self.ran: list[str] = []

    def run(self, command: list[str], **_options: Any) -> "CompletedProcess[str]":
        name = command[2].removeprefix("bench.")
        self.ran.append(name)
        if name in self.figures:
            Path(command[command.index("--json") + 1]).write_text(json.dumps(self.figures[name]))
        return CompletedProcess(command, self.code)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(page, "HERE", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "PLOTS", Plots(tmp_path / "plots"))
    monkeypatch.setattr(page, "machine", lambda: COMMIT)
    return tmp_path


@pytest.mark.parametrize(("p99", "code", "mark"), [(1070, 0, ""), (2222, 1, "- **TOO LATE: p99 is 2,222 ms")])
def test_the_whole_run_stores_shows_and_fails(
    p99: int, code: int, mark: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts({"timers": timer_figures(p99), "micro_benchmarks": {SQL: 4.0}}, code)
    monkeypatch.setattr("bench.__main__.subprocess.run", parts.run)
    skip = ",".join(set(page.PARTS) - set(parts.figures))
    assert exit_code(page.main, monkeypatch, "--skip", skip) == code
    assert parts.ran == ["micro_benchmarks", "timers"]
    assert json.loads((here / "results" / "timers.json").read_text()) == {
        "machine": COMMIT,
        "numbers": timer_figures(p99),
    }
    report = (here / "REPORT.md").read_text()
    section = report[report.index("## Timed messages") : report.index("## Two brokers")]
    for text in ("22,222 messages a second", "33,333 overdue", f"p99 {p99:,} ms (limit 1,100)", mark):
        assert text in section
    assert ("TOO LATE" in section) == bool(code)


def test_a_part_without_figures_leaves_the_old_ones(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = here / "results" / "timers.json"
    old.parent.mkdir()
    old.write_text("old")
    monkeypatch.setattr("bench.__main__.subprocess.run", Parts({}, 1).run)
    with pytest.raises(CalledProcessError):
        page.run_part("timers", [])
    assert old.read_text() == "old"
