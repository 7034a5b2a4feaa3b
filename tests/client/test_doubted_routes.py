"""A broker that does not answer as a master does: its routes are queried at once, not with the next regular refresh."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
import trio
import trio.testing

from trimq.client import NoPermissionError, TopicNotFoundError, UnreachableError, routes
from trimq.client.routes import RouteCache, TopicRoute
from trimq.protocol.body import BrokerData, QueueData, TopicRouteData

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]


def route(**addresses: str) -> TopicRouteData:
    """The route of a topic on one broker; keys are ids with a letter in front."""
    return TopicRouteData(
        queue_datas=[QueueData(broker_name="g", read_queue_nums=1, write_queue_nums=1, perm=6)],
        broker_datas=[
            BrokerData(broker_name="g", cluster="C", broker_addrs={key[1:]: found for key, found in addresses.items()})
        ],
    )


class NameServer:
    """Answers with ``routes``; counts what it was asked for."""

    def __init__(self, **routes: TopicRouteData) -> None:
        self.routes = routes
        self.asked: list[str] = []
        self.is_down = False
        self.denied = ""
        self.cache = RouteCache(self.fetch, self.any_broker)

    async def fetch(self, topic: str) -> TopicRouteData | None:
        self.asked.append(topic)
        if self.is_down:
            raise UnreachableError("no name server answers")
        if topic == self.denied:
            raise NoPermissionError("no matched policies.", code=16)
        return self.routes.get(topic)

    async def any_broker(self) -> bool:
        return True

    async def until(self, count: int) -> None:
        with anyio.fail_after(20):
            while len(self.asked) < count:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.01)


@asynccontextmanager
async def looking(**known: TopicRouteData) -> AsyncIterator[NameServer]:
    """A name server with routes that the cache knows, and a cache that looks at them again when they are doubted."""
    names = NameServer(**known)
    for topic in known:
        await names.cache.refresh(topic)
    names.asked.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(names.cache.look_again)
        yield names
        tasks.cancel_scope.cancel()


async def test_only_the_routes_of_the_broker_are_queried() -> None:
    async with looking(T=route(_0="a:1", _1="b:1"), Other=route(_0="c:1")) as names:
        names.routes["T"] = route(_0="b:1")
        names.cache.doubt("a:1")
        await names.until(1)
        known = names.cache.known("T")
        assert known is not None
        assert known.master("g") == "b:1"
        assert names.asked == ["T"]


async def test_it_is_queried_again_while_there_is_no_master_and_no_name_server() -> None:
    async with looking(T=route(_0="a:1")) as names:
        names.is_down = True
        names.cache.doubt("a:1")
        await names.until(1)
        names.is_down, names.routes["T"] = False, route(_1="b:1")
        names.cache.doubt("a:1")
        await names.until(2)
        names.routes["T"] = route(_0="b:1")
        names.cache.doubt("")  # a send that found no master
        await names.until(3)
        known = names.cache.known("T")
        assert known is not None
        assert known.master("g") == "b:1"


async def test_a_topic_that_may_not_be_queried_does_not_keep_others_from_it() -> None:
    async with looking(Denied=route(_0="a:1"), T=route(_0="a:1")) as names:
        names.denied = "Denied"
        names.cache.doubt("a:1")
        await names.until(2)
        assert names.asked == ["Denied", "T"]


async def test_many_failures_make_few_queries() -> None:
    async with looking(T=route(_0="a:1")) as names:
        with anyio.move_on_after(1.0):
            while True:
                names.cache.doubt("a:1")
                await anyio.sleep(0.001)
        assert 1 <= len(names.asked) <= 4


async def test_it_is_queried_again_until_the_routes_name_another_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one failure: the new master may take seconds, and a consumer that pauses does not ask meanwhile."""
    monkeypatch.setattr(routes, "_LOOK_AGAIN", 0.01)
    async with looking(T=route(_0="a:1")) as names:
        names.cache.doubt("a:1")
        await names.until(3)
        names.routes["T"] = route(_0="b:1")
        while names.cache._doubted:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.01)
        asked = len(names.asked)
        await anyio.sleep(0.1)
        assert len(names.asked) == asked


async def test_many_topics_are_queried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_LOOK_AGAIN", 0.01)
    monkeypatch.setattr(routes, "_MOST_DOUBTED", 4)
    names = NameServer(**{f"T{number}": route(_0="a:1") for number in range(10)})
    for topic in names.routes:
        await names.cache.refresh(topic)
    del names.routes["T0"]  # deleted: the others are queried all the same
    del names.cache._routes["T1"]
    names.asked.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(names.cache.look_again)
        names.cache.doubt("a:1")
        await names.until(9)
        assert set(names.asked) == {f"T{number}" for number in range(10)} - {"T1"}
        tasks.cancel_scope.cancel()


def virtually(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_doubt_ends_after_a_while() -> None:
    async def doubts() -> None:
        async with looking(T=route(_0="a:1")) as names:
            for _ in range(2):
                names.cache.doubt("a:1")
                await anyio.sleep(10)
                assert names.cache._doubted
                assert "T" in names.asked
                await anyio.sleep(60)
                assert not names.cache._doubted
                names.asked.clear()

    virtually(doubts)


def test_an_outage_that_lasts_makes_few_queries_and_hides_no_other_failure() -> None:
    """Many topics without a master, which a consumer doubts again and again."""

    async def outage() -> None:
        names = NameServer(**{f"T{number}": route(_1="b:1") for number in range(500)}, Other=route(_0="c:1"))
        for topic in names.routes:
            await names.cache.refresh(topic)

        async def consumer() -> None:
            while True:
                names.cache.doubt("")
                await anyio.sleep(5)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(names.cache.look_again)
            tasks.start_soon(consumer)
            names.cache.doubt("once:1")
            names.asked.clear()
            await anyio.sleep(15)
            assert len(names.asked) >= 15 * 200  # one that is short is over soon
            await anyio.sleep(30)
            names.asked.clear()
            await anyio.sleep(100)
            assert 0 < len(names.asked) <= 14 * 200
            names.asked.clear()
            await names.until(200)  # the long pause has just begun
            names.cache.doubt("c:1")
            await anyio.sleep(5)
            assert len(names.asked) >= 5 * 200
            assert "Other" in names.asked
            assert names.cache._suspects.keys() == {"", "c:1"}
            for topic in names.routes:  # the outage is over
                names.routes[topic] = route(_0="d:1")
            await anyio.sleep(60)
            for topic in names.routes:  # another one begins
                names.routes[topic] = route(_1="d:1")
                await names.cache.refresh(topic)
            names.asked.clear()
            await anyio.sleep(14)
            assert len(names.asked) >= 11 * 200
            tasks.cancel_scope.cancel()

    virtually(outage)


def test_one_that_was_doubted_lately_is_not_looked_for_as_often() -> None:
    async def doubts() -> None:
        names = NameServer(T=route(_0="a:1"))
        await names.cache.refresh("T")
        names.asked.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(names.cache.look_again)
            names.cache.doubt("a:1")
            await anyio.sleep(20)
            first = len(names.asked)
            assert first >= 15
            names.cache.doubt("a:1")
            await anyio.sleep(60)
            assert 5 <= len(names.asked) - first <= 12
            before = len(names.asked)
            names.cache.doubt("a:1")
            await anyio.sleep(20)
            assert len(names.asked) - before >= 15
            tasks.cancel_scope.cancel()

    virtually(doubts)


async def test_a_topic_that_is_not_found_and_a_callback_that_fails_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_LOOK_AGAIN", 0.01)
    names = NameServer(T=route(_0="a:1"), U=route(_0="a:1"))
    for topic in ("T", "U"):
        await names.cache.refresh(topic)
    names.asked.clear()
    refresh = names.cache.refresh

    async def missing(topic: str) -> TopicRoute:
        if topic == "T":
            names.asked.append(topic)
            raise TopicNotFoundError("gone")
        return await refresh(topic)

    def fails(_route: TopicRoute) -> None:
        raise ValueError("a defect of a callback")

    monkeypatch.setattr(names.cache, "refresh", missing)
    names.cache.on_change.append(fails)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(names.cache.look_again)
        names.cache.doubt("a:1")
        await names.until(2)
        assert names.asked[:2] == ["T", "U"]
        names.routes["U"] = route(_0="a:1", _1="b:1")
        await names.until(8)
        tasks.cancel_scope.cancel()


async def test_a_pause_ends_with_another_route() -> None:
    names = NameServer(T=route(_0="a:1"), U=route(_0="a:1"))
    tried = await names.cache.refresh("T")
    ended = anyio.Event()

    async def pause() -> None:
        await names.cache.differs("T", tried)
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pause)
        await anyio.wait_all_tasks_blocked()
        await names.cache.refresh("U")
        await names.cache.refresh("T")
        await anyio.wait_all_tasks_blocked()
        assert not ended.is_set()
        names.routes["T"] = route(_0="b:1")
        await names.cache.refresh("T")
        with anyio.fail_after(20):
            await ended.wait()
