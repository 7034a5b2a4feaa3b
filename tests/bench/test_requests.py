"""The in-process cost of requests: each row measures the path that it names, and every request is answered."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from bench import frames, mixed, requests, wire
from bench.paths import OtherPathError, PathCounter, RequestPath
from bench.requests import ROWS, Load, Row, measure, measure_row
from bench.wire import RefusedError, connected
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode
from trimq.protocol.native import NATIVE
from trimq.protocol.property_text import decode_properties
from trimq.remoting.server.handler_table import HandlerTable, Route

SEND, BATCH = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE
LARGER: dict[str, object] = {"mappedFileSizeCommitLog": 256 << 20, "commitLogReserveStep": 32 << 20}


native = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")


@pytest.mark.parametrize(
    ("name", "extension"),
    [
        *[pytest.param(name, "on", marks=native) for name, row in ROWS.items() if row.path != row.path_without_native],
        *[(name, "off") for name, row in ROWS.items() if row.path != row.path_without_native],
        *[(name, "either") for name, row in ROWS.items() if row.path == row.path_without_native],
    ],
)
async def test_a_row_takes_the_path_that_it_names(name: str, extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if extension == "off":
        monkeypatch.setattr(NATIVE, "is_on", False)
        monkeypatch.setattr(NATIVE, "extension", None)
    path = ROWS[name].path_without_native if extension == "off" else ROWS[name].path
    turn = ROWS[name].requests * ROWS[name].messages
    with trio.fail_after(30):
        # In few turns a single one, while the log allocates space or the machine is busy, would be a large part.
        found = await measure_row(name, max(1600, 100 * turn), LARGER)
    assert found["path"] == path
    assert found["paths"][path] > 0.9 * sum(found["paths"].values())
    assert 0 < found["us_message"] <= found["us_request"] < 100_000


@pytest.mark.parametrize("name", ["send alone", "send", "send 64", "mixed batch", "pull", "query"])
async def test_a_signed_row_takes_the_same_path(name: str) -> None:
    with trio.fail_after(30):
        found = await measure_row(name, 1600, LARGER, signed=True)
    assert found["path"] == ROWS[name].expected
    assert found["paths"][found["path"]] > 0.9 * sum(found["paths"].values())


@contextmanager
def routed(table: HandlerTable, code: int, **changes: Any) -> Iterator[Route]:
    route = table.routes[code]
    table.route(code, replace(route, **changes))
    yield route
    table.route(code, route)


@pytest.mark.parametrize(
    ("name", "code", "closed", "taken"),
    [
        pytest.param("send", SEND, {"grouped": None}, "fast", marks=native),
        ("send 64", SEND, {"grouped": None, "fast": None}, "full"),
        ("send alone", SEND, {"fast": None, "grouped": None}, "full"),
        pytest.param("batch", BATCH, {"fast": None}, "full", marks=native),
        ("query", RequestCode.QUERY_MESSAGE, {"fast": None}, "full"),
    ],
)
async def test_a_row_fails_where_another_path_is_taken(
    name: str, code: int, closed: dict[str, None], taken: RequestPath, tmp_path: Path
) -> None:
    async with running_broker(tmp_path, clock=None, disk=None, **LARGER) as broker:
        async with connected(broker) as one:
            await requests.fill(one)
        async with connected(broker, ROWS[name].connections) as clients:
            with (
                routed(clients.connections[0].table, code, **closed),
                pytest.raises(OtherPathError, match=f"{taken} 100.0%"),
            ):
                await measure(clients, name, 400)


async def test_a_row_fails_where_some_of_its_requests_take_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(number: int, _like: int) -> bytes:
        if number % 2:
            return frames.send(number)
        fields = frames.send_fields("Requests", 0, frames.escaped("DELAY\x011\x02"))  # which needs the full handler
        return frames.frame(310, number, fields, frames.BODY)

    uneven = Row("fast", "fast", make)
    monkeypatch.setitem(ROWS, "uneven", uneven)
    async with running_broker(tmp_path, clock=None, disk=None, **LARGER) as broker, connected(broker) as one:
        await requests.fill(one)
        with pytest.raises(OtherPathError, match=r"uneven .* 50\.0%"):
            await measure(one, "uneven", 40)


async def test_routes_are_what_they_were_behind_the_count(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, connected(broker) as one:
        table = one.connections[0].table
        before = dict(table.routes)
        with PathCounter(table, [SEND, BATCH]) as counter:
            assert table.routes[SEND] is not before[SEND]
            with routed(table, SEND), pytest.raises(OtherPathError, match="replaced"):
                counter.taken(0)
        assert table.routes == before


@pytest.mark.parametrize("name", ["mixed", "mixed 64", "mixed batch"])
async def test_mixed_requests_are_accepted_by_the_full_path(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    async with (
        running_broker(tmp_path, clock=None, disk=None, **LARGER) as broker,
        connected(broker, row.connections) as clients,
    ):
        table = clients.connections[0].table
        load = Load(clients, row)
        with (
            routed(table, SEND, fast=None, grouped=None),
            routed(table, BATCH, fast=None),
            PathCounter(table, [SEND, BATCH]) as counter,
        ):
            for _ in range(row.kinds):
                turn = await load.turn(counter)  # raises if a request is refused
                assert counter.taken(turn.requests)["full"] == turn.requests
        assert stored(broker) == row.kinds * row.requests * row.messages


def stored(broker: BrokerController) -> int:
    topics = {message.topic for message in mixed.messages()}
    queues = broker.context.store.queues
    return sum(queues.next_offset(topic, queue) for topic in topics for queue in range(mixed.QUEUES))


async def test_a_reply_other_than_success_ends_it(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, connected(broker, 2) as clients:
        bad = frames.frame(310, 7, frames.send_fields("a/b", 0, ""), b"body")
        with pytest.raises(RefusedError, match="refuses with"):
            await clients.turn([frames.send(1), bad])


async def test_a_turn_without_replies_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LIMIT_SECONDS", 0.2)
    async with running_broker(tmp_path) as broker, connected(broker) as one:
        await one.turn([frames.send(0)])
        silent = frames.send(1).replace(b'"flag":0', b'"flag":2')  # a one-way request
        with pytest.raises(RefusedError, match="no reply to 1 requests"):
            await one.turn([silent])


@pytest.mark.parametrize("count", [1, 64])
async def test_a_turn_is_a_round_of_the_reactor(count: int, tmp_path: Path) -> None:
    ends = []
    async with running_broker(tmp_path) as broker, connected(broker, count) as clients:
        await clients.turn([frames.send(number) for number in range(count)])  # creates the topic
        broker.reactor.at_round_end.append(lambda: ends.append(broker.reactor.in_round))
        before = broker.reactor.stats.rounds
        turn = await clients.turn([frames.send(number) for number in range(count)])
        rounds = broker.reactor.stats.rounds - before
        assert 1 <= rounds <= 4  # a busy kernel may deliver some of the frames later
        assert ends == [True] * rounds
        assert turn.requests == count
        assert turn.seconds > 0


async def test_more_than_the_sockets_hold_is_served_in_one_turn(tmp_path: Path) -> None:
    async with running_broker(tmp_path, clock=None, disk=None, **LARGER) as broker, connected(broker, 2) as clients:
        many = b"".join([mixed.batch(number) for number in range(80)])
        assert len(many) > 8 << 20
        turn = await clients.turn([many, mixed.send(0)])
        assert turn.requests == 81


def test_what_is_drawn_is_the_same_for_a_seed_and_as_mixed_as_it_says() -> None:
    drawn = mixed.draw()
    assert drawn == list(mixed.messages())
    assert drawn != mixed.draw(seed=23)
    assert len(drawn) == mixed.COUNT
    assert len({message.topic for message in drawn}) == mixed.TOPICS
    bodies = sorted(message.body for message in drawn)
    assert (bodies[0], bodies[-1]) >= (20, 30_000)
    assert bodies[-1] <= 32 * 1024
    assert 600 < bodies[len(bodies) // 2] < 1100  # log-uniform: half of them are below the geometric mean
    all_properties = [decode_properties(message.properties(7)) for message in drawn]
    words = [len(properties.get("KEYS", "").split()) for properties in all_properties]
    assert set(words) == {0, 1, 2, 3}
    lengths = {len(message.text) for message in drawn}
    assert len(lengths) > 500
    assert min(lengths) < 60
    assert max(lengths) > 2000
    assert all(properties["UNIQ_KEY"] == frames.unique(7) for properties in all_properties)
    assert 0.75 < sum("TAGS" in properties for properties in all_properties) / len(drawn) < 0.85
    assert any(not message.text.isascii() for message in drawn)


def test_a_frame_says_which_message_it_is() -> None:
    assert mixed.send(5) == mixed.send(5)
    one, other = mixed.send(5, like=2), mixed.send(6, like=2)
    assert len(one) == len(other)
    assert one != other
