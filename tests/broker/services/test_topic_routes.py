from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.broker.services.fakes import configuration
from tests.store.simdisk import SimDisk
from trimq.broker.services import topic_routes
from trimq.broker.services.registration import BrokerOuterAPI
from trimq.broker.services.topic_routes import QueueRoute, TopicRouteInfoManager
from trimq.broker.services.topics import TopicConfigManager
from trimq.protocol.body import MessageQueue, QueueData, TopicRouteData, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.remoting.errors import RemotingConnectError
from trimq.remoting.runtime.clock import ManualClock


class NameServers:
    """Name servers with one table of routes. One that is down refuses connections."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.queues: dict[str, list[QueueData]] = {}
        self.asked: list[tuple[str, str]] = []
        self.hold: trio.Event | None = None
        self.code: int = ResponseCode.SUCCESS

    async def invoke(self, address: str, command: RemotingCommand, timeout: float) -> RemotingCommand:
        assert command.code == RequestCode.GET_ROUTEINFO_BY_TOPIC
        topic = command.ext_fields()["topic"]
        self.asked.append((address, topic))
        await trio.lowlevel.checkpoint()
        if self.hold is not None:
            await self.hold.wait()
        if address in self.down:
            raise RemotingConnectError(address, ConnectionRefusedError())
        if self.code:
            return command.reply(self.code, "no")
        if topic not in self.queues:
            return command.reply(ResponseCode.TOPIC_NOT_EXIST, "no route")
        return command.reply(body=encode_json(TopicRouteData(queue_datas=self.queues[topic])))


class World:
    def __init__(self, *addresses: str, **config: Any) -> None:
        self.clock = ManualClock()
        self.config = configuration(**config)
        self.servers = NameServers()
        topics = TopicConfigManager(self.config, SimDisk(), self.clock)
        api = BrokerOuterAPI(self.config, self.servers, topics, self.clock, addresses=addresses)
        self.routes = TopicRouteInfoManager(self.config, api, self.clock)


def on(broker: str, queues: int, perm: int = 6) -> QueueData:
    return QueueData(broker_name=broker, read_queue_nums=queues, write_queue_nums=1, perm=perm)


async def test_a_route_has_the_readable_queues_in_their_order() -> None:
    world = World("ns:1")
    world.servers.queues["T"] = [on("b", 2), on("c", 4, perm=2), on("a", 3, perm=4), on("d", 0)]
    assert world.routes.known("T") == (False, None)
    route = await world.routes.find("T")
    assert route == QueueRoute("T", (("a", 3), ("b", 2)))
    assert route.total == 5
    assert world.routes.known("T") == (True, route)
    assert await world.routes.find("T") is route
    assert world.servers.asked == [("ns:1", "T")]


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_a_range_of_queues_is_what_a_list_has_there(counts: list[int], data: st.DataObject) -> None:
    route = QueueRoute("T", tuple((f"b{number}", count) for number, count in enumerate(counts)))
    every = [
        MessageQueue(topic="T", broker_name=f"b{number}", queue_id=queue)
        for number, count in enumerate(counts)
        for queue in range(count)
    ]
    assert every == sorted(every)
    start = data.draw(st.integers(0, len(every)))
    numbers = range(start, data.draw(st.integers(start, len(every))), data.draw(st.integers(1, 7)))
    assert list(route.queues(numbers)) == [every[number] for number in numbers]


async def test_a_route_is_used_for_its_interval_and_then_asked_for_again() -> None:
    world = World("ns:1", loadBalancePollNameServerInterval=30_000)
    world.servers.queues["T"] = [on("a", 1)]
    await world.routes.find("T")
    world.servers.queues["T"] = [on("a", 2)]
    world.clock.advance(29.9)
    assert world.routes.known("T")[0]
    world.clock.advance(0.2)
    assert not world.routes.known("T")[0]
    assert await world.routes.find("T") == QueueRoute("T", (("a", 2),))


async def test_an_old_route_is_used_while_no_name_server_answers() -> None:
    world = World("ns:1", "ns:2")
    world.servers.queues["T"] = [on("a", 1)]
    route = await world.routes.find("T")
    assert len(world.servers.asked) == 1
    world.clock.advance(31)
    world.servers.down = {"ns:1"}
    assert await world.routes.find("T") == route  # the other one answers
    world.clock.advance(31)
    world.servers.down = {"ns:1", "ns:2"}
    assert await world.routes.find("T") == route
    asked = len(world.servers.asked)
    assert await world.routes.find("T") == route  # not asked again for the next second
    assert len(world.servers.asked) == asked
    world.servers.down = set()
    world.servers.queues["T"] = [on("a", 2)]
    world.clock.advance(1.1)
    assert await world.routes.find("T") == QueueRoute("T", (("a", 2),))


async def test_failures_are_logged_within_a_budget() -> None:
    world = World("ns:1")
    world.servers.down = {"ns:1"}
    with capture_logs() as logs:
        for number in range(100):
            assert await world.routes.find(f"T{number}") is None
    assert 0 < len([entry for entry in logs if entry["event"] == "route_not_fetched"]) <= 20


async def test_an_unknown_topic_is_asked_about_once_a_second() -> None:
    world = World("ns:1")
    assert await world.routes.find("T") is None
    assert world.routes.known("T") == (True, None)
    world.servers.queues["T"] = [on("a", 1)]
    assert await world.routes.find("T") is None
    world.clock.advance(1.1)
    assert await world.routes.find("T") is not None
    world.clock.advance(31)
    del world.servers.queues["T"]
    assert await world.routes.find("T") is None  # deleted: the old route is not used on


@pytest.mark.parametrize("servers", [(), ("ns:1",)])
async def test_errors_of_name_servers(servers: tuple[str, ...]) -> None:
    world = World(*servers)
    world.servers.code = ResponseCode.SYSTEM_ERROR
    assert await world.routes.find("T") is None


async def test_one_question_for_a_topic_and_a_bounded_number_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_routes, "MAX_QUESTIONS", 2)
    world = World("ns:1")
    world.servers.queues = {name: [on("a", 1)] for name in "TUV"}
    await world.routes.find("V")
    world.clock.advance(31)
    world.servers.hold = trio.Event()
    found: dict[str, list[QueueRoute | None]] = {}

    async def find(topic: str) -> None:
        route = await world.routes.find(topic)
        found.setdefault(topic, []).append(route)

    async with trio.open_nursery() as nursery:
        for topic in "TUTU":
            nursery.start_soon(find, topic)
        await trio.testing.wait_all_tasks_blocked()
        assert len(world.servers.asked) == 3
        assert await world.routes.find("W") is None  # unknown for now
        assert await world.routes.find("V") == QueueRoute("V", (("a", 1),))  # the old one
        assert not found
        world.servers.hold.set()
    assert found == {topic: [QueueRoute(topic, (("a", 1),))] * 2 for topic in "TU"}
    assert len(world.servers.asked) == 3


async def test_a_question_that_is_cancelled_does_not_stop_the_others() -> None:
    world = World("ns:1")
    world.servers.queues["T"] = [on("a", 1)]
    world.servers.hold = trio.Event()
    found: list[QueueRoute | None] = []

    async def find(scope: trio.CancelScope) -> None:
        with scope:
            found.append(await world.routes.find("T"))

    async with trio.open_nursery() as nursery:
        scopes = [trio.CancelScope(), trio.CancelScope()]
        for scope in scopes:
            nursery.start_soon(find, scope)
            await trio.testing.wait_all_tasks_blocked()
        assert len(world.servers.asked) == 1
        scopes[0].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert len(world.servers.asked) == 2
        assert not found
        world.servers.hold.set()
    assert found == [QueueRoute("T", (("a", 1),))]


async def test_routes_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_routes, "MAX_ROUTES", 3)
    world = World("ns:1")
    for number in range(10):
        await world.routes.find(f"T{number}")
        assert len(world.routes._entries) <= 3
    assert set(world.routes._entries) == {"T7", "T8", "T9"}
