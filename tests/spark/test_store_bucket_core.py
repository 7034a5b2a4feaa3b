"""The table of a tier in a bucket, without Spark: it equals the log, whatever was joined; nothing else is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs the spark extra: pip install 'trimq[spark]'")

import trio

from tests.interop.harness.object_server import ObjectServer
from tests.spark import test_store_core as local
from tests.spark.buckets import BROKER, Place, damaged, join, new_place, parsed, place_of, rows, run, upload
from tests.store.stores import TOPIC, fill, put, until_dispatched
from trimq.broker.store.tiered.bucket import joiner
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.pipeline.options import OptionError
from trimq.pipeline.store.bucket import BucketReader
from trimq.pipeline.store.options import parse
from trimq.pipeline.store.plan import plan_of

pytestmark = pytest.mark.one_pyspark

HOURS, COUNT = 3, 30
"""Messages of each queue in each hour."""


async def write(store: BucketMessageStore) -> None:
    """Messages of two topics in three hours; four uploads in each hour."""
    for hour in range(HOURS):
        for number in range(COUNT):
            for queue in range(2):
                await fill(store, 1, queue_id=queue, first=hour * COUNT + number)
            await fill(store, 1, topic="Other", first=hour * COUNT + number)
            store.clock.advance(1.0)  # type: ignore[attr-defined]
            if number % 8 == 7:
                await upload(store)
        await upload(store)
        store.clock.advance(3600.0)  # type: ignore[attr-defined]


@pytest.fixture
def place(object_server: ObjectServer, tmp_path: Path) -> Place:
    return new_place(object_server, tmp_path)


@pytest.fixture
def small_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    monkeypatch.setattr(joiner, "JOIN_SEGMENTS", 2)


def log_rows(place: Place) -> list[dict[str, Any]]:
    """What the log has, which keeps everything."""
    return sorted((row | {"brokerName": BROKER} for row in local.rows(place.store)), key=place_of)


SPLITS: list[dict[str, Any]] = [{}, {"splitSize": 600}, {"splitSize": 0}, {"splitSize": "8k"}, {"checkCrc": False}]


def test_the_table_equals_the_log_before_and_after_joins(place: Place, small_joins: None) -> None:
    run(place, write)
    expected = log_rows(place)
    assert len(expected) == 3 * HOURS * COUNT
    for options in SPLITS:
        assert rows(place, **options) == expected
    joins = []

    async def script(store: BucketMessageStore) -> None:
        joins.append(await join(store))

    run(place, script)
    assert joins[0] > 3
    assert any((place.objects / "segments").iterdir())
    for options in SPLITS:
        assert rows(place, **options) == expected
    assert damaged(place) == []


def test_large_stretches_are_divided_and_blocks_next_to_each_other_come_with_one_request(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    body = 1 << 20
    count = 40

    async def script(store: BucketMessageStore) -> None:
        for number in range(count):
            await put(store, bytes([number]) * body, topic="Large")
            await put(store, b"small", topic="Small")
            if number % 20 == 19:
                await upload(store)
        assert await join(store) == 1

    run(place, script, mapped_file_size_commit_log=64 << 20, max_message_size=4 << 20)
    expected = log_rows(place)
    assert len(expected) == 2 * count
    before = len(place.gets())
    assert rows(place) == expected
    segments = [name for name in place.gets()[before:] if name.startswith("segments/")]
    # Two objects: a directory each, at most 7 ranges of 8 MiB, and one for the blocks of the small messages.
    assert 8 <= len(segments) <= 10
    parts = plan_of(parsed(place, splitSize="8m")).parts
    assert len(parts) == 6
    assert rows(place, splitSize="8m") == expected
    assert rows(place, splitSize="1m") == expected


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"topics": "Other"}, lambda topic, queue, offset: topic == "Other"),
        ({"topicsPattern": "Oth.*"}, lambda topic, queue, offset: topic == "Other"),
        ({"topics": TOPIC, "queues": "1"}, lambda topic, queue, offset: topic == TOPIC and queue == 1),
        (
            {"topics": "Other", "startingOffsets": '{"Other": {"0": 7}}', "endingOffsets": '{"Other": {"0": 33}}'},
            lambda topic, queue, offset: topic == "Other" and 7 <= offset < 33,
        ),
        ({"sql": "KEYS = 'k3'"}, lambda topic, queue, offset: offset % 7 == 3),
        ({"topics": "None"}, lambda topic, queue, offset: False),
    ],
)
def test_what_is_selected(options: dict[str, str], wanted: Any, written: Place) -> None:
    expected = [row for row in log_rows(written) if wanted(*place_of(row))]
    assert rows(written, **options) == expected
    assert rows(written, splitSize=600, **options) == expected


@pytest.fixture(scope="module")
def written(object_server: ObjectServer, tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = new_place(object_server, tmp_path_factory.mktemp("written"))
    run(place, write)
    return place


def test_positions_and_times(written: Place) -> None:
    everything = log_rows(written)
    middle = sorted(row["commitLogOffset"] for row in everything)[100]
    late = [row for row in everything if row["commitLogOffset"] >= middle]
    assert rows(written, startingPosition=middle) == late
    assert rows(written, endingPosition=middle) == [row for row in everything if row not in late]
    times = sorted({row["storeTimestamp"] for row in everything})
    begin, end = times[20], times[40]
    expected = [row for row in everything if begin <= row["storeTimestamp"] <= end]
    given = {"startingTimestamp": local.ms(begin), "endingTimestamp": local.ms(end)}
    assert rows(written, **given) == expected


def test_only_what_is_selected_is_read(written: Place) -> None:
    """Pruned by the manifest: objects of other times are not read at all, of others the blocks of one topic."""
    everything = log_rows(written)
    hour = sorted(row["storeTimestamp"] for row in everything)[len(everything) // 2]
    last = [row for row in everything if row["storeTimestamp"] > hour]

    def gets(**options: Any) -> tuple[list[dict[str, Any]], list[str]]:
        before = len(written.gets())
        found = rows(written, **options)
        return found, written.gets()[before:]

    _, all_gets = gets()
    objects = {name for name in all_gets if name.startswith("log/")}
    assert len(objects) == 4 * HOURS
    manifest = [name for name in all_gets if name.startswith("manifest/")]
    assert len(manifest) == len(all_gets) - 2 * len(objects)  # a directory, and one range of blocks
    found, some = gets(startingTimestamp=local.ms(hour) + 1000)
    assert found == last
    assert 0 < len({name for name in some if name.startswith("log/")}) <= len(objects) // 2 + 1
    found, none = gets(topics="None")
    assert (found, [name for name in none if not name.startswith("manifest/")]) == ([], [])
    # The plan needs the manifest only, and no listing.
    before = len(written.requests())
    plan_of(parsed(written, broker=BROKER))
    calls = written.requests()[before:]
    assert {call for call, _ in calls} == {"GetObject"}
    assert {name.rpartition("/")[0].rpartition("/")[2] for _, name in calls} == {"manifest"}


def test_what_the_root_does_not_name_yet_is_not_in_the_table(place: Place) -> None:
    async def script(store: BucketMessageStore) -> None:
        await fill(store, 10)
        await upload(store)
        await fill(store, 10, first=10)
        await until_dispatched(store)
        await store.flush()
        while await store.uploads._upload_object(force=True):
            pass
        assert store.manifest.unsaved == 1
        found = await trio.to_thread.run_sync(rows, place)
        assert [row["queueOffset"] for row in found] == list(range(10))
        await store.uploads.save()
        found = await trio.to_thread.run_sync(rows, place)
        assert [row["queueOffset"] for row in found] == list(range(20))

    run(place, script)


def test_what_has_expired_is_gone(place: Place) -> None:
    run(place, write)
    everything = log_rows(place)
    hour = sorted(row["storeTimestamp"] for row in everything)[len(everything) * 2 // 3 - 1]

    async def script(store: BucketMessageStore) -> None:
        assert await store.bucket_queues.expire(local.ms(hour) + 1) == 8
        await fill(store, 3, queue_id=1, first=HOURS * COUNT)
        await upload(store)

    run(place, script)
    expected = [row for row in log_rows(place) if row["storeTimestamp"] > hour]
    assert len(expected) == COUNT * 3 + 3
    assert rows(place) == expected

    async def all_gone(store: BucketMessageStore) -> None:
        assert await store.bucket_queues.expire(1 << 60) > 0
        assert any(not entry.object.length for entry in store.manifest.entries)  # where queues end

    run(place, all_gone)
    assert rows(place) == []
    assert damaged(place) == []


def test_a_deleted_topic_and_a_new_one_of_its_name(place: Place, small_joins: None) -> None:
    async def script(store: BucketMessageStore) -> None:
        for number in range(4):
            await fill(store, 10, first=number * 10)
            await fill(store, 10, topic="Other", first=number * 10)
            await upload(store)
        await store.delete_topic("Other")
        await put(store, b"new", topic="Other")
        await upload(store)

    run(place, script)
    found = rows(place)
    assert [place_of(row) for row in found] == sorted([("Other", 0, 0), *((TOPIC, 0, n) for n in range(40))])
    assert found[0]["body"] == b"new"

    async def joined(store: BucketMessageStore) -> None:
        assert await join(store)

    run(place, joined)
    assert rows(place) == found


def test_brokers_of_a_cluster_are_one_table(place: Place) -> None:
    async def script(store: BucketMessageStore) -> None:
        await fill(store, 7)
        await upload(store)

    for name in ("broker-a", "broker b"):
        run(place, script, name)
    found = rows(place)
    assert sorted({row["brokerName"] for row in found}) == ["broker b", "broker-a"]
    assert len(found) == 14
    assert [row["brokerName"] for row in rows(place, broker="broker b")] == ["broker b"] * 7
    assert len(rows(place, broker="broker b,broker-a")) == 14
    assert {row["brokerName"] for row in rows(place, brokerName="x")} == {"x"}
    with pytest.raises(OptionError, match=r"option broker is not given: expected one broker, with startingPosition"):
        rows(place, startingPosition=5)
    assert len(rows(place, startingPosition=5, broker="broker-a")) == 6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"broker": "b"}, "option broker = 'b': expected to be given with cluster"),
        ({"endpoint": "http://u:pw@h"}, r"option endpoint = 'http://\*\*\*@h': expected to be given with cluster"),
        ({"cluster": "C", "endpoint": "http://u:pw@h"}, r"option endpoint = 'http://\*\*\*@h': .* without a user"),
        ({"cluster": "C", "path": "s3://key:pw@b"}, r"option path = 's3://\*\*\*@b': .* without a user"),
        ({"cluster": "C", "path": "/local"}, "option path = '/local': expected s3://BUCKET/PREFIX"),
        ({"cluster": "C", "path": "s3://b/a//b"}, "option path = .*: expected s3://BUCKET/PREFIX"),
        ({"cluster": "C", "storageOptions": '{"secret": 1}'}, "option storageOptions = '...': .* keys come from"),
        ({"cluster": "C", "consumeQueues": "never"}, "option consumeQueues = '...': expected not to be given"),
        ({"cluster": "C", "pathStyle": "maybe"}, "option pathStyle = 'maybe': expected true or false"),
    ],
)
def test_wrong_options(options: dict[str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text) as error:
        parse({"path": "s3://b/p", **options})
    assert "pw" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://b", ("s3", "b", "")),
        ("s3a://b.c/", ("s3", "b.c", "")),
        ("gs://b/prod/mq/", ("gs", "b", "prod/mq")),
        ("az://b/prod", ("az", "b", "prod")),
    ],
)
def test_paths_of_buckets(path: str, expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AZURE_STORAGE_ACCOUNT_NAME": "a",
        "AZURE_STORAGE_ACCOUNT_KEY": "a2V5",
        "GOOGLE_SKIP_SIGNATURE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    options = {"path": path, "cluster": "C", "region": "eu-west-1", "pathStyle": "false"}
    found = parse(options).bucket
    assert found is not None
    assert found[:3] == expected
    assert (found.cluster, found.brokers, found.region, found.path_style) == ("C", (), "eu-west-1", False)
    BucketReader(found)
