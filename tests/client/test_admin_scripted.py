"""Admin against scripted brokers: requests, the results made from replies, and error codes that are results."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.client.scripted import Answer, ScriptedBroker, records, scripted_broker
from trimq.client import Admin, Client, MessageQueue, PerhapsStoredError, TopicNotFoundError, UsageError
from trimq.client.admin.base import first_that_knows, properties_of, text_of
from trimq.client.errors import NotStoredError, UnreachableError
from trimq.protocol import lenient_json
from trimq.protocol.body import BrokerData, QueueData, SubscriptionGroupConfig, TopicConfig, TopicRouteData, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message_id import encode_offset_id
from trimq.protocol.record import pack_host

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC


def queue(number: int = 0, topic: str = "T") -> MessageQueue:
    return MessageQueue(topic=topic, broker_name="a", queue_id=number)


def body(value: object) -> Answer:
    """A function that replies with JSON."""
    return lambda command: command.reply(body=encode_json(value))


def by_queue(name: str, table: dict[MessageQueue, Any]) -> bytes:
    """A body with a table whose keys are objects."""
    return b'{"%s":%s}' % (name.encode(), lenient_json.dumps_object_keys(table.items()))


def refused(code: int, remark: str = "no") -> Answer:
    return lambda command: command.reply(code, remark)


def sent(broker: ScriptedBroker, code: int) -> list[RemotingCommand]:
    return [command for _, command in broker.seen if command.code == code]


@asynccontextmanager
async def administered() -> AsyncIterator[tuple[ScriptedBroker, Admin]]:
    async with scripted_broker() as broker, Admin(broker.address) as admin:
        yield broker, admin


def routes(broker: ScriptedBroker, missing: str) -> Answer:
    """The broker has all topics except one."""

    def answer(command: RemotingCommand) -> RemotingCommand:
        if command.ext_fields()["topic"] == missing:
            return command.reply(ResponseCode.TOPIC_NOT_EXIST, "no such topic")
        return broker.route(command)

    return answer


def two_brokers(one: ScriptedBroker, two: ScriptedBroker) -> Answer:
    brokers = [
        BrokerData(cluster=cluster, broker_name=name, broker_addrs={"0": broker.address})
        for cluster, name, broker in (("c2", "b", two), ("c1", "a", one))
    ]
    queues = [QueueData(broker_name=name, read_queue_nums=1, write_queue_nums=1, perm=6) for name in ("a", "b")]
    return body(TopicRouteData(broker_datas=brokers, queue_datas=queues))


def clusters(*addresses: str) -> Answer:
    table = {
        name: {"cluster": "c", "brokerName": name, "brokerAddrs": {"0": address, "1": "127.0.0.1:1"}}
        for name, address in zip("ab", addresses, strict=False)
    }
    return body({"brokerAddrTable": table, "clusterAddrTable": {"c": sorted(table), "empty": [], "gone": ["lost"]}})


# -- finding brokers ----------------------------------------------------------------------------------------------


async def test_brokers_are_found_by_cluster_and_name_and_slaves_where_wanted() -> None:
    async with administered() as (broker, admin):
        broker.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = clusters("127.0.0.1:11", "127.0.0.1:22")
        assert await admin.addresses() == ["127.0.0.1:11", "127.0.0.1:22"]
        assert await admin.addresses(cluster="c") == ["127.0.0.1:11", "127.0.0.1:22"]
        assert await admin.addresses(broker="b") == ["127.0.0.1:22"]
        assert await admin.addresses(broker="b", masters_only=False) == ["127.0.0.1:22", "127.0.0.1:1"]
        assert await admin.addresses(cluster="empty") == []
        assert broker.counts[RequestCode.GET_BROKER_CLUSTER_INFO] == 5
        assert await admin.addresses(broker="127.0.0.1:33") == ["127.0.0.1:33"]  # an address: no request is sent
        assert broker.counts[RequestCode.GET_BROKER_CLUSTER_INFO] == 5


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"cluster": "other"}, "no cluster other; there are c, empty, gone"),
        ({"broker": "other"}, "no broker other; there are a"),
        ({"cluster": "gone"}, "no broker lost; there are a"),
    ],
)
async def test_an_unknown_name_is_refused_with_those_that_there_are(wanted: dict[str, str], expected: str) -> None:
    async with administered() as (broker, admin):
        broker.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = clusters("127.0.0.1:11")
        with pytest.raises(UsageError, match=expected):
            await admin.addresses(**wanted)  # type: ignore[arg-type]


async def test_a_client_that_is_shared_stays_open() -> None:
    async with scripted_broker() as broker, Client(broker.address) as client:
        broker.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = clusters("127.0.0.1:11")
        async with Admin(client=client) as admin:
            assert await admin.addresses() == ["127.0.0.1:11"]
        assert client.is_open
    own = Admin(broker.address)
    async with own:
        assert own.client.is_open
    assert not own.client.is_open


async def test_the_first_broker_that_knows_is_enough_and_the_last_error_shows_that_none_does() -> None:
    asked: list[str] = []

    async def ask(address: str) -> str:
        asked.append(address)
        if address != "good":
            raise NotStoredError(f"{address} does not know")
        return "found"

    assert await first_that_knows(["bad", "good", "never asked"], ask) == "found"
    assert asked == ["bad", "good"]
    with pytest.raises(NotStoredError, match="worse does not know"):
        await first_that_knows(["bad", "worse"], ask)
    with pytest.raises(UsageError, match="no broker to ask") as error:
        await first_that_knows([], ask)
    assert error.value.code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("changes", [{"key": "one\ntwo"}, {"a\nb": "x"}, {"a=b": "x"}])
async def test_a_setting_that_would_become_another_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="does not fit into one line"):
        text_of(changes)


async def test_settings_are_read_as_they_are_written() -> None:
    assert text_of({"a": "1", "b": "x=y"}) == b"a=1\nb=x=y\n"
    assert properties_of(b"#comment=1\na=1\n\nno value\n b = x=y \n") == {"a": "1", "b": "x=y"}


# -- groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "with blank", "g" * 256])
async def test_a_group_of_a_bad_name_is_refused_before_a_request_is_sent(name: str) -> None:
    async with administered() as (broker, admin):
        with pytest.raises(UsageError):
            await admin.update_group(broker.address, SubscriptionGroupConfig(group_name=name))
        assert broker.seen == []


async def test_a_topic_of_a_bad_name_is_refused_before_a_request_is_sent() -> None:
    async with administered() as (broker, admin):
        with pytest.raises(UsageError):
            await admin.update_topic(broker.address, TopicConfig(topic_name="with blank"))
        assert broker.seen == []


async def test_a_group_without_a_retry_topic_is_looked_for_where_its_topic_is() -> None:
    async with administered() as (broker, admin):
        broker.answers[ROUTE] = routes(broker, missing="%RETRY%g")
        broker.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = clusters(broker.address)
        assert await admin.group_masters("g", "T") == [broker.address]
        with pytest.raises(TopicNotFoundError, match="%RETRY%g"):
            await admin.group_masters("g")


async def test_an_offset_that_a_group_has_not_is_none_and_zero_is_one() -> None:
    async with administered() as (broker, admin):
        code = RequestCode.QUERY_CONSUMER_OFFSET
        broker.answers[code] = lambda command: command.reply(header={"offset": "0"})
        assert await admin.offset_of("g", queue(3)) == 0
        broker.answers[code] = lambda command: command.reply(header={"offset": "-1"})
        assert await admin.offset_of("g", queue(3)) is None
        broker.answers[code] = refused(ResponseCode.QUERY_NOT_FOUND)
        assert await admin.offset_of("g", queue(3)) is None
        broker.answers[code] = refused(ResponseCode.SYSTEM_BUSY)
        with pytest.raises(NotStoredError):
            await admin.offset_of("g", queue(3))
        fields = sent(broker, code)[0].ext_fields()
        assert (fields["consumerGroup"], fields["topic"], fields["queueId"]) == ("g", "T", "3")
        # with zero for "none", a group that never consumed would look like one at offset 0
        assert fields["setZeroIfNotFound"] == "false"


async def test_offsets_are_reset_at_the_broker_of_the_queue_alone() -> None:
    async with scripted_broker() as one, scripted_broker() as two, Admin(one.address) as admin:
        one.answers[ROUTE] = two_brokers(one, two)
        place = MessageQueue(topic="T", broker_name="b", queue_id=0)
        code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
        two.answers[code] = lambda command: command.reply(body=by_queue("offsetTable", {place: 7}))
        one.answers[code] = lambda command: command.reply(body=by_queue("offsetTable", {queue(): 1}))
        assert await admin.reset_offset("T", "g", 5.0, queue=place, offset=7) == {place: 7}
        assert (one.counts[code], two.counts[code]) == (0, 1)
        fields = sent(two, code)[0].ext_fields()
        assert (fields["timestamp"], fields["queueId"], fields["offset"]) == ("5000", "0", "7")
        assert await admin.reset_offset("T", "g", None) == {queue(): 1, place: 7}
        fields = sent(one, code)[0].ext_fields()
        assert (fields["timestamp"], fields["queueId"], fields["offset"]) == ("-1", "-1", "-1")


async def test_cloned_offsets_leave_out_the_retry_topic_of_the_source() -> None:
    async with administered() as (broker, admin):
        own = {"brokerOffset": 9, "consumerOffset": 4}
        table = {queue(1): own, queue(0): {"brokerOffset": 9, "consumerOffset": 6}, queue(0, "%RETRY%g"): own}
        broker.answers[RequestCode.GET_CONSUME_STATS] = lambda command: command.reply(
            body=by_queue("offsetTable", table)
        )
        assert await admin.clone_offsets("g", "h", "T") == {queue(0): 6, queue(1): 4}
        commits = [command.ext_fields() for command in sent(broker, RequestCode.UPDATE_CONSUMER_OFFSET)]
        assert [(one["consumerGroup"], one["topic"], one["queueId"], one["commitOffset"]) for one in commits] == [
            ("h", "T", "0", "6"),
            ("h", "T", "1", "4"),
        ]


async def test_a_broker_can_clone_offsets_by_itself() -> None:
    async with administered() as (broker, admin):
        await admin.clone_offsets_at_broker(broker.address, "g", "h")
        [command] = sent(broker, RequestCode.CLONE_GROUP_OFFSET)
        fields = command.ext_fields()
        assert (fields["srcGroup"], fields["destGroup"], fields["offline"]) == ("g", "h", "false")
        assert "topic" not in fields


async def test_the_consume_mode_is_pull_or_pop() -> None:
    async with administered() as (broker, admin):
        code = RequestCode.SET_MESSAGE_REQUEST_MODE
        with pytest.raises(UsageError, match="neither PULL nor POP"):
            await admin.set_consume_mode(broker.address, "T", "g", "PUSH")
        assert broker.seen == []
        await admin.set_consume_mode(broker.address, "T", "g", "POP", share=3)
        [command] = sent(broker, code)
        asked = lenient_json.loads(bytes(command.body))
        assert asked == {"topic": "T", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 3}


async def test_the_topics_of_a_group_are_those_of_all_brokers_once_each() -> None:
    async with scripted_broker() as one, scripted_broker() as two, Admin(one.address) as admin:
        one.answers[ROUTE] = two_brokers(one, two)
        one.answers[RequestCode.QUERY_TOPICS_BY_CONSUMER] = body({"topicList": ["T", "B"]})
        two.answers[RequestCode.QUERY_TOPICS_BY_CONSUMER] = body({"topicList": ["A", "T"]})
        assert await admin.group_topics("g") == ["A", "B", "T"]
        assert sent(two, RequestCode.QUERY_TOPICS_BY_CONSUMER)[0].ext_fields()["group"] == "g"


async def test_a_subscription_comes_from_the_first_broker_that_knows_it() -> None:
    async with scripted_broker() as one, scripted_broker() as two, Admin(one.address) as admin:
        code = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER
        one.answers[ROUTE] = two_brokers(one, two)
        one.answers[code] = body({"group": "g", "topic": "T", "subscriptionData": None})
        two.answers[code] = body({"subscriptionData": {"topic": "T", "subString": "a || b", "subVersion": 7}})
        found = await admin.subscription("g", "T")
        assert found is not None
        assert (found.topic, found.sub_string, found.sub_version) == ("T", "a || b", 7)
        two.answers[code] = one.answers[code]
        assert await admin.subscription("g", "T") is None


async def test_time_spans_of_all_brokers_are_in_the_queues_order() -> None:
    async with scripted_broker() as one, scripted_broker() as two, Admin(one.address) as admin:
        code = RequestCode.QUERY_CONSUME_TIME_SPAN
        one.answers[ROUTE] = two_brokers(one, two)

        def spans(broker: str, *numbers: int) -> Answer:
            return body(
                {
                    "consumeTimeSpanSet": [
                        {
                            "messageQueue": {"topic": "T", "brokerName": broker, "queueId": number},
                            "minTimeStamp": 5,
                            "maxTimeStamp": 9,
                            "consumeTimeStamp": 6,
                            "delayTime": number,
                        }
                        for number in numbers
                    ]
                }
            )

        one.answers[code], two.answers[code] = spans("a", 1, 0), spans("b", 0)
        found = await admin.time_spans("g", "T")
        places = [(span.message_queue.broker_name, span.message_queue.queue_id, span.delay_time) for span in found]
        assert places == [("a", 0, 0), ("a", 1, 1), ("b", 0, 0)]
        assert (found[0].min_time_stamp, found[0].max_time_stamp, found[0].consume_time_stamp) == (5, 9, 6)
        one.answers[code] = two.answers[code] = body({})
        assert await admin.time_spans("g", "T") == []


async def test_the_topics_of_a_group_that_are_not_there_are_deleted_already() -> None:
    async with administered() as (broker, admin):
        code = RequestCode.DELETE_TOPIC_IN_BROKER
        broker.answers[code] = refused(ResponseCode.TOPIC_NOT_EXIST)
        await admin.delete_group_topics("g", [broker.address])
        for each in (code, RequestCode.DELETE_TOPIC_IN_NAMESRV):
            assert [one.ext_fields()["topic"] for one in sent(broker, each)] == ["%RETRY%g", "%DLQ%g"]
        broker.answers[code] = refused(ResponseCode.NO_PERMISSION)
        with pytest.raises(UsageError) as error:
            await admin.delete_group_topics("g", [broker.address])
        assert error.value.code == ResponseCode.NO_PERMISSION


# -- clients ------------------------------------------------------------------------------------------------------


async def test_offsets_in_hand_are_put_together_by_client() -> None:
    async with scripted_broker() as one, scripted_broker() as two, Admin(one.address) as admin:
        code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
        one.answers[ROUTE] = two_brokers(one, two)
        other = MessageQueue(topic="T", broker_name="b", queue_id=0)

        def table(client: str, place: MessageQueue, offset: int) -> Answer:
            inner = lenient_json.dumps_object_keys([(place, offset)])
            return lambda command: command.reply(body=b'{"consumerTable":{"%s":%s}}' % (client.encode(), inner))

        one.answers[code], two.answers[code] = table("x", queue(), 3), table("x", other, 4)
        assert await admin.consumer_offsets("T", "g") == {"x": {queue(): 3, other: 4}}
        two.answers[code] = body({})
        assert await admin.consumer_offsets("T", "g", "x") == {"x": {queue(): 3}}
        assert [one.ext_fields().get("clientAddr") for one in sent(one, code)] == [None, "x"]


@pytest.mark.parametrize(
    ("answer", "online"),
    [
        (body({"connectionSet": [{"clientId": "x"}]}), True),
        (refused(ResponseCode.CONSUMER_NOT_ONLINE), False),
        (refused(ResponseCode.SYSTEM_ERROR), False),
    ],
    ids=["a member", "none", "none, as old brokers say it"],
)
async def test_a_group_is_online_where_a_broker_has_a_member(answer: Answer, online: bool) -> None:
    async with administered() as (broker, admin):
        broker.answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = answer
        assert await admin.is_online("g") is online


async def test_a_broker_that_cannot_say_whether_a_group_is_online_is_an_error() -> None:
    async with administered() as (broker, admin):
        broker.answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = refused(ResponseCode.SYSTEM_BUSY)
        with pytest.raises(NotStoredError):
            await admin.is_online("g")


# -- brokers ------------------------------------------------------------------------------------------------------


async def test_how_a_broker_replicates_is_reported_as_in_its_answer() -> None:
    async with administered() as (broker, admin):
        broker.answers[RequestCode.GET_BROKER_HA_STATUS] = body({"master": True, "inSyncSlaveNums": 1})
        assert await admin.ha_status(broker.address) == {"master": True, "inSyncSlaveNums": 1}


async def test_all_offsets_are_numbers_by_queue() -> None:
    async with administered() as (broker, admin):
        code = RequestCode.GET_ALL_CONSUMER_OFFSET
        broker.answers[code] = lambda command: command.reply(
            body=b'{"offsetTable":{"T@g":{0:5,1:"6"},"T@h":{}},"dataVersion":{}}'
        )
        assert await admin.all_offsets(broker.address) == {"T@g": {0: 5, 1: 6}, "T@h": {}}
        broker.answers[code] = body({"offsetTable": None})
        assert await admin.all_offsets(broker.address) == {}


# -- topics -------------------------------------------------------------------------------------------------------


async def test_topics_of_a_cluster_and_where_a_topic_is() -> None:
    async with administered() as (broker, admin):
        broker.answers[RequestCode.GET_TOPICS_BY_CLUSTER] = body({"topicList": ["T", "A"]})
        assert await admin.topics("c") == ["A", "T"]
        assert sent(broker, RequestCode.GET_TOPICS_BY_CLUSTER)[0].ext_fields()["cluster"] == "c"
        broker.answers[ROUTE] = two_brokers(broker, broker)
        assert await admin.topic_clusters("T") == ["c1", "c2"]


async def test_the_settings_of_a_brokers_topics() -> None:
    async with administered() as (broker, admin):
        table = {"T": {"topicName": "T", "readQueueNums": 3, "writeQueueNums": 2, "perm": 4}}
        broker.answers[RequestCode.GET_ALL_TOPIC_CONFIG] = body({"topicConfigTable": table})
        [(name, config)] = (await admin.topic_configs(broker.address)).items()
        assert (name, config.read_queue_nums, config.write_queue_nums, config.perm) == ("T", 3, 2, 4)


async def test_the_topics_of_a_broker_itself_in_order() -> None:
    async with administered() as (broker, admin):
        broker.answers[RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER] = body({"topicList": ["TBW102", "BenchmarkTest"]})
        assert await admin.system_topics(broker.address) == ["BenchmarkTest", "TBW102"]


async def test_whether_a_topic_is_there_is_no_where_no_broker_is_either() -> None:
    async with administered() as (broker, admin):
        assert await admin.has_topic("T")
        broker.answers[ROUTE] = refused(ResponseCode.TOPIC_NOT_EXIST)
        broker.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = clusters(broker.address)
        assert not await admin.has_topic("T")
        broker.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = body({"brokerAddrTable": {}, "clusterAddrTable": {}})
        assert not await admin.has_topic("T")
    async with Admin("127.0.0.1:1") as admin:
        with pytest.raises(UnreachableError):
            await admin.has_topic("T")


async def test_the_permission_of_a_topic_changes_and_nothing_else_of_it() -> None:
    async with administered() as (broker, admin):
        config = {"topicName": "T", "readQueueNums": 3, "writeQueueNums": 2, "perm": 6, "order": True}
        broker.answers[RequestCode.GET_TOPIC_CONFIG] = body(config)
        assert await admin.update_topic_perm("T", 4) == {broker.address: 6}
        fields = sent(broker, RequestCode.UPDATE_AND_CREATE_TOPIC)[0].ext_fields()
        kept = (fields["readQueueNums"], fields["writeQueueNums"], fields["perm"], fields["order"])
        assert kept == ("3", "2", "4", "true")


# -- messages -----------------------------------------------------------------------------------------------------


async def test_what_is_no_offset_id_is_refused_before_a_request_is_sent() -> None:
    async with administered() as (broker, admin):
        for text in ("", "not hexadecimal", "0" * 33):
            with pytest.raises(UsageError, match="no offset message id"):
                await admin.message_by_id(text)
        assert broker.seen == []


async def test_a_message_has_the_name_of_the_broker_that_its_id_gives() -> None:
    async with administered() as (broker, admin):
        host, _, port = broker.address.partition(":")
        message_id = encode_offset_id(pack_host(host, int(port)), 42)
        broker.answers[RequestCode.VIEW_MESSAGE_BY_ID] = lambda command: command.reply(body=records(7, 1))
        broker.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = clusters("127.0.0.1:11", broker.address)
        message = await admin.message_by_id(message_id)
        assert (message.body, message.broker_name) == (b"7", "b")
        assert sent(broker, RequestCode.VIEW_MESSAGE_BY_ID)[0].ext_fields()["offset"] == "42"
        broker.answers[RequestCode.GET_BROKER_CLUSTER_INFO] = clusters("127.0.0.1:11")
        assert (await admin.message_by_id(message_id)).broker_name == ""


async def test_a_broker_without_a_message_of_a_key_does_not_end_the_search() -> None:
    async with scripted_broker() as one, scripted_broker() as two, Admin(one.address) as admin:
        code = RequestCode.QUERY_MESSAGE
        one.answers[ROUTE] = two_brokers(one, two)
        one.answers[code] = refused(ResponseCode.QUERY_NOT_FOUND)
        two.answers[code] = refused(ResponseCode.QUERY_NOT_FOUND)
        assert await admin.messages_by_key("T", "k") == []
        assert (one.counts[code], two.counts[code]) == (1, 1)
        two.answers[code] = lambda command: command.reply(body=records(0, 2))
        # a message found in an index by the hash of a key need not have the key
        assert await admin.messages_by_key("T", "k") == []
        two.answers[code] = refused(ResponseCode.SYSTEM_ERROR)
        with pytest.raises(PerhapsStoredError):
            await admin.messages_by_key("T", "k")


# -- name servers -------------------------------------------------------------------------------------------------


async def test_values_that_name_servers_do_not_have_are_none_and_refusals_are_errors() -> None:
    async with administered() as (broker, admin):
        one, every = RequestCode.GET_KV_CONFIG, RequestCode.GET_KVLIST_BY_NAMESPACE
        broker.answers[one] = broker.answers[every] = refused(ResponseCode.QUERY_NOT_FOUND)
        assert await admin.get_kv("ns", "k") is None
        assert await admin.list_kv("ns") == {}
        broker.answers[one] = lambda command: command.reply(header={"value": "v"})
        broker.answers[every] = body({"table": {"k": "v"}})
        assert await admin.get_kv("ns", "k") == "v"
        assert await admin.list_kv("ns") == {"k": "v"}
        assert sent(broker, every)[0].ext_fields()["namespace"] == "ns"
        broker.answers[one] = broker.answers[every] = refused(ResponseCode.NO_PERMISSION)
        with pytest.raises(UsageError):
            await admin.get_kv("ns", "k")
        with pytest.raises(UsageError):
            await admin.list_kv("ns")
