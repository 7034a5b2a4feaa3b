"""The jobs' processing of records without Spark: from rows to files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs the spark extra: pip install 'trimq[spark]'")
pytest.importorskip("pyspark", reason="needs the spark extra: pip install 'trimq[spark]'")

import msgspec
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tests.spark.logs import START, LogWriter
from tests.spark.mixed import ENTRIES, QUEUE_FILE, SLOTS, by_broker, entries, mixed, queue_files
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.queue.deleted_topics import DeletedTopic, DeletedTopics
from trimq.pipeline.jobs.dispatch import DELAY_LEVELS, delay_table, dispatch_batch, dropped_topics
from trimq.pipeline.jobs.index_files import read_index_file, write_index_files
from trimq.pipeline.jobs.job_support import Target, groups
from trimq.pipeline.jobs.rebuild import write_queue_files, write_whole_queues
from trimq.pipeline.store.files import DataFile, StoreFiles
from trimq.pipeline.store.options import StoreOptions
from trimq.pipeline.store.plan import plan
from trimq.pipeline.store.table import walk
from trimq.pipeline.store.walk import Chunk
from trimq.protocol.dispatch_rules import unit_tags_code
from trimq.protocol.hashing import key_hash
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_text import decode_properties
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT, UNIT_SIZE

pytestmark = pytest.mark.one_pyspark


def dispatch_rows(
    root: Path, split_size: int, dropped: dict[str, Any] | None = None, *, tags: bool = True
) -> list[dict[str, Any]]:
    """Each record's row; first keys are numbered from the start of the log."""
    files, reading = StoreFiles(str(root)), StoreOptions(path=str(root), split_size=split_size)
    rows: list[dict[str, Any]] = []
    keys = 0
    for number, part in enumerate(plan(files, reading).parts):
        for item in walk(files, part, reading):
            assert isinstance(item, Chunk)
            batch, more = dispatch_batch(item, number, keys, delay_table(DELAY_LEVELS), dropped, tags=tags)
            keys += more
            rows += batch.to_pylist()
    return rows


@pytest.mark.parametrize("tags", [True, False])
def test_units_and_keys_are_those_that_the_broker_dispatches(tmp_path: Path, tags: bool) -> None:
    writer = LogWriter(tmp_path / "store").put_all(mixed(300))
    rows = dispatch_rows(writer.write(), 3000, tags=tags)
    keys = 0
    for row, sent in zip(rows, writer.sent, strict=True):
        text = "".join(f"{name}\x01{value}\x02" for name, value in sent.properties.items())
        properties = decode_properties(text)
        assert row["tagsCode"] == unit_tags_code(sent.topic, text, sent.time, delay_table(DELAY_LEVELS))
        assert row["hashes"] == [key_hash(sent.topic, key) for key in index_keys(properties, tags=tags)]
        assert row["keyNumber"] == keys
        assert (row["topic"], row["phy"], row["size"]) == (sent.topic, sent.phy, sent.size)
        keys += len(row["hashes"])
    assert keys > 300


def test_files_are_those_of_the_broker(tmp_path: Path) -> None:
    root = LogWriter(tmp_path / "store").put_all(mixed(400, seed=7)).write()
    rows = dispatch_rows(root, 3000)
    out = Target(str(tmp_path / "out"))
    units = QUEUE_FILE // 20
    queued = sorted(
        ({**row, "file": row["queueOffset"] // units} for row in rows if row["queued"]),
        key=lambda row: (row["topic"], row["queueId"], row["queueOffset"]),
    )
    finished = write_queue_files(out, QUEUE_FILE, iter(pa.Table.from_pylist(queued).to_batches(max_chunksize=37)))
    assert all(row["regular"] for batch in finished for row in batch.to_pylist())
    capacity = ENTRIES - 1
    total = sum(len(row["hashes"]) for row in rows)
    found = []
    for row in rows:
        for at, key in enumerate(row["hashes"]):
            number = row["keyNumber"] + at
            entry = {"number": number, "hash": key, "phy": row["phy"], "storeTime": row["storeTime"]}
            found.append({"file": number // capacity, **entry})
            if number % capacity == capacity - 1 and number + 1 < total:
                found.append({"file": number // capacity + 1, **entry})
    table = pa.Table.from_pylist(sorted(found, key=lambda row: (row["file"], row["number"])))
    written = list(write_index_files(out, SLOTS, ENTRIES, iter(table.to_batches(max_chunksize=53))))
    assert len(written) > 3
    (path, *_) = written[0]["path"].to_pylist()
    read = list(read_index_file(StoreFiles(str(root)), SLOTS, ENTRIES, 0, DataFile(path, 0, Path(path).stat().st_size)))
    assert [batch["kind"].null_count for batch in read] == [capacity]
    for batch in written:
        Path(batch["path"][0].as_py()).rename(tmp_path / "out" / "index" / f"{batch['file'][0].as_py():017d}")
    broker = by_broker(root, tmp_path)
    assert queue_files(tmp_path / "out") == queue_files(broker)
    assert entries(tmp_path / "out") == entries(broker)


def test_a_deleted_topics_records_have_no_units(tmp_path: Path) -> None:
    """As in the broker, log offset and time decide; records of the topic after its next creation have units."""
    root = LogWriter(tmp_path / "store").put_all(mixed(200)).write()
    rows = dispatch_rows(root, 3000)
    later = next(row["phy"] for row in rows[150:] if row["topic"] == "A")
    noted = DeletedTopics(RealDisk(), str(root))
    noted.topics = {"A": DeletedTopic(later, START + 1_000_000), "B": DeletedTopic(1 << 40, START + 60 * 700)}
    (root / "topics.dropped").write_bytes(msgspec.json.encode(noted.topics))
    noted.load()
    dropped = dropped_topics(StoreFiles(str(root)))
    assert dropped == {topic: (each.position, each.wall_ms) for topic, each in noted.topics.items()}
    left = dispatch_rows(root, 3000, dropped)
    assert [row["queued"] for row in left] == [
        row["queued"] and not noted.has(row["topic"], row["phy"], row["storeTime"]) for row in rows
    ]
    gone = {(row["topic"], row["queued"]) for row in left if row["topic"] in "AB"}
    assert gone == {(topic, queued) for topic in "AB" for queued in (True, False)}
    assert [row["hashes"] for row in left] == [row["hashes"] for row in rows], "for the index only the offset counts"
    (root / "topics.dropped").write_bytes(b"{")
    assert dropped_topics(StoreFiles(str(root))) == {}


def test_nothing_to_sync_needs_no_directory(tmp_path: Path) -> None:
    Target(str(tmp_path / "not" / "made")).sync()


def test_a_queue_with_gaps_is_written_file_by_file(tmp_path: Path) -> None:
    """One task can write a queue of any size: full files are on disk before the next rows are requested."""
    names = ("topic", "queueId", "phy", "size", "tagsCode", "queueOffset")
    directory = tmp_path / "consumequeue"

    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(0, 100, 5):
            full = {"T": max(0, number - 3) // 10, "U": max(0, number - 53) // 10} if number else {}
            for topic, (low, high) in {"T": (0, 50), "U": (50, 100)}.items():
                if low < number < high:
                    assert len(list(directory.glob(f"{topic}/0/*"))) >= full[topic]
            topic = "T" if number < 50 else "U"
            units = [(topic, 0, n * 1000, 100, 7, n % 50 + (n % 50 > 20)) for n in range(number, number + 5)]
            yield pa.RecordBatch.from_pylist([dict(zip(names, unit, strict=True)) for unit in units])

    written = pa.Table.from_batches(write_whole_queues(Target(str(tmp_path)), 10 * UNIT_SIZE, 1 << 20, rows()))
    assert written.select(["topic", "file", "units"]).to_pylist() == [
        {"topic": topic, "file": file, "units": 10 if file < 5 else 1} for topic in "TU" for file in range(6)
    ]
    for topic, base in (("T", 0), ("U", 50)):
        data = b"".join(path.read_bytes() for path in sorted((directory / topic / "0").iterdir()))
        units = [UNIT.unpack_from(data, at * UNIT_SIZE) for at in range(51)]
        assert units[:21] + units[22:] == [((base + n) * 1000, 100, 7) for n in range(50)]
        assert units[21] == (0, FILLER_SIZE, 0)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab")), max_size=30), st.integers(1, 7))
def test_groups_of_sorted_rows(pairs: list[tuple[int, str]], size: int) -> None:
    pairs.sort()
    rows: list[dict[str, Any]] = [{"a": a, "b": b, "n": number} for number, (a, b) in enumerate(pairs)]
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("n", pa.int64())])
    batches = pa.Table.from_pylist(rows, schema=schema).to_batches(max_chunksize=size)
    found = [(key, table["n"].to_pylist()) for key, table in groups(iter(batches), ("a", "b"))]
    wanted: dict[tuple[int, str], list[int]] = {}
    for row in rows:
        wanted.setdefault((row["a"], row["b"]), []).append(row["n"])
    assert found == list(wanted.items())
