"""The ledger by which the crash tests judge a broker: it detects each kind of broken promise."""

import pytest

from tests.crash.ledger import Reader, Stream, find_losses


@pytest.fixture
def stream() -> Stream:
    """Five acknowledged messages: two before a kill at second 10, three after it."""
    stream = Stream("T", 1)
    for number in range(5):
        if number == 2:
            stream.killed(10.0)
        assert stream.take() == number
        stream.acknowledge(number, number, 8.0 + number)
    return stream


def read(stream: Stream, *numbers: int) -> Reader:
    reader = Reader(stream)
    for offset, number in enumerate(numbers):
        reader.read(stream.body(number), offset)
    return reader


def test_all_is_well(stream: Stream) -> None:
    assert read(stream, 0, 1, 2, 3, 4).faults == []
    assert find_losses(stream) == (0, 0.0, [])
    assert (stream.acknowledged, stream.seen) == (5, 5)


def test_a_tail_that_a_kill_took(stream: Stream) -> None:
    stream.offsets[2:5] = type(stream.offsets)("q", [1, 2, 3])
    assert read(stream, 0, 2, 3, 4).faults == []
    assert find_losses(stream) == (1, 1.0, [])


def test_a_loss_with_something_behind_it(stream: Stream) -> None:
    read(stream, 1, 2, 3, 4)
    assert find_losses(stream).faults == ["T/1: 0 is missing, and 1 after it is stored"]


def test_a_loss_without_a_kill(stream: Stream) -> None:
    read(stream, 0, 1, 2, 3)
    assert find_losses(stream).faults == ["T/1: 4 is missing, and the broker was not killed after it"]


def test_order(stream: Stream) -> None:
    faults = read(stream, 1, 0, 2, 3, 4).faults
    assert "T/1: 0 came after 1" in faults


def test_twice(stream: Stream) -> None:
    assert "T/1: 1 came after 1" in read(stream, 0, 1, 1, 2).faults


def test_another_offset(stream: Stream) -> None:
    reader = Reader(stream)
    reader.read(stream.body(0), 1)
    assert len(reader.faults) == 2


@pytest.mark.parametrize("body", [b"", b"T-1-0", b"T-1-7:", b"T-2-0:xx", b"T-1-x:", b"T-1-0:0000"])
def test_a_body_that_was_never_sent(stream: Stream, body: bytes) -> None:
    reader = Reader(stream)
    reader.read(body, 0)
    assert [fault.endswith("was never sent") for fault in reader.faults] == [True]
