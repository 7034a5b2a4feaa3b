"""The commands of ``mqstore tiered``: they print, check, clear and restore what brokers have uploaded."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import msgspec
import trio

from trimq.broker.store.tiered.bucket.unfinished_uploads import open_unfinished_uploads
from trimq.broker.tools import collect_garbage
from trimq.broker.tools import command_parts as parts
from trimq.broker.tools.bucket_listing import bucket_lines, list_bucket
from trimq.broker.tools.offline_bucket import KEYS, BucketOptions, OfflineBucket, find_bucket
from trimq.broker.tools.offline_store import NotUsableError
from trimq.broker.tools.offline_tier import find_tier
from trimq.broker.tools.restore_store import restore_lines, restore_store
from trimq.broker.tools.tier_listing import listing, listing_lines
from trimq.broker.tools.verdicts import TierFindings, Verdict
from trimq.broker.tools.verify_bucket import BucketReport, BucketVerification
from trimq.broker.tools.verify_tier import TierReport, TierVerification
from trimq.protocol.bucket_object import BucketFormatError

_F = TypeVar("_F", bound=Callable[..., Any])

_config = click.option(
    "-c",
    "--configFile",
    "config_file",
    metavar="FILE",
    help="The broker's configuration, which names the tier. Of a store with index files it needs their sizes.",
)
_store = click.argument("store", required=False, type=click.Path(path_type=Path, file_okay=False))
_tier = click.option(
    "--tier", "tier", metavar="DIR", help="The directory of the segments, if the configuration does not name it."
)
_topics = click.option("-t", "--topic", "topics", multiple=True, help="Only this topic; can be given more than once.")
_OPTIONS = BucketOptions(
    "The bucket: s3://BUCKET, gs://BUCKET or az://CONTAINER.",
    "What the names of all objects begin with.",
    "URL of the object store.",
    "Region of a bucket of S3.",
    "Name of the cluster.",
    "Name of the broker.",
)


def _bucket_options(command: _F) -> _F:
    """Options that name a bucket; the command gets them as ``**bucket``."""
    for option, key, text in reversed(list(zip(BucketOptions._fields, KEYS, _OPTIONS, strict=True))):
        command = click.option(f"--{option}", metavar="TEXT", help=f"{text} As {key}.")(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def tiered() -> None:
    """Print, check and restore what brokers have uploaded: segments in a directory (TriMQ or RocketMQ), or a bucket.

    Keys and roles for a bucket come from the environment or the machine, as those of a broker.
    """


@tiered.command(name="ls")
@_store
@_config
@_tier
@_bucket_options
@_topics
@click.option("--segments", is_flag=True, help="Also print each segment or object.")
@parts.as_json
def ls(
    store: Path | None,
    config_file: str | None,
    tier: str | None,
    topics: tuple[str, ...],
    segments: bool,
    as_json: bool,
    **bucket: str | None,
) -> None:
    """Print the queues of the tier with their offsets and times, and the index files.

    For a tier in a directory, STORE is the directory of the store. For a bucket only its manifest is read.
    """
    found = _find(config_file, bucket, store, tier)
    if found is not None:
        with _errors():
            listed = trio.run(list_bucket, found, frozenset(topics))
        _print(listed, bucket_lines(listed, segments=segments), as_json=as_json)
        return
    with parts.opened(_needed(store), config_file) as opened:
        offline = find_tier(opened, config_file, tier)
        queues, index = list(offline.queues(frozenset(topics))), [] if topics else offline.index()
        _print(listing(queues, index), listing_lines(queues, index, segments=segments), as_json=as_json)


@tiered.command(name="verify")
@_store
@_config
@_tier
@_bucket_options
@_topics
@click.option(
    "--crc/--no-crc",
    default=True,
    help="Compare each body with its checksum, or only heads and lengths; of the objects in a bucket only the ends.",
)
@parts.as_json
def verify(
    store: Path | None,
    config_file: str | None,
    tier: str | None,
    topics: tuple[str, ...],
    crc: bool,
    as_json: bool,
    **bucket: str | None,
) -> None:
    """Check segments or objects, messages, and index files of the tier. Nothing is changed.

    For a tier in a directory, STORE is the directory of the store.

    Exit code 0: the tier is sound. 1: a broker's next start repairs it, or keys may not be found. 2: it cannot be
    checked. 3: messages are damaged or missing.
    """
    found = _find(config_file, bucket, store, tier)
    if found is not None:
        with _errors():
            in_bucket = _verify_bucket(found, frozenset(topics), crc=crc)
        verdict = in_bucket.verdict
        _print(_with_verdict(in_bucket, verdict), _bucket_report_lines(in_bucket), as_json=as_json)
        sys.exit(verdict)
    with parts.opened(_needed(store), config_file) as opened:
        offline = find_tier(opened, config_file, tier)
        total = sum(queue.log.size for queue in offline.queues(frozenset(topics)))
        total += 0 if topics else sum(file.size for file in offline.index())
        with parts.progress("verifying", total) as progress:
            report = TierVerification(offline, check_crc=crc).run(progress, frozenset(topics))
    _print(_with_verdict(report, report.verdict), _tier_lines(report), as_json=as_json)
    sys.exit(report.verdict)


@tiered.command(name="restore")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@_config
@_bucket_options
@parts.as_json
def restore(directory: Path, config_file: str | None, as_json: bool, **bucket: str | None) -> None:
    """Make the empty DIRECTORY the store of a broker whose history is in a bucket.

    Topics, groups and consumer offsets come back; the messages stay in the bucket, from where the broker reads them.
    Prints for each queue what may be missing. Delayed, timed and half messages are not restored: they are not uploaded.
    """
    found = _need_bucket(_find(config_file, bucket, directory, None))
    with _errors(), parts.progress("restoring", None) as progress:
        report = restore_store(found, directory.absolute(), progress)
    _print(report, restore_lines(report), as_json=as_json)


@tiered.command(name="gc")
@_config
@_bucket_options
@click.option("--delete", "is_deleting", is_flag=True, help="Delete what was found; without it nothing is changed.")
@parts.as_json
def gc(config_file: str | None, is_deleting: bool, as_json: bool, **bucket: str | None) -> None:
    """Print what the history in a bucket does not need any more: what a broker that was killed has left behind.

    It is older than tieredStoreBucketGraceTime. A broker may go on meanwhile. Uploads that were never completed, which
    no listing shows, are found in S3.
    """
    found = _need_bucket(_find(config_file, bucket, None, None))
    with _errors():
        problem, uploads = "", None
        try:
            uploads = open_unfinished_uploads(found.tier)
        except OSError as error:
            problem = f"uploads that were never completed are not looked for: {error}"
        report = trio.run(collect_garbage.find, found, uploads, time.time_ns() // 1_000_000)
        report.problem = problem or report.problem
        if is_deleting:
            total = len(report.objects) + len(report.uploads)
            with parts.progress("deleting", total, "objects") as progress:
                trio.run(collect_garbage.delete, found, uploads, report, progress)
    _print(report, collect_garbage.garbage_lines(report), as_json=as_json)


# -- helpers


def _find(
    config_file: str | None, options: dict[str, str | None], store: Path | None, tier: str | None
) -> OfflineBucket | None:
    """The bucket that the configuration or options name, unless it is a directory."""
    given = BucketOptions(**options)
    if tier is not None:
        if any(given):
            parts.fail("--tier names a directory: it does not go together with options for a bucket")
        return None
    try:
        found = find_bucket(config_file, given, store)
    except NotUsableError as error:
        parts.fail(str(error))
    if found is None and any(given):
        parts.fail("which bucket? Pass --bucket, or the broker's configuration with -c")
    return found


def _needed(store: Path | None) -> Path:
    if store is None:
        parts.fail("where is the tier? Pass the directory of the store, or name a bucket with -c or --bucket")
    return store


def _need_bucket(found: OfflineBucket | None) -> OfflineBucket:
    if found is None:
        parts.fail("which bucket? Pass --bucket, or the broker's configuration with -c")
    return found


@contextmanager
def _errors() -> Iterator[None]:
    def fail(group: BaseExceptionGroup[BaseException]) -> NoReturn:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        parts.fail(str(error))

    try:
        yield
    except* (NotUsableError, OSError, BucketFormatError) as group:
        fail(group)


def _print(value: Any, lines: Iterator[str], *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(value))
        return
    for line in lines:
        click.echo(line)


def _with_verdict(report: msgspec.Struct, verdict: Verdict) -> dict[str, Any]:
    return {**msgspec.to_builtins(report), "verdict": verdict.name}


def _verify_bucket(found: OfflineBucket, topics: frozenset[str], *, crc: bool) -> BucketReport:
    verification = BucketVerification(found, check_messages=crc)
    trio.run(verification.read, topics)
    with parts.progress("verifying", verification.total) as progress:
        return trio.run(verification.run, progress)


def _tier_lines(report: TierReport) -> Iterator[str]:
    yield f"tier        {report.directory} of {report.root}"
    yield f"messages    {report.messages} in {report.queues} queues, {report.bytes} bytes, {report.segments} segments"
    yield f"offsets     {report.known_offsets} messages have kept their offset in the log"
    yield f"index       {report.index_files} files, {report.index_entries} entries"
    yield from _finding_lines(report)


def _bucket_report_lines(report: BucketReport) -> Iterator[str]:
    yield f"bucket      {report.bucket}, epoch {report.epoch}"
    yield f"messages    {report.messages} in {report.queues} queues, {report.bytes} bytes, {report.objects} objects"
    yield f"log         up to offset {report.end}; {report.holes} messages are in holes of queues"
    yield f"state       {report.state_files} files; the manifest has {report.pages} pages"
    yield f"index       {report.index_files} files, {report.index_entries} entries"
    yield from _finding_lines(report)


def _finding_lines(report: TierFindings) -> Iterator[str]:
    yield from parts.fault_lines([("lost", report.lost), ("repairable", report.repairable), ("index", report.index)])
    for note in report.notes:
        yield f"note        {note}"
    yield {
        Verdict.SOUND: "the tier is sound",
        Verdict.REPAIRABLE: "the tier needs repair: a broker's next start does what is repairable",
    }.get(report.verdict, "the tier is damaged: messages are lost")
