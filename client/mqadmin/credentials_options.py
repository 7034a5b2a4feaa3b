"""Options of mqadmin for credentials, before the command: ``mqadmin --credentials FILE listUser``.

There is no option for a secret key: other users of the machine see command lines. As in RocketMQ, the file
``$ROCKETMQ_HOME/conf/tools.yml`` is used if it exists, with the keys accessKey and secretKey.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

if TYPE_CHECKING:
    from trimq.remoting.client.credentials import Credentials

_META: Final = "trimq.credentials"
_SECRET: Final = "TRIMQ_SECRET_KEY"  # noqa: S105 - the name of a variable

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


def kept() -> "Credentials | None":
    """The credentials of the running command; None if none are given. Raises click.UsageError."""
    file, access_key = click.get_current_context().meta.get(_META, (None, None))
    if access_key:
        secret = os.environ.get(_SECRET)
        if not secret:
            raise click.UsageError(f"--access-key {access_key}: its secret key must be in the variable {_SECRET}")
        from trimq.remoting.client.credentials import Credentials  # noqa: PLC0415 - slow to import

        return Credentials(access_key, secret)
    if file:
        return _read(Path(file))
    home = os.environ.get("ROCKETMQ_HOME")
    tools = Path(home) / "conf" / "tools.yml" if home else None
    return _read(tools) if tools is not None and tools.is_file() else None


def _read(path: Path) -> "Credentials":
    from trimq.client.credentials_file import others_can_read, read_credentials  # noqa: PLC0415 - slow to import
    from trimq.client.errors import UsageError  # noqa: PLC0415 - as above

    try:
        if others_can_read(path):
            click.echo(f"Warning: other users can read the secret key in {path}: chmod 600 {path}", err=True)
        return read_credentials(path)
    except UsageError as error:
        raise click.UsageError(error.text) from None
