"""Traces as programs and administrators read them, over real brokers."""

import json
import time
from functools import partial
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result

from tests.client.servers import Servers
from tests.interop.harness.waiting import POLL_INTERVAL
from trimq.client import Admin, Consumer, Message, Producer, lifecycle, sync
from trimq.client.admin.traces import TraceView
from trimq.client.mqadmin import main
from trimq.client.mqadmin.shell import show_time
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
    encode_trace,
)
from trimq.protocol.topic_rules import TRACE_TOPIC

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits until the traces are stored, however busy the machine is."""
    monkeypatch.setattr(dispatcher, "FLUSH_TIMEOUT", 60.0)
    monkeypatch.setattr(lifecycle, "CLOSE_TIMEOUT", 60.0)


@pytest.fixture
def topic(servers: Servers, name: str) -> str:
    """The topic of the test's traces."""
    return servers.create_topic(f"{name}_traces", 1)


async def put(servers: Servers, topic: str, body: bytes, keys: list[str], count: int = 1) -> None:
    """Send a message of traces, and wait until ``count`` messages with its keys are found."""
    async with Producer("traces", namesrv=servers.namesrv) as producer:
        await producer.send(Message(topic, body, keys=keys))
    await servers.indexed(topic, *keys, count=count)


def body(*traces: MessageTrace) -> bytes:
    return "".join([encode_trace(trace) for trace in traces]).encode()


@pytest.mark.anyio
async def test_what_the_sdk_writes_the_sdk_reads(servers: Servers, name: str, topic: str) -> None:
    servers.create_topic(name, 1)
    options: dict[str, Any] = {
        "namesrv": servers.namesrv, "enable_msg_trace": True, "customized_trace_topic": topic,
    }  # fmt: skip
    async with Producer(f"p_{name}", **options) as producer:
        receipt = await producer.send(Message(name, b"1 book", tags="paid", keys=["o-1", "c-7"]))
        other = await producer.send(Message(name, b"2 books", keys="o-2"))
    async with Consumer(name, name, start="first", **options) as consumer:
        with anyio.fail_after(30):
            for _ in range(2):
                async with (await anext(consumer)).process():
                    pass
    await servers.indexed(topic, "o-1", count=2)
    async with Admin(servers.namesrv) as admin:
        with anyio.fail_after(30):  # the consumer may have reported the end of the processing after its start
            while True:
                found = await admin.message_traces(receipt.message_id, trace_topic=topic)
                if len(found.views) >= 3:
                    break
                await anyio.sleep(POLL_INTERVAL)
        by_key = await admin.messages_by_key(topic, "o-1")
        later = await admin.message_traces(receipt.message_id, trace_topic=topic, begin=found.views[-1].store_time + 1)
    assert found.skipped == 0
    sent, before, after = [view.trace for view in found.views]
    assert isinstance(sent, PubTrace)
    assert isinstance(before, SubBeforeTrace)
    assert isinstance(after, SubAfterTrace)
    assert sent.store_host == servers.broker.address
    assert (sent.region, sent.tags, sent.keys) == ("DefaultRegion", "paid", "o-1 c-7")
    assert sent.offset_message_id == receipt.offset_message_id
    assert (before.group, before.keys, before.region) == (name, "o-1 c-7", "DefaultRegion")
    assert (after.group, after.success, after.request_id) == (name, True, before.request_id)
    assert {view.client_host for view in found.views} == {"127.0.0.1"}
    assert len(by_key) in (2, 3)  # of the producer, and of the consumer
    assert later.views == []
    assert other.message_id not in {view.trace.message_id for view in found.views}


@pytest.mark.anyio
async def test_a_reply_is_traced(servers: Servers, name: str, topic: str) -> None:
    servers.create_topic(name, 1)
    async with (
        Producer(f"p_{name}", namesrv=servers.namesrv) as asker,
        Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer,
        anyio.create_task_group() as group,
    ):
        group.start_soon(partial(asker.request, Message(name, b"price?"), ttl=60))
        async with Producer(
            f"r_{name}", namesrv=servers.namesrv, enable_msg_trace=True, customized_trace_topic=topic
        ) as replier:
            with anyio.fail_after(60):
                message = await anext(consumer)
                async with message.process():
                    receipt = await replier.reply(message, b"9.90")
    await servers.indexed(topic, receipt.message_id)
    async with Admin(servers.namesrv) as admin:
        [view] = (await admin.message_traces(receipt.message_id, trace_topic=topic)).views
    assert isinstance(view.trace, PubTrace)
    assert view.trace.topic.endswith("_REPLY_TOPIC")
    assert (view.trace.success, view.trace.body_length) == (True, 4)


def test_blocking_programs(servers: Servers, name: str, topic: str) -> None:
    with sync.Producer(name, namesrv=servers.namesrv, enable_msg_trace=True, customized_trace_topic=topic) as producer:
        receipt = producer.send(Message(servers.create_topic(name, 1), b"x"))
    anyio.run(servers.indexed, topic, receipt.message_id)
    with sync.Admin(servers.namesrv) as admin:
        found = admin.message_traces(receipt.message_id, trace_topic=topic)
    assert [view.trace.type for view in found.views] == ["Pub"]


@pytest.mark.anyio
async def test_traces_that_cannot_be_read_are_counted(servers: Servers, topic: str) -> None:
    good = encode_trace(RecallTrace(5, "r", "g", "T", "id-1", True))
    others = encode_trace(RecallTrace(5, "r", "g", "T", "id-2", True))
    await put(servers, topic, f"{good}Recall\x01soon\x02{others}".encode() + b"\xff\xfe\x02", ["id-1"])
    async with Admin(servers.namesrv) as admin:
        found = await admin.message_traces("id-1", trace_topic=topic)
    assert [view.trace.message_id for view in found.views] == ["id-1"]
    assert found.skipped == 2


@pytest.mark.anyio
async def test_a_batch_that_a_java_client_traced_once(servers: Servers, topic: str) -> None:
    trace = PubTrace(5, "r", "g", "T", "id-1,id-2", None, None, "h:1", 7, 3, MessageType.NORMAL, "a,b", True)
    await put(servers, topic, body(trace), ["id-1,id-2", "id-2"])
    async with Admin(servers.namesrv) as admin:
        for wanted in ("id-1,id-2", "id-2"):
            assert [view.trace for view in (await admin.message_traces(wanted, trace_topic=topic)).views] == [trace]


def test_the_time_of_an_old_trace_is_when_it_was_stored() -> None:
    old = SubAfterTrace("q", "id", 3, True, None)
    assert TraceView(old, "h", 7.5).time == 7.5
    assert TraceView(old._replace(timestamp=1500), "h", 7.5).time == 1.5


# -- mqadmin -----------------------------------------------------------------------------------------------------------

PUB = PubTrace(1_000, "r", "shop", "T", "id", "t", "k", "h:1", 7, 3, MessageType.NORMAL, "off", True)
BEFORE = SubBeforeTrace(2_000, "r", "billing", "q1", "id", 0, "k")
AFTER = SubAfterTrace("q1", "id", 9, False, "k", 2, 2_009, "billing")
OLD = SubAfterTrace("q1", "id", 9, False, "k")
AGAIN = SubBeforeTrace(3_000, "r", "billing", "q2", "id", 1, "k")
OTHER = SubAfterTrace("q3", "id", 1, True, "k", 0, 4_000, "audit")
END = EndTransactionTrace(
    5_000, "r", "shop", "T", "id", "t", "k", "h:1", MessageType.TRANS_COMMIT, "tx", EndState.ROLLBACK, True
)
RECALL = RecallTrace(6_000, "r", "shop", "T", "id", False)


def run(servers: Servers, *words: str) -> Result:
    return RUNNER.invoke(main, ["queryMsgTraceById", *words, "-n", servers.namesrv])


def table(output: str) -> list[list[str]]:
    """The words of each line, with the times (which have a blank in them) left out."""
    return [[word for word in line.split() if ":" not in word and "-" not in word] for line in output.splitlines()]


def when(trace: PubTrace | SubBeforeTrace) -> str:
    return show_time(trace.timestamp).partition(",")[0]


def test_the_tables_of_a_message(servers: Servers, topic: str) -> None:
    anyio.run(put, servers, topic, body(PUB, BEFORE, AFTER, AGAIN, OTHER, END, RECALL), ["id"])
    result = run(servers, "-i", " id ", "-t", topic)
    assert result.exit_code == 0, result.output
    host = "127.0.0.1"
    assert table(result.output) == [
        ["#Type", "ProducerGroup", "ClientHost", "SendTime", "CostTimes", "Status"],
        ["Pub", "shop", host, "3ms", "success"],
        [],
        ["#Type", "ConsumerGroup", "ClientHost", "ConsumerTime", "CostTimes", "Status"],
        ["Sub", "billing", host, "9ms", "failed"],
        ["Sub", "billing", host, "started"],
        [],
        ["#Type", "ConsumerGroup", "ClientHost", "ConsumerTime", "CostTimes", "Status"],
        ["Sub", "audit", host, "1ms", "success"],
        [],
        ["#Type", "ProducerGroup", "ClientHost", "SendTime", "CostTimes", "Status"],
        ["EndTransaction", "shop", host, "ROLLBACK_MESSAGE"],
        ["Recall", "shop", host, "failed"],
    ]
    assert when(PUB) in result.output
    assert when(AGAIN) in result.output


def test_the_group_of_an_old_trace_is_that_of_its_start(servers: Servers, topic: str) -> None:
    anyio.run(put, servers, topic, body(BEFORE, OLD), ["id"])
    found = table(run(servers, "-i", "id", "-t", topic).output)
    assert found[1:] == [["Sub", "billing", "127.0.0.1", "9ms", "failed"], []]


def test_json(servers: Servers, topic: str) -> None:
    anyio.run(put, servers, topic, body(PUB, BEFORE, END), ["id"])
    sent, began, ended = json.loads(run(servers, "-i", "id", "-t", topic, "--json").output)
    assert sent == {
        "Type": "Pub", "Group": "shop", "ClientHost": "127.0.0.1", "Time": 1000, "CostTimes": 3, "Status": "success",
        "Topic": "T", "MsgId": "id", "Tags": "t", "Keys": "k", "StoreHost": "h:1", "BodyLength": 7, "MsgType": 0,
        "OffsetMsgId": "off", "RequestId": None, "RetryTimes": None, "ContextCode": None, "TransactionId": None,
        "FromTransactionCheck": None, "RegionId": "r",
    }  # fmt: skip
    assert (began["Type"], began["Status"], began["RetryTimes"], began["RequestId"]) == (
        "SubBefore",
        "started",
        0,
        "q1",
    )
    assert (ended["Status"], ended["TransactionId"], ended["FromTransactionCheck"]) == ("ROLLBACK_MESSAGE", "tx", True)


def test_what_is_not_found_or_not_readable(servers: Servers, topic: str) -> None:
    anyio.run(put, servers, topic, body(PUB) + b"Pub\x01\x02", ["id"])
    missing = run(servers, "-i", "no-such-id", "-t", topic)
    assert missing.exit_code == 1
    assert f"there is no trace of no-such-id in {topic}" in missing.stderr
    assert "Error" in run(servers, "-i", "id", "-t", "no_such_topic").stderr
    damaged = run(servers, "-i", "id", "-t", topic)
    assert damaged.exit_code == 0
    assert damaged.stderr == "1 traces cannot be decoded and are left out\n"


def test_the_period_and_the_number(servers: Servers, topic: str) -> None:
    for count in (1, 2):
        anyio.run(put, servers, topic, body(PUB), ["id"], count)
    words = ["-i", "id", "-t", topic, "--json"]
    assert len(json.loads(run(servers, *words).output)) == 2
    assert len(json.loads(run(servers, *words, "-c", "1").output)) == 1
    assert run(servers, *words, "-b", str(int(time.time() * 1000) + 60_000)).exit_code == 1
    assert run(servers, *words, "-e", "1000").exit_code == 1


def test_send_message_with_a_trace(servers: Servers, name: str) -> None:
    words = ["sendMessage", "-t", servers.create_topic(name, 1), "-p", "x", "-n", servers.namesrv, "--json"]
    for traced, code in (("true", 0), ("false", 1)):
        [sent] = json.loads(RUNNER.invoke(main, [*words, "-m", traced]).output)
        if code == 0:
            anyio.run(servers.indexed, TRACE_TOPIC, sent["MsgId"])
        assert run(servers, "-i", sent["MsgId"]).exit_code == code
