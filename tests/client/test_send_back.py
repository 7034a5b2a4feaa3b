"""Handing a message back: the broker stores it, a copy is sent, or it stays. And brokers' requests to clients."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from tests.client.scripted import Answer, ScriptedBroker, pull_header, records, scripted_broker
from tests.client.test_scripted import SEND, refused, stored
from trimq.client import Consumer, ReceivedMessage
from trimq.client.core import Client
from trimq.client.decode import split_messages
from trimq.client.retries import send_back
from trimq.protocol import lenient_json
from trimq.protocol.body import encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.property_text import decode_properties

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

BACK = RequestCode.CONSUMER_SEND_MSG_BACK


def message() -> ReceivedMessage:
    return split_messages(records(7, 1), "a", ReceivedMessage)[0]


@asynccontextmanager
async def client_of(answers: dict[int, Answer]) -> AsyncIterator[tuple[ScriptedBroker, Client]]:
    async with scripted_broker() as broker, Client(broker.address) as client:
        broker.answers |= answers
        yield broker, client


@pytest.mark.parametrize(("most", "expected"), [(-1, None), (5, "5")])
async def test_the_broker_keeps_it(most: int, expected: str | None) -> None:
    async with client_of({}) as (broker, client):
        assert await send_back(client, "g", message(), 3, most)
        [asked] = await broker.until(BACK, 1)
        fields = asked.ext_fields()
        assert (fields["group"], fields["originTopic"], fields["delayLevel"]) == ("g", "T", "3")
        assert fields.get("maxReconsumeTimes") == expected
        assert broker.counts[SEND] == 0


@pytest.mark.parametrize(
    ("level", "most", "times", "delay", "limit"),
    [(0, -1, "1", "3", "16"), (5, 2, "1", "5", "2"), (-1, 2, "3", "3", "2"), (-1, -1, "17", "3", "16")],
    ids=["later", "at a level", "dead letter", "dead letter by default"],
)
async def test_a_copy_is_sent_where_the_broker_does_not(
    level: int, most: int, times: str, delay: str, limit: str
) -> None:
    async with client_of({BACK: refused(ResponseCode.SYSTEM_ERROR), SEND: stored}) as (broker, client):
        assert await send_back(client, "g", message(), level, most)
        [copy] = await broker.until(SEND, 1)
        fields = copy.ext_fields()
        assert fields["b"] == "%RETRY%g"
        assert bytes(copy.body) == b"7"
        properties = decode_properties(fields["i"])
        assert properties["RETRY_TOPIC"] == "T"
        assert properties["RECONSUME_TIME"] == times
        assert properties["DELAY"] == delay
        assert properties["MAX_RECONSUME_TIMES"] == limit
        assert properties["ORIGIN_MESSAGE_ID"] == message().offset_message_id


async def test_it_stays_where_neither_works() -> None:
    busy = refused(ResponseCode.SYSTEM_BUSY)
    async with client_of({BACK: busy, SEND: busy}) as (broker, client):
        assert not await send_back(client, "g", message(), 0, -1)
        assert broker.counts[SEND] == 1


# -- requests of brokers -----------------------------------------------------------------------------------------------


class Pushing:
    """A consumer of T that has read messages 0 and 1 and acknowledged the first, with its connection."""

    def __init__(self, broker: ScriptedBroker, consumer: Consumer) -> None:
        self.broker = broker
        self.consumer = consumer
        self.opaque = 1_000_000
        self.answers: dict[int, RemotingCommand] = {}

    async def ask(self, code: int, fields: dict[str, str], body: bytes = b"") -> RemotingCommand:
        """Send the consumer a request of its broker, and return the reply."""
        self.opaque += 1
        command = RemotingCommand.request(code, fields, body)
        command.opaque = self.opaque
        [stream] = {
            id(stream): stream for stream, seen in self.broker.seen if seen.code == RequestCode.HEART_BEAT
        }.values()
        await self.broker.send(stream, command)
        while True:
            for _, seen in self.broker.seen:
                if seen.opaque == command.opaque and seen.is_reply:
                    return seen
            await self.broker.arrived.wait()


def pulled(command: RemotingCommand) -> RemotingCommand | None:
    offset = int(command.ext_fields()["queueOffset"])
    if command.ext_fields()["topic"] != "T" or offset >= 2:
        return None  # held
    return command.reply(header=pull_header(2), body=records(offset, 2 - offset))


@asynccontextmanager
async def pushing() -> AsyncIterator[Pushing]:
    async with scripted_broker() as broker:
        broker.answers |= {
            RequestCode.PULL_MESSAGE: pulled,
            RequestCode.QUERY_CONSUMER_OFFSET: lambda command: command.reply(header={"offset": "0"}),
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: lambda command: command.reply(
                body=encode_json({"consumerIdList": [consumer.client.id]})
            ),
        }
        consumer: Consumer = Consumer("g", "T", namesrv=broker.address)
        async with consumer:
            with anyio.fail_after(20):
                await (await anext(consumer)).ack()
            yield Pushing(broker, consumer)


def offsets(broker_name: str, offset: int) -> bytes:
    key = b'{"brokerName":"%s","queueId":0,"topic":"T"}' % broker_name.encode()
    return b'{"offsetTable":{%s:%d}}' % (key, offset)


async def test_offsets_are_reset_by_a_broker() -> None:
    async with pushing() as pushed:
        fields = {"topic": "T", "group": "g", "timestamp": "0", "isForce": "true"}
        reply = await pushed.ask(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, fields, offsets("a", 0))
        assert reply.code == ResponseCode.SUCCESS
        assert (await anext(pushed.consumer)).queue_offset == 0
        # an unknown queue is no error: brokers send the request to all members
        reply = await pushed.ask(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, fields, offsets("b", 0))
        assert reply.code == ResponseCode.SUCCESS


async def test_a_consumer_reports_its_offsets() -> None:
    async with pushing() as pushed:
        reply = await pushed.ask(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": "T", "group": "g"})
        [(queue, offset)] = lenient_json.loads(bytes(reply.body))["messageQueueTable"].items()
        assert lenient_json.loads(queue) == {"brokerName": "a", "queueId": 0, "topic": "T"}
        assert offset == 1
        reply = await pushed.ask(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": "Other", "group": "g"})
        assert bytes(reply.body) == b'{"messageQueueTable":{}}'


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (RequestCode.RESET_CONSUMER_CLIENT_OFFSET, {"topic": "T", "group": "x", "timestamp": "0", "isForce": "true"}),
        (RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": "T", "group": "x"}),
        (RequestCode.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "x", "clientId": "c"}),
        (RequestCode.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": "x", "clientId": "c"}),
    ],
)
async def test_what_is_another_groups_is_refused(code: int, fields: dict[str, str]) -> None:
    async with pushing() as pushed:
        reply = await pushed.ask(code, fields)
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "no member" in str(reply.remark)


async def test_a_message_that_is_tried_at_once() -> None:
    async with pushing() as pushed:
        answers: list[Any] = []

        async def handle() -> None:
            async for one in pushed.consumer:
                if one.queue_offset == 7:
                    await one.nack()
                    return
                await one.ack()

        async with anyio.create_task_group() as group:
            group.start_soon(handle)
            fields = {"consumerGroup": "g", "clientId": pushed.consumer.client.id, "brokerName": "a"}
            answers.append(await pushed.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, fields, records(7, 1)))
        assert b'"consumeResult":"CR_LATER"' in bytes(answers[0].body)
        reply = await pushed.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, fields, records(7, 2))
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "one message is expected, here are 2" in str(reply.remark)
