"""What producers and consumers report in message traces, and that traffic never waits for the reports."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import pytest

from tests.client.scripted import Answer, ScriptedBroker, listening, pull_header
from tests.client.test_transaction_checks import ask
from trimq.client import (
    Consumer,
    Message,
    NotStoredError,
    PerhapsStoredError,
    Producer,
    PullConsumer,
    TransactionProducer,
    TransactionState,
    UsageError,
    lifecycle,
)
from trimq.client.compression import decompress
from trimq.client.trace import dispatcher as dispatcher_module
from trimq.client.trace import hooks
from trimq.client.trace.dispatcher import TraceDispatcher
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message_trace import (
    EndState,
    EndTransactionTrace,
    MessageTrace,
    MessageType,
    PubTrace,
    RecallTrace,
    SubAfterTrace,
    SubBeforeTrace,
    decode_traces,
)
from trimq.protocol.property_text import decode_properties, encode_properties
from trimq.protocol.recall_handle import encode_handle
from trimq.protocol.record import encode_record, pack_host

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

SEND: Final = RequestCode.SEND_MESSAGE_V2
TRACES: Final = "RMQ_SYS_TRACE_TOPIC"


class Traced(ScriptedBroker):
    """A broker that stores what it gets and decodes the traces. ``traces_answer`` replaces its answer to these."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[list[MessageTrace]] = []
        self.keys: list[list[str]] = []
        self.groups: list[str] = []
        self.fields: dict[str, str] = {}
        self.refuse: Answer | None = None
        self.traces_answer: Answer | None = None
        self.trace_topic = TRACES
        self.answers |= {SEND: self.take, RequestCode.SEND_BATCH_MESSAGE: self.take_batch}

    @property
    def traces(self) -> list[MessageTrace]:
        return list(itertools.chain(*self.bodies))

    def take(self, command: RemotingCommand) -> RemotingCommand | None:
        fields = command.ext_fields()
        if fields["b"] == self.trace_topic:
            if self.traces_answer is not None:
                return self.traces_answer(command)
            text = decompress(bytes(command.body), int(fields["f"])).decode()
            decoded = decode_traces(text)
            assert decoded.skipped == 0
            self.bodies.append(decoded.traces)
            self.keys.append(decode_properties(fields["i"])["KEYS"].split(" "))
            self.groups.append(fields["a"])
        elif self.refuse is not None:
            return self.refuse(command)
        offset_id = "7F00000100002A9F" + "0" * 15 + "7"
        header = {"msgId": offset_id, "queueId": fields["e"], "queueOffset": "5", "transactionId": "tx", **self.fields}
        return command.reply(header=header)

    def take_batch(self, command: RemotingCommand) -> RemotingCommand:
        header = {"msgId": "7F00000100002A9F" + "0" * 16, "queueId": "0", "queueOffset": "5", **self.fields}
        return command.reply(header=header)


@pytest.fixture
async def broker() -> AsyncIterator[Traced]:
    made = Traced()
    async with listening(made):
        yield made


def dispatcher_of(member: Producer | Consumer | PullConsumer) -> TraceDispatcher:
    assert member.trace_dispatcher is not None
    return member.trace_dispatcher


async def test_a_send(broker: Traced) -> None:
    broker.fields = {"MSG_REGION": "north", "TRACE_ON": "true"}
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        message = Message("T", b"1 book", tags="paid", keys=["o-1", "c-7"])
        receipt = await producer.send(message)
    [trace] = broker.traces
    assert isinstance(trace, PubTrace)
    assert trace == PubTrace(
        trace.timestamp, "north", "orders", "T", receipt.message_id, "paid", "o-1 c-7", broker.address, 6, trace.cost,
        MessageType.NORMAL, receipt.offset_message_id, True,
    )  # fmt: skip
    assert trace.timestamp > 1_700_000_000_000
    assert 0 <= trace.cost < 30_000
    assert broker.keys == [[receipt.message_id, "o-1", "c-7"]]
    [group] = broker.groups
    assert group.startswith("_INNER_TRACE_PRODUCER-orders-PRODUCE-")
    assert (dispatcher_of(producer).sent, dispatcher_of(producer).discarded) == (1, 0)


async def test_without_the_option_there_is_no_trace(broker: Traced) -> None:
    async with Producer("orders", namesrv=broker.address) as producer:
        await producer.send(Message("T", b"x"))
        assert producer.trace_dispatcher is None
    assert broker.traces == []


@pytest.mark.parametrize(
    ("delay", "kind"),
    [({"delay_level": 3}, MessageType.DELAY), ({"delay": 5.0}, MessageType.DELAY), ({}, MessageType.NORMAL)],
)
async def test_the_type_of_the_message(broker: Traced, delay: dict[str, Any], kind: MessageType) -> None:
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        await producer.send(Message("T", b"x", **delay))
    [trace] = broker.traces
    assert isinstance(trace, PubTrace)
    assert trace.message_type is kind


async def test_failed_sends(broker: Traced) -> None:
    async with Producer("orders", namesrv=broker.address, retries=0, enable_msg_trace=True) as producer:
        broker.refuse = lambda command: command.reply(ResponseCode.SYSTEM_BUSY, "not now")
        message = Message("T", b"x")
        with pytest.raises(NotStoredError):
            await producer.send(message)
        broker.refuse = lambda command: command.reply(
            ResponseCode.FLUSH_DISK_TIMEOUT, header={"msgId": "0" * 32, "queueId": "0", "queueOffset": "5"}
        )
        not_flushed = await producer.send(Message("T", b"x"))
        with pytest.raises(UsageError):
            await producer.send(Message("T", b""))  # it never got an id, so there is no trace of it
    assert [(trace.message_id, isinstance(trace, PubTrace) and trace.success) for trace in broker.traces] == [
        (message.message_id, False),
        (not_flushed.message_id, False),
    ]
    first, second = broker.traces
    assert isinstance(first, PubTrace)
    assert isinstance(second, PubTrace)
    assert (first.offset_message_id, second.offset_message_id) == (None, "0" * 32)
    assert first.store_host == broker.address


async def test_a_send_without_a_reply_is_not_traced(broker: Traced) -> None:
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        await producer.send_oneway(Message("T", b"x"))
        receipt = await producer.send(Message("T", b"y"))
    assert [trace.message_id for trace in broker.traces] == [receipt.message_id]


async def test_the_trace_topic_itself_is_not_traced(broker: Traced) -> None:
    broker.trace_topic = "Traces"
    async with Producer(
        "orders", namesrv=broker.address, enable_msg_trace=True, customized_trace_topic="Traces"
    ) as producer:
        receipt = await producer.send(Message("T", b"x"))
        await producer.send(Message("Traces", b"\x02", keys="mine"))
    assert [trace.message_id for trace in broker.traces] == [receipt.message_id]


async def test_a_broker_that_wants_no_traces_gets_none(broker: Traced) -> None:
    broker.fields = {"TRACE_ON": "false"}
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        await producer.send(Message("T", b"x"))
        broker.fields = {"TRACE_ON": "true"}
        wanted = await producer.send(Message("T", b"x"))
    assert [trace.message_id for trace in broker.traces] == [wanted.message_id]


async def test_each_message_of_a_batch(broker: Traced) -> None:
    broker.fields = {"MSG_REGION": "north"}
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True, retries=0) as producer:
        receipts = await producer.send_batch([Message("T", b"a", tags="t", keys="k"), Message("T", b"bc")])
        broker.answers[RequestCode.SEND_BATCH_MESSAGE] = lambda command: command.reply(ResponseCode.SYSTEM_BUSY, "no")
        lost = [Message("T", b"a"), Message("T", b"b")]
        with pytest.raises(NotStoredError):
            await producer.send_batch(lost)
    assert [(t.message_id, t.tags, t.keys, t.region, t.body_length, t.success) for t in pubs(broker)] == [
        (receipts[0].message_id, "t", "k", "north", 1, True),
        (receipts[1].message_id, None, None, "north", 2, True),
        (lost[0].message_id, None, None, "DefaultRegion", 1, False),
        (lost[1].message_id, None, None, "DefaultRegion", 1, False),
    ]
    assert [trace.store_host for trace in pubs(broker)] == ["127.0.0.1:10911"] * 2 + [""] * 2


async def test_a_batch_whose_reply_has_no_address(broker: Traced) -> None:
    header = {"msgId": "none", "queueId": "0", "queueOffset": "5"}
    broker.answers[RequestCode.SEND_BATCH_MESSAGE] = lambda command: command.reply(header=header)
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        await producer.send_batch([Message("T", b"a")])
    assert [(trace.store_host, trace.offset_message_id) for trace in pubs(broker)] == [("", "none")]


async def test_recalls(broker: Traced) -> None:
    broker.answers[RequestCode.RECALL_MESSAGE] = lambda command: command.reply(header={"msgId": "7F01"})
    handle = encode_handle("T", "a", 1_700_000_000_000, "7F01")
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        broker.fields = {"MSG_REGION": "north"}
        receipt = await producer.send(Message("T", b"x"))
        assert await producer.recall(handle) == "7F01"
        broker.answers[RequestCode.RECALL_MESSAGE] = lambda command: command.reply(
            ResponseCode.ILLEGAL_OPERATION, "it is due already"
        )
        with pytest.raises(UsageError, match="due already"):
            await producer.recall(handle)
        broker.fields = {"TRACE_ON": "false"}
        await producer.send(Message("T", b"x"))
        with pytest.raises(UsageError, match="due already"):
            await producer.recall(handle)
    sent, *recalls = broker.traces
    assert sent.message_id == receipt.message_id
    assert [trace for trace in recalls if isinstance(trace, RecallTrace)] == recalls
    assert [trace[1:] for trace in recalls] == [
        ("north", "orders", "T", "7F01", True),
        ("north", "orders", "T", "7F01", False),
    ]


async def test_messages_that_linger(broker: Traced) -> None:
    broker.fields = {"MSG_REGION": "north"}
    async with (
        Producer("orders", namesrv=broker.address, enable_msg_trace=True, linger=0) as producer,
        anyio.create_task_group() as group,
    ):
        await producer.send(Message("T", b"a"))  # opens the connection: the next batch is sent without a task
        broker.fields = {"MSG_REGION": "south"}
        for _ in range(3):
            group.start_soon(producer.send, Message("T", b"a"))
    assert [(trace.region, trace.success) for trace in pubs(broker)] == [("north", True)] + [("south", True)] * 3


def pubs(broker: Traced) -> list[PubTrace]:
    return [trace for trace in broker.traces if isinstance(trace, PubTrace)]


@pytest.mark.parametrize("state", TransactionState)
async def test_the_end_of_a_transaction(broker: Traced, state: TransactionState) -> None:
    async with (
        TransactionProducer("orders", lambda _: state, namesrv=broker.address, enable_msg_trace=True) as producer,
        producer.transaction(Message("T", b"x", tags="t", keys="k")) as transaction,
    ):
        transaction.state = state
    half, end = broker.traces
    assert isinstance(half, PubTrace)
    assert isinstance(end, EndTransactionTrace)
    assert (half.message_type, half.success) == (MessageType.TRANS_HALF, True)
    expected = {"COMMIT": EndState.COMMIT, "ROLLBACK": EndState.ROLLBACK, "UNKNOWN": EndState.UNKNOWN}[state.name]
    assert end == EndTransactionTrace(
        end.timestamp, "DefaultRegion", "orders", "T", half.message_id, "t", "k", broker.address,
        MessageType.TRANS_COMMIT, "tx", expected, False,
    )  # fmt: skip
    assert end.timestamp >= half.timestamp


async def test_ends_of_transactions_that_are_not_traced(broker: Traced) -> None:
    broker.trace_topic = "Traces"
    options = {"namesrv": broker.address, "enable_msg_trace": True, "customized_trace_topic": "Traces"}
    async with TransactionProducer("g", lambda _: TransactionState.COMMIT, **options) as producer:  # type: ignore[arg-type]
        async with producer.transaction(Message("Traces", b"\x02", keys="k")):
            pass
        broker.fields = {"TRACE_ON": "false"}
        async with producer.transaction(Message("T", b"x")):
            pass
    assert broker.traces == []
    assert broker.counts[RequestCode.END_TRANSACTION] == 2


async def test_the_end_of_a_transaction_that_is_cancelled(broker: Traced) -> None:
    broker.answers[RequestCode.END_TRANSACTION] = lambda _: None
    async with (
        TransactionProducer(
            "g", lambda _: TransactionState.COMMIT, namesrv=broker.address, enable_msg_trace=True
        ) as producer,
        anyio.create_task_group() as group,
    ):

        async def pay() -> None:
            async with producer.transaction(Message("T", b"x")):
                pass

        group.start_soon(pay)
        await broker.until(RequestCode.END_TRANSACTION, 1)
        group.cancel_scope.cancel()
    assert [trace.type for trace in broker.traces] == ["Pub", "EndTransaction"]


async def test_the_answer_to_a_check_is_traced_with_the_region_of_the_message(broker: Traced) -> None:
    broker.answers[RequestCode.END_TRANSACTION] = lambda _: None
    async with TransactionProducer(
        "g", lambda _: TransactionState.COMMIT, namesrv=broker.address, enable_msg_trace=True
    ) as producer:
        await producer.queues("T")
        await producer.client.heartbeat()
        await ask(broker, "g", b"x", MSG_REGION="north")
        await broker.until(RequestCode.END_TRANSACTION, 1)
        with anyio.fail_after(10):
            while not dispatcher_of(producer).sent:
                await dispatcher_of(producer).flush()
                await anyio.lowlevel.checkpoint()
    [end] = broker.traces
    assert isinstance(end, EndTransactionTrace)
    assert (end.state, end.from_transaction_check, end.transaction_id) == (EndState.COMMIT, True, "t")
    assert (end.store_host, end.topic, end.region) == (broker.address, "T", "north")


# -- consumers ---------------------------------------------------------------------------------------------------------


def stored(*properties: dict[str, str], topic: bytes = b"T") -> Answer:
    """The answer to the first pull: messages with these properties. Later pulls are held."""
    body = b"".join(
        encode_record(
            topic=topic,
            body=b"x",
            queue_id=0,
            queue_offset=number,
            properties=encode_properties(each).encode(),
            physical_offset=number,
            born_timestamp=0,
            born_host=pack_host("127.0.0.1", 1),
            store_timestamp=0,
            store_host=pack_host("127.0.0.1", 1),
            reconsume_times=2,
        )
        for number, each in enumerate(properties)
    )

    def answer(command: RemotingCommand) -> RemotingCommand | None:
        if command.ext_fields()["queueOffset"] != "0":
            return None
        return command.reply(header=pull_header(len(properties)), body=body)

    return answer


@asynccontextmanager
async def consuming(broker: Traced, *properties: dict[str, str], topic: bytes = b"T") -> AsyncIterator[Consumer]:
    broker.answers |= {
        RequestCode.PULL_MESSAGE: stored(*properties, topic=topic),
        RequestCode.GET_MIN_OFFSET: lambda command: command.reply(header={"offset": "0"}),
    }
    async with Consumer(
        "billing", topic.decode(), namesrv=broker.address, model="broadcasting", start="first", enable_msg_trace=True
    ) as consumer:
        yield consumer


async def test_processing(broker: Traced) -> None:
    properties = {"UNIQ_KEY": "7F01", "KEYS": "k1 k2", "MSG_REGION": "north", "TRACE_ON": "true"}
    async with consuming(broker, properties) as consumer, (await anext(consumer)).process():
        pass
    before, after = broker.traces
    assert isinstance(before, SubBeforeTrace)
    assert isinstance(after, SubAfterTrace)
    assert before == SubBeforeTrace(before.timestamp, "north", "billing", before.request_id, "7F01", 2, "k1 k2")
    assert after == SubAfterTrace(before.request_id, "7F01", after.cost, True, "k1 k2", 0, after.timestamp, "billing")
    assert (after.timestamp or 0) >= before.timestamp > 1_700_000_000_000
    assert broker.keys == [["7F01", "k1", "k2"]]
    assert broker.groups[0].startswith("_INNER_TRACE_PRODUCER-billing-CONSUME-")


async def test_processing_that_fails_or_is_cancelled(broker: Traced) -> None:
    async with consuming(broker, {"UNIQ_KEY": "A"}, {"UNIQ_KEY": "B"}) as consumer:
        async with (await anext(consumer)).process():
            raise ValueError("not today")
        with anyio.CancelScope() as scope:
            async with (await anext(consumer)).process():
                scope.cancel()
                await anyio.lowlevel.checkpoint()
    ends = [trace for trace in broker.traces if isinstance(trace, SubAfterTrace)]
    assert [(trace.message_id, trace.success, trace.context_code) for trace in ends] == [
        ("A", False, 2),
        ("B", False, 4),
    ]


async def test_a_batch_has_one_request_id_and_shares_the_time(broker: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks._Began, "cost", lambda _began: 90)
    async with consuming(
        broker, {"UNIQ_KEY": "A"}, {"UNIQ_KEY": "B", "TRACE_ON": "false"}, {"UNIQ_KEY": "C"}
    ) as consumer:
        async for batch in consumer.batches(10):
            async with batch.process():
                assert len(batch) == 3
            break
    assert [(trace.type, trace.message_id) for trace in broker.traces] == [
        ("SubBefore", "A"), ("SubBefore", "C"), ("SubAfter", "A"), ("SubAfter", "C"),
    ]  # fmt: skip
    assert len({trace.request_id for trace in broker.traces if isinstance(trace, SubBeforeTrace | SubAfterTrace)}) == 1
    assert {trace.cost for trace in broker.traces if isinstance(trace, SubAfterTrace)} == {30}


@pytest.mark.parametrize("topic", [b"T", TRACES.encode()])
async def test_what_is_not_traced(broker: Traced, topic: bytes) -> None:
    # guards: a consumer of the trace topic would report each report
    properties = {"UNIQ_KEY": "A", "TRACE_ON": "false"} if topic == b"T" else {"UNIQ_KEY": "A"}
    async with consuming(broker, properties, topic=topic) as consumer, (await anext(consumer)).process():
        pass
    assert broker.traces == []


async def test_polled_messages(broker: Traced) -> None:
    broker.answers[RequestCode.PULL_MESSAGE] = stored({"UNIQ_KEY": "A"}, {"UNIQ_KEY": "B"})
    async with PullConsumer("audit", namesrv=broker.address, enable_msg_trace=True) as consumer:
        await consumer.assign(dict.fromkeys(await consumer.queues("T"), 0))
        assert len(await consumer.poll()) == 2
    assert [(trace.type, trace.message_id) for trace in broker.traces] == [
        ("SubBefore", "A"), ("SubBefore", "B"), ("SubAfter", "A"), ("SubAfter", "B"),
    ]  # fmt: skip
    assert all(trace.success for trace in broker.traces if isinstance(trace, SubAfterTrace))


# -- the dispatcher ----------------------------------------------------------------------------------------------------


def recall(number: int, topic: str = "T") -> RecallTrace:
    return RecallTrace(1, "r", "g", topic, f"id{number}", True)


async def test_traces_go_out_after_some_seconds(broker: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "FLUSH_INTERVAL", 0.01)
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        for number in range(3):  # each alone: the time starts with the first trace that waits
            await anyio.wait_all_tasks_blocked()
            dispatcher_of(producer).append(recall(number))
            await broker.until(SEND, number + 1)
        assert [len(body) for body in broker.bodies] == [1, 1, 1]


async def test_many_traces_go_out_immediately(broker: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "FLUSH_INTERVAL", 1e6)
    monkeypatch.setattr(dispatcher_module, "BATCH", 10)
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        assert dispatcher_of(producer).append(recall(0))
        await anyio.wait_all_tasks_blocked()  # the dispatcher waits for more
        for number in range(1, 25):
            assert dispatcher_of(producer).append(recall(number))
        await broker.until(SEND, 2)
        await anyio.wait_all_tasks_blocked()
        assert [len(body) for body in broker.bodies] == [10, 10]
        await dispatcher_of(producer).flush()
        assert [len(body) for body in broker.bodies] == [10, 10, 5]
        await dispatcher_of(producer).flush()  # nothing is waiting
    assert [trace.message_id for trace in broker.traces] == [f"id{number}" for number in range(25)]
    assert len(broker.bodies) == 3


async def test_a_message_stays_below_the_limits(broker: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len("Recall.1.r.g.T.id10.true.")
    monkeypatch.setattr(dispatcher_module, "MAX_MESSAGE_SIZE", 3 * size + 1)
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        for number in range(10, 17):
            dispatcher_of(producer).append(recall(number))
        assert not dispatcher_of(producer).append(recall(1, topic="T" * 4 * size))
        await dispatcher_of(producer).flush()
        assert [len(body) for body in broker.bodies] == [3, 3, 1]
        monkeypatch.setattr(dispatcher_module, "MAX_KEYS_SIZE", 10)
        for number in range(10, 13):  # 5 bytes each
            dispatcher_of(producer).append(recall(number))
        dispatcher_of(producer).append(SubBeforeTrace(1, "r", "g", "q", "id", 0, "aü b dropped"))
    assert [len(body) for body in broker.bodies[3:]] == [2, 1, 1]
    assert broker.keys[3:] == [["id10", "id11"], ["id12"], ["id", "aü", "b"]]
    assert dispatcher_of(producer).discarded == 1


async def test_traffic_goes_on_when_too_many_traces_wait(
    broker: Traced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatcher_module, "MAX_TRACES", 3)
    monkeypatch.setattr(dispatcher_module, "BATCH", 1)
    monkeypatch.setattr(dispatcher_module, "FLUSH_TIMEOUT", 0.01)
    monkeypatch.setattr(lifecycle, "CLOSE_TIMEOUT", 1e6)  # the dispatcher itself does not let the close wait
    broker.traces_answer = lambda _: None  # the broker is slow to store traces
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        for _ in range(10):
            await producer.send(Message("T", b"x"))
        dispatcher = dispatcher_of(producer)
        assert (dispatcher.sent, dispatcher.discarded) == (0, 6)  # one is on its way, three wait
    assert (dispatcher.sent, dispatcher.discarded) == (0, 10)  # at the close all are accounted for
    assert sum("traces are discarded" in record.getMessage() for record in caplog.records) == 1


async def test_the_bytes_that_wait_are_bounded(broker: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "MAX_WAITING_SIZE", 100)
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        dispatcher = dispatcher_of(producer)
        assert [dispatcher.append(recall(number)) for number in range(5)] == [True, True, True, False, False]
        await dispatcher.flush()
        assert dispatcher.append(recall(5))  # there is room again
    assert (dispatcher.sent, dispatcher.discarded) == (4, 2)


async def test_traces_that_a_broker_refuses_are_counted(broker: Traced, caplog: pytest.LogCaptureFixture) -> None:
    broker.traces_answer = lambda command: command.reply(ResponseCode.NO_PERMISSION, "not here")
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        dispatcher = dispatcher_of(producer)
        await producer.send(Message("T", b"x"))
        await dispatcher.flush()
        assert (dispatcher.sent, dispatcher.discarded) == (0, 1)
        broker.traces_answer = None
        await producer.send(Message("T", b"x"))
        await dispatcher.flush()
        assert (dispatcher.sent, dispatcher.discarded) == (1, 1)
    assert any("message traces cannot be stored" in record.getMessage() for record in caplog.records)


async def test_an_invalid_trace_is_discarded_alone(broker: Traced) -> None:
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        dispatcher = dispatcher_of(producer)
        assert not dispatcher.append(recall(1, topic="a\x01b"))
        assert not dispatcher.append(recall(1, topic="\ud800"))
        assert dispatcher.append(recall(2))
    assert not dispatcher.append(recall(3))  # closed
    assert (dispatcher.sent, dispatcher.discarded) == (1, 3)
    assert [trace.message_id for trace in broker.traces] == ["id2"]


async def test_the_group_of_the_traces_is_in_the_heartbeat_and_leaves(broker: Traced) -> None:
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        await producer.send(Message("T", b"x"))
        await producer.client.heartbeat()
        [heartbeat] = await broker.until(RequestCode.HEART_BEAT, 1)
        assert dispatcher_of(producer).group.encode() in bytes(heartbeat.body)
    left = [command.ext_fields()["producerGroup"] for command in await broker.until(RequestCode.UNREGISTER_CLIENT, 2)]
    assert left == ["orders", dispatcher_of(producer).group]


async def test_settings(broker: Traced) -> None:
    with pytest.raises(UsageError, match="customized_trace_topic"):
        Producer("p", namesrv=broker.address, enable_msg_trace=True, customized_trace_topic="with blank")
    with pytest.raises(UsageError, match="customized_trace_topic"):
        Producer("p", namesrv=broker.address, enable_msg_trace=True, customized_trace_topic="")
    long = Producer("p" * 255, namesrv=broker.address, enable_msg_trace=True)
    assert len(dispatcher_of(long).group) == 255


async def test_a_cancelled_send_is_traced_as_failed(broker: Traced) -> None:
    broker.refuse = lambda _: None
    async with Producer("orders", namesrv=broker.address, enable_msg_trace=True) as producer:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                message = Message("T", b"x")
                group.start_soon(producer.send, message)
                await broker.until(SEND, 1)
                scope.cancel()
    assert [(trace.message_id, trace.success) for trace in pubs(broker)] == [(message.message_id, False)]


async def test_an_unknown_outcome_is_traced_as_failed(broker: Traced) -> None:
    async with Producer(
        "orders", namesrv=broker.address, enable_msg_trace=True, send_timeout=0.01, retries=0
    ) as producer:
        await producer.queues("T")
        broker.refuse = lambda _: None
        with pytest.raises(PerhapsStoredError):
            await producer.send(Message("T", b"x"))
    assert [trace.success for trace in pubs(broker)] == [False]
