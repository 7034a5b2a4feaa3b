"""Transactional messages and request-reply, against a real broker."""

import anyio
import pytest

from tests.client.servers import Servers
from trimq.client import (
    Consumer,
    Message,
    Producer,
    PullConsumer,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
    UsageError,
)

pytestmark = pytest.mark.anyio


def never(_message: ReceivedMessage) -> TransactionState:
    pytest.fail("the broker asked although it had been notified")


async def bodies(servers: Servers, topic: str, count: int, within: float = 40) -> list[bytes]:
    found: list[bytes] = []
    async with PullConsumer(f"read_{topic}", namesrv=servers.namesrv, start="first") as consumer:
        await consumer.assign(await consumer.queues(topic))
        with anyio.fail_after(within):
            while len(found) < count:
                found += [message.body for message in await consumer.poll()]
    return sorted(found)


async def test_commit_and_rollback(servers: Servers, name: str, request: pytest.FixtureRequest) -> None:
    servers.expect(request, "transactions")
    servers.create_topic(name, 2)
    async with TransactionProducer(name, never, namesrv=servers.namesrv) as producer:
        async with producer.transaction(Message(name, b"good", keys="k")) as transaction:
            assert transaction.receipt.transaction_id
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction(Message(name, b"bad")):
                raise ZeroDivisionError
        await producer.send(Message(name, b"plain"))
        assert await bodies(servers, name, 2) == [b"good", b"plain"]


async def test_the_broker_asks_where_it_was_not_notified(
    servers: Servers, name: str, request: pytest.FixtureRequest
) -> None:
    servers.expect(request, "transactions")
    servers.create_topic(name, 1)
    asked: list[bytes] = []

    async def check(message: ReceivedMessage) -> TransactionState:
        assert message.topic == name
        asked.append(message.body)
        return TransactionState.COMMIT if message.body == b"yes" else TransactionState.ROLLBACK

    async with TransactionProducer(name, check, namesrv=servers.namesrv) as producer:
        for body in (b"yes", b"no"):
            async with producer.transaction(Message(name, body)) as transaction:
                transaction.state = TransactionState.UNKNOWN
        with servers.checking():
            assert await bodies(servers, name, 1) == [b"yes"]
            with anyio.fail_after(40):
                while b"no" not in asked:  # noqa: ASYNC110 - the broker decides when
                    await anyio.sleep(0.05)


async def test_a_delayed_transaction_is_a_usage_error(servers: Servers, name: str) -> None:
    async with TransactionProducer(name, never, namesrv=servers.namesrv) as producer:
        with pytest.raises(UsageError, match="delayed"):
            async with producer.transaction(Message(name, b"x", delay_level=1)):
                pytest.fail("not prepared, and yet begun")


async def test_request_and_reply(servers: Servers, name: str, request: pytest.FixtureRequest) -> None:
    servers.expect(request, "request_reply")
    servers.create_topic(name, 1)
    async with (
        Producer(name, namesrv=servers.namesrv) as asker,
        Producer(name + "_r", namesrv=servers.namesrv) as replier,
        Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer,
        anyio.create_task_group() as group,
    ):

        async def serve() -> None:
            async for message in consumer:
                async with message.process():
                    await replier.reply(message, message.body.upper())

        group.start_soon(serve)
        answer = await asker.request(Message(name, b"price"), ttl=20)
        assert answer.body == b"PRICE"
        group.cancel_scope.cancel()


async def test_a_request_without_a_reply(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    async with Producer(name, namesrv=servers.namesrv) as asker:
        # The ttl is for the request alone: the route and the connection are there, and the broker knows the client.
        await asker.send(Message(name, b"no request"))
        await asker.client.heartbeat()
        with pytest.raises(TimeoutError):
            await asker.request(Message(name, b"anybody?"), ttl=2.5)


async def test_only_requests_can_be_replied_to(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    async with Producer(name, namesrv=servers.namesrv) as producer:
        await producer.send(Message(name, b"no request"))
        async with PullConsumer(name, namesrv=servers.namesrv, start="first") as consumer:
            await consumer.assign(await consumer.queues(name))
            [message] = await consumer.poll(timeout=20)
        with pytest.raises(UsageError, match="no request"):
            await producer.reply(message, b"x")
