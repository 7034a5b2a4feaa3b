"""Is enough of the code run by the tests? ``python -m tests.coverage.floor unit coverage.json``

Reads a report of ``coverage json`` and floor.toml. Each file has to reach the floor; one that does not is an exception
there, with its own figures and the reason. No figure in floor.toml may be lower than it was in the commit before, and
what is measured of a leg as a whole may not be lower than what floor.toml says.
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
"""Percentage points by which two runs of the same tests differ: tasks do not meet in the same order each time."""
FEW = 2
"""Lines or branches that a file may lack beyond its floor: in a file of four branches, one is 25 %."""


@dataclass(frozen=True)
class Share:
    """How many there are, and how many of them were run."""

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
    """Lines and branches of a file, or of a leg."""

    lines: Share = field(default_factory=Share)
    branches: Share = field(default_factory=Share)

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(self.lines + other.lines, self.branches + other.branches)

    def __str__(self) -> str:
        return f"lines {self.lines.percent:.1f} %, branches {self.branches.percent:.1f} %"


@dataclass(frozen=True)
class Floor:
    """What has to be reached, in percent, and why it is less than elsewhere."""

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
        """Raises KeyError or TypeError for a key that is missing or strange."""
        table = tomllib.loads(text)
        exceptions: dict[str, Floor] = {}
        for entry in table["exception"]:
            path = entry.pop("file")
            if path in exceptions:
                raise ValueError(f"{path} is there twice")
            exceptions[path] = Floor(**entry)
        legs = {name: dict(leg) for name, leg in table["leg"].items()}
        folders = {name: tuple(leg.pop("folders")) for name, leg in legs.items()}
        return cls(Floor(**table["floor"]), folders, {name: Floor(**leg) for name, leg in legs.items()}, exceptions)

    def of(self, path: str) -> Floor:
        return self.exceptions.get(path, self.general)


def files_of(report: Mapping[str, Any], folders: Iterable[str]) -> dict[str, Measured]:
    """The files of a report that are in these folders."""
    found: dict[str, Measured] = {}
    for path, entry in report["files"].items():
        if path.split("/", 1)[0] in folders:
            told = entry["summary"]
            found[path] = Measured(
                Share(told["covered_lines"], told["num_statements"]),
                Share(told["covered_branches"], told["num_branches"]),
            )
    return found


def too_low(floors: Floors, leg: str, files: Mapping[str, Measured]) -> list[str]:
    """What does not reach its floor, a line each; and exceptions that are none any more."""
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
            problems.append(f"{path}: an exception for a file that is not there")
        elif path in files and not floor.lower_than(floors.general):
            problems.append(f"{path}: an exception that asks for more than the floor is none")
    return problems


def lowered(before: Floors, now: Floors, old_files: Iterable[str]) -> list[str]:
    """Figures that are lower than they were, a line each. A file that is new may come with an exception."""
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
    """What git says; None where it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], check=False, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def commits_before(root: Path = ROOT) -> list[str]:
    """What the floor is compared with: the last commit, and what this change is based on."""
    base = os.environ.get("CI_BASE") or (git("merge-base", "HEAD", "origin/main", root=root) or "").strip()
    if not base or base == (git("rev-parse", "HEAD", root=root) or "").strip():
        base = "HEAD^"
    return ["HEAD", base]


def lowered_since(commits: Iterable[str], now: Floors, root: Path = ROOT) -> list[str]:
    """Compares with floor.toml of these commits, where it is there."""
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
    """1 where something is too low."""
    parser = argparse.ArgumentParser(description="Compares a report of coverage with floor.toml.")
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
