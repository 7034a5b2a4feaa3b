"""Settings of all tests: the same random examples in each CI run, a restored log configuration, shared brokers."""

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import structlog
from _pytest.nodeid import NodeId
from hypothesis import settings

from tests.canary_hooks import (
    pytest_configure,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_runtest_teardown,
)
from tests.tls_certificates import certificates

__all__ = [
    "certificates",
    "pytest_configure",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
]

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.register_profile("nightly", max_examples=4000, deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

BROKER_FIXTURES = {"group", "mix"}
"""Fixtures that start several brokers and controllers, which takes half a minute, for the tests of a module.

Those that start a JVM of a client are not here: half of the tests with partners use one, and a single worker would have
all of these. So each worker starts such JVMs.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests that share brokers, so that one worker of pytest-xdist runs them all and starts these once.

    Slow tests load the machine or measure it, so no other test runs at the same time.
    """
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.alone)
        if not BROKER_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            callspec = getattr(item, "callspec", None)
            mix = callspec.id if callspec is not None and "mix" in callspec.params else ""
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {mix}"))
        mark = item.get_closest_marker("xdist_group")
        if mark is not None and getattr(config.option, "loadgroup", False):
            # The scheduler reads the group from the id. pytest-xdist 3.8 writes it where pytest 9.2 does not look.
            item._id = NodeId.parse(f"{item.nodeid}@{mark.args[0]}")


def pytest_collection_finish() -> None:
    """Freeze modules and tests: each collection would visit these, and a run has thousands of collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_set_up() -> Iterator[None]:
    """Restore the log configuration, which commands change when a test runs them in this process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
    logging.getLogger("trimq.client").setLevel(logging.NOTSET)
