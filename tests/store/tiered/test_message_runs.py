"""Messages in runs, and the extension, which restores many records in one call, against Python."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.store.tiered.fake_queue import TOPIC, record
from trimq.broker.store.read.record_look import place_of
from trimq.broker.store.tiered.access.taken import Taken
from trimq.broker.store.tiered.container import message_runs
from trimq.broker.store.tiered.container.flat_message_file import FlatMessageFile
from trimq.broker.store.tiered.container.message_runs import MessageRun, Messages, TieredMessage, restored
from trimq.protocol.native import NATIVE, NativeExtension
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.record import AT_BODY_CRC
from trimq.protocol.tiered_layout import APACHE_UPLOADED, PHYSICAL

native = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")
START, FIRST = 5_000, 40
PLACE = place_of(TOPIC, 0)


def messages_of(offsets: list[int]) -> list[TieredMessage]:
    return [TieredMessage(offset, offset % 3, b"%d" % offset * (1 + offset % 4)) for offset in offsets]


@given(st.lists(st.integers(0, 40), unique=True).map(sorted), st.integers(0, 42))
def test_runs_hold_the_messages(offsets: list[int], at: int) -> None:
    expected = messages_of(offsets)
    found = Messages.of(expected)
    assert list(found) == expected
    assert (len(found), found.size) == (len(expected), sum(len(message.record) for message in expected))
    assert all(one.end < two.offset for one, two in pairwise(found.runs))
    behind = [run.message(number) for run, first in found.behind(at) for number in range(first, len(run.tags_codes))]
    assert behind == [message for message in expected if message.offset >= at]
    assert found.get(at) == next((message for message in expected if message.offset == at), None)


@given(
    st.lists(st.integers(0, 30), unique=True, min_size=1).map(sorted),
    st.integers(0, 12),
    st.integers(0, 60),
    st.integers(0, 35),
)
@example([1, 3], 12, 5, 35)  # two runs that have more bytes together
def test_what_is_taken(offsets: list[int], count: int, size: int, end: int) -> None:
    """In one step for all of a run, as one by one."""
    messages = messages_of(offsets)
    taken = Taken(count, size, end)
    for run, first in Messages.of(messages).behind(0):
        if (last := taken.take(run, first)) < len(run.tags_codes):
            assert run.offset + last not in {message.offset for message in messages[: taken.count]}
            break
    expected: list[bytes] = []
    for message in messages:
        total = sum(map(len, expected)) + len(message.record)
        if message.offset >= end or (expected and (len(expected) >= count or total > size)):
            break
        expected.append(message.record)
    assert b"".join(taken.buffers) == b"".join(expected)
    assert (taken.count, taken.size) == (len(expected), sum(map(len, expected)))


class Stored:
    """Records as they stand in the tier, with their units and entries."""

    def __init__(self, bodies: list[bytes], physical: list[int]) -> None:
        self.data, self.units, self.entries = bytearray(), bytearray(), bytearray()
        self.bounds = [0]
        for number, (body, log_offset) in enumerate(zip(bodies, physical, strict=True)):
            one = bytearray(record(FIRST + number, body=body))
            one[28:36] = (START + len(self.data)).to_bytes(8, "big")
            self.units += UNIT.pack(START + len(self.data), len(one), number)
            self.entries += PHYSICAL.pack(
                log_offset, len(one), int.from_bytes(one[AT_BODY_CRC : AT_BODY_CRC + 4], "big")
            )
            self.data += one
            self.bounds.append(len(self.data))

    def with_python(self) -> list[MessageRun]:
        file: Any = FlatMessageFile.__new__(FlatMessageFile)
        file._check_crc, file._place = False, PLACE
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(message_runs, "NATIVE", NativeExtension(None, "off"))
            tags_codes = list(range(len(self.bounds) - 1))
            return list(
                file._restore(
                    memoryview(bytes(self.data)),
                    START,
                    bytes(self.units),
                    bytes(self.entries),
                    FIRST,
                    tags_codes,
                    self.bounds,
                )
            )

    def with_extension(self) -> bytes | None:
        return restored(memoryview(self.data), START, bytes(self.units), bytes(self.entries), FIRST, PLACE)


@native
@given(
    st.lists(st.tuples(st.binary(max_size=20), st.integers(-1, 1 << 50)), min_size=1, max_size=6),
    st.lists(
        st.tuples(st.sampled_from(["data", "units", "entries"]), st.integers(0, 800), st.integers(1, 255)), max_size=2
    ),
)
@example([(b"b", 7)], [("entries", 15, 1)])  # the body CRC of another record
@example([(b"b", 7)], [("entries", 11, 1)])  # its size
@example([(b"b", 7)], [("units", 7, 1)])
@example([(b"b", 7)], [("data", 23, 1)])
def test_the_extension_restores_what_python_restores(
    drawn: list[tuple[bytes, int]], harms: list[tuple[str, int, int]]
) -> None:
    stored = Stored([body for body, _ in drawn], [physical for _, physical in drawn])
    for name, at, mask in harms:
        part = getattr(stored, name)
        part[at % len(part)] ^= mask
    made = stored.with_extension()
    runs = stored.with_python()
    if made is None:
        assert harms
        return
    assert [(run.offset, run.data, list(run.bounds)) for run in runs] == [(FIRST, made, stored.bounds)]
    for (begin, _), (_, physical) in zip(pairwise(stored.bounds), drawn, strict=True):
        if not harms:
            expected = physical if physical >= 0 else APACHE_UPLOADED + START + begin
            assert int.from_bytes(made[begin + 28 : begin + 36], "big") == expected


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=native), False])
@pytest.mark.parametrize("at", [0, 11, 15])
def test_an_entry_of_another_message_gives_no_offset(at: int, is_native: bool) -> None:
    """Its log offset, size and body CRC have to be those of the record."""
    stored = Stored([b"a", b"b"], [1, 2])
    stored.entries[at] ^= 0x80
    (data,) = [stored.with_extension()] if is_native else [run.data for run in stored.with_python()]
    assert data is not None
    second = stored.bounds[1]
    assert int.from_bytes(data[28:36], "big") == APACHE_UPLOADED + START
    assert int.from_bytes(data[second + 28 : second + 36], "big") == 2


@native
def test_a_damaged_record_is_left_out_by_python() -> None:
    stored = Stored([b"a", b"b", b"c"], [1, 2, 3])
    stored.data[stored.bounds[1] + 12] ^= 1
    assert stored.with_extension() is None
    assert [(run.offset, run.end, list(run.tags_codes)) for run in stored.with_python()] == [
        (FIRST, FIRST + 1, [0]),
        (FIRST + 2, FIRST + 3, [2]),
    ]


def test_a_fault_of_the_extension_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        NativeFault = RuntimeError

        def tier_records(self, *_: object) -> bytes:
            raise RuntimeError("asked for")

    broken: Any = Broken()
    state = NativeExtension(broken)
    monkeypatch.setattr(message_runs, "NATIVE", state)
    assert Stored([b"a"], [1]).with_extension() is None
    assert state.has_failed
