"""A group in controller mode with one bucket: the master writes, the slave reads, and the next master goes on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.interop.harness import REMARKS, probe
from tests.interop.harness.bucket_brokers import (
    Load,
    bucket_of,
    bucket_options,
    check_all,
    history,
    ranges,
    tier_note,
    wait_for_upload,
)
from tests.interop.harness.drivers import JavaClient, unique
from tests.interop.harness.failover import NAME, Group, running_group
from tests.interop.harness.faulty_proxy import FaultyProxy, running_proxy
from tests.interop.harness.object_server import CREDENTIALS, ObjectServer
from tests.interop.harness.servers import Broker
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import Sent, connected
from tests.interop.test_sync_master import Load as Flood
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.protocol.bucket_manifest import Root

QUEUES = 2
WRITES = ("PUT", "POST", "DELETE")


def root_of(bucket: Bucket) -> Root:
    root = history(bucket, NAME).root
    assert root is not None
    return root


def other_than(group: Group, master: Broker) -> Broker:
    (other,) = (broker for broker in group.brokers if broker is not master)
    return other


def fill(broker: Broker, topic: str) -> list[Sent]:
    """Messages in the bucket, that the broker has sent to it."""
    probe.create_topic(broker.address, topic, QUEUES)
    load = Load(broker, topic, QUEUES, 3000, 0.002)
    with load.sending():
        load.wait_for(200)
    wait_for_upload(broker)
    return load.sent


def slave_reads(slave: Broker, proxy: FaultyProxy, topic: str, sent: list[Sent]) -> None:
    """It serves what is in the bucket as it is there."""
    before = sum(method == "GET" and "/log/" in target for method, target in list(proxy.requests))
    with connected("127.0.0.1", slave.port) as wire:
        check_all(wire, topic, sent)
    assert sum(method == "GET" and "/log/" in target for method, target in list(proxy.requests)) > before


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
def test_each_master_goes_on_with_the_bucket(
    request: pytest.FixtureRequest,
    object_server: ObjectServer,
    tmp_path: Path,
    latest_java: JavaClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in CREDENTIALS.items():
        monkeypatch.setenv(key, value)
    name = object_server.create_bucket()
    bucket = bucket_of(monkeypatch, object_server, name, NAME)
    with ExitStack() as stack:
        proxies = [stack.enter_context(running_proxy(object_server.port)) for _ in range(2)]
        each = [bucket_options(proxy.endpoint, name) for proxy in proxies]
        properties = {"tieredStorageLevel": "FORCE", "slaveReadEnable": "true"}
        group = stack.enter_context(
            running_group(tmp_path, brokers=2, etcd_members=0, properties=properties, each=each)
        )

        def proxy_of(broker: Broker) -> FaultyProxy:
            return proxies[group.brokers.index(broker)]

        first = group.wait_for_master()
        second = other_than(group, first)
        early = unique("Early")
        sent = fill(first, early)
        # A slave reads the manifest when it starts, and then from time to time.
        second.stop()
        second.start()
        group.wait_for_all()
        slave_reads(second, proxy_of(second), early, sent)
        assert proxy_of(second).count(*WRITES) == 0
        assert not tier_note(second)

        topic = unique("Failover")
        probe.create_topic(first.address, topic, QUEUES)
        flood = Flood(latest_java, topic, group.names.address)
        flood.is_acknowledged()
        wait_until(lambda: ranges(history(bucket, NAME), topic), "uploads by the first master")
        epoch = root_of(bucket).epoch
        first.kill()
        assert group.wait_for_master(but=first) is second
        flood.is_acknowledged()
        wait_until(lambda: root_of(bucket).epoch > epoch, "the second master owns the bucket")
        assert root_of(bucket).epoch >= int(group.replicas()["masterEpoch"])
        written = proxy_of(first).count(*WRITES)
        first.start()
        group.wait_for_all()
        slave_reads(first, proxy_of(first), early, sent)
        assert proxy_of(first).count(*WRITES) == written

        # The next one is frozen, and goes on when it is the master no more.
        epoch = root_of(bucket).epoch
        with second.process.frozen():
            assert group.wait_for_master(but=second) is first
            flood.is_acknowledged()
            wait_until(lambda: root_of(bucket).epoch > epoch, "the first one owns the bucket again")
        group.wait_for_all()
        assert root_of(bucket).epoch >= int(group.replicas()["masterEpoch"])
        owner = root_of(bucket).owner
        flood.is_acknowledged()

        found = flood.stop()  # reads all of it, which is in the bucket, from the master
        flood.close()
        wait_for_upload(first)
        request.config.stash.setdefault(REMARKS, []).append(f"{request.node.name}: {found}")
        assert found["wrong"] == 0, found["examples"]
        assert (found["undelivered"], found["outOfOrder"]) == (0, 0)
        its = history(bucket, NAME)
        assert sum(ranges(its, topic).values()) == found["stored"] >= found["acknowledged"]
        assert its.root is not None
        assert its.root.owner == owner
        assert not tier_note(second)
        slave_reads(first, proxy_of(first), early, sent)

        # Of a new bucket the first epoch is that of the controllers.
        for broker in (second, first):
            broker.stop()
        object_server.delete_bucket(name)
        object_server.files(name).mkdir()
        for broker in (first, second):
            broker.start()
        wait_until(lambda: history(bucket, NAME).root is not None, "the claim of the new bucket")
        assert root_of(bucket).epoch >= 3
