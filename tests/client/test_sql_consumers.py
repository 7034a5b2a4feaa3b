"""Consumers that filter by SQL92 expressions, against real brokers: what arrives, and which errors are raised."""

import anyio
import pytest

from tests.client.scripted import scripted_broker
from tests.client.servers import Servers
from tests.interop.harness import probe
from trimq.client import Client, Consumer, Message, Producer, PullConsumer, Sql, UsageError
from trimq.client.expression_check import check_in_broker
from trimq.client.subscription import Subscription
from trimq.protocol.body import BrokerData, QueueData, TopicRouteData, encode_json
from trimq.protocol.codes import RequestCode

pytestmark = pytest.mark.anyio


async def send(servers: Servers, topic: str, *amounts: object) -> None:
    async with Producer(topic, namesrv=servers.namesrv) as producer:
        for amount in amounts:
            await producer.send(Message(topic, b"%a" % amount, properties={"amount": str(amount)}))


def _switch(servers: Servers, value: str) -> None:
    probe.ask(servers.broker.address, RequestCode.UPDATE_BROKER_CONFIG, body=f"enablePropertyFilter={value}".encode())


async def test_two_groups_with_different_expressions(servers: Servers, name: str) -> None:
    servers.create_topic(name, 2)
    few = Consumer(f"{name}_few", {name: Sql("amount < 2 OR amount IS NULL")}, namesrv=servers.namesrv, start="first")
    many = Consumer(f"{name}_many", {name: Sql("amount BETWEEN 5 AND 7")}, namesrv=servers.namesrv, start="first")

    async def take(consumer: Consumer, count: int) -> set[bytes]:
        found = []
        for _ in range(count):
            message = await anext(consumer)
            await message.ack()
            found.append(message.body)
        assert len(set(found)) == count
        return set(found)

    async with few, many:
        with anyio.fail_after(60):
            await send(servers, name, *range(6))
            assert await take(few, 2) == {b"0", b"1"}
            assert await take(many, 1) == {b"5"}
            # the pulls of both groups are held from now on
            await send(servers, name, *range(6, 10))
            async with Producer(name, namesrv=servers.namesrv) as producer:
                await producer.send(Message(name, b"none"))
            assert await take(few, 1) == {b"none"}
            assert await take(many, 2) == {b"6", b"7"}


async def test_what_is_sent_back_comes_again(servers: Servers, name: str) -> None:
    """Consumers subscribe to their retry topic by a tag, so that each message that was sent back is delivered."""
    servers.create_topic(name, 1)
    await send(servers, name, 1, 20)
    async with Consumer(name, {name: Sql("amount > 10")}, namesrv=servers.namesrv, start="first") as consumer:
        with anyio.fail_after(60):
            for attempt in range(2):
                message = await anext(consumer)
                assert (message.body, message.reconsume_times, message.topic) == (b"20", attempt, name)
                await (message.nack(delay_level=1) if attempt == 0 else message.ack())


async def test_a_pull_consumer(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    await send(servers, name, *range(100))
    tags = Sql("amount >= 97 AND TAGS IS NULL")
    async with PullConsumer(name, namesrv=servers.namesrv, start="first", tags=tags) as consumer:
        await consumer.assign(await consumer.queues(name))
        found: list[bytes] = []
        with anyio.fail_after(60):
            while len(found) < 3:
                found += [message.body for message in await consumer.poll(timeout=30)]
            await send(servers, name, 1, 98)
            found += [message.body for message in await consumer.poll(timeout=30)]
    assert found == [b"97", b"98", b"99", b"98"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("amount > ", r"'amount > ' is not valid at position \d+: "),
        ("", r"'' is not valid at position 0: "),
        ("amount >> 3", r"'amount >> 3' is not valid at position 8: "),
    ],
)
async def test_an_expression_that_is_not_valid(text: str, why: str) -> None:
    """It is refused where it is given, before any broker is asked."""
    for make in (
        lambda: Subscription("T", Sql(text), 1),
        lambda: Consumer("G", {"T": Sql(text)}, namesrv="127.0.0.1:1"),
        lambda: PullConsumer("G", tags=Sql(text), namesrv="127.0.0.1:1"),
    ):
        with pytest.raises(UsageError, match=why):
            make()


async def test_a_broker_without_a_master_is_not_asked() -> None:
    async with scripted_broker() as broker:
        brokers = [
            BrokerData(cluster="c", broker_name="a", broker_addrs={"1": "127.0.0.1:1"}),
            BrokerData(cluster="c", broker_name="b", broker_addrs={"0": broker.address}),
        ]
        queues = [QueueData(broker_name=name, read_queue_nums=1, write_queue_nums=1, perm=6) for name in "ab"]
        route = encode_json(TopicRouteData(broker_datas=brokers, queue_datas=queues))
        broker.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] = lambda command: command.reply(body=route)
        async with Client(broker.address) as client:
            await check_in_broker(client, "G", Subscription("T", Sql("a = 1"), 1))
        assert broker.counts[RequestCode.CHECK_CLIENT_CONFIG] == 1


async def test_a_topic_that_comes_later(servers: Servers, name: str) -> None:
    async with Consumer(name, {name: Sql("amount = 2")}, namesrv=servers.namesrv, start="first") as consumer:
        servers.create_topic(name, 1)
        await send(servers, name, 1, 2)
        with anyio.fail_after(60):
            assert (await anext(consumer)).body == b"2"


async def test_a_broker_that_filters_by_tags_only(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    _switch(servers, "false")
    try:
        with pytest.raises(UsageError, match="enablePropertyFilter=true") as refused:
            async with Consumer(name, {name: Sql("a = 1")}, namesrv=servers.namesrv):
                pass
        assert (refused.value.code, refused.value.address) == (1, servers.broker.address)
        async with PullConsumer(name, namesrv=servers.namesrv, tags=Sql("a = 1")) as consumer:
            queues = await consumer.queues(name)
            with pytest.raises(UsageError, match="enablePropertyFilter=true"):
                await consumer.assign(queues)
    finally:
        _switch(servers, "true")
