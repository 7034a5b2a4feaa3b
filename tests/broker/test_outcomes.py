"""Every outcome of the store as a reply, and the paths through cold data: the test sets the store's results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.raw_client import json_frame
from tests.broker.wire_client import WireClient, send_ext
from trimq.broker.controller import BrokerController
from trimq.broker.processor_table import end_processor, send_back_processor, send_processor
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import GetMessageResult, GetMessageStatus, PutCallback, PutMessageResult, PutMessageStatus
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.message_id import decode_offset_id
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.reactor import listen


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (PutMessageStatus.PUT_OK, ResponseCode.SUCCESS),
        (PutMessageStatus.FLUSH_DISK_TIMEOUT, ResponseCode.FLUSH_DISK_TIMEOUT),
        (PutMessageStatus.FLUSH_SLAVE_TIMEOUT, ResponseCode.FLUSH_SLAVE_TIMEOUT),
        (PutMessageStatus.SLAVE_NOT_AVAILABLE, ResponseCode.SLAVE_NOT_AVAILABLE),
        (PutMessageStatus.SERVICE_NOT_AVAILABLE, ResponseCode.SERVICE_NOT_AVAILABLE),
        (PutMessageStatus.CREATE_MAPPED_FILE_FAILED, ResponseCode.SYSTEM_ERROR),
        (PutMessageStatus.MESSAGE_ILLEGAL, ResponseCode.MESSAGE_ILLEGAL),
        (PutMessageStatus.PROPERTIES_SIZE_EXCEEDED, ResponseCode.MESSAGE_ILLEGAL),
        (PutMessageStatus.OS_PAGE_CACHE_BUSY, ResponseCode.SYSTEM_BUSY),
        (PutMessageStatus.UNKNOWN_ERROR, ResponseCode.SYSTEM_ERROR),
        (PutMessageStatus.IN_SYNC_REPLICAS_NOT_ENOUGH, ResponseCode.SYSTEM_ERROR),
        (PutMessageStatus.WHEEL_TIMER_MSG_ILLEGAL, ResponseCode.MESSAGE_ILLEGAL),
        (PutMessageStatus.WHEEL_TIMER_NOT_ENABLE, ResponseCode.SYSTEM_ERROR),
    ],
)
@pytest.mark.parametrize("later", [False, True])
async def test_outcomes_of_a_put(broker: BrokerController, status: PutMessageStatus, code: int, later: bool) -> None:
    result = PutMessageResult(status, 1000, 7, 100, 1, remark="" if status.value < 4 else "because")
    if status > PutMessageStatus.SLAVE_NOT_AVAILABLE:
        result.physical_offset = result.queue_offset = -1
    callbacks: list[PutCallback] = []

    def put(_message: Any, done: PutCallback) -> PutMessageResult | None:
        if not later:
            return result
        callbacks.append(done)
        return None

    async with store_that(broker, put_message=put) as client:
        for batch in ("false", "true"):
            body = b"x" if batch == "false" else bytes.fromhex("00000016 00000000 00000000 00000000 00000000 0000")
            ext = {"a": "P", "b": "TBW102", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "m": batch}
            opaque = await client.post(RequestCode.SEND_MESSAGE_V2, ext, body)
            if later:
                await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "TBW102", "queueId": 0})
                assert opaque not in client.replies
                callbacks.pop()(result)
            reply = await client.reply(opaque)
            assert reply.code == code
            fields = reply.ext_fields()
            if result.ok:
                assert decode_offset_id(fields["msgId"])[1] == 1000
                assert (fields["queueId"], fields["queueOffset"]) == ("0", "7")
            else:
                assert reply.remark == "because"
                assert fields == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}


@pytest.mark.parametrize(
    "status",
    [
        PutMessageStatus.PUT_OK,
        PutMessageStatus.FLUSH_DISK_TIMEOUT,
        PutMessageStatus.SLAVE_NOT_AVAILABLE,
        PutMessageStatus.SERVICE_NOT_AVAILABLE,
    ],
)
async def test_outcomes_of_a_put_on_the_fast_path(tmp_path: Path, status: PutMessageStatus) -> None:
    """Under SYNC_FLUSH the outcome comes later here too; it is answered and counted as on the full path."""
    result = PutMessageResult(status, 1000, 7, 100, 1, remark="because")
    callbacks: list[PutCallback] = []

    paths = []

    def put(_message: Any, done: PutCallback) -> None:
        paths.append("full")
        callbacks.append(done)

    def put_now(_message: Any, done: PutCallback) -> PutMessageResult:
        paths.append("fast")
        callbacks.append(done)
        return result

    ext = send_ext("TBW102", {"UNIQ_KEY": "U1"})
    async with running_broker(tmp_path, flushDiskType="SYNC_FLUSH") as broker:
        stats = broker.context.stats
        async with store_that(broker, put_message=put, put_now=put_now) as client:
            answers = []
            for fast in (False, True):
                await client.stream.send_all(json_frame(RequestCode.SEND_MESSAGE_V2, ext, fast=fast, body=b"x"))
                await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "TBW102", "queueId": 0})
                assert 7 not in client.replies
                before = stats.put_total
                callbacks.pop()(result)
                reply = await client.reply(7)
                answers.append((reply.code, reply.remark, reply.ext_fields(), stats.put_total - before))
    assert answers[0] == answers[1]
    assert answers[0][3] == result.ok
    assert paths == ["full", "fast"]


@pytest.mark.parametrize("later", [False, True])
async def test_message_that_cannot_be_sent_back(broker: BrokerController, client: WireClient, later: bool) -> None:
    await client.send("Orders")
    (message,) = await client.pull_messages("Orders")
    result = PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark="full")

    def put(_message: MessageInner, done: PutCallback) -> PutMessageResult | None:
        if not later:
            return result
        trio.lowlevel.current_trio_token().run_sync_soon(done, result)
        return None

    async with store_that(broker, put_message=put) as other:
        ext = {"offset": message.commit_log_offset, "group": "G", "delayLevel": 0}
        reply = await other.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext)
        assert (reply.code, reply.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, "full")


def store_that(broker: BrokerController, **methods: Callable[..., Any]) -> Any:
    """A client of a port whose sends go to a store with replaced methods."""
    kept = {name: getattr(broker.context.store, name) for name in methods}
    for name, method in methods.items():
        setattr(broker.context.store, name, method)
    table = HandlerTable()
    send_processor(broker.context, end_processor(broker.context)).register(table)
    send_back_processor(broker.context).register(table)
    table.register(RequestCode.GET_MAX_OFFSET, lambda _, command: command.reply(header={"offset": "0"}))
    sock = listen("127.0.0.1", 0)
    address = sock.getsockname()
    broker.reactor.add_listener(sock, table)
    return _restoring(broker, kept, WireClient.connect(address))


class _restoring:  # noqa: N801 - used like a function
    def __init__(self, broker: BrokerController, kept: dict[str, Any], inner: Any) -> None:
        self.broker, self.kept, self.inner = broker, kept, inner

    async def __aenter__(self) -> WireClient:
        client: WireClient = await self.inner.__aenter__()
        return client

    async def __aexit__(self, *error: object) -> None:
        for name, method in self.kept.items():
            setattr(self.broker.context.store, name, method)
        await self.inner.__aexit__(*error)


@pytest.mark.parametrize(
    ("status", "offset", "code"),
    [
        (GetMessageStatus.NO_MATCHED_MESSAGE, 3, ResponseCode.PULL_RETRY_IMMEDIATELY),
        (GetMessageStatus.MESSAGE_WAS_REMOVING, 3, ResponseCode.PULL_RETRY_IMMEDIATELY),
        (GetMessageStatus.OFFSET_FOUND_NULL, 3, ResponseCode.PULL_NOT_FOUND),
        (GetMessageStatus.OFFSET_OVERFLOW_ONE, 3, ResponseCode.PULL_NOT_FOUND),
        (GetMessageStatus.OFFSET_OVERFLOW_BADLY, 3, ResponseCode.PULL_OFFSET_MOVED),
        (GetMessageStatus.OFFSET_TOO_SMALL, 3, ResponseCode.PULL_OFFSET_MOVED),
        (GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, 0, ResponseCode.PULL_NOT_FOUND),
        (GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, 3, ResponseCode.PULL_OFFSET_MOVED),
        (GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0, ResponseCode.PULL_NOT_FOUND),
        (GetMessageStatus.NO_MESSAGE_IN_QUEUE, 3, ResponseCode.PULL_OFFSET_MOVED),
    ],
)
@pytest.mark.parametrize("cold", [False, True])
async def test_outcomes_of_a_get(
    broker: BrokerController, client: WireClient, status: GetMessageStatus, offset: int, code: int, cold: bool
) -> None:
    released = []
    result = GetMessageResult(status, 5, 2, 9, release=lambda: released.append(1))

    store = broker.context.store
    usual = store.get_message  # the delivery of delayed messages calls it too

    async def get_cold(*_: Any) -> GetMessageResult:
        return result

    def get(topic: str, *where: Any) -> GetMessageResult | None:
        if topic != "TBW102":
            return usual(topic, *where)
        return None if cold else result

    store.get_message = get
    store.get_message_cold = get_cold
    reply = await client.pull("TBW102", offset)
    assert (reply.code, reply.remark) == (code, status.name)
    ext = reply.ext_fields()
    assert (ext["nextBeginOffset"], ext["minOffset"], ext["maxOffset"]) == ("5", "2", "9")
    assert released == [1]


async def test_the_store_learns_which_group_pulls(broker: BrokerController, client: WireClient) -> None:
    await client.send("Orders", b"one")
    store = broker.context.store
    asked: list[tuple[object, ...]] = []
    cold = store.get_message_cold

    def get(*arguments: Any) -> GetMessageResult | None:
        asked.append(arguments)
        return None

    async def get_cold(*arguments: Any) -> GetMessageResult:
        asked.append(arguments)
        return await cold(*arguments)

    store.get_message, store.get_message_cold = get, get_cold
    (message,) = await client.pull_messages("Orders", group="Readers")
    assert message.body == b"one"
    assert [arguments[6] for arguments in asked] == ["Readers"] * 2


async def test_cold_data(broker: BrokerController, client: WireClient) -> None:
    sent = await client.send("Orders", b"one", {"KEYS": "k"})
    store = broker.context.store
    for name in ("get_message", "query_message", "look_message"):
        setattr(store, name, lambda *_: None)
    (message,) = await client.pull_messages("Orders")
    assert message.body == b"one"
    reply = await client.pull("Orders", 1, sysFlag=6, suspendTimeoutMillis=200)
    assert reply.remark == "OFFSET_OVERFLOW_ONE"
    ext = {"topic": "Orders", "key": "k", "maxNum": 4, "beginTimestamp": 0, "endTimestamp": 2**60}
    assert (await client.ask(RequestCode.QUERY_MESSAGE, ext)).code == ResponseCode.SUCCESS
    offset = decode_offset_id(sent.ext_fields()["msgId"])[1]
    assert b"one" in bytes((await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": offset})).body)
    back = {"offset": offset, "group": "G", "delayLevel": 1}
    assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == ResponseCode.SUCCESS


async def test_handler_that_fails_costs_one_request(broker: BrokerController, client: WireClient) -> None:
    def broken(*_: Any) -> Any:
        raise LookupError("inside")

    kept = broker.context.store.look_message
    setattr(broker.context.store, "look_message", broken)  # noqa: B010 - a method, to mypy
    reply = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": 0})
    assert (reply.code, reply.remark) == (ResponseCode.SYSTEM_ERROR, "LookupError: inside")
    setattr(broker.context.store, "look_message", kept)  # noqa: B010 - as above
    assert (await client.send("Orders")).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_rounds_get_larger_where_they_share_a_sync(tmp_path: Path, flush: str) -> None:
    async with running_broker(tmp_path, flushDiskType=flush) as broker:
        assert bool(broker.reactor.limits.spin_many) == (flush == "ASYNC_FLUSH")
