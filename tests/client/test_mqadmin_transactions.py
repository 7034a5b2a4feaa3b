"""mqadmin's commands for half messages, against TriMQ's broker and against Apache's."""

import json
import time
from typing import Any

import anyio
import pytest
from click.testing import CliRunner

from tests.client.servers import Servers
from trimq.client import Message, ReceivedMessage, TransactionProducer, TransactionState
from trimq.client.mqadmin import main

RUNNER = CliRunner()
AGED = 3
"""Seconds."""


def answered(servers: Servers, *words: str) -> Any:
    result = RUNNER.invoke(main, [*words, "-n", servers.namesrv, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def unknown(_message: ReceivedMessage) -> TransactionState:
    return TransactionState.UNKNOWN


def test_half_messages(servers: Servers, name: str) -> None:
    # guards what an operator looks for: which group leaves its transactions open, since when, and checked how often
    servers.create_topic(name, 1)
    ids: dict[bytes, str] = {}
    sent: dict[bytes, float] = {}
    states = {b"committed": TransactionState.COMMIT, b"rolled back": TransactionState.ROLLBACK}

    async def listed(body: bytes, column: str, least: int) -> dict[str, dict[str, Any]]:
        """The open halves, once no others are listed, and this one has at least this number in a column."""
        while True:
            rows = {row["MsgId"]: row for row in await anyio.to_thread.run_sync(found)}
            if rows.keys() == {ids[b"open"], ids[b"checked"]} and rows[ids[body]][column] >= least:
                return rows
            await anyio.sleep(0.1)

    def found() -> list[dict[str, Any]]:
        asked.append(time.time())
        rows: list[dict[str, Any]] = answered(
            servers, "halfMessages", "-b", servers.broker.address, "-g", name, "-t", name
        )
        return rows

    async def prepared() -> dict[str, dict[str, Any]]:
        async with TransactionProducer(name, unknown, namesrv=servers.namesrv) as producer:
            for body in (b"open", b"committed", b"rolled back", b"checked"):
                immunity = 600 if body == b"open" else None
                sent[body] = time.time()
                async with producer.transaction(
                    Message(name, body, keys="k"), check_immunity_time_in_seconds=immunity
                ) as transaction:
                    ids[body] = transaction.receipt.message_id
                    transaction.state = states.get(body, TransactionState.UNKNOWN)
            with anyio.fail_after(60):
                await listed(b"open", "Age(s)", AGED)  # more than a few roundings
                with servers.checking():
                    return await listed(b"checked", "Checks", 1)

    asked: list[float] = []
    rows = anyio.run(prepared)
    ended = time.time()
    row = rows[ids[b"open"]]
    assert (row["Topic"], row["Producer Group"], row["Broker"]) == (name, name, servers.broker.address)
    assert asked[-1] - sent[b"open"] - 1 <= row["Age(s)"] <= ended - sent[b"open"] + 1
    assert answered(servers, "halfMessages", "-c", "DefaultCluster", "-g", "absent") == []
    if servers.peer == "trimq":
        assert row["Checks"] == 0


def test_a_half_message_is_checked_again(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)

    async def prepare() -> str:
        async with TransactionProducer(name, unknown, namesrv=servers.namesrv) as producer:
            async with producer.transaction(Message(name, b"x")) as transaction:
                transaction.state = TransactionState.UNKNOWN
            return transaction.receipt.offset_message_id

    half = anyio.run(prepare)
    result = RUNNER.invoke(main, ["resumeCheckHalfMessage", "-i", half, "-n", servers.namesrv])
    assert (result.exit_code, result.output) == (0, f"{half} is checked again.\n")


@pytest.mark.parametrize("words", [["halfMessages"], ["halfMessages", "-b", "127.0.0.1:1", "-c", "x"]])
def test_the_command_line(words: list[str]) -> None:
    assert RUNNER.invoke(main, words).exit_code == 2


def test_an_id_that_is_none() -> None:
    result = RUNNER.invoke(main, ["resumeCheckHalfMessage", "-i", "u1", "-n", "127.0.0.1:1"])
    assert (result.exit_code, "no offset message id" in result.output) == (2, True)
