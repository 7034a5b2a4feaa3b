"""Waits until devices are idle, so that earlier writes and deletions do not slow down the next measurement.

Otherwise the gigabytes of dirty pages that one broker left would be written while the next one is measured. A file
system that reports deleted blocks to the device (ext4 with ``discard``) also continues with that for a while.
"""

import os
import time
from pathlib import Path
from typing import Final

_STILL_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.1
_WORDS: Final = slice(3, None)


def settle(limit: float = 60.0) -> None:
    """Write all dirty pages, then wait until all devices have been idle for a second.

    After ``limit`` seconds it prints a warning and returns.
    """
    os.sync()
    began = still_since = time.monotonic()
    before = _counters()
    while (now := time.monotonic()) - still_since < _STILL_SECONDS:
        if now - began > limit:
            print(f"a device is still busy after {limit:g} s: figures that depend on it may be too low", flush=True)
            return
        time.sleep(_POLL_SECONDS)
        if (counters := _counters()) != before:
            before, still_since = counters, time.monotonic()


def _counters() -> list[list[str]]:
    """The counters of each device: finished requests and those in progress."""
    lines = Path("/proc/diskstats").read_text(encoding="ascii").splitlines()
    return [line.split()[_WORDS] for line in lines]
