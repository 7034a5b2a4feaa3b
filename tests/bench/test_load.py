"""The load generator (bench/rmqload) with TriMQ's broker: each row runs, and sends and measures what it documents."""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from bench import mixed
from bench.processes import load_tool
from bench.requests import ASKING
from bench.side_by_side import ROWS, load
from bench.wire import connected
from tests.interop.harness import partners
from tests.store.builders import records
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.property_text import decode_properties
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import Outcome

pytestmark = [pytest.mark.partners, pytest.mark.nightly, pytest.mark.timeout(120, func_only=True)]

SHORT = "-warm 100ms -dur 400ms"
COUNTED = "-warm 0s -dur 20s -n"
"""So many requests: in a short time a disk that stands still for a moment lets none through."""
LARGER: dict[str, Any] = {
    "mappedFileSizeCommitLog": 256 << 20,
    "commitLogReserveStep": 32 << 20,
    "mappedFileSizeConsumeQueue": 600_000,
    "maxIndexNum": 400_000,
    # A disk that stands still for a moment is not what is tested here.
    "osPageCacheBusyTimeOutMills": 30_000,
}


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    partners.tool("go")
    with load_tool(tmp_path_factory.mktemp("load")) as built:
        yield built


async def run(tool: Path, broker: BrokerController, arguments: str) -> dict[str, Any]:
    return await trio.to_thread.run_sync(load, tool, broker.endpoint[1], arguments, 1)


@pytest.mark.parametrize(
    "name",
    [
        "mixed64",
        "mixedpipelined",
        "mixedbatch",
        "topics1000",
        "transactions64",
        "transactionspipelined",
        "mixedtransactions",
        "e2e",
        "catchup1",
        "catchup8",
    ],
)
async def test_a_row_runs_and_nothing_fails(name: str, tool: Path, tmp_path: Path) -> None:
    row = ROWS[name]
    async with running_broker(tmp_path, flushDiskType=row.flush, **LARGER) as broker:
        for write in row.writes:
            written = await run(tool, broker, f"{write} -n 200 -dur 5s")
            assert written["messages"] >= 200
        # Of 64 connections each rolls back every eighth of its transactions.
        enough = SHORT if name == "e2e" else f"{COUNTED} {2000 if name == 'mixedtransactions' else 300}"
        found = await run(tool, broker, f"{row.load} {enough}")
        topics = set(broker.context.topics.table)
        counters = broker.context.transactions.counters
    assert (found["failed"], found["remark"]) == (0, "")
    assert found["messages"] > 0
    if name == "mixedtransactions":
        connections, of = 64, 8
        assert counters.rollbacks > 0
        assert abs(counters.commits - (of - 1) * counters.rollbacks) <= (of - 1) * connections
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["p999_ms"]
    if name == "topics1000":
        assert {f"Topics{number:04d}" for number in range(1000)} <= topics


@pytest.mark.parametrize(("load_of", "together"), [("-mode send", 1), ("-mode batch", 32)])
@pytest.mark.parametrize("paths", ["all", "full"])
async def test_mixed_messages_are_stored_as_they_were_drawn(
    load_of: str, together: int, paths: str, tool: Path, tmp_path: Path
) -> None:
    async with running_broker(tmp_path, **LARGER) as broker, connected(broker) as other:
        table = other.connections[0].table
        if paths == "full":
            for code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE):
                table.route(code, replace(table.routes[code], fast=None, grouped=None))
        found = await run(tool, broker, f"{load_of} -conns 1 -mixed {{mixed}} {COUNTED} 100")
        stored = records(broker.context.store.files)
    assert found["failed"] == 0
    assert len(stored) >= found["messages"] >= together
    for at, message in enumerate(stored):
        like = mixed.messages()[at % mixed.COUNT]
        first = mixed.messages()[(at - at % together) % mixed.COUNT]
        assert (message.topic, message.queue_id) == (first.topic, first.queue_id)
        assert len(message.body) == like.body
        expected = decode_properties(like.text.replace(mixed.NUMBER, str(at)))
        properties = dict(message.properties)
        assert re.fullmatch("[0-9A-F]{32}", properties.pop("UNIQ_KEY").upper())
        expected.pop("UNIQ_KEY")
        assert expected.items() <= properties.items()
    assert len({message.properties["UNIQ_KEY"] for message in stored}) == len(stored)


@pytest.mark.parametrize(
    "load_of",
    [
        "send -window 8",
        "send -mixed {mixed}",
        "batch -mixed {mixed}",
        "pull",
        "transaction",
        "e2e -rate 500 -topics 2",
    ],
)
async def test_a_signed_load(load_of: str, tool: Path, tmp_path: Path) -> None:
    user = json.dumps({"username": "load", "password": "a-secret"})
    settings: dict[str, Any] = {**LARGER, **ASKING, "initAuthenticationUser": user, "allowAdminOverPlain": True}
    enough = "-warm 0s -dur 400ms" if "e2e" in load_of else f"{COUNTED} 200"
    async with running_broker(tmp_path, **settings) as broker:
        assert broker.context.users is not None
        refused = broker.context.users.access.refused
        if load_of == "pull":
            await run(tool, broker, f"-mode send {COUNTED} 200 -access-key load -secret-key a-secret")
        found = await run(tool, broker, f"-mode {load_of} -conns 4 {enough} -access-key load -secret-key a-secret")
        assert (found["failed"], found["remark"], refused["authentication"]) == (0, "", 0)
        assert found["messages"] > 0
        if load_of == "pull":
            found = await run(tool, broker, f"-mode pull -conns 1 {COUNTED} 9 -access-key load -secret-key wrong")
            assert (found["messages"], refused["authentication"]) == (0, 9)


async def test_the_sequence_is_the_same_in_each_run(tool: Path, tmp_path: Path) -> None:
    runs = []
    for number in range(2):
        async with running_broker(tmp_path / str(number), **LARGER) as broker:
            await run(tool, broker, f"-mode send -conns 4 -mixed {{mixed}} {COUNTED} 400")
            by_place: dict[tuple[str, int], list[tuple[int, str | None]]] = {}
            for message in records(broker.context.store.files):
                keys = message.properties.get("KEYS")
                by_place.setdefault((message.topic, len(message.body)), []).append((message.queue_id, keys))
            runs.append(by_place)
    first, second = runs
    shared = [place for place in first if place in second]
    assert len(shared) > 20
    for place in shared:
        common = min(len(first[place]), len(second[place]))
        if common == 1:
            assert first[place][0] == second[place][0]


async def test_latency_is_from_the_send_to_the_receipt(tool: Path, tmp_path: Path) -> None:
    # A machine that stands still for a moment changes the figures of one attempt; a wrong measurement is always wrong.
    attempts = 4
    for attempt in range(1, attempts + 1):
        quick, slow, born, places = await late_sends(tool, tmp_path / str(attempt))
        assert (quick["failed"], quick["remark"]) == (slow["failed"], slow["remark"]) == (0, "")
        assert quick["messages"] == slow["messages"] == 60
        assert slow["p50_ms"] >= 300
        assert places == {(f"Late{number:04d}", queue) for number in range(3) for queue in range(2)}
        # Sends that wait for replies instead of the clock would take 8 times the delay, their median over 1 s.
        as_planned = 300 <= max(born) - min(born) < 1100 and quick["p50_ms"] < 300 and slow["p50_ms"] < 1000
        if as_planned and quick["msg_s"] == 100:
            return
        assert attempt < attempts, f"latency or rate is not as planned: {quick} {slow}"


async def late_sends(
    tool: Path, directory: Path
) -> tuple[dict[str, Any], dict[str, Any], list[int], set[tuple[str, int]]]:
    """Figures of sends that are answered at once, and 0.3 s later; born times and queues of the former."""
    arguments = "-mode e2e -conns 6 -topics 3 -queues 2 -topic Late -rate 100 -warm 0s -dur 600ms"
    async with running_broker(directory, **LARGER) as broker, connected(broker) as other:
        quick = await run(tool, broker, arguments)
        stored = records(broker.context.store.files)
        table = other.connections[0].table
        handler = table.routes[RequestCode.SEND_MESSAGE_V2].full

        async def later(connection: Connection, command: RemotingCommand) -> Outcome:
            await trio.sleep(0.3)
            return handler(connection, command)

        table.register(RequestCode.SEND_MESSAGE_V2, later)
        slow = await run(tool, broker, arguments)
    born = [message.born_timestamp for message in stored]
    return quick, slow, born, {(message.topic, message.queue_id) for message in stored}


async def test_what_does_not_arrive_has_failed(tool: Path, tmp_path: Path) -> None:
    async with running_broker(tmp_path, maxMessageSize=512, **LARGER) as broker:
        found = await run(
            tool, broker, "-mode e2e -conns 2 -topics 1 -queues 2 -topic Long -rate 50 -warm 0s -dur 200ms"
        )
    assert found["messages"] == 0
    assert found["failed"] == 20  # each message counts twice: it was refused, and it did not arrive
    assert "10 of 10 messages have not arrived" in found["remark"]


async def test_a_poll_that_ends_without_messages_is_asked_again(tool: Path, tmp_path: Path) -> None:
    async with running_broker(
        tmp_path, maxHeldRequests=1, **LARGER
    ) as broker:  # further polls are answered immediately
        found = await run(
            tool, broker, "-mode e2e -conns 4 -topics 1 -queues 4 -topic Polled -rate 50 -warm 0s -dur 400ms"
        )
    assert (found["failed"], found["messages"]) == (0, 20)


async def test_topics_that_are_refused_end_the_load(tool: Path, tmp_path: Path) -> None:
    async with running_broker(tmp_path, **LARGER) as broker:
        with pytest.raises(RuntimeError, match="creating topics: code"):
            await run(tool, broker, f"-mode send -conns 1 -topics 2 -topic a/b {SHORT}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("-mode e2e -conns 5 -topics 2 -queues 2", "its own queue"),
        ("-mode e2e -conns 1 -size 8", "-size must be at least 9"),
        ("-mode e2e -conns 1 -rate 0", "-rate"),
        ("-mode send -mixed /nowhere/mixed.jsonl", "no such file"),
        ("-mode send -mixed {tmp}", "expected a topic, and a body"),
    ],
)
def test_bad_arguments_are_refused(arguments: str, says: str, tool: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"topic":"T","queue_id":0,"body":40000,"text":""}\n')
    command = [str(tool), "-addr", "127.0.0.1:1", *arguments.replace("{tmp}", str(bad)).split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert says in done.stderr
