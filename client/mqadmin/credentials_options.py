"""Options of mqadmin for credentials, before the command: ``mqadmin --credentials FILE listUser``.

There is no option for a secret key: other users of the machine see command lines. As in RocketMQ, the file
``$ROCKETMQ_HOME/conf/tools.yml`` is used if it exists, with the keys accessKey and secretKey.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import click

from trimq.remoting.client.credentials import Credentials

_META: Final = "trimq.credentials"
_SECRET: Final = "TRIMQ_SECRET_KEY"  # noqa: S105 - the name of a variable
_MOST: Final = 64 * 1024
"""Bytes of a file of credentials."""
_KEYS: Final = ("accessKey", "secretKey", "securityToken")

_Function: TypeAlias = Callable[..., Any]

_OPTIONS: Final = (
    click.option(
        "--credentials",
        metavar="FILE",
        envvar="TRIMQ_CREDENTIALS",
        help="File with the lines accessKey: NAME and secretKey: SECRET. Default: $ROCKETMQ_HOME/conf/tools.yml.",
    ),
    click.option(
        "--access-key",
        metavar="NAME",
        envvar="TRIMQ_ACCESS_KEY",
        help=f"The user's name, if its secret key is in the variable {_SECRET}.",
    ),
)


def credentials_options(function: _Function) -> _Function:
    """Adds the options; ``function`` passes their values to ``keep``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def keep(context: click.Context, options: dict[str, Any]) -> None:
    """Remembers the options for the command, and removes them from ``options``. Files are read when it runs."""
    context.meta[_META] = options.pop("credentials"), options.pop("access_key")


def kept() -> Credentials | None:
    """The credentials of the running command; None if none are given. Raises click.UsageError."""
    file, access_key = click.get_current_context().meta.get(_META, (None, None))
    if access_key:
        secret = os.environ.get(_SECRET)
        if not secret:
            raise click.UsageError(f"--access-key {access_key}: its secret key must be in the variable {_SECRET}")
        return Credentials(access_key, secret)
    if file:
        return read_credentials(Path(file))
    home = os.environ.get("ROCKETMQ_HOME")
    tools = Path(home) / "conf" / "tools.yml" if home else None
    return read_credentials(tools) if tools is not None and tools.is_file() else None


def read_credentials(path: Path) -> Credentials:
    """The credentials in a file; warns if other users can read it. Raises click.UsageError, without its content."""
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & (stat.S_IRGRP | stat.S_IROTH):
                click.echo(f"Warning: other users can read the secret key in {path}: chmod 600 {path}", err=True)
            data = file.read(_MOST)
    except OSError as error:
        raise click.UsageError(f"the credentials in {path} cannot be read: {error.strerror}") from None
    values = _values(path, data)
    missing = [key for key in _KEYS[:2] if not values.get(key)]
    if missing:
        raise click.UsageError(f"{path}: {' and '.join(missing)} missing; expected a line {missing[0]}: VALUE")
    return Credentials(values["accessKey"], values["secretKey"], values.get("securityToken"))


def _values(path: Path, data: bytes) -> dict[str, str]:
    """The keys and texts of a file in YAML's form for a flat map; other keys do not count."""
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise click.UsageError(f"{path} is not UTF-8 text") from None
    values: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith(("#", "---")):
            continue
        key, colon, value = text.partition(":")
        if not colon or (value and not value[0].isspace()):
            raise click.UsageError(f"{path}, line {number}: expected KEY: VALUE")
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
        raise click.UsageError(f"{path}, line {number}: expected a text in {quote}, without {quote} or \\ inside")
    return inside
