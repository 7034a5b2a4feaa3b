"""Commands of mqadmin 5.5.0, and their output, on a running broker with a connected producer and consumer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import Admin, Consumer, JavaClient, Producer, Record, bodies, message, unique
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until

BARE_KEY = re.compile(r"([{,]\s*)(-?\d+):")
FAILURE = " command failed"


def rows(output: str) -> list[list[str]]:
    """The words of each line of a table, without its head and blank lines."""
    return [line.split() for line in output.splitlines() if line.strip() and not line.startswith("#")]


def parsed(output: str) -> Any:
    """Parse JSON as printed by fastjson, with unquoted numbers as keys."""
    return json.loads(BARE_KEY.sub(r'\1"\2":', output))


def settings(output: str) -> dict[str, str]:
    """Parse lines of the form "key = value" or "key : value"."""
    found = {}
    for line in output.splitlines():
        key, separator, value = line.partition("=" if "=" in line else ":")
        if separator:
            found[key.strip()] = value.strip()
    return found


@dataclass(frozen=True)
class Stage:
    """The objects of the commands: a topic with messages, its producer, and a consumer that has read them."""

    cluster: Cluster
    admin: Admin
    topic: str
    group: str
    producer_group: str
    producer: Producer
    consumer: Consumer
    sent: list[Record]
    client_id: str

    @property
    def broker(self) -> str:
        return self.cluster.broker.address

    def run(self, command: str, *words: str) -> str:
        """Run a command that must succeed and return its output."""
        output = self.admin.run(command, *words)
        assert FAILURE not in output, output
        return output

    def refusal(self, command: str, *words: str) -> int:
        """Run a command that must be refused and return the response code."""
        output = self.admin.run(command, *words)
        code = re.search(r"CODE: (\d+)", output)
        assert code, output
        return int(code.group(1))


@pytest.fixture(scope="module")
def stage(cluster: Cluster, admin: Admin, latest_java: JavaClient) -> Iterator[Stage]:
    topic, group, producer_group = cluster.create_topic(unique("Admin")), unique("G"), unique("PG")
    with (
        latest_java.producer(cluster, producer_group) as producer,
        latest_java.consumer(cluster, group, {topic: "*"}) as consumer,
    ):
        sent = []
        for queue in range(4):
            specs = [message(f"m{queue}{number}", keys=f"key{queue}{number}", tags="TagA") for number in range(5)]
            sent += producer.send_to(("broker-a", queue), topic, specs)
        consumer.received(20)
        wait_until(
            lambda: sum(probe.committed_offset(cluster.broker.address, group, topic, n) or 0 for n in range(4)) == 20,
            "committed offsets",
        )
        connection = admin.run("consumerConnection", "-g", group)
        client_id = next(row[0] for row in rows(connection) if "@" in row[0])
        yield Stage(cluster, admin, topic, group, producer_group, producer, consumer, sent, client_id)


def test_topics(stage: Stage, tmp_path: Path) -> None:
    topic, broker = unique("Made"), stage.broker
    output = stage.run("updateTopic", "-b", broker, "-t", topic, "-r", "3", "-w", "3", "-p", "6")
    assert f"create topic to {broker} success." in output
    assert f"TopicConfig [topicName={topic}, readQueueNums=3, writeQueueNums=3, perm=RW-" in output
    output = stage.run("updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", "5", "-w", "4")
    assert "readQueueNums=5, writeQueueNums=4" in output

    route = parsed(stage.run("topicRoute", "-t", topic))
    (data,) = route["brokerDatas"]
    assert (data["brokerName"], data["cluster"], data["brokerAddrs"]) == ("broker-a", "DefaultCluster", {"0": broker})
    (queues,) = route["queueDatas"]
    assert (queues["brokerName"], queues["perm"]) == ("broker-a", 6)
    assert (queues["readQueueNums"], queues["writeQueueNums"]) == (5, 4)
    listed = rows(stage.run("topicRoute", "-t", topic, "-l"))
    assert listed[0] == ["DefaultCluster", "broker-a", f"{{0={broker}}}", "5", "4", "6"]

    output = stage.run("updateTopicPerm", "-t", topic, "-b", broker, "-p", "4")
    assert f"update topic perm from 6 to 4 in {broker} success." in output
    assert parsed(stage.run("topicRoute", "-t", topic))["queueDatas"][0]["perm"] == 4
    assert stage.run("topicClusterList", "-t", topic).split() == ["DefaultCluster"]
    assert topic in stage.run("topicList").split()
    assert ["DefaultCluster", stage.topic, stage.group] in rows(stage.run("topicList", "-c"))

    names = [unique("Listed"), unique("Listed")]
    several = tmp_path / "topics.json"
    several.write_text(
        json.dumps([{"topicName": name, "readQueueNums": 2, "writeQueueNums": 2, "perm": 6} for name in names])
    )
    assert f"to {broker} success" in stage.run("updateTopicList", "-b", broker, "-f", str(several))
    wait_until(lambda: set(names) <= set(stage.run("topicList").split()), f"{names} in the topic list")

    output = stage.run("deleteTopic", "-c", "DefaultCluster", "-t", topic)
    assert f"delete topic [{topic}] from cluster [DefaultCluster] success." in output
    assert f"delete topic [{topic}] from NameServer success." in output
    assert stage.refusal("topicRoute", "-t", topic) == 17
    assert stage.refusal("topicStatus", "-t", topic) == 17


def test_topics_that_may_not_be(stage: Stage) -> None:
    assert stage.refusal("updateTopic", "-b", stage.broker, "-t", "bad@name", "-r", "3", "-w", "3") == 29
    assert stage.refusal("updateTopic", "-b", stage.broker, "-t", "TBW102", "-r", "3", "-w", "3") == 29
    attribute = ("-a", "+no.such.attribute=1")
    assert stage.refusal("updateTopic", "-b", stage.broker, "-t", unique("T"), *attribute) == 1


def test_topic_status_and_queues(stage: Stage) -> None:
    status = rows(stage.run("topicStatus", "-t", stage.topic))
    assert [row[:4] for row in status[:4]] == [["broker-a", str(queue), "0", "5"] for queue in range(4)]
    assert all(re.match(r"\d{4}-\d\d-\d\d", row[4]) for row in status[:4])
    assert status[4][:3] == ["Topic", "Put", "TPS:"]

    shares = json.loads(stage.run("allocateMQ", "-t", stage.topic, "-i", "10.0.0.1,10.0.0.2"))["result"]
    # mqadmin assigns the queues in the order of a hash set, which depends on the topic's name.
    assert {owner: len(queues) for owner, queues in shares.items()} == {"10.0.0.1": 2, "10.0.0.2": 2}
    assert sorted(one["queueId"] for queues in shares.values() for one in queues) == [0, 1, 2, 3]
    for words in (("-b", stage.broker), ("-b", stage.broker, "-g", stage.group), ()):
        output = stage.run("queryCq", "-t", stage.topic, "-q", "0", "-i", "0", "-c", "3", *words)
        assert "max: 5, min: 0" in output
        assert re.findall(r"idx: (\d)", output) == ["0", "1", "2"]
        tag_hash = 2598919  # "TagA" in Java
        assert len(re.findall(rf"physicOffset=\d+, physicSize=\d+, tagsCode={tag_hash}", output)) == 3
        if "-g" in words:
            assert f'"topic":"{stage.topic}"' in output


def test_cluster_and_broker(stage: Stage) -> None:
    (line,) = [row for row in rows(stage.run("clusterList")) if "broker-a" in row]
    assert line[:4] == ["DefaultCluster", "broker-a", "0", stage.broker]
    assert re.match(r"V\d+_\d+_\d+", line[4])
    assert line[-1] == "true"
    (line,) = [row for row in rows(stage.run("clusterList", "-m")) if "broker-a" in row]
    assert int(line[4]) >= 20

    for words in (("-b", stage.broker), ("-c", "DefaultCluster")):
        output = stage.run("brokerStatus", *words)
        status = settings(output.replace(stage.broker, ""))
        assert status["brokerActive"] == "true"
        assert int(status["msgPutTotalTodayNow"]) >= 20
        assert float(status["commitLogDiskRatio"]) <= 1
        assert len(status["putTps"].split()) in {1, 2, 3}
        assert status["sendThreadPoolQueueSize"].isdigit()
        assert int(status["commitLogMaxOffset"]) > int(status["commitLogMinOffset"]) == 0

    (line,) = [
        row
        for row in rows(stage.run("brokerConsumeStats", "-b", stage.broker))
        if row[1:4] == [stage.group, "broker-a", "3"]
    ]
    assert line[:7] == [stage.topic, stage.group, "broker-a", "3", "5", "5", "0"]
    output = stage.run("sendMsgStatus", "-b", "broker-a", "-s", "16", "-c", "3")
    assert output.count("sendStatus=SEND_OK") >= 3


def test_broker_configuration(stage: Stage) -> None:
    for words in (("-b", stage.broker), ("-c", "DefaultCluster")):
        found = settings(stage.run("getBrokerConfig", *words))
        assert found["brokerName"] == "broker-a"
        assert found["brokerClusterName"] == "DefaultCluster"
        assert found["listenPort"] == str(stage.cluster.broker.port)
        assert found["storePathRootDir"] == str(stage.cluster.broker.store)
        assert found["mappedFileSizeCommitLog"] == str(16 * 1024 * 1024)
    before = settings(stage.run("getBrokerConfig", "-b", stage.broker))["maxMessageSize"]
    output = stage.run("updateBrokerConfig", "-b", stage.broker, "-k", "maxMessageSize", "-v", "4194305")
    assert f"update broker config success, {stage.broker}" in output
    assert settings(stage.run("getBrokerConfig", "-b", stage.broker))["maxMessageSize"] == "4194305"
    stage.run("updateBrokerConfig", "-b", stage.broker, "-k", "maxMessageSize", "-v", before)
    assert stage.refusal("updateBrokerConfig", "-b", stage.broker, "-k", "brokerConfigPath", "-v", "x") == 16


def test_connections(stage: Stage) -> None:
    output = stage.run("consumerConnection", "-g", stage.group)
    connected = rows(output)
    assert connected[0][0] == stage.client_id
    assert connected[0][2:] == ["JAVA", "V5_5_0"]
    assert [stage.topic, "*"] in connected
    assert [f"%RETRY%{stage.group}", "*"] in connected
    assert "ConsumeType: CONSUME_PASSIVELY" in output
    assert "MessageModel: CLUSTERING" in output
    assert "ConsumeFromWhere: CONSUME_FROM_FIRST_OFFSET" in output
    (line,) = rows(stage.run("producerConnection", "-g", stage.producer_group, "-t", stage.topic))
    assert line[-2:] == ["JAVA", "V5_5_0"]
    output = stage.run("producer", "-b", stage.broker)
    assert re.search(rf"producer group \({stage.producer_group}\) instance : clientId=\S+@", output)
    assert stage.refusal("consumerConnection", "-g", unique("Unknown")) == 17
    assert stage.refusal("producerConnection", "-g", unique("Unknown"), "-t", stage.topic) == 1


def test_consumer_progress_and_status(stage: Stage) -> None:
    output = stage.run("consumerProgress", "-g", stage.group)
    lines = [row for row in rows(output) if row[0] == stage.topic]
    assert [row[:7] for row in lines] == [
        [stage.topic, "broker-a", str(queue), "5", "5", "0", "0"] for queue in range(4)
    ]
    assert "Consume Diff Total: 0" in output
    assert rows(stage.run("consumerProgress", "-g", stage.group, "-s", "true"))
    (line,) = [row for row in rows(stage.run("consumerProgress")) if row[0] == stage.group]
    assert (line[1], line[2], line[3], line[4], line[-1]) == ("1", "V5_5_0", "PUSH", "CLUSTERING", "0")

    output = stage.run("consumerStatus", "-g", stage.group)
    assert stage.client_id in output
    assert "Same subscription in the same group of consumer" in output
    assert "Rebalance OK" in output
    output = stage.run("consumerStatus", "-g", stage.group, "-i", stage.client_id, "-s", "true")
    assert re.search(rf"consumerGroup\s+: {stage.group}", output)
    assert "#Consumer MQ Detail#" in output
    assert re.search(rf"{stage.topic}\s+broker-a\s+3", output)


def test_groups(stage: Stage, tmp_path: Path) -> None:
    group, broker = unique("Made"), stage.broker
    output = stage.run("updateSubGroup", "-b", broker, "-g", group, "-r", "3", "-q", "2", "-s", "true")
    assert f"create subscription group to {broker} success." in output
    assert f"groupName={group}, consumeEnable=true" in output
    found = settings(stage.run("getConsumerConfig", "-g", group))
    assert (found["groupName"], found["retryMaxTimes"], found["retryQueueNums"]) == (group, "3", "2")
    assert found["consumeFromMinEnable"] == "false"
    assert f"create subscription group to {broker} success." in stage.run(
        "updateSubGroup", "-c", "DefaultCluster", "-g", group
    )

    names = [unique("Listed"), unique("Listed")]
    several = tmp_path / "groups.json"
    several.write_text(json.dumps([{"groupName": name, "retryMaxTimes": 5} for name in names]))
    assert f"to {broker} success" in stage.run("updateSubGroupList", "-b", broker, "-f", str(several))
    assert settings(stage.run("getConsumerConfig", "-g", names[1]))["retryMaxTimes"] == "5"

    output = stage.run("deleteSubGroup", "-b", broker, "-g", group)
    assert f"delete subscription group [{group}] from broker [{broker}] success." in output


def test_a_group_that_may_not_consume(stage: Stage, latest_java: JavaClient) -> None:
    """A switch on a group takes effect on its running consumer."""
    topic, group = stage.cluster.create_topic(unique("Switched"), queues=1), unique("G")
    with latest_java.consumer(stage.cluster, group, {topic: "*"}) as consumer:
        stage.producer.send(topic, [message("first")])
        consumer.received(1)
        stage.run("updateSubGroup", "-b", stage.broker, "-g", group, "-s", "false")
        refused = probe.call(
            stage.broker,
            11,
            {
                "consumerGroup": group,
                "topic": topic,
                "queueId": "0",
                "queueOffset": "0",
                "maxMsgNums": "1",
                "sysFlag": "0",
                "commitOffset": "0",
                "suspendTimeoutMillis": "0",
                "subVersion": "0",
            },
        )
        assert refused.code == 16
        stage.run("updateSubGroup", "-b", stage.broker, "-g", group, "-s", "true")
        stage.producer.send(topic, [message("second")])
        assert bodies(consumer.received(2)) == ["first", "second"]


def test_messages(stage: Stage) -> None:
    first = stage.sent[0]
    output = stage.run("queryMsgById", "-t", stage.topic, "-i", first["offsetMsgId"])
    assert re.search(rf"OffsetID:\s+{first['offsetMsgId']}", output)
    assert re.search(rf"Topic:\s+{stage.topic}", output)
    assert re.search(r"Tags:\s+\[TagA\]", output)
    assert re.search(r"Keys:\s+\[key00\]", output)
    assert re.search(rf"Store Host:\s+{stage.broker}", output)
    assert f"MessageTrack [consumerGroup={stage.group}, trackType=CONSUMED, exceptionDesc=null]" in output

    output = stage.run("queryMsgByUniqueKey", "-t", stage.topic, "-i", first["msgId"])
    assert re.search(r"Keys:\s+\[key00\]", output)
    assert f"MessageTrack [consumerGroup={stage.group}, trackType=CONSUMED" in output
    (line,) = rows(stage.run("queryMsgByKey", "-t", stage.topic, "-k", "key23"))
    assert line[:3] == [stage.sent[13]["msgId"], "2", "3"]
    output = stage.run("queryMsgByOffset", "-t", stage.topic, "-b", "broker-a", "-i", "3", "-o", "4")
    assert re.search(r"Keys:\s+\[key34\]", output)
    assert stage.refusal("queryMsgByKey", "-t", stage.topic, "-k", "no-such-key") == 208

    output = stage.run("printMsg", "-t", stage.topic, "-d", "true")
    assert output.count("MSGID:") == 20
    output = stage.run("printMsgByQueue", "-t", stage.topic, "-a", "broker-a", "-i", "1", "-p", "true", "-d", "true")
    assert output.count("MSGID:") == 5
    output = stage.run("printMsgByQueue", "-t", stage.topic, "-a", "broker-a", "-i", "1", "-f", "true")
    assert re.search(r"Tag: TagA\s+Count: 5", output)
    assert "MSGID:" in stage.run("consumeMessage", "-t", stage.topic, "-g", unique("G"), "-c", "20")
    output = stage.run("consumeMessage", "-t", stage.topic, "-b", "broker-a", "-i", "1", "-o", "2", "-c", "2")
    assert output.count("MSGID:") == 2


def test_a_message_is_pushed_to_one_consumer(stage: Stage, latest_java: JavaClient) -> None:
    """mqadmin asks the broker, the broker asks the client, and the answer returns through the broker."""
    topic, group = stage.cluster.create_topic(unique("Pushed"), queues=1), unique("G")
    with latest_java.consumer(stage.cluster, group, {topic: "*"}) as consumer:
        (sent,) = stage.producer.send(topic, [message("again and again")])
        consumer.received(1)
        connection = stage.run("consumerConnection", "-g", group)
        client = ("-g", group, "-d", next(row[0] for row in rows(connection) if "@" in row[0]))
        output = stage.run("queryMsgById", "-t", topic, "-i", sent["offsetMsgId"], *client)
        assert "consumeResult=CR_SUCCESS" in output
        output = stage.run("queryMsgByUniqueKey", "-t", topic, "-i", sent["msgId"], *client)
        assert "consumeResult=CR_SUCCESS" in output
        assert bodies(consumer.received(3)) == ["again and again"] * 3


def test_sending(stage: Stage) -> None:
    topic = stage.cluster.create_topic(unique("Sent"))
    (line,) = rows(stage.run("sendMessage", "-t", topic, "-p", "hello", "-k", "sentkey", "-c", "TagZ"))
    assert (line[0], line[2]) == ("broker-a", "SEND_OK")
    (line,) = rows(stage.run("sendMessage", "-t", topic, "-p", "hello", "-b", "broker-a", "-i", "2"))
    assert line[:3] == ["broker-a", "2", "SEND_OK"]
    found = wait_until(lambda: stage.producer.query_key(topic, "sentkey"), "the message by its key")
    assert (found[0]["body"], found[0]["tags"]) == ("hello", "TagZ")
    output = stage.run("checkMsgSendRT", "-t", topic, "-a", "3", "-s", "64")
    assert [row[2] for row in rows(output) if row[0] == "broker-a"] == ["true"] * 3


def test_statistics(stage: Stage) -> None:
    lines = rows(stage.run("statsAll", "-t", stage.topic))
    assert any(row[:3] == [stage.topic, stage.group, "0"] for row in lines)
    every = {row[0] for row in rows(stage.run("statsAll"))}
    assert {"TBW102", "SELF_TEST_TOPIC", stage.topic} <= every
    active = stage.cluster.create_topic(unique("Active"))
    stage.producer.send(active, [message("now")])
    wait_until(lambda: active in stage.run("statsAll", "-a").split(), "rates of the last minute", 60)


def test_name_server(stage: Stage) -> None:
    address = stage.cluster.name_servers[0].address
    assert "success" in stage.run("updateKvConfig", "-s", "SPACE", "-k", "key1", "-v", "value1")
    assert probe.ask(address, 101, {"namespace": "SPACE", "key": "key1"}).ext["value"] == "value1"
    assert "success" in stage.run("deleteKvConfig", "-s", "SPACE", "-k", "key1")
    assert probe.call(address, 101, {"namespace": "SPACE", "key": "key1"}).code == 22

    assert "orderConf=[broker-a:4]" in stage.run("updateOrderConf", "-t", stage.topic, "-m", "put", "-v", "broker-a:4")
    assert "orderConf=[broker-a:4]" in stage.run("updateOrderConf", "-t", stage.topic, "-m", "get")
    assert "delete orderConf success" in stage.run("updateOrderConf", "-t", stage.topic, "-m", "delete")

    found = settings(stage.run("getNamesrvConfig"))
    assert found["listenPort"] == str(stage.cluster.name_servers[0].port)
    output = stage.run("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", "true")
    assert f"update name server config success![{address}]" in output
    assert settings(stage.run("getNamesrvConfig"))["orderMessageEnable"] == "true"
    stage.run("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", "false")

    output = stage.run("wipeWritePerm", "-b", "broker-a")
    assert re.search(rf"wipe write perm of broker\[broker-a\] in name server\[{address}\] OK, [1-9]", output)
    assert parsed(stage.run("topicRoute", "-t", stage.topic))["queueDatas"][0]["perm"] == 4
    output = stage.run("addWritePerm", "-b", "broker-a")
    assert re.search(rf"add write perm of broker\[broker-a\] in name server\[{address}\] OK, [1-9]", output)
    assert parsed(stage.run("topicRoute", "-t", stage.topic))["queueDatas"][0]["perm"] == 6


def test_cleaning(stage: Stage) -> None:
    for command in ("cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"):
        assert "success" in stage.run(command, "-b", stage.broker)
    assert "success" in stage.run("cleanExpiredCQ", "-c", "DefaultCluster")
    status = rows(stage.run("topicStatus", "-t", stage.topic))
    assert [row[2:4] for row in status[:4]] == [["0", "5"]] * 4


def test_exports(stage: Stage, tmp_path: Path) -> None:
    where = str(tmp_path)
    assert "metadata.json success" in stage.run("exportMetadata", "-c", "DefaultCluster", "-f", where)
    exported = json.loads((tmp_path / "metadata.json").read_text())
    assert exported["topicConfigTable"][stage.topic]["readQueueNums"] == 4
    assert stage.group in exported["subscriptionGroupTable"]
    assert "topic.json success" in stage.run("exportMetadata", "-b", stage.broker, "-t", "-f", where)
    assert stage.topic in json.loads((tmp_path / "topic.json").read_text())["topicConfigTable"]
    assert "configs.json success" in stage.run("exportConfigs", "-c", "DefaultCluster", "-f", where)
    assert "broker-a" in json.loads((tmp_path / "configs.json").read_text())["brokerConfigs"]
    assert "metrics.json success" in stage.run("exportMetrics", "-c", "DefaultCluster", "-f", where)
    assert "broker-a" in json.loads((tmp_path / "metrics.json").read_text())["evaluateReport"]


def test_a_running_consumer_goes_back(stage: Stage, latest_java: JavaClient) -> None:
    topic, group = stage.cluster.create_topic(unique("Reset"), queues=2), unique("G")
    with latest_java.consumer(stage.cluster, group, {topic: "*"}) as consumer:
        stage.producer.send(topic, [message(f"m{number}") for number in range(10)])
        consumer.received(10)
        lines = rows(stage.run("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0"))
        assert sorted(row for row in lines if row[0] == "broker-a") == [["broker-a", "0", "0"], ["broker-a", "1", "0"]]
        got = consumer.received(20, wait=60)
        assert sorted(bodies(got)) == sorted(f"m{number}" for number in range(10) for _ in range(2))
        wait_until(
            lambda: [probe.committed_offset(stage.broker, group, topic, queue) for queue in (0, 1)] == [5, 5],
            "offsets after the second read",
        )
        lines = rows(stage.run("resetOffsetByTime", "-g", group, "-t", topic, "-s", "now"))
        assert ["broker-a", "1", "5"] in lines


def test_offsets_of_a_group_that_is_not_there(stage: Stage, latest_java: JavaClient) -> None:
    topic, group = stage.cluster.create_topic(unique("Away"), queues=2), unique("G")
    with latest_java.consumer(stage.cluster, group, {topic: "*"}) as consumer:
        stage.producer.send(topic, [message(f"m{number}") for number in range(8)])
        consumer.received(8)
        consumer.wait_for_position(topic, 8)
    place = ("-b", stage.broker, "-q", "1", "-o", "2")
    output = stage.run("resetOffsetByTime", "-g", group, "-t", topic, "-s", "-1", *place)
    assert "reset consumer offset to 2" in output
    with latest_java.consumer(stage.cluster, group, {topic: "*"}) as consumer:
        got = consumer.received(2)
        assert sorted((record["queue"], record["offset"]) for record in got) == [(1, 2), (1, 3)]
        consumer.wait_for_position(topic, 8)
    stage.producer.send(topic, [message(f"skipped{number}") for number in range(4)])
    lines = rows(stage.run("skipAccumulatedMessage", "-g", group, "-t", topic))
    assert sorted(lines) == [["broker-a", "0", "6"], ["broker-a", "1", "6"]]
    stage.producer.send(topic, [message("next")])
    with latest_java.consumer(stage.cluster, group, {topic: "*"}) as consumer:
        assert bodies(consumer.received(1)) == ["next"]


def test_offsets_are_copied_to_another_group(stage: Stage) -> None:
    copy = unique("Copy")
    stage.run("updateSubGroup", "-b", stage.broker, "-g", copy)
    output = stage.run("cloneGroupOffset", "-s", stage.group, "-d", copy, "-t", stage.topic, "-o", "true")
    assert "clone group offset success" in output
    assert [probe.committed_offset(stage.broker, copy, stage.topic, queue) for queue in range(4)] == [5] * 4


def test_a_broker_without_a_controller_has_no_epochs(stage: Stage) -> None:
    assert stage.refusal("getBrokerEpoch", "-b", "broker-a") == 1


@pytest.mark.parametrize("command", ["listUser", "listAcl"])
def test_users_and_policies_are_refused_while_authentication_is_off(stage: Stage, command: str) -> None:
    """16, and what to switch on. Apache's broker answers 1: it has no provider of metadata then."""
    output = stage.admin.run(command, "-b", stage.broker)
    if stage.cluster.broker.peer == "apache":
        assert "CODE: 1  DESC: " in output
    else:
        assert "CODE: 16  DESC: users and policies are served while authenticationEnabled=true only" in output


def test_a_master_without_slaves(stage: Stage) -> None:
    assert "#SlaveNum\t0\n#InSyncSlaveNum\t0" in stage.run("haStatus", "-b", stage.broker)
