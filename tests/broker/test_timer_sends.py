"""Where a send with a time goes, and what it is answered; recalls and the requests about the timer."""

import json
from pathlib import Path

import pytest

from tests.broker.test_delay_clock import ASYNC
from tests.broker.timers import RECALLS, TIMER, Life, all_there, comes, recalled, there, timed
from tests.broker.wire_client import WireClient
from trimq.protocol.body import TopicConfig
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding
from trimq.protocol.recall_handle import decode_handle, encode_handle
from trimq.protocol.timer_layout import decode_checkpoint

NOW = 1_700_000_000_000
DAY = 86_400_000


@pytest.fixture
async def life(tmp_path: Path) -> Life:
    return Life(tmp_path / "store", RECALLS)


@pytest.mark.parametrize(
    ("properties", "out"),
    [
        ({"TIMER_DELAY_SEC": "10"}, 9_000),
        ({"TIMER_DELAY_MS": "10000"}, 9_000),
        ({"TIMER_DELAY_MS": "10001"}, 10_000),
        ({"TIMER_DELIVER_MS": str(NOW + 9_999)}, 9_000),
        ({"TIMER_DELIVER_MS": str(NOW + 1)}, 0),
        ({"TIMER_DELIVER_MS": str(NOW + 5_000), "TIMER_DELAY_MS": "7500", "TIMER_DELAY_SEC": "9"}, 8_000),
        ({"TIMER_DELAY_SEC": "259200"}, 3 * DAY - 1000),
    ],
)
async def test_a_timed_message_waits_in_the_timers_topic(life: Life, properties: dict[str, str], out: int) -> None:
    async with life.running() as client:
        reply = await client.send("Orders", b"later", properties | {"TAGS": "t"}, queue_id=2)
        ext = reply.ext_fields()
        assert (reply.code, ext["queueId"], ext["queueOffset"]) == (ResponseCode.SUCCESS, "2", "0")
        (waiting,) = await there(client, TIMER)
        assert waiting.properties["TIMER_OUT_MS"] == str(NOW + out)
        assert waiting.properties["REAL_TOPIC"] == "Orders"
        assert waiting.properties["REAL_QID"] == "2"
        assert waiting.properties.items() >= properties.items()
        handle = decode_handle(ext["recallHandle"])
        assert handle == ("Orders", "broker-a", NOW + out + 1, waiting.properties["UNIQ_KEY"])


@pytest.mark.parametrize("properties", [{"TIMER_DELAY_MS": "0"}, {"TIMER_DELAY_SEC": "-1"}, {"TIMER_DELIVER_MS": "5"}])
async def test_a_message_whose_time_has_come_is_stored_at_once(life: Life, properties: dict[str, str]) -> None:
    async with life.running() as client:
        ext = (await client.send("Orders", b"now", properties)).ext_fields()
        assert "recallHandle" not in ext
        (found,) = await there(client, "Orders")
        assert found.properties.items() >= properties.items()


async def test_a_delay_level_takes_precedence(life: Life) -> None:
    async with life.running() as client:
        ext = (await client.send("Orders", b"level", {"TIMER_DELAY_MS": "60000", "DELAY": "1"})).ext_fields()
        assert "recallHandle" not in ext
        await life.advance(1.1)
        found = await comes(client, "Orders", 0)
        assert "TIMER_DELAY_MS" not in found.properties


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        ({"TIMER_DELAY_MS": "259200001"}, "timerMaxDelaySec"),
        ({"TIMER_DELIVER_MS": str(NOW + 4 * DAY)}, "timerMaxDelaySec"),
        ({"TIMER_DELAY_MS": "soon"}, "TIMER_DELAY_MS"),
        ({"TIMER_DELAY_SEC": "", "TIMER_DELAY_MS": "9" * 30}, "TIMER_DELAY_MS"),
        ({"TIMER_DELIVER_MS": "1", "TIMER_DEL_UNIQKEY": "U"}, "due"),
    ],
)
async def test_times_that_are_refused(life: Life, properties: dict[str, str], text: str) -> None:
    async with life.running() as client:
        reply = await client.send("Orders", b"later", properties)
        assert reply.code == ResponseCode.MESSAGE_ILLEGAL
        assert text in str(reply.remark)
        assert await there(client, TIMER) == []


async def test_the_longest_delay(tmp_path: Path) -> None:
    """Also of a recall, and changed while the broker runs."""
    life = Life(tmp_path / "store", RECALLS | {"timerMaxDelaySec": "10"})
    async with life.running() as client:

        async def codes(milliseconds: int) -> tuple[int, int]:
            """Of a send, and of a recall with a handle for that time."""
            reply = await client.send("Orders", b"later", {"TIMER_DELAY_MS": str(milliseconds)})
            handle = encode_handle("Orders", "broker-a", NOW + milliseconds - 1, "U")
            return reply.code, (await recalled(client, handle)).code

        taken, refused, illegal = ResponseCode.SUCCESS, ResponseCode.MESSAGE_ILLEGAL, ResponseCode.ILLEGAL_OPERATION
        assert await codes(9_999) == (taken, taken)
        assert await codes(10_000) == (taken, illegal)
        assert await codes(10_001) == (refused, illegal)
        assert await codes(11_000) == (refused, illegal)
        life.broker.configuration.apply("timerMaxDelaySec", "11", "test")
        assert await codes(10_999) == (taken, taken)
        assert await codes(11_000) == (taken, illegal)
        assert await codes(11_001) == (refused, illegal)


async def test_a_broker_without_a_timer(tmp_path: Path) -> None:
    life = Life(tmp_path / "store", ASYNC | {"timerWheelEnable": "false", "recallMessageEnable": "true"})
    async with life.running() as client:
        reply = await client.send("Orders", b"later", {"TIMER_DELAY_MS": "1000"})
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "timerWheelEnable" in str(reply.remark)
        assert (await client.send("Orders", b"level", {"TIMER_DELAY_MS": "1000", "DELAY": "1"})).code == 0
        for code in (RequestCode.GET_TIMER_CHECK_POINT, RequestCode.GET_TIMER_METRICS):
            assert (await client.ask(code)).code == ResponseCode.SYSTEM_ERROR
        handle = encode_handle("Orders", "broker-a", NOW + 10_000, "U")
        assert (await recalled(client, handle)).code == ResponseCode.SYSTEM_ERROR
        info = json.loads(bytes((await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).body))["table"]
        assert (info["timerReadBehind"], info["timerOffsetBehind"], info["timerCongestNum"]) == ("0", "0", "0")


async def test_too_many_messages_for_the_same_time(tmp_path: Path) -> None:
    life = Life(tmp_path / "store", RECALLS | {"timerCongestNumEachSlot": "3"})
    async with life.running() as client:
        stored, handle = 0, ""
        refused = set()
        while stored < 6:  # between the limit and twice the limit some are refused, at random
            reply = await client.send("Orders", b"same", {"TIMER_DELIVER_MS": str(NOW + 20_500)})
            if reply.code == ResponseCode.SUCCESS:
                stored += 1
                handle = reply.ext_fields()["recallHandle"]
            else:
                assert stored > 3
                refused.add(reply.code)
            await life.settled()  # it is in the wheel
        assert refused <= {ResponseCode.SYSTEM_ERROR}
        for _ in range(10):
            reply = await client.send("Orders", b"same", {"TIMER_DELIVER_MS": str(NOW + 20_500)})
            assert reply.code == ResponseCode.SYSTEM_ERROR
            assert "6 messages wait for the same time; above 3 (timerCongestNumEachSlot)" in str(reply.remark)
        assert (await client.send("Orders", b"other", {"TIMER_DELIVER_MS": str(NOW + 21_500)})).code == 0
        assert (await recalled(client, handle)).code == ResponseCode.SUCCESS
        assert len(await there(client, TIMER)) == 6 + 2


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("v1", [True, False])
async def test_the_handle_comes_in_every_encoding(life: Life, encoding: Encoding, *, v1: bool) -> None:
    async with life.running(), WireClient.connect(life.broker.endpoint, encoding) as client:
        code = RequestCode.SEND_MESSAGE if v1 else RequestCode.SEND_MESSAGE_V2
        reply = await client.send("Orders", b"x", {"TIMER_DELAY_MS": "5000"}, v1=v1, code=code)
        assert decode_handle(reply.ext_fields()["recallHandle"]).topic == "Orders"


async def test_a_retry_topic_gets_no_handle(life: Life) -> None:
    async with life.running() as client:
        await client.heartbeat("c1", consumers=[{"groupName": "G", "subscriptionDataSet": []}])
        reply = await client.send("%RETRY%G", b"x", {"TIMER_DELAY_MS": "5000"})
        assert reply.code == ResponseCode.SUCCESS
        assert "recallHandle" not in reply.ext_fields()


@pytest.mark.parametrize(("code", "v1"), [(RequestCode.SEND_MESSAGE, True), (RequestCode.SEND_MESSAGE_V2, False)])
@pytest.mark.parametrize(
    "properties", [{}, {"TIMER_OUT_MS": str(NOW + 3000), "REAL_TOPIC": "RMQ_SYS_TRANS_HALF_TOPIC"}]
)
async def test_a_send_to_the_timers_own_topic(life: Life, properties: dict[str, str], code: int, *, v1: bool) -> None:
    """RocketMQ takes it, and delivers it to whatever topic it names."""
    async with life.running() as client:
        for more in ({}, {"TIMER_DELAY_MS": "5"}, {"DELAY": "1"}, {"TRAN_MSG": "true", "PGROUP": "P"}):
            reply = await client.send(TIMER, b"foreign", properties | more, v1=v1, code=code)
            assert reply.code == ResponseCode.NO_PERMISSION
            assert TIMER in str(reply.remark)
        await timed(client, b"own", 5_000)
        assert [one.body for one in await there(client, TIMER)] == [b"own"]


async def test_a_delivered_message_is_not_timed_again(life: Life) -> None:
    """A consumer that sends it to its retry topic sends all of its properties."""
    async with life.running() as client:
        await timed(client, b"x", 2_000)
        await life.advance(4)
        found = await comes(client, "Orders", 0)
        await client.send("Orders", b"again", found.properties)
        assert (await comes(client, "Orders", 1)).body == b"again"


async def test_one_way(life: Life) -> None:
    async with life.running() as client:
        await client.post(RequestCode.SEND_MESSAGE_V2, {"b": "Orders"}, b"x", flag=2)
        await timed(client, b"later", 2_000)
        await life.advance(3)
        assert (await comes(client, "Orders", 0)).body == b"later"


@pytest.mark.parametrize(("queues", "queue"), [(8, 6), (4, 0)])
async def test_a_queue_that_its_topic_has_no_more(life: Life, queues: int, queue: int) -> None:
    async with life.running() as client:
        await client.send("Orders")
        topics = life.broker.context.topics
        topics.put(TopicConfig("Orders", read_queue_nums=8, write_queue_nums=8))
        assert (await client.send("Orders", b"x", {"TIMER_DELAY_MS": "5000"}, queue_id=6)).code == ResponseCode.SUCCESS
        topics.put(TopicConfig("Orders", read_queue_nums=queues, write_queue_nums=queues))
        await life.advance(6)
        assert life.broker.context.store.max_offset("Orders", queue) == (1 if queue else 2)


# -- recalls


@pytest.mark.parametrize("with_topic", [False, True])
@pytest.mark.parametrize("delay", [10_000, 9_500, 100_000])
async def test_a_recalled_message_does_not_come(tmp_path: Path, delay: int, *, with_topic: bool) -> None:
    """100 s is beyond the roll window: message and delete mark roll until both are in the last slot."""
    changes = {"appendTopicForTimerDeleteKey": str(with_topic).lower(), "timerRollWindowSlot": "30"}
    life = Life(tmp_path / "store", RECALLS | changes)
    async with life.running() as client:
        ext = await timed(client, b"recalled", delay, UNIQ_KEY="U1")
        await timed(client, b"kept", delay, UNIQ_KEY="U2")
        reply = await recalled(client, ext["recallHandle"])
        assert (reply.code, reply.ext_fields()["msgId"]) == (ResponseCode.SUCCESS, "U1")
        mark = (await there(client, TIMER))[2]
        assert mark.properties["TIMER_DEL_UNIQKEY"] == ("Orders+U1" if with_topic else "U1")
        assert mark.properties["PGROUP"] == "P"
        assert mark.body == b"0"
        for _ in range(delay // 5000 + 1):
            await life.advance(5)
        assert [one.body for one in await all_there(client)] == [b"kept"]
        puts = life.broker.context.timer.puts
        assert (puts.cancelled, puts.dropped, puts.deleted) == (1, 0, 0)
        assert {topic: one.count for topic, one in life.broker.context.timer.metrics.counts.items()} == {"Orders": 0}


async def test_a_recall_of_a_message_that_does_not_exist(life: Life) -> None:
    async with life.running() as client:
        await timed(client, b"kept", 10_000)
        assert (await recalled(client, encode_handle("Orders", "broker-a", NOW + 9_000, "U9"))).code == 0
        await life.advance(11)
        assert len(await all_there(client)) == 1


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_a_one_way_recall_is_not_answered(tmp_path: Path, flush: str) -> None:
    life = Life(tmp_path / "store", RECALLS | {"flushDiskType": flush})
    async with life.running() as client:
        ext = await timed(client, b"recalled", 10_000)
        fields = {"producerGroup": "P", "topic": "Orders", "recallHandle": ext["recallHandle"]}
        opaque = await client.post(RequestCode.RECALL_MESSAGE, fields, flag=2)
        await comes(client, TIMER, 1)
        assert (await client.send("Orders", b"other")).code == ResponseCode.SUCCESS
        await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        assert opaque not in client.replies
        await life.advance(12)
        assert [one.body for one in await there(client, "Orders")] == [b"other"]


async def test_recalls_across_a_restart(life: Life) -> None:
    async with life.running() as client:
        ext = await timed(client, b"recalled", 10_000)
        await life.advance(2)
    async with life.running() as client:
        assert (await recalled(client, ext["recallHandle"])).code == ResponseCode.SUCCESS
        await life.advance(2)
    async with life.running() as client:
        await life.advance(20)
        assert await all_there(client) == []


async def test_a_recall_while_the_precision_is_another_one(tmp_path: Path) -> None:
    """The delete mark has the time of the message, and finds it in whatever slot."""
    life = Life(tmp_path / "store", RECALLS | {"timerPrecisionMs": 100})
    async with life.running() as client:
        ext = await timed(client, b"recalled", 10_900)
        await timed(client, b"kept", 10_900)
        await life.advance(2)
    life.changes = RECALLS | {"timerPrecisionMs": 1000}
    async with life.running() as client:
        assert (await recalled(client, ext["recallHandle"])).code == ResponseCode.SUCCESS
        await life.advance(2)
        outs = [one.properties["TIMER_OUT_MS"] for one in await all_there(client, TIMER)]
        assert outs == [str(NOW + 10_800)] * 3
    life.changes = RECALLS | {"timerPrecisionMs": 100}
    async with life.running() as client:
        for _ in range(80):
            await life.advance(0.1)
        assert [one.body for one in await all_there(client)] == [b"kept"]


async def test_recalls_are_off_by_default(client: WireClient) -> None:
    reply = await recalled(client, encode_handle("Orders", "broker-a", NOW, "U"))
    assert reply.code == ResponseCode.NO_PERMISSION
    assert "recallMessageEnable" in str(reply.remark)
    assert reply.ext_fields()["MSG_REGION"] == "DefaultRegion"


@pytest.mark.parametrize(
    ("handle", "topic", "code"),
    [
        (encode_handle("Orders", "broker-a", NOW + 9_000, "U"), "Nowhere", ResponseCode.TOPIC_NOT_EXIST),
        (encode_handle(TIMER, "broker-a", NOW + 9_000, "U"), TIMER, ResponseCode.NO_PERMISSION),
        ("?", "Orders", ResponseCode.ILLEGAL_OPERATION),
        (encode_handle("Other", "broker-a", NOW + 9_000, "U"), "Orders", ResponseCode.ILLEGAL_OPERATION),
        (encode_handle("Orders", "broker-b", NOW + 9_000, "U"), "Orders", ResponseCode.ILLEGAL_OPERATION),
        (encode_handle("Orders", "broker-a", NOW - 1, "U"), "Orders", ResponseCode.ILLEGAL_OPERATION),
        (encode_handle("Orders", "broker-a", NOW + 3 * DAY, "U"), "Orders", ResponseCode.ILLEGAL_OPERATION),
        (encode_handle("Orders", "broker-a", NOW + 9_000, "U\x01"), "Orders", ResponseCode.ILLEGAL_OPERATION),
        ("djEgT3JkZXJzIGJyb2tlci1hIHNvb24gVQ==", "Orders", ResponseCode.ILLEGAL_OPERATION),
    ],
)
async def test_recalls_that_are_refused(life: Life, handle: str, topic: str, code: ResponseCode) -> None:
    async with life.running() as client:
        await client.send("Orders")
        reply = await recalled(client, handle, topic)
        assert reply.code == code
        assert reply.remark
        assert await there(client, TIMER) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"startAcceptSendRequestTimeStamp": str(NOW + 60_000)},
        {"brokerPermission": "4", "allowRecallWhenBrokerNotWriteable": "false"},
    ],
)
async def test_recalls_while_the_broker_takes_no_sends(tmp_path: Path, changes: dict[str, str]) -> None:
    life = Life(tmp_path / "store", RECALLS | changes)
    async with life.running() as client:
        reply = await recalled(client, encode_handle("Orders", "broker-a", NOW + 9_000, "U"))
        assert reply.code == ResponseCode.SERVICE_NOT_AVAILABLE


async def test_recalls_of_a_broker_that_permits_no_writing(tmp_path: Path) -> None:
    life = Life(tmp_path / "store", RECALLS | {"brokerPermission": "4"})
    async with life.running() as client:
        ext = await timed(client, b"x", 10_000)
        assert (await recalled(client, ext["recallHandle"])).code == ResponseCode.SUCCESS


async def test_a_recall_that_the_store_refuses(life: Life) -> None:
    async with life.running() as client:
        ext = await timed(client, b"x", 10_000)
        life.broker.context.store.flags.set(2, "a test")  # type: ignore[arg-type]
        reply = await recalled(client, ext["recallHandle"])
        assert (reply.code, reply.remark) == (ResponseCode.SYSTEM_ERROR, "a test")


# -- what mqadmin asks


async def test_checkpoint_and_metrics(life: Life) -> None:
    async with life.running() as client:
        await timed(client, b"1", 10_000)
        await timed(client, b"2", 60_000)
        await timed(client, b"3", 60_000, "Payments")
        await life.advance(2)
        await life.advance(2)
        checkpoint = decode_checkpoint(bytes((await client.ask(RequestCode.GET_TIMER_CHECK_POINT)).body))
        assert checkpoint.queue_offset == checkpoint.master_queue_offset == 3
        assert checkpoint.log_position == 3 * 52
        metrics = json.loads(bytes((await client.ask(RequestCode.GET_TIMER_METRICS)).body))
        assert {topic: one["count"] for topic, one in metrics["timingCount"].items()} == {"Orders": 2, "Payments": 1}
        assert metrics["dataVersion"]["counter"] > 0
        await life.advance(7)
        metrics = json.loads(bytes((await client.ask(RequestCode.GET_TIMER_METRICS)).body))
        assert metrics["timingCount"]["Orders"] == {"count": 1, "timeStamp": life.clock.wall_ms()}


async def test_runtime_information(life: Life) -> None:
    async with life.running() as client:

        async def table() -> dict[str, str]:
            reply = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
            info: dict[str, str] = json.loads(bytes(reply.body))["table"]
            return {name: value for name, value in info.items() if name.startswith("timer")}

        idle = {
            "timerReadBehind": "0",
            "timerOffsetBehind": "0",
            "timerCongestNum": "0",
            "timerEnqueueTps": "0.0",
            "timerDequeueTps": "0.0",
        }
        assert await table() == idle
        for number in range(4):
            await timed(client, b"x", 2_000 + number)
        await life.advance(1)
        assert await table() == idle | {"timerCongestNum": "4", "timerEnqueueTps": "4.0"}
        life.broker.configuration.apply("timerStopDequeue", "true", "test")
        await life.advance(8)
        assert await table() == idle | {"timerCongestNum": "4", "timerReadBehind": "7"}
        life.broker.configuration.apply("timerStopDequeue", "false", "test")
        life.broker.configuration.apply("timerStopEnqueue", "true", "test")
        await timed(client, b"x", 2_000)
        await life.advance(2)
        assert await table() == idle | {"timerOffsetBehind": "1", "timerDequeueTps": "2.0"}
        life.broker.configuration.apply("timerStopEnqueue", "false", "test")
        await life.advance(1)
        assert len(await all_there(client)) == 5


async def test_a_deleted_topic_is_no_longer_counted(life: Life) -> None:
    async with life.running() as client:
        await timed(client, b"x", 20_000)
        await life.advance(1)
        assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "Orders"})).code == 0
        metrics = json.loads(bytes((await client.ask(RequestCode.GET_TIMER_METRICS)).body))
        assert metrics["timingCount"] == {}
