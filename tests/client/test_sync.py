"""The blocking facade, against a real broker."""

import asyncio
import threading

import anyio
import pytest

from tests.client.servers import Servers
from trimq.client import NotStoredError, SendOutcome, UsageError
from trimq.client.sync import Admin, Batch, Consumer, Message, Producer, PullConsumer, TransactionProducer


def test_send_and_consume(servers: Servers, name: str) -> None:
    servers.create_topic(name, 2)
    with Producer(name, namesrv=servers.namesrv) as producer:
        receipt = producer.send(Message(name, b"one", tags="t"))
        assert receipt.queue_offset == 0
        assert len(producer.send_many([Message(name, b"two"), Message(name, b"three")])) == 2
        assert len(producer.send_batch([Message(name, b"four"), Message(name, b"five")])) == 2
        bad = Message(name, b"")
        with pytest.raises(UsageError):
            producer.send(bad)
        assert bad.outcome is SendOutcome.NOT_STORED
    with pytest.raises(NotStoredError, match="not open"):
        producer.send(Message(name, b"x"))
    seen = []
    with Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
        for message in consumer:
            with message.process():
                seen.append((message.body, message.tags, message.topic))
            if len(seen) == 5:
                break
        assert consumer.take(timeout=0.1) is None
        consumer.commit()
    assert {body for body, _, _ in seen} == {b"one", b"two", b"three", b"four", b"five"}
    assert (b"one", "t", name) in seen


def test_an_exception_means_again_later(servers: Servers, name: str) -> None:
    with Producer(name, namesrv=servers.namesrv) as producer:
        producer.send(Message(name, b"x"))
    with Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
        for number, message in enumerate(consumer):
            with message.process(delay_level=1):
                if number == 0:
                    raise ValueError("not now")
                break
        assert message.reconsume_times == 1


def test_batches(servers: Servers, name: str) -> None:
    with Producer(name, namesrv=servers.namesrv) as producer:
        producer.send_many([Message(name, b"%d" % number) for number in range(10)])
    seen: list[bytes] = []

    def handle(batch: Batch) -> None:
        with batch.process():
            assert len(batch) <= 4
            seen.extend(message.body for message in batch)

    with Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
        for batch in consumer.batches(4):
            handle(batch)
            if len(seen) == 10:
                break
    assert sorted(seen) == [b"%d" % number for number in range(10)]


def test_pull_and_admin(servers: Servers, name: str) -> None:
    with Admin(servers.namesrv) as admin:
        admin.create_topic(name, queues=1)
        with Producer(name, namesrv=servers.namesrv) as producer:
            producer.send_many([Message(name, b"%d" % number) for number in range(3)])
    anyio.run(servers.dispatched, name, 3)
    with PullConsumer(name, namesrv=servers.namesrv, start="first") as consumer:
        [queue] = consumer.queues(name)
        consumer.assign({queue: 1})
        assert [message.queue_offset for message in consumer.poll(timeout=20)] == [1, 2]
        consumer.commit()
        assert consumer.committed(queue) == 3
        consumer.seek(queue, 0)
        assert consumer.position(queue) == 0
        assert (consumer.first_offset(queue), consumer.end_offset(queue)) == (0, 3)
    with Admin(servers.namesrv) as admin:
        [bounds] = admin.topic_stats(name).values()
        assert bounds.max_offset == 3


def test_threads_share_a_producer(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    with Producer(name, namesrv=servers.namesrv) as producer:
        threads = [
            threading.Thread(target=lambda: [producer.send(Message(name, b"x")) for _ in range(5)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with PullConsumer(name, namesrv=servers.namesrv, start="first") as consumer:
        [queue] = consumer.queues(name)
        consumer.assign([queue])
        seen = 0
        while seen < 20 and (messages := consumer.poll(timeout=20)):
            seen += len(messages)
        assert (seen, consumer.end_offset(queue)) == (20, 20)


def test_nothing_is_left_behind(servers: Servers, name: str) -> None:
    before = set(threading.enumerate())  # the threads, not their number: threads of other tests may end during this one
    with Producer(name, namesrv=servers.namesrv) as producer:
        producer.send(Message(name, b"x"))
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before


def test_transaction(servers: Servers, name: str, request: pytest.FixtureRequest) -> None:
    servers.expect(request, "transactions")
    servers.create_topic(name, 1)

    def never(_message: object) -> None:
        pytest.fail("the broker asked although it had been notified")

    with TransactionProducer(name, never, namesrv=servers.namesrv) as producer:  # type: ignore[arg-type]
        with producer.transaction(Message(name, b"good")):
            pass
        with pytest.raises(ZeroDivisionError), producer.transaction(Message(name, b"bad")):
            raise ZeroDivisionError
    with PullConsumer(name, namesrv=servers.namesrv, start="first") as consumer:
        consumer.assign(consumer.queues(name))
        assert [message.body for message in consumer.poll(timeout=20)] == [b"good"]


def test_inside_a_running_loop_as_in_a_notebook(servers: Servers, name: str) -> None:
    async def cell() -> int:
        with Producer(name, namesrv=servers.namesrv) as producer:
            return producer.send(Message(name, b"x")).queue_offset

    assert asyncio.run(cell()) == 0
    assert anyio.run(cell, backend="trio") >= 0
