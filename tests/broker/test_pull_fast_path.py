"""The fast path of a pull returns, byte for byte, the replies of the full path, and has the same side effects."""

import json
from typing import Any

import pytest
import trio

from tests.broker.processors import pull_fast_path_of
from tests.broker.raw_client import Raw, json_frame
from tests.broker.wire_client import WireClient, consumer
from trimq.broker.controller import BrokerController
from trimq.broker.processors.pull.pull_fast_path import COPIED
from trimq.broker.services.stats import GROUP_GET_NUMS, GROUP_GET_SIZE
from trimq.protocol.codes import RequestCode
from trimq.protocol.frame import decode
from trimq.protocol.headers.pull import PullMessageRequestHeader
from trimq.protocol.message import decode_messages
from trimq.protocol.typed_request import decoder

DECODE = decoder(PullMessageRequestHeader)
FIELDS = {
    "consumerGroup": "group",
    "topic": "Orders",
    "queueId": "0",
    "queueOffset": "0",
    "maxMsgNums": "32",
    "sysFlag": "4",
    "commitOffset": "3",
    "suspendTimeoutMillis": "0",
    "subscription": "*",
    "subVersion": "0",
    "expressionType": "TAG",
}
CASES: list[dict[str, Any]] = [
    {},
    {"queueOffset": "7", "maxMsgNums": "3"},
    {"subscription": "a"},
    {"subscription": "a || b", "queueOffset": "2"},
    {"subscription": "none"},
    {"subscription": "||"},
    {"sysFlag": "5"},
    {"sysFlag": "5", "commitOffset": "-1"},
    {"sysFlag": "5", "commitOffset": "-7"},
    {"sysFlag": "5", "commitOffset": str(2**62)},
    {"sysFlag": "0"},
    {"expressionType": "SQL92"},
    {"maxMsgNums": "0"},
    {"maxMsgBytes": "1"},
    {"queueId": "9"},
    {"queueOffset": "99"},
    {"queueOffset": "-1"},
    {"queueId": "-1"},
    {"maxMsgBytes": "-1"},
    {"maxMsgNums": "-1"},
    {"topic": "None"},
    {"queueOffset": "40"},
    {"queueId": 0, "queueOffset": " 1"},
]


def _traces(broker: BrokerController) -> dict[str, Any]:
    context = broker.context
    stats = {
        name: {key: (item.value, item.times) for key, item in context.stats.items(name).items()}
        for name in (GROUP_GET_NUMS, GROUP_GET_SIZE)
    }
    store = context.store.stats
    return {
        **stats,
        "total": context.stats.get_total,
        "found": (store.found_times_total, store.transferred_messages_total),
        "offsets": {key: dict(table) for key, table in context.offsets.offset_table.items()},
        "pulled": {key: dict(table) for key, table in context.offsets.pull_offset_table.items()},
    }


def _growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    grown: dict[Any, Any] = {}
    for name in (GROUP_GET_NUMS, GROUP_GET_SIZE):
        for key, (value, times) in after[name].items():
            old = before[name].get(key, (0, 0))
            grown[name, key] = (value - old[0], times - old[1])
    grown["total"] = after["total"] - before["total"]
    grown["found"] = tuple(new - old for new, old in zip(after["found"], before["found"], strict=True))
    return grown | {name: after[name] for name in ("offsets", "pulled")}


@pytest.mark.parametrize("code", [RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE])
async def test_both_paths_answer_and_leave_the_same(broker: BrokerController, client: WireClient, code: int) -> None:
    await client.heartbeat("c1", consumers=[consumer("group", "Orders", "a")])
    for number in range(40):
        await client.send("Orders", b"x" * (number * 3), properties=f"TAGS\x01{'ab'[number % 3 == 0]}\x02")
    stream = await trio.open_tcp_stream(*broker.endpoint)
    async with stream:
        raw = Raw(stream)
        await raw.ask(json_frame(code, FIELDS, fast=True))  # creates the group and the counters
        for case in CASES:
            fields = FIELDS | case
            replies, growths = [], []
            for fast in (False, True):
                for table in (broker.context.offsets.offset_table, broker.context.offsets.pull_offset_table):
                    table.clear()
                broker.context.offsets.offset_table["Orders@group"] = {
                    1: 0
                }  # the fast path does not take a first commit
                before = _traces(broker)
                replies.append(await raw.ask(json_frame(code, fields, fast=fast)))
                growths.append(_growth(before, _traces(broker)))
            assert replies[0] == replies[1], case
            assert growths[0] == growths[1], case


async def test_what_is_changed_counts_at_once(broker: BrokerController, client: WireClient) -> None:
    await client.send("Orders", b"body")
    stream = await trio.open_tcp_stream(*broker.endpoint)
    async with stream:
        raw = Raw(stream)
        frame = json_frame(11, FIELDS, fast=True)
        assert b"FOUND" in await raw.ask(frame)
        topics, groups = broker.context.topics.table, broker.context.groups.table
        topic, group = topics["Orders"], groups["group"]
        topics["Orders"] = type(topic)(topic_name="Orders", perm=2)
        assert b"does not permit reading" in await raw.ask(frame)
        topics["Orders"] = topic
        groups["group"] = type(group)(group_name="group", consume_enable=False)
        assert b"may not consume" in await raw.ask(frame)
        groups["group"] = group
        assert b"FOUND" in await raw.ask(frame)
        broker.context.offsets.assign_reset("Orders", "group", 0, 0)
        assert b"OFFSET_RESET" in await raw.ask(frame)
        assert b"FOUND" in await raw.ask(frame)
        broker.context.store.queues.drop_topic("Orders")
        assert b"FOUND" not in await raw.ask(frame)


@pytest.mark.parametrize(
    ("change", "code", "answered"),
    [
        ("brokerPermission=2", 11, 16),
        ("brokerPermission=2", 361, 16),
        ("litePullMessageEnable=false", 361, 16),
        ("litePullMessageEnable=false", 11, 0),
        ("maxTransferCountOnMessageInMemory=1", 11, 0),
    ],
)
async def test_what_the_configuration_says_counts_at_once(
    broker: BrokerController, client: WireClient, change: str, code: int, answered: int
) -> None:
    for _ in range(3):
        await client.send("Orders", b"body")
    async with await trio.open_tcp_stream(*broker.endpoint) as stream:
        raw = Raw(stream)
        assert await both(raw, code, FIELDS) == 0
        assert (await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=change.encode())).code == 0
        assert await both(raw, code, FIELDS) == answered


async def both(raw: Raw, code: int, fields: dict[str, Any]) -> int:
    """The reply code of both paths, whose replies are the same bytes."""
    general = await raw.ask(json_frame(code, fields, fast=False))
    assert await raw.ask(json_frame(code, fields, fast=True)) == general
    return decode(memoryview(general)[4:]).code


async def test_what_administrators_do_counts_at_once(broker: BrokerController, client: WireClient) -> None:
    for queue_id in (0, 3):
        await client.send("Orders", b"body", queue_id=queue_id)
    await client.heartbeat("c1", consumers=[consumer("group", "Orders")])
    heartbeat = FIELDS | {"sysFlag": "0"}
    last = FIELDS | {"queueId": "3"}
    async with await trio.open_tcp_stream(*broker.endpoint) as stream:
        raw = Raw(stream)

        async def answers() -> list[int]:
            return [await both(raw, 11, fields) for fields in (FIELDS, heartbeat, last)]

        assert await answers() == [0, 0, 0]
        forbid = {"group": "group", "topic": "Orders", "readable": "false"}
        await client.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, forbid)
        assert await answers() == [0, 16, 0]
        await client.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, forbid | {"readable": "true"})
        assert await answers() == [0, 0, 0]
        fewer = {"topic": "Orders", "defaultTopic": "TBW102", "readQueueNums": 2, "writeQueueNums": 4, "perm": 6}
        await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, fewer | {"topicFilterType": "SINGLE_TAG"})
        assert await answers() == [0, 0, 29]
        other = json.dumps({"groupName": "group", "groupSysFlag": 5}).encode()
        await client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=other)
        assert await answers() == [0, 0, 29]
        assert b'"groupSysFlag":"5"' in await raw.ask(json_frame(11, FIELDS, fast=True))
        await client.heartbeat("c1", consumers=[consumer("group", "Other")])
        assert await answers() == [0, 24, 29]
        await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"autoCreateSubscriptionGroup=false")
        await client.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "group"})
        assert await answers() == [26, 26, 26]


async def test_a_pending_reset_slows_down_no_others(broker: BrokerController, client: WireClient) -> None:
    for topic in ("Orders", "Other"):
        await client.send(topic, b"body")
        await client.pull(topic, group="group")
    broker.context.offsets.assign_reset("Other", "group", 0, 0)
    (connection,) = broker.reactor.connections.values()
    serve = pull_fast_path_of(broker.context).serve
    answers = []
    for topic in ("Orders", "Other"):
        head = memoryview(json_frame(11, FIELDS | {"topic": topic}, fast=True))[8:]
        answers.append(serve(connection, DECODE(head)))
    assert isinstance(answers[0], bytes)
    assert b"FOUND" in answers[0]
    assert answers[1] is None


async def test_large_answers_are_not_copied(broker: BrokerController, client: WireClient) -> None:
    for _ in range(5):
        await client.send("Orders", b"l" * (COPIED // 4))
    before = _traces(broker)
    found = await client.pull("Orders")
    assert len(found.body) > COPIED
    assert _growth(before, _traces(broker))["found"] == (1, 5)
    assert len(decode_messages(bytes(found.body))) == 5


async def test_what_a_consumer_will_ask_for_next_is_made_ahead(broker: BrokerController, client: WireClient) -> None:
    for number in range(40):
        await client.send("Orders", b"%d" % number)
    await client.pull("Orders", group="group")
    (connection,) = broker.reactor.connections.values()
    pulls = pull_fast_path_of(broker.context)
    stats = broker.context.store.stats

    def ask(**fields: str) -> bytes:
        head = memoryview(json_frame(11, FIELDS | {"maxMsgNums": "8"} | fields, fast=True))[8:]
        answer = pulls.serve(connection, DECODE(head))
        return answer if isinstance(answer, bytes) else b""

    expected = [ask(queueOffset=str(offset)) for offset in range(0, 40, 8)]
    pulls._expected = None
    pulls.prepare()
    assert pulls._prepared is None, "no client has pulled"
    for number, reply in enumerate(expected):
        found = stats.found_times_total, stats.transferred_messages_total
        assert ask(queueOffset=str(8 * number)) == reply
        assert (stats.found_times_total, stats.transferred_messages_total) == (found[0] + 1, found[1] + 8)
        assert pulls._prepared is None, "taken"
        pulls.prepare()
        assert (pulls._prepared is not None) is (number < 4)
    ask(queueOffset="0")
    pulls.prepare()
    assert ask(queueOffset="16") == expected[2], "a different pull than the expected one"
    ask(queueOffset="30")
    pulls._prepared = None
    pulls.prepare()
    assert pulls._prepared is None, "fewer messages than a pull may get: more can arrive before the pull"
    ask(queueOffset="0")
    (queue,) = [queue for queue in broker.context.store.queues.loaded_queues() if queue.next_offset]
    queue.deleted = True
    pulls.prepare()
    assert pulls._prepared is None
    queue.deleted = False
