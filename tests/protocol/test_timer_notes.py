"""The notes in timercheck, and what RocketMQ leaves of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.timer_layout import TimerCheckpoint, decode_checkpoint, encode_checkpoint
from trimq.protocol.timer_notes import NO_NOTES, TimerNotes, decode_notes, encode_with_notes

LONG = st.integers(0, (1 << 63) - 1)
CHECKPOINT = TimerCheckpoint(*range(1, 8))


@given(st.tuples(*[LONG] * 7), LONG)
def test_notes_are_encoded_and_decoded(numbers: tuple[int, ...], log_begin: int) -> None:
    checkpoint, notes = TimerCheckpoint(*numbers), TimerNotes(log_begin)
    data = encode_with_notes(checkpoint, notes)
    assert len(data) == 4096
    assert data[:56] == encode_checkpoint(checkpoint)[:56]
    assert decode_checkpoint(data) == checkpoint
    assert decode_notes(data) == notes


def test_without_notes_it_is_rocketmqs_file() -> None:
    data = encode_with_notes(CHECKPOINT, NO_NOTES)
    assert data == encode_checkpoint(CHECKPOINT)
    assert decode_notes(data) == NO_NOTES


@pytest.mark.parametrize("changed", [0, 8, 55, 56, 60, 67])
def test_notes_of_another_checkpoint_do_not_count(changed: int) -> None:
    data = bytearray(encode_with_notes(CHECKPOINT, TimerNotes(52)))
    data[changed] ^= 1
    assert decode_notes(bytes(data)) == NO_NOTES


def test_a_short_file_has_no_notes() -> None:
    assert decode_notes(encode_with_notes(CHECKPOINT, TimerNotes(52))[:4095]) == NO_NOTES
