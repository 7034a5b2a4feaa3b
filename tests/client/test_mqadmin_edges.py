"""mqadmin with nothing to show, with arguments that do not match, and with JSON output."""

import json
from datetime import datetime

import anyio
import pytest
from click.testing import CliRunner, Result

from tests.client.scripted import scripted_broker
from tests.client.servers import Servers
from tests.client.test_mqadmin import answered, run, said
from trimq.client import Consumer, Message, MessageQueue, Producer, PullConsumer, UsageError
from trimq.client.mqadmin import COMMANDS, main
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand


@pytest.fixture
def filled(servers: Servers, name: str) -> str:
    """A topic with one queue and three messages, the second of which is tagged."""
    servers.create_topic(name, 1)

    async def fill() -> None:
        async with Producer(f"p_{name}", namesrv=servers.namesrv) as producer:
            for number in range(3):
                await producer.send(Message(name, b"body %d" % number, tags="odd" if number == 1 else None))
        await servers.dispatched(name, 3)

    anyio.run(fill)
    return name


def test_what_was_changed_in_json(servers: Servers, name: str) -> None:
    address = servers.broker.address
    at = ["-b", address]
    answered(servers, "updateTopic", *at, "-t", name)
    assert answered(servers, "updateTopicPerm", *at, "-t", name, "-p", "4") == {
        "topic": name,
        "broker": address,
        "before": 6,
        "perm": 4,
    }
    changed = answered(servers, "updateBrokerConfig", *at, "-k", "maxMessageSize", "-v", "4194304")
    assert changed == {"key": "maxMessageSize", "value": "4194304", "brokers": [address]}
    answered(servers, "updateSubGroup", *at, "-g", name)
    assert answered(servers, "deleteSubGroup", *at, "-g", name) == {"groupName": name, "brokers": [address]}
    place = ["-s", name, "-k", "key"]
    stored = {"namespace": name, "key": "key", "value": "value"}
    assert answered(servers, "updateKvConfig", *place, "-v", "value") == stored
    assert answered(servers, "deleteKvConfig", *place) == {"namespace": name, "key": "key"}
    for command in ("cleanExpiredCQ", "cleanUnusedTopic"):
        assert answered(servers, command, *at) == [address]


def test_a_route_is_json_as_rocketmq_prints_it(servers: Servers, filled: str) -> None:
    text = said(servers, "topicRoute", "-t", filled)
    assert json.loads(text) == answered(servers, "topicRoute", "-t", filled)
    assert json.loads(text)["queueDatas"][0]["brokerName"] == "broker-a"
    [row] = answered(servers, "topicRoute", "-t", filled, "-l")
    assert (row["BrokerName"], row["BrokerAddrs"]) == ("broker-a", f"0={servers.broker.address}")


def test_one_queue_is_reset(servers: Servers, filled: str) -> None:
    said(servers, "updateSubGroup", "-b", servers.broker.address, "-g", filled)
    words = ["resetOffsetByTime", "-g", filled, "-t", filled, "-s", "now", "-b", "broker-a", "-q", "0"]
    assert answered(servers, *words) == [{"brokerName": "broker-a", "queueId": 0, "offset": 3}]
    assert answered(servers, *words, "-o", "1") == [{"brokerName": "broker-a", "queueId": 0, "offset": 1}]


def test_messages_that_are_not_there(servers: Servers, filled: str) -> None:
    result = run(servers, "queryMsgByUniqueKey", "-t", filled, "-i", "0" * 32)
    assert result.exit_code == 1
    assert "there is no message" in result.output
    result = run(servers, "queryMsgByOffset", "-t", filled, "-b", "broker-a", "-i", "0", "-o", "99")
    assert result.exit_code == 1


def test_a_message_is_sent_to_a_queue(servers: Servers, filled: str) -> None:
    words = ["sendMessage", "-t", filled, "-p", "to one queue"]
    result = run(servers, *words, "-b", "broker-a")
    assert result.exit_code == 2
    assert "-b and -i name one queue together" in result.output
    [row] = answered(servers, *words, "-b", "broker-a", "-i", "0")
    assert row["QID"] == 0
    assert "to one queue" in said(servers, "queryMsgByOffset", "-t", filled, "-b", "broker-a", "-i", "0", "-o", "3")


def test_messages_are_read_and_counted(servers: Servers, filled: str) -> None:
    found = said(servers, "printMsg", "-t", filled, "-d", "true")
    assert found.count("body ") == 3
    queue = ["-t", filled, "-a", "broker-a", "-i", "0"]
    assert said(servers, "printMsgByQueue", *queue, "-p", "true", "-d", "true").count("body ") == 3
    counted = said(servers, "printMsgByQueue", *queue, "-p", "false", "-f", "true")
    assert ["odd", "1"] in [line.split() for line in counted.splitlines()]
    assert "body " not in counted
    for words in (["-i", "0"], ["-b", "broker-a", "-o", "1"]):
        result = run(servers, "consumeMessage", "-t", filled, *words)
        assert result.exit_code == 2
        assert "-i needs -b, and -o needs -i" in result.output
    one = said(servers, "consumeMessage", "-t", filled, "-b", "broker-a", "-i", "0", "-o", "1", "-c", "1")
    assert "body 1" in one
    assert "body 2" not in one


def test_an_empty_topic_has_nothing_to_read(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    assert "body" not in said(servers, "printMsg", "-t", name)
    [row] = [line.split() for line in said(servers, "statsAll", "-t", name).splitlines() if line.startswith(name)]
    assert row[:2] == [name, "0"]  # no group
    unknown = said(servers, "statsAll", "-t", f"{name}_unknown")
    assert f"{name}_unknown" not in unknown


def test_a_consumer_that_does_not_answer(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)

    async def ask() -> tuple[Result, Result]:
        async with Consumer(name, name, namesrv=servers.namesrv) as consumer:
            missing = await anyio.to_thread.run_sync(run, servers, "consumerStatus", "-g", name, "-i", "unknown")
            there = await anyio.to_thread.run_sync(run, servers, "consumerStatus", "-g", name, "-i", consumer.client.id)
            return missing, there

    missing, there = anyio.run(ask)
    assert missing.exit_code == 1
    assert there.exit_code == 0
    assert name in there.output


def test_commands_are_listed_and_explained() -> None:
    listed = CliRunner().invoke(main, ["--help"]).output
    assert all(command in listed for command in COMMANDS)
    assert "Usage: " in CliRunner().invoke(main, ["help", "updateTopic"]).output
    result = CliRunner().invoke(main, ["help", "noSuchCommand"])
    assert result.exit_code == 2
    assert "no command noSuchCommand" in result.output


@pytest.mark.anyio
async def test_a_broker_that_says_nothing_is_in_the_list_all_the_same() -> None:
    async with scripted_broker() as broker:
        broker.answers |= {
            RequestCode.GET_BROKER_CLUSTER_INFO: lambda command: command.reply(
                body=b'{"brokerAddrTable":{"a":{"brokerName":"a","cluster":"c","brokerAddrs":{"0":"%s"}}},'
                b'"clusterAddrTable":{"c":["a"]}}' % broker.address.encode()
            ),
            RequestCode.GET_BROKER_RUNTIME_INFO: lambda command: command.reply(ResponseCode.SYSTEM_BUSY, "no"),
        }
        words = ["clusterList", "-n", broker.address, "--json"]
        result = await anyio.to_thread.run_sync(CliRunner().invoke, main, words)
        assert result.exit_code == 0, result.output
        [row] = json.loads(result.output)
        assert row["Broker Name"] == "a"


@pytest.mark.anyio
async def test_a_topics_status_shows_the_tier() -> None:
    def status(command: RemotingCommand) -> RemotingCommand:
        queue = b'{"brokerName":"a","queueId":%d,"topic":"T"}:{"lastUpdateTimestamp":0,"maxOffset":9,"minOffset":%d%s}'
        tier = b',"localMinOffset":5,"tierMaxOffset":8,"tierMinOffset":2'
        return command.reply(body=b'{"offsetTable":{%s,%s}}' % (queue % (0, 2, tier), queue % (1, 0, b"")))

    async with scripted_broker(queues=2) as broker:
        broker.answers[RequestCode.GET_TOPIC_STATS_INFO] = status
        words = ["topicStatus", "-n", broker.address, "-t", "T", "--json"]
        result = await anyio.to_thread.run_sync(CliRunner().invoke, main, words)
        assert result.exit_code == 0, result.output
        first, second = json.loads(result.output)
        ranges = ("Min Offset", "Max Offset", "Local Min", "Tier Min", "Tier Max")
        assert [first[name] for name in ranges] == [2, 9, 5, 2, 8]
        assert [second[name] for name in ranges] == [0, 9, "", "", ""]


# -- sending -----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_what_cannot_be_sent_is_refused_before_anything_is(servers: Servers, name: str) -> None:
    async with Producer(name, namesrv=servers.namesrv, max_message_size=1000) as producer:
        for bad, why in (
            (Message(name, b""), "the body is empty"),
            (Message(name, b"x" * 2000), "1,?000"),
        ):
            with pytest.raises(UsageError, match=why):
                await producer.send(bad)
            with pytest.raises(UsageError, match=why):
                await producer.send_batch([Message(name, b"good"), bad])
        with pytest.raises(UsageError, match="a delayed message cannot be in a batch"):
            await producer.send_batch([Message(name, b"good"), Message(name, b"later", delay_level=1)])


@pytest.mark.anyio
async def test_a_receipt_names_the_queue_that_the_broker_chose() -> None:
    async with scripted_broker(queues=2) as broker:
        broker.answers[RequestCode.SEND_MESSAGE_V2] = lambda command: command.reply(
            header={"msgId": "0" * 32, "queueId": "7", "queueOffset": "5"}
        )
        async with Producer("p", namesrv=broker.address) as producer:
            receipt = await producer.send(Message("T", b"x"))
        assert receipt.queue == MessageQueue(topic="T", broker_name="a", queue_id=7)


@pytest.mark.anyio
async def test_reading_begins_at_the_end_or_at_a_time_with_a_zone(servers: Servers, filled: str) -> None:
    async with PullConsumer(filled, namesrv=servers.namesrv, start="last") as consumer:
        [queue] = await consumer.queues(filled)
        await consumer.assign([queue])
        assert await consumer.poll(timeout=0.1) == []
        assert consumer.position(queue) == 3
        with pytest.raises(UsageError, match="no time zone"):
            await consumer.offset_by_time(queue, datetime(2030, 1, 1))  # noqa: DTZ001 - that is the test
