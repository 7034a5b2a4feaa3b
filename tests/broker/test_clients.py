"""Heartbeats, members, notifications, locks, offsets, queries, messages sent back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import pytest
import trio

from tests.broker.wire_client import WireClient, consumer, properties_text
from trimq.broker.controller import BrokerController
from trimq.broker.services import producers
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.testing import running_broker
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import ONEWAY_FLAG
from trimq.protocol.message import decode_message, decode_messages
from trimq.protocol.message_id import decode_offset_id

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
OFFSET = {"consumerGroup": "G", "topic": "Orders", "queueId": 0}


# heartbeats


async def test_heartbeat_reply(client: WireClient) -> None:
    reply = await client.heartbeat("c1", producers=["P"], consumers=[consumer("G", "Orders")])
    assert reply.code == ResponseCode.SUCCESS
    ext = reply.ext_fields()
    assert ext["IS_SUPPORT_HEART_BEAT_V2"] == "true"
    assert ext["TRIMQ_MSGPACK"] == "true"


async def test_retry_topic_exists_right_after_the_heartbeat(client: WireClient) -> None:
    """Trap 8."""
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    reply = await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "%RETRY%G"})
    config = json.loads(bytes(reply.body))
    assert (config["readQueueNums"], config["writeQueueNums"], config["perm"]) == (1, 1, 6)


@pytest.mark.parametrize("how", ["heartbeat", "send", "sent back"])
async def test_unit_mode_marks_the_retry_topic(client: WireClient, how: str) -> None:
    """Trap 13."""
    await client.send("Orders")
    (message,) = await client.pull_messages("Orders")
    if how == "heartbeat":
        await client.heartbeat("c1", consumers=[consumer("G", "Orders", unitMode=True)])
    elif how == "send":
        await client.send("%RETRY%G", unit_mode="true")
    else:
        assert await back(client, message.commit_log_offset, unitMode="true") == ResponseCode.SUCCESS
    reply = await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "%RETRY%G"})
    assert json.loads(bytes(reply.body))["topicSysFlag"] == 2


async def test_fingerprints(client: WireClient) -> None:
    async def change(fingerprint: int, **more: Any) -> str:
        reply = await client.heartbeat(
            "c1", consumers=[consumer("G", "Orders")], heartbeatFingerprint=fingerprint, **more
        )
        return reply.ext_fields()["IS_SUB_CHANGE"]

    assert [await change(f) for f in (7, 7, 8, 8)] == ["false", "false", "true", "false"]
    reply = await client.heartbeat(
        "c1",
        consumers=[consumer("G", "Orders", subscriptionDataSet=[])],
        heartbeatFingerprint=8,
        withoutSub=True,
    )
    assert reply.ext_fields()["IS_SUB_CHANGE"] == "false"
    assert (await client.pull("Orders", sysFlag=0)).code == ResponseCode.TOPIC_NOT_EXIST
    await client.send("Orders")
    assert (await client.pull("Orders", sysFlag=0)).code == ResponseCode.SUCCESS


async def test_fields_that_node_leaves_out(client: WireClient) -> None:
    group = consumer("G", "Orders", subscriptionDataSet=[{"topic": "Orders", "subString": "*", "subVersion": 1}])
    assert (await client.heartbeat("c1", consumers=[group])).code == ResponseCode.SUCCESS
    await client.send("Orders")
    assert (await client.pull("Orders", sysFlag=2)).code == ResponseCode.SUCCESS


async def test_members_and_notifications(broker: BrokerController, client: WireClient) -> None:
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    first = await client.asked_for(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert first.is_oneway
    assert first.ext_fields() == {"consumerGroup": "G"}
    async with WireClient.connect(broker.endpoint) as other:
        await other.heartbeat("c2", consumers=[consumer("G", "Orders")])
        await client.asked_for(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
        await other.asked_for(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
        reply = await client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
        assert sorted(json.loads(bytes(reply.body))["consumerIdList"]) == ["c1", "c2"]
    await client.asked_for(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    reply = await client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
    assert json.loads(bytes(reply.body))["consumerIdList"] == ["c1"]


async def test_the_producer_groups_of_a_connection_are_bounded(
    broker: BrokerController, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be in one needs no permission, and each takes memory."""
    monkeypatch.setattr(producers, "MOST_GROUPS", 3)
    table = broker.context.producers.table
    assert (await client.heartbeat("c1", producers=["A", "B", "C"])).code == ResponseCode.SUCCESS
    assert (await client.heartbeat("c1", producers=["A", "B", "C"])).code == ResponseCode.SUCCESS
    for names, code in ((["A", "D"], ResponseCode.SYSTEM_BUSY), (["A" * 256], ResponseCode.SYSTEM_BUSY)):
        assert (await client.heartbeat("c1", producers=names)).code == code
    assert list(table) == ["A", "B", "C"]
    await client.ask(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "producerGroup": "A"})
    assert (await client.heartbeat("c1", producers=["D" * 256])).code == ResponseCode.INVALID_PARAMETER
    assert (await client.heartbeat("c1", producers=["D" * 255])).code == ResponseCode.SUCCESS
    assert list(table) == ["B", "C", "D" * 255]


async def test_group_without_members_is_an_error(client: WireClient) -> None:
    """Trap 5."""
    reply = await client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
    assert (reply.code, reply.remark) == (ResponseCode.SYSTEM_ERROR, "no consumer for this group, G")


async def test_unregister(client: WireClient) -> None:
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")], producers=["P"])
    ext = {"clientID": "c1", "producerGroup": "P", "consumerGroup": "G"}
    assert (await client.ask(RequestCode.UNREGISTER_CLIENT, ext)).code == ResponseCode.SUCCESS
    reply = await client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
    assert reply.code == ResponseCode.SYSTEM_ERROR
    reply = await client.ask(RequestCode.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "P"})
    assert reply.code == ResponseCode.SYSTEM_ERROR


async def test_clients_that_come_and_go_on_one_connection(broker: BrokerController, client: WireClient) -> None:
    (connection,) = broker.reactor.connections.values()
    ext = {"clientID": "c1", "producerGroup": "P", "consumerGroup": "G"}
    listeners = []
    for _ in range(3):
        await client.heartbeat("c1", consumers=[consumer("G", "Orders")], producers=["P"])
        await client.ask(RequestCode.UNREGISTER_CLIENT, ext)
        listeners.append(len(connection.on_close))
    assert listeners == [listeners[0]] * 3


@pytest.mark.parametrize(
    ("kind", "code"),
    [("TAG", ResponseCode.SUCCESS), (None, ResponseCode.SUCCESS), ("SQL92", ResponseCode.SYSTEM_ERROR)],
)
async def test_client_config(client: WireClient, kind: str | None, code: int) -> None:
    body = {"clientId": "c", "group": "G", "subscriptionData": {"topic": "T", "subString": "*", "expressionType": kind}}
    assert (await client.ask(RequestCode.CHECK_CLIENT_CONFIG, body=json.dumps(body).encode())).code == code


@pytest.mark.parametrize("code", [RequestCode.HEART_BEAT, RequestCode.LOCK_BATCH_MQ, RequestCode.CHECK_CLIENT_CONFIG])
@pytest.mark.parametrize("body", [b"", b"junk", b"[]", b'{"clientID":7'])
async def test_broken_bodies(client: WireClient, code: int, body: bytes) -> None:
    assert (await client.ask(code, body=body)).code == ResponseCode.SYSTEM_ERROR
    assert (await client.send("Orders")).code == ResponseCode.SUCCESS


# locks


async def test_locks(client: WireClient) -> None:
    def body(client_id: str, *queues: int) -> bytes:
        mq_set = [{"topic": "Orders", "brokerName": "broker-a", "queueId": n} for n in queues]
        return json.dumps({"consumerGroup": "G", "clientId": client_id, "mqSet": mq_set}).encode()

    async def lock(client_id: str, *queues: int) -> list[int]:
        reply = await client.ask(RequestCode.LOCK_BATCH_MQ, body=body(client_id, *queues))
        return [queue["queueId"] for queue in json.loads(bytes(reply.body))["lockOKMQSet"]]

    assert await lock("c1", 0, 1) == [0, 1]
    assert await lock("c2", 1, 2) == [2]
    await client.ask(RequestCode.UNLOCK_BATCH_MQ, body=body("c1", 1))
    assert await lock("c2", 1) == [1]
    opaque = await client.post(RequestCode.UNLOCK_BATCH_MQ, body=body("c1", 0), flag=ONEWAY_FLAG)
    assert await lock("c2", 0) == [0]
    assert opaque not in client.replies


# offsets


async def test_offset_of_a_new_group(client: WireClient) -> None:
    """A young queue is read from its start; a group gets QUERY_NOT_FOUND for a queue that does not exist (trap 5)."""
    assert (await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, OFFSET)).code == ResponseCode.QUERY_NOT_FOUND
    await client.send("Orders")
    reply = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, OFFSET)
    assert (reply.code, reply.ext_fields()) == (ResponseCode.SUCCESS, {"offset": "0"})
    reply = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, OFFSET | {"setZeroIfNotFound": "false"})
    assert reply.code == ResponseCode.QUERY_NOT_FOUND
    reply = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, OFFSET | {"queueId": 1})
    assert reply.code == ResponseCode.QUERY_NOT_FOUND


async def test_commits(client: WireClient) -> None:
    update = RequestCode.UPDATE_CONSUMER_OFFSET
    assert (await client.ask(update, OFFSET | {"commitOffset": 1})).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    assert (await client.ask(update, OFFSET | {"commitOffset": 1})).code == ResponseCode.TOPIC_NOT_EXIST
    await client.send("Orders")
    for offset in (1, 100, 0):
        assert (await client.ask(update, OFFSET | {"commitOffset": offset})).code == ResponseCode.SUCCESS
        reply = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, OFFSET)
        assert reply.ext_fields() == {"offset": str(offset)}
    await client.post(update, OFFSET | {"commitOffset": 7}, flag=ONEWAY_FLAG)
    assert (await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, OFFSET)).ext_fields() == {"offset": "7"}
    await client.ask(update, OFFSET | {"commitOffset": -1})
    reply = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, OFFSET | {"setZeroIfNotFound": "false"})
    assert reply.code == ResponseCode.QUERY_NOT_FOUND
    stored = json.loads(bytes((await client.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)).body))
    assert stored["offsetTable"]["Orders@G"] == {"0": -1}


@pytest.mark.parametrize(
    ("queue", "offset", "named"),
    [
        (-3, 1, "queueId is -3"),
        (10**9, 1, "queueId is 1000000000; the topic Orders has the queues 0 to 3"),
        (4, 1, "queueId is 4"),
        (0, -7, "commitOffset is -7; it must be from -1 to 461168601842738790"),
        (0, 1 << 62, "commitOffset is 4611686018427387904"),
        (0, 461168601842738791, "commitOffset is 461168601842738791"),
    ],
)
async def test_commits_that_cannot_be(
    broker: BrokerController, client: WireClient, queue: int, offset: int, named: str
) -> None:
    """Guards that no commit, one-way or not, stores an impossible queue or offset."""
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    await client.send("Orders")
    commit = OFFSET | {"queueId": queue, "commitOffset": offset}
    reply = await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    assert reply.code == ResponseCode.INVALID_PARAMETER
    assert named in (reply.remark or "")
    await client.post(RequestCode.UPDATE_CONSUMER_OFFSET, commit, flag=ONEWAY_FLAG)
    await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, OFFSET | {"commitOffset": 461168601842738790})
    assert broker.context.offsets.offset_table == {"Orders@G": {0: 461168601842738790}}
    assert broker.context.offsets.refused == 2


async def test_commits_in_queues_that_a_topic_had_before(broker: BrokerController, client: WireClient) -> None:
    """Guards consumers still working on a queue when its topic gets fewer queues, and consumers of retry topics."""
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    await client.send("Orders", queue_id=3)
    config = broker.context.topics.table["Orders"]
    broker.context.topics.put(type(config)(topic_name="Orders", read_queue_nums=1, write_queue_nums=2))
    update = RequestCode.UPDATE_CONSUMER_OFFSET
    codes = [
        (await client.ask(update, OFFSET | {"queueId": queue, "commitOffset": 1})).code for queue in (0, 1, 2, 3, 4)
    ]
    assert codes == [0, 0, 0, 0, ResponseCode.INVALID_PARAMETER]
    retry = OFFSET | {"topic": "%RETRY%G", "commitOffset": 1}
    assert (await client.ask(update, retry)).code == ResponseCode.SUCCESS
    assert (await client.ask(update, retry | {"queueId": 1})).code == ResponseCode.INVALID_PARAMETER


async def test_groups_are_bounded(tmp_path: Path) -> None:
    """Guards the broker's memory and state files against names that a client makes up, on every path they come in."""
    async with (
        running_broker(tmp_path, maxOffsetGroups=2, enableCreateSysGroup=False) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        groups, offsets = broker.context.groups, broker.context.offsets
        await client.send("Orders")
        for name in ("A", "B"):
            assert (await client.pull("Orders", group=name, sysFlag=5, commitOffset=1)).code == ResponseCode.SUCCESS
        refused = await client.pull("Orders", group="C", sysFlag=5, commitOffset=1)
        assert refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
        assert "maxOffsetGroups" in (refused.remark or "")
        await client.heartbeat("c1", consumers=[consumer("C", "Orders")])
        (message,) = await client.pull_messages("Orders", group="A")
        sent_back = await back(client, message.commit_log_offset, group="C")
        created = await client.ask(
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=json.dumps({"groupName": "C"}).encode()
        )
        assert (sent_back, created.code) == (ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, ResponseCode.SYSTEM_BUSY)
        changed = await client.ask(
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=json.dumps({"groupName": "B"}).encode()
        )
        assert changed.code == ResponseCode.SUCCESS
        clone = {"srcGroup": "A", "destGroup": "C", "topic": "", "offline": "true"}
        assert (await client.ask(RequestCode.CLONE_GROUP_OFFSET, clone)).code == ResponseCode.SYSTEM_BUSY
        assert (set(groups.table), set(offsets.offset_table)) == ({"A", "B"}, {"Orders@A", "Orders@B"})
        assert "%RETRY%C" not in broker.context.topics.table
        assert groups.refused == 4

        # a removed group makes space for another one; its offsets, if they are retained, do not
        await client.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "B", "cleanOffset": "false"})
        assert "Orders@B" not in offsets.pull_offset_table
        assert (await client.pull("Orders", group="C")).code == ResponseCode.SUCCESS
        commit = OFFSET | {"consumerGroup": "C", "commitOffset": 1}
        busy = await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
        assert (busy.code, "maxOffsetGroups" in (busy.remark or "")) == (ResponseCode.SYSTEM_BUSY, True)
        assert (await client.pull("Orders", group="C", sysFlag=5, commitOffset=1)).code == ResponseCode.SYSTEM_BUSY
        reset = {"topic": "Orders", "group": "C", "timestamp": -1, "isForce": "true"}
        assert (await client.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)).code == ResponseCode.SYSTEM_BUSY
        assert offsets.refused == 2
        assert set(offsets.offset_table) == {"Orders@A", "Orders@B"}
        assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit | {"consumerGroup": "A"})).code == 0


async def test_limits_of_queues(client: WireClient) -> None:
    where = {"topic": "Orders", "queueId": 0}
    for code in (RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET):
        assert (await client.ask(code, where)).ext_fields() == {"offset": "0"}
    reply = await client.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, where)
    assert reply.ext_fields() == {"timestamp": "-1"}
    for _ in range(3):
        await client.send("Orders")
    first = (await client.pull_messages("Orders"))[0]
    assert (await client.ask(RequestCode.GET_MAX_OFFSET, where)).ext_fields() == {"offset": "3"}
    assert (await client.ask(RequestCode.GET_MIN_OFFSET, where)).ext_fields() == {"offset": "0"}
    reply = await client.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, where)
    assert reply.ext_fields() == {"timestamp": str(first.store_timestamp)}


async def test_offset_by_time(client: WireClient) -> None:
    search = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    where = {"topic": "Orders", "queueId": 0}
    assert (await client.ask(search, where | {"timestamp": 1})).ext_fields() == {"offset": "0"}
    for _ in range(3):
        await client.send("Orders")
    assert (await client.ask(search, where | {"timestamp": 1})).ext_fields() == {"offset": "0"}
    far = where | {"timestamp": 32_503_680_000_000}
    assert (await client.ask(search, far)).ext_fields() == {"offset": "3"}
    last = (await client.pull_messages("Orders"))[-1].store_timestamp
    reply = await client.ask(search, where | {"timestamp": last, "boundaryType": "UPPER"})
    assert reply.ext_fields() == {"offset": "2"}


async def test_offsets_survive_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        await client.send("Orders")
        await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
        await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, OFFSET | {"commitOffset": 1})
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        assert (await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, OFFSET)).ext_fields() == {"offset": "1"}
        assert len(await client.pull_messages("Orders")) == 1
        assert (await client.send("Orders")).ext_fields()["queueOffset"] == "1"


# queries


async def test_query_by_key(client: WireClient) -> None:
    unique = "7F0000010001AABBCCDD000000010001"
    await client.send("Orders", b"one", {"KEYS": "k1 k2", "UNIQ_KEY": unique})
    await client.send("Orders", b"two", {"KEYS": "k2"}, queue_id=1)
    await client.send("Others", b"three", {"KEYS": "k2"})

    async def query(key: str, **more: object) -> list[bytes]:
        ext = {"topic": "Orders", "key": key, "maxNum": 10, "beginTimestamp": 0, "endTimestamp": 2**62} | more
        reply = await client.ask(RequestCode.QUERY_MESSAGE, ext)
        if reply.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        assert int(reply.ext_fields()["indexLastUpdateTimestamp"]) > 0
        assert "indexLastUpdatePhyoffset" in reply.ext_fields()
        return [message.body for message in decode_messages(bytes(reply.body))]

    assert await query("k1") == [b"one"]
    assert sorted(await query("k2")) == [b"one", b"two"]
    assert len(await query("k2", maxNum=1)) == 1
    assert await query(unique, _UNIQUE_KEY_QUERY="true", maxNum=0) == [b"one"]
    assert await query("k3") == []
    assert await query("k1", endTimestamp=1) == []


@pytest.mark.parametrize("how", ["short", "long", "batch"])
async def test_only_spaces_stand_between_keys(client: WireClient, how: str) -> None:
    """Both live and after a start that rebuilds the index; an ideographic space is a character like any other."""
    keys = " k1  k2\u3000b \tc "
    if how == "batch":
        item = properties_text({"KEYS": keys}).encode()
        reply = await client.send("Orders", encode_batch([(0, b"x", item)]), batch="true", code=320)
    else:
        await client.send("Orders")
        properties = {"KEYS": keys} | ({"UNIQ_KEY": "U1"} if how == "short" else {})
        reply = await client.send("Orders", b"x", properties)
    assert reply.code == ResponseCode.SUCCESS
    found = {}
    for key in ("k1", "k2\u3000b", "\tc", "k2", "b", "c", ""):
        ext = {"topic": "Orders", "key": key, "maxNum": 10, "beginTimestamp": 0, "endTimestamp": 2**62}
        found[key] = (await client.ask(RequestCode.QUERY_MESSAGE, ext)).code == ResponseCode.SUCCESS
    assert [key for key, there in found.items() if there] == ["k1", "k2\u3000b", "\tc"]


async def test_view_by_id(client: WireClient) -> None:
    reply = await client.send("Orders", b"one")
    _, offset = decode_offset_id(reply.ext_fields()["msgId"])
    found = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": offset})
    assert decode_message(bytes(found.body)).body == b"one"
    for wrong in (offset + 1, 10**12, -1):
        reply = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": wrong})
        assert reply.code == ResponseCode.SYSTEM_ERROR


# sent back


async def back(client: WireClient, offset: int, **more: object) -> int:
    ext = {"offset": offset, "group": "G", "delayLevel": 0, "originTopic": "Orders"} | more
    return (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext)).code


async def test_sent_back_comes_again_later(client: WireClient) -> None:
    await client.send("Orders", b"one", {"TAGS": "t", "a": "b"})
    (original,) = await client.pull_messages("Orders")
    assert await back(client, original.commit_log_offset, delayLevel=1) == ResponseCode.SUCCESS
    (again,) = await client.pull_messages("%RETRY%G", sysFlag=6)
    assert again.body == b"one"
    assert again.reconsume_times == 1
    assert again.born_timestamp == original.born_timestamp
    assert again.born_host == original.born_host
    properties = again.properties
    assert properties["RETRY_TOPIC"] == "Orders"
    assert properties["ORIGIN_MESSAGE_ID"] == original.offset_message_id
    assert (properties["WAIT"], properties["DELAY"], properties["a"]) == ("false", "1", "b")
    assert await back(client, again.commit_log_offset, maxReconsumeTimes=2) == ResponseCode.SUCCESS
    (parked,) = await client.pull_messages("SCHEDULE_TOPIC_XXXX", queueId=3)
    assert parked.properties["DELAY"] == "4"
    assert parked.properties["ORIGIN_MESSAGE_ID"] == original.offset_message_id


@pytest.mark.parametrize("changes", [{"delayLevel": -1}, {"maxReconsumeTimes": 0}])
async def test_sent_back_for_the_last_time(client: WireClient, changes: dict[str, object]) -> None:
    await client.send("Orders", b"one")
    (original,) = await client.pull_messages("Orders")
    assert await back(client, original.commit_log_offset, **changes) == ResponseCode.SUCCESS
    (dead,) = await client.pull_messages("%DLQ%G")
    assert dead.topic == "%DLQ%G"
    assert dead.reconsume_times == 1
    assert dead.properties["DELAY"] == "0"
    assert dead.properties["RETRY_TOPIC"] == "Orders"


async def test_sent_back_refusals(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, autoCreateSubscriptionGroup=False) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        assert await back(client, 0) == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
        put = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await client.ask(put, body=b'{"groupName":"G","retryQueueNums":0}')
        assert await back(client, 0) == ResponseCode.SUCCESS
        await client.ask(put, body=b'{"groupName":"G","retryQueueNums":2}')
        for offset in (0, 12345, -1, 2**62):
            assert await back(client, offset) == ResponseCode.SYSTEM_ERROR


class DiskThatWaits(RealDisk):
    """Holds writes of topics.json while ``gate`` is an event that is not set."""

    gate: trio.Event | None = None
    waiting = 0

    async def run(self, function: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        if self.gate is not None and any(str(argument).endswith("topics.json") for argument in arguments):
            self.waiting += 1
            await self.gate.wait()
        return await super().run(function, *arguments)


async def test_a_heartbeat_is_answered_when_the_retry_topic_is_on_disk(tmp_path: Path) -> None:
    # guards the rule that a reply that depends on a new topic is sent after the topics file has been replaced
    disk = DiskThatWaits()
    async with running_broker(tmp_path, disk=disk) as broker, WireClient.connect(broker.endpoint) as client:
        disk.gate = trio.Event()
        data = {"clientID": "c1", "producerDataSet": [], "consumerDataSet": [consumer("Fresh", "Orders")]}
        opaque = await client.post(RequestCode.HEART_BEAT, body=json.dumps(data).encode())
        try:
            with trio.fail_after(10):
                while not disk.waiting:
                    await trio.lowlevel.checkpoint()
            await client.ask(
                RequestCode.GET_MAX_OFFSET, {"topic": "Orders", "queueId": 0}
            )  # this request is answered first
            assert "%RETRY%Fresh" in broker.context.topics.table
            assert opaque not in client.replies
        finally:
            disk.gate.set()
        assert (await client.reply(opaque)).code == 0
