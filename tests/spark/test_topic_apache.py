"""The same tables with Apache's broker: users of RocketMQ can use the Spark source without TriMQ's broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.harness.servers import broker_on_store
from tests.spark.tables import bodies, read, shown, write
from trimq.client.sync import Admin
from trimq.pipeline.options import Options
from trimq.pipeline.topics.offsets import INITIAL, StreamOffset
from trimq.pipeline.topics.planning import DataLossError
from trimq.pipeline.topics.progress import Progress
from trimq.pipeline.topics.settings import ReadSettings


@pytest.mark.one_pyspark
@pytest.mark.timeout(300, func_only=True)
def test_topics_of_apaches_broker_are_tables_too(tmp_path: Path) -> None:
    filtered = {"enablePropertyFilter": "true"}
    with broker_on_store("apache", tmp_path, tmp_path / "store", filtered) as cluster, Admin(cluster.namesrv) as admin:
        topic = cluster.create_topic("SparkApache", 3)
        rows = [
            {"body": b"%04d" % n, "tags": f"t{n % 4}", "keys": [f"k{n}"], "properties": [("n", str(n))]}
            for n in range(500)
        ]
        options: dict[str, Any] = {"topic": topic, "batchBytes": 4000}
        assert write(cluster, rows[:230], idempotent=True, **options) == (230, 0)
        shown(admin, topic, 230)
        assert write(cluster, rows, idempotent=True, again=True, **options) == (270, 230)
        shown(admin, topic, 500)
        found = read(cluster, topics=topic, minPartitions=7, group="apache-shown")
        assert bodies(found) == [b"%04d" % number for number in range(500)]
        assert {row["brokerName"] for row in found} == {"broker-a"}
        assert all(dict(row["properties"])["n"] == str(int(row["body"])) for row in found)
        assert len(read(cluster, topics=topic, tags="t1 || t3")) == 250
        assert len(read(cluster, topics=topic, sql="n > 400 AND TAGS = 't0'")) == 24
        assert admin.consume_stats("apache-shown", topic).lag == 0


@pytest.mark.one_pyspark
@pytest.mark.timeout(300, func_only=True)
def test_a_stream_knows_its_queues_of_apaches_broker_again(tmp_path: Path) -> None:
    """The state of a queue in the checkpoint agrees with the answers of Apache's broker too."""
    with broker_on_store("apache", tmp_path, tmp_path / "store", {}) as cluster, Admin(cluster.namesrv) as admin:
        topic = cluster.create_topic("SparkApacheAnew", 1)
        rows: list[dict[str, Any]] = [{"body": b"%04d" % n} for n in range(30)]

        def run(start: StreamOffset, **options: str) -> tuple[StreamOffset, int]:
            given = {"namesrv": cluster.namesrv, "topics": topic, "startingOffsets": "earliest", **options}
            reader = Progress(ReadSettings.of(Options(given), stream=True))
            reader.pin_target()
            end = StreamOffset.of(reader.end_after(start, None).to_json())
            return end, sum(span.size for span in reader.ranges(start, end))

        write(cluster, rows, topic=topic)
        shown(admin, topic, 30)
        end, count = run(StreamOffset.of(INITIAL))
        assert (count, len(end.seen)) == (30, 1)
        write(cluster, rows, topic=topic)
        shown(admin, topic, 60)
        end, count = run(end)
        assert count == 30
        admin.delete_topic(topic)
        cluster.create_topic(topic, 1)
        write(cluster, rows * 3, topic=topic)
        shown(admin, topic, 90)
        with pytest.raises(DataLossError, match="has another message at 59"):
            run(end)
        assert run(end, failOnDataLoss="false")[1] == 90
