"""The table of a tier in a bucket, without Spark: it equals the log, whatever was joined; nothing else is read."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs the spark extra: pip install 'trimq[spark]'")

import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.interop.harness.object_server import ObjectServer
from tests.spark import test_store_core as local
from tests.spark.buckets import BROKER, Place, damaged, join, new_place, parsed, place_of, rows, run, upload
from tests.store.stores import TOPIC, fill, put, until_dispatched
from trimq.broker.store.tiered.bucket import joiner
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.stretch_table import StretchTable
from trimq.pipeline.jobs.archive_bucket import BucketBounds, bucket_bounds
from trimq.pipeline.options import OptionError
from trimq.pipeline.store.bucket import BucketError, BucketReader, ObjectGoneError
from trimq.pipeline.store.bucket_plan import plan_history
from trimq.pipeline.store.files import StorePathError
from trimq.pipeline.store.history import _history, shown
from trimq.pipeline.store.options import parse
from trimq.pipeline.store.plan import plan_of
from trimq.pipeline.store.table import batches
from trimq.protocol.bucket_manifest import Entry, Root, StoredObject, Stretch, StretchRows
from trimq.protocol.bucket_object import HEADER_SIZE

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


# -- faults


def test_an_object_that_goes_while_a_table_is_read(place: Place, small_joins: None) -> None:
    """The text says what to do; an object that is missing although the manifest names it is damage."""
    run(place, write)
    planned = parsed(place)
    parts = plan_of(planned).parts

    async def script(store: BucketMessageStore) -> None:
        assert await join(store)

    run(place, script)
    with pytest.raises(ObjectGoneError, match=r"log/0+-\d+ is not in the bucket any more.*tieredStoreBucketGraceTime"):
        [list(batches(None, part, planned)) for part in parts]
    gone = next((place.objects / "segments").iterdir())
    gone.unlink()
    with pytest.raises(BucketError, match=r"segments/.* is damaged: it is missing, although the manifest names it"):
        rows(place)
    (damage,) = damaged(place)
    assert damage.file.endswith(gone.name)
    assert damage.why == "it is missing, although the manifest names it"
    assert pickle.loads(pickle.dumps(ObjectGoneError("a"))).name == "a"


def harm(path: Path, at: int) -> None:
    """Change a byte of an object, whose attributes stay."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_block_has_no_rows_and_is_in_the_table_of_damage(place: Place) -> None:
    run(place, write)
    expected = log_rows(place)
    harmed = sorted((place.objects / "log").iterdir())[2]
    harm(harmed, HEADER_SIZE + 20)
    found = rows(place)
    missing = [row for row in expected if row not in found]
    assert 0 < len(missing) < 30
    assert len({(row["topic"], row["queueId"]) for row in missing}) == 1
    (damage,) = damaged(place)
    assert damage.file.endswith(f"log/{harmed.name}")
    assert damage.why.endswith("the checksum of the block is wrong")
    assert damage.phy == min(row["commitLogOffset"] for row in missing)
    # Without the check only what is not a record at all is left out: the unit has another log offset.
    assert len(rows(place, checkCrc="false")) >= len(expected) - 1


def test_units_that_do_not_fit(place: Place) -> None:
    run(place, write)
    harm(sorted((place.objects / "log").iterdir())[2], HEADER_SIZE + 8 + 3)  # the size of the first record
    assert len(rows(place, checkCrc="false")) < 3 * HOURS * COUNT
    assert [damage.why.rpartition(": ")[2] for damage in damaged(place, checkCrc="false")] == [
        "the units of the block do not fit its records"
    ]


def test_a_damaged_directory_is_an_error_unless_damage_is_asked_for(place: Place) -> None:
    run(place, write)
    harmed = sorted((place.objects / "log").iterdir())[2]
    harm(harmed, harmed.stat().st_size - 60)
    with pytest.raises(BucketError, match=rf"log/{harmed.name} in the bucket is damaged: the directory"):
        rows(place)
    (damage,) = damaged(place)
    assert damage.file.endswith(f"log/{harmed.name}")
    assert damage.length > 0


def test_a_manifest_that_cannot_be_read(place: Place) -> None:
    with pytest.raises(StorePathError, match=r"s3://.* has no broker of cluster C1: nothing is in prod/mq/C1"):
        rows(place)
    run(place, write)
    with pytest.raises(StorePathError, match=r"no tier of broker no in cluster C1: there is no prod/mq/C1/no/manifest"):
        rows(place, broker="no")
    other = place.objects.parent / "other"
    shutil.copytree(place.objects, other)
    with pytest.raises(BucketError, match="is that of broker broker-a in cluster C1"):
        rows(place, broker="other")
    shutil.rmtree(other)
    page = max((place.objects / "manifest").glob("page-*"))
    harm(page, 40)
    with pytest.raises(BucketError, match=rf"manifest/{page.name} in the bucket: the manifest page is damaged"):
        rows(place)
    page.unlink()
    with pytest.raises(BucketError, match=r"the manifest names what is not there: .*manifest/page"):
        rows(place)
    harm(place.objects / "manifest/root", 5)
    with pytest.raises(BucketError, match=r"manifest/root in the bucket: the root of the manifest is damaged"):
        rows(place)


def test_no_text_has_a_key(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run(place, write)
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    plan = plan_of(parsed(place))
    assert secret.encode() not in pickle.dumps((plan, parsed(place)))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(
        BucketError, match=r"refuses access to .* HTTP status 403 SignatureDoesNotMatch.*environment"
    ) as error:
        rows(place, broker=BROKER)
    assert error.value.__cause__ is None
    assert "wrong-secret" not in str(error.value)
    assert os.environ["AWS_ACCESS_KEY_ID"] not in str(error.value).replace(place.bucket, "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    place.server.delete_bucket(place.bucket)
    with pytest.raises(BucketError, match="the bucket does not exist"):
        rows(place, broker=BROKER)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    options = parse({"path": "s3://b/p", "cluster": "C"})
    assert options.bucket is not None
    with pytest.raises(BucketError, match=r"needs the package obstore.*pip install 'trimq\[spark,s3\]'"):
        BucketReader(options.bucket)


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


# -- overlaps


@st.composite
def stretches(draw: st.DrawFn) -> list[tuple[StoredObject, Stretch]]:
    found = []
    for number in range(draw(st.integers(1, 9))):
        stored = StoredObject(
            draw(st.integers(0, 3)), 9, draw(st.integers(0, 2)), draw(st.integers(1, 2)), number, 100, 50
        )
        begin, count = draw(st.integers(0, 30)), draw(st.integers(0, 12))
        queue = draw(st.integers(0, 1))
        found.append((stored, Stretch("T", queue, 1, begin, count, 1, number, 0, 1, 0, 1)))
    return found


@given(stretches())
def test_overlaps_show_what_a_broker_shows(given_stretches: list[tuple[StoredObject, Stretch]]) -> None:
    root = Root("C", "b", 1, "o")
    page = [Entry(stored, StretchRows.of([stretch])) for stored, stretch in given_stretches]
    history = _history("b", "", root, [page])
    found = shown(history)
    actual = {}
    for row, begin, end in zip(found.rows, found.begins.tolist(), found.ends.tolist(), strict=True):
        for offset in range(begin, end):
            key = int(row["queue_id"]), offset
            assert key not in actual
            actual[key] = history.objects[int(row["object"])]
    expected = {}
    for queue in range(2):
        table = StretchTable()
        for stored, stretch in given_stretches:
            if stretch.queue_id == queue and stretch.messages:
                table.add(stored, stretch)
        for offset in range(50):
            part = table.at(offset, "T", queue)
            if part is not None:
                expected[queue, offset] = part.stored
    assert actual == expected


def test_stretches_of_an_object_may_stand_in_several_pages() -> None:
    stored = StoredObject(0, 9, 1, 1, 0, 100, 50)
    pages = [[Entry(stored, [Stretch(topic, 0, 1, 0, 2, 1, at, 0, 1, 0, 1)])] for at, topic in enumerate("TUT")]
    pages[2][0].stretches[0] = pages[2][0].stretches[0]._replace(queue_id=1)  # type: ignore[index]
    history = _history("b", "", Root("C", "b", 1, "o"), pages)
    (part,) = plan_history(history, parse({"path": "s3://b", "cluster": "C"}))
    (piece,) = part.pieces
    assert [piece.topics[int(row["topic"])] for row in piece.stretches.rows] == ["T", "U", "T"]


# -- what an archive may miss


def test_an_archive_that_may_miss_messages_is_recognised(place: Place) -> None:
    ends: list[int] = []

    async def script(store: BucketMessageStore) -> None:
        for number in range(4):
            await fill(store, 5, first=5 * number)
            await fill(store, 5, topic="Other", first=5 * number)
            store.clock.advance(1.0)  # type: ignore[attr-defined]
            await upload(store)
            ends.append(store.manifest.end)

    run(place, script)

    def bounds(begin: int | None, **options: Any) -> BucketBounds:
        return bucket_bounds(parsed(place, broker=BROKER, **options), begin)

    assert bounds(None) == (0, ends[3], "")
    assert bounds(0) == bounds(ends[0] - 1) == bounds(ends[3]) == (0, ends[3], "")

    async def first_gone(store: BucketMessageStore) -> None:
        store.bucket_queues.replace(store.manifest.entries[:1], [])
        await store.uploads.save()

    run(place, first_gone)
    start = ends[0]
    assert bounds(None) == (start, ends[3], "")
    assert bounds(ends[0]) == (start, ends[3], "")
    assert bounds(ends[0] - 1).why == f"the bucket begins at {start}, the archive ends at {start - 1}"

    async def one_segment_gone(store: BucketMessageStore) -> None:
        """Of the oldest window one queue's messages are gone: as if they had been in a segment of their own."""
        oldest = store.manifest.entries[0]
        kept = Entry(oldest.object, [one for one in oldest.stretches if one.topic == "Other"])
        store.manifest.change([oldest.object], [kept])
        await store.uploads.save()

    run(place, one_segment_gone)
    assert bounds(ends[1]) == (start, ends[3], "")
    assert bounds(ends[1] - 1).why == f"1 queues (as {TOPIC}/0) begin later"
    assert bounds(ends[1] - 1, topics="Other").why == ""

    async def all_gone(store: BucketMessageStore) -> None:
        await store.bucket_queues.expire(1 << 60)

    run(place, all_gone)
    assert bounds(None) == (ends[3], ends[3], "")
    assert bounds(ends[3]) == (ends[3], ends[3], "")
    assert bounds(ends[2]).why == f"the bucket begins at {ends[3]}, the archive ends at {ends[2]}"

    async def more(store: BucketMessageStore) -> None:
        await fill(store, 1, topic="New")
        await upload(store)

    run(place, more)
    # The queues have ended at the tombstones, all of which the archive has.
    assert bounds(ends[3]).why == ""


def test_a_queue_whose_last_messages_have_expired_unarchived(place: Place) -> None:
    begin: list[int] = []

    async def script(store: BucketMessageStore) -> None:
        await fill(store, 3)
        await upload(store)
        begin.append(store.manifest.end)
        await fill(store, 3, topic="Gone")
        await fill(store, 3, first=3)
        await upload(store)
        entry = store.manifest.entries[1]
        kept, gone = (
            Entry(entry.object, [one for one in entry.stretches if (one.topic == "Gone") is is_gone])
            for is_gone in (False, True)
        )
        end = gone.stretches[0]._replace(offset=3, messages=0, size=0, blocks=0, position=0)
        expired = Entry(entry.object._replace(length=0, directory=0, number=1), [end])
        store.manifest.change([entry.object], [kept, expired])
        await store.uploads.save()

    run(place, script)
    options = parsed(place, broker=BROKER)
    assert bucket_bounds(options, begin[0]).why == "the last messages of 1 queues (as Gone/0) have expired"
    assert bucket_bounds(parsed(place, broker=BROKER, topics=TOPIC), begin[0]).why == ""
    assert len(rows(place)) == 6


def test_a_queue_that_ended_before_the_archive_and_goes_on(place: Place) -> None:
    begin: list[int] = []

    async def script(store: BucketMessageStore) -> None:
        await fill(store, 3)
        await upload(store)
        await store.bucket_queues.expire(1 << 60)
        begin.append(store.manifest.end)
        await fill(store, 3, topic="Other")
        await upload(store)
        await fill(store, 3, first=3)
        await upload(store)

    run(place, script)
    assert bucket_bounds(parsed(place, broker=BROKER), begin[0]) == (begin[0], log_end(place), "")


def log_end(place: Place) -> int:
    ends: list[int] = []

    async def script(store: BucketMessageStore) -> None:
        ends.append(store.manifest.end)

    run(place, script)
    return ends[0]
