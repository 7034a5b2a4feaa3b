"""Queues and index built on Spark equal those that the broker builds from the same log."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.harness.drivers import JavaClient, java_client
from tests.interop.harness.servers import SMALL, Peer, broker_on_store
from tests.interop.harness.waiting import wait_until
from tests.spark.logs import START, LogWriter, Sent
from tests.spark.mixed import ENTRIES, QUEUE_FILE, SIZES, SLOTS, by_broker, entries, mixed, queue_files
from trimq.broker.tools.offline_store import opened
from trimq.broker.tools.verdicts import Verdict
from trimq.broker.tools.verify import Verification

# PySpark 4.0 leaves sockets to its clients open
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from trimq.pipeline.jobs.rebuild import RebuildReport


def by_spark(spark: SparkSession, root: Path, *, index_tags: bool = True, **options: Any) -> RebuildReport:
    from trimq.pipeline.jobs.rebuild import RebuildOptions, rebuild  # noqa: PLC0415 - PySpark may be missing

    sizes = RebuildOptions(queue_file_size=QUEUE_FILE, slots=SLOTS, entries=ENTRIES, index_tags=index_tags)
    return rebuild(spark, str(root), str(root), sizes, **options)


def verified(root: Path, tmp_path: Path) -> Verdict:
    config = tmp_path / "verify.conf"
    config.write_text(SIZES)
    with opened(root, str(config)) as store:
        report = Verification(store).run(lambda _: None)
        assert not report.consume_queues.shown, report.consume_queues.shown
        assert not report.index.shown, report.index.shown
        return report.verdict


def test_queues_and_index_are_byte_for_byte_the_brokers(spark: SparkSession, tmp_path: Path) -> None:
    root = LogWriter(tmp_path / "store", file_size=16_384).put_all(mixed(400)).write()
    report = by_spark(spark, root, split_size=3000)
    assert (report.records, report.damages, report.irregular) == (400, [], 0)
    broker = by_broker(root, tmp_path)
    assert queue_files(root) == queue_files(broker)
    assert entries(root) == entries(broker)
    assert report.index_files == len(entries(broker)) > 2
    assert verified(root, tmp_path) is Verdict.SOUND


def test_an_index_without_tags_is_the_brokers_too_and_is_sound(spark: SparkSession, tmp_path: Path) -> None:
    """With --no-index-tags and indexTagEnable=false; checks that know about tags do not report damage."""
    from trimq.pipeline.jobs.audit import audit  # noqa: PLC0415 - PySpark may be missing

    root = LogWriter(tmp_path / "store", file_size=16_384).put_all(mixed(200)).write()
    report = by_spark(spark, root, index_tags=False)
    broker = by_broker(root, tmp_path, "indexTagEnable=false\n")
    assert entries(root) == entries(broker)
    assert verified(root, tmp_path) is Verdict.SOUND
    for store in (root, broker):
        found = audit(spark, str(store), slots=SLOTS, entries=ENTRIES)
        assert found.is_sound, found.faults
        assert found.keys == report.keys


def test_queues_that_begin_late_have_gaps_or_a_second_life(spark: SparkSession, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "store", file_size=16_384)
    writer.offsets |= {("Late", 0): 27, ("Gap", 0): 3}
    writer.put_all([Sent(topic="Late", time=START + number) for number in range(30)])
    writer.put_all([Sent(topic="Gap", time=START + 50 + number) for number in range(30)])
    writer.put_all([Sent(topic="Twice", time=START + 90 + number) for number in range(5)])
    writer.offsets["Twice", 0] = 0
    writer.put_all([Sent(topic="Twice", time=START + 100 + number) for number in range(7)])
    for hurt in (writer.sent[40], writer.sent[41], writer.sent[45]):
        start = hurt.phy // 16_384 * 16_384
        writer.files[start][hurt.phy - start + 90] ^= 255
    root = writer.write()
    report = by_spark(spark, root)
    # 69 records are whole; the first life of Twice has no units.
    assert (report.irregular, report.units) == (2, 64)
    # Adjacent damaged records are one stretch.
    assert [phy for phy, _, _ in report.damages] == [writer.sent[40].phy, writer.sent[45].phy]
    assert queue_files(root) == queue_files(by_broker(root, tmp_path))


def test_of_a_second_life_only_its_own_files_are_left(spark: SparkSession, tmp_path: Path) -> None:
    """The first life of the queue has filled two files (of 20 units) when the second begins."""
    writer = LogWriter(tmp_path / "store", file_size=16_384)
    writer.put_all([Sent(topic="Twice", time=START + number) for number in range(50)])
    writer.offsets["Twice", 0] = 0
    second = len(writer.sent)
    writer.put_all([Sent(topic="Twice", time=START + 100 + number) for number in range(7)])
    root = writer.write()
    report = by_spark(spark, root)
    assert (report.irregular, report.records, report.units) == (1, 57, 7)
    (name,) = files = queue_files(root)
    assert name == "Twice/0/" + "0" * 20
    assert int.from_bytes(files[name][:8], "big") == writer.sent[second].phy
    assert files == queue_files(by_broker(root, tmp_path))


def test_deleted_topics_stay_deleted(spark: SparkSession, tmp_path: Path) -> None:
    """The broker's own list of deleted topics is used; the first queue of Again is from before its deletion."""
    writer = LogWriter(tmp_path / "store", file_size=16_384)
    writer.put_all([Sent(topic=topic, time=START + n) for n in range(30) for topic in ("Gone", "Kept", "Again")])
    end = writer.at
    writer.offsets["Again", 0] = 0
    writer.put_all([Sent(topic="Again", time=START + 100 + n) for n in range(9)])
    root = writer.write()
    (root / "topics.dropped").write_text(f'{{"Gone":[{end},{START + 50}],"Again":[{end},{START + 50}]}}')
    report = by_spark(spark, root)
    assert (report.records, report.units, report.irregular) == (99, 39, 0)
    files = queue_files(root)
    assert {Path(name).parts[0] for name in files} == {"Kept", "Again"}
    assert files == queue_files(by_broker(root, tmp_path))


def test_what_is_there_is_not_overwritten(spark: SparkSession, tmp_path: Path) -> None:
    from trimq.pipeline.jobs.rebuild import RebuildError  # noqa: PLC0415 - PySpark may be missing

    root = LogWriter(tmp_path / "store").put_all(mixed(5)).write()
    (root / "checkpoint").write_bytes(b"")
    with pytest.raises(RebuildError, match="checkpoint"):
        by_spark(spark, root)


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaClient]:
    with java_client("5.5.0", "JSON", tmp_path_factory.mktemp("java")) as client:
        yield client


@pytest.mark.one_pyspark
@pytest.mark.parametrize("peer", ["trimq", "apache"])
def test_brokers_open_the_result(spark: SparkSession, tmp_path: Path, java: JavaClient, peer: Peer) -> None:
    """Only the log of a broker is left: after a rebuild messages and keys are found, and new messages are stored."""
    from trimq.pipeline.jobs.rebuild import RebuildOptions, rebuild  # noqa: PLC0415 - PySpark may be missing

    store = tmp_path / "store"
    texts = [f"message {number}" for number in range(60)]
    with broker_on_store("trimq", tmp_path / "first", store) as cluster:
        cluster.create_topic("Rebuilt", queues=1)
        with java.producer(cluster) as producer:
            specs = [{"body": text, "keys": f"key{number}", "tags": "T"} for number, text in enumerate(texts)]
            producer.send("Rebuilt", specs)
    for name in ("consumequeue", "index"):
        shutil.rmtree(store / name)
    for name in ("checkpoint", "consumequeue.snapshot"):
        (store / name).unlink(missing_ok=True)
    sizes = RebuildOptions(
        queue_file_size=int(SMALL["mappedFileSizeConsumeQueue"]),
        slots=int(SMALL["maxHashSlotNum"]),
        entries=int(SMALL["maxIndexNum"]),
    )
    assert rebuild(spark, str(store), str(store), sizes).records >= 60
    before = queue_files(store)
    with ExitStack() as stack:
        cluster = stack.enter_context(broker_on_store(peer, tmp_path / "second", store))
        producer = stack.enter_context(java.producer(cluster))
        reader = stack.enter_context(java.lite_consumer(cluster, "G"))
        place = {"topic": "Rebuilt", "broker": "broker-a", "queue": 0}
        offsets = producer.ask("offsets", **place)
        assert (offsets["min"], offsets["max"]) == (0, 60)
        # No seek: this client may lose it if a pull is in flight, with either broker. A new group starts at the first.
        reader.ask("assign", queues=[place])
        assert [one["body"] for one in reader.poll(60)] == texts
        found = wait_until(lambda: producer.query_key("Rebuilt", "key17"), "a key")
        assert [one["body"] for one in found] == ["message 17"]
        (sent,) = producer.send("Rebuilt", [{"body": "one more", "keys": "more", "tags": "T"}])
        assert sent["offset"] == 60
    name = "Rebuilt/0/" + "0" * 20
    assert queue_files(store)[name][: 60 * 20] == before[name][: 60 * 20]
