"""TriMQ's SDK at Apache's servers, over TLS and with users; a broker of one peer at a name server of the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import unique
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.security import allow, create_user, secured
from tests.interop.harness.servers import Broker, Cluster, NameServer, Peer, running_cluster
from tests.interop.harness.waiting import wait_until
from tests.tls_certificates import Certificates, KeyPair, certificates
from trimq.client import (
    ClientOptions,
    Credentials,
    CredentialsError,
    NoPermissionError,
    RocketMQError,
    Tls,
    TransactionState,
)
from trimq.client.sync import Consumer, Message, Producer, PullConsumer, TransactionProducer

__all__ = ["certificates"]

pytestmark = pytest.mark.xdist_group("security peers")

SECRET = "canary-of-a-user"
Header = Literal["json", "rocketmq"]


@pytest.fixture(scope="module")
def apache(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Cluster]:
    """Apache's servers 5.5.0: TLS enforcing with certificates of clients, and users."""
    security = secured(certificates, "mutual", access_control=True)
    with running_cluster(tmp_path_factory.mktemp("apache"), peer="apache", security=security) as cluster:
        yield cluster


def tls(made: Certificates, pair: KeyPair | None) -> Tls:
    if pair is None:
        return Tls(ca_file=made.ca)
    return Tls(ca_file=made.ca, cert_file=pair.cert, key_file=pair.key)


class User:
    """A user of a broker, and the options of a client that acts as this user."""

    def __init__(self, cluster: Cluster, made: Certificates, header: Header, **resources: str) -> None:
        broker = cluster.broker.address
        self.name = create_user(broker, unique("user"), SECRET).access_key
        for resource, actions in resources.items():
            kind, _, name = resource.partition("_")
            allow(broker, self.name, f"{kind.title()}:{name}", actions.split())
        self.options = ClientOptions(
            header=header, tls=tls(made, made.client), credentials=Credentials(self.name, SECRET)
        )


def taken(consumer: Consumer, count: int) -> list[Any]:
    """The first messages that a consumer gets, not acknowledged yet."""
    got: list[Any] = []
    deadline = time.monotonic() + 60
    while len(got) < count:
        one = consumer.take(timeout=deadline - time.monotonic())
        assert one is not None, got
        got.append(one)
    return got


@pytest.mark.parametrize("header", ["json", "rocketmq"])
def test_the_original_accepts_our_signatures(apache: Cluster, certificates: Certificates, header: Header) -> None:
    """Of single sends, of those with prepared headers, of batches and one-ways; of pulls, commits and send-backs."""
    topic, group = apache.create_topic(unique("Ours")), unique("G")
    writes = User(apache, certificates, header, **{f"topic_{topic}": "Pub"})
    reads = User(apache, certificates, header, **{f"topic_{topic}": "Sub", f"group_{group}": "Sub"})
    settings = {"namesrv": apache.namesrv, "options": writes.options}
    with Producer(unique("PG"), **settings) as producer:
        for number in range(8):
            producer.send(Message(topic, f"one{number}".encode(), tags="ä", keys=["k"], properties={"p": "ü"}))
        producer.send_batch([Message(topic, f"batch{number}".encode()) for number in range(4)])
        producer.send_oneway(Message(topic, b"oneway"))
        producer.send(Message(topic, b"large " * 5_000))
    with Producer(unique("PG"), linger=0.01, **settings) as producer:
        producer.send_many([Message(topic, f"linger{number}".encode()) for number in range(4)])
    with Consumer(group, topic, namesrv=apache.namesrv, options=reads.options, start="first") as consumer:
        got = taken(consumer, 18)
        again = got.pop()
        again.nack(delay_level=1)
        for one in got:
            one.ack()
        (retried,) = taken(consumer, 1)
        retried.ack()
        consumer.commit()
    assert (retried.body, retried.reconsume_times) == (again.body, 1)
    expected = [f"one{n}" for n in range(8)] + [f"batch{n}" for n in range(4)] + [f"linger{n}" for n in range(4)]
    seen = sorted(one.body.decode() for one in [*got, retried])
    assert seen == sorted([*expected, "oneway", "large " * 5_000])
    assert sum(probe.committed_offset(apache.broker.address, group, topic, queue) or 0 for queue in range(4)) == 18


def test_transactions_and_pulls_at_the_original(apache: Cluster, certificates: Certificates) -> None:
    topic, group = apache.create_topic(unique("Halves")), unique("G")
    writes = User(apache, certificates, "json", **{f"topic_{topic}": "Pub"})
    reads = User(apache, certificates, "json", **{f"topic_{topic}": "Sub Get", f"group_{group}": "Sub"})
    with TransactionProducer(
        unique("PG"), namesrv=apache.namesrv, options=writes.options, check=lambda _: TransactionState.COMMIT
    ) as producer:
        with producer.transaction(Message(topic, b"committed")):
            pass
        with producer.transaction(Message(topic, b"rolled back")) as transaction:
            transaction.state = TransactionState.ROLLBACK
        with producer.transaction(Message(topic, b"committed too")):
            pass
    with PullConsumer(group, namesrv=apache.namesrv, options=reads.options, start="first") as consumer:
        consumer.assign(consumer.queues(topic))
        found: list[bytes] = []
        deadline = time.monotonic() + 60
        while len(found) < 2 and time.monotonic() < deadline:
            found += [one.body for one in consumer.poll(10, timeout=5)]
        consumer.commit()
    assert sorted(found) == [b"committed", b"committed too"]


def test_our_clients_show_the_original_s_refusals(apache: Cluster, certificates: Certificates) -> None:
    topic, other = apache.create_topic(unique("Ours")), apache.create_topic(unique("Other"))
    user = User(apache, certificates, "json", **{f"topic_{topic}": "Pub"})
    with Producer(unique("PG"), namesrv=apache.namesrv, options=user.options) as producer:
        producer.send(Message(topic, b"allowed"))
        with pytest.raises(NoPermissionError, match=rf"User:{user.name} has no permission to access Topic:{other}"):
            producer.send(Message(other, b"refused"))
    wrong = ClientOptions(tls=user.options.tls, credentials=Credentials(user.name, "wrong"))
    unsigned = ClientOptions(tls=user.options.tls)
    for options in (wrong, unsigned):
        with (
            Producer(unique("PG"), namesrv=apache.namesrv, options=options) as producer,
            pytest.raises(CredentialsError),
        ):
            producer.send(Message(topic, b"refused"))


def test_the_original_refuses_our_clients_without_a_certificate(apache: Cluster, certificates: Certificates) -> None:
    """Nor does a client of ours fall back to a plain connection."""
    topic = apache.create_topic(unique("Ours"))
    for one in (tls(certificates, None), tls(certificates, certificates.foreign_client), False):
        options = ClientOptions(tls=one)
        with pytest.raises(RocketMQError), Producer(unique("PG"), namesrv=apache.namesrv, options=options) as producer:
            producer.send(Message(topic, b"refused"))
    foreign = Tls(ca_file=certificates.other.cert, cert_file=certificates.client.cert, key_file=certificates.client.key)
    with (
        pytest.raises(RocketMQError, match="certificate"),
        Producer(unique("PG"), namesrv=apache.namesrv, options=ClientOptions(tls=foreign)) as producer,
    ):
        producer.send(Message(topic, b"refused"))


# -- a broker of one peer at a name server of the other


@contextmanager
def mixed(directory: Path, made: Certificates, name_server: Peer, broker: Peer) -> Iterator[Cluster]:
    security = secured(made, "mutual")
    with ExitStack() as stack:
        server = NameServer(name_server, directory / "namesrv", security=security)
        stack.enter_context(ended_afterwards(server.process, gracefully=name_server == "trimq"))
        server.start()
        home = directory / "broker"
        master = Broker(broker, home, [server], store=home / "store", security=security)
        stack.enter_context(ended_afterwards(master.process, gracefully=broker == "trimq"))
        master.start()
        yield Cluster([server], [master])


@pytest.mark.parametrize(("name_server", "broker"), [("apache", "trimq"), ("trimq", "apache")])
def test_a_broker_registers_over_tls(
    tmp_path: Path, certificates: Certificates, name_server: Peer, broker: Peer
) -> None:
    """With its own certificate, which the name server verifies; TLS is on because the broker's mode is enforcing."""
    with mixed(tmp_path, certificates, name_server, broker) as cluster:
        topic = cluster.create_topic(unique("Mixed"))
        wait_until(lambda: probe.has_route(cluster.namesrv, topic), "the topic's route")
        options = ClientOptions(tls=tls(certificates, certificates.client))
        with (
            Producer(unique("PG"), namesrv=cluster.namesrv, options=options) as producer,
            Consumer(unique("G"), topic, namesrv=cluster.namesrv, options=options, start="first") as consumer,
        ):
            producer.send(Message(topic, b"over TLS"))
            (got,) = taken(consumer, 1)
            got.ack()
        assert got.body == b"over TLS"
