"""SQL92 expressions that are compiled in a thread: each request with one is answered, whatever comes meanwhile."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from tests.broker.test_sql_filters import SQL, TOPIC, check, pull, serving, sql_consumer
from tests.broker.wire_client import WireClient, consumer, pull_ext
from trimq.broker.controller import BrokerController
from trimq.broker.filters import sql
from trimq.broker.services import producers
from trimq.broker.services.consumer_filters import MOST_NEW
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.message import decode_messages
from trimq.protocol.sysflag import PULL_SUBSCRIPTION, PULL_SUSPEND

RETRY = "%RETRY%G"


def long(start: str) -> str:
    """An expression that is compiled in a thread."""
    return " OR ".join(f"p{number} = '{start}'" for number in range(30))


async def post_heartbeat(client: WireClient, groups: list[dict[str, Any]], *producers: str) -> int:
    """Send a heartbeat, and do not wait for the reply."""
    names = [{"groupName": name} for name in producers]
    body = {"clientID": "c", "consumerDataSet": groups, "producerDataSet": names}
    return await client.post(RequestCode.HEART_BEAT, body=json.dumps(body).encode())


class Compiling:
    """Counts what a broker compiles in a thread, and lets it wait."""

    def __init__(self, broker: BrokerController) -> None:
        self.cache = broker.context.filters._expressions
        self.texts: list[str] = []
        self.go = trio.Event()
        self.go.set()
        self._run = self.cache._run
        self.cache._run = self.run

    async def run(self, function: Callable[[str], Any], text: str) -> Any:
        self.texts.append(text)
        await self.go.wait()
        return await self._run(function, text)

    async def has(self, count: int) -> None:
        with trio.fail_after(10):
            while len(self.texts) < count:
                await trio.lowlevel.checkpoint()


@asynccontextmanager
async def compiling(**changes: object) -> AsyncIterator[tuple[BrokerController, WireClient, Compiling]]:
    async with serving(None, **changes) as (broker, client):
        await client.send(TOPIC, properties={"p1": "a", "n": "1"})
        await check(client, "n = 1")  # loads the parser
        yield broker, client, Compiling(broker)


async def test_an_expression_that_is_not_cached_is_compiled_once_for_a_pull() -> None:
    async with compiling() as (_, client, counted):
        counted.cache._most = 0
        with trio.fail_after(10):
            assert (await client.pull(TOPIC, subscription=long("a"), **SQL)).code == ResponseCode.SUCCESS
            assert (await client.pull(TOPIC, subscription=long("a") + " OR", **SQL)).code == 23
            assert (await check(client, long("a"))).code == ResponseCode.SUCCESS
            assert (await check(client, long("a") + " OR")).code == 23
        assert counted.texts == [long("a"), long("a") + " OR", long("a"), long("a") + " OR"]
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, long("a")), ("Other", long("b")))])
        assert (await pull(client)).code == ResponseCode.SUCCESS
        assert counted.texts[4:] == [long("a"), long("b")], "the heartbeat's filters stay with their groups"


async def test_a_pull_whose_expression_changes_while_it_is_compiled_is_sent_again() -> None:
    async with compiling() as (broker, client, counted), WireClient.connect(broker.endpoint) as other:
        counted.cache._most = 0
        filters = broker.context.filters
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, long("a")))])
        filters._filters.clear()  # as after a start
        counted.go = trio.Event()
        opaque = await other.post(
            RequestCode.PULL_MESSAGE, pull_ext(TOPIC, 0, sysFlag=0, subscription=None, subVersion=1)
        )
        await counted.has(2)
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "n = 1"), version=2)])
        entry = filters.get(TOPIC, "G")
        assert entry is not None
        entry.expression = long("c")
        filters._filters.clear()
        counted.go.set()
        reply = await other.reply(opaque)
        assert reply.code == ResponseCode.SYSTEM_BUSY
        assert len(counted.texts) == 2


async def test_a_heartbeat_has_a_number_of_new_expressions() -> None:
    async with compiling() as (broker, client, counted):
        count = MOST_NEW + 40
        groups = [sql_consumer(f"G{number}", (TOPIC, long(f"{number}"))) for number in range(count)]
        reply = await client.heartbeat("c", consumers=[*groups, consumer("H", TOPIC)])
        assert reply.code == ResponseCode.SUCCESS
        assert len(counted.texts) == MOST_NEW
        filters = broker.context.filters
        assert (filters.alive, filters.refused) == (MOST_NEW, 40)
        assert (await pull(client, "H")).code == ResponseCode.SUCCESS, "the rest of the heartbeat counts"
        assert (await pull(client, f"G{count - 1}")).code == ResponseCode.FILTER_DATA_NOT_EXIST
        await client.heartbeat("c", consumers=[*groups, consumer("H", TOPIC)])
        assert (filters.alive, len(counted.texts)) == (count, count), "the next one brings the others"


async def test_a_client_has_a_number_of_expressions_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "MOST_WAITING", 3)
    async with compiling() as (broker, client, counted), WireClient.connect(broker.endpoint) as other:
        counted.go = trio.Event()
        groups = [sql_consumer(f"G{number}", (TOPIC, long(f"{number}"))) for number in range(5)]
        heartbeat = await post_heartbeat(other, groups)
        await counted.has(1)
        assert (await other.pull(TOPIC, subscription=long("a"), **SQL)).code == ResponseCode.SYSTEM_BUSY
        busy = await check(other, long("a"))
        assert (busy.code, busy.remark) == (
            ResponseCode.SYSTEM_BUSY,
            "too many expressions of this client wait to be compiled: try again",
        )
        mine = await client.post(RequestCode.PULL_MESSAGE, pull_ext(TOPIC, 0, subscription=long("a"), **SQL))
        await trio.testing.wait_all_tasks_blocked()
        counted.go.set()
        assert (await client.reply(mine)).code == ResponseCode.SUCCESS
        assert (await other.reply(heartbeat)).code == ResponseCode.SUCCESS
        assert counted.texts.index(long("a")) <= 2, "clients take turns"
        assert (broker.context.filters.alive, broker.context.filters.refused) == (3, 2)
        assert (await other.pull(TOPIC, subscription=long("a"), **SQL)).code == ResponseCode.SUCCESS


async def test_a_heartbeat_that_is_compiled_does_not_undo_what_comes_after_it() -> None:
    """The client leaves two of the groups before the expressions of its heartbeat are compiled."""
    async with compiling() as (broker, client, counted):
        counted.go = trio.Event()
        groups = [sql_consumer(name, (TOPIC, long("a"))) for name in ("Left", "Again", "Stays")]
        first = await post_heartbeat(client, groups, "P", "Q")
        await counted.has(1)
        for name in ("Left", "Again"):
            ext = {"clientID": "c", "producerGroup": "P", "consumerGroup": name}
            assert (await client.ask(RequestCode.UNREGISTER_CLIENT, ext)).code == ResponseCode.SUCCESS
        await client.heartbeat("c", consumers=[sql_consumer("Again", (TOPIC, "n = 1"), version=2)])
        counted.go.set()
        assert (await client.reply(first)).code == ResponseCode.SUCCESS
        context = broker.context
        assert sorted(context.consumers.table) == ["Again", "Stays"]
        assert sorted(context.producers.table) == ["Q"]
        entry = context.filters.get(TOPIC, "Again")
        assert entry is not None
        assert entry.expression == "n = 1"
        assert context.filters.get(TOPIC, "Left") is None


async def test_heartbeats_that_are_compiled_together_do_not_exceed_the_producer_groups_of_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producers, "MOST_GROUPS", 3)
    async with compiling() as (broker, client, counted):
        counted.go = trio.Event()
        first = await post_heartbeat(client, [sql_consumer("G", (TOPIC, long("a")))], "A", "B")
        await counted.has(1)
        second = await post_heartbeat(client, [sql_consumer("H", (TOPIC, long("b")))], "C", "D")
        counted.go.set()
        codes = {(await client.reply(opaque)).code for opaque in (first, second)}
        assert codes == {ResponseCode.SUCCESS, ResponseCode.SYSTEM_BUSY}
        assert sorted(broker.context.producers.table) in (["A", "B"], ["C", "D"])


@pytest.mark.parametrize("change", [False, True])
async def test_a_held_pull_of_a_retry_topic_continues_where_it_was(change: bool) -> None:
    """More messages than one pull searches: the one that fits comes at once, unless an expression has changed."""
    async with (
        compiling(filterSupportRetry=True, maxFilterMessageSize=2000) as (broker, client, _),
        WireClient.connect(broker.endpoint) as reader,
    ):
        await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "n = 2"), ("Other", "n = 2"))])
        await client.send(RETRY, b"first", {"n": "1", "RETRY_TOPIC": TOPIC})
        holds = broker.context.long_polling
        held: dict[str, Any] = {"subscription": "n > 5", "sysFlag": PULL_SUSPEND | PULL_SUBSCRIPTION}
        opaque = await reader.post(RequestCode.PULL_MESSAGE, pull_ext(RETRY, 1, **SQL, **held))
        with trio.fail_after(10):
            while not holds.held:
                await trio.lowlevel.checkpoint()
        for _ in range(150):
            await client.send(RETRY, b"x", {"n": "1", "RETRY_TOPIC": TOPIC})
        with trio.fail_after(10):
            while holds.filters.is_pending:
                await trio.lowlevel.checkpoint()
        if change:
            await client.heartbeat("c", consumers=[sql_consumer("G", (TOPIC, "n = 2"), ("Other", "n = 3"), version=2)])
        await client.send(RETRY, b"it", {"n": "2", "RETRY_TOPIC": TOPIC})
        reply = await reader.reply(opaque)
        if change:
            assert (reply.code, reply.ext_fields()["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "101")
            return
        assert [message.body for message in decode_messages(bytes(reply.body))] == [b"it"]
        assert reply.ext_fields()["nextBeginOffset"] == "152"


async def test_a_retry_topics_expressions_are_compiled_in_a_thread_after_a_start() -> None:
    async with compiling(filterSupportRetry=True) as (broker, client, counted):
        topics = ((TOPIC, long("a")), ("Other", long("b")))
        await client.heartbeat("c", consumers=[sql_consumer("G", *topics)])
        await client.send(RETRY, b"yes", {"p7": "b", "RETRY_TOPIC": "Other"})
        await client.send(RETRY, b"no", {"p7": "a", "RETRY_TOPIC": "Other"})
        filters = broker.context.filters
        filters._filters.clear()
        counted.cache._filters.clear()
        counted.cache._size = 0
        counted.texts.clear()
        reply = await client.pull(RETRY, subscription=long("c"), **SQL)
        assert [message.body for message in decode_messages(bytes(reply.body))] == [b"yes"]
        assert counted.texts == [long("c"), long("a"), long("b")]
