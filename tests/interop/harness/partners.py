"""Finds, fetches and builds the official clients, once and outside the source tree."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent / "partners"
BUILD_TIMEOUT = 1200
VERSITYGW = "v1.8.0"

_HOW_TO_GET = {
    "make": "GNU make (for example: apt-get install make)",
    "java": "a JDK, 17 or later (for example: apt-get install openjdk-17-jdk-headless)",
    "javac": "a JDK, 17 or later (for example: apt-get install openjdk-17-jdk-headless)",
    "mvn": "Maven (for example: apt-get install maven)",
    "node": "Node.js, 18 or later (for example: apt-get install nodejs npm)",
    "npm": "npm (for example: apt-get install npm)",
    "go": "Go, 1.22 or later (https://go.dev/dl)",
}


class BuildError(Exception):
    """A partner could not be fetched or built; the text contains the build's output."""


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def tool(name: str, *, demanded: bool = True) -> str:
    """The path of a tool. If it is missing the test is skipped; in CI, where partners are required, it fails."""
    found = shutil.which(name)
    if found is not None:
        return found
    message = f"{name} is not installed; this test needs {_HOW_TO_GET[name]}"
    if demanded and in_ci():
        pytest.fail(message)
    pytest.skip(message)


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trimq-partners"


def _built(name: str, sources: list[Path], salt: str, build: Callable[[Path], None]) -> Path:
    """The directory built from exactly these sources, from the cache if possible.

    A build writes to a temporary directory, which is renamed when it is complete, so that concurrent test runs do not
    disturb each other.
    """
    digest = hashlib.sha256(salt.encode())
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    ready = cache() / f"{name}-{digest.hexdigest()[:16]}"
    if ready.exists():
        return ready
    fresh = ready.with_name(f"{ready.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        build(fresh)
        try:
            fresh.rename(ready)
        except OSError:
            if not ready.exists():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return ready


def _run(argv: list[str], directory: Path) -> None:
    done = subprocess.run(
        argv,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT,
        check=False,
    )
    if done.returncode != 0:
        raise BuildError(f"{' '.join(argv)}: status {done.returncode}\n{done.stdout[-6000:]}")


def java_driver(version: str) -> str:
    """The class path of the Java driver with one version of the client."""
    tool("java")
    mvn = tool("mvn")
    pom = HERE / "java" / "pom.xml"

    def build(into: Path) -> None:
        options = [f"-Drocketmq.version={version}", f"-Dpartners.out={into}"]
        _run([mvn, "-q", "-B", "-f", str(pom), *options, "package"], into)

    sources = [pom, *(HERE / "java").rglob("*.java")]
    ready = _built(f"java-{version}", sources, version, build)
    return f"{ready}/classes:{ready}/lib/*"


def filter_referee(version: str = "5.5.0") -> str:
    """The class path of the referee, which is Apache's SQL92 filter."""
    tool("java")
    mvn = tool("mvn")
    pom = HERE / "filter" / "pom.xml"

    def build(into: Path) -> None:
        options = [f"-Drocketmq.version={version}", f"-Dpartners.out={into}"]
        _run([mvn, "-q", "-B", "-f", str(pom), *options, "package"], into)

    ready = _built(f"filter-{version}", [pom, *(HERE / "filter").rglob("*.java")], version, build)
    return f"{ready}/classes:{ready}/lib/*"


def apache_servers(version: str = "5.5.0") -> Path:
    """The directory with the jars of Apache's broker and name server."""
    tool("java")
    mvn = tool("mvn")
    pom = HERE / "apache" / "pom.xml"

    def build(into: Path) -> None:
        options = [f"-Drocketmq.version={version}", f"-DoutputDirectory={into}"]
        _run([mvn, "-q", "-B", "-f", str(pom), *options, "dependency:copy-dependencies"], into)

    return _built(f"apache-{version}", [pom], version, build)


def delta_jars() -> list[Path]:
    """The jars of Delta Lake; Spark contains all their other dependencies."""
    mvn = tool("mvn")
    pom = HERE / "delta" / "pom.xml"

    def build(into: Path) -> None:
        options = [f"-DoutputDirectory={into}", "-DincludeGroupIds=io.delta"]
        _run([mvn, "-q", "-B", "-f", str(pom), *options, "dependency:copy-dependencies"], into)

    return sorted(_built("delta", [pom], "", build).glob("*.jar"))


def node_driver() -> Path:
    """The directory with the Node driver and its packages."""
    tool("node")
    npm = tool("npm")
    sources = [HERE / "node" / name for name in ("package.json", "package-lock.json", "driver.js")]

    def build(into: Path) -> None:
        for source in sources:
            shutil.copy(source, into)
        _run([npm, "ci", "--no-audit", "--no-fund"], into)

    return _built("node", sources, "", build)


def go_driver() -> Path:
    """The Go driver's executable."""
    go = tool("go", demanded=False)
    directory = HERE / "go"
    sources = [directory / name for name in ("go.mod", "go.sum", "main.go")]

    def build(into: Path) -> None:
        _run([go, "build", "-o", str(into / "partner"), "."], directory)

    return _built("go", sources, "", build) / "partner"


def versitygw() -> Path:
    """The executable of versitygw, an S3 server that keeps objects as files."""
    go = tool("go")

    def build(into: Path) -> None:
        # auto: Go fetches a newer Go if this one is too old for the server.
        settings = [f"GOBIN={into}", "GOTOOLCHAIN=auto", "GOFLAGS=-buildvcs=false"]
        _run(["env", *settings, go, "install", f"github.com/versity/versitygw/cmd/versitygw@{VERSITYGW}"], into)

    return _built(f"versitygw-{VERSITYGW}", [], VERSITYGW, build) / "versitygw"
