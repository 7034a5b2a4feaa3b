"""The Node client, ali-ons: sends, consumption, and messages exchanged with the Java client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import (
    JavaClient,
    LineDriver,
    PartnerError,
    Record,
    bodies,
    message,
    messages,
    unique,
)
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until


@contextmanager
def opened(node: LineDriver, what: str, cluster: Cluster, **options: Any) -> Iterator[str]:
    """Open a producer or consumer and close it at the end."""
    name = unique(what)
    node.call(f"{what}.open", name=name, namesrv=cluster.namesrv, **options)
    try:
        yield name
    finally:
        node.call("close", name=name)


@contextmanager
def consuming(
    node: LineDriver, cluster: Cluster, group: str, subscribe: Mapping[str, str], **options: Any
) -> Iterator[str]:
    with opened(node, "consumer", cluster, group=group, subscribe=subscribe, **options) as name:
        yield name


def received(node: LineDriver, name: str, count: int) -> list[Record]:
    got: list[Record] = node.call("consumer.received", name=name, count=count, wait=30_000)
    assert len(got) >= count, f"{len(got)} of {count}: {bodies(got)}"
    return got


@pytest.fixture(scope="module")
def producer(node: LineDriver, cluster: Cluster) -> Iterator[str]:
    with opened(node, "producer", cluster, group=unique("PG")) as name:
        yield name


def test_sends_and_consumes(cluster: Cluster, node: LineDriver, producer: str) -> None:
    topic, group = cluster.create_topic(unique("Node")), unique("G")
    specs = [message(f"ü{number}", tags="TagA", keys=f"nodekey{number}") for number in range(12)]
    with consuming(node, cluster, group, {topic: "*"}) as consumer:
        sent = node.call("producer.send", name=producer, topic=topic, messages=specs)
        got = received(node, consumer, 12)
    assert {one["status"] for one in sent} == {"SEND_OK"}
    assert {(one["queue"], one["offset"]) for one in sent} == {(one["queue"], one["offset"]) for one in got}
    assert sorted(bodies(got)) == sorted(bodies(specs))
    assert {one["tags"] for one in got} == {"TagA"}
    wait_until(
        lambda: [probe.committed_offset(cluster.broker.address, group, topic, queue) for queue in range(4)] == [3] * 4,
        "committed offsets",
    )


def test_an_unknown_topic_is_an_error(node: LineDriver, producer: str) -> None:
    """This client does not query the route of TBW102, the topic that lets brokers create others."""
    with pytest.raises(PartnerError) as refused:
        node.call("producer.send", name=producer, topic=unique("NodeUnknown"), messages=[message("x")])
    assert refused.value.codes == [17]


def test_tags(cluster: Cluster, node: LineDriver, producer: str) -> None:
    topic = cluster.create_topic(unique("NodeTags"), queues=1)
    with consuming(node, cluster, unique("G"), {topic: "Red || Blue"}) as consumer:
        specs = [message(f"{tag}{number}", tags=tag) for number in range(5) for tag in ("Red", "Green", "Blue")]
        node.call("producer.send", name=producer, topic=topic, messages=specs)
        got = received(node, consumer, 10)
    assert bodies(got) == [spec["body"] for spec in specs if spec["tags"] != "Green"]


def test_retry(cluster: Cluster, node: LineDriver, producer: str) -> None:
    topic = cluster.create_topic(unique("NodeRetry"), queues=1)
    with consuming(node, cluster, unique("G"), {topic: "*"}, fail_until=1) as consumer:
        node.call("producer.send", name=producer, topic=topic, messages=[message("again")])
        got = received(node, consumer, 2)
    assert [(one["body"], one["reconsume"]) for one in got] == [("again", 0), ("again", 1)]


def test_goes_on_where_it_stopped(cluster: Cluster, node: LineDriver, producer: str) -> None:
    topic, group = cluster.create_topic(unique("NodeResume"), queues=2), unique("G")
    node.call("producer.send", name=producer, topic=topic, messages=messages(6))
    with consuming(node, cluster, group, {topic: "*"}) as consumer:
        received(node, consumer, 6)
        wait_until(
            lambda: sum(probe.committed_offset(cluster.broker.address, group, topic, n) or 0 for n in (0, 1)) == 6,
            "committed offsets",
        )
    node.call("producer.send", name=producer, topic=topic, messages=messages(4, "later"))
    with consuming(node, cluster, group, {topic: "*"}) as consumer:
        assert sorted(bodies(received(node, consumer, 4))) == [f"later{number}" for number in range(4)]


def test_between_node_and_java(cluster: Cluster, node: LineDriver, producer: str, latest_java: JavaClient) -> None:
    topic, large = cluster.create_topic(unique("NodeJava")), "z" * 20_000
    with (
        consuming(node, cluster, unique("G"), {topic: "*"}) as in_node,
        latest_java.consumer(cluster, unique("G"), {topic: "*"}) as in_java,
        latest_java.producer(cluster) as from_java,
    ):
        node.call(
            "producer.send", name=producer, topic=topic, messages=[message("from node", keys="abc"), message(large)]
        )
        from_java.send(topic, [message("from java", tags="T", keys="def"), message("y", size=20_000)])
        in_node_bodies = bodies(received(node, in_node, 4))
        records = in_java.received(4)
        by_key = wait_until(lambda: from_java.query_key(topic, "abc"), "the message from Node by its key")
    assert {"from node", "from java", large} < set(in_node_bodies)
    assert {"from node", "from java"} < set(bodies(records))
    assert sorted(record["length"] for record in records)[2:] == [20_000, 20_000]
    assert bodies(by_key) == ["from node"]


def test_delay_levels_and_timers(cluster: Cluster, node: LineDriver, producer: str) -> None:
    """The client has delay levels. A timer is a property to it; its own time of delivery means nothing to brokers."""
    topic, now = cluster.create_topic(unique("NodeDelay"), queues=1), time.time_ns() // 1_000_000
    with consuming(node, cluster, unique("G"), {topic: "*"}) as consumer:
        specs = [
            message("level", delay=4),
            message("timer", properties={"TIMER_DELIVER_MS": str(now + 5_000)}),
            message("at once", deliver=now + 3_600_000),
        ]
        node.call("producer.send", name=producer, topic=topic, messages=specs)
        got = received(node, consumer, 3)
    assert bodies(got) == ["at once", "level", "timer"]
    assert got[1]["stored"] - got[1]["born"] >= 1_900
    assert now + 4_000 <= int(got[2]["properties"]["TIMER_OUT_MS"]) <= got[2]["stored"]


def test_sql92(cluster: Cluster, node: LineDriver, producer: str) -> None:
    topic = cluster.create_topic(unique("NodeSql"), queues=1)
    with consuming(node, cluster, unique("G"), {}, sql={topic: "size > 3 AND colour IS NOT NULL"}) as consumer:
        specs = [message(f"m{size}", properties={"size": str(size), "colour": "red"}) for size in range(6)]
        node.call("producer.send", name=producer, topic=topic, messages=[message("bare"), *specs])
        assert bodies(received(node, consumer, 2)) == ["m4", "m5"]


def test_a_half_message_that_java_decides(hasty: Cluster, node: LineDriver, latest_java: JavaClient) -> None:
    """The client can prepare a message but neither end it nor answer a check; another producer of the group can."""
    topic, group = hasty.create_topic(unique("NodeHalf")), unique("PG")
    ends = {"TRAN_MSG": "true", "PGROUP": group}
    with (
        opened(node, "producer", hasty, group=group) as from_node,
        latest_java.producer(hasty, group, transactional=True, heartbeat=500) as from_java,
        latest_java.consumer(hasty, unique("G"), {topic: "*"}) as consumer,
    ):
        specs = [message(f"{when}", properties={**ends, "whenAsked": when}) for when in ("commit", "rollback")]
        sent = node.call("producer.send", name=from_node, topic=topic, messages=specs)
        from_java.send(topic, [message("plain")])
        got = consumer.received(2, wait=60)
        wait_until(lambda: set(bodies(from_java.checks())) == {"commit", "rollback"}, "both checks", 60)
    assert {one["status"] for one in sent} == {"SEND_OK"}
    assert sorted(bodies(got)) == ["commit", "plain"]
