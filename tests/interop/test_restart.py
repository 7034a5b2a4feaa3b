"""A broker restarts while clients are connected: no message is lost, and no consumer starts over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import JavaClient, bodies, message, messages, unique
from tests.interop.harness.servers import Cluster, running_cluster
from tests.interop.harness.waiting import wait_until


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as running:
        yield running


def test_clients_live_through_a_restart(own_cluster: Cluster, latest_java: JavaClient) -> None:
    cluster, topic, group = own_cluster, own_cluster.create_topic(unique("Restart")), unique("G")
    broker = cluster.broker
    with (
        latest_java.producer(cluster, retries=0) as producer,
        latest_java.consumer(cluster, group, {topic: "*"}) as consumer,
        latest_java.consumer(cluster, unique("G"), {topic: "*"}, fail_until=1) as failing,
    ):
        sent = producer.send(topic, messages(20, keys="before"))
        consumer.received(20)
        failing.received(20)

        def committed() -> int:
            return sum(probe.committed_offset(broker.address, group, topic, queue) or 0 for queue in range(4))

        wait_until(lambda: committed() == 20, "committed offsets")
        producer.send(topic, [message("delayed", delay=13)])
        broker.stop()
        assert not (broker.store / "abort").exists()
        assert not probe.cluster(cluster.name_servers[0].address)
        broker.start()
        assert committed() >= 20
        after = producer.send(topic, messages(4, "after"))
        got = consumer.received(25, wait=60)
        assert sorted(bodies(got)) == sorted([*bodies(messages(20)), *bodies(messages(4, "after")), "delayed"])
        assert {one["offset"] for one in after} <= {5, 6}
        failed = failing.received(50, wait=60)
        assert {one["reconsume"] for one in failed} == {0, 1}
        assert {one["body"] for one in failed if one["reconsume"] == 1} >= set(bodies(messages(20)))
        assert len(producer.query_key(topic, "before")) == 20
        by_id = producer.ask("viewId", topic=topic, msg_id=sent[7]["offsetMsgId"])
        assert by_id["body"] == "m7"
