"""Pulling: statuses, next offsets, the order of checks, long polls."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.wire_client import WireClient, consumer, pull_ext
from tests.ports import free_port
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import ONEWAY_FLAG, Encoding, RemotingCommand
from trimq.protocol.message import decode_messages

MANDATORY = {"suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset"}


def brief(reply: RemotingCommand) -> tuple[int, str | None, str]:
    ext = reply.ext_fields()
    assert ext.keys() >= MANDATORY  # trap 4
    return reply.code, reply.remark, ext["nextBeginOffset"]


async def fill(client: WireClient, topic: str = "Orders", count: int = 5, **more: Any) -> None:
    for n in range(count):
        assert (await client.send(topic, b"body-%d" % n, **more)).code == 0


async def test_found(client: WireClient) -> None:
    await fill(client)
    reply = await client.pull("Orders", 1, maxMsgNums=3)
    assert brief(reply) == (ResponseCode.SUCCESS, "FOUND", "4")
    ext = reply.ext_fields()
    assert (ext["minOffset"], ext["maxOffset"], ext["suggestWhichBrokerId"]) == ("0", "5", "0")
    assert (ext["topicSysFlag"], ext["groupSysFlag"]) == ("0", "0")
    assert [message.queue_offset for message in decode_messages(bytes(reply.body))] == [1, 2, 3]


@pytest.mark.parametrize("encoding", list(Encoding))
async def test_encodings(broker: BrokerController, encoding: Encoding) -> None:
    async with WireClient.connect(broker.endpoint, encoding) as client:
        await fill(client, count=2)
        assert brief(await client.pull("Orders"))[1:] == ("FOUND", "2")
        assert brief(await client.pull("Orders", 2))[:2] == (ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE")


async def test_at_most_32_messages(client: WireClient) -> None:
    await fill(client, count=40)
    assert len(await client.pull_messages("Orders", maxMsgNums=100)) == 32


async def test_bytes_that_the_client_takes(client: WireClient) -> None:
    await fill(client, count=10)
    assert len(await client.pull_messages("Orders", maxMsgBytes=500)) == 2
    assert len(await client.pull_messages("Orders", maxMsgBytes=1)) == 1


@pytest.mark.parametrize(
    ("offset", "code", "status", "following"),
    [
        (5, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", "5"),
        (6, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", "5"),
        (1000, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", "5"),
        (-1, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL", "0"),
    ],
)
async def test_outside_of_the_queue(client: WireClient, offset: int, code: int, status: str, following: str) -> None:
    await fill(client)
    assert brief(await client.pull("Orders", offset)) == (code, status, following)


@pytest.mark.parametrize(("offset", "code"), [(0, ResponseCode.PULL_NOT_FOUND), (3, ResponseCode.PULL_OFFSET_MOVED)])
async def test_queue_without_messages(client: WireClient, offset: int, code: int) -> None:
    await fill(client)
    reply = await client.pull("Orders", offset, queueId=1)
    assert brief(reply)[0] == code
    assert brief(reply)[1] in ("NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE")
    assert brief(reply)[2] == "0"


async def test_tags(client: WireClient) -> None:
    for tag in ("a", "b", "c", "a"):
        await client.send("Orders", tag.encode(), {"TAGS": tag})
    messages = await client.pull_messages("Orders", subscription="a || b")
    assert [message.body for message in messages] == [b"a", b"b", b"a"]
    assert brief(await client.pull("Orders", subscription="a"))[2] == "4"
    assert brief(await client.pull("Orders", subscription="z")) == (
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        "NO_MATCHED_MESSAGE",
        "4",
    )


# checks, in their order


@pytest.mark.parametrize(
    ("settings", "changes", "code"),
    [
        ({"brokerPermission": 2}, {}, ResponseCode.NO_PERMISSION),
        ({"autoCreateSubscriptionGroup": False}, {}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        ({}, {"topic": "Nowhere"}, ResponseCode.TOPIC_NOT_EXIST),
        ({}, {"queueId": 4}, ResponseCode.INVALID_PARAMETER),
        ({}, {"queueId": -1}, ResponseCode.INVALID_PARAMETER),
        ({}, {"subscription": "||"}, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ({}, {"expressionType": "SQL92", "subscription": "a > 1"}, ResponseCode.SYSTEM_ERROR),
        ({}, {"sysFlag": 0}, ResponseCode.SUBSCRIPTION_NOT_EXIST),
        ({}, {"queueOffset": None}, ResponseCode.SYSTEM_ERROR),
        ({}, {"queueOffset": "many"}, ResponseCode.SYSTEM_ERROR),
    ],
)
async def test_refusals(tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], code: int) -> None:
    async with running_broker(tmp_path, **settings) as broker, WireClient.connect(broker.endpoint) as client:
        await fill(client)
        reply = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("Orders") | changes)
        assert reply.code == code, reply.remark
        if code == ResponseCode.NO_PERMISSION:
            assert reply.ext_fields() == {"forbiddenType": "1"}


async def test_group_that_may_not_consume(client: WireClient) -> None:
    await fill(client)
    body = json.dumps({"groupName": "G", "consumeEnable": False}).encode()
    await client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
    reply = await client.pull("Orders")
    assert (reply.code, reply.ext_fields()) == (ResponseCode.NO_PERMISSION, {"forbiddenType": "2"})


async def test_topic_that_hands_out_nothing(client: WireClient) -> None:
    ext = {
        "topic": "WriteOnly",
        "defaultTopic": "TBW102",
        "readQueueNums": 1,
        "writeQueueNums": 1,
        "perm": 2,
        "topicFilterType": "SINGLE_TAG",
    }
    await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)
    reply = await client.pull("WriteOnly")
    assert (reply.code, reply.ext_fields()) == (ResponseCode.NO_PERMISSION, {"forbiddenType": "3"})


async def test_subscription_of_the_heartbeat(client: WireClient) -> None:
    """Trap 6: before the heartbeat took effect 24 and 25 are the answers, never 19."""
    await client.send("Orders", b"a", {"TAGS": "a"})
    await client.send("Orders", b"b", {"TAGS": "b"})
    plain: dict[str, Any] = {"sysFlag": 2, "subscription": None}
    assert (await client.pull("Orders", **plain)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    await client.heartbeat("c1", consumers=[consumer("G", "Orders", "b")])
    messages = await client.pull_messages("Orders", **plain)
    assert [message.body for message in messages] == [b"b"]
    assert (await client.pull("%RETRY%G", **plain)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert (await client.pull("Orders", subVersion=2, **plain)).code == ResponseCode.SUBSCRIPTION_NOT_LATEST


async def test_broadcasting_that_is_not_allowed(client: WireClient) -> None:
    await fill(client)
    body = json.dumps({"groupName": "G", "consumeBroadcastEnable": False}).encode()
    await client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
    await client.heartbeat("c1", consumers=[consumer("G", "Orders", messageModel="BROADCASTING")])
    reply = await client.pull("Orders", sysFlag=0)
    assert (reply.code, reply.ext_fields()) == (ResponseCode.NO_PERMISSION, {"forbiddenType": "4"})


async def test_group_that_may_not_read_the_topic(client: WireClient) -> None:
    await fill(client)
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    ext = {"group": "G", "topic": "Orders", "readable": "false"}
    reply = await client.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, ext)
    assert json.loads(bytes(reply.body)) == {"group": "G", "topic": "Orders", "readable": False}
    refused = await client.pull("Orders", sysFlag=0)
    assert (refused.code, refused.ext_fields()) == (ResponseCode.NO_PERMISSION, {"forbiddenType": "5"})
    await client.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, ext | {"readable": "true"})
    assert (await client.pull("Orders", sysFlag=0)).code == ResponseCode.SUCCESS


# commits


async def test_commit_flag(client: WireClient) -> None:
    await fill(client)
    await client.pull("Orders", 2, sysFlag=5, commitOffset=2)
    query = {"consumerGroup": "G", "topic": "Orders", "queueId": 0}
    reply = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, query)
    assert reply.ext_fields() == {"offset": "2"}
    await client.pull("Orders", 3, sysFlag=4, commitOffset=4)
    assert (await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, query)).ext_fields() == {"offset": "2"}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("offset", [-7, 1 << 62])
async def test_a_commit_flag_with_an_offset_that_cannot_be(
    broker: BrokerController, client: WireClient, offset: int, again: bool
) -> None:
    """Guards that a pull cannot commit what UPDATE_CONSUMER_OFFSET refuses, also if the fast path knows the group."""
    await fill(client)
    if again:
        await client.pull("Orders", 2, sysFlag=5, commitOffset=2)
    reply = await client.pull("Orders", 2, sysFlag=5, commitOffset=offset)
    assert reply.code == ResponseCode.INVALID_PARAMETER
    assert str(offset) in (reply.remark or "")
    assert broker.context.offsets.offset_table.get("Orders@G") == ({0: 2} if again else None)
    assert broker.context.offsets.refused == 1
    assert (await client.pull("Orders", 2, sysFlag=4, commitOffset=offset)).code == ResponseCode.SUCCESS


# long polls


async def test_held_until_a_message_comes(broker: BrokerController, client: WireClient) -> None:
    await fill(client)
    opaque = await client.post(RequestCode.PULL_MESSAGE, pull_ext("Orders", 5, sysFlag=6))
    async with WireClient.connect(broker.endpoint) as producer:
        await client.pull("Orders")
        assert opaque not in client.replies
        await producer.send("Orders", b"news")
        reply = await client.reply(opaque)
        assert brief(reply) == (ResponseCode.SUCCESS, "FOUND", "6")
        assert decode_messages(bytes(reply.body))[0].body == b"news"


async def test_held_until_a_tag_fits(broker: BrokerController, client: WireClient) -> None:
    await fill(client, count=1)
    opaque = await client.post(RequestCode.PULL_MESSAGE, pull_ext("Orders", 1, sysFlag=6, subscription="b"))
    await client.send("Orders", b"other", {"TAGS": "a"})
    await client.pull("Orders")
    assert opaque not in client.replies
    await client.send("Orders", b"mine", {"TAGS": "b"})
    reply = await client.reply(opaque)
    assert brief(reply) == (ResponseCode.SUCCESS, "FOUND", "3")
    assert [message.body for message in decode_messages(bytes(reply.body))] == [b"mine"]


async def test_a_group_that_is_forbidden_while_its_pull_is_held(broker: BrokerController, client: WireClient) -> None:
    """The pull was allowed when it came: what arrives later is not delivered all the same."""
    await fill(client, count=1)
    await client.heartbeat("c1", consumers=[consumer("G", "Orders")])
    opaque = await client.post(RequestCode.PULL_MESSAGE, pull_ext("Orders", 1, sysFlag=2, subscription=None))
    with trio.fail_after(50):
        while broker.context.long_polling.held != 1:
            await trio.lowlevel.checkpoint()
    ext = {"group": "G", "topic": "Orders", "readable": "false"}
    assert (await client.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, ext)).code == 0
    await client.send("Orders", b"not for G")
    refused = await client.reply(opaque)
    assert (refused.code, refused.ext_fields()) == (ResponseCode.NO_PERMISSION, {"forbiddenType": "5"})
    assert not refused.body


async def test_time_of_a_held_pull_runs_out(client: WireClient) -> None:
    await fill(client)
    started = trio.current_time()
    reply = await client.pull("Orders", 5, sysFlag=6, suspendTimeoutMillis=300)
    assert brief(reply) == (ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", "5")
    assert trio.current_time() - started >= 0.3


async def test_moved_offsets_are_not_held(client: WireClient) -> None:
    await fill(client)
    assert (await client.pull("Orders", 9, sysFlag=6)).code == ResponseCode.PULL_OFFSET_MOVED


async def test_lite_pull(client: WireClient) -> None:
    await fill(client)
    reply = await client.ask(RequestCode.LITE_PULL_MESSAGE, pull_ext("Orders", sysFlag=20))
    assert brief(reply) == (ResponseCode.SUCCESS, "FOUND", "5")
    opaque = await client.post(RequestCode.LITE_PULL_MESSAGE, pull_ext("Orders", 5, sysFlag=22))
    await client.send("Orders", b"news")
    assert brief(await client.reply(opaque))[2] == "6"


async def test_lite_pulls_switched_off(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, litePullMessageEnable=False) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        await fill(client)
        reply = await client.ask(RequestCode.LITE_PULL_MESSAGE, pull_ext("Orders", sysFlag=20))
        assert (reply.code, reply.ext_fields()) == (ResponseCode.NO_PERMISSION, {"forbiddenType": "1"})


async def test_one_way_pull_is_not_answered(client: WireClient) -> None:
    await fill(client)
    opaque = await client.post(RequestCode.PULL_MESSAGE, pull_ext("Orders"), flag=ONEWAY_FLAG)
    await client.pull("Orders")
    assert opaque not in client.replies


async def test_shutdown_answers_held_pulls(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        await fill(client)
        opaque = await client.post(RequestCode.PULL_MESSAGE, pull_ext("Orders", 5, sysFlag=6))
        await client.pull("Orders")
        broker.shutdown()
        assert (await client.reply(opaque)).code == ResponseCode.PULL_NOT_FOUND
        await client.until_closed()


async def test_fast_port_serves_no_pulls(tmp_path: Path) -> None:
    port = free_port()
    async with running_broker(tmp_path, fastListenPort=port), WireClient.connect(("127.0.0.1", port)) as client:
        assert (await client.send("Orders")).code == ResponseCode.SUCCESS
        for code in (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE):
            reply = await client.ask(code, pull_ext("Orders"))
            assert reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
