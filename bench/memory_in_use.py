"""Simulates the memory of a machine that has run for a while: little is free, and new pages are recycled ones.

A virtual machine may return free memory to its host (free page reporting). The first access to a page that was free is
then a fault in the host: 10.9 us for 4 KiB on one such machine, where a recycled page costs 1.2. A log that grows by
100 MB/s uses a quarter of a core for these faults alone, whatever program writes it, and they hide the cost of its
messages. So ``in_use`` allocates most of the memory, and writes a file as large as the rest.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PAGE: Final = 4096
_GIB: Final = 1 << 30
_CHUNK: Final = 4 << 20
_PROBE: Final = 256 << 20
_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE, available since Linux 5.14."""


def page_us(directory: Path) -> float:
    """Microseconds to write one new page of a file into the page cache."""
    path = directory / "probe"
    try:
        started = time.perf_counter()
        _fill(path, _PROBE)
        return (time.perf_counter() - started) * 1e6 / (_PROBE // PAGE)
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def in_use(leave_gib: float, directory: Path) -> Iterator[None]:
    """Allocate all available memory but ``leave_gib``, and fill the rest with the cached pages of a file.

    ``directory`` gets that file. Memory and file are released at the end of the block.
    """
    leave = int(leave_gib * _GIB)
    held = mmap.mmap(-1, max(PAGE, _available() - leave))
    try:
        held.madvise(_POPULATE_WRITE)
        path = directory / "old"
        try:
            _fill(path, leave)
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        held.close()


def _fill(path: Path, size: int) -> None:
    chunk = bytes(_CHUNK)
    with path.open("wb", buffering=0) as file:
        for _ in range(size // _CHUNK):
            file.write(chunk)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
