"""Settings of glibc's malloc; nothing with another C library. See docs/decisions/027-memory-of-malloc.md."""

import ctypes
import os
from typing import Any, Final

_M_ARENA_MAX: Final = -8


def _glibc() -> Any:
    """The C library if it is glibc, else None."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def use_one_arena() -> None:
    """Let all threads share one arena, before there are any: each arena keeps what it has once needed.

    MALLOC_ARENA_MAX in the environment has precedence.
    """
    library = _glibc()
    if library is not None and "MALLOC_ARENA_MAX" not in os.environ:
        library.mallopt(_M_ARENA_MAX, 1)


def give_back_memory() -> None:
    """Give free memory back to the system: for a thread.

    An allocation of another thread waits meanwhile, about 0.1 ms for each MiB that is given back.
    """
    library = _glibc()
    if library is not None:
        library.malloc_trim(ctypes.c_size_t(0))
