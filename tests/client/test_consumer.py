"""Consuming, against a real broker."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from tests.client.servers import Servers
from trimq.client import (
    Consumer,
    ConsumerMessage,
    Interceptor,
    Message,
    MessageQueue,
    Prefetch,
    ProcessContext,
    Producer,
    PullConsumer,
    ReceiveContext,
    Sql,
    UsageError,
)

pytestmark = pytest.mark.anyio


async def send(namesrv: str, topic: str, count: int, tags: Callable[[int], str | None] = lambda _: None) -> None:
    async with Producer(f"p_{topic}", namesrv=namesrv) as producer:
        for number in range(count):
            await producer.send(Message(topic, b"%d" % number, tags=tags(number)))


async def take(consumer: Consumer, count: int, within: float = 30) -> list[ConsumerMessage]:
    found: list[ConsumerMessage] = []
    with anyio.fail_after(within):
        while len(found) < count:
            message = await anext(consumer)
            await message.ack()
            found.append(message)
    return found


async def test_messages_by_tag(namesrv: str, name: str) -> None:
    await send(namesrv, name, 12, lambda number: "abc"[number % 3])
    async with Consumer(name, {name: "a || c"}, namesrv=namesrv, start="first") as consumer:
        found = await take(consumer, 8)
    assert {message.body for message in found} == {b"%d" % number for number in range(12) if number % 3 != 1}
    assert {message.topic for message in found} == {name}


async def test_acknowledged_offsets_are_committed(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    await send(servers.namesrv, name, 10)
    async with Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
        await take(consumer, 4)
        [queue] = consumer.assignment
        await consumer.commit()
        async with PullConsumer(name + "_look", namesrv=servers.namesrv) as look:
            look.group = name
            assert await look.committed(queue) == 4
    async with Consumer(name, name, namesrv=servers.namesrv) as consumer:
        assert [message.body for message in await take(consumer, 6)] == [b"%d" % number for number in range(4, 10)]


async def test_an_exception_means_again_later(namesrv: str, name: str) -> None:
    await send(namesrv, name, 5)
    tries: Counter[bytes] = Counter()
    async with Consumer(name, name, namesrv=namesrv, start="first") as consumer:
        with anyio.fail_after(30):
            async for message in consumer:
                async with message.process(delay_level=1):
                    tries[message.body] += 1
                    assert message.reconsume_times == tries[message.body] - 1
                    assert message.topic == name
                    if message.body == b"3" and tries[b"3"] < 3:
                        raise ValueError("not now")
                if tries.total() == 7:
                    break
    assert tries == {b"0": 1, b"1": 1, b"2": 1, b"3": 3, b"4": 1}


async def test_the_last_try_ends_with_the_dead_letters(namesrv: str, name: str) -> None:
    await send(namesrv, name, 1)
    async with Consumer(name, name, namesrv=namesrv, start="first", max_retries=1) as consumer:
        with anyio.fail_after(30):
            for _ in range(2):
                await (await anext(consumer)).nack(delay_level=1)
    async with PullConsumer(name + "_dead", namesrv=namesrv, start="first") as dead:
        await dead.assign([MessageQueue(topic=f"%DLQ%{name}", broker_name="broker-a", queue_id=0)])
        [message] = await dead.poll(timeout=30)
        assert message.body == b"0"


async def test_a_cancelled_block_gives_the_message_back(namesrv: str, name: str) -> None:
    await send(namesrv, name, 1)
    async with Consumer(name, name, namesrv=namesrv, start="first") as consumer:
        with anyio.fail_after(30):
            message = await anext(consumer)
            with anyio.CancelScope() as scope:
                async with message.process():
                    scope.cancel()
                    await anyio.sleep(1)
            assert (await anext(consumer)).message_id == message.message_id


async def test_batches(namesrv: str, name: str) -> None:
    await send(namesrv, name, 50)
    seen: list[bytes] = []
    async with Consumer(name, name, namesrv=namesrv, start="first") as consumer:
        with anyio.fail_after(30):
            async for batch in consumer.batches(7):
                async with batch.process():
                    assert 1 <= len(batch) <= 7
                    offsets = [message.queue_offset for message in batch]
                    assert offsets == list(range(offsets[0], offsets[0] + len(batch)))
                    seen += [message.body for message in batch]
                if len(seen) == 50:
                    break
    assert sorted(seen) == sorted(b"%d" % number for number in range(50))


async def test_run_calls_a_handler_concurrently(namesrv: str, name: str) -> None:
    await send(namesrv, name, 8)
    inside = 0
    together = anyio.Event()

    async def handle(_message: ConsumerMessage) -> None:
        nonlocal inside
        inside += 1
        if inside == 4:
            together.set()
        await together.wait()

    async with Consumer(name, name, namesrv=namesrv, start="first") as consumer:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: consumer.run(handle, concurrency=4))
                await together.wait()
                group.cancel_scope.cancel()


async def test_orderly_keeps_the_order_over_failures(servers: Servers, name: str) -> None:
    servers.create_topic(name, 2)
    await send(servers.namesrv, name, 20)
    order: dict[MessageQueue, list[int]] = {}
    async with Consumer(name, name, namesrv=servers.namesrv, start="first", orderly=True, suspend=0.05) as consumer:
        with anyio.fail_after(30):
            while sum(map(len, order.values())) < 20:
                message = await anext(consumer)
                async with message.process():
                    if message.queue_offset % 3 == 0 and message.delivery_attempt == 1:
                        raise ValueError("not now")
                    order.setdefault(message.queue, []).append(message.queue_offset)
    assert list(order.values()) == [list(range(10)), list(range(10))]


async def test_orderly_gives_a_queue_to_one_task_at_a_time(servers: Servers, name: str) -> None:
    servers.create_topic(name, 2)
    await send(servers.namesrv, name, 20)
    inside: Counter[MessageQueue] = Counter()
    done = 0

    async def handle(message: ConsumerMessage) -> None:
        nonlocal done
        inside[message.queue] += 1
        await anyio.sleep(0.01)
        assert inside[message.queue] == 1
        inside[message.queue] -= 1
        done += 1
        if done == 20:
            group.cancel_scope.cancel()

    async with Consumer(name, name, namesrv=servers.namesrv, start="first", orderly=True) as consumer:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: consumer.run(handle, concurrency=5))


async def test_an_orderly_message_becomes_a_dead_letter(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    await send(servers.namesrv, name, 2)
    async with Consumer(
        name, name, namesrv=servers.namesrv, start="first", orderly=True, suspend=0.01, max_retries=2
    ) as consumer:
        bodies = []
        with anyio.fail_after(30):
            while b"1" not in bodies:
                message = await anext(consumer)
                bodies.append(message.body)
                if message.body == b"0":
                    await message.nack()
    assert bodies == [b"0", b"0", b"0", b"1"]


async def test_members_share_the_queues(servers: Servers, name: str) -> None:
    servers.create_topic(name, 4)

    async def until(condition: Callable[[], bool]) -> None:
        with anyio.fail_after(30):
            while not condition():  # noqa: ASYNC110 - other clients change it
                await anyio.sleep(0.05)

    async with Consumer(name, name, namesrv=servers.namesrv, start="first") as one:
        assert len(one.assignment) == 4
        async with Consumer(name, name, namesrv=servers.namesrv, start="first") as two:
            await until(lambda: len(one.assignment) == len(two.assignment) == 2)
            assert set(one.assignment).isdisjoint(two.assignment)
        await until(lambda: len(one.assignment) == 4)


async def test_broadcasting_reaches_every_member(namesrv: str, name: str, tmp_path: Path) -> None:
    await send(namesrv, name, 6)
    file = tmp_path / "offsets.json"
    async with (
        Consumer(name, name, namesrv=namesrv, start="first", model="broadcasting", offsets_file=file) as one,
        Consumer(name, name, namesrv=namesrv, start="first", model="broadcasting") as two,
    ):
        assert len(await take(one, 6)) == 6
        assert len(await take(two, 6)) == 6
    async with Consumer(name, name, namesrv=namesrv, start="first", model="broadcasting", offsets_file=file) as one:
        await send(namesrv, name, 1)
        assert len(await take(one, 1)) == 1
        with anyio.move_on_after(0.5):
            pytest.fail(f"again: {await anext(one)}")


async def test_start_last_sees_only_what_comes(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    async with PullConsumer(name, namesrv=servers.namesrv, start="last") as consumer:
        await send(servers.namesrv, name, 3)
        [queue] = await consumer.queues(name)
        await servers.dispatched(name, 3)
        end = await consumer.end_offset(queue)
        assert end == 3
        await consumer.assign({queue: end})
        await send(servers.namesrv, name, 1)
        assert [message.queue_offset for message in await consumer.poll(timeout=30)] == [3]


async def test_a_full_prefetch_stops_pulling(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    await send(servers.namesrv, name, 40)
    prefetch = Prefetch(messages=10, pull_messages=5)
    async with Consumer(name, name, namesrv=servers.namesrv, start="first", prefetch=prefetch) as consumer:
        first = await anext(consumer)
        await anyio.sleep(0.3)
        [process_queue] = [one for queue, one in consumer.rebalancer.process_queues.items() if queue.topic == name]
        assert process_queue.window.unfinished == 10
        await first.ack()
        assert len(await take(consumer, 39)) == 39


async def test_suspend_and_resume(namesrv: str, name: str) -> None:
    await send(namesrv, name, 2)
    async with Consumer(name, name, namesrv=namesrv, start="first") as consumer:
        await take(consumer, 1)
        consumer.suspend()
        with anyio.move_on_after(0.3):
            pytest.fail(f"suspended, and yet: {await anext(consumer)}")
        consumer.resume()
        await take(consumer, 1)


async def test_a_topic_that_comes_later(servers: Servers, name: str) -> None:
    async with Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
        assert consumer.assignment == []
        servers.create_topic(name, 1)
        await send(servers.namesrv, name, 1)
        await take(consumer, 1)


async def test_sql_subscription(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    async with Producer(name, namesrv=servers.namesrv) as producer:
        for amount in range(10):
            await producer.send(Message(name, b"%d" % amount, properties={"amount": str(amount)}))
    async with Consumer(name, {name: Sql("amount > 6")}, namesrv=servers.namesrv, start="first") as consumer:
        assert [message.body for message in await take(consumer, 3)] == [b"7", b"8", b"9"]


async def test_interceptors_see_receipt_and_acknowledgement(namesrv: str, name: str) -> None:
    seen: list[str] = []

    class Watch(Interceptor):
        def received(self, context: ReceiveContext) -> None:
            seen.append(f"received {len(context.messages)}")

        def before_process(self, context: ProcessContext) -> None:
            seen.append(f"begin {context.messages[0].body!r}")

        def after_process(self, context: ProcessContext) -> None:
            seen.append(f"end {context.acknowledged}")

    await send(namesrv, name, 1)
    async with Consumer(name, name, namesrv=namesrv, start="first", interceptors=[Watch()]) as consumer:
        with anyio.fail_after(30):
            message = await anext(consumer)
            async with message.process():
                pass
    assert seen == ["received 1", "begin b'0'", "end True"]


async def test_wrong_settings_are_usage_errors(name: str) -> None:
    with pytest.raises(UsageError, match="neither"):
        Consumer(name, name, namesrv="127.0.0.1:1", model="pubsub")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="empty tag"):
        Consumer(name, {name: "a ||"}, namesrv="127.0.0.1:1")
    with pytest.raises(UsageError, match="at least one topic"):
        Consumer(name, {}, namesrv="127.0.0.1:1")
    with pytest.raises(UsageError, match="blank"):
        Consumer("", name, namesrv="127.0.0.1:1")


async def test_a_cancelled_consumer_still_commits_and_says_goodbye(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    await send(servers.namesrv, name, 3)
    with anyio.CancelScope() as scope:
        async with Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
            await take(consumer, 2)
            scope.cancel()
            await anyio.sleep(30)
    async with Consumer(name, name, namesrv=servers.namesrv) as consumer:
        assert len(consumer.assignment) == 1
        assert [message.body for message in await take(consumer, 1)] == [b"2"]
