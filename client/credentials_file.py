"""A file with credentials, in the form of RocketMQ's ``conf/tools.yml``.

It has the lines ``accessKey: NAME`` and ``secretKey: SECRET``, and perhaps ``securityToken: TOKEN``.
"""

import stat
from pathlib import Path
from typing import Final

from trimq.client.errors import UsageError
from trimq.remoting.client.credentials import Credentials

_MOST: Final = 64 * 1024
"""Bytes of such a file."""
_KEYS: Final = ("accessKey", "secretKey", "securityToken")


def others_can_read(path: Path) -> bool:
    """Whether users other than its owner may read a file. Raises UsageError."""
    try:
        return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError as error:
        raise _unreadable(path, error) from None


def read_credentials(path: Path) -> Credentials:
    """The credentials in a file. Blocks. Raises UsageError, whose text has nothing of the file's content."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST)
    except OSError as error:
        raise _unreadable(path, error) from None
    values = _values(path, data)
    missing = [key for key in _KEYS[:2] if not values.get(key)]
    if missing:
        raise UsageError(f"{path}: {' and '.join(missing)} missing; expected a line {missing[0]}: VALUE")
    return Credentials(values["accessKey"], values["secretKey"], values.get("securityToken"))


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"the credentials in {path} cannot be read: {error.strerror}")


def _values(path: Path, data: bytes) -> dict[str, str]:
    """The keys and texts of a file in YAML's form for a flat map; other keys do not count."""
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    values: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith(("#", "---")):
            continue
        key, colon, value = text.partition(":")
        if not colon or (value and not value[0].isspace()):
            raise UsageError(f"{path}, line {number}: expected KEY: VALUE")
        if key in _KEYS:
            values[key] = _text(path, number, value.strip())
    return values


def _text(path: Path, number: int, value: str) -> str:
    """A value without its quotes, or without the comment behind it."""
    quote = value[:1]
    if quote not in ("'", '"'):
        return value.partition(" #")[0].rstrip()
    inside, end, rest = value[1:].partition(quote)
    if not end or (rest.strip() and not rest.lstrip().startswith("#")) or "\\" in inside:
        raise UsageError(f"{path}, line {number}: expected a text in {quote}, without {quote} or \\ inside")
    return inside
