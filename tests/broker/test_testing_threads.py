"""The broker for users' own tests."""

import doctest

import pytest
import structlog

from trimq import client
from trimq.broker import testing_threads
from trimq.broker.pytest_fixtures import rocketmq_broker, rocketmq_cluster
from trimq.broker.testing import running_broker
from trimq.broker.testing_threads import BrokerUnderTest, ClusterUnderTest, broker_in_thread
from trimq.client.sync import Admin, Message, Producer, PullConsumer
from trimq.remoting.runtime.clock import ManualClock

__all__ = ["rocketmq_broker", "rocketmq_cluster"]


def test_a_broker_of_the_suite(rocketmq_broker: BrokerUnderTest) -> None:
    with Producer("shop", namesrv=rocketmq_broker.namesrv) as producer:
        producer.send(Message("Announcements", b"1 book"))
    with PullConsumer("test", namesrv=rocketmq_broker.namesrv, start="first") as consumer:
        consumer.assign(consumer.queues("Announcements"))
        assert [message.body for message in consumer.poll(timeout=10)] == [b"1 book"]


def test_two_brokers_share_a_name_server(rocketmq_cluster: ClusterUnderTest) -> None:
    with Admin(rocketmq_cluster.namesrv) as admin:
        admin.create_topic("Orders", queues=2)
    with Producer("shop", namesrv=rocketmq_cluster.namesrv) as producer:
        used = {producer.send(Message("Orders", b"x")).queue.broker_name for _ in range(4)}
    assert used == {"broker-a", "broker-b"}


def test_time_goes_on_when_the_test_says_so() -> None:
    with broker_in_thread(clock=ManualClock(wall_ms=1_700_000_000_000)) as broker:
        with Producer("shop", namesrv=broker.namesrv) as producer:
            producer.send(Message("Reminders", b"now"))
            producer.send(Message("Reminders", b"in two hours", delay_level=18))
        with PullConsumer("test", namesrv=broker.namesrv, start="first") as consumer:
            consumer.assign(consumer.queues("Reminders"))
            [now] = consumer.poll(timeout=10)
            broker.advance(2 * 3600 - 1)
            assert consumer.poll(timeout=1.0) == []
            broker.advance(1)
            [later] = consumer.poll(timeout=20)
    assert (now.body, later.body) == (b"now", b"in two hours")
    assert (now.store_time, later.store_time) == (1_700_000_000, 1_700_007_200)


def test_time_of_the_machine_cannot_be_moved(rocketmq_broker: BrokerUnderTest) -> None:
    with pytest.raises(RuntimeError, match="ManualClock"):
        rocketmq_broker.advance(1)


async def test_time_in_a_broker_of_this_loop() -> None:
    clock = ManualClock()
    async with running_broker(clock=clock, embeddedNamesrvEnable=True, embeddedNamesrvPort=0) as broker:
        assert broker.namesrv is not None
        assert broker.namesrv.address is not None
        namesrv = "{}:{}".format(*broker.namesrv.address)
        async with client.Producer("shop", namesrv=namesrv) as producer:
            await producer.send(Message("Reminders", b"in a second", delay_level=1))
        async with client.PullConsumer("test", namesrv=namesrv, start="first") as consumer:
            await consumer.assign(await consumer.queues("Reminders"))
            assert await consumer.poll(timeout=0.2) == []
            clock.advance(1)
            [message] = await consumer.poll(timeout=20)
    assert message.body == b"in a second"


async def test_not_inside_trio() -> None:
    with pytest.raises(RuntimeError, match="running_broker"):  # noqa: SIM117 - entering is what raises
        with broker_in_thread():
            pytest.fail("entered")


def test_examples_run() -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # the broker's log is not part of their output
    assert doctest.testmod(testing_threads).failed == 0
