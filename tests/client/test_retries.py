"""What happens to a message that cannot be handed back, to a lock that cannot be renewed, to a broker that forgot us.

Each guards against silence: a message that is committed and not processed, a queue that two members read, a broker that
sends nothing until the next regular heartbeat.
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
    """As far as Retries and Rebalancer use one."""

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


async def test_a_message_that_nobody_takes_back_stays_and_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offset would be committed with those around it, and it would never be processed."""

    async def send_back(_client: object, _group: str, message: str, *_: object) -> bool:
        await anyio.lowlevel.checkpoint()
        return message != "nobody takes it"

    monkeypatch.setattr(retries, "send_back", send_back)
    monkeypatch.setattr(retries, "LOCAL_RETRY_DELAY", 0.0)
    process_queue: Any = RecordedProcessQueue()
    async with anyio.create_task_group() as group:
        handing: Any = Retries(None, "g", None, 1.0, group.start_soon)  # type: ignore[arg-type]
        await handing.to_retry_topic(process_queue, ["one", "nobody takes it", "two"], 0)
        assert process_queue.done == ["one", "two"]
    assert process_queue.again == ["nobody takes it"]


@pytest.mark.parametrize(
    ("held", "age", "paused"),
    [(True, LOCK_LIFETIME + 1, False), (False, 1.0, None), (False, LOCK_LIFETIME + 1, True)],
    ids=["renewed", "not renewed once", "not renewed for long"],
)
async def test_a_queue_is_read_as_long_as_its_lock_is_trusted(held: bool, age: float, paused: bool | None) -> None:
    """The broker gives a lock that is not renewed to another member: two would read the queue."""
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
    """It has forgotten its producers and consumers; the next regular heartbeat comes half a minute later."""
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
