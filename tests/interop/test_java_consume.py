"""All kinds of consumers of the Java client."""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.interop.harness import probe
from tests.interop.harness.drivers import (
    JavaClient,
    bodies,
    message,
    messages,
    unique,
)
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until

BROKER = "broker-a"


def test_concurrent(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Concurrent"), queues=8)
    with java.producer(cluster) as producer, java.consumer(cluster, unique("G"), {topic: "*"}) as consumer:
        producer.send(topic, messages(100, "early"), "async")
        consumer.received(100)
        producer.send(topic, messages(300, "late"), "async")
        got = consumer.received(400)
    assert len(got) == 400
    assert set(Counter(bodies(got)).values()) == {1}
    assert {record["queue"] for record in got} == set(range(8))


def test_a_waiting_pull_is_answered_when_a_message_comes(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Waiting"), queues=1)
    with java.producer(cluster) as producer, java.consumer(cluster, unique("G"), {topic: "*"}) as consumer:
        producer.send(topic, [message("first")])
        consumer.received(1)
        delays = []
        for number in range(10):
            producer.send(topic, [message(f"m{number}")])
            record = consumer.received(number + 2)[-1]
            delays.append(record["at"] - record["stored"])
    assert sorted(delays)[5] < 500, f"milliseconds from storing to receiving: {delays}"


def test_orderly(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Orderly"))
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, unique("G"), {topic: "*"}, orderly=True) as consumer,
    ):
        producer.send(topic, messages(200))
        got = consumer.received(200)
    queues = defaultdict(list)
    for record in got:
        queues[record["queue"]].append(record["offset"])
    assert queues == {queue: list(range(50)) for queue in range(4)}


def test_orderly_holds_a_queue_until_its_message_is_done(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Holding"), queues=1)
    options = {"orderly": True, "fail_until": 2, "suspend": 100}
    with java.producer(cluster) as producer, java.consumer(cluster, unique("G"), {topic: "*"}, **options) as consumer:
        producer.send(topic, messages(2))
        got = consumer.received(6)
    assert [(record["body"], record["reconsume"]) for record in got] == [
        (body, times) for body in ("m0", "m1") for times in range(3)
    ]


def test_orderly_gives_up_into_the_dead_letter_queue(cluster: Cluster, java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("OrderlyDead"), queues=1), unique("G")
    options = {"orderly": True, "fail_until": 99, "suspend": 100, "max_reconsume": 1}
    dead = f"%DLQ%{group}"
    with java.producer(cluster) as producer, java.consumer(cluster, group, {topic: "*"}, **options) as consumer:
        producer.send(topic, [message("poison")])
        consumer.received(2)
        wait_until(lambda: probe.has_route(cluster.name_servers[0].address, dead), f"route of {dead}")
        with java.lite_consumer(cluster, unique("G")) as reader:
            reader.ask("assign", queues=[{"topic": dead, "broker": BROKER, "queue": 0}])
            (record,) = reader.poll(1)
    assert record["body"] == "poison"
    assert record["properties"]["RETRY_TOPIC"] == topic


def test_tags(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Tags"))
    specs = [message(f"{tag}{number}", tags=tag) for number in range(10) for tag in ("Red", "Green", "Blue")]
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, unique("G"), {topic: "Red || Blue"}) as two,
        java.consumer(cluster, unique("G"), {topic: "Green"}) as one,
    ):
        producer.send(topic, [*specs, message("no tag")])
        # The last message of each queue shows that all messages before it have been filtered.
        for queue in range(4):
            producer.send_to((BROKER, queue), topic, [message("end", tags="Red"), message("end", tags="Green")])
        red_and_blue = [record for record in two.received(24) if record["body"] != "end"]
        green = [record for record in one.received(14) if record["body"] != "end"]
    assert sorted(bodies(red_and_blue)) == sorted(spec["body"] for spec in specs if spec["tags"] != "Green")
    assert sorted(bodies(green)) == sorted(spec["body"] for spec in specs if spec["tags"] == "Green")


def test_retry_until_it_works(cluster: Cluster, java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("Retry")), unique("G")
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, group, {topic: "*"}, fail_until=1) as consumer,
    ):
        (sent,) = producer.send(topic, [message("again", tags="T", keys="retrykey")])
        first, second = consumer.received(2)
    assert (first["reconsume"], second["reconsume"]) == (0, 1)
    assert second["topic"] == topic
    assert (second["tags"], second["keys"]) == ("T", "retrykey")
    assert second["properties"]["RETRY_TOPIC"] == topic
    assert second["properties"]["ORIGIN_MESSAGE_ID"] == sent["offsetMsgId"]
    assert second["msgId"] == first["msgId"] == sent["msgId"]
    assert second["born"] == first["born"]
    assert second["stored"] - first["stored"] >= 900


def test_retry_ends_in_the_dead_letter_queue(cluster: Cluster, java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("Dead")), unique("G")
    dead = f"%DLQ%{group}"
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, group, {topic: "*"}, fail_until=99, max_reconsume=2) as consumer,
    ):
        (sent,) = producer.send(topic, [message("poison", keys="deadkey")])
        tries = consumer.received(3)
        wait_until(lambda: probe.has_route(cluster.name_servers[0].address, dead), f"route of {dead}")
        with java.lite_consumer(cluster, unique("G")) as reader:
            reader.ask("assign", queues=[{"topic": dead, "broker": BROKER, "queue": 0}])
            (record,) = reader.poll(1)
        assert len(consumer.so_far()) == 3
    assert [one["reconsume"] for one in tries] == [0, 1, 2]
    assert (record["topic"], record["body"], record["keys"]) == (dead, "poison", "deadkey")
    assert record["reconsume"] == 3
    assert record["properties"]["RETRY_TOPIC"] == topic
    assert record["properties"]["ORIGIN_MESSAGE_ID"] == sent["offsetMsgId"]


def test_broadcast(cluster: Cluster, java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("Broadcast")), unique("G")
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, group, {topic: "*"}, model="BROADCASTING") as one,
        java.consumer(cluster, group, {topic: "*"}, model="BROADCASTING") as other,
    ):
        producer.send(topic, messages(40))
        assert sorted(bodies(one.received(40))) == sorted(bodies(other.received(40)))
        assert len(one.so_far()) == len(other.so_far()) == 40
    assert probe.committed_offset(cluster.broker.address, group, topic, 0) is None


def test_queries_by_key_and_id(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Query"))
    specs = [message(f"q{number}", keys=f"common own{number}") for number in range(5)]
    with java.producer(cluster) as producer:
        sent = producer.send(topic, specs)
        wait_until(lambda: len(producer.query_key(topic, "common")) == 5, "all messages in the index")
        assert sorted(bodies(producer.query_key(topic, "common"))) == bodies(specs)
        assert bodies(producer.query_key(topic, "own3")) == ["q3"]
        assert producer.query_key(topic, "unused") == []
        assert producer.query_key(unique("Elsewhere"), "common") == []
        by_offset = producer.ask("viewId", topic=topic, msg_id=sent[2]["offsetMsgId"])
        by_unique = producer.ask("viewUnique", topic=topic, msg_id=sent[4]["msgId"])
    assert by_offset["body"] == "q2"
    assert by_offset["queue"] == sent[2]["queue"]
    assert by_unique["body"] == "q4"
    assert by_unique["msgId"] == sent[4]["msgId"]


def test_offsets(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Offsets"), queues=2)
    with java.producer(cluster) as producer:
        empty = producer.ask("offsets", topic=topic, broker=BROKER, queue=1)
        producer.send_to((BROKER, 0), topic, messages(5))
        found = producer.ask("offsets", topic=topic, broker=BROKER, queue=0, time=0)
        late = producer.ask("offsets", topic=topic, broker=BROKER, queue=0, time=found["earliest"] + 3_600_000)
        queues = producer.ask("queues", topic=topic)
    assert (empty["min"], empty["max"], empty["earliest"]) == (0, 0, -1)
    assert (found["min"], found["max"], found["found"]) == (0, 5, 0)
    assert late["found"] == 5
    assert {(one["broker"], one["queue"]) for one in queues} == {(BROKER, 0), (BROKER, 1)}


def test_lite_pull_with_subscribe(cluster: Cluster, java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("Lite")), unique("G")
    with java.producer(cluster) as producer:
        producer.send(topic, messages(30, tags="A"))
        producer.send(topic, messages(30, "hidden", tags="B"))
        with java.lite_consumer(cluster, group, {topic: "A"}) as consumer:
            assert sorted(bodies(consumer.poll(30))) == sorted(f"m{number}" for number in range(30))
            consumer.ask("commit")
        producer.send(topic, messages(8, "more", tags="A"))
        with java.lite_consumer(cluster, group, {topic: "A"}) as consumer:
            assert sorted(bodies(consumer.poll(8))) == [f"more{number}" for number in range(8)]


def test_lite_pull_with_assign_and_seek(cluster: Cluster, java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("Assign")), unique("G")
    place = {"topic": topic, "broker": BROKER, "queue": 2}
    with java.producer(cluster) as producer, java.lite_consumer(cluster, group, auto_commit=False) as consumer:
        producer.send_to((BROKER, 2), topic, messages(20))
        assert len(consumer.ask("queues", topic=topic)) == 4
        consumer.ask("assign", queues=[place])
        # Read to the end before seeking: a pull in flight may deliver its messages to this client after the seek.
        assert bodies(consumer.poll(20)) == [f"m{number}" for number in range(20)]
        consumer.ask("seek", **place, to="15")
        assert bodies(consumer.poll(5)) == [f"m{number}" for number in range(15, 20)]
        consumer.ask("seek", **place, to="begin")
        assert bodies(consumer.poll(20)) == [f"m{number}" for number in range(20)]
        consumer.ask("commit")
    assert probe.committed_offset(cluster.broker.address, group, topic, 2) == 20
    with java.producer(cluster) as producer, java.lite_consumer(cluster, group, auto_commit=False) as consumer:
        consumer.ask("assign", queues=[place])
        assert consumer.ask("committed", **place) == 20
        assert consumer.ask("offsetForTime", **place, time=0) == 0
        consumer.ask("seek", **place, to="end")
        producer.send_to((BROKER, 2), topic, [message("new")])
        assert bodies(consumer.poll(1)) == ["new"]


def test_two_consumers_share_the_queues(cluster: Cluster, java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("Share")), unique("G")
    with java.producer(cluster) as producer, java.consumer(cluster, group, {topic: "*"}) as one:
        one.wait_for_queues(4)
        with java.consumer(cluster, group, {topic: "*"}) as other:
            first, second = one.wait_for_queues(2), other.wait_for_queues(2)
            assert not first & second
            producer.send(topic, messages(40))
            wait_until(lambda: len(one.so_far()) + len(other.so_far()) >= 40, "all messages at the two")
            assert sorted(bodies(one.so_far()) + bodies(other.so_far())) == sorted(bodies(messages(40)))
            assert {record["queue"] for record in one.so_far()} == {queue for _, _, queue in first}
        one.wait_for_queues(4)
        producer.send(topic, messages(8, "alone"))
        wait_until(lambda: sum(body.startswith("alone") for body in bodies(one.so_far())) == 8, "the rest at one")


def test_orderly_consumers_lock_their_queues(cluster: Cluster, java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("Lock")), unique("G")
    specs = [message(f"{order}-{step:02}", order=order) for step in range(40) for order in range(4)]
    with java.producer(cluster) as producer, java.consumer(cluster, group, {topic: "*"}, orderly=True) as one:
        one.wait_for_queues(4)
        producer.send(topic, specs[:80], "ordered")
        with java.consumer(cluster, group, {topic: "*"}, orderly=True) as other:
            one.wait_for_queues(2)
            other.wait_for_queues(2)
            producer.send(topic, specs[80:], "ordered")
            wait_until(
                lambda: len(set(bodies(one.so_far()) + bodies(other.so_far()))) == len(specs), "all messages", 60
            )
            got = sorted([*one.so_far(), *other.so_far()], key=lambda record: record["at"])
    for order in range(4):
        assert [body for body in bodies(got) if body.startswith(f"{order}-")] == [
            f"{order}-{step:02}" for step in range(40)
        ]


def test_a_consumer_goes_on_where_it_stopped(cluster: Cluster, java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("Resume")), unique("G")
    with java.producer(cluster) as producer:
        producer.send(topic, messages(20))
        with java.consumer(cluster, group, {topic: "*"}) as consumer:
            consumer.received(20)
            consumer.wait_for_position(topic, 20)
        assert sum(probe.committed_offset(cluster.broker.address, group, topic, n) or 0 for n in range(4)) == 20
        producer.send(topic, messages(12, "later"))
        with java.consumer(cluster, group, {topic: "*"}) as consumer:
            got = consumer.received(12)
    assert sorted(bodies(got)) == sorted(f"later{number}" for number in range(12))


def test_a_new_group_from_the_last_offset(cluster: Cluster, java: JavaClient) -> None:
    """On a queue whose first message is still in memory a new group starts at 0, whatever start it requests."""
    topic = cluster.create_topic(unique("Last"))
    with java.producer(cluster) as producer:
        producer.send(topic, messages(8))
        with java.consumer(cluster, unique("G"), {topic: "*"}, **{"from": "CONSUME_FROM_LAST_OFFSET"}) as consumer:
            assert len(consumer.received(8)) == 8
