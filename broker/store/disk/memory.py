"""How much memory this process may use."""

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
    """Bytes of RAM, or the limit of the control group if that is smaller."""
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
    """How much memory the newest part of the log may use."""

    in_memory_bytes: int
    """Bytes back from the end of the log that are read through the map: pages written so recently are in memory."""
    bulk_pace: int
    """Bytes a second from which on the log counts as written in bulk: it would fill all memory within minutes."""
    unread_bytes: int
    """Bytes back from the end of the log that stay in memory for consumers that have yet to read them."""


def log_memory(memory: int) -> LogMemory:
    """An eighth of ``memory`` is read through the map, 1 GiB at most; 40 % of ``memory`` is for unread messages.

    40 % is the default of accessMessageInMemoryMaxRatio. A pace that fills ``memory`` within two minutes is bulk.
    """
    return LogMemory(
        min(max(memory // _HOT_SHARE, 64 * MIB), 1024 * MIB),
        min(max(memory // _FULL_SECONDS, 16 * MIB), 192 * MIB),
        memory * _UNREAD_PERCENT // 100,
    )
