"""Sending: the stored record, the reply, and every refusal."""

import json
from pathlib import Path

import pytest

from tests.broker.wire_client import WireClient, consumer, hashes_of, properties_text
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import ONEWAY_FLAG, Encoding
from trimq.protocol.hashing import key_hash
from trimq.protocol.message_id import decode_offset_id
from trimq.protocol.property_names import NOT_IN_A_BATCH
from trimq.protocol.record import pack_host

UNIQUE = "7F0000010001AABBCCDD000000010001"


async def test_reply_and_record(broker: BrokerController, client: WireClient) -> None:
    reply = await client.send(
        "Orders", b"one", {"UNIQ_KEY": UNIQUE, "TAGS": "TagA", "KEYS": "k1 k2", "WAIT": "true"}, queue_id=2
    )
    assert reply.code == ResponseCode.SUCCESS
    ext = reply.ext_fields()
    assert ext["MSG_REGION"] == "DefaultRegion"
    assert ext["TRACE_ON"] == "true"
    assert (ext["queueId"], ext["queueOffset"], ext["transactionId"]) == ("2", "0", UNIQUE)
    host, offset = decode_offset_id(ext["msgId"])
    assert host == pack_host(*broker.endpoint)
    (message,) = await client.pull_messages("Orders", queueId=2)
    assert message.commit_log_offset == offset
    assert message.offset_message_id == ext["msgId"]
    assert message.body == b"one"
    assert message.born_timestamp == 1_700_000_000_000
    assert message.born_host[0] == "127.0.0.1"
    assert message.store_host == broker.endpoint
    assert message.properties == {
        "UNIQ_KEY": UNIQUE,
        "TAGS": "TagA",
        "KEYS": "k1 k2",
        "WAIT": "true",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        "CLUSTER": "DefaultCluster",
    }


@pytest.mark.parametrize("encoding", list(Encoding))
async def test_encodings(broker: BrokerController, encoding: Encoding) -> None:
    async with WireClient.connect(broker.endpoint, encoding) as client:
        reply = await client.send("Orders", properties={"UNIQ_KEY": UNIQUE})
        assert reply.encoding == encoding
        assert reply.code == ResponseCode.SUCCESS
        assert {"msgId", "queueId", "queueOffset", "transactionId", "MSG_REGION", "TRACE_ON"} <= set(reply.ext_fields())
        assert await client.pull_messages("Orders")


async def test_first_form_of_the_header(client: WireClient) -> None:
    reply = await client.send("Orders", v1=True, code=RequestCode.SEND_MESSAGE)
    assert reply.code == ResponseCode.SUCCESS
    reply = await client.send("Orders", v1=True, code=RequestCode.SEND_MESSAGE)
    assert reply.ext_fields()["queueOffset"] == "1"


async def test_numbers_and_booleans_as_ext_values(client: WireClient) -> None:
    """Trap 1: Node sends JSON numbers; replies hold strings only."""
    header = (
        b'{"code":310,"flag":0,"language":"JAVA","opaque":77,"version":121,"extFields":{"a":"P","b":"Orders","c":"TBW102",'
        b'"d":4,"e":1,"f":0,"g":1700000000000,"h":0,"i":"","j":0,"k":false,"l":null}}'
    )
    frame = (len(header) + 5).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header + b"x"
    await client.stream.send_all(frame)
    reply = await client.reply(77)
    assert reply.code == ResponseCode.SUCCESS
    raw = json.loads(bytes(reply.ext_raw))
    assert all(isinstance(value, str) for value in raw.values())
    assert raw["queueId"] == "1"
    assert len(raw["transactionId"]) == 32


async def test_trailing_separator_may_be_missing(client: WireClient) -> None:
    await client.send("Orders", properties=properties_text({"KEYS": "a", "UNIQ_KEY": UNIQUE})[:-1])
    (message,) = await client.pull_messages("Orders")
    assert message.properties["UNIQ_KEY"] == UNIQUE
    assert message.properties["CLUSTER"] == "DefaultCluster"


async def test_unique_key_is_made_where_it_is_missing(client: WireClient) -> None:
    reply = await client.send("Orders")
    (message,) = await client.pull_messages("Orders")
    assert message.unique_id == reply.ext_fields()["transactionId"]


# guards: a message is found by its unique key also if the broker made the key, whatever other keys it has
@pytest.mark.parametrize("tags", ["true", "false"])
@pytest.mark.parametrize("properties", [None, {"TAGS": "TagA"}, {"KEYS": "k1 k2", "TAGS": "TagA"}, {"WAIT": "true"}])
async def test_the_index_has_a_unique_key_that_the_broker_made(
    tmp_path: Path, tags: str, properties: dict[str, str] | None
) -> None:
    async with running_broker(tmp_path, indexTagEnable=tags) as broker, WireClient.connect(broker.endpoint) as client:
        unique = (await client.send("Orders", properties=properties)).ext_fields()["transactionId"]
        (message,) = await client.pull_messages("Orders")
        words = [unique, *(properties or {}).get("KEYS", "").split()]
        if tags == "true" and "TAGS" in (properties or {}):
            words.append("T#TagA")
        assert await hashes_of(broker, [message]) == [[key_hash("Orders", word) for word in words]]


async def test_properties_of_the_broker_are_not_doubled(client: WireClient) -> None:
    await client.send("Orders", properties={"MSG_REGION": "elsewhere", "CLUSTER": "x", "POP_CK": "0 0 0", "a": "b"})
    (message,) = await client.pull_messages("Orders")
    assert message.properties["MSG_REGION"] == "DefaultRegion"
    assert message.properties["CLUSTER"] == "DefaultCluster"
    assert "POP_CK" not in message.properties
    assert message.properties["a"] == "b"


async def test_topic_is_made_by_the_first_send(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        assert (await client.send("Made", default_topic_queue_nums=12)).code == ResponseCode.SUCCESS
        written = json.loads((tmp_path / "config" / "topics.json").read_bytes())
        config = written["topicConfigTable"]["Made"]
        assert (config["readQueueNums"], config["writeQueueNums"], config["perm"]) == (8, 8, 6)


async def test_unit_mode_marks_the_topic(client: WireClient) -> None:
    await client.send("Unit", unit_mode="true")
    reply = await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "Unit"})
    assert json.loads(bytes(reply.body))["topicSysFlag"] == 1


async def test_no_automatic_creation(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, autoCreateTopicEnable=False) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        assert (await client.send("Made")).code == ResponseCode.TOPIC_NOT_EXIST
        assert (await client.send("%RETRY%G")).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("topic", ["", " ", "a b", "naïve", "x" * 128])
async def test_bad_names(client: WireClient, topic: str) -> None:
    reply = await client.send(topic)
    assert reply.code == ResponseCode.INVALID_PARAMETER
    assert reply.ext_fields() == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}


@pytest.mark.parametrize(
    "topic",
    [
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    ],
)
async def test_topics_that_take_no_messages(client: WireClient, topic: str) -> None:
    assert (await client.send(topic)).code == ResponseCode.NO_PERMISSION


async def test_queue_ids(client: WireClient) -> None:
    assert (await client.send("Orders", queue_id=3)).code == ResponseCode.SUCCESS
    assert (await client.send("Orders", queue_id=4)).code == ResponseCode.INVALID_PARAMETER
    chosen = {(await client.send("Orders", queue_id=-1)).ext_fields()["queueId"] for _ in range(40)}
    assert chosen <= {"0", "1", "2", "3"}
    assert len(chosen) > 1


async def test_model_topic_takes_messages(client: WireClient) -> None:
    assert (await client.send("TBW102")).code == ResponseCode.SUCCESS


async def test_write_permission_is_not_looked_at(client: WireClient) -> None:
    await client.ask(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        {
            "topic": "ReadOnly",
            "defaultTopic": "TBW102",
            "readQueueNums": 1,
            "writeQueueNums": 1,
            "perm": 4,
            "topicFilterType": "SINGLE_TAG",
        },
    )
    assert (await client.send("ReadOnly")).code == ResponseCode.SUCCESS


async def test_sizes(tmp_path: Path) -> None:
    async with running_broker(tmp_path, maxMessageSize=1000) as broker, WireClient.connect(broker.endpoint) as client:
        assert (await client.send("Orders", b"x" * 1000)).code == ResponseCode.SUCCESS
        assert (await client.send("Orders", b"x" * 1001)).code == ResponseCode.MESSAGE_ILLEGAL
        assert (await client.send("Orders", properties={"a": "b" * 32_800})).code == ResponseCode.MESSAGE_ILLEGAL
        assert (await client.send("Orders", b"")).code == ResponseCode.MESSAGE_ILLEGAL


async def test_one_way_is_stored_and_not_answered(client: WireClient) -> None:
    """Trap 9."""
    first = await client.post(RequestCode.SEND_MESSAGE_V2, {"a": "x"}, flag=ONEWAY_FLAG)
    await client.send("Orders")
    opaque = await client.post(
        RequestCode.SEND_MESSAGE_V2,
        {"a": "P", "b": "Orders", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0},
        b"one-way",
        flag=ONEWAY_FLAG,
    )
    messages = await client.pull_messages("Orders")
    assert [message.body for message in messages] == [b"hello", b"one-way"]
    assert first not in client.replies
    assert opaque not in client.replies


async def test_not_before_the_start_time(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, startAcceptSendRequestTimeStamp=32_503_680_000_000) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        reply = await client.send("Orders")
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "32503680000000" in str(reply.remark)


# refused until they are implemented


@pytest.mark.parametrize("sys_flag", [0x40, 0x80, 0xC0])
async def test_inner_batches_by_flag(client: WireClient, sys_flag: int) -> None:
    assert (await client.send("Orders", sys_flag=sys_flag)).code == ResponseCode.MESSAGE_ILLEGAL


async def test_inner_batches_by_property(client: WireClient) -> None:
    assert (await client.send("Orders", properties={"INNER_NUM": "2"})).code == ResponseCode.MESSAGE_ILLEGAL


@pytest.mark.parametrize("code", [220, 221, 9999])
async def test_codes_that_are_not_served(client: WireClient, code: int) -> None:
    reply = await client.ask(code, {"topic": "Orders", "consumerGroup": "G"})
    assert reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert reply.remark == f" request type {code} not supported"


async def test_host_bits_of_a_client_are_not_believed(client: WireClient) -> None:
    await client.send("Orders", sys_flag=0x31)
    (message,) = await client.pull_messages("Orders")
    assert message.sys_flag == 1


# delays


async def test_delayed_message_is_parked_and_comes_later(client: WireClient) -> None:
    await client.send("Orders", b"now")
    reply = await client.send("Orders", b"later", {"DELAY": "1", "UNIQ_KEY": UNIQUE}, queue_id=1)
    ext = reply.ext_fields()
    assert (reply.code, ext["queueId"], ext["queueOffset"]) == (ResponseCode.SUCCESS, "1", "0")
    (parked,) = await client.pull_messages("SCHEDULE_TOPIC_XXXX")
    assert parked.properties["REAL_TOPIC"] == "Orders"
    assert parked.properties["REAL_QID"] == "1"
    assert parked.topic == "SCHEDULE_TOPIC_XXXX"
    (delivered,) = await client.pull_messages("Orders", queueId=1, sysFlag=6)
    assert delivered.body == b"later"
    assert delivered.topic == "Orders"
    assert delivered.unique_id == UNIQUE
    assert delivered.store_timestamp >= parked.store_timestamp + 1000


async def test_level_beyond_the_last_is_the_last(client: WireClient) -> None:
    await client.send("Orders", properties={"DELAY": "99"})
    (parked,) = await client.pull_messages("SCHEDULE_TOPIC_XXXX", queueId=17)
    assert parked.properties["DELAY"] == "18"


async def test_delay_that_is_no_number(client: WireClient) -> None:
    assert (await client.send("Orders", properties={"DELAY": "soon"})).code == ResponseCode.MESSAGE_ILLEGAL


# retries


async def test_retry_topic_is_made_for_a_group(client: WireClient) -> None:
    reply = await client.send("%RETRY%G", properties={"RETRY_TOPIC": "Orders"}, reconsume_times=16)
    assert reply.code == ResponseCode.SUCCESS
    (message,) = await client.pull_messages("%RETRY%G")
    assert message.reconsume_times == 16


async def test_retry_of_an_unknown_group(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, autoCreateSubscriptionGroup=False) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        assert (await client.send("%RETRY%G")).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


async def test_used_up_tries_go_to_the_dead_letters(client: WireClient) -> None:
    reply = await client.send("%RETRY%G", properties={"DELAY": "4", "KEYS": "k"}, reconsume_times=17, queue_id=0)
    assert reply.code == ResponseCode.SUCCESS
    (message,) = await client.pull_messages("%DLQ%G")
    assert message.topic == "%DLQ%G"
    assert message.properties["DELAY"] == "-1"
    assert message.properties["KEYS"] == "k"


@pytest.mark.parametrize(("version", "topic"), [(479, "%DLQ%G"), (120, "%RETRY%G")])
async def test_limit_of_the_request(client: WireClient, version: int, topic: str) -> None:
    ext = {"a": "P", "b": "%RETRY%G", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "j": 3, "l": 2}
    await client.ask(RequestCode.SEND_MESSAGE_V2, ext, b"x", version=version)
    assert len(await client.pull_messages(topic)) == 1


async def test_group_that_holds_queue_locks(client: WireClient) -> None:
    body = {
        "consumerGroup": "G",
        "clientId": "c",
        "mqSet": [{"topic": "Orders", "brokerName": "broker-a", "queueId": 0}],
    }
    await client.ask(RequestCode.LOCK_BATCH_MQ, body=json.dumps(body).encode())
    await client.send("%RETRY%G", reconsume_times=1)
    assert len(await client.pull_messages("%DLQ%G")) == 1


# batches


async def test_batch(client: WireClient) -> None:
    items = [(n, b"body-%d" % n, properties_text({"UNIQ_KEY": f"{n:032d}", "TAGS": "T"}).encode()) for n in range(3)]
    shared = {"UNIQ_KEY": UNIQUE, "WAIT": "true"}
    reply = await client.send(
        "Orders", encode_batch(items), shared, batch="true", code=RequestCode.SEND_BATCH_MESSAGE, queue_id=1
    )
    assert reply.code == ResponseCode.SUCCESS
    ext = reply.ext_fields()
    assert (ext["queueId"], ext["queueOffset"], ext["transactionId"]) == ("1", "0", UNIQUE)
    messages = await client.pull_messages("Orders", queueId=1)
    assert ext["msgId"].split(",") == [message.offset_message_id for message in messages]
    assert [message.queue_offset for message in messages] == [0, 1, 2]
    assert [(message.flag, message.body) for message in messages] == [(n, b"body-%d" % n) for n in range(3)]
    assert messages[1].properties == {"UNIQ_KEY": f"{1:032d}", "TAGS": "T"}


async def test_field_decides_what_a_batch_is(client: WireClient) -> None:
    body = encode_batch([(0, b"one", b""), (0, b"two", b"")])
    await client.send("Orders", body, code=RequestCode.SEND_BATCH_MESSAGE)
    assert [message.body for message in await client.pull_messages("Orders")] == [body]
    reply = await client.send("Orders", body, batch="true", v1=True, code=RequestCode.SEND_MESSAGE)
    assert "transactionId" not in reply.ext_fields()
    assert [message.body for message in await client.pull_messages("Orders", 1)] == [b"one", b"two"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"junk",
        encode_batch([(0, b"one", b"")])[:-1],
        encode_batch([(0, b"one", properties_text({"DELAY": "3"}).encode())]),
        encode_batch([(0, b"one", properties_text({"TIMER_DELAY_MS": "3"}).encode())]),
        encode_batch([(0, b"one", properties_text({"TRAN_MSG": "true"}).encode())]),
        encode_batch([(0, b"one", properties_text({"INNER_NUM": "3"}).encode())]),
    ],
)
async def test_batches_that_are_refused(client: WireClient, body: bytes) -> None:
    reply = await client.send("Orders", body, batch="true", code=RequestCode.SEND_BATCH_MESSAGE)
    assert reply.code == ResponseCode.MESSAGE_ILLEGAL


@pytest.mark.parametrize("name", sorted(NOT_IN_A_BATCH))
async def test_what_no_message_of_a_batch_may_have(client: WireClient, name: str) -> None:
    """The table of properties decides: a name added there is refused without a rule of its own."""
    value = "true" if name == "TRAN_MSG" else "3"
    for names in ({name: value}, {"UNIQ_KEY": UNIQUE, name: value, "a": "b"}):
        body = encode_batch([(0, b"one", b""), (0, b"two", properties_text(names).encode())])
        reply = await client.send("Orders", body, batch="true", code=RequestCode.SEND_BATCH_MESSAGE)
        assert reply.code == ResponseCode.MESSAGE_ILLEGAL
        assert (reply.remark or "").startswith("a message in a batch cannot")
    assert (await client.pull("Orders")).code == ResponseCode.PULL_NOT_FOUND


@pytest.mark.parametrize("properties", [{"DELAY": "0"}, {"TRAN_MSG": "false"}, {"TIMER_OUT_MS": "3"}])
async def test_what_a_message_of_a_batch_may_have(client: WireClient, properties: dict[str, str]) -> None:
    body = encode_batch([(0, b"one", properties_text(properties).encode())])
    reply = await client.send("Orders", body, batch="true", code=RequestCode.SEND_BATCH_MESSAGE)
    assert reply.code == ResponseCode.SUCCESS
    (message,) = await client.pull_messages("Orders")
    assert message.properties == properties


async def test_batch_to_a_retry_topic(client: WireClient) -> None:
    await client.heartbeat("c", consumers=[consumer("G", "Orders")])
    reply = await client.send("%RETRY%G", encode_batch([(0, b"one", b"")]), batch="true", code=320)
    assert reply.code == ResponseCode.MESSAGE_ILLEGAL


async def test_batch_over_the_limit(tmp_path: Path) -> None:
    async with running_broker(tmp_path, maxMessageSize=1000) as broker, WireClient.connect(broker.endpoint) as client:
        body = encode_batch([(0, b"x" * 600, b""), (0, b"x" * 600, b"")])
        reply = await client.send("Orders", body, batch="true", code=320)
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert (await client.pull("Orders")).code == ResponseCode.PULL_NOT_FOUND


async def test_sync_flush(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path, flushDiskType="SYNC_FLUSH") as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        assert (await client.send("Orders")).code == ResponseCode.SUCCESS
        assert (await client.send("Orders", properties={"WAIT": "false"})).code == ResponseCode.SUCCESS
        items = [(0, b"one", b""), (0, b"two", b"")]
        assert (await client.send("Orders", encode_batch(items), batch="true", code=320)).code == ResponseCode.SUCCESS
        assert len(await client.pull_messages("Orders")) == 4
