"""Audit, statistics, compaction, replay, and the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from tests.spark.logs import START, LogWriter, Sent
from tests.spark.stores import some
from trimq.pipeline.__main__ import main
from trimq.protocol.file_names import offset_name

# PySpark 4.0 leaves sockets to its clients open
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.interop.harness.servers import Cluster
    from trimq.client.sync import Admin

SLOTS, ENTRIES = 64, 100


def built(spark: SparkSession, root: Path) -> Path:
    from trimq.pipeline.jobs.rebuild import RebuildOptions, rebuild  # noqa: PLC0415 - PySpark may be missing

    rebuild(spark, str(root), str(root), RebuildOptions(queue_file_size=400, slots=SLOTS, entries=ENTRIES))
    return root


def audited(spark: SparkSession, root: Path) -> Any:
    from trimq.pipeline.jobs.audit import audit  # noqa: PLC0415 - PySpark may be missing

    return audit(spark, str(root), slots=SLOTS, entries=ENTRIES)


def test_audit_finds_each_fault_and_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    from trimq.pipeline.jobs.audit import write_page  # noqa: PLC0415 - PySpark may be missing

    writer = LogWriter(tmp_path / "store", file_size=16_384).put_all(some(150))
    root = built(spark, writer.write())
    report = audited(spark, root)
    assert report.is_sound, report.faults
    assert (report.records, report.units, report.queues, report.keys) == (150, 150, 10, 150)
    queue = root / "consumequeue" / "T1" / "0" / offset_name(0)
    units = bytearray(queue.read_bytes())
    units[3 * 20 + 7] ^= 1
    queue.write_bytes(units)
    last = root / "consumequeue" / "T2" / "1" / offset_name(0)
    units = bytearray(last.read_bytes())
    units[15 * 20 : 16 * 20] = units[14 * 20 : 15 * 20]
    last.write_bytes(units)
    index = min((root / "index").iterdir())
    data = bytearray(index.read_bytes())
    at = 40 + SLOTS * 4 + 5 * 20
    data[at : at + 4] = bytes([1, 2, 3, 4])
    index.write_bytes(data)
    log = root / "commitlog" / offset_name(0)
    data = bytearray(log.read_bytes())
    data[writer.sent[50].phy + 90] ^= 1
    log.write_bytes(data)
    report = audited(spark, root)
    found = {fault.kind: fault.count for fault in report.faults}
    assert found["damaged record"] == 1
    assert found["queue unit is not the record's"] == 1
    # The unit of the damaged record no longer points to a record.
    assert found["queue unit without record"] == 2
    assert found["offsets without a record"] == 1
    assert found["key that a query does not find"] >= 1
    write_page(report, tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert "damaged record" in page
    assert "<img" in page or "matplotlib" in page


def test_audit_finds_that_files_are_gone(spark: SparkSession, tmp_path: Path) -> None:
    """Issue 19.4: an audit called a store sound that lacked its newest log file and five sixths of its records."""
    writer = LogWriter(tmp_path / "store", file_size=16_384).put_all(some(150))
    root = built(spark, writer.write())
    newest = root / "commitlog" / offset_name(max(writer.files))
    data = newest.read_bytes()
    newest.unlink()
    report = audited(spark, root)
    found = {fault.kind: fault.count for fault in report.faults}
    lost = sum(message.phy >= max(writer.files) for message in writer.sent)
    assert 0 < lost < 150
    assert found == {
        "log ends before the checkpoint": 1,
        "queue unit behind the log's end": lost,
        "index entry without record": 2 * lost,  # of its unique key and its tag
    }
    assert report.verdict == 3
    newest.write_bytes(data[: writer.sent[-1].phy - max(writer.files)])
    assert {"log chain", "queue unit behind the log's end"} <= {fault.kind for fault in audited(spark, root).faults}
    newest.write_bytes(data)
    assert audited(spark, root).is_sound
    queue = root / "consumequeue" / "T1" / "1"
    files = sorted(queue.iterdir())
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:210])
    report = audited(spark, root)
    assert {fault.kind: fault.count for fault in report.faults}["queue file"] == 1
    assert report.verdict == 1


def test_audit_takes_an_earlier_due_time_for_sound_and_a_later_one_not(spark: SparkSession, tmp_path: Path) -> None:
    """A message stored after the clock was set back is due earlier than its record's store time suggests."""
    delayed = "SCHEDULE_TOPIC_XXXX"
    writer = LogWriter(tmp_path / "store", file_size=16_384)
    for number in range(3):
        writer.put(Sent(topic=delayed, queue_id=2, body=b"later", properties={"DELAY": "3"}, time=START + number))
    root = built(spark, writer.write())
    queue = root / "consumequeue" / delayed / "2" / offset_name(0)
    units = bytearray(queue.read_bytes())
    for change, faults in ((-3_600_000, []), (1, ["queue unit is not the record's"])):
        units[32:40] = (START + 1 + 10_000 + change).to_bytes(8, "big")
        queue.write_bytes(units)
        assert [fault.kind for fault in audited(spark, root).faults] == faults


def test_figures(spark: SparkSession, tmp_path: Path) -> None:
    from trimq.pipeline.jobs.stats import stats, write_page  # noqa: PLC0415 - PySpark may be missing

    messages = [
        Sent(
            topic="Orders" if number % 3 else "Pays",
            body=b"x" * number,
            properties={"KEYS": "hot" if number % 2 else f"k{number}", "TAGS": f"t{number % 2}"},
            time=START + number * 600_000,
            born=START + number * 600_000 - number,
            born_host=(f"10.0.0.{number % 2}", 40_000 + number),
        )
        for number in range(30)
    ]
    root = LogWriter(tmp_path / "store").put_all(messages).write()
    found = stats(spark, str(root))
    assert found.records == 30
    tables = found.tables
    assert {row["topic"]: row["messages"] for row in tables["topics"]} == {"Orders": 20, "Pays": 10}
    assert sum(row["bytes"] for row in tables["topics"]) == sum(range(30))
    assert {row["host"]: row["messages"] for row in tables["hosts"]} == {"10.0.0.0": 15, "10.0.0.1": 15}
    assert tables["keys"][0]["key"] == "hot"
    assert sum(row["messages"] for row in tables["hours"]) == 30
    assert {row["topic"]: (row["least"], row["most"]) for row in tables["latencies"]} == {
        "Orders": (1, 29),
        "Pays": (0, 27),
    }
    assert {row["topic"]: sum(row["powers"].values()) for row in tables["sizes"]} == {"Orders": 20, "Pays": 10}
    assert {row["topic"]: 10 < row["p50"] < 18 for row in tables["latencies"]}["Pays"]
    write_page(found, tmp_path / "stats.html")
    assert "Messages by hour" in (tmp_path / "stats.html").read_text()


def test_the_newest_of_each_key(spark: SparkSession, tmp_path: Path) -> None:
    from trimq.pipeline.jobs.compact import compact  # noqa: PLC0415 - PySpark may be missing

    writer = LogWriter(tmp_path / "store")
    for number in range(40):
        properties = {"KEYS": f"k{number % 7}"} if number % 5 else {}
        writer.put(Sent(topic=f"T{number % 2}", body=b"%d" % number, properties=properties, time=START))
    writer.put(Sent(topic="T0", body=b"", properties={"KEYS": "k1"}, time=START))
    wanted: dict[tuple[str, str], bytes] = {}
    for one in writer.sent:
        if "KEYS" in one.properties:
            wanted[one.topic, one.properties["KEYS"]] = one.body
    table = spark.read.format("rocketmq-store").load(str(writer.write()))
    rows = compact(table).collect()
    assert {(row.topic, row["keys"][0]): bytes(row.body) for row in rows} == {k: v for k, v in wanted.items() if v}
    assert len(rows) == len(wanted) - 1
    assert compact(table, tombstones=False).count() == len(wanted)


def test_replay_keeps_the_order_of_each_key(
    spark: SparkSession, tmp_path: Path, cluster: Cluster, admin: Admin
) -> None:
    from trimq.pipeline.jobs.replay import ReplayOptions, replay  # noqa: PLC0415 - PySpark may be missing

    admin.create_topic("Replayed", queues=4)
    writer = LogWriter(tmp_path / "store")
    for number in range(60):
        properties = {"KEYS": f"k{number % 5}", "TAGS": "t", "UNIQ_KEY": f"U{number}", "colour": "red"}
        writer.put(Sent(body=b"%d" % number, properties=properties, time=START + number))
    table = spark.read.format("rocketmq-store").load(str(writer.write()))
    assert replay(table, ReplayOptions(namesrv=cluster.namesrv, topic="Replayed")) == 60
    topic = spark.read.format("rocketmq").option("namesrv", cluster.namesrv).option("topics", "Replayed").load()
    rows = topic.orderBy("brokerName", "queueId", "queueOffset").collect()
    assert sorted(int(bytes(row.body)) for row in rows) == list(range(60))
    for key in {row["keys"][0] for row in rows}:
        mine = [row for row in rows if row["keys"][0] == key]
        assert len({(row.brokerName, row.queueId) for row in mine}) == 1
        assert [int(bytes(row.body)) for row in mine] == sorted(int(bytes(row.body)) for row in mine)
    assert {row.properties["colour"] for row in rows} == {"red"}
    assert not {row.uniqId for row in rows} & {f"U{number}" for number in range(60)}


def test_replay_lets_no_more_through_than_allowed() -> None:
    from trimq.pipeline.jobs.replay import Pace  # noqa: PLC0415 - PySpark may be missing

    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    pace = Pace(50, lambda: now, sleep)
    for _ in range(20):
        pace.wait(10)
    assert now == pytest.approx(100 + 190 / 50)
    now += 60
    pace.wait(10)
    pace.wait(10)
    assert now == pytest.approx(100 + 190 / 50 + 60 + 10 / 50)


@pytest.mark.parametrize("name", ["rebuild", "audit", "stats", "archive", "replay", "compact"])
def test_every_job_is_a_command_with_help(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert "STORE" in result.output


def test_commands(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    root = str(LogWriter(tmp_path / "store").put_all(some(20)).write())
    result = CliRunner().invoke(main, ["stats", root, "--json", "--page", str(tmp_path / "page.html")])
    assert result.exit_code == 0, (result.output, result.exception)
    assert sum(row["messages"] for row in json.loads(result.stdout)["tables"]["topics"]) == 20
    assert (tmp_path / "page.html").exists()
    sizes = ["--slots", "64", "--entries", "100"]
    result = CliRunner().invoke(main, ["rebuild", root, str(tmp_path / "out"), *sizes])
    assert (result.exit_code, result.output[:15]) == (0, "20 records read")
    result = CliRunner().invoke(main, ["rebuild", root, str(tmp_path / "out"), *sizes])
    assert result.exit_code == 2
    result = CliRunner().invoke(main, ["audit", root, *sizes])
    assert result.exit_code == 1
    assert "record without queue unit: 20" in result.output
    result = CliRunner().invoke(main, ["compact", root, str(tmp_path / "compact"), "--key", "uniqId"])
    assert result.output == "20 keys\n"
    result = CliRunner().invoke(main, ["stats", str(tmp_path / "nowhere")])
    assert result.exit_code == 2, result.output
