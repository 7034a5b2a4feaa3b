"""The hooks of pytest that search for secrets after each test; ``tests/conftest.py`` imports them."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import LogCapture

from tests import canary

_shared: list[Path] = []
"""Directories that were made for the tests of a module, or of a session."""


def pytest_configure() -> None:
    """What tests read of their output is not in their reports, and captured events are not in the output."""
    _look_at_results(pytest.CaptureFixture, "readouterr")
    look = LogCapture.__call__

    def capture(self: LogCapture, logger: Any, name: str, event: Any) -> Any:
        canary.look_at("the log", repr(event))
        return look(self, logger, name, event)

    if not hasattr(look, "is_wrapped"):
        capture.is_wrapped = True  # type: ignore[attr-defined]
        LogCapture.__call__ = capture  # type: ignore[assignment,method-assign]
    make = pytest.TempPathFactory.mktemp

    def mktemp(self: pytest.TempPathFactory, *args: Any, **more: Any) -> Path:
        made = make(self, *args, **more)
        _shared.append(made)
        return made

    if not hasattr(make, "is_wrapped"):
        mktemp.is_wrapped = True  # type: ignore[attr-defined]
        pytest.TempPathFactory.mktemp = mktemp  # type: ignore[method-assign]


def _look_at_results(kind: Any, name: str) -> None:
    method = getattr(kind, name)
    if hasattr(method, "is_wrapped"):
        return

    def call(self: Any) -> Any:
        result = method(self)
        canary.look_at("the output", f"{result.out}{result.err}")
        return result

    call.is_wrapped = True  # type: ignore[attr-defined]
    setattr(kind, name, call)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Forget what others have noted."""
    canary.take_found()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Note whether the directories of the module are complete."""
    item.stash[_IS_LAST] = nextitem is None or nextitem.path != item.path
    return (yield)


_IS_LAST = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test fails if a secret has appeared in its output, in replies, or in files."""
    report = yield
    if call.when == "teardown":
        own = (getattr(item, "funcargs", None) or {}).get("tmp_path")
        if own in _shared:
            _shared.remove(own)
        if report.passed and canary.is_used_by(item):
            for name, text in report.sections:
                canary.look_at(name, text)
            directories = ([own] if own is not None else []) + (_shared if item.stash.get(_IS_LAST, False) else [])
            found = canary.take_found() + [f"{path} has a secret of the tests in it" for path in _files(directories)]
            if found:
                report.outcome = "failed"
                report.longrepr = "\n".join(found)
    return report


def _files(directories: list[Path]) -> list[Path]:
    """The files with secrets below these directories, each once: the shared ones are searched with each module."""
    found = [path for directory in directories for path in canary.files_with_canary(directory)]
    for path in found:
        canary.permit(path)
    return found
