"""The same tables over Apache's broker: whoever has RocketMQ already needs nothing else of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from client.sync import Admin
from tests.interop.harness.servers import broker_on_store
from tests.spark.tables import bodies, read, write


@pytest.mark.one_pyspark
@pytest.mark.timeout(300, func_only=True)
def test_topics_of_apaches_broker_are_tables_too(tmp_path: Path) -> None:
    properties = {"enablePropertyFilter": "true"}
    with broker_on_store("apache", tmp_path, tmp_path / "store", properties) as cluster:
        topic = cluster.create_topic("SparkApache", 3)
        rows = [
            {"body": b"%04d" % n, "tags": f"t{n % 4}", "keys": [f"k{n}"], "properties": [("n", str(n))]}
            for n in range(500)
        ]
        options: dict[str, Any] = {"topic": topic, "batchBytes": 4000}
        assert write(cluster, rows[:230], idempotent=True, **options) == (230, 0)
        assert write(cluster, rows, idempotent=True, again=True, **options) == (270, 230)
        found = read(cluster, topics=topic, minPartitions=7, group="apache-shown")
        assert bodies(found) == [b"%04d" % number for number in range(500)]
        assert {row["brokerName"] for row in found} == {"broker-a"}
        assert all(dict(row["properties"])["n"] == str(int(row["body"])) for row in found)
        assert len(read(cluster, topics=topic, tags="t1 || t3")) == 250
        assert len(read(cluster, topics=topic, sql="n > 400 AND TAGS = 't0'")) == 24
        with Admin(cluster.namesrv) as admin:
            assert admin.consume_stats("apache-shown", topic).lag == 0
