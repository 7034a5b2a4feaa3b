"""Request and reply between Java clients, in both roles and over two brokers."""

from __future__ import annotations

import pytest

from tests.interop.harness.drivers import JavaClient, PartnerError, message, unique
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import connected

REPLIES = "DefaultCluster_REPLY_TOPIC"


def stored_replies(cluster: Cluster) -> list[int]:
    """How many replies each broker has stored."""
    counts = []
    for master in cluster.brokers:
        with connected("127.0.0.1", master.port) as broker:
            counts.append(broker.offsets(REPLIES, 0)[1])
    return counts


def test_over_two_brokers(hasty: Cluster, java: JavaClient) -> None:
    """Replies reach the requester over whichever broker the replying client picks."""
    topic = hasty.create_topic(unique("Request"), queues=2)
    before = stored_replies(hasty)
    with (
        java.consumer(hasty, unique("G"), {topic: "*"}, reply=True) as consumer,
        java.producer(hasty, retries=0) as producer,
    ):
        consumer.wait_for_queues(4)
        asked = []
        for number in range(8):
            place = {"broker": ("broker-a", "broker-b")[number % 2], "queue": number // 2 % 2}
            reply = producer.ask(
                "request", topic=topic, messages=[message(f"q{number}")], wait=20_000, callback=number >= 4, **place
            )
            assert reply["body"] == f"reply to q{number}"
            assert reply["properties"]["MSG_TYPE"] == "reply"
            asked.append(reply["properties"]["CORRELATION_ID"])
        requests = {record["body"]: record for record in consumer.received(8)}
    assert [requests[f"q{number}"]["properties"]["CORRELATION_ID"] for number in range(8)] == asked
    assert len(set(asked)) == 8
    more = [now - then for now, then in zip(stored_replies(hasty), before, strict=True)]
    assert sum(more) == 8
    assert all(more), f"stored replies by broker: {more}"


def test_a_requester_that_is_gone(hasty: Cluster, java: JavaClient) -> None:
    topic = hasty.create_topic(unique("Gone"))
    who = {"CORRELATION_ID": "1", "REPLY_TO_CLIENT": "127.0.0.1@gone", "TTL": "3000"}
    with (
        java.consumer(hasty, unique("G"), {topic: "*"}, reply=True) as consumer,
        java.producer(hasty) as producer,
    ):
        producer.send(topic, [message("question", properties=who)])
        (failure, *_) = wait_until(consumer.failures, "the refusal of the reply")
    assert failure["codes"][0] == 1
    assert "channel of <127.0.0.1@gone> not found" in failure["causes"][-1]


def test_no_reply(hasty: Cluster, latest_java: JavaClient) -> None:
    topic = hasty.create_topic(unique("Unanswered"))
    with latest_java.producer(hasty) as producer, pytest.raises(PartnerError) as failed:
        producer.ask("request", topic=topic, messages=[message("question")], wait=1_500)
    assert failed.value.type == "RequestTimeoutException"
