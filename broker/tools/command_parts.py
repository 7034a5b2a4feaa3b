"""What the commands of ``mqstore`` share: options, exits, progress."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from trimq.broker.tools import offline_store
from trimq.broker.tools.offline_store import NotUsableError, OfflineStore
from trimq.broker.tools.verdicts import Faults, Verdict

Progress = Callable[[int], None]

as_json = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")


def fail(text: str) -> NoReturn:
    """End the process: it could not do its work."""
    click.echo(f"mqstore: {text}", err=True)
    sys.exit(Verdict.NOT_USABLE)


@contextmanager
def opened(root: Path, config_file: str | None) -> Iterator[OfflineStore]:
    """A store directory that no broker has open, for reading."""
    try:
        with offline_store.opened(root, config_file) as found:
            yield found
    except (NotUsableError, OSError) as error:
        fail(str(error))


@contextmanager
def progress(what: str, total: int | None, unit: str = "") -> Iterator[Progress]:
    """A progress bar if standard error is a terminal; nothing otherwise.

    ``total``: in bytes, or in ``unit``; None if it is not known.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 - not needed without a terminal
    from rich.progress import (  # noqa: PLC0415 - as above
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars  # noqa: PLC0415 - as above

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn()]
    columns += [MofNCompleteColumn(), TextColumn(unit)] if unit else [DownloadColumn(), TransferSpeedColumn()]
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done: bars.update(task, completed=done)


def fault_lines(kinds: list[tuple[str, Faults]]) -> Iterator[str]:
    """The faults of a report, a line for each."""
    for name, faults in kinds:
        for text in faults.shown:
            yield f"fault       {name}: {text}"
        if faults.count > len(faults.shown):
            yield f"fault       {name}: and {faults.count - len(faults.shown)} more"
