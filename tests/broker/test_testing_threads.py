"""The broker for other people's tests."""

import pytest

from broker.pytest_fixtures import rocketmq_broker, rocketmq_cluster
from broker.testing_threads import BrokerUnderTest, ClusterUnderTest, broker_in_thread
from client.sync import Admin, Message, Producer, PullConsumer

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


async def test_not_inside_trio() -> None:
    with pytest.raises(RuntimeError, match="running_broker"):  # noqa: SIM117 - entering is what raises
        with broker_in_thread():
            pytest.fail("entered")
