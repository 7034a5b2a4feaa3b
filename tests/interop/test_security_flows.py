"""What the Java client does beyond sending and pushing, with users who may do exactly what each of it needs.

On plain connections, and the common flow over mutual TLS too, where a JVM speaks TLS 1.2 only.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import (
    Consumer,
    JavaClient,
    PartnerError,
    Producer,
    bodies,
    java_client,
    message,
    messages,
    mqadmin,
    unique,
)
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.security import (
    ADMINISTRATOR,
    Security,
    allow,
    create_user,
    java_client_options,
    secured,
)
from tests.interop.harness.servers import Cluster, NameServer, running_cluster
from tests.interop.harness.waiting import wait_until
from tests.interop.test_mqadmin import FAILURE
from tests.interop.test_security_clients import HEARTBEAT, NO_PERMISSION, options, pair_of_users
from tests.interop.test_transactions import HALF, OUTCOMES, committed, half
from tests.tls_certificates import Certificates, certificates

__all__ = ["certificates"]

pytestmark = pytest.mark.xdist_group("security flows")

REPLIES = "DefaultCluster_REPLY_TOPIC"
POP_MESSAGE = 200050

#: Checks of transactions after two seconds, and again each second.
CHECKS = {"transactionTimeOut": "2000", "transactionCheckInterval": "1000"}


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory, security = tmp_path_factory.mktemp("users"), secured(access_control=True)
    with running_cluster(directory, security=security, properties=CHECKS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaClient]:
    with java_client("5.5.0", "JSON", tmp_path_factory.mktemp("java")) as client:
        yield client


def refusals(cluster: Cluster, *users: Mapping[str, str]) -> list[str]:
    """What TriMQ's broker has refused to users: clients make up for some refusals, so that a test sees no failure."""
    names = {f"user={user['access_key']} " for user in users}
    lines = cluster.broker.process.log.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if " access_refused " in line and any(name in line for name in names)]


def let_it_answer(cluster: Cluster, user: Mapping[str, str]) -> None:
    """The Java client answers a check with the topic of all halves: that is the one which Apache's broker checks."""
    if cluster.broker.peer == "apache":
        allow(cluster.broker.address, user["access_key"], f"Topic:{HALF}", ["Pub"])


def transactions(producer: Producer, consumer: Consumer, topic: str) -> None:
    """Each outcome at once, and each after a check; what is committed is delivered."""
    specs = [half(f"{outcome}-{asked}-{number}", outcome, asked) for number in range(2) for outcome, asked in OUTCOMES]
    producer.transaction(topic, specs)
    assert sorted(bodies(consumer.received(len(committed(specs))))) == committed(specs)
    unknown = {spec["body"] for spec in specs if spec["body"].startswith("unknown")}
    wait_until(lambda: set(bodies(producer.checks())) == unknown, "a check of each unknown message")


def test_transactions(users: Cluster, java: JavaClient) -> None:
    topic, group = users.create_topic(unique("Transaction")), unique("G")
    writes, reads = pair_of_users(users, topic, group)
    let_it_answer(users, writes)
    with (
        java.producer(users, transactional=True, retries=0, heartbeat=HEARTBEAT, **writes) as producer,
        java.consumer(users, group, {topic: "*"}, **reads) as consumer,
    ):
        transactions(producer, consumer, topic)
        with pytest.raises(PartnerError) as refusal:
            producer.transaction(users.create_topic(unique("Refused")), [half("never", "commit")])
        assert refusal.value.codes[-1] == NO_PERMISSION


def test_a_member_of_the_group_who_may_not_send_is_asked_nothing(users: Cluster, java: JavaClient) -> None:
    """A check carries the message: it goes to members of the group only whose user has Pub of the topic."""
    if users.broker.peer == "apache":
        pytest.skip("Apache's broker asks each client that says it is in the producer group")
    topic, group, members = users.create_topic(unique("Asked")), unique("G"), unique("PG")
    writes, reads = pair_of_users(users, topic, group)
    own = users.create_topic(unique("Own"))
    stranger, _ = pair_of_users(users, own, unique("G"))
    with (
        java.consumer(users, group, {topic: "*"}, **reads) as consumer,
        java.producer(users, members, transactional=True, heartbeat=500, **stranger) as other,
    ):
        other.send(own, messages(1))  # with the first route it tells the broker of its group
        wait_until(lambda: probe.has_producer(users.broker.address, members), "the stranger's heartbeat")
        with java.producer(users, members, transactional=True, heartbeat=500, **writes) as producer:
            transactions(producer, consumer, topic)
            assert other.checks() == []


def test_requests_and_replies(users: Cluster, java: JavaClient) -> None:
    """Who replies needs Pub of the topic of replies; the one who asks does not."""
    topic, group = users.create_topic(unique("Request")), unique("G")
    writes, reads = pair_of_users(users, topic, group)
    with (
        java.consumer(users, group, {topic: "*"}, reply=True, **reads) as consumer,
        java.producer(users, retries=0, **writes) as producer,
    ):
        with pytest.raises(PartnerError):
            producer.ask("request", topic=topic, messages=[message("refused")], wait=1_500)
        (failure, *_) = wait_until(consumer.failures, "the refusal of the reply")
        assert NO_PERMISSION in failure["codes"]
        allow(users.broker.address, reads["access_key"], f"Topic:{REPLIES}", ["Pub"])
        for number in range(4):
            # Without a queue the client calls the callback before there is a reply, with none.
            place = {"broker": "broker-a", "queue": number}
            asked = [message(f"q{number}")]
            reply = producer.ask("request", topic=topic, messages=asked, wait=20_000, callback=number >= 2, **place)
            assert reply["body"] == f"reply to q{number}"


def test_delayed_messages(users: Cluster, java: JavaClient) -> None:
    """By level, and at a time; one is recalled. The sender needs nothing of the topics in which they wait."""
    topic, group = users.create_topic(unique("Delayed"), queues=1), unique("G")
    writes, reads = pair_of_users(users, topic, group)
    with (
        java.producer(users, retries=0, **writes) as producer,
        java.consumer(users, group, {topic: "*"}, **reads) as consumer,
    ):
        recalled = producer.send(topic, [message("recalled", delay_ms=60_000)])[0]
        assert producer.recall(topic, recalled["recallHandle"]) == recalled["msgId"]
        producer.send(topic, [message("level", delay=2), message("time", delay_ms=1_000), message("at once")])
        assert sorted(bodies(consumer.received(3))) == ["at once", "level", "time"]
    assert refusals(users, writes, reads) == []


def test_orderly(users: Cluster, java: JavaClient) -> None:
    """Locks of queues, retries in place, and the dead letter queue of the group."""
    topic, group = users.create_topic(unique("Orderly")), unique("G")
    writes, reads = pair_of_users(users, topic, group)
    with (
        java.producer(users, **writes) as producer,
        java.consumer(users, group, {topic: "*"}, orderly=True, fail_until=1, suspend=100, **reads) as consumer,
    ):
        producer.send(topic, messages(40))
        got = consumer.received(80)
    queues = defaultdict(list)
    for record in got:
        if record["reconsume"] == 1:
            queues[record["queue"]].append(record["offset"])
    assert queues == {queue: list(range(10)) for queue in range(4)}
    dead = f"%DLQ%{group}"
    with (
        java.producer(users, **writes) as producer,
        java.consumer(
            users, group, {topic: "*"}, orderly=True, fail_until=99, suspend=100, max_reconsume=1, **reads
        ) as consumer,
    ):
        producer.send(topic, [message("poison")])
        wait_until(lambda: probe.has_route(users.namesrv, dead), f"route of {dead}")
    assert refusals(users, writes, reads) == []


def test_broadcast(users: Cluster, java: JavaClient) -> None:
    topic, group = users.create_topic(unique("Broadcast")), unique("G")
    writes, reads = pair_of_users(users, topic, group)
    with (
        java.producer(users, **writes) as producer,
        java.consumer(users, group, {topic: "*"}, model="BROADCASTING", **reads) as one,
        java.consumer(users, group, {topic: "*"}, model="BROADCASTING", **reads) as other,
    ):
        producer.send(topic, messages(20))
        assert sorted(bodies(one.received(20))) == sorted(bodies(other.received(20)))
    assert refusals(users, writes, reads) == []


def test_a_failed_message_is_delivered_again(users: Cluster, java: JavaClient) -> None:
    """It goes through the group's retry topic, for which Sub of the group is enough."""
    topic, group = users.create_topic(unique("Retry")), unique("G")
    writes, reads = pair_of_users(users, topic, group)
    with (
        java.producer(users, **writes) as producer,
        java.consumer(users, group, {topic: "*"}, fail_until=1, **reads) as consumer,
    ):
        producer.send(topic, messages(4))
        got = consumer.received(8, wait=60)
    assert Counter(record["reconsume"] for record in got) == {0: 4, 1: 4}
    assert {record["topic"] for record in got if record["reconsume"]} <= {topic, f"%RETRY%{group}"}
    assert refusals(users, writes, reads) == []


def test_a_running_consumer_goes_back(users: Cluster, java: JavaClient, tmp_path: Path) -> None:
    """The broker asks the client for it; who resets needs Update of topic and group."""
    topic, group = users.create_topic(unique("Reset"), queues=2), unique("G")
    writes, reads = pair_of_users(users, topic, group)
    with (
        java.producer(users, **writes) as producer,
        java.consumer(users, group, {topic: "*"}, **reads) as consumer,
        mqadmin(users, tmp_path / "mqadmin", user=ADMINISTRATOR) as admin,
    ):
        producer.send(topic, messages(10))
        consumer.received(10)
        consumer.wait_for_position(topic, 10)
        reset = {"topic": topic, "group": group, "timestamp": "0", "isForce": "true", "queueId": "-1"}
        reader = probe.Access(None, probe.Credentials(reads["access_key"], reads["secret_key"]))
        assert probe.call(users.broker.address, 222, reset, access=reader).code == NO_PERMISSION
        printed = admin.run("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
        assert FAILURE not in printed
        got = consumer.received(20, wait=60)
        assert Counter(bodies(got)) == {f"m{number}": 2 for number in range(10)}


def test_pop_is_refused_before_it_is_not_supported(users: Cluster) -> None:
    """A user who may not consume learns nothing else. TriMQ's broker does not serve POP yet."""
    if users.supports("pop"):
        pytest.skip("the broker serves POP")
    topic, group = users.create_topic(unique("Pop")), unique("G")
    writes, reads = pair_of_users(users, topic, group)
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": "0",
        "maxMsgNums": "1",
        "invisibleTime": "60000",
        "pollTime": "0",
        "bornTime": str(int(time.time() * 1000)),
        "initMode": "0",
    }
    codes = [
        probe.call(
            users.broker.address, POP_MESSAGE, fields, access=probe.Access(None, probe.Credentials(*user.values()))
        ).code
        for user in (writes, reads)
    ]
    assert codes == [NO_PERMISSION, 3]


# -- with TLS


def check_its_version(java: JavaClient, directory: Path, security: Security) -> None:
    """A name server with TLS 1.3 only gets no request of this JVM; one with 1.2 answers that there is no route."""
    answers = {}
    for version in ("TLSv1.3", "TLSv1.2"):
        only = {**security.tls, "tls.protocols": version}
        server = NameServer("trimq", directory / version, security=replace(security, tls=only))
        with ended_afterwards(server.process):
            server.start()
            cluster = Cluster([server], [])
            with java.producer(cluster, tls=True) as producer, pytest.raises(PartnerError) as failure:
                producer.ask("queues", topic="None")
        answers[version] = failure.value.causes[-1]
    assert "CODE: 17" in answers["TLSv1.2"], answers
    assert "send request to" in answers["TLSv1.3"], answers


def test_the_common_flow_over_mutual_tls_of_one_version(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> None:
    """Send, consume and transactions as users with certificates, in a JVM that has TLS 1.2 only."""
    directory = tmp_path_factory.mktemp("mutual")
    tls12 = (
        *java_client_options(certificates, certificates.client),
        "-Djdk.tls.client.protocols=TLSv1.2",
        "-Dtls.protocols=TLSv1.2",
    )
    security = secured(certificates, "mutual", access_control=True)
    with (
        running_cluster(directory / "cluster", security=security, properties=CHECKS) as cluster,
        java_client("5.5.0", "ROCKETMQ", directory / "java", *tls12) as java,
    ):
        check_its_version(java, directory, security)
        topic, group = cluster.create_topic(unique("Mutual")), unique("G")
        writes, reads = pair_of_users(cluster, topic, group)
        let_it_answer(cluster, writes)
        stranger = options(create_user(cluster.broker.address, unique("stranger"), "canary-of-a-user"))
        with (
            java.producer(cluster, tls=True, transactional=True, heartbeat=HEARTBEAT, **writes) as producer,
            java.consumer(cluster, group, {topic: "*"}, tls=True, heartbeat=HEARTBEAT, **reads) as consumer,
            java.producer(cluster, tls=True, retries=0, **stranger) as refused,
        ):
            transactions(producer, consumer, topic)
            before = len(consumer.so_far())
            producer.send(topic, messages(8))
            consumer.received(before + 8)
            consumer.wait_for_position(topic, before + 8)
            with pytest.raises(PartnerError) as refusal:
                refused.send(topic, messages(1))
            assert refusal.value.codes[-1] == NO_PERMISSION
