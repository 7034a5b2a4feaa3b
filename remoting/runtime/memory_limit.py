"""How much memory this process may take: the machine's, or what its control group allows."""

import os
from pathlib import Path
from typing import Final

_CGROUP: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_MEBIBYTE: Final = 1024 * 1024


def memory_allowed(limits: tuple[Path, ...] = _CGROUP) -> int:
    """Bytes: the smaller one of the machine's memory and the control group's limit, where there is one."""
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
    """Bytes that unfinished frames may take by default: a sixteenth of the memory, from 64 MiB to 1 GiB."""
    memory = memory_allowed() if allowed is None else allowed
    return min(max(memory // 16, 64 * _MEBIBYTE), 1024 * _MEBIBYTE)
