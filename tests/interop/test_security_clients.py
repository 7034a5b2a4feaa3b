"""The official clients over TLS, with users and policies, and with both."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import (
    JavaClient,
    LineDriver,
    PartnerError,
    bodies,
    java_client,
    messages,
    unique,
)
from tests.interop.harness.security import (
    Security,
    allow,
    create_user,
    files_with_secrets,
    java_client_options,
    secured,
)
from tests.interop.harness.servers import Cluster, running_cluster
from tests.interop.harness.waiting import wait_until
from tests.tls_certificates import Certificates, certificates

__all__ = ["certificates"]

pytestmark = pytest.mark.xdist_group("security clients")

NO_PERMISSION = 16

#: Java's client 4.9.8 leaves a heartbeat out while another one runs. Until the next, by default after 30 seconds, the
#: broker refuses its pulls, because their subscription is newer than that of the last heartbeat.
HEARTBEAT = 1_000

VERSIONS = [("5.5.0", "JSON"), ("5.5.0", "ROCKETMQ"), ("4.9.8", "JSON")]

#: The clusters by name: open for TLS and plain, TLS only, TLS with certificates of clients, plain with users.
SECURITY: dict[str, Callable[[Certificates], Security]] = {
    "permissive": lambda made: secured(made, "permissive"),
    "enforcing": lambda made: secured(made, "enforcing", access_control=True),
    "mutual": lambda made: secured(made, "mutual"),
    "users": lambda made: secured(access_control=True),
}

#: Encodings differ in what is signed, so of clusters without users the second one is tested by night.
CASES = [
    pytest.param(
        name,
        client,
        id="-".join((name, *client)),
        marks=[pytest.mark.nightly] if client[1] == "ROCKETMQ" and name in {"permissive", "mutual"} else [],
    )
    for name in SECURITY
    for client in VERSIONS
]


@dataclass
class Started:
    """Clusters and clients, each started when a test first needs it, and ended with the module."""

    directory: Path
    certificates: Certificates
    stack: ExitStack
    clusters: dict[str, Cluster] = field(default_factory=dict)
    clients: dict[tuple[str, str], JavaClient] = field(default_factory=dict)

    def cluster(self, name: str) -> Cluster:
        if name not in self.clusters:
            running = running_cluster(self.directory / name, security=SECURITY[name](self.certificates))
            self.clusters[name] = self.stack.enter_context(running)
        return self.clusters[name]

    def java(self, version: str, encoding: str) -> JavaClient:
        """A JVM whose clients use TLS, with a certificate, unless a test says otherwise."""
        if (version, encoding) not in self.clients:
            options = java_client_options(self.certificates, self.certificates.client)
            directory = self.directory / f"java-{version}-{encoding}"
            client = self.stack.enter_context(java_client(version, encoding, directory, *options))
            self.clients[version, encoding] = client
        return self.clients[version, encoding]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Started]:
    with ExitStack() as stack:
        yield Started(tmp_path_factory.mktemp("security"), certificates, stack)


def pair_of_users(cluster: Cluster, topic: str, group: str) -> tuple[dict[str, str], dict[str, str]]:
    """Options of a producer and a consumer. With access control each is a user who may do exactly what it needs to."""
    if not cluster.broker.security.access_control:
        return {}, {}
    broker = cluster.broker.address
    producing, consuming = (create_user(broker, unique(name), "canary-of-a-user") for name in ("writes", "reads"))
    allow(broker, producing.access_key, f"Topic:{topic}", ["Pub"])
    allow(broker, consuming.access_key, f"Topic:{topic}", ["Sub"])
    allow(broker, consuming.access_key, f"Group:{group}", ["Sub"])
    return options(producing), options(consuming)


def options(user: probe.Credentials) -> dict[str, str]:
    return {"access_key": user.access_key, "secret_key": user.secret_key}


def committed(cluster: Cluster, group: str, topic: str) -> int:
    return sum(probe.committed_offset(cluster.broker.address, group, topic, queue) or 0 for queue in range(4))


@pytest.mark.parametrize(("name", "encoding"), CASES)
def test_java_sends_and_consumes(started: Started, name: str, encoding: tuple[str, str]) -> None:
    cluster, java = started.cluster(name), started.java(*encoding)
    topic, group = cluster.create_topic(unique("Secure")), unique("G")
    producing, consuming = pair_of_users(cluster, topic, group)
    tls = name != "users"
    with (
        java.producer(cluster, tls=tls, **producing) as producer,
        java.consumer(cluster, group, {topic: "*"}, tls=tls, heartbeat=HEARTBEAT, **consuming) as consumer,
    ):
        queues = producer.ask("queues", topic=topic)
        producer.send(topic, messages(8, "one"))
        producer.send(topic, messages(8, "batch"), mode="batch")
        producer.send(topic, messages(4, "oneway"), mode="oneway")
        got = consumer.received(20)
        consumer.wait_for_position(topic, 20)
    assert len(queues) == 4
    expected = [f"one{n}" for n in range(8)] + [f"batch{n}" for n in range(8)] + [f"oneway{n}" for n in range(4)]
    assert sorted(bodies(got)) == sorted(expected)
    wait_until(lambda: committed(cluster, group, topic) == 20, "committed offsets")


def test_a_permissive_server_serves_plain_clients_too(started: Started) -> None:
    cluster, java = started.cluster("permissive"), started.java("5.5.0", "JSON")
    topic = cluster.create_topic(unique("Mixed"))
    with (
        java.producer(cluster, tls=False) as producer,
        java.consumer(cluster, unique("G"), {topic: "*"}, tls=True) as consumer,
    ):
        producer.send(topic, messages(8))
        assert sorted(bodies(consumer.received(8))) == sorted(f"m{n}" for n in range(8))


def test_an_enforcing_server_executes_nothing_of_plain_clients(started: Started) -> None:
    """Up to 5.4.0 Apache's servers closed the connection, but stored the message."""
    cluster, java = started.cluster("enforcing"), started.java("5.5.0", "JSON")
    topic = cluster.create_topic(unique("Plain"), queues=1)
    users = pair_of_users(cluster, topic, unique("G"))
    with java.producer(cluster, tls=True, **users[0]) as producer:
        producer.send(topic, messages(1))
    user = probe.Credentials(users[0]["access_key"], users[0]["secret_key"])
    with pytest.raises(OSError):
        send(cluster, topic, probe.Access(None, user))
    with (
        java.producer(cluster, tls=False, retries=0, timeout=3_000, **users[0]) as producer,
        pytest.raises(PartnerError),
    ):
        producer.send(topic, messages(1))
    assert end_of_queue(cluster, topic) == 1


def send(cluster: Cluster, topic: str, access: probe.Access) -> probe.Reply:
    """Send one message to a queue by the harness's own client, with the fields that the broker requires."""
    fields = {
        "producerGroup": "probe",
        "topic": topic,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4",
        "queueId": "0",
        "sysFlag": "0",
        "bornTimestamp": "1700000000000",
        "flag": "0",
        "properties": "",
        "reconsumeTimes": "0",
    }
    return probe.call(cluster.broker.address, 10, fields, b"body", access=access)


def end_of_queue(cluster: Cluster, topic: str) -> int:
    return int(probe.ask(cluster.broker.address, 30, {"topic": topic, "queueId": "0"}).ext["offset"])


def test_clients_need_a_certificate_of_the_right_authority(started: Started) -> None:
    """Mutual TLS: a client without a certificate, or with one of another authority, gets no answer of either server."""
    cluster, made = started.cluster("mutual"), started.certificates
    topic = cluster.create_topic(unique("Mutual"))
    for pair in (None, made.foreign_client):
        access = probe.Access(made.client_context(pair))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            send(cluster, topic, access)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            probe.call(cluster.namesrv, probe.CLUSTER_INFO, access=access)
    assert send(cluster, topic, probe.Access(made.client_context(made.client))).code == 0


def test_java_without_a_certificate_is_refused(started: Started) -> None:
    cluster, made = started.cluster("mutual"), started.certificates
    topic = cluster.create_topic(unique("Mutual"))
    without = java_client_options(made, None)
    with java_client("5.5.0", "JSON", started.directory / "java-without-certificate", *without) as java:
        with java.producer(cluster, retries=0, timeout=3_000) as producer, pytest.raises(PartnerError):
            producer.send(topic, messages(1))
        permissive = started.cluster("permissive")
        topic = permissive.create_topic(unique("Mutual"))
        with java.producer(permissive) as producer:
            assert len(producer.send(topic, messages(1))) == 1


# -- users and policies


@pytest.mark.parametrize("encoding", VERSIONS, ids="-".join)
@pytest.mark.parametrize("name", ["users", "enforcing"])
def test_java_sees_the_refusal(started: Started, name: str, encoding: tuple[str, str]) -> None:
    """Code 16, as Apache's; after the administrator has allowed it the same producer sends."""
    cluster, java = started.cluster(name), started.java(*encoding)
    allowed, refused = (cluster.create_topic(unique(prefix)) for prefix in ("Allowed", "Refused"))
    producing, _ = pair_of_users(cluster, allowed, unique("G"))
    with java.producer(cluster, tls=name != "users", retries=0, **producing) as producer:
        assert len(producer.send(allowed, messages(1))) == 1
        with pytest.raises(PartnerError) as refusal:
            producer.send(refused, messages(1))
        assert refusal.value.codes[-1] == NO_PERMISSION
        assert f"Topic:{refused}" in refusal.value.causes[-1]
        allow(cluster.broker.address, producing["access_key"], f"Topic:{refused}", ["Pub"])
        assert len(producer.send(refused, messages(1))) == 1


def test_java_with_a_wrong_secret_key_is_refused(started: Started) -> None:
    cluster, java = started.cluster("users"), started.java("5.5.0", "JSON")
    topic = cluster.create_topic(unique("Wrong"))
    producing, _ = pair_of_users(cluster, topic, unique("G"))
    for credentials in ({**producing, "secret_key": "wrong"}, {**producing, "access_key": unique("Unknown")}, {}):
        with (
            java.producer(cluster, tls=False, retries=0, **credentials) as producer,
            pytest.raises(PartnerError) as refusal,
        ):
            producer.send(topic, messages(1))
        assert refusal.value.codes[-1] == NO_PERMISSION


def test_a_consumer_needs_its_topic_and_its_group(started: Started) -> None:
    """With the topic alone it gets nothing; it begins when its group is allowed."""
    cluster, java = started.cluster("users"), started.java("5.5.0", "JSON")
    topic, group = cluster.create_topic(unique("Group")), unique("G")
    producing, _ = pair_of_users(cluster, topic, unique("Other"))
    user = create_user(cluster.broker.address, unique("reads"), "canary-of-a-user")
    allow(cluster.broker.address, user.access_key, f"Topic:{topic}", ["Sub"])
    pull = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": "0",
        "queueOffset": "0",
        "maxMsgNums": "1",
        "sysFlag": "0",
        "commitOffset": "0",
        "suspendTimeoutMillis": "0",
        "subVersion": "0",
    }
    with (
        java.producer(cluster, tls=False, **producing) as producer,
        java.consumer(cluster, group, {topic: "*"}, tls=False, **options(user)) as consumer,
    ):
        producer.send(topic, messages(4))
        reply = probe.call(cluster.broker.address, 11, pull, access=probe.Access(None, user))
        assert (reply.code, f"Group:{group}" in reply.remark) == (NO_PERMISSION, True)
        assert consumer.so_far() == []
        allow(cluster.broker.address, user.access_key, f"Group:{group}", ["Sub"])
        assert sorted(bodies(consumer.received(4))) == [f"m{n}" for n in range(4)]


@contextmanager
def opened(driver: LineDriver, what: str, cluster: Cluster, **arguments: Any) -> Iterator[str]:
    name = unique(what)
    driver.call(f"{what}.open", name=name, namesrv=cluster.namesrv, **arguments)
    try:
        yield name
    finally:
        driver.call("close", name=name)


def exchange(driver: LineDriver, cluster: Cluster, users: tuple[Mapping[str, str], Mapping[str, str]], topic: str,
             group: str) -> list[str]:  # fmt: skip
    """Send eight messages with a client that is not Java's, and consume them with another."""
    with (
        opened(driver, "producer", cluster, group=unique("PG"), **users[0]) as producer,
        opened(driver, "consumer", cluster, group=group, subscribe={topic: "*"}, **users[1]) as consumer,
    ):
        driver.call("producer.send", name=producer, topic=topic, messages=messages(8))
        received = driver.call("consumer.received", name=consumer, count=8, wait=30_000)
        wait_until(lambda: committed(cluster, group, topic) == 8, "committed offsets")
    return bodies(received)


def refused_send(driver: LineDriver, cluster: Cluster, user: Mapping[str, str], topic: str) -> PartnerError:
    name = unique("producer")
    driver.call("producer.open", name=name, namesrv=cluster.namesrv, group=unique("PG"), **user)
    try:
        with pytest.raises(PartnerError) as refusal:
            driver.call("producer.send", name=name, topic=topic, messages=messages(1))
    finally:
        # With a wrong secret key ali-ons cannot sign off either, and says so.
        with suppress(PartnerError):
            driver.call("close", name=name)
    return refusal.value


@pytest.mark.parametrize("partner", ["node", "go"])
def test_other_clients_sign_their_requests(started: Started, request: pytest.FixtureRequest, partner: str) -> None:
    """ali-ons 3.12.0 and rocketmq-client-go 2.1.2. Neither has TLS: both open plain sockets only."""
    driver: LineDriver = request.getfixturevalue(partner)
    cluster = started.cluster("users")
    topic, group = cluster.create_topic(unique("Signed")), unique("G")
    refused = cluster.create_topic(unique("Refused"))
    users = pair_of_users(cluster, topic, group)
    assert sorted(exchange(driver, cluster, users, topic, group)) == [f"m{n}" for n in range(8)]
    # ali-ons tries other brokers after a refusal, and does not show the last one's text.
    shown = "still failed" if partner == "node" else f"Topic:{refused}"
    assert shown in str(refused_send(driver, cluster, users[0], refused))
    refused_send(driver, cluster, {**users[0], "secret_key": "wrong"}, topic)
    assert [end_of_queue(cluster, refused), sum_of_ends(cluster, topic)] == [0, 8]


def sum_of_ends(cluster: Cluster, topic: str) -> int:
    ends = (probe.ask(cluster.broker.address, 30, {"topic": topic, "queueId": str(queue)}) for queue in range(4))
    return sum(int(one.ext["offset"]) for one in ends)


@pytest.mark.parametrize("partner", ["node", "go"])
def test_a_permissive_server_serves_clients_without_tls(
    started: Started, request: pytest.FixtureRequest, partner: str
) -> None:
    driver: LineDriver = request.getfixturevalue(partner)
    cluster = started.cluster("permissive")
    topic, group = cluster.create_topic(unique("Plain")), unique("G")
    assert sorted(exchange(driver, cluster, ({}, {}), topic, group)) == [f"m{n}" for n in range(8)]


@pytest.mark.parametrize("name", ["users", "enforcing"])
def test_servers_write_no_password(started: Started, name: str) -> None:
    """Neither logs nor store have one, after good and bad requests; Apache's store has all of them."""
    cluster = started.cluster(name)
    topic = cluster.create_topic(unique("Canary"))
    users = pair_of_users(cluster, topic, unique("G"))
    context = cluster.broker.security.access.context
    for access_key, secret_key in ((users[0]["access_key"], users[0]["secret_key"]), (unique("stranger"), "wrong")):
        reply = send(cluster, topic, probe.Access(context, probe.Credentials(access_key, secret_key)))
        assert reply.code == (0 if secret_key != "wrong" else NO_PERMISSION)
        assert "canary-of-a-user" not in reply.remark
    directories = [server.directory for server in cluster.name_servers] + [cluster.broker.directory]
    found = [path for directory in directories for path in files_with_secrets(directory)]
    assert bool(found) == (cluster.broker.peer == "apache"), found
