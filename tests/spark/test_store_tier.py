"""The table of a store with its tier, without Spark: each message once, wherever it is, and nothing else is read."""

import errno
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs the spark extra: pip install 'trimq[spark]'")
pytest.importorskip("fsspec", reason="needs the spark extra: pip install 'trimq[spark]'")

import msgspec
import trio

from tests.spark.test_store_core import damaged, ms, rows
from tests.store.stores import TOPIC, fill, put, until_dispatched
from tests.store.tiered.real_stores import opened_store
from trimq.pipeline.jobs.archive import ArchiveError, ArchiveOptions, Batch, _range
from trimq.pipeline.store.files import LocalSource, StoreFiles, StorePathError
from trimq.pipeline.store.options import parse
from trimq.pipeline.store.plan import plan
from trimq.pipeline.store.tier import tier_files, without_offset
from trimq.protocol.lenient_json import loads
from trimq.protocol.tiered_layout import APACHE_UPLOADED

pytestmark = pytest.mark.one_pyspark

QUEUES = 2
COUNT = 40
"""Messages of each queue in each of two hours."""


async def write(root: Path) -> None:
    """Messages of two topics in two hours: most are in the tier only, some in both, the last ones in the log."""
    async with opened_store(root) as store:
        for hour in range(2):
            for number in range(COUNT):
                for queue in range(QUEUES):
                    await fill(store, 1, queue_id=queue, first=hour * COUNT + number)
                await fill(store, 1, topic="Other", first=hour * COUNT + number)
                store.clock.advance(1.0)  # type: ignore[attr-defined]
            store.clock.advance(3600.0)  # type: ignore[attr-defined]
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        await fill(store, 5, first=2 * COUNT)
        await put(store, b"never uploaded", topic="New")
        await until_dispatched(store)
        await store.flush()
        while len(store.files.files) > 2:
            await store._clean._delete_log_files(immediately=True)
            await store._clean._follow()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiered")
    trio.run(write, root)
    return root


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "place")
    return tmp_path / "place"


def read(place: Path, **options: Any) -> list[dict[str, Any]]:
    return rows(place / "store", tieredStoreFilePath=place / "tier", **options)


def places(found: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return sorted((row["topic"], row["queueId"], row["queueOffset"]) for row in found)


ALL = sorted(
    [(TOPIC, queue, number) for queue in range(QUEUES) for number in range(2 * COUNT)]
    + [("Other", 0, number) for number in range(2 * COUNT)]
    + [(TOPIC, 0, 2 * COUNT + number) for number in range(5)]
    + [("New", 0, 0)]
)


def test_each_message_once_wherever_it_is(place: Path) -> None:
    local = rows(place / "store")
    assert 5 < len(local) < len(ALL)
    found = read(place)
    for options in ({}, {"splitSize": 600}, {"splitSize": 0}, {"consumeQueues": "never"}, {"consumeQueues": "always"}):
        found = read(place, **options)
        assert places(found) == ALL
        assert [row["queueOffset"] for row in found if (row["topic"], row["queueId"]) == (TOPIC, 1)] == list(
            range(2 * COUNT)
        )
    by_place = {(row["topic"], row["queueId"], row["queueOffset"]): row for row in found}
    for row in local:
        assert by_place[row["topic"], row["queueId"], row["queueOffset"]] == row
    assert len({row["commitLogOffset"] for row in found}) == len(ALL)
    assert min(row["commitLogOffset"] for row in found) == 0
    assert len({row["msgId"] for row in found}) == len(ALL)
    assert damaged(place / "store", tieredStoreFilePath=place / "tier") == []


def test_each_message_once_without_queues_and_with_a_torn_unit(place: Path) -> None:
    """Without queues, as with those in RocksDB, the log offset alone says which records the log has."""
    shutil.rmtree(place / "store/consumequeue")
    units = max(place.glob("tier/*/broker-a/Other/0/CONSUME_QUEUE/*[0-9]"), key=lambda file: file.name[8:])
    units.write_bytes(units.read_bytes() + b"torn")
    assert places(read(place)) == ALL
    assert damaged(place / "store", tieredStoreFilePath=place / "tier") == []


def test_the_metadata_says_which_segments_are_of_a_time(place: Path) -> None:
    file = place / "store/config/tieredStoreMetadata.json"
    tables: Any = loads(file.read_bytes())
    tables["commitLogFileSegmentTable"]["broker-a/Other/0"]["0"]["endTimestamp"] = 5
    file.write_bytes(msgspec.json.encode(tables))
    found = [row["queueOffset"] for row in read(place, topics="Other", startingTimestamp=6)]
    assert 0 < min(found) < 2 * COUNT
    assert len(read(place, topics="Other", startingTimestamp=5)) == 2 * COUNT


def test_rows_of_the_tier_are_those_of_the_log(tmp_path: Path) -> None:
    """A store whose log has all messages, and the same one after its log was deleted."""

    async def run(root: Path) -> None:
        await write(root)

    trio.run(run, tmp_path)
    before = {row["commitLogOffset"]: row for row in read(tmp_path)}
    for file in (tmp_path / "store/commitlog").iterdir():
        file.unlink()
    shutil.rmtree(tmp_path / "store/consumequeue")
    after = {row["commitLogOffset"]: row for row in read(tmp_path)}
    assert 0 < len(after) < len(before)
    assert after.items() <= before.items()
    shutil.rmtree(tmp_path / "store/commitlog")
    assert {row["commitLogOffset"]: row for row in read(tmp_path)} == after
    with pytest.raises(StorePathError, match="is no store"):
        rows(tmp_path / "store")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"topics": "Other"}, lambda topic, queue, offset: topic == "Other"),
        ({"topicsPattern": "Oth.*|New"}, lambda topic, queue, offset: topic != TOPIC),
        ({"topics": TOPIC, "queues": "1"}, lambda topic, queue, offset: topic == TOPIC and queue == 1),
        ({"queues": "0"}, lambda topic, queue, offset: queue == 0),
        (
            {"topics": "Other", "startingOffsets": '{"Other": {"0": 7}}', "endingOffsets": '{"Other": {"0": 30}}'},
            lambda topic, queue, offset: topic == "Other" and 7 <= offset < 30,
        ),
    ],
)
def test_what_is_selected(options: dict[str, str], wanted: Any, place: Path) -> None:
    assert places(read(place, **options)) == [one for one in ALL if wanted(*one)]


class Reads:
    """Counts the bytes that are read from each kind of segment, by topic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.files: set[str] = set()
        read = LocalSource.read

        def counted(source: LocalSource, begin: int, end: int) -> memoryview:
            data = read(source, begin, end)
            words = source._path.split("/")
            if words[-2] in {"COMMIT_LOG", "CONSUME_QUEUE"}:
                self.bytes[words[-4], words[-2]] += len(data)
                self.files.add(source._path)
            return data

        monkeypatch.setattr(LocalSource, "read", counted)


def test_other_topics_and_times_are_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = read(place)
    times = sorted(ms(row["storeTimestamp"]) for row in everything)
    middle = times[0] + 1_800_000
    first = [row for row in everything if ms(row["storeTimestamp"]) < middle]
    assert 0 < len(first) < len(everything)
    whole = sum(file.stat().st_size for file in place.glob(f"tier/*/broker-a/{TOPIC}/*/COMMIT_LOG/*"))
    counted = Reads(monkeypatch)
    assert places(read(place, topics="Other")) == [one for one in ALL if one[0] == "Other"]
    assert {topic for topic, _ in counted.bytes} == {"Other"}

    counted = Reads(monkeypatch)
    assert places(read(place, endingTimestamp=middle)) == places(first)
    assert counted.bytes[TOPIC, "COMMIT_LOG"] < 0.7 * whole

    counted = Reads(monkeypatch)
    late = [row for row in everything if ms(row["storeTimestamp"]) >= middle]
    assert places(read(place, startingTimestamp=middle)) == places(late)
    assert counted.bytes[TOPIC, "COMMIT_LOG"] < 0.7 * whole
    assert not any(file.endswith("0" * 20) for file in counted.files if "COMMIT_LOG" in file)

    for options in ({"endingTimestamp": times[0] - 1}, {"topics": "New"}):
        counted = Reads(monkeypatch)
        assert len(read(place, **options)) == ("topics" in options)
        assert not counted.bytes
    counted = Reads(monkeypatch)
    assert read(place, startingTimestamp=times[-1] + 1) == []
    assert counted.bytes[TOPIC, "COMMIT_LOG"] < 2_000


def test_messages_of_apaches_broker_have_no_offset_in_the_log(place: Path) -> None:
    before = read(place)
    for file in place.glob("tier/*/broker-a/Other/0/CONSUME_QUEUE/*.phy"):
        file.unlink()
    found = place.glob(f"tier/*/broker-a/{TOPIC}/1/CONSUME_QUEUE/*.phy")
    sides = sorted(found, key=lambda file: file.name[8:])
    first = bytearray(sides[0].read_bytes()[:-16])
    first[3 * 16 + 11] ^= 1  # a size
    first[4 * 16 + 15] ^= 1  # a checksum
    sides[0].write_bytes(first)
    sides[1].write_bytes(b"\xff" * 16 + sides[1].read_bytes()[16:32] + b"\0" * 16 + sides[1].read_bytes()[48:])
    after = read(place)
    assert places(after) == places(before)
    old = {(row["topic"], row["queueId"], row["queueOffset"]): row["commitLogOffset"] for row in before}
    lost = [
        (row["topic"], row["queueId"], row["queueOffset"])
        for row in after
        if row["commitLogOffset"] != old[row["topic"], row["queueId"], row["queueOffset"]]
    ]
    assert all(row["commitLogOffset"] >= APACHE_UPLOADED for row in after if row["commitLogOffset"] not in old.values())
    log_start = min(row["commitLogOffset"] for row in rows(place / "store"))
    in_tier = [one for one in ALL if one[0] == "Other" and old[one] < log_start]
    assert sorted(lost) == sorted(
        [*in_tier, (TOPIC, 1, 3), (TOPIC, 1, 4), (TOPIC, 1, 19), (TOPIC, 1, 20), (TOPIC, 1, 22)]
    )
    assert len({row["msgId"] for row in after}) == len(after)


def test_damage_in_the_tier_is_skipped_and_listed(place: Path) -> None:
    (log,) = (file for file in place.glob("tier/*/broker-a/Other/0/COMMIT_LOG/*") if file.name.endswith("0" * 20))
    (units,) = (file for file in place.glob("tier/*/broker-a/Other/0/CONSUME_QUEUE/*") if file.name.endswith("0" * 20))
    data = bytearray(log.read_bytes())
    data[100] ^= 1  # the body of the first message
    log.write_bytes(data)
    data = bytearray(units.read_bytes())
    data[20 * 5 : 20 * 5 + 8] = (1 << 40).to_bytes(8, "big")
    units.write_bytes(data)
    assert places(read(place)) == [one for one in ALL if one not in {("Other", 0, 0), ("Other", 0, 5)}]
    found = damaged(place / "store", tieredStoreFilePath=place / "tier")
    assert sorted(one.why.split(" does")[0] for one in found) == [
        "the unit of queue Other/0 at 0",
        "the unit of queue Other/0 at 5",
    ]


def test_what_cannot_be_read_says_why(place: Path) -> None:
    with pytest.raises(StorePathError, match=r"has 0 directories \*/broker-a/Other/0: expected tieredStoreFilePath"):
        rows(place / "store", tieredStoreFilePath=place / "store")
    (cluster,) = (place / "tier").iterdir()
    shutil.copytree(cluster, place / "tier/00000000_other")
    with pytest.raises(StorePathError, match=r"has 2 directories .* with one cluster"):
        read(place)
    shutil.rmtree(place / "tier/00000000_other")
    for file in place.glob(f"tier/*/broker-a/{TOPIC}/0/COMMIT_LOG/*"):
        file.unlink()
        break
    with pytest.raises(FileNotFoundError) as missing:
        read(place)
    assert missing.value.errno == errno.ENOENT
    metadata = place / "store/config/tieredStoreMetadata.json"
    tables = loads(metadata.read_bytes())
    assert isinstance(tables, dict)
    metadata.write_text("{", encoding="utf-8")
    with pytest.raises(StorePathError, match="cannot be read"):
        read(place)
    metadata.unlink()
    with pytest.raises(StorePathError, match="has no tier: there is no"):
        read(place)


def test_messages_without_an_offset_are_counted(place: Path) -> None:
    options = parse({"path": str(place / "store"), "tieredStoreFilePath": str(place / "tier"), "splitSize": "500"})
    files, tier = StoreFiles(options.path), tier_files(options)

    def count() -> int:
        return without_offset(tier, plan(files, options).parts)

    assert count() == 0
    side = min(place.glob(f"tier/*/broker-a/{TOPIC}/1/CONSUME_QUEUE/*.phy"), key=lambda file: file.name[8:])
    side.write_bytes(side.read_bytes()[:-16])
    assert count() == 1
    side.unlink()
    assert count() == 20


def test_an_archive_takes_from_the_tier_what_the_log_has_no_longer(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = place / "archive"
    log_start = min(row["commitLogOffset"] for row in rows(place / "store"))
    files = StoreFiles(str(place / "store"))
    options = ArchiveOptions(tiered_store_file_path=str(place / "tier"))
    begin, end, lost = _range(files, [], options)
    assert (begin, lost) == (0, 0)
    taken = read(place, startingPosition=begin, endingPosition=end)
    assert places(taken) == ALL
    done = Batch(0, "broker", 0, log_start)
    assert _range(files, [done], options) == (log_start, end, 0)
    assert places(read(place, startingPosition=log_start)) == places(rows(place / "store"))
    counted = Reads(monkeypatch)
    assert places(read(place, startingPosition=log_start, endingPosition=end)) == places(rows(place / "store"))
    assert not counted.bytes
    before = Batch(0, "broker", 0, 500)
    assert _range(files, [before], options) == (500, end, 0)
    with pytest.raises(ArchiveError, match="bytes were deleted before they were archived"):
        _range(files, [before], ArchiveOptions())
    for side in place.glob("tier/*/broker-a/Other/0/CONSUME_QUEUE/*.phy"):
        side.unlink()
    with pytest.raises(ArchiveError, match=r"the tier has \d+ messages that RocketMQ's broker has uploaded"):
        _range(files, [before], options)
    assert _range(files, [before], msgspec.structs.replace(options, topics=TOPIC))[0] == 500
    assert _range(files, [before], msgspec.structs.replace(options, fail_on_data_loss=False))[0] == 500
    assert _range(files, [done], options)[0] == log_start
    assert not target.exists()


def metadata(place: Path, change: Any) -> None:
    file = place / "store/config/tieredStoreMetadata.json"
    tables: Any = loads(file.read_bytes())
    change(tables)
    file.write_bytes(msgspec.json.encode(tables))


def units_of(tables: Any, path: str) -> dict[str, Any]:
    found: dict[str, Any] = tables["consumeQueueFileSegmentTable"][path]
    return found


def tier_losses(place: Path, begin: int = 500) -> str:
    files = StoreFiles(str(place / "store"))
    options = ArchiveOptions(tiered_store_file_path=str(place / "tier"))
    with pytest.raises(ArchiveError) as refused:
        _range(files, [Batch(0, "broker", 0, begin)], options)
    accepted = _range(files, [Batch(0, "broker", 0, begin)], msgspec.structs.replace(options, fail_on_data_loss=False))
    assert accepted[0] == begin
    return str(refused.value)


@pytest.mark.parametrize("base", [400, 800, 1200])
def test_a_gap_between_units_hides_nothing_behind_it(base: int, place: Path) -> None:
    """Messages that were deleted before they were uploaded leave one."""
    metadata(place, lambda tables: units_of(tables, "broker-a/Other/0").pop(str(base)))
    gone = {("Other", 0, number) for number in range(base // 20, base // 20 + 20)}
    in_log = set(places(rows(place / "store")))
    assert places(read(place)) == [one for one in ALL if one not in gone - in_log]
    assert "all messages between, of 1 queues (as Other/0)" in tier_losses(place)


def test_what_has_expired_in_the_tier_may_be_lost_for_an_archive(place: Path) -> None:
    def expire(tables: Any) -> None:
        path = f"broker-a/{TOPIC}/1"
        for table in ("commitLogFileSegmentTable", "consumeQueueFileSegmentTable"):
            first = min(tables[table][path], key=int)
            tables[table][path][first]["status"] = 2
        tables["consumeQueueFileSegmentTable"].pop("broker-a/Other/0")

    metadata(place, expire)
    for file in place.glob(f"tier/*/broker-a/{TOPIC}/1/*/cfcd2084{0:020}*"):
        file.unlink()
    found = {offset for topic, queue, offset in places(read(place)) if (topic, queue) == (TOPIC, 1)}
    assert 0 < min(found) <= 20
    assert found == set(range(min(found), 2 * COUNT))
    assert "all messages between, of 2 queues (as Other/0)" in tier_losses(place)


def test_a_log_that_was_begun_anew(place: Path) -> None:
    for name in ("commitlog", "consumequeue", "index"):
        shutil.rmtree(place / "store" / name)
    for name in ("checkpoint", "abort"):
        (place / "store" / name).unlink(missing_ok=True)

    async def again() -> None:
        async with opened_store(place) as store:
            await fill(store, 3, topic="Other", first=900)
            await until_dispatched(store)
            await store.flush()

    trio.run(again)
    found = places(read(place))
    in_tier = [one for one in ALL if one[0] != "New" and one[2] < 2 * COUNT]
    new = {("Other", 0, 2 * COUNT + number) for number in range(3)}
    assert len(set(found)) == len(found)
    assert {*in_tier, *new} <= set(found) <= {*ALL, *new} - {("New", 0, 0)}


def test_without_queues_messages_of_apaches_broker_may_be_in_the_log_too(place: Path) -> None:
    for side in place.glob("tier/*/broker-a/Other/0/CONSUME_QUEUE/*.phy"):
        side.unlink()
    assert places(read(place)) == ALL
    shutil.rmtree(place / "store/consumequeue")
    with pytest.raises(StorePathError, match="nothing says whether the log has them too"):
        read(place)


def test_an_archive_needs_a_log(place: Path) -> None:
    for file in (place / "store/commitlog").iterdir():
        file.write_bytes(b"")
    options = ArchiveOptions(tiered_store_file_path=str(place / "tier"))
    with pytest.raises(ArchiveError, match="the log is empty"):
        _range(StoreFiles(str(place / "store")), [], options)
    assert _range(StoreFiles(str(place / "store")), [], ArchiveOptions()) == (0, 0, 0)
