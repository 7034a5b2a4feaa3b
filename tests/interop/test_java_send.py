"""All kinds of sends of the Java client."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.interop.conftest import LATEST_JAVA
from tests.interop.harness.drivers import (
    JavaClient,
    PartnerError,
    Record,
    bodies,
    message,
    messages,
    unique,
)
from tests.interop.harness.servers import Cluster

OFFSET_ID = re.compile(r"^[0-9A-F]{32}$")
LARGE = 300 * 1024


def dense(sent: list[Record]) -> bool:
    """Whether the offsets of each queue are consecutive from 0."""
    offsets: dict[int, list[int]] = defaultdict(list)
    for one in sent:
        offsets[one["queue"]].append(one["offset"])
    return all(sorted(found) == list(range(len(found))) for found in offsets.values())


def test_sync(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Sync"))
    specs = [
        message(
            f"body {number} ü€😀",
            tags=f"Tag{number % 2}",
            keys=f"key{number} second{number}",
            flag=number,
            properties={"colour": "blue", "empty-ish": " ", "text": "ü=1&2"},
        )
        for number in range(12)
    ]
    with java.producer(cluster) as producer, java.consumer(cluster, unique("G"), {topic: "*"}) as consumer:
        sent = producer.send(topic, specs)
        got = {record["body"]: record for record in consumer.received(12)}
    assert {one["status"] for one in sent} == {"SEND_OK"}
    assert {one["region"] for one in sent} == {"DefaultRegion"}
    assert {one["trace"] for one in sent} == {True}
    assert all(OFFSET_ID.match(one["offsetMsgId"]) for one in sent)
    assert {one["queue"] for one in sent} == {0, 1, 2, 3}
    assert dense(sent)
    for number, (spec, one) in enumerate(zip(specs, sent, strict=True)):
        record = got[spec["body"]]
        assert (record["queue"], record["offset"]) == (one["queue"], one["offset"])
        assert record["msgId"] == record["uniqKey"] == one["msgId"]
        assert record["offsetMsgId"] == one["offsetMsgId"]
        assert (record["tags"], record["keys"]) == (spec["tags"], spec["keys"])
        assert record["flag"] == number
        assert record["reconsume"] == 0
        assert {key: record["properties"][key] for key in spec["properties"]} == spec["properties"]
        assert record["properties"]["CLUSTER"] == "DefaultCluster"
        assert record["properties"]["MSG_REGION"] == "DefaultRegion"
        assert record["storeHost"] == f"/{cluster.broker.address}"
        assert record["born"] <= record["stored"] + 1


def test_async(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Async"))
    with java.producer(cluster) as producer, java.consumer(cluster, unique("G"), {topic: "*"}) as consumer:
        sent = producer.send(topic, messages(100), "async")
        got = consumer.received(100)
    assert {one["status"] for one in sent} == {"SEND_OK"}
    assert dense(sent)
    assert {(one["queue"], one["offset"]) for one in sent} == {(one["queue"], one["offset"]) for one in got}
    assert sorted(bodies(got)) == sorted(f"m{number}" for number in range(100))


def test_one_way(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("OneWay"))
    with java.producer(cluster) as producer, java.consumer(cluster, unique("G"), {topic: "*"}) as consumer:
        assert producer.send(topic, messages(50), "oneway") is None
        assert sorted(bodies(consumer.received(50))) == sorted(f"m{number}" for number in range(50))


def test_batch(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Batch"), queues=1)
    specs = [message(f"b{number}", tags="T", keys=f"batchkey{number}") for number in range(20)]
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, unique("G"), {topic: "*"}, orderly=True) as consumer,
    ):
        producer.send(topic, messages(3, "before"))
        (sent,) = producer.send(topic, specs, "batch")
        got = consumer.received(23)[3:]
        by_key = producer.query_key(topic, "batchkey7")
    assert sent["status"] == "SEND_OK"
    assert sent["offset"] == 3
    assert len(sent["offsetMsgId"].split(",")) == 20
    assert bodies(got) == bodies(specs)
    assert [one["offset"] for one in got] == list(range(3, 23))
    assert [one["offsetMsgId"] for one in got] == sent["offsetMsgId"].split(",")
    assert [one["keys"] for one in got] == [spec["keys"] for spec in specs]
    assert bodies(by_key) == ["b7"]


@pytest.mark.parametrize("java", LATEST_JAVA, indirect=True, ids="-".join)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_automatic_batches(cluster: Cluster, java: JavaClient, mode: str) -> None:
    """The client gathers single sends into batches; the messages of a batch have one time of birth."""
    topic = cluster.create_topic(unique("AutoBatch"))
    count = 200 if mode == "async" else 4
    specs = [message(f"m{number}", tags="T", keys=f"autokey{number}") for number in range(count)]
    with (
        java.producer(cluster, auto_batch=True, batch_delay=100) as producer,
        java.consumer(cluster, unique("G"), {topic: "*"}) as consumer,
    ):
        sent = producer.send(topic, specs, mode)
        got = {record["body"]: record for record in consumer.received(count)}
        assert bodies(producer.query_key(topic, f"autokey{count - 1}")) == [f"m{count - 1}"]
    assert dense(sent)
    assert {one["status"] for one in sent} == {"SEND_OK"}
    for spec, one in zip(specs, sent, strict=True):
        record = got[spec["body"]]
        assert (record["queue"], record["offset"]) == (one["queue"], one["offset"])
        assert (record["offsetMsgId"], record["msgId"]) == (one["offsetMsgId"], one["msgId"])
        assert (record["tags"], record["keys"]) == ("T", spec["keys"])
    if mode == "async":
        assert len({(record["queue"], record["born"]) for record in got.values()}) < count / 2


def test_ordered(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Ordered"))
    specs = [message(f"{order}-{step}", order=order) for step in range(20) for order in range(6)]
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, unique("G"), {topic: "*"}, orderly=True) as consumer,
    ):
        sent = producer.send(topic, specs, "ordered")
        got = consumer.received(len(specs))
    assert all(one["queue"] == spec["order"] % 4 for one, spec in zip(sent, specs, strict=True))
    for order in range(6):
        steps = [body for body in bodies(got) if body.startswith(f"{order}-")]
        assert steps == [f"{order}-{step}" for step in range(20)]


def test_a_topic_that_was_not_created(cluster: Cluster, java: JavaClient) -> None:
    topic = unique("Automatic")
    with java.producer(cluster, queues=3) as producer:
        sent = producer.send(topic, messages(6))
        assert {one["queue"] for one in sent} == {0, 1, 2}
        with java.consumer(cluster, unique("G"), {topic: "*"}) as consumer:
            assert sorted(bodies(consumer.received(6))) == [f"m{number}" for number in range(6)]


def test_large_bodies_come_back_unchanged(cluster: Cluster, java: JavaClient) -> None:
    """The client compresses some of the bodies, and there are more than one pull returns."""
    topic = cluster.create_topic(unique("Large"), queues=1)
    with (
        java.producer(cluster) as packing,
        java.producer(cluster, compress_over=10_000_000) as plain,
        java.consumer(cluster, unique("G"), {topic: "*"}, orderly=True) as consumer,
    ):
        packing.send(topic, messages(5, "packed", size=LARGE))
        plain.send(topic, messages(5, "plain", size=LARGE))
        got = consumer.received(10)
    assert {record["length"] for record in got} == {LARGE}
    assert len({record["crc"] for record in got[:5]}) == 5
    assert [record["size"] > LARGE for record in got] == [False] * 5 + [True] * 5


def test_a_body_over_the_limit_is_refused(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("TooLarge"))
    with java.producer(cluster, compress_over=100_000_000, retries=0) as producer:
        with pytest.raises(PartnerError) as refused:
            producer.send(topic, [message("x", size=4 * 1024 * 1024 + 1)])
        assert refused.value.codes[0] == 13
        assert producer.send(topic, [message("x", size=4 * 1024 * 1024)])[0]["status"] == "SEND_OK"


def test_over_the_second_listener(cluster: Cluster, java: JavaClient) -> None:
    """The VIP channel is the port two below the broker's; a client uses it for everything except pulls."""
    topic = cluster.create_topic(unique("Vip"))
    with (
        java.producer(cluster, vip=True) as producer,
        java.consumer(cluster, unique("G"), {topic: "*"}, vip=True) as consumer,
    ):
        assert {one["status"] for one in producer.send(topic, messages(8))} == {"SEND_OK"}
        assert len(consumer.received(8)) == 8


def test_without_waiting_for_the_disk(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("NoWait"))
    with java.producer(cluster) as producer:
        (sent,) = producer.send(topic, [message("x", wait=False)])
    assert sent["status"] == "SEND_OK"


def test_delay_levels(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Delay"), queues=1)
    specs = [message("later", delay=4), message("sooner", delay=1), message("now", keys="delaykey")]
    with java.producer(cluster) as producer, java.consumer(cluster, unique("G"), {topic: "*"}) as consumer:
        sent = producer.send(topic, specs)
        got = consumer.received(3)
    assert {one["status"] for one in sent} == {"SEND_OK"}
    assert bodies(got) == ["now", "sooner", "later"]
    waited = {record["body"]: record["stored"] - record["born"] for record in got}
    assert 900 <= waited["sooner"] < 5_000
    assert 1_900 <= waited["later"] < 7_000
    assert {record["topic"] for record in got} == {topic}
    assert got[2]["properties"]["DELAY"] == "4"
    assert got[2]["properties"]["REAL_TOPIC"] == topic
    assert got[2]["msgId"] == sent[0]["msgId"]


def test_request_and_reply(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Request"))
    with (
        java.consumer(cluster, unique("G"), {topic: "*"}, reply=True) as consumer,
        java.producer(cluster, retries=0) as producer,
    ):
        consumer.wait_for_queues(4)
        reply = producer.ask("request", topic=topic, messages=[message("question")], wait=10_000)
    assert reply["body"] == "reply to question"
