"""How much memory this process may count on."""

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

MIB: Final = 1 << 20
_HOT_SHARE: Final = 8
_UNREAD_PERCENT: Final = 40
_FALLBACK: Final = 2 << 30
_FULL_SECONDS: Final = 120


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


class LogMemory(NamedTuple):
    """What the newest part of the log may take of the memory."""

    in_memory_bytes: int
    """How far back from its end it is read through the map: pages written so lately are still in memory."""
    bulk_pace: int
    """Bytes a second from which on it is written in bulk: it would fill all memory within minutes."""
    unread_bytes: int
    """How far back from its end it is kept in memory for consumers that have yet to read it."""


def log_memory(memory: int) -> LogMemory:
    """An eighth of ``memory`` is taken to be in memory, 1 GiB at most. What fills all of it within two minutes is bulk.

    40 % of it is for what is to be read, which is what accessMessageInMemoryMaxRatio assumes if nobody sets it.
    """
    return LogMemory(
        min(max(memory // _HOT_SHARE, 64 * MIB), 1024 * MIB),
        min(max(memory // _FULL_SECONDS, 16 * MIB), 192 * MIB),
        memory * _UNREAD_PERCENT // 100,
    )
