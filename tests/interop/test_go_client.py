"""The Go client, rocketmq-client-go: sends and push consumption."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.interop.harness import probe
from tests.interop.harness.drivers import LineDriver, Record, bodies, message, messages, unique
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until


@contextmanager
def opened(go: LineDriver, what: str, cluster: Cluster, **options: Any) -> Iterator[str]:
    """Open a producer or consumer and close it at the end."""
    name = unique(what)
    go.call(f"{what}.open", name=name, namesrv=cluster.namesrv, **options)
    try:
        yield name
    finally:
        go.call("close", name=name)


def received(go: LineDriver, name: str, count: int) -> list[Record]:
    got: list[Record] = go.call("consumer.received", name=name, count=count, wait=60_000)
    assert len(got) >= count, f"{len(got)} of {count}: {bodies(got)}"
    return got


def test_single_batch_and_one_way(cluster: Cluster, go: LineDriver) -> None:
    topic, group = cluster.create_topic(unique("Go")), unique("G")
    with (
        opened(go, "producer", cluster, group=unique("PG")) as producer,
        opened(go, "consumer", cluster, group=group, subscribe={topic: "*"}) as consumer,
    ):
        specs = [message(f"single{number}", tags="TagA", keys=f"gokey{number}") for number in range(10)]
        sent = go.call("producer.send", name=producer, topic=topic, messages=specs)
        assert {one["status"] for one in sent} == {0}
        (batch,) = go.call("producer.send", name=producer, topic=topic, messages=messages(10, "batch"), mode="batch")
        assert batch["status"] == 0
        go.call("producer.send", name=producer, topic=topic, messages=messages(10, "oneway"), mode="oneway")
        got = received(go, consumer, 30)
        wait_until(
            lambda: sum(probe.committed_offset(cluster.broker.address, group, topic, n) or 0 for n in range(4)) == 30,
            "committed offsets",
        )
    expected = [f"{kind}{number}" for kind in ("single", "batch", "oneway") for number in range(10)]
    assert sorted(bodies(got)) == sorted(expected)


def test_tags_retry_and_order(cluster: Cluster, go: LineDriver) -> None:
    filtered, retried, ordered = (cluster.create_topic(unique("Go")) for _ in range(3))
    with (
        opened(go, "producer", cluster, group=unique("PG")) as producer,
        opened(go, "consumer", cluster, group=unique("G"), subscribe={filtered: "Red || Blue"}) as filtering,
        opened(go, "consumer", cluster, group=unique("G"), subscribe={retried: "*"}, fail_until=1) as retrying,
        opened(go, "consumer", cluster, group=unique("G"), subscribe={ordered: "*"}, orderly=True) as ordering,
    ):
        specs = [message(f"{tag}{number}", tags=tag) for number in range(4) for tag in ("Red", "Green", "Blue")]
        go.call("producer.send", name=producer, topic=filtered, messages=specs)
        go.call("producer.send", name=producer, topic=retried, messages=[message("again")])
        steps = [message(f"{order}-{step}", order=f"key{order}") for step in range(10) for order in range(3)]
        go.call("producer.send", name=producer, topic=ordered, messages=steps)
        assert sorted(bodies(received(go, filtering, 8))) == sorted(
            spec["body"] for spec in specs if spec["tags"] != "Green"
        )
        in_order = bodies(received(go, ordering, 30))
        assert [one["reconsume"] for one in received(go, retrying, 2)] == [0, 1]
    for order in range(3):
        assert [body for body in in_order if body.startswith(f"{order}-")] == [f"{order}-{step}" for step in range(10)]
