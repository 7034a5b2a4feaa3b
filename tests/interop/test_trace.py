"""Message traces: what the Java clients write is read by the SDK, what the SDK writes is read by Apache's mqadmin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.interop.harness.drivers import JavaClient, Record, message, mqadmin, unique
from tests.interop.harness.servers import Cluster, running_cluster
from tests.interop.harness.waiting import wait_until
from trimq.client import Message, lifecycle, sync
from trimq.client.admin.traces import TraceViews
from trimq.client.trace import dispatcher
from trimq.protocol.message_trace import (
    EndState,
    EndTransactionTrace,
    MessageTrace,
    MessageType,
    PubTrace,
    RecallTrace,
    SubAfterTrace,
    SubBeforeTrace,
)

PROPERTIES = {
    "traceTopicEnable": "true",
    "enablePropertyFilter": "true",
    "recallMessageEnable": "true",
    "transactionTimeOut": "1000",
    "transactionCheckInterval": "1000",
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose broker has the trace topic from its start."""
    with running_cluster(tmp_path_factory.mktemp("traced"), properties=PROPERTIES) as running:
        yield running


def traces_of(cluster: Cluster, message_id: str, count: int) -> TraceViews:
    """The traces of a message, once there are ``count`` of them: Java clients report after up to 5 seconds."""
    with sync.Admin(cluster.namesrv) as admin:
        wait_until(
            lambda: len(admin.message_traces(message_id).views) >= count, f"{count} traces of {message_id}", timeout=30
        )
        found: TraceViews = admin.message_traces(message_id)
    assert found.skipped == 0
    assert len(found.views) == count
    return found


def test_the_topic(traced: Cluster) -> None:
    with sync.Admin(traced.namesrv) as admin:
        [queues] = admin.route("RMQ_SYS_TRACE_TOPIC").queue_datas
    assert (queues.read_queue_nums, queues.write_queue_nums, queues.perm) == (1, 1, 6)


def test_the_sdk_reads_what_java_clients_report(traced: Cluster, java: JavaClient) -> None:
    topic, group, producers = traced.create_topic(unique("Traced"), queues=1), unique("G"), unique("PG")
    # The traces are read before the clients close: a Java client does not wait for the traces that it sends at its end.
    with (
        java.producer(traced, producers, trace=True) as producer,
        java.consumer(traced, group, {topic: "*"}, trace=True, failUntil=1) as consumer,
    ):
        [first] = producer.send(topic, [message("1 book", tags="T", keys="k1 k2")])
        [late] = producer.send(topic, [message("late", delay=1)])
        [batch] = producer.send(topic, [message("a", keys="k3"), message("b")], "batch")
        consumer.received(8, wait=60)  # each of the four messages fails once
        sent, *consumed = [view.trace for view in traces_of(traced, first["msgId"], 5).views]
        delayed = traces_of(traced, late["msgId"], 5).views[0].trace
        [together] = traces_of(traced, batch["msgId"], 1).views  # both ids, joined by a comma
        # Records of a batch have no MSG_REGION. 5.5.0 drops the traces of their processing, 4.9.8 writes null.
        ids = batch["msgId"].split(",") if java.version == "4.9.8" else []
        each = [traces_of(traced, one, 4).views for one in ids]
    assert isinstance(sent, PubTrace)
    assert (sent.region, sent.group, sent.topic, sent.tags, sent.keys) == (
        "DefaultRegion", producers, topic, "T", "k1 k2",
    )  # fmt: skip
    assert (sent.store_host, sent.body_length, sent.message_type, sent.offset_message_id, sent.success) == (
        traced.broker.address, 6, MessageType.NORMAL, first["offsetMsgId"], True,
    )  # fmt: skip
    assert attempts(consumed) == [(0, False, 4), (1, True, 0)]
    assert {trace.keys for trace in consumed} == {"k1 k2"}
    assert isinstance(delayed, PubTrace)
    assert delayed.message_type is MessageType.DELAY
    assert isinstance(together.trace, PubTrace)
    assert together.trace.offset_message_id == batch["offsetMsgId"]
    for views in each:
        assert attempts([view.trace for view in views]) == [(0, False, 4), (1, True, 0)]
        assert {view.trace.region for view in views if isinstance(view.trace, SubBeforeTrace)} == {None}


def attempts(traces: Sequence[MessageTrace]) -> list[tuple[int, bool, int]]:
    """Retry times, success and context code of each attempt to process a message."""
    starts = {trace.request_id: trace for trace in traces if isinstance(trace, SubBeforeTrace)}
    ends = [trace for trace in traces if isinstance(trace, SubAfterTrace)]
    return sorted((starts[end.request_id].retry_times, end.success, end.context_code) for end in ends)


def test_the_sdk_reads_what_a_lite_consumer_reports(traced: Cluster, java: JavaClient) -> None:
    topic, group = traced.create_topic(unique("Traced"), queues=1), unique("G")
    with java.producer(traced) as producer:
        [sent] = producer.send(topic, [message("x", keys="k")])
    with java.lite_consumer(traced, group, {topic: "*"}, trace=True) as consumer:
        consumer.poll(1)
        traces = [view.trace for view in traces_of(traced, sent["msgId"], 2).views]
    assert attempts(traces) == [(0, True, 0)]


def test_the_sdk_reads_the_ends_of_transactions(traced: Cluster, java: JavaClient) -> None:
    topic, producers = traced.create_topic(unique("Traced"), queues=1), unique("PG")
    outcomes = [
        ({"outcome": "commit"}, {(EndState.COMMIT, False)}),
        ({"outcome": "rollback"}, {(EndState.ROLLBACK, False)}),
        ({"outcome": "unknown", "whenAsked": "commit"}, {(EndState.UNKNOWN, False), (EndState.COMMIT, True)}),
    ]
    specs = [message("x", tags="T", keys="k", properties=properties) for properties, _ in outcomes]
    with (
        java.producer(traced, producers, trace=True, transactional=True) as producer,
        sync.Admin(traced.namesrv) as admin,
    ):
        sent: list[Record] = producer.ask("transaction", topic=topic, messages=specs)
        for one, (_, expected) in zip(sent, outcomes, strict=True):

            def traces(message_id: str = one["msgId"]) -> list[MessageTrace]:
                return [view.trace for view in admin.message_traces(message_id).views]

            # At least these ends: Apache's broker may ask for a transaction that was ended a moment ago.
            wait_until(lambda: expected <= set(map(end_of, traces())), f"the ends {expected}")  # noqa: B023 - at once
            for trace in traces():
                assert isinstance(trace, PubTrace | EndTransactionTrace)
                assert (trace.group, trace.topic, trace.tags, trace.keys) == (producers, topic, "T", "k")
            [half] = [trace for trace in traces() if isinstance(trace, PubTrace)]
            assert half.message_type is MessageType.TRANS_HALF


def end_of(trace: MessageTrace) -> tuple[EndState, bool] | None:
    """How a transaction ended, and whether the broker asked."""
    return (trace.state, trace.from_transaction_check) if isinstance(trace, EndTransactionTrace) else None


def test_the_sdk_reads_recalls(traced: Cluster, latest_java: JavaClient) -> None:
    topic, producers = traced.create_topic(unique("Traced"), queues=1), unique("PG")
    with latest_java.producer(traced, producers, trace=True) as producer:
        [sent] = producer.send(topic, [message("later", delayMs=60_000)])
        producer.ask("recall", topic=topic, handle=sent["recallHandle"])
        first, recall = [view.trace for view in traces_of(traced, sent["msgId"], 2).views]
    assert isinstance(first, PubTrace)
    assert first.message_type is MessageType.DELAY
    assert isinstance(recall, RecallTrace)
    assert recall[1:] == ("DefaultRegion", producers, topic, sent["msgId"], True)


def test_apaches_mqadmin_reads_what_the_sdk_reports(
    traced: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Closing waits until the traces are stored, however busy the machine is.
    monkeypatch.setattr(dispatcher, "FLUSH_TIMEOUT", 60.0)
    monkeypatch.setattr(lifecycle, "CLOSE_TIMEOUT", 60.0)
    topic, group, producers = traced.create_topic(unique("Traced"), queues=1), unique("G"), unique("PG")
    with sync.Producer(producers, namesrv=traced.namesrv, enable_msg_trace=True) as producer:
        sent = producer.send(Message(topic, b"1 book", tags="T", keys=["k1", "k2"]))
        together = producer.send_batch([Message(topic, b"a"), Message(topic, b"b", keys="k3")])
    with sync.Consumer(group, topic, namesrv=traced.namesrv, start="first", enable_msg_trace=True) as consumer:
        for number in range(3):
            delivered = consumer.take(30)
            assert delivered is not None
            with delivered.process():
                if not number:
                    raise ValueError("not today")
    for receipt in (sent, *together):
        traces_of(traced, receipt.message_id, 3)  # mqadmin reads once
    with ExitStack() as stack:
        admin = stack.enter_context(mqadmin(traced, tmp_path))
        first = table(admin.run("queryMsgTraceById", "-i", sent.message_id))
        others = [table(admin.run("queryMsgTraceById", "-i", receipt.message_id)) for receipt in together]
        named = table(admin.run("queryMsgTraceById", "-i", sent.message_id, "-t", "RMQ_SYS_TRACE_TOPIC", "-c", "10"))
    assert first == named == [["Pub", producers, "127.0.0.1", "success"], ["Sub", group, "127.0.0.1", "failed"]]
    expected = [["Pub", producers, "127.0.0.1", "success"], ["Sub", group, "127.0.0.1", "success"]]
    assert others == [expected, expected]


def table(output: str) -> list[list[str]]:
    """Type, group, client and status of each line of mqadmin's tables, without SendTime (two words) and CostTimes."""
    lines = [line.split() for line in output.splitlines() if line.strip() and not line.startswith("#")]
    assert all(len(words) == 7 and words[5].endswith("ms") for words in lines), output
    return [[*words[:3], words[6]] for words in lines]
