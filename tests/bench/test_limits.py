"""A benchmark whose limit is missed exits with 1, and its figures are stored and marked in the report all the same."""

import json
import sys
from pathlib import Path
from subprocess import CalledProcessError, CompletedProcess
from typing import Any

import pytest

import bench.__main__ as page
from bench import micro_benchmarks, timers
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
