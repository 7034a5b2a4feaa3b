"""The memory available to this process: the machine's, or the limit of its control group."""

import os
from pathlib import Path
from typing import Final

_CGROUP: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_MEBIBYTE: Final = 1024 * 1024


def memory_allowed(limits: tuple[Path, ...] = _CGROUP) -> int:
    """The machine's memory or the control group's limit, whichever is smaller, in bytes."""
    allowed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            allowed = min(allowed, int(text))
    return allowed


def unfinished_allowed(allowed: int | None = None) -> int:
    """Default limit of unfinished frames in bytes: a sixteenth of the memory, at least 64 MiB and at most 1 GiB."""
    memory = memory_allowed() if allowed is None else allowed
    return min(max(memory // 16, 64 * _MEBIBYTE), 1024 * _MEBIBYTE)
