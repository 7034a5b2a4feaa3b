"""Message traces: what the Java clients write is read by the SDK, what the SDK writes is read by Apache's mqadmin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.harness.drivers import Admin, JavaClient, message, mqadmin, unique
from tests.interop.harness.servers import Cluster, running_cluster
from trimq.client import sync


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose broker has the trace topic from its start."""
    with running_cluster(tmp_path_factory.mktemp("traced"), properties={"traceTopicEnable": "true", "transactionTimeOut": "1000", "transactionCheckInterval": "1000"}) as running:
        yield running


def test_golden(traced: Cluster, java: JavaClient) -> None:
    topic = traced.create_topic(unique("Traced"), queues=1)
    group, producers = unique("G"), unique("PG")
    with java.producer(traced, producers, trace=True) as producer:
        sent = producer.send(topic, [message("a", tags="T", keys="k1 k2"), message("b"), message("c", delay=1)])
        sent += producer.send(topic, [message("d", tags="T", keys="k1"), message("e")], "batch")
    with java.producer(traced, producers, trace=True, transactional=True) as p2:
        print("TRANS", p2.ask("transaction", topic=topic, messages=[message("t1", keys="tk", properties={"outcome":"commit"}), message("t2", properties={"outcome":"rollback"}),message("t3", properties={"outcome":"unknown", "whenAsked":"commit"})]))
    with java.consumer(traced, group, {topic: "*"}, trace=True, failUntil=1) as consumer:
        consumer.received(12, wait=60)
    with java.lite_consumer(traced, unique("L"), {topic: "*"}, trace=True) as lite:
        lite.poll(5)
    with sync.Admin(traced.namesrv) as admin, sync.PullConsumer(unique("r"), namesrv=traced.namesrv, start="first") as c:
        c.assign(c.queues("RMQ_SYS_TRACE_TOPIC"))
        import time
        time.sleep(6)
        for m in c.poll(100, timeout=3):
            print("GOLD", java.version, m.body, m.all_properties)
    print(sent)
    assert 0
