"""A quiet device: what was written or deleted before does not slow down what is measured next.

Gigabytes that one broker leaves to the kernel go to the device while the next one is measured, and a file system that
tells the device of what it has deleted (ext4 with ``discard``) goes on with that for a while.
"""

import os
import time
from pathlib import Path
from typing import Final

_STILL_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.1
_WORDS: Final = slice(3, None)


def settle(limit: float = 60.0) -> None:
    """Write all that waits, then wait until no device has had anything to do for a second.

    After ``limit`` seconds it says that one still has, and gives up.
    """
    os.sync()
    began = still_since = time.monotonic()
    before = _counters()
    while (now := time.monotonic()) - still_since < _STILL_SECONDS:
        if now - began > limit:
            print(f"a device is still busy after {limit:g} s: figures that depend on it are too low", flush=True)
            return
        time.sleep(_LOOK_SECONDS)
        if (counters := _counters()) != before:
            before, still_since = counters, time.monotonic()


def _counters() -> list[list[str]]:
    """What each device has done, and what it is doing."""
    lines = Path("/proc/diskstats").read_text(encoding="ascii").splitlines()
    return [line.split()[_WORDS] for line in lines]
