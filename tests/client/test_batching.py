"""Automatic batching, with a sender that the test controls."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from trimq.client.attempts import Failure, OnResult
from trimq.client.batching import Batcher
from trimq.client.errors import ClosedError, NotStoredError, PerhapsStoredError, RocketMQError
from trimq.client.message import Message, MessageQueue, SendReceipt, SendStatus
from trimq.client.sending import Prepared, entry_text
from trimq.protocol.batch import decode_batch
from trimq.protocol.message_id import UniqueIdGenerator

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

QUEUE = MessageQueue(topic="T", broker_name="a", queue_id=1)
OTHER = MessageQueue(topic="T", broker_name="a", queue_id=2)


class ScriptedSender:
    """Records batches by their messages' bodies; the test completes them. If ``open`` is False, ``begin`` fails."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []
        self.queues: list[MessageQueue | None] = []
        self.on_results: list[OnResult] = []
        self.prepared: list[Prepared] = []
        self.delivered: list[tuple[list[bytes], Failure | None]] = []
        self.refusal: BaseException | None = None
        self.open = True
        self.queues_of_topic = 1
        self.began = anyio.Event()

    async def until(self, count: int) -> None:
        while len(self.sent) < count:
            await self.began.wait()

    def spread(self, _topic: str, /) -> int:
        return self.queues_of_topic

    def begin(
        self, prepared: Prepared, queue: MessageQueue | None, messages: Sequence[Message], on_result: OnResult, /
    ) -> bool:
        bodies = [bytes(item.body) for item in decode_batch(prepared.body)]
        assert bodies == [message.body for message in messages]
        assert list(prepared.message_ids) == [message.message_id for message in messages]
        if self.open:
            self.sent.append(bodies)
            self.queues.append(queue)
            self.on_results.append(on_result)
            self.prepared.append(prepared)
            self.began.set()
            self.began = anyio.Event()
        return self.open

    async def deliver(
        self,
        prepared: Prepared,
        queue: MessageQueue | None,
        messages: Sequence[Message],
        context: None = None,
        failure: Failure | None = None,
        /,
    ) -> list[SendReceipt]:
        self.delivered.append(([message.body for message in messages], failure))
        if self.refusal is not None:
            raise self.refusal
        return receipts(prepared)

    def answer(self, number: int) -> None:
        self.on_results[number](receipts(self.prepared[number]))


def receipts(prepared: Prepared) -> list[SendReceipt]:
    return [
        SendReceipt(message_id, QUEUE, offset, SendStatus.SEND_OK, str(offset))
        for offset, message_id in enumerate(prepared.message_ids)
    ]


class Sends:
    """Callers of one batcher, and the result of each."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.ids = UniqueIdGenerator(bytes(4))
        self.ended: dict[bytes, SendReceipt | RocketMQError | None] = {}
        self.scopes: dict[bytes, anyio.CancelScope] = {}

    async def send(self, body: bytes, queue: MessageQueue | None = None, topic: str = "T") -> None:
        """Like Producer.send; the result is None if the call was cancelled."""
        message = Message(topic, body)
        with anyio.CancelScope() as self.scopes[body]:
            self.ended[body] = None
            try:
                receipt = await self.batcher.send(message, entry_text(message, None, self.ids, 1000), queue)
                assert receipt.message_id == message.message_id
                self.ended[body] = receipt
            except RocketMQError as error:
                self.ended[body] = error


@asynccontextmanager
async def batching(
    sender: ScriptedSender, linger: float = 0.0, max_bytes: int = 100_000
) -> AsyncIterator[tuple[Sends, anyio.abc.TaskGroup]]:
    """All senders have ended when the block ends."""
    async with anyio.create_task_group() as outer:

        def spawn(function: object) -> None:
            outer.start_soon(function)  # type: ignore[arg-type]

        batcher = Batcher(linger, max_bytes, sender, spawn)
        batcher.start()
        outer.start_soon(batcher.run)
        await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as group:
            yield Sends(batcher), group
        outer.cancel_scope.cancel()


async def test_what_is_sent_in_one_turn_is_a_batch_and_each_gets_its_own_receipt() -> None:
    sender = ScriptedSender()
    async with batching(sender) as (sends, group):
        for number in range(5):
            group.start_soon(sends.send, b"%d" % number)
        await anyio.wait_all_tasks_blocked()
        (bodies,) = sender.sent
        assert sorted(bodies) == [b"0", b"1", b"2", b"3", b"4"]
        sender.answer(0)
    found = {body: receipt.queue_offset for body, receipt in sends.ended.items() if isinstance(receipt, SendReceipt)}
    assert [found[body] for body in bodies] == [0, 1, 2, 3, 4]


async def test_a_full_batch_leaves_before_its_time() -> None:
    sender = ScriptedSender()
    async with batching(sender, linger=1000, max_bytes=300) as (sends, group):
        for number in range(4):
            group.start_soon(sends.send, bytes([number]) * 100)
        await anyio.wait_all_tasks_blocked()
        assert [len(bodies) for bodies in sender.sent] == [1, 1, 1]
        group.start_soon(sends.batcher.flush)
        await anyio.wait_all_tasks_blocked()
        assert [len(bodies) for bodies in sender.sent] == [1, 1, 1, 1]
        for number in range(4):
            sender.answer(number)
    assert all(isinstance(receipt, SendReceipt) for receipt in sends.ended.values())


async def test_a_burst_while_nothing_is_under_way_is_spread_over_the_queues_and_later_batches_are_large() -> None:
    """Guards: a burst used to be one batch, so one queue, and one consumer, got all of it."""
    sender = ScriptedSender()
    sender.queues_of_topic = 3
    async with batching(sender, linger=0.3) as (sends, group):
        for number in range(16 * 4 + 5):
            group.start_soon(sends.send, b"%d" % number)
        await sender.until(3)
        await anyio.wait_all_tasks_blocked()
        assert [len(bodies) for bodies in sender.sent] == [32, 21, 16]
        for number in range(100, 140):
            group.start_soon(sends.send, b"%d" % number)
        await sender.until(4)
        assert [len(bodies) for bodies in sender.sent] == [32, 21, 16, 40]
        for number in range(4):
            sender.answer(number)
    assert all(isinstance(receipt, SendReceipt) for receipt in sends.ended.values())


async def test_topics_do_not_share_a_batch() -> None:
    sender = ScriptedSender()
    async with batching(sender) as (sends, group):
        group.start_soon(sends.send, b"a", None, "A")
        group.start_soon(sends.send, b"b", None, "B")
        await anyio.wait_all_tasks_blocked()
        assert sorted(sender.sent) == [[b"a"], [b"b"]]
        sender.answer(0)
        sender.answer(1)


async def test_every_sender_gets_an_error_of_its_own_after_the_other_attempts() -> None:
    sender = ScriptedSender()
    sender.refusal = PerhapsStoredError("no", code=1, address="x")
    async with batching(sender) as (sends, group):
        for body in (b"1", b"2"):
            group.start_soon(sends.send, body)
        await anyio.wait_all_tasks_blocked()
        first = Failure(QUEUE, NotStoredError("busy", code=2))
        sender.on_results[0](first)
    assert sender.delivered == [(sender.sent[0], first)]
    one, two = sends.ended.values()
    assert isinstance(one, PerhapsStoredError)
    assert isinstance(two, PerhapsStoredError)
    assert one is not two
    assert (one.code, one.address, one.__cause__) == (1, "x", sender.refusal)


async def test_other_attempts_may_work() -> None:
    sender = ScriptedSender()
    async with batching(sender) as (sends, group):
        group.start_soon(sends.send, b"1")
        await anyio.wait_all_tasks_blocked()
        sender.on_results[0](Failure(QUEUE, NotStoredError("busy", code=2)))
    assert isinstance(sends.ended[b"1"], SendReceipt)


async def test_what_cannot_begin_at_once_is_delivered_by_a_task() -> None:
    sender = ScriptedSender()
    sender.open = False
    async with batching(sender) as (sends, group):
        group.start_soon(sends.send, b"1")
    assert sender.delivered == [([b"1"], None)]
    assert isinstance(sends.ended[b"1"], SendReceipt)


@pytest.mark.parametrize("full", [False, True])
async def test_a_batch_that_can_begin_nowhere_fails(full: bool) -> None:
    sender = ScriptedSender()
    sender.open = False

    def spawn(_function: object) -> None:
        raise ClosedError("closed")

    batcher = Batcher(0.0, 10 if full else 1000, sender, spawn)
    batcher.start()
    sends = Sends(batcher)
    async with anyio.create_task_group() as group:
        group.start_soon(batcher.run)
        with anyio.fail_after(5):
            await sends.send(b"1")
        group.cancel_scope.cancel()
    assert isinstance(sends.ended[b"1"], ClosedError)


async def test_who_is_cancelled_before_the_batch_leaves_is_not_in_it() -> None:
    sender = ScriptedSender()
    async with batching(sender, linger=1000) as (sends, group):
        for body in (b"1", b"2", b"3"):
            group.start_soon(sends.send, body)
            await anyio.wait_all_tasks_blocked()
        sends.scopes[b"2"].cancel()
        await anyio.wait_all_tasks_blocked()
        group.start_soon(sends.send, b"4")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(sends.batcher.flush)
        await anyio.wait_all_tasks_blocked()
        assert sender.sent == [[b"1", b"3", b"4"]]
        sends.scopes[b"3"].cancel()  # too late to take it out of the batch
        await anyio.wait_all_tasks_blocked()
        sender.answer(0)
    assert [sends.ended[body] is None for body in (b"1", b"2", b"3", b"4")] == [False, True, True, False]


async def test_a_batch_of_which_nothing_is_left_is_not_sent() -> None:
    sender = ScriptedSender()
    async with batching(sender, linger=1000) as (sends, group):
        group.start_soon(sends.send, b"1")
        await anyio.wait_all_tasks_blocked()
        sends.scopes[b"1"].cancel()
        await anyio.wait_all_tasks_blocked()
        await sends.batcher.flush()
    assert sender.sent == []


async def test_batches_for_a_queue_leave_one_after_the_other_and_the_next_one_grows() -> None:
    sender = ScriptedSender()
    async with batching(sender) as (sends, group):
        for body in (b"1", b"2", b"3"):
            group.start_soon(sends.send, body, QUEUE)
            await anyio.wait_all_tasks_blocked()
        group.start_soon(sends.send, b"x", OTHER)
        await anyio.wait_all_tasks_blocked()
        assert sender.sent == [[b"1"], [b"x"]]
        assert sender.queues == [QUEUE, OTHER]
        sender.answer(0)
        await anyio.wait_all_tasks_blocked()
        assert sender.sent[2:] == [[b"2", b"3"]]
        sender.answer(1)
        sender.answer(2)
    assert all(isinstance(receipt, SendReceipt) for receipt in sends.ended.values())


@pytest.mark.parametrize("refused", [False, True])
async def test_a_line_of_full_batches_keeps_its_order(refused: bool) -> None:
    sender = ScriptedSender()
    async with batching(sender, max_bytes=100) as (sends, group):
        for number in range(6):
            group.start_soon(sends.send, b"%d" % number, QUEUE)
            await anyio.wait_all_tasks_blocked()
        assert sender.sent == [[b"0"]]
        for number in (2, 3):
            sends.scopes[b"%d" % number].cancel()
        await anyio.wait_all_tasks_blocked()
        if refused:
            sender.refusal = NotStoredError("busy")
            sender.on_results[0](Failure(QUEUE, sender.refusal))
            await anyio.wait_all_tasks_blocked()
        else:
            sender.answer(0)
        for number in range(1, 4):
            assert len(sender.sent) == number + 1
            sender.answer(number)
    assert sender.sent == [[b"0"], [b"1"], [b"4"], [b"5"]]
    assert isinstance(sends.ended[b"0"], NotStoredError if refused else SendReceipt)


async def test_while_the_broker_has_nothing_to_do_half_of_those_who_come_again_are_enough_for_a_batch() -> None:
    sender = ScriptedSender()
    async with batching(sender) as (sends, group):

        async def sending(number: int) -> None:
            for turn in range(3):
                await sends.send(b"%d %d" % (number, turn))

        for number in range(40):
            group.start_soon(sending, number)
        await anyio.wait_all_tasks_blocked()
        assert [len(bodies) for bodies in sender.sent] == [40]
        sender.answer(0)
        await anyio.wait_all_tasks_blocked()
        assert [len(bodies) for bodies in sender.sent] == [40, 20, 20]
        sender.answer(1)
        await anyio.wait_all_tasks_blocked()
        assert [len(bodies) for bodies in sender.sent] == [40, 20, 20, 20]  # the broker is busy
        sender.answer(2)
        await anyio.wait_all_tasks_blocked()
        sender.answer(3)
        sender.answer(4)
    assert len(sends.ended) == 120
    assert all(isinstance(receipt, SendReceipt) for receipt in sends.ended.values())


async def test_closing_fails_the_sends_whose_batch_was_not_sent() -> None:
    sender = ScriptedSender()
    batcher = Batcher(1000, 1000, sender, lambda _: None)
    batcher.start()
    sends = Sends(batcher)
    async with anyio.create_task_group() as group, anyio.create_task_group() as running:
        running.start_soon(batcher.run)
        group.start_soon(sends.send, b"1")
        await anyio.wait_all_tasks_blocked()
        running.cancel_scope.cancel()
    assert isinstance(sends.ended[b"1"], ClosedError)
    await sends.send(b"2")
    assert isinstance(sends.ended[b"2"], ClosedError)
    assert sender.sent == []
