"""Timed messages of the Java client: the ways to give a time, recall, and a broker that is killed meanwhile."""

from __future__ import annotations

import struct
import time

import pytest

from tests.interop.conftest import LATEST_JAVA
from tests.interop.harness import probe
from tests.interop.harness.drivers import JavaClient, PartnerError, Record, bodies, message, unique
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until

TIMER_CHECK_POINT = 60
TIMER_METRICS = 61
DAYS = 24 * 3600
LARGEST = 4 * 1024 * 1024

#: The properties that client 5.5.0 sets; client 4.9.8 has no methods for them, but can set them all the same.
PROPERTIES = {"delay_ms": "TIMER_DELAY_MS", "delay_sec": "TIMER_DELAY_SEC", "deliver_ms": "TIMER_DELIVER_MS"}


def now() -> int:
    return time.time_ns() // 1_000_000


def timed(java: JavaClient, body: str, **when: int) -> Record:
    """A message with one of delay_ms, delay_sec and deliver_ms."""
    if java.version == "5.5.0":
        return message(body, keys=body, **when)
    return message(body, keys=body, properties={PROPERTIES[way]: str(value) for way, value in when.items()})


def check_time(record: Record, due: int, precision: int) -> None:
    """Check that a message came at its time: the broker rounds down to its precision, and delivers never earlier."""
    out = int(record["properties"]["TIMER_OUT_MS"])
    assert out % precision == 0
    assert due - precision <= out, record
    assert out <= record["stored"] < out + 10_000, record


def test_every_way_to_give_a_time(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("Timer"), queues=1)
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, unique("G"), {topic: "*"}, orderly=True) as consumer,
    ):
        begin = now()
        # They are sent one after the other: the times between them are more than that takes on a busy machine.
        specs = [
            timed(java, "third", deliver_ms=begin + 12_000),
            timed(java, "second", delay_ms=5_500),
            timed(java, "first", delay_sec=1),
            timed(java, "past", deliver_ms=begin - 1),
            message("plain"),
        ]
        sent = dict(zip(bodies(specs), producer.send(topic, specs), strict=True))
        got = consumer.received(5)
        found = wait_until(lambda: producer.query_key(topic, "second"), "the delivered message by its key")
    assert bodies(got) == ["past", "plain", "first", "second", "third"]
    records = {record["body"]: record for record in got}
    for body, delay in {"first": 1_000, "second": 5_500}.items():
        check_time(records[body], records[body]["born"] + delay, 1_000)
    check_time(records["third"], begin + 12_000, 1_000)
    for body, record in records.items():
        assert (record["topic"], record["queue"], record["msgId"]) == (topic, 0, sent[body]["msgId"])
        parked = body in {"first", "second", "third"}
        assert ("REAL_TOPIC" in record["properties"]) == ("TIMER_DEQUEUE_MS" in record["properties"]) == parked
        assert (sent[body]["recallHandle"] is not None) == (parked and java.version == "5.5.0")
    assert [one["offsetMsgId"] for one in found] == [records["second"]["offsetMsgId"]]


def test_a_tenth_of_a_second(hasty: Cluster, java: JavaClient) -> None:
    topic = hasty.create_topic(unique("Tenth"), queues=1)
    delays = list(range(1_950, 0, -390))
    specs = [timed(java, str(delay), delay_ms=delay) for delay in delays]
    with java.producer(hasty) as producer, java.consumer(hasty, unique("G"), {topic: "*"}, orderly=True) as consumer:
        producer.send_to(("broker-a", 0), topic, specs)
        got = consumer.received(len(specs))
    assert bodies(got) == [str(delay) for delay in reversed(delays)]
    for record in got:
        check_time(record, record["born"] + int(record["body"]), 100)


@pytest.mark.parametrize("java", LATEST_JAVA, indirect=True, ids="-".join)
def test_recall(cluster: Cluster, java: JavaClient) -> None:
    topic, other = cluster.create_topic(unique("Recall"), queues=1), cluster.create_topic(unique("Recall"), queues=1)
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, unique("G"), {topic: "*"}, orderly=True) as consumer,
    ):
        before, recalled, after, last = producer.send(
            topic,
            [timed(java, body, delay_ms=3_000) for body in ("before", "recalled", "after")]
            + [timed(java, "last", delay_ms=4_500)],
        )
        handle = recalled["recallHandle"]
        assert producer.recall(topic, handle) == recalled["msgId"]
        assert producer.recall(topic, handle) == recalled["msgId"]
        with pytest.raises(PartnerError) as refused:
            producer.recall(other, handle)
        assert refused.value.codes == [604]
        got = consumer.received(3)
        with pytest.raises(PartnerError) as refused:
            producer.recall(topic, before["recallHandle"])
        assert refused.value.codes == [604]
    assert sorted(bodies(got)[:2]) == ["after", "before"]
    assert [record["msgId"] for record in got[2:]] == [last["msgId"]]
    assert after["recallHandle"] != handle


@pytest.mark.parametrize("java", LATEST_JAVA, indirect=True, ids="-".join)
def test_across_a_kill(hasty: Cluster, java: JavaClient) -> None:
    """Pending messages come after a kill, those whose time passed meanwhile too; a recalled one does not come."""
    topic, broker = hasty.create_topic(unique("KilledTimer"), queues=1), hasty.broker
    with (
        java.producer(hasty, retries=0) as producer,
        java.consumer(hasty, unique("G"), {topic: "*"}, orderly=True) as consumer,
    ):
        specs = [timed(java, f"{delay}-{number}", delay_ms=delay) for delay in (700, 9_000) for number in range(20)]
        begin = now()
        sent = producer.send_to((broker.name, 0), topic, specs)
        producer.recall(topic, sent[-1]["recallHandle"])
        broker.kill()
        wait_until(lambda: now() > begin + 700, "a time that passes while the broker is down")
        broker.start()
        got = consumer.received(39, wait=60, distinct="body")
        # What is sent for a later time shows that everything due before it has been delivered.
        producer.send_to((broker.name, 0), topic, [timed(java, "end", delay_ms=500)])
        got = consumer.received(40, wait=60, distinct="body")
    assert set(bodies(got)) == {*bodies(specs[:-1]), "end"}
    for record in got:
        delay = 500 if record["body"] == "end" else int(record["body"].partition("-")[0])
        assert int(record["properties"]["TIMER_OUT_MS"]) <= record["stored"]
        assert record["stored"] >= record["born"] + delay - 100


def test_times_that_are_refused(cluster: Cluster, latest_java: JavaClient) -> None:
    topic = cluster.create_topic(unique("TooFar"))
    with latest_java.producer(cluster, retries=0) as producer:
        for spec in (
            timed(latest_java, "far", delay_sec=3 * DAYS + 60),
            timed(latest_java, "far", deliver_ms=now() + (3 * DAYS + 60) * 1000),
            message("no number", properties={"TIMER_DELAY_SEC": "soon"}),
        ):
            with pytest.raises(PartnerError) as refused:
                producer.send(topic, [spec])
            assert refused.value.codes == [13]


def test_a_large_timed_message(cluster: Cluster, latest_java: JavaClient) -> None:
    """Apache's broker loses a timed message whose record is larger than the largest body."""
    topic = cluster.create_topic(unique("LargeTimer"), queues=1)
    size = LARGEST if cluster.broker.peer == "trimq" else LARGEST - 1024
    with (
        latest_java.producer(cluster, compress_over=100_000_000) as producer,
        latest_java.consumer(cluster, unique("G"), {topic: "*"}, orderly=True) as consumer,
    ):
        producer.send(topic, [message("large", size=size), message("large", size=size, delay_sec=1)])
        at_once, later = consumer.received(2)
    assert later["length"] == at_once["length"] == size
    assert later["crc"] == at_once["crc"]


def test_pending_messages_are_counted(cluster: Cluster, latest_java: JavaClient) -> None:
    topic, address = cluster.create_topic(unique("Counted")), cluster.broker.address

    def pending() -> int:
        counted = probe.ask(address, TIMER_METRICS).json()["timingCount"]
        return int(counted.get(topic, {}).get("count", 0))

    with (
        latest_java.producer(cluster) as producer,
        latest_java.consumer(cluster, unique("G"), {topic: "*"}, orderly=True) as consumer,
    ):
        producer.send(topic, [message("soon", delay_sec=2), *(message("late", delay_sec=3600) for _ in range(3))])
        wait_until(lambda: pending() == 4, "all messages in the timer's statistics")
        consumer.received(1)
        wait_until(lambda: pending() == 3, "the delivered message out of the timer's statistics")
    (read, flushed, queue, master, *_) = struct.unpack_from(">qqqq", probe.ask(address, TIMER_CHECK_POINT).body)
    assert abs(read - now()) < 60_000
    assert flushed % 52 == 0 and flushed > 0  # noqa: PT018
    assert 0 < queue <= master or master == 0
