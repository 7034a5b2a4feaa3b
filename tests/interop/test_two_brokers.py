"""Two masters and two name servers: clients use both masters, and work without one master or name server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import JavaClient, PartnerError, Producer, bodies, messages, mqadmin, unique
from tests.interop.harness.servers import Cluster, running_cluster
from tests.interop.harness.waiting import wait_until


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("pair"), brokers=2, name_servers=2) as running:
        yield running


def _has_queues(producer: Producer, topic: str, expected: int) -> bool:
    """The Java client raises an error if its name server is down, and uses the next one at the next call."""
    try:
        return len(producer.ask("queues", topic=topic)) == expected
    except PartnerError:
        return False


def test_two_brokers_and_two_name_servers(
    pair: Cluster, latest_java: JavaClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    topic, group = pair.create_topic(unique("Pair")), unique("G")
    for server in pair.name_servers:
        wait_until(lambda at=server.address: probe.has_route(at, topic), "the route")  # type: ignore[misc]
        assert set(probe.cluster(server.address)) == {"broker-a", "broker-b"}

    with (
        latest_java.producer(pair) as producer,
        latest_java.consumer(pair, group, {topic: "*"}) as consumer,
    ):
        consumer.wait_for_queues(8)
        sent = producer.send(topic, messages(40))
        assert Counter((one["broker"], one["queue"]) for one in sent) == {
            (broker, queue): 5 for broker in ("broker-a", "broker-b") for queue in range(4)
        }
        assert sorted(bodies(consumer.received(40))) == sorted(bodies(messages(40)))

        with mqadmin(pair, tmp_path_factory.mktemp("pair-mqadmin")) as admin:
            for master in pair.brokers:
                assert master.address in admin.run("clusterList")
            # A broker lists the queues for which the consumer has committed an offset, which it does periodically.
            wait_until(lambda: admin.run("consumerProgress", "-g", group).count(topic) == 8, "offsets on both brokers")

        pair.name_servers[0].process.kill()
        with latest_java.producer(pair) as late:
            fresh = pair.create_topic(unique("Pair"))
            wait_until(lambda: _has_queues(late, fresh, 8), "the late producer uses the other name server")
            assert len(late.send(fresh, messages(16))) == 16
        producer.send(topic, messages(40, "second"))
        consumer.received(80)

        pair.brokers[1].stop()
        wait_until(lambda: set(probe.cluster(pair.name_servers[1].address)) == {"broker-a"}, "one broker")
        wait_until(lambda: _has_queues(producer, topic, 4), "the producer's new route")
        sent = producer.send(topic, messages(8, "third"))
        assert {one["broker"] for one in sent} == {"broker-a"}
        consumer.received(88)

        pair.brokers[1].start()
        wait_until(lambda: _has_queues(producer, topic, 8), "both brokers in the route")
        consumer.wait_for_queues(8)
        producer.send(topic, messages(16, "fourth"))
        got = consumer.received(104, distinct="body")
    expected = [*messages(40), *messages(40, "second"), *messages(8, "third"), *messages(16, "fourth")]
    assert sorted(set(bodies(got))) == sorted(bodies(expected))
