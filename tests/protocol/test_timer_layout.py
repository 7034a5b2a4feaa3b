"""Layouts of the timer's files, the recall handle, and the properties of timed messages."""

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol import timer_layout as layout
from trimq.protocol.property_text import decode_properties, join_properties
from trimq.protocol.recall_handle import RecallHandle, RecallHandleError, decode_handle, encode_handle
from trimq.protocol.record import MAX_PROPERTIES
from trimq.protocol.timer_layout import TimerCheckpoint, TimerUnit
from trimq.protocol.timer_message import (
    TimerTextError,
    deliver_time,
    due_time,
    restored_text,
    rolled_text,
)

LONG = st.integers(0, 2**62)
INT = st.integers(-(2**31), 2**31 - 1)
NAME = st.text("abcXYZ0189-_%|", min_size=1, max_size=40)

UNITS = st.builds(
    lambda previous, magic, write, delay, offset, size, topic: TimerUnit(
        previous, magic, write, write + delay, offset, size, topic
    ),
    st.integers(-1, 2**62),
    st.integers(1, 7),
    LONG,
    st.integers(0, 2**31 - 1),
    LONG,
    st.integers(1, 2**31 - 1),
    INT,
)


@given(UNITS)
def test_a_unit_is_packed_and_unpacked(unit: TimerUnit) -> None:
    data = layout.pack_unit(unit)
    assert len(data) == 52
    assert layout.unpack_unit(b"xx" + data, 2) == unit
    assert layout.unpack_unit(data[:-1]) is None
    assert unit.rolls == bool(unit.magic & 2)
    assert unit.deletes == bool(unit.magic & 4)


@given(st.binary(min_size=52, max_size=52))
def test_other_bytes_are_no_unit(data: bytes) -> None:
    size, _, magic = struct.unpack_from(">iqi", data)
    assert (layout.unpack_unit(data) is None) == (size != 52 or not 0 < magic < 16)


def test_a_unit_as_rocketmq_writes_it() -> None:
    """The fields one after the other, as TimerMessageStore.doEnqueue puts them into its buffer."""
    parts = (
        struct.pack(">i", 52),
        struct.pack(">q", -1),
        struct.pack(">i", 1),
        struct.pack(">q", 1_795_703_787_000),
        struct.pack(">i", 11_000),
        struct.pack(">q", 4096),
        struct.pack(">i", 272),
        struct.pack(">i", -1_924_903_163),
        struct.pack(">q", 0),
    )
    unit = TimerUnit(-1, 1, 1_795_703_787_000, 1_795_703_798_000, 4096, 272, -1_924_903_163)
    assert layout.pack_unit(unit) == b"".join(parts)


@given(st.integers(16, 2**31 - 1))
def test_a_blank_ends_a_file(remaining: int) -> None:
    data = layout.pack_blank(remaining)
    assert data == struct.pack(">iqI", remaining, 0, 0xCBD43194)
    assert layout.is_blank(data)
    assert layout.unpack_unit(data.ljust(52, b"\0")) is None
    assert not layout.is_blank(data[:-1])
    assert not layout.is_blank(bytes(16))


@given(st.integers(68, 2**31 - 1))
def test_the_last_unit_of_a_file_leaves_room_for_a_blank(file_size: int) -> None:
    last = layout.last_unit_at(file_size)
    assert layout.fits(last, file_size)
    assert not layout.fits(last + layout.UNIT_SIZE, file_size)
    assert file_size - last - layout.UNIT_SIZE >= layout.BLANK_SIZE


def test_sizes_are_rocketmqs() -> None:
    assert layout.last_unit_at(100 * 1024 * 1024) == 104_857_532
    assert layout.WHEEL_SIZE == 38_707_200
    assert layout.SLOTS == 1_209_600


@given(st.tuples(*[LONG] * 7))
def test_a_checkpoint_is_encoded_and_decoded(numbers: tuple[int, ...]) -> None:
    checkpoint = TimerCheckpoint(*numbers)
    data = layout.encode_checkpoint(checkpoint)
    assert len(data) == 4096
    assert data[:56] == struct.pack(">7q", *numbers)
    assert layout.decode_checkpoint(data) == checkpoint
    assert layout.encode_checkpoint(checkpoint, padded=False) == data[:56]


def test_a_checkpoint_that_is_none() -> None:
    with pytest.raises(ValueError, match="has 4096 bytes, this file has 55"):
        layout.decode_checkpoint(bytes(55))
    with pytest.raises(ValueError, match="no negative"):
        layout.decode_checkpoint(struct.pack(">7q", 1, -1, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("configured", "used"), [(1, 100), (100, 100), (199, 100), (200, 200), (999, 500), (1000, 1000), (60_000, 1000)]
)
def test_precisions_are_rounded_down(configured: int, used: int) -> None:
    assert layout.snapped_precision(configured) == used


@pytest.mark.parametrize(
    ("configured", "used"), [(172_800, 172_800), (1, 604_740), (2, 2), (604_740, 604_740), (604_741, 604_740)]
)
def test_roll_windows(configured: int, used: int) -> None:
    assert layout.roll_window(layout.SLOTS, configured) == used


@given(LONG, st.sampled_from(layout.PRECISIONS))
def test_a_slot_ends_at_the_first_multiple_that_is_not_before_the_time(time: int, precision: int) -> None:
    out = layout.out_time(time, precision)
    assert out % precision == 0
    assert out < time <= out + precision


@given(LONG, st.integers(0, 10**12), st.sampled_from(layout.PRECISIONS), st.integers(2, 604_740))
def test_a_message_beyond_the_window_rolls_within_it(now: int, delay: int, precision: int, window: int) -> None:
    now -= now % precision
    time, rolls = layout.place_in_window(now + delay, now, window, precision)
    assert rolls == (delay >= window * precision)
    assert time == now + delay if not rolls else now < time < now + delay or window < 4
    assert time <= now + window * precision


# -- recall handles


@given(NAME, NAME, LONG, NAME)
def test_a_handle_is_encoded_and_decoded(topic: str, broker: str, out: int, key: str) -> None:
    handle = encode_handle(topic, broker, out, key)
    assert decode_handle(handle) == RecallHandle(topic, broker, out + 1, key)
    assert decode_handle(handle.rstrip("=")) == RecallHandle(topic, broker, out + 1, key)


def test_a_handle_of_rocketmq_5_5_0() -> None:
    handle = "djEgT3JkZXJzIGJyb2tlci1hIDE3OTU3MDM3OTgwMDEgVWEw"
    assert decode_handle(handle) == RecallHandle("Orders", "broker-a", 1_795_703_798_001, "Ua0")
    assert encode_handle("Orders", "broker-a", 1_795_703_798_000, "Ua0") == handle


@given(st.text(max_size=60))
def test_other_texts_are_no_handle(text: str) -> None:
    try:
        decode_handle(text)
    except RecallHandleError:
        return
    assert base64.urlsafe_b64decode(text + "==").startswith(b"v1 ")


@pytest.mark.parametrize("raw", ["v1 topic broker 12", "v2 topic broker 12 key", "", "\xff"])
def test_handles_with_other_words(raw: str) -> None:
    with pytest.raises(RecallHandleError):
        decode_handle(base64.urlsafe_b64encode(raw.encode("latin-1")).decode())


@pytest.mark.parametrize("handle", ["a+b/", "a", "äöü"])
def test_handles_that_are_no_base64(handle: str) -> None:
    with pytest.raises(RecallHandleError):
        decode_handle(handle)


def test_a_handle_whose_time_is_no_number() -> None:
    assert decode_handle(base64.urlsafe_b64encode(b"v1 t b soon key").decode()).deliver_ms == -1


# -- properties


@pytest.mark.parametrize(
    ("properties", "time"),
    [
        ({"TIMER_DELAY_SEC": "3"}, 4_000),
        ({"TIMER_DELAY_MS": "3"}, 1_003),
        ({"TIMER_DELIVER_MS": "3"}, 3),
        ({"TIMER_DELAY_SEC": "1", "TIMER_DELAY_MS": "2", "TIMER_DELIVER_MS": "3"}, 2_000),
        ({"TIMER_DELAY_MS": "2", "TIMER_DELIVER_MS": "3"}, 1_002),
        ({"TIMER_DELAY_MS": "-2000"}, -1_000),
        ({"TIMER_DELAY_MS": "+2"}, 1_002),
        ({"TIMER_DELAY_MS": "2", "TIMER_OUT_MS": "5"}, None),
        ({}, None),
    ],
)
def test_the_time_of_a_message(properties: dict[str, str], time: int | None) -> None:
    assert deliver_time(properties, 1_000) == time


@pytest.mark.parametrize("text", ["", "x", "1.5", "1 ", "--1", "9223372036854775808", "²", "1" * 5000])
def test_times_that_are_no_numbers(text: str) -> None:
    with pytest.raises(TimerTextError, match="TIMER_DELAY_MS"):
        deliver_time({"TIMER_DELAY_MS": text}, 0)
    with pytest.raises(TimerTextError):
        due_time({"TIMER_OUT_MS": text})


def test_a_message_of_the_timers_topic_without_a_time() -> None:
    with pytest.raises(TimerTextError):
        due_time({})


@given(st.dictionaries(NAME, NAME, max_size=5))
def test_properties_of_a_delivered_message(own: dict[str, str]) -> None:
    sent = own | {"TIMER_OUT_MS": "5", "REAL_TOPIC": "T", "REAL_QID": "2"}
    assert decode_properties(restored_text(sent, 7, 8).decode()) == sent | {
        "TIMER_ENQUEUE_MS": "7",
        "TIMER_DEQUEUE_MS": "8",
    }


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("1", "2"), ("9", "10"), ("many", "1")])
def test_properties_of_a_message_that_rolls(before: str | None, after: str) -> None:
    sent = {"TIMER_OUT_MS": "5", "REAL_TOPIC": "T"} | ({} if before is None else {"TIMER_ROLL_TIMES": before})
    found = decode_properties(rolled_text(sent, 7, 8).decode())
    assert found == sent | {"TIMER_ROLL_TIMES": after, "TIMER_ENQUEUE_MS": "7", "TIMER_DEQUEUE_MS": "8"}


def test_properties_that_leave_no_room() -> None:
    """The timer's own properties are left out, so that a message of any legal size can be delivered and rolled."""
    sent = {"REAL_TOPIC": "T", "REAL_QID": "0"}
    sent["long"] = "x" * (MAX_PROPERTIES - len(join_properties(sent | {"long": ""})))
    assert len(join_properties(sent)) == MAX_PROPERTIES
    assert decode_properties(restored_text(sent, 7, 8).decode()) == sent
    assert decode_properties(rolled_text(sent, 7, 8).decode()) == sent
