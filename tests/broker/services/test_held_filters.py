"""Held pulls whose filter needs properties: which messages answer them, and that a burst is evaluated in slices."""

import trio
import trio.testing

from tests.broker.services.fakes import FakeConnection
from tests.broker.services.test_long_polling import Tags, World
from trimq.broker.services.long_polling import PullRequest
from trimq.protocol.sql92.cost import AT_ONCE as SLICE


class Wants:
    """Accepts messages whose properties contain a text. Counts its evaluations."""

    needs_properties = True

    def __init__(self, wanted: bytes, terms: int = 1) -> None:
        self.wanted = wanted
        self.terms = terms
        self.evaluated: list[bytes] = []

    def match_tags(self, _tags_code: int) -> bool:
        return True

    def match_record(self, properties: bytes) -> bool:
        self.evaluated.append(properties)
        if properties == b"broken":
            raise ZeroDivisionError
        return self.wanted in properties


class Held(World):
    """Pulls held on queue 0 of topic T, whose messages have the properties in ``stored``; None is not in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[bytes | None] = []
        self.looks = 0
        self.holds.filters.look = self._look

    def _look(self, topic: str, queue_id: int, offset: int) -> bytes | None:
        assert queue_id in (0, 1)
        self.looks += 1
        return self.stored[offset] if topic == "T" else b"u"

    def wants(self, text: bytes, *, offset: int = 0, topic: str = "T", queue_id: int = 0) -> PullRequest:
        made = self.hold(FakeConnection(), offset=offset, topic=topic, queue_id=queue_id, tags=Wants(text))  # type: ignore[arg-type]
        assert made is not None
        return made

    def put(self, *properties: bytes | None) -> None:
        for each in properties:
            self.stored.append(each)
            self.arrive(next_offset=len(self.stored))


def evaluated(pull: PullRequest) -> list[bytes]:
    assert isinstance(pull.filter, Wants)
    return pull.filter.evaluated


def test_only_messages_that_it_accepts_wake_a_pull() -> None:
    world = Held()
    red, green = world.wants(b"red"), world.wants(b"green")
    by_tag = world.hold(tags=Tags(7))
    world.put(b"blue", b"red")
    assert evaluated(red) == [], "not while messages are dispatched"
    assert world.take() == [red]
    assert evaluated(green) == [b"blue", b"red"]
    world.put(b"blue")
    assert world.take() == []
    assert evaluated(green) == [b"blue", b"red", b"blue"], "each message once"
    world.put(b"green, red")
    assert world.take() == [green]
    assert world.holds.held == 1
    world.arrive(next_offset=5, tags=7)
    assert world.take() == [by_tag]
    assert world.empty()


def test_messages_before_its_offset_are_not_evaluated() -> None:
    world = Held()
    world.put(b"red", b"red")
    pull = world.wants(b"red", offset=2)
    world.arrive(next_offset=2)
    assert not world.holds.filters.is_pending
    world.put(b"red")
    assert world.take() == [pull]
    assert evaluated(pull) == [b"red"]


def test_what_is_not_in_memory_or_fails_is_left_to_the_pull() -> None:
    world = Held()
    pull, later = world.wants(b"red"), world.wants(b"red", offset=1)
    world.put(None)
    assert world.take() == [pull]
    assert evaluated(pull) == []
    world.put(b"broken")
    assert world.take() == [later]


def test_a_burst_is_evaluated_in_slices() -> None:
    world = Held()
    pulls = [world.wants(b"red") for _ in range(3)]
    count = 2 * SLICE
    world.put(*[b"blue"] * count, b"red")
    slices = 0
    while world.holds.filters.is_pending:
        before = [len(evaluated(pull)) for pull in pulls]
        served = world.take()
        slices += 1
        done = [len(evaluated(pull)) for pull in pulls]
        assert sum(done) - sum(before) <= SLICE
        assert world.looks <= slices * SLICE
        if world.holds.filters.is_pending:
            assert served == [] or max(done) == count + 1
    assert slices >= 6
    assert [len(evaluated(pull)) for pull in pulls] == [count + 1] * 3, "each message once for each pull"
    assert world.empty()


def test_a_slice_has_few_evaluations_where_one_takes_long() -> None:
    """Long properties, and an expression with many conditions."""
    world = Held()
    pull = world.hold(tags=Wants(b"red", 256))  # type: ignore[arg-type]
    assert pull is not None
    world.put(*[b"blue" * 1000] * 20, b"red")
    last = slices = 0
    while world.holds.filters.is_pending:
        world.take()
        slices += 1
        assert len(evaluated(pull)) - last <= 1
        last = len(evaluated(pull))
    assert (last, slices) == (21, 21)


def test_queues_take_turns() -> None:
    world = Held()
    world.wants(b"red")
    other = world.wants(b"u", topic="U", queue_id=1)
    world.put(*[b"blue"] * (10 * SLICE))
    world.arrive("U", 1)
    assert world.take() == []
    assert world.take() == [other]
    assert world.holds.filters.is_pending


def test_a_pull_that_is_gone_is_not_evaluated() -> None:
    world = Held()
    connection = FakeConnection()
    pull = world.hold(connection, tags=Wants(b"red"))  # type: ignore[arg-type]
    assert pull is not None
    world.put(b"red")
    connection.close("gone")
    assert world.take() == []
    assert evaluated(pull) == []
    assert not world.holds.filters.is_pending
    assert world.empty()


def test_its_time_runs_out_while_messages_wait_to_be_evaluated() -> None:
    world = Held()
    pull = world.wants(b"red")
    world.put(*[b"blue"] * (2 * SLICE))
    assert world.take() == []
    world.clock.advance(20)
    world.holds.expire()
    assert world.take() == [pull]
    assert not world.holds.filters.is_pending


async def test_outside_of_a_round_the_service_evaluates_by_itself() -> None:
    world = Held()
    world.holds.in_round = lambda: False
    async with trio.open_nursery() as nursery:
        await nursery.start(world.holds.run)
        pull = world.wants(b"red")
        world.put(*[b"blue"] * (5 * SLICE), b"red")
        await trio.testing.wait_all_tasks_blocked()
        assert world.served == [pull]
        assert len(evaluated(pull)) == 5 * SLICE + 1
        nursery.cancel_scope.cancel()


async def test_the_rest_of_a_burst_is_evaluated_by_the_service() -> None:
    world = Held()
    async with trio.open_nursery() as nursery:
        await nursery.start(world.holds.run)
        pull = world.wants(b"red")
        world.put(*[b"blue"] * (5 * SLICE), b"red")
        world.holds.serve_woken()
        assert world.served == []
        await trio.testing.wait_all_tasks_blocked()
        assert world.served == [pull]
        nursery.cancel_scope.cancel()
