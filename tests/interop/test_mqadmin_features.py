"""mqadmin 5.5.0 and the administration client on timers, transactions, filters, request modes and forbidden groups."""

from __future__ import annotations

import re

import pytest

from tests.interop.conftest import LATEST_JAVA
from tests.interop.harness import probe
from tests.interop.harness.drivers import Admin, JavaClient, bodies, message, messages, unique
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until
from tests.interop.test_mqadmin import FAILURE, rows, settings

QUERY_CORRECTION_OFFSET = 308
GET_ALL_MESSAGE_REQUEST_MODE = 402
LARGEST_LONG = 2**63 - 1


def test_timers(cluster: Cluster, admin: Admin, latest_java: JavaClient) -> None:
    topic, broker = cluster.create_topic(unique("AdminTimer")), cluster.broker.address
    with latest_java.producer(cluster) as producer:
        (sent,) = producer.send(topic, [message("later", keys="timerkey", delay_sec=3600)])
        status = settings(admin.run("brokerStatus", "-b", broker).replace(broker, ""))
        for key in ("timerReadBehind", "timerOffsetBehind", "timerCongestNum"):
            assert re.fullmatch(r"\d+", status[key]), key
        for key in ("timerEnqueueTps", "timerDequeueTps"):
            assert float(status[key]) >= 0, key
        # The message is in the timer's topic, and found there by its offset id.
        output = admin.run("queryMsgById", "-t", "rmq_sys_wheel_timer", "-i", sent["offsetMsgId"])
        assert re.search(r"Keys:\s+\[timerkey\]", output)
        assert re.search(r"TIMER_OUT_MS=\d+", output)
        assert f"REAL_TOPIC={topic}" in output
        assert admin.run("topicStatus", "-t", topic).count("broker-a") == 4
        wait_until(
            lambda: rows(admin.run("topicStatus", "-t", "rmq_sys_wheel_timer"))[0][1:3] == ["0", "0"],
            "the timer's queue",
        )
    # The other engine for timers, a RocksDB variant, is refused.
    output = admin.run("switchTimerEngine", "-b", broker, "-e", "R")
    assert cluster.broker.peer == "apache" or FAILURE in output, output


def test_transactions(cluster: Cluster, admin: Admin, latest_java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("AdminHalf"), queues=1), unique("PG")
    # The broker itself does not check it meanwhile.
    outcome = {"outcome": "unknown", "whenAsked": "commit", "CHECK_IMMUNITY_TIME_IN_SECONDS": "600"}
    spec = message("half", keys="halfkey", properties=outcome)
    with (
        latest_java.producer(cluster, group, transactional=True) as producer,
        latest_java.consumer(cluster, unique("G"), {topic: "*"}) as consumer,
    ):
        (sent,) = producer.transaction(topic, [spec])
        half_topic = "RMQ_SYS_TRANS_HALF_TOPIC"
        output = wait_until(
            lambda: _found(admin.run("queryMsgByUniqueKey", "-t", half_topic, "-i", sent["msgId"])), "the half message"
        )
        assert re.search(r"Keys:\s+\[halfkey\]", output)
        assert (f"REAL_TOPIC={topic}" in output, f"PGROUP={group}" in output) == (True, True)
        place = re.search(r"CommitLog Offset:\s+(\d+)", output)
        assert place
        offset_id = f"7F000001{cluster.broker.port:08X}{int(place.group(1)):016X}"
        # The copy of the half that this stores is as old as the half, and its checks count from 0.
        assert latest_java.admin(cluster, "resumeCheckHalfMessage", half_topic, offset_id) is True
        found = wait_until(lambda: _copies(admin.run("queryMsgByKey", "-t", half_topic, "-k", "halfkey")), "its copy")
        assert {row[0] for row in found} == {sent["msgId"]}
        assert bodies(consumer.so_far()) == []


def _copies(output: str) -> list[list[str]]:
    """Two lines or more: Apache's broker puts an immune half back in each of its rounds."""
    found = rows(output) if FAILURE not in output else []
    return found if len(found) >= 2 else []


def _found(output: str) -> str:
    return "" if FAILURE in output else output


def test_filters(cluster: Cluster, admin: Admin, latest_java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("AdminSql"), queues=1), unique("G")
    expression = "size > 1"
    with (
        latest_java.producer(cluster) as producer,
        latest_java.consumer(cluster, group, sql={topic: expression}) as consumer,
    ):
        producer.send(topic, [message(f"m{size}", properties={"size": str(size)}) for size in range(4)])
        consumer.received(2)
        output = admin.run("consumerConnection", "-g", group)
        assert re.search(rf"{topic}\s+{re.escape(expression)}", output), output
        output = admin.run("queryCq", "-t", topic, "-q", "0", "-i", "0", "-c", "4", "-b", cluster.broker.address,
                           "-g", group)  # fmt: skip
    assert f'"subString":"{expression}"' in output
    assert f'"expression":"{expression}"' in output


@pytest.mark.parametrize("java", LATEST_JAVA, indirect=True, ids="-".join)
def test_request_modes(cluster: Cluster, admin: Admin, java: JavaClient) -> None:
    """Consumers that leave the rebalancing to the broker share the queues, before and after a mode is set."""
    topic, group, broker = cluster.create_topic(unique("Mode"), queues=4), unique("G"), cluster.broker.address
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, group, {topic: "*"}, broker_rebalance=True) as one,
    ):
        one.wait_for_queues(4)
        with java.consumer(cluster, group, {topic: "*"}, broker_rebalance=True) as other:
            assert not one.wait_for_queues(2) & other.wait_for_queues(2)
            output = admin.run("setConsumeMode", "-b", broker, "-t", topic, "-g", group, "-m", "PULL", "-q", "0")
            assert f"set consume mode to {broker} success" in output
            producer.send(topic, messages(8))
            wait_until(lambda: len(one.so_far()) + len(other.so_far()) == 8, "all messages at the two")
            assert (len(one.so_far()), len(other.so_far())) == (4, 4)
        one.wait_for_queues(4)
    modes = probe.ask(broker, GET_ALL_MESSAGE_REQUEST_MODE).json()["messageRequestModeMap"]
    assert modes[topic][group]["mode"] == "PULL"
    assert "CODE: 16" in admin.run("setConsumeMode", "-b", broker, "-t", f"%RETRY%{group}", "-g", group, "-m", "PULL")
    assert "CODE: 17" in admin.run("setConsumeMode", "-b", broker, "-t", unique("No"), "-g", group, "-m", "PULL")


def test_a_forbidden_group(cluster: Cluster, latest_java: JavaClient) -> None:
    """A group may be forbidden to read one topic; its running consumer gets nothing until that is taken back."""
    topic, group = cluster.create_topic(unique("Forbidden"), queues=1), unique("G")
    place = ("updateAndGetGroupReadForbidden", cluster.broker.address, group, topic)
    with (
        latest_java.producer(cluster) as producer,
        latest_java.consumer(cluster, group, {topic: "*"}) as consumer,
        latest_java.consumer(cluster, unique("G"), {topic: "*"}) as other,
    ):
        producer.send(topic, [message("first")])
        consumer.received(1)
        assert latest_java.admin(cluster, *place, None)["readable"] is True
        assert latest_java.admin(cluster, *place, False)["readable"] is False
        # The pull that waits meanwhile may still be answered: this message ends it.
        producer.send(topic, [message("second")])
        other.received(2)
        refused = _pull(cluster, group, topic)
        assert (refused.code, refused.ext.get("forbiddenType")) == (16, "5")
        assert (group in refused.remark, topic in refused.remark) == (True, True)
        producer.send(topic, [message("third")])
        other.received(3)
        assert "third" not in bodies(consumer.so_far())
        assert latest_java.admin(cluster, *place, True)["readable"] is True
        # A listener that is called by several threads says nothing of the order.
        assert sorted(bodies(consumer.received(3))) == ["first", "second", "third"]


def _pull(cluster: Cluster, group: str, topic: str) -> probe.Reply:
    header = {
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
    return probe.call(cluster.broker.address, 11, header)


def test_offsets_of_other_groups(cluster: Cluster, latest_java: JavaClient) -> None:
    """CLONE_GROUP_OFFSET by the administration client, QUERY_CORRECTION_OFFSET as a raw frame: no client has a call."""
    topic, broker = cluster.create_topic(unique("Cloned"), queues=2), cluster.broker.address
    first, second, copy = unique("G"), unique("G"), unique("G")
    probe.create_group(broker, copy)
    with latest_java.producer(cluster) as producer, latest_java.consumer(cluster, first, {topic: "*"}) as consumer:
        producer.send(topic, messages(8))
        consumer.received(8)
        consumer.wait_for_position(topic, 8)
    wait_until(
        lambda: [probe.committed_offset(broker, first, topic, queue) for queue in (0, 1)] == [4, 4], "the offsets"
    )
    latest_java.admin(cluster, "cloneGroupOffset", first, copy, topic, True)
    assert [probe.committed_offset(broker, copy, topic, queue) for queue in (0, 1)] == [4, 4]
    probe.create_group(broker, second)
    probe.commit_offset(broker, second, topic, 0, 1)
    probe.commit_offset(broker, second, topic, 1, 7)

    def correction(**header: str) -> dict[str, int]:
        found: dict[str, int] = probe.ask(broker, QUERY_CORRECTION_OFFSET, {"topic": topic, **header}).json()[
            "correctionOffsets"
        ]
        return found

    assert correction(compareGroup=first) == {"0": 1, "1": 4}
    assert correction(compareGroup=second) == {"0": 1, "1": 4}
    probe.commit_offset(broker, first, topic, 0, 3)
    probe.commit_offset(broker, copy, topic, 0, 3)
    probe.commit_offset(broker, second, topic, 0, 2)
    assert correction(compareGroup=first) == {"0": 2, "1": 4}
