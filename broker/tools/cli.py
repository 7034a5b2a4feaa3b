"""The command ``mqstore``: checks, prints and repairs a store directory that no broker has open.

Repairing means rebuilding queues, index and checkpoint from the log.
"""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from trimq.broker.tools import command_parts as parts
from trimq.broker.tools import offline_store
from trimq.broker.tools.auth_commands import authkey, authrotate
from trimq.broker.tools.dump import Filter, figures, lines
from trimq.broker.tools.offline_store import NotUsableError, OfflineStore
from trimq.broker.tools.tiered_commands import tiered
from trimq.broker.tools.verdicts import Faults, Verdict
from trimq.broker.tools.verify import Report, Verification

_store = click.argument("store", type=click.Path(path_type=Path, file_okay=False))
_config = click.option(
    "-c",
    "--configFile",
    "config_file",
    metavar="FILE",
    help="The broker's configuration. Needed if the sizes of index files or the delay levels are not the defaults.",
)


@click.group(name="mqstore", context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Check, print and repair a message store that no broker has open."""


main.add_command(tiered)
main.add_command(authkey)
main.add_command(authrotate)


@main.command()
@_store
@_config
@parts.as_json
def verify(store: Path, config_file: str | None, as_json: bool) -> None:
    """Check every record, the queues, the index and the state files. Nothing is changed.

    Exit code 0: the store is sound. 1: queues, index or checkpoint do not match the log; `mqstore rebuild` repairs
    them, and so does the broker's next start if the last line says so. 2: the directory cannot be checked. 3: records
    are damaged or files are missing.
    """
    with parts.opened(store, config_file) as opened, parts.progress("verifying", _size(opened)) as progress:
        report = Verification(opened).run(progress)
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(report), "verdict": report.verdict.name}))
    else:
        for line in _report_lines(report):
            click.echo(line)
    sys.exit(report.verdict)


@main.command()
@_store
@_config
@click.option("-t", "--topic", "topics", multiple=True, help="Only this topic; can be given more than once.")
@click.option("-i", "--queueId", "queue_id", type=int, help="Only this queue.")
@click.option("-k", "--key", help="Only messages with this key or unique key.")
@click.option(
    "--begin", metavar="TIME", help="Only records stored at this time or later: ms, or 2026-01-31T12:00:00 (UTC)."
)
@click.option("--end", metavar="TIME", help="Only records stored before this time.")
@click.option("-n", "--limit", type=int, help="Stop after this number of records.")
@click.option("--body/--no-body", default=True, help="Print the bodies, or leave them out.")
def dump(  # noqa: PLR0913, PLR0917 - an option each
    store: Path,
    config_file: str | None,
    topics: tuple[str, ...],
    queue_id: int | None,
    key: str | None,
    begin: str | None,
    end: str | None,
    limit: int | None,
    body: bool,
) -> None:
    """Print records as JSON, one per line, in the order of the log."""
    wanted = Filter(frozenset(topics), queue_id, key, _time(begin), _time(end))
    with parts.opened(store, config_file) as opened, parts.progress("reading", _size(opened)) as progress:
        _open_log(opened)
        out = sys.stdout.buffer
        for number, line in enumerate(lines(opened, wanted, progress, body=body)):
            if limit is not None and number >= limit:
                break
            out.write(line + b"\n")


@main.command()
@_store
@_config
@parts.as_json
def stat(store: Path, config_file: str | None, as_json: bool) -> None:
    """Print the content of the log: its files, and its messages by topic."""
    with parts.opened(store, config_file) as opened, parts.progress("counting", _size(opened)) as progress:
        _open_log(opened)
        found = figures(opened, progress)
        files, start = len(opened.files), opened.log_start
    if as_json:
        log = {"logFiles": files, "logStart": start, "logEnd": found.log_end, "damaged": found.damaged}
        click.echo(msgspec.json.encode({**log, "topics": found.topics}))
        return
    click.echo(f"log: {files} files, offsets {start} to {found.log_end}, {found.damaged} damaged places")
    click.echo(f"{'topic':40} {'queues':>6} {'messages':>10} {'bytes':>14}  first                last")
    for name, topic in sorted(found.topics.items()):
        times = "  ".join(_text(time) for time in (topic.first, topic.last))
        click.echo(f"{name:40} {topic.queues:6} {topic.messages:10} {topic.bytes:14}  {times}")


@main.command()
@_store
@_config
def rebuild(store: Path, config_file: str | None) -> None:
    """Rebuild index and checkpoint from the log, and every queue unit that is missing or wrong."""
    import logging  # noqa: PLC0415 - only this command has to silence the store's own log

    import structlog  # noqa: PLC0415 - as above

    from trimq.broker.tools.rebuild import rebuild as run  # noqa: PLC0415 - the other commands need no event loop

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        config = offline_store.find_config(store.absolute(), config_file)
        size = sum(file.stat().st_size for file in config.commit_log_path.glob("[0-9]*"))
        with parts.progress("rebuilding", size) as progress:
            report = run(config, progress)
    except NotUsableError as error:
        parts.fail(str(error))
    click.echo(
        f"{report.records} records read, {report.units_rebuilt} queue units and {report.keys_rebuilt} keys written; "
        f"the log ends at {report.position}"
    )
    for note in report.notes:
        click.echo(f"note: {note}")
    for damage in report.damaged:
        click.echo(f"damaged: {damage.length} bytes at offset {damage.phy}: {damage.why}")
    sys.exit(Verdict.DAMAGED if report.damaged else Verdict.SOUND)


# -- helpers


def _remedy(report: Report) -> str:
    if report.start_mends:
        return "the next start does it, or mqstore rebuild"
    return "mqstore rebuild does it; a start would not find all faults"


def _report_lines(report: Report) -> Iterator[str]:
    yield f"store       {report.root}"
    yield f"log         {report.log_files} files, offsets {report.log_start} to {report.log_end}"
    yield f"records     {report.records}, of which {report.superseded} were replaced when a topic was created again"
    yield f"queues      {report.queues} with {report.units} units that point to their records"
    entries = f"{report.index_entries} entries for {report.keys} keys, {report.tags} tags"
    yield f"index       {report.index_files} files, {entries}"
    kinds: list[tuple[str, Faults]] = [
        ("commit log", report.log),
        ("state files", report.state),
        ("queues", report.consume_queues),
        ("index", report.index),
        ("checkpoint", report.checkpoint),
    ]
    yield from parts.fault_lines(kinds)
    for note in report.notes:
        yield f"note        {note}"
    yield {
        Verdict.SOUND: "the store is sound",
        Verdict.REPAIRABLE: f"queues, index or checkpoint need repair: {_remedy(report)}",
    }.get(report.verdict, "the store is damaged: messages or state are lost")


def _open_log(store: OfflineStore) -> None:
    for text in store.open_log():
        click.echo(f"mqstore: warning: {text}; the log is not read beyond it", err=True)


def _size(store: OfflineStore) -> int:
    return sum(file.stat().st_size for file in store.config.commit_log_path.glob("[0-9]*"))


def _time(text: str | None) -> int | None:
    if text is None:
        return None
    if text.isdigit():
        return int(text)
    try:
        given = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a time: use ms since 1970, or 2026-01-31T12:00:00") from error
    return int((given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp() * 1000)


def _text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
