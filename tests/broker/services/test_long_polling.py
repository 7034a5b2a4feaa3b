from typing import Any

import trio
import trio.testing

from tests.broker.services.fakes import FakeConnection, configuration
from trimq.broker.services.long_polling import LONGEST_HOLD_MS, PullRequest, PullRequestHoldService
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.pull import PullMessageRequestHeader
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import ManualClock


class Tags:
    needs_properties = False
    terms = 0

    def __init__(self, *wanted: int) -> None:
        self.wanted = wanted

    def match_tags(self, tags_code: int) -> bool:
        return tags_code in self.wanted

    def match_record(self, properties: bytes) -> bool:
        raise AssertionError


class World:
    def __init__(self, config: Configuration | None = None) -> None:
        self.clock = ManualClock()
        self.holds = PullRequestHoldService(config or configuration(), self.clock)
        self.served: list[PullRequest] = []
        self.holds.again = self.served.append
        self.holds.in_round = lambda: True

    def hold(
        self,
        connection: FakeConnection | None = None,
        *,
        topic: str = "T",
        queue_id: int = 0,
        offset: int = 0,
        tags: Tags | None = None,
        ms: int = 15_000,
    ) -> PullRequest | None:
        header = PullMessageRequestHeader(
            consumer_group="G", topic=topic, queue_id=queue_id, queue_offset=offset, max_msg_nums=32, sys_flag=2,
            commit_offset=0, suspend_timeout_millis=ms, sub_version=0,
        )  # fmt: skip
        command = RemotingCommand.request(RequestCode.PULL_MESSAGE)
        request = PullRequest((connection or FakeConnection()).real, command, header, topic, queue_id, offset, tags)
        return request if self.holds.hold(request, ms) else None

    def arrive(self, topic: str = "T", queue_id: int = 0, next_offset: int = 1, tags: int = 0) -> None:
        self.holds.notify_arriving(topic, queue_id, next_offset, tags, 0)

    def take(self) -> list[PullRequest]:
        self.holds.serve_woken()
        served, self.served[:] = list(self.served), []
        return served

    def empty(self) -> bool:
        holds = self.holds
        return not (holds.held or holds._queues or holds._buckets)


def test_a_message_wakes_the_pulls_of_its_queue() -> None:
    world = World()
    first, second = world.hold(), world.hold()
    other_queue, other_topic = world.hold(queue_id=1), world.hold(topic="U")
    assert world.holds.held == 4
    assert world.holds.held_by_queue("T", 0) == 2
    world.arrive()
    assert world.served == []
    assert world.take() == [first, second]
    assert world.take() == []
    world.arrive(queue_id=1)
    world.arrive(topic="U")
    assert world.take() == [other_queue, other_topic]
    assert world.empty()


def test_only_messages_at_or_after_its_offset_wake_a_pull() -> None:
    world = World()
    request = world.hold(offset=5)
    world.arrive(next_offset=5)
    assert world.take() == []
    world.arrive(next_offset=6)
    assert world.take() == [request]


def test_only_messages_with_its_tags_wake_a_pull() -> None:
    world = World()
    request = world.hold(tags=Tags(7))
    world.arrive(tags=8)
    assert world.take() == []
    world.arrive(tags=7, next_offset=2)
    assert world.take() == [request]


async def test_its_time_runs_out() -> None:
    world = World()
    early, late = world.hold(ms=1000), world.hold(ms=15_000)
    world.holds.in_round = lambda: False
    async with trio.open_nursery() as nursery:
        await nursery.start(world.holds.run)
        served_at: dict[int, float] = {}
        start = world.clock.monotonic()
        for _ in range(160):
            await trio.testing.wait_all_tasks_blocked()
            for request in world.take():
                served_at[id(request)] = world.clock.monotonic() - start
            world.clock.advance(0.1)
        nursery.cancel_scope.cancel()
    assert 1.0 <= served_at[id(early)] <= 1.5
    assert 15.0 <= served_at[id(late)] <= 15.5
    assert world.empty()


async def test_nothing_held_is_nothing_to_do() -> None:
    world = World()
    async with trio.open_nursery() as nursery:
        await nursery.start(world.holds.run)
        await trio.testing.wait_all_tasks_blocked()
        assert world.clock.sleeping == 0
        world.hold()
        await trio.testing.wait_all_tasks_blocked()
        assert world.clock.sleeping == 1
        nursery.cancel_scope.cancel()


async def test_outside_of_a_round_the_service_serves_by_itself() -> None:
    world = World()
    world.holds.in_round = lambda: False
    async with trio.open_nursery() as nursery:
        await nursery.start(world.holds.run)
        request = world.hold()
        world.arrive()
        await trio.testing.wait_all_tasks_blocked()
        assert world.served == [request]
        nursery.cancel_scope.cancel()


def test_a_closed_connection_takes_its_pulls_along() -> None:
    world, connection = World(), FakeConnection()
    world.hold(connection)
    world.hold(connection, queue_id=1)
    kept = world.hold()
    connection.close("gone")
    assert world.holds.held == 1
    assert world.hold(connection) is None
    world.arrive()
    assert world.take() == [kept]
    assert world.empty()


def test_a_pull_whose_connection_closes_after_it_was_woken_is_not_served() -> None:
    world, connection = World(), FakeConnection()
    world.hold(connection)
    world.arrive()
    connection.close("gone")
    assert world.take() == []


def test_a_pull_that_is_served_can_be_held_again() -> None:
    world, connection = World(), FakeConnection()
    for offset in range(3):
        request = world.hold(connection, offset=offset)
        world.arrive(next_offset=offset + 1)
        assert world.take() == [request]
    assert len(connection.on_close) == 1
    assert world.empty()


def test_a_pull_that_is_held_while_others_are_served_waits() -> None:
    world = World()
    again: list[PullRequest | None] = []
    world.holds.again = lambda request: again.append(world.hold(offset=9))
    world.hold()
    world.arrive()
    world.holds.serve_woken()
    assert len(again) == 1
    assert world.holds.held == 1


def test_there_is_a_limit() -> None:
    world = World(configuration(maxHeldRequests=2))
    assert world.hold()
    assert world.hold()
    assert world.hold() is None
    assert world.holds.refused == 1
    world.arrive()
    world.take()
    assert world.hold()


def test_the_time_a_pull_is_held_is_bounded() -> None:
    world = World()
    world.hold(ms=10**12)
    world.clock.advance(LONGEST_HOLD_MS / 1000 + 0.2)
    world.holds.expire()
    assert len(world.take()) == 1


def test_negative_times_run_out_at_once() -> None:
    world = World()
    world.hold(ms=-5)
    world.clock.advance(0.2)
    world.holds.expire()
    assert len(world.take()) == 1


def test_without_long_polling_a_pull_waits_a_second() -> None:
    world = World(configuration(longPollingEnable=False))
    world.hold(ms=15_000)
    world.clock.advance(1.2)
    world.holds.expire()
    assert len(world.take()) == 1


def test_a_topic_and_all_can_be_woken() -> None:
    world = World()
    first, second, other = world.hold(), world.hold(queue_id=3), world.hold(topic="U")
    world.holds.wake_topic("T")
    assert world.take() == [first, second]
    world.holds.wake_all()
    assert world.take() == [other]
    assert world.empty()


def test_an_error_is_an_answer_and_the_others_are_served() -> None:
    world, refused, broken = World(), FakeConnection(), FakeConnection()
    errors: dict[Any, Exception] = {
        refused.real: RemotingError(ResponseCode.NO_PERMISSION, "no"),
        broken.real: ValueError("oops"),
    }
    served = world.served

    def again(request: PullRequest) -> None:
        if request.connection in errors:
            raise errors[request.connection]
        served.append(request)

    world.holds.again = again
    world.hold(refused)
    world.hold(broken)
    good = world.hold()
    world.arrive()
    assert world.take() == [good]
    assert [reply.code for _, reply in refused.settled] == [ResponseCode.NO_PERMISSION]
    assert [(reply.code, reply.remark) for _, reply in broken.settled] == [(1, "ValueError: oops")]


async def test_a_pull_is_not_answered_while_its_client_takes_nothing() -> None:
    """Guards the high-water mark against held pulls: a message wakes them all, and each causes a reply."""
    world, slow, quick = World(), FakeConnection("slow"), FakeConnection("quick")
    waits, goes = world.hold(slow), world.hold(quick)
    slow.over = True
    world.arrive()
    assert world.take() == [goes]
    slow.drain()
    assert world.take() == [waits]
    assert world.take() == []
