"""A tier in a bucket as a table of real Spark, and the jobs on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from tests.interop.harness.object_server import ObjectServer
from tests.spark.buckets import BROKER, Place, join, new_place, run, upload
from tests.spark.test_store_bucket_core import log_rows, small_joins, write
from tests.spark.test_store_bucket_faults import harm
from tests.store.stores import TOPIC, fill
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.pipeline.__main__ import main
from trimq.protocol.bucket_object import HEADER_SIZE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# PySpark 4.0 leaves sockets to its clients open
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
__all__ = ["small_joins"]


@pytest.fixture
def place(object_server: ObjectServer, tmp_path: Path) -> Place:
    return new_place(object_server, tmp_path)


def table(spark: SparkSession, place: Place, **options: Any) -> DataFrame:
    return spark.read.format("rocketmq-store").options(**place.options, **options).load(place.url)


def values(row: dict[str, Any]) -> tuple[Any, ...]:
    return (
        *(row[name] for name in ("topic", "brokerName", "queueId", "queueOffset", "tags", "msgId", "uniqId")),
        bytes(row["body"]),
        list(row["keys"]),
        dict(row["properties"]),
        *(row[name].timestamp() for name in ("bornTimestamp", "storeTimestamp")),
        *(row[name] for name in ("bornHost", "storeHost", "commitLogOffset", "reconsumeTimes", "flag", "sysFlag")),
    )


def sorted_values(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted((values(row) for row in found), key=lambda row: row[:4])


def test_spark_equals_the_input_before_and_after_joins(spark: SparkSession, place: Place, small_joins: None) -> None:
    run(place, write)
    expected = sorted_values(log_rows(place))

    def found(**options: Any) -> list[tuple[Any, ...]]:
        return sorted_values([row.asDict() for row in table(spark, place, **options).collect()])

    assert found() == expected
    assert table(spark, place, splitSize="8k").rdd.getNumPartitions() > 4

    async def script(store: BucketMessageStore) -> None:
        assert await join(store)

    run(place, script)
    assert found(splitSize="8k") == expected
    assert table(spark, place, topics="Other").where("queueOffset > 9").count() == len(
        [row for row in expected if row[0] == "Other" and row[3] > 9]
    )


def test_an_object_that_is_gone_ends_the_query_with_advice(spark: SparkSession, place: Place) -> None:
    run(place, write)
    next((place.objects / "log").iterdir()).unlink()
    with pytest.raises(Exception, match=r"it is missing, although the manifest names it\. Restore it from a backup"):
        table(spark, place).count()
    (row,) = table(spark, place, damage="true").collect()
    assert "/log/" in row.file


def command(spark: SparkSession, place: Place, job: str, *arguments: str) -> Any:
    given = ["--cluster", "C1", "--broker", BROKER, "--endpoint", place.server.endpoint]
    return CliRunner().invoke(main, [job, place.url, *arguments, *given])


@pytest.fixture
def lasting(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands stop their session at the end, which is that of the other tests."""
    monkeypatch.setattr(type(spark), "stop", lambda _: None)


def test_an_archive_goes_on_where_it_was(spark: SparkSession, place: Place, lasting: None, small_joins: None) -> None:
    from trimq.pipeline.jobs.archive import batches, read  # noqa: PLC0415 - PySpark may be missing

    run(place, write)
    target = str(place.root / "archive")
    done = command(spark, place, "archive", target, "--json")
    assert done.exit_code == 0, done.output
    first = json.loads(done.output)
    assert (first["broker_name"], first["rows"], first["lost"]) == (BROKER, len(log_rows(place)), 0)
    assert command(spark, place, "archive", target).output == "nothing new\n"

    async def more(store: BucketMessageStore) -> None:
        await fill(store, 11, topic="More")
        await upload(store)
        await join(store)

    run(place, more)
    assert command(spark, place, "archive", target).output == "batch 1: 11 rows in 1 files\n"
    expected = sorted_values(log_rows(place))
    assert sorted_values([row.asDict() for row in read(spark, target).collect()]) == expected

    async def expired(store: BucketMessageStore) -> None:
        await fill(store, 4, topic="Late")
        await upload(store)
        assert await store.bucket_queues.expire(1 << 60)
        await fill(store, 5, topic="Late", first=4)
        await upload(store)

    run(place, expired)
    done = command(spark, place, "archive", target)
    assert done.exit_code == 2
    assert "messages may have expired, or their topics been deleted, before they were archived" in done.output
    assert "the bucket begins at" in done.output
    done = command(spark, place, "archive", target, "--accept-data-loss")
    assert done.output == "batch 2: 5 rows in 1 files\n"
    assert batches(target, BROKER)[2].lost > 0


def test_an_archive_is_of_one_broker(spark: SparkSession, place: Place, lasting: None) -> None:
    target = str(place.root / "archive")
    given = ["--cluster", "C1", "--endpoint", place.server.endpoint]
    done = CliRunner().invoke(main, ["archive", place.url, target, *given])
    assert (done.exit_code, done.output) == (
        2,
        "pipeline: an archive is that of one broker: give the options cluster and broker\n",
    )
    done = CliRunner().invoke(main, ["audit", place.url, *given])
    assert (done.exit_code, "the name of one broker" in done.output) == (2, True)
    done = CliRunner().invoke(main, ["audit", place.url, "--broker", BROKER])
    assert (done.exit_code, "to be given with cluster" in done.output) == (2, True)


def test_an_audit(spark: SparkSession, place: Place, lasting: None, small_joins: None) -> None:
    run(place, write)
    count = len(log_rows(place))
    done = command(spark, place, "audit", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert (report["records"], report["units"], report["queues"], report["faults"]) == (count, count, 3, [])

    async def joined(store: BucketMessageStore) -> None:
        assert await join(store)

    run(place, joined)
    assert json.loads(command(spark, place, "audit", "--json").output)["records"] == count
    harmed = min((place.objects / "segments").iterdir())
    harm(harmed, HEADER_SIZE + 20)
    done = command(spark, place, "audit", "--page", str(place.root / "audit.html"))
    assert done.exit_code == 3, done.output
    assert f"segments/{harmed.name}" in done.output
    assert "the checksum of the block is wrong" in done.output
    assert (place.root / "audit.html").exists()


def test_an_audit_finds_missing_offsets(spark: SparkSession, place: Place, lasting: None) -> None:
    async def script(store: BucketMessageStore) -> None:
        for number in range(3):
            await fill(store, 5, first=5 * number)
            await upload(store)
        gone = store.manifest.entries[1]
        await store.bucket_queues.replace([gone], [])
        await store.uploads.save()

    run(place, script)
    done = command(spark, place, "audit")
    assert done.exit_code == 1, done.output
    assert f"offsets without a record: 1: topic={TOPIC} queueId=0 offsets=10 span=15" in done.output


def test_other_jobs_read_a_bucket(spark: SparkSession, place: Place, lasting: None) -> None:
    run(place, write)
    done = command(spark, place, "stats", "--topics", "Other", "--json")
    assert [row["topic"] for row in json.loads(done.output)["tables"]["topics"]] == ["Other"]
    assert command(spark, place, "compact", str(place.root / "compact")).output == "14 keys\n"
