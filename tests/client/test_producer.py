"""Sending, against a real broker."""

import time

import anyio
import pytest

from tests.client.servers import Servers
from trimq.client import (
    Client,
    ClientOptions,
    Interceptor,
    Message,
    NotStoredError,
    Producer,
    PullConsumer,
    ReceivedMessage,
    SendContext,
    SendOutcome,
    SendStatus,
    TopicNotFoundError,
    UnreachableError,
    UsageError,
)
from trimq.client.admin import Admin
from trimq.client.admin.timers import PendingTimer
from trimq.protocol.codes import ResponseCode

pytestmark = pytest.mark.anyio


async def read(namesrv: str, topic: str, count: int) -> list[ReceivedMessage]:
    """The first ``count`` messages of a topic, in the order of queue and offset."""
    found: list[ReceivedMessage] = []
    async with PullConsumer(f"read_{topic}", namesrv=namesrv, start="first") as consumer:
        await consumer.assign(await consumer.queues(topic))
        with anyio.fail_after(30):
            while len(found) < count:
                found += await consumer.poll(100)
    return sorted(found, key=lambda message: (message.queue_id, message.queue_offset))


async def test_a_receipt_has_the_position_of_the_message(namesrv: str, name: str) -> None:
    message = Message(name, b"1 book", tags="paid", keys=["o-1", "c-7"], properties={"shop": "north"}, flag=3)
    async with Producer(name, namesrv=namesrv) as producer:
        receipt = await producer.send(message)
    assert receipt.status is SendStatus.SEND_OK
    assert receipt.message_id == message.message_id
    assert message.outcome is SendOutcome.STORED
    [stored] = await read(namesrv, name, 1)
    assert (stored.queue, stored.queue_offset) == (receipt.queue, receipt.queue_offset)
    assert (stored.topic, stored.body, stored.tags, stored.keys) == (name, b"1 book", "paid", ("o-1", "c-7"))
    assert stored.properties == {"shop": "north"}
    assert stored.message_id == receipt.message_id
    assert stored.offset_message_id == receipt.offset_message_id
    assert stored.flag == 3
    assert stored.reconsume_times == 0
    assert 0 <= stored.store_time - stored.born_time < 60


@pytest.mark.parametrize("header", ["json", "rocketmq", "msgpack"])
async def test_header_encodings(namesrv: str, name: str, header: str) -> None:
    async with Producer(name, namesrv=namesrv, options=ClientOptions(header=header)) as producer:  # type: ignore[arg-type]
        await producer.send(Message(name, b"one"))
        await producer.client.heartbeat()
        await producer.send(Message(name, b"two"))
    assert {message.body for message in await read(namesrv, name, 2)} == {b"one", b"two"}


async def test_many_in_flight(namesrv: str, name: str) -> None:
    async with Producer(name, namesrv=namesrv, max_in_flight=16) as producer:
        await producer.send(Message(name, b"first"))
        async with anyio.create_task_group() as group:
            for number in range(200):
                group.start_soon(producer.send, Message(name, b"%d" % number))
    bodies = {message.body for message in await read(namesrv, name, 201)}
    assert bodies == {b"first", *(b"%d" % number for number in range(200))}


async def test_a_sharding_key_chooses_one_queue(servers: Servers, name: str) -> None:
    servers.create_topic(name, 4)
    async with Producer(name, namesrv=servers.namesrv) as producer:
        for number in range(10):
            await producer.send(Message(name, b"a%d" % number, sharding_key="a"))
            await producer.send(Message(name, b"b%d" % number, sharding_key="b"))
    stored = await read(servers.namesrv, name, 20)
    for key in ("a", "b"):
        mine = [message for message in stored if message.sharding_key == key]
        assert len({message.queue for message in mine}) == 1
        assert [message.body for message in mine] == [b"%s%d" % (key.encode(), number) for number in range(10)]


async def test_a_chosen_queue(servers: Servers, name: str) -> None:
    servers.create_topic(name, 4)
    async with Producer(name, namesrv=servers.namesrv) as producer:
        queue = (await producer.queues(name))[2]
        receipt = await producer.send(Message(name, b"x"), queue=queue)
    assert receipt.queue == queue


async def test_a_queue_of_another_topic_says_where_and_the_message_what(servers: Servers, name: str) -> None:
    """A forwarded message goes to its own topic, whatever topics were sent over the connection before."""
    other = f"{name}_other"
    for topic in (name, other):
        servers.create_topic(topic, 4)
    async with Producer(name, namesrv=servers.namesrv) as producer:
        queue = (await producer.queues(name))[2]
        for topic in (name, other, other):
            await producer.send(Message(topic, topic.encode()), queue=queue)
    assert [message.body for message in await read(servers.namesrv, other, 2)] == [other.encode()] * 2


@pytest.mark.parametrize("compression", ["zlib", "lz4", "zstd", None])
async def test_compression_is_undone_by_the_reader(namesrv: str, name: str, compression: str | None) -> None:
    body = b"to be compressed " * 1000
    async with Producer(name, namesrv=namesrv, compression=compression) as producer:  # type: ignore[arg-type]
        await producer.send(Message(name, body))
    [stored] = await read(namesrv, name, 1)
    assert stored.body == body
    assert (stored.size < 2000) == (compression is not None)


async def test_a_batch_is_split_by_size_and_topic(namesrv: str, name: str) -> None:
    messages = [Message(f"{name}_{number % 2}", b"%d" % number + bytes(30_000)) for number in range(10)]
    async with Producer(name, namesrv=namesrv, max_message_size=70_000) as producer:
        receipts = await producer.send_batch(messages)
    assert [receipt.message_id for receipt in receipts] == [message.message_id for message in messages]
    assert all(message.outcome is SendOutcome.STORED for message in messages)
    for number in range(2):
        stored = await read(namesrv, f"{name}_{number}", 5)
        places = {message.message_id: (message.queue, message.queue_offset) for message in stored}
        for receipt in receipts[number::2]:
            assert places[receipt.message_id] == (receipt.queue, receipt.queue_offset)


async def test_linger_makes_batches_with_a_receipt_each(namesrv: str, name: str) -> None:
    async with Producer(name, namesrv=namesrv, linger=0.3) as producer:
        await producer.send(Message(name, b"first"))
        receipts = []

        async def send(number: int) -> None:
            receipts.append(await producer.send(Message(name, b"%d" % number)))

        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(send, number)
    stored = {message.message_id: message for message in await read(namesrv, name, 101)}
    assert len({receipt.queue for receipt in receipts}) == 4  # a burst with no batch in flight is spread
    for receipt in receipts:
        assert stored[receipt.message_id].queue_offset == receipt.queue_offset


async def test_linger_keeps_the_order_of_a_sharding_key(namesrv: str, name: str) -> None:
    async with Producer(name, namesrv=namesrv, linger=0.0, batch_bytes=600) as producer:
        await producer.send(Message(name, b"first"))
        async with anyio.create_task_group() as group:
            for number in range(60):
                group.start_soon(producer.send, Message(name, b"%03d" % number, sharding_key="k"))
                await anyio.lowlevel.checkpoint()
    stored = await read(namesrv, name, 61)
    numbers = [int(message.body) for message in stored if message.sharding_key == "k"]
    assert sorted(numbers) == list(range(60))
    places = [message.queue_offset for message in stored if message.sharding_key == "k"]
    assert places == sorted(places)


async def test_a_cancelled_send_in_an_unsent_batch_is_not_stored(namesrv: str, name: str) -> None:
    message = Message(name, b"taken back")
    async with Producer(name, namesrv=namesrv, linger=30) as producer:
        with anyio.move_on_after(0.2):
            await producer.send(message)
        assert message.outcome is SendOutcome.NOT_STORED
        other = Message(name, b"stays")
        async with anyio.create_task_group() as group:
            group.start_soon(producer.send, other)
            await anyio.wait_all_tasks_blocked()
            await producer.flush()
    assert [message.body for message in await read(namesrv, name, 1)] == [b"stays"]


async def test_oneway(namesrv: str, name: str) -> None:
    async with Producer(name, namesrv=namesrv) as producer:
        await producer.send(Message(name, b"creates the topic"))
        message = Message(name, b"who knows")
        await producer.send_oneway(message)
        assert message.outcome is SendOutcome.PERHAPS_STORED
        assert len(await read(namesrv, name, 2)) == 2


async def test_delay_level(namesrv: str, name: str) -> None:
    async with Producer(name, namesrv=namesrv) as producer:
        await producer.send(Message(name, b"now"))
        began = anyio.current_time()
        await producer.send(Message(name, b"later", delay_level=2))
        stored = await read(namesrv, name, 2)
    assert {message.body for message in stored} == {b"now", b"later"}
    assert anyio.current_time() - began >= 0.9


@pytest.mark.parametrize("by", ["delay", "deliver_at"])
async def test_precise_delay(servers: Servers, name: str, by: str, request: pytest.FixtureRequest) -> None:
    servers.expect(request, "timer_messages")
    async with Producer(name, namesrv=servers.namesrv) as producer:
        await producer.send(Message(name, b"now"))
        began = time.time()
        later = Message(name, b"later", delay=3) if by == "delay" else Message(name, b"later", deliver_at=began + 3)
        await producer.send(later)
        stored = await read(servers.namesrv, name, 2)
    assert {message.body for message in stored} == {b"now", b"later"}
    assert time.time() - began >= 1.5  # brokers store delays in whole seconds


async def pending(admin: Admin, topic: str, count: int) -> list[PendingTimer]:
    with anyio.fail_after(10):
        while len(found := await admin.pending_timers(topic)) != count:  # noqa: ASYNC110 - the broker does not notify clients
            await anyio.sleep(0.1)
    return found


async def test_recall(namesrv: str, name: str) -> None:
    """Of two messages for the same time one is recalled, by its receipt; another one by the handle as text."""
    async with Producer(name, namesrv=namesrv) as producer:
        await producer.send(Message(name, b"now"))
        deliver_at = time.time() + 4
        receipts = [await producer.send(Message(name, b"%d" % number, deliver_at=deliver_at)) for number in range(3)]
        assert await producer.recall(receipts[0]) == receipts[0].message_id
        assert await producer.recall(str(receipts[2].recall_handle)) == receipts[2].message_id
        async with Admin(namesrv) as admin:
            waiting = await pending(admin, name, 3)
        assert [(one.message.message_id, one.recalled) for one in waiting] == [
            (receipt.message_id, number != 1) for number, receipt in enumerate(receipts)
        ]
        stored = await read(namesrv, name, 2)
        assert {message.body for message in stored} == {b"now", b"1"}
        with pytest.raises(UsageError) as refused:
            await producer.recall(receipts[1])
        assert refused.value.code == ResponseCode.ILLEGAL_OPERATION
    async with Admin(namesrv) as admin:
        await pending(admin, name, 0)  # a checkpoint of the broker later


async def test_recalls_that_cannot_succeed(namesrv: str, name: str) -> None:
    async with Producer(name, namesrv=namesrv) as producer:
        receipt = await producer.send(Message(name, b"now"))
        with pytest.raises(UsageError, match="delay or deliver_at"):
            await producer.recall(receipt)
        with pytest.raises(UsageError, match="handle"):
            await producer.recall("no handle")


async def test_usage_errors_are_found_before_anything_is_sent(namesrv: str, name: str) -> None:
    async with Producer(name, namesrv=namesrv, max_message_size=100) as producer:
        for message in (
            Message(name, b""),
            Message(name, bytes(101)),
            Message(name, b"x", properties={"KEYS": "a"}),
            Message(name, b"x", properties={"a": "b\x01"}),
            Message(name, b"x", keys=["two words"]),
            Message(name, b"x", properties={"long": "x" * 40_000}),
        ):
            with pytest.raises(UsageError):
                await producer.send(message)
            assert message.outcome is SendOutcome.NOT_STORED
    with pytest.raises(UsageError, match="characters"):
        Message("no blanks", b"x")


async def test_a_topic_that_does_not_exist(namesrv: str, name: str) -> None:
    async with Producer(name, namesrv=namesrv, create_topics=False) as producer:
        with pytest.raises(TopicNotFoundError) as caught:
            await producer.send(Message(name, b"x"))
    assert caught.value.code == 17
    assert "updateTopic" in caught.value.help


async def test_no_name_server_answers(name: str) -> None:
    async with Producer(name, namesrv="127.0.0.1:1;127.0.0.1:2") as producer:
        message = Message(name, b"x")
        with pytest.raises(UnreachableError, match="no name server answers"):
            await producer.send(message)
        assert message.outcome is SendOutcome.NOT_STORED


async def test_a_dead_name_server_is_passed_over(namesrv: str, name: str) -> None:
    for _ in range(4):  # the first queue is random
        async with Producer(name, namesrv=["127.0.0.1:1", namesrv]) as producer:
            await producer.send(Message(name, b"x"))


async def test_errors_of_the_body_leave_the_block_as_they_are(namesrv: str, name: str) -> None:
    producer = Producer(name, namesrv=namesrv)

    async def fail_inside() -> None:
        async with producer:
            await producer.send(Message(name, b"x"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    with pytest.raises(NotStoredError, match="not open"):
        await producer.send(Message(name, b"x"))


async def test_producers_share_a_client(namesrv: str, name: str) -> None:
    async with Client(namesrv) as client, Producer("a", client=client) as one, Producer("b", client=client) as two:
        await one.send(Message(name, b"1"))
        await two.send(Message(name, b"2"))
    assert len(await read(namesrv, name, 2)) == 2


async def test_interceptors_see_sends_and_add_properties(namesrv: str, name: str) -> None:
    seen: list[SendContext] = []

    class Stamp(Interceptor):
        def before_send(self, context: SendContext) -> None:
            context.properties["trace"] = "t-1"

        def after_send(self, context: SendContext) -> None:
            seen.append(context)
            raise RuntimeError("an observer's fault is its own")

    async with Producer(name, namesrv=namesrv, interceptors=[Stamp()]) as producer:
        receipt = await producer.send(Message(name, b"x"))
        with pytest.raises(UsageError):
            await producer.send(Message(name, b""))
    assert seen[0].receipt == receipt
    assert seen[0].attempts == 1
    assert isinstance(seen[1].error, UsageError)
    [stored] = await read(namesrv, name, 1)
    assert stored.properties == {"trace": "t-1"}
