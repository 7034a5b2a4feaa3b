"""Checks that the tests cover enough of the code: ``python -m tests.coverage.floor unit coverage.json``

Reads a report of ``coverage json`` and floor.toml. Each file has to reach the floor; a file that does not needs an
exception in floor.toml, with its own figures and a reason. No figure in floor.toml may be lower than in the commit
before, and the coverage of a leg (one run of tests) as a whole may not be lower than its figures in floor.toml.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILE = "tests/coverage/floor.toml"
TOLERANCE = 0.2
"""Percentage points by which two runs of the same tests may differ: the order of tasks varies."""
FEW = 2
"""Lines or branches that a file may lack below its floor: in a file of four branches, one is 25 %."""


@dataclass(frozen=True)
class Share:
    """The number of lines or branches, and how many of them were run."""

    run: int = 0
    there: int = 0

    @property
    def percent(self) -> float:
        return round(100 * self.run / self.there, 1) if self.there else 100.0

    def reaches(self, floor: float) -> bool:
        return 100 * min(self.run + FEW, self.there) >= floor * self.there

    def __add__(self, other: "Share") -> "Share":
        return Share(self.run + other.run, self.there + other.there)


@dataclass(frozen=True)
class Measured:
    """Coverage of lines and branches of a file or of a leg."""

    lines: Share = field(default_factory=Share)
    branches: Share = field(default_factory=Share)

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(self.lines + other.lines, self.branches + other.branches)

    def __str__(self) -> str:
        return f"lines {self.lines.percent:.1f} %, branches {self.branches.percent:.1f} %"


@dataclass(frozen=True)
class Floor:
    """The required coverage in percent, and for an exception the reason."""

    lines: float
    branches: float
    reason: str = ""

    def __str__(self) -> str:
        return f"lines {self.lines:.1f} %, branches {self.branches:.1f} %"

    def lower_than(self, other: "Floor") -> bool:
        return self.lines < other.lines or self.branches < other.branches


@dataclass(frozen=True)
class Floors:
    """floor.toml."""

    general: Floor
    folders: Mapping[str, tuple[str, ...]]
    legs: Mapping[str, Floor]
    exceptions: Mapping[str, Floor]

    @classmethod
    def parse(cls, text: str) -> "Floors":
        """Parse floor.toml. Raises KeyError or TypeError for a missing or unknown key."""
        table = tomllib.loads(text)
        exceptions: dict[str, Floor] = {}
        for entry in table["exception"]:
            path = entry.pop("file")
            if path in exceptions:
                raise ValueError(f"{path} has two exceptions")
            exceptions[path] = Floor(**entry)
        legs = {name: dict(leg) for name, leg in table["leg"].items()}
        folders = {name: tuple(leg.pop("folders")) for name, leg in legs.items()}
        return cls(Floor(**table["floor"]), folders, {name: Floor(**leg) for name, leg in legs.items()}, exceptions)

    def of(self, path: str) -> Floor:
        return self.exceptions.get(path, self.general)


def files_of(report: Mapping[str, Any], folders: Iterable[str]) -> dict[str, Measured]:
    """The report's files in these folders."""
    found: dict[str, Measured] = {}
    for path, entry in report["files"].items():
        if path.split("/", 1)[0] in folders:
            summary = entry["summary"]
            found[path] = Measured(
                Share(summary["covered_lines"], summary["num_statements"]),
                Share(summary["covered_branches"], summary["num_branches"]),
            )
    return found


def too_low(floors: Floors, leg: str, files: Mapping[str, Measured]) -> list[str]:
    """One line for each file or leg below its floor, and for each exception that is no longer needed."""
    if not files:
        return [f"{leg}: nothing was measured"]
    whole = sum(files.values(), Measured())
    problems = []
    recorded = floors.legs[leg]
    if whole.lines.percent < recorded.lines - TOLERANCE or whole.branches.percent < recorded.branches - TOLERANCE:
        problems.append(f"{leg}: {whole}; it was {recorded}")
    for path, measured in sorted(files.items()):
        floor = floors.of(path)
        if not (measured.lines.reaches(floor.lines) and measured.branches.reaches(floor.branches)):
            problems.append(f"{path}: {measured}; the floor is {floor}")
    for path, floor in floors.exceptions.items():
        if not floor.reason:
            problems.append(f"{path}: an exception needs a reason")
        if path.split("/", 1)[0] in floors.folders[leg] and path not in files:
            problems.append(f"{path}: an exception for a file that does not exist")
        elif path in files and not floor.lower_than(floors.general):
            problems.append(f"{path}: an exception that asks for more than the floor is none")
    return problems


def lowered(before: Floors, now: Floors, old_files: Iterable[str]) -> list[str]:
    """One line for each figure that was lowered. A new file may have an exception from the start."""
    problems = []
    if now.general.lower_than(before.general):
        problems.append(f"the floor is {now.general}; it was {before.general}")
    for leg, floor in before.legs.items():
        if leg not in now.legs or now.legs[leg].lower_than(floor):
            problems.append(f"{leg}: {now.legs.get(leg)}; it was {floor}")
    known = set(old_files)
    for path, floor in now.exceptions.items():
        if path in known and floor.lower_than(before.of(path)):
            problems.append(f"{path}: {floor}; it was {before.of(path)}")
    return problems


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """Git's output; None if the command fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], check=False, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def commits_before(root: Path = ROOT) -> list[str]:
    """The commits with which the floor is compared: the last one, and the base of this change."""
    base = os.environ.get("CI_BASE") or (git("merge-base", "HEAD", "origin/main", root=root) or "").strip()
    if not base or base == (git("rev-parse", "HEAD", root=root) or "").strip():
        base = "HEAD^"
    return ["HEAD", base]


def lowered_since(commits: Iterable[str], now: Floors, root: Path = ROOT) -> list[str]:
    """Compare with the floor.toml of these commits; commits without the file are skipped."""
    problems: list[str] = []
    for commit in commits:
        text = git("show", f"{commit}:{FILE}", root=root)
        if text is None:
            print(f"no {FILE} in {commit}: nothing to compare with")
        else:
            files = (git("ls-tree", "-r", "--name-only", commit, root=root) or "").splitlines()
            problems += [f"{problem} ({commit})" for problem in lowered(Floors.parse(text), now, files)]
    return problems


def main() -> int:
    """Return 1 if any figure is too low."""
    parser = argparse.ArgumentParser(description="Compares a coverage report with floor.toml.")
    parser.add_argument("leg", choices=["unit", "spark"])
    parser.add_argument("report", type=Path, help="made by coverage json")
    given = parser.parse_args()
    floors = Floors.parse((ROOT / FILE).read_text(encoding="utf-8"))
    files = files_of(json.loads(given.report.read_text(encoding="utf-8")), floors.folders[given.leg])
    problems = too_low(floors, given.leg, files) + lowered_since(commits_before(), floors)
    for problem in problems:
        print(problem)
    print(f"coverage of {given.leg}, {len(files)} files: {sum(files.values(), Measured())}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
