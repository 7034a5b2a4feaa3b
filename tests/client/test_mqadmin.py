"""mqadmin: every command does what its name says, with output for people and for scripts."""

import json
import subprocess
import sys
import time
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result

from tests.client.servers import Servers
from tests.interop.harness import probe
from tests.interop.harness.waiting import wait_until
from trimq.client import Consumer, Message, Producer
from trimq.client.mqadmin import COMMANDS, main
from trimq.client.mqadmin.shell import parse_time, show_time
from trimq.client.sync import Consumer as SyncConsumer
from trimq.client.sync import Producer as SyncProducer
from trimq.protocol.codes import RequestCode
from trimq.protocol.timer_layout import TimerCheckpoint, decode_checkpoint

RUNNER = CliRunner()


def run(servers: Servers, *words: str) -> Result:
    return RUNNER.invoke(main, [*words, "-n", servers.namesrv])


def said(servers: Servers, *words: str) -> str:
    result = run(servers, *words)
    assert result.exit_code == 0, result.output
    return result.output


def answered(servers: Servers, *words: str) -> Any:
    return json.loads(said(servers, *words, "--json"))


@pytest.fixture
def topic(servers: Servers, name: str) -> str:
    """A topic with three messages, and a group (of the same name) that has consumed one of them."""
    servers.create_topic(name, 1)

    async def fill() -> None:
        async with Producer(f"p_{name}", namesrv=servers.namesrv) as producer:
            for number in range(3):
                await producer.send(
                    Message(name, b"body %d" % number, tags=["even", "odd", "even"][number], keys=f"k{number}")
                )
        async with Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
            await (await anext(consumer)).ack()

    anyio.run(fill)
    return name


def test_clusters_and_brokers(servers: Servers) -> None:
    [row] = answered(servers, "clusterList")
    assert row["Broker Name"] == "broker-a"
    assert row["Addr"] == servers.broker.address
    assert "InTotalToday" in answered(servers, "clusterList", "-m")[0]
    assert "brokerVersionDesc" in said(servers, "brokerStatus", "-b", servers.broker.address)
    assert "brokerVersionDesc" in answered(servers, "brokerStatus", "-c", "DefaultCluster")


def test_broker_configuration(servers: Servers) -> None:
    address = servers.broker.address
    said(
        servers,
        "updateBrokerConfig",
        "-b",
        address,
        "-k",
        "messageDelayLevel",
        "-v",
        "1s 1s 1s 2s 2s 3s 3s 4s 4s 5s 6s 7s 8s 9s 10s 20s 30s 1m",
    ) if servers.peer == "apache" else None
    config = answered(servers, "getBrokerConfig", "-b", address)
    assert config["brokerName"] == "broker-a"
    before = config["maxMessageSize"]
    said(servers, "updateBrokerConfig", "-b", address, "-k", "maxMessageSize", "-v", "4194303")
    assert answered(servers, "getBrokerConfig", "-b", address)["maxMessageSize"] == "4194303"
    said(servers, "updateBrokerConfig", "-c", "DefaultCluster", "-k", "maxMessageSize", "-v", before)


def test_a_broker_named_by_its_address_needs_no_name_server(servers: Servers) -> None:
    alone = {"NAMESRV_ADDR": ""}
    address = servers.broker.address
    changed = ["-b", address, "-k", "maxMessageSize", "-v", "4194304"]
    for words in (
        ["updateBrokerConfig", *changed],
        ["getBrokerConfig", "-b", address],
        ["brokerStatus", "-b", address],
    ):
        result = RUNNER.invoke(main, words, env=alone)
        assert (result.exit_code, address in result.output or "brokerActive" in result.output) == (0, True), words
    by_cluster = RUNNER.invoke(main, ["brokerStatus", "-c", "DefaultCluster"], env=alone)
    assert (by_cluster.exit_code, "no name server: give" in by_cluster.output) == (2, True)


def test_topics(servers: Servers, name: str) -> None:
    assert "create topic to" in said(servers, "updateTopic", "-c", "DefaultCluster", "-t", name, "-r", "2", "-w", "2")
    assert name in answered(servers, "topicList")
    assert answered(servers, "topicClusterList", "-t", name) == ["DefaultCluster"]
    [queues] = answered(servers, "topicRoute", "-t", name)["queueDatas"]
    assert (queues["readQueueNums"], queues["perm"]) == (2, 6)
    assert "broker-a" in said(servers, "topicRoute", "-t", name, "-l")
    assert [row["QID"] for row in answered(servers, "topicStatus", "-t", name)] == [0, 1]
    said(servers, "updateTopicPerm", "-b", servers.broker.address, "-t", name, "-p", "4")
    assert answered(servers, "topicRoute", "-t", name)["queueDatas"][0]["perm"] == 4
    shares = answered(servers, "allocateMQ", "-t", name, "-i", "a,b")
    assert [(row["Client"], row["QID"]) for row in shares] == [("a", 0), ("b", 1)]
    said(servers, "deleteTopic", "-t", name, "-c", "DefaultCluster")
    result = run(servers, "topicRoute", "-t", name)
    assert result.exit_code == 1
    assert "TOPIC_NOT_EXIST" in result.output
    assert "updateTopic" in result.output  # the help lists the commands


def test_groups(servers: Servers, name: str) -> None:
    said(servers, "updateSubGroup", "-c", "DefaultCluster", "-g", name, "-r", "3")
    assert answered(servers, "getConsumerConfig", "-g", name)["retry_max_times"] == 3
    said(servers, "deleteSubGroup", "-c", "DefaultCluster", "-g", name)
    assert run(servers, "getConsumerConfig", "-g", name).exit_code == 1


def test_progress_and_offsets(servers: Servers, topic: str) -> None:
    def progress() -> list[tuple[int, int, int]]:
        result = run(servers, "consumerProgress", "-g", topic, "--json")
        rows = json.loads(result.output) if result.exit_code == 0 else []
        return [(row["Broker Offset"], row["Consumer Offset"], row["Diff"]) for row in rows if row["Topic"] == topic]

    wait_until(lambda: progress() == [(3, 1, 2)], "the offset that the consumer has committed without an answer")
    assert "Consume Diff Total: 2" in said(servers, "consumerProgress", "-g", topic, "-s", "true")
    assert any(row["Group"] == topic for row in answered(servers, "consumerProgress"))
    said(servers, "updateSubGroup", "-c", "DefaultCluster", "-g", topic + "_2")
    [given] = answered(servers, "cloneGroupOffset", "-s", topic, "-d", topic + "_2", "-t", topic)
    assert given["offset"] == 1
    [reset] = answered(servers, "resetOffsetByTime", "-g", topic, "-t", topic, "-s", "0")
    assert reset["offset"] == 0
    [skipped] = answered(servers, "skipAccumulatedMessage", "-g", topic, "-t", topic)
    assert skipped["offset"] == 3
    assert answered(servers, "brokerConsumeStats", "-b", servers.broker.address)
    stats = answered(servers, "statsAll", "-t", topic)
    assert {row["Topic"] for row in stats} == {topic}


def timer_checkpoint(servers: Servers) -> TimerCheckpoint:
    return decode_checkpoint(bytes(probe.ask(servers.broker.address, RequestCode.GET_TIMER_CHECK_POINT).body))


def test_pending_timers(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    with SyncProducer(name, namesrv=servers.namesrv) as producer:
        delivered = producer.send(Message(name, b"delivered", delay=1))
        late = producer.send(Message(name, b"late", keys=["k"], delay=900))
        before = time.time()
        soon = producer.send(Message(name, b"soon", delay=600))
        earliest, latest = before + 600, time.time() + 600
        producer.send(Message(name + "_other", b"other", delay=600))
    with SyncConsumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
        got = consumer.take(timeout=60)
    assert got is not None
    assert (got.body, got.message_id) == (b"delivered", delivered.message_id)
    # Its record stays in the timer's topic; the checkpoint says that the timer is past it.
    due = int(got.message.all_properties["TIMER_OUT_MS"])
    wait_until(lambda: timer_checkpoint(servers).read_time > due, "a checkpoint after the delivery")
    asked = time.time()
    rows = answered(servers, "pendingTimers", "-t", name)
    ended = time.time()
    assert [row["MsgId"] for row in rows] == [soon.message_id, late.message_id]
    assert (rows[1]["Keys"], rows[1]["Bytes"], rows[1]["QID"], rows[1]["Recalled"]) == ("k", 4, 0, False)
    # 2 s for the timer's precision and for whole seconds
    assert earliest - ended - 2 <= rows[0]["In s"] <= latest - asked + 2
    assert soon.message_id in said(servers, "pendingTimers", "-t", name, "-c", "1")
    assert late.message_id not in said(servers, "pendingTimers", "-t", name, "-c", "1")


def test_messages(servers: Servers, topic: str) -> None:
    [sent] = answered(servers, "sendMessage", "-t", topic, "-p", "from a shell", "-k", "shell", "-c", "tag")
    assert sent["Send Result"] == "SEND_OK"
    deadline = time.monotonic() + 30
    while not (found := answered(servers, "queryMsgByKey", "-t", topic, "-k", "shell")):
        assert time.monotonic() < deadline
    assert found[0]["Message ID"] == sent["MsgId"]
    shown = answered(servers, "queryMsgByUniqueKey", "-t", topic, "-i", sent["MsgId"])
    fields = shown[0] if isinstance(shown, list) else shown
    assert fields["Message Body"] == "from a shell"
    assert fields["OffsetID"] in said(servers, "queryMsgById", "-i", fields["OffsetID"])
    place = ["-b", "broker-a", "-i", str(fields["Queue ID"]), "-o", str(fields["Queue Offset"])]
    assert "from a shell" in said(servers, "queryMsgByOffset", "-t", topic, *place)
    units = answered(servers, "queryCq", "-t", topic, "-q", "0", "-i", "0", "-c", "2")
    assert [unit["Index"] for unit in units] == [0, 1]
    lines = [json.loads(line) for line in said(servers, "printMsg", "-t", topic, "--json").splitlines()]
    assert [line["Message Body"] for line in lines] == ["body 0", "body 1", "body 2", "from a shell"]
    assert said(servers, "printMsg", "-t", topic, "-s", "odd").count("BODY") == 1
    counted = said(servers, "printMsgByQueue", "-t", topic, "-a", "broker-a", "-i", "0", "-p", "false", "-f", "true")
    assert "even  " in counted
    assert said(servers, "consumeMessage", "-t", topic, "-c", "2").count("BODY") == 2
    assert "body 2" in said(servers, "consumeMessage", "-t", topic, "-b", "broker-a", "-i", "0", "-o", "2", "-c", "1")
    assert len(answered(servers, "sendMsgStatus", "-b", "broker-a", "-c", "3")) == 3


def test_connected_clients(servers: Servers, topic: str) -> None:
    consumers: list[Any] = []

    async def while_connected() -> None:
        async with (
            Producer(f"p_{topic}", namesrv=servers.namesrv) as producer,
            Consumer(topic, {topic: "even"}, namesrv=servers.namesrv, start="first") as consumer,
        ):
            receipt = await producer.send(Message(topic, b"directly", tags="even"))
            await producer.client.heartbeat()
            ask = anyio.to_thread.run_sync

            async def handle() -> None:
                async for message in consumer:
                    async with message.process():
                        consumers.append(message.body)

            async with anyio.create_task_group() as group:
                group.start_soon(handle)
                members = await ask(lambda: answered(servers, "consumerConnection", "-g", topic))
                [member] = members[0]
                assert member["ClientId"] == consumer.client.id
                assert {"Topic": topic, "SubExpression": "even"} in members[1]
                [sender] = await ask(lambda: answered(servers, "producerConnection", "-g", f"p_{topic}", "-t", topic))
                assert sender["ClientId"] == producer.client.id
                every = await ask(lambda: answered(servers, "producer", "-b", servers.broker.address))
                assert any(row["Group"] == f"p_{topic}" for row in every)
                status = await ask(lambda: said(servers, "consumerStatus", "-g", topic))
                assert "PROP_CONSUME_TYPE" in status
                words = ["-i", receipt.offset_message_id, "-g", topic, "-d", consumer.client.id]
                direct = await ask(lambda: answered(servers, "queryMsgById", *words))
                assert direct["consumeResult"] == "CR_SUCCESS"
                shown = await ask(lambda: said(servers, "consumerProgress", "-g", topic, "-s", "true"))
                assert consumer.client.id in shown
                group.cancel_scope.cancel()

    anyio.run(while_connected)
    assert consumers.count(b"directly") == 2


def test_name_servers(servers: Servers, name: str) -> None:
    assert answered(servers, "getNamesrvConfig")
    assert answered(servers, "wipeWritePerm", "-b", "broker-a")[0]["Topics Wiped"] > 0
    assert answered(servers, "addWritePerm", "-b", "broker-a")[0]["Topics Added"] > 0
    said(servers, "updateKvConfig", "-s", "ns", "-k", name, "-v", "1")
    said(servers, "deleteKvConfig", "-s", "ns", "-k", name)
    said(servers, "updateOrderConf", "-t", name, "-m", "put", "-v", "broker-a:4")
    assert answered(servers, "updateOrderConf", "-t", name, "-m", "get")["orderConf"] == "broker-a:4"
    said(servers, "updateOrderConf", "-t", name, "-m", "delete")
    assert run(servers, "updateOrderConf", "-t", name, "-m", "get").exit_code == 1
    said(servers, "updateNamesrvConfig", "-k", "orderMessageEnable", "-v", "false")


def test_cleaning(servers: Servers) -> None:
    for command in ("cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"):
        assert answered(servers, command, "-c", "DefaultCluster") == [servers.broker.address]


def test_consume_mode(servers: Servers, topic: str) -> None:
    for mode in ("POP", "PULL"):
        said(servers, "setConsumeMode", "-c", "DefaultCluster", "-t", topic, "-g", topic, "-m", mode)
        words = ("-b", servers.broker.address, "-t", topic, "-g", topic, "-m", mode, "-q", "2")
        found = answered(servers, "setConsumeMode", *words)
        assert found == {"topic": topic, "groupName": topic, "mode": mode, "popShareQueueNum": 2}
    retry = ("-b", servers.broker.address, "-t", f"%RETRY%{topic}", "-g", topic, "-m", "PULL")
    assert run(servers, "setConsumeMode", *retry).exit_code == 1


def test_replication(servers: Servers) -> None:
    assert "brokerAddr" in said(servers, "haStatus", "-b", servers.broker.address)


def test_exit_statuses() -> None:
    unanswered = RUNNER.invoke(main, ["topicList", "-n", "127.0.0.1:1"])
    assert unanswered.exit_code == 3
    assert "no name server answers" in unanswered.output
    assert RUNNER.invoke(main, ["topicRoute"]).exit_code == 2
    assert RUNNER.invoke(main, ["brokerStatus", "-n", "127.0.0.1:1"]).exit_code == 2
    assert RUNNER.invoke(main, ["noSuchCommand"]).exit_code == 2
    assert RUNNER.invoke(main, ["topicList", "-n", ""], env={"NAMESRV_ADDR": ""}).exit_code == 2


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command: str) -> None:
    for words in ([command, "--help"], ["help", command]):
        result = RUNNER.invoke(main, words)
        assert result.exit_code == 0, result.output
        assert "--namesrvAddr" in result.output


def test_times() -> None:
    assert parse_time("now") is None
    assert parse_time("1500") == 1.5
    moment = parse_time("2026-01-02#03:04:05:678")
    assert moment is not None
    assert show_time(moment * 1000) == "2026-01-02 03:04:05,678"


def test_it_starts_quickly() -> None:
    words = [sys.executable, "-X", "importtime", "-c", "from trimq.client.mqadmin import main; main(['--help'])"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "Commands" in done.stdout
    assert loaded.isdisjoint({"trio", "asyncio", "anyio", "msgspec", "trimq.client.admin"})
