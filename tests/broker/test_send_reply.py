"""Request-reply on the broker: a reply is checked, pushed to the client that waits for it, stored, and answered."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.wire_client import WireClient, consumer, send_ext
from tests.namesrv.server import running
from trimq.broker.controller import BrokerController
from trimq.broker.services import client_calls
from trimq.broker.store.running_flags import Flag
from trimq.broker.testing import running_broker
from trimq.protocol import sysflag
from trimq.protocol.body import TopicConfig
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.property_text import decode_properties

TOPIC = "DefaultCluster_REPLY_TOPIC"
PROPERTIES = {"MSG_TYPE": "reply", "CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "asker", "TTL": "3000", "UNIQ_KEY": "U1"}
ADDED = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
ABSENT = PROPERTIES | {"REPLY_TO_CLIENT": "absent"}
UNKNOWN = "push reply message fail, channel of <absent> not found."
FAILED = "push reply message to askerfail."
SEND = RequestCode.SEND_REPLY_MESSAGE_V2
PUSH = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT


@asynccontextmanager
async def asking(broker: BrokerController, name: str = "asker") -> AsyncIterator[WireClient]:
    """A client that the broker knows as a producer."""
    async with WireClient.connect(broker.endpoint) as client:
        await client.heartbeat(name, producers=["P"])
        yield client


async def reply(client: WireClient, properties: dict[str, str] = ABSENT, **more: Any) -> RemotingCommand:
    """Send a reply and return the broker's answer."""
    body = more.pop("body", b"answer")
    return await client.ask(SEND, send_ext(more.pop("topic", TOPIC), properties, **more), body)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - the condition is internal to the broker and has no event
            await trio.sleep(0.01)


# what a reply does


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("encoding", [Encoding.JSON, Encoding.ROCKETMQ])
@pytest.mark.parametrize("v1", [False, True])
async def test_a_reply_is_pushed_and_stored(tmp_path: Path, v1: bool, encoding: Encoding, flush: str) -> None:
    async with (
        running_broker(tmp_path, flushDiskType=flush) as broker,
        WireClient.connect(broker.endpoint, encoding) as client,
        asking(broker) as asker,
    ):
        code = RequestCode.SEND_REPLY_MESSAGE if v1 else SEND
        ext = send_ext(TOPIC, PROPERTIES, v1=v1, flag=7, queue_id=-1)
        opaque = await client.post(code, ext, b"answer")
        pushed = await asker.asked_for(PUSH)
        # Not answered before the client has answered, and nothing waits for it: another request is served meanwhile.
        assert (await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": 0})).ext_fields() == {
            "offset": "0"
        }
        assert (await client.send("Orders", b"other bytes " * 1000)).code == 0  # in the same receive buffer
        assert opaque not in client.replies
        await asker.answer(pushed)
        answer = await client.reply(opaque)

        fields = pushed.ext_fields()
        assert not pushed.is_oneway
        assert bytes(pushed.body) == b"answer"
        properties = decode_properties(fields.pop("properties"))
        now = broker.clock.wall_ms()
        for time in (int(properties.pop("PUSH_REPLY_TIME")), int(fields.pop("storeTimestamp"))):
            assert now - 60_000 < time <= now
        assert properties == PROPERTIES | ADDED
        host, port = client.plain.socket.getsockname()[:2]
        assert fields == {
            "producerGroup": "P",
            "topic": TOPIC,
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": "4",
            "queueId": "-1",
            "sysFlag": "0",
            "bornTimestamp": "1700000000000",
            "flag": "7",
            "reconsumeTimes": "0",
            "unitMode": "false",
            "bornHost": f"{host}:{port}",
            "storeHost": broker.address,
        }
        assert (answer.code, answer.remark) == (0, None)
        (stored,) = await client.pull_messages(TOPIC)
        assert answer.ext_fields() == ADDED | {
            "msgId": stored.offset_message_id,
            "queueId": "0",
            "queueOffset": "0",
        }
        assert (stored.body, stored.flag, stored.born_timestamp) == (b"answer", 7, 1_700_000_000_000)
        assert stored.properties == PROPERTIES | ADDED
        assert broker.context.client_calls.running == broker.context.client_calls.held_bytes == 0
        assert broker.context.stats.items("TOPIC_PUT_NUMS")[TOPIC].value == 1


async def test_a_reply_is_stored_only_if_that_is_wanted(broker: BrokerController, client: WireClient) -> None:
    assert (await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"storeReplyMessageEnable=false")).code == 0
    answer = await reply(client)
    assert (answer.code, answer.remark, answer.ext_fields()) == (ResponseCode.SYSTEM_ERROR, UNKNOWN, ADDED)
    async with asking(broker) as asker:
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"answer")
        await asker.answer(await asker.asked_for(PUSH))
        answer = await client.reply(opaque)
    assert (answer.code, answer.ext_fields()) == (0, ADDED | {"msgId": "0", "queueId": "0", "queueOffset": "0"})
    assert broker.context.store.max_offset(TOPIC, 0) == 0


async def test_without_a_channel_it_is_stored_and_the_answer_says_so(
    broker: BrokerController, client: WireClient
) -> None:
    without = {name: value for name, value in PROPERTIES.items() if name != "REPLY_TO_CLIENT"}
    async with WireClient.connect(broker.endpoint) as other:
        await other.heartbeat("absent", consumers=[consumer("G", "Orders")])  # a consumer is not asked
        for offset, (properties, remark) in enumerate(
            ((ABSENT, UNKNOWN), (without, "reply message properties[REPLY_TO_CLIENT] is null"))
        ):
            answer = await reply(client, properties)
            assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, remark)
            assert answer.ext_fields()["queueOffset"] == str(offset)
        assert {request.code for request in other.asked} <= {RequestCode.NOTIFY_CONSUMER_IDS_CHANGED}
    assert [message.properties for message in await client.pull_messages(TOPIC)] == [ABSENT | ADDED, without | ADDED]


async def test_a_client_that_answers_with_an_error_or_goes_away(broker: BrokerController, client: WireClient) -> None:
    async with asking(broker) as asker:
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"answer")
        await asker.answer(await asker.asked_for(PUSH), ResponseCode.SYSTEM_ERROR, remark="no")
        answer = await client.reply(opaque)
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, FAILED)
        assert answer.ext_fields()["queueOffset"] == "0"
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"answer")
        await asker.asked_for(PUSH)
    answer = await client.reply(opaque)  # as soon as the connection has ended, not after the time to answer
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, FAILED)
    assert answer.ext_fields()["queueOffset"] == "1"


async def test_a_client_that_does_not_answer_in_time(
    broker: BrokerController, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_calls, "CLIENT_TIMEOUT", 0.1)
    async with asking(broker) as asker:
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"answer")
        pushed = await asker.asked_for(PUSH)
        answer = await client.reply(opaque)
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, FAILED)
        await asker.answer(pushed)  # too late: it is ignored
        assert (await asker.heartbeat("asker", producers=["P"])).code == 0


async def test_the_newest_connection_of_a_client_gets_it(broker: BrokerController, client: WireClient) -> None:
    async with asking(broker) as old, asking(broker) as new:
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"answer")
        await new.answer(await new.asked_for(PUSH))
        assert (await client.reply(opaque)).code == 0
        assert not old.asked


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_one_way(tmp_path: Path, flush: str) -> None:
    async with (
        running_broker(tmp_path, flushDiskType=flush) as broker,
        WireClient.connect(broker.endpoint) as client,
        asking(broker) as asker,
    ):
        await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"answer", flag=2)
        await asker.answer(await asker.asked_for(PUSH))
        await client.post(SEND, send_ext(TOPIC, ABSENT), b"answer", flag=2)
        await until(lambda: broker.context.store.max_offset(TOPIC, 0) == 2)
        await until(lambda: broker.reactor.stats.inflight == 0)
        assert (await client.heartbeat("c", producers=["P"])).code == 0
        assert not client.replies


async def test_a_compressed_body_is_stored_as_one(client: WireClient) -> None:
    flags = sysflag.COMPRESSED | sysflag.COMPRESSION_ZLIB
    every = flags | sysflag.TRANSACTION_PREPARED | sysflag.INNER_BATCH | sysflag.BORN_HOST_V6 | sysflag.MULTI_TAGS
    await reply(client, sys_flag=every)
    (stored,) = await client.pull_messages(TOPIC)
    assert stored.sys_flag == flags


async def test_a_delayed_reply_is_pushed_now_and_stored_with_the_delayed_messages(
    broker: BrokerController, client: WireClient
) -> None:
    async with asking(broker) as asker:
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES | {"DELAY": "3"}), b"answer")
        pushed = await asker.asked_for(PUSH)
        await asker.answer(pushed)
        assert "REAL_TOPIC" not in decode_properties(pushed.ext_fields()["properties"])
        assert (await client.reply(opaque)).ext_fields()["queueOffset"] == "0"
    assert broker.context.store.max_offset(TOPIC, 0) == 0
    assert broker.context.store.max_offset("SCHEDULE_TOPIC_XXXX", 2) == 1


async def test_a_handle_of_a_popped_message_is_removed(client: WireClient) -> None:
    await reply(client, ABSENT | {"POP_CK": "1"})
    (stored,) = await client.pull_messages(TOPIC)
    assert stored.properties == ABSENT | ADDED


# the checks of a send


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"body": b""}, ResponseCode.MESSAGE_ILLEGAL),
        ({"body": b"x" * 1001}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": PROPERTIES | {"x": "y" * 33_000}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": PROPERTIES | {"x": "ä" * 17_000}}, ResponseCode.MESSAGE_ILLEGAL),
        # With what the broker adds to them, these are too long.
        ({"properties": PROPERTIES | {"x": "y" * (32_767 - 110)}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": PROPERTIES | {"INNER_NUM": "2"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": PROPERTIES | {"DELAY": "x"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"queue_id": 1}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "a.b"}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "x" * 128}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "SELF_TEST_TOPIC"}, ResponseCode.NO_PERMISSION),
        ({"topic": "Ordered"}, ResponseCode.NO_PERMISSION),
        ({"topic": "New", "default_topic": "none"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"flag": 1 << 40}, ResponseCode.SYSTEM_ERROR),
        ({"queue_id": None}, ResponseCode.SYSTEM_ERROR),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_refused_is_neither_pushed_nor_stored(
    tmp_path: Path, changes: dict[str, Any], code: ResponseCode
) -> None:
    async with (
        running_broker(tmp_path, maxMessageSize=1000, brokerPermission=4) as broker,
        WireClient.connect(broker.endpoint) as client,
        asking(broker) as asker,
    ):
        broker.context.topics.put(TopicConfig(topic_name="Ordered", order=True))
        end = broker.context.store.max_phy_offset
        answer = await reply(client, **({"properties": PROPERTIES} | changes))
        assert answer.code == code, answer.remark
        assert answer.remark
        await asker.heartbeat("asker", producers=["P"])
        assert not asker.asked
        assert broker.context.store.max_phy_offset == end
        assert broker.context.client_calls.running == 0


async def test_no_reply_before_the_broker_accepts_sends(tmp_path: Path) -> None:
    later = 32_503_680_000_000
    async with (
        running_broker(tmp_path, startAcceptSendRequestTimeStamp=later) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        answer = await reply(client)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert str(later) in (answer.remark or "")


@pytest.mark.parametrize("name", ["asker", "absent"])
async def test_a_topic_that_a_reply_creates_is_on_disk_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with (
        running_broker(tmp_path) as broker,
        WireClient.connect(broker.endpoint) as client,
        asking(broker) as asker,
    ):
        persisted = broker.context.topics.persisted
        waited: list[str] = []

        async def after_the_write() -> None:
            await persisted()
            waited.append((tmp_path / "config/topics.json").read_text())

        monkeypatch.setattr(broker.context.topics, "persisted", after_the_write)
        ext = send_ext("Other_REPLY_TOPIC", PROPERTIES | {"REPLY_TO_CLIENT": name})
        opaque = await client.post(SEND, ext, b"answer")
        if name == "asker":
            await asker.answer(await asker.asked_for(PUSH))
        answer = await client.reply(opaque)
        assert answer.code == (0 if name == "asker" else ResponseCode.SYSTEM_ERROR)
        assert answer.ext_fields()["queueOffset"] == "0"
        assert ["Other_REPLY_TOPIC" in text for text in waited] == [True]


async def test_a_store_that_takes_nothing_does_not_undo_the_push(broker: BrokerController, client: WireClient) -> None:
    await client.send("Orders")
    broker.context.store.flags.set(Flag.DISK_FULL, "the disk is full")
    async with asking(broker) as asker:
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"answer")
        await asker.answer(await asker.asked_for(PUSH))
        answer = await client.reply(opaque)
    assert (answer.code, answer.ext_fields()["msgId"]) == (0, "0")
    assert (await reply(client)).ext_fields() == ADDED


async def test_a_fault_is_answered(
    broker: BrokerController, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(client_calls.ClientCalls, "ask", fail)
    async with asking(broker):
        answer = await reply(client, PROPERTIES)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "ZeroDivisionError: a fault")
    assert broker.context.client_calls.running == broker.reactor.stats.inflight == 0


async def test_the_topic_of_replies_is_registered_at_the_start(tmp_path: Path) -> None:
    async with running(tmp_path) as namesrv:
        address = "{}:{}".format(*namesrv.address)
        config: dict[str, Any] = {"namesrvAddr": address, "brokerClusterName": "c1"}
        async with running_broker(tmp_path / "store", **config), namesrv.connect() as names:
            found = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "c1_REPLY_TOPIC"})
            assert found.code == 0
            assert b'"brokerName":"broker-a"' in bytes(found.body)


# forged replies, clients that do not answer, and limits


@pytest.mark.parametrize("name", [" ", "asker ", "ASKER", "asker\n", "\0", "ä" * 15_000, "x" * 32_000])
async def test_a_client_that_is_not_there(broker: BrokerController, client: WireClient, name: str) -> None:
    """Only the exact id finds a client. A long one is neither logged nor kept."""
    async with asking(broker) as asker:
        with capture_logs() as events:
            answer = await reply(client, {"REPLY_TO_CLIENT": name, "UNIQ_KEY": "U1"})
        assert (answer.code, answer.remark) == (
            ResponseCode.SYSTEM_ERROR,
            f"push reply message fail, channel of <{name}> not found.",
        )
        (event,) = (event for event in events if event["event"] == "reply_not_delivered")
        assert len(event["client"]) <= 100
        assert len(event["reason"]) <= 200
        assert (await client.send("Orders")).code == 0
        assert not asker.asked
        assert broker.context.client_calls.held_bytes == 0


async def test_a_reply_that_names_another_client_reaches_only_that(
    broker: BrokerController, client: WireClient
) -> None:
    """It is for the client to know its requests: as in RocketMQ, the broker does not."""
    async with asking(broker) as asker, asking(broker, "other") as other:
        forged = PROPERTIES | {"REPLY_TO_CLIENT": "other", "CORRELATION_ID": "of asker"}
        opaque = await client.post(SEND, send_ext(TOPIC, forged), b"answer")
        pushed = await other.asked_for(PUSH)
        assert decode_properties(pushed.ext_fields()["properties"])["CORRELATION_ID"] == "of asker"
        await other.answer(pushed)
        assert (await client.reply(opaque)).code == 0
        await asker.heartbeat("asker", producers=["P"])
        assert not asker.asked


async def test_a_client_that_does_not_answer_delays_no_other(broker: BrokerController, client: WireClient) -> None:
    async with asking(broker, "silent") as silent, asking(broker) as asker:
        waiting = [
            await client.post(SEND, send_ext(TOPIC, PROPERTIES | {"REPLY_TO_CLIENT": "silent"}), b"answer")
            for _ in range(100)
        ]
        for _ in waiting:
            await silent.asked_for(PUSH)
        # The same connection: other replies, sends, and requests that run as tasks are served.
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"answer")
        await asker.answer(await asker.asked_for(PUSH))
        assert (await client.reply(opaque)).code == 0
        assert (await client.send("New")).code == 0
        assert (await client.ask(RequestCode.GET_ALL_TOPIC_CONFIG)).code == 0
        assert not client.replies
        assert broker.context.client_calls.running == len(waiting)
    for opaque in waiting:
        assert (await client.reply(opaque)).code == ResponseCode.SYSTEM_ERROR


async def test_many_small_properties_count_with_the_memory_that_they_take(
    broker: BrokerController, client: WireClient
) -> None:
    async with WireClient.connect(broker.endpoint) as asker:
        await asker.heartbeat("asker", producers=["P"])
        many = {f"k{number}": "v" for number in range(3000)}
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES | many | {"REPLY_TO_CLIENT": "asker"}), b"x")
        calls = broker.context.client_calls
        await until(lambda: calls.running == 1)
        # Two strings of about 50 bytes each, and two entries of dicts.
        assert calls.held_bytes > 3000 * 200
        await asker.answer(await asker.asked_for(PUSH))
        assert (await client.reply(opaque)).code == 0
        assert calls.held_bytes == 0


@pytest.mark.parametrize("limit", ["calls", "bytes"])
@pytest.mark.parametrize("whose", ["the client's", "the replier's", "all"])
async def test_replies_that_wait_are_bounded(
    broker: BrokerController, client: WireClient, monkeypatch: pytest.MonkeyPatch, limit: str, whose: str
) -> None:
    """A connection may take an eighth of the limits."""
    each = client_calls.OVERHEAD + 60_000
    monkeypatch.setattr(client_calls, "MAX_CALLS", 16 if limit == "calls" else 1000)
    monkeypatch.setattr(client_calls, "MAX_BYTES", 1 << 30 if limit == "calls" else 33 * each // 2)
    most = 16 if whose == "all" else 2
    calls = broker.context.client_calls
    async with trio.open_nursery() as nursery:
        repliers: list[WireClient] = [client]
        askers: list[WireClient] = []

        async def connect(name: str | None, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            async with WireClient.connect(broker.endpoint) as found:
                if name is not None:
                    await found.heartbeat(name, producers=["P"])
                (repliers if name is None else askers).append(found)
                task_status.started()
                await trio.sleep_forever()

        for number in range(most + 1):
            await nursery.start(connect, None)
            await nursery.start(connect, f"asker{number}")
        sent = []
        for number in range(most + 1):
            to = 0 if whose == "the client's" else number
            who = repliers[0 if whose == "the replier's" else number]
            ext = send_ext(TOPIC, PROPERTIES | {"REPLY_TO_CLIENT": f"asker{to}"})
            sent.append((who, await who.post(SEND, ext, b"x" * 59_500), askers[to]))
            await until(lambda number=number: calls.running == min(number + 1, most))  # type: ignore[misc]
        who, opaque, _ = sent.pop()
        answer = await who.reply(opaque)
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert "wait" in (answer.remark or "")
        assert calls.refused == 1
        assert broker.context.store.max_offset(TOPIC, 0) == 0
        for who, opaque, asker in sent:
            await asker.answer(await asker.asked_for(PUSH))
            assert (await who.reply(opaque)).code == 0
        assert calls.running == calls.held_bytes == 0
        assert not calls._of
        nursery.cancel_scope.cancel()


async def test_one_reply_of_any_size_is_taken(
    broker: BrokerController, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_calls, "MAX_BYTES", 1000)
    async with asking(broker) as asker:
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"x" * (4 << 20))
        pushed = await asker.asked_for(PUSH)
        assert len(pushed.body) == 4 << 20
        await asker.answer(pushed)
        assert (await client.reply(opaque)).code == 0


async def _without_reading(broker: BrokerController) -> trio.SocketStream:
    """The connection of the client "asker", which reads nothing."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await sock.connect(broker.endpoint)
    slow = WireClient(trio.SocketStream(sock))
    await slow.post(
        RequestCode.HEART_BEAT, body=b'{"clientID":"asker","producerDataSet":[{"groupName":"P"}],"consumerDataSet":[]}'
    )
    await until(lambda: broker.context.producers.find_by_client_id("asker") is not None)
    return slow.plain


async def test_a_client_that_reads_nothing_costs_its_mark_and_gets_the_rest_when_it_reads(tmp_path: Path) -> None:
    mark = 1 << 20
    config: dict[str, Any] = {"writeBufferHighWaterMark": mark, "writeBufferLowWaterMark": mark // 2}
    async with running_broker(tmp_path, **config) as broker, WireClient.connect(broker.endpoint) as client:
        stream = await _without_reading(broker)
        body = b"x" * 250_000
        sent = [await client.post(SEND, send_ext(TOPIC, PROPERTIES), body) for _ in range(30)]
        await until(lambda: broker.context.client_calls.running == len(sent))
        waiting = broker.context.producers.find_by_client_id("asker")
        assert waiting is not None
        await until(waiting.is_over)
        assert waiting.waiting < mark + len(body) + 10_000
        # Once it reads and answers, every reply goes out.
        async with trio.open_nursery() as nursery:
            asker = WireClient(stream)
            nursery.start_soon(asker._read)
            for _ in sent:
                await asker.answer(await asker.asked_for(PUSH))
            for opaque in sent:
                assert (await client.reply(opaque)).code == 0
            nursery.cancel_scope.cancel()
        await stream.aclose()


async def test_a_client_that_never_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_calls, "CLIENT_TIMEOUT", 0.2)
    config: dict[str, Any] = {"writeBufferHighWaterMark": 1 << 20, "writeBufferLowWaterMark": 1 << 19}
    async with running_broker(tmp_path, **config) as broker, WireClient.connect(broker.endpoint) as client:
        stream = await _without_reading(broker)
        sent = [await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"x" * 250_000) for _ in range(30)]
        for opaque in sent:
            answer = await client.reply(opaque)
            assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, FAILED)
        assert broker.context.store.max_offset(TOPIC, 0) == len(sent)
        assert broker.context.client_calls.running == 0
        await stream.aclose()


async def test_a_replier_that_goes_away_does_not_take_its_replies_with_it(broker: BrokerController) -> None:
    async with asking(broker) as asker:
        async with WireClient.connect(broker.endpoint) as replier:
            await replier.post(SEND, send_ext(TOPIC, PROPERTIES), b"answer")
            pushed = await asker.asked_for(PUSH)
        await until(lambda: len(broker.reactor.connections) == 1)
        await asker.answer(pushed)
        await until(lambda: broker.context.store.max_offset(TOPIC, 0) == 1)
        assert broker.context.client_calls.running == 0


async def test_a_broker_that_stops_lets_replies_end(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path) as broker,
        WireClient.connect(broker.endpoint) as client,
        asking(broker) as asker,
    ):
        opaque = await client.post(SEND, send_ext(TOPIC, PROPERTIES), b"answer")
        pushed = await asker.asked_for(PUSH)
        broker.shutdown()
        await asker.answer(pushed)
        assert (await client.reply(opaque)).code == 0
        await broker.stopped.wait()
