"""Transactions of the Java client: outcomes, check-backs, and a broker that is killed in the middle of them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable

from tests.interop.harness import probe
from tests.interop.harness.drivers import JavaClient, Record, bodies, message, unique
from tests.interop.harness.log_image import Record as Stored
from tests.interop.harness.log_image import split
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import RefusedError, Wire, connected

HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
CHECKER = "CID_RMQ_SYS_TRANS"
GIVEN_UP = "TRANS_CHECK_MAX_TIME_TOPIC"
RESUME_CHECK = 323

#: Outcome of the local transaction, and the answer to a check of one that stayed unknown.
OUTCOMES = [("commit", ""), ("rollback", ""), ("unknown", "commit"), ("unknown", "rollback")]


def half(body: str, outcome: str, when_asked: str = "", **properties: str) -> Record:
    """A message whose properties tell the producer how its transaction ends."""
    return message(body, properties={"outcome": outcome, "whenAsked": when_asked, **properties})


def committed(specs: Iterable[Record]) -> list[str]:
    """The bodies of the messages that their producer commits at once or when it is asked."""
    ends = [(spec["body"], spec["properties"]["outcome"], spec["properties"]["whenAsked"]) for spec in specs]
    return sorted(body for body, outcome, asked in ends if "commit" in (outcome, asked))


def unresolved(broker: Wire, address: str) -> int:
    """How many records of the half topic the broker has not passed yet."""
    passed = probe.committed_offset(address, CHECKER, HALF, 0) or 0
    return broker.offsets(HALF, 0)[1] - passed


def wait_until_resolved(cluster: Cluster) -> None:
    """Wait until no broker of the cluster has a half message that it would check again."""
    for one in cluster.brokers:
        with connected("127.0.0.1", one.port) as broker:
            wait_until(
                lambda broker=broker, one=one: unresolved(broker, one.address) == 0,  # type: ignore[misc]
                f"no half messages left on {one.name}",
                60,
            )


def prepared_by(cluster: Cluster, record: Record) -> Stored:
    """The half message from which a committed message was made."""
    master = next(one for one in cluster.brokers if one.name == record["broker"])
    with connected("127.0.0.1", master.port) as broker:
        (found,) = split(broker.view(record["prepared"]))
    return found


def check_delivered(cluster: Cluster, received: list[Record], expected: Iterable[str]) -> None:
    """Check that exactly the expected bodies came, and that TriMQ's broker has stored each of them once.

    Apache's broker ends a half again if the second request comes before the first one's op record. A consumer may get
    a stored message again after a kill, because the broker's consumer offsets are older than the messages.
    """
    stored = {(record["broker"], record["queue"], record["offset"]): record["body"] for record in received}
    counts = Counter(stored.values())
    assert set(counts) == set(expected)
    if cluster.broker.peer == "trimq":
        assert set(counts.values()) == {1}


def test_outcomes_and_checks(hasty: Cluster, java: JavaClient) -> None:
    topic, group = hasty.create_topic(unique("Transaction")), unique("PG")
    specs = [half(f"{outcome}-{asked}-{number}", outcome, asked) for number in range(4) for outcome, asked in OUTCOMES]
    with (
        java.producer(hasty, group, transactional=True, retries=0) as producer,
        java.consumer(hasty, unique("G"), {topic: "*"}) as consumer,
    ):
        sent = dict(zip(bodies(specs), producer.transaction(topic, specs), strict=True))
        consumer.received(len(committed(specs)))
        unknown = [body for body in sent if body.startswith("unknown")]
        wait_until(lambda: set(bodies(producer.checks())) == set(unknown), "a check of each unknown message")
        wait_until_resolved(hasty)
        got, asked = consumer.so_far(), producer.checks()
    assert {one["local"] for one in sent.values()} == {"COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"}
    assert {one["status"] for one in sent.values()} == {"SEND_OK"}
    assert all(one["transactionId"] == one["msgId"] for one in sent.values())
    assert {one["broker"] for one in sent.values()} == {"broker-a", "broker-b"}
    check_delivered(hasty, got, committed(specs))
    for record in got:
        one = sent[record["body"]]
        assert record["sysFlag"] & 12 == 8
        assert (record["topic"], record["queue"], record["broker"]) == (topic, one["queue"], one["broker"])
        assert record["msgId"] == record["properties"]["__transactionId__"] == one["msgId"]
        assert (record["properties"]["PGROUP"], record["properties"]["TRAN_MSG"]) == (group, "true")
        assert "REAL_TOPIC" not in record["properties"]
        prepared = prepared_by(hasty, record)
        assert (prepared.topic, prepared.properties["UNIQ_KEY"]) == (HALF, one["msgId"])
        times = record["properties"].get("TRANSACTION_CHECK_TIMES", "0")
        assert prepared.properties.get("TRANSACTION_CHECK_TIMES", "0") == times
        assert (times == "0") == record["body"].startswith("commit")
    for check in asked:
        assert (check["topic"], check["uniqKey"]) == (topic, sent[check["body"]]["msgId"])
        assert check["queue"] == sent[check["body"]]["queue"]
        assert check["at"] - check["born"] >= 1_500


def test_across_a_kill(hasty: Cluster, java: JavaClient) -> None:
    """Every acknowledged half ends as its producer decided, although requests to end some are lost with the broker."""
    topic, broker = hasty.create_topic(unique("Killed")), hasty.broker
    specs = [
        half(f"{outcome}-{asked or outcome}-{number}", outcome, asked or outcome)
        for number in range(150)
        for outcome, asked in OUTCOMES
    ]
    with (
        java.producer(hasty, transactional=True, retries=0, timeout=2_000, heartbeat=500) as producer,
        java.consumer(hasty, unique("G"), {topic: "*"}) as consumer,
    ):
        sending = java.begin("producer.transaction", name=producer.name, topic=topic, messages=specs, go_on=True)
        wait_until(lambda: len(consumer.so_far()) >= 10, "the first committed messages")
        broker.kill()
        broker.start()
        sent = sending.result(60)
        accepted = [spec for spec, one in zip(specs, sent, strict=True) if "failed" not in one]
        assert len(accepted) > 100
        wanted = set(committed(accepted))
        wait_until(lambda: wanted <= set(bodies(consumer.so_far())), "all committed messages", 60)
        wait_until_resolved(hasty)
        got = consumer.so_far()
    # A send that failed may have been stored all the same; the producer then decides when it is asked.
    check_delivered(hasty, got, wanted | (set(bodies(got)) & set(committed(specs))))


def test_another_producer_of_the_group_answers(hasty: Cluster, java: JavaClient) -> None:
    topic, group = hasty.create_topic(unique("Another")), unique("PG")
    with (
        java.consumer(hasty, unique("G"), {topic: "*"}) as consumer,
        java.producer(hasty, group, transactional=True, heartbeat=500) as second,
    ):
        # A client tells a broker about its producer groups once it knows the broker from a topic's route.
        second.send(topic, [message("hello")])
        with java.producer(hasty, group, transactional=True, undecided=True) as first:
            (sent,) = first.transaction(topic, [half("adopted", "unknown", "commit")])
        _, record = consumer.received(2)
        checks = second.checks()
    assert (record["body"], record["msgId"]) == ("adopted", sent["msgId"])
    assert bodies(checks)[-1] == "adopted"


def test_a_half_is_not_checked_before_its_time(hasty: Cluster, latest_java: JavaClient) -> None:
    topic = hasty.create_topic(unique("Immune"))
    immune = half("immune", "unknown", "commit", CHECK_IMMUNITY_TIME_IN_SECONDS="4")
    with (
        latest_java.consumer(hasty, unique("G"), {topic: "*"}) as consumer,
        latest_java.producer(hasty, transactional=True) as producer,
    ):
        producer.transaction(topic, [immune, half("soon", "unknown", "commit")])
        consumer.received(2)
        at = {check["body"]: check["at"] - check["born"] for check in producer.checks()}
    assert 1_500 <= at["soon"] < 4_000 <= at["immune"] < 15_000


def given_up(broker: Wire, key: str) -> Stored | None:
    """The record of a half message that the broker does not check any more."""
    found: list[Stored] = []
    with contextlib.suppress(RefusedError):  # the topic does not exist before the first such message
        while data := broker.pull(GIVEN_UP, 0, len(found), 32):
            found += split(data)
    return next((record for record in found if record.properties["UNIQ_KEY"] == key), None)


def test_a_half_that_stays_undecided_is_given_up_and_resumed(hasty: Cluster, latest_java: JavaClient) -> None:
    topic = hasty.create_topic(unique("GivenUp"))
    with (
        latest_java.consumer(hasty, unique("G"), {topic: "*"}) as consumer,
        latest_java.producer(hasty, transactional=True, undecided=True) as producer,
    ):
        (sent,) = producer.transaction(topic, [half("forgotten", "unknown", "commit")])
        master = next(one for one in hasty.brokers if one.name == sent["broker"])
        with connected("127.0.0.1", master.port) as broker:
            record = wait_until(lambda: given_up(broker, sent["msgId"]), "a half that is given up", 60)
            checks = [int(one["properties"]["TRANSACTION_CHECK_TIMES"]) for one in producer.checks()]
            assert checks == list(range(1, 16))
            assert record is not None
            assert record.properties["TRANSACTION_CHECK_TIMES"] == "15"
            assert (record.properties["REAL_TOPIC"], record.body) == (topic, b"forgotten")
            producer.ask("decide")
            offset_id = f"7F000001{master.port:08X}{record.phy:016X}"
            broker.ask(RESUME_CHECK, {"topic": topic, "msgId": offset_id})
            (got,) = consumer.received(1)
    assert (got["body"], got["msgId"]) == ("forgotten", sent["msgId"])
