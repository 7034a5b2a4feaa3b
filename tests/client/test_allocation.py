"""The strategies by which members share queues: pure functions and their properties."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.client import MessageQueue, average, circle, consistent_hash, machine_room, sticky
from trimq.client.allocation import Allocation

STRATEGIES: dict[str, Allocation] = {
    "average": average,
    "circle": circle,
    "consistent_hash": consistent_hash,
    "machine_room": machine_room({"x"}),
    "sticky": sticky,
}
EVEN = ("average", "circle", "machine_room", "sticky")


def queues(count: int) -> list[MessageQueue]:
    return [MessageQueue(topic="T", broker_name="x@a", queue_id=number) for number in range(count)]


def numbers(found: list[MessageQueue]) -> list[int]:
    return [queue.queue_id for queue in found]


@pytest.mark.parametrize("name", STRATEGIES)
@given(count=st.integers(0, 40), members=st.integers(1, 12))
def test_every_queue_has_exactly_one_owner(name: str, count: int, members: int) -> None:
    clients = sorted(f"10.0.0.{number}@{number * 7919}" for number in range(members))
    shares = [STRATEGIES[name](client, queues(count), clients) for client in clients]
    assert sorted(queue for share in shares for queue in share) == queues(count)
    if name in EVEN:
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_client_that_is_no_member_gets_nothing(name: str) -> None:
    assert STRATEGIES[name]("stranger", queues(4), ["a", "b"]) == []


@pytest.mark.parametrize(("count", "members", "shares"), [
    (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
    (2, 3, [[0], [1], []]),
    (4, 1, [[0, 1, 2, 3]]),
])  # fmt: skip
def test_average_as_in_java(count: int, members: int, shares: list[list[int]]) -> None:
    clients = [f"c{number}" for number in range(members)]
    assert [numbers(average(client, queues(count), clients)) for client in clients] == shares


def test_machine_room_as_in_java() -> None:
    allocate = machine_room({"x"})
    assert [numbers(allocate(client, queues(5), ["a", "b"])) for client in "ab"] == [[0, 1, 4], [2, 3]]
    far = [MessageQueue(topic="T", broker_name=name, queue_id=0) for name in ("y@a", "x", "x@a@b")]
    assert allocate("a", far, ["a"]) == []


def moved(allocate: Allocation, before: list[str], after: list[str], count: int) -> int:
    def owners(clients: list[str]) -> dict[MessageQueue, str]:
        return {queue: client for client in clients for queue in allocate(client, queues(count), clients)}

    old, new = owners(before), owners(after)
    return sum(old[queue] != new[queue] for queue in old)


@pytest.mark.parametrize("allocate", [sticky, consistent_hash])
@given(members=st.integers(2, 8))
def test_few_queues_move_when_a_member_leaves(allocate: Callable[..., list[MessageQueue]], members: int) -> None:
    clients = sorted(f"c{number}" for number in range(members))
    moves = [moved(allocate, clients, [other for other in clients if other != leaving], 48) for leaving in clients]
    # Of 48 queues, those of the leaving member have to move; average moves about half of all queues.
    assert sum(moves) / len(moves) <= 2.5 * 48 / members
