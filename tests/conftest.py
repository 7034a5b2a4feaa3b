"""What every test has: random examples that are the same in each CI run, and a log that is set up as at the start."""

import logging
import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def _log_set_up() -> Iterator[None]:
    """Commands that a test runs in this process set up the log for themselves: the next test finds it as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
    logging.getLogger("trimq.client").setLevel(logging.NOTSET)
