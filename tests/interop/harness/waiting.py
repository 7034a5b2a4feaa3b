"""Waiting for a condition instead of for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_INTERVAL = 0.05


def wait_until(condition: Callable[[], T | None], what: str, timeout: float = 30.0) -> T:
    """Return the first true value of a condition. Raises TimeoutError with ``what`` and the last value."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s, last seen: {value!r}")
        time.sleep(POLL_INTERVAL)
