"""What Java producers send our consumers get, and the reverse; members of both kinds share a group."""

import time
from collections.abc import Iterator

import pytest

from client.sync import Consumer, Message, Producer, TransactionProducer
from tests.client.servers import Servers
from tests.interop.harness.drivers import JavaClient, bodies, java_client, message, messages
from tests.interop.harness.servers import Cluster

pytestmark = [pytest.mark.partners, pytest.mark.timeout(150, func_only=True)]


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaClient]:
    with java_client("5.5.0", "JSON", tmp_path_factory.mktemp("java")) as client:
        yield client


@pytest.fixture
def cluster(servers: Servers) -> Cluster:
    return Cluster([servers.name_server], [servers.broker])


Seen = tuple[str, str | None, tuple[str, ...]]


def received(
    cluster: Cluster, topic: str, count: int, **settings: object
) -> list[tuple[str, str | None, tuple[str, ...]]]:
    """Body, tags and keys of the first messages of a topic, as our consumer gets them."""
    found: list[Seen] = []
    with Consumer(f"ours_{topic}", topic, namesrv=cluster.namesrv, start="first", **settings) as consumer:
        deadline = time.monotonic() + 60
        while len(found) < count:
            got = consumer.take(timeout=deadline - time.monotonic())
            assert got is not None, found
            found.append((got.body.decode(), got.tags, got.keys))
            got.ack()
    return found


def test_ours_to_java(cluster: Cluster, servers: Servers, java: JavaClient, name: str) -> None:
    servers.create_topic(name, 2)
    large = b"large " * 1000
    with java.consumer(cluster, name, {name: "a || b"}) as consumer:
        with Producer(name, namesrv=cluster.namesrv) as producer:
            receipt = producer.send(Message(name, b"plain", tags="a", keys=["k1", "k2"], properties={"p": "q"}))
            producer.send(Message(name, b"not wanted", tags="c"))
            producer.send(Message(name, b"later", tags="a", delay_level=1))
            producer.send_batch([Message(name, b"batch 1", tags="b"), Message(name, b"batch 2", tags="b")])
        for how in ("zlib", "lz4", "zstd"):
            with Producer(name, namesrv=cluster.namesrv, compression=how) as producer:
                producer.send(Message(name, large, tags="a"))
        with Producer(name, namesrv=cluster.namesrv, linger=0.02) as producer:
            producer.send_many([Message(name, b"linger 1", tags="b"), Message(name, b"linger 2", tags="b")])
        got = consumer.received(9)
    assert sorted(record["body"] for record in got if record["length"] < 100) == [
        "batch 1", "batch 2", "later", "linger 1", "linger 2", "plain",
    ]  # fmt: skip
    assert [record["length"] for record in got if record["length"] > 100] == [len(large)] * 3
    [plain] = [record for record in got if record["body"] == "plain"]
    assert plain["msgId"] == receipt.message_id
    assert plain["keys"] == "k1 k2"
    assert plain["properties"]["p"] == "q"


def test_java_to_ours(cluster: Cluster, servers: Servers, java: JavaClient, name: str) -> None:
    servers.create_topic(name, 2)
    with java.producer(cluster) as producer:
        producer.send(name, [message("plain", tags="a", keys="k1 k2"), message("later", delay=1)])
        producer.send(name, [message("one", tags="b"), message("two", tags="b")], "batch")
        producer.send(name, [message("large", size=20_000)])
    found = received(cluster, name, 5)
    assert ("plain", "a", ("k1", "k2")) in found
    assert {body for body, _, _ in found if len(body) < 100} == {"plain", "later", "one", "two"}
    assert max(len(body) for body, _, _ in found) == 20_000


def test_order_over_both(cluster: Cluster, servers: Servers, java: JavaClient, name: str) -> None:
    servers.create_topic(name, 4)
    with java.producer(cluster) as producer:
        producer.send(name, [message(f"{number}", order=1) for number in range(20)], "ordered")
    assert [body for body, _, _ in received(cluster, name, 20, orderly=True)] == [str(number) for number in range(20)]
    with java.consumer(cluster, name + "_j", {name: "*"}, orderly=True) as consumer:
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
        pytest.fail("the broker asked, though it was told")

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
