"""Messages that cannot be handed back, locks that cannot be renewed, and brokers that have forgotten their clients.

Each test guards against a silent fault: a message that is committed and not processed, a queue that two members read,
a broker that sends nothing until the next regular heartbeat.
"""

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from tests.client.scripted import scripted_broker
from tests.client.test_scripted import SEND, stored
from trimq.client import Message, MessageQueue, Producer, retries
from trimq.client.rebalance import LOCK_LIFETIME, Rebalancer
from trimq.client.retries import Retries
from trimq.protocol.codes import RequestCode

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

QUEUE = MessageQueue(topic="T", broker_name="a", queue_id=0)


class RecordedProcessQueue:
    """A process queue, with the attributes that Retries and Rebalancer use."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.again: list[object] = []
        self.paused: bool | None = None

    def finished(self, messages: Iterable[object]) -> None:
        self.done += messages

    def put_back(self, messages: Iterable[object]) -> None:
        self.again += messages

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


async def test_a_message_that_no_broker_takes_back_stays_and_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its offset would be committed with those around it, and it would never be processed."""

    async def send_back(_client: object, _group: str, message: str, *_: object) -> bool:
        await anyio.lowlevel.checkpoint()
        return message != "no broker takes it"

    monkeypatch.setattr(retries, "send_back", send_back)
    monkeypatch.setattr(retries, "LOCAL_RETRY_DELAY", 0.0)
    process_queue: Any = RecordedProcessQueue()
    async with anyio.create_task_group() as group:
        handing: Any = Retries(None, "g", None, 1.0, group.start_soon)  # type: ignore[arg-type]
        await handing.to_retry_topic(process_queue, ["one", "no broker takes it", "two"], 0)
        assert process_queue.done == ["one", "two"]
    assert process_queue.again == ["no broker takes it"]


@pytest.mark.parametrize(
    ("held", "age", "paused"),
    [(True, LOCK_LIFETIME + 1, False), (False, 1.0, None), (False, LOCK_LIFETIME + 1, True)],
    ids=["renewed", "not renewed once", "not renewed for long"],
)
async def test_a_queue_is_read_as_long_as_its_lock_is_trusted(held: bool, age: float, paused: bool | None) -> None:
    """The broker gives a lock that is not renewed to another member; two members would read the queue."""
    rebalancer: Any = Rebalancer(
        SimpleNamespace(), "g", lambda: ["T"], None, None, None, orderly=True,  # type: ignore[arg-type]
    )  # fmt: skip
    process_queue = RecordedProcessQueue()
    rebalancer.process_queues[QUEUE] = process_queue
    rebalancer._locked_at[QUEUE] = time.monotonic() - age

    async def lock_queues(queues: list[MessageQueue]) -> set[MessageQueue]:
        await anyio.lowlevel.checkpoint()
        return set(queues) if held else set()

    rebalancer._lock_queues = lock_queues
    await rebalancer._renew()
    assert process_queue.paused is paused


async def test_a_broker_that_was_lost_is_greeted_as_soon_as_it_is_there_again() -> None:
    """A restarted broker has no producers and consumers; the next regular heartbeat comes half a minute later."""
    async with scripted_broker() as broker, Producer("p", namesrv=broker.address) as producer:
        broker.answers[SEND] = stored
        await producer.send(Message("T", b"x"))
        await producer.client.heartbeat()
        assert broker.counts[RequestCode.HEART_BEAT] == 1
        lost = anyio.Event()
        producer.client._remoting.on_close.append(lambda _: lost.set())
        await broker.seen[0][0].aclose()
        await lost.wait()
        await producer.send(Message("T", b"y"))
        with anyio.fail_after(10):
            await broker.until(RequestCode.HEART_BEAT, 2)
