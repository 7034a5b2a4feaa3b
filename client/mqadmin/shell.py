"""The frame of all commands: the name server's address, the open Admin, tables or JSON, errors and exit statuses."""

import json
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import wraps
from typing import Any, Final, NoReturn, TypeAlias

import anyio
import click

from trimq.client.admin import Admin
from trimq.client.admin.base import REQUEST_TIMEOUT
from trimq.client.core import ClientOptions
from trimq.client.errors import RocketMQError, UnreachableError, UsageError
from trimq.client.mqadmin import credentials_options
from trimq.client.mqadmin.tls_options import kept

EXIT_REFUSED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3


class Output:
    """Prints tables for people, or collects one JSON document for scripts."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._documents: list[Any] = []

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Prints rows under the columns' names; in JSON a list of objects."""
        every = [list(row) for row in rows]
        if self.as_json:
            self._documents.append([dict(zip(columns, row, strict=True)) for row in every])
            return
        cells = [[f"#{columns[0]}", *columns[1:]], *([_cell(value) for value in row] for row in every)]
        widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
        for row in cells:
            line = "  ".join(
                cell.rjust(width) if _is_number(cell) else cell.ljust(width)
                for cell, width in zip(row, widths, strict=True)
            )
            click.echo(line.rstrip())

    def record(self, values: dict[str, Any]) -> None:
        """Prints one name and value a line; in JSON an object."""
        if self.as_json:
            self._documents.append(values)
            return
        width = max((len(name) for name in values), default=0)
        for name, value in values.items():
            click.echo(f"{name.ljust(width)} : {_cell(value)}")

    def lines(self, values: Iterable[str]) -> None:
        """Prints one value a line; in JSON a list."""
        every = list(values)
        if self.as_json:
            self._documents.append(every)
        else:
            for value in every:
                click.echo(value)

    def item(self, value: dict[str, Any], line: str) -> None:
        """Prints one item of a stream immediately: a line; in JSON an object in a line of its own."""
        click.echo(json.dumps(value, ensure_ascii=False, default=_plain) if self.as_json else line)

    def say(self, text: str) -> None:
        """Prints a text for people; nothing in JSON."""
        if not self.as_json:
            click.echo(text)

    def finish(self) -> None:
        """Prints the collected JSON: a single document as it is, several as a list."""
        if self.as_json and self._documents:
            document = self._documents[0] if len(self._documents) == 1 else self._documents
            click.echo(json.dumps(document, indent=2, ensure_ascii=False, default=_plain))


Function: TypeAlias = Callable[..., Awaitable[None]]
"""A command's implementation: ``async def f(admin, out, *, option...)``."""


class Commands:
    """The commands of one module. ``@commands.add("topicList")`` makes a coroutine function a command."""

    def __init__(self) -> None:
        self._table: dict[str, click.Command] = {}

    def get_command(self, _ctx: click.Context, name: str) -> click.Command:
        """The command with this name."""
        return self._table[name]

    def add(self, name: str) -> Callable[[Function], click.Command]:
        """Makes ``async def f(admin, out, *, option...)`` a command, with the additional options -n and --json."""

        def wrap(function: Function) -> click.Command:
            @wraps(function)
            def run(namesrv: str | None, *, as_json: bool, **options: Any) -> None:
                _quiet()
                out = Output(as_json=as_json)
                settings = ClientOptions(
                    request_timeout=REQUEST_TIMEOUT, tls=kept(), credentials=credentials_options.kept()
                )

                async def body() -> None:
                    async with Admin(namesrv, options=settings) as admin:
                        await function(admin, out, **options)

                try:
                    anyio.run(body)
                except RocketMQError as error:
                    _fail(error)
                out.finish()

            command = click.command(name, context_settings={"help_option_names": ["-h", "--help"]})(run)
            command.params.append(
                click.Option(
                    ["-n", "--namesrvAddr", "namesrv"],
                    envvar="NAMESRV_ADDR",
                    help="Name servers, host:port, separated by semicolons. Default: NAMESRV_ADDR.",
                )
            )
            command.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print JSON, for scripts."))
            self._table[name] = command
            return command

        return wrap


def _quiet() -> None:
    """Suppresses the SDK's warnings: a command prints its own errors."""
    logging.getLogger("trimq.client").setLevel(logging.ERROR)


def _fail(error: RocketMQError) -> NoReturn:
    click.echo(f"Error: {error}", err=True)
    if error.help:
        click.echo(f"  {error.help}", err=True)
    if isinstance(error, UnreachableError):
        sys.exit(EXIT_UNREACHABLE)
    sys.exit(EXIT_USAGE if isinstance(error, UsageError) and error.code is None else EXIT_REFUSED)


def one_of(broker: str | None, cluster: str | None) -> None:
    """Raises click.UsageError unless exactly one of broker and cluster is given."""
    if (broker is None) == (cluster is None):
        raise click.UsageError("give either -b (a broker's address) or -c (a cluster's name)")


def parse_time(text: str) -> float | None:
    """Seconds since the epoch from milliseconds or from yyyy-MM-dd#HH:mm:ss:SSS in local time; None for ``now``.

    Raises click.UsageError for another text.

    >>> parse_time("1500"), parse_time("now")
    (1.5, None)
    """
    if text in ("now", "-1"):
        return None
    if text.isdigit():
        return int(text) / 1000
    for form in ("%Y-%m-%d#%H:%M:%S:%f", "%Y-%m-%d#%H:%M:%S", "%Y-%m-%d#%H:%M"):
        try:
            return datetime.strptime(text, form).astimezone().timestamp()
        except ValueError:
            continue
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        raise click.UsageError(f"{text!r} is no time: give now, milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS") from None


def show_time(milliseconds: float) -> str:
    """A time in ms since the epoch as local time, as RocketMQ prints it; empty for 0 and below."""
    if milliseconds <= 0:
        return ""
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC).astimezone()
    return f"{moment:%Y-%m-%d %H:%M:%S},{int(milliseconds) % 1000:03d}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("-", "", 1).isdigit()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)
