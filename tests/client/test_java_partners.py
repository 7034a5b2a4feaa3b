"""TriMQ's consumers get the messages of Java producers and the reverse; members of both kinds share a group."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.client.servers import Servers
from tests.interop.harness.drivers import JavaClient, bodies, java_client, message, messages
from tests.interop.harness.servers import Cluster
from trimq.client import Sql
from trimq.client.sync import Consumer, Message, Producer, TransactionProducer

pytestmark = [pytest.mark.partners, pytest.mark.timeout(150, func_only=True)]


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaClient]:
    with java_client("5.5.0", "JSON", tmp_path_factory.mktemp("java")) as client:
        yield client


@pytest.fixture(scope="module", params=["5.5.0", "4.9.8"])
def any_java(
    request: pytest.FixtureRequest, java: JavaClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JavaClient]:
    """The newest client, and the last one before 5.0, which most programs still use."""
    if request.param == java.version:
        yield java
    else:
        with java_client(request.param, "JSON", tmp_path_factory.mktemp("old-java")) as client:
            yield client


@pytest.fixture
def cluster(servers: Servers) -> Cluster:
    return Cluster([servers.name_server], [servers.broker])


Seen = tuple[str, str | None, tuple[str, ...]]


def received(
    cluster: Cluster, topic: str, count: int, **settings: object
) -> list[tuple[str, str | None, tuple[str, ...]]]:
    """Body, tags and keys of the first messages of a topic, as TriMQ's consumer gets them."""
    found: list[Seen] = []
    with Consumer(f"ours_{topic}", topic, namesrv=cluster.namesrv, start="first", **settings) as consumer:
        deadline = time.monotonic() + 60
        while len(found) < count:
            got = consumer.take(timeout=deadline - time.monotonic())
            assert got is not None, found
            found.append((got.body.decode(), got.tags, got.keys))
            got.ack()
    return found


def test_ours_to_java(cluster: Cluster, servers: Servers, any_java: JavaClient, name: str) -> None:
    servers.create_topic(name, 2)
    large = b"large " * 1000
    with any_java.consumer(cluster, name, {name: "a || b"}) as consumer:
        with Producer(name, namesrv=cluster.namesrv) as producer:
            receipt = producer.send(Message(name, b"plain", tags="a", keys=["k1", "k2"], properties={"p": "q"}))
            producer.send(Message(name, b"not wanted", tags="c"))
            producer.send(Message(name, b"later", tags="a", delay_level=1))
            producer.send_oneway(Message(name, b"one way", tags="a"))
            producer.send_batch([Message(name, b"batch 1", tags="b"), Message(name, b"batch 2", tags="b")])
        for how in ("zlib", "lz4", "zstd"):
            with Producer(name, namesrv=cluster.namesrv, compression=how) as producer:
                producer.send(Message(name, large, tags="a"))
        with Producer(name, namesrv=cluster.namesrv, linger=0.02) as producer:
            producer.send_many([Message(name, b"linger 1", tags="b"), Message(name, b"linger 2", tags="b")])
        got = consumer.received(10)
    assert sorted(record["body"] for record in got if record["length"] < 100) == [
        "batch 1", "batch 2", "later", "linger 1", "linger 2", "one way", "plain",
    ]  # fmt: skip
    assert [record["length"] for record in got if record["length"] > 100] == [len(large)] * 3
    [plain] = [record for record in got if record["body"] == "plain"]
    assert plain["msgId"] == receipt.message_id
    assert plain["keys"] == "k1 k2"
    assert plain["properties"]["p"] == "q"


def test_java_to_ours(cluster: Cluster, servers: Servers, any_java: JavaClient, name: str) -> None:
    servers.create_topic(name, 2)
    with any_java.producer(cluster) as producer:
        producer.send(name, [message("plain", tags="a", keys="k1 k2"), message("later", delay=1)])
        producer.send(name, [message("one", tags="b"), message("two", tags="b")], "batch")
        producer.send(name, [message("large", size=20_000)])
        producer.send(name, [message("async")], "async")
        producer.send(name, [message("one way")], "oneway")
    found = received(cluster, name, 7)
    assert ("plain", "a", ("k1", "k2")) in found
    assert {body for body, _, _ in found if len(body) < 100} == {"plain", "later", "one", "two", "async", "one way"}
    assert max(len(body) for body, _, _ in found) == 20_000


def test_order_over_both(cluster: Cluster, servers: Servers, any_java: JavaClient, name: str) -> None:
    servers.create_topic(name, 4)
    with any_java.producer(cluster) as producer:
        producer.send(name, [message(f"{number}", order=1) for number in range(20)], "ordered")
    assert [body for body, _, _ in received(cluster, name, 20, orderly=True)] == [str(number) for number in range(20)]
    with any_java.consumer(cluster, name + "_j", {name: "*"}, orderly=True) as consumer:
        with Producer(name, namesrv=cluster.namesrv) as ours:
            for number in range(20, 40):
                ours.send(Message(name, b"%d" % number, sharding_key="k"))
        got = [record for record in consumer.received(40) if int(record["body"]) >= 20]
    assert bodies(got) == [str(number) for number in range(20, 40)]


def test_members_of_both_kinds_share_a_group(cluster: Cluster, servers: Servers, java: JavaClient, name: str) -> None:
    servers.create_topic(name, 4)
    with (
        java.consumer(cluster, name, {name: "*"}) as theirs,
        Consumer(name, name, namesrv=cluster.namesrv, start="first") as ours,
    ):
        theirs.wait_for_queues(2)
        assert len(ours.assignment) == 2
        with java.producer(cluster) as producer:
            producer.send(name, messages(40), "async")
        mine = []
        while (got := ours.take(timeout=3.0)) is not None:
            mine.append(got.body.decode())
            got.ack()
        both = mine + bodies(theirs.so_far())
    assert sorted(both) == sorted(f"m{number}" for number in range(40))
    assert mine


def test_what_we_hand_back_a_java_member_can_get(
    cluster: Cluster, servers: Servers, java: JavaClient, name: str
) -> None:
    servers.create_topic(name, 1)
    with Consumer(name, name, namesrv=cluster.namesrv, start="first") as ours:
        with java.producer(cluster) as producer:
            producer.send(name, [message("again", tags="t")])
        got = ours.take(timeout=30)
        assert got is not None
        got.nack(delay_level=3)
    with java.consumer(cluster, name, {name: "*"}) as theirs:
        [record] = theirs.received(1)
    assert (record["body"], record["tags"], record["reconsume"], record["topic"]) == ("again", "t", 1, name)


def test_what_a_java_member_hands_back_we_can_get(
    cluster: Cluster, servers: Servers, java: JavaClient, name: str
) -> None:
    servers.create_topic(name, 1)
    with java.consumer(cluster, name, {name: "*"}, failUntil=9) as theirs:
        with Producer(name, namesrv=cluster.namesrv) as producer:
            producer.send(Message(name, b"again", keys=["k"]))
        theirs.received(2)  # the second delivery is of the message handed back
    with Consumer(name, name, namesrv=cluster.namesrv, start="first") as ours:
        got = ours.take(timeout=60)
        assert got is not None
        assert (got.body, got.topic, got.keys) == (b"again", name, ("k",))
        assert got.reconsume_times >= 1
        got.ack()


def test_broadcasting(cluster: Cluster, servers: Servers, java: JavaClient, name: str) -> None:
    servers.create_topic(name, 2)
    with (
        java.consumer(cluster, name, {name: "*"}, model="BROADCASTING") as one,
        java.consumer(cluster, name, {name: "*"}, model="BROADCASTING") as other,
    ):
        one.wait_for_queues(2)
        other.wait_for_queues(2)
        with Producer(name, namesrv=cluster.namesrv) as producer:
            producer.send(Message(name, b"to all"))
        assert [bodies(each.received(1)) for each in (one, other)] == [["to all"]] * 2
    with java.producer(cluster) as theirs:
        theirs.send(name, [message("to all of ours")])
    for _ in range(2):
        found = received(cluster, name, 2, model="broadcasting")
        assert {body for body, _, _ in found} == {"to all", "to all of ours"}


def test_sql92(cluster: Cluster, servers: Servers, java: JavaClient, name: str) -> None:
    servers.create_topic(name, 1)
    with Producer(name, namesrv=cluster.namesrv) as ours, java.producer(cluster) as theirs:
        for amount in ("5", "50"):
            ours.send(Message(name, b"ours " + amount.encode(), properties={"amount": amount}))
            theirs.send(name, [message(f"theirs {amount}", properties={"amount": amount})])
    with Consumer(name, {name: Sql("amount > 10")}, namesrv=cluster.namesrv, start="first") as consumer:
        mine = {got.body for _ in range(2) if (got := consumer.take(timeout=30)) is not None}
    assert mine == {b"ours 50", b"theirs 50"}
    with java.consumer(cluster, name + "_j", sql={name: "amount > 10"}) as consumer_of_theirs:
        assert set(bodies(consumer_of_theirs.received(2))) == {"ours 50", "theirs 50"}


def test_a_time_of_delivery(
    cluster: Cluster, servers: Servers, java: JavaClient, name: str, request: pytest.FixtureRequest
) -> None:
    servers.expect(request, "timer_messages")
    servers.create_topic(name, 1)
    with java.consumer(cluster, name, {name: "*"}) as consumer, Producer(name, namesrv=cluster.namesrv) as producer:
        began = time.time()
        producer.send(Message(name, b"in three seconds", deliver_at=began + 3))
        assert bodies(consumer.received(1)) == ["in three seconds"]
        assert time.time() - began >= 1.5  # brokers store delays in whole seconds


def test_transactions(
    cluster: Cluster, servers: Servers, java: JavaClient, name: str, request: pytest.FixtureRequest
) -> None:
    servers.expect(request, "transactions")
    servers.create_topic(name, 1)
    with java.producer(cluster, transactional=True) as producer:
        outcomes = [message(how, properties={"outcome": how}) for how in ("commit", "rollback")]
        producer.ask("transaction", topic=name, messages=outcomes)
    assert received(cluster, name, 1) == [("commit", None, ())]

    def never(_message: object) -> None:
        pytest.fail("the broker asked although it had been notified")

    with (
        java.consumer(cluster, name, {name: "*"}) as consumer,
        TransactionProducer(name, never, namesrv=cluster.namesrv) as ours,  # type: ignore[arg-type]
    ):
        with ours.transaction(Message(name, b"ours")):
            pass
        assert "ours" in bodies(consumer.received(2))


def test_request_and_reply(
    cluster: Cluster, servers: Servers, java: JavaClient, name: str, request: pytest.FixtureRequest
) -> None:
    servers.expect(request, "request_reply")
    servers.create_topic(name, 1)
    with (
        java.consumer(cluster, name, {name: "*"}, reply=True),
        Producer(name, namesrv=cluster.namesrv) as producer,
    ):
        assert producer.request(Message(name, b"question"), ttl=30).body == b"reply to question"


def test_a_java_request_and_our_reply(
    cluster: Cluster, servers: Servers, java: JavaClient, name: str, request: pytest.FixtureRequest
) -> None:
    servers.expect(request, "request_reply")
    servers.create_topic(name, 1)
    with (
        Consumer(name, name, namesrv=cluster.namesrv, start="first") as ours,
        Producer(name, namesrv=cluster.namesrv) as producer,
        java.producer(cluster) as theirs,
        ThreadPoolExecutor(1) as asking,
    ):
        answer = asking.submit(theirs.ask, "request", topic=name, messages=[message("question")], wait=10_000)
        question = ours.take(timeout=20)
        assert question is not None
        producer.reply(question, b"our answer")
        question.ack()
        assert answer.result(30)["body"] == "our answer"
