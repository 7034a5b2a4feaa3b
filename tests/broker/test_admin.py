"""Administration requests, as mqadmin sends them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.broker.wire_client import WireClient, consumer
from trimq.broker.controller import BrokerController
from trimq.broker.processors.admin import client_admin, queue_admin
from trimq.broker.testing import running_broker
from trimq.protocol import lenient_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand

NEW_TOPIC = {
    "topic": "Orders",
    "defaultTopic": "TBW102",
    "readQueueNums": 2,
    "writeQueueNums": 2,
    "perm": 6,
    "topicFilterType": "SINGLE_TAG",
}


def body(reply: RemotingCommand) -> Any:
    assert reply.code == ResponseCode.SUCCESS, (reply.code, reply.remark)
    return lenient_json.loads(bytes(reply.body))


def by_queue(table: dict[str, Any]) -> dict[int, Any]:
    """Return a map whose keys are message queues by queue id (trap 3: the keys are objects, not text)."""
    return {json.loads(key)["queueId"]: value for key, value in table.items()}


# topics


async def test_topic_life(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        assert (await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "Orders"})).code == 17
        assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)).code == 0
        on_disk = json.loads((tmp_path / "config" / "topics.json").read_bytes())
        assert on_disk["topicConfigTable"]["Orders"]["readQueueNums"] == 2
        changed = NEW_TOPIC | {"readQueueNums": 4, "attributes": "+message.type=NORMAL"}
        assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, changed)).code == 0
        config = body(await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "Orders", "lo": "true"}))
        assert (config["readQueueNums"], config["writeQueueNums"]) == (4, 2)
        assert config["attributes"] == {"message.type": "NORMAL"}
        table = body(await client.ask(RequestCode.GET_ALL_TOPIC_CONFIG))
        assert table["topicConfigTable"]["Orders"]["perm"] == 6
        assert table["dataVersion"]["counter"] > 0
        assert (await client.send("Orders")).code == 0
        assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "Orders"})).code == 0
        assert (await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "Orders"})).code == 17
        assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "Orders"})).code == 0
        assert (await client.pull("Orders")).code == ResponseCode.TOPIC_NOT_EXIST
        assert not (tmp_path / "consumequeue" / "Orders").exists()
        assert (await client.send("Orders")).ext_fields()["queueOffset"] == "0"


async def test_a_topic_that_a_send_makes_anew_while_it_is_deleted(
    broker: BrokerController, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message acknowledged after the deletion belongs to the new topic."""
    await client.send("Orders", b"old")
    topics = broker.context.topics
    usual = topics.persisted

    async def send_first() -> None:
        monkeypatch.setattr(topics, "persisted", usual)
        async with WireClient.connect(broker.endpoint) as producer:
            assert (await producer.send("Orders", b"new")).code == ResponseCode.SUCCESS
        await usual()

    monkeypatch.setattr(topics, "persisted", send_first)
    assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "Orders"})).code == ResponseCode.SUCCESS
    assert [message.body for message in await client.pull_messages("Orders")] == [b"new"]


async def test_topic_list(client: WireClient) -> None:
    configs = [{"topicName": f"T{n}", "readQueueNums": n, "writeQueueNums": n} for n in (1, 2)]
    data = json.dumps({"topicConfigList": configs}).encode()
    assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=data)).code == 0
    assert body(await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "T2"}))["readQueueNums"] == 2


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topic": "a b"}, ResponseCode.INVALID_PARAMETER),
        ({"topic": " "}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "TBW102"}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "rmq_sys_mine"}, ResponseCode.INVALID_PARAMETER),
        ({"perm": 16}, ResponseCode.INVALID_PARAMETER),
        ({"readQueueNums": -1}, ResponseCode.INVALID_PARAMETER),
        ({"attributes": "+no.such=1"}, ResponseCode.SYSTEM_ERROR),
        ({"attributes": "message.type=NORMAL"}, ResponseCode.SYSTEM_ERROR),
        ({"perm": None}, ResponseCode.SYSTEM_ERROR),
    ],
)
async def test_topics_that_cannot_be(client: WireClient, changes: dict[str, Any], code: int) -> None:
    assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC | changes)).code == code


@pytest.mark.parametrize("topic", ["", "TBW102", "SCHEDULE_TOPIC_XXXX"])
async def test_topics_that_stay(client: WireClient, topic: str) -> None:
    reply = await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic})
    assert reply.code == ResponseCode.INVALID_PARAMETER


async def test_topic_shapes_of_the_original(client: WireClient) -> None:
    """Trap 16: attributes may be an empty string."""
    ext = NEW_TOPIC | {"attributes": "", "order": "false", "topicSysFlag": 0}
    assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)).code == 0


async def test_booleans_may_be_missing(client: WireClient) -> None:
    """Trap 17: an absent value is false, only the string "true" is true."""
    ext = NEW_TOPIC | {"order": "TRUE"}
    assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)).code == 0
    assert body(await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "Orders"}))["order"] is True
    assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC | {"order": "yes"})).code == 0
    assert body(await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "Orders"}))["order"] is False


async def test_system_topics(client: WireClient) -> None:
    topics = body(await client.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER))["topicList"]
    assert {"TBW102", "SCHEDULE_TOPIC_XXXX", "BenchmarkTest", "broker-a", "DefaultCluster"} <= set(topics)


async def test_topic_stats(client: WireClient) -> None:
    assert (await client.ask(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "Orders"})).code == 17
    await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)
    await client.send("Orders", queue_id=1)
    (message,) = await client.pull_messages("Orders", queueId=1)
    reply = await client.ask(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "Orders"})
    assert b'{"offsetTable":{{' in bytes(reply.body)
    assert by_queue(body(reply)["offsetTable"]) == {
        0: {"minOffset": 0, "maxOffset": 0, "lastUpdateTimestamp": 0},
        1: {"minOffset": 0, "maxOffset": 1, "lastUpdateTimestamp": message.store_timestamp},
    }


@pytest.mark.parametrize(
    "code",
    [
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.CLEAN_UNUSED_TOPIC,
        RequestCode.DELETE_EXPIRED_COMMITLOG,
    ],
)
async def test_cleaning(client: WireClient, code: int) -> None:
    await client.send("Orders")
    assert (await client.ask(code)).code == ResponseCode.SUCCESS
    assert len(await client.pull_messages("Orders")) == 1


async def test_queues_of_topics_that_are_not_there_are_cleaned(broker: BrokerController, client: WireClient) -> None:
    """CLEAN_UNUSED_TOPIC (316) removes the queues that an interrupted deletion of a topic has left."""
    await client.send("Orders")
    await client.send("Left")
    store = broker.context.store
    assert broker.context.topics.delete("Left")
    assert store.topics().keys() >= {"Orders", "Left"}
    assert (await client.ask(RequestCode.CLEAN_UNUSED_TOPIC)).code == ResponseCode.SUCCESS
    assert "Orders" in store.topics()
    assert "Left" not in store.topics()


async def test_a_topic_that_a_send_makes_anew_while_others_are_cleaned(
    broker: BrokerController, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, topics = broker.context.store, broker.context.topics
    for topic in ("Left", "Made"):
        await client.send(topic)
        assert topics.delete(topic)
    usual = store.queues.deleted_topics.save

    async def send_first() -> None:
        assert set(store.queues.deleted_topics.topics) == {"Left"}
        async with WireClient.connect(broker.endpoint) as producer:
            assert (await producer.send("Made", b"new")).code == ResponseCode.SUCCESS
        await usual()

    monkeypatch.setattr(store.queues.deleted_topics, "save", send_first)
    assert (await client.ask(RequestCode.CLEAN_UNUSED_TOPIC)).code == ResponseCode.SUCCESS
    assert not store.has_queue("Left", 0)
    assert (await client.pull_messages("Made"))[-1].body == b"new"


async def test_expired_files_and_then_empty_queues_go_by_hand(tmp_path: Path) -> None:
    """DELETE_EXPIRED_COMMITLOG (329) at any hour, then CLEAN_EXPIRED_CONSUMEQUEUE (306)."""
    settings: dict[str, Any] = {"mappedFileSizeCommitLog": 65536, "deleteCommitLogFilesInterval": 1}
    async with running_broker(tmp_path, **settings) as broker, WireClient.connect(broker.endpoint) as client:
        for unique in ("U1", "U2"):  # the second one takes the fast path, which remembers the queue
            await client.send("Old", properties={"UNIQ_KEY": unique})
        for _ in range(3):
            await client.send("Orders", b"x" * 40_000)
        store = broker.context.store
        assert await store.write_path.sync.flush()
        for path in sorted((tmp_path / "commitlog").iterdir())[:2]:
            os.utime(path, (0, 0))
        assert store.min_phy_offset == 0
        assert (await client.ask(RequestCode.DELETE_EXPIRED_COMMITLOG)).code == ResponseCode.SUCCESS
        with trio.fail_after(10):
            while store.min_offset("Old", 0) == 0:
                await trio.lowlevel.checkpoint()
        assert store.has_queue("Old", 0)
        assert (await client.ask(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)).code == ResponseCode.SUCCESS
        assert not store.has_queue("Old", 0)
        reply = await client.send("Old", b"again", {"UNIQ_KEY": "U3"})
        assert reply.ext_fields()["queueOffset"] == "2"
        assert [message.body for message in await client.pull_messages("Old", 2)] == [b"again"]
        (left,) = await client.pull_messages("Orders", store.min_offset("Orders", 0))
        assert len(left.body) == 40_000


# groups


async def test_group_life(client: WireClient) -> None:
    put, get = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG
    assert (await client.ask(put, body=b'{"groupName":"a b"}')).code == ResponseCode.INVALID_PARAMETER
    assert (await client.ask(put, body=b'{"groupName":"G","retryMaxTimes":3,"attributes":null}')).code == 0
    config = body(await client.ask(get, {"group": "G"}))
    assert (config["retryMaxTimes"], config["consumeEnable"], config["retryQueueNums"]) == (3, True, 1)
    data = json.dumps({"groupConfigList": [{"groupName": "G1"}, {"groupName": "G2"}]}).encode()
    assert (await client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=data)).code == 0
    table = body(await client.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG))
    assert {"G", "G1", "G2", "TOOLS_CONSUMER"} <= set(table["subscriptionGroupTable"])
    await client.send("Orders")
    commit = {"consumerGroup": "G", "topic": "Orders", "queueId": 0, "commitOffset": 1}
    await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    delete = RequestCode.DELETE_SUBSCRIPTIONGROUP
    assert (await client.ask(delete, {"groupName": "G", "cleanOffset": "true"})).code == 0
    topics = body(await client.ask(RequestCode.QUERY_TOPICS_BY_CONSUMER, {"group": "G"}))
    assert topics["topicList"] == []


async def test_unknown_group(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, autoCreateSubscriptionGroup=False) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        reply = await client.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "G"})
        assert reply.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


async def test_who_is_connected(client: WireClient) -> None:
    connections = RequestCode.GET_CONSUMER_CONNECTION_LIST
    assert (await client.ask(connections, {"consumerGroup": "G"})).code == ResponseCode.CONSUMER_NOT_ONLINE
    await client.heartbeat("c1", consumers=[consumer("G", "Orders", "a")], producers=["P"])
    found = body(await client.ask(connections, {"consumerGroup": "G"}))
    (one,) = found["connectionSet"]
    assert (one["clientId"], one["language"], one["version"]) == ("c1", "JAVA", 479)
    assert one["clientAddr"].startswith("127.0.0.1:")
    assert (found["consumeType"], found["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert found["subscriptionTable"]["Orders"]["subString"] == "a"
    producers = body(await client.ask(RequestCode.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "P"}))
    assert [one["clientId"] for one in producers["connectionSet"]] == ["c1"]
    every = body(await client.ask(RequestCode.GET_ALL_PRODUCER_INFO))
    assert every["data"]["P"][0]["remoteIP"].startswith("/127.0.0.1:")
    who = body(await client.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "Orders"}))
    assert who == {"groupList": ["G"]}
    ext = {"group": "G", "topic": "Orders"}
    subscription = body(await client.ask(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, ext))
    assert subscription["subscriptionData"]["tagsSet"] == ["a"]


# progress of groups


async def test_consume_stats(client: WireClient) -> None:
    await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)
    for _ in range(3):
        await client.send("Orders")
    await client.pull("Orders", 2, sysFlag=5, commitOffset=2)
    stats = body(await client.ask(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "G"}))
    queue = by_queue(stats["offsetTable"])[0]
    messages = await client.pull_messages("Orders")
    assert (queue["brokerOffset"], queue["consumerOffset"]) == (3, 2)
    assert queue["lastTimestamp"] == messages[1].store_timestamp
    assert set(by_queue(stats["offsetTable"])) == {0, 1}
    named = body(await client.ask(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "X", "topicList": "Orders;No"}))
    assert by_queue(named["offsetTable"])[0]["consumerOffset"] == 0
    everything = body(await client.ask(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}))
    assert everything["totalDiff"] == 1
    (mine,) = [entry["G"] for entry in everything["consumeStatsList"] if "G" in entry]
    assert by_queue(mine[0]["offsetTable"])[0]["consumerOffset"] == 2
    ordered = body(await client.ask(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "true"}))
    assert ordered["totalDiff"] == 0


async def test_time_span(client: WireClient) -> None:
    await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)
    for _ in range(2):
        await client.send("Orders")
    await client.pull("Orders", 1, sysFlag=5, commitOffset=1)
    ext = {"topic": "Orders", "group": "G"}
    spans = body(await client.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, ext))["consumeTimeSpanSet"]
    first, last = await client.pull_messages("Orders")
    assert spans[0]["messageQueue"] == {"topic": "Orders", "brokerName": "broker-a", "queueId": 0}
    assert spans[0]["minTimeStamp"] == spans[0]["consumeTimeStamp"] == first.store_timestamp
    assert spans[0]["maxTimeStamp"] == last.store_timestamp
    assert spans[0]["delayTime"] >= 0
    assert (await client.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, ext | {"topic": "No"})).code == 17


RESET = {"topic": "Orders", "group": "G", "timestamp": -1, "isForce": "true"}


async def test_reset_is_handed_out_at_the_next_pull(client: WireClient) -> None:
    """Trap 14: until then the broker ignores commits of running consumers."""
    reset = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    assert (await client.ask(reset, RESET)).code == ResponseCode.TOPIC_NOT_EXIST
    await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)
    assert (await client.ask(reset, RESET)).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    for _ in range(3):
        await client.send("Orders")
    await client.pull("Orders", 1, sysFlag=5, commitOffset=1)
    reply = await client.ask(reset, RESET)
    assert b'{"offsetTable":{{' in bytes(reply.body)
    assert by_queue(body(reply)["offsetTable"]) == {0: 3, 1: 0}
    commit = {"consumerGroup": "G", "topic": "Orders", "queueId": 0, "commitOffset": 2}
    assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == ResponseCode.SUCCESS
    query = {"consumerGroup": "G", "topic": "Orders", "queueId": 0}
    assert (await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, query)).ext_fields() == {"offset": "3"}
    moved = await client.pull("Orders", 2, sysFlag=7, commitOffset=2)
    assert (moved.code, moved.remark) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET")
    assert moved.ext_fields()["nextBeginOffset"] == "3"
    assert (await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, query)).ext_fields() == {"offset": "3"}
    assert (await client.pull("Orders", 2)).remark == "FOUND"


async def test_reset_to_a_time_and_to_an_offset(client: WireClient) -> None:
    reset = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)
    for _ in range(3):
        await client.send("Orders")
    await client.pull("Orders")
    table = body(await client.ask(reset, RESET | {"timestamp": 1}))["offsetTable"]
    assert by_queue(table) == {0: 0, 1: 0}
    table = body(await client.ask(reset, RESET | {"queueId": 0, "offset": 2}))["offsetTable"]
    assert by_queue(table) == {0: 2}
    assert (await client.ask(reset, RESET | {"queueId": 0, "offset": 5})).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("place", [{"queueId": 2}, {"queueId": 10**9, "offset": 0}, {"queueId": 10**9, "offset": 1}])
async def test_reset_in_a_queue_that_is_not_there(
    broker: BrokerController, client: WireClient, place: dict[str, Any]
) -> None:
    """Guards that a reset leaves no offset of a queue that the topic does not have."""
    await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)
    await client.send("Orders")
    await client.pull("Orders")
    reply = await client.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RESET | place)
    assert reply.code == ResponseCode.INVALID_PARAMETER
    assert "queueId is" in (reply.remark or "")
    assert broker.context.offsets.offset_table == broker.context.offsets.reset_offset_table == {}


async def test_reset_wakes_a_held_pull(client: WireClient) -> None:
    await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)
    await client.send("Orders")
    await client.pull("Orders")
    opaque = await client.post(RequestCode.PULL_MESSAGE, _held("Orders", 1))
    await client.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RESET | {"timestamp": 1})
    assert (await client.reply(opaque)).remark == "OFFSET_RESET"


async def test_deleting_a_topic_wakes_its_held_pulls_and_no_others(
    broker: BrokerController, client: WireClient
) -> None:
    """Guards consumers of a deleted topic against waiting until their long poll ends: they are notified immediately."""
    for topic in ("Orders", "Others"):
        await client.send(topic)
        await client.pull(topic)
    opaque = [
        await client.post(
            RequestCode.PULL_MESSAGE, _held(topic, 1) | {"suspendTimeoutMillis": 60_000, "queueId": queue}
        )
        for topic, queue in (("Orders", 0), ("Orders", 1), ("Others", 0))
    ]
    offset = {"topic": "Orders", "queueId": 0}
    await client.ask(RequestCode.GET_MAX_OFFSET, offset)  # answered after them: they are held now
    assert broker.context.long_polling.held == 2, "a pull of a queue without messages is held at offset 0 only"
    assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "Orders"})).code == ResponseCode.SUCCESS
    assert (await client.reply(opaque[0], timeout=3)).code == ResponseCode.TOPIC_NOT_EXIST
    assert broker.context.long_polling.held == 1
    assert opaque[2] not in client.replies


def _held(topic: str, offset: int) -> dict[str, Any]:
    from tests.broker.wire_client import pull_ext  # noqa: PLC0415 - only here

    return pull_ext(topic, offset, sysFlag=6)


async def test_reset_by_the_clients(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, useServerSideResetOffset=False) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC)
        await client.send("Orders")
        await client.pull("Orders")
        reset = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
        assert (await client.ask(reset, RESET)).code == ResponseCode.CONSUMER_NOT_ONLINE
        await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
        assert (await client.ask(reset, RESET)).code == ResponseCode.SUCCESS
        request = await client.asked_for(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert request.is_oneway
        assert request.ext_fields() == {"topic": "Orders", "group": "G", "timestamp": "-1"}
        assert by_queue(lenient_json.loads(bytes(request.body))["offsetTable"]) == {0: 1, 1: 0}


# forwarded to clients


async def test_running_info(broker: BrokerController, client: WireClient) -> None:
    ask = {"consumerGroup": "G", "clientId": "c1", "jstackEnable": "true"}
    assert (await client.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, ask)).code == ResponseCode.SYSTEM_ERROR
    async with WireClient.connect(broker.endpoint) as member:
        await member.heartbeat("c1", consumers=[consumer("G", "Orders")])
        opaque = await client.post(RequestCode.GET_CONSUMER_RUNNING_INFO, ask)
        asked = await member.asked_for(RequestCode.GET_CONSUMER_RUNNING_INFO)
        assert asked.ext_fields() == ask
        await member.answer(asked, body=b'{"mqTable":{}}')
        reply = await client.reply(opaque)
        assert (reply.code, bytes(reply.body)) == (0, b'{"mqTable":{}}')


async def test_client_that_goes_away_before_it_answers(broker: BrokerController, client: WireClient) -> None:
    async with WireClient.connect(broker.endpoint) as member:
        await member.heartbeat("c1", consumers=[consumer("G", "Orders")])
        opaque = await client.post(RequestCode.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "G", "clientId": "c1"})
        await member.asked_for(RequestCode.GET_CONSUMER_RUNNING_INFO)
    assert (await client.reply(opaque)).code == ResponseCode.SYSTEM_ERROR


async def test_consume_directly(client: WireClient) -> None:
    sent = await client.send("Orders", b"one")
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    ext = {"consumerGroup": "G", "clientId": "c1", "msgId": sent.ext_fields()["msgId"], "topic": "Orders"}
    opaque = await client.post(RequestCode.CONSUME_MESSAGE_DIRECTLY, ext)
    asked = await client.asked_for(RequestCode.CONSUME_MESSAGE_DIRECTLY)
    fields = asked.ext_fields()
    assert (fields["brokerName"], fields["topicSysFlag"], fields["groupSysFlag"]) == ("broker-a", "0", "0")
    assert b"one" in bytes(asked.body)
    await client.answer(asked, body=b'{"consumeResult":"CR_SUCCESS"}')
    assert bytes((await client.reply(opaque)).body) == b'{"consumeResult":"CR_SUCCESS"}'
    for wrong in ("", "xx", "F" * 32):
        reply = await client.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, ext | {"msgId": wrong})
        assert reply.code == ResponseCode.SYSTEM_ERROR


async def test_consumer_status(client: WireClient) -> None:
    ext = {"topic": "Orders", "group": "G"}
    status = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
    assert (await client.ask(status, ext)).code == ResponseCode.CONSUMER_NOT_ONLINE
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    opaque = await client.post(status, ext)
    asked = await client.asked_for(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT)
    assert asked.ext_fields() == ext
    table = b'{{"brokerName":"broker-a","queueId":0,"topic":"Orders"}:5}'
    await client.answer(asked, body=b'{"messageQueueTable":' + table + b"}")
    reply = await client.reply(opaque)
    assert bytes(reply.body) == b'{"consumerTable":{"c1":' + table + b'},"messageQueueTable":{}}'


# offsets between groups


async def test_clone_and_correct(client: WireClient) -> None:
    for _ in range(3):
        await client.send("Orders")
    await client.pull("Orders", 2, sysFlag=5, commitOffset=2)
    ext = {"srcGroup": "G", "destGroup": "H", "topic": "", "offline": "true"}
    assert (await client.ask(RequestCode.CLONE_GROUP_OFFSET, ext)).code == 0
    query = {"consumerGroup": "H", "topic": "Orders", "queueId": 0}
    assert (await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, query)).ext_fields() == {"offset": "2"}
    ext = {"filterGroups": "H", "compareGroup": "H", "topic": "Orders"}
    found = body(await client.ask(RequestCode.QUERY_CORRECTION_OFFSET, ext))
    assert found == {"correctionOffsets": {"0": 2}}
    ext = {"srcGroup": "G", "destGroup": "a@b", "topic": "", "offline": "true"}
    assert (await client.ask(RequestCode.CLONE_GROUP_OFFSET, ext)).code == ResponseCode.INVALID_PARAMETER


# the broker itself


async def test_config(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        reply = await client.ask(RequestCode.GET_BROKER_CONFIG)
        lines = bytes(reply.body).decode().splitlines()
        assert "brokerName=broker-a" in lines
        assert lines == sorted(lines)
        assert json.loads(reply.ext_fields()["version"])["counter"] == 0
        update = RequestCode.UPDATE_BROKER_CONFIG
        assert (await client.ask(update, body=b"autoCreateTopicEnable=false\nnoSuchKey=1\n")).code == 0
        assert (await client.send("Made")).code == ResponseCode.TOPIC_NOT_EXIST
        reply = await client.ask(RequestCode.GET_BROKER_CONFIG)
        assert b"autoCreateTopicEnable=false\n" in bytes(reply.body)
        assert json.loads(reply.ext_fields()["version"])["counter"] == 1
        for text, code in (
            (b"brokerConfigPath=/x", ResponseCode.NO_PERMISSION),
            (b"configBlackList=", ResponseCode.NO_PERMISSION),
            (b"maxMessageSize=many", ResponseCode.INVALID_PARAMETER),
            (b"listenPort=1", ResponseCode.INVALID_PARAMETER),
        ):
            reply = await client.ask(update, body=text + b"\ntraceOn=false\n")
            assert reply.code == code, text
            assert text.partition(b"=")[0].decode() in str(reply.remark)
        assert (await client.send("TBW102")).ext_fields()["TRACE_ON"] == "true"
        assert (await client.ask(update, body=b"traceOn=false")).code == 0
        assert (await client.send("TBW102")).ext_fields()["TRACE_ON"] == "false"
        saved = (tmp_path / "config" / "broker.properties").read_text()
        assert "autoCreateTopicEnable=false" in saved
        assert "noSuchKey" not in saved


async def test_runtime_info(client: WireClient) -> None:
    await client.send("Orders")
    table = body(await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO))["table"]
    assert all(isinstance(value, str) for value in table.values())
    for name in [
        "brokerVersionDesc",
        "brokerActive",
        "putTps",
        "getTransferredTps",
        "sendThreadPoolQueueSize",
        "pullThreadPoolQueueSize",
        "ackThreadPoolQueueSize",
        "sendThreadPoolQueueHeadWaitTimeMills",
        "pullThreadPoolQueueHeadWaitTimeMills",
        "ackThreadPoolQueueHeadWaitTimeMills",
        "pageCacheLockTimeMills",
        "earliestMessageTimeStamp",
        "commitLogDiskRatio",
        "timerReadBehind",
        "timerOffsetBehind",
        "timerCongestNum",
        "timerEnqueueTps",
        "timerDequeueTps",
        "msgPutTotalYesterdayMorning",
        "msgPutTotalTodayMorning",
        "msgPutTotalTodayNow",
        "msgGetTotalYesterdayMorning",
        "msgGetTotalTodayMorning",
        "msgGetTotalTodayNow",
        "dispatchBehindBytes",
        "commitLogMaxOffset",
        "commitLogMinOffset",
        "putMessageTimesTotal",
        "runtime",
        "bootTimestamp",
        "scheduleMessageOffset_1",
    ]:
        assert name in table, name
    assert table["msgPutTotalTodayNow"] == "1"
    assert len(table["putTps"].split()) == 3


async def test_more_units_of_a_queue_than_a_reply_shows_are_refused_and_not_left_out(
    client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards 321 against an unbounded reply. The text of many units is assembled from several reads."""
    monkeypatch.setattr(queue_admin, "_MOST_UNITS", 5)
    monkeypatch.setattr(queue_admin, "_UNITS_AT_ONCE", 2)
    for _ in range(6):
        await client.send("Orders")
    ext = {"topic": "Orders", "queueId": 0, "index": 0, "count": 1_000_000}
    reply = await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext)
    assert reply.code == ResponseCode.INVALID_PARAMETER
    assert reply.remark == "queue 0 of Orders has 6 units from 0 on: request at most 5"
    found = body(await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext | {"index": 1}))
    offsets = [unit["physicOffset"] for unit in found["queueData"]]
    assert len(offsets) == 5
    assert offsets == sorted(set(offsets))
    for index in (-1, 6, 7):
        found = body(await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext | {"index": index}))
        assert found["queueData"] == []


TEXTS = st.text('{}"\\a', max_size=6)
TABLES = st.recursive(TEXTS | st.integers(), lambda inner: st.dictionaries(TEXTS, inner))


@given(TABLES)
def test_the_inner_table_of_a_clients_answer_is_found_whatever_stands_in_it(table: object) -> None:
    """Guards 223: the text is scanned in windows, and braces and quotes within strings are ignored."""
    text = json.dumps({"k": table}).encode()
    before = b'{"a":1,"messageQueueTable":'
    for window in (1, 2, 7, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client_admin, "_WINDOW", window)
            (*_, (start, end)) = client_admin.inner_table(before + text + b',"z":"}"}')
        assert (before + text)[start:end] == text
    assert [pair for pair in client_admin.inner_table(before + text[:-1]) if pair != (0, 0)] == []


async def test_stats_data(client: WireClient) -> None:
    ext = {"statsName": "TOPIC_PUT_NUMS", "statsKey": "Orders"}
    assert (await client.ask(RequestCode.VIEW_BROKER_STATS_DATA, ext)).code == ResponseCode.SYSTEM_ERROR
    await client.send("Orders")
    await client.pull("Orders")
    data = body(await client.ask(RequestCode.VIEW_BROKER_STATS_DATA, ext))
    assert data["statsMinute"]["sum"] == data["statsDay"]["sum"] == 1
    ext = {"statsName": "GROUP_GET_NUMS", "statsKey": "Orders@G"}
    assert body(await client.ask(RequestCode.VIEW_BROKER_STATS_DATA, ext))["statsHour"]["sum"] == 1


async def test_units_of_a_queue(client: WireClient) -> None:
    ext = {"topic": "Orders", "queueId": 0, "index": 0, "count": 10}
    assert (await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext)).code == ResponseCode.SYSTEM_ERROR
    for tag in ("a", "b"):
        await client.send("Orders", properties={"TAGS": tag})
    messages = await client.pull_messages("Orders")
    found = body(await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext))
    assert (found["minQueueIndex"], found["maxQueueIndex"]) == (0, 2)
    assert found["queueData"] == [
        {"physicOffset": m.commit_log_offset, "physicSize": m.size, "tagsCode": tag}
        for m, tag in zip(messages, (97, 98), strict=True)
    ]
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    found = body(await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext | {"index": 1, "consumerGroup": "G"}))
    assert len(found["queueData"]) == 1
    assert found["subscriptionData"]["topic"] == "Orders"
