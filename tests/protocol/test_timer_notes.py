"""The notes in timercheck, and what RocketMQ leaves of them."""

import struct
import zlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.timer_layout import TimerCheckpoint, decode_checkpoint, encode_checkpoint
from trimq.protocol.timer_notes import (
    MOST_LEFT,
    NO_NOTES,
    SlotRest,
    TimerNotes,
    decode_notes,
    encode_with_notes,
    rest_of,
)

LONG = st.integers(0, (1 << 63) - 1)
RESTS = st.builds(SlotRest, LONG, LONG, st.lists(LONG, max_size=60).map(tuple))
CHECKPOINT = TimerCheckpoint(*range(1, 8))
NOTES = TimerNotes(52, 7, 1000, 900, 1100, (SlotRest(1000, 900, (100, 300)), SlotRest(2000, 500, ())))


@given(
    st.tuples(*[LONG] * 7), st.builds(TimerNotes, LONG, LONG, LONG, LONG, LONG, st.lists(RESTS, max_size=6).map(tuple))
)
def test_notes_are_encoded_and_decoded(numbers: tuple[int, ...], notes: TimerNotes) -> None:
    checkpoint = TimerCheckpoint(*numbers)
    data = encode_with_notes(checkpoint, notes)
    assert len(data) == 4096
    assert data[:56] == encode_checkpoint(checkpoint)[:56]
    assert decode_checkpoint(data) == checkpoint
    assert decode_notes(data) == notes


def test_without_notes_it_is_rocketmqs_file() -> None:
    data = encode_with_notes(CHECKPOINT, NO_NOTES)
    assert data == encode_checkpoint(CHECKPOINT)
    assert decode_notes(data) == NO_NOTES


@pytest.mark.parametrize("changed", [0, 8, 55, 56, 60, 67, 71, 100, 4095])
def test_notes_of_another_checkpoint_do_not_count(changed: int) -> None:
    data = bytearray(encode_with_notes(CHECKPOINT, NOTES))
    data[changed] ^= 1
    assert decode_notes(bytes(data)) == NO_NOTES


@pytest.mark.parametrize(
    ("at", "number"), [(100, -1), (100, 1), (100, 300), (100, 2**31 - 1), (120, -1), (120, 1), (120, MOST_LEFT)]
)
def test_notes_with_lengths_that_do_not_fit_do_not_count(at: int, number: int) -> None:
    """Their checksum fits all the same."""
    data = bytearray(encode_with_notes(CHECKPOINT, NOTES))
    data[at : at + 4] = number.to_bytes(4, "big", signed=True)
    data[56:60] = zlib.crc32(b"\x01" + data[:56] + data[60:]).to_bytes(4, "big")
    assert decode_notes(bytes(data)) == NO_NOTES


def test_the_places_of_the_notes() -> None:
    """Those of docs/formats/timer.md."""
    data = encode_with_notes(CHECKPOINT, NOTES)
    assert [int.from_bytes(data[at : at + 8], "big") for at in (60, 68, 76, 84, 92)] == [52, 7, 1000, 900, 1100]
    assert int.from_bytes(data[100:104], "big") == 2
    assert struct.unpack_from(">qqiqq qqi", data, 104) == (1000, 900, 2, 100, 300, 2000, 500, 0)


def test_notes_of_another_layout_do_not_count() -> None:
    data = bytearray(encode_with_notes(CHECKPOINT, NOTES))
    data[56:60] = zlib.crc32(b"\x02" + data[:56] + data[60:]).to_bytes(4, "big")
    assert decode_notes(bytes(data)) == NO_NOTES


def test_a_short_file_has_no_notes() -> None:
    assert decode_notes(encode_with_notes(CHECKPOINT, NOTES)[:4095]) == NO_NOTES


@pytest.mark.parametrize("sizes", [(0, MOST_LEFT), (0, MOST_LEFT + 1), (300, 300), (MOST_LEFT, 3), (200, 200, 200)])
def test_rests_that_are_too_long_say_that_more_is_left(sizes: tuple[int, ...]) -> None:
    rests = tuple(SlotRest(time, 10**6, tuple(range(0, 10 * size, 10))) for time, size in enumerate(sizes, 1))
    found = decode_notes(encode_with_notes(CHECKPOINT, TimerNotes(rests=rests))).rests
    assert [one.time for one in found] == list(range(1, 1 + len(found)))
    assert len(found) >= len(rests) - 1
    for rest, kept in zip(rests, found, strict=False):
        assert kept.left == rest.left[: len(kept.left)]
        assert kept.until == (rest.until if kept == rest else rest.left[len(kept.left)])


@given(st.data(), st.integers(1, 60))
def test_the_numbers_of_a_rest(data: st.DataObject, count: int) -> None:
    offsets = array("q", (100 + 10 * number for number in range(count)))
    numbers = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    rest = rest_of(7, offsets, numbers)
    assert list(rest.numbers(offsets)) == numbers
    # Those at the end of the slot need no room.
    tail = next((at for at in range(len(numbers)) if numbers[-1 - at] != count - 1 - at), len(numbers))
    assert len(rest.left) == len(numbers) - tail
    # Messages that came to the slot since are left, as are those whose place in the list has no room.
    offsets.extend([10_000, 10_010])
    assert list(rest.numbers(offsets)) == [*numbers, count, count + 1]
    assert set(rest.shortened(1).numbers(offsets)) >= {*numbers, count, count + 1}


def test_a_rest_with_more_than_there_is_room_for() -> None:
    offsets = range(0, 10_000, 2)
    rest = rest_of(7, offsets, range(0, 3000, 2))
    assert len(rest.left) == MOST_LEFT
    assert list(rest.numbers(offsets)) == [*range(0, 2 * MOST_LEFT, 2), *range(2 * MOST_LEFT, 5000)]


@pytest.mark.parametrize("offsets", [(100, 300, 200, 400), (100, 200, 200, 300), (300, 400, 100, 200)])
def test_a_slot_whose_messages_do_not_rise_is_left_as_a_whole(offsets: tuple[int, ...]) -> None:
    assert list(SlotRest(7, 300, (200,)).numbers(array("q", offsets))) == [0, 1, 2, 3]


def test_a_second_rest_for_which_there_is_no_room_is_left_out() -> None:
    """Then all messages of its slot count as left."""
    rests = (SlotRest(1, 10**6, tuple(range(MOST_LEFT))), SlotRest(2, 500, (100,)))
    assert decode_notes(encode_with_notes(CHECKPOINT, TimerNotes(rests=rests))).rests == rests[:1]
