"""The file of the epochs of a log, and the comparison of two logs by their epochs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.epoch_file import MOST_EPOCHS, Epoch, consistent_point, decode, encode, entry_at

STEPS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), max_size=20)


def rising(steps: list[tuple[int, int]]) -> list[Epoch]:
    entries, number, start = [], 0, 0
    for more, further in steps:
        number, start = number + more, start + further
        entries.append(Epoch(number, start))
    return entries


@given(steps=STEPS)
def test_a_file_is_read_as_it_was_written(steps: list[tuple[int, int]]) -> None:
    entries = rising(steps)
    assert decode(encode(entries)) == entries


def test_the_text_is_rocketmqs() -> None:
    """The example in the documentation of RocketMQ's CheckpointFile, with its checksum."""
    assert encode([Epoch(7, 7000), Epoch(8, 8000)]) == b"2\n773307083\n7-7000\n8-8000\n"


def test_what_rocketmq_accepts_too() -> None:
    assert decode(b"1\n0\n7-7000\n") == [Epoch(7, 7000)]  # a checksum of 0 is not checked
    assert decode(b"2\n773307083\n7-7000\n8-8000") == [Epoch(7, 7000), Epoch(8, 8000)]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "ends before its first entry"),
        (b"2\n773307083", "ends before its first entry"),
        (b"2\n773307084\n7-7000\n8-8000\n", "the checksum of the entries is 773307083, not 773307084"),
        (b"1\n773307083\n7-7000\n8-8000\n", "2 entries, not 1"),
        (b"x\n0\n", "'x' is no number"),
        (b"1\n0\n7 7000\n", "b'7 7000' is no entry"),
        (b"1\n0\n-7-7000\n", "b'' is no number"),
        (b"2\n0\n8-0\n7-10\n", "epoch 7 from 10 on follows epoch 8 from 0 on"),
        (b"2\n0\n7-10\n8-9\n", "epoch 8 from 9 on follows epoch 7 from 10 on"),
        (b"1\n0\n2147483648-0\n", "out of range"),
        (b"%d\n0\n" % (MOST_EPOCHS + 1) + b"".join(b"%d-0\n" % n for n in range(MOST_EPOCHS + 1)), "more than 1000"),
    ],
)
def test_a_damaged_file(data: bytes, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        decode(data)


def test_the_epoch_of_an_offset() -> None:
    entries = [Epoch(1, 10), Epoch(3, 50), Epoch(4, 50)]
    assert entry_at(entries, 9) is None
    assert entry_at(entries, 10) == (Epoch(1, 10), 50)
    assert entry_at(entries, 49) == (Epoch(1, 10), 50)
    assert entry_at(entries, 50) == (Epoch(4, 50), None)
    assert entry_at([], 0) is None


@pytest.mark.parametrize(
    ("mine", "my_end", "theirs", "their_end", "point"),
    [
        ([(1, 0)], 300, [(1, 0)], 500, 300),  # a slave that is behind
        ([(1, 0)], 300, [(1, 0), (2, 200)], 500, 200),  # the end of an old master, which no member had
        ([(1, 0), (2, 100)], 300, [(1, 0), (3, 200)], 200, 100),  # two masters after epoch 1, one with less
        ([(1, 0), (2, 100)], 300, [(1, 0), (2, 150)], 400, 100),
        ([(1, 0), (2, 100)], 100, [(1, 0), (3, 100)], 400, 100),  # an epoch without records
        ([(2, 100)], 300, [(1, 0), (2, 100), (3, 400)], 500, 300),  # the first files have expired here
        ([(1, 0), (2, 100)], 300, [(2, 100), (3, 400)], 500, 300),  # and there
        ([(1, 0)], 300, [(2, 0)], 500, None),
        ([], 300, [(1, 0)], 500, None),
        ([(1, 0)], 300, [], 0, None),
    ],
)
def test_where_two_logs_part(
    mine: list[tuple[int, int]], my_end: int, theirs: list[tuple[int, int]], their_end: int, point: int | None
) -> None:
    here, there = [Epoch(*pair) for pair in mine], [Epoch(*pair) for pair in theirs]
    assert consistent_point(here, my_end, there, their_end) == point
    assert consistent_point(there, their_end, here, my_end) == point


@given(common=STEPS, mine=STEPS, theirs=STEPS, sizes=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_two_logs_are_never_the_same_behind_the_point(
    common: list[tuple[int, int]],
    mine: list[tuple[int, int]],
    theirs: list[tuple[int, int]],
    sizes: tuple[int, int],
) -> None:
    """Bytes are named by the epoch that wrote them: what both call the same must be in both logs."""
    base = rising([(1, 0), *common])
    # Each epoch has one master: those of the two sides have odd and even numbers.
    here = [*base, *(Epoch(2 * n + 1000, base[-1].start + s) for n, s in rising(mine))]
    there = [*base, *(Epoch(2 * n + 1001, base[-1].start + s) for n, s in rising(theirs))]
    ends = here[-1].start + sizes[0], there[-1].start + sizes[1]
    point = consistent_point(here, ends[0], there, ends[1])
    assert point is not None
    assert point <= min(ends)
    for offset in range(0, point, max(1, point // 50)):
        assert entry_at(here, offset)[0] == entry_at(there, offset)[0]  # type: ignore[index]
