"""PullConsumer, which reads given queues, against a real broker."""

import time
from datetime import UTC, datetime

import anyio
import pytest

from tests.client.servers import Servers
from trimq.client import Message, Producer, PullConsumer, ReceivedMessage, UsageError

pytestmark = pytest.mark.anyio


async def fill(servers: Servers, topic: str, count: int, queues: int = 1) -> None:
    servers.create_topic(topic, queues)
    async with Producer(topic, namesrv=servers.namesrv) as producer:
        for number in range(count):
            await producer.send(Message(topic, b"%d" % number, tags="even" if number % 2 == 0 else "odd"))
    await servers.dispatched(topic, count)


async def test_seek_poll_commit(servers: Servers, name: str) -> None:
    await fill(servers, name, 10)
    async with PullConsumer(name, namesrv=servers.namesrv, start="first") as consumer:
        [queue] = await consumer.queues(name)
        await consumer.assign([queue])
        assert [message.body for message in await consumer.poll(4, timeout=30)] == [b"0", b"1", b"2", b"3"]
        assert consumer.position(queue) == 4
        await consumer.commit()
        assert await consumer.committed(queue) == 4
        consumer.seek(queue, 8)
        assert [message.body for message in await consumer.poll(timeout=30)] == [b"8", b"9"]
        await consumer.seek_to_first()
        assert (await consumer.poll(1, timeout=30))[0].body == b"0"
        await consumer.seek_to_end()
        assert await consumer.poll(timeout=0.2) == []
        assert (await consumer.first_offset(queue), await consumer.end_offset(queue)) == (0, 10)
    async with PullConsumer(name, namesrv=servers.namesrv) as consumer:
        await consumer.assign([queue])
        assert (await consumer.poll(1, timeout=30))[0].body == b"4"


async def test_offsets_for_times(servers: Servers, name: str) -> None:
    await fill(servers, name, 3)
    await anyio.sleep(0.01)
    middle = time.time()
    await anyio.sleep(0.01)
    await fill(servers, name, 2)
    await servers.dispatched(name, 5)
    async with PullConsumer(name, namesrv=servers.namesrv) as consumer:
        [queue] = await consumer.queues(name)
        assert await consumer.offset_by_time(queue, middle) == 3
        await consumer.assign({queue: 0})
        await consumer.seek_to_time(datetime.fromtimestamp(middle, UTC))
        assert len(await consumer.poll(timeout=30)) == 2


async def test_tags(servers: Servers, name: str) -> None:
    await fill(servers, name, 6)
    async with PullConsumer(name, namesrv=servers.namesrv, start="first", tags="odd") as consumer:
        await consumer.assign(await consumer.queues(name))
        found: list[ReceivedMessage] = []
        with anyio.fail_after(30):
            while len(found) < 3:
                found += await consumer.poll()
    assert [message.body for message in found] == [b"1", b"3", b"5"]


async def test_pause_and_reassign(servers: Servers, name: str) -> None:
    await fill(servers, name, 4, queues=2)
    async with PullConsumer(name, namesrv=servers.namesrv, start="first") as consumer:
        one, two = await consumer.queues(name)
        await consumer.assign([one, two])
        consumer.pause(one)
        await anyio.sleep(0.2)
        assert {message.queue for message in await consumer.poll(timeout=30)} == {two}
        consumer.resume(one)
        assert {message.queue for message in await consumer.poll(timeout=30)} == {one}
        await consumer.assign([two])
        assert consumer.assignment == [two]
        with pytest.raises(UsageError, match="not assigned"):
            consumer.position(one)


async def test_poll_without_queues_is_a_usage_error(servers: Servers, name: str) -> None:
    async with PullConsumer(name, namesrv=servers.namesrv) as consumer:
        with pytest.raises(UsageError, match="for ever"):
            await consumer.poll()


async def test_several_tasks_poll(namesrv: str, name: str) -> None:
    """Each message goes to one task, and no task waits while a message is available."""
    found: list[bytes] = []
    async with (
        Producer(name, namesrv=namesrv) as producer,
        PullConsumer(name, namesrv=namesrv, start="first") as puller,
    ):
        await producer.send(Message(name, b"0"))
        await puller.assign(await puller.queues(name))

        async def work() -> None:
            while len(found) < 40:
                found.extend([message.body for message in await puller.poll(1, timeout=0.5)])

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(work)
                for number in range(1, 40):
                    await producer.send(Message(name, b"%d" % number))
    assert sorted(found, key=int) == [b"%d" % number for number in range(40)]
