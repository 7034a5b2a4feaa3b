"""Behaviour that no real broker shows at a test's request: errors, no reply, replies at a given time."""

from datetime import UTC, datetime

import anyio
import pytest

from tests.client.scripted import Answer, ScriptedBroker, pull_header, records, scripted_broker
from trimq.client import (
    ClientOptions,
    Consumer,
    Message,
    NotStoredError,
    PerhapsStoredError,
    Producer,
    PullConsumer,
    SendOutcome,
)
from trimq.protocol.batch import decode_batch
from trimq.protocol.body import BrokerData, QueueData, TopicRouteData, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.headers.client import HeartbeatResponseHeader

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

SEND = RequestCode.SEND_MESSAGE_V2
BATCH = RequestCode.SEND_BATCH_MESSAGE


def stored(command: RemotingCommand) -> RemotingCommand:
    return command.reply(header={"msgId": "0" * 32, "queueId": command.ext_fields()["e"], "queueOffset": "5"})


def refused(code: int) -> Answer:
    return lambda command: command.reply(code, "not here")


def messages_of(command: RemotingCommand) -> int:
    """The number of messages in a send of a batch."""
    return len(decode_batch(command.body)) if command.code == BATCH else 0


def route_of_both(one: ScriptedBroker, two: ScriptedBroker) -> Answer:
    brokers = [
        BrokerData(cluster="c", broker_name=name, broker_addrs={"0": broker.address})
        for name, broker in (("a", one), ("b", two))
    ]
    queues = [QueueData(broker_name=name, read_queue_nums=2, write_queue_nums=2, perm=6) for name in ("a", "b")]
    body = encode_json(TopicRouteData(broker_datas=brokers, queue_datas=queues))
    return lambda command: command.reply(body=body)


@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_BUSY, ResponseCode.SYSTEM_ERROR])
async def test_a_send_that_fails_is_repeated_on_another_broker_and_the_first_left_alone(code: int) -> None:
    async with scripted_broker() as one, scripted_broker() as two:
        one.answers |= {RequestCode.GET_ROUTEINFO_BY_TOPIC: route_of_both(one, two), SEND: refused(code)}
        two.answers[SEND] = stored
        async with Producer("p", namesrv=one.address) as producer:
            receipts = [await producer.send(Message("T", b"x")) for _ in range(8)]
        assert {receipt.queue.broker_name for receipt in receipts} == {"b"}
        assert (one.counts[SEND], two.counts[SEND]) == (1, 8)


async def test_an_error_has_the_brokers_code_and_address_and_says_what_to_do() -> None:
    async with scripted_broker() as broker:
        broker.answers[SEND] = refused(ResponseCode.SYSTEM_BUSY)
        async with Producer("p", namesrv=broker.address, retries=0) as producer:
            message = Message("T", b"x")
            with pytest.raises(NotStoredError) as error:
                await producer.send(message)
        assert (error.value.code, error.value.address) == (ResponseCode.SYSTEM_BUSY, broker.address)
        assert message.outcome is SendOutcome.NOT_STORED
        assert "not here" in str(error.value)
        assert error.value.help


async def test_a_cancelled_send_says_whether_it_was_under_way() -> None:
    async with scripted_broker() as broker:
        broker.answers[SEND] = lambda _: None
        async with (
            Producer("p", namesrv=broker.address, max_in_flight=1) as producer,
            anyio.create_task_group() as group,
        ):
            out, waiting = Message("T", b"out"), Message("T", b"waiting")
            group.start_soon(producer.send, out)
            await broker.until(SEND, 1)
            group.start_soon(producer.send, waiting)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert (out.outcome, waiting.outcome) == (SendOutcome.PERHAPS_STORED, SendOutcome.NOT_STORED)
        assert broker.counts[SEND] == 1


async def test_no_more_messages_are_in_flight_than_allowed() -> None:
    async with scripted_broker() as broker:
        broker.answers[SEND] = lambda _: None
        async with (
            Producer("p", namesrv=broker.address, max_in_flight=3) as producer,
            anyio.create_task_group() as group,
        ):
            for number in range(9):
                group.start_soon(producer.send, Message("T", b"%d" % number))
            for answered in range(9):
                sends = await broker.until(SEND, min(answered + 3, 9))
                await anyio.wait_all_tasks_blocked()
                assert broker.counts[SEND] == min(answered + 3, 9)
                stream = next(stream for stream, command in broker.seen if command is sends[answered])
                await stream.send(encode(stored(sends[answered])))


@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_BUSY, ResponseCode.SYSTEM_ERROR])
async def test_a_batch_that_fails_is_repeated_on_another_broker_and_the_first_left_alone(code: int) -> None:
    async with scripted_broker() as one, scripted_broker() as two:
        one.answers |= {RequestCode.GET_ROUTEINFO_BY_TOPIC: route_of_both(one, two), BATCH: stored}
        two.answers[BATCH] = stored
        async with Producer("p", namesrv=one.address, linger=0.0) as producer:
            for _ in range(4):  # opens the connections
                await producer.send(Message("T", b"x"))
            before = one.counts[BATCH]
            one.answers[BATCH] = refused(code)
            for _ in range(6):
                messages = [Message("T", b"%d" % number) for number in range(3)]
                async with anyio.create_task_group() as group:
                    for message in messages:
                        group.start_soon(producer.send, message)
                assert {message.outcome for message in messages} == {SendOutcome.STORED}
        assert before
        assert one.counts[BATCH] == before + 1


@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("end", ["refused", "silence", "closed", "cancelled"])
async def test_every_sender_of_a_batch_learns_what_became_of_it(end: str, warm: bool) -> None:
    patience = 0.3 if end == "silence" else 20.0
    async with scripted_broker() as broker:
        async with Producer("p", namesrv=broker.address, linger=0.0, retries=0, send_timeout=patience) as producer:
            if warm:
                broker.answers[BATCH] = stored
                await producer.send(Message("T", b"opens the connection"))
            seen = len(broker.seen)
            broker.answers[BATCH] = refused(ResponseCode.SYSTEM_BUSY) if end == "refused" else lambda _: None
            messages = [Message("T", b"%d" % number) for number in range(5)]
            errors: list[BaseException] = []

            async def send(message: Message) -> None:
                try:
                    await producer.send(message)
                except (NotStoredError, PerhapsStoredError) as error:
                    errors.append(error)

            async with anyio.create_task_group() as group:
                for message in messages:
                    group.start_soon(send, message)
                while sum(messages_of(command) for _, command in broker.seen[seen:]) < len(messages):
                    await broker.arrived.wait()
                if end == "cancelled":
                    group.cancel_scope.cancel()
                elif end == "closed":
                    await broker.seen[-1][0].aclose()
            if end == "cancelled":
                await broker.seen[-1][0].aclose()  # on close, the producer would wait for the sends in flight
        outcome = SendOutcome.NOT_STORED if end == "refused" else SendOutcome.PERHAPS_STORED
        assert {message.outcome for message in messages} == {outcome}
        kinds = {"refused": [NotStoredError] * 5, "cancelled": []}
        assert [type(error) for error in errors] == kinds.get(end, [PerhapsStoredError] * 5)
        assert len({id(error) for error in errors}) == len(errors)


@pytest.mark.parametrize("offered", [False, True])
async def test_msgpack_headers_go_to_a_broker_that_said_it_takes_them(offered: bool) -> None:
    async with scripted_broker() as broker:
        broker.answers[SEND] = stored
        broker.answers[RequestCode.HEART_BEAT] = lambda command: command.reply(
            header=HeartbeatResponseHeader(trimq_msgpack=True if offered else None)
        )
        async with Producer("p", namesrv=broker.address, options=ClientOptions(header="msgpack")) as producer:
            await producer.send(Message("T", b"before"))
            await producer.client.heartbeat()
            await producer.send(Message("T", b"after"))
        before, after = await broker.until(SEND, 2)
        assert before.encoding is Encoding.JSON
        assert after.encoding is (Encoding.MSGPACK if offered else Encoding.JSON)


async def test_a_group_that_may_not_ask_for_offsets_begins_at_the_first_message() -> None:
    """A user with Sub but not Get: it pulls at 0, as Java's consumers do, and learns where the queue begins."""
    async with scripted_broker() as broker:
        broker.answers |= {
            RequestCode.QUERY_CONSUMER_OFFSET: refused(ResponseCode.QUERY_NOT_FOUND),
            RequestCode.GET_MIN_OFFSET: refused(ResponseCode.NO_PERMISSION),
            RequestCode.PULL_MESSAGE: lambda command: (
                command.reply(ResponseCode.PULL_OFFSET_MOVED, header=pull_header(7))
                if command.ext_fields()["queueOffset"] == "0"
                else command.reply(header=pull_header(8), body=records(7, 1))
            ),
        }
        async with PullConsumer("g", namesrv=broker.address, start="first") as consumer:
            await consumer.assign(await consumer.queues("T"))
            (message,) = await consumer.poll(1, timeout=20)
        assert message.queue_offset == 7


@pytest.mark.parametrize("start", [1234.5, datetime.fromtimestamp(1234.5, UTC)], ids=["seconds", "datetime"])
async def test_a_group_without_offsets_begins_at_a_time(start: datetime | float) -> None:
    async with scripted_broker() as broker:
        broker.answers |= {
            RequestCode.QUERY_CONSUMER_OFFSET: refused(ResponseCode.QUERY_NOT_FOUND),
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: lambda command: command.reply(header={"offset": "42"}),
            RequestCode.PULL_MESSAGE: lambda _: None,
        }
        async with Consumer("g", "T", namesrv=broker.address, start=start, model="broadcasting"):
            (search,) = await broker.until(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, 1)
            (pull,) = await broker.until(RequestCode.PULL_MESSAGE, 1)
        assert search.ext_fields()["timestamp"] == "1234500"
        assert pull.ext_fields()["queueOffset"] == "42"
