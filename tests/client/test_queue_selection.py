"""Selection of a queue for a message without one: each topic's queues in turn, from a random first queue.

Guards against one counter for all topics (four topics in turn with four queues each: one queue of each got all) and
against a fixed first queue (many producers that send one message each would all send to one queue).
"""

from collections import Counter
from itertools import count

import anyio
import pytest

from tests.client.scripted import scripted_broker
from tests.client.test_scripted import BATCH, SEND, stored
from trimq.client import Message, Producer, latency_fault_tolerance
from trimq.client.latency_fault_tolerance import LatencyFaultTolerance
from trimq.client.message import MessageQueue
from trimq.protocol.batch import decode_batch
from trimq.protocol.codes import RequestCode

pytestmark = pytest.mark.timeout(30)


def queues(topic: str, number: int = 4) -> list[MessageQueue]:
    return [MessageQueue(topic=topic, broker_name="a", queue_id=queue_id) for queue_id in range(number)]


def test_each_topic_has_its_own_turn() -> None:
    tolerance = LatencyFaultTolerance(lambda: 0.0, start=lambda: 2)
    found = [tolerance.select(queues(topic)).queue_id for _ in range(4) for topic in "ABCD"]
    assert found == [2] * 4 + [3] * 4 + [0] * 4 + [1] * 4


def test_a_turn_begins_where_chance_says() -> None:
    starts = count(5)
    tolerance = LatencyFaultTolerance(lambda: 0.0, start=lambda: next(starts))
    assert [tolerance.select(queues(topic)).queue_id for topic in "ABC"] == [1, 2, 3]


def test_chance_is_chance() -> None:
    assert len({latency_fault_tolerance.random_start() % 64 for _ in range(500)}) > 8


def test_the_turns_of_many_topics_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_fault_tolerance, "_TOPICS", 3)
    tolerance = LatencyFaultTolerance(lambda: 0.0, start=lambda: 0)
    for topic in "ABCD":
        tolerance.select(queues(topic))
    assert list(tolerance._turns) == ["B", "C", "D"]
    assert tolerance.select(queues("D")).queue_id == 1
    assert tolerance.select(queues("A")).queue_id == 0  # evicted: it starts again at the first queue


def test_the_queues_that_are_left_share_alike_while_a_broker_is_out() -> None:
    tolerance = LatencyFaultTolerance(lambda: 0.0, start=lambda: 0)
    both = [*queues("T", 2), MessageQueue(topic="T", broker_name="b", queue_id=7)]
    tolerance.failed("b")
    assert Counter(tolerance.select(both).queue_id for _ in range(6)) == {0: 3, 1: 3}
    assert Counter(tolerance.select(both, avoid="b").queue_id for _ in range(6)) == {0: 3, 1: 3}
    tolerance.failed("a")  # all brokers have failed: any is selected except the last one that failed
    assert {tolerance.select(both, avoid="a").broker_name for _ in range(6)} == {"b"}
    assert Counter(tolerance.select(both).queue_id for _ in range(6)) == {0: 2, 1: 2, 7: 2}


@pytest.mark.anyio
async def test_producers_that_send_one_message_each_use_all_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = count()
    monkeypatch.setattr(latency_fault_tolerance, "random_start", lambda: next(starts))
    async with scripted_broker(queues=4) as broker:
        broker.answers[SEND] = stored
        for _ in range(4):
            async with Producer("p", namesrv=broker.address) as producer:
                await producer.send(Message("T", b"x"))
        sends = await broker.until(SEND, 4)
    assert [send.ext_fields()["e"] for send in sends] == ["0", "1", "2", "3"]


@pytest.mark.anyio
async def test_a_first_burst_with_linger_uses_all_queues() -> None:
    """This holds before the topic's route is known, too: a program's first burst is such a case."""
    async with scripted_broker(queues=4) as broker:
        broker.answers[BATCH] = stored
        async with (
            Producer("p", namesrv=broker.address, linger=0.3) as producer,
            anyio.create_task_group() as group,
        ):
            for number in range(100):
                group.start_soon(producer.send, Message("T", b"%d" % number))
        batches = [command for _, command in broker.seen if command.code == RequestCode.SEND_BATCH_MESSAGE]
    assert sorted(batch.ext_fields()["e"] for batch in batches) == ["0", "1", "2", "3"]
    assert sorted(len(decode_batch(batch.body)) for batch in batches) == [16, 20, 32, 32]
