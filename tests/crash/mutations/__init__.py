"""Mutations: small faults in the code, stored as diffs, that the tests have to find.

Each ``AREA/NN-SLUG.diff`` is a mistake that a maintainer could make. Its header names what breaks and which tests
have to fail:

    # What breaks: a failed sync is answered like one that succeeded.
    # Tests: tests/store/test_flush.py::test_a_failed_sync_acknowledges_nothing_and_is_not_repeated
    # Environment: spark-newest      (where the tests need PySpark)
    # Survives: reason               (where no test can detect it)

``python -m tests.crash.mutations`` applies each to a copy of the tree and runs its tests there. Mutations in the area
``native`` break the native extension or its callers: their tests run with an extension built from the copy.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]

_HEADER: Final = re.compile(r"# (What breaks|Tests|Environment|Survives): *(.*)")
_NOT_COPIED: Final = shutil.ignore_patterns(
    ".git", ".venv*", "data", "target", "node_modules", "wheels", "__pycache__", ".*_cache", ".hypothesis"
)
_PASSED, _FAILED = 0, 1  # pytest's exit codes
_EXTENSION: Final = Path("build") / "extension"
"""Folder of a tree's own extension; processes that use it have this folder in PYTHONPATH."""


class Outcome(Enum):
    """Result of running a mutation's tests."""

    KILLED = "killed"
    TIMED_OUT = "killed: the tests did not end"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN: it does not apply, or the tests could not be run"

    @property
    def is_killed(self) -> bool:
        """True if the tests detected the mutation."""
        return self in {Outcome.KILLED, Outcome.TIMED_OUT}


class MutationError(Exception):
    """A diff lacks a required header line, or tests fail without any mutation."""


@dataclass(frozen=True)
class Mutation:
    """One diff. ``tests`` are pytest targets; ``survives`` is the reason why no test can fail, or empty."""

    path: Path
    what: str
    tests: tuple[str, ...]
    environment: str = ""
    survives: str = ""

    @classmethod
    def read(cls, path: Path) -> "Mutation":
        """Read a mutation from its file. Raises MutationError if a required header line is missing."""
        head = path.read_text(encoding="utf-8").partition("\n--- ")[0]
        found = {match[1]: match[2].strip() for match in map(_HEADER.fullmatch, head.splitlines()) if match}
        for key in ("What breaks", "Tests"):
            if not found.get(key):
                raise MutationError(f"{path}: no line '# {key}: ...' before the diff")
        return cls(
            path,
            found["What breaks"],
            tuple(found["Tests"].split()),
            found.get("Environment", ""),
            found.get("Survives", ""),
        )

    @property
    def area(self) -> str:
        """The part of the project that the mutation breaks."""
        return self.path.parent.name

    @property
    def is_native(self) -> bool:
        """True if its tests need the native extension; all other tests run without it."""
        return self.area == "native"

    @property
    def name(self) -> str:
        """AREA/NN-SLUG."""
        return f"{self.area}/{self.path.stem}"


def all_mutations(directory: Path = HERE) -> list[Mutation]:
    """All mutations in a directory, sorted by name."""
    return [Mutation.read(path) for path in sorted(directory.glob("*/*.diff"))]


def applies(mutation: Mutation, root: Path = ROOT) -> str:
    """The reason why a diff does not apply to the tree at ``root``; empty if it applies."""
    return _git_apply(mutation, root, "--check")


def _git_apply(mutation: Mutation, root: Path, *options: str) -> str:
    done = subprocess.run(
        ["git", "apply", "-p1", *options, str(mutation.path)],
        cwd=root,
        # A copied tree is not a repository; without the ceiling git would search the folders above it for one.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip() if done.returncode else ""


def interpreter(environment: str, root: Path = ROOT) -> str:
    """Path of the Python that a mutation's tests need. Raises MutationError if that environment does not exist."""
    if not environment:
        return sys.executable
    python = root / f".venv-{environment}" / "bin" / "python"
    if not python.exists():
        raise MutationError(f"{python} is missing: make .venv-{environment}/.stamp")
    return str(python)


def marks_for(environment: str) -> str:
    """The marker expression that selects a mutation's tests.

    Tests with official clients take too long and are excluded. In a Spark environment every test is a partner test.
    """
    return "not oldest_pyspark" if environment else "not partners"


@contextmanager
def copied_tree(place: Path, root: Path = ROOT) -> Iterator[Path]:
    """Copy the tree below ``place``, without environments and caches; the copy is deleted at the end."""
    copy = place / "tree"
    shutil.copytree(root, copy, ignore=_NOT_COPIED, symlinks=True)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def build_extension(tree: Path) -> str:
    """Build the native extension of a tree for the tests in it; return the build's errors, empty if it succeeded."""
    folder = tree / "build" / "wheel"
    # A mutation run builds the extension dozens of times: build time matters here, the extension's speed does not.
    quickly = {"LTO": "off", "OPT_LEVEL": "1", "CODEGEN_UNITS": "16", "INCREMENTAL": "true"}
    done = subprocess.run(
        [tree / "native" / "make-wheel", folder, "--no-build-isolation"],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            **{f"CARGO_PROFILE_RELEASE_{key}": value for key, value in quickly.items()},
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        log = folder / "build.log"
        return done.stderr + (log.read_text(encoding="utf-8") if log.exists() else "")
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(tree / _EXTENSION, ignore_errors=True)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tree / _EXTENSION)
    return ""


def environment_of(tree: Path, *, native: bool) -> dict[str, str]:
    """Environment variables for a tree's processes: they use the extension built from this tree, or none at all."""
    path = os.pathsep.join(map(str, [tree, tree / _EXTENSION] if native else [tree]))
    return {**os.environ, "PYTHONPATH": path, "TRIMQ_NATIVE": "on" if native else "off"}


def has_extension(tree: Path) -> bool:
    """Whether processes of a tree use the extension built from it.

    Without an extension the tests of a native mutation would be skipped, and every such mutation would survive.
    """
    code = "from trimq.protocol.native import NATIVE; print(NATIVE.is_on and NATIVE.extension.__file__)"
    environment = environment_of(tree, native=True)
    command = [sys.executable, "-B", "-c", code]
    found = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return found.stdout.startswith(str(tree / _EXTENSION))


def can_build_extension(root: Path = ROOT) -> bool:
    """Whether a recent enough Rust toolchain is installed; prints a line if not."""
    return subprocess.run([root / "native" / "make-wheel", "--look"], check=False).returncode == 0


def run_tests(
    python: str, tree: Path, tests: Sequence[str], timeout: float, marks: str, *, native: bool = False
) -> tuple[int | None, str]:
    """Run pytest; return its exit code (None: it did not end within ``timeout`` seconds) and its output."""
    command = [python, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment_of(tree, native=native),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tests may have started processes of their own
        return None, process.communicate()[0]
    return process.returncode, printed


def try_mutation(mutation: Mutation, tree: Path, timeout: float = 600.0) -> tuple[Outcome, str]:
    """Apply a mutation to ``tree``, run its tests, revert it; return the outcome and the last command's output."""
    why = _git_apply(mutation, tree)
    if why:
        return Outcome.BROKEN, why
    try:
        if mutation.is_native and (why := build_extension(tree)):
            return Outcome.BROKEN, why
        code, printed = run_tests(
            interpreter(mutation.environment),
            tree,
            mutation.tests,
            timeout,
            marks_for(mutation.environment),
            native=mutation.is_native,
        )
    finally:
        _git_apply(mutation, tree, "--reverse")
    if code is None:
        return Outcome.TIMED_OUT, printed
    return {_PASSED: Outcome.SURVIVED, _FAILED: Outcome.KILLED}.get(code, Outcome.BROKEN), printed
