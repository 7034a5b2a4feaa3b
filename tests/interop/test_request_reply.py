"""Request and reply over two brokers: between Java clients, and between Java and the SDK in both roles."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import JavaClient, PartnerError, Record, message, unique
from tests.interop.harness.log_image import Record as Stored
from tests.interop.harness.log_image import split
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import connected
from trimq.client import sync
from trimq.client.sync import Message

REPLIES = "DefaultCluster_REPLY_TOPIC"


def end_of_replies(cluster: Cluster) -> list[int]:
    """The end of each broker's queue of stored replies."""
    ends = []
    for master in cluster.brokers:
        with connected("127.0.0.1", master.port) as broker:
            ends.append(broker.offsets(REPLIES, 0)[1])
    return ends


def stored_replies(cluster: Cluster, since: list[int]) -> list[set[str]]:
    """The CORRELATION_IDs of the replies that each broker has stored since then."""
    ids: list[set[str]] = []
    for master, offset in zip(cluster.brokers, since, strict=True):
        with connected("127.0.0.1", master.port) as broker:
            records: list[Stored] = []
            while found := broker.pull(REPLIES, 0, offset + len(records), 32):
                records += split(found)
        ids.append({record.properties["CORRELATION_ID"] for record in records})
    return ids


def test_over_two_brokers(hasty: Cluster, java: JavaClient) -> None:
    """Replies reach the requester over whichever broker the replying client picks."""
    topic = hasty.create_topic(unique("Request"), queues=2)
    before = end_of_replies(hasty)
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
    # The topic is that of all tests, and a question that was delivered again has another reply: those asked for count.
    # A broker may store a reply after it has passed it on.
    wait_until(lambda: set().union(*stored_replies(hasty, before)) >= set(asked), "the stored replies")
    stored = [ids & set(asked) for ids in stored_replies(hasty, before)]
    assert all(stored), f"stored replies by broker: {stored}"


def test_the_sdk_asks_and_java_replies(hasty: Cluster, java: JavaClient) -> None:
    topic = hasty.create_topic(unique("Request"), queues=2)
    bodies = [f"q{number}" for number in range(8)]
    with (
        java.consumer(hasty, unique("G"), {topic: "*"}, reply=True) as consumer,
        sync.Producer(unique("PG"), namesrv=hasty.namesrv) as producer,
        ThreadPoolExecutor(len(bodies)) as asking,
    ):
        consumer.wait_for_queues(4)
        replies = list(asking.map(lambda body: producer.request(Message(topic, body.encode()), ttl=30), bodies))
        requests = {record["body"]: record["properties"] for record in consumer.received(len(bodies))}
    assert [reply.body.decode() for reply in replies] == [f"reply to {body}" for body in bodies]
    ids = [requests[body]["CORRELATION_ID"] for body in bodies]
    assert len(set(ids)) == len(bodies)


def test_java_asks_and_the_sdk_replies(hasty: Cluster, java: JavaClient) -> None:
    topic, group = hasty.create_topic(unique("Request"), queues=2), unique("PG")
    with (
        sync.Consumer(unique("G"), topic, namesrv=hasty.namesrv, start="first") as consumer,
        sync.Producer(unique("PG"), namesrv=hasty.namesrv) as replier,
        java.producer(hasty, group, retries=0) as producer,
        ThreadPoolExecutor(8) as asking,
    ):

        def ask(number: int) -> Future[Record]:
            return asking.submit(
                producer.ask,
                "request",
                topic=topic,
                messages=[message(f"q{number}")],
                wait=20_000,
                callback=number >= 4,
                broker=("broker-a", "broker-b")[number % 2],
                queue=number // 2 % 2,
            )

        # The client's first request of a topic sends the heartbeats; one at the same time overtakes them and has no
        # channel yet.
        answers = {"q0": ask(0)}
        wait_until(lambda: all(probe.has_producer(one.address, group) for one in hasty.brokers), "the heartbeats")
        answers |= {f"q{number}": ask(number) for number in range(1, 8)}
        places = set()
        asked = {}
        for _ in answers:
            question = consumer.take(timeout=30)
            assert question is not None
            assert question.wants_reply
            body = question.body.decode()
            places.add(question.queue)
            asked[body] = question.message.all_properties["CORRELATION_ID"]
            replier.reply(question, f"reply to {body}".encode(), properties={"q": body})
            question.ack()
        for body, answer in answers.items():
            reply = answer.result(30)
            assert reply["body"] == f"reply to {body}"
            assert (reply["properties"]["q"], reply["properties"]["MSG_TYPE"]) == (body, "reply")
            assert reply["properties"]["CORRELATION_ID"] == asked[body]
    assert len(places) == 4


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
