"""``python -m trimq.pipeline NAME --help``: the jobs as commands. Spark's own settings come from the environment.

The same commands run on a cluster with ``spark-submit``. ``PYSPARK_SUBMIT_ARGS`` and ``spark-defaults.conf`` apply as
with any Spark program.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from trimq.client.mqadmin.tls_options import take_tls, tls_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

_store = click.argument("store")
_json = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
_page = click.option("--page", type=click.Path(dir_okay=False), help="Write a page with tables and plots (HTML).")
_split = click.option("--split-size", default=64 << 20, show_default=True, help="Bytes of the log that one task reads.")


def _bucket(command: Callable[..., None]) -> Callable[..., None]:
    """Options of a command whose STORE may be a bucket; the command gets those that are given as ``bucket``."""
    names = {"cluster": "cluster", "broker": "broker", "endpoint": "endpoint", "region": "region"}

    @functools.wraps(command)
    def run(*, path_style: bool, **given: Any) -> None:
        bucket = {option: given.pop(name) for name, option in names.items()}
        bucket["pathStyle"] = None if path_style else "false"
        command(bucket={name: value for name, value in bucket.items() if value}, **given)

    for option in (
        click.option(
            "--path-style/--virtual-host",
            default=True,
            help="The bucket's name is in the path of URLs, or in the host.",
        ),
        click.option("--region", help="Region of a bucket of S3."),
        click.option("--endpoint", metavar="URL", help="URL of the object store."),
        click.option("--broker", metavar="NAME", help="Name of the broker in the bucket."),
        click.option(
            "--cluster", metavar="NAME", help="STORE is a bucket with the tier of brokers: s3://BUCKET/PREFIX."
        ),
    ):
        run = option(run)
    return run


@click.group(name="pipeline", context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Jobs over message stores on Spark. STORE is a directory, any path that fsspec knows, or a bucket (--cluster)."""


@main.command()
@_store
@click.argument("target")
@_split
@_json
@click.option("--queue-file-size", default=6_000_000, show_default=True, help="mappedFileSizeConsumeQueue, in bytes.")
@click.option("--slots", default=5_000_000, show_default=True, help="maxHashSlotNum.")
@click.option("--entries", default=20_000_000, show_default=True, help="maxIndexNum.")
@click.option("--delay-levels", help="messageDelayLevel, if the broker's differs from the default.")
@click.option("--index/--no-index", default=True, help="Write the index, or leave it out.")
@click.option("--index-tags/--no-index-tags", default=True, help="Put tags into the index, or not (indexTagEnable).")
def rebuild(store: str, target: str, split_size: int, as_json: bool, **sizes: Any) -> None:
    """Build consume queues, index and checkpoint of STORE from its log alone, into TARGET.

    The exit code is 3 if records are damaged.
    """
    with _session("rebuild") as spark:
        from trimq.pipeline.jobs.rebuild import RebuildOptions  # noqa: PLC0415 - needs PySpark
        from trimq.pipeline.jobs.rebuild import rebuild as run  # noqa: PLC0415 - as above

        options = RebuildOptions(**{name: value for name, value in sizes.items() if value is not None})
        report = run(spark, store, target, options, split_size=split_size)
    _print(
        as_json,
        report,
        f"{report.records} records read up to offset {report.log_end}; {report.units} units in {report.queues} queues, "
        f"{report.keys} keys in {report.index_files} index files",
        *(f"damaged: {length} bytes at offset {phy}: {why}" for phy, length, why in report.damages),
    )
    sys.exit(3 if report.damages else 0)


@main.command()
@_store
@_split
@_json
@_page
@click.option("--slots", default=5_000_000, show_default=True, help="maxHashSlotNum.")
@click.option("--entries", default=20_000_000, show_default=True, help="maxIndexNum.")
@click.option("--delay-levels", help="messageDelayLevel, if the broker's differs from the default.")
@_bucket
def audit(store: str, as_json: bool, page: str | None, bucket: dict[str, str], **settings: Any) -> None:
    """Check records, the chain of the log, queues, index and checkpoint of STORE against each other.

    Of a bucket: directories, blocks, records, and the offsets of queues.

    Exit codes are those of `mqstore verify`. 0: the store is sound. 1: queues, index or checkpoint do not match the
    log; a broker's next start or `rebuild` repairs them (of a bucket: messages are missing in a queue). 2: the store
    cannot be read. 3: records are damaged, or files of the log are missing.
    """
    with _session("audit") as spark:
        from trimq.pipeline.jobs import audit as job  # noqa: PLC0415 - needs PySpark

        if bucket:
            from trimq.pipeline.jobs.audit_bucket import audit_bucket  # noqa: PLC0415 - as above

            report = audit_bucket(spark, store, bucket, split_size=settings["split_size"])
        else:
            report = job.audit(spark, store, **{name: value for name, value in settings.items() if value is not None})
    if page:
        job.write_page(report, page)
    _print(
        as_json,
        report,
        f"{report.records} records, {report.units} units in {report.queues} queues, {report.keys} keys in "
        f"{report.index_files} index files",
        *(f"fault: {fault.kind}: {fault.count}: {'; '.join(fault.examples[:3])}" for fault in report.faults),
        "the store is sound" if report.is_sound else "the store has faults",
    )
    sys.exit(report.verdict)


@main.command()
@_store
@_json
@_page
@click.option("--topics", help="Only these topics, separated by commas.")
@click.option("--begin", help="Only records stored at this time or later: ms, or 2026-01-31T12:00:00 (UTC).")
@click.option("--end", help="Only records stored at this time or earlier.")
@_bucket
def stats(
    store: str,
    as_json: bool,
    page: str | None,
    topics: str | None,
    begin: str | None,
    end: str | None,
    bucket: dict[str, str],
) -> None:
    """Traffic by topic, tag, producer host and hour; sizes, latencies, hot keys."""
    given = {"topics": topics, "startingTimestamp": begin, "endingTimestamp": end, **bucket}
    with _session("stats") as spark:
        from trimq.pipeline.jobs import stats as job  # noqa: PLC0415 - needs PySpark

        found = job.stats(spark, store, **{name: value for name, value in given.items() if value})
    if page:
        job.write_page(found, page)
    rows = found.tables["topics"]
    _print(as_json, found, *(f"{row['topic']:40} {row['messages']:>12} {row['bytes']:>16}" for row in rows))


@main.command()
@_store
@click.argument("target")
@_split
@_json
@click.option("--topics", default="", help="Only these topics, separated by commas.")
@click.option(
    "--broker-name", default="", show_default="--broker, or broker", help="Separates archives of several brokers."
)
@click.option("--file-size", default=128 << 20, show_default=True, help="Approximate size of a file, in bytes.")
@click.option("--fail-on-data-loss/--accept-data-loss", default=True, help="Stop if the log was deleted unarchived.")
@click.option(
    "--tiered-store-file-path", default="", metavar="DIR", help="The tier, for records that the log has no longer."
)
@click.option("--format", default="parquet", show_default=True, help="Or another that Spark writes, as orc, json.")
@click.option("--format-option", multiple=True, metavar="NAME=VALUE", help="For Spark's writer of another format.")
@_bucket
def archive(store: str, target: str, as_json: bool, format_option: tuple[str, ...], **settings: Any) -> None:
    """Append the records that STORE got since the last run to the archive TARGET, by topic and day."""
    if wrong := [text for text in format_option if "=" not in text]:
        raise click.BadParameter(f"{wrong[0]!r}: expected NAME=VALUE", param_hint="--format-option")
    settings["format_options"] = dict(text.split("=", 1) for text in format_option)
    with _session("archive") as spark:
        from trimq.pipeline.jobs import archive as job  # noqa: PLC0415 - needs PySpark

        batch = job.archive(spark, store, target, job.ArchiveOptions(**settings))
    text = "nothing new" if batch is None else f"batch {batch.number}: {batch.rows} rows in {len(batch.files)} files"
    _print(as_json, batch, text)


@main.command()
@_store
@click.option("--namesrv", required=True, help="Addresses of the name servers.")
@click.option("--to", "topic", required=True, help="The topic to send to; it has to exist.")
@click.option("--where", default="true", help="Which rows: an SQL condition on the columns of the store.")
@click.option("--rate", default=0.0, help="Messages a second; 0 for no limit.")
@click.option("--key", default="get(keys, 0)", show_default=True, help="Rows with the same key keep their order.")
@click.option("--order", default="commitLogOffset", show_default=True, help="An SQL expression for that order.")
@click.option("--tasks", default=2, show_default=True, help="Number of tasks that send at the same time.")
@_bucket
@tls_options
@click.option("--credentials-file", default="", help="File with accessKey and secretKey, on each machine that sends.")
def replay(store: str, where: str, bucket: dict[str, str], **settings: Any) -> None:
    """Send rows of STORE into a topic again: at least once, rows with the same key in their order."""
    settings["tls"] = take_tls(settings)
    with _session("replay") as spark:
        from trimq.pipeline.jobs import replay as job  # noqa: PLC0415 - needs PySpark

        table = spark.read.format("rocketmq-store").options(**bucket).load(store).where(where)
        sent = job.replay(table, job.ReplayOptions(**settings))
    click.echo(f"{sent} messages sent")


@main.command()
@_store
@click.argument("target")
@click.option("--topics", default="", help="Only these topics, separated by commas.")
@click.option("--key", default="get(keys, 0)", show_default=True, help="An SQL expression for a row's key.")
@click.option("--order", default="commitLogOffset", show_default=True, help="An SQL expression: the largest is newest.")
@click.option("--tombstones/--no-tombstones", default=True, help="An empty body deletes its key, or is a row.")
@_bucket
def compact(store: str, target: str, topics: str, bucket: dict[str, str], **settings: Any) -> None:
    """Write the newest record of each key of STORE to TARGET, as Parquet."""
    with _session("compact") as spark:
        from trimq.pipeline.jobs import compact as job  # noqa: PLC0415 - needs PySpark

        reader = spark.read.format("rocketmq-store").options(**bucket)
        table = (reader.option("topics", topics) if topics else reader).load(store)
        job.compact(table, **settings).write.parquet(target)
        click.echo(f"{spark.read.parquet(target).count()} keys")


# -- helpers


@contextmanager
def _session(name: str) -> "Iterator[SparkSession]":
    """A session for one job. Errors that a user can fix are printed without a traceback."""
    try:
        from trimq.pipeline.jobs.job_support import session  # noqa: PLC0415 - PySpark may be missing
    except ImportError as error:
        _fail(f"{error}: the jobs need the spark extra, pip install 'trimq[spark]'")
    spark = session(name)
    try:
        yield spark
    except _expected_errors() as error:
        _fail(str(error))
    finally:
        spark.stop()


def _expected_errors() -> tuple[type[Exception], ...]:
    from pyspark.errors import AnalysisException  # noqa: PLC0415 - PySpark may be missing

    from trimq.pipeline.jobs.archive import ArchiveError  # noqa: PLC0415 - needs PySpark
    from trimq.pipeline.jobs.rebuild import RebuildError  # noqa: PLC0415 - as above

    return ValueError, OSError, AnalysisException, ArchiveError, RebuildError


def _fail(text: str) -> NoReturn:
    click.echo(f"pipeline: {text}", err=True)
    sys.exit(2)


def _print(as_json: bool, report: Any, *lines: str) -> None:
    if as_json:
        encode: Callable[[Any], bytes] = msgspec.json.Encoder(enc_hook=str).encode
        click.echo(encode(report))
        return
    for line in lines:
        click.echo(line)


if __name__ == "__main__":
    main()
