"""Files with secrets: only their owner may read them, who is the user of this process, or root."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO


@contextmanager
def private_file(path: str) -> Iterator[BinaryIO]:
    """The open file. Blocks, but not for a pipe. Raises OSError, and ValueError with what was expected."""
    with open(path, "rb", opener=_open) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("a regular file, and no pipe, directory or device")
        if found.st_mode & 0o077:
            raise ValueError(f"a file that only its owner can read (chmod 600 {path})")
        if belongs_to_another(found):
            raise ValueError(f"a file of this user or of root, not of the user {found.st_uid} (chown {path})")
        yield file


def _open(path: str, flags: int) -> int:
    """Without O_NONBLOCK a pipe would be waited for until it has a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def belongs_to_another(found: os.stat_result) -> bool:
    """Whether a file belongs to neither the user of this process nor root: its owner could read and change it."""
    return found.st_uid not in (os.geteuid(), 0)
