"""What every test has: the same random examples in each CI run, a log that is set up as at the start, JVMs shared."""

import logging
import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.register_profile("nightly", max_examples=4000, deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

JVM_FIXTURES = {"java", "latest_java", "any_java", "admin"}
"""Each starts a JVM that tests share, over a module or the whole session."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a JVM are a group, which one worker of pytest-xdist runs: else each would start one of its own.

    Slow ones load the machine or measure it, so nothing runs beside them.
    """
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.alone)
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("servers") == "apache":
            item.add_marker(pytest.mark.xdist_group("apache"))
        elif not JVM_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("java"))


@pytest.fixture(autouse=True)
def _log_set_up() -> Iterator[None]:
    """Commands that a test runs in this process set up the log for themselves: the next test finds it as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
    logging.getLogger("trimq.client").setLevel(logging.NOTSET)
