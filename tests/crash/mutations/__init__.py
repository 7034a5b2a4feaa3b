"""Mutations: small faults of the code, kept as diffs, that the tests have to find.

Each ``AREA/NN-SLUG.diff`` is what a maintainer could do by mistake. It starts with lines that say what breaks, and
which tests have to fail:

    # What breaks: a failed sync is answered as if it had been done.
    # Tests: tests/store/test_flush.py::test_a_failed_sync_acknowledges_nothing_and_is_not_repeated
    # Environment: spark-newest      (where the tests need PySpark)
    # Survives: reason               (where no test can see it)

``python -m tests.crash.mutations`` applies each to a copy of the tree and runs its tests there. Those of the area
``native`` break the native extension, or what calls it: their tests run with an extension that is built of the copy.
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
"""Where the extension of a tree is, for processes that have this in PYTHONPATH."""


class Outcome(Enum):
    """What the tests made of a mutation."""

    KILLED = "killed"
    TIMED_OUT = "killed: the tests did not end"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN: it does not apply, or the tests could not be run"

    @property
    def is_killed(self) -> bool:
        """True where the tests have noticed it."""
        return self in {Outcome.KILLED, Outcome.TIMED_OUT}


class MutationError(Exception):
    """A diff without the lines that it needs, or tests that fail without any mutation."""


@dataclass(frozen=True)
class Mutation:
    """One diff. ``tests`` are pytest's targets; ``survives`` is the reason where no test can fail."""

    path: Path
    what: str
    tests: tuple[str, ...]
    environment: str = ""
    survives: str = ""

    @classmethod
    def read(cls, path: Path) -> "Mutation":
        """The mutation in a file. Raises MutationError where a line of its head is missing."""
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
        """The part of the project that it breaks."""
        return self.path.parent.name

    @property
    def is_native(self) -> bool:
        """Its tests need the native extension; all others run without."""
        return self.area == "native"

    @property
    def name(self) -> str:
        """AREA/NN-SLUG."""
        return f"{self.area}/{self.path.stem}"


def all_mutations(directory: Path = HERE) -> list[Mutation]:
    """Those of a directory, in the order of their names."""
    return [Mutation.read(path) for path in sorted(directory.glob("*/*.diff"))]


def applies(mutation: Mutation, root: Path = ROOT) -> str:
    """Why a diff does not apply to the tree at ``root``; empty where it does."""
    return _git_apply(mutation, root, "--check")


def _git_apply(mutation: Mutation, root: Path, *options: str) -> str:
    done = subprocess.run(
        ["git", "apply", "-p1", *options, str(mutation.path)],
        cwd=root,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)},  # a copy is in no repository
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip() if done.returncode else ""


def interpreter(environment: str, root: Path = ROOT) -> str:
    """The Python that a mutation's tests need. Raises MutationError where that environment was not made."""
    if not environment:
        return sys.executable
    python = root / f".venv-{environment}" / "bin" / "python"
    if not python.exists():
        raise MutationError(f"{python} is missing: make .venv-{environment}/.stamp")
    return str(python)


def marks_for(environment: str) -> str:
    """Which tests count: those with official clients take too long; in an environment of Spark all are its partners."""
    return "not oldest_pyspark" if environment else "not partners"


@contextmanager
def copied_tree(place: Path, root: Path = ROOT) -> Iterator[Path]:
    """A copy of the tree below ``place``, without environments and caches."""
    copy = place / "tree"
    shutil.copytree(root, copy, ignore=_NOT_COPIED, symlinks=True)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def build_extension(tree: Path) -> str:
    """Build the native extension of a tree, for tests in it. What was said where that fails; empty where it is done."""
    folder = tree / "build" / "wheel"
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
    """Environment of a tree's processes: they use the extension that was built from it, or none at all."""
    path = os.pathsep.join(map(str, [tree, tree / _EXTENSION] if native else [tree]))
    return {**os.environ, "PYTHONPATH": path, "TRIMQ_NATIVE": "on" if native else "off"}


def has_extension(tree: Path) -> bool:
    """Whether processes of a tree use the extension that was built of it. Without one, its tests would be skipped."""
    code = "from trimq.protocol.native import NATIVE; print(NATIVE.is_on and NATIVE.extension.__file__)"
    environment = environment_of(tree, native=True)
    command = [sys.executable, "-B", "-c", code]
    found = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return found.stdout.startswith(str(tree / _EXTENSION))


def can_build_extension(root: Path = ROOT) -> bool:
    """Whether a Rust is there that is new enough; if not, a line says so."""
    return subprocess.run([root / "native" / "make-wheel", "--look"], check=False).returncode == 0


def run_tests(
    python: str, tree: Path, tests: Sequence[str], timeout: float, marks: str, *, native: bool = False
) -> tuple[int | None, str]:
    """pytest's exit code (None: it did not end in ``timeout`` seconds) and what it printed."""
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
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    return process.returncode, printed


def try_mutation(mutation: Mutation, tree: Path, timeout: float = 600.0) -> tuple[Outcome, str]:
    """Apply a mutation to ``tree``, run its tests, and take it back. The text is what was printed last."""
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
