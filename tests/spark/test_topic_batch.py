"""Batch reads of topics, with real Spark against real brokers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimq.client.message import MessageQueue
from trimq.client.sync import Message, Producer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.interop.harness.servers import Cluster


def test_a_topic_is_a_table_of_eighteen_columns(spark: SparkSession, cluster: Cluster, producer: Producer) -> None:
    topic = cluster.create_topic("SparkColumns", 2)
    receipts = producer.send_many(
        [
            Message(topic, b"1 book", tags="paid", keys=["o-1", "c-7"], properties={"shop": "north"}, flag=5),
            Message(topic, b"x" * 5000),
        ]
    )
    frame = spark.read.format("rocketmq").option("namesrv", cluster.namesrv).option("topics", topic).load()
    assert frame.columns == [
        "topic",
        "brokerName",
        "queueId",
        "queueOffset",
        "body",
        "tags",
        "keys",
        "msgId",
        "uniqId",
        "bornTimestamp",
        "storeTimestamp",
        "bornHost",
        "storeHost",
        "commitLogOffset",
        "reconsumeTimes",
        "flag",
        "sysFlag",
        "properties",
    ]
    rows = {row.uniqId: row for row in frame.collect()}
    assert len(rows) == 2
    paid, large = (rows[receipt.message_id] for receipt in receipts)
    for row, receipt in zip((paid, large), receipts, strict=True):
        assert MessageQueue(topic=row.topic, broker_name=row.brokerName, queue_id=row.queueId) == receipt.queue
        assert row.queueOffset == receipt.queue_offset
        assert row.msgId == receipt.offset_message_id
        assert row.storeHost in {broker.address for broker in cluster.brokers}
        assert row.bornHost.startswith("127.0.0.1:")
        assert row.bornTimestamp <= row.storeTimestamp
        assert row.reconsumeTimes == 0
    assert (bytes(paid.body), paid.tags, paid.keys, paid.flag) == (b"1 book", "paid", ["o-1", "c-7"], 5)
    assert paid.properties["shop"] == "north"
    assert paid.properties["KEYS"] == "o-1 c-7"
    assert bytes(large.body) == b"x" * 5000
    assert large.sysFlag & 1, "the producer compressed the body, so the read has decompressed it"
    assert (large.tags, large.keys) == (None, [])
