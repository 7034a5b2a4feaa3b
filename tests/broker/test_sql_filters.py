"""Consumers that filter by SQL92 expressions: refusals, and that every path delivers what the expression accepts."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from tests.broker.fast_paths import fast_paths
from tests.broker.raw_client import Raw, json_frame
from tests.broker.wire_client import WireClient, consumer, properties_text, pull_ext
from tests.store.simdisk import SimDisk
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import decode
from trimq.protocol.message import StoredMessage, decode_messages
from trimq.protocol.sql92 import compile_expression
from trimq.protocol.sysflag import PULL_SUBSCRIPTION, PULL_SUSPEND
from trimq.remoting.runtime.clock import ManualClock

TOPIC = "Orders"
SQL: dict[str, Any] = {"expressionType": "SQL92"}


def sql_consumer(group: str, *subscriptions: tuple[str, str], version: int = 1) -> dict[str, Any]:
    """A consumer group for a heartbeat, with expressions by topic."""
    data = [
        {"topic": topic, "subString": text, "tagsSet": [], "codeSet": [], "subVersion": version, **SQL}
        for topic, text in subscriptions
    ]
    return consumer(group, TOPIC, subscriptionDataSet=data)


@asynccontextmanager
async def serving(
    directory: Path | None = None, **changes: object
) -> AsyncIterator[tuple[BrokerController, WireClient]]:
    """A broker that filters by expressions, and a client."""
    settings = {"enablePropertyFilter": True} | changes
    async with running_broker(directory, **settings) as broker, WireClient.connect(broker.endpoint) as client:  # type: ignore[arg-type]
        yield broker, client


async def check(client: WireClient, text: str, kind: str = "SQL92") -> RemotingCommand:
    subscription = {"topic": TOPIC, "subString": text, "expressionType": kind}
    body = json.dumps({"clientId": "c", "group": "G", "subscriptionData": subscription}).encode()
    return await client.ask(RequestCode.CHECK_CLIENT_CONFIG, body=body)


async def pull(client: WireClient, group: str = "G", topic: str = TOPIC, **more: Any) -> RemotingCommand:
    """A pull by the subscription of the group's heartbeats."""
    fields = {"sysFlag": 0, "subscription": None, "subVersion": 1, "expressionType": None}
    return await client.pull(topic, group=group, **(fields | more))


# refusals


async def test_the_check_at_a_consumers_start() -> None:
    async with serving() as (_, client):
        assert (await check(client, "a > 1 AND TAGS = 'x'")).code == ResponseCode.SUCCESS
        wrong = await check(client, "a > 1 AND AND")
        assert wrong.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
        assert wrong.remark is not None
        assert wrong.remark.startswith("the SQL92 expression is not valid at position 10: ")
        other = await check(client, "a > 1", "GROOVY")
        assert (other.code, other.remark) == (23, "the expression type 'GROOVY' is neither TAG nor SQL92")
        nothing = await check(client, "")
        assert (nothing.code, nothing.remark) == (23, "the subscription has no expression")
        await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"enablePropertyFilter=false")
        off = await check(client, "a > 1")
        why = (
            "the broker does not support consumers that filter by SQL92: use tags, or set enablePropertyFilter=true in "
            "the broker's configuration"
        )
        assert (off.code, off.remark) == (ResponseCode.SYSTEM_ERROR, why)
        assert (await check(client, "a > 1 AND AND")).code == ResponseCode.SYSTEM_ERROR
        assert (await check(client, "*", "TAG")).code == ResponseCode.SUCCESS


async def test_a_wrong_expression_in_a_heartbeat_is_dropped_and_the_rest_counts() -> None:
    async with serving() as (_, client):
        for topic in (TOPIC, "Other"):
            await client.send(topic, properties={"a": "2"})
        subscriptions = ((TOPIC, "a >"), ("Other", "a = 2"))
        reply = await client.heartbeat("c", consumers=[sql_consumer("G", *subscriptions), consumer("H", TOPIC)])
        assert reply.code == ResponseCode.SUCCESS
        assert (await pull(client)).code == ResponseCode.FILTER_DATA_NOT_EXIST
        assert (await pull(client, topic="Other")).code == ResponseCode.SUCCESS
        assert (await pull(client, "H")).code == ResponseCode.SUCCESS
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "a > 1"), version=2)])
        assert (await pull(client)).code == ResponseCode.SUCCESS
        # a wrong one takes the place of a right one: the group must not be filtered by what it no longer asks for
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "a >"), version=3)])
        assert (await pull(client)).code == ResponseCode.FILTER_DATA_NOT_EXIST


async def test_codes_of_pulls_by_heartbeats() -> None:
    async with serving() as (broker, client):
        await client.send(TOPIC, properties={"a": "2"})
        assert (await pull(client)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "a > 1"))])
        assert (await pull(client)).code == ResponseCode.SUCCESS
        assert (await pull(client, subVersion=2)).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
        info = broker.context.consumers.table["G"]
        info.subscriptions[TOPIC].sub_version = 2
        not_latest = await pull(client, subVersion=2)
        assert not_latest.code == ResponseCode.FILTER_DATA_NOT_LATEST
        assert not_latest.remark == (
            "the broker has an older expression of the consumer group G for Orders than this pull"
        )
        await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"enablePropertyFilter=false")
        assert (await pull(client, subVersion=2)).code == ResponseCode.FILTER_DATA_NOT_LATEST
        assert (await pull(client)).code == ResponseCode.SYSTEM_ERROR


async def test_codes_of_pulls_with_a_subscription() -> None:
    async with serving() as (_, client):
        await client.send(TOPIC, properties={"a": "2"})
        texts = ("a > 1", "a < 1", "a >", "", None)
        codes = [(await client.pull(TOPIC, subscription=text, **SQL)).code for text in texts]
        assert codes == [0, 20, 23, 23, 23]
        assert (await client.pull(TOPIC, subscription="a", expressionType="sql92")).code == 23
        await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"enablePropertyFilter=false")
        codes = [(await client.pull(TOPIC, subscription=text, **SQL)).code for text in texts]
        assert codes == [1, 1, 1, 23, 23]


async def test_long_expressions_are_compiled_in_a_thread(tmp_path: Path) -> None:
    """In each request that may bring one: the event loop serves others meanwhile."""
    async with serving(tmp_path) as (broker, client):
        threads = []
        compiled = broker.context.filters._expressions._run

        async def run(function: Any, text: str) -> Any:
            threads.append(text)
            return await compiled(function, text)

        broker.context.filters._expressions._run = run
        texts = [" OR ".join(f"p{number} = '{start}'" for number in range(30)) for start in "abcd"]
        await client.send(TOPIC, properties={"p7": "b", "p8": "c"})
        assert (await check(client, texts[0])).code == ResponseCode.SUCCESS
        held: dict[str, Any] = {"suspendTimeoutMillis": 100, "sysFlag": PULL_SUBSCRIPTION | PULL_SUSPEND}
        assert (await client.pull(TOPIC, subscription=texts[1], **SQL)).code == ResponseCode.SUCCESS
        assert (await client.pull(TOPIC, 1, subscription=texts[2] + " OR", **SQL)).code == 23
        assert (await client.pull(TOPIC, 1, subscription=texts[2], **SQL, **held)).code == ResponseCode.PULL_NOT_FOUND
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, texts[3]))])
        assert (await pull(client)).code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert threads == [texts[0], texts[1], texts[2] + " OR", texts[2], texts[3]]

        async def forbidding(function: Any, text: str) -> Any:
            await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=2")
            return await compiled(function, text)

        broker.context.filters._expressions._run = forbidding
        reply = await client.pull(TOPIC, subscription=texts[0] + " OR b = 1", **SQL)
        assert (reply.code, reply.ext_fields()) == (ResponseCode.NO_PERMISSION, {"forbiddenType": "1"})
    async with serving(tmp_path) as (broker, client):
        # from the file, so that the first pull brings it
        await client.heartbeat("c", consumers=[sql_consumer("H", (TOPIC, "TRUE"))])
        info = broker.context.consumers.table["H"]
        broker.context.consumers.table["G"] = info
        entry = broker.context.filters.get(TOPIC, "G")
        assert entry is not None
        assert broker.context.filters.is_not_compiled(entry)
        assert (await pull(client)).code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert not broker.context.filters.is_not_compiled(entry)


async def test_two_groups_with_their_own_expressions() -> None:
    async with serving() as (_, client):
        for number in range(6):
            await client.send(TOPIC, b"%d" % number, {"n": str(number)})
        groups = [sql_consumer("Low", (TOPIC, "n < 2")), sql_consumer("High", (TOPIC, "n >= 4"))]
        await client.heartbeat("c", consumers=groups)
        for group, bodies in (("Low", [b"0", b"1"]), ("High", [b"4", b"5"])):
            reply = await pull(client, group)
            assert [message.body for message in decode_messages(bytes(reply.body))] == bodies
            assert reply.ext_fields()["nextBeginOffset"] == "6"


async def test_administrators_see_the_expression_of_a_group() -> None:
    async with serving() as (_, client):
        await client.send(TOPIC)
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "n < 2"), version=7), consumer("H", TOPIC)])
        found = {}
        for group in ("G", "H"):
            ext = {"topic": TOPIC, "queueId": 0, "index": 0, "count": 1, "consumerGroup": group}
            reply = await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext)
            found[group] = json.loads(json.loads(bytes(reply.body))["filterData"])
        assert found["H"] is None
        assert (found["G"]["expression"], found["G"]["clientVersion"], found["G"]["dead"]) == ("n < 2", 7, False)


async def test_expressions_live_and_die_with_their_group(tmp_path: Path) -> None:
    async with serving(tmp_path) as (broker, client):
        await client.send(TOPIC)
        filters = broker.context.filters
        async with WireClient.connect(broker.endpoint) as member:
            groups = [sql_consumer("G", (TOPIC, "n < 2"), ("Other", "n < 2"))]
            await member.heartbeat("c", consumers=groups, heartbeatFingerprint=7)
            assert filters.alive == 2
            without = [consumer("G", TOPIC, subscriptionDataSet=[])]
            await member.heartbeat("c", consumers=without, heartbeatFingerprint=7, withoutSub=True)
            assert filters.alive == 2, "such a heartbeat leaves the subscriptions unchanged"
            await member.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "n < 2"))])
            assert filters.alive == 1
            ext = {"clientID": "c", "producerGroup": "", "consumerGroup": "G"}
            await member.ask(RequestCode.UNREGISTER_CLIENT, ext)
            assert filters.alive == 0
            await member.heartbeat("c", consumers=groups)
            assert filters.alive == 2
        with trio.fail_after(10):
            while filters.alive:  # the broker notices the closed connection
                await trio.lowlevel.checkpoint()
    async with serving(tmp_path) as (broker, client):
        assert sorted(broker.context.filters.table) == [TOPIC, "Other"]
        assert broker.context.filters.alive == 0


async def test_a_message_that_does_not_fit_does_not_answer_a_held_pull() -> None:
    async with serving() as (broker, client), WireClient.connect(broker.endpoint) as reader:
        await client.send(TOPIC, b"first", {"n": "1"})
        held: dict[str, Any] = {"subscription": "n = 2", "sysFlag": PULL_SUBSCRIPTION | PULL_SUSPEND}
        opaque = await reader.post(RequestCode.PULL_MESSAGE, pull_ext(TOPIC, 1, **SQL, **held))
        holds = broker.context.long_polling
        with trio.fail_after(10):
            while not holds.held:
                await trio.lowlevel.checkpoint()
        for _ in range(3):
            await client.send(TOPIC, b"other", {"n": "1"})
            assert holds.held == 1
        await client.send(TOPIC, b"it", {"n": "2"})
        reply = await reader.reply(opaque)
        assert [message.body for message in decode_messages(bytes(reply.body))] == [b"it"]
        assert reply.ext_fields()["nextBeginOffset"] == "5"


@pytest.mark.parametrize("by_heartbeat", [False, True])
@pytest.mark.parametrize("change", [False, True])
async def test_what_a_held_pull_has_passed_over_is_not_searched_again(by_heartbeat: bool, change: bool) -> None:
    """More messages than one pull searches: the one that fits comes at once, unless the expression has changed."""
    clock = ManualClock()
    async with serving(clock=clock) as (broker, client), WireClient.connect(broker.endpoint) as reader:
        await client.send(TOPIC, b"first", {"n": "1"})
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "n = 2"))])
        holds = broker.context.long_polling

        async def hold(offset: int) -> int:
            flags = PULL_SUSPEND | (0 if by_heartbeat else PULL_SUBSCRIPTION)
            held: dict[str, Any] = {"subscription": "n = 2", "sysFlag": flags, "subVersion": 1}
            opaque = await reader.post(RequestCode.PULL_MESSAGE, pull_ext(TOPIC, offset, **SQL, **held))
            with trio.fail_after(10):
                while not holds.held:
                    await trio.lowlevel.checkpoint()
            return opaque

        async def fill() -> None:
            rows = [(0, b"x", b"n\x011\x02")] * 250
            for _ in range(4):
                await client.send(TOPIC, encode_batch(rows), code=RequestCode.SEND_BATCH_MESSAGE, batch="true")
            with trio.fail_after(10):
                while holds.filters.is_pending:
                    await trio.lowlevel.checkpoint()

        opaque = await hold(1)
        await fill()
        if change:
            if by_heartbeat:
                await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "n = 2 "), version=2)])
            else:
                broker.context.filters._expressions._filters.clear()
        await client.send(TOPIC, b"it", {"n": "2"})
        reply = await reader.reply(opaque)
        if change:
            assert (reply.code, reply.ext_fields()["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "801")
            return
        assert [message.body for message in decode_messages(bytes(reply.body))] == [b"it"]
        assert reply.ext_fields()["nextBeginOffset"] == "1002"
        # the same where its time is over: the client continues behind them
        opaque = await hold(1002)
        await fill()
        clock.advance(20)
        reply = await reader.reply(opaque)
        assert (reply.code, reply.ext_fields()["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "2002")


# retry topics


@pytest.mark.parametrize("supported", [False, True])
async def test_retry_topics(supported: bool) -> None:
    """With filterSupportRetry the expression for the real topic counts, otherwise the one for the retry topic."""
    async with serving(filterSupportRetry=supported) as (_, client):
        await client.send(TOPIC)
        retry = "%RETRY%G"
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "n > 2"), (retry, "n < 2"))])
        for number, topic in enumerate([TOPIC, TOPIC, TOPIC, TOPIC, "Other", None]):
            real = {"RETRY_TOPIC": topic} if topic else {}
            await client.send(retry, b"%d" % number, {"n": str(number), **real})
        in_heartbeats = await pull(client, topic=retry)
        in_request = await client.pull(retry, subscription="n < 2", **SQL)
        for reply in (in_heartbeats, in_request):
            bodies = [message.body for message in decode_messages(bytes(reply.body))]
            assert bodies == ([b"3", b"4", b"5"] if supported else [b"0", b"1"])
        # consumers subscribe to their retry topic by the tag *, so that they get all they sent back
        assert len(await client.pull_messages(retry)) == 6


# all paths deliver the same

EXPRESSIONS = [
    "n > 3",
    "n BETWEEN 2 AND 5 OR color IN ('red', 'blau')",
    "color IS NULL",
    "TAGS = 'a' AND n <> 3",
    "NOT (n = 2 OR color = 'grün')",
    "color CONTAINS 'r' AND n IS NOT NULL",
    "rare = 'yes'",
    "TRUE",
    "n > 5000",
]


def _properties(random: Random) -> dict[str, str]:
    found = {
        "n": random.choice(["", "2", "3", "5", "-1", "4.5", "many", "99999999999999999999"]),
        "color": random.choice(["", "red", "blau", "grün"]),
        "TAGS": random.choice(["", "a", "b"]),
        "KEYS": random.choice(["", "k1 k2"]),
        "UNIQ_KEY": random.choice(["", f"{random.randrange(1 << 120):032X}"]),
        "WAIT": random.choice(["", "true", "false"]),
        "rare": "yes" if random.random() < 0.01 else "",
    }
    names = list(found)
    random.shuffle(names)
    return {name: found[name] for name in names if found[name]}


async def _fill(client: WireClient, random: Random, count: int) -> None:
    """Store at least ``count`` messages in queue 0 of TOPIC, and others between them."""
    left = count
    while left > 0:
        body = bytes(random.choice([0, 20, 20, 3000]))
        kind = random.random()
        if kind < 0.2:
            rows = [(0, b"%d" % row, properties_text(_properties(random)).encode()) for row in range(20)]
            reply = await client.send(TOPIC, encode_batch(rows), code=RequestCode.SEND_BATCH_MESSAGE, batch="true")
            assert reply.code == 0, reply.remark
            left -= 20
        elif kind < 0.4:
            await client.send("Other", body, _properties(random))
        elif kind < 0.5:
            await client.send(TOPIC, body, _properties(random), queue_id=1)
        else:
            await client.send(TOPIC, body, _properties(random), v1=kind < 0.6, code=10 if kind < 0.6 else 310)
            left -= 1


def _expected(messages: list[StoredMessage], text: str) -> list[int]:
    expression = compile_expression(text)
    return [message.queue_offset for message in messages if expression.matches(message.properties)]


async def _walk(raw: Raw, fields: dict[str, Any], *, fast: bool) -> list[int]:
    """Read queue 0 as a consumer does. The offsets of the messages that came."""
    found: list[int] = []
    offset, end = 0, 1
    while offset < end:
        reply = decode(memoryview(await raw.ask(json_frame(11, fields | {"queueOffset": str(offset)}, fast=fast)))[4:])
        assert reply.code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY), reply.remark
        ext = reply.ext_fields()
        messages = decode_messages(bytes(reply.body))
        assert bool(messages) is (reply.code == ResponseCode.SUCCESS)
        found += [message.queue_offset for message in messages]
        following, end = int(ext["nextBeginOffset"]), int(ext["maxOffset"])
        assert following > offset, "a consumer would stay here"
        assert all(offset <= message.queue_offset < following for message in messages)
        offset = following
    return found


def _fields(group: str, text: str | None, count: int) -> dict[str, Any]:
    ext = pull_ext(TOPIC, 0, group=group, maxMsgNums=count, expressionType="SQL92", subVersion=1)
    if text is None:
        ext |= {"sysFlag": 0}
        del ext["subscription"]
    else:
        ext |= {"sysFlag": PULL_SUBSCRIPTION, "subscription": text}
    return {name: str(value) for name, value in ext.items()}


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("seed", range(2))
async def test_every_path_delivers_what_the_expression_accepts(seed: int, flush: str) -> None:
    random = Random(seed)
    disk = SimDisk()
    async with serving(disk=disk, flushDiskType=flush) as (broker, client):
        await _fill(client, random, 100 if flush == "SYNC_FLUSH" else 300)
        messages: list[StoredMessage] = []
        while len(messages) < int((await client.pull(TOPIC)).ext_fields()["maxOffset"]):
            messages += await client.pull_messages(TOPIC, len(messages))
        groups = {text: f"G{number}" for number, text in enumerate(EXPRESSIONS)}
        await client.heartbeat("c", consumers=[sql_consumer(group, (TOPIC, text)) for text, group in groups.items()])
        async with await trio.open_tcp_stream(*broker.endpoint) as stream:
            raw = Raw(stream)
            await raw.ask(json_frame(11, _fields("G", "TRUE", 1), fast=True))
            served = fast_paths(broker)
            for cold in (False, True):
                if cold:
                    file = broker.context.store.files.files[0]
                    file.in_memory_from = file.size
                    disk.cold = True
                    file_cache = broker.context.store.files.page_cache
                    file_cache.forget(file, 0, file.size)
                for text, group in groups.items():
                    expected = _expected(messages, text)
                    count = random.choice([1, 7, 32])
                    for fields in (_fields(group, None, count), _fields("G", text, count)):
                        for fast in (False, True):
                            assert await _walk(raw, fields, fast=fast) == expected, (text, count, cold, fast)
                if not cold:
                    assert served, "the fast path has served none"


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("seed", range(2))
async def test_held_pulls_are_answered_by_what_the_expression_accepts(seed: int, flush: str) -> None:
    random = Random(seed)
    async with serving(flushDiskType=flush) as (broker, client), trio.open_nursery() as nursery:
        await _fill(client, random, 5)
        start = int((await client.pull(TOPIC)).ext_fields()["maxOffset"])
        groups = {text: f"G{number}" for number, text in enumerate(EXPRESSIONS)}
        await client.heartbeat("c", consumers=[sql_consumer(group, (TOPIC, text)) for text, group in groups.items()])
        found: dict[str, list[int]] = {text: [] for text in EXPRESSIONS}

        async def follow(text: str, group: str) -> None:
            async with WireClient.connect(broker.endpoint) as own:
                offset = start
                while True:
                    fields: dict[str, Any] = {"suspendTimeoutMillis": 60_000}
                    if random.random() < 0.5:
                        fields |= {"sysFlag": PULL_SUSPEND, "subscription": None}
                    else:
                        fields |= {"sysFlag": PULL_SUSPEND | PULL_SUBSCRIPTION, "subscription": text}
                    opaque = await own.post(
                        RequestCode.PULL_MESSAGE, pull_ext(TOPIC, offset, group=group, subVersion=1, **SQL) | fields
                    )
                    reply = await own.reply(opaque, 60)
                    assert reply.code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY), reply.remark
                    found[text] += [message.queue_offset for message in decode_messages(bytes(reply.body))]
                    offset = int(reply.ext_fields()["nextBeginOffset"])

        for text, group in groups.items():
            nursery.start_soon(follow, text, group)
        holds = broker.context.long_polling

        async def all_held() -> None:
            with trio.fail_after(10):
                while holds.held < len(EXPRESSIONS) or holds.filters.is_pending:
                    await trio.lowlevel.checkpoint()

        for _ in range(20):
            await all_held()
            await _fill(client, random, 5)
        messages: list[StoredMessage] = []
        while len(messages) < int((await client.pull(TOPIC)).ext_fields()["maxOffset"]):
            messages += await client.pull_messages(TOPIC, len(messages))
        await all_held()
        for text in EXPRESSIONS:
            assert found[text] == [offset for offset in _expected(messages, text) if offset >= start], text
        nursery.cancel_scope.cancel()
