"""Admin, against a real broker: groups and their offsets, clients, messages, topics, name servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from tests.client.scripted import scripted_broker
from tests.client.servers import Servers
from tests.client.test_scripted import refused
from trimq.client import (
    Admin,
    Consumer,
    Message,
    MessageQueue,
    Producer,
    RocketMQError,
    TopicNotFoundError,
    UsageError,
)
from trimq.protocol.body import SubscriptionGroupConfig, TopicConfig
from trimq.protocol.codes import RequestCode, ResponseCode

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def one_of_three(servers: Servers, name: str) -> AsyncIterator[tuple[Admin, Consumer, MessageQueue]]:
    """A group (called as the topic) that has consumed the first of three messages and still exists."""
    servers.create_topic(name, 1)
    async with Producer(f"p_{name}", namesrv=servers.namesrv) as producer:
        receipts = [await producer.send(Message(name, b"%d" % number, keys=f"k{number}")) for number in range(3)]
    async with (
        Admin(servers.namesrv) as admin,
        Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer,
    ):
        await (await anext(consumer)).ack()
        await consumer.commit()
        yield admin, consumer, receipts[0].queue


async def test_a_group_is_made_changed_and_deleted(servers: Servers, name: str) -> None:
    async with Admin(servers.namesrv) as admin:
        await admin.update_group(servers.broker.address, SubscriptionGroupConfig(group_name=name, retry_max_times=3))
        assert (await admin.groups(servers.broker.address))[name].retry_max_times == 3
        await admin.delete_group(servers.broker.address, name, clean_offset=True)
        assert name not in await admin.groups(servers.broker.address)
        with pytest.raises(UsageError, match="group"):
            await admin.update_group(servers.broker.address, SubscriptionGroupConfig(group_name="no/group"))
        with pytest.raises(TopicNotFoundError):
            await admin.group_masters(f"{name}_unknown")
        with pytest.raises(UsageError, match="neither PULL nor POP"):
            await admin.set_consume_mode(servers.broker.address, name, name, "PUSH")


async def test_offsets_are_set_and_copied(servers: Servers, name: str) -> None:
    async with one_of_three(servers, name) as (admin, _, queue):
        assert await admin.offset_of(name, queue) == 1
        assert await admin.offset_of(f"{name}_unknown", queue) is None
        assert (await admin.consume_stats(name, name)).lag == 2
        copy, other = f"{name}_copy", f"{name}_other"
        for group in (copy, other):
            await admin.update_group(servers.broker.address, SubscriptionGroupConfig(group_name=group))
        assert await admin.clone_offsets(name, copy, name) == {queue: 1}
        assert await admin.clone_offsets(name, copy) == {queue: 1}  # not those of its retry topic
        assert await admin.offset_of(copy, queue) == 1
        await admin.clone_offsets_at_broker(servers.broker.address, name, other, name)
        assert await admin.offset_of(other, queue) == 1
        await admin.set_offset(copy, queue, 2)
        assert await admin.offset_of(copy, queue) == 2
        assert await admin.reset_offset(name, copy, None) == {queue: 3}
        assert name in await admin.group_topics(name)
        [span] = await admin.time_spans(name, name)
        assert span.message_queue == queue
        assert span.min_time_stamp <= span.max_time_stamp


async def test_a_running_consumer_follows_a_reset(servers: Servers, name: str) -> None:
    async with one_of_three(servers, name) as (admin, consumer, queue):
        with anyio.fail_after(30):
            assert await admin.reset_offset(name, name, 0.0) == {queue: 0}
            async for message in consumer:
                await message.ack()
                if message.queue_offset == 0:  # the group has consumed this message already
                    break


async def test_who_is_connected_and_with_what(servers: Servers, name: str) -> None:
    async with one_of_three(servers, name) as (admin, consumer, queue):
        [member] = (await admin.consumer_connection(name)).connection_set
        assert member.client_id == consumer.client.id
        assert await admin.is_online(name)
        found = await admin.subscription(name, name)
        assert found is not None
        assert (found.topic, found.sub_string) == (name, "*")
        assert await admin.consumer_offsets(name, name) == {consumer.client.id: {queue: 1}}
        info = await admin.running_info(name, consumer.client.id)
        assert info.properties["consumerGroup"] == name
        assert queue in info.queues
    async with Admin(servers.namesrv) as admin:
        assert not await admin.is_online(name)
        assert await admin.subscription(name, name) is None


async def test_a_groups_own_topics_are_deleted(servers: Servers, name: str) -> None:
    async with one_of_three(servers, name) as (admin, _, _):
        assert await admin.has_topic(f"%RETRY%{name}")
    async with Admin(servers.namesrv) as admin:
        await admin.delete_group_topics(name, await admin.addresses())
        assert not await admin.has_topic(f"%RETRY%{name}")
        await admin.delete_group_topics(name, await admin.addresses())  # no such topics are left: no error


async def test_messages_are_found(servers: Servers, name: str) -> None:
    async with one_of_three(servers, name) as (admin, _, queue):
        await servers.indexed(name, "k1")
        [message] = await admin.messages_by_key(name, "k1")
        assert message.body == b"1"
        assert await admin.messages_by_key(name, "k1", end=message.store_time - 3600) == []
        assert await admin.messages_by_key(name, "unknown") == []
        [again] = await admin.messages_by_unique_key(name, message.message_id)
        assert again.offset_message_id == message.offset_message_id
        assert (await admin.message_by_id(message.offset_message_id)).body == b"1"
        for wrong in ("", "7F00", "not an id of 32 characters, is it"):
            with pytest.raises(UsageError, match="no offset message id"):
                await admin.message_by_id(wrong)
        found = await admin.message_by_offset(queue, 2)
        assert found is not None
        assert found.body == b"2"
        assert await admin.message_by_offset(queue, 99) is None


async def test_topics_of_brokers_and_clusters(servers: Servers, name: str) -> None:
    servers.create_topic(name, 2)
    async with Admin(servers.namesrv) as admin:
        assert name in await admin.topics()
        assert name in await admin.topics("DefaultCluster")
        assert await admin.topic_clusters(name) == ["DefaultCluster"]
        assert (await admin.topic_configs(servers.broker.address))[name].read_queue_nums == 2
        assert (await admin.topic_config(servers.broker.address, name)).write_queue_nums == 2
        await admin.create_topic(f"{name}_read_only", queues=1, perm=4)
        assert (await admin.topic_config(servers.broker.address, f"{name}_read_only")).perm == 4
        assert "TBW102" in await admin.system_topics(servers.broker.address)
        assert not await admin.has_topic(f"{name}_unknown")
        with pytest.raises(UsageError):
            await admin.update_topic(servers.broker.address, TopicConfig(topic_name="no/topic"))


async def test_values_of_name_servers(servers: Servers, name: str) -> None:
    async with Admin(servers.namesrv) as admin:
        assert await admin.get_kv(name, "key") is None
        assert await admin.list_kv(name) == {}
        await admin.put_kv(name, "key", "value")
        assert await admin.get_kv(name, "key") == "value"
        assert await admin.list_kv(name) == {"key": "value"}
        await admin.delete_kv(name, "key")
        assert await admin.get_kv(name, "key") is None


async def test_what_a_broker_says(servers: Servers, name: str) -> None:
    async with one_of_three(servers, name) as (admin, _, _):
        address = servers.broker.address
        assert (await admin.runtime_info(address))["brokerVersionDesc"]
        assert (await admin.broker_config(address))["brokerName"] == "broker-a"
        stats = await admin.broker_stats(address, "TOPIC_PUT_NUMS", name)
        assert stats.stats_day.sum in (
            (3,) if servers.peer == "trimq" else (0, 3)
        )  # Apache's broker computes the sums every ten seconds
        everyone = await admin.broker_consume_stats(address)
        assert everyone["brokerAddr"] == address


# -- answers that no real broker gives at a test's request -------------------------------------------------------------


async def test_other_errors_than_not_found_are_raised() -> None:
    async with scripted_broker() as broker, Admin(broker.address) as admin:
        for code in (RequestCode.QUERY_MESSAGE, RequestCode.GET_KV_CONFIG, RequestCode.GET_KVLIST_BY_NAMESPACE):
            broker.answers[code] = refused(ResponseCode.SYSTEM_BUSY)
        broker.answers[RequestCode.DELETE_TOPIC_IN_BROKER] = refused(ResponseCode.NO_PERMISSION)
        broker.answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = refused(ResponseCode.SYSTEM_BUSY)
        with pytest.raises(RocketMQError) as error:
            await admin.messages_by_key("T", "k")
        assert error.value.code == ResponseCode.SYSTEM_BUSY
        for ask in (admin.get_kv("n", "k"), admin.list_kv("n"), admin.is_online("g")):
            with pytest.raises(RocketMQError):
                await ask
        with pytest.raises(RocketMQError) as error:
            await admin.delete_group_topics("g", [broker.address])
        assert error.value.code == ResponseCode.NO_PERMISSION
        assert broker.counts[RequestCode.DELETE_TOPIC_IN_NAMESRV] == 0
        broker.answers[RequestCode.DELETE_TOPIC_IN_BROKER] = refused(ResponseCode.TOPIC_NOT_EXIST)
        await admin.delete_group_topics("g", [broker.address])
        assert broker.counts[RequestCode.DELETE_TOPIC_IN_NAMESRV] == 2  # the retry topic and the dead letters


async def test_a_message_of_a_broker_that_no_name_server_knows_has_no_broker_name() -> None:
    async with scripted_broker() as broker, Admin(broker.address) as admin:
        broker.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = lambda command: command.reply(
            body=b'{"brokerAddrTable":{"b":{"brokerName":"b","cluster":"c","brokerAddrs":{"0":"127.0.0.1:1"}}}}'
        )
        assert await admin._broker_name(broker.address) == ""
        assert await admin._broker_name("127.0.0.1:1") == "b"
