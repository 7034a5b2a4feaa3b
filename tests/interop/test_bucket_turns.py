"""A broker with a bucket of a real object store, and the official Java client: all levels, and an empty disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.harness import probe
from tests.interop.harness.bucket_brokers import (
    Load,
    bucket_broker,
    bucket_of,
    check_all,
    history,
    mqstore,
    ranges,
    read_from,
    send_one,
    tier_note,
    wait_for_upload,
)
from tests.interop.harness.drivers import JavaClient, Producer, bodies, message, unique
from tests.interop.harness.faulty_proxy import FaultyProxy, running_proxy
from tests.interop.harness.object_server import ObjectServer
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker, Cluster, NameServer
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import Sent, connected
from tests.ports import broker_port

QUEUES = 2
MESSAGES = 300
DELETE_EXPIRED = 329


@pytest.fixture
def names(tmp_path: Path) -> Iterator[NameServer]:
    """A name server of this test."""
    server = NameServer("trimq", tmp_path / "namesrv")
    with ended_afterwards(server.process):
        server.start()
        yield server


def forget_pages(store: Path) -> None:
    """Remove the log from the page cache, of which nothing may be dirty."""
    for path in (store / "commitlog").iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def delete_expired(broker: Broker) -> None:
    """Delete all files of the log but the last one, as if they were old."""
    files = sorted((broker.store / "commitlog").iterdir())
    for path in files:
        os.utime(path, (1, 1))
    probe.ask(broker.address, DELETE_EXPIRED)
    wait_until(lambda: not files[0].exists() and not files[-3].exists(), "the deletion of the log files")


def what_is_sent(producer: Producer, topic: str) -> list[dict[str, Any]]:
    """Send messages of all sizes, with keys, to the queues in turn; what the client knows of each."""
    found = []
    for number in range(MESSAGES):
        spec = message(f"{number} ", size=10 + number * 97 % 9000, keys=f"key{number} shared", tags="T")
        (sent,) = producer.send_to(("broker-a", number % QUEUES), topic, [spec])
        found.append({**sent, "number": number})
    return found


def read_all(java: JavaClient, cluster: Cluster, topic: str, count: int) -> dict[int, list[dict[str, Any]]]:
    """All messages by queue, as a consumer gets them from the beginning on."""
    queues = [{"topic": topic, "broker": "broker-a", "queue": queue} for queue in range(QUEUES)]
    with java.lite_consumer(cluster, unique("Reader"), batch=32) as reader:
        reader.ask("assign", queues=queues)  # a new group begins with the first message
        got = reader.poll(count)
    return {queue: [one for one in got if one["queue"] == queue] for queue in range(QUEUES)}


def places(records: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """Offset, unique key and message id of each."""
    return [(one["offset"], one["uniqKey"], one["offsetMsgId"]) for one in records]


def fetched(proxy: FaultyProxy) -> int:
    """How many reads of messages the broker has made of the bucket."""
    return sum(method == "GET" and "/log/" in target for method, target in list(proxy.requests))


def check_finds(producer: Producer, topic: str, sent: list[dict[str, Any]], stored: dict[str, int]) -> None:
    """By id, by key and by time the client finds each message."""
    # After a restore the keys that the bucket's index has not are read from the messages, in the background.
    wait_until(lambda: producer.query_key(topic, f"key{MESSAGES - 1}"), "the key of the last message")
    for one in sent[:: MESSAGES // 12]:
        assert producer.ask("viewId", topic=topic, msg_id=one["offsetMsgId"])["uniqKey"] == one["msgId"]
        found = producer.query_key(topic, f"key{one['number']}")
        assert [record["uniqKey"] for record in found] == [one["msgId"]]
        at = stored[one["msgId"]]
        place = producer.ask("offsets", topic=topic, broker="broker-a", queue=one["queue"], time=at)
        first = min(other["offset"] for other in sent if (other["queue"], stored[other["msgId"]]) == (one["queue"], at))
        assert place["found"] == first


def test_each_level_reads_the_same_messages(
    object_server: ObjectServer, names: NameServer, latest_java: JavaClient, tmp_path: Path
) -> None:
    bucket, topic, port = object_server.create_bucket(), unique("Level"), broker_port()
    home = tmp_path / "broker"
    with running_proxy(object_server.port) as proxy:

        def on(level: str) -> Broker:
            return bucket_broker(
                home, proxy.endpoint, bucket, [names], port=port, properties={"tieredStorageLevel": level}
            )

        broker = on("NOT_IN_DISK")
        cluster = Cluster([names], [broker])
        with latest_java.producer(cluster) as producer:
            with ended_afterwards(broker.process):
                broker.start()
                probe.create_topic(broker.address, topic, QUEUES)
                sent = what_is_sent(producer, topic)
                wait_for_upload(broker)
                before = fetched(proxy)
                got = read_all(latest_java, cluster, topic, MESSAGES)
                assert fetched(proxy) == before  # all of it is local
                for queue, records in got.items():
                    its = [one for one in sent if one["queue"] == queue]
                    assert places(records) == [(one["offset"], one["msgId"], one["offsetMsgId"]) for one in its]
                    assert [one["body"].partition(" ")[0] for one in records] == [str(one["number"]) for one in its]
                stored = {one["uniqKey"]: one["stored"] for records in got.values() for one in records}

            def same(records: dict[int, list[dict[str, Any]]]) -> bool:
                skip = {"at"}
                return all(
                    [{k: v for k, v in one.items() if k not in skip} for one in records[queue]]
                    == [{k: v for k, v in one.items() if k not in skip} for one in got[queue]]
                    for queue in range(QUEUES)
                )

            for level in ("NOT_IN_MEM", "FORCE", "DISABLE"):
                forget_pages(broker.store)
                broker = on(level)
                with ended_afterwards(broker.process):
                    broker.start()
                    before = fetched(proxy)
                    assert same(read_all(latest_java, cluster, topic, MESSAGES)), level
                    assert (fetched(proxy) > before) == (level != "DISABLE"), level
            for level in ("NOT_IN_DISK", "DISABLE"):
                broker = on(level)
                with ended_afterwards(broker.process):
                    broker.start()
                    if level == "NOT_IN_DISK":
                        delete_expired(broker)
                        before = fetched(proxy)
                        assert same(read_all(latest_java, cluster, topic, MESSAGES))
                        assert fetched(proxy) > before
                        check_finds(producer, topic, sent, stored)
                    begin = producer.ask("offsets", topic=topic, broker="broker-a", queue=0)["min"]
                    assert (begin == 0) == (level == "NOT_IN_DISK")


def test_an_empty_disk_gets_all_of_the_history(
    object_server: ObjectServer, names: NameServer, latest_java: JavaClient, tmp_path: Path
) -> None:
    """After an orderly stop nothing is missing: topics, groups, consumer offsets, messages, keys."""
    bucket, topic, group = object_server.create_bucket(), unique("Wiped"), unique("Group")
    broker = bucket_broker(tmp_path / "broker", object_server.endpoint, bucket, [names])
    cluster = Cluster([names], [broker])
    with ended_afterwards(broker.process), latest_java.producer(cluster) as producer:
        broker.start()
        probe.create_topic(broker.address, topic, QUEUES)
        probe.create_group(broker.address, group)
        sent = what_is_sent(producer, topic)
        with latest_java.consumer(cluster, group, {topic: "*"}) as consumer:
            got = consumer.received(MESSAGES)
            consumer.wait_for_position(topic, MESSAGES)
        stored = {one["uniqKey"]: one["stored"] for one in got}
        offsets = [probe.committed_offset(broker.address, group, topic, queue) for queue in range(QUEUES)]
        assert offsets == [MESSAGES // QUEUES] * QUEUES
        assert broker.stop() == 0
        shutil.rmtree(broker.store)

        broker.start()
        assert not tier_note(broker)
        assert probe.has_route(names.address, topic)
        assert group in (broker.store / "config/subscriptionGroup.json").read_text(encoding="utf-8")
        assert [probe.committed_offset(broker.address, group, topic, queue) for queue in range(QUEUES)] == offsets
        check_finds(producer, topic, sent, stored)
        again = read_all(latest_java, cluster, topic, MESSAGES)
        assert {one["uniqKey"]: one["stored"] for records in again.values() for one in records} == stored
        new = producer.send_to(("broker-a", 0), topic, [message("new")])
        assert new[0]["offset"] == MESSAGES // QUEUES
        assert int(new[0]["offsetMsgId"][16:], 16) > max(int(one["offsetMsgId"][16:], 16) for one in sent)
        with latest_java.consumer(cluster, group, {topic: "*"}) as consumer:
            assert bodies(consumer.received(1)) == ["new"]
            consumer.wait_for_position(topic, MESSAGES + 1)
        wait_for_upload(broker)
        # A stop after which only the offsets of consumers are new.
        broker.stop()
        broker.start()
        probe.commit_offset(broker.address, group, topic, 1, 7)
        broker.stop()
        shutil.rmtree(broker.store)
        report = json.loads(mqstore("restore", "--json", "-c", broker.configuration, broker.store))
        assert not any(queue["missing"] for queue in report["queues"]), report
        broker.start()
        committed = [probe.committed_offset(broker.address, group, topic, queue) for queue in range(QUEUES)]
        assert committed == [MESSAGES // QUEUES + 1, 7]


def test_a_kill_and_an_empty_disk_lose_only_what_was_not_uploaded(
    object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, topic = object_server.create_bucket(), unique("Killed")
    broker = bucket_broker(tmp_path / "broker", object_server.endpoint, name)
    bucket = bucket_of(monkeypatch, object_server, name)
    kept: list[Sent] = []
    with ended_afterwards(broker.process):
        broker.start()
        probe.create_topic(broker.address, topic, QUEUES)
        for number in range(3):
            load = Load(broker, topic, QUEUES, 3000, 0.002)
            with load.sending():
                load.wait_for(150)
                before = history(bucket).end
                wait_until(lambda before=before: history(bucket).end > before, "an upload")  # type: ignore[misc]
                broker.kill()
            shutil.rmtree(broker.store)
            if number == 1:
                mqstore("restore", "-c", broker.configuration, broker.store)
            broker.start()
            found = history(bucket)
            ends = ranges(found, topic)
            kept += [one for one in load.sent if one.offset < ends[one.queue]]
            assert sorted(ends.items()) == [(queue, sum(one.queue == queue for one in kept)) for queue in range(QUEUES)]
            with connected("127.0.0.1", broker.port) as wire:
                check_all(wire, topic, kept)
                for queue in range(QUEUES):
                    # Behind all that is in the bucket, by both offsets.
                    new = send_one(wire, topic, queue)
                    assert new.offset == ends[queue]
                    assert new.phy >= found.end
                    kept.append(new)
                    assert [one.phy for one in read_from(wire, topic, queue, new.offset, new.offset + 1)] == [new.phy]
        wait_for_upload(broker)
        assert sum(ranges(history(bucket), topic).values()) == len(kept)
