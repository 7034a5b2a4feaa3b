"""How much memory this process may count on."""

import contextlib
import os
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
_HOT_SHARE: Final = 8
_FALLBACK: Final = 2 << 30


def memory_limit() -> int:
    """Bytes of RAM, or of the control group's limit where that is smaller."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits, default=_FALLBACK)


def hot_bytes(memory: int) -> int:
    """How far back from its end the log is read through the map: pages written so lately are still in memory."""
    return min(max(memory // _HOT_SHARE, 64 * MIB), 1024 * MIB)
