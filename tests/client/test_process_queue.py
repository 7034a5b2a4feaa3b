"""A process queue against a broker that replies when the test triggers it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import anyio
import pytest
from anyio.abc import SocketStream

from tests.client.scripted import ScriptedBroker, pull_header, records, route_reply, scripted_broker
from trimq.client import Client, ClientOptions, MessageQueue, ReceivedMessage
from trimq.client.core import Push
from trimq.client.errors import UnreachableError, error_for
from trimq.client.process_queue import Prefetch, ProcessQueue
from trimq.client.pulling import Pulled
from trimq.client.subscription import Subscription
from trimq.protocol.body import ConsumerData, ProducerData
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

QUEUE = MessageQueue(topic="T", broker_name="a", queue_id=0)


class Broker:
    """A broker whose pulls wait until the test completes them."""

    def __init__(self, inner: ScriptedBroker) -> None:
        self.inner = inner
        inner.answers[RequestCode.PULL_MESSAGE] = lambda _: None

    @property
    def pulls(self) -> list[tuple[SocketStream, RemotingCommand]]:
        return [(stream, command) for stream, command in self.inner.seen if command.code == RequestCode.PULL_MESSAGE]

    async def asked(self, count: int) -> int:
        """Wait until ``count`` pulls have been received, and return the offset of the last one."""
        pulls = await self.inner.until(RequestCode.PULL_MESSAGE, count)
        return int(pulls[-1].ext_fields()["queueOffset"])

    async def answer(self, number: int, body: bytes, next_offset: int, code: int = ResponseCode.SUCCESS) -> None:
        stream, command = self.pulls[number]
        await stream.send(encode(command.reply(code, header=pull_header(next_offset), body=body)))


class Watched(ProcessQueue):
    """Signals that the reply to a pull has been processed."""

    absorbed = 0
    turn: anyio.Event

    def absorb(self, result: Pulled) -> None:
        try:
            super().absorb(result)
        finally:
            self.absorbed += 1
            self.turn.set()

    def taken(self, count: int) -> list[ReceivedMessage]:
        """Take the available messages, up to a number."""
        return list(self.take(count) or ())

    async def until_absorbed(self, count: int) -> None:
        while self.absorbed < count:
            self.turn = anyio.Event()
            await self.turn.wait()


@asynccontextmanager
async def reading(
    prefetch: Prefetch, *, header: Literal["json", "rocketmq"] = "json"
) -> AsyncIterator[tuple[Broker, Watched]]:
    async with scripted_broker() as inner, Client(inner.address, ClientOptions(header=header)) as client:
        broker = Broker(inner)
        process_queue = Watched(
            client,
            "g",
            QUEUE,
            Subscription("T", "*", 0),
            0,
            prefetch=prefetch,
            kind=ReceivedMessage,
            with_subscription=True,
            on_ready=lambda _: None,
        )
        process_queue.turn = anyio.Event()
        client.spawn(process_queue.run)
        yield broker, process_queue
        process_queue.drop()


async def first_answer(broker: Broker, process_queue: Watched, count: int) -> None:
    """Answer the first pull with ``count`` messages."""
    await broker.asked(1)
    await broker.answer(0, records(0, count), count)
    await process_queue.until_absorbed(1)


@pytest.mark.parametrize("header", ["json", "rocketmq"])
async def test_the_next_pull_follows_the_answer_of_the_last(header: Literal["json", "rocketmq"]) -> None:
    async with reading(Prefetch(), header=header) as (broker, process_queue):
        assert await broker.asked(1) == 0
        await broker.answer(0, records(0, 3), 3)
        assert await broker.asked(2) == 3
        await broker.answer(1, b"", 3, ResponseCode.PULL_NOT_FOUND)
        assert await broker.asked(3) == 3
        await broker.answer(2, records(3, 2), 9)  # the offsets between are filtered out
        assert await broker.asked(4) == 9
        assert [message.body for message in process_queue.taken(10)] == [b"0", b"1", b"2", b"3", b"4"]


async def test_nothing_is_requested_while_there_is_no_space() -> None:
    async with reading(Prefetch(messages=4, pull_messages=2)) as (broker, process_queue):
        for pull in (1, 2):
            assert await broker.asked(pull) == 2 * pull - 2
            await broker.answer(pull - 1, records(2 * pull - 2, 2), 2 * pull)
        await process_queue.until_absorbed(2)
        taken = process_queue.taken(3)
        assert len(broker.pulls) == 2
        process_queue.finished(taken[1:])  # the first message is not finished, but two are
        assert await broker.asked(3) == 4
        assert process_queue.committable == 0
        process_queue.pause()
        await broker.answer(2, records(4, 1), 5)
        await process_queue.until_absorbed(3)
        process_queue.finished(taken[:1])
        assert process_queue.committable == 3
        assert len(broker.pulls) == 3
        process_queue.resume()
        assert await broker.asked(4) == 5


async def test_the_bound_by_bytes_holds_too() -> None:
    size = len(records(0, 1))
    async with reading(Prefetch(bytes=2 * size)) as (broker, process_queue):
        for number in (0, 1):
            assert await broker.asked(number + 1) == number
            await broker.answer(number, records(number, 1), number + 1)
        await process_queue.until_absorbed(2)
        assert (len(broker.pulls), process_queue.held_bytes) == (2, 2 * size)
        process_queue.finished(process_queue.taken(1))
        assert await broker.asked(3) == 2


async def test_what_cannot_be_read_is_not_passed_over() -> None:
    """The next pull is sent before a reply's messages are decoded; that must not move the committed offset."""
    async with reading(Prefetch()) as (broker, process_queue):
        await broker.asked(1)
        await broker.answer(0, records(0, 2)[:-1], 2)
        await process_queue.until_absorbed(1)
        assert (process_queue.position, process_queue.committable) == (0, 0)
        assert not process_queue.buffer


@pytest.mark.parametrize("answered", [True, False])
async def test_a_seek_forgets_the_pull_that_is_under_way(answered: bool) -> None:
    async with reading(Prefetch()) as (broker, process_queue):
        await broker.asked(1)
        if answered:
            await broker.answer(0, records(0, 2), 2)
            await process_queue.until_absorbed(1)
            await broker.asked(2)
        old = len(broker.pulls) - 1
        process_queue.seek(50)
        assert await broker.asked(old + 2) == 50
        await broker.answer(old, records(0, 2), 2)
        await broker.answer(old + 1, records(50, 1), 51)
        assert await broker.asked(old + 3) == 51
        assert [message.queue_offset for message in process_queue.taken(10)] == [50]


async def test_after_a_broken_connection_it_goes_on_where_it_was() -> None:
    async with reading(Prefetch()) as (broker, process_queue):
        await broker.asked(1)
        await broker.answer(0, records(0, 2), 2)
        await broker.asked(2)
        await anyio.aclose_forcefully(broker.pulls[1][0])
        assert await broker.asked(3) == 2
        await broker.answer(2, records(2, 1), 3)
        await process_queue.until_absorbed(2)
        assert [message.queue_offset for message in process_queue.taken(10)] == [0, 1, 2]


async def test_a_dropped_process_queue_takes_nothing_any_more() -> None:
    async with reading(Prefetch()) as (broker, process_queue):
        await broker.asked(1)
        process_queue.drop()
        await broker.answer(0, records(0, 2), 2)
        await process_queue.client.request(broker.inner.address, RequestCode.HEART_BEAT, {})  # follows the pull's reply
        assert (process_queue.absorbed, process_queue.taken(10), process_queue.committable) == (0, [], 0)
        assert len(broker.pulls) == 1


async def test_what_is_finished_twice_counts_once() -> None:
    async with reading(Prefetch()) as (broker, process_queue):
        await first_answer(broker, process_queue, 4)
        messages = process_queue.taken(3)
        left = process_queue.held_bytes // 2
        for _ in range(2):
            process_queue.finished(messages[:1])
            process_queue.finished_one(messages[1])
            assert (process_queue.held_bytes, process_queue.committable) == (left, 2)


async def test_the_next_pull_waits_until_enough_is_finished() -> None:
    async with reading(Prefetch(messages=2, pull_messages=1)) as (broker, process_queue):
        await first_answer(broker, process_queue, 3)
        first, second = process_queue.taken(2)
        process_queue.finished_one(first)
        # a pull would have been received before it
        await process_queue.client.request(broker.inner.address, RequestCode.HEART_BEAT, {})
        assert len(broker.pulls) == 1
        process_queue.finished_one(second)
        assert await broker.asked(2) == 3


async def test_what_is_put_back_is_taken_again_unless_the_process_queue_is_dropped() -> None:
    async with reading(Prefetch()) as (broker, process_queue):
        await first_answer(broker, process_queue, 2)
        messages = process_queue.taken(1)
        process_queue.put_back(messages)
        assert [message.queue_offset for message in process_queue.taken(10)] == [0, 1]
        process_queue.drop()
        process_queue.put_back(messages)
        assert not process_queue.is_ready
        assert process_queue.taken(10) == []


async def test_a_process_queue_that_goes_on_has_nothing_to_hand_out_before_the_next_answer() -> None:
    async with reading(Prefetch()) as (broker, process_queue):
        await broker.asked(1)
        process_queue.pause()
        process_queue.resume()
        assert not process_queue.is_ready
        await broker.answer(0, records(0, 1), 1)
        await process_queue.until_absorbed(1)
        assert process_queue.is_ready


async def test_where_the_route_has_no_such_broker_it_is_asked_for_again() -> None:
    async with reading(Prefetch()) as (broker, _):
        asked = 0

        def answer(command: RemotingCommand) -> RemotingCommand:
            nonlocal asked
            asked += 1
            return route_reply(command, {"0": broker.inner.address}, name="b" if asked == 1 else "a")

        broker.inner.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] = answer
        assert await broker.asked(1) == 0
        assert asked == 2


async def test_the_next_pull_goes_to_the_member_that_the_broker_names() -> None:
    async with scripted_broker() as inner, reading(Prefetch()) as (broker, process_queue):
        slave = Broker(inner)
        addresses = {"0": broker.inner.address, "1": inner.address}
        broker.inner.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] = lambda command: route_reply(command, addresses)
        await broker.asked(1)
        stream, command = broker.pulls[0]
        header = pull_header(2) | {"suggestWhichBrokerId": "1"}
        await stream.send(encode(command.reply(ResponseCode.SUCCESS, header=header, body=records(0, 2))))
        assert await slave.asked(1) == 2
        await slave.answer(0, records(2, 1), 3)  # the reply names the master
        assert await broker.asked(2) == 3
        stream, command = broker.pulls[1]
        header = pull_header(3) | {"suggestWhichBrokerId": "1"}
        await stream.send(encode(command.reply(ResponseCode.PULL_RETRY_IMMEDIATELY, header=header)))
        assert await slave.asked(2) == 3
        await slave.answer(1, b"", 3, ResponseCode.PULL_RETRY_IMMEDIATELY)  # a slave that is behind, or serves no pulls
        assert await broker.asked(3) == 3
        assert [message.queue_offset for message in process_queue.taken(10)] == [0, 1, 2]


class Group:
    """A member of a group, with the methods that heartbeats call."""

    def producer_data(self) -> ProducerData | None:
        return None

    def consumer_data(self) -> ConsumerData | None:
        return ConsumerData(group_name="g")

    def pushes(self) -> dict[int, Push]:
        return {}


async def test_a_broker_that_does_not_know_the_subscription_yet_is_greeted() -> None:
    async with reading(Prefetch()) as (broker, process_queue):
        await broker.asked(1)
        process_queue.client.join(Group())
        greeted = broker.inner.counts[RequestCode.HEART_BEAT]
        await broker.answer(0, b"", 0, ResponseCode.SUBSCRIPTION_NOT_EXIST)
        assert await broker.asked(2) == 0
        assert broker.inner.counts[RequestCode.HEART_BEAT] > greeted


async def test_a_pause_after_failures_ends_when_the_route_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new master is known: the consumer does not wait until the pause, which has grown to seconds, is over."""
    monkeypatch.setattr("trimq.client.process_queue._FIRST_PAUSE", 1000.0)
    monkeypatch.setattr("trimq.client.process_queue._LONGEST_PAUSE", 1000.0)
    async with reading(Prefetch()) as (broker, process_queue):
        await broker.asked(1)
        await broker.pulls[0][0].aclose()
        while not process_queue._pause:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.01)
        routes = process_queue.client.routes
        broker.inner.queues = 2
        with anyio.fail_after(20):
            await routes.refresh("T")
            await broker.asked(2)


async def test_a_broker_that_does_not_answer_a_pull_is_doubted_and_one_that_refuses_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with reading(Prefetch()) as (broker, process_queue):
        await broker.asked(1)
        doubted: list[str] = []
        monkeypatch.setattr(process_queue.client.routes, "doubt", doubted.append)
        await process_queue._recover(error_for(ResponseCode.NO_PERMISSION, "no", "b:1"))
        assert doubted == []
        await process_queue._recover(UnreachableError("no answer", address="b:1"))
        assert doubted == ["b:1"]
