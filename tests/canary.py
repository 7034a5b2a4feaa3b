"""A canary in the secrets of tests: after each test that has some, its log, replies and files are searched for it.

Passwords of users and of keys, and credentials of servers, begin with CANARY, or contain it. It may appear nowhere, in
clear, as base64 or as hex digits. Files that a test writes to give a secret to a server are permitted by whom writes
them (``permit``), as are those that a server writes in clear because the test says so. ``tests/conftest.py`` has the
hooks. Passwords that tests enter wrongly on purpose, such as "guess", have no canary.
"""

import base64
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

CANARY: Final = "canary-"

_CLEAR: Final = CANARY.encode()
_PIECE: Final = 4 << 20
_IMPORT: Final = re.compile(r"^\s*(?:from|import) (tests[\w.]*)(?: import (?:\(([^()]*)\)|([^\n(]*)))?", re.MULTILINE)


def _base64_forms(clear: bytes) -> Iterator[bytes]:
    """The characters that are the same whatever stands before and behind it."""
    for before in range(3):
        text = base64.b64encode(bytes(before) + clear)
        yield text[-(-before * 8 // 6) : (before + len(clear)) * 8 // 6]


NEEDLES: Final = (_CLEAR, *_base64_forms(_CLEAR), _CLEAR.hex().encode(), _CLEAR.hex().upper().encode())

_found: list[str] = []
_permitted: list[str] = []
_replies_permitted = False


def has_canary(data: bytes | bytearray | memoryview) -> bool:
    """Whether a secret is in there."""
    whole = bytes(data)
    return any(needle in whole for needle in NEEDLES)


def look_at(what: str, data: bytes | bytearray | memoryview | str) -> None:
    """Note for the test that runs if a secret is in ``data``."""
    if has_canary(data.encode("utf-8", "replace") if isinstance(data, str) else data):
        _found.append(f"{what} has a secret of the tests in it: {data!r:.500}")


def look_at_reply(data: bytes | bytearray | memoryview) -> None:
    """The same for what a server has sent."""
    if not _replies_permitted:
        look_at("a reply", data)


@contextmanager
def permitted_replies() -> Iterator[None]:
    """Replies may have secrets in them: the test is about those that do."""
    global _replies_permitted  # noqa: PLW0603 - one test runs at a time
    _replies_permitted = True
    try:
        yield
    finally:
        _replies_permitted = False


def permit(path: Path | str) -> None:
    """Files with this path, which may have stars, contain a secret on purpose."""
    _permitted.append(str(path))


def take_found() -> list[str]:
    """What was noted since the last call, which it forgets."""
    found = list(_found)
    _found.clear()
    return found


def files_with_canary(directory: Path) -> list[Path]:
    """The files below ``directory`` with a secret, without those that are permitted."""
    found = []
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            if is_regular(path) and _in_file(path) and not is_permitted(path):
                found.append(path)
    return found


def is_permitted(path: Path) -> bool:
    """Whether a secret may be in it."""
    return any(fnmatchcase(str(path), pattern) for pattern in _permitted)


def is_regular(path: Path) -> bool:
    """Whether there is something to read: no pipe, and no link to elsewhere."""
    return path.is_file() and not path.is_symlink()


def _in_file(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            return any(has_canary(piece) for piece in _pieces(file.fileno()))
    except OSError:  # it is gone, or not to be read by this user
        return False


def _pieces(fd: int) -> Iterator[bytes]:
    """The content, without the holes of a sparse file; each piece with the end of the one before."""
    longest = max(map(len, NEEDLES)) - 1
    end = os.fstat(fd).st_size
    at, before = 0, b""
    while at < end:
        begin = _data_from(fd, at, end)
        if begin > at:
            at, before = begin, b""
        piece = os.pread(fd, _PIECE, at)
        if not piece:
            return
        yield before + piece
        at, before = at + len(piece), piece[-longest:]


def _data_from(fd: int, at: int, end: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError:  # only a hole follows
        return end


# which tests have secrets


def is_used_by(item: pytest.Item) -> bool:
    """Whether a test may have secrets: its module or that of a fixture names the canary, or imports one that does."""
    info: Any = getattr(item, "_fixtureinfo", None)
    fixtures = info.name2fixturedefs if info is not None else {}
    modules = {getattr(item, "module", None) and item.module.__name__}  # type: ignore[attr-defined] # of functions
    modules |= {definition.func.__module__ for found in fixtures.values() for definition in found}
    return any(name is not None and name.startswith("tests") and _speaks(name) for name in modules)


def _speaks(module: str) -> bool:
    return any(_names_it(name) for name in _closure(module))


@cache
def _closure(module: str) -> frozenset[str]:
    """The module and the modules of tests that it imports, directly or not."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen and name in sys.modules and name != "tests.conftest":
            seen.add(name)
            waiting += _imports(name)
    return frozenset(seen)


@cache
def _imports(module: str) -> list[str]:
    found = []
    for name, several, few in _IMPORT.findall(_source(module)):
        found.append(name)
        found += [f"{name}.{part.split(' as ')[0].strip()}" for part in (several or few).split(",")]
    return found


@cache
def _names_it(module: str) -> bool:
    return module != __name__ and (_CLEAR.decode() in _source(module) or f"{__name__}.CANARY" in _imports(module))


@cache
def _source(module: str) -> str:
    file = getattr(sys.modules[module], "__file__", None)
    return Path(file).read_text(encoding="utf-8") if file is not None and file.endswith(".py") else ""
