"""What the crash tests judge by: each kind of broken promise is found."""

import pytest

from tests.crash.ledger import Lane, Reader, find_losses


@pytest.fixture
def lane() -> Lane:
    """Five messages, all acknowledged; two before a kill at second 10, three after it."""
    lane = Lane("T", 1)
    for number in range(5):
        if number == 2:
            lane.killed(10.0)
        assert lane.take() == number
        lane.acknowledge(number, number, 8.0 + number)
    return lane


def read(lane: Lane, *numbers: int) -> Reader:
    reader = Reader(lane)
    for offset, number in enumerate(numbers):
        reader.read(lane.body(number), offset)
    return reader


def test_all_is_well(lane: Lane) -> None:
    assert read(lane, 0, 1, 2, 3, 4).faults == []
    assert find_losses(lane) == (0, 0.0, [])
    assert (lane.acknowledged, lane.seen) == (5, 5)


def test_a_tail_that_a_kill_took(lane: Lane) -> None:
    lane.offsets[2:5] = type(lane.offsets)("q", [1, 2, 3])
    assert read(lane, 0, 2, 3, 4).faults == []
    assert find_losses(lane) == (1, 1.0, [])


def test_a_loss_with_something_behind_it(lane: Lane) -> None:
    read(lane, 1, 2, 3, 4)
    assert find_losses(lane).faults == ["T/1: 0 is missing, and 1 behind it is there"]


def test_a_loss_without_a_kill(lane: Lane) -> None:
    read(lane, 0, 1, 2, 3)
    assert find_losses(lane).faults == ["T/1: 4 is missing, and nobody killed the broker after it"]


def test_order(lane: Lane) -> None:
    faults = read(lane, 1, 0, 2, 3, 4).faults
    assert "T/1: 0 came behind 1" in faults


def test_twice(lane: Lane) -> None:
    assert "T/1: 1 came behind 1" in read(lane, 0, 1, 1, 2).faults


def test_another_offset(lane: Lane) -> None:
    reader = Reader(lane)
    reader.read(lane.body(0), 1)
    assert len(reader.faults) == 2


@pytest.mark.parametrize("body", [b"", b"T-1-0", b"T-1-7:", b"T-2-0:xx", b"T-1-x:", b"T-1-0:0000"])
def test_what_nobody_sent(lane: Lane, body: bytes) -> None:
    reader = Reader(lane)
    reader.read(body, 0)
    assert [fault.endswith("was never sent") for fault in reader.faults] == [True]
