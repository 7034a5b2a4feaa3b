"""The cache of compiled expressions, and the turns that clients take to have theirs compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from trimq.broker.filters.fair_lock import FairLock
from trimq.broker.filters.sql import MOST_WAITING, ExpressionCache, SqlFilter


async def _directly(function: Callable[[str], Any], text: str) -> Any:
    await trio.lowlevel.checkpoint()
    return function(text)


def _sum(cache: ExpressionCache) -> int:
    return sum(len(text) + 256 for text in cache._filters)


async def test_a_text_that_is_stored_while_it_is_compiled_counts_once() -> None:
    async def run(function: Callable[[str], Any], text: str) -> Any:
        compiled = await _directly(function, text)
        cache.filter("SQL92", text)  # a pull brings the same one meanwhile
        return compiled

    cache = ExpressionCache(run, 3000)
    for number in range(30):
        await cache.prepare([f"a{number} = 1"], "c")
        assert cache._size == _sum(cache) <= 3000
    assert len(cache._filters) == 11


async def test_what_is_prepared_does_not_depend_on_the_cache() -> None:
    cache = ExpressionCache(_directly, 0)
    compiled = await cache.prepare(["a = 1", "a = ", "a = 1"], "c")
    assert list(compiled) == ["a = 1", "a = "]
    assert cache.filter("SQL92", "a = 1", compiled) is compiled["a = 1"]
    assert cache._filters == {}


async def test_clients_take_turns() -> None:
    """A client with one expression waits for one of each other client, not for all that they have."""
    order = []
    gate = trio.Event()

    async def run(function: Callable[[str], Any], text: str) -> Any:
        await gate.wait()
        order.append(text)
        return await _directly(function, text)

    cache = ExpressionCache(run)
    many = [f"a = {number}" for number in range(20)]
    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(cache.prepare, [f"{text} OR b{number} = 1" for text in many], "many")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(cache.prepare, ["one = 1", "one = 2"], "one")
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    assert len(order) == 202
    assert max(order.index("one = 1"), order.index("one = 2")) <= 5, order[:8]
    assert cache._waiting == {}


async def test_a_client_has_a_number_of_expressions_that_wait() -> None:
    gate = trio.Event()

    async def run(function: Callable[[str], Any], text: str) -> Any:
        await gate.wait()
        return await _directly(function, text)

    cache = ExpressionCache(run, 0)
    counts = []

    async def prepare(count: int, start: str, client: str) -> None:
        counts.append(len(await cache.prepare([f"{start}{number} = 1" for number in range(count)], client)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(prepare, MOST_WAITING - 3, "a", "one")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(prepare, 10, "b", "one")
        nursery.start_soon(prepare, 10, "c", "other")
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0):
            await cache.prepare(["x = 1"], "third")
        gate.set()
    assert sorted(counts) == [3, 10, MOST_WAITING - 3]
    assert cache._waiting == {}
    assert len(await cache.prepare([f"d{number} = 1" for number in range(MOST_WAITING)], "one")) == MOST_WAITING


async def test_an_expression_whose_compilation_fails_lets_the_next_one_go_on() -> None:
    async def run(function: Callable[[str], Any], text: str) -> Any:
        if text == "bad":
            raise MemoryError
        return await _directly(function, text)

    cache = ExpressionCache(run)
    with pytest.raises(MemoryError):
        await cache.prepare(["bad", "a = 1"], "c")
    assert isinstance((await cache.prepare(["a = 1"], "c"))["a = 1"], SqlFilter)
    assert cache._waiting == {}


async def test_a_fair_lock_is_held_by_one_task_and_survives_cancelled_ones() -> None:
    lock = FairLock()
    order: list[str] = []
    inside = 0

    async def task(client: str, scope: trio.CancelScope, go: trio.Event) -> None:
        nonlocal inside
        with scope:
            async with lock.turn(client):
                inside += 1
                assert inside == 1
                order.append(client)
                await go.wait()
                inside -= 1

    first, go, scopes = trio.Event(), trio.Event(), [trio.CancelScope() for _ in range(7)]
    go.set()
    async with trio.open_nursery() as nursery:
        for number, (client, event) in enumerate(
            [("a", first), ("b", go), ("b", go), ("b", go), ("c", go), ("d", go), ("a", go)]
        ):
            nursery.start_soon(task, client, scopes[number], event)
            await trio.testing.wait_all_tasks_blocked()
        scopes[2].cancel()  # waits, and another one of its client too
        scopes[5].cancel()  # the only one of its client
        await trio.testing.wait_all_tasks_blocked()
        first.set()
    assert order == ["a", "b", "c", "a", "b"]
    # one that is cancelled when it is its turn passes it on
    hold, scope = trio.Event(), trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task, "a", trio.CancelScope(), hold)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(task, "b", scope, trio.Event())
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(task, "c", trio.CancelScope(), go)
        await trio.testing.wait_all_tasks_blocked()
        hold.set()
        await trio.testing.wait_all_tasks_blocked()
        inside -= 1
        scope.cancel()
    assert order[-3:] == ["a", "b", "c"]
    assert not lock._held
    assert not lock._waiting
