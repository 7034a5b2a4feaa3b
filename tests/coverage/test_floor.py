"""The floor check detects coverage below the floor, and a floor that was lowered."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.coverage import floor
from tests.coverage.floor import FILE, ROOT, Floor, Floors, Measured, Share, files_of, lowered, lowered_since, too_low

TEXT = """
floor = {lines = 95, branches = 90}
[leg.unit]
folders = ["broker", "client"]
lines = 97.0
branches = 92.0
[[exception]]
file = "client/old.py"
lines = 50
branches = 40
reason = "only Apache's broker does this"
"""
NOW = Floors.parse(TEXT)


def measured(lines: tuple[int, int], branches: tuple[int, int] = (0, 0)) -> Measured:
    return Measured(Share(*lines), Share(*branches))


GOOD = {"broker/a.py": measured((990, 1000), (950, 1000)), "client/old.py": measured((5, 10), (4, 10))}


def test_what_is_good() -> None:
    assert too_low(NOW, "unit", GOOD) == []


@pytest.mark.parametrize(
    ("path", "share", "expected"),
    [
        ("broker/a.py", measured((940, 1000), (950, 1000)), ["unit: lines 93.6 %", "broker/a.py: lines 94.0 %"]),
        (
            "broker/a.py",
            measured((990, 1000), (890, 1000)),
            ["unit: lines 98.5 %, branches 88.5 %", "broker/a.py: lines 99.0 %"],
        ),
        ("broker/b.py", measured((7, 10)), ["broker/b.py: lines 70.0 %"]),
        ("client/old.py", measured((2, 10), (4, 10)), ["client/old.py: lines 20.0 %"]),
    ],
)
def test_what_is_too_low(path: str, share: Measured, expected: list[str]) -> None:
    problems = too_low(NOW, "unit", {**GOOD, path: share})
    assert len(problems) == len(expected)
    assert all(problem.startswith(begin) for problem, begin in zip(problems, expected, strict=True)), problems


def test_a_small_file_may_lack_two() -> None:
    assert too_low(NOW, "unit", {**GOOD, "broker/b.py": measured((8, 10), (0, 2))}) == []


def test_the_whole_may_not_fall_although_each_file_reaches_its_floor() -> None:
    files = {**GOOD, "broker/a.py": measured((955, 1000), (950, 1000))}
    assert [problem[:5] for problem in too_low(NOW, "unit", files)] == ["unit:"]


def test_exceptions_that_are_none() -> None:
    more = '\n[[exception]]\nfile = "broker/a.py"\nlines = 95\nbranches = 90\nreason = "none"\n'
    gone = '\n[[exception]]\nfile = "broker/gone.py"\nlines = 1\nbranches = 1\nreason = "gone"\n'
    nothing = '\n[[exception]]\nfile = "broker/a.py"\nlines = 1\nbranches = 1\n'
    assert "asks for more" in too_low(Floors.parse(TEXT + more), "unit", GOOD)[0]
    assert "does not exist" in too_low(Floors.parse(TEXT + gone), "unit", GOOD)[0]
    assert "needs a reason" in too_low(Floors.parse(TEXT + nothing), "unit", GOOD)[0]
    with pytest.raises(ValueError, match="has two exceptions"):
        Floors.parse(TEXT + more + more)


def test_nothing_measured_is_no_success() -> None:
    assert too_low(NOW, "unit", {}) == ["unit: nothing was measured"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lines = 95,", "lines = 94,"),
        ("branches = 90}", "branches = 89.9}"),
        ("lines = 97.0", "lines = 96.9"),
        ("branches = 92.0", "branches = 91.0"),
        ("lines = 50", "lines = 49"),
        ("leg.unit", "leg.others"),
        ("client/old.py", "client/known.py"),
    ],
)
def test_a_figure_that_was_lowered(old: str, new: str) -> None:
    assert old in TEXT
    files = ["client/old.py", "client/known.py"]
    assert len(lowered(NOW, Floors.parse(TEXT.replace(old, new)), files)) == 1
    assert lowered(NOW, NOW, files) == []


def test_a_new_file_may_come_with_an_exception() -> None:
    new = Floors.parse(TEXT.replace("client/old.py", "client/new.py"))
    assert lowered(NOW, new, ["client/old.py"]) == []


def test_commits_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=tmp_path, check=True)

    monkeypatch.delenv("CI_BASE", raising=False)
    git("init", "-q", "-b", "main")
    (tmp_path / FILE).parent.mkdir(parents=True)
    for lines in ("97.0", "96.0", "96.0"):
        (tmp_path / FILE).write_text(TEXT.replace("97.0", lines))
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", lines)
    assert floor.commits_before(tmp_path) == ["HEAD", "HEAD^"]
    now = Floors.parse((tmp_path / FILE).read_text())
    assert lowered_since(["HEAD", "HEAD^"], now, tmp_path) == []
    assert lowered_since(["HEAD^^"], now, tmp_path) == [
        "unit: lines 96.0 %, branches 92.0 %; it was lines 97.0 %, branches 92.0 % (HEAD^^)"
    ]
    assert lowered_since(["HEAD^^^^"], now, tmp_path) == []  # a commit that does not exist
    monkeypatch.setenv("CI_BASE", "HEAD^^")
    assert floor.commits_before(tmp_path) == ["HEAD", "HEAD^^"]


def test_a_report_is_read() -> None:
    summary = {"covered_lines": 1, "num_statements": 2, "covered_branches": 3, "num_branches": 4}
    report = {"files": {"broker/a.py": {"summary": summary}, "pipeline/a.py": {"summary": summary}}}
    assert files_of(json.loads(json.dumps(report)), ["broker"]) == {"broker/a.py": measured((1, 2), (3, 4))}


def test_the_floors_of_the_project() -> None:
    floors = Floors.parse((ROOT / FILE).read_text(encoding="utf-8"))
    assert floors.general == Floor(95, 90)
    folders = {folder for leg in floors.folders.values() for folder in leg}
    assert folders == {"protocol", "remoting", "namesrv", "controller", "client", "broker", "pipeline", "trimq"}
    for path, exception in floors.exceptions.items():
        assert (ROOT / path).exists(), path
        assert len(exception.reason) > 20, path
        assert exception.lower_than(floors.general), path
