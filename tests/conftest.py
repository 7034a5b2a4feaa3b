"""Settings of all tests: the same random examples in each CI run, a restored log configuration, shared JVMs."""

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
"""Fixtures that start a JVM shared by the tests of a module or of the whole session."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests that share a JVM, so that one worker of pytest-xdist runs them all and starts a single JVM.

    Slow tests load the machine or measure it, so no other test runs at the same time.
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
    """Restore the log configuration, which commands change when a test runs them in this process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
    logging.getLogger("trimq.client").setLevel(logging.NOTSET)
