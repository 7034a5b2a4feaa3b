"""Files with secrets: only their owner may read them, who is the user of this process, or root.

Of those that are replaced as a whole (auth.json), the directory has the same owner, and only he may change it: who may
write there may put another file in place, or take this one away.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

_OTHERS_READ_OR_WRITE: Final = 0o077
_OTHERS_WRITE: Final = 0o022


@contextmanager
def private_file(path: str) -> Iterator[BinaryIO]:
    """The open file. Blocks, but not for a pipe. Raises OSError, and ValueError with what was expected."""
    with open(path, "rb", opener=_open) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("a regular file, and no pipe, directory or device")
        if found.st_mode & _OTHERS_READ_OR_WRITE:
            raise ValueError(f"a file that only its owner can read (chmod 600 {path})")
        if belongs_to_another(found.st_uid):
            raise ValueError(f"a file of this user or of root, not of the user {found.st_uid} (chown {path})")
        yield file


def _open(path: str, flags: int) -> int:
    """Without O_NONBLOCK a pipe would be waited for until it has a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def belongs_to_another(owner: int) -> bool:
    """Whether the user of this number is neither that of this process nor root: he may read and change what he owns."""
    return owner not in (os.geteuid(), 0)


def problem_of_file(path: str, permissions: int, owner: int) -> str:
    """Why others may read or change a file, and what to do; empty if they may not. ``owner``: the user's number."""
    if permissions & _OTHERS_READ_OR_WRITE:
        return f"others may read it (mode {permissions:04o}): chmod 600 {path}"
    if belongs_to_another(owner):
        return f"it belongs to another user (uid {owner}), who may change it: chown {path}"
    return ""


def problem_of_directory(path: str, permissions: int, owner: int) -> str:
    """Why others may replace the files in a directory, and what to do; empty if they may not."""
    if permissions & _OTHERS_WRITE:
        return f"others may replace it (mode {permissions:04o} of its directory): chmod go-w {path}"
    if belongs_to_another(owner):
        return f"its directory belongs to another user (uid {owner}), who may replace it: chown {path}"
    return ""
